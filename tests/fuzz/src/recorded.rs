//! Graphs of real programs, cut into parts and changed.
//!
//! `cargo run --example record` makes the archives in the folder `recorded`: for each program, graph blobs one behind the other, compressed.
//! Their buffers are counted from 1 and are as large as their tensors need.
#![forbid(unsafe_code)]

use crate::graph::Graph;
use crate::guest::{Guest, Neighbour, whole};
use crate::mutate;
use crate::threads::{PerCount, Threads};
use apir_ggml::extent;
use apir_protocol::graph::graph_size;
use apir_protocol::handle::BufferHandle;
use apir_protocol::messages::{BufferClearRequest, BufferSetTensorRequest};
use apir_protocol::tensor::TensorRecord;
use arbitrary::Unstructured;
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

/// The archives.
pub const ARCHIVES: [(&str, &[u8]); 3] = [
    ("smollm2", include_bytes!("../recorded/smollm2.z")),
    ("minilm", include_bytes!("../recorded/minilm.z")),
    ("backend-ops", include_bytes!("../recorded/backend-ops.z")),
];

/// The most nodes of a part, but for those inputs that take a whole graph.
const PART: usize = 24;
/// Larger buffers are not cleared for each input, but only their leafs, and of these not the larger ones, which are no indices.
const CLEARED: u64 = 1 << 20;
const CLEARED_LEAF: u64 = 1 << 16;

/// Graphs as an archive.
#[must_use]
pub fn pack(graphs: &[Graph]) -> Vec<u8> {
    let bytes: Vec<u8> = graphs.iter().flat_map(Graph::to_blob).collect();
    miniz_oxide::deflate::compress_to_vec(&bytes, 10)
}

/// The graphs of an archive.
///
/// # Panics
/// When it is none.
#[must_use]
pub fn unpack(archive: &[u8]) -> Vec<Graph> {
    let bytes = miniz_oxide::inflate::decompress_to_vec(archive).expect("an archive");
    let (mut graphs, mut rest) = (Vec::new(), &bytes[..]);
    while !rest.is_empty() {
        let graph = Graph::from_blob(rest).expect("a graph in an archive");
        rest = &rest[graph_size(graph.nodes.len() as u32, graph.tensors.len() as u32) as usize..];
        graphs.push(graph);
    }
    graphs
}

/// `count` nodes from `start` on, and what they are made of; what other nodes made is data here.
#[must_use]
pub fn part(graph: &Graph, start: usize, count: usize) -> Graph {
    let start = start.min(graph.nodes.len());
    let nodes: Vec<u64> = graph.nodes.iter().copied().skip(start).take(count).collect();
    let inside: HashSet<u64> = nodes.iter().copied().collect();
    let mut wanted = inside.clone();
    // Records come behind what they are made of, so that one pass from the end finds all.
    for tensor in graph.tensors.iter().rev().filter(|tensor| inside.contains(&tensor.id)) {
        wanted.extend(tensor.src);
    }
    for tensor in graph.tensors.iter().rev() {
        if wanted.contains(&tensor.id) {
            wanted.insert(tensor.view_src);
        }
    }
    let mut tensors: Vec<_> =
        graph.tensors.iter().copied().filter(|tensor| wanted.contains(&tensor.id)).collect();
    for tensor in tensors.iter_mut().filter(|tensor| !inside.contains(&tensor.id)) {
        (tensor.op, tensor.src) = (0, [0; 10]);
    }
    Graph { nodes, tensors }
}

/// Bytes that each buffer of a graph must have, by its number.
#[must_use]
pub fn sizes(graph: &Graph) -> HashMap<u64, u64> {
    let mut sizes = HashMap::new();
    for tensor in graph.tensors.iter().filter(|tensor| tensor.buffer.0 != 0) {
        let bytes = extent(tensor.type_, tensor.ne.map(i64::from), tensor.nb.map(u64::from)).unwrap_or(0);
        let size: &mut u64 = sizes.entry(tensor.buffer.0).or_default();
        *size = (*size).max(tensor.data + bytes).next_multiple_of(64);
    }
    sizes
}

/// What became of a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It had no changes, and was computed.
    Honest,
    /// It was changed, and computed.
    Computed,
    /// It was changed, and refused.
    Refused,
}

