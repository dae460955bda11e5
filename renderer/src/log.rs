//! Log lines: which are written, where to, and how many about guests: a guest must not fill the host's disk.
//!
//! A server, and a VMM with the drop-in, has one budget for all that its guests cause: its own lines about them and what their workers
//! write. A guest that connects again and again gets no more of it.
#![forbid(unsafe_code)]

use crate::error::Error;
use crate::relay::WorkerLine;
use apir_protocol::log::{LeftOut, LineBudget};
use apir_protocol::settings::{DEFAULT_LOG_LINES, MAX_LOG_LINES};
use nix::fcntl::OFlag;
use nix::sys::signal::SigSet;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{LazyLock, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tracing_subscriber::EnvFilter;

/// The name of our lines, for filters: the crate's own is that of the library which it stands in for.
pub(crate) const TARGET: &str = "apir";

/// Environment variable with the level, or a filter.
pub(crate) const VARIABLE: &str = "APIR_LOG";
const DEFAULT: &str = "info";
const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];
/// Environment variable with the file of what workers write. They do not get it: the file is written here.
pub(crate) const FILE_VARIABLE: &str = "APIR_LLAMA_CPP_LOG_TO_FILE";

/// Which lines `APIR_LOG` asks for: those of level `info` and above when it is unset.
///
/// # Errors
/// [`Error::Variable`] for what is neither a level nor a filter.
pub fn filter() -> Result<EnvFilter, Error> {
    match std::env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        None => Ok(EnvFilter::new(DEFAULT)),
        Some(value) => value.to_str().and_then(parse).ok_or_else(|| Error::Variable {
            name: VARIABLE,
            value,
            fix: format!("must be {}, or a tracing filter such as {TARGET}=debug", LEVELS.join(", ")),
        }),
    }
}

/// The same where a wrong value must not keep a program from its work: then the filter of an unset variable, and the fault.
pub fn filter_or_default() -> (EnvFilter, Option<Error>) {
    match filter() {
        Ok(filter) => (filter, None),
        Err(error) => (EnvFilter::new(DEFAULT), Some(error)),
    }
}

/// A filter takes a lone word for a module and shows all of its lines, and so none for a misspelt level.
fn parse(text: &str) -> Option<EnvFilter> {
    let is_meant = |part: &str| {
        let part = part.trim();
        part.contains(['=', '[']) || LEVELS.iter().any(|level| part.eq_ignore_ascii_case(level))
    };
    text.split(',').all(is_meant).then(|| EnvFilter::try_new(text).ok()).flatten()
}

/// Lines of a second that only this process may write: workers that flood the log do not hide that one was lost.
const RESERVED_LINES: u64 = 2;

/// The budget of this process.
#[derive(Debug)]
struct Budget {
    start: Instant,
    limit: u64,
    lines: Mutex<LineBudget>,
}

static BUDGET: LazyLock<Budget> = LazyLock::new(|| {
    // A wrong value is told by the plugin, which reads the same variable.
    let limit = std::env::var(MAX_LOG_LINES).ok().and_then(|text| text.parse().ok());
    Budget { start: Instant::now(), limit: limit.unwrap_or(DEFAULT_LOG_LINES), lines: Mutex::default() }
});

impl Budget {
    fn admit(&self, reserved: u64) -> Option<LeftOut> {
        let limit = if self.limit > 2 * reserved { self.limit - reserved } else { self.limit };
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.admit(self.start.elapsed(), limit).map(LeftOut)
    }
}

/// Warns of something that a guest caused, at a bounded rate.
pub(crate) fn warn(line: fmt::Arguments<'_>) {
    if let Some(left_out) = BUDGET.admit(0) {
        tracing::warn!(target: TARGET, "{line}{left_out}");
    }
}

/// Tells of something that a guest caused and that is in order, at a bounded rate.
pub(crate) fn info(line: fmt::Arguments<'_>) {
    if let Some(left_out) = BUDGET.admit(RESERVED_LINES) {
        tracing::info!(target: TARGET, "{line}{left_out}");
    }
}

/// The file of what workers write, once it is open.
static FILE: OnceLock<File> = OnceLock::new();

