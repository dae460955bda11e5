//! Lines that may come by the thousand.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The least time between two lines.
const GAP: Duration = Duration::from_secs(1);

/// Admits a line a second, the first at once. It takes no lock, which a fork could copy while it is held.
#[derive(Debug)]
pub(super) struct Throttle {
    start: Instant,
    /// Milliseconds from the start until the next line.
    next: AtomicU64,
    left_out: AtomicU64,
}

impl Throttle {
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), next: AtomicU64::new(0), left_out: AtomicU64::new(0) }
    }

    /// The number of lines left out since the last one, or none when this one is left out.
    pub(super) fn admit(&self) -> Option<u64> {
        self.admit_at(self.start.elapsed())
    }

    fn admit_at(&self, now: Duration) -> Option<u64> {
        let next = self.next.load(Ordering::Relaxed);
        let then = (now + GAP).as_millis() as u64;
        let admitted = now.as_millis() as u64 >= next
            // Another thread may have the turn.
            && self.next.compare_exchange(next, then, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if !admitted {
            self.left_out.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(self.left_out.swap(0, Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_a_second_and_a_count_of_the_others() {
        let throttle = Throttle::new();
        let admit = |millis| throttle.admit_at(Duration::from_millis(millis));
        assert_eq!(admit(0), Some(0));
        assert_eq!((admit(1), admit(500), admit(999)), (None, None, None));
        assert_eq!((admit(1000), admit(1001)), (Some(3), None));
        assert_eq!(admit(5000), Some(1));
    }
}
