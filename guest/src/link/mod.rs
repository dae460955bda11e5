//! Links: how commands and shared memory reach the host.
//!
//! A [`Link`] carries commands one way and makes blobs, memory that both sides see. The host answers a command in its
//! reply blob: it stores the notification word last, and [`wait::until`] watches that word.
mod memory;
mod socket;
pub mod wait;

pub use memory::{Blob, Unref};
pub use socket::SocketLink;

use apir_protocol::socket::{BlobRefusal, FrameError};
use std::fmt::Debug;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Environment variable with the path of `apir serve`'s socket; it chooses the socket link.
pub const SOCKET_VARIABLE: &str = "APIR_SOCKET";

/// A connection to one context of a host.
pub trait Link: Send + Sync + Debug {
    /// The transport's name: `socket` or `virtgpu`.
    fn transport(&self) -> &'static str;

    /// What to add to every command type: 0, or 331 on a Venus capset.
    fn command_type_offset(&self) -> u32;

    /// Makes a blob of at least `size` bytes, zeroed, mapped on both sides.
    ///
    /// # Errors
    /// [`LinkError::Refused`] when the host will not or cannot (the link lives on), any other when the link does not.
    fn create_blob(&self, size: u64) -> Result<Blob, LinkError>;

    /// Sends one whole command: the 12-byte header and its arguments, a multiple of 4 bytes. Does not wait for it to run.
    ///
    /// # Errors
    /// [`LinkError::Command`] for a length the link cannot carry (nothing is sent), else the link's failure.
    fn submit(&self, command: &[u8]) -> Result<(), LinkError>;

    /// Says whether the host is still there; costs about a microsecond.
    ///
    /// # Errors
    /// [`LinkError::Lost`] once the host is gone.
    fn check_peer(&self) -> Result<(), LinkError>;
}

/// Why a link could not be opened or used.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The environment names no host.
    #[error(
        "no apir host: {SOCKET_VARIABLE} is not set; set it to the PATH of a server started with: \
         apir serve --socket PATH --plugin FILE --ggml-library FILE"
    )]
    NoTransport,
    /// Nobody answers at the socket.
    #[error(
        "cannot connect to {} ({SOCKET_VARIABLE}): {source}; \
         start it with: apir serve --socket {} --plugin FILE --ggml-library FILE", .path.display(), .path.display()
    )]
    Connect {
        /// The socket's path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The server speaks other frames.
    #[error(
        "the server at {} speaks socket version {found}, this library {expected}; take both from one apir release",
        .path.display()
    )]
    Version {
        /// The socket's path.
        path: PathBuf,
        /// The server's version.
        found: u32,
        /// Ours.
        expected: u32,
    },
    /// The host is gone: its worker ended or was killed, or the server stopped.
    #[error("the apir host is gone ({0}); the output of `apir serve` says why")]
    Lost(String),
    /// The host is there but did not answer in time.
    #[error("no answer from the apir host within {} ms", .0.as_millis())]
    Timeout(Duration),
    /// The host refused a blob; the link lives on.
    #[error("the host refused a blob of {size} bytes: {reason}")]
    Refused {
        /// The size asked for, in bytes.
        size: u64,
        /// The host's reason.
        reason: BlobRefusal,
    },
    /// The host sent a packet that is not a frame, or not the one awaited.
    #[error("bad frame from the host: {0}")]
    Frame(#[from] FrameError),
    /// The host broke the rules of the link.
    #[error("the host broke the link's rules: {0}")]
    Protocol(String),
    /// A command of a length that the link cannot carry.
    #[error("command of {len} bytes: the link carries 12 to {limit}, in whole words")]
    Command {
        /// Its length in bytes.
        len: usize,
        /// The longest command.
        limit: usize,
    },
    /// An access outside a blob.
    #[error("bytes {offset}..+{len} lie outside blob {res_id} of {size} bytes")]
    Bounds {
        /// The blob's resource id.
        res_id: u32,
        /// First byte of the access.
        offset: usize,
        /// Its length in bytes.
        len: usize,
        /// The blob's size in bytes.
        size: usize,
    },
    /// The system failed a call.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

/// Opens the link that the environment chooses: the socket named by `APIR_SOCKET`.
///
/// # Errors
/// When no host is named, none answers, or it speaks another version; the message is one line with the fix.
pub fn open() -> Result<Box<dyn Link>, LinkError> {
    match std::env::var_os(SOCKET_VARIABLE) {
        Some(path) if !path.is_empty() => Ok(Box::new(SocketLink::connect(path.as_ref())?)),
        _ => Err(LinkError::NoTransport),
    }
}
