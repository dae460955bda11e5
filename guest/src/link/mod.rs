//! Links: how commands and shared memory reach the host.
//!
//! A [`Link`] carries commands one way and makes blobs, memory that both sides see. The host answers a command in its
//! reply blob: it stores the notification word last, and [`wait::until`] watches that word.
mod memory;
mod process;
mod pulse;
mod socket;
mod virtgpu;
pub mod wait;

pub use memory::{Blob, Unref};
pub use process::Process;
#[cfg(test)]
pub(crate) use process::in_fork;
pub use pulse::{Patience, Pulse};
pub use socket::SocketLink;
pub use virtgpu::{APIR_CAPSET_VARIABLE, CapsetFound, Findings, RENDER_NODE_VARIABLE, Unusable, VirtgpuLink};

use apir_protocol::socket::{BlobRefusal, FrameError};
use nix::errno::Errno;
use std::fmt::{self, Debug};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
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

    /// The host's signs of life, by which every wait on this link ends.
    fn pulse(&self) -> &Pulse;
}

/// What to do where no server is named.
const SERVER_FIX: &str = "set APIR_SOCKET to the PATH of a server started with: \
    apir serve --socket PATH --plugin FILE --ggml-library FILE";

/// Why a link could not be opened or used.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// There is no render node, and the environment names no server.
    #[error(
        "no apir host: there is no render node in /dev/dri, and {SOCKET_VARIABLE} is not set; give the VM a virtio-gpu \
         device (containers need --device /dev/dri), or {SERVER_FIX}"
    )]
    NoTransport,
    /// No render node leads to a host, and the environment names no server.
    #[error("no apir host: {0}; or {SERVER_FIX}")]
    NoVirtgpu(Findings),
    /// The render node that the environment names will not do.
    #[error("no apir host by {RENDER_NODE_VARIABLE}: {0}")]
    NoRenderNode(Findings),
    /// Nobody answers at the socket.
    #[error("cannot connect to {} ({SOCKET_VARIABLE}): {source}; {}", .path.display(), connect_fix(.path, .source))]
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
    #[error("the apir host is gone ({0}); the host's output says why")]
    Lost(String),
    /// The host is there but did not answer in time.
    #[error("no answer from the apir host within {} ms", .0.as_millis())]
    Timeout(Duration),
    /// The host counts its word up no more.
    #[error(
        "the apir host has given no sign of life for {} ms: it is stopped or hangs; its output may say why",
        .0.as_millis()
    )]
    Silent(Duration),
    /// The host refused a blob; the link lives on.
    #[error("the host refused a blob of {size} bytes: {reason}")]
    Refused {
        /// The size asked for, in bytes.
        size: u64,
        /// Why.
        reason: BlobFailure,
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

/// What to do about a failed connection.
fn connect_fix(path: &Path, error: &io::Error) -> String {
    // A socket in a folder that this user may not search cannot be looked at: the error says so.
    let other_file = std::fs::metadata(path).is_ok_and(|found| !found.file_type().is_socket());
    match Errno::from_raw(error.raw_os_error().unwrap_or_default()) {
        _ if other_file => format!("this is not a socket; set {SOCKET_VARIABLE} to the PATH of apir serve --socket"),
        Errno::ENOENT => format!(
            "there is no such file: start the server with: apir serve --socket {} --plugin FILE --ggml-library FILE \
             (a container needs the socket's folder mounted)",
            path.display()
        ),
        Errno::EACCES | Errno::EPERM => {
            "only the user who started apir serve may connect, and each folder of the path must be searchable; \
             run this program as that user"
                .to_owned()
        }
        Errno::ECONNREFUSED => format!(
            "the server that made it has ended: start it again with: apir serve --socket {} --plugin FILE \
             --ggml-library FILE",
            path.display()
        ),
        Errno::EPROTOTYPE => {
            format!("another program than apir serve listens there; set {SOCKET_VARIABLE} to the PATH of apir serve --socket")
        }
        Errno::ENAMETOOLONG => "a socket's path has at most 107 bytes; use a shorter one on both sides".to_owned(),
        Errno::EAGAIN => "the server is busy with others who connect, or stopped; try again, or start it again".to_owned(),
        _ => format!("check {SOCKET_VARIABLE}; it must be the PATH of apir serve --socket"),
    }
}

/// Why there is no blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BlobFailure {
    /// The server's reason.
    #[error("{0}")]
    Server(BlobRefusal),
    /// The kernel has no room left in the window for host memory.
    #[error(
        "the VM's window for host memory is full; give its device a larger one (QEMU: hostmem=SIZE), or use less \
         of the GPU"
    )]
    Window,
    /// The kernel has it, but cannot map it.
    #[error(
        "it cannot be mapped (the VM's window for host memory is full, or the host has no memory left); the host's \
         output says why"
    )]
    Unmappable,
}

impl From<BlobRefusal> for BlobFailure {
    fn from(refusal: BlobRefusal) -> Self {
        Self::Server(refusal)
    }
}

/// One way to a host; whether an APIR host is there shows in the handshake.
pub struct Route {
    name: Option<String>,
    open: Opener,
}

type Opener = Box<dyn FnOnce() -> Result<Box<dyn Link>, LinkError>>;

impl Route {
    /// A way by this name, which failures are to be told under; without one, what `open` and the session say is enough.
    pub fn new(
        name: Option<String>,
        open: impl FnOnce() -> Result<Box<dyn Link>, LinkError> + 'static,
    ) -> Self {
        Self { name, open: Box::new(open) }
    }

    /// Its name, for failures that do not say what they are about.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Opens a link with a context of its own.
    ///
    /// # Errors
    /// When nobody answers there, or somebody of another version.
    pub fn open(self) -> Result<Box<dyn Link>, LinkError> {
        (self.open)()
    }
}

impl fmt::Debug for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Route").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The ways to a host, to be tried in this order: the socket that `APIR_SOCKET` names, else the render nodes.
///
/// # Errors
/// When there is no way; the message is one line with the fix.
pub fn routes() -> Result<Vec<Route>, LinkError> {
    match std::env::var_os(SOCKET_VARIABLE) {
        Some(path) if !path.is_empty() => {
            Ok(vec![Route::new(None, move || Ok(Box::new(SocketLink::connect(path.as_ref())?)))])
        }
        _ => virtgpu::routes(),
    }
}
