//! ggml of two backend versions on either side, in programs that open it either way.

use std::path::Path;

use apir_tests::Error;
use apir_tests::error::check;
use apir_tests::fakes;
use apir_tests::ggml::Visibility;
use apir_tests::ggml_program::{GgmlProgram, check_remote, event, warnings};
use apir_tests::peers::{self, Dist, LlamaDir};
use apir_tests::releases;
use apir_tests::server::Serve;

/// Runs a program of the ggml in `folder` against the ggml library `host` in the server.
fn pair(folder: &Path, version: &str, visibility: Visibility, host: &Path) -> Result<(), Error> {
    pair_with(folder, version, visibility, &Serve::new(&Dist::from_env()?, host))
}

fn pair_with(folder: &Path, version: &str, visibility: Visibility, serve: &Serve) -> Result<(), Error> {
    let dist = Dist::from_env()?;
    let server = serve.start()?;
    let program = GgmlProgram::new(env!("CARGO_BIN_EXE_ggml-program"), folder, &dist);
    let output = program.visibility(visibility).envs(server.guest_env()).run(&["compute"])?;
    let loaded = event(&output, "loaded")?;
    check(loaded["version"].as_str().is_some_and(|found| found.starts_with(version)), || {
        format!("this is no ggml {version}: {loaded}")
    })?;
    check_remote(&output)?;
    let warnings = warnings(&output);
    check(warnings.is_empty(), || format!("a run without faults warns: {warnings:?}"))
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_program_of_api_3_that_opened_ggml_local() -> Result<(), Error> {
    let llama = LlamaDir::from_env()?;
    pair(llama.path(), "0.", Visibility::Local, &llama.cpu_library())
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_program_of_api_3_that_opened_ggml_global() -> Result<(), Error> {
    let llama = LlamaDir::from_env()?;
    pair(llama.path(), "0.", Visibility::Global, &llama.cpu_library())
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_program_of_api_2_that_opened_ggml_local() -> Result<(), Error> {
    let api2 = peers::ggml_api2()?;
    pair(&api2, "0.25.", Visibility::Local, &peers::baseline_cpu_library(&api2)?)
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_program_of_api_2_that_opened_ggml_global() -> Result<(), Error> {
    let api2 = peers::ggml_api2()?;
    pair(&api2, "0.25.", Visibility::Global, &peers::baseline_cpu_library(&api2)?)
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_program_of_api_2_and_a_host_of_api_3() -> Result<(), Error> {
    pair(&peers::ggml_api2()?, "0.25.", Visibility::Local, &LlamaDir::from_env()?.cpu_library())
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_program_of_api_3_and_a_host_of_api_2() -> Result<(), Error> {
    let host = peers::baseline_cpu_library(&peers::ggml_api2()?)?;
    pair(LlamaDir::from_env()?.path(), "0.", Visibility::Local, &host)
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_host_library_asked_by_its_own_registration_function() -> Result<(), Error> {
    let llama = LlamaDir::from_env()?;
    let serve = Serve::new(&Dist::from_env()?, &llama.cpu_library()).registration("ggml_backend_cpu_reg");
    pair_with(llama.path(), "0.", Visibility::Local, &serve)
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t27_operations_of_releases_that_number_them_differently() -> Result<(), Error> {
    releases::operations(env!("CARGO_BIN_EXE_ggml-program"), "0.13.1", "0.26.0")?;
    releases::operations(env!("CARGO_BIN_EXE_ggml-program"), "0.26.0", "0.13.1")
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t27_a_model_between_releases_that_number_operations_differently() -> Result<(), Error> {
    releases::model(env!("CARGO_BIN_EXE_llama-program"), "0.13.1", "0.26.0")?;
    releases::model(env!("CARGO_BIN_EXE_llama-program"), "0.26.0", "0.13.1")
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t27_a_guest_of_an_older_ggml_refuses_upstream_s_plugin_in_one_line() -> Result<(), Error> {
    let (dist, llama) = (Dist::from_env()?, LlamaDir::from_env()?);
    let server = Serve::new(&dist, &llama.cpu_library()).plugin(&llama.upstream_plugin()?).start()?;
    let folder = peers::ggml_release("0.13.1")?;
    let program =
        GgmlProgram::new(env!("CARGO_BIN_EXE_ggml-program"), &folder, &dist).envs(server.guest_env());
    let output = program.command(&["operations"]).run(std::time::Duration::from_secs(30))?;
    let lines: Vec<&str> = output.stderr.lines().filter(|line| line.contains("no device: ")).collect();
    let [line] = lines[..] else {
        return Err(Error::Unexpected(format!("not one line: {}", output.stderr)));
    };
    check(line.contains("0.13.1") && line.contains("0.19 or newer"), || line.to_owned())
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t27_a_ggml_to_come_with_an_operation_a_map_and_a_unit_inserted() -> Result<(), Error> {
    let (dist, llama, folder) = (Dist::from_env()?, LlamaDir::from_env()?, tempfile::tempdir());
    let folder = folder.map_err(|error| Error::Unexpected(error.to_string()))?;
    let library = fakes::shifted_library(folder.path(), &llama, &peers::llama_source()?)?;
    let server =
        Serve::new(&dist, &library).env("LD_LIBRARY_PATH", &llama.path().to_string_lossy()).start()?;
    let program =
        GgmlProgram::new(env!("CARGO_BIN_EXE_ggml-program"), llama.path(), &dist).envs(server.guest_env());
    let output = program.run(&["operations"])?;
    let computed = event(&output, "operations")?;
    // The last map has a number there that no known release gives one.
    check(computed["unsupported"] == serde_json::json!(["Trunc"]), || computed.to_string())?;
    check(output.stderr.contains("the host has ggml 0.28.0"), || output.stderr.clone())
}
