//! Builds the guard, and for its own tests a library that stands in for ggml's CPU backend.
#![allow(clippy::expect_used, reason = "a build script reports by ending")]

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    for (source, library) in [("src/guard.c", "libapir-guard.so"), ("tests/backend.c", "libbackend.so")] {
        println!("cargo:rerun-if-changed={source}");
        build(Path::new(source), &out.join(library));
    }
}

fn build(source: &Path, library: &Path) {
    // Not cc's own way, which makes archives: both are opened while a test runs. Nor with the sanitizer of a fuzz target: the program has
    // its runtime, and the library would bring another one.
    let mut compiler: Command =
        cc::Build::new().opt_level(1).cargo_metadata(false).get_compiler().to_command();
    let done = compiler
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-fno-sanitize=all", "-shared", "-fPIC", "-o"])
        .arg(library)
        .arg(source)
        .status();
    assert!(done.is_ok_and(|status| status.success()), "{} does not compile", source.display());
}
