//! Lines to ggml's log, or to stderr where there is no ggml.
#![forbid(unsafe_code)]

use super::once::ForkOnce;
use apir_ggml::process::{GgmlBase, LogLevel};
use std::ffi::CString;
use std::fmt;
use std::io;

static BASE: ForkOnce<GgmlBase> = ForkOnce::new();

/// Sends the lines from here on to this ggml's log.
pub(super) fn to_ggml(base: GgmlBase) {
    BASE.get_or_make(|| base);
}

pub(super) fn debug(message: fmt::Arguments<'_>) {
    line(LogLevel::Debug, message);
}

pub(super) fn info(message: fmt::Arguments<'_>) {
    line(LogLevel::Info, message);
}

pub(super) fn warn(message: fmt::Arguments<'_>) {
    line(LogLevel::Warn, message);
}

pub(super) fn error(message: fmt::Arguments<'_>) {
    line(LogLevel::Error, message);
}

fn line(level: LogLevel, message: fmt::Arguments<'_>) {
    let text = format!("ggml-virtgpu: {message}").replace(['\0', '\n'], " ");
    #[cfg(test)]
    captured::LINES.with_borrow_mut(|lines| lines.push(text.clone()));
    match (BASE.get(), CString::new(text.as_bytes())) {
        (Some(base), Ok(text)) => base.log(level, &text),
        _ => to_stderr(&text),
    }
}

/// Writes a line to stderr, past ggml's log. Takes no lock, which a fork could have copied while it was held.
pub(super) fn to_stderr(line: &str) {
    // A program without stderr has nobody to tell.
    let _ = nix::unistd::write(io::stderr(), format!("{line}\n").as_bytes());
}

#[cfg(test)]
pub(super) mod captured {
    use std::cell::RefCell;

    thread_local! {
        pub(super) static LINES: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
    }

    /// The lines of this thread since the last call.
    pub(crate) fn take() -> Vec<String> {
        LINES.take()
    }
}