/// A guest with buffers for every recorded graph, and its neighbour.
#[derive(Debug)]
pub struct Bench {
    guest: Guest,
    neighbour: Neighbour,
    graphs: Vec<Graph>,
    buffers: Vec<(BufferHandle, u64)>,
    zeros: u32,
}

impl Bench {
    /// All recorded graphs.
    #[must_use]
    pub fn graphs() -> Vec<Graph> {
        ARCHIVES.iter().flat_map(|(_, archive)| unpack(archive)).collect()
    }

    /// Starts both.
    #[must_use]
    pub fn start(threads: Threads) -> Self {
        let graphs = Self::graphs();
        let mut most: HashMap<u64, u64> = HashMap::new();
        for (buffer, size) in graphs.iter().flat_map(sizes) {
            let known = most.entry(buffer).or_default();
            *known = (*known).max(size);
        }
        let mut guest = Guest::started(threads);
        let last = most.keys().max().copied().unwrap_or_default();
        let sizes = (1..=last).map(|buffer| most.get(&buffer).map_or(64, |size| (*size).max(64)));
        let buffers = sizes.map(|size| (guest.buffer(size as usize), size)).collect();
        let (zeros, _) = guest.blob(&[0; CLEARED_LEAF as usize]);
        Self { guest, neighbour: Neighbour::start(), graphs, buffers, zeros }
    }

    /// Lets indices be good ones again, whatever was computed before.
    fn clear(&mut self, graph: &Graph) {
        for (buffer, size) in &self.buffers {
            if *size <= CLEARED {
                let _ = self.guest.call(&BufferClearRequest { buffer: *buffer, value: 0 });
            }
        }
        for leaf in graph.tensors.iter().filter(|tensor| tensor.op == 0) {
            let place = (leaf.buffer.0 as usize).checked_sub(1).and_then(|at| self.buffers.get(at));
            let Some(&(buffer, _)) = place.filter(|(_, size)| *size > CLEARED) else { continue };
            let size = extent(leaf.type_, leaf.ne.map(i64::from), leaf.nb.map(u64::from)).unwrap_or(0);
            if size <= CLEARED_LEAF {
                let tensor = TensorRecord { data: leaf.data, ..whole(buffer, size as usize) };
                let request = BufferSetTensorRequest { buffer, tensor, res_id: self.zeros, offset: 0, size };
                self.guest.call(&request).expect("a write of a leaf");
            }
        }
    }

    /// Computes the mutant that an input stands for: two bytes choose the graph, two where the part starts, one how many nodes it has; the rest
    /// are numbers for changes. Without changes it must be computed. Fewer bytes are no input.
    ///
    /// # Panics
    /// When it is not, or the guest or its neighbour does not live.
    pub fn run(&mut self, input: &[u8]) -> Option<Outcome> {
        let (&[a, b, c, d, count], numbers) = input.split_first_chunk::<5>()?;
        let graph = &self.graphs[usize::from(u16::from_le_bytes([a, b])) % self.graphs.len()];
        let start = usize::from(u16::from_le_bytes([c, d])) % graph.nodes.len();
        let cut = match count {
            u8::MAX => part(graph, 0, graph.nodes.len()),
            _ => part(graph, start, 1 + usize::from(count) % PART),
        };
        let mut mutant = cut.clone();
        mutate::graph(&mut mutant, &mut Unstructured::new(numbers));
        let honest = mutant == cut;
        self.clear(&cut);
        let handles: Vec<_> = self.buffers.iter().map(|(handle, _)| *handle).collect();
        mutant.resolve(&handles);
        let computed = self.guest.compute(&mutant.to_blob());
        assert!(!honest || computed == Ok(0), "a recorded graph ended with {computed:?}: {cut}");
        assert!(computed.is_err() || computed.is_ok_and(|status| (-2..=1).contains(&status)));
        self.guest.assert_alive();
        self.neighbour.check();
        Some(match computed {
            _ if honest => Outcome::Honest,
            Ok(_) => Outcome::Computed,
            Err(_) => Outcome::Refused,
        })
    }
}

/// Runs an input in one of this process's benches.
pub fn run(input: &[u8]) {
    thread_local! { static BENCHES: RefCell<PerCount<Bench>> = RefCell::default(); }
    BENCHES.with_borrow_mut(|benches| {
        benches.get(Threads::of(input), Bench::start).run(input);
    });
}
