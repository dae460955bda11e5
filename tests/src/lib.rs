//! Whole-system tests of the pair: a harness that runs real ggml programs against a real server.
//!
//! The harness knows our pieces only as files ([`peers::Dist`]), as a user does.

pub mod architectures;
pub mod backend_ops;
pub mod chat;
pub mod completion;
pub mod embedding;
pub mod error;
pub mod fakes;
pub mod fork;
pub mod ggml;
pub mod ggml_program;
pub mod http;
pub mod llama;
pub mod peers;
pub mod process;
pub mod program;
pub mod releases;
pub mod remote;
pub mod server;
pub mod vm;

pub use error::Error;
pub use remote::Remote;
