//! Fences that are ours to retire: those of our contexts, and all where there is no real library.
//!
//! Commands of an APIR context are answered in shared memory and nobody waits for their fences, so a fence retires as soon as
//! the VMM can take it: at its next poll, or from a thread where it asked for that.
#![forbid(unsafe_code)]

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};

/// A fence that the VMM wants to hear of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fence {
    /// Of the whole device.
    Device {
        /// The VMM's number for it.
        id: u32,
    },
    /// Of one context's ring.
    Context {
        /// The context.
        context: u32,
        /// Its ring.
        ring: u32,
        /// The VMM's number for it.
        id: u64,
    },
}

/// How the VMM hears of a fence.
pub(crate) trait Retire: Send + Sync {
    /// Tells that `fence` has passed.
    fn retire(&self, fence: Fence);
}

/// The fences that have not been told.
pub(crate) struct Fences {
    vmm: Arc<dyn Retire>,
    way: Way,
    joined: OnceLock<Epoll>,
}

enum Way {
    Poll { waiting: Mutex<Vec<Fence>>, event: EventFd },
    Thread { queue: Option<Sender<Fence>>, thread: Option<JoinHandle<()>> },
}

impl Fences {
    /// Fences told to `vmm`: from a thread of their own when `at_once`, else at each poll.
    pub(crate) fn new(vmm: Arc<dyn Retire>, at_once: bool) -> io::Result<Self> {
        let way = if at_once {
            let (queue, fences) = channel();
            let told = vmm.clone();
            let thread = thread::Builder::new().name("apir-fences".into()).spawn(move || {
                super::block_signals();
                for fence in fences {
                    told.retire(fence);
                }
            })?;
            Way::Thread { queue: Some(queue), thread: Some(thread) }
        } else {
            let event = EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
            Way::Poll { waiting: Mutex::default(), event }
        };
        Ok(Self { vmm, way, joined: OnceLock::new() })
    }

    /// Adds a fence that passes at once.
    pub(crate) fn add(&self, fence: Fence) {
        match &self.way {
            Way::Poll { waiting, event } => {
                waiting.lock().unwrap_or_else(PoisonError::into_inner).push(fence);
                // It fails only when its count is full, and is then readable anyway.
                let _ = event.write(1);
            }
            Way::Thread { queue, .. } => {
                // The thread ends after this queue.
                let _ = queue.as_ref().map(|queue| queue.send(fence));
            }
        }
    }

    /// Tells the fences that wait for a poll.
    pub(crate) fn poll(&self) {
        let Way::Poll { waiting, event } = &self.way else { return };
        let _ = event.read();
        let fences = std::mem::take(&mut *waiting.lock().unwrap_or_else(PoisonError::into_inner));
        // Outside the lock: the VMM may add others from here.
        for fence in fences {
            self.vmm.retire(fence);
        }
    }

    /// Forgets the fences that wait.
    pub(crate) fn clear(&self) {
        if let Way::Poll { waiting, event } = &self.way {
            waiting.lock().unwrap_or_else(PoisonError::into_inner).clear();
            let _ = event.read();
        }
    }

    /// What becomes readable when a poll is due; nothing where no poll is needed.
    pub(crate) fn event(&self) -> Option<BorrowedFd<'_>> {
        match &self.way {
            Way::Poll { event, .. } => Some(event.as_fd()),
            Way::Thread { .. } => None,
        }
    }

    /// One descriptor for [`Fences::event`] and for `theirs`, which is always the same one; it lives as long as the fences.
    pub(crate) fn event_with(&self, theirs: BorrowedFd<'_>) -> io::Result<RawFd> {
        let Some(ours) = self.event() else { return Ok(theirs.as_raw_fd()) };
        if let Some(joined) = self.joined.get() {
            return Ok(joined.0.as_raw_fd());
        }
        let joined = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        for fd in [ours, theirs] {
            joined.add(fd, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
        }
        Ok(self.joined.get_or_init(|| joined).0.as_raw_fd())
    }
}

impl Drop for Fences {
    fn drop(&mut self) {
        if let Way::Thread { queue, thread } = &mut self.way {
            *queue = None;
            // Once this returns the VMM may free what its callbacks use. A callback may itself end the library.
            if let Some(thread) =
                thread.take().filter(|thread| thread.thread().id() != thread::current().id())
            {
                let _ = thread.join();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    #[derive(Default)]
    struct Told(Mutex<Vec<Fence>>);

    impl Retire for Told {
        fn retire(&self, fence: Fence) {
            self.0.lock().unwrap().push(fence);
        }
    }

    const TWO: [Fence; 2] = [Fence::Device { id: 7 }, Fence::Context { context: 1, ring: 0, id: 1 << 40 }];

    #[test]
    fn fences_wait_for_a_poll_which_the_event_asks_for() {
        let told = Arc::new(Told::default());
        let fences = Fences::new(told.clone(), false).unwrap();
        let due = || {
            let mut fds = [PollFd::new(fences.event().unwrap(), PollFlags::POLLIN)];
            poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
        };
        assert!(!due());
        TWO.into_iter().for_each(|fence| fences.add(fence));
        assert!(due() && told.0.lock().unwrap().is_empty());
        fences.poll();
        assert!(!due());
        assert_eq!(*told.0.lock().unwrap(), TWO);
        fences.add(TWO[0]);
        fences.clear();
        fences.poll();
        assert_eq!(told.0.lock().unwrap().len(), 2);
    }

    #[test]
    fn the_thread_has_told_everything_when_the_fences_are_dropped() {
        let told = Arc::new(Told::default());
        let fences = Fences::new(told.clone(), true).unwrap();
        assert!(fences.event().is_none());
        TWO.into_iter().for_each(|fence| fences.add(fence));
        drop(fences);
        assert_eq!(*told.0.lock().unwrap(), TWO);
    }
}
