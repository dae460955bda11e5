//! ggml's own test-backend-ops through the pair: its cases, and what the local CPU says about each.
#![forbid(unsafe_code)]

use std::time::Duration;

use crate::error::{Error, check};
use crate::peers::LlamaDir;
use crate::program::{Output, Program};
use crate::server::Server;

/// The device of the pair in front of ggml's CPU backend.
pub(crate) const DEVICE: &str = "[virtgpu] CPU";

/// How test-backend-ops calls the local backend that it compares with.
const LOCAL: &str = "CPU";

/// How long listing the cases may take.
const LIST_LIMIT: Duration = Duration::from_secs(300);

/// What came of the cases of an operation.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cases {
    /// How many gave what the local backend gives.
    pub passed: u64,
    /// How many the local backend does not support either.
    pub unsupported: u64,
    /// Those that the local backend supports, and the pair says that it does not.
    pub refused: Vec<String>,
    /// Those that gave something else, or nothing.
    pub failed: Vec<String>,
}

/// What came of one case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed,
    Unsupported,
    Refused,
}

impl Cases {
    /// Runs the operation's cases, or those whose parameters match a pattern, on one thread.
    ///
    /// # Errors
    /// [`Error`] when the program cannot be run to its end, or does not tell the outcome of every case.
    pub fn run(
        llama: &LlamaDir,
        server: &Server,
        operation: &str,
        parameters: Option<&str>,
        limit: Duration,
    ) -> Result<Self, Error> {
        let mut program = program(llama).args(["test", "-b", DEVICE, "-o", operation]);
        if let Some(pattern) = parameters {
            program = program.args(["-p", pattern]);
        }
        Self::parse(&program.envs(server.guest_env()).run(limit)?, operation)
    }

    /// How many the local backend supports.
    #[must_use]
    pub fn local(&self) -> u64 {
        self.passed + (self.refused.len() + self.failed.len()) as u64
    }

    /// Fails unless all that the local backend supports passed.
    ///
    /// # Errors
    /// [`Error::Unexpected`] that names the first case of each kind.
    pub fn check(&self) -> Result<(), Error> {
        for (what, cases) in [("refused", &self.refused), ("failed", &self.failed)] {
            check(cases.is_empty(), || format!("{} {what} cases, the first is {}", cases.len(), cases[0]))?;
        }
        Ok(())
    }

    fn parse(output: &Output, operation: &str) -> Result<Self, Error> {
        let mut cases = Self::default();
        for line in output.stdout.lines() {
            let Some((name, outcome)) = parse_case(line, operation) else { continue };
            match outcome {
                Outcome::Passed => cases.passed += 1,
                Outcome::Unsupported => cases.unsupported += 1,
                Outcome::Refused => cases.refused.push(name),
                Outcome::Failed => cases.failed.push(name),
            }
        }
        let told = output.stdout.lines().find_map(parse_summary);
        let found = (cases.passed, cases.passed + cases.failed.len() as u64);
        check(told == Some(found), || {
            format!(
                "{} of {operation} ended with {}: {found:?} cases passed and ran, told are {told:?}:\n{}\n{}",
                output.name,
                output.status,
                last_line(&output.stdout),
                last_line(&output.stderr)
            )
        })?;
        Ok(cases)
    }
}

/// The operations that have cases, in the program's order.
///
/// # Errors
/// [`Error`] when the program cannot be run to its end.
pub fn operations(llama: &LlamaDir) -> Result<Vec<String>, Error> {
    let output = program(llama).args(["support", "-b", LOCAL]).run(LIST_LIMIT)?.success()?;
    let mut operations: Vec<String> = Vec::new();
    for line in output.stdout.lines().filter(|line| line.contains("SUPPORTED")) {
        let name = line.trim_start().split('(').next().unwrap_or_default();
        if !operations.iter().any(|known| known == name) {
            operations.push(name.to_owned());
        }
    }
    Ok(operations)
}

