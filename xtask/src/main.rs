//! Developer commands: cargo xtask demo | test | codegen | bench | archs | versions | ops | fuzz | coverage | dist.
#![forbid(unsafe_code)]

mod apt;
mod archs;
mod bench;
mod cache;
mod cargo_tools;
mod codegen;
mod coverage;
mod debian;
mod demo;
mod dist;
mod error;
mod fetch;
mod fuzz;
mod glibc;
mod models;
mod ops;
mod peers;
mod python;
mod releases;
mod rutabaga;
mod suite;
mod test;
mod tools;
mod ui;
mod upstream;
mod versions;
mod vm;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::dist::Workspace;
use crate::error::Error;
use crate::ui::Ui;

/// Developer commands of apir.
///
/// Peers and models are kept in $APIR_CACHE, or ~/.cache/apir; LLAMA_CPP_DIR names a llama.cpp to use instead of building one.
#[derive(Parser)]
#[command(name = "cargo xtask", max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Let llama.cpp generate text through the pair, and compare it with the same run on the local CPU
    Demo(demo::Options),
    /// Run every check and every test
    Test,
    /// Rewrite the generated files from protocol/commands.toml
    Codegen {
        /// Only say which are stale, as a unified diff
        #[arg(long)]
        check: bool,
    },
    /// Measure the pair
    Bench(bench::Options),
    /// Run a model of every architecture of llama.cpp through the pair, and compare it with the local CPU
    Archs(archs::Options),
    /// Run programs of every ggml release at hand on hosts of every one
    Versions,
    /// Run every case of ggml's own test-backend-ops through the pair
    Ops(ops::Options),
    /// Run a command in a virtual machine: stock QEMU, Debian's kernel, our renderer and plugin
    Vm(vm::Options),
    /// Run the fuzz targets
    Fuzz(fuzz::Options),
    /// Count the lines of the host and the protocol that their tests reach
    Coverage(coverage::Options),
    /// Build apir and its two libraries and give them their real names
    Dist,
}

fn main() -> ExitCode {
    let ui = Ui::new();
    match run(&Arguments::parse().command, &ui) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            ui.line(&format!("error: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// Runs a command; gives back its exit status, 1 when it ran, but what it checked does not hold.
fn run(command: &Command, ui: &Ui) -> Result<u8, Error> {
    let workspace = Workspace::find()?;
    let holds = match command {
        Command::Vm(options) => return vm::run(&workspace, ui, options),
        Command::Demo(options) => demo::run(&workspace, ui, options),
        Command::Test => test::run(&workspace, ui),
        Command::Codegen { check } => codegen::run(&workspace, ui, *check),
        Command::Bench(options) => bench::run(&workspace, ui, options).map(|()| true),
        Command::Archs(options) => archs::run(&workspace, ui, options),
        Command::Versions => versions::run(&workspace, ui),
        Command::Ops(options) => ops::run(&workspace, ui, options),
        Command::Fuzz(options) => fuzz::run(&workspace, ui, options),
        Command::Coverage(options) => coverage::run(&workspace, ui, options),
        Command::Dist => {
            let folder: PathBuf = workspace.build_dist(ui)?;
            ui.result(&folder.display().to_string());
            Ok(true)
        }
    }?;
    Ok(u8::from(!holds))
}
