//! Sentence embeddings by llama-embedding, through the pair or on the local CPU.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::completion::Stats;
use crate::error::{Error, IoContext, check};
use crate::peers::LlamaDir;
use crate::program::Program;
use crate::remote::Remote;

/// What is embedded, one sentence a line.
const SENTENCES: &str = "A cat sat on the mat.\nThe capital of France is Paris.\nOwnership is a discipline.";

/// How long one run may take.
const LIMIT: Duration = Duration::from_secs(120);

/// Sentences to be embedded.
#[derive(Debug, Clone)]
pub struct Embedding {
    program: PathBuf,
    model: PathBuf,
}

impl Embedding {
    /// The sentences by this model.
    pub fn new(llama: &LlamaDir, model: &Path) -> Self {
        Self { program: llama.program("llama-embedding"), model: model.to_owned() }
    }

    /// The vectors as the remote device computes them, as text; fails when the device computed nothing.
    pub fn run_remote(&self, remote: &impl Remote) -> Result<String, Error> {
        let folder = remote.folder();
        let file = tempfile::NamedTempFile::new_in(folder).at("create a file in", folder)?;
        let program = self.command().args(["-ngl", "99"]).envs(remote.guest_env());
        let output = remote.run(program.env("APIR_STATS", file.path()), LIMIT)?.success()?;
        let stats = Stats::read(file.path())?;
        check(stats.graph_computes > 0, || format!("nothing was computed remotely: {stats:?}"))?;
        Ok(output.stdout)
    }

    /// The vectors as the local CPU computes them, as the remote side does: without repacked weights.
    pub fn run_local(&self) -> Result<String, Error> {
        let output = self.command().args(["--device", "none", "--no-repack"]).run(LIMIT)?.success()?;
        Ok(output.stdout)
    }

    fn command(&self) -> Program {
        Program::new(&self.program).arg("-m").arg(&self.model).args([
            "-p",
            SENTENCES,
            "--embd-output-format",
            "array",
            "-t",
            "1",
        ])
    }
}
