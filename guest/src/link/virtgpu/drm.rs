//! The calls to the kernel's DRM layer, behind traits so that tests can play the kernel.
//!
//! Request numbers and structs are those of the kernel's `virtgpu_drm.h` and `drm.h`.
use memmap2::{MmapOptions, MmapRaw};
use nix::errno::Errno;
use std::ffi::c_int;
use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where the kernel's device manager puts the nodes.
const FOLDER: &str = "/dev/dri";
const RENDER_NODE_PREFIX: &str = "renderD";

const BLOB_MEM_HOST3D: u32 = 2;
const BLOB_FLAG_USE_MAPPABLE: u32 = 1;
const CONTEXT_PARAM_CAPSET_ID: u64 = 1;
const CONTEXT_PARAM_NUM_RINGS: u64 = 2;
const CONTEXT_PARAM_POLL_RINGS_MASK: u64 = 3;
const EXECBUF_RING_IDX: u32 = 4;

/// Bytes of a capset that are looked at: the whole of APIR's, the first words of Venus'.
pub(super) const CAPSET_SIZE: usize = 24;

/// What `GETPARAM` is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u64)]
pub(super) enum Param {
    /// The device has 3D contexts.
    Features3d = 1,
    /// The device has blob resources.
    ResourceBlob = 3,
    /// The device has a window for host memory.
    HostVisible = 4,
    /// Contexts can choose a capset.
    ContextInit = 6,
    /// A bit for each capset of the host.
    SupportedCapsetIds = 7,
}

/// A buffer object: the handle within its open file, the resource id on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Made {
    pub(super) handle: u32,
    pub(super) res_id: u32,
}

/// The render nodes of a machine.
pub(super) trait Drm: Send + Sync + Debug {
    /// Their paths in ascending order; none where there is no folder for them.
    fn render_nodes(&self) -> Vec<PathBuf>;

    /// Opens a node.
    fn open(&self, path: &Path) -> io::Result<Arc<dyn Node>>;
}

/// An open render node. Errors are the kernel's.
pub(super) trait Node: Send + Sync + Debug {
    /// Name of its driver.
    fn driver(&self) -> io::Result<String>;

    /// One of the driver's parameters; kernels refuse those that they do not know with `EINVAL`.
    fn param(&self, param: Param) -> io::Result<u64>;

    /// The first bytes of a capset.
    fn caps(&self, capset: u32) -> io::Result<[u8; CAPSET_SIZE]>;

    /// Makes this file's context, once.
    fn context_init(&self, capset: u32) -> io::Result<()>;

    /// Makes a mappable blob of the host's of `size` bytes.
    fn create_blob(&self, size: u64) -> io::Result<Made>;

    /// Where in the node the object is mapped.
    fn map_offset(&self, handle: u32) -> io::Result<u64>;

    /// Maps `len` bytes of the node from `offset`.
    fn map(&self, offset: u64, len: usize) -> io::Result<MmapRaw>;

    /// Submits a command to ring 0.
    fn submit(&self, command: &[u8]) -> io::Result<()>;

    /// Gives an object back.
    fn gem_close(&self, handle: u32) -> io::Result<()>;
}

/// The running kernel.
#[derive(Debug)]
pub(super) struct Kernel;

#[derive(Debug)]
struct RenderNode(File);

#[repr(C)]
struct GetParam {
    param: u64,
    value: u64,
}

#[repr(C)]
struct GetCaps {
    capset_id: u32,
    capset_version: u32,
    address: u64,
    size: u32,
    pad: u32,
}

#[repr(C)]
struct ContextParam {
    param: u64,
    value: u64,
}

#[repr(C)]
struct ContextInit {
    num_params: u32,
    pad: u32,
    params: u64,
}

#[repr(C)]
#[derive(Default)]
struct CreateBlob {
    blob_mem: u32,
    blob_flags: u32,
    handle: u32,
    res_id: u32,
    size: u64,
    pad: u32,
    command_size: u32,
    command: u64,
    blob_id: u64,
}

#[repr(C)]
struct Map {
    offset: u64,
    handle: u32,
    pad: u32,
}

