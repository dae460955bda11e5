//! `cargo xtask archs`: a small random model of every architecture that llama.cpp can make one of, through the pair and on the local CPU.

use std::time::Duration;

use apir_tests::architectures::Architectures;
use apir_tests::peers::Dist;
use apir_tests::server::Serve;

use crate::dist::Workspace;
use crate::error::Error;
use crate::peers::{Llama, Stage};
use crate::ui::Ui;

/// How long all may take.
const LIMIT: Duration = Duration::from_secs(3600);

/// Options of the command.
#[derive(clap::Args)]
pub struct Options {
    /// A regular expression for the names of the architectures
    #[arg(long, default_value = ".")]
    only: String,
}

/// Runs it; `false` when a model came out otherwise than on the local CPU.
pub fn run(workspace: &Workspace, ui: &Ui, options: &Options) -> Result<bool, Error> {
    let llama = Llama::ready(ui, &[Stage::Libraries, Stage::Models])?;
    let dist = Dist::at(&workspace.build_dist(ui)?);
    let server = Serve::new(&dist, &llama.cpu_library()).start()?;
    let found = Architectures::run(&llama, &server, &options.only, LIMIT)?;
    found.failed.iter().for_each(|row| ui.result(&format!("not equal: {row}")));
    ui.result(&format!("no test: {}", found.skipped.join(", ")));
    ui.result(&format!("equal: {}", found.equal.join(", ")));
    let (equal, failed, skipped) = (found.equal.len(), found.failed.len(), found.skipped.len());
    ui.result(&format!(
        "{equal} models equal to the last bit, {failed} not; llama.cpp has no test of {skipped}"
    ));
    Ok(found.failed.is_empty() && equal > 0)
}
