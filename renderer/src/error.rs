//! What keeps a server, a worker or a context from running.
#![forbid(unsafe_code)]

use crate::context::Fatal;
use crate::probe::ProbeError;
use apir_protocol::socket::{FrameError, SOCKET_VERSION};
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

/// What keeps a server, a worker or a context from running.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file that has to be a library is not there, or no regular file.
    #[error("{option} {}: {reason}; give the full path of {wanted}", .path.display())]
    Library {
        /// The option that named it.
        option: &'static str,
        /// Its path.
        path: PathBuf,
        /// What is wrong.
        reason: String,
        /// What should have been named.
        wanted: &'static str,
    },
    /// An environment variable with a value that it cannot have.
    #[error("{name}={}: {fix}", .value.display())]
    Variable {
        /// The variable.
        name: &'static str,
        /// Its value, or the part that is wrong.
        value: OsString,
        /// What it should be.
        fix: String,
    },
    /// The system would not wall a worker in.
    #[error("cannot {what} for the sandbox: {cause}; APIR_SANDBOX=off runs workers without one")]
    Sandbox {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        cause: String,
    },
    /// What is to be served cannot be: a setting, the plugin or the ggml library is wrong.
    #[error("{0}")]
    Probe(#[from] ProbeError),
    /// The program of the workers is not there.
    #[error("worker program {}: {source}; set APIR_WORKER to the apir program", .path.display())]
    WorkerProgram {
        /// Its path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A socket's path has to fit into its address.
    #[error("--socket {}: {len} bytes, the limit is {limit}; choose a shorter path", .path.display())]
    SocketPathLength {
        /// The path.
        path: PathBuf,
        /// Its length in bytes.
        len: usize,
        /// The longest path.
        limit: usize,
    },
    /// The folder of the socket is not there.
    #[error("--socket {}: the folder {} does not exist; make it, or choose another path", .path.display(), .folder.display())]
    SocketFolder {
        /// The path.
        path: PathBuf,
        /// Its folder.
        folder: PathBuf,
    },
    /// Something else has the socket's path.
    #[error("--socket {}: this exists and is not a socket; choose another path", .path.display())]
    SocketOccupied {
        /// The path.
        path: PathBuf,
    },
    /// A server listens there already.
    #[error("--socket {}: another server is listening there; stop it, or choose another path", .path.display())]
    SocketInUse {
        /// The path.
        path: PathBuf,
    },
    /// The system refused the socket.
    #[error("--socket {}: cannot {what}: {source}", .path.display())]
    Socket {
        /// The path.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// A configuration string with a NUL byte.
    #[error("configuration {key}: a NUL byte in the key or its value")]
    ConfigNul {
        /// The key.
        key: String,
    },
    /// Two contexts of one process with one id.
    #[error("context {id} exists already in this process")]
    ContextExists {
        /// The id.
        id: u32,
    },
    /// A blob that was handed over is none that a context can have.
    #[error("blob {res_id} cannot be attached: {source}")]
    Attach {
        /// Its resource id.
        res_id: u32,
        /// What is wrong.
        source: io::Error,
    },
    /// A blob was handed over without its memory.
    #[error("blob {res_id} came without its memory")]
    NoMemory {
        /// Its resource id.
        res_id: u32,
    },
    /// The client sent descriptors, which only a VMM may: one could be its own end of the connection.
    #[error("the client sent descriptors")]
    Descriptors,
    /// A worker that was not started by a server.
    #[error("--fd {fd} is not a SOCK_SEQPACKET socket: `apir worker` is started by `apir serve`")]
    NotASocket {
        /// The descriptor.
        fd: i32,
    },
    /// The server ended before its worker began.
    #[error("the server (process {server}) is gone")]
    ServerGone {
        /// Its process id.
        server: i32,
    },
    /// The client sent a packet that is not a frame.
    #[error("bad frame from the client: {0}")]
    Frame(#[from] FrameError),
    /// The client sent a frame out of turn.
    #[error("the client sent {found} where {awaited} was awaited")]
    OutOfTurn {
        /// What came.
        found: &'static str,
        /// What should have come.
        awaited: &'static str,
    },
    /// The client speaks other frames.
    #[error("the client speaks socket version {found}, this server {SOCKET_VERSION}")]
    Version {
        /// The client's version.
        found: u32,
    },
    /// The process that fills a cache of shaders ended early.
    #[error("the process that fills it ended with {status}; its lines say why{}", match .kept {
        Some(kept) => format!(", and what it had compiled is kept in {}", kept.display()),
        None => String::new(),
    })]
    Warm {
        /// How it ended.
        status: std::process::ExitStatus,
        /// The cache with what it had compiled.
        kept: Option<PathBuf>,
    },
    /// The plugin filled no cache of shaders.
    #[error("no shader was compiled: {0}")]
    NotWarmed(&'static str),
    /// The client's command ended its context.
    #[error("context lost: {0}")]
    Fatal(#[from] Fatal),
    /// The system failed a call.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

impl Error {
    /// Names what failed in a system call.
    pub(crate) fn io<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Io { what, source: source.into() }
    }
}
