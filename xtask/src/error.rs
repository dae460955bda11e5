//! What can go wrong in a developer command.

use std::io;
use std::path::{Path, PathBuf};

/// An error of `cargo xtask`, told in full by its Display.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or folder could not be read, made or changed.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb: "read", "create".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A program could not be started at all.
    #[error("cannot start {program}: {source}")]
    Start {
        /// The program's name or path.
        program: String,
        /// What the system said.
        source: io::Error,
    },
    /// A program ended with an exit status other than 0.
    #[error("{command}\n  ended with {status}; its last lines:\n{tail}\n  whole log: {}", log.display())]
    Command {
        /// The whole command line.
        command: String,
        /// Its exit status.
        status: String,
        /// Its last lines of output, indented.
        tail: String,
        /// Where all its output is.
        log: PathBuf,
    },
    /// Programs are missing and cannot be installed from here.
    #[error("missing {missing}: install the packages {packages} ({why})")]
    Packages {
        /// The programs that were looked for.
        missing: String,
        /// The Debian packages that hold them.
        packages: String,
        /// Why xtask did not install them.
        why: &'static str,
    },
    /// A download failed each time it was tried.
    #[error("cannot download {what} after {tries} tries: {cause}")]
    Download {
        /// The package and its version.
        what: String,
        /// How often it was tried.
        tries: u32,
        /// The last line of the last failure.
        cause: String,
    },
    /// A downloaded file is not the one this project was written against.
    #[error(
        "the download of {what} has sha256 {found}, wanted {wanted}: the registry serves another file than the pinned one"
    )]
    Checksum {
        /// The package and its version.
        what: &'static str,
        /// The sha256 of what came, in hex.
        found: String,
        /// The pinned sha256, in hex.
        wanted: &'static str,
    },
    /// A file that a step should have left, or that the user named, is not there.
    #[error("{} is missing: {hint}", path.display())]
    Missing {
        /// The file or folder.
        path: PathBuf,
        /// What to do about it.
        hint: String,
    },
    /// The codegen step failed.
    #[error("codegen: {0}")]
    Codegen(String),
    /// The harness could not run the pair.
    #[error(transparent)]
    Harness(#[from] apir_tests::Error),
    /// Two texts that must be equal are not, or another promise of the demo was broken.
    #[error("{0}")]
    Check(String),
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
