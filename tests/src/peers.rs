//! Where the pieces under test and their peers are. `cargo xtask test` says so through the environment.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{Error, IoContext};

/// The folder with our own pieces under their real names.
#[derive(Debug, Clone)]
pub struct Dist(PathBuf);

/// The folder of a llama.cpp: its programs, its ggml libraries, and upstream's own plugin.
#[derive(Debug, Clone)]
pub struct LlamaDir(PathBuf);

/// The folder of the models.
#[derive(Debug, Clone)]
pub struct Models(PathBuf);

impl Dist {
    /// The folder that `APIR_DIST` names.
    pub fn from_env() -> Result<Self, Error> {
        folder("APIR_DIST", "the folder with apir, libggml-virtgpu.so and libggml-virtgpu-backend.so")
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

    /// The program `apir`.
    pub fn apir(&self) -> PathBuf {
        self.0.join("apir")
    }

    /// The guest's library.
    pub fn guest(&self) -> PathBuf {
        self.0.join("libggml-virtgpu.so")
    }

    /// The host's plugin.
    pub fn plugin(&self) -> PathBuf {
        self.0.join("libggml-virtgpu-backend.so")
    }
}

impl LlamaDir {
    /// The folder that `APIR_LLAMA_DIR` names.
    pub fn from_env() -> Result<Self, Error> {
        folder("APIR_LLAMA_DIR", "the folder with llama.cpp's programs and libraries").map(Self)
    }

    /// This folder.
    pub fn at(folder: &Path) -> Self {
        Self(folder.to_owned())
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A program of llama.cpp.
    pub fn program(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// ggml's CPU backend.
    pub fn cpu_library(&self) -> PathBuf {
        self.0.join("libggml-cpu.so")
    }

    /// Upstream's host plugin.
    pub fn upstream_plugin(&self) -> Result<PathBuf, Error> {
        let path = self.0.join("libggml-virtgpu-backend.so");
        match path.is_file() {
            true => Ok(path),
            false => Err(Error::Missing { path, what: "upstream's host plugin" }),
        }
    }
}

impl Models {
    /// The folder that `APIR_MODELS` names.
    pub fn from_env() -> Result<Self, Error> {
        folder("APIR_MODELS", "the folder with the models").map(Self)
    }

    /// The folder itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// SmolLM2-135M-Instruct.
    pub fn smollm2(&self) -> PathBuf {
        self.0.join("SmolLM2-135M-Instruct.Q4_1.gguf")
    }

    /// all-MiniLM-L6-v2.
    pub fn minilm(&self) -> PathBuf {
        self.0.join("all-MiniLM-L6-v2.F16.gguf")
    }

    /// The small random model.
    pub fn tiny(&self) -> PathBuf {
        self.0.join("tiny.gguf")
    }
}

/// The folder of llama.cpp's source tree, `APIR_LLAMA_SRC`.
pub fn llama_source() -> Result<PathBuf, Error> {
    folder("APIR_LLAMA_SRC", "the folder with llama.cpp's source tree")
}

/// The folder of prebuilt ggml libraries of backend API 2, `APIR_GGML_API2_DIR`.
pub fn ggml_api2() -> Result<PathBuf, Error> {
    folder("APIR_GGML_API2_DIR", "the folder with ggml libraries of backend API 2")
}

/// The folder of one release of ggml, such as `0.13.1`, in the folder that `APIR_GGML_RELEASES` names. It has `libggml-base.so`
/// and `libggml-cpu.so`, which [`registration`] tells how to ask.
pub fn ggml_release(version: &str) -> Result<PathBuf, Error> {
    let path =
        folder("APIR_GGML_RELEASES", "the folder with a folder for each release of ggml")?.join(version);
    match path.join("libggml-base.so").is_file() {
        true => Ok(path),
        false => Err(Error::Missing { path, what: "a release of ggml" }),
    }
}

/// ggml's Vulkan backend, in the folder that `APIR_VULKAN_DIR` names.
pub fn vulkan_library() -> Result<PathBuf, Error> {
    let path = folder("APIR_VULKAN_DIR", "the folder with ggml's Vulkan backend")?.join("libggml-vulkan.so");
    match path.is_file() {
        true => Ok(path),
        false => Err(Error::Missing { path, what: "ggml's Vulkan backend" }),
    }
}

/// ggml's CPU backend for any x86-64 processor in a folder that has one for each kind.
pub fn baseline_cpu_library(folder: &Path) -> Result<PathBuf, Error> {
    let path = folder.join("libggml-cpu-x64.so");
    match path.is_file() {
        true => Ok(path),
        false => Err(Error::Missing { path, what: "ggml's CPU backend" }),
    }
}

/// The registration function to ask of a CPU library: `None` for the usual one, which only libraries that were built to
/// be loaded at run time have.
pub fn registration(library: &Path) -> Result<Option<&'static str>, Error> {
    const OWN: &str = "ggml_backend_cpu_reg";
    let bytes = fs::read(library).at("read", library)?;
    let has = |symbol: &str| {
        let entry = format!("\0{symbol}\0");
        bytes.windows(entry.len()).any(|window| window == entry.as_bytes())
    };
    Ok((!has("ggml_backend_init") && has(OWN)).then_some(OWN))
}

pub(crate) fn folder(name: &'static str, meaning: &'static str) -> Result<PathBuf, Error> {
    let path = std::env::var_os(name).map(PathBuf::from).ok_or(Error::Environment { name, meaning })?;
    match path.is_dir() {
        true => Ok(path),
        false => Err(Error::Missing { path, what: meaning }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_linked_into_ggml_is_asked_for_its_own_function() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let with = |bytes: &str| {
            fs::write(file.path(), bytes).unwrap();
            registration(file.path()).unwrap()
        };
        assert_eq!(with("x\0ggml_backend_init\0ggml_backend_cpu_reg\0"), None);
        assert_eq!(with("x\0ggml_backend_cpu_reg\0y"), Some("ggml_backend_cpu_reg"));
        assert_eq!(with("x"), None);
    }
}
