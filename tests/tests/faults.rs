//! Rows T6, T10, T20 and T21 of the cases: a host that fails, ends, stops or answers nonsense, and guests that are killed.

use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use apir_tests::Error;
use apir_tests::error::{IoContext, check};
use apir_tests::fakes;
use apir_tests::ggml_program::{GgmlProgram, LIMIT, check_remote, event, wait_for_event};
use apir_tests::peers::{self, Dist, LlamaDir};
use apir_tests::process;
use apir_tests::program::{Output, Running};
use apir_tests::server::{Serve, Server};
use nix::sys::signal::Signal;
use serde_json::json;
use tempfile::TempDir;

/// How long a program may take to end: the ten seconds of silence that a host may have, and room for a busy machine.
const END_LIMIT: Duration = Duration::from_secs(60);

/// What the tests are about and what they are made with.
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

    /// Our plugin in front of ggml's CPU backend with a fault.
    fn faulty(&self, fault: &str) -> Result<Serve, Error> {
        let library = fakes::gpu_library(self.folder.path(), &self.llama, &peers::llama_source()?)?;
        Ok(Serve::new(&self.dist, &library).env("APIR_TEST_FAULT", fault))
    }

    fn program(&self, server: &Server) -> GgmlProgram {
        GgmlProgram::new(env!("CARGO_BIN_EXE_ggml-program"), self.llama.path(), &self.dist)
            .envs(server.guest_env())
    }
}

/// Has a program make `count` buffers of 256 MiB on a host that has room for two; which of them it got.
fn without_memory(
    program: &GgmlProgram,
    server: &Server,
    count: usize,
) -> Result<(Output, Vec<bool>), Error> {
    const SIZE: usize = 256 << 20;
    let work = ["allocate", "--count", &count.to_string(), "--size", &SIZE.to_string()];
    let mut running = program.command(&work).start()?;
    wait_for_event(&running, "ready", LIMIT)?;
    let worker = server.wait_for_workers(1)?[0];
    let limit = process::address_space(worker)? + (700 << 20);
    let limited = Command::new("prlimit").args([format!("--pid={worker}"), format!("--as={limit}")]).status();
    check(limited.is_ok_and(|status| status.success()), || "prlimit failed".to_owned())?;
    running.send_line("go")?;
    let output = running.wait(LIMIT)?.success()?;
    let allocated = event(&output, "allocated")?;
    let made = allocated["made"].as_array().into_iter().flatten().map(|made| *made == true).collect();
    Ok((output, made))
}

