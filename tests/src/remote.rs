//! Where a ggml program finds a remote device.
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use crate::error::Error;
use crate::program::{Output, Program};

/// A place in which programs run that have a remote device.
pub trait Remote {
    /// The environment of a program that shall load our backend and use the device.
    fn guest_env(&self) -> Vec<(OsString, OsString)>;

    /// A folder that this process and the programs see under the same path.
    fn folder(&self) -> &Path;

    /// Runs a program there, to its end.
    ///
    /// # Errors
    /// It could not be started, or took longer than `limit`.
    fn run(&self, program: Program, limit: Duration) -> Result<Output, Error>;
}
