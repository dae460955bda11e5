//! How many log lines guests may cause.

use core::time::Duration;

/// How long a budget of lines lasts.
const WINDOW: Duration = Duration::from_secs(1);

/// Bounds the lines of a process or of a server: so many a second, and the others are counted.
#[derive(Debug, Default)]
pub struct LineBudget {
    window: Option<Duration>,
    lines: u64,
    left_out: u64,
}

impl LineBudget {
    /// `Some(n)` when a line may be written at `now`, by any clock that does not go back, after `n` that might not.
    pub fn admit(&mut self, now: Duration, limit: u64) -> Option<u64> {
        if self.window.is_none_or(|start| now.saturating_sub(start) >= WINDOW) {
            (self.window, self.lines) = (Some(now), 0);
        }
        if self.lines >= limit {
            self.left_out += 1;
            return None;
        }
        self.lines += 1;
        Some(core::mem::take(&mut self.left_out))
    }
}

/// Ends a line after `n` that were left out.
#[derive(Debug, Clone, Copy)]
pub struct LeftOut(pub u64);

impl core::fmt::Display for LeftOut {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
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
    fn t21_a_flood_leaves_ten_lines_a_second_and_a_count() {
        let start = Duration::from_secs(7);
        let mut budget = LineBudget::default();
        let mut asked = |at| (0..1000).filter(|_| budget.admit(start + at, 10).is_some()).count();
        assert_eq!(asked(Duration::ZERO), 10);
        assert_eq!(asked(Duration::from_millis(999)), 0);
        assert_eq!(budget.admit(start + WINDOW, 10), Some(1990));
        assert_eq!(budget.admit(start + WINDOW, 10), Some(0));
        assert_eq!(budget.admit(start + WINDOW, 0), None);
    }
}
