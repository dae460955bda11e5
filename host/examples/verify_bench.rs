//! How long the graph of one token of SmolLM2-135M takes to verify, and to recognise: 937 nodes, 1278 tensors, as recorded for the fuzzers.
//!
//! `cargo xtask bench --only verify` runs it; it prints one line of JSON, medians in µs. `first` copies and verifies a graph that was not seen before,
//! `again` copies one that is known and compares it. `APIR_LLAMA_DIR` names the folder of a libggml-cpu.so of ggml 0.26, whose operations have the
//! numbers of the recording.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark ends where it cannot go on")]

use apir_ggml::GgmlLibrary;
use apir_protocol::graph::{GraphReader, graph_size};
use ggml_virtgpu_backend::verify::graph::{Terms, Verifier};
use ggml_virtgpu_backend::verify::indices::IndexCheck;
use ggml_virtgpu_backend::verify::rules::RuleBook;
use ggml_virtgpu_backend::verify::tensor::MAX_EXTENT;
use ggml_virtgpu_backend::verify::{BufferInfo, Buffers};
use std::path::Path;
use std::time::Instant;

/// Graph blobs one behind the other, compressed.
const RECORDED: &[u8] = include_bytes!("../../tests/fuzz/recorded/smollm2.z");
const NODES: usize = 937;
const ROUNDS: usize = 500;

/// Buffers that hold whatever lies in them, in memory that the guest shares.
struct Boundless;

impl Buffers for Boundless {
    fn find(&self, _token: u64) -> Option<BufferInfo> {
        Some(BufferInfo { size: MAX_EXTENT, alignment: 32, host: true, shared: true })
    }
}

/// The recorded graph of one token, the last of this many nodes.
fn recorded() -> Vec<u8> {
    let blobs = miniz_oxide::inflate::decompress_to_vec(RECORDED).expect("a compressed recording");
    let (mut rest, mut found) = (&blobs[..], None);
    while !rest.is_empty() {
        let graph = GraphReader::parse(rest).expect("a recorded graph");
        let size = graph_size(graph.node_count() as u32, graph.tensor_count() as u32) as usize;
        if graph.node_count() == NODES {
            found = Some(rest[..size].to_vec());
        }
        rest = &rest[size..];
    }
    found.expect("a recorded graph of one token")
}

/// The median time of many rounds, in µs.
fn median(mut round: impl FnMut()) -> f64 {
    let mut times: Vec<_> = (0..ROUNDS)
        .map(|_| {
            let start = Instant::now();
            round();
            start.elapsed()
        })
        .collect();
    times.sort();
    times[ROUNDS / 2].as_secs_f64() * 1e6
}

fn main() {
    let folder =
        std::env::var("APIR_LLAMA_DIR").expect("APIR_LLAMA_DIR must name the folder of libggml-cpu.so");
    // SAFETY: whoever set the path trusts the file; nothing is computed with this handle.
    let library = unsafe { GgmlLibrary::open(&Path::new(&folder).join("libggml-cpu.so"), None) }.unwrap();
    let rules = RuleBook::new(library.ops(), library.version(), true, 1);
    let terms =
        Terms { rules: &rules, buffers: &Boundless, index_check: IndexCheck::All, max_nodes: 1 << 20 };
    let blob = recorded();
    let (mut verifier, mut private) = (Verifier::default(), Vec::new());
    let copy = |private: &mut Vec<u8>| {
        private.clear();
        private.extend_from_slice(&blob);
    };
    let first = median(|| {
        copy(&mut private);
        verifier.verify(&private, &terms).expect("an honest graph");
    });
    let known = private.clone();
    let again = median(|| {
        copy(&mut private);
        assert!(private == known);
    });
    let graph = GraphReader::parse(&blob).unwrap();
    println!(
        "{{\"verify_us\":{{\"first\":{first:.1},\"again\":{again:.1}}},\"nodes\":{},\"tensors\":{},\"bytes\":{}}}",
        graph.node_count(),
        graph.tensor_count(),
        blob.len()
    );
}
