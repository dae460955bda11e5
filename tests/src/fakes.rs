//! Libraries that are not what they should be, or do what a program does not.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Error, IoContext};
use crate::peers::LlamaDir;
use crate::program::Program;

/// No symbol that anybody asks for.
const EMPTY: &str = "int apir_tests_nothing;";

/// ggml's CPU backend as a GPU.
const GPU: &str = include_str!("fakes/gpu.c");

/// ggml's CPU backend with other numbers.
const SHIFTED: &str = include_str!("fakes/shifted.c");

/// A plugin that answers noise.
const RUBBISH: &str = include_str!("fakes/rubbish.c");

/// A ggml backend of a version that nobody knows yet.
const FUTURE: &str = include_str!("fakes/future.c");

/// Backends loaded at a program's start.
const LOAD_ALL: &str = include_str!("fakes/load_all.c");

/// A file that is no library.
pub fn text_file(folder: &Path) -> Result<PathBuf, Error> {
    let path = folder.join("libtext.so");
    fs::write(&path, "This is no library.\n").at("write", &path)?;
    Ok(path)
}

/// A library that needs ggml's base as backends do, but has no registration symbol.
pub fn empty_library(folder: &Path, llama: &LlamaDir) -> Result<PathBuf, Error> {
    compile(folder, "libempty.so", EMPTY, llama)
}

/// A backend library whose registry says backend API 99.
pub fn future_library(folder: &Path, llama: &LlamaDir) -> Result<PathBuf, Error> {
    compile(folder, "libfuture.so", FUTURE, llama)
}

/// ggml's CPU backend as a GPU, for ggml's own headers in `source` and its libraries. It has the fault that the variable
/// APIR_TEST_FAULT names, if that is set.
pub fn gpu_library(folder: &Path, llama: &LlamaDir, source: &Path) -> Result<PathBuf, Error> {
    let headers = ["ggml/include", "ggml/src"].map(|inside| format!("-I{}", source.join(inside).display()));
    compile_with(folder, "libgpu.so", GPU, llama, &[&headers[0], &headers[1], "-l:libggml-cpu.so"])
}

/// ggml's CPU backend as ggml 0.28.0 may number things: an operation, a map and a unit are inserted.
pub fn shifted_library(folder: &Path, llama: &LlamaDir, source: &Path) -> Result<PathBuf, Error> {
    let headers = ["ggml/include", "ggml/src"].map(|inside| format!("-I{}", source.join(inside).display()));
    compile_with(folder, "libshifted.so", SHIFTED, llama, &[&headers[0], &headers[1], "-l:libggml-cpu.so"])
}

/// An APIR plugin that answers every command with success and noise.
pub fn rubbish_plugin(folder: &Path, llama: &LlamaDir) -> Result<PathBuf, Error> {
    compile(folder, "librubbish.so", RUBBISH, llama)
}

/// What loads every backend into a program that does not, when `LD_PRELOAD` names it.
pub fn loading_library(folder: &Path, llama: &LlamaDir) -> Result<PathBuf, Error> {
    compile_with(folder, "libload.so", LOAD_ALL, llama, &["-lggml"])
}

fn compile(folder: &Path, name: &str, source: &str, llama: &LlamaDir) -> Result<PathBuf, Error> {
    compile_with(folder, name, source, llama, &[])
}

fn compile_with(
    folder: &Path,
    name: &str,
    source: &str,
    llama: &LlamaDir,
    options: &[&str],
) -> Result<PathBuf, Error> {
    let library = folder.join(name);
    let text = library.with_extension("c");
    fs::write(&text, source).at("write", &text)?;
    let ggml = llama.path().display();
    Program::new(Path::new("gcc"))
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .arg(&text)
        .args(["-Wl,--no-as-needed", &format!("-Wl,-rpath,{ggml}"), &format!("-L{ggml}"), "-lggml-base"])
        .args(options)
        .run(Duration::from_secs(60))?
        .success()?;
    Ok(library)
}
