//! What can go wrong in the harness, and what a test says when an expectation fails.
#![forbid(unsafe_code)]

use std::io;
use std::path::{Path, PathBuf};

/// An error of the harness.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A variable that says where the peers are is not set.
    #[error("{name} is not set: `cargo xtask test` sets it to {meaning}")]
    Environment {
        /// The variable.
        name: &'static str,
        /// What it must hold.
        meaning: &'static str,
    },
    /// A file that must be there is not.
    #[error("{} is missing ({what})", path.display())]
    Missing {
        /// The file or folder.
        path: PathBuf,
        /// What it is for.
        what: &'static str,
    },
    /// A file or folder could not be read, made or changed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A program could not be started.
    #[error("cannot start {program}: {source}")]
    Start {
        /// The program.
        program: String,
        /// What the system said.
        source: io::Error,
    },
    /// A program did not do in time what was waited for.
    #[error("{program} did not {what} within {seconds} s; it printed:\n{printed}")]
    Timeout {
        /// The program.
        program: String,
        /// What was waited for.
        what: String,
        /// How long, in seconds.
        seconds: u64,
        /// The end of what it printed.
        printed: String,
    },
    /// A program ended with another exit status than 0.
    #[error("{program} ended with {status}; it printed:\n{printed}")]
    Failed {
        /// The program.
        program: String,
        /// Its exit status.
        status: String,
        /// The end of what it printed.
        printed: String,
    },
    /// A library could not be loaded or lacks a symbol.
    #[error("cannot use {}: {source}", path.display())]
    Library {
        /// The library.
        path: PathBuf,
        /// What the loader said.
        source: libloading::Error,
    },
    /// A program succeeded, but the end of its output is missing.
    #[error("the output of {program} ends before {wanted:?}")]
    OutputCut {
        /// The program.
        program: String,
        /// What it should have printed at its end.
        wanted: &'static str,
    },
    /// Something came out otherwise than it must.
    #[error("{0}")]
    Unexpected(String),
}

/// Shorthand for [`Error::Unexpected`].
pub fn unexpected<T>(text: impl Into<String>) -> Result<T, Error> {
    Err(Error::Unexpected(text.into()))
}

/// Fails with [`Error::Unexpected`] unless `holds`.
pub fn check(holds: bool, text: impl FnOnce() -> String) -> Result<(), Error> {
    match holds {
        true => Ok(()),
        false => Err(Error::Unexpected(text())),
    }
}

/// Gives an [`io::Error`] the path and the action it belongs to.
pub trait IoContext<T> {
    /// Turns the error into [`Error::Io`].
    fn at(self, action: &'static str, path: &Path) -> Result<T, Error>;
}

impl<T> IoContext<T> for io::Result<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T, Error> {
        self.map_err(|source| Error::Io { action, path: path.to_owned(), source })
    }
}
