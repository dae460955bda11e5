//! Building our own libraries and program, and giving them the names that others load them by.

use std::fs;
use std::path::{Path, PathBuf};

use crate::cache;
use crate::error::{Error, IoContext};
use crate::tools::Tool;
use crate::ui::{Ui, Unit};

/// Cargo's file name and the real one.
const ARTEFACTS: &[(&str, &str)] = &[
    ("apir", "apir"),
    ("libggml_virtgpu.so", "libggml-virtgpu.so"),
    ("libggml_virtgpu_backend.so", "libggml-virtgpu-backend.so"),
    ("libvirglrenderer.so", "libvirglrenderer.so.1"),
];

/// The workspace that is worked on.
#[derive(Debug, Clone)]
pub struct Workspace {
    /// Its root folder.
    pub root: PathBuf,
    target: PathBuf,
}

impl Workspace {
    /// The workspace that this xtask belongs to.
    pub fn find() -> Result<Self, Error> {
        let manifest = std::env::var_os("CARGO_MANIFEST_DIR")
            .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
        let root = manifest.parent().unwrap_or(&manifest).to_owned();
        let target = match std::env::var_os("CARGO_TARGET_DIR") {
            Some(folder) => std::path::absolute(&folder).at("resolve", Path::new(&folder))?,
            None => root.join("target"),
        };
        Ok(Self { root, target })
    }

    /// The folder of the artefacts under their real names.
    pub fn dist(&self) -> PathBuf {
        self.target.join("dist")
    }

    /// A folder for what is built beside the workspace.
    pub fn target(&self, name: &str) -> PathBuf {
        self.target.join(name)
    }

    /// The log file of a step on this workspace.
    pub fn log(&self, step: &str) -> PathBuf {
        self.target.join("xtask-logs").join(format!("{step}.log"))
    }

    /// A cargo command on this workspace.
    pub fn cargo(&self, step: &str) -> Tool {
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        Tool::new(cargo, &self.log(step)).dir(&self.root)
    }

    /// Builds the artefacts in release mode and puts them into [`Workspace::dist`].
    pub fn build_dist(&self, ui: &Ui) -> Result<PathBuf, Error> {
        let bar = ui.bar("build apir and its libraries", Unit::Items, 0);
        let mut built = 0;
        self.cargo("dist")
            .args([
                "build",
                "--release",
                "-p",
                "apir",
                "-p",
                "apir-guest",
                "-p",
                "apir-host",
                "-p",
                "apir-renderer",
            ])
            .run_lines(|line| {
                if line.trim_start().starts_with("Compiling") {
                    built += 1;
                    bar.set(built, 0);
                }
            })?;
        bar.finish();
        let dist = self.dist();
        fs::create_dir_all(&dist).at("create", &dist)?;
        for (from, to) in ARTEFACTS {
            let from = self.target.join("release").join(from);
            let part = dist.join(format!(".{to}.part"));
            fs::copy(&from, &part).at("copy", &from)?;
            // By rename, since a running program may have the old file mapped.
            cache::put(&part, &dist.join(to))?;
        }
        Ok(dist)
    }
}
