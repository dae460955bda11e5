//! A host that goes away takes nobody else with it.

use std::time::Duration;

use apir_tests::Error;
use apir_tests::completion::{PROMPT, Request};
use apir_tests::error::check;
use apir_tests::ggml_program::{GgmlProgram, LIMIT, check_remote, wait_for_event};
use apir_tests::peers::{Dist, LlamaDir, Models};
use apir_tests::process;
use apir_tests::program::Running;
use apir_tests::server::{Serve, Server};
use nix::sys::signal::Signal;

/// How long a program may take to end after its host is gone.
const END_LIMIT: Duration = Duration::from_secs(20);

/// Starts a completion that goes on for long, and waits until it is in the middle of its text.
fn generating(server: &Server, llama: &LlamaDir) -> Result<Running, Error> {
    let request = Request::new(llama, &Models::from_env()?.smollm2(), 4000);
    let running = request.remote_command(server).start()?;
    running.wait_for("generate text", LIMIT, |text| (text.len() > PROMPT.len() + 60).then_some(()))?;
    Ok(running)
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_killed_worker_ends_its_client_only() -> Result<(), Error> {
    let (dist, llama) = (Dist::from_env()?, LlamaDir::from_env()?);
    let server = Serve::new(&dist, &llama.cpu_library()).start()?;
    let program =
        GgmlProgram::new(env!("CARGO_BIN_EXE_ggml-program"), llama.path(), &dist).envs(server.guest_env());
    let mut bystander = program.command(&["repeat", "--count", "50000"]).start()?;
    wait_for_event(&bystander, "ready", LIMIT)?;
    let spared = server.wait_for_workers(1)?[0];
    let victim = generating(&server, &llama)?;
    bystander.send_line("go")?;
    let workers = server.wait_for_workers(2)?;
    let Some(&worker) = workers.iter().find(|&&worker| worker != spared) else {
        return Err(Error::Unexpected(format!("no second worker among {workers:?}")));
    };

    process::signal(worker, Signal::SIGKILL)?;

    victim.wait(END_LIMIT)?.failed_by_itself()?;
    wait_for_event(&bystander, "done", LIMIT)?;
    bystander.wait(LIMIT)?.success()?;
    check(server.is_alive(), || format!("the server ended: {}", server.stderr()))?;
    check_remote(&program.run(&["compute"])?)
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_stopped_server_ends_its_clients() -> Result<(), Error> {
    let (dist, llama) = (Dist::from_env()?, LlamaDir::from_env()?);
    let server = Serve::new(&dist, &llama.cpu_library()).start()?;
    let client = generating(&server, &llama)?;
    let worker = server.wait_for_workers(1)?[0];
    process::signal(server.pid(), Signal::SIGKILL)?;
    client.wait(END_LIMIT)?.failed_by_itself()?;
    check(process::wait_until(END_LIMIT, || !process::is_alive(worker)), || {
        "the worker outlives its server".to_owned()
    })
}
