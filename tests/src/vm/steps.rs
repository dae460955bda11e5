//! Many checks on one machine, since its boot costs more than most of them.
#![forbid(unsafe_code)]

use std::time::Instant;

use crate::error::{Error, check};

/// Checks that all run, whether or not those before them hold.
#[derive(Debug, Default)]
pub struct Steps {
    failures: Vec<String>,
}

impl Steps {
    /// Runs one check and prints how it went.
    pub fn check(&mut self, name: &str, work: impl FnOnce() -> Result<(), Error>) {
        let started = Instant::now();
        let result = work();
        let seconds = started.elapsed().as_secs_f64();
        match result {
            Ok(()) => println!("ok - {name} ({seconds:.1} s)"),
            Err(error) => {
                println!("not ok - {name} ({seconds:.1} s)");
                self.failures.push(format!("{name}: {error}"));
            }
        }
    }

    /// Fails when any check did.
    ///
    /// # Errors
    /// What the checks that failed said.
    pub fn finish(self) -> Result<(), Error> {
        check(self.failures.is_empty(), || self.failures.join("\n\n"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::unexpected;

    #[test]
    fn every_failure_is_told() {
        let mut steps = Steps::default();
        steps.check("a", || unexpected("x"));
        steps.check("b", || Ok(()));
        steps.check("c", || unexpected("y"));
        assert_eq!(steps.finish().unwrap_err().to_string(), "a: x\n\nc: y");
    }
}
