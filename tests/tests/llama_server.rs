//! llama-server, as a chat application sees it.

use std::ffi::OsString;

use apir_tests::Error;
use apir_tests::chat;
use apir_tests::error::check;
use apir_tests::peers::{Dist, LlamaDir, Models};
use apir_tests::program::Program;
use apir_tests::server::Serve;

/// Starts a server, asks it something, and gives the answer and the server's log.
fn chat(arguments: &[&str], env: Vec<(OsString, OsString)>) -> Result<(String, String), Error> {
    let server = Program::new(&LlamaDir::from_env()?.program("llama-server"));
    chat::ask(server.args(arguments).envs(env), &Models::from_env()?.smollm2())
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
