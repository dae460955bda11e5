//! `cargo xtask versions`: programs of every ggml release at hand on hosts of every one.

use crate::cache::Cache;
use crate::dist::Workspace;
use crate::error::Error;
use crate::peers::{Llama, Stage};
use crate::suite::Suite;
use crate::ui::Ui;
use crate::{models, releases};

/// Runs it; `false` when an operation or a model came out otherwise than it must.
pub fn run(workspace: &Workspace, ui: &Ui) -> Result<bool, Error> {
    let cache = Cache::open()?;
    let _lock = cache.lock(ui)?;
    let llama = Llama::find(&cache)?;
    for stage in [Stage::Libraries, Stage::Programs] {
        llama.build(&cache, ui, stage)?;
    }
    releases::ensure(&cache, ui, &llama)?;
    models::tiny(&cache, ui, &workspace.root)?;
    let dist = workspace.build_dist(ui)?;
    let tool = workspace
        .cargo("versions")
        .args(["test", "--no-fail-fast", "--workspace", "--test", "versions"])
        .args(["--", "--ignored", "--test-threads=1", "--show-output"])
        .env("APIR_HOST_THREADS", "1")
        .env("APIR_DIST", dist)
        .env("APIR_GGML_RELEASES", releases::folder(&cache))
        .env("APIR_MODELS", models::folder(&cache));
    let mut suite = Suite::new(ui);
    suite.cargo_test("versions", tool);
    Ok(suite.finish())
}
