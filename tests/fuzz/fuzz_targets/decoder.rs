//! Any bytes as the request and the reply of every command.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| apir_fuzz::decoder::run(input));