/// A program that a signal went to; what became of it.
fn killed(running: Running) -> Result<(), Error> {
    process::signal(running.pid(), Signal::SIGKILL)?;
    let output = running.wait(END_LIMIT)?;
    check(output.status.signal() == Some(9), || format!("it ended with {}", output.status))
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t6_the_third_allocation_fails_and_the_next_one_works() -> Result<(), Error> {
    let pieces = Pieces::from_env()?;
    let server = pieces.faulty("alloc:3")?.start()?;
    let output = pieces.program(&server).run(&["allocate", "--count", "5"])?;
    let made = &event(&output, "allocated")?["made"];
    check(*made == json!([true, true, false, true, true]), || format!("buffers made: {made}"))?;
    check(event(&output, "computed")?["supported"] == true, || output.stdout.clone())
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t6_a_host_without_memory_refuses_buffers_and_goes_on() -> Result<(), Error> {
    let pieces = Pieces::from_env()?;
    let server = Serve::new(&pieces.dist, &pieces.llama.cpu_library()).start()?;
    let (output, made) = without_memory(&pieces.program(&server), &server, 6)?;
    check(made.first() == Some(&true) && made.last() == Some(&false), || format!("buffers made: {made:?}"))?;
    check_remote(&output)
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t21_what_ggml_says_of_a_guests_commands_is_bounded() -> Result<(), Error> {
    let pieces = Pieces::from_env()?;
    let server = Serve::new(&pieces.dist, &pieces.llama.cpu_library()).start()?;
    let started = Instant::now();
    let (_, made) = without_memory(&pieces.program(&server), &server, 20_000)?;
    let failed = made.iter().filter(|made| !**made).count();
    check(failed > 19_000, || format!("only {failed} allocations failed"))?;
    let lines = server.stderr();
    let count = lines.lines().filter(|line| line.contains("ggml: ")).count() as u64;
    // Ten a second, each with a count of the others before it.
    let most = 10 * (started.elapsed().as_secs() + 2);
    check(count <= most && count < 19_000, || format!("{count} lines of ggml's, {most} may be"))?;
    check(lines.contains("earlier lines left out"), || lines.clone())
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t10_a_long_computation_and_its_end_disturb_no_other_guest() -> Result<(), Error> {
    let pieces = Pieces::from_env()?;
    let server = pieces.faulty("slow:2000")?.start()?;
    let program = pieces.program(&server);
    let mut slow = program.command(&["latency", "--side", "64", "--seconds", "600"]).start()?;
    wait_for_event(&slow, "ready", LIMIT)?;
    let mut quick = program.command(&["latency", "--seconds", "6"]).start()?;
    wait_for_event(&quick, "ready", LIMIT)?;
    slow.send_line("go")?;
    quick.send_line("go")?;
    std::thread::sleep(Duration::from_secs(3));
    killed(slow)?;
    let output = quick.wait(LIMIT)?.success()?;
    let latency = event(&output, "latency")?;
    println!("beside a computation of 2 s: {latency}");
    let p99 = latency["p99_us"].as_u64().unwrap_or(u64::MAX);
    // It would be 2 s if it waited for the other; 5 ms are asked for on a machine that does nothing else.
    check(p99 < 50_000, || format!("the quick guest waited: {latency}"))
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t20_a_backend_that_ends_its_process_fails_one_guest() -> Result<(), Error> {
    let pieces = Pieces::from_env()?;
    for fault in ["abort", "exit"] {
        let server = pieces.faulty(fault)?.start()?;
        let program = pieces.program(&server);
        let mut bystander = program.command(&["allocate", "--count", "9", "--only"]).start()?;
        wait_for_event(&bystander, "ready", LIMIT)?;
        let output = program.command(&["compute"]).run(END_LIMIT)?.failed_by_itself()?;
        check(output.stderr.contains("the apir host is gone"), || output.stderr.clone())?;
        bystander.send_line("go")?;
        let output = bystander.wait(LIMIT)?.success()?;
        check(event(&output, "allocated")?["made"] == json!(vec![true; 9]), || output.stdout.clone())?;
        program.run(&["allocate", "--count", "1", "--only"])?;
        check(server.is_alive(), || server.stderr())?;
    }
    Ok(())
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t20_a_stopped_worker_fails_its_guest_and_comes_too_late() -> Result<(), Error> {
    let pieces = Pieces::from_env()?;
    let server = Serve::new(&pieces.dist, &pieces.llama.cpu_library()).start()?;
    let program = pieces.program(&server);
    let mut running = program.command(&["repeat", "--count", "1000"]).start()?;
    wait_for_event(&running, "ready", LIMIT)?;
    let worker = server.wait_for_workers(1)?[0];
    process::signal(worker, Signal::SIGSTOP)?;
    running.send_line("go")?;
    let output = running.wait(END_LIMIT)?.failed_by_itself()?;
    check(output.stderr.contains("no sign of life for 10000 ms"), || output.stderr.clone())?;
    check_remote(&program.run(&["compute"])?)?;
    process::signal(worker, Signal::SIGCONT)?;
    check(process::wait_until(END_LIMIT, || !process::is_alive(worker)), || {
        "the worker outlives its guest".to_owned()
    })
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t20_a_host_that_never_replies_fails_its_guest() -> Result<(), Error> {
    let pieces = Pieces::from_env()?;
    let server = pieces.faulty("hang")?.env("APIR_MAX_COMMAND_MS", "1000").start()?;
    let program = pieces.program(&server);
    let output =
        program.command(&["compute"]).env("APIR_TIMEOUT_MS", "2000").run(END_LIMIT)?.failed_by_itself()?;
    check(output.stderr.contains("no sign of life for 2000 ms"), || output.stderr.clone())?;
    program.run(&["allocate", "--count", "1", "--only"]).map(drop)
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t20_a_computation_that_takes_longer_than_the_silence_is_waited_for() -> Result<(), Error> {
    let pieces = Pieces::from_env()?;
    let server = pieces.faulty("slow:4000")?.start()?;
    let program = pieces.program(&server);
    let work = ["latency", "--side", "64", "--seconds", "1"];
    let mut running = program.command(&work).env("APIR_TIMEOUT_MS", "1500").start()?;
    wait_for_event(&running, "ready", LIMIT)?;
    running.send_line("go")?;
    let output = running.wait(LIMIT)?.success()?;
    let most = event(&output, "latency")?["most_us"].as_u64();
    check(most.is_some_and(|most| most >= 4_000_000), || output.stdout.clone())
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t20_a_plugin_that_answers_nonsense_ends_no_program() -> Result<(), Error> {
    let pieces = Pieces::from_env()?;
    let plugin = fakes::rubbish_plugin(pieces.folder.path(), &pieces.llama)?;
    let server = Serve::new(&pieces.dist, &pieces.llama.cpu_library()).plugin(&plugin).start()?;
    let output = pieces.program(&server).command(&["compute"]).run(END_LIMIT)?;
    output.failed_by_itself()?;
    // With a local backend to fall back to, the program does its work.
    let local = pieces.program(&server).cpu(&pieces.llama.cpu_library()).run(&["compute"])?;
    check(event(&local, "computed")?["device"] == "CPU", || local.stdout.clone())
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t20_a_guest_killed_at_any_command_leaves_nothing() -> Result<(), Error> {
    let pieces = Pieces::from_env()?;
    let server = Serve::new(&pieces.dist, &pieces.llama.cpu_library()).start()?;
    let program = pieces.program(&server);
    let mut witness = program.command(&["latency", "--seconds", "1"]).start()?;
    wait_for_event(&witness, "ready", LIMIT)?;
    for step in 0..20 {
        let victim = program.command(&["threads", "--threads", "2", "--rounds", "1000000"]).start()?;
        std::thread::sleep(Duration::from_millis(step * 15));
        killed(victim)?;
    }
    server.wait_for_workers(1)?;
    witness.send_line("go")?;
    witness.wait(LIMIT)?.success()?;
    check_remote(&program.run(&["compute"])?)?;
    server.wait_for_workers(0)?;
    check(server.is_alive(), || server.stderr())?;
    let left = sockets_beside(server.socket());
    check(left == 1, || format!("{left} files beside the socket"))
}

fn sockets_beside(socket: &Path) -> usize {
    socket.parent().and_then(|folder| folder.read_dir().ok()).map_or(0, Iterator::count)
}
