//! Lets a ggml that was built for AddressSanitizer find the targets' own runtime of it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-link-arg-bins=-Wl,--export-dynamic-symbol=__asan_*");
}
