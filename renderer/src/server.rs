//! The server: a listening socket, and a worker process for each client.
#![forbid(unsafe_code)]

use crate::error::Error;
use crate::log::{LeftOut, LogLimit, TARGET};
use crate::plugin::Plugin;
use crate::sandbox::Sandbox;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, UnixAddr, accept4, bind, connect, getsockopt, listen, socket,
    sockopt,
};
use nix::unistd::Pid;
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, Permissions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Environment variable with the program that is run as `PROGRAM worker …` for each client.
const WORKER_VARIABLE: &str = "APIR_WORKER";
/// What fits into a socket address beside the NUL.
const SOCKET_PATH_LIMIT: usize = if cfg!(target_os = "macos") { 103 } else { 107 };
/// How long accepting rests when the system is out of descriptors: clients wait in the backlog.
const ACCEPT_REST: Duration = Duration::from_millis(100);
/// How long workers may take to end their plugins when the server stops.
const STOP_GRACE: Duration = Duration::from_secs(2);

/// What `apir serve` is told.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Where to listen.
    pub socket: PathBuf,
    /// The APIR plugin.
    pub plugin: PathBuf,
    /// The ggml backend library that the plugin drives.
    pub ggml_library: PathBuf,
    /// Its registration symbol; without it the plugin has its own default.
    pub ggml_reg: Option<OsString>,
    /// What walls the workers in.
    pub sandbox: Sandbox,
}

/// A server that listens.
#[derive(Debug)]
pub struct Server {
    options: ServerOptions,
    program: PathBuf,
    signals: SignalFd,
    listener: OwnedFd,
    // Device and inode of the socket file, so that only our own is removed at the end.
    identity: (u64, u64),
    workers: Vec<Worker>,
    last_client: u32,
    limit: LogLimit,
}

#[derive(Debug)]
struct Worker {
    client: u32,
    process: Child,
}

impl Server {
    /// Checks the options and listens. Call it before the process has other threads: it blocks the signals that
    /// [`Server::run`] waits for, and that holds for the calling thread and its children only.
    ///
    /// # Errors
    /// One line naming the option, what is wrong with it and the fix.
    pub fn bind(options: ServerOptions) -> Result<Self, Error> {
        let options = ServerOptions {
            plugin: plugin(&options.plugin)?,
            ggml_library: library(
                "--ggml-library",
                &options.ggml_library,
                "a ggml backend library such as libggml-cpu.so",
            )?,
            ..options
        };
        let program = worker_program()?;
        let mut mask = SigSet::empty();
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGCHLD] {
            mask.add(signal);
        }
        mask.thread_block().map_err(Error::io("block signals"))?;
        let signals = SignalFd::with_flags(&mask, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
            .map_err(Error::io("receive signals"))?;
        let (listener, identity) = listen_at(&options.socket)?;
        Ok(Self {
            options,
            program,
            signals,
            listener,
            identity,
            workers: Vec::new(),
            last_client: 0,
            limit: LogLimit::default(),
        })
    }

