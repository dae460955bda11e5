//! A kernel in this process: render nodes whose host makes blobs of real memory.
#![forbid(unsafe_code)]

use super::drm::{CAPSET_SIZE, Drm, Made, Node, Param};
use memmap2::{MmapOptions, MmapRaw};
use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// One node, as its driver tells it.
#[derive(Debug, Clone)]
pub(super) struct Device {
    pub(super) driver: &'static str,
    /// The kernel's refusal to open it.
    pub(super) closed: Option<Errno>,
    pub(super) params: HashMap<Param, u64>,
    /// Capsets that `GET_CAPS` knows, with their first word.
    pub(super) capsets: BTreeMap<u32, u32>,
    /// Whether the host makes the blobs that it is asked for.
    pub(super) makes_blobs: bool,
    /// Bytes of the window for host memory.
    pub(super) window: u64,
    /// Bytes of the host's pages.
    pub(super) page: u64,
    /// What `EXECBUFFER` fails with.
    pub(super) broken: Option<Errno>,
}

/// The machine: its nodes, and what was done to them.
#[derive(Debug, Default)]
pub(super) struct FakeDrm {
    pub(super) devices: BTreeMap<PathBuf, Device>,
    pub(super) log: Arc<Mutex<Log>>,
}

#[derive(Debug, Default)]
pub(super) struct Log {
    /// Nodes opened.
    pub(super) opened: Vec<PathBuf>,
    /// Capsets of the contexts made.
    pub(super) contexts: Vec<u32>,
    /// Sizes of the blobs asked for.
    pub(super) sizes: Vec<u64>,
    /// Handles given back.
    pub(super) closed: Vec<u32>,
    /// Commands submitted.
    pub(super) commands: Vec<Vec<u8>>,
}

#[derive(Debug)]
struct FakeNode {
    device: Device,
    log: Arc<Mutex<Log>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    context: bool,
    blobs: HashMap<u32, u64>,
    next: u32,
}

impl Device {
    /// A device with everything, whose host has these capsets.
    pub(super) fn with(capsets: &[u32]) -> Self {
        let ids = capsets.iter().fold(0, |ids, capset| ids | 1 << capset);
        let params = [
            (Param::Features3d, 1),
            (Param::ResourceBlob, 1),
            (Param::HostVisible, 1),
            (Param::ContextInit, 1),
            (Param::SupportedCapsetIds, ids),
        ];
        Self {
            driver: "virtio_gpu",
            closed: None,
            params: params.into(),
            capsets: capsets.iter().map(|capset| (*capset, 1)).collect(),
            makes_blobs: true,
            window: 256 << 20,
            page: 4096,
            broken: None,
        }
    }

    /// Another driver's device.
    pub(super) fn of(driver: &'static str) -> Self {
        Self { driver, params: HashMap::new(), capsets: BTreeMap::new(), ..Self::with(&[]) }
    }

    /// The same on a kernel or device that does not know the parameter.
    pub(super) fn without(mut self, param: Param) -> Self {
        self.params.remove(&param);
        self
    }
}

impl FakeDrm {
    /// A machine with these devices, from renderD128 on.
    pub(super) fn new(devices: impl IntoIterator<Item = Device>) -> Self {
        let path = |index| PathBuf::from(format!("/dev/dri/renderD{}", 128 + index));
        let devices = devices.into_iter().enumerate().map(|(index, device)| (path(index), device)).collect();
        Self { devices, log: Arc::default() }
    }
}

impl Drm for FakeDrm {
    fn render_nodes(&self) -> Vec<PathBuf> {
        self.devices.keys().cloned().collect()
    }

    fn open(&self, path: &Path) -> io::Result<Arc<dyn Node>> {
        self.log.lock().unwrap().opened.push(path.to_owned());
        let device = self.devices.get(path).ok_or(Errno::ENOENT)?.clone();
        match device.closed {
            Some(errno) => Err(errno.into()),
            None => Ok(Arc::new(FakeNode { device, log: self.log.clone(), state: Mutex::default() })),
        }
    }
}

impl Node for FakeNode {
    fn driver(&self) -> io::Result<String> {
        if self.device.driver.is_empty() {
            return Err(Errno::ENOTTY.into());
        }
        Ok(self.device.driver.to_owned())
    }

    fn param(&self, param: Param) -> io::Result<u64> {
        Ok(*self.device.params.get(&param).ok_or(Errno::EINVAL)?)
    }

    fn caps(&self, capset: u32) -> io::Result<[u8; CAPSET_SIZE]> {
        let first = self.device.capsets.get(&capset).ok_or(Errno::EINVAL)?;
        let mut caps = [0; CAPSET_SIZE];
        caps[..4].copy_from_slice(&first.to_le_bytes());
        Ok(caps)
    }

    fn context_init(&self, capset: u32) -> io::Result<()> {
        let mut state = self.state.lock().unwrap();
        if std::mem::replace(&mut state.context, true) {
            return Err(Errno::EEXIST.into());
        }
        self.caps(capset)?;
        self.log.lock().unwrap().contexts.push(capset);
        Ok(())
    }

    fn create_blob(&self, size: u64) -> io::Result<Made> {
        let mut state = self.state.lock().unwrap();
        self.log.lock().unwrap().sizes.push(size);
        if state.blobs.values().sum::<u64>() + size > self.device.window {
            return Err(Errno::ENOSPC.into());
        }
        state.next += 1;
        let handle = state.next;
        state.blobs.insert(handle, size);
        Ok(Made { handle, res_id: handle + 100 })
    }

    fn map_offset(&self, handle: u32) -> io::Result<u64> {
        let state = self.state.lock().unwrap();
        state.blobs.get(&handle).map_or(Err(Errno::ENOENT.into()), |_| Ok(u64::from(handle) << 32))
    }

    fn map(&self, offset: u64, len: usize) -> io::Result<MmapRaw> {
        let state = self.state.lock().unwrap();
        let size = *state.blobs.get(&((offset >> 32) as u32)).ok_or(Errno::EINVAL)?;
        // A host maps whole pages of its own into the window.
        if !self.device.makes_blobs || len as u64 != size || !size.is_multiple_of(self.device.page) {
            return Err(Errno::EINVAL.into());
        }
        let memory = File::from(memfd_create(c"fake", MFdFlags::empty())?);
        memory.set_len(size)?;
        MmapOptions::new().len(len).map_raw(&memory)
    }

    fn submit(&self, command: &[u8]) -> io::Result<()> {
        if let Some(errno) = self.device.broken {
            return Err(errno.into());
        }
        self.log.lock().unwrap().commands.push(command.to_vec());
        Ok(())
    }

    fn gem_close(&self, handle: u32) -> io::Result<()> {
        self.log.lock().unwrap().closed.push(handle);
        match self.state.lock().unwrap().blobs.remove(&handle) {
            Some(_) => Ok(()),
            None => Err(Errno::EINVAL.into()),
        }
    }
}
