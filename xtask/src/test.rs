//! `cargo xtask test`: every check and test, with the peers built beside the checks that do not need them.

use std::path::PathBuf;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use crate::apt;
use crate::cache::Cache;
use crate::codegen;
use crate::dist::Workspace;
use crate::error::Error;
use crate::fuzz::{self, Fuzzers};
use crate::models;
use crate::peers::{self, Llama, Stage};
use crate::suite::{Counts, Suite};
use crate::tools::Tool;
use crate::ui::Ui;
use crate::{releases, rutabaga, upstream, vm};

/// The tests of the other crates that need ggml's libraries.
const CRATES: &str = "crates with ggml";

/// The client that drives our renderer through the published rutabaga_gfx, in a workspace of its own.
const RUTABAGA: &str = "rutabaga";

/// Every seed of the fuzz targets, without a fuzzer.
const SEEDS: &str = "seeds of the fuzz targets";

/// The fuzz targets, each for [`FUZZ_SECONDS`].
const FUZZ: &str = "fuzz targets";

/// How long each fuzz target runs.
const FUZZ_SECONDS: u32 = 20;

/// The tests of other crates that need Debian's virglrenderer begin so.
const NEEDS_DEBIAN: &str = "debians_library_";

/// What can be tested once milestones are reached: [`CRATES`], [`RUTABAGA`], [`SEEDS`], [`FUZZ`], or a test file of the workspace.
const PLAN: &[(&[Milestone], &[&str])] = &[
    (&[Milestone::Libraries], &[CRATES, "rows", "bad_input", "memory", "threads", "forks", RUTABAGA, SEEDS]),
    (&[Milestone::Vulkan], &["vulkan"]),
    (&[Milestone::Programs], &["ggml_versions", "backend_ops", "demo", "worker_killed", "faults"]),
    (&[Milestone::Machines, Milestone::Programs], &["vm", "vm_matrix", "chain"]),
    (&[Milestone::Debian, Milestone::Programs], &["vm_debian"]),
    (&[Milestone::Models], &["models"]),
    (&[Milestone::Servers], &["llama_server"]),
    (&[Milestone::Fuzzers], &[FUZZ]),
];

/// What the background threads have ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Milestone {
    Libraries,
    Vulkan,
    Programs,
    Models,
    Servers,
    Fuzzers,
    Machines,
    Debian,
}

/// A background thread, which reaches its milestones one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lane {
    /// Builds llama.cpp, and the fuzz targets with a ggml of their own.
    Llama,
    /// Makes what virtual machines are made of.
    Machines,
}

/// How far the background threads are.
#[derive(Debug, Default)]
struct Progress {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    reached: Vec<Milestone>,
    failures: Vec<(Lane, String)>,
}

/// Where the peers will be.
#[derive(Debug, Clone)]
struct Peers {
    cache: Cache,
    llama: Llama,
    source: PathBuf,
    models: PathBuf,
    ggml_api2: PathBuf,
    machines: PathBuf,
    fuzzers: Fuzzers,
}

/// Runs it; `false` when anything failed.
pub fn run(workspace: &Workspace, ui: &Ui) -> Result<bool, Error> {
    let cache = Cache::open()?;
    let _lock = cache.lock(ui)?;
    let peers = Peers::new(workspace, &cache)?;
    let progress = Progress::default();
    let mut suite = Suite::new(ui);
    thread::scope(|scope| {
        scope.spawn(|| progress.record(Lane::Llama, peers.prepare(workspace, ui, &progress)));
        scope.spawn(|| progress.record(Lane::Machines, peers.prepare_machines(ui, &progress)));
        without_peers(workspace, ui, &mut suite);
        let dist_is_built = {
            let mut built = false;
            suite.step("build of the artefacts", || {
                workspace.build_dist(ui)?;
                built = true;
                Ok(true)
            });
            built
        };
        for &(milestones, tests) in PLAN {
            let ready = match dist_is_built {
                true => milestones.iter().try_for_each(|&milestone| progress.wait_for(milestone)),
                false => Err("the artefacts were not built".to_owned()),
            };
            match ready {
                Ok(()) => tests.iter().for_each(|test| with_peers(workspace, &peers, ui, &mut suite, test)),
                Err(cause) => suite.skip(tests, &cause),
            }
        }
    });
    Ok(suite.finish())
}

