//! How many threads a computation may use.
//!
//! A CPU backend starts its threads itself, and most ways to do so end the process when the system has none left: so it is with OpenMP, which keeps a team
//! for every thread that has computed. Each calling thread has a share of the process's budget, and a team grows only when the system has just shown that it
//! would start as many. One thread, the calling one, is always there.
#![forbid(unsafe_code)]

use crate::budget::{Account, HELPERS, Sharing, Taken};
use std::cell::RefCell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Threads that are left to the rest of the process when a team grows.
const SPARE: usize = 2;
/// Stack of a thread that is tried: what the C library gives those of OpenMP.
const STACK: usize = 8 << 20;
/// How long a team that could not grow rests before it tries again.
const REST: Duration = Duration::from_secs(1);
/// Teams of full size that a process has at a time.
const FULL_TEAMS: u64 = 4;
/// Threads that all teams may have together, however small a full one is.
const LEAST: u64 = 64;

thread_local! {
    static TEAM: RefCell<Team> = const { RefCell::new(Team { account: None, helpers: 0, taken: Vec::new(), rest: None }) };
}

/// The helpers of a calling thread, until it ends.
struct Team {
    account: Option<Account>,
    helpers: usize,
    taken: Vec<Taken>,
    rest: Option<Instant>,
}

/// How a library and a process treat threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Habits {
    /// The library keeps the threads of a calling thread, as OpenMP does; else it starts them for each computation.
    pub keeps_teams: bool,
    /// Nobody else computes in this process.
    pub alone: bool,
}

/// How many threads a computation on the calling thread may use, which would like `wanted`: at least one.
#[must_use]
pub fn granted(wanted: usize, habits: Habits) -> usize {
    let Some(helpers) = wanted.checked_sub(1).filter(|helpers| *helpers > 0) else { return 1 };
    // No team while the thread ends.
    let granted = TEAM.try_with(|team| team.borrow_mut().grant(helpers, habits)).unwrap_or(0);
    let granted = if habits.keeps_teams || habits.alone { granted } else { startable(granted) };
    if granted < helpers {
        warn_once(wanted, granted + 1);
    }
    granted + 1
}

impl Team {
    fn grant(&mut self, wanted: usize, habits: Habits) -> usize {
        if self.helpers < wanted && self.rest.is_none_or(|rest| rest.elapsed() > REST) {
            self.grow(wanted, habits);
            self.rest = (self.helpers < wanted).then(Instant::now);
        }
        self.helpers.min(wanted)
    }

    fn grow(&mut self, wanted: usize, habits: Habits) {
        let missing = wanted - self.helpers;
        if habits.alone {
            self.helpers += startable(missing);
            return;
        }
        let limit = limit(wanted);
        let account =
            self.account.get_or_insert_with(|| Account::new("threads", &HELPERS, limit, Sharing::Fair));
        let most = usize::try_from(account.left()).unwrap_or(usize::MAX).min(missing);
        // Taken before it is tried, so that two that grow at once do not count on the same threads.
        let Ok(taken) = account.take(most as u64) else { return };
        let more = startable(most);
        drop(taken);
        if let Ok(taken) = account.take(more as u64) {
            self.taken.push(taken);
            self.helpers += more;
        }
    }
}

/// Helpers of all teams, of which a full one has `helpers`.
fn limit(helpers: usize) -> u64 {
    (FULL_TEAMS * (helpers as u64 + 1)).max(LEAST)
}

/// How many of `wanted` threads the system would start now, some being left to others.
fn startable(wanted: usize) -> usize {
    if wanted == 0 {
        return 0;
    }
    let gate = Mutex::new(());
    let started = thread::scope(|scope| {
        // All are there at the same time.
        let closed = gate.lock();
        let start = || {
            let wait = || drop(gate.lock());
            thread::Builder::new().stack_size(STACK).spawn_scoped(scope, wait).ok()
        };
        let threads: Vec<_> = (0..wanted + SPARE).map_while(|_| start()).collect();
        drop(closed);
        let started = threads.len();
        // The end of a scope does not wait until the system has its threads back, and the library starts as many next.
        threads.into_iter().for_each(|thread| drop(thread.join()));
        started
    });
    started.saturating_sub(SPARE).min(wanted)
}

/// Says that computations are slower than they could be; once, since every one may meet it.
fn warn_once(wanted: usize, granted: usize) {
    static TOLD: AtomicBool = AtomicBool::new(false);
    if !TOLD.swap(true, Ordering::Relaxed) {
        tracing::warn!("threads: {granted} of {wanted} for a computation; the process has no more");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARED: Habits = Habits { keeps_teams: true, alone: false };

    #[test]
    fn teams_share_what_there_is_and_give_it_back() {
        let wanted = 17;
        assert_eq!((limit(1), limit(wanted - 1)), (64, 68));
        let gate = std::sync::Arc::new(Mutex::new(()));
        let closed = gate.lock().unwrap();
        let (told, all) = std::sync::mpsc::channel();
        let start = |told: std::sync::mpsc::Sender<usize>| {
            let gate = gate.clone();
            thread::spawn(move || {
                told.send(granted(wanted, SHARED)).unwrap();
                assert_eq!(granted(1, SHARED), 1);
                drop(gate.lock());
            })
        };
        let threads: Vec<_> = (0..40).map(|_| start(told.clone())).collect();
        let granted: Vec<usize> = all.iter().take(40).collect();
        drop(closed);
        // Joining waits for a thread's own memory too, a scope does not.
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(granted.iter().all(|threads| (1..=wanted).contains(threads)), "{granted:?}");
        let helpers: usize = granted.iter().map(|threads| threads - 1).sum();
        assert!(helpers as u64 <= limit(wanted - 1) && granted.contains(&wanted), "{granted:?}");
        assert_eq!(thread::spawn(move || self::granted(wanted, SHARED)).join().unwrap(), wanted);
    }

    #[test]
    fn the_system_is_asked_for_all_at_once() {
        assert_eq!((startable(0), startable(3)), (0, 3));
    }
}