fn program(llama: &LlamaDir) -> Program {
    Program::new(&llama.program("test-backend-ops")).env("OMP_THREAD_LIMIT", "1")
}

/// Reads `  ADD(type=f32,…): OK`; what went wrong is printed before it on the same line, and `OK` in colour.
fn parse_case(line: &str, operation: &str) -> Option<(String, Outcome)> {
    let start = line.find(&format!("  {operation}("))?;
    let (name, outcome) = line[start..].trim().rsplit_once("): ")?;
    let outcome = match outcome.strip_prefix("not supported [").and_then(|names| names.strip_suffix(']')) {
        None if outcome.contains("OK") => Outcome::Passed,
        None if outcome.contains("FAIL") => Outcome::Failed,
        None => return None,
        // A backend is named for each tensor that it does not support.
        Some(names) => {
            let (local, ours): (Vec<_>, Vec<_>) = split_names(names).partition(|name| *name == LOCAL);
            if ours.len() > local.len() { Outcome::Refused } else { Outcome::Unsupported }
        }
    };
    Some((line[..start].to_owned() + name + ")", outcome))
}

/// A line as a terminal without colours shows it.
pub(crate) fn without_colours(line: &str) -> String {
    let mut parts = line.split("\u{1b}[");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.split_once('m').map_or("", |(_, rest)| rest))
}

fn split_names(names: &str) -> impl Iterator<Item = &str> {
    names.split(", ")
}

/// Reads `  12/13 tests passed`.
fn parse_summary(line: &str) -> Option<(u64, u64)> {
    let (passed, ran) = line.trim().strip_suffix(" tests passed")?.split_once('/')?;
    Some((passed.parse().ok()?, ran.parse().ok()?))
}

fn last_line(text: &str) -> &str {
    text.trim_end().lines().next_back().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_cases() {
        let case = |line: &str| parse_case(line, "ADD").map(|(_, outcome)| outcome);
        assert_eq!(case("  ADD(type=f32,ne=[1,1]): \u{1b}[1;32mOK\u{1b}[0m"), Some(Outcome::Passed));
        assert_eq!(case("  ADD(type=i8): not supported [[virtgpu] CPU, CPU]"), Some(Outcome::Unsupported));
        assert_eq!(case("  ADD(type=f32): not supported [[virtgpu] CPU]"), Some(Outcome::Refused));
        let both = "  ADD(type=f32): not supported [[virtgpu] CPU, [virtgpu] CPU, CPU]";
        assert_eq!(case(both), Some(Outcome::Refused), "a second tensor is refused by the pair alone");
        assert_eq!(case("  ADD_ID(type=f32): OK"), None);
        assert_eq!(case("  Backend [virtgpu] CPU: OK"), None);
        let (name, outcome) = parse_case("[ADD] ERR = 0.5 > 0.1   ADD(n=1): FAIL", "ADD").unwrap();
        assert_eq!((name.as_str(), outcome), ("[ADD] ERR = 0.5 > 0.1 ADD(n=1)", Outcome::Failed));
        assert_eq!(parse_summary("  12/13 tests passed"), Some((12, 13)));
    }

    #[test]
    fn a_run_without_an_end_is_an_error() {
        let output = |stdout: &str| Output {
            name: "test-backend-ops".to_owned(),
            status: std::process::ExitStatus::default(),
            stdout: stdout.to_owned(),
            stderr: String::new(),
            elapsed: Duration::ZERO,
        };
        let whole = output("  ADD(a): OK\n  ADD(b): not supported [CPU, x]\n  1/1 tests passed\n");
        let cases = Cases::parse(&whole, "ADD").unwrap();
        assert_eq!((cases.passed, cases.unsupported, cases.local()), (1, 1, 1));
        assert!(Cases::parse(&output("  ADD(a): OK\n"), "ADD").is_err());
        assert!(Cases::parse(&output("  ADD(a): OK\n  1/2 tests passed\n"), "ADD").is_err());
    }
}
