//! The link over virtio-gpu: the guest kernel's virtio_gpu driver, through a DRM render node.
//!
//! The kernel tells neither that the host refused a blob (its mmap fails) nor that the host is gone. Hosts of this project
//! answer for a worker that died, and their plugin counts a word up while it lives; elsewhere only a deadline ends a wait.
mod drm;
#[cfg(test)]
mod fake;
mod nodes;
#[cfg(test)]
mod tests;

pub use nodes::{CapsetFound, Findings, Unusable};

use super::{Blob, BlobFailure, Link, LinkError, Pulse, Route, Unref};
use apir_protocol::constants::{BLOB_ALIGN, CAPSET_APIR, VENUS_COMMAND_TYPE_OFFSET};
use apir_protocol::socket::{BlobRefusal, MAX_BLOB_SIZE, MAX_COMMAND};
use drm::{Drm, Kernel, Node};
use nix::errno::Errno;
use nodes::{Choice, Way};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

/// Environment variable with the path of the render node to use; without it every node is looked at.
pub const RENDER_NODE_VARIABLE: &str = "APIR_RENDER_NODE";
/// Environment variable of upstream's guest: where it is set, only the APIR capset is used.
pub const APIR_CAPSET_VARIABLE: &str = "GGML_REMOTING_USE_APIR_CAPSET";

/// A link to one context of a virtio-gpu device.
#[derive(Debug)]
pub struct VirtgpuLink {
    node: Arc<dyn Node>,
    command_type_offset: u32,
    pulse: Pulse,
}

/// A buffer object of the kernel's, given back on [`Unref::unref`].
#[derive(Debug)]
struct Object {
    node: Arc<dyn Node>,
    handle: u32,
}

/// The ways to an APIR context through this machine's render nodes, the likeliest first.
///
/// # Errors
/// [`LinkError::NoTransport`] without any node, [`LinkError::NoVirtgpu`] when none will do, with a line for each.
pub(super) fn routes() -> Result<Vec<Route>, LinkError> {
    let choice = Choice {
        node: std::env::var_os(RENDER_NODE_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from),
        only_apir: std::env::var_os(APIR_CAPSET_VARIABLE).is_some(),
    };
    routes_over(&(Arc::new(Kernel) as Arc<dyn Drm>), &choice)
}

fn routes_over(drm: &Arc<dyn Drm>, choice: &Choice) -> Result<Vec<Route>, LinkError> {
    let route = |way: Way| {
        let drm = drm.clone();
        Route::new(Some(way.to_string()), move || Ok(Box::new(VirtgpuLink::open(&*drm, &way)?)))
    };
    Ok(nodes::ways(&**drm, choice)?.into_iter().map(route).collect())
}

impl VirtgpuLink {
    /// Opens the node and makes its context. The kernel allows one context for each open file, hence a file of its own.
    fn open(drm: &dyn Drm, way: &Way) -> Result<Self, LinkError> {
        let node = drm.open(&way.path).map_err(io_error("open the render node"))?;
        node.context_init(way.capset).map_err(io_error("make a context"))?;
        let command_type_offset = if way.capset == CAPSET_APIR { 0 } else { VENUS_COMMAND_TYPE_OFFSET };
        Ok(Self { node, command_type_offset, pulse: Pulse::default() })
    }
}

impl Link for VirtgpuLink {
    fn transport(&self) -> &'static str {
        "virtgpu"
    }

    fn command_type_offset(&self) -> u32 {
        self.command_type_offset
    }

    fn create_blob(&self, size: u64) -> Result<Blob, LinkError> {
        let refused = |reason| LinkError::Refused { size, reason };
        if size == 0 || size > MAX_BLOB_SIZE {
            return Err(refused(BlobRefusal::Size.into()));
        }
        // The pages of the host may be of 16 KiB; every blob is a multiple.
        let rounded = size.next_multiple_of(BLOB_ALIGN);
        let len = usize::try_from(rounded).map_err(|_| refused(BlobRefusal::Size.into()))?;
        let made = self.node.create_blob(rounded).map_err(|error| match errno(&error) {
            Errno::ENOSPC | Errno::ENOMEM => refused(BlobFailure::Window),
            _ => io_error("make a blob")(error),
        })?;
        let object = Arc::new(Object { node: self.node.clone(), handle: made.handle });
        let mapping = self
            .node
            .map_offset(made.handle)
            .map_err(io_error("map a blob"))
            .and_then(|offset| {
                self.node.map(offset, len).map_err(|error| match errno(&error) {
                    // The only sign that the host did not make it.
                    Errno::EINVAL => refused(BlobFailure::Unmappable),
                    _ => io_error("map a blob")(error),
                })
            })
            .inspect_err(|_| object.unref(made.res_id))?;
        Ok(Blob::new(made.res_id, mapping, object))
    }

    fn submit(&self, command: &[u8]) -> Result<(), LinkError> {
        if command.len() < 12 || command.len() > MAX_COMMAND || !command.len().is_multiple_of(4) {
            return Err(LinkError::Command { len: command.len(), limit: MAX_COMMAND });
        }
        self.node.submit(command).map_err(io_error("submit a command to the render node"))
    }

    /// Always well: the kernel does not tell.
    fn check_peer(&self) -> Result<(), LinkError> {
        Ok(())
    }

    fn pulse(&self) -> &Pulse {
        &self.pulse
    }
}

impl Unref for Object {
    fn unref(&self, _: u32) {
        // It fails only for a handle that is not ours.
        let _ = self.node.gem_close(self.handle);
    }
}

fn errno(error: &io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::UnknownErrno, Errno::from_raw)
}

fn io_error(what: &'static str) -> impl Fn(io::Error) -> LinkError {
    move |source| LinkError::Io { what, source }
}
