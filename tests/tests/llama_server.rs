//! llama-server, as a chat application sees it.

use std::ffi::OsString;
use std::time::Duration;

use apir_tests::Error;
use apir_tests::error::check;
use apir_tests::http;
use apir_tests::peers::{Dist, LlamaDir, Models};
use apir_tests::process::wait_until;
use apir_tests::program::Program;
use apir_tests::server::Serve;
use serde_json::{Value, json};

/// How long it may take to load the model.
const READY_LIMIT: Duration = Duration::from_secs(60);

/// Starts a server, asks it something, and gives the answer and the server's log.
fn chat(arguments: &[&str], env: Vec<(OsString, OsString)>) -> Result<(String, String), Error> {
    let port = http::free_port()?;
    let running = Program::new(&LlamaDir::from_env()?.program("llama-server"))
        .arg("-m")
        .arg(Models::from_env()?.smollm2())
        .args(["--port", &port.to_string(), "-t", "1", "-c", "1024", "-np", "1", "--no-warmup"])
        .args(["--fit", "off", "--log-verbosity", "4", "--log-colors", "off"])
        .args(arguments)
        .envs(env)
        .start()?;
    let healthy = || matches!(http::request(port, "GET", "/health", &Value::Null), Ok((200, _)));
    if !wait_until(READY_LIMIT, healthy) {
        return Err(running.timeout("be healthy", READY_LIMIT));
    }
    let question = json!({
        "messages": [{"role": "user", "content": "Name the capital of France."}],
        "max_tokens": 16,
        "temperature": 0,
    });
    let (status, answer) = http::request(port, "POST", "/v1/chat/completions", &question)?;
    check(status == 200, || format!("{status}: {answer}"))?;
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap_or("").to_owned();
    check(!text.trim().is_empty(), || format!("no text in {answer}"))?;
    Ok((text, running.stderr().text()))
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_chat_is_answered_as_by_the_local_cpu() -> Result<(), Error> {
    let server = Serve::new(&Dist::from_env()?, &LlamaDir::from_env()?.cpu_library()).start()?;
    let (remote, log) = chat(&["-ngl", "99"], server.guest_env())?;
    check(log.contains("[virtgpu] CPU model buffer size"), || {
        format!("no weights on the remote device:\n{log}")
    })?;
    let (local, _) = chat(&["--device", "none", "--no-repack"], Vec::new())?;
    check(remote == local, || format!("remote: {remote:?}\nlocal: {local:?}"))
}
