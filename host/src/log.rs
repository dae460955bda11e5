//! Log lines: where they go, and how many guests may cause.
//!
//! Every line of the plugin and of ggml passes one writer with one budget: a guest that starts contexts one after another gets no more
//! lines than one that keeps its context.
#![forbid(unsafe_code)]

use apir_protocol::log::{LeftOut, LineBudget};
use apir_protocol::settings::DEFAULT_LOG_LINES;
use nix::fcntl::OFlag;
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;
use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// Environment variable with the file of log lines.
const FILE: &str = "APIR_LLAMA_CPP_LOG_TO_FILE";
/// Environment variable with the filter.
const FILTER: &str = "APIR_LOG";

/// Lines a second of the process.
static LIMIT: AtomicU64 = AtomicU64::new(DEFAULT_LOG_LINES);

/// Sends log lines to the file of `APIR_LLAMA_CPP_LOG_TO_FILE`, else to standard error; once a process. `APIR_LOG` chooses which lines.
pub fn start() {
    let mut faults = Vec::new();
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let filter = set(FILTER).and_then(|value| {
        let filter = value.to_str().and_then(|text| EnvFilter::try_new(text).ok());
        if filter.is_none() {
            faults.push(format!(
                "{FILTER}={}: must be a level or a tracing filter; taken as info",
                value.display()
            ));
        }
        filter
    });
    let output = set(FILE).and_then(|path| {
        open(&path)
            .map_err(|cause| faults.push(format!("{FILE}={}: {cause}; logging here", path.display())))
            .ok()
    });
    let lines = Lines::new(output.map_or(Output::Stderr, Output::File));
    // A program that the plugin shares its tracing with may have chosen already: then its choice stays.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter.unwrap_or_else(|| EnvFilter::new("info")))
        .with_target(false)
        .with_ansi(false)
        .with_writer(lines)
        // A failed write would be told to standard error by a macro that panics when that fails too.
        .log_internal_errors(false)
        .try_init();
    for fault in faults {
        tracing::warn!("{fault}");
    }
}

/// Opens the log: what is in it stays, and lines of several processes do not overwrite each other.
fn open(path: &OsString) -> io::Result<File> {
    // A pipe's reader that stops costs lines, and nobody waits for it.
    let without_waiting = (OFlag::O_NONBLOCK | OFlag::O_NOCTTY).bits();
    OpenOptions::new().append(true).create(true).custom_flags(without_waiting).open(path)
}

/// Sets how many lines a second the process writes.
pub fn set_limit(lines: u64) {
    LIMIT.store(lines, Ordering::Relaxed);
}

/// Takes over a line of ggml's.
pub fn from_ggml(level: i32, text: &str) {
    let text = text.trim_end();
    if text.is_empty() {
        return;
    }
    match level {
        4 => tracing::error!("ggml: {text}"),
        3 => tracing::warn!("ggml: {text}"),
        2 => tracing::info!("ggml: {text}"),
        _ => tracing::debug!("ggml: {text}"),
    }
}

#[derive(Debug)]
enum Output {
    File(File),
    Stderr,
}

/// Lines of a second that are kept for warnings and errors: what ggml tells of devices does not hide them.
const RESERVED_LINES: u64 = 2;

/// The writer of all lines.
#[derive(Debug)]
struct Lines {
    output: Output,
    start: Instant,
    budget: Mutex<LineBudget>,
}

impl Lines {
    fn new(output: Output) -> Self {
        Self { output, start: Instant::now(), budget: Mutex::default() }
    }
}

/// The writer of one line.
struct Line<'a> {
    lines: &'a Lines,
    reserved: u64,
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line { lines: self, reserved: 0 }
    }

    fn make_writer_for(&'a self, event: &Metadata<'_>) -> Line<'a> {
        let reserved = if *event.level() <= Level::WARN { 0 } else { RESERVED_LINES };
        Line { lines: self, reserved }
    }
}

impl Write for Line<'_> {
    /// Takes the line; one that is not admitted is dropped.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let limit = LIMIT.load(Ordering::Relaxed);
        let limit = if limit > 2 * self.reserved { limit - self.reserved } else { limit };
        let Lines { output, start, budget } = self.lines;
        let mut budget = budget.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(left_out) = budget.admit(start.elapsed(), limit) else {
            return Ok(line.len());
        };
        drop(budget);
        // One line is one write: lines of several processes are not mixed. Some of ggml's have line ends inside.
        let text = String::from_utf8_lossy(line);
        let whole = format!("{}{}\n", text.trim_end().replace('\n', " "), LeftOut(left_out));
        match output {
            Output::File(file) => {
                let mut file = file;
                file.write_all(whole.as_bytes())?;
            }
            Output::Stderr => io::stderr().write_all(whole.as_bytes())?,
        }
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
    fn s28_a_log_file_keeps_what_is_in_it() {
        let path = std::env::temp_dir().join(format!("apir-log-{}", std::process::id()));
        for _ in 0..2 {
            let lines = Lines::new(Output::File(open(&path.clone().into_os_string()).unwrap()));
            lines.make_writer().write_all(b"a guest's trace\n").unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(text, "a guest's trace\na guest's trace\n");
    }

    #[test]
    fn t21_a_line_with_line_ends_is_one_line_and_a_flood_ends() {
        let path = std::env::temp_dir().join(format!("apir-flood-{}", std::process::id()));
        let lines = Lines::new(Output::File(open(&path.clone().into_os_string()).unwrap()));
        for _ in 0..1000 {
            lines.make_writer().write_all(b"one\ntwo\n").unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        // A slow machine may take more than one second for it.
        let written = text.lines().count();
        assert!((10..=50).contains(&written), "{written}");
        assert!(text.lines().all(|line| line.starts_with("one two")), "{text}");
    }
}
