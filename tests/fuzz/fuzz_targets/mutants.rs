//! Parts of real programs' graphs, changed and computed.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| apir_fuzz::recorded::run(input));
