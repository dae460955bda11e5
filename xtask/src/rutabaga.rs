//! The test client on the published rutabaga_gfx crate, whose build script asks pkg-config for virglrenderer.

use std::fs;

use crate::apt::{self, Need};
use crate::cache::Cache;
use crate::dist::Workspace;
use crate::error::{Error, IoContext};
use crate::tools::Tool;
use crate::ui::Ui;

/// Its manifest, from the workspace's root.
pub const MANIFEST: &str = "tests/rutabaga/Cargo.toml";

/// What its build needs.
const PKG_CONFIG: &[Need] = &[Need::Program("pkg-config", "pkg-config")];

/// The run of its tests, with our renderer in the place of the library that it asks for.
pub fn test(workspace: &Workspace, cache: &Cache, ui: &Ui) -> Result<Tool, Error> {
    apt::ensure(cache, ui, PKG_CONFIG)?;
    let dist = workspace.dist();
    // The name that linkers look for.
    let link = dist.join("libvirglrenderer.so");
    if !link.exists() {
        std::os::unix::fs::symlink("libvirglrenderer.so.1", &link).at("create", &link)?;
    }
    let description = dist.join("virglrenderer.pc");
    let text = format!(
        "Name: virglrenderer\nDescription: apir in its place\nVersion: 1.3.0\n\
         Cflags: -DVIRGL_RENDERER_UNSTABLE_APIS\nLibs: -L{} -lvirglrenderer\n",
        dist.display()
    );
    fs::write(&description, text).at("write", &description)?;
    Ok(workspace
        .cargo("rutabaga")
        .args(["test", "--no-fail-fast", "--manifest-path", MANIFEST])
        .env("CARGO_TARGET_DIR", workspace.target("rutabaga"))
        .env("PKG_CONFIG_PATH", &dist)
        .env("LD_LIBRARY_PATH", &dist))
}
