//! What virglrenderer does for APIR: contexts, blobs and worker processes, behind a unix socket.
//!
//! [`Context`] is the whole of one guest's connection apart from any transport: its blobs, its configuration, the
//! plugin and the command stream. [`Server`] listens on a socket and starts a worker process for each client;
//! [`worker::run`] is that process: one context, fed from the client's socket. As `libvirglrenderer.so.1` the crate stands in for
//! virglrenderer in a VMM: it serves contexts of APIR by such workers, and leaves all others to the real library.

mod blob;
mod chain;
mod choose;
mod context;
mod dropin;
mod error;
mod launch;
mod log;
mod plugin;
mod probe;
mod relay;
mod sandbox;
mod server;
mod state;
mod virgl;
mod waiting;
mod warm;
pub mod worker;

pub use context::{Config, Context, CreatedBlob, Fatal};
pub use error::Error;
pub use log::{QueuedStderr, filter as log_filter, filter_or_default as log_filter_or_default};
pub use plugin::score;
pub use probe::ProbeError;
pub use sandbox::{Profile, Sandbox, ShaderCaches};
pub use server::{Server, ServerOptions};
pub use warm::{WarmOptions, Warmed, fill, warm, warm_beside_server};
