//! The guest's first file system: a shell, the kernel's modules that the guest needs, and our init.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use apir_tests::vm::{Root, VmDir};

use super::kernel;
use crate::cache::{self, Cache};
use crate::error::{Error, IoContext};
use crate::tools::Tool;

/// The first process of the guest.
const INIT: &str = include_str!("init");

/// What is loaded, with all that it needs: devices, the graphics driver, shared folders, a writable layer.
const MODULES: &[&str] = &["virtio_pci", "virtio_gpu", "9pnet_virtio", "9p", "overlay"];

/// File type bits of a cpio entry.
const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const DEVICE: u32 = 0o020_600;

/// Makes it, or takes the one that is there.
pub fn ensure(cache: &Cache, dir: &VmDir) -> Result<(), Error> {
    let (folder, version) = kernel::modules(&dir.kernel_tree())?;
    if !dir.initramfs().is_file() {
        cache.forget("vm-initramfs")?;
    }
    let key = format!("{version} {} {}", MODULES.join(" "), cache::sha256_of(INIT.as_bytes()));
    cache.step("vm-initramfs", &key, || {
        let scratch = cache.scratch()?;
        let archive = scratch.path().join("initramfs");
        let bytes = build(cache, dir, &folder, &version, scratch.path())?;
        fs::write(&archive, bytes).at("write", &archive)?;
        cache::put(&archive, &dir.initramfs())
    })
}

fn build(cache: &Cache, dir: &VmDir, folder: &Path, version: &str, scratch: &Path) -> Result<Vec<u8>, Error> {
    let root = Root::new(&dir.hypervisor_root())?.with(&dir.kernel_tree()).with(scratch);
    let log = cache.log("vm-initramfs");
    let tree = dir.kernel_tree().join("usr");
    Tool::from_program(root.program("depmod").arg("-b").arg(tree).arg(version), &log).run()?;
    let index = folder.join("modules.dep");
    let order = load_order(&fs::read_to_string(&index).at("read", &index)?, MODULES)?;

    let mut archive = Archive::default();
    for name in ["bin", "dev", "modules"] {
        archive.entry(name, FOLDER, (0, 0), &[]);
    }
    archive.entry("dev/console", DEVICE, (5, 1), &[]);
    archive.entry("init", PROGRAM, (0, 0), INIT.as_bytes());
    let busybox = dir.hypervisor_root().join("usr/bin/busybox");
    archive.entry("bin/busybox", PROGRAM, (0, 0), &fs::read(&busybox).at("read", &busybox)?);
    let mut names = String::new();
    for module in order {
        let packed = folder.join(&module);
        let copy = scratch.join(packed.file_name().unwrap_or_default());
        fs::copy(&packed, &copy).at("copy", &packed)?;
        let plain = if copy.extension().is_some_and(|extension| extension == "xz") {
            Tool::from_program(root.program("xz").arg("--decompress").arg(&copy), &log).run()?;
            copy.with_extension("")
        } else {
            copy
        };
        let name = plain.file_name().unwrap_or_default().to_string_lossy().into_owned();
        archive.entry(&format!("modules/{name}"), PROGRAM, (0, 0), &fs::read(&plain).at("read", &plain)?);
        names.push_str(&name);
        names.push('\n');
    }
    archive.entry("modules/order", PROGRAM, (0, 0), names.as_bytes());
    Ok(archive.finish())
}

/// The files of some modules and of what they need, in the order in which they can be loaded. `index` is depmod's:
/// `file: what it needs`, all of it, nearest first. A module that the kernel has built in is in no line.
fn load_order(index: &str, modules: &[&str]) -> Result<Vec<String>, Error> {
    let lines: BTreeMap<String, (&str, Vec<&str>)> = index
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(file, needs)| (module_name(file), (file, needs.split_whitespace().collect())))
        .collect();
    let mut order: Vec<String> = Vec::new();
    for module in modules {
        let Some((file, needs)) = lines.get(*module) else { continue };
        for file in needs.iter().rev().chain([file]) {
            if !order.iter().any(|known| known == file) {
                order.push((*file).to_owned());
            }
        }
    }
    match order.is_empty() {
        true => Err(Error::Check(format!("the kernel has none of the modules {}", modules.join(", ")))),
        false => Ok(order),
    }
}

/// `kernel/drivers/gpu/drm/virtio/virtio-gpu.ko.xz` is the module virtio_gpu.
fn module_name(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or(file);
    name.split('.').next().unwrap_or(name).replace('-', "_")
}

/// A cpio archive of the kind that the kernel unpacks ("newc", see its buffer-format documentation).
#[derive(Debug, Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    /// Adds one entry; folders come before what is in them.
    fn entry(&mut self, name: &str, mode: u32, (major, minor): (u32, u32), content: &[u8]) {
        self.entries += 1;
        let fields = [
            self.entries, // inode
            mode,
            0, // user
            0, // group
            1, // links
            0, // time
            content.len() as u32,
            0, // device of the file itself
            0,
            major,
            minor,
            name.len() as u32 + 1,
            0, // checksum, unused in this format
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.align();
        self.bytes.extend_from_slice(content);
        self.align();
    }

    fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn align(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_module_needs_is_loaded_before_it() {
        let index = "kernel/a/drm.ko.xz:\nkernel/a/drm-kms.ko.xz: kernel/a/drm.ko.xz\n\
                     kernel/a/virtio-gpu.ko.xz: kernel/a/drm-kms.ko.xz kernel/a/drm.ko.xz\nkernel/b/9p.ko:\n";
        let order = load_order(index, &["virtio_gpu", "built_in", "drm", "9p"]).unwrap();
        assert_eq!(
            order,
            ["kernel/a/drm.ko.xz", "kernel/a/drm-kms.ko.xz", "kernel/a/virtio-gpu.ko.xz", "kernel/b/9p.ko"]
        );
        assert!(load_order(index, &["none"]).is_err());
    }

    #[test]
    fn an_archive_is_a_row_of_aligned_entries() {
        let mut archive = Archive::default();
        archive.entry("ab", PROGRAM, (0, 0), b"12345");
        let bytes = archive.finish();
        // 110 bytes of header, the name and its end.
        assert_eq!(&bytes[110..113], b"ab\0");
        assert_eq!(&bytes[116..121], b"12345");
        assert_eq!(&bytes[124..130], b"070701");
        assert_eq!(bytes.len() % 4, 0);
    }
}
