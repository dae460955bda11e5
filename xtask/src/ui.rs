//! Progress for people: bars on a terminal, plain lines elsewhere. All of it goes to stderr.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

/// How often a plain line is printed for a bar that moves.
const PLAIN_INTERVAL: Duration = Duration::from_secs(30);

/// The one place that writes progress.
#[derive(Debug)]
pub struct Ui {
    bars: Option<MultiProgress>,
}

/// What a bar counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Bytes of a download.
    Bytes,
    /// Steps of a build.
    Steps,
    /// Things of which nobody knows how many there will be.
    Items,
}

/// One running job.
#[derive(Debug)]
pub struct Bar {
    label: String,
    unit: Unit,
    bar: Option<ProgressBar>,
    total: AtomicU64,
    started: Instant,
    last_plain: AtomicU64,
}

impl Ui {
    /// Bars when stderr is a terminal and CI is not set.
    pub fn new() -> Self {
        let fancy = std::io::stderr().is_terminal() && std::env::var_os("CI").is_none();
        Self { bars: fancy.then(MultiProgress::new) }
    }

    /// Prints one line above the bars.
    pub fn line(&self, text: &str) {
        match &self.bars {
            Some(bars) => bars.suspend(|| eprintln!("{text}")),
            None => eprintln!("{text}"),
        }
    }

    /// Prints a result line to stdout without tearing the bars.
    pub fn result(&self, text: &str) {
        match &self.bars {
            Some(bars) => bars.suspend(|| println!("{text}")),
            None => println!("{text}"),
        }
    }

    /// Starts a bar; a total of 0 means that it is not known yet.
    pub fn bar(&self, label: &str, unit: Unit, total: u64) -> Bar {
        let bar = self.bars.as_ref().map(|bars| {
            let bar = bars.add(ProgressBar::new(total));
            bar.set_style(style(unit));
            bar.set_message(label.to_owned());
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        if bar.is_none() {
            eprintln!("{label} ...");
        }
        Bar {
            label: label.to_owned(),
            unit,
            bar,
            total: AtomicU64::new(total),
            started: Instant::now(),
            last_plain: AtomicU64::new(0),
        }
    }
}

impl Bar {
    /// Moves the bar to `done` of `total`.
    pub fn set(&self, done: u64, total: u64) {
        self.total.store(total, Ordering::Relaxed);
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
            return;
        }
        let elapsed = self.started.elapsed().as_secs();
        if elapsed >= self.last_plain.load(Ordering::Relaxed) + PLAIN_INTERVAL.as_secs() {
            self.last_plain.store(elapsed, Ordering::Relaxed);
            eprintln!("{} {}", self.label, self.amount(done));
        }
    }

    /// Ends the bar with one line saying how long it took.
    pub fn finish(self) {
        let line = format!("{} done in {:.1} s", self.label, self.started.elapsed().as_secs_f64());
        match &self.bar {
            Some(bar) => bar.finish_with_message(line),
            None => eprintln!("{line}"),
        }
    }

    fn amount(&self, done: u64) -> String {
        let total = self.total.load(Ordering::Relaxed);
        match self.unit {
            Unit::Bytes => format!("{:.1} of {:.1} MB", done as f64 / 1e6, total as f64 / 1e6),
            Unit::Steps => format!("{done}/{total}"),
            Unit::Items => done.to_string(),
        }
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        // A bar dropped by an error must not stay on the screen as if it ran.
        if let Some(bar) = self.bar.as_ref().filter(|bar| !bar.is_finished()) {
            bar.abandon();
        }
    }
}

fn style(unit: Unit) -> ProgressStyle {
    let template = match unit {
        Unit::Bytes => "{spinner} {msg} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec}",
        Unit::Steps => "{spinner} {msg} [{bar:30}] {pos}/{len} {elapsed}",
        Unit::Items => "{spinner} {msg} {pos} {elapsed}",
    };
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}
