//! From what a guest says to what may reach a backend.
//!
//! [`tensor`] checks one tensor against the buffer that it lies in; [`rules`] holds a node against the rules of its operation, which [`ops`] lists;
//! [`graph`] checks a whole graph; [`indices`] plans how contents that address memory are kept from changing,
//! and `parts` which nodes are computed together. A [`graph::VerifiedGraph`] comes
//! from there alone, and nothing else is computed. docs/verifier.md lists the rules.
#![forbid(unsafe_code)]

mod error;
pub mod graph;
pub mod indices;
pub mod layout;
pub mod node;
pub mod ops;
mod parts;
pub mod rules;
pub mod tensor;
pub mod types;
pub mod work;

#[cfg(test)]
pub(crate) mod tests;

pub use error::VerifyError;

/// A live buffer of a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BufferInfo {
    /// Its bytes.
    pub size: u64,
    /// What tensors that are no views start at multiples of.
    pub alignment: u64,
    /// It lies in host memory, in ggml's plain layout.
    pub host: bool,
    /// The guest can write it at any time.
    pub shared: bool,
}

/// The live buffers of a context, by token.
pub trait Buffers {
    /// The buffer with this token, nothing when no live buffer has it.
    fn find(&self, token: u64) -> Option<BufferInfo>;

    /// The number of the memory that the buffer lies in, from its first byte on: buffers over one blob have the same.
    fn memory(&self, token: u64) -> u64 {
        token
    }
}