/// The checks that need nothing but this workspace.
fn without_peers(workspace: &Workspace, ui: &Ui, suite: &mut Suite<'_>) {
    let run = |tool: Tool| tool.run().map(|()| true);
    suite.step("format", || {
        run(workspace.cargo("fmt").args(["fmt", "--all", "--check"]))?;
        [rutabaga::MANIFEST, fuzz::MANIFEST].into_iter().try_fold(true, |_, manifest| {
            run(workspace.cargo("fmt-others").args(["fmt", "--check", "--manifest-path", manifest]))
        })
    });
    suite.step("generated files", || codegen::run(workspace, ui, true));
    suite.step("clippy", || {
        let clippy = workspace.cargo("clippy").args(["clippy", "--workspace", "--all-targets", "--quiet"]);
        run(clippy.args(["--", "--deny", "warnings"]))?;
        run(fuzz::clippy(workspace))
    });
    let unit = workspace.cargo("unit").args(["test", "--workspace", "--no-fail-fast"]);
    suite.cargo_test("unit tests", unit);
}

/// One of the tests that run ggml's libraries and llama.cpp's programs.
fn with_peers(workspace: &Workspace, peers: &Peers, ui: &Ui, suite: &mut Suite<'_>, test: &str) {
    if test == RUTABAGA {
        return match rutabaga::test(workspace, &peers.cache, ui) {
            Ok(tool) => suite.cargo_test(test, peers.env(workspace, tool)),
            Err(error) => suite.skip(&[test], &error.to_string()),
        };
    }
    if test == SEEDS {
        return suite.cargo_test(test, peers.env(workspace, fuzz::replay(workspace)));
    }
    if test == FUZZ {
        return suite.group(test, || {
            let reports = peers.fuzzers.run(ui, &fuzz::runs(|_| true, &[], FUZZ_SECONDS))?;
            let failed = reports.iter().filter(|report| report.finding.is_some()).count() as u64;
            Ok(Counts { passed: reports.len() as u64 - failed, failed })
        });
    }
    // Always the whole workspace, since a part of it would be built with other features.
    let tool = workspace.cargo(test).args(["test", "--no-fail-fast", "--workspace"]);
    // One at a time: they measure memory and time, and each has several processes of its own. What is only timed, for
    // a person to read, is named so.
    let shared = ["--", "--ignored", "--test-threads=1", "--show-output", "--skip", "_is_timed"];
    let tool = match test {
        CRATES => tool.args(["--exclude", "apir-tests"]).args(shared).args(["--skip", NEEDS_DEBIAN]),
        _ => tool.args(["--test", test]).args(shared),
    };
    suite.cargo_test(test, peers.env(workspace, tool));
}

impl Peers {
    fn new(workspace: &Workspace, cache: &Cache) -> Result<Self, Error> {
        Ok(Self {
            llama: Llama::find(cache)?,
            source: peers::source_tree_path(cache),
            models: models::folder(cache),
            ggml_api2: peers::ggml_api2_path(cache),
            machines: vm::folder(cache).path().to_owned(),
            fuzzers: Fuzzers::find(workspace, cache)?,
            cache: cache.clone(),
        })
    }

