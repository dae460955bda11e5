//! Waiting for a word in shared memory.
//!
//! There is no interrupt for it: a short spin catches quick answers, then sleeps grow with the time already waited, so
//! that a wait ends within a few per cent of its length and a long one costs no processor.
#![forbid(unsafe_code)]

use super::{Link, LinkError};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const SPIN: Duration = Duration::from_micros(20);
const SHORTEST_SLEEP: Duration = Duration::from_micros(5);
const LONGEST_SLEEP: Duration = Duration::from_micros(500);
const PEER_CHECK: Duration = Duration::from_millis(1);

/// Returns once `done` says true.
///
/// # Errors
/// [`LinkError::Lost`] within a few milliseconds of the host's end, [`LinkError::Silent`] once it gives no sign of life any
/// more; from a host that never gave one [`LinkError::Timeout`] at `deadline` after the call.
pub fn until(
    link: &dyn Link,
    deadline: Option<Duration>,
    mut done: impl FnMut() -> bool,
) -> Result<(), LinkError> {
    let start = Instant::now();
    let mut patience = link.pulse().wait(deadline);
    if may_spin() {
        while start.elapsed() < SPIN {
            for _ in 0..16 {
                if done() {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
        }
    }
    let _slack = FineTimer::set();
    let mut checked = start;
    loop {
        if done() {
            return Ok(());
        }
        let now = Instant::now();
        let elapsed = now - start;
        patience.check()?;
        if now - checked >= PEER_CHECK {
            checked = now;
            if let Err(lost) = link.check_peer() {
                // The host may have answered before it went.
                return if done() { Ok(()) } else { Err(lost) };
            }
        }
        std::thread::sleep((elapsed / 32).clamp(SHORTEST_SLEEP, LONGEST_SLEEP));
    }
}

/// Spinning on the only processor keeps the host, or the VM's own kernel, from running.
fn may_spin() -> bool {
    // Not a OnceLock: a fork while another thread sets it would wait for ever.
    static PROCESSORS: AtomicUsize = AtomicUsize::new(0);
    if PROCESSORS.load(Ordering::Relaxed) == 0 {
        PROCESSORS.store(std::thread::available_parallelism().map_or(1, usize::from), Ordering::Relaxed);
    }
    PROCESSORS.load(Ordering::Relaxed) > 1
}

/// Sleeps that end on time while it lives. The slack belongs to the program's thread, so it is put back.
struct FineTimer {
    before: Option<i32>,
}

impl FineTimer {
    #[cfg(target_os = "linux")]
    fn set() -> Self {
        let before = nix::sys::prctl::get_timerslack().ok();
        let set = nix::sys::prctl::set_timerslack(1).is_ok();
        Self { before: before.filter(|_| set) }
    }

    #[cfg(not(target_os = "linux"))]
    fn set() -> Self {
        Self { before: None }
    }
}

impl Drop for FineTimer {
    fn drop(&mut self) {
        #[cfg(target_os = "linux")]
        if let Some(before) = self.before.and_then(|slack| u64::try_from(slack).ok()) {
            // Setting what was read cannot fail.
            let _ = nix::sys::prctl::set_timerslack(before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::{Blob, Pulse};
    use std::sync::atomic::AtomicBool;

    #[derive(Debug, Default)]
    struct Peer {
        gone: AtomicBool,
        pulse: Pulse,
    }

    impl Link for Peer {
        fn transport(&self) -> &'static str {
            "test"
        }
        fn command_type_offset(&self) -> u32 {
            0
        }
        fn create_blob(&self, _: u64) -> Result<Blob, LinkError> {
            Err(LinkError::NoTransport)
        }
        fn submit(&self, _: &[u8]) -> Result<(), LinkError> {
            Ok(())
        }
        fn check_peer(&self) -> Result<(), LinkError> {
            if self.gone.load(Ordering::Relaxed) { Err(LinkError::Lost("test".into())) } else { Ok(()) }
        }
        fn pulse(&self) -> &Pulse {
            &self.pulse
        }
    }

    #[test]
    fn a_deadline_ends_the_wait_and_the_timer_slack_is_put_back() {
        let before = nix::sys::prctl::get_timerslack().unwrap();
        let start = Instant::now();
        let limit = Duration::from_millis(20);
        let end = until(&Peer::default(), Some(limit), || false);
        assert!(matches!(end, Err(LinkError::Timeout(t)) if t == limit));
        assert!(start.elapsed() >= limit);
        assert_eq!(nix::sys::prctl::get_timerslack().unwrap(), before);
    }

    #[test]
    fn a_lost_peer_ends_the_wait() {
        let peer = Peer::default();
        let waited = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                peer.gone.store(true, Ordering::Relaxed);
            });
            until(&peer, None, || false)
        });
        assert!(matches!(waited, Err(LinkError::Lost(_))));
    }

    #[test]
    fn an_answer_left_by_a_lost_peer_counts() {
        let peer = Peer { gone: AtomicBool::new(true), pulse: Pulse::default() };
        let start = Instant::now();
        until(&peer, None, || start.elapsed() > Duration::from_millis(1)).unwrap();
    }
}
