//! The virtual environment that holds the download client, and what writes models.

use std::path::PathBuf;

use crate::apt;
use crate::cache::Cache;
use crate::error::Error;
use crate::tools::Tool;
use crate::ui::Ui;

/// What is installed in it.
const PACKAGES: &[&str] = &["unearth==0.19.0", "gguf==0.19.0"];

/// A Python with its own packages, in the cache.
#[derive(Debug, Clone)]
pub struct Venv {
    bin: PathBuf,
}

impl Venv {
    /// Makes it, or takes the one that is there.
    pub fn ensure(cache: &Cache, ui: &Ui) -> Result<Self, Error> {
        let root = cache.path("venv");
        let venv = Self { bin: root.join("bin") };
        cache.step("venv", &PACKAGES.join(" "), || {
            apt::ensure(cache, ui, apt::PYTHON)?;
            if !venv.program("pip").is_file() {
                Tool::new("python3", &cache.log("venv")).args(["-m", "venv", "--clear"]).arg(&root).run()?;
            }
            let log = cache.log("pip");
            Tool::new(venv.program("pip"), &log).args(["install", "--quiet"]).args(PACKAGES).run()
        })?;
        Ok(venv)
    }

    /// A program of the environment.
    pub fn program(&self, name: &str) -> PathBuf {
        self.bin.join(name)
    }
}
