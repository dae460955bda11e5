//! From what a guest says to what may reach a backend.
//!
//! [`tensor`] checks one tensor against the buffer that it lies in, [`graph`] the shape of a whole graph. A
//! [`graph::VerifiedGraph`] comes from there alone.
#![forbid(unsafe_code)]

pub mod graph;
pub mod tensor;

use apir_ggml::ExtentError;
use apir_protocol::graph::GraphError;
use thiserror::Error;

/// Bytes of each live buffer of a context, by its token.
pub trait BufferSizes {
    /// Bytes of the buffer with this token, nothing when no live buffer has it.
    fn buffer_size(&self, token: u64) -> Option<u64>;
}

/// Why a tensor or a graph was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum VerifyError {
    /// The bytes are no graph.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// A graph without nodes.
    #[error("a graph of no nodes")]
    NoNodes,
    /// A tensor whose id is 0, which names none.
    #[error("tensor {index} has the id 0")]
    NullId {
        /// Place among the graph's tensors.
        index: usize,
    },
    /// Two tensors share an id.
    #[error("tensor {index} has the id {id:#x} of another")]
    DuplicateId {
        /// Place of the second.
        index: usize,
        /// The id.
        id: u64,
    },
    /// An id that no tensor has.
    #[error("{what} is the unknown tensor {id:#x}")]
    UnknownId {
        /// What names it.
        what: &'static str,
        /// The id.
        id: u64,
    },
    /// A tensor listed before one that it is made of.
    #[error("tensor {index} is made of tensor {source_index}, which does not come before it")]
    Order {
        /// The tensor.
        index: usize,
        /// What it is made of.
        source_index: usize,
    },
    /// A node is listed twice, or before a node that it is made of.
    #[error("node {node} is listed twice or before what it is made of")]
    NodeOrder {
        /// Place among the nodes.
        node: usize,
    },
    /// A type that ggml does not have, dimensions or strides that no tensor has.
    #[error("{name:?}: {cause}")]
    Extent {
        /// The tensor's name.
        name: String,
        /// What is wrong.
        cause: ExtentError,
    },
    /// An operation that this ggml does not have.
    #[error("{name:?}: operation {op}, this ggml has {count}")]
    UnknownOp {
        /// The tensor's name.
        name: String,
        /// The number.
        op: u32,
        /// How many there are.
        count: u32,
    },
    /// An operation that calls into the program that made it.
    #[error("{name:?}: {op} calls a function by its address")]
    Callback {
        /// The tensor's name.
        name: String,
        /// The operation's name.
        op: String,
    },
    /// The buffer's token is dead or never lived.
    #[error("{name:?}: no buffer {token:#x}")]
    UnknownBuffer {
        /// The tensor's name.
        name: String,
        /// The token.
        token: u64,
    },
    /// A tensor that has an address but no buffer, or that must have one.
    #[error("{name:?}: no buffer")]
    NoBuffer {
        /// The tensor's name.
        name: String,
    },
    /// The tensor does not lie inside its buffer.
    #[error("{name:?}: bytes {offset} + {extent} do not lie inside the buffer of {size} bytes")]
    OutsideBuffer {
        /// The tensor's name.
        name: String,
        /// Bytes from the buffer's base.
        offset: u64,
        /// Bytes that the tensor spans.
        extent: u64,
        /// Bytes of the buffer.
        size: u64,
    },
    /// A view that does not lie where its source and its offset say.
    #[error("{name:?}: a view that lies elsewhere than {view_offs} bytes into its source")]
    ViewElsewhere {
        /// The view's name.
        name: String,
        /// Bytes into the source.
        view_offs: u64,
    },
}
