//! Graphs computed by the plugin with the real libggml-cpu.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| apir_fuzz::compute::run(input));

libfuzzer_sys::fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    apir_fuzz::compute::mutate(data, (size, max_size), seed, libfuzzer_sys::fuzzer_mutate)
});
