//! A graph computed while a second thread of the guest changes shared memory.
#![no_main]

use apir_fuzz::race::{Race, run};

libfuzzer_sys::fuzz_target!(|input: &[u8]| run(input));

libfuzzer_sys::fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    apir_fuzz::input::mutate::<Race>(data, (size, max_size), seed, libfuzzer_sys::fuzzer_mutate)
});
