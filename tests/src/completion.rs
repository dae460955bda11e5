//! Greedy completions by llama-completion, through the pair or on the local CPU, and what its log says about them.
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use crate::error::{Error, IoContext, unexpected};
use crate::peers::LlamaDir;
use crate::program::{Output, Program};
use crate::remote::Remote;

/// The prompt of the demo.
pub const PROMPT: &str = "The capital of France is";

/// How long one completion may take.
const LIMIT: Duration = Duration::from_secs(300);

/// How often a completion is run whose output is cut off.
const TRIES: usize = 5;

/// A completion to be run.
#[derive(Debug, Clone)]
pub struct Request {
    /// The program.
    pub program: PathBuf,
    /// The model file.
    pub model: PathBuf,
    /// How many tokens to generate.
    pub tokens: u32,
}

/// What came of a completion.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// The prompt and what was generated.
    pub text: String,
    /// Tokens a second while generating.
    pub tokens_per_s: f64,
    /// How many decode steps that were.
    pub steps: u32,
    /// Layers on the device and layers in all.
    pub offloaded: Option<(u32, u32)>,
    /// The device that was used, by name, when there was one.
    pub device: Option<String>,
    /// The buffers that hold the model.
    pub model_buffers: Vec<ModelBuffer>,
    /// The library behind ggml's local CPU device.
    pub cpu_library: Option<PathBuf>,
}

/// One buffer that holds weights.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelBuffer {
    /// The name of its buffer type.
    pub name: String,
    /// Its size in MiB.
    pub mib: f64,
}

/// What the guest's library counted, cumulative over a process.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Stats {
    /// The device's name.
    pub device: String,
    /// The kind of link.
    pub transport: String,
    /// Commands sent.
    pub calls: u64,
    /// Bytes moved over the link, both ways.
    pub bytes: u64,
    /// Graphs computed.
    pub graph_computes: u64,
}

impl Request {
    /// A completion of the demo's prompt.
    pub fn new(llama: &LlamaDir, model: &Path, tokens: u32) -> Self {
        Self { program: llama.program("llama-completion"), model: model.to_owned(), tokens }
    }

    /// The command line for the pair.
    pub fn remote_command(&self, remote: &impl Remote) -> Program {
        self.command().args(["-ngl", "99"]).envs(remote.guest_env())
    }

    /// Runs on the remote device; with the counters of the guest's library.
    pub fn run_remote(&self, remote: &impl Remote) -> Result<(Completion, Stats), Error> {
        run_until_told(|| {
            let folder = remote.folder();
            let file = tempfile::NamedTempFile::new_in(folder).at("create a file in", folder)?;
            let env = vec![(OsString::from("APIR_STATS"), file.path().as_os_str().to_owned())];
            let output = remote.run(self.remote_command(remote).envs(env), LIMIT)?.success()?;
            Ok((parse_completion(&output)?, Stats::read(file.path())?))
        })
    }

    /// Runs on the remote device of a guest library that does not count.
    pub fn run_remote_uncounted(&self, remote: &impl Remote) -> Result<Completion, Error> {
        run_until_told(|| parse_completion(&remote.run(self.remote_command(remote), LIMIT)?.success()?))
    }

    /// Runs on the local CPU as the remote side computes: without repacked weights, which change the order of sums.
    pub fn run_local(&self) -> Result<Completion, Error> {
        run_until_told(|| {
            let output = self.command().args(["--device", "none", "--no-repack"]).run(LIMIT)?.success()?;
            parse_completion(&output)
        })
    }

    fn command(&self) -> Program {
        // Room for the prompt; the default context would spend more time on clearing memory than on the tokens.
        let context = (self.tokens + 64).next_multiple_of(256).max(512);
        Program::new(&self.program)
            .arg("-m")
            .arg(&self.model)
            .args(["-p", PROMPT, "-n", &self.tokens.to_string(), "-c", &context.to_string()])
            .args([
                "--temp",
                "0",
                "--seed",
                "1",
                "-t",
                "1",
                "--no-conversation",
                "--no-warmup",
                "--simple-io",
            ])
            .args(["--fit", "off", "--log-verbosity", "4", "--log-colors", "off"])
    }
}

impl Completion {
    /// Fails unless every layer of the model is on a device whose buffers are the pair's.
    pub fn check_all_remote(&self) -> Result<(), Error> {
        match self.offloaded {
            Some((on_device, all)) if on_device == all && all > 0 => (),
            found => {
                return unexpected(format!("not every layer is on the remote device: offloaded {found:?}"));
            }
        }
        if !self.model_buffers.iter().any(|buffer| buffer.name.starts_with("[virtgpu]") && buffer.mib > 0.0) {
            return unexpected(format!("no weights lie on [virtgpu]: {:?}", self.model_buffers));
        }
        Ok(())
    }
}

/// Runs again when the end of the output is missing: llama.cpp's programs print on a thread of their own, and a run of a few
/// milliseconds now and then ends before that thread has printed all. A completion's speed comes after the text, so it
/// shows whether the text is whole.
pub(crate) fn run_until_told<T>(mut run: impl FnMut() -> Result<T, Error>) -> Result<T, Error> {
    for _ in 1..TRIES {
        match run() {
            Err(Error::OutputCut { .. }) => continue,
            result => return result,
        }
    }
    run()
}

