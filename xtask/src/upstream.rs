//! Upstream's guest library, built from the same source tree as the peers, for the tests of its pairings with ours.

use std::fs;
use std::path::Path;

use apir_tests::vm::VmDir;

use crate::apt::{self, Need};
use crate::cache::{self, Cache};
use crate::error::{Error, IoContext};
use crate::peers::{self, Llama};
use crate::tools::Tool;
use crate::ui::{Ui, Unit};

const CMAKE_LISTS: &str = include_str!("upstream/CMakeLists.txt");
const EXTERNAL_PROJECT: &str = include_str!("upstream/ExternalProject.cmake");

/// What it needs besides a build of llama.cpp.
const DRM: &[Need] = &[Need::Program("pkg-config", "pkg-config"), Need::Header("xf86drm.h", "libdrm-dev")];

/// Builds it beside the ggml of `llama`, with the headers of the guest's kernel, since distributions' libdrm lacks the
/// blobs; nothing to do where llama.cpp is the user's, who may have another version.
pub fn guest(cache: &Cache, ui: &Ui, llama: &Llama, dir: &VmDir) -> Result<(), Error> {
    if llama.source.is_none() {
        return Ok(());
    }
    let to = dir.upstream_guest();
    if !to.is_file() {
        cache.forget("upstream-guest")?;
    }
    let key = cache::sha256_of(format!("{CMAKE_LISTS}{EXTERNAL_PROJECT}").as_bytes());
    cache.step("upstream-guest", &key, || {
        apt::ensure(cache, ui, apt::LLAMA_BUILD)?;
        apt::ensure(cache, ui, DRM)?;
        let bar = ui.bar("build upstream's guest library", Unit::Items, 0);
        let scratch = cache.scratch()?;
        let (source, build) = (scratch.path().join("source"), scratch.path().join("build"));
        write(&source.join("CMakeLists.txt"), CMAKE_LISTS)?;
        write(&source.join("ExternalProject.cmake"), EXTERNAL_PROJECT)?;
        let headers = scratch.path().join("headers");
        write(&headers.join("venus_hw.h"), "")?;
        copy_folder(&dir.kernel_tree().join("usr/include/drm"), &headers.join("drm"))?;
        let define = |name: &str, path: &Path| format!("-D{name}={}", path.display());
        let log = cache.log("upstream-guest");
        Tool::new("cmake", &cache.log("upstream-guest-configure"))
            .args(["-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-S"])
            .arg(&source)
            .arg("-B")
            .arg(&build)
            .arg(define("GGML_TREE", &peers::source_tree_path(cache).join("ggml")))
            .arg(define("GGML_BASE", &llama.bin.join("libggml-base.so")))
            .arg(define("HEADERS", &headers))
            .run()?;
        Tool::new("ninja", &log).arg("-C").arg(&build).arg("ggml-virtgpu").run()?;
        bar.finish();
        cache::put(&build.join("guest/libggml-virtgpu.so"), &to)
    })
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).at("create", folder)?;
    }
    fs::write(path, text).at("write", path)
}

/// Copies the files of a folder without folders.
fn copy_folder(from: &Path, to: &Path) -> Result<(), Error> {
    fs::create_dir_all(to).at("create", to)?;
    for file in crate::debian::files(from)? {
        fs::copy(&file, to.join(file.file_name().unwrap_or_default())).at("copy", &file)?;
    }
    Ok(())
}
