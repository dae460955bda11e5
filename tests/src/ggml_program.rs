//! Running `ggml-program`: a process of its own, since variables and loading modes are a process's.
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::Value;

use crate::error::{Error, check};
use crate::ggml::Visibility;
use crate::peers::Dist;
use crate::program::{Output, Program, Running};

/// How long one run may take.
pub const LIMIT: Duration = Duration::from_secs(120);

/// A program that loads ggml from a folder and our backend.
#[derive(Debug, Clone)]
pub struct GgmlProgram {
    program: PathBuf,
    ggml: PathBuf,
    guest: PathBuf,
    visibility: Visibility,
    cpu: Option<PathBuf>,
    env: Vec<(OsString, OsString)>,
}

impl GgmlProgram {
    /// The program at `program`, with ggml's libraries in the folder `ggml`.
    pub fn new(program: &str, ggml: &Path, dist: &Dist) -> Self {
        Self {
            program: program.into(),
            ggml: ggml.to_owned(),
            guest: dist.guest(),
            visibility: Visibility::Local,
            cpu: None,
            env: Vec::new(),
        }
    }

    /// Opens ggml in this way.
    #[must_use]
    pub fn visibility(mut self, visibility: Visibility) -> Self {
        self.visibility = visibility;
        self
    }

    /// Loads this file as our backend.
    #[must_use]
    pub fn guest(mut self, library: &Path) -> Self {
        self.guest = library.to_owned();
        self
    }

    /// Falls back to this local backend.
    #[must_use]
    pub fn cpu(mut self, library: &Path) -> Self {
        self.cpu = Some(library.to_owned());
        self
    }

    /// Sets environment variables.
    #[must_use]
    pub fn envs(mut self, pairs: impl IntoIterator<Item = (OsString, OsString)>) -> Self {
        self.env.extend(pairs);
        self
    }

    /// The command line that does `work`.
    pub fn command(&self, work: &[&str]) -> Program {
        let mut program =
            Program::new(&self.program).arg("--ggml").arg(&self.ggml).arg("--guest").arg(&self.guest);
        if self.visibility == Visibility::Global {
            program = program.arg("--global");
        }
        if let Some(cpu) = &self.cpu {
            program = program.arg("--cpu").arg(cpu);
        }
        // GGML_BACKEND_PATH is for programs that load every backend, which this one does not.
        program.args(work).envs(self.env.iter().cloned())
    }

    /// Does `work` to its end, which must be a success.
    pub fn run(&self, work: &[&str]) -> Result<Output, Error> {
        self.command(work).run(LIMIT)?.success()
    }
}

/// Waits until the program tells an event.
pub fn wait_for_event(running: &Running, name: &str, limit: Duration) -> Result<Value, Error> {
    running.wait_for(&format!("tell {name:?}"), limit, |text| find(text, name))
}

/// The event of this name that a program told.
pub fn event(output: &Output, name: &str) -> Result<Value, Error> {
    find(&output.stdout, name)
        .ok_or_else(|| Error::Unexpected(format!("{} told no {name:?}:\n{}", output.name, output.stdout)))
}

/// The warnings and errors among ggml's messages, without the level.
pub fn warnings(output: &Output) -> Vec<String> {
    let level = |line: &str| line.strip_prefix("log 3 ").or(line.strip_prefix("log 4 ")).map(str::to_owned);
    output.stderr.lines().filter_map(level).collect()
}

/// Fails unless our device was found and has done the work.
pub fn check_remote(output: &Output) -> Result<(), Error> {
    let loaded = event(output, "loaded")?;
    let device = &loaded["devices"][0];
    check(device["name"] == "[virtgpu] CPU", || format!("the device is {device}"))?;
    check(device["kind"] == 1, || format!("the device is no GPU: {device}"))?;
    let memory = |key: &str| device[key].as_u64().unwrap_or(0);
    check(memory("total") > 0 && memory("free") <= memory("total"), || format!("memory of {device}"))?;
    let computed = event(output, "computed")?;
    check(computed["device"] == device["name"], || format!("another device computed: {computed}"))?;
    check(computed["supported"] == true, || format!("the device refuses its own graph: {computed}"))?;
    let buffer = computed["buffer"].as_str().unwrap_or("");
    check(buffer.starts_with("[virtgpu] "), || format!("the buffer is {buffer:?}"))
}

fn find(text: &str, name: &str) -> Option<Value> {
    text.lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .find(|event| event["event"] == name)
}