/// Opens the file of `APIR_LLAMA_CPP_LOG_TO_FILE` for what workers write. What is in it stays.
///
/// # Errors
/// [`Error::Variable`] when it cannot be opened.
pub(crate) fn open_file() -> Result<(), Error> {
    let Some(path) = std::env::var_os(FILE_VARIABLE).filter(|value| !value.is_empty()) else { return Ok(()) };
    // A pipe's reader that stops costs lines; a server that waited for it would serve nobody.
    let without_waiting = (OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits();
    match OpenOptions::new().append(true).create(true).custom_flags(without_waiting).open(&path) {
        Ok(file) => {
            // One that is open already is the same.
            let _ = FILE.set(file);
            Ok(())
        }
        Err(cause) => {
            let fix = format!("cannot be opened to append to: {cause}");
            Err(Error::Variable { name: FILE_VARIABLE, value: path, fix })
        }
    }
}

/// Passes a line of the worker of `who` on, at a bounded rate: to the file, else to `sink`, which gets it without time and level.
pub(crate) fn from_worker(who: fmt::Arguments<'_>, line: &WorkerLine<'_>, sink: impl FnOnce(&str)) {
    let Some(left_out) = BUDGET.admit(RESERVED_LINES) else { return };
    let text = format!("{who}: {}{left_out}", line.text);
    match FILE.get() {
        // A full disk, or a full pipe, must not end anything.
        Some(mut file) => drop(file.write_all(format!("{}{text}\n", line.head()).as_bytes())),
        None => sink(&text),
    }
}

/// Writes a line to standard error, which may be gone.
pub(crate) fn to_stderr(line: &str) {
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Lines that wait for standard error; further ones are dropped.
const QUEUED_LINES: usize = 1024;
/// How long the last lines may take to be written.
const FLUSH_LIMIT: Duration = Duration::from_secs(1);

enum Queued {
    Line(Vec<u8>),
    Flush(SyncSender<()>),
}

/// Standard error behind a thread of its own: whoever reads it may stop, and a server must go on.
static QUEUE: LazyLock<SyncSender<Queued>> = LazyLock::new(|| {
    let (sender, lines) = sync_channel(QUEUED_LINES);
    // Where no thread can be started, lines are lost.
    let _ = thread::Builder::new().name("apir-log".to_owned()).spawn(move || {
        // Signals are for the thread that waits for them. It fails for no argument of ours.
        let _ = SigSet::all().thread_block();
        for queued in lines {
            match queued {
                Queued::Line(line) => drop(io::stderr().write_all(&line)),
                Queued::Flush(done) => drop(done.send(())),
            }
        }
    });
    sender
});

/// A writer of whole lines to standard error that never waits for whoever reads it.
#[derive(Debug, Clone, Copy)]
pub struct QueuedStderr;

impl QueuedStderr {
    /// Waits, for a second at most, until everything is written.
    pub fn flush() {
        let (done, written) = sync_channel(1);
        if QUEUE.try_send(Queued::Flush(done)).is_ok() {
            let _ = written.recv_timeout(FLUSH_LIMIT);
        }
    }

    /// Writes a line, or drops it when too many wait.
    pub(crate) fn line(line: &str) {
        let _ = QUEUE.try_send(Queued::Line(format!("{line}\n").into_bytes()));
    }
}

impl Write for QueuedStderr {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let _ = QUEUE.try_send(Queued::Line(line.to_vec()));
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_or_a_filter_and_nothing_else() {
        for good in ["info", "WARN", "off", "apir=debug", "warn,apir=trace", "apir[span]=debug"] {
            assert!(parse(good).is_some(), "{good}");
        }
        for bad in ["loud", "inof", "info,loud", "apir=loud", "=", ","] {
            assert!(parse(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn t21_workers_that_flood_leave_lines_for_the_server() {
        let budget = Budget { start: Instant::now(), limit: 10, lines: Mutex::default() };
        let admitted = (0..100).filter(|_| budget.admit(RESERVED_LINES).is_some()).count();
        // A slow machine may take more than one second for it.
        assert!(admitted.is_multiple_of(8), "{admitted}");
        assert!(budget.admit(0).is_some_and(|left_out| left_out.0 > 0));
    }
}
