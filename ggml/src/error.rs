//! What can go wrong between this crate and a ggml library.
#![forbid(unsafe_code)]

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::layout::{OLDEST_VERSION, Version};
use crate::types::ExtentError;

/// An error of this crate; the message is one line that names the thing, the value and the limit.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The ggml library's file cannot be looked at.
    #[error("ggml library {}: {source}", path.display())]
    LibraryMissing {
        /// The library's file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The path of the ggml library names something else than a file.
    #[error("ggml library {}: not a file", path.display())]
    LibraryNotAFile {
        /// The path.
        path: PathBuf,
    },
    /// The loader refuses the ggml library.
    #[error("ggml library {}: cannot be loaded: {reason}", path.display())]
    LibraryOpen {
        /// The library's file.
        path: PathBuf,
        /// What the loader says.
        reason: String,
    },
    /// The ggml library, or the libraries it needs, lack a symbol.
    #[error("ggml library {}: no symbol {symbol} in it or in the libraries it needs", path.display())]
    SymbolMissing {
        /// The library's file.
        path: PathBuf,
        /// The symbol.
        symbol: String,
    },
    /// The file is a library of something else, or a part of ggml that is no backend.
    #[error("ggml library {}: not a ggml backend: {reason}", path.display())]
    NotABackend {
        /// The library's file.
        path: PathBuf,
        /// What it lacks, and what to name in its place.
        reason: String,
    },
    /// A variant for another processor.
    #[error(
        "ggml library {}: this processor lacks instructions that it is built for (its ggml_backend_score is 0); name another variant",
        path.display()
    )]
    ProcessorUnsupported {
        /// The library's file.
        path: PathBuf,
    },
    /// The registration function gives none.
    #[error("ggml library {}: {symbol} gives no registration", path.display())]
    RegistryNull {
        /// The library's file.
        path: PathBuf,
        /// The registration function.
        symbol: String,
    },
    /// The backend has another API version than its ggml.
    #[error(
        "ggml library {}: {symbol} gives a backend of API {found}, but its ggml {version} has API {expected}",
        path.display()
    )]
    ApiVersion {
        /// The library's file.
        path: PathBuf,
        /// The registration function.
        symbol: String,
        /// API version of the backend.
        found: i32,
        /// API version of its ggml.
        expected: u32,
        /// Version of its ggml.
        version: Version,
    },
    /// The ggml is older than [`OLDEST_VERSION`].
    #[error("ggml: too old ({version}, oldest supported {OLDEST_VERSION})")]
    VersionUnsupported {
        /// Version of the ggml.
        version: Version,
    },
    /// A ggml library has a version that is not supported.
    #[error("ggml library {}: {source}", path.display())]
    LibraryVersion {
        /// The library's file.
        path: PathBuf,
        /// Which version, and what is supported.
        source: Box<Error>,
    },
    /// `ggml_version()` gives no version.
    #[error("ggml says it is version \"{text}\", which is not of the form 0.26.0")]
    VersionUnreadable {
        /// What it gives.
        text: String,
    },
    /// This process has no libggml-base.
    #[error(
        "no libggml-base is loaded in this process; the backend must be loaded by a program that uses ggml as a shared library"
    )]
    BaseMissing,
    /// The libggml-base of this process lacks a symbol.
    #[error("{library} has no symbol {symbol}")]
    BaseSymbolMissing {
        /// Name of the libggml-base found.
        library: String,
        /// The symbol.
        symbol: &'static str,
    },
    /// A backend leaves out a function it must have.
    #[error("{object} has no {slot}")]
    SlotMissing {
        /// Kind of the object.
        object: &'static str,
        /// The function.
        slot: &'static str,
    },
    /// A function of a backend gives nothing.
    #[error("{slot} of {object} gives nothing")]
    SlotNull {
        /// Kind of the object.
        object: &'static str,
        /// The function.
        slot: &'static str,
    },
    /// A device's index is past the last.
    #[error("there is no device {index}: registry {registry} has {count}")]
    NoDevice {
        /// The index asked for.
        index: usize,
        /// Devices there are.
        count: usize,
        /// Name of the registry.
        registry: String,
    },
    /// A host pointer does not fit the buffer type's alignment.
    #[error("host memory at {address:#x} is not aligned to {alignment} bytes")]
    Misaligned {
        /// The address.
        address: usize,
        /// The alignment.
        alignment: usize,
    },
    /// A tensor's shape has no extent.
    #[error(transparent)]
    Extent(#[from] ExtentError),
    /// A tensor's data is not all in its buffer.
    #[error(
        "tensor data at {data:#x} with {extent} bytes is not inside the buffer at {base:#x} with {size} bytes"
    )]
    OutsideBuffer {
        /// The tensor's address.
        data: usize,
        /// The tensor's extent in bytes.
        extent: u64,
        /// The buffer's address.
        base: usize,
        /// The buffer's bytes.
        size: usize,
    },
    /// A range is not inside a tensor.
    #[error("{len} bytes at offset {offset} are not inside a tensor of {extent} bytes")]
    OutsideTensor {
        /// Start of the range.
        offset: u64,
        /// Bytes of the range.
        len: usize,
        /// The tensor's extent in bytes.
        extent: u64,
    },
    /// Two tensors of a copy differ in type, shape or strides.
    #[error("a tensor is copied only onto one of the same type, shape and strides")]
    LayoutsDiffer,
    /// Two tensors of a copy share some of their bytes.
    #[error("a tensor of {nbytes} bytes is not copied {apart} bytes further, onto itself")]
    TensorsOverlap {
        /// The tensors' extent in bytes.
        nbytes: u64,
        /// Bytes between their addresses.
        apart: u64,
    },
    /// A view is not where its view source says.
    #[error("tensor {index} is a view of tensor {view_src} at offset {offset}, but lies elsewhere")]
    ViewElsewhere {
        /// Index of the view.
        index: usize,
        /// Index of its source.
        view_src: usize,
        /// Offset of the view in bytes.
        offset: u64,
    },
    /// A tensor has an address but no buffer.
    #[error("tensor {index} has the address {data:#x} but no buffer")]
    NoBuffer {
        /// Index of the tensor.
        index: usize,
        /// Its address.
        data: usize,
    },
    /// A graph names a tensor it does not have.
    #[error("the graph has {count} tensors, {user} names tensor {index}")]
    NoTensor {
        /// What names it.
        user: &'static str,
        /// The index named.
        index: usize,
        /// Tensors there are.
        count: usize,
    },
    /// A graph has more tensors than its 32-bit numbers can count.
    #[error("a graph has at most {limit} tensors and nodes")]
    GraphTooLarge {
        /// The limit.
        limit: usize,
    },
    /// The list of operations does not end with the one that ends every known list.
    #[error("ggml lists {found} operations and none of them is the known last one")]
    Operations {
        /// Operations read.
        found: usize,
    },
}