    fn prepare(&self, workspace: &Workspace, ui: &Ui, progress: &Progress) -> Result<(), Error> {
        let cache = &self.cache;
        apt::ensure(cache, ui, apt::C_COMPILER)?;
        peers::ggml_api2(cache, ui)?;
        peers::source_tree(cache, ui)?;
        self.llama.build(cache, ui, Stage::Libraries)?;
        releases::ensure(cache, ui, &self.llama)?;
        progress.reach(Milestone::Libraries);
        peers::ggml_vulkan(cache, ui)?;
        progress.reach(Milestone::Vulkan);
        models::tiny(cache, ui, &workspace.root)?;
        models::smollm2(cache, ui)?;
        self.llama.build(cache, ui, Stage::Programs)?;
        progress.reach(Milestone::Programs);
        models::minilm(cache, ui, &workspace.root)?;
        self.llama.build(cache, ui, Stage::Models)?;
        progress.reach(Milestone::Models);
        self.llama.build(cache, ui, Stage::Servers)?;
        progress.reach(Milestone::Servers);
        self.fuzzers.prepare(cache, ui)?;
        self.fuzzers.build(ui)?;
        progress.reach(Milestone::Fuzzers);
        Ok(())
    }

    fn prepare_machines(&self, ui: &Ui, progress: &Progress) -> Result<(), Error> {
        let cache = &self.cache;
        let dir = vm::ensure(cache, ui)?;
        vm::ensure_debian(cache, ui, &dir)?;
        progress.reach(Milestone::Debian);
        progress.wait_for(Milestone::Libraries).map_err(Error::Check)?;
        upstream::guest(cache, ui, &self.llama, &dir)?;
        progress.reach(Milestone::Machines);
        Ok(())
    }

    fn env(&self, workspace: &Workspace, tool: Tool) -> Tool {
        // One thread: more of them spin against the other tests' processes, and race where a kernel lets them.
        tool.env("APIR_HOST_THREADS", "1")
            .env("APIR_DIST", workspace.dist())
            .env("APIR_LLAMA_DIR", &self.llama.bin)
            .env("APIR_LLAMA_SRC", &self.source)
            .env("APIR_MODELS", &self.models)
            .env("APIR_GGML_API2_DIR", &self.ggml_api2)
            .env("APIR_GGML_RELEASES", releases::folder(&self.cache))
            .env("APIR_VM", &self.machines)
            .env("APIR_VULKAN_DIR", peers::ggml_vulkan_path(&self.cache))
            .env("APIR_GGML_CPU_API2", self.ggml_api2.join("libggml-cpu-x64.so"))
    }
}

impl Milestone {
    /// The thread that reaches it.
    fn lane(self) -> Lane {
        match self {
            Milestone::Libraries
            | Milestone::Vulkan
            | Milestone::Programs
            | Milestone::Models
            | Milestone::Servers
            | Milestone::Fuzzers => Lane::Llama,
            Milestone::Machines | Milestone::Debian => Lane::Machines,
        }
    }
}

impl Progress {
    fn reach(&self, milestone: Milestone) {
        self.lock().reached.push(milestone);
        self.changed.notify_all();
    }

    fn record(&self, lane: Lane, result: Result<(), Error>) {
        if let Err(error) = result {
            self.lock().failures.push((lane, error.to_string()));
        }
        self.changed.notify_all();
    }

    fn wait_for(&self, milestone: Milestone) -> Result<(), String> {
        let mut state = self.lock();
        loop {
            if state.reached.contains(&milestone) {
                return Ok(());
            }
            if let Some((_, failure)) = state.failures.iter().find(|(lane, _)| *lane == milestone.lane()) {
                return Err(failure.clone());
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_reached_stays_usable_after_a_failure() {
        let progress = Progress::default();
        progress.reach(Milestone::Libraries);
        progress.record(Lane::Llama, Err(Error::Check("no more".to_owned())));
        assert_eq!(progress.wait_for(Milestone::Libraries), Ok(()));
        assert_eq!(progress.wait_for(Milestone::Programs), Err("no more".to_owned()));
        progress.reach(Milestone::Debian);
        assert_eq!(progress.wait_for(Milestone::Debian), Ok(()), "another thread goes on");
    }
}
