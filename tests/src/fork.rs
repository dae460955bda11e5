//! Forks of the calling process, as interpreters and preforking servers make them.

use std::cell::Cell;
use std::process;

use nix::errno::Errno;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, alarm, fork};

use crate::error::{Error, check};

/// After this many seconds a child is ended, which is a failure.
const LIMIT: u32 = 100;

/// Which process this is.
#[derive(Debug)]
pub enum Side {
    /// The one that forked.
    Parent(Forked),
    /// The fork.
    Child(Ending),
}

/// A fork of this process.
#[derive(Debug)]
pub struct Forked {
    pid: Pid,
    status: Cell<WaitStatus>,
}

/// The end of a fork.
#[derive(Debug)]
pub struct Ending(());

impl Side {
    /// Forks this process, which must have one thread.
    pub fn fork() -> Result<Self, Error> {
        // SAFETY: a fork of a process with one thread may do all that the process may.
        match unsafe { fork() } {
            Ok(ForkResult::Parent { child }) => {
                Ok(Self::Parent(Forked { pid: child, status: Cell::new(WaitStatus::StillAlive) }))
            }
            Ok(ForkResult::Child) => {
                alarm::set(LIMIT);
                Ok(Self::Child(Ending(())))
            }
            Err(errno) => Err(Error::Unexpected(format!("cannot fork: {errno}"))),
        }
    }
}

impl Ending {
    /// Ends the fork as a program ends: exit handlers and the destructors of libraries run.
    pub fn with(self, result: Result<(), Error>) -> ! {
        if let Err(error) = &result {
            eprintln!("in the fork: {error}");
        }
        process::exit(i32::from(result.is_err()))
    }
}

impl Forked {
    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        if self.status.get() == WaitStatus::StillAlive {
            let status = waitpid(self.pid, Some(WaitPidFlag::WNOHANG));
            self.status.set(status.unwrap_or(WaitStatus::Exited(self.pid, Errno::ECHILD as i32)));
        }
        self.status.get() != WaitStatus::StillAlive
    }

    /// Fails unless it has ended with success.
    pub fn check(&self) -> Result<(), Error> {
        let status = self.status.get();
        check(matches!(status, WaitStatus::Exited(_, 0)), || format!("a fork ended with {status:?}"))
    }
}