#[repr(C)]
#[derive(Default)]
struct ExecBuffer {
    flags: u32,
    size: u32,
    command: u64,
    handles: u64,
    num_handles: u32,
    fence_fd: i32,
    ring_idx: u32,
    syncobj_stride: u32,
    num_in_syncobjs: u32,
    num_out_syncobjs: u32,
    in_syncobjs: u64,
    out_syncobjs: u64,
}

#[repr(C)]
struct GemClose {
    handle: u32,
    pad: u32,
}

/// The calls themselves: each is unsafe for the pointers in its struct and for the descriptor.
mod ioctl {
    use super::{ContextInit, CreateBlob, ExecBuffer, GemClose, GetCaps, GetParam, Map};

    nix::ioctl_write_ptr!(gem_close, b'd', 0x09, GemClose);
    nix::ioctl_readwrite!(map, b'd', 0x41, Map);
    nix::ioctl_readwrite!(execbuffer, b'd', 0x42, ExecBuffer);
    nix::ioctl_readwrite!(getparam, b'd', 0x43, GetParam);
    nix::ioctl_readwrite!(get_caps, b'd', 0x49, GetCaps);
    nix::ioctl_readwrite!(resource_create_blob, b'd', 0x4a, CreateBlob);
    nix::ioctl_readwrite!(context_init, b'd', 0x4b, ContextInit);
}

impl Drm for Kernel {
    fn render_nodes(&self) -> Vec<PathBuf> {
        nodes_in(Path::new(FOLDER))
    }

    fn open(&self, path: &Path) -> io::Result<Arc<dyn Node>> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        Ok(Arc::new(RenderNode(file)))
    }
}

fn nodes_in(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let number = |name: &str| name.strip_prefix(RENDER_NODE_PREFIX)?.parse::<u32>().ok();
    let mut nodes: Vec<_> =
        entries.filter_map(|entry| Some((number(entry.file_name().to_str()?)?, entry.path()))).collect();
    nodes.sort();
    nodes.into_iter().map(|(_, path)| path).collect()
}

impl RenderNode {
    fn fd(&self) -> c_int {
        self.0.as_raw_fd()
    }
}

impl Node for RenderNode {
    fn driver(&self) -> io::Result<String> {
        let mut name = Vec::new();
        drm_ffi::get_version(self.0.as_fd(), Some(&mut name), None, None)?;
        let name: Vec<u8> = name.into_iter().map(|char| char.cast_unsigned()).collect();
        Ok(String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned())
    }

    fn param(&self, param: Param) -> io::Result<u64> {
        // The kernel writes the low half only.
        let mut value = 0u64;
        let mut request =
            GetParam { param: param as u64, value: (&raw mut value).expose_provenance() as u64 };
        // SAFETY: the struct is the call's, and `value` takes the int that the kernel writes.
        restarted(|| unsafe { ioctl::getparam(self.fd(), &raw mut request) })?;
        Ok(value)
    }

    fn caps(&self, capset: u32) -> io::Result<[u8; CAPSET_SIZE]> {
        let mut caps = [0; CAPSET_SIZE];
        let mut request = GetCaps {
            capset_id: capset,
            capset_version: 0,
            address: caps.as_mut_ptr().expose_provenance() as u64,
            size: CAPSET_SIZE as u32,
            pad: 0,
        };
        // SAFETY: the struct is the call's, and `caps` takes the bytes that it asks for.
        restarted(|| unsafe { ioctl::get_caps(self.fd(), &raw mut request) })?;
        Ok(caps)
    }

    fn context_init(&self, capset: u32) -> io::Result<()> {
        let params = [
            (CONTEXT_PARAM_CAPSET_ID, capset.into()),
            (CONTEXT_PARAM_NUM_RINGS, 1),
            (CONTEXT_PARAM_POLL_RINGS_MASK, 0),
        ]
        .map(|(param, value)| ContextParam { param, value });
        let mut request = ContextInit {
            num_params: params.len() as u32,
            pad: 0,
            params: params.as_ptr().expose_provenance() as u64,
        };
        // SAFETY: the struct is the call's, and it names as many parameters as there are.
        restarted(|| unsafe { ioctl::context_init(self.fd(), &raw mut request) })
    }