    /// Serves until SIGINT, SIGTERM or SIGHUP, then removes the socket and ends the workers.
    ///
    /// Call it on a thread that lives as long as the process: the kernel kills the workers when their thread ends.
    ///
    /// # Errors
    /// Only when waiting itself fails; whatever clients and workers do is logged.
    pub fn run(mut self) -> Result<(), Error> {
        let mut rest_until: Option<Instant> = None;
        loop {
            let rest = rest_until.map(|until| until.saturating_duration_since(Instant::now()));
            if rest.is_some_and(|rest| rest.is_zero()) {
                rest_until = None;
                continue;
            }
            let mut fds = [
                PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.listener.as_fd(), PollFlags::POLLIN),
            ];
            let watched = if rest.is_some() { 1 } else { 2 };
            match poll(&mut fds[..watched], timeout(rest)) {
                Ok(_) | Err(Errno::EINTR) => {}
                Err(errno) => {
                    self.stop();
                    return Err(Error::io("wait for clients")(errno));
                }
            }
            let waiting = rest.is_none() && fds[1].any() == Some(true);
            if self.told_to_stop() {
                self.stop();
                return Ok(());
            }
            self.reap();
            if waiting && !self.accept() {
                rest_until = Some(Instant::now() + ACCEPT_REST);
            }
        }
    }

    /// Takes every signal that has come; true when one of them asks the server to stop.
    fn told_to_stop(&self) -> bool {
        let mut stop = false;
        while let Ok(Some(signal)) = self.signals.read_signal() {
            stop |= i32::try_from(signal.ssi_signo) != Ok(Signal::SIGCHLD as i32);
        }
        stop
    }

    /// Accepts one client; false when the system has no room for it now.
    fn accept(&mut self) -> bool {
        match accept4(&self.listener, SockFlag::SOCK_CLOEXEC) {
            Ok(client) => {
                self.start_worker(client);
                true
            }
            // The client has gone again, or another signal came first.
            Err(Errno::EAGAIN | Errno::EINTR | Errno::ECONNABORTED) => true,
            Err(errno) => {
                self.warn(format_args!(
                    "cannot accept a client: {errno}; trying again in {} ms",
                    ACCEPT_REST.as_millis()
                ));
                false
            }
        }
    }

    fn start_worker(&mut self, client: OwnedFd) {
        self.last_client = self.last_client.wrapping_add(1).max(1);
        let number = self.last_client;
        let peer = getsockopt(&client, sockopt::PeerCredentials).map(|peer| peer.pid());
        let mut command = Command::new(&self.program);
        command
            .args(["worker", "--fd", "0"])
            .args(["--context", &number.to_string()])
            .args(["--server", &std::process::id().to_string()])
            .arg("--plugin")
            .arg(&self.options.plugin)
            .arg("--ggml-library")
            .arg(&self.options.ggml_library)
            .env_clear()
            .envs(self.options.sandbox.environment())
            .stdin(Stdio::from(client));
        if let Some(symbol) = &self.options.ggml_reg {
            command.arg("--ggml-reg").arg(symbol);
        }
        match command.spawn() {
            Ok(process) => {
                if let Some(left_out) = self.limit.admit() {
                    tracing::info!(
                        target: TARGET,
                        "client {number} connected: process {}, worker {}{}",
                        peer.unwrap_or(0),
                        process.id(),
                        LeftOut(left_out)
                    );
                }
                self.workers.push(Worker { client: number, process });
            }
            Err(error) => self.warn(format_args!(
                "client {number} turned away: cannot start {}: {error}",
                self.program.display()
            )),
        }
    }

    /// Forgets the workers that have ended, with a line for each.
    fn reap(&mut self) {
        let limit = &self.limit;
        self.workers.retain_mut(|worker| {
            let (client, pid) = (worker.client, worker.process.id());
            match worker.process.try_wait() {
                Ok(None) => return true,
                Ok(Some(status)) if status.success() => {
                    if let Some(left_out) = limit.admit() {
                        tracing::info!(target: TARGET, "client {client} left{}", LeftOut(left_out));
                    }
                }
                Ok(Some(status)) => {
                    if let Some(left_out) = limit.admit() {
                        tracing::warn!(
                            target: TARGET,
                            "client {client} lost: worker {pid} ended with {status}{}",
                            LeftOut(left_out)
                        );
                    }
                }
                Err(error) => tracing::warn!(target: TARGET, "worker {pid} cannot be waited for: {error}"),
            }
            false
        });
    }

    fn stop(mut self) {
        let path = &self.options.socket;
        if identity(path).is_ok_and(|found| found == self.identity)
            && let Err(error) = fs::remove_file(path)
        {
            tracing::warn!(target: TARGET, "cannot remove {}: {error}", path.display());
        }
        for worker in &self.workers {
            if let Ok(pid) = i32::try_from(worker.process.id()) {
                // One that has ended is not yet waited for, so the id is still its own.
                let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
            }
        }
        let end = Instant::now() + STOP_GRACE;
        loop {
            self.reap();
            let left = end.saturating_duration_since(Instant::now());
            if self.workers.is_empty() || left.is_zero() {
                break;
            }
            let mut fds = [PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
            if poll(&mut fds, timeout(Some(left))).is_err() || self.told_to_stop() {
                break;
            }
        }
        for worker in &mut self.workers {
            let pid = worker.process.id();
            tracing::warn!(target: TARGET, "worker {pid} of client {} killed", worker.client);
            if let Err(error) = worker.process.kill().and_then(|()| worker.process.wait()) {
                tracing::warn!(target: TARGET, "worker {pid} cannot be killed: {error}");
            }
        }
    }

    fn warn(&self, line: fmt::Arguments<'_>) {
        if let Some(left_out) = self.limit.admit() {
            tracing::warn!(target: TARGET, "{line}{}", LeftOut(left_out));
        }
    }
}

impl fmt::Display for Server {
    /// One line: where it listens, what it serves, and what walls the workers in.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "listening on {} (plugin {}, ggml library {}); workers are {}",
            self.options.socket.display(),
            self.options.plugin.display(),
            self.options.ggml_library.display(),
            self.options.sandbox.describe(Some(&self.options.ggml_library))
        )
    }
}

