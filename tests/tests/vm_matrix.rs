//! Our halves and upstream's with each other in a virtual machine: guest library, host plugin and host ggml.
//!
//! The cells of `apir serve`, where the guest library is always ours, are in demo.rs and ggml_versions.rs.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use apir_tests::Error;
use apir_tests::completion::Request;
use apir_tests::error::{IoContext, check};
use apir_tests::fakes;
use apir_tests::ggml_program::{GgmlProgram, check_remote, event};
use apir_tests::peers::{self, Dist, LlamaDir, Models};
use apir_tests::server::Serve;
use apir_tests::vm::{Boot, Guest, Renderer, Steps, VmDir};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(120);

const TOKENS: u32 = 16;

/// Everything that can be paired.
struct Pieces {
    dist: Dist,
    llama: LlamaDir,
    upstream_guest: PathBuf,
    upstream_plugin: PathBuf,
    api2: PathBuf,
    api3_library: PathBuf,
    api2_library: PathBuf,
    gpu_library: PathBuf,
    // Holds the worker's program and its configuration.
    folder: TempDir,
}

impl Pieces {
    fn from_env(dir: &VmDir) -> Result<Self, Error> {
        let folder = TempDir::with_prefix("apir-matrix-").at("create a folder in", &std::env::temp_dir())?;
        let (llama, api2) = (LlamaDir::from_env()?, peers::ggml_api2()?);
        let upstream_guest = dir.upstream_guest();
        if !upstream_guest.is_file() {
            return Err(Error::Missing { path: upstream_guest, what: "upstream's guest library" });
        }
        Ok(Self {
            dist: Dist::from_env()?,
            upstream_guest,
            upstream_plugin: llama.upstream_plugin()?,
            api3_library: llama.cpu_library(),
            api2_library: peers::baseline_cpu_library(&api2)?,
            gpu_library: fakes::gpu_library(folder.path(), &llama, &peers::llama_source()?)?,
            llama,
            api2,
            folder,
        })
    }

    /// A machine whose workers read at their start which plugin and library they use.
    fn boot(&self, dir: &VmDir) -> Result<Guest, Error> {
        let worker = self.folder.path().join("worker");
        let script =
            format!("#!/bin/sh\n. {}\nexec {} \"$@\"\n", self.choice().display(), self.dist.apir().display());
        fs::write(&worker, script).at("write", &worker)?;
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&worker, mode).at("make a program of", &worker)?;
        let renderer = Renderer::new(&self.dist, &self.api3_library)
            .worker(&worker)
            .with(&self.upstream_plugin)
            .with(&self.api2_library);
        Boot::new(dir, dir.accelerator()?).renderer(renderer).start()
    }

    /// What the next worker shall use.
    fn choose(&self, plugin: &Path, library: &Path) -> Result<(), Error> {
        let choice = self.choice();
        let text = format!(
            "export VIRGL_APIR_BACKEND_LIBRARY='{}' APIR_LLAMA_CPP_GGML_LIBRARY_PATH='{}'\n",
            plugin.display(),
            library.display()
        );
        fs::write(&choice, text).at("write", &choice)
    }

    fn choice(&self) -> PathBuf {
        self.folder.path().join("choice")
    }

    /// The text that a cell must generate: that of the local CPU, or of a server with the host's library where that
    /// computes by other code.
    fn reference(&self, request: &Request, library: &Path) -> Result<String, Error> {
        if library == self.api2_library {
            return Ok(request.run_remote(&Serve::new(&self.dist, library).start()?)?.0.text);
        }
        Ok(request.run_local()?.text)
    }

    fn generates(&self, guest: &Guest, library: &Path, plugin: &Path, host: &Path) -> Result<(), Error> {
        let request = Request::new(&self.llama, &Models::from_env()?.tiny(), TOKENS);
        let reference = self.reference(&request, host)?;
        self.choose(plugin, host)?;
        let remote = request.run_remote_uncounted(&guest.loading(library))?;
        remote.check_all_remote()?;
        check(remote.text == reference, || {
            format!("the texts differ:\n--- remote\n{}\n--- reference\n{reference}", remote.text)
        })
    }

    /// A program of backend API 2 with our guest library.
    fn computes_in_api2(&self, guest: &Guest, plugin: &Path, host: &Path) -> Result<(), Error> {
        self.choose(plugin, host)?;
        let program = GgmlProgram::new(env!("CARGO_BIN_EXE_ggml-program"), &self.api2, &self.dist);
        let output = guest.run(&program.command(&["compute"]), LIMIT)?.success()?;
        let loaded = event(&output, "loaded")?;
        check(loaded["version"].as_str().is_some_and(|found| found.starts_with("0.25.")), || {
            format!("this is no ggml of API 2: {loaded}")
        })?;
        check_remote(&output)
    }
}

#[test]
#[ignore = "needs a virtual machine: cargo xtask test runs it"]
fn every_pairing() -> Result<(), Error> {
    let dir = VmDir::from_env()?;
    let pieces = Pieces::from_env(&dir)?;
    let guest = pieces.boot(&dir)?;
    let (ours, our_plugin) = (pieces.dist.guest(), pieces.dist.plugin());
    let (theirs, their_plugin) = (&pieces.upstream_guest, &pieces.upstream_plugin);
    let (api2, api3, gpu) = (&pieces.api2_library, &pieces.api3_library, &pieces.gpu_library);
    let mut steps = Steps::default();
    let generates = |guest_library: &Path, plugin: &Path, host: &Path| {
        pieces.generates(&guest, guest_library, plugin, host)
    };
    steps.check("our guest, our plugin, host API 3", || generates(&ours, &our_plugin, api3));
    steps.check("our guest, our plugin, host API 2", || generates(&ours, &our_plugin, api2));
    steps.check("our guest, upstream's plugin, host API 3", || generates(&ours, their_plugin, api3));
    steps.check("upstream's guest, our plugin, host API 3", || generates(theirs, &our_plugin, api3));
    steps.check("upstream's guest, our plugin, host API 2", || generates(theirs, &our_plugin, api2));
    // Upstream's halves pass on that the CPU is one, and llama.cpp would not take it for a device.
    steps.check("upstream's guest, upstream's plugin, host API 3", || generates(theirs, their_plugin, gpu));
    let computes = |plugin: &Path, host: &Path| pieces.computes_in_api2(&guest, plugin, host);
    steps.check("our guest in API 2, our plugin, host API 3", || computes(&our_plugin, api3));
    steps.check("our guest in API 2, our plugin, host API 2", || computes(&our_plugin, api2));
    steps.check("our guest in API 2, upstream's plugin, host API 3", || computes(their_plugin, api3));
    steps.finish()
}