fn parse_completion(output: &Output) -> Result<Completion, Error> {
    let log = &output.stderr;
    let (steps, tokens_per_s) = log
        .lines()
        .find_map(parse_eval_time)
        .ok_or_else(|| Error::OutputCut { program: output.name.clone(), wanted: "eval time" })?;
    Ok(Completion {
        text: output.stdout.trim_end().to_owned(),
        tokens_per_s,
        steps,
        offloaded: log.lines().filter_map(parse_offloaded).next_back(),
        device: log.lines().find_map(parse_device),
        model_buffers: log.lines().filter_map(parse_model_buffer).collect(),
        cpu_library: log
            .lines()
            .find_map(|line| line.split_once("loaded CPU backend from "))
            .map(|(_, path)| PathBuf::from(path.trim())),
    })
}

impl Stats {
    /// What a program left in the file of `APIR_STATS`.
    pub fn read(path: &Path) -> Result<Self, Error> {
        parse_stats(&fs::read_to_string(path).at("read", path)?)
    }
}

/// The last line of the counters, which are cumulative.
fn parse_stats(text: &str) -> Result<Stats, Error> {
    let line = text.lines().rfind(|line| !line.trim().is_empty());
    let line = line
        .ok_or_else(|| Error::Unexpected("the guest's library wrote no counters to APIR_STATS".to_owned()))?;
    serde_json::from_str(line)
        .map_err(|error| Error::Unexpected(format!("not a line of counters: {line}: {error}")))
}

/// `… eval time = 323.61 ms / 31 runs ( 10.44 ms per token, 95.79 tokens per second)`, not the prompt's.
fn parse_eval_time(line: &str) -> Option<(u32, f64)> {
    let (before, after) = line.split_once("eval time =")?;
    if before.trim_end().ends_with("prompt") {
        return None;
    }
    let steps = after.split_once('/')?.1.split_whitespace().next()?.parse().ok()?;
    let speed = after.rsplit_once(',')?.1.split_whitespace().next()?.parse().ok()?;
    Some((steps, speed))
}

/// `load_tensors: offloaded 31/31 layers to GPU`.
fn parse_offloaded(line: &str) -> Option<(u32, u32)> {
    let (done, all) = line.split_once("offloaded ")?.1.split_once(" layers")?.0.split_once('/')?;
    Some((done.parse().ok()?, all.parse().ok()?))
}

/// `… using device [virtgpu] CPU (AMD …) - 23000 MiB free`.
fn parse_device(line: &str) -> Option<String> {
    Some(line.split_once("using device ")?.1.split_once(" (")?.0.trim().to_owned())
}

/// `load_tensors: [virtgpu] CPU model buffer size = 92.10 MiB`.
fn parse_model_buffer(line: &str) -> Option<ModelBuffer> {
    let (name, size) = line.split_once("load_tensors:")?.1.split_once("model buffer size =")?;
    let mib = size.trim().strip_suffix("MiB")?.trim().parse().ok()?;
    Some(ModelBuffer { name: name.trim().to_owned(), mib })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_lines() {
        let eval = "0.00.61 I common_perf_print:        eval time =     323.61 ms /    31 runs   (   10.44 ms per token,    95.79 tokens per second)";
        assert_eq!(parse_eval_time(eval), Some((31, 95.79)));
        let prompt = "0.00.61 I common_perf_print: prompt eval time =      31.45 ms /     5 tokens (    6.29 ms per token,   158.99 tokens per second)";
        assert_eq!(parse_eval_time(prompt), None);
        assert_eq!(parse_offloaded("0.1 I load_tensors: offloaded 31/31 layers to GPU"), Some((31, 31)));
        assert_eq!(
            parse_model_buffer("0.1 I load_tensors:   CPU_Mapped model buffer size =    92.10 MiB"),
            Some(ModelBuffer { name: "CPU_Mapped".to_owned(), mib: 92.10 })
        );
        assert_eq!(
            parse_device("I llama_prepare: using device [virtgpu] CPU (Some CPU) (unknown id) - 9 MiB free"),
            Some("[virtgpu] CPU".to_owned())
        );
    }

    #[test]
    fn only_a_cut_output_is_run_again() {
        let cut = || Error::OutputCut { program: "p".to_owned(), wanted: "w" };
        let mut results = vec![Ok(3), Err(cut())];
        assert_eq!(run_until_told(|| results.pop().unwrap()).unwrap(), 3);
        let mut runs = 0;
        let mut count = |error: fn() -> Error| {
            runs = 0;
            let _ = run_until_told::<()>(|| {
                runs += 1;
                Err(error())
            });
            runs
        };
        assert_eq!(count(|| Error::OutputCut { program: "p".to_owned(), wanted: "w" }), TRIES);
        assert_eq!(count(|| Error::Unexpected("x".to_owned())), 1);
    }

    #[test]
    fn the_last_line_of_counters_counts() {
        let line = |calls| {
            format!(
                "{{\"device\":\"d\",\"transport\":\"socket\",\"calls\":{calls},\"bytes\":2,\"graph_computes\":3}}\n"
            )
        };
        assert_eq!(parse_stats(&(line(1) + &line(7))).unwrap().calls, 7);
        assert!(parse_stats("").unwrap_err().to_string().contains("APIR_STATS"));
    }
}
