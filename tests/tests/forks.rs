//! Rows T25, T26, T29 and T31 of the cases: programs that fork, that load the backend twice, that store what they read, and paths of any bytes.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Duration;

use apir_tests::Error;
use apir_tests::error::{IoContext, check};
use apir_tests::ggml_program::{GgmlProgram, LIMIT, check_remote, event, wait_for_event, warnings};
use apir_tests::peers::{Dist, LlamaDir};
use apir_tests::process;
use apir_tests::server::{Serve, Server};
use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;

/// The kinds of buffers: bytes that may be mapped, or none at all.
const MAPPED_BYTES: [Option<&str>; 2] = [None, Some("1")];

struct Pieces {
    dist: Dist,
    llama: LlamaDir,
    folder: TempDir,
}

impl Pieces {
    fn from_env() -> Result<Self, Error> {
        let folder = TempDir::with_prefix("apir-").at("create a folder in", &std::env::temp_dir())?;
        Ok(Self { dist: Dist::from_env()?, llama: LlamaDir::from_env()?, folder })
    }

    fn serve(&self, mapped: Option<&str>) -> Result<Server, Error> {
        let serve = Serve::new(&self.dist, &self.llama.cpu_library());
        mapped.map_or(serve.clone(), |bytes| serve.env("APIR_MAX_MAPPED_BYTES", bytes)).start()
    }

    fn program(&self, server: &Server) -> GgmlProgram {
        GgmlProgram::new(env!("CARGO_BIN_EXE_ggml-program"), self.llama.path(), &self.dist)
            .envs(server.guest_env())
    }

