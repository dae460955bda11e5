//! The same random graph computed by ggml alone and by the plugin.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| apir_fuzz::differential::run(input));
