//! `cargo xtask fuzz`: the targets of tests/fuzz under libFuzzer and AddressSanitizer, with ggml's CPU backend built for them.

mod ggml;

use std::ffi::OsString;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use serde::Serialize;

use crate::cache::Cache;
use crate::cargo_tools::{self, Subcommand};
use crate::dist::Workspace;
use crate::error::{Error, IoContext};
use crate::tools::Tool;
use crate::ui::{Ui, Unit};

/// A fuzz target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Its name.
    pub name: &'static str,
    /// The most bytes of an input.
    pub longest: u32,
    /// Whether it computes, with some number of threads.
    pub threaded: bool,
    /// How often one input is run to see a finding again: what comes of it may be a matter of time.
    again: u32,
}

/// All targets.
pub const TARGETS: [Target; 8] = [
    Target { name: "decoder", longest: 8192, threaded: false, again: 1 },
    Target { name: "graph", longest: 65_536, threaded: false, again: 1 },
    Target { name: "session", longest: 16_384, threaded: true, again: 100 },
    Target { name: "compute", longest: 32_768, threaded: true, again: 10 },
    Target { name: "mutants", longest: 512, threaded: true, again: 10 },
    Target { name: "race", longest: 1024, threaded: true, again: 1000 },
    Target { name: "socket", longest: 4096, threaded: false, again: 1 },
    Target { name: "differential", longest: 512, threaded: true, again: 10 },
];

/// Counts of the host's threads that the targets know.
const THREADS: [&str; 3] = ["1", "2", "4"];

/// The workspace of the targets.
const FOLDER: &str = "tests/fuzz";

/// Its manifest, from the workspace's root.
pub const MANIFEST: &str = "tests/fuzz/Cargo.toml";

/// The target folder of what runs on the stable toolchain.
const REPLAY: &str = "fuzz-replay";

/// What builds and runs them.
const CARGO_FUZZ: Subcommand = Subcommand { name: "cargo-fuzz", version: "0.13.2" };

/// How long one input may take, in seconds: the largest graphs are computed under a sanitizer, beside whatever else runs.
const INPUT_LIMIT: u32 = 30;

/// The most memory of a fuzzer, in MiB.
const MEMORY_LIMIT: u32 = 4096;

/// Options of the fuzzers.
#[derive(clap::Args)]
pub struct Options {
    /// Only this target [default: all, as many at once as there are processors]
    #[arg(value_parser = TARGETS.map(|target| target.name))]
    target: Option<String>,
    /// How long each target runs, with all its counts of threads together
    #[arg(long, default_value_t = 60)]
    seconds: u32,
    /// Run what computes with each of these numbers of threads of the host [default: each input chooses its own]
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', value_parser = THREADS)]
    threads: Vec<String>,
    /// Run the target on this one input, as after a finding
    #[arg(long, value_name = "FILE", requires = "target")]
    input: Option<PathBuf>,
    /// Print the results as one line of JSON at the end
    #[arg(long)]
    json: bool,
}

/// A run of a target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// The target.
    target: Target,
    /// How many threads of the host compute; without a number each input chooses its own.
    threads: Option<String>,
    /// How long it takes.
    seconds: u32,
}

/// What came of a run of a target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The target.
    pub target: &'static str,
    /// How many threads of the host computed, where they all did with the same number.
    pub threads: Option<String>,
    /// Inputs run.
    pub runs: u64,
    /// Seconds from start to end, those of loading the corpus among them.
    pub seconds: u64,
    /// Inputs a second.
    pub per_second: u64,
    /// Inputs of the corpus that each reach something of their own.
    pub corpus: u64,
    /// Edges of the code that they reach.
    pub edges: u64,
    /// What ended it before its time.
    pub finding: Option<Finding>,
}

/// An input that broke something.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// The lines that say what broke.
    pub what: String,
    /// Where the input was written to.
    pub input: Option<PathBuf>,
}

/// What the targets are built from and run with.
#[derive(Debug, Clone)]
pub struct Fuzzers {
    workspace: Workspace,
    ggml: PathBuf,
    path: OsString,
}

