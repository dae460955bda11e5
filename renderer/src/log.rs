//! Log lines: which are written, and how many about guests: a guest must not fill the host's disk.
#![forbid(unsafe_code)]

use crate::error::Error;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};
use tracing_subscriber::EnvFilter;

/// The name of our lines, for filters: the crate's own is that of the library which it stands in for.
pub(crate) const TARGET: &str = "apir";

/// Environment variable with the level, or a filter.
const VARIABLE: &str = "APIR_LOG";
const DEFAULT: &str = "info";
const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];

/// Which lines `APIR_LOG` asks for: those of level `info` and above when it is unset.
///
/// # Errors
/// [`Error::Variable`] for what is neither a level nor a filter.
pub fn filter() -> Result<EnvFilter, Error> {
    match std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        None => Ok(EnvFilter::new(DEFAULT)),
        Some(value) => value.to_str().and_then(parse).ok_or_else(|| Error::Variable {
            name: VARIABLE,
            value,
            fix: format!("must be {}, or a tracing filter such as {TARGET}=debug", LEVELS.join(", ")),
        }),
    }
}

/// The same where a wrong value must not keep a program from its work: then the filter of an unset variable, and the fault.
pub fn filter_or_default() -> (EnvFilter, Option<Error>) {
    match filter() {
        Ok(filter) => (filter, None),
        Err(error) => (EnvFilter::new(DEFAULT), Some(error)),
    }
}

/// A filter takes a lone word for a module and shows all of its lines, and so none for a misspelt level.
fn parse(text: &str) -> Option<EnvFilter> {
    let is_meant = |part: &str| {
        let part = part.trim();
        part.contains(['=', '[']) || LEVELS.iter().any(|level| part.eq_ignore_ascii_case(level))
    };
    text.split(',').all(is_meant).then(|| EnvFilter::try_new(text).ok()).flatten()
}

const PERIOD: Duration = Duration::from_secs(1);
const LINES_PER_PERIOD: u32 = 10;

/// Says which lines may be written, and counts the others.
#[derive(Debug, Default)]
pub(crate) struct LogLimit(Mutex<Window>);

#[derive(Debug, Default)]
struct Window {
    start: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl LogLimit {
    /// `Some(n)` when a line may be written now, after `n` that might not.
    pub(crate) fn admit(&self) -> Option<u64> {
        self.admit_at(Instant::now())
    }

    fn admit_at(&self, now: Instant) -> Option<u64> {
        let mut window = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if window.start.is_none_or(|start| now - start >= PERIOD) {
            window.start = Some(now);
            window.lines = 0;
        }
        if window.lines == LINES_PER_PERIOD {
            window.left_out += 1;
            return None;
        }
        window.lines += 1;
        Some(std::mem::take(&mut window.left_out))
    }
}

/// Ends a line after `n` that were left out.
pub(crate) struct LeftOut(pub(crate) u64);

impl std::fmt::Display for LeftOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            0 => Ok(()),
            n => write!(f, " ({n} earlier lines left out)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_or_a_filter_and_nothing_else() {
        for good in ["info", "WARN", "off", "apir=debug", "warn,apir=trace", "apir[span]=debug"] {
            assert!(parse(good).is_some(), "{good}");
        }
        for bad in ["loud", "inof", "info,loud", "apir=loud", "=", ","] {
            assert!(parse(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn ten_lines_a_second_and_the_rest_counted() {
        let limit = LogLimit::default();
        let start = Instant::now();
        let admitted = (0..25).filter_map(|_| limit.admit_at(start)).count();
        assert_eq!(admitted, 10);
        assert_eq!(limit.admit_at(start + PERIOD), Some(15));
        assert_eq!(limit.admit_at(start + PERIOD), Some(0));
    }
}
