//! Graphs as the wire carries them, and the host's verifier over a table of made-up buffers.
#![forbid(unsafe_code)]

use crate::ops::OPS;
use apir_ggml::{OpTable, TypeInfo, Version};
use apir_protocol::graph::{GraphReader, encode_graph, graph_size};
use apir_protocol::handle::BufferHandle;
use apir_protocol::tensor::TensorRecord;
use ggml_virtgpu_backend::verify::graph::{Terms, Verifier};
use ggml_virtgpu_backend::verify::indices::IndexCheck;
use ggml_virtgpu_backend::verify::rules::RuleBook;
use ggml_virtgpu_backend::verify::{BufferInfo, Buffers, VerifyError};
use std::fmt;
use std::sync::LazyLock;

/// ggml's flag of a node that is to be executed.
pub const FLAG_COMPUTE: i32 = 16;

/// The most tensors and the most nodes of a graph here: more would only be slower.
const MAX_ENTRIES: usize = 4096;

/// A graph that may be changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Graph {
    /// Ids in the order of execution.
    pub nodes: Vec<u64>,
    /// The records, each behind what it is made of in an honest graph.
    pub tensors: Vec<TensorRecord>,
}

impl Graph {
    /// The graph at the front of `bytes`, if there is one of a size worth trying.
    #[must_use]
    pub fn from_blob(bytes: &[u8]) -> Option<Self> {
        let reader = GraphReader::parse(bytes).ok()?;
        if reader.node_count() > MAX_ENTRIES || reader.tensor_count() > MAX_ENTRIES {
            return None;
        }
        Some(Self { nodes: reader.node_ids().collect(), tensors: reader.tensors().collect() })
    }

    /// Its bytes on the wire.
    #[must_use]
    pub fn to_blob(&self) -> Vec<u8> {
        let mut bytes = vec![0; graph_size(self.nodes.len() as u32, self.tensors.len() as u32) as usize];
        // The buffer is as long as the graph.
        let _ = encode_graph(&self.nodes, &self.tensors, &mut bytes);
        bytes
    }

    /// The record with this id.
    #[must_use]
    pub fn find(&self, id: u64) -> Option<&TensorRecord> {
        self.tensors.iter().find(|tensor| tensor.id == id)
    }

    /// Puts `handles[n - 1]` where the buffer is `n`; other numbers stay, as handles of nothing.
    pub fn resolve(&mut self, handles: &[BufferHandle]) {
        for tensor in &mut self.tensors {
            if let Some(handle) = (tensor.buffer.0 as usize).checked_sub(1).and_then(|at| handles.get(at)) {
                tensor.buffer = *handle;
            }
        }
    }
}

/// A line for each tensor; `*` marks the nodes.
impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} nodes {:?}", self.nodes.len(), self.nodes)?;
        for tensor in &self.tensors {
            let name = OPS.get(tensor.op as usize).copied().unwrap_or("?");
            let type_ = TypeInfo::get(tensor.type_).map_or("?", |info| info.name);
            let mark = if self.nodes.contains(&tensor.id) { '*' } else { ' ' };
            let sources: Vec<_> = tensor.src.iter().filter(|id| **id != 0).collect();
            let last = tensor.op_params.iter().rposition(|word| *word != 0).map_or(0, |at| at + 1);
            write!(f, "{mark}{:#x} {name} {type_} {:?} {:?}", tensor.id, tensor.ne, tensor.nb)?;
            write!(f, " at {:#x}+{:#x} of {sources:?}", tensor.buffer.0, tensor.data)?;
            if tensor.view_src != 0 {
                write!(f, " view of {:#x}+{:#x}", tensor.view_src, tensor.view_offs)?;
            }
            writeln!(f, " flags {:#x} params {:?}", tensor.flags, &tensor.op_params[..last])?;
        }
        Ok(())
    }
}

/// Buffers by their tokens 1, 2, ….
#[derive(Debug)]
pub struct Table(pub &'static [BufferInfo]);

impl Buffers for Table {
    fn find(&self, token: u64) -> Option<BufferInfo> {
        (token as usize).checked_sub(1).and_then(|at| self.0.get(at)).copied()
    }
}

/// The buffers of the verifier's target: a small one, one that the guest shares, one of a device, and one so large that sums could wrap.
pub const BUFFERS: Table = Table(&[
    BufferInfo { size: 1 << 16, alignment: 32, host: true, shared: false },
    BufferInfo { size: 1 << 14, alignment: 32, host: true, shared: true },
    BufferInfo { size: 1 << 16, alignment: 128, host: false, shared: false },
    BufferInfo { size: 1 << 62, alignment: 32, host: true, shared: false },
]);

/// Verifies a graph that lies in private memory, and holds what passes against what must be true of it.
///
/// # Errors
/// Why it was refused.
///
/// # Panics
/// When a graph has passed that must not.
pub fn verify(blob: &[u8]) -> Result<(), VerifyError> {
    verify_in(blob, &BUFFERS)
}

/// As [`verify`], over other buffers.
///
/// # Errors
/// Why it was refused.
///
/// # Panics
/// When a graph has passed that must not.
pub fn verify_in(blob: &[u8], buffers: &Table) -> Result<(), VerifyError> {
    static RULES: LazyLock<RuleBook> = LazyLock::new(|| {
        RuleBook::new(&OpTable::from_names(OPS), Version { major: 0, minor: 26, patch: 0 }, true, 4)
    });
    let terms = Terms { rules: &RULES, buffers, index_check: IndexCheck::All, max_nodes: 1 << 20 };
    let mut verifier = Verifier::default();
    let graph = verifier.verify(blob, &terms)?;
    let copy = crate::ops::op("CPY");
    for (index, entry) in graph.tensors().iter().enumerate() {
        let tensor = entry.tensor();
        if let Some(place) = tensor.place() {
            let end = place.offset.checked_add(tensor.extent()).expect("the end of a tensor wraps");
            let size = buffers.find(place.buffer).expect("a tensor lies in no buffer").size;
            assert!(end <= size, "a tensor ends at {end} of {size} bytes");
        }
        for earlier in entry.sources().into_iter().flatten().chain(entry.view_src()) {
            let earlier = earlier as usize;
            assert!(
                earlier < index || earlier == index && tensor.op() == copy,
                "{index} is made of {earlier}"
            );
        }
    }
    assert!(graph.nodes().iter().all(|node| *node < graph.tensors().len()));
    let mut before = 0;
    for stop in &graph.plan().stops {
        assert!(
            stop.before >= before && stop.before < graph.nodes().len(),
            "a stop before node {}",
            stop.before
        );
        before = stop.before;
    }
    Ok(())
}
