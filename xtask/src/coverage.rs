//! `cargo xtask coverage`: lines of the host and the protocol that their own tests reach in their own processes.
//!
//! tarpaulin sees the files of one workspace only: what the seeds of the fuzz targets reach beyond is not counted.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::apt;
use crate::cache::Cache;
use crate::cargo_tools::{self, Subcommand};
use crate::dist::Workspace;
use crate::error::{Error, IoContext};
use crate::peers::{Llama, Stage};
use crate::tools::Tool;
use crate::ui::Ui;

/// What counts lines.
const TARPAULIN: Subcommand = Subcommand { name: "cargo-tarpaulin", version: "0.37.5" };

/// The folders whose lines count.
const COUNTED: [&str; 2] = ["host/src/", "protocol/src/"];

/// Files in them that are tests.
const TESTS: [&str; 3] = ["host/src/mutants.rs", "/tests/", "/tests.rs"];

/// Options of the measurement.
#[derive(clap::Args)]
pub struct Options {
    /// Fail below this share of the lines, in percent
    #[arg(long, default_value_t = 85.0)]
    least: f64,
}

/// What tarpaulin writes.
#[derive(Debug, Deserialize)]
struct Report {
    files: Vec<File>,
}

/// A source file, its path in parts.
#[derive(Debug, Deserialize)]
struct File {
    path: Vec<String>,
    traces: Vec<Trace>,
}

/// A line that can be reached.
#[derive(Debug, Deserialize)]
struct Trace {
    line: u64,
    stats: Stats,
}

/// How often it was.
#[derive(Debug, Deserialize)]
enum Stats {
    Line(u64),
}

/// Whether each line of each file was reached.
#[derive(Debug, Default)]
struct Lines(BTreeMap<PathBuf, BTreeMap<u64, bool>>);

/// Runs it; `false` when fewer lines than wanted are reached.
pub fn run(workspace: &Workspace, ui: &Ui, options: &Options) -> Result<bool, Error> {
    let (llama, path) = {
        let cache = Cache::open()?;
        let _lock = cache.lock(ui)?;
        apt::ensure(&cache, ui, apt::C_COMPILER)?;
        cargo_tools::ensure(workspace, &cache, ui, TARPAULIN)?;
        let llama = Llama::find(&cache)?;
        llama.build(&cache, ui, Stage::Libraries)?;
        (llama, cargo_tools::path(&cache)?)
    };
    workspace.build_dist(ui)?;
    ui.line("run the tests of host and protocol under ptrace");
    let out = workspace.target("coverage");
    fs::create_dir_all(&out).at("create", &out)?;
    tarpaulin(workspace, &out).env("PATH", &path).env("APIR_LLAMA_DIR", &llama.bin).run()?;
    let lines = Lines::read(&workspace.root, &out.join("tarpaulin-report.json"))?;
    for (path, lines) in &lines.0 {
        let reached = lines.values().filter(|reached| **reached).count();
        let missed: Vec<u64> =
            lines.iter().filter(|(_, reached)| !**reached).map(|(line, _)| *line).collect();
        let missed = if missed.is_empty() { String::new() } else { format!(", not {}", ranges(&missed)) };
        ui.result(&format!("{}: {reached} of {}{missed}", path.display(), lines.len()));
    }
    let (reached, all) = lines.count();
    let share = 100.0 * reached as f64 / all.max(1) as f64;
    ui.result(&format!("{reached} of {all} lines, {share:.1} %"));
    Ok(share >= options.least)
}

fn tarpaulin(workspace: &Workspace, out: &Path) -> Tool {
    workspace
        .cargo("coverage")
        .args(["tarpaulin", "--engine", "ptrace", "--out", "Json", "--skip-clean", "--timeout", "600"])
        .arg("--output-dir")
        .arg(out)
        .arg("--target-dir")
        .arg(out)
        .args(["-p", "apir-host", "-p", "apir-protocol"])
        .args(["--", "--include-ignored", "--test-threads=1"])
        .env("APIR_DIST", workspace.dist())
        .env("APIR_HOST_THREADS", "1")
        .env("APIR_LOG", "off")
}

impl Lines {
    /// What a run reached.
    fn read(root: &Path, report: &Path) -> Result<Self, Error> {
        let text = fs::read_to_string(report).at("read", report)?;
        let parsed: Report = serde_json::from_str(&text)
            .map_err(|error| Error::Check(format!("{}: {error}", report.display())))?;
        let mut all = Self::default();
        for file in parsed.files {
            let path: PathBuf = file.path.iter().collect();
            let Ok(path) = path.strip_prefix(root) else { continue };
            let text = path.to_string_lossy();
            let counts = COUNTED.iter().any(|folder| text.starts_with(folder));
            if !counts || TESTS.iter().any(|test| text.contains(test)) {
                continue;
            }
            let lines = all.0.entry(path.to_owned()).or_default();
            for Trace { line, stats: Stats::Line(count) } in file.traces {
                *lines.entry(line).or_default() |= count > 0;
            }
        }
        Ok(all)
    }

    /// Lines that were reached, and all.
    fn count(&self) -> (usize, usize) {
        let all = self.0.values().flat_map(BTreeMap::values);
        (all.clone().filter(|reached| **reached).count(), all.count())
    }
}

/// Numbers in order, those in a row as one range.
fn ranges(numbers: &[u64]) -> String {
    let rows = numbers.chunk_by(|a, b| *b == a + 1);
    let texts = rows.map(|row| match row {
        [first, .., last] => format!("{first}-{last}"),
        [one] => one.to_string(),
        [] => String::new(),
    });
    texts.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_counts_once_and_tests_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let report = dir.path().join("r.json");
        let file = |path: &str, traces: &str| {
            format!(
                r#"{{"path":["/","w",{path}],"content":"","covered":1,"coverable":2,"traces":[{traces}]}}"#
            )
        };
        let trace = |line: u64, count: u64| {
            format!(r#"{{"line":{line},"address":[],"length":1,"stats":{{"Line":{count}}}}}"#)
        };
        let own = file(r#""host","src","a.rs""#, &[trace(1, 0), trace(1, 3), trace(2, 0)].join(","));
        let test = file(r#""host","src","verify","tests","b.rs""#, &trace(1, 0));
        let other = file(r#""guest","src","c.rs""#, &trace(1, 0));
        fs::write(&report, format!(r#"{{"files":[{own},{test},{other}]}}"#)).unwrap();
        let lines = Lines::read(Path::new("/w"), &report).unwrap();
        assert_eq!(lines.count(), (1, 2));
    }

    #[test]
    fn numbers_in_a_row_are_a_range() {
        assert_eq!(ranges(&[1, 2, 3, 7, 9, 10]), "1-3 7 9-10");
    }
}
