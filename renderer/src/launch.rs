//! Starting a worker process, for a server and for a VMM.
#![forbid(unsafe_code)]

use crate::log::FILE_VARIABLE;
use crate::relay::WorkerOutput;
use crate::sandbox::Sandbox;
use crate::worker::Libraries;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// How worker processes are started.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    /// The program, run as `PROGRAM worker …`.
    pub(crate) program: PathBuf,
    /// What it is told to load; what is absent it finds in its environment.
    pub(crate) libraries: Libraries,
    /// What walls it in.
    pub(crate) sandbox: Sandbox,
    /// Whether its client makes the blobs and hands them over.
    pub(crate) attach: bool,
}

impl Launch {
    /// Starts a worker for the client at the other end of `socket`.
    pub(crate) fn spawn(&self, socket: OwnedFd, number: u32) -> io::Result<(Child, WorkerOutput)> {
        self.spawn_with(socket, number, &[])
    }

    /// The same with more variables.
    pub(crate) fn spawn_with(
        &self,
        socket: OwnedFd,
        number: u32,
        variables: &[(&str, OsString)],
    ) -> io::Result<(Child, WorkerOutput)> {
        // Libraries may print, and the standard output may be a guest's console.
        let (output, [stdout, stderr]) = WorkerOutput::new()?;
        let mut command = Command::new(&self.program);
        command
            .args(["worker", "--fd", "0"])
            .args(["--context", &number.to_string()])
            .args(["--server", &std::process::id().to_string()])
            .env_clear()
            .envs(self.sandbox.environment())
            // What it writes is written to the file here, at this process's rate.
            .env_remove(FILE_VARIABLE)
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::from(socket))
            .stdout(stdout)
            .stderr(stderr);
        if self.attach {
            command.arg("--attach");
        }
        let Libraries { plugin, ggml_library, ggml_reg } = &self.libraries;
        for (option, value) in [
            ("--plugin", plugin.as_ref().map(|path| path.as_os_str())),
            ("--ggml-library", ggml_library.as_ref().map(|path| path.as_os_str())),
            ("--ggml-reg", ggml_reg.as_deref()),
        ] {
            if let Some(value) = value {
                command.arg(option).arg(value);
            }
        }
        command.spawn().map(|process| (process, output))
    }
}

/// Both ends of a connection to a worker.
pub(crate) fn connection() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?)
}
