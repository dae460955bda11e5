//! Debian's kernel, unpacked and not installed.

use std::fs;
use std::path::{Path, PathBuf};

use apir_tests::vm::VmDir;

use crate::cache::{self, Cache};
use crate::debian;
use crate::error::{Error, IoContext};
use crate::tools::Tool;

/// Unpacks the packages of a folder, and puts the kernel's image beside them.
pub fn unpack(cache: &Cache, packages: &Path, dir: &VmDir) -> Result<(), Error> {
    let scratch = cache.scratch()?;
    let tree = scratch.path().join("kernel");
    for package in debian::files(packages)? {
        Tool::new("dpkg-deb", &cache.log("vm-kernel")).arg("--extract").arg(package).arg(&tree).run()?;
    }
    let image = find(&tree.join("boot"), "vmlinuz-")?;
    let copy = scratch.path().join("vmlinuz");
    fs::copy(&image, &copy).at("copy", &image)?;
    cache::put(&tree, &dir.kernel_tree())?;
    cache::put(&copy, &dir.kernel())
}

/// The modules of the kernel in an unpacked tree, and the kernel's version.
pub fn modules(tree: &Path) -> Result<(PathBuf, String), Error> {
    let folder = find(&tree.join("usr/lib/modules"), "")?;
    let version = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok((folder, version))
}

fn find(folder: &Path, prefix: &str) -> Result<PathBuf, Error> {
    let matches =
        |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(prefix));
    debian::files(folder)?.into_iter().find(matches).ok_or_else(|| Error::Missing {
        path: folder.join(format!("{prefix}*")),
        hint: "Debian's kernel package should have it".to_owned(),
    })
}
