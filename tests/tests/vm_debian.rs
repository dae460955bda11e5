//! Debian's own llama.cpp, built by nobody here, with our guest library put where the distribution has its backends.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use apir_tests::Error;
use apir_tests::chat;
use apir_tests::completion::Stats;
use apir_tests::error::{IoContext, check};
use apir_tests::peers::{Dist, LlamaDir, Models};
use apir_tests::program::{Output, Program};
use apir_tests::server::{Serve, Server};
use apir_tests::vm::{Boot, Renderer, Root, VmDir};
use serde_json::Value;

const LIMIT: Duration = Duration::from_secs(400);

/// Where the distribution has ggml's backends; our library needs no variable there.
const BACKENDS: &str = "/usr/lib/x86_64-linux-gnu/ggml/backends0";

/// The packages that are tried.
const PACKAGES: [&str; 3] = ["libggml0", "llama.cpp-tools", "llama.cpp-tests"];

/// What ggml's loader, or our library, says where the distribution is ahead of us.
const TOO_NEW: [&str; 2] = ["incompatible API version", "is not supported, only"];

/// Debian's root with a server of ours behind it.
struct Debian {
    root: PathBuf,
    dist: Dist,
    server: Server,
}

impl Debian {
    fn from_env() -> Result<Self, Error> {
        let (dist, root) = (Dist::from_env()?, VmDir::from_env()?.debian_root());
        println!("note: {}", versions(&root)?);
        let server = Serve::new(&dist, &LlamaDir::from_env()?.cpu_library()).start()?;
        Ok(Self { root, dist, server })
    }

    /// A root that sees our library, the server's socket and the models.
    fn enter(&self) -> Result<Root, Error> {
        let socket_folder = self.server.socket().parent().unwrap_or(self.server.socket());
        Ok(Root::new(&self.root)?
            .with_at(&self.dist.guest(), &Path::new(BACKENDS).join("libggml-virtgpu.so"))
            .with(socket_folder)
            .with(Models::from_env()?.path()))
    }

    fn program(&self, root: &Root, name: &str) -> Program {
        root.program(name).env("APIR_SOCKET", self.server.socket()).env("LD_LIBRARY_PATH", "")
    }
}

/// The versions of the packages in a root.
fn versions(root: &Path) -> Result<String, Error> {
    let path = root.join("var/lib/dpkg/status");
    let text = fs::read_to_string(&path).at("read", &path)?;
    let field = |paragraph: &str, name: &str| {
        paragraph.lines().find_map(|line| line.strip_prefix(name).map(str::to_owned)).unwrap_or_default()
    };
    let found =
        text.split("\n\n").filter(|paragraph| PACKAGES.contains(&field(paragraph, "Package: ").as_str()));
    let lines: Vec<String> = found
        .map(|paragraph| format!("{} {}", field(paragraph, "Package: "), field(paragraph, "Version: ")))
        .collect();
    check(lines.len() == PACKAGES.len(), || format!("{} lists only {lines:?}", path.display()))?;
    Ok(lines.join(", "))
}

/// Whether the distribution's ggml is of a version that is not supported yet; said, since it is no success.
fn is_skipped(log: &str) -> bool {
    let line = log.lines().find(|line| TOO_NEW.iter().any(|text| line.contains(text)));
    if let Some(line) = line {
        println!("note: SKIPPED: Debian's ggml is newer than what is supported: {line}");
    }
    line.is_some()
}

fn bench(program: Program, model: &Path) -> Program {
    program
        .arg("-m")
        .arg(model)
        .args(["-p", "16", "-n", "4", "-r", "2", "-ngl", "99", "-t", "1", "-o", "json"])
}

