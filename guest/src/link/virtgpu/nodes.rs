//! Which render nodes lead to an APIR context, and why the others do not.
#![forbid(unsafe_code)]

use super::APIR_CAPSET_VARIABLE;
use super::drm::{Drm, Node, Param};
use crate::link::LinkError;
use apir_protocol::constants::{CAPSET_APIR, CAPSET_VENUS};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

const DRIVER: &str = "virtio_gpu";

/// What the environment asks for.
#[derive(Debug, Default)]
pub(super) struct Choice {
    /// The only node to use.
    pub(super) node: Option<PathBuf>,
    /// Whether only the APIR capset may be used.
    pub(super) only_apir: bool,
}

/// A node and the capset of the context to make there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) path: PathBuf,
    pub(super) capset: u32,
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with capset {}", self.path.display(), self.capset)
    }
}

/// Why a render node will not do.
#[derive(Debug, thiserror::Error)]
pub enum Unusable {
    /// Another driver's device.
    #[error("its driver is {0}, not virtio_gpu")]
    OtherDriver(String),
    /// This user may not open it.
    #[error("permission denied; add this user to the group that owns it (mostly `render`)")]
    Permission,
    /// It cannot be opened.
    #[error("it cannot be opened: {0}")]
    Open(io::Error),
    /// A file that is no render node.
    #[error("it does not tell its driver ({0}): it is no render node")]
    NoNode(io::Error),
    /// The device has no contexts.
    #[error(
        "its virtio-gpu has no 3D contexts; give the VM one with a renderer \
         (QEMU: -device virtio-gpu-gl-pci,blob=on,hostmem=4G,venus=on)"
    )]
    No3d,
    /// The device or its driver has no blobs.
    #[error(
        "its virtio-gpu has no blob resources; turn them on in the VM's device (QEMU: blob=on), with a guest kernel of \
         5.16 or newer"
    )]
    NoBlobs,
    /// The device has no window for host memory.
    #[error("its virtio-gpu has no window for host memory; give the VM's device one (QEMU: hostmem=4G)")]
    NoWindow,
    /// The device or its driver cannot choose a capset.
    #[error(
        "its virtio-gpu cannot make contexts of a chosen capset; use a VMM that offers context init (QEMU 9.2 or newer, \
         venus=on), with a guest kernel of 5.16 or newer"
    )]
    NoContextInit,
    /// The host has no capset that could be APIR.
    #[error(
        "its host offers no APIR ({}{}); start the VMM on apir's libvirglrenderer.so.1 with Venus on (QEMU: venus=on)",
        list(.found),
        if *.only_apir { format!(", and {APIR_CAPSET_VARIABLE} asks for 10 only") } else { String::new() }
    )]
    NoCapset {
        /// The capsets looked for.
        found: Vec<(u32, CapsetFound)>,
        /// Whether only the APIR capset was looked for.
        only_apir: bool,
    },
}

/// What a host has of a capset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CapsetFound {
    /// Data that is not all zeros.
    Present,
    /// Not offered.
    Absent,
    /// Offered, but all zeros: no renderer behind it.
    Zeros,
    /// Offered, but the host does not hand it out.
    Unread,
}

fn list(found: &[(u32, CapsetFound)]) -> String {
    let said = |(capset, found): &(u32, CapsetFound)| {
        let what = match found {
            CapsetFound::Present => "is there",
            CapsetFound::Absent => "is not offered",
            CapsetFound::Zeros => "is all zeros",
            CapsetFound::Unread => "cannot be read",
        };
        format!("capset {capset} {what}")
    };
    found.iter().map(said).collect::<Vec<_>>().join(", ")
}

/// The nodes that were looked at, and why each will not do.
#[derive(Debug)]
pub struct Findings(pub Vec<(PathBuf, Unusable)>);

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (path, why)) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{}: {why}", path.display())?;
        }
        Ok(())
    }
}

/// The ways to APIR, those by its own capset first: a Venus capset need not be APIR's, and finding out takes time.
///
/// # Errors
/// [`LinkError::NoTransport`] without any node, [`LinkError::NoRenderNode`] when the chosen one will not do,
/// [`LinkError::NoVirtgpu`] when none will.
pub(super) fn ways(drm: &dyn Drm, choice: &Choice) -> Result<Vec<Way>, LinkError> {
    let nodes = choice.node.clone().map_or_else(|| drm.render_nodes(), |node| vec![node]);
    if nodes.is_empty() {
        return Err(LinkError::NoTransport);
    }
    let mut ways = Vec::new();
    let mut findings = Vec::new();
    for path in nodes {
        match capsets(drm, &path, choice.only_apir) {
            Ok(capsets) => ways.extend(capsets.into_iter().map(|capset| Way { path: path.clone(), capset })),
            Err(why) => findings.push((path, why)),
        }
    }
    if !ways.is_empty() {
        ways.sort_by_key(|way| way.capset != CAPSET_APIR);
        return Ok(ways);
    }
    Err(match choice.node {
        Some(_) => LinkError::NoRenderNode(Findings(findings)),
        None => LinkError::NoVirtgpu(Findings(findings)),
    })
}

/// The capsets of a node that may lead to APIR, at least one.
fn capsets(drm: &dyn Drm, path: &Path, only_apir: bool) -> Result<Vec<u32>, Unusable> {
    let node = drm.open(path).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => Unusable::Permission,
        _ => Unusable::Open(error),
    })?;
    let driver = node.driver().map_err(Unusable::NoNode)?;
    if driver != DRIVER {
        return Err(Unusable::OtherDriver(driver));
    }
    // Older kernels refuse the parameters of what they lack.
    let lacks = |param| node.param(param).unwrap_or(0) == 0;
    if lacks(Param::Features3d) {
        return Err(Unusable::No3d);
    }
    if lacks(Param::ResourceBlob) {
        return Err(Unusable::NoBlobs);
    }
    if lacks(Param::HostVisible) {
        return Err(Unusable::NoWindow);
    }
    if lacks(Param::ContextInit) {
        return Err(Unusable::NoContextInit);
    }
    let wanted = if only_apir { &[CAPSET_APIR][..] } else { &[CAPSET_APIR, CAPSET_VENUS] };
    let offered = node.param(Param::SupportedCapsetIds).ok();
    let found: Vec<_> = wanted.iter().map(|capset| (*capset, look_at(&*node, *capset, offered))).collect();
    let present: Vec<_> =
        found.iter().filter(|(_, found)| *found == CapsetFound::Present).map(|(capset, _)| *capset).collect();
    if present.is_empty() { Err(Unusable::NoCapset { found, only_apir }) } else { Ok(present) }
}

/// `offered` has a bit for each capset; kernels that cannot tell are asked for the capset itself.
fn look_at(node: &dyn Node, capset: u32, offered: Option<u64>) -> CapsetFound {
    if offered.is_some_and(|ids| ids & (1 << capset) == 0) {
        return CapsetFound::Absent;
    }
    match node.caps(capset) {
        Ok(caps) if caps.iter().all(|byte| *byte == 0) => CapsetFound::Zeros,
        Ok(_) => CapsetFound::Present,
        Err(_) if offered.is_none() => CapsetFound::Absent,
        Err(_) => CapsetFound::Unread,
    }
}
