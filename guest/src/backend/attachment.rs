//! A device's session in one process: what the host said there, and what went wrong.
#![forbid(unsafe_code)]

use super::log;
use super::throttle::Throttle;
use crate::cache::Cache;
use crate::host_device::HostDevice;
use crate::numbers::{HostHints, Numbers, OwnNumbers};
use crate::session::{Session, SessionError};
use crate::text::plain;
use apir_protocol::messages::DeviceGetMemoryRequest;
use std::fmt::{self, Display};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// Bytes of the host's version that are shown.
const MAX_VERSION: usize = 32;

/// A session and what depends on it. It lives as long as the process, since ggml's objects may outlive everything.
#[derive(Debug)]
pub(super) struct Attachment {
    pub(super) session: Session,
    pub(super) host: HostDevice,
    pub(super) numbers: Numbers,
    pub(super) supported: Cache<bool>,
    pub(super) alloc_sizes: Cache<u64>,
    pub(super) told_unmapped: AtomicBool,
    memory: Mutex<(u64, u64)>,
    failed: AtomicBool,
    told_lost: AtomicBool,
    /// A bit for each [`Silent`] that was told on a lost host.
    told_silent: AtomicU32,
    reads: Throttle,
    allocations: Throttle,
}

/// What ggml has no way to hear of when it fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Silent {
    Write,
    Fill,
    Clear,
}

impl Silent {
    fn what(self) -> &'static str {
        match self {
            Self::Write => "cannot write a tensor",
            Self::Fill => "cannot fill a tensor",
            Self::Clear => "cannot clear a buffer",
        }
    }
}

impl Attachment {
    /// Asks the host of an open session about its device and its numbers.
    pub(super) fn new(mut session: Session, own: &OwnNumbers) -> Result<Self, SessionError> {
        let version = own.names.version;
        // A host may keep its device from a guest that does not ask for the names.
        let (told, host) = session
            .start(|session| Ok((session.ask_names(&version.to_string())?, HostDevice::ask(session)?)))?;
        let hints = HostHints { ours: session.host_is_ours(), tells_mmap_support: host.tells_mmap_support };
        let numbers = own.agree(told.as_ref(), hints)?;
        if let (Numbers::Mapped(_), Some(told)) = (&numbers, &told) {
            let theirs = plain(&told.version, MAX_VERSION);
            log::info(format_args!(
                "the host has ggml {theirs}, this program {version}: operations are matched by name"
            ));
        }
        Ok(Self {
            memory: Mutex::new(host.memory),
            session,
            host,
            numbers,
            supported: Cache::new(),
            alloc_sizes: Cache::new(),
            told_unmapped: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            told_lost: AtomicBool::new(false),
            told_silent: AtomicU32::new(0),
            reads: Throttle::new(),
            allocations: Throttle::new(),
        })
    }

    /// Tells of a failure that ggml has no way to hear of; the next computation then fails. On a lost host each kind is told once.
    pub(super) fn fail(&self, kind: Silent, error: &dyn Display) {
        self.failed.store(true, Ordering::Relaxed);
        let told = || self.told_silent.fetch_or(1 << kind as u32, Ordering::Relaxed) & 1 << kind as u32 != 0;
        if !(self.session.is_lost() && told()) {
            log::error(format_args!("{}: {error}", kind.what()));
        }
    }

    /// Tells that what a program has read is not what was there; the next computation then fails. At most a line a second.
    pub(super) fn fail_read(&self, error: &dyn Display) {
        self.failed.store(true, Ordering::Relaxed);
        if let Some(left_out) = self.reads.admit() {
            let left_out = LeftOut(left_out);
            log::error(format_args!(
                "cannot read a tensor: {error}; what the program read is not valid and must not be stored{left_out}"
            ));
        }
    }

    /// Tells that there is no buffer; at most a line a second.
    pub(super) fn fail_allocation(&self, error: &dyn Display) {
        if let Some(left_out) = self.allocations.admit() {
            self.tell("cannot allocate a buffer", &format_args!("{error}{}", LeftOut(left_out)));
        }
    }

    /// Logs a failure that ggml hears of; a lost host only once.
    pub(super) fn tell(&self, what: &str, error: &dyn Display) {
        if !(self.session.is_lost() && self.told_lost.swap(true, Ordering::Relaxed)) {
            log::error(format_args!("{what}: {error}"));
        }
    }

    /// Whether a transfer has failed since the last time this was asked.
    pub(super) fn take_failed(&self) -> bool {
        self.failed.swap(false, Ordering::Relaxed)
    }

    /// Free and total memory in bytes, as the host says now or as it last said.
    pub(super) fn memory(&self) -> (u64, u64) {
        if !self.session.is_ours() {
            return self.host.memory;
        }
        let answer = self.session.device_get_memory(&DeviceGetMemoryRequest {});
        let mut last = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        match answer {
            Ok(now) => *last = (now.free, now.total),
            Err(error) => self.tell("cannot ask for the free memory", &error),
        }
        *last
    }
}

/// The end of a line that stands for others, too.
struct LeftOut(u64);

impl Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            count => write!(f, " ({count} more of these since the last line)"),
        }
    }
}
