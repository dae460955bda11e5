//! Programs of one ggml release on a host of another: row T27 of the cases.
#![forbid(unsafe_code)]

use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::error::{Error, check};
use crate::ggml_program::{GgmlProgram, event};
use crate::peers::{self, Dist, Models};
use crate::program::{Output, Program};
use crate::server::Serve;

/// How long a program may take on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// A server in front of a release's CPU backend.
pub fn serve(host: &str) -> Result<Serve, Error> {
    let library = peers::ggml_release(host)?.join("libggml-cpu.so");
    let serve = Serve::new(&Dist::from_env()?, &library);
    Ok(match peers::registration(&library)? {
        Some(symbol) => serve.registration(symbol),
        None => serve,
    })
}

/// `ggml-program` of the release `guest` computes operations on the release `host`; fails unless each gives what it must.
pub fn operations(program: &str, guest: &str, host: &str) -> Result<(), Error> {
    let server = serve(host)?.start()?;
    let program = GgmlProgram::new(program, &peers::ggml_release(guest)?, &Dist::from_env()?);
    let output = program.envs(server.guest_env()).run(&["operations"])?;
    let loaded = event(&output, "loaded")?;
    check(loaded["version"] == guest, || format!("this is no ggml {guest}: {loaded}"))?;
    let computed = event(&output, "operations")?;
    check(computed["device"] == "[virtgpu] CPU", || format!("another device computed: {computed}"))?;
    let unsupported = computed["unsupported"].as_array().map_or(0, Vec::len);
    check(unsupported == 0, || format!("not all operations are supported: {computed}"))?;
    check_told(&output, guest, host)
}

/// `llama-program` of the release `guest` continues a prompt on the release `host`; fails unless it comes to the last bit to what the
/// host's release gives on its own processor: the kernels are the host's.
pub fn model(program: &str, guest: &str, host: &str) -> Result<(), Error> {
    let server = serve(host)?.start()?;
    let stats = tempfile::NamedTempFile::new().map_err(|error| Error::Unexpected(error.to_string()))?;
    let command = |release: &str| -> Result<Program, Error> {
        let command = Program::new(Path::new(program)).arg("--release").arg(peers::ggml_release(release)?);
        // Its default is four threads, which spin.
        Ok(command.arg("--model").arg(Models::from_env()?.tiny()).env("OMP_THREAD_LIMIT", "1"))
    };
    let local = command(host)?.run(LIMIT)?.success()?;
    let remote = command(guest)?.arg("--guest").arg(Dist::from_env()?.guest()).envs(server.guest_env());
    let remote = remote.env("APIR_STATS", stats.path()).run(LIMIT)?.success()?;
    let (wanted, found) = (event(&local, "tokens")?, event(&remote, "tokens")?);
    check(found == wanted, || format!("{found}, must be {wanted}"))?;
    let told = std::fs::read_to_string(stats.path()).unwrap_or_default();
    let computes = told.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let computes = computes.filter_map(|line| line["graph_computes"].as_u64()).max().unwrap_or(0);
    check(computes > 0, || format!("the host computed no graph: {told:?}"))?;
    check_told(&remote, guest, host)
}

/// A line tells of other numbers exactly where there are some.
fn check_told(output: &Output, guest: &str, host: &str) -> Result<(), Error> {
    let told = output.stderr.contains("operations are matched by name");
    // Since 0.17 the numbers have stayed.
    let differ = (guest == "0.13.1") != (host == "0.13.1");
    check(told == differ, || format!("the line about other numbers: {told}, must be {differ}"))
}
