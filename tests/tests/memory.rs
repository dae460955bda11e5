//! Nothing that a command makes outlives it, on either side.

use std::time::Duration;

use apir_tests::Error;
use apir_tests::error::check;
use apir_tests::ggml_program::{GgmlProgram, wait_for_event};
use apir_tests::peers::{Dist, LlamaDir};
use apir_tests::process::{descriptor_count, mapping_count, rss_anon_kib};
use apir_tests::server::Serve;

/// How long the calls may take in all.
const LIMIT: Duration = Duration::from_secs(180);

/// By how much the memory of a process may grow, in KiB.
const GROWTH_KIB: u64 = 1024;

/// What is measured of one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Usage {
    rss_anon_kib: u64,
    mappings: usize,
    descriptors: usize,
}

impl Usage {
    fn of(pid: u32) -> Result<Self, Error> {
        Ok(Self {
            rss_anon_kib: rss_anon_kib(pid)?,
            mappings: mapping_count(pid)?,
            descriptors: descriptor_count(pid)?,
        })
    }
}

/// Runs `work` and gives what guest and worker used after its warm-up and at its end.
fn usage_around(work: &[&str]) -> Result<[(&'static str, Usage, Usage); 2], Error> {
    let (dist, llama) = (Dist::from_env()?, LlamaDir::from_env()?);
    let server = Serve::new(&dist, &llama.cpu_library()).start()?;
    let program = GgmlProgram::new(env!("CARGO_BIN_EXE_ggml-program"), llama.path(), &dist);
    let mut running = program.envs(server.guest_env()).command(work).start()?;
    wait_for_event(&running, "ready", LIMIT)?;
    let worker = server.wait_for_workers(1)?[0];
    let before = (Usage::of(running.pid())?, Usage::of(worker)?);
    running.send_line("go")?;
    wait_for_event(&running, "done", LIMIT)?;
    let after = (Usage::of(running.pid())?, Usage::of(worker)?);
    running.send_line("end")?;
    running.wait(LIMIT)?.success()?;
    Ok([("guest", before.0, after.0), ("worker", before.1, after.1)])
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_hundred_thousand_graphs_leave_nothing_behind() -> Result<(), Error> {
    for (side, before, after) in usage_around(&["repeat", "--warm-up", "1000", "--count", "100000"])? {
        check(after.rss_anon_kib < before.rss_anon_kib + GROWTH_KIB, || {
            format!("{side} grew by 1 MiB or more: {before:?}, then {after:?}")
        })?;
        check(after.descriptors <= before.descriptors, || {
            format!("{side} leaks descriptors: {before:?}, {after:?}")
        })?;
    }
    Ok(())
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn ten_thousand_mapped_buffers_leave_nothing_behind() -> Result<(), Error> {
    for (side, before, after) in usage_around(&["buffers", "--warm-up", "100", "--count", "10000"])? {
        check(after.mappings <= before.mappings, || {
            format!("{side} leaks mappings: {before:?}, then {after:?}")
        })?;
        check(after.descriptors <= before.descriptors, || {
            format!("{side} leaks descriptors: {before:?}, {after:?}")
        })?;
        check(after.rss_anon_kib < before.rss_anon_kib + GROWTH_KIB, || {
            format!("{side} grew by 1 MiB or more: {before:?}, then {after:?}")
        })?;
    }
    Ok(())
}
