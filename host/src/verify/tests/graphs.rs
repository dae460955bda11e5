//! Whole graphs: ids, order, views, places.

use super::super::graph::{Terms, VerifiedGraph, Verifier};
use super::super::indices::IndexCheck;
use super::super::rules::RuleBook;
use super::super::{BufferInfo, Buffers, VerifyError};
use super::{op, rules, t};
use apir_ggml::abi::FLAG_COMPUTE;
use apir_protocol::graph::{encode_graph, graph_size};
use apir_protocol::handle::BufferHandle;
use apir_protocol::tensor::{RawTensor, TensorRecord};
use proptest::prelude::*;

/// Host memory that the guest does not see, host memory that it does, a device's, and much of the first kind.
pub(crate) const PRIVATE: u64 = 7;
pub(crate) const SHARED: u64 = 8;
pub(crate) const DEVICE: u64 = 9;
pub(crate) const LARGE: u64 = 10;

pub(crate) struct Kinds;

impl Buffers for Kinds {
    fn find(&self, token: u64) -> Option<BufferInfo> {
        let info = BufferInfo { size: 4096, alignment: 32, host: true, shared: false };
        match token {
            PRIVATE => Some(info),
            SHARED => Some(BufferInfo { shared: true, ..info }),
            DEVICE => Some(BufferInfo { host: false, ..info }),
            LARGE => Some(BufferInfo { size: 1 << 40, ..info }),
            _ => None,
        }
    }
}

/// A graph to be; ids are places from 1 on.
#[derive(Clone, Default)]
pub(crate) struct Sketch {
    pub(crate) tensors: Vec<TensorRecord>,
    pub(crate) nodes: Vec<u64>,
}

impl Sketch {
    /// Adds a tensor and gives its id.
    pub(crate) fn leaf(&mut self, tensor: RawTensor, buffer: u64, data: u64) -> u64 {
        let id = self.tensors.len() as u64 + 1;
        self.tensors.push(TensorRecord {
            id,
            type_: tensor.type_,
            buffer: BufferHandle(buffer),
            ne: tensor.ne.map(|elements| elements as u32),
            nb: tensor.nb.map(|stride| stride as u32),
            op_params: tensor.op_params,
            data,
            ..TensorRecord::default()
        });
        id
    }

    /// Adds a node.
    pub(crate) fn node(
        &mut self,
        name: &str,
        tensor: RawTensor,
        buffer: u64,
        data: u64,
        sources: &[u64],
    ) -> u64 {
        let id = self.leaf(tensor, buffer, data);
        let record = self.last();
        (record.op, record.flags) = (op(name), FLAG_COMPUTE);
        record.src[..sources.len()].copy_from_slice(sources);
        self.nodes.push(id);
        id
    }

    /// Adds a node that is a view of another tensor, `offset` bytes into it.
    pub(crate) fn view(
        &mut self,
        name: &str,
        tensor: RawTensor,
        of: u64,
        offset: u64,
        sources: &[u64],
    ) -> u64 {
        let viewed = self.tensors[of as usize - 1];
        let id = self.node(name, tensor, viewed.buffer.0, viewed.data + offset, sources);
        let record = self.last();
        (record.view_src, record.view_offs) = (of, offset);
        if name == "VIEW" {
            record.op_params[0] = offset as i32;
        }
        id
    }

