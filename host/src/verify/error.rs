//! Why a tensor or a graph was refused.
#![forbid(unsafe_code)]

use apir_ggml::{ExtentError, Version};
use apir_protocol::graph::GraphError;
use thiserror::Error;

/// Why a tensor or a graph was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum VerifyError {
    /// The bytes are no graph.
    #[error(transparent)]
    Graph(#[from] GraphError),
    /// A graph without nodes.
    #[error("a graph of no nodes")]
    NoNodes,
    /// A graph beyond the context's limit.
    #[error("a graph of {value} {what}, the limit is {limit}")]
    GraphTooLarge {
        /// What there is too much of.
        what: &'static str,
        /// How much there is.
        value: u64,
        /// How much there may be.
        limit: u64,
    },
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
    /// More than kernels can count.
    #[error("{name:?}: {value} {what}, the limit is {limit}")]
    TooLarge {
        /// The tensor's name.
        name: String,
        /// What there is too much of.
        what: &'static str,
        /// How much there is.
        value: u64,
        /// How much there may be.
        limit: u64,
    },
    /// A stride that is 0, splits elements, or spreads blocks of a row.
    #[error("{name:?}: stride {stride} of dimension {dim}, for elements or blocks of {size} bytes")]
    Stride {
        /// The tensor's name.
        name: String,
        /// The dimension.
        dim: usize,
        /// Its stride in bytes.
        stride: u64,
        /// Bytes of an element or block.
        size: u32,
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
    /// An operation that no rule allows.
    #[error("{name:?}: there is no rule for {op}")]
    NoRule {
        /// The tensor's name.
        name: String,
        /// The operation's name.
        op: String,
    },
    /// A node that breaks a rule of its operation.
    #[error("{name:?}: {op} breaks the rule: {what}")]
    Rule {
        /// The tensor's name.
        name: String,
        /// The operation's name.
        op: &'static str,
        /// What does not hold.
        what: &'static str,
    },
    /// A node that this ggml is too old for.
    #[error("{name:?}: {op} with {what}: this ggml is too old ({version}, limit {since})")]
    Release {
        /// The tensor's name.
        name: String,
        /// The operation's name.
        op: &'static str,
        /// What came later.
        what: &'static str,
        /// The first release that is known to have it.
        since: Version,
        /// The ggml at hand.
        version: Version,
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
    /// The tensor does not start where its buffer lets tensors start.
    #[error("{name:?}: byte {offset} is no multiple of {alignment}")]
    Misaligned {
        /// The tensor's name.
        name: String,
        /// Bytes from the buffer's base, or from the viewed tensor's.
        offset: u64,
        /// What it must be a multiple of.
        alignment: u64,
    },
    /// A view that does not lie where its source and its offset say.
    #[error("{name:?}: a view that lies elsewhere than {view_offs} bytes into its source")]
    ViewElsewhere {
        /// The view's name.
        name: String,
        /// Bytes into the source.
        view_offs: u64,
    },
    /// A view that is no part of what it views, or views a view; ggml flattens these.
    #[error("{name:?}: a view of {what}")]
    View {
        /// The view's name.
        name: String,
        /// What is wrong with what it views.
        what: &'static str,
    },
    /// A node would write into what it reads.
    #[error("{name:?}: the result of {op} lies over a source")]
    Overlap {
        /// The node's name.
        name: String,
        /// The operation's name.
        op: String,
    },
}
