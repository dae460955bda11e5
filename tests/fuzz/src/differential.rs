//! The same random graph computed by ggml alone and by the plugin: every byte of every buffer must be the same.
#![forbid(unsafe_code)]

use crate::compute::Bench;
use crate::generate::{Case, SIZES};
use crate::guest::library;
use crate::local::Local;
use crate::threads::{PerCount, Threads};
use arbitrary::Unstructured;
use std::cell::RefCell;

/// Makes a graph from the input's numbers and computes it twice.
///
/// # Panics
/// When the results differ.
pub fn run(input: &[u8]) {
    thread_local! { static BOTH: RefCell<(Option<Local>, PerCount<Bench>)> = RefCell::default(); }
    let case = Case::arbitrary(&mut Unstructured::new(input));
    BOTH.with_borrow_mut(|(local, benches)| {
        let local = local.get_or_insert_with(|| Local::open(&library()));
        let bench = benches.get(Threads::of(input), Bench::start);
        let expected = local.compute(&case);
        bench.fill(&case.contents);
        let status = bench.compute(&case.graph);
        assert_eq!(status, Ok(0), "the plugin ended with {status:?}, ggml computes {}", case.graph);
        compare(&case, &expected, &bench.contents());
    });
}

fn compare(case: &Case, expected: &[Vec<u8>; SIZES.len()], found: &[Vec<u8>; SIZES.len()]) {
    for (buffer, (expected, found)) in expected.iter().zip(found).enumerate() {
        let Some(at) = (0..expected.len()).find(|at| expected[*at] != found[*at]) else { continue };
        panic!("byte {at} of buffer {} differs: {}", buffer + 1, case.graph);
    }
}
