//! For tests: the work memory of ggml's CPU backend lies between two guards that nothing may touch.
//!
//! ggml plans work memory for a graph, and a kernel that uses more of it than planned changes whatever lies behind. [`load`] makes that a SIGSEGV, or an
//! abort with a line about it, in every graph that a ggml library computes which is opened later. It works for every ggml library whose own call of
//! `ggml_graph_compute` the dynamic linker resolves, as those built by cmake and by packages do; [`count`] says whether it did.

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW, Symbol};
use std::ffi::c_ulong;
use std::sync::LazyLock;

/// The library of the guard, which `LD_PRELOAD` may name as well.
pub const LIBRARY: &str = concat!(env!("OUT_DIR"), "/libapir-guard.so");

type Number = Symbol<unsafe extern "C" fn() -> c_ulong>;

/// How many graphs were guarded, and what was planned for the last: bytes and threads.
static NUMBERS: LazyLock<[Number; 3]> = LazyLock::new(|| {
    // SAFETY: the library has no code that runs when it is opened, and its other functions have this type.
    let loaded = unsafe {
        Library::open(Some(LIBRARY), RTLD_NOW | RTLD_GLOBAL).and_then(|library| {
            let number = |name: &str| library.get(name.as_bytes());
            let all = [
                number("apir_guard_count\0")?,
                number("apir_guard_work\0")?,
                number("apir_guard_threads\0")?,
            ];
            // It stays: ggml calls it from now on.
            std::mem::forget(library);
            Ok(all)
        })
    };
    loaded.unwrap_or_else(|error| panic!("{LIBRARY}: {error}"))
});

/// What ggml planned for a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planned {
    /// Bytes of work memory.
    pub work: u64,
    /// Threads.
    pub threads: u64,
}

/// Guards every ggml library that this process opens from now on.
///
/// # Panics
/// When the guard cannot be opened.
pub fn load() {
    LazyLock::force(&NUMBERS);
}

/// How many graphs with work memory were computed with a guard.
///
/// # Panics
/// As [`load`].
#[must_use]
pub fn count() -> u64 {
    number(0)
}

/// What was planned for the last graph that was computed, with a guard or without.
///
/// # Panics
/// As [`load`].
#[must_use]
pub fn planned() -> Planned {
    Planned { work: number(1), threads: number(2) }
}

fn number(at: usize) -> u64 {
    // SAFETY: the function reads a number.
    unsafe { NUMBERS[at]() }
}
