//! What an ordinary program has loaded for everyone to see, offered to drivers.
//!
//! Drivers that compile code at run time, such as Mesa's lavapipe by LLVM, look its calls of math functions up among the symbols that are open to all. A
//! program that links the math library has them there; one that does not, and loads ggml with its symbols kept to itself, ends in a call of address 0.

#[cfg(target_os = "linux")]
use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};

/// What every program of the C library has, or could have without a difference.
#[cfg(target_os = "linux")]
const ALWAYS: &[&str] = &["libm.so.6", "libpthread.so.0", "libdl.so.2"];

/// What a program has when its libraries need it. Never loaded here: one of the system's would be taken for the one that a
/// library brings along.
#[cfg(target_os = "linux")]
const WHEN_LOADED: &[&str] = &["libstdc++.so.6", "libgcc_s.so.1"];

/// Opens them to all, once the library that drives the drivers is loaded and before it is asked for devices. What is not
/// there is left out: other C libraries have it in one file, which is open to all.
#[cfg(target_os = "linux")]
pub(super) fn open_to_all() {
    let always = ALWAYS.iter().copied().map(|name| (name, RTLD_NOW | RTLD_GLOBAL));
    let loaded = WHEN_LOADED.iter().copied().map(|name| (name, RTLD_NOW | RTLD_GLOBAL | libc::RTLD_NOLOAD));
    for (name, flags) in always.chain(loaded) {
        // SAFETY: the system's own libraries, whose initialisers every program runs.
        if let Ok(library) = unsafe { Library::open(Some(name), flags) } {
            // Kept for as long as the process lives, as the library that needs it is.
            std::mem::forget(library);
        }
    }
}

/// Elsewhere the system's library is one, and open to all.
#[cfg(not(target_os = "linux"))]
pub(super) fn open_to_all() {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn is_open_to_all(symbol: &CStr) -> bool {
        // SAFETY: the name is a C string; the symbol is only looked for.
        !unsafe { libc::dlsym(libc::RTLD_DEFAULT, symbol.as_ptr()) }.is_null()
    }

    #[test]
    fn t30_math_is_open_to_code_that_is_compiled_at_run_time() {
        open_to_all();
        for symbol in [c"erff", c"expf", c"lgammaf", c"pthread_create", c"dlopen", c"_Unwind_Resume"] {
            assert!(is_open_to_all(symbol), "{symbol:?}");
        }
        // Not what nobody has loaded: a library may bring one of its own.
        assert!(!is_open_to_all(c"__gxx_personality_v0"));
    }
}
