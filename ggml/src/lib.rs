//! ggml's C ABI in every supported version, and loading of ggml libraries.
//!
//! The only crate that knows where a field of a ggml struct lies.
//!
//! | module | for | what |
//! |---|---|---|
//! | [`abi`] | both | the structs, with their offsets asserted |
//! | [`layout`] | both | which layout a ggml library uses, by its version and symbols |
//! | [`types`] | both | the element types, and the extent of a tensor |
//! | [`ops`] | both | the operations by name |
//! | [`names`] | both | what all numbers in tensors mean, by name |
//! | [`values`] | both | kinds of devices, outcomes of computations |
//! | [`tensor`] | both | reading a tensor or a graph |
//! | [`graph`] | the host | building a graph in memory that is used again |
//! | [`library`] | the host | a loaded ggml library: its devices, buffers and backends |
//! | [`process`] | a backend | the ggml of the program it was loaded by |
//!
//! Supported: ggml from [`layout::OLDEST_VERSION`] (backend API 2) up to API 3, on 64-bit targets.

pub mod abi;
pub mod error;
pub mod graph;
pub mod layout;
pub mod library;
pub mod names;
pub mod ops;
#[cfg(target_os = "linux")]
pub mod process;
pub mod tensor;
pub mod types;
pub mod values;

pub use error::Error;
pub use graph::{Graph, GraphBuilder, TensorSpec};
pub use layout::{Layout, Version};
pub use library::GgmlLibrary;
pub use names::Names;
pub use ops::{OpKind, OpTable};
pub use tensor::{GraphRef, TensorRef};
pub use types::{ExtentError, TypeInfo, extent};
pub use values::{DeviceType, Status};
