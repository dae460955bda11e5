//! Log lines: where they go, and how many a guest may cause.
#![forbid(unsafe_code)]

use std::fs::File;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};
use tracing_subscriber::EnvFilter;

/// Sends log lines to the file of `APIR_LLAMA_CPP_LOG_TO_FILE`, else to standard error; once a process. `APIR_LOG` chooses which lines.
pub fn start() {
    let filter = EnvFilter::try_from_env("APIR_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_target(false).with_ansi(false);
    let file = std::env::var_os("APIR_LLAMA_CPP_LOG_TO_FILE").map(|path| (File::create(&path), path));
    // A program that the plugin shares its tracing with may have chosen already: then its choice stays.
    let _ = match file {
        Some((Ok(file), _)) => lines.with_writer(Mutex::new(file)).try_init(),
        Some((Err(cause), path)) => {
            let started = lines.with_writer(std::io::stderr).try_init();
            tracing::warn!("APIR_LLAMA_CPP_LOG_TO_FILE={}: {cause}; logging here", path.display());
            started
        }
        None => lines.with_writer(std::io::stderr).try_init(),
    };
}

/// Lines that ggml may write in a second: more than it has to say at its start, and it may say one for each command.
const GGML_LINES: u64 = 100;

/// Takes over a line of ggml's.
pub fn from_ggml(level: i32, text: &str) {
    static BUDGET: LazyLock<Mutex<LogBudget>> =
        LazyLock::new(|| Mutex::new(LogBudget::new(Instant::now(), GGML_LINES)));
    let text = text.trim_end();
    if text.is_empty() {
        return;
    }
    match BUDGET.lock().unwrap_or_else(PoisonError::into_inner).ask(Instant::now()) {
        Verdict::Suppress => return,
        Verdict::Write { suppressed: 0 } => {}
        Verdict::Write { suppressed } => tracing::warn!("ggml: {suppressed} lines suppressed"),
    }
    match level {
        4 => tracing::error!("ggml: {text}"),
        3 => tracing::warn!("ggml: {text}"),
        2 => tracing::info!("ggml: {text}"),
        _ => tracing::debug!("ggml: {text}"),
    }
}

/// How long a budget of lines lasts.
const WINDOW: Duration = Duration::from_secs(1);

/// Bounds the lines that one context's guest causes.
#[derive(Debug)]
pub struct LogBudget {
    window: Instant,
    limit: u64,
    lines: u64,
    suppressed: u64,
}

/// What to do with a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Write it, and say how many were suppressed before it.
    Write {
        /// Lines suppressed since the last one written.
        suppressed: u64,
    },
    /// Do not write it.
    Suppress,
}

impl LogBudget {
    /// A budget of `limit` lines a second, full at `now`.
    #[must_use]
    pub fn new(now: Instant, limit: u64) -> Self {
        Self { window: now, limit, lines: 0, suppressed: 0 }
    }

    /// Asks for a line at `now`.
    pub fn ask(&mut self, now: Instant) -> Verdict {
        if now.duration_since(self.window) >= WINDOW {
            (self.window, self.lines) = (now, 0);
        }
        if self.lines == self.limit {
            self.suppressed += 1;
            return Verdict::Suppress;
        }
        self.lines += 1;
        Verdict::Write { suppressed: std::mem::take(&mut self.suppressed) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_leaves_ten_lines_a_second_and_a_count() {
        let start = Instant::now();
        let mut budget = LogBudget::new(start, 10);
        let asked = |budget: &mut LogBudget, at| {
            (0..1000).filter(|_| budget.ask(start + at) != Verdict::Suppress).count()
        };
        assert_eq!(asked(&mut budget, Duration::ZERO), 10);
        assert_eq!(asked(&mut budget, Duration::from_millis(999)), 0);
        assert_eq!(budget.ask(start + WINDOW), Verdict::Write { suppressed: 1990 });
        assert_eq!(budget.ask(start + WINDOW), Verdict::Write { suppressed: 0 });
    }
}
