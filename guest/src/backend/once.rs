//! A value that a process makes once, and that its forks do not wait for.

use crate::link::Process;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::time::Duration;

/// How often a thread looks for the value that another thread makes.
const LOOK: Duration = Duration::from_millis(1);

/// Like a `OnceLock`, of which a fork would wait for ever when it copied it while another thread was making the value: here the fork makes its own.
#[derive(Debug)]
pub(super) struct ForkOnce<T: 'static> {
    /// Null until it is made; never freed.
    value: AtomicPtr<T>,
    /// The process in which a thread makes or has made the value; 0 before.
    maker: AtomicU64,
}

impl<T: Send + Sync + 'static> ForkOnce<T> {
    pub(super) const fn new() -> Self {
        Self { value: AtomicPtr::new(ptr::null_mut()), maker: AtomicU64::new(0) }
    }

    /// The value, if it is made.
    pub(super) fn get(&self) -> Option<&'static T> {
        // SAFETY: null, or boxed below and never freed.
        unsafe { self.value.load(Ordering::Acquire).as_ref() }
    }

    /// The value; made now, or waited for while another thread of this process makes it. After a panic of `make` the next call makes it.
    pub(super) fn get_or_make(&self, make: impl FnOnce() -> T) -> &'static T {
        let here = Process::current().generation();
        loop {
            if let Some(value) = self.get() {
                return value;
            }
            let maker = self.maker.load(Ordering::Acquire);
            // Of another process's thread a fork has only what it had written.
            if maker != here
                && self.maker.compare_exchange(maker, here, Ordering::AcqRel, Ordering::Acquire).is_ok()
            {
                break;
            }
            std::thread::sleep(LOOK);
        }
        let turn = Turn(&self.maker);
        let value: &'static T = Box::leak(Box::new(make()));
        self.value.store(ptr::from_ref(value).cast_mut(), Ordering::Release);
        std::mem::forget(turn);
        value
    }
}

/// Gives the turn back when making panics.
struct Turn<'a>(&'a AtomicU64);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::in_fork;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn threads_get_one_value_and_a_panic_leaves_the_turn() {
        static VALUE: ForkOnce<u32> = ForkOnce::new();
        static MADE: AtomicU64 = AtomicU64::new(0);
        assert!(VALUE.get().is_none());
        assert!(std::panic::catch_unwind(|| VALUE.get_or_make(|| panic!("not now"))).is_err());
        let make = || {
            std::thread::sleep(Duration::from_millis(20));
            MADE.fetch_add(1, Ordering::Relaxed);
            7
        };
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(move || assert_eq!(*VALUE.get_or_make(make), 7));
            }
        });
        assert_eq!((VALUE.get(), MADE.load(Ordering::Relaxed)), (Some(&7), 1));
    }

    #[test]
    fn t25_a_fork_does_not_wait_for_a_value_that_a_thread_of_its_parent_makes() {
        static VALUE: ForkOnce<u8> = ForkOnce::new();
        static BEGUN: AtomicBool = AtomicBool::new(false);
        static END: AtomicBool = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let making = scope.spawn(|| {
                *VALUE.get_or_make(|| {
                    BEGUN.store(true, Ordering::Relaxed);
                    while !END.load(Ordering::Relaxed) {
                        std::thread::sleep(LOOK);
                    }
                    1
                })
            });
            while !BEGUN.load(Ordering::Relaxed) {
                std::thread::sleep(LOOK);
            }
            let status = in_fork(|| *VALUE.get_or_make(|| 2));
            // Before anything can panic: the scope waits for the thread.
            END.store(true, Ordering::Relaxed);
            assert_eq!((status, making.join().unwrap()), (2, 1));
        });
        assert_eq!(VALUE.get(), Some(&1));
    }
}