/// Runs it; `false` when an input was found that breaks something.
pub fn run(workspace: &Workspace, ui: &Ui, options: &Options) -> Result<bool, Error> {
    let fuzzers = {
        let cache = Cache::open()?;
        let _lock = cache.lock(ui)?;
        let fuzzers = Fuzzers::find(workspace, &cache)?;
        fuzzers.prepare(&cache, ui)?;
        fuzzers
    };
    workspace.build_dist(ui)?;
    fuzzers.build(ui)?;
    let wanted = |target: &Target| options.target.as_deref().is_none_or(|name| name == target.name);
    let runs = runs(wanted, &options.threads, options.seconds);
    let reports = match &options.input {
        Some(input) => runs.iter().map(|run| fuzzers.run_input(ui, run, input)).collect::<Result<_, _>>()?,
        None => fuzzers.run(ui, &runs)?,
    };
    if options.json {
        let json = serde_json::to_string(&reports).map_err(|error| Error::Check(error.to_string()))?;
        ui.result(&json);
    }
    Ok(reports.iter().all(|report| report.finding.is_none()))
}

/// The runs of targets, each target for so many seconds: what does not compute, and then each count in turn, so that runs of one target, which
/// share its corpus, are seldom side by side.
pub fn runs(wanted: impl Fn(&Target) -> bool, threads: &[String], seconds: u32) -> Vec<Run> {
    let targets =
        |threaded| TARGETS.into_iter().filter(move |target| target.threaded == threaded).filter(&wanted);
    let counts: Vec<_> = match threads {
        [] => vec![None],
        counts => counts.iter().cloned().map(Some).collect(),
    };
    let share = seconds / counts.len() as u32;
    let alone = targets(false).map(|target| Run { target, threads: None, seconds });
    let each = |threads: Option<String>| {
        targets(true).map(move |target| Run { target, threads: threads.clone(), seconds: share })
    };
    alone.chain(counts.into_iter().flat_map(each)).collect()
}

impl Run {
    /// Its name, of which logs are named.
    fn name(&self) -> String {
        let threads = self.threads.as_deref().map(|threads| format!("-{threads}")).unwrap_or_default();
        format!("fuzz-{}{threads}", self.target.name)
    }
}

impl Fuzzers {
    /// Where everything will be that [`Fuzzers::prepare`] gets.
    pub fn find(workspace: &Workspace, cache: &Cache) -> Result<Self, Error> {
        Ok(Self { workspace: workspace.clone(), ggml: ggml::folder(cache), path: cargo_tools::path(cache)? })
    }

    /// Gets what building the targets needs, and builds ggml.
    pub fn prepare(&self, cache: &Cache, ui: &Ui) -> Result<(), Error> {
        cargo_tools::ensure(&self.workspace, cache, ui, CARGO_FUZZ)?;
        let log = self.workspace.log("nightly");
        let version = Tool::new("rustup", &log).args(["run", "nightly", "rustc", "--version"]);
        if !version.finish(|_| ())?.success {
            ui.line("install the nightly toolchain, which has the sanitizers");
            Tool::new("rustup", &log)
                .args(["toolchain", "install", "nightly", "--profile", "minimal", "--no-self-update"])
                .run()?;
        }
        ggml::ensure(cache, ui)
    }

    /// Builds all targets.
    pub fn build(&self, ui: &Ui) -> Result<(), Error> {
        let bar = ui.bar("build the fuzz targets", Unit::Items, 0);
        let mut built = 0;
        self.cargo_fuzz("fuzz-build", "build").run_lines(|line| {
            if line.trim_start().starts_with("Compiling") {
                built += 1;
                bar.set(built, 0);
            }
        })?;
        bar.finish();
        Ok(())
    }

