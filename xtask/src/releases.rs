//! Releases of ggml as package registries serve them: a folder each, named by its version, with `libggml-base.so` and `libggml-cpu.so`.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::cache::{self, Cache};
use crate::error::{Error, IoContext};
use crate::fetch::{Archive, Source, open_wheel};
use crate::glibc;
use crate::peers::{self, Llama};
use crate::python::Venv;
use crate::ui::Ui;

/// A release whose libraries, libllama among them, are in a Python wheel.
#[derive(Debug)]
struct Wheel {
    version: &'static str,
    archive: Archive,
}

/// The folder of the libraries in these wheels.
const INSIDE: &str = "llama_cpp_py_sync";

/// The oldest supported release, and the newest that a registry has.
const WHEELS: &[Wheel] = &[
    Wheel {
        version: "0.13.1",
        archive: Archive {
            source: Source::Wheel("llama-cpp-py-sync==0.9445"),
            file: "llama_cpp_py_sync-0.9445-1cpu-py3-none-manylinux2014_x86_64.whl",
            bytes: 3_653_352,
            sha256: "edae7f3bc389dc8dfc8793d74e4eea21d7854f3b277f7f60608b18de2908cc5a",
        },
    },
    Wheel {
        version: "0.27.0",
        archive: Archive {
            source: Source::Wheel("llama-cpp-py-sync==0.11739"),
            file: "llama_cpp_py_sync-0.11739-1cpu-py3-none-manylinux2014_x86_64.whl",
            bytes: 5_486_572,
            sha256: "c97dd32b41841ab779172f9d20616cc915a73045ae5dca4b81051e6cd2751714",
        },
    },
];

/// Where the folders are, once made.
pub fn folder(cache: &Cache) -> PathBuf {
    cache.path("peers/releases")
}

/// Makes the folders: the wheels' releases, the prebuilt one of backend API 2, and `llama`'s, whose libraries must be built.
pub fn ensure(cache: &Cache, ui: &Ui, llama: &Llama) -> Result<(), Error> {
    let folder = folder(cache);
    for wheel in WHEELS {
        let to = folder.join(wheel.version);
        if !to.join("libggml-base.so").is_file() {
            let archive = wheel.archive.fetch(cache, ui)?;
            take_libraries(cache, ui, &archive, &to)?;
        }
    }
    peers::ggml_api2(cache, ui)?;
    let api2 = peers::ggml_api2_path(cache);
    let api2_names = [
        ("libggml-cpu.so", "libggml-cpu-x64.so"),
        ("libggml.so", "libggml.v0.5.0.so"),
        ("libllama.so", "libllama.v0.5.0.so"),
    ];
    link(cache, &folder.join("0.25.1"), &api2, &api2_names)?;
    // Its libllama is built later.
    link(cache, &folder.join("0.26.0"), &llama.bin, &[("libllama.so", "libllama.so")])
}

/// Takes the libraries out of a wheel and gives them the names that programs link.
fn take_libraries(cache: &Cache, ui: &Ui, wheel: &Path, to: &Path) -> Result<(), Error> {
    let unpacked = open_wheel(cache, &Venv::ensure(cache, ui)?, wheel)?;
    let inside = unpacked.path().join(INSIDE);
    let scratch = cache.scratch()?;
    let made = scratch.path().join("release");
    fs::create_dir(&made).at("create", &made)?;
    for name in ["libggml-base", "libggml-cpu", "libggml-rpc", "libggml", "libllama"] {
        // Wheels have no links: the same file is there under each of its names.
        let known = [format!("{name}.so.0"), format!("{name}.so")];
        let Some(file) = known.iter().map(|file| inside.join(file)).find(|file| file.is_file()) else {
            continue;
        };
        let library = made.join(&known[0]);
        fs::rename(&file, &library).at("move into place", &library)?;
        glibc::use_older_names(&library)?;
        let plain = made.join(&known[1]);
        symlink(&known[0], &plain).at("create", &plain)?;
    }
    cache::put(&made, to)
}

/// A folder of links to the libraries in another: each under its own name, and some under the usual one too.
fn link(cache: &Cache, to: &Path, libraries: &Path, renamed: &[(&str, &str)]) -> Result<(), Error> {
    let scratch = cache.scratch()?;
    let made = scratch.path().join("release");
    fs::create_dir(&made).at("create", &made)?;
    let entries = fs::read_dir(libraries).at("list", libraries)?.flatten();
    let found = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut links: BTreeMap<String, String> =
        found.filter(|name| name.contains(".so")).map(|name| (name.clone(), name)).collect();
    links.extend(renamed.iter().map(|(name, file)| (name.to_string(), file.to_string())));
    for (name, file) in links {
        let (path, target) = (made.join(name), libraries.join(file));
        symlink(&target, &path).at("create", &path)?;
    }
    cache::put(&made, to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_links_has_the_usual_names_and_the_own_ones() {
        let (root, libraries) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for file in ["libggml-cpu-x64.so", "libggml-base.so.0", "program"] {
            fs::write(libraries.path().join(file), file).unwrap();
        }
        let cache = Cache::at(root.path().to_owned()).unwrap();
        let to = cache.path("release");
        link(&cache, &to, libraries.path(), &[("libggml-cpu.so", "libggml-cpu-x64.so")]).unwrap();
        let read = |name: &str| fs::read_to_string(to.join(name)).ok();
        assert_eq!(read("libggml-cpu.so").as_deref(), Some("libggml-cpu-x64.so"));
        assert_eq!(read("libggml-cpu-x64.so"), read("libggml-cpu.so"));
        assert!(read("libggml-base.so.0").is_some() && read("program").is_none());
    }
}