fn check_bench(output: &Output) -> Result<(), Error> {
    if is_skipped(&output.stderr) {
        return Ok(());
    }
    let results: Value = serde_json::from_str(&output.stdout).map_err(|error| {
        Error::Unexpected(format!("not the JSON of llama-bench: {error}:\n{}", output.stdout))
    })?;
    for result in results.as_array().into_iter().flatten() {
        check(result["backends"].as_str().is_some_and(|names| names.contains("virtgpu")), || {
            format!("another backend was used: {result}")
        })?;
        check(result["avg_ts"].as_f64().is_some_and(|speed| speed > 0.0), || format!("no speed: {result}"))?;
    }
    check(results.as_array().is_some_and(|results| results.len() == 2), || format!("results: {results}"))
}

#[test]
#[ignore = "needs Debian's llama.cpp: cargo xtask test runs it"]
fn llama_bench_over_the_socket() -> Result<(), Error> {
    let debian = Debian::from_env()?;
    let root = debian.enter()?;
    let stats = debian.server.socket().with_file_name("stats");
    let program = debian.program(&root, "llama-bench").env("APIR_STATS", &stats);
    let output = bench(program, &Models::from_env()?.tiny()).run(LIMIT)?.success()?;
    check_bench(&output)?;
    if is_skipped(&output.stderr) {
        return Ok(());
    }
    let stats = Stats::read(&stats)?;
    check(stats.graph_computes > 4, || format!("too few graphs: {stats:?}"))
}

#[test]
#[ignore = "needs Debian's llama.cpp: cargo xtask test runs it"]
fn llama_server_over_the_socket() -> Result<(), Error> {
    let debian = Debian::from_env()?;
    let root = debian.enter()?;
    let server = debian.program(&root, "llama-server").args(["-ngl", "99"]);
    let (text, log) = chat::ask(server, &Models::from_env()?.smollm2())?;
    if is_skipped(&log) {
        return Ok(());
    }
    check(text.contains("Paris"), || format!("it answered {text:?}"))?;
    check(log.contains("[virtgpu] CPU model buffer size"), || {
        format!("no weights on the remote device:\n{log}")
    })
}

#[test]
#[ignore = "needs Debian's llama.cpp: cargo xtask test runs it"]
fn ggmls_own_tests_over_the_socket() -> Result<(), Error> {
    let debian = Debian::from_env()?;
    let root = debian.enter()?;
    let output = debian
        .program(&root, "/usr/libexec/x86_64-linux-gnu/ggml/test-backend-ops")
        .args(["test", "-b", "[virtgpu] CPU", "-o", "SOFT_MAX,RMS_NORM,CPY"])
        .run(LIMIT)?
        .success()?;
    if is_skipped(&output.stderr) {
        return Ok(());
    }
    for name in ["SOFT_MAX", "RMS_NORM", "CPY"] {
        let case = format!("  {name}(");
        let cases = || output.stdout.lines().filter(|line| line.starts_with(&case));
        let good = cases().filter(|line| line.contains("OK")).count();
        println!("note: {name}: {good} cases");
        check(good > 0 && !cases().any(|line| line.contains("FAIL")), || output.stdout.clone())?;
    }
    Ok(())
}

#[test]
#[ignore = "needs a virtual machine: cargo xtask test runs it"]
fn llama_bench_in_a_machine() -> Result<(), Error> {
    let (dist, llama, dir) = (Dist::from_env()?, LlamaDir::from_env()?, VmDir::from_env()?);
    println!("note: {}", versions(&dir.debian_root())?);
    let guest = Boot::new(&dir, dir.accelerator()?)
        .root(&dir.debian_root())
        .renderer(Renderer::new(&dist, &llama.cpu_library()))
        .start()?;
    let copy = |from: &Path| -> Result<PathBuf, Error> {
        let to = guest.folder().join(from.file_name().unwrap_or_default());
        fs::copy(from, &to).at("copy", from)?;
        Ok(to)
    };
    let (library, model) = (copy(&dist.guest())?, copy(&Models::from_env()?.tiny())?);
    // Into the guest's own layer over the root.
    guest.run(&Program::new(Path::new("/bin/cp")).arg(library).arg(BACKENDS), LIMIT)?.success()?;
    check_bench(
        &guest.run(&bench(Program::new(Path::new("/usr/bin/llama-bench")), &model), LIMIT)?.success()?,
    )
}
