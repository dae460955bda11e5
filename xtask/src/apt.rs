//! Debian packages: what is missing is installed when that is possible, and named when it is not.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

use crate::cache::Cache;
use crate::error::Error;
use crate::tools::{self, Tool};
use crate::ui::Ui;

/// Something a step needs on this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// A program in PATH, and the package that has it.
    Program(&'static str, &'static str),
    /// A Python module, and the package that has it.
    PythonModule(&'static str, &'static str),
    /// A C header under /usr/include, and the package that has it.
    Header(&'static str, &'static str),
    /// Any other file, and the package that has it.
    File(&'static str, &'static str),
}

/// What downloading needs: Python with virtual environments.
pub const PYTHON: &[Need] =
    &[Need::Program("python3", "python3"), Need::PythonModule("ensurepip", "python3-venv")];

/// What building llama.cpp needs.
pub const LLAMA_BUILD: &[Need] = &[
    Need::Program("cmake", "cmake"),
    Need::Program("ninja", "ninja-build"),
    Need::Program("g++", "g++"),
    Need::Program("tar", "tar"),
];

/// What fetching and unpacking an npm package needs.
pub const NPM: &[Need] = &[Need::Program("npm", "npm"), Need::Program("tar", "tar")];

/// A Vulkan that computes on the processor: its loader and Mesa's lavapipe.
pub const VULKAN: &[Need] = &[
    Need::File("/usr/lib/x86_64-linux-gnu/libvulkan.so.1", "libvulkan1"),
    Need::File("/usr/share/vulkan/icd.d/lvp_icd.x86_64.json", "mesa-vulkan-drivers"),
];

/// What the tests compile on their own.
pub const C_COMPILER: &[Need] = &[Need::Program("gcc", "gcc"), Need::Program("g++", "g++")];

static TURN: Mutex<()> = Mutex::new(());

/// Installs what is missing of `needs`.
pub fn ensure(cache: &Cache, ui: &Ui, needs: &[Need]) -> Result<(), Error> {
    // Only one of the threads that prepare peers may run apt.
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let missing: Vec<Need> = needs.iter().copied().filter(|need| !need.is_met()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let packages: Vec<&str> = missing.iter().map(|need| need.package()).collect();
    let refused = |why| Error::Packages {
        missing: missing.iter().map(|need| need.name()).collect::<Vec<_>>().join(", "),
        packages: packages.join(" "),
        why,
    };
    if tools::find("apt-get").is_none() {
        return Err(refused("this system has no apt-get"));
    }
    if !nix::unistd::geteuid().is_root() {
        return Err(refused("installing them needs root"));
    }
    ui.line(&format!("installing {}", packages.join(" ")));
    Tool::new("apt-get", &cache.log("apt-update")).arg("update").run()?;
    Tool::new("apt-get", &cache.log("apt-install"))
        .args(["install", "--yes", "--no-install-recommends"])
        .args(&packages)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .run()?;
    match missing.iter().all(|need| need.is_met()) {
        true => Ok(()),
        false => Err(refused("apt-get installed them, but they are still not found")),
    }
}

impl Need {
    fn is_met(&self) -> bool {
        match self {
            Need::Program(program, _) => tools::find(program).is_some(),
            Need::PythonModule(module, _) => Command::new("python3")
                .args(["-c", &format!("import {module}")])
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status()
                .is_ok_and(|status| status.success()),
            Need::Header(header, _) => Path::new("/usr/include").join(header).is_file(),
            Need::File(path, _) => Path::new(path).is_file(),
        }
    }

    fn name(&self) -> &'static str {
        match self {
            Need::Program(name, _)
            | Need::PythonModule(name, _)
            | Need::Header(name, _)
            | Need::File(name, _) => name,
        }
    }

    fn package(&self) -> &'static str {
        match self {
            Need::Program(_, package)
            | Need::PythonModule(_, package)
            | Need::Header(_, package)
            | Need::File(_, package) => package,
        }
    }
}
