//! What is missing or wrong is named in one line, and the program goes on without it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use apir_tests::error::{IoContext, check};
use apir_tests::ggml_program::{GgmlProgram, event, warnings};
use apir_tests::peers::{Dist, LlamaDir};
use apir_tests::server::Serve;
use apir_tests::{Error, fakes};

/// How long a server may take to refuse.
const LIMIT: Duration = Duration::from_secs(20);

/// A program that can fall back to its local CPU.
fn program(dist: &Dist, llama: &LlamaDir) -> GgmlProgram {
    GgmlProgram::new(env!("CARGO_BIN_EXE_ggml-program"), llama.path(), dist).cpu(&llama.cpu_library())
}

/// Fails unless the program found no remote device, said why in one line with all of `named`, and used its CPU.
fn check_fallback(program: &GgmlProgram, named: &[&str]) -> Result<(), Error> {
    let output = program.run(&["compute"])?;
    let loaded = event(&output, "loaded")?;
    check(loaded["devices"] == serde_json::json!([]), || format!("there are devices: {loaded}"))?;
    check(event(&output, "computed")?["device"] == "CPU", || "the CPU did not compute".to_owned())?;
    let lines = warnings(&output);
    check(lines.len() == 1, || format!("not one line but {lines:#?}\nall of stderr:\n{}", output.stderr))?;
    match named.iter().find(|part| !lines[0].contains(**part)) {
        None => Ok(()),
        Some(part) => Err(Error::Unexpected(format!("{part:?} is not in {:?}", lines[0]))),
    }
}

/// As [`check_fallback`], with a server that runs, but cannot do what it shall; its own line must have all of `named`.
fn check_refused_by_host(serve: &Serve, named: &[&str]) -> Result<(), Error> {
    let (dist, llama) = (Dist::from_env()?, LlamaDir::from_env()?);
    let server = serve.start()?;
    check_fallback(&program(&dist, &llama).envs(server.guest_env()), &[])?;
    let told = server.stderr();
    let line = told.lines().find(|line| named.iter().all(|part| line.contains(part)));
    check(line.is_some(), || format!("no line of the server has all of {named:?}:\n{told}"))?;
    check(server.is_alive(), || "the server ended".to_owned())
}

/// Fails unless `apir serve` refuses with exit code 1 and one line with all of `named`.
fn check_serve_refuses(serve: &Serve, socket: &Path, named: &[&str]) -> Result<(), Error> {
    let output = serve.command(socket).run(LIMIT)?;
    check(output.status.code() == Some(1), || format!("it ended with {}: {}", output.status, output.stderr))?;
    let lines: Vec<&str> = output.stderr.lines().collect();
    check(lines.len() == 1, || format!("not one line: {:?}", output.stderr))?;
    match named.iter().find(|part| !lines[0].contains(**part)) {
        None => Ok(()),
        Some(part) => Err(Error::Unexpected(format!("{part:?} is not in {:?}", lines[0]))),
    }
}

fn temporary() -> Result<tempfile::TempDir, Error> {
    tempfile::tempdir().at("create a folder in", &std::env::temp_dir())
}