    fn create_blob(&self, size: u64) -> io::Result<Made> {
        let mut request = CreateBlob {
            blob_mem: BLOB_MEM_HOST3D,
            blob_flags: BLOB_FLAG_USE_MAPPABLE,
            size,
            ..CreateBlob::default()
        };
        // SAFETY: the struct is the call's, and it carries no command.
        restarted(|| unsafe { ioctl::resource_create_blob(self.fd(), &raw mut request) })?;
        Ok(Made { handle: request.handle, res_id: request.res_id })
    }

    fn map_offset(&self, handle: u32) -> io::Result<u64> {
        let mut request = Map { offset: 0, handle, pad: 0 };
        // SAFETY: the struct is the call's.
        restarted(|| unsafe { ioctl::map(self.fd(), &raw mut request) })?;
        Ok(request.offset)
    }

    fn map(&self, offset: u64, len: usize) -> io::Result<MmapRaw> {
        MmapOptions::new().offset(offset).len(len).map_raw(&self.0)
    }

    fn submit(&self, command: &[u8]) -> io::Result<()> {
        let size = u32::try_from(command.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
        // With a ring named and no fence asked for, newer kernels make no fence, which APIR hosts need not know.
        let mut request = ExecBuffer {
            flags: EXECBUF_RING_IDX,
            size,
            command: command.as_ptr().expose_provenance() as u64,
            ..ExecBuffer::default()
        };
        // SAFETY: the struct is the call's, and the kernel only reads the `size` bytes of the command.
        restarted(|| unsafe { ioctl::execbuffer(self.fd(), &raw mut request) })
    }

    fn gem_close(&self, handle: u32) -> io::Result<()> {
        let request = GemClose { handle, pad: 0 };
        // SAFETY: the struct is the call's; nobody uses the handle afterwards.
        restarted(|| unsafe { ioctl::gem_close(self.fd(), &raw const request) })
    }
}

/// DRM calls that a signal interrupted are made again, with the struct as it was.
fn restarted(mut call: impl FnMut() -> nix::Result<c_int>) -> io::Result<()> {
    loop {
        return match call() {
            Err(Errno::EINTR | Errno::EAGAIN) => continue,
            Err(errno) => Err(errno.into()),
            Ok(_) => Ok(()),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::size_of;

    #[test]
    fn structs_are_the_kernels() {
        assert_eq!(size_of::<GetParam>(), 16);
        assert_eq!(size_of::<GetCaps>(), 24);
        assert_eq!(size_of::<ContextParam>(), 16);
        assert_eq!(size_of::<ContextInit>(), 16);
        assert_eq!(size_of::<CreateBlob>(), 48);
        assert_eq!(std::mem::offset_of!(CreateBlob, size), 16);
        assert_eq!(std::mem::offset_of!(CreateBlob, blob_id), 40);
        assert_eq!(size_of::<Map>(), 16);
        assert_eq!(size_of::<ExecBuffer>(), 64);
        assert_eq!(std::mem::offset_of!(ExecBuffer, fence_fd), 28);
        assert_eq!(std::mem::offset_of!(ExecBuffer, ring_idx), 32);
        assert_eq!(size_of::<GemClose>(), 8);
    }

    #[test]
    fn render_nodes_come_in_the_order_of_their_numbers() {
        let folder = std::env::temp_dir().join(format!("apir-nodes-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for name in ["card0", "renderD130", "renderD99", "by-path", "renderDx", "renderD128"] {
            std::fs::write(folder.join(name), "").unwrap();
        }
        let found = nodes_in(&folder);
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, ["renderD99", "renderD128", "renderD130"].map(|name| folder.join(name)));
        assert!(nodes_in(&folder).is_empty());
    }

    #[test]
    fn a_file_that_is_no_node_is_told_by_every_call() {
        let node = Kernel.open(Path::new("/dev/null")).unwrap();
        let failed = |result: io::Result<()>| {
            assert_eq!(result.unwrap_err().raw_os_error(), Some(Errno::ENOTTY as i32));
        };
        failed(node.driver().map(drop));
        failed(node.param(Param::HostVisible).map(drop));
        failed(node.caps(10).map(drop));
        failed(node.context_init(10));
        failed(node.create_blob(16384).map(drop));
        failed(node.map_offset(1).map(drop));
        failed(node.submit(&[0; 12]));
        failed(node.gem_close(1));
        assert!(node.map(0, 4096).is_err());
    }
}
