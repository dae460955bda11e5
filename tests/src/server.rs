//! A running `apir serve`.
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::sys::signal::Signal;
use tempfile::TempDir;

use crate::error::{Error, IoContext};
use crate::peers::Dist;
use crate::process;
use crate::program::{Output, Program, Running};
use crate::remote::Remote;

/// How long the server may take to listen.
const READY_LIMIT: Duration = Duration::from_secs(20);

/// How long it may take to stop.
const STOP_LIMIT: Duration = Duration::from_secs(5);

/// How to start a server.
#[derive(Debug, Clone)]
pub struct Serve {
    apir: PathBuf,
    guest: PathBuf,
    plugin: PathBuf,
    library: PathBuf,
    registration: Option<String>,
    env: Vec<(OsString, OsString)>,
}

/// A server that listens; stopped when dropped.
#[derive(Debug)]
pub struct Server {
    running: Option<Running>,
    guest: PathBuf,
    socket: PathBuf,
    folder: TempDir,
}

impl Serve {
    /// Our plugin in front of the ggml library `library`, on one host thread.
    pub fn new(dist: &Dist, library: &Path) -> Self {
        // Upstream's plugin leaves ggml at four threads, which OpenMP can be told to cut to one.
        let env = [("APIR_HOST_THREADS", "1"), ("OMP_THREAD_LIMIT", "1"), ("APIR_SHADER_CACHE", "off")];
        Self {
            apir: dist.apir(),
            guest: dist.guest(),
            plugin: dist.plugin(),
            library: library.to_owned(),
            registration: None,
            env: env.map(|(key, value)| (key.into(), value.into())).to_vec(),
        }
    }

    /// Uses another plugin.
    #[must_use]
    pub fn plugin(mut self, plugin: &Path) -> Self {
        self.plugin = plugin.to_owned();
        self
    }

    /// Uses another registration symbol than the plugin's default.
    #[must_use]
    pub fn registration(mut self, symbol: &str) -> Self {
        self.registration = Some(symbol.to_owned());
        self
    }

    /// Sets an environment variable of the server and its workers.
    #[must_use]
    pub fn env(mut self, key: &str, value: &str) -> Self {
        self.env.push((key.into(), value.into()));
        self
    }

    /// The command line that listens on `socket`.
    pub fn command(&self, socket: &Path) -> Program {
        let mut program = Program::new(&self.apir)
            .arg("serve")
            .arg("--socket")
            .arg(socket)
            .arg("--plugin")
            .arg(&self.plugin)
            .arg("--ggml-library")
            .arg(&self.library)
            .envs(self.env.iter().cloned());
        if let Some(symbol) = &self.registration {
            program = program.args(["--ggml-reg", symbol]);
        }
        program
    }

    /// Starts the server and waits until it listens.
    pub fn start(&self) -> Result<Server, Error> {
        let folder = TempDir::with_prefix("apir-").at("create a folder in", &std::env::temp_dir())?;
        let socket = folder.path().join("socket");
        let running = self.command(&socket).start()?;
        let ready =
            running.stderr().wait_for(READY_LIMIT, |text| text.contains("listening on").then_some(()));
        match ready {
            Some(()) => Ok(Server { running: Some(running), guest: self.guest.clone(), socket, folder }),
            None => Err(running.failure("listen", READY_LIMIT)),
        }
    }
}

impl Remote for Server {
    fn guest_env(&self) -> Vec<(OsString, OsString)> {
        Server::guest_env(self)
    }

    fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn run(&self, program: Program, limit: Duration) -> Result<Output, Error> {
        program.run(limit)
    }
}

impl Server {
    /// The environment of a ggml program that shall load our backend and use this server.
    pub fn guest_env(&self) -> Vec<(OsString, OsString)> {
        vec![
            ("GGML_BACKEND_PATH".into(), self.guest.clone().into()),
            ("APIR_SOCKET".into(), self.socket.clone().into()),
        ]
    }

    /// The socket it listens on.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.running.as_ref().map_or(0, Running::pid)
    }

    /// Whether it runs.
    pub fn is_alive(&self) -> bool {
        process::is_alive(self.pid())
    }

    /// What it and its workers have written to stderr.
    pub fn stderr(&self) -> String {
        self.running.as_ref().map_or_else(String::new, |running| running.stderr().text())
    }

    /// The process ids of its workers, one for each client.
    pub fn workers(&self) -> Vec<u32> {
        process::children(self.pid())
    }

    /// Waits until there are exactly `count` workers.
    pub fn wait_for_workers(&self, count: usize) -> Result<Vec<u32>, Error> {
        let limit = Duration::from_secs(20);
        match process::wait_until(limit, || self.workers().len() == count) {
            true => Ok(self.workers()),
            false => Err(Error::Timeout {
                program: "apir serve".to_owned(),
                what: format!("have {count} workers (it has {:?})", self.workers()),
                seconds: limit.as_secs(),
                printed: self.stderr(),
            }),
        }
    }

    /// Asks it to stop and waits for its end.
    pub fn stop(mut self) -> Result<Output, Error> {
        match self.running.take() {
            Some(running) => {
                process::signal(running.pid(), Signal::SIGTERM)?;
                running.wait(STOP_LIMIT)
            }
            None => Err(Error::Unexpected("the server was stopped before".to_owned())),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(running) = self.running.take() {
            // A server that does not stop when asked is killed by dropping it.
            let _ = process::signal(running.pid(), Signal::SIGTERM);
            let _ = running.wait(STOP_LIMIT);
        }
    }
}
