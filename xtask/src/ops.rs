//! `cargo xtask ops`: every case of ggml's own test-backend-ops through the pair, and a table of what came of them.

use std::fmt;
use std::fs;
use std::time::{Duration, Instant};

use apir_tests::backend_ops::{Cases, operations};
use apir_tests::peers::Dist;
use apir_tests::server::Serve;

use crate::dist::Workspace;
use crate::error::{Error, IoContext};
use crate::peers::{Llama, Stage};
use crate::ui::Ui;

/// How long the cases of one operation may take.
const LIMIT: Duration = Duration::from_secs(3 * 3600);

/// The page with the table, and what stands around it there.
const PAGE: &str = "docs/verifier.md";
const BEGIN: &str = "<!-- Counted by cargo xtask ops: begin -->\n";
const END: &str = "<!-- Counted by cargo xtask ops: end -->";

/// The table's head.
const HEAD: &str = "| operation | cases | supported by the local CPU | passed | refused | failed |\n|---|--:|--:|--:|--:|--:|\n";
const TOTAL: &str = "all";

/// Options of the command.
#[derive(clap::Args)]
pub struct Options {
    /// Run the cases of these operations only, by test-backend-ops' names for them
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Put the counts of each operation into docs/verifier.md once it is through
    #[arg(long)]
    record: bool,
}

/// The counts of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Row {
    operation: String,
    counts: [u64; 5],
}

impl Row {
    fn new(operation: &str, cases: &Cases) -> Self {
        let (refused, failed) = (cases.refused.len() as u64, cases.failed.len() as u64);
        let (local, all) = (cases.local(), cases.local() + cases.unsupported);
        Self { operation: operation.to_owned(), counts: [all, local, cases.passed, refused, failed] }
    }

    fn parse(line: &str) -> Option<Self> {
        let mut cells = line.strip_prefix('|')?.strip_suffix('|')?.split('|').map(str::trim);
        let operation = cells.next()?.to_owned();
        let counts: Vec<u64> = cells.map(str::parse).collect::<Result<_, _>>().ok()?;
        Some(Self { operation, counts: counts.try_into().ok()? })
    }

    fn total(rows: &[Self]) -> Self {
        let count = |at: usize| rows.iter().map(|row| row.counts[at]).sum();
        Self { operation: TOTAL.to_owned(), counts: std::array::from_fn(count) }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "| {} |", self.operation)?;
        self.counts.iter().try_for_each(|count| write!(f, " {count} |"))
    }
}

/// Runs it; `false` when a case that the local CPU supports did not pass.
pub fn run(workspace: &Workspace, ui: &Ui, options: &Options) -> Result<bool, Error> {
    let llama = Llama::ready(ui, &[Stage::Libraries, Stage::Programs])?;
    let dist = Dist::at(&workspace.build_dist(ui)?);
    let all = operations(&llama)?;
    if let Some(unknown) = options.only.iter().find(|name| !all.contains(name)) {
        return Err(Error::Check(format!("test-backend-ops has no cases of {unknown}")));
    }
    let chosen = || all.iter().filter(|name| options.only.is_empty() || options.only.contains(name));
    let mut rows = Vec::new();
    let mut good = true;
    for (at, operation) in chosen().enumerate() {
        let started = Instant::now();
        // A server for each, so that a lost worker costs one operation.
        let server = Serve::new(&dist, &llama.cpu_library()).start()?;
        let cases = match Cases::run(&llama, &server, operation, None, LIMIT) {
            Ok(cases) => cases,
            Err(error) => {
                ui.result(&error.to_string());
                good = false;
                continue;
            }
        };
        let row = Row::new(operation, &cases);
        let (number, seconds) = (at + 1, started.elapsed().as_secs());
        ui.result(&format!("{number}/{}: {row} in {seconds} s", chosen().count()));
        for (what, cases) in [("refused", &cases.refused), ("failed", &cases.failed)] {
            cases.iter().for_each(|case| ui.result(&format!("  {what}: {case}")));
            good &= cases.is_empty();
        }
        if options.record {
            record(workspace, &row, &all)?;
        }
        rows.push(row);
    }
    ui.result(&Row::total(&rows).to_string());
    Ok(good)
}

/// Puts a row into the page's table, in the place of an older one.
fn record(workspace: &Workspace, row: &Row, order: &[String]) -> Result<(), Error> {
    let path = workspace.root.join(PAGE);
    let page = fs::read_to_string(&path).at("read", &path)?;
    let page = with_row(&page, row, order)
        .ok_or_else(|| Error::Check(format!("{} has no place for the table", path.display())))?;
    fs::write(&path, page).at("write", &path)
}

fn with_row(page: &str, row: &Row, order: &[String]) -> Option<String> {
    let (before, rest) = page.split_once(BEGIN)?;
    let (table, after) = rest.split_once(END)?;
    let mut rows: Vec<Row> = table.lines().filter_map(Row::parse).collect();
    rows.retain(|known| known.operation != row.operation && order.contains(&known.operation));
    rows.push(row.clone());
    rows.sort_by_key(|row| order.iter().position(|operation| *operation == row.operation));
    rows.push(Row::total(&rows));
    let lines: String = rows.iter().map(|row| format!("{row}\n")).collect();
    Some(format!("{before}{BEGIN}\n{HEAD}{lines}\n{END}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(operation: &str, counts: [u64; 5]) -> Row {
        Row { operation: operation.to_owned(), counts }
    }

    #[test]
    fn a_row_takes_its_place_in_the_table() {
        let order = ["ADD", "MUL"].map(str::to_owned);
        let page = format!("a\n{BEGIN}\n{END}\nb\n");
        let page = with_row(&page, &row("MUL", [5, 4, 3, 1, 0]), &order).unwrap();
        let page = with_row(&page, &row("ADD", [1, 1, 1, 0, 0]), &order).unwrap();
        let page = with_row(&page, &row("MUL", [5, 4, 4, 0, 0]), &order).unwrap();
        let lines = "| ADD | 1 | 1 | 1 | 0 | 0 |\n| MUL | 5 | 4 | 4 | 0 | 0 |\n| all | 6 | 5 | 5 | 0 | 0 |\n";
        assert_eq!(page, format!("a\n{BEGIN}\n{HEAD}{lines}\n{END}\nb\n"));
        assert_eq!(with_row("no table", &row("ADD", [0; 5]), &order), None);
    }

    #[test]
    fn counts_of_cases() {
        let refused = vec!["x".to_owned()];
        let cases = Cases { passed: 3, unsupported: 2, refused, failed: Vec::new() };
        assert_eq!(Row::new("ADD", &cases), row("ADD", [6, 4, 3, 1, 0]));
    }
}
