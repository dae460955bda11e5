//! Two guests that send commands in any order: honest and hostile handles, tensors, graphs and blobs, made and freed.
#![forbid(unsafe_code)]

mod run;
mod transcript;

use crate::generate::Case;
use crate::input::{Input, change_list};
use crate::mutate;
use arbitrary::{Arbitrary, Unstructured};
use serde::{Deserialize, Serialize};

pub use run::{Machine, run};
pub use transcript::Transcript;

/// The most steps of a session: later ones are not taken.
pub const MAX_STEPS: usize = 64;

/// What two guests do, one step after the other.
#[derive(Debug, Clone, PartialEq, Eq, Arbitrary, Serialize, Deserialize)]
pub struct Session {
    /// Who does what. Even numbers are the first guest.
    pub steps: Vec<(u8, Step)>,
}

/// A step of one guest.
#[derive(Debug, Clone, PartialEq, Eq, Arbitrary, Serialize, Deserialize)]
pub enum Step {
    /// Sends a command.
    Call(Call),
    /// Sends the first bytes of a command only.
    Cut(Call, u8),
    /// Sends a command with bytes behind it.
    Trailing(Call, Vec<u8>),
    /// Sends bytes.
    Raw(u32, Vec<u8>),
    /// Makes a blob of so many pages, filled with a byte.
    MakeBlob(u8, u8),
    /// Makes a blob of a graph; its buffers are the guest's own, counted from 1.
    MakeGraph(GraphBytes),
    /// Writes to a blob.
    WriteBlob(u8, u16, Vec<u8>),
    /// Takes a blob away.
    DropBlob(u8),
    /// Lets another thread write one byte of a blob over and over, from now on to the end.
    Scribble(u8, u16),
    /// Starts the context, which may have started.
    Start,
    /// Ends the context.
    Stop,
}

/// A command in terms of what the guest has.
#[derive(Debug, Clone, PartialEq, Eq, Arbitrary, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the protocol's commands")]
pub enum Call {
    GetDeviceCount,
    GetCount,
    GetName,
    GetDescription,
    GetType,
    GetMemory,
    SupportsOp(Box<Inline>),
    GetBufferType,
    GetProps,
    BufferFromPtr { blob: Blob, size: Size, max_tensor_size: Size },
    TypeName(Handle),
    TypeAlignment(Handle),
    TypeMaxSize(Handle),
    TypeIsHost(Handle),
    Alloc(Handle, Size),
    AllocSize(Handle, Box<Inline>),
    GetBase(Handle),
    Set(Transfer),
    Get(Transfer),
    Copy { buffer: Handle, from: Tensor, to: Tensor },
    Clear(Handle, u8),
    Free(Handle),
    Compute(Blob, Size),
    Hello(u64),
    Liveness(Blob, Size),
    Names,
}

/// A handle that a guest sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Arbitrary, Serialize, Deserialize)]
pub enum Handle {
    /// One of its live buffers.
    Live(u8),
    /// A buffer that it has freed.
    Stale(u8),
    /// Its buffer type.
    Type,
    /// A live buffer of the other guest.
    Others(u8),
    /// The other guest's buffer type.
    OthersType,
    /// A number.
    Raw(u64),
}

/// A resource id that a guest sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Arbitrary, Serialize, Deserialize)]
pub enum Blob {
    /// One of its blobs.
    Live(u8),
    /// A number.
    Raw(u32),
}

/// A size, an offset or an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Arbitrary, Serialize, Deserialize)]
pub enum Size {
    /// What fits: a graph's own length, a small buffer's.
    Fitting,
    /// A small number.
    Small(u16),
    /// Any number.
    Raw(u64),
}

/// Bytes between a tensor and a blob.
#[derive(Debug, Clone, PartialEq, Eq, Arbitrary, Serialize, Deserialize)]
pub struct Transfer {
    /// The command's buffer.
    pub buffer: Handle,
    /// The tensor.
    pub tensor: Tensor,
    /// The blob.
    pub blob: Blob,
    /// Bytes into the tensor.
    pub offset: Size,
    /// Bytes.
    pub size: Size,
}

/// A tensor of a transfer.
#[derive(Debug, Clone, PartialEq, Eq, Arbitrary, Serialize, Deserialize)]
pub struct Tensor {
    /// Where it says to lie.
    pub buffer: Handle,
    /// Number of the type.
    pub type_: u8,
    /// Dimensions.
    pub ne: [u32; 4],
    /// Strides, where they are not those of a new tensor.
    pub nb: Option<[u32; 4]>,
    /// Bytes into the buffer.
    pub data: Size,
}

/// A node outside any graph.
#[derive(Debug, Clone, PartialEq, Eq, Arbitrary, Serialize, Deserialize)]
pub struct Inline {
    /// The node's operation.
    pub op: u8,
    /// The node's parameters, as far as they are given.
    pub params: Vec<i32>,
    /// The node.
    pub tensor: Plain,
    /// The node's buffer.
    pub buffer: Handle,
    /// What it views.
    pub view: Option<Plain>,
    /// What it is made of.
    pub sources: Vec<Plain>,
}

/// A tensor of a node outside any graph.
#[derive(Debug, Clone, PartialEq, Eq, Arbitrary, Serialize, Deserialize)]
pub struct Plain {
    /// Number of the type.
    pub type_: u8,
    /// Dimensions.
    pub ne: [i64; 4],
    /// Strides, where they are not those of a new tensor.
    pub nb: Option<[u64; 4]>,
}

/// A graph blob. Out of numbers it is made as a random graph with changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GraphBytes(pub Vec<u8>);

impl<'a> Arbitrary<'a> for GraphBytes {
    fn arbitrary(u: &mut Unstructured<'a>) -> arbitrary::Result<Self> {
        let mut graph = Case::arbitrary(u).graph;
        mutate::graph(&mut graph, u);
        Ok(Self(graph.to_blob()))
    }
}

impl Input for Session {
    fn change(&mut self, u: &mut Unstructured<'_>) {
        change_list(&mut self.steps, u, |(_, step), u| match step {
            Step::MakeGraph(bytes) => {
                if let Some(mut graph) = crate::graph::Graph::from_blob(&bytes.0) {
                    mutate::graph(&mut graph, u);
                    bytes.0 = graph.to_blob();
                }
            }
            Step::Cut(_, len) => *len = len.wrapping_add(1),
            step => {
                if let Ok(other) = Step::arbitrary(u) {
                    *step = other;
                }
            }
        });
        self.steps.truncate(MAX_STEPS);
    }
}
