//! Any bytes as a graph for the verifier.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    let _ = apir_fuzz::graph::verify(input);
});

libfuzzer_sys::fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    apir_fuzz::mutate::blob(data, (size, max_size), seed, libfuzzer_sys::fuzzer_mutate)
});
