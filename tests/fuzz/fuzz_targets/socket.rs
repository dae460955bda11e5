//! Frames of the socket, and a renderer's context under a stream of them.
#![no_main]

use apir_fuzz::socket::{Input, run};

libfuzzer_sys::fuzz_target!(|input: &[u8]| run(input));

libfuzzer_sys::fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    apir_fuzz::input::mutate::<Input>(data, (size, max_size), seed, libfuzzer_sys::fuzzer_mutate)
});
