//! Log lines about guests, held to a rate: a guest must not fill the host's disk.
#![forbid(unsafe_code)]

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

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
    fn ten_lines_a_second_and_the_rest_counted() {
        let limit = LogLimit::default();
        let start = Instant::now();
        let admitted = (0..25).filter_map(|_| limit.admit_at(start)).count();
        assert_eq!(admitted, 10);
        assert_eq!(limit.admit_at(start + PERIOD), Some(15));
        assert_eq!(limit.admit_at(start + PERIOD), Some(0));
    }
}
