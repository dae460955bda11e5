//! llama.cpp's own test-llama-archs through the pair: a small random model of each architecture, beside the same on the local CPU.
#![forbid(unsafe_code)]

use std::time::Duration;

use crate::backend_ops::{DEVICE, without_colours};
use crate::completion::run_until_told;
use crate::error::{Error, check};
use crate::fakes;
use crate::peers::LlamaDir;
use crate::program::{Output, Program};
use crate::remote::Remote;
use crate::server::Server;

/// What came of the models.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Architectures {
    /// Models whose logits are those of the local CPU to the last bit, and who pass llama.cpp's other checks.
    pub equal: Vec<String>,
    /// Models that llama.cpp's program has no test for.
    pub skipped: Vec<String>,
    /// The others, with all that was said of them.
    pub failed: Vec<String>,
}

impl Architectures {
    /// Runs the models of the architectures whose names match a pattern.
    ///
    /// # Errors
    /// [`Error`] when the program cannot be run, or does not tell the outcome of every model.
    pub fn run(llama: &LlamaDir, server: &Server, pattern: &str, limit: Duration) -> Result<Self, Error> {
        let loader = fakes::loading_library(server.folder(), llama)?;
        run_until_told(|| {
            let program = Program::new(&llama.program("test-llama-archs"))
                .args(["-a", pattern, "-b", DEVICE, "-s", "1"])
                .env("LD_PRELOAD", &loader)
                .env("OMP_THREAD_LIMIT", "1")
                .envs(server.guest_env());
            Self::parse(&program.run(limit)?)
        })
    }

    /// Fails unless all that were run are equal.
    ///
    /// # Errors
    /// [`Error::Unexpected`] that names the first other.
    pub fn check(&self) -> Result<(), Error> {
        check(self.failed.is_empty(), || {
            format!("{} models are not equal, the first is {}", self.failed.len(), self.failed[0])
        })
    }

    fn parse(output: &Output) -> Result<Self, Error> {
        let mut found = Self::default();
        for line in output.stdout.lines().map(without_colours).filter(|line| line.starts_with('|')) {
            let cells: Vec<_> = line.split('|').map(str::trim).collect();
            // Whatever is said while a model runs stands between the cells of its row.
            match cells[..] {
                ["", "Model arch.", ..] => {}
                ["", rule, ..] if rule.starts_with("---") => {}
                ["", name, _, config, "SKIP", "SKIP", "SKIP", ""] => {
                    found.skipped.push(format!("{name} ({config})"));
                }
                ["", name, _, config, "OK (0.00e+00)", trip, mixed, ""]
                    if [trip, mixed].iter().all(|cell| cell.starts_with("OK") || *cell == "SKIP") =>
                {
                    found.equal.push(format!("{name} ({config})"));
                }
                _ => found.failed.push(line),
            }
        }
        if found.failed.is_empty() {
            // The program's last line; a run that failed may end without one.
            let told = output.stdout.lines().any(|line| line.starts_with("Summary: "));
            let program = output.name.clone();
            return if told { Ok(found) } else { Err(Error::OutputCut { program, wanted: "Summary" }) };
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(rows: &str) -> Result<Architectures, Error> {
        Architectures::parse(&Output {
            name: "test-llama-archs".to_owned(),
            status: std::process::ExitStatus::default(),
            stdout: format!(
                "|  Model arch.|  Device|Config|   NMSE vs. CPU|Roundtrip|    Mixed batch|\n|---|---|---|\n{rows}"
            ),
            stderr: String::new(),
            elapsed: Duration::ZERO,
        })
    }

    #[test]
    fn rows_of_models() {
        let (on, skip) = ("\u{1b}[1;32mOK\u{1b}[0m", "\u{1b}[1;33mSKIP\u{1b}[0m");
        let rows = format!(
            "|  llama|EPYC| Dense|  {on} (0.00e+00)|       {on}|  {on} (8.75e-09)|\n\
             |   clip|EPYC| Dense|{skip}           |     {skip}|{skip}           |\n\
             Summary: all 1 test(s) passed\n"
        );
        let found = parse(&rows).unwrap();
        assert_eq!((found.equal.len(), found.skipped.len(), found.failed.len()), (1, 1, 0));
        let near = format!("|  llama|EPYC| Dense|  {on} (1.00e-09)|       {on}|  {on} (8.75e-09)|\n");
        assert_eq!(parse(&near).unwrap().failed.len(), 1, "near is not equal");
        assert_eq!(parse("|  llama|EPYC| Dense|cannot compute a graph\n").unwrap().failed.len(), 1);
        let cut = rows.lines().next().unwrap();
        assert!(matches!(parse(cut), Err(Error::OutputCut { .. })));
    }
}
