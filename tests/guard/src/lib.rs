//! For tests: the work memory of ggml's CPU backend lies between two guards that nothing may touch.
//!
//! ggml plans work memory for a graph, and a kernel that uses more of it than planned changes whatever lies behind. [`load`] makes that a SIGSEGV, or an
//! abort with a line about it, in every graph that a ggml library computes which is opened later. It works for every ggml library whose own call of
//! `ggml_graph_compute` the dynamic linker resolves, as those built by cmake and by packages do; [`count`] says whether it did.

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};
use std::sync::LazyLock;

/// The library of the guard, which `LD_PRELOAD` may name as well.
pub const LIBRARY: &str = concat!(env!("OUT_DIR"), "/libapir-guard.so");

static COUNT: LazyLock<Symbol<unsafe extern "C" fn() -> std::ffi::c_ulong>> = LazyLock::new(|| {
    // SAFETY: the library has no code that runs when it is opened, and its one other function has this type.
    let loaded = unsafe {
        Library::open(Some(LIBRARY), RTLD_NOW | RTLD_GLOBAL).and_then(|library| {
            let count = library.get(b"apir_guard_count\0");
            // It stays: ggml calls it from now on.
            std::mem::forget(library);
            count
        })
    };
    loaded.unwrap_or_else(|error| panic!("{LIBRARY}: {error}"))
});

/// Guards every ggml library that this process opens from now on.
///
/// # Panics
/// When the guard cannot be opened.
pub fn load() {
    LazyLock::force(&COUNT);
}

/// How many graphs with work memory were computed with a guard.
///
/// # Panics
/// As [`load`].
#[must_use]
pub fn count() -> u64 {
    // SAFETY: the function reads a number.
    unsafe { COUNT() }
}
