//! What virglrenderer does for APIR: contexts, blobs and worker processes, behind a unix socket.
//!
//! [`Context`] is the whole of one guest's connection apart from any transport: its blobs, its configuration, the
//! plugin and the command stream. [`Server`] listens on a socket and starts a worker process for each client;
//! [`worker::run`] is that process: one context, fed from the client's socket.

mod blob;
mod context;
mod error;
mod log;
mod plugin;
mod server;
mod state;
pub mod worker;

pub use context::{Config, Context, CreatedBlob, Fatal};
pub use error::Error;
pub use server::{Server, ServerOptions};
