//! `cargo xtask codegen`: the generated files follow protocol/commands.toml.

use crate::dist::Workspace;
use crate::error::Error;
use crate::ui::Ui;

/// Writes the stale files, or with `check` only shows how they differ; `false` when a check found some.
pub fn run(workspace: &Workspace, ui: &Ui, check: bool) -> Result<bool, Error> {
    let stale =
        apir_codegen::run(&workspace.root, check).map_err(|error| Error::Codegen(error.to_string()))?;
    for output in &stale {
        match check {
            true => ui.result(&output.diff()),
            false => ui.result(&format!("wrote {}", output.path)),
        }
    }
    if check && !stale.is_empty() {
        ui.line("generated files are stale: run cargo xtask codegen");
    }
    Ok(!check || stale.is_empty())
}
