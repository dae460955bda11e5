//! ggml's CPU backend with its assertions and under AddressSanitizer, so that a kernel that goes astray is noticed where it does.

use std::fs;
use std::path::PathBuf;

use crate::apt;
use crate::cache::Cache;
use crate::error::{Error, IoContext};
use crate::peers;
use crate::tools::Tool;
use crate::ui::{Ui, Unit};

/// The folder of this build in the cache.
const FOLDER: &str = "peers/ggml-sanitized";

/// The assertions that are kept.
const ASSERT_HEADER: &str = include_str!("assert.h");

/// Stands for the folder of [`ASSERT_HEADER`] in [`FLAGS`].
const INCLUDE: &str = "INCLUDE";

/// For the compilers. The fuzz targets bring the sanitizer's runtime, so that the libraries must not link one.
const FLAGS: &str = "-O2 -g1 -UNDEBUG -fsanitize=address -IINCLUDE";

/// Only ggml, without code for this processor only, and without threads that a sanitizer cannot follow.
const OPTIONS: &[&str] = &[
    "-DCMAKE_BUILD_TYPE=RelWithDebInfo",
    "-DCMAKE_SHARED_LINKER_FLAGS=-fno-sanitize=address",
    "-DCMAKE_MODULE_LINKER_FLAGS=-fno-sanitize=address",
    "-DLLAMA_BUILD_NUMBER=11434",
    "-DLLAMA_BUILD_COMMIT=b11434",
    "-DGGML_BACKEND_DL=ON",
    "-DGGML_CPU_ALL_VARIANTS=OFF",
    "-DGGML_NATIVE=OFF",
    "-DGGML_OPENMP=OFF",
    "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
];

/// Where libggml-cpu.so will be.
pub fn folder(cache: &Cache) -> PathBuf {
    cache.path(FOLDER).join("build/bin")
}

/// Builds it when it is not there yet.
pub fn ensure(cache: &Cache, ui: &Ui) -> Result<(), Error> {
    let step = "ggml-sanitized";
    if !folder(cache).join("libggml-cpu.so").is_file() {
        cache.forget(step)?;
    }
    peers::source_tree(cache, ui)?;
    let key = format!("{FLAGS} {} {ASSERT_HEADER}", OPTIONS.join(" "));
    cache.step(step, &key, || build(cache, ui))
}

fn build(cache: &Cache, ui: &Ui) -> Result<(), Error> {
    apt::ensure(cache, ui, apt::LLAMA_BUILD)?;
    let folder = cache.path(FOLDER);
    let include = folder.join("include");
    fs::create_dir_all(&include).at("create", &include)?;
    let header = include.join("assert.h");
    fs::write(&header, ASSERT_HEADER).at("write", &header)?;
    let flags = FLAGS.replace(INCLUDE, &include.display().to_string());
    let build = folder.join("build");
    Tool::new("cmake", &cache.log("ggml-sanitized-configure"))
        .arg("-S")
        .arg(peers::source_tree_path(cache))
        .arg("-B")
        .arg(&build)
        .args(["-G", "Ninja"])
        .args(OPTIONS)
        .args(["C", "CXX"].map(|language| format!("-DCMAKE_{language}_FLAGS_RELWITHDEBINFO={flags}")))
        .run()?;
    let bar = ui.bar("build ggml for fuzzing", Unit::Steps, 0);
    Tool::new("ninja", &cache.log("ggml-sanitized"))
        .arg("-C")
        .arg(&build)
        .args(["ggml-base", "ggml-cpu"])
        .run_lines(|line| {
            if let Some((done, total)) = peers::ninja_progress(line) {
                bar.set(done, total);
            }
        })?;
    bar.finish();
    Ok(())
}
