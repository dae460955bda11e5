//! The roots: a stock QEMU with all it loads, and the distribution's own llama.cpp.

use std::path::Path;

use apir_tests::vm::VmDir;

use crate::cache::Cache;
use crate::debian::Suite;
use crate::error::Error;
use crate::ui::Ui;

use super::kernel;

/// QEMU 10 with a software renderer, the real virglrenderer with its render server, the kernel and its headers.
const HYPERVISOR: Suite = Suite {
    name: "trixie",
    packages: &[
        "qemu-system-x86",
        "qemu-system-gui",
        "qemu-system-modules-opengl",
        "libvirglrenderer1",
        "virgl-server",
        "libegl-mesa0",
        "libgl1-mesa-dri",
        "libegl1",
        "libgl1",
        // What ggml's libraries need.
        "libgomp1",
        "libstdc++6",
        // What the guest's first file system is made with.
        "busybox-static",
        "kmod",
        "xz-utils",
    ],
    // The cloud kernel has no graphics driver at all.
    downloads: &["linux-image-amd64", "linux-libc-dev"],
    rolling: false,
};

/// llama.cpp and ggml as the distribution ships them.
const LLAMA: Suite = Suite {
    name: "sid",
    packages: &["llama.cpp-tools", "llama.cpp-tests", "libggml0"],
    downloads: &[],
    rolling: true,
};

/// Makes the root of QEMU and the kernel beside it.
pub fn hypervisor(cache: &Cache, ui: &Ui, dir: &VmDir) -> Result<(), Error> {
    let (root, kernel) = (dir.hypervisor_root(), dir.kernel());
    step(cache, "vm-qemu", &HYPERVISOR, &[&root.join("usr/bin/qemu-system-x86_64"), &kernel], || {
        HYPERVISOR.make(cache, ui, &root, |packages| kernel::unpack(cache, packages, dir))
    })
}

/// Makes the root with the distribution's llama.cpp.
pub fn llama(cache: &Cache, ui: &Ui, dir: &VmDir) -> Result<(), Error> {
    let root = dir.debian_root();
    step(cache, "vm-debian", &LLAMA, &[&root.join("usr/bin/llama-bench")], || {
        LLAMA.make(cache, ui, &root, |_| Ok(()))
    })
}

/// A step whose files may have been removed.
fn step(
    cache: &Cache,
    name: &str,
    suite: &Suite,
    files: &[&Path],
    work: impl FnOnce() -> Result<(), Error>,
) -> Result<(), Error> {
    if files.iter().any(|file| !file.is_file()) {
        cache.forget(name)?;
    }
    cache.step(name, &suite.key(), work)
}
