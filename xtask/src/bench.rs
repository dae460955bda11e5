//! `cargo xtask bench`: measurements of the pair. Each one is a program that prints a JSON object.

use std::ffi::OsStr;

use apir_tests::peers::{Dist, LlamaDir};
use apir_tests::server::Serve;
use clap::ValueEnum;
use serde_json::{Map, Value};

use crate::dist::Workspace;
use crate::error::Error;
use crate::peers::{Llama, Stage};
use crate::ui::Ui;

/// Options of the benchmarks.
#[derive(clap::Args)]
pub struct Options {
    /// Print the results as one line of JSON at the end
    #[arg(long)]
    json: bool,
    /// Measure only this
    #[arg(long)]
    only: Option<Bench>,
}

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Bench {
    /// Time of a call that does nothing, in µs
    Call,
    /// Time to verify the graph of one token, and to recognise it when it comes again, in µs
    Verify,
}

/// Runs the chosen benchmarks, or all.
pub fn run(workspace: &Workspace, ui: &Ui, options: &Options) -> Result<(), Error> {
    let llama = Llama::ready(ui, &[Stage::Libraries])?;
    let dist = Dist::at(&workspace.build_dist(ui)?);
    let mut results = Map::new();
    for &bench in
        Bench::value_variants().iter().filter(|bench| options.only.is_none_or(|only| only == **bench))
    {
        let measured = match bench {
            Bench::Call => call(workspace, &dist, &llama)?,
            Bench::Verify => verify(workspace, &llama)?,
        };
        for (name, value) in measured {
            ui.result(&format!("{name}: {value}"));
            results.insert(name, value);
        }
    }
    if options.json {
        ui.result(&Value::Object(results).to_string());
    }
    Ok(())
}

/// A call without arguments, from the guest's session to the worker and back.
fn call(workspace: &Workspace, dist: &Dist, llama: &LlamaDir) -> Result<Map<String, Value>, Error> {
    let server = Serve::new(dist, &llama.cpu_library()).start()?;
    let cargo = ["-p", "apir-tests", "--bin", "call-bench"];
    program(workspace, &cargo, "APIR_SOCKET", server.socket().as_os_str())
}

/// The verifier of graphs alone, and the comparison that stands for it.
fn verify(workspace: &Workspace, llama: &LlamaDir) -> Result<Map<String, Value>, Error> {
    let cargo = ["-p", "apir-host", "--example", "verify_bench"];
    let mut measured = program(workspace, &cargo, "APIR_LLAMA_DIR", llama.path().as_os_str())?;
    measured.retain(|name, _| name == "verify_us");
    Ok(measured)
}

/// Runs a program of the workspace in release mode and reads the JSON object of its last line.
fn program(
    workspace: &Workspace,
    cargo: &[&str; 4],
    key: &str,
    value: &OsStr,
) -> Result<Map<String, Value>, Error> {
    let name = cargo[3];
    let lines = workspace
        .cargo(name)
        .args(["run", "--quiet", "--release"])
        .args(cargo)
        .env(key, value)
        .run_lines(|_| ())?;
    let line = lines.last().map_or("", String::as_str);
    serde_json::from_str(line)
        .map_err(|error| Error::Check(format!("{name} printed no JSON at its end: {line}: {error}")))
}
