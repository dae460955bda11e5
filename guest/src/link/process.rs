//! Which process a thing belongs to.
//!
//! A fork copies memory and shares descriptors and mappings: without a check, a child would speak on its parent's connection, take its replies and
//! give back its memory. A word in a page that the kernel empties in children (`MADV_WIPEONFORK`) tells them apart, also those of a bare `clone`, and
//! where process numbers come again. Systems without such pages are asked for the process's number.

use memmap2::{MmapOptions, MmapRaw};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::{fmt, mem, ptr};

/// A process, told from its forks and from its ancestors.
#[derive(Debug, Clone, Copy)]
pub struct Process {
    generation: u64,
    pid: u32,
}

/// The first word of the page, in which a process keeps its generation; null until it is first asked for. No lock guards it: a fork could
/// copy that while it is held.
static WORD: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());
/// The system has no such pages.
static WITHOUT: AtomicBool = AtomicBool::new(false);
/// The last generation. A child counts on from its parent's, so none of its own is one of its ancestors'.
static LAST: AtomicU64 = AtomicU64::new(0);

impl Process {
    /// The process that calls.
    pub fn current() -> Self {
        Self { generation: generation(), pid: std::process::id() }
    }

    /// Whether it is the process that calls; costs about a nanosecond.
    pub fn is_current(&self) -> bool {
        self.generation == generation()
    }

    /// A number that no ancestor and no earlier fork of an ancestor has, for remembering what was done in a process.
    pub fn generation(&self) -> u64 {
        self.generation
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}", self.pid)
    }
}

fn generation() -> u64 {
    let Some(word) = word() else {
        return std::process::id().into();
    };
    match word.load(Ordering::Relaxed) {
        0 => {
            let fresh = LAST.fetch_add(1, Ordering::Relaxed) + 1;
            // Another thread of this process may be the first.
            let set = word.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed);
            set.map_or_else(|first| first, |_| fresh)
        }
        generation => generation,
    }
}

fn word() -> Option<&'static AtomicU64> {
    if WITHOUT.load(Ordering::Relaxed) {
        return None;
    }
    let mut word = WORD.load(Ordering::Acquire);
    if word.is_null() {
        let Some(page) = page() else {
            WITHOUT.store(true, Ordering::Relaxed);
            return None;
        };
        let made = page.as_mut_ptr().cast();
        match WORD.compare_exchange(ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                // For as long as the process lives.
                mem::forget(page);
                word = made;
            }
            Err(first) => word = first,
        }
    }
    // SAFETY: not null, so the start of a page that is never unmapped and only accessed here.
    Some(unsafe { &*word })
}

fn page() -> Option<MmapRaw> {
    let page = MmapRaw::from(MmapOptions::new().len(size_of::<u64>()).map_anon().ok()?);
    wiped_on_fork(&page).then_some(page)
}

#[cfg(target_os = "linux")]
fn wiped_on_fork(page: &MmapRaw) -> bool {
    use nix::sys::mman::{MmapAdvise, madvise};
    let start = ptr::NonNull::new(page.as_mut_ptr().cast());
    // SAFETY: the advice is for a mapping of our own, and takes nothing away from this process.
    start.is_some_and(|start| unsafe { madvise(start, page.len(), MmapAdvise::MADV_WIPEONFORK) }.is_ok())
}

#[cfg(not(target_os = "linux"))]
fn wiped_on_fork(_page: &MmapRaw) -> bool {
    false
}

/// Runs `child` in a fork of this process and gives the status it ends with: its answer, or 101 when it panics, or 1000 and the number of a
/// signal. A panic may also end by the alarm: another test may hold a lock that printing it takes.
#[cfg(test)]
pub(crate) fn in_fork(child: impl FnOnce() -> u8) -> i32 {
    use nix::sys::wait::{WaitStatus, waitpid};
    // SAFETY: the child calls only what a fork of a test may: the C library's allocator is usable there, no lock that it takes is held by another
    // thread, and it ends without running this process's handlers.
    match unsafe { nix::unistd::fork() }.unwrap() {
        nix::unistd::ForkResult::Child => {
            nix::unistd::alarm::set(20);
            let status = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(101);
            // SAFETY: it never returns.
            unsafe { libc::_exit(status.into()) }
        }
        nix::unistd::ForkResult::Parent { child } => match waitpid(child, None).unwrap() {
            WaitStatus::Exited(_, status) => status,
            WaitStatus::Signaled(_, signal, _) => 1000 + signal as i32,
            other => panic!("the child ended otherwise: {other:?}"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t25_a_fork_is_another_process_and_so_is_its_fork() {
        let parent = Process::current();
        assert!(parent.is_current() && Process::current().is_current());
        let status = in_fork(|| {
            let child = Process::current();
            assert!(!parent.is_current() && child.is_current());
            let grandchild = in_fork(|| {
                let here = Process::current();
                let own = here.generation() != child.generation() && here.generation() != parent.generation();
                u8::from(own && !parent.is_current() && !child.is_current() && here.is_current())
            });
            assert!(child.is_current());
            grandchild as u8
        });
        assert_eq!(status, 1);
        assert!(parent.is_current());
    }

    #[test]
    fn t25_a_bare_clone_is_another_process() {
        let parent = Process::current();
        // SAFETY: the child makes two loads and ends; it shares no memory with this process.
        let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) };
        if child == 0 {
            // SAFETY: it never returns.
            unsafe { libc::_exit(i32::from(!parent.is_current())) }
        }
        let pid = nix::unistd::Pid::from_raw(i32::try_from(child).unwrap());
        let status = nix::sys::wait::waitpid(pid, None).unwrap();
        assert!(matches!(status, nix::sys::wait::WaitStatus::Exited(_, 1)), "{status:?}");
    }
}
