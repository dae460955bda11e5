//! Counting checks and tests, and telling how they went.

use std::collections::BTreeSet;
use std::time::Instant;

use crate::error::Error;
use crate::tools::{Finished, Tool};
use crate::ui::Ui;

/// How many lines of a failed test run are shown.
const SHOWN_LINES: usize = 150;

/// Runs steps one after the other and counts what passed and failed.
#[derive(Debug)]
pub struct Suite<'a> {
    ui: &'a Ui,
    counts: Counts,
}

/// Passed and failed tests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Tests and steps that passed.
    pub passed: u64,
    /// Tests and steps that failed or could not be run.
    pub failed: u64,
}

impl<'a> Suite<'a> {
    /// Nothing has run yet.
    pub fn new(ui: &'a Ui) -> Self {
        Self { ui, counts: Counts::default() }
    }

    /// A step that counts as one test.
    pub fn step(&mut self, name: &str, work: impl FnOnce() -> Result<bool, Error>) {
        self.group(name, || work().map(|passed| Counts { passed: passed.into(), failed: (!passed).into() }));
    }

    /// A step that counts as several tests.
    pub fn group(&mut self, name: &str, work: impl FnOnce() -> Result<Counts, Error>) {
        let started = Instant::now();
        let counts = work().unwrap_or_else(|error| {
            self.ui.result(&error.to_string());
            Counts { passed: 0, failed: 1 }
        });
        self.count(name, started, counts);
    }

    /// A run of `cargo test`, which counts as many tests as it says. Notes that its tests print are passed on.
    pub fn cargo_test(&mut self, name: &str, tool: Tool) {
        let started = Instant::now();
        let mut lines = Vec::new();
        let finished = tool.finish(|line| lines.push(line.to_owned()));
        let mut counts =
            lines.iter().filter_map(|line| parse_result(line)).fold(Counts::default(), Counts::add);
        match &finished {
            Ok(Finished { success: true, .. }) => (),
            Ok(finished) => {
                // No failed test, yet a failure: it did not compile, or a test program crashed.
                counts.failed = counts.failed.max(1);
                self.show(&lines);
                self.ui.result(&format!("{} ended with {}", tool.command_line(), finished.status));
            }
            Err(error) => {
                counts.failed = counts.failed.max(1);
                self.ui.result(&error.to_string());
            }
        }
        if counts == Counts::default() {
            self.ui.result(&format!("{} ran no test", tool.command_line()));
            counts.failed = 1;
        }
        self.count(name, started, counts);
        let mut told = BTreeSet::new();
        for note in lines.iter().filter(|line| line.starts_with("note: ")) {
            if told.insert(note) {
                self.ui.result(&format!("        {note}"));
            }
        }
    }

    /// Counts steps that cannot be run, because `cause` came before.
    pub fn skip(&mut self, names: &[&str], cause: &str) {
        for name in names {
            self.ui.result(&format!("FAILED  {name}: cannot run: {cause}"));
            self.counts.failed += 1;
        }
    }

    /// Prints the closing line; whether nothing failed.
    pub fn finish(self) -> bool {
        let Counts { passed, failed } = self.counts;
        self.ui.result(&format!("{passed} passed, {failed} failed"));
        failed == 0
    }

    fn count(&mut self, name: &str, started: Instant, counts: Counts) {
        self.counts = self.counts.add(counts);
        let verdict = if counts.failed == 0 { "ok    " } else { "FAILED" };
        let seconds = started.elapsed().as_secs_f64();
        let Counts { passed, failed } = counts;
        self.ui.result(&format!("{verdict}  {name}: {passed} passed, {failed} failed in {seconds:.1} s"));
    }

    /// The interesting lines of a failed run: its failures, or else its end.
    fn show(&self, lines: &[String]) {
        let from = lines
            .iter()
            .position(|line| line == "failures:" || line.starts_with("error"))
            .unwrap_or_else(|| lines.len().saturating_sub(SHOWN_LINES));
        for line in lines.iter().skip(from).take(SHOWN_LINES) {
            self.ui.result(&format!("    {line}"));
        }
    }
}

impl Counts {
    fn add(self, other: Self) -> Self {
        Self { passed: self.passed + other.passed, failed: self.failed + other.failed }
    }
}

/// `test result: ok. 12 passed; 0 failed; 3 ignored; …`
fn parse_result(line: &str) -> Option<Counts> {
    let mut parts = line.strip_prefix("test result:")?.split_once(". ")?.1.split("; ");
    let passed = parts.next()?.strip_suffix(" passed")?.trim().parse().ok()?;
    let failed = parts.next()?.strip_suffix(" failed")?.trim().parse().ok()?;
    Some(Counts { passed, failed })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Tool {
        Tool::new("sh", &std::env::temp_dir().join(format!("suite-{}.log", std::process::id())))
            .args(["-c", script])
    }

    #[test]
    fn result_lines() {
        let line = "test result: FAILED. 12 passed; 3 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.01s";
        assert_eq!(parse_result(line), Some(Counts { passed: 12, failed: 3 }));
        assert_eq!(parse_result("running 3 tests"), None);
    }

    #[test]
    fn everything_that_does_not_pass_is_counted() {
        let ui = Ui::new();
        let mut suite = Suite::new(&ui);
        suite.step("a", || Ok(true));
        suite.step("b", || Ok(false));
        suite.step("c", || Err(Error::Check("no".to_owned())));
        suite.cargo_test("d", sh("echo 'test result: ok. 5 passed; 0 failed; 0 ignored'"));
        suite.cargo_test("e", sh("echo 'error: could not compile'; exit 101"));
        suite.cargo_test("f", sh("true"));
        suite.skip(&["g", "h"], "x");
        suite.group("i", || Ok(Counts { passed: 3, failed: 2 }));
        assert_eq!(suite.counts, Counts { passed: 9, failed: 8 });
        assert!(!suite.finish());
    }
}