/// Rounded up to the millisecond, so that a wait does not end early and spin.
fn timeout(left: Option<Duration>) -> PollTimeout {
    left.map_or(PollTimeout::NONE, |left| {
        PollTimeout::try_from(left.as_millis() + 1).unwrap_or(PollTimeout::MAX)
    })
}

/// The absolute path of a library file: workers and plugins may have another folder.
fn library(option: &'static str, path: &Path, wanted: &'static str) -> Result<PathBuf, Error> {
    let error = |reason: String| Error::Library { option, path: path.to_owned(), reason, wanted };
    let found = fs::metadata(path).map_err(|cause| error(cause.to_string()))?;
    if !found.is_file() {
        return Err(error("not a regular file".into()));
    }
    std::path::absolute(path).map_err(|cause| error(cause.to_string()))
}

/// The absolute path of a plugin, which is tried out: a client would be told of a wrong one by a number alone.
fn plugin(path: &Path) -> Result<PathBuf, Error> {
    const OPTION: &str = "--plugin";
    const WANTED: &str = "an APIR plugin such as libggml-virtgpu-backend.so";
    let path = library(OPTION, path, WANTED)?;
    match Plugin::load(&path) {
        Ok(_) => Ok(path),
        Err(cause) => Err(Error::Library { option: OPTION, path, reason: cause.to_string(), wanted: WANTED }),
    }
}

fn worker_program() -> Result<PathBuf, Error> {
    let path = match std::env::var_os(WORKER_VARIABLE) {
        Some(path) if !path.is_empty() => PathBuf::from(path),
        _ => std::env::current_exe().map_err(Error::io("find this program's own file"))?,
    };
    match fs::metadata(&path) {
        Ok(_) => Ok(path),
        Err(source) => Err(Error::WorkerProgram { path, source }),
    }
}

fn listen_at(path: &Path) -> Result<(OwnedFd, (u64, u64)), Error> {
    let len = path.as_os_str().as_bytes().len();
    if len > SOCKET_PATH_LIMIT {
        return Err(Error::SocketPathLength { path: path.to_owned(), len, limit: SOCKET_PATH_LIMIT });
    }
    let folder = match path.parent() {
        Some(folder) if folder.as_os_str().is_empty() => Path::new("."),
        Some(folder) => folder,
        None => Path::new(""),
    };
    if !folder.is_dir() {
        return Err(Error::SocketFolder { path: path.to_owned(), folder: folder.to_owned() });
    }
    let failed = |what| move |source: io::Error| Error::Socket { path: path.to_owned(), what, source };
    let address = UnixAddr::new(path).map_err(|errno| failed("use this path")(errno.into()))?;
    clear_stale(path, &address)?;
    let listener = seqpacket().map_err(failed("make a socket"))?;
    bind(listener.as_raw_fd(), &address).map_err(|errno| match errno {
        Errno::EADDRINUSE => Error::SocketInUse { path: path.to_owned() },
        errno => failed("bind it")(errno.into()),
    })?;
    // Before listening: whoever may connect may compute on this host.
    fs::set_permissions(path, Permissions::from_mode(0o600)).map_err(failed("set its permissions"))?;
    listen(&listener, Backlog::MAXCONN).map_err(|errno| failed("listen")(errno.into()))?;
    let identity = identity(path).map_err(failed("find it again"))?;
    Ok((listener, identity))
}

/// Removes a socket file that nobody listens to.
fn clear_stale(path: &Path, address: &UnixAddr) -> Result<(), Error> {
    let failed = |what| move |source: io::Error| Error::Socket { path: path.to_owned(), what, source };
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed("look at it")(error)),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(Error::SocketOccupied { path: path.to_owned() });
        }
        Ok(_) => {}
    }
    let probe = seqpacket().map_err(failed("make a socket"))?;
    match connect(probe.as_raw_fd(), address) {
        Err(Errno::ECONNREFUSED) => fs::remove_file(path).map_err(failed("remove the stale one")),
        // A full backlog and a stream socket both have an owner.
        Ok(()) | Err(Errno::EAGAIN | Errno::EPROTOTYPE) => Err(Error::SocketInUse { path: path.to_owned() }),
        Err(errno) => Err(failed("ask whether a server is listening")(errno.into())),
    }
}

fn seqpacket() -> io::Result<OwnedFd> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    Ok(socket(AddressFamily::Unix, SockType::SeqPacket, flags, None)?)
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}