    /// A copy of the guest library under another name.
    fn copy(&self, name: &str) -> Result<std::path::PathBuf, Error> {
        let path = self.folder.path().join(name);
        fs::copy(self.dist.guest(), &path).at("write", &path)?;
        Ok(path)
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap_or_default()
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t25_forks_of_every_kind_leave_their_parent_alone() -> Result<(), Error> {
    let pieces = Pieces::from_env()?;
    for mapped in MAPPED_BYTES {
        let server = pieces.serve(mapped)?;
        let stats = pieces.folder.path().join("stats");
        let running = pieces.program(&server).command(&["forks"]).env("APIR_STATS", &stats).start()?;
        wait_for_event(&running, "done", LIMIT)?;
        // Forks that used the device had a worker; the parent keeps its own.
        server.wait_for_workers(1)?;
        let output = running.wait(LIMIT)?.success()?;
        server.wait_for_workers(0)?;
        let children = output.stdout.lines().filter(|line| line.contains("\"forked\"")).count();
        check(children == 7, || output.stdout.clone())?;
        // Two of them used what they had inherited: a line for a write, a read and a graph, each.
        let told = warnings(&output);
        let lost = told.iter().filter(|line| line.contains("of which this process is a fork")).count();
        check(lost == 6 && told.len() == 6, || format!("{told:#?}"))?;
        // Each process counts its own: the parent at the end of its backend and at its own, three children likewise.
        let lines = fs::read_to_string(&stats).at("read", &stats)?;
        let lines: Vec<Value> = lines.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        check(lines.len() == 9, || format!("{lines:#?}"))?;
        fs::remove_file(&stats).at("remove", &stats)?;
    }
    Ok(())
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t26_a_second_copy_of_the_library_has_no_device_and_says_why() -> Result<(), Error> {
    let pieces = Pieces::from_env()?;
    let server = pieces.serve(None)?;
    let copy = pieces.copy("libggml-virtgpu-copy.so")?;
    for second in [&copy, &pieces.dist.guest()] {
        for visible in [apir_tests::ggml::Visibility::Local, apir_tests::ggml::Visibility::Global] {
            let program = pieces.program(&server).visibility(visible);
            let output = program.run(&["twice", "--second", text(second)])?;
            check_remote(&output)?;
            let twice = event(&output, "twice")?;
            let count = |key: &str| twice[key].as_array().map_or(0, Vec::len);
            check((count("second"), count("all")) == (0, 1), || twice.to_string())?;
            let lines = warnings(&output);
            check(lines.len() == 1 && lines[0].contains("no device: this program has loaded "), || {
                format!("{lines:#?}")
            })?;
            check(lines[0].contains(text(&pieces.dist.guest())), || format!("{lines:#?}"))?;
        }
    }
    // Where the first is unloaded, the second has the device.
    for second in [&copy, &pieces.dist.guest()] {
        let output = pieces.program(&server).run(&["twice", "--unload", "--second", text(second)])?;
        check_remote(&output)?;
        let twice = event(&output, "twice")?;
        check(twice["second"] == twice["all"] && twice["all"].as_array().map_or(0, Vec::len) == 1, || {
            twice.to_string()
        })?;
        check(warnings(&output).is_empty(), || output.stderr.clone())?;
    }
    Ok(())
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t29_a_program_that_stores_what_it_reads_of_a_lost_host_is_told_or_ended() -> Result<(), Error> {
    let pieces = Pieces::from_env()?;
    for mapped in MAPPED_BYTES {
        for (setting, status) in [(None, 0), (Some("fail"), 0), (Some("exit"), 70)] {
            let server = pieces.serve(mapped)?;
            let mut program = pieces.program(&server).command(&["store"]);
            if let Some(setting) = setting {
                program = program.env("APIR_ON_LOST", setting);
            }
            let mut running = program.start()?;
            wait_for_event(&running, "ready", LIMIT)?;
            process::signal(server.wait_for_workers(1)?[0], Signal::SIGKILL)?;
            running.send_line("go")?;
            let output = running.wait(LIMIT)?;
            check(output.status.code() == Some(status), || format!("{}: {}", output.status, output.stderr))?;
            check(output.stdout.contains("stored") == (status == 0), || output.stdout.clone())?;
            let told = warnings(&output);
            let not_valid = |line: &&String| line.contains("is gone") && line.contains("not valid");
            check(told.iter().filter(not_valid).count() == 1, || format!("{told:#?}"))?;
            check(output.stderr.contains("ending with status 70") == (status == 70), || {
                output.stderr.clone()
            })?;
            if status == 0 {
                let stored = event(&output, "stored")?;
                check(stored["failed"] == true && stored["zeros"] == mapped.is_some(), || {
                    stored.to_string()
                })?;
            }
        }
    }
    let server = pieces.serve(None)?;
    let cpu = pieces.llama.cpu_library();
    let output =
        pieces.program(&server).cpu(&cpu).command(&["compute"]).env("APIR_ON_LOST", "abort").run(LIMIT)?;
    let told = warnings(&output.success()?);
    check(
        told.len() == 1 && told[0].contains("APIR_ON_LOST=abort: must be fail (the default) or exit"),
        || format!("{told:#?}"),
    )
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t31_paths_of_any_bytes_lead_to_a_device() -> Result<(), Error> {
    let pieces = Pieces::from_env()?;
    let folder = pieces.folder.path().join(OsStr::from_bytes(b"caf\xe9"));
    fs::create_dir(&folder).at("create", &folder)?;
    for entry in fs::read_dir(pieces.llama.path()).at("read", pieces.llama.path())?.flatten() {
        let name = entry.file_name();
        if name.as_bytes().starts_with(b"libggml") {
            fs::copy(entry.path(), folder.join(&name)).at("copy", &entry.path())?;
        }
    }
    for (from, to) in [(pieces.dist.guest(), "guest.so"), (pieces.dist.plugin(), "plugin.so")] {
        fs::copy(&from, folder.join(to)).at("copy", &from)?;
    }
    for sandbox in ["strict", "off"] {
        let server = Serve::new(&pieces.dist, &folder.join("libggml-cpu.so"))
            .plugin(&folder.join("plugin.so"))
            .env("APIR_SANDBOX", sandbox)
            .start()?;
        let program = GgmlProgram::new(env!("CARGO_BIN_EXE_ggml-program"), &folder, &pieces.dist)
            .guest(&folder.join("guest.so"))
            .envs(server.guest_env());
        check_remote(&program.run(&["compute"])?)?;
    }
    Ok(())
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t31_buffers_beyond_the_limit_on_mapped_ones_are_told_once() -> Result<(), Error> {
    let pieces = Pieces::from_env()?;
    let server = pieces.serve(Some("8192"))?;
    let started = std::time::Instant::now();
    let output = pieces.program(&server).run(&["allocate", "--count", "2000", "--only"])?;
    let told = output.stderr.lines().filter(|line| line.contains("using a device buffer")).count();
    check(told == 1, || format!("{told} lines: {}", output.stderr))?;
    // What the host says is bounded by the second.
    let host = server.stderr().lines().count() as u64;
    let most = 20 + 12 * (started.elapsed() + Duration::from_secs(2)).as_secs();
    check(host <= most, || format!("{host} lines of the host's, {most} may be:\n{}", server.stderr()))
}
