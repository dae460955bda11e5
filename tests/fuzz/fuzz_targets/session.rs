//! Commands of two guests in any order.
#![no_main]

use apir_fuzz::session::{Session, run};

libfuzzer_sys::fuzz_target!(|input: &[u8]| run(input));

libfuzzer_sys::fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    apir_fuzz::input::mutate::<Session>(data, (size, max_size), seed, libfuzzer_sys::fuzzer_mutate)
});