    /// Runs targets, as many at once as there are processors, and tells how each went.
    pub fn run(&self, ui: &Ui, runs: &[Run]) -> Result<Vec<Report>, Error> {
        let at_once = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(runs.len());
        let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
        thread::scope(|scope| {
            for _ in 0..at_once {
                scope.spawn(|| {
                    while let Some(run) = runs.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let report = self.run_one(run);
                        if let Ok(report) = &report {
                            ui.result(&report.to_string());
                        }
                        done.lock().unwrap_or_else(PoisonError::into_inner).push(report);
                    }
                });
            }
        });
        done.into_inner().unwrap_or_else(PoisonError::into_inner).into_iter().collect()
    }

    fn run_one(&self, run: &Run) -> Result<Report, Error> {
        let target = run.target;
        let root = self.workspace.root.join(FOLDER);
        let corpus = root.join("corpus").join(target.name);
        fs::create_dir_all(&corpus).at("create", &corpus)?;
        let tool = self
            .cargo_fuzz(&run.name(), "run")
            .arg(target.name)
            // New inputs go to the first folder.
            .arg(&corpus)
            .arg(root.join("seeds").join(target.name))
            .args(["--", "-print_final_stats=1"])
            .arg(format!("-max_total_time={}", run.seconds))
            .arg(format!("-max_len={}", target.longest));
        self.report(run, tool)
    }

    /// Runs a target on one input.
    fn run_input(&self, ui: &Ui, run: &Run, input: &Path) -> Result<Report, Error> {
        let target = run.target;
        let input = std::path::absolute(input).at("resolve", input)?;
        let tool = self
            .cargo_fuzz(&format!("{}-input", run.name()), "run")
            .arg(target.name)
            .arg(&input)
            .args(["--", "-print_final_stats=1"])
            .arg(format!("-runs={}", target.again));
        let report = self.report(run, tool)?;
        ui.result(&report.to_string());
        Ok(report)
    }

    fn report(&self, run: &Run, tool: Tool) -> Result<Report, Error> {
        let started = Instant::now();
        let tool = match &run.threads {
            Some(threads) => tool.env("APIR_FUZZ_THREADS", threads),
            None => tool,
        };
        let mut output = Output::default();
        let tool = tool.arg(format!("-timeout={INPUT_LIMIT}")).arg(format!("-rss_limit_mb={MEMORY_LIMIT}"));
        let finished = tool.finish(|line| output.line(line))?;
        let what = match output.told.is_empty() {
            true => finished.tail.join("\n"),
            false => output.told.join("\n"),
        };
        let input = output.input.map(|input| self.workspace.root.join(input));
        Ok(Report {
            target: run.target.name,
            threads: run.threads.clone(),
            runs: output.runs,
            seconds: started.elapsed().as_secs(),
            per_second: output.per_second,
            corpus: output.corpus,
            edges: output.edges,
            finding: (!finished.success).then_some(Finding { what, input }),
        })
    }

    /// `cargo fuzz` of the nightly toolchain, which alone has sanitizers.
    fn cargo_fuzz(&self, step: &str, verb: &str) -> Tool {
        Tool::new("rustup", &self.workspace.log(step))
            .args(["run", "nightly", "cargo", "fuzz", verb, "--fuzz-dir", FOLDER])
            .dir(&self.workspace.root)
            .env("PATH", &self.path)
            .env("CARGO_TARGET_DIR", self.workspace.target("fuzz"))
            .env("APIR_DIST", self.workspace.dist())
            .env("APIR_LLAMA_DIR", &self.ggml)
            // For the worker of a renderer's context; a key comes before it elsewhere.
            .env("APIR_HOST_THREADS", "1")
            .env("APIR_LOG", "off")
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { target, runs, seconds, per_second, corpus, edges, .. } = self;
        write!(f, "{target}")?;
        match self.threads.as_deref() {
            None => {}
            Some("1") => write!(f, ", 1 thread")?,
            Some(threads) => write!(f, ", {threads} threads")?,
        }
        let findings = u8::from(self.finding.is_some());
        write!(
            f,
            ": {runs} inputs in {seconds} s, {per_second} a second, corpus {corpus}, edges {edges}, findings {findings}"
        )?;
        let Some(finding) = &self.finding else { return Ok(()) };
        write!(f, "\n{}", finding.what)?;
        match &finding.input {
            Some(input) => {
                write!(f, "\nto run it again: cargo xtask fuzz {target}")?;
                if let Some(threads) = &self.threads {
                    write!(f, " --threads {threads}")?;
                }
                write!(f, " --input {}", input.display())
            }
            None => Ok(()),
        }
    }
}

/// What the output of a fuzzer says.
#[derive(Debug, Default)]
struct Output {
    runs: u64,
    per_second: u64,
    corpus: u64,
    edges: u64,
    input: Option<String>,
    told: Vec<String>,
    panicked: bool,
}

impl Output {
    fn line(&mut self, line: &str) {
        let number = |text: &str| text.trim().split('/').next().and_then(|number| number.parse().ok());
        let behind = |word| {
            line.strip_prefix('#').and_then(|rest| number(rest.split_once(word)?.1.split(' ').next()?))
        };
        self.corpus = behind(" corp: ").unwrap_or(self.corpus);
        self.edges = behind(" cov: ").unwrap_or(self.edges);
        let stat = |word| line.strip_prefix(word).and_then(number);
        self.runs = stat("stat::number_of_executed_units:").unwrap_or(self.runs);
        self.per_second = stat("stat::average_exec_per_sec:").unwrap_or(self.per_second);
        let written = line.split_once("Test unit written to ").map(|(_, path)| path);
        // Slow inputs are written too, and the fuzzer goes on.
        if let Some(path) = written.filter(|path| !path.contains("/slow-unit-")) {
            self.input = Some(path.to_owned());
        }
        let telling = ["panicked at", "ERROR: ", "SUMMARY: ", "assertion failed", "GGML_ASSERT"]
            .iter()
            .any(|word| line.contains(word));
        // A panic's message comes in the line behind.
        if telling || self.panicked {
            self.told.push(line.to_owned());
        }
        self.panicked = line.contains("panicked at");
    }
}