fn name(path: &Path) -> String {
    path.display().to_string()
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_socket_that_is_not_there() -> Result<(), Error> {
    let (dist, llama, folder) = (Dist::from_env()?, LlamaDir::from_env()?, temporary()?);
    let socket = folder.path().join("nobody");
    let program = program(&dist, &llama).envs([("APIR_SOCKET".into(), socket.clone().into())]);
    check_fallback(&program, &[&name(&socket), "apir serve"])
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_socket_that_nobody_listens_on() -> Result<(), Error> {
    let (dist, llama, folder) = (Dist::from_env()?, LlamaDir::from_env()?, temporary()?);
    let socket = folder.path().join("stale");
    std::os::unix::net::UnixListener::bind(&socket).at("listen on", &socket)?;
    let program = program(&dist, &llama).envs([("APIR_SOCKET".into(), socket.clone().into())]);
    check_fallback(&program, &[&name(&socket)])
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn no_socket_and_no_virtual_gpu() -> Result<(), Error> {
    let (dist, llama) = (Dist::from_env()?, LlamaDir::from_env()?);
    check_fallback(&program(&dist, &llama), &["APIR_SOCKET"])
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_library_that_went_away() -> Result<(), Error> {
    let (dist, folder) = (Dist::from_env()?, temporary()?);
    let library = fakes::text_file(folder.path())?;
    let server = Serve::new(&dist, &library).start()?;
    std::fs::remove_file(&library).at("remove", &library)?;
    let llama = LlamaDir::from_env()?;
    check_fallback(&program(&dist, &llama).envs(server.guest_env()), &[])?;
    check(server.stderr().contains(&name(&library)), || server.stderr())
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_library_that_is_text() -> Result<(), Error> {
    let (dist, folder) = (Dist::from_env()?, temporary()?);
    let library = fakes::text_file(folder.path())?;
    check_refused_by_host(&Serve::new(&dist, &library), &[&name(&library)])
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_library_without_the_symbol() -> Result<(), Error> {
    let (dist, folder) = (Dist::from_env()?, temporary()?);
    let library = fakes::empty_library(folder.path(), &LlamaDir::from_env()?)?;
    check_refused_by_host(&Serve::new(&dist, &library), &[&name(&library), "ggml_backend_init"])
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_symbol_that_the_library_does_not_have() -> Result<(), Error> {
    let (dist, llama) = (Dist::from_env()?, LlamaDir::from_env()?);
    let library = llama.cpu_library();
    let serve = Serve::new(&dist, &library).registration("ggml_backend_nothing_reg");
    check_refused_by_host(&serve, &[&name(&library), "ggml_backend_nothing_reg"])
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_library_of_a_version_to_come() -> Result<(), Error> {
    let (dist, folder) = (Dist::from_env()?, temporary()?);
    let library = fakes::future_library(folder.path(), &LlamaDir::from_env()?)?;
    check_refused_by_host(&Serve::new(&dist, &library), &[&name(&library), "99"])
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_plugin_that_is_no_plugin() -> Result<(), Error> {
    let (dist, llama, folder) = (Dist::from_env()?, LlamaDir::from_env()?, temporary()?);
    let plugin = fakes::empty_library(folder.path(), &llama)?;
    let serve = Serve::new(&dist, &llama.cpu_library()).plugin(&plugin);
    let named = [&name(&plugin), "undefined symbol: apir_backend_initialize"];
    check_serve_refuses(&serve, &folder.path().join("socket"), &named)
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_server_without_its_files() -> Result<(), Error> {
    let (dist, llama, folder) = (Dist::from_env()?, LlamaDir::from_env()?, temporary()?);
    let (socket, missing) = (folder.path().join("socket"), folder.path().join("missing.so"));
    let good = Serve::new(&dist, &llama.cpu_library());
    check_serve_refuses(&good.clone().plugin(&missing), &socket, &[&name(&missing)])?;
    check_serve_refuses(&Serve::new(&dist, &missing), &socket, &[&name(&missing)])?;
    let nowhere = folder.path().join("no-such-folder/socket");
    check_serve_refuses(&good, &nowhere, &[&name(&nowhere)])?;
    let long = folder.path().join("s".repeat(120));
    check_serve_refuses(&good, &long, &[&name(&long)])
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_socket_in_use() -> Result<(), Error> {
    let (dist, llama) = (Dist::from_env()?, LlamaDir::from_env()?);
    let serve = Serve::new(&dist, &llama.cpu_library());
    let server = serve.start()?;
    let socket: PathBuf = server.socket().to_owned();
    check_serve_refuses(&serve, &socket, &[&name(&socket)])?;
    check(server.is_alive(), || "the first server ended".to_owned())
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_server_that_is_asked_to_stop() -> Result<(), Error> {
    let (dist, llama) = (Dist::from_env()?, LlamaDir::from_env()?);
    let server = Serve::new(&dist, &llama.cpu_library()).start()?;
    let socket = server.socket().to_owned();
    let output = server.stop()?;
    check(output.status.code() == Some(0), || format!("it ended with {}: {}", output.status, output.stderr))?;
    check(!socket.exists(), || format!("{} is left", socket.display()))
}
