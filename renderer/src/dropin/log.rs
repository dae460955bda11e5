//! Where the drop-in's log lines go: to the VMM's log callback, else to standard error.
#![forbid(unsafe_code)]

use std::fmt::{self, Write as _};
use std::sync::{Arc, Mutex, PoisonError};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::util::SubscriberInitExt;

/// What takes a line in place of standard error.
pub(crate) type Sink = Arc<dyn Fn(Level, &str) + Send + Sync>;

static SINK: Mutex<Option<Sink>> = Mutex::new(None);

/// Starts logging, once for the process; APIR_LOG chooses the lines.
pub(crate) fn start() {
    let (filter, fault) = crate::log::filter_or_default();
    // A second start finds the first one's subscriber.
    if tracing_subscriber::registry().with(filter).with(Lines).try_init().is_ok() {
        // A VMM starts all the same.
        for fault in fault.into_iter().chain(crate::log::open_file().err()) {
            tracing::warn!(target: crate::log::TARGET, "{fault}");
        }
    }
}

/// Sends later lines to `sink`, or to standard error again.
pub(crate) fn set_sink(sink: Option<Sink>) {
    *SINK.lock().unwrap_or_else(PoisonError::into_inner) = sink;
}

struct Lines;

impl<S: Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut line = Line("apir: ".to_owned());
        event.record(&mut line);
        write(*event.metadata().level(), &line.0);
    }
}

/// Writes a line that is not to be filtered any more.
pub(crate) fn write(level: Level, line: &str) {
    // Called outside the lock: the VMM may call the library from there, which may log again.
    let sink = SINK.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match sink {
        Some(sink) => sink(level, line),
        None => crate::log::to_stderr(line),
    }
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            let _ = write!(self.0, "{value:?}");
        }
    }
}