/// Clippy over what the targets share, on the stable toolchain.
pub fn clippy(workspace: &Workspace) -> Tool {
    workspace
        .cargo("fuzz-clippy")
        .args(["clippy", "--manifest-path", MANIFEST, "--lib", "--tests", "--examples", "--quiet"])
        .args(["--", "--deny", "warnings"])
        .env("CARGO_TARGET_DIR", workspace.target(REPLAY))
}

/// The run of every seed, and of what fuzzing has found here, on the stable toolchain.
pub fn replay(workspace: &Workspace) -> Tool {
    workspace
        .cargo("fuzz-replay")
        .args(["test", "--no-fail-fast", "--manifest-path", MANIFEST])
        .args(["--", "--include-ignored", "--test-threads=1", "--nocapture"])
        .env("CARGO_TARGET_DIR", workspace.target(REPLAY))
        .env("APIR_LOG", "off")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_libfuzzer_prints_is_understood() {
        let mut output = Output::default();
        for line in [
            "INFO: seed corpus: files: 169 min: 1b max: 26000b total: 350000b rss: 60Mb",
            "#170\tINITED cov: 411 ft: 800 corp: 20/10Kb exec/s: 0 rss: 62Mb",
            "#4978\tDONE   cov: 512 ft: 1091 corp: 64/10Kb lim: 4096 exec/s: 311 rss: 62Mb",
            "stat::number_of_executed_units: 4978",
            "stat::average_exec_per_sec:     311",
            "artifact_prefix='/a/'; Test unit written to /a/slow-unit-0",
        ] {
            output.line(line);
        }
        let Output { runs, per_second, corpus, edges, input, told, .. } = output;
        assert_eq!((runs, per_second, corpus, edges, input), (4978, 311, 64, 512, None));
        assert!(told.is_empty(), "{told:?}");
    }

    #[test]
    fn a_finding_says_what_broke_and_how_to_run_it_again() {
        let mut output = Output::default();
        output.line("thread '<unnamed>' panicked at src/decoder.rs:9:5:");
        output.line("a second round changes the bytes");
        output.line("note: run with `RUST_BACKTRACE=1`");
        output.line("artifact_prefix='/a/'; Test unit written to /a/crash-1");
        let finding =
            Finding { what: output.told.join("\n"), input: output.input.as_deref().map(PathBuf::from) };
        let report = Report {
            target: "compute",
            threads: Some("4".to_owned()),
            runs: 9,
            seconds: 3,
            per_second: 3,
            corpus: 2,
            edges: 5,
            finding: Some(finding),
        };
        let text = report.to_string();
        assert!(
            text.contains("panicked at src/decoder.rs:9:5:\na second round changes the bytes\nto run"),
            "{text}"
        );
        assert!(text.starts_with("compute, 4 threads: 9 inputs in 3 s,"), "{text}");
        assert!(text.ends_with("cargo xtask fuzz compute --threads 4 --input /a/crash-1"), "{text}");
    }

    #[test]
    fn the_counts_of_threads_share_the_time_of_a_target() {
        let counts = THREADS.map(str::to_owned);
        let all = runs(|_| true, &counts, 900);
        assert_eq!(all.len(), 3 + 3 * 5);
        for run in &all {
            assert_eq!(
                (run.seconds, run.threads.is_some()),
                if run.target.threaded { (300, true) } else { (900, false) }
            );
        }
        let one = runs(|target| target.name == "race", &[], 60);
        assert_eq!(
            one.iter().map(|run| (run.name(), run.seconds)).collect::<Vec<_>>(),
            [("fuzz-race".to_owned(), 60)]
        );
    }

    #[test]
    fn the_targets_are_those_of_the_fuzz_workspace() {
        let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fuzz/Cargo.toml");
        let text = fs::read_to_string(manifest).unwrap();
        let named: Vec<_> = text.lines().filter(|line| line.contains("fuzz_targets/")).collect();
        assert_eq!(named.len(), TARGETS.len());
        for target in TARGETS {
            assert!(named.iter().any(|line| line.contains(&format!("/{}.rs", target.name))), "{target:?}");
        }
    }
}