    pub(crate) fn last(&mut self) -> &mut TensorRecord {
        self.tensors.last_mut().unwrap()
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; graph_size(self.nodes.len() as u32, self.tensors.len() as u32) as usize];
        encode_graph(&self.nodes, &self.tensors, &mut bytes).unwrap();
        bytes
    }

    pub(crate) fn verify<T>(
        &self,
        index_check: IndexCheck,
        look: impl FnOnce(Result<VerifiedGraph<'_>, VerifyError>) -> T,
    ) -> T {
        self.verify_for(&rules(), index_check, look)
    }

    pub(crate) fn verify_for<T>(
        &self,
        rules: &RuleBook,
        index_check: IndexCheck,
        look: impl FnOnce(Result<VerifiedGraph<'_>, VerifyError>) -> T,
    ) -> T {
        let terms = Terms { rules, buffers: &Kinds, index_check, max_nodes: 100 };
        look(Verifier::default().verify(&self.encode(), &terms))
    }

    fn refusal(&self) -> String {
        self.verify(IndexCheck::All, |verified| verified.unwrap_err().to_string())
    }

    fn passes(&self) {
        self.verify(IndexCheck::All, |verified| assert_eq!(verified.err(), None));
    }
}

fn row() -> RawTensor {
    t(0, &[8])
}

/// b = a * a; v = the last half of b; c = v + v.
fn sample() -> Sketch {
    let mut graph = Sketch::default();
    let a = graph.leaf(row(), PRIVATE, 0);
    let b = graph.node("SQR", row(), PRIVATE, 64, &[a]);
    let v = graph.view("VIEW", t(0, &[4]), b, 16, &[b]);
    graph.node("ADD", t(0, &[4]), PRIVATE, 128, &[v, v]);
    graph
}

fn sample_with(change: impl FnOnce(&mut Sketch)) -> Sketch {
    let mut graph = sample();
    change(&mut graph);
    graph
}

#[test]
fn a_graph_keeps_its_shape() {
    sample().verify(IndexCheck::All, |verified| {
        let graph = verified.unwrap();
        assert_eq!(graph.nodes(), [1, 2, 3]);
        assert_eq!(graph.tensors()[3].sources()[..3], [Some(2), Some(2), None]);
        assert_eq!(graph.tensors()[2].view_src(), Some(1));
        assert_eq!((graph.tensors()[0].node(), graph.tensors()[1].node()), (None, Some(0)));
        assert_eq!(graph.tensors()[3].tensor().place().unwrap().room, 4096 - 128);
        assert!(graph.plan().stops.is_empty());
    });
}

#[test]
fn broken_graphs_are_refused() {
    type Change = fn(&mut Sketch);
    let cases: &[(&str, Change)] = &[
        ("a graph of no nodes", |g| g.nodes.clear()),
        ("has the id 0", |g| g.tensors[0].id = 0),
        ("has the id 0x1 of another", |g| g.tensors[1].id = 1),
        ("a node is the unknown tensor 0x9", |g| g.nodes[0] = 9),
        ("a node is the unknown tensor 0x0", |g| g.nodes[0] = 0),
        ("a source is the unknown tensor 0x9", |g| g.tensors[1].src[0] = 9),
        ("a view's source is the unknown tensor 0x9", |g| g.tensors[1].view_src = 9),
        ("a source is the unknown tensor 0x3", |g| g.tensors.swap(1, 3)),
        ("does not come before it", |g| g.tensors[1].src[0] = 2),
        ("does not come before it", |g| g.tensors[2].view_src = 3),
        ("listed twice or before", |g| g.nodes.swap(0, 2)),
        ("listed twice or before", |g| g.nodes.push(2)),
        ("no buffer 0x5", |g| g.tensors[0].buffer = BufferHandle(5)),
        ("no buffer", |g| g.tensors[0].buffer = BufferHandle(0)),
        ("no buffer", |g| (g.tensors[0].buffer, g.tensors[0].data) = (BufferHandle(0), 1 << 46)),
        ("no buffer", |g| (g.tensors[3].buffer, g.tensors[3].data) = (BufferHandle(0), 0)),
        ("do not lie inside the buffer", |g| g.tensors[0].data = 4096 - 16),
        ("do not lie inside the buffer", |g| g.tensors[0].data = u64::MAX - 8),
        ("is no multiple of 32", |g| g.tensors[3].data = 132),
        ("lies elsewhere than 16 bytes", |g| g.tensors[2].data += 16),
        ("lies elsewhere than 16 bytes", |g| g.tensors[2].buffer = BufferHandle(SHARED)),
        ("a view of more than there is", |g| {
            (g.tensors[2].view_offs, g.tensors[2].data, g.tensors[2].op_params[0]) = (20, 84, 20);
        }),
        ("is no multiple of 4", |g| (g.tensors[2].view_offs, g.tensors[2].data) = (14, 78)),
        ("a view of a tensor of another type", |g| g.tensors[2].type_ = 26),
        ("a view of a view", |g| {
            (g.tensors[3].view_src, g.tensors[3].view_offs, g.tensors[3].data) = (3, 0, 80);
        }),
        ("starts offset bytes into a", |g| g.tensors[2].op_params[0] = 12),
        ("lies over a source", |g| {
            g.tensors.truncate(2);
            g.nodes.truncate(1);
            (g.tensors[1].op, g.tensors[1].data) = (op("CUMSUM"), 0);
        }),
        ("has memory of its own", |g| {
            g.tensors.truncate(2);
            g.nodes.truncate(1);
            (g.tensors[1].op, g.tensors[1].view_src, g.tensors[1].data) = (op("CONT"), 1, 0);
        }),
        ("a graph of 101 nodes, the limit is 100", |g| g.nodes = vec![2; 101]),
        ("a graph of 101 tensors, the limit is 100", |g| g.tensors = vec![g.tensors[0]; 101]),
        ("stride 2 of dimension 0", |g| g.tensors[0].nb[0] = 2),
        ("there is no rule for FLASH_ATTN_BACK", |g| g.tensors[1].op = op("FLASH_ATTN_BACK")),
        ("calls a function by its address", |g| g.tensors[0].op = op("CUSTOM")),
        ("SQR breaks the rule: it has more sources", |g| g.tensors[1].src[4] = 1),
    ];
    sample().passes();
    for (words, change) in cases {
        let error = sample_with(change).refusal();
        assert!(error.contains(words), "{words}: {error}");
    }
}

#[test]
fn results_lie_over_a_source_only_in_place() {
    let in_place = |name: &str, data: u64, ne: &[i64]| {
        let mut graph = Sketch::default();
        let a = graph.leaf(t(0, &[16]), PRIVATE, 64);
        let b = graph.leaf(t(0, &[16]), PRIVATE, 256);
        graph.node(name, t(0, ne), PRIVATE, data, &[a, b]);
        graph
    };
    in_place("ADD", 64, &[16]).passes();
    // A program's allocator takes the memory of any parent of the same layout.
    in_place("ADD", 256, &[16]).passes();
    assert!(in_place("ADD", 32, &[16]).refusal().contains("over a source"), "the end over the start");
    assert!(
        in_place("OUT_PROD", 64, &[16, 16]).refusal().contains("over a source"),
        "larger than the source"
    );
    let mut scan = in_place("CONCAT", 512, &[32]);
    scan.passes();
    scan.last().data = 64;
    assert!(scan.refusal().contains("over a source"));
}

#[test]
fn sources_that_are_written_lie_over_nothing() {
    let mut graph = Sketch::default();
    let weights = graph.leaf(row(), PRIVATE, 0);
    graph.last().flags = apir_ggml::abi::FLAG_PARAM;
    let gradient = graph.leaf(row(), PRIVATE, 64);
    let m = graph.leaf(row(), PRIVATE, 128);
    let v = graph.leaf(row(), PRIVATE, 192);
    let settings = graph.leaf(t(0, &[7]), PRIVATE, 256);
    graph.view("OPT_STEP_ADAMW", row(), weights, 0, &[weights, gradient, m, v, settings]);
    graph.passes();
    for (tensor, data) in [(3, 128), (2, 64), (1, 192), (4, 128)] {
        let mut broken = graph.clone();
        broken.tensors[tensor].data = data;
        assert!(broken.refusal().contains("over a source"), "tensor {tensor} at {data}");
    }
}

#[test]
fn views_are_where_they_say() {
    let mut graph = Sketch::default();
    let a = graph.leaf(t(0, &[6, 4]), PRIVATE, 0);
    let swapped = RawTensor { ne: [4, 6, 1, 1], nb: [24, 4, 96, 96], ..RawTensor::default() };
    graph.view("TRANSPOSE", swapped, a, 0, &[a]);
    graph.passes();
    for (name, tensor, params) in [
        ("TRANSPOSE", swapped, [0; 4]),
        ("PERMUTE", swapped, [1, 0, 2, 3]),
        ("RESHAPE", t(0, &[4, 6]), [0; 4]),
    ] {
        let with = |offset: u64, ne1: i64| {
            let mut graph = Sketch::default();
            // More than the view needs, so that only its rule keeps it at the start.
            let a = graph.leaf(t(0, &[6, 4]), PRIVATE, 0);
            let mut part = tensor;
            part.ne[1] = ne1;
            graph.view(name, part, a, offset, &[a]);
            graph.last().op_params[..4].copy_from_slice(&params);
            graph
        };
        with(0, 6).passes();
        assert!(with(4, 5).refusal().contains("starts where a does"), "{name}");
    }
}

#[test]
fn nodes_that_are_not_marked_are_data() {
    // One that breaks rules, has no buffer under its source, and is not computed.
    let mut graph = sample();
    let nowhere = graph.leaf(row(), 0, 0);
    let other = graph.node("GLU", row(), PRIVATE, 512, &[nowhere]);
    assert!(graph.refusal().contains("GLU breaks the rule"));
    graph.last().flags = 0;
    graph.node("SQR", row(), PRIVATE, 640, &[other]);
    graph.verify(IndexCheck::All, |verified| {
        let graph = verified.unwrap();
        assert_eq!((graph.nodes(), graph.tensors()[5].node()), (&[1, 2, 3, 6][..], None));
    });
    graph.nodes.push(other);
    assert!(graph.refusal().contains("listed twice"));
    for tensor in &mut graph.tensors {
        tensor.flags = 0;
    }
    graph.nodes.pop();
    graph.verify(IndexCheck::All, |verified| assert_eq!(verified.unwrap().nodes(), [2], "a view"));
}

#[test]
fn what_another_graph_computed_is_data() {
    // A tensor whose operation is hostile is not computed here, and is checked as any other tensor.
    let mut graph = sample();
    let other = graph.leaf(row(), PRIVATE, 512);
    graph.last().op = op("ARGSORT");
    graph.node("SQR", row(), PRIVATE, 640, &[other]);
    graph.passes();
    graph.tensors[4].data = 4096;
    assert!(graph.refusal().contains("do not lie inside"));
}

#[test]
fn a_cast_is_its_own_second_source() {
    let mut graph = Sketch::default();
    let a = graph.leaf(row(), PRIVATE, 0);
    let cast = graph.node("CPY", t(1, &[8]), PRIVATE, 64, &[a]);
    assert!(graph.refusal().contains("required source is absent"));
    graph.last().src[1] = cast;
    graph.passes();
    graph.last().op = op("ADD");
    assert!(graph.refusal().contains("does not come before it"));
}

#[test]
fn a_promise_of_more_keys_than_there_are_is_one_of_all() {
    let mut graph = Sketch::default();
    let q = graph.leaf(t(0, &[32, 1, 2]), PRIVATE, 0);
    let (k, v) = (graph.leaf(t(1, &[32, 7, 2]), PRIVATE, 256), graph.leaf(t(1, &[32, 7, 2]), PRIVATE, 1152));
    graph.node("FLASH_ATTN_EXT", t(0, &[32, 2, 1]), PRIVATE, 2048, &[q, k, v]);
    for (given, taken) in [(0, 0), (5, 5), (7, 7), (8, 7), (i32::MAX, 7)] {
        graph.last().op_params[4] = given;
        graph.verify(IndexCheck::All, |verified| {
            assert_eq!(verified.unwrap().tensors()[3].tensor().op_params()[4], taken);
        });
    }
    graph.last().op_params[4] = -1;
    assert!(graph.refusal().contains("not negative"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever bytes change, a graph that passes has every tensor in its buffer and sources before users.
    #[test]
    fn mutants_are_refused_or_sound(edits in prop::collection::vec((0usize..1260, any::<u8>()), 1..6)) {
        let mut bytes = sample().encode();
        for (at, value) in edits {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        let rules = rules();
        let terms = Terms { rules: &rules, buffers: &Kinds, index_check: IndexCheck::All, max_nodes: 100 };
        let mut verifier = Verifier::default();
        if let Ok(graph) = verifier.verify(&bytes, &terms) {
            for (index, entry) in graph.tensors().iter().enumerate() {
                if let Some(place) = entry.tensor().place() {
                    prop_assert!(place.offset + entry.tensor().extent() <= 4096);
                    prop_assert_eq!(place.offset + place.room, 4096);
                }
                let copy = entry.tensor().op() == op("CPY");
                let mut earlier = entry.sources().into_iter().flatten().chain(entry.view_src());
                prop_assert!(earlier.all(|at| (at as usize) < index || copy && at as usize == index));
            }
            prop_assert!(graph.nodes().iter().all(|node| *node < graph.tensors().len()));
        }
    }
}
