//! Cargo's subcommands that come from crates.io, installed into the cache at pinned versions.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::cache::Cache;
use crate::dist::Workspace;
use crate::error::Error;
use crate::ui::Ui;

/// A crate that holds a subcommand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subcommand {
    /// The crate, which is also the program's name.
    pub name: &'static str,
    /// Its version.
    pub version: &'static str,
}

fn folder(cache: &Cache) -> PathBuf {
    cache.path("cargo/bin")
}

/// PATH with the installed programs first.
pub fn path(cache: &Cache) -> Result<OsString, Error> {
    let others = std::env::var_os("PATH").unwrap_or_default();
    std::env::join_paths([folder(cache)].into_iter().chain(std::env::split_paths(&others)))
        .map_err(|error| Error::Check(format!("PATH cannot be extended: {error}")))
}

/// Installs one unless it is there.
pub fn ensure(workspace: &Workspace, cache: &Cache, ui: &Ui, subcommand: Subcommand) -> Result<(), Error> {
    let Subcommand { name, version } = subcommand;
    if !folder(cache).join(name).is_file() {
        cache.forget(name)?;
    }
    cache.step(name, version, || {
        ui.line(&format!("install {name} {version}"));
        workspace
            .cargo(name)
            .args(["install", name, "--version", version, "--locked", "--force", "--root"])
            .arg(cache.path("cargo"))
            .run()
    })
}
