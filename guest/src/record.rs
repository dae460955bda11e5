//! ggml's tensors as they travel: records in graphs and transfers, inline tensors in questions, keys in caches.
#![forbid(unsafe_code)]

use crate::numbers::{NotOnHost, Numbers};
use apir_ggml::TensorRef;
use apir_protocol::handle::BufferHandle;
use apir_protocol::tensor::{InlineTensor, MAX_DIMS, NAME_SIZE, RawTensor, TensorRecord};

/// Where a tensor's data lies on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Place {
    /// The buffer, or none for a tensor without data.
    pub(crate) buffer: BufferHandle,
    /// Bytes from the buffer's base.
    pub(crate) offset: u64,
}

/// Why a tensor cannot travel.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum RecordError {
    /// A dimension does not fit the wire's 32 bits.
    #[error("tensor '{name}' has {elements} elements in dimension {dim}; APIR carries 0 to {}", u32::MAX)]
    Elements { name: String, dim: usize, elements: i64 },
    /// A stride that counts does not fit the wire's 32 bits.
    #[error(
        "tensor '{name}' has a stride of {bytes} bytes in dimension {dim}; APIR carries up to {}",
        u32::MAX
    )]
    Stride { name: String, dim: usize, bytes: u64 },
    /// The host's ggml is another release and lacks something.
    #[error("tensor '{name}' has {what}, which the host's ggml does not have")]
    NotOnHost { name: String, what: NotOnHost },
    /// The data lies in a buffer of another backend.
    #[error("tensor '{name}' lies in a buffer that is not this device's")]
    Foreign { name: String },
    /// The data lies in no buffer.
    #[error("tensor '{name}' has data in no buffer")]
    Homeless { name: String },
    /// The data does not lie within the buffer.
    #[error("tensor '{name}' lies outside its buffer: bytes {offset:#x}..+{len} of {size}")]
    Outside { name: String, offset: usize, len: usize, size: usize },
    /// The graph's counts or size leave what can be sent.
    #[error("a graph of {nodes} nodes and {tensors} tensors is too large")]
    Graph { nodes: usize, tensors: usize },
}

/// A tensor's name, for people.
pub(crate) fn name(tensor: TensorRef<'_>) -> String {
    String::from_utf8_lossy(tensor.name()).into_owned()
}

/// The record of a tensor that is data, whatever made it, and lies at `place`.
pub(crate) fn data_record(
    tensor: TensorRef<'_>,
    place: Place,
    numbers: &Numbers,
) -> Result<TensorRecord, RecordError> {
    let (ne, nb) = narrow(tensor)?;
    Ok(TensorRecord {
        id: tensor.address() as u64,
        type_: numbers.type_(tensor.type_number()).map_err(|what| lacks(tensor, what))?,
        buffer: place.buffer,
        ne,
        nb,
        flags: tensor.flags(),
        view_src: address(tensor.view_src()),
        view_offs: tensor.view_offs(),
        data: place.offset,
        name: padded_name(tensor),
        ..TensorRecord::default()
    })
}

/// The record of a node whose data lies at `place`.
pub(crate) fn node_record(
    node: TensorRef<'_>,
    place: Place,
    numbers: &Numbers,
) -> Result<TensorRecord, RecordError> {
    let (op, op_params) = numbers.operation(node.op(), node.op_params()).map_err(|what| lacks(node, what))?;
    let src = node.sources().map(address);
    Ok(TensorRecord { op, op_params, src, ..data_record(node, place, numbers)? })
}

fn address(tensor: Option<TensorRef<'_>>) -> u64 {
    tensor.map_or(0, |tensor| tensor.address() as u64)
}

fn lacks(tensor: TensorRef<'_>, what: NotOnHost) -> RecordError {
    RecordError::NotOnHost { name: name(tensor), what }
}

