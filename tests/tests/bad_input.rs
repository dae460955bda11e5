//! What is missing or wrong is named in one line, and the program goes on without it.

use std::path::{Path, PathBuf};
use std::time::Duration;

use apir_tests::error::{IoContext, check};
use apir_tests::ggml_program::{GgmlProgram, event, warnings};
use apir_tests::peers::{self, Dist, LlamaDir};
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
    let (dist, llama, folder) = (Dist::from_env()?, LlamaDir::from_env()?, temporary()?);
    let library = folder.path().join("libggml-cpu.so");
    std::os::unix::fs::symlink(llama.cpu_library(), &library).at("link", &library)?;
    let server = Serve::new(&dist, &library).start()?;
    std::fs::remove_file(&library).at("remove", &library)?;
    check_fallback(&program(&dist, &llama).envs(server.guest_env()), &["--ggml-library"])?;
    check(
        server.stderr().contains(&format!("client 1: context 1: ggml library {}: ", name(&library))),
        || server.stderr(),
    )
}

/// A server's start that is refused for its ggml library.
fn check_library_refused(library: &Path, registration: Option<&str>, named: &[&str]) -> Result<(), Error> {
    let (dist, folder) = (Dist::from_env()?, temporary()?);
    let mut serve = Serve::new(&dist, library);
    if let Some(symbol) = registration {
        serve = serve.registration(symbol);
    }
    check_serve_refuses(&serve, &folder.path().join("socket"), &[&[name(library).as_str()], named].concat())
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t31_what_is_no_ggml_backend_is_found_at_the_start() -> Result<(), Error> {
    let (llama, folder) = (LlamaDir::from_env()?, temporary()?);
    let text = fakes::text_file(folder.path())?;
    check_library_refused(&text, None, &["cannot be loaded: "])?;
    let empty = fakes::empty_library(folder.path(), &llama)?;
    check_library_refused(&empty, None, &["not a ggml backend", "ggml_backend_init", "name a backend"])?;
    for part_of_ggml in ["libggml.so", "libggml-base.so"] {
        let library = llama.path().join(part_of_ggml);
        check_library_refused(&library, None, &["it has no function ggml_backend_init, as libggml.so"])?;
    }
    let plugin = Dist::from_env()?.plugin();
    check_library_refused(&plugin, None, &["neither it nor a library that it needs is ggml's"])?;
    let nothing = "ggml_backend_nothing_reg";
    check_library_refused(
        &llama.cpu_library(),
        Some(nothing),
        &[nothing, "but ggml_backend_init, the default"],
    )?;
    check_library_refused(&fakes::future_library(folder.path(), &llama)?, None, &["99"])
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t31_settings_that_do_not_parse_are_found_at_the_start() -> Result<(), Error> {
    let (dist, llama, folder) = (Dist::from_env()?, LlamaDir::from_env()?, temporary()?);
    let socket = folder.path().join("socket");
    for (variable, value, form) in [
        ("APIR_MAX_DEVICE_BYTES", "20GB", "a number of bytes such as 21474836480 or 20G"),
        ("APIR_MAX_MAPPED_BYTES", "-1", "a number of bytes"),
        ("APIR_MAX_COMMAND_BYTES", "0", "a number of bytes"),
        ("APIR_MAX_BUFFERS", "many", "a number from 1 on"),
        ("APIR_MAX_CACHED_GRAPHS", "1G", "a number"),
        ("APIR_MAX_GRAPH_NODES", "0", "a number from 1 on"),
        ("APIR_MAX_BAD_COMMANDS", "0", "a number from 1 on"),
        ("APIR_MAX_COMMAND_MS", "1s", "a number from 1 on"),
        ("APIR_MAX_LOG_LINES", "ten", "a number"),
        ("APIR_HOST_THREADS", "0", "a number from 1 to 1024"),
        ("APIR_PRESENT_AS", "cpu", "gpu, igpu or accel"),
        ("APIR_INDEX_CHECK", "on", "all, leaf or off"),
    ] {
        let serve = Serve::new(&dist, &llama.cpu_library()).env(variable, value);
        check_serve_refuses(&serve, &socket, &[&format!("apir: {variable}={value}: must be {form}")])?;
    }
    let server = Serve::new(&dist, &llama.cpu_library()).env("APIR_MAX_DEVICE_BYTES", "1G").start()?;
    let told = server.stderr();
    check(told.contains("; device CPU (") && told.contains("), 1024 MiB"), || told.clone())
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t31_of_a_package_s_variants_the_best_that_runs_is_served() -> Result<(), Error> {
    let (dist, variants) = (Dist::from_env()?, peers::ggml_api2()?);
    for named in [variants.clone(), variants.join("libggml-cpu-*.so")] {
        let server = Serve::new(&dist, &named).start()?;
        let told = server.stderr();
        check(told.contains(&format!("ggml library {}/libggml-cpu-", variants.display())), || told.clone())?;
        check(told.contains("; device CPU ("), || told.clone())?;
    }
    check_library_refused(&variants.join("libggml-cuda*.so"), None, &["no file libggml-cuda*.so in "])
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
