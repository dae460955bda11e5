//! Real virtual machines: a stock QEMU in a Debian root of its own, Debian's kernel, and programs run in the guest.
//!
//! The guest's file system is a folder of the host, read-only with a layer of its own on top, so that a path means the
//! same file on both sides. `cargo xtask` prepares what a machine is made of; here it is only used.
#![forbid(unsafe_code)]

mod boot;
mod contexts;
mod guest;
mod root;
mod steps;

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

pub use boot::{Boot, Renderer};
pub use contexts::contexts_program;
pub use guest::{Guest, Job, Loaded};
pub use root::Root;
pub use steps::Steps;

use crate::error::{Error, IoContext};

/// The folder with what machines are made of.
#[derive(Debug, Clone)]
pub struct VmDir(PathBuf);

/// What runs the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// The processor, through /dev/kvm.
    Kvm,
    /// QEMU's own emulation.
    Tcg,
}

impl VmDir {
    /// The folder that `APIR_VM` names.
    pub fn from_env() -> Result<Self, Error> {
        crate::peers::folder("APIR_VM", "the folder with the roots and the kernel of virtual machines")
            .map(Self)
    }

    /// This folder.
    pub fn at(folder: &Path) -> Self {
        Self(folder.to_owned())
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The Debian root that QEMU runs in.
    pub fn hypervisor_root(&self) -> PathBuf {
        self.0.join("qemu")
    }

    /// The Debian root with the distribution's own llama.cpp.
    pub fn debian_root(&self) -> PathBuf {
        self.0.join("debian")
    }

    /// The unpacked kernel packages.
    pub fn kernel_tree(&self) -> PathBuf {
        self.0.join("kernel")
    }

    /// The kernel's image.
    pub fn kernel(&self) -> PathBuf {
        self.0.join("vmlinuz")
    }

    /// The guest's first file system.
    pub fn initramfs(&self) -> PathBuf {
        self.0.join("initramfs.cpio")
    }

    /// Upstream's guest library.
    pub fn upstream_guest(&self) -> PathBuf {
        self.0.join("upstream/libggml-virtgpu.so")
    }

    /// The file that says which accelerator works on this machine.
    pub fn accelerator_file(&self) -> PathBuf {
        self.0.join("accelerator")
    }

    /// The accelerator that works on this machine.
    pub fn accelerator(&self) -> Result<Accelerator, Error> {
        let path = self.accelerator_file();
        fs::read_to_string(&path).at("read", &path)?.parse()
    }
}

impl Accelerator {
    /// Its name, as QEMU says it.
    pub fn name(self) -> &'static str {
        match self {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg",
        }
    }
}

impl FromStr for Accelerator {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        [Accelerator::Kvm, Accelerator::Tcg]
            .into_iter()
            .find(|accelerator| accelerator.name() == text.trim())
            .ok_or_else(|| Error::Unexpected(format!("{text:?} is no accelerator: kvm or tcg")))
    }
}