/// Shape and strides in 32 bits. The stride of a dimension of one element counts for nothing and is cut, as upstream does.
fn narrow(tensor: TensorRef<'_>) -> Result<([u32; MAX_DIMS], [u32; MAX_DIMS]), RecordError> {
    let (shape, strides) = (tensor.shape(), tensor.strides());
    let (mut ne, mut nb) = ([0; MAX_DIMS], [0; MAX_DIMS]);
    for dim in 0..MAX_DIMS {
        let (elements, bytes) = (shape[dim], strides[dim]);
        ne[dim] = u32::try_from(elements).map_err(|_| RecordError::Elements {
            name: name(tensor),
            dim,
            elements,
        })?;
        if elements > 1 && bytes > u64::from(u32::MAX) {
            return Err(RecordError::Stride { name: name(tensor), dim, bytes });
        }
        nb[dim] = bytes as u32;
    }
    Ok((ne, nb))
}

/// Whether a node, its sources and the tensor it views can all travel in records.
pub(crate) fn fits_records(node: TensorRef<'_>) -> bool {
    related(node).all(|tensor| narrow(tensor).is_ok())
}

/// A node, the tensor it views, and its sources.
fn related(node: TensorRef<'_>) -> impl Iterator<Item = TensorRef<'_>> {
    [Some(node), node.view_src()].into_iter().chain(node.sources()).flatten()
}

fn padded_name(tensor: TensorRef<'_>) -> [u8; NAME_SIZE] {
    let mut name = [0; NAME_SIZE];
    // At most 63 bytes, so that the last stays NUL.
    let text = tensor.name();
    name[..text.len()].copy_from_slice(text);
    name
}

/// A node as a question carries it. It names no buffer: the answer is for every node of this content.
pub(crate) fn inline(node: TensorRef<'_>, numbers: &Numbers) -> Result<InlineTensor, NotOnHost> {
    let (op, op_params) = numbers.operation(node.op(), node.op_params())?;
    let other = |tensor: TensorRef<'_>| {
        // What made a source says nothing about the node: the host need not have it.
        let (op, op_params) = numbers.operation(tensor.op(), tensor.op_params()).unwrap_or_default();
        Ok(RawTensor { op, op_params, ..raw(tensor, numbers)? })
    };
    Ok(InlineTensor {
        tensor: RawTensor { op, op_params, ..raw(node, numbers)? },
        buffer: BufferHandle::default(),
        view_src: node.view_src().map(other).transpose()?,
        // The first absent source ends them: the wire cannot carry those behind it.
        sources: node
            .sources()
            .into_iter()
            .map_while(|source| source.map(other))
            .collect::<Result<_, _>>()?,
    })
}

fn raw(tensor: TensorRef<'_>, numbers: &Numbers) -> Result<RawTensor, NotOnHost> {
    Ok(RawTensor {
        type_: numbers.type_(tensor.type_number())?,
        ne: tensor.shape(),
        nb: tensor.strides(),
        flags: tensor.flags(),
        view_offs: tensor.view_offs(),
        name: padded_name(tensor),
        // Encoding sets the presence flags.
        ..RawTensor::default()
    })
}

/// What an answer about a node depends on: its operation with parameters, and type, shape and strides of all it names.
pub(crate) fn content_key(node: TensorRef<'_>) -> Vec<u8> {
    let mut key = Vec::with_capacity(512);
    key.extend(node.op().to_le_bytes());
    for word in node.op_params() {
        key.extend(word.to_le_bytes());
    }
    push_shape(&mut key, Some(node));
    push_shape(&mut key, node.view_src());
    for source in node.sources() {
        push_shape(&mut key, source);
    }
    key
}

/// Appends what counts of a tensor; an absent one is told from every present one by its first byte.
fn push_shape(key: &mut Vec<u8>, tensor: Option<TensorRef<'_>>) {
    key.push(u8::from(tensor.is_some()));
    let Some(tensor) = tensor else { return };
    key.extend(tensor.type_number().to_le_bytes());
    for elements in tensor.shape() {
        key.extend(elements.to_le_bytes());
    }
    for bytes in tensor.strides() {
        key.extend(bytes.to_le_bytes());
    }
}
