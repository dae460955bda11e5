//! A guest program that uses the host's own renderers.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::VmDir;
use crate::error::{Error, IoContext};
use crate::program::Program;

const SOURCE: &str = include_str!("contexts.c");

/// Compiles the program that holds a Venus and a virgl context at once, for the kernel of `dir`; its argument is how
/// many rounds of commands it sends to each.
///
/// # Errors
/// It does not compile.
pub fn contexts_program(folder: &Path, dir: &VmDir) -> Result<PathBuf, Error> {
    let (program, source) = (folder.join("contexts"), folder.join("contexts.c"));
    fs::write(&source, SOURCE).at("write", &source)?;
    Program::new(Path::new("gcc"))
        .args(["-O2", "-Wall", "-I"])
        .arg(dir.kernel_tree().join("usr/include"))
        .arg("-o")
        .arg(&program)
        .arg(&source)
        .run(Duration::from_secs(60))?
        .success()?;
    Ok(program)
}
