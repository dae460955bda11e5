//! The server: a listening socket, and a worker process for each client.
#![forbid(unsafe_code)]

use crate::choose::choose;
use crate::error::Error;
use crate::launch::Launch;
use crate::log::{self, TARGET};
use crate::plugin::Plugin;
use crate::probe::probe;
use crate::relay::{Wait, WorkerLine, WorkerOutput};
use crate::sandbox::Sandbox;
use crate::waiting::{MAX_PER_PEER, MAX_WAITING, Peer, Waiting};
use crate::worker::Libraries;
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
use std::process::Child;
use std::time::{Duration, Instant};

/// Environment variable with the program that is run as `PROGRAM worker …` for each client.
const WORKER_VARIABLE: &str = "APIR_WORKER";
/// What fits into a socket address beside the NUL.
const SOCKET_PATH_LIMIT: usize = if cfg!(target_os = "macos") { 103 } else { 107 };
/// How long accepting rests when the system is out of descriptors: clients wait in the backlog.
const ACCEPT_REST: Duration = Duration::from_millis(100);
/// Clients that the system keeps for the next accepting; a process that connects faster waits.
const BACKLOG: i32 = 128;
/// Clients accepted before the server looks at its workers again.
const ACCEPTS_PER_ROUND: usize = 64;
/// Workers that are starting at a time, of all clients and of one peer's: the processor is shared with those that run.
const MAX_STARTING: usize = 4;
const MAX_STARTING_PER_PEER: usize = 2;
/// Time from one line on clients that left at once to the next.
const GONE_PERIOD: Duration = Duration::from_secs(1);
/// How long a worker counts as starting, should it never say that it has started.
const START_LIMIT: Duration = Duration::from_secs(5);
/// The most workers at a time, as in virglrenderer's server, and the most of one peer's.
const MAX_WORKERS: usize = 256;
const MAX_WORKERS_PER_PEER: usize = 192;
/// How long workers may take to end when the server stops: longer than they may compute for a client that has left.
const STOP_GRACE: Duration = Duration::from_secs(3);
/// How long loading the ggml library may take: drivers of GPUs compile kernels then.
const PROBE_LIMIT: Duration = Duration::from_secs(120);

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
    launch: Launch,
    // What the plugin said of the library and its device.
    serves: String,
    signals: SignalFd,
    listener: OwnedFd,
    // Device and inode of the socket file, so that only our own is removed at the end.
    identity: (u64, u64),
    waiting: Waiting<OwnedFd>,
    workers: Vec<Worker>,
    last_client: u32,
    // Clients that left before they had a worker and were not told of, and when some were.
    gone: u64,
    gone_told: Option<Instant>,
}

#[derive(Debug)]
struct Worker {
    client: u32,
    peer: Peer,
    process: Child,
    output: WorkerOutput,
    start: Instant,
}

impl Worker {
    fn is_starting(&self, now: Instant) -> bool {
        !self.output.has_started() && now - self.start < START_LIMIT
    }

    fn log(client: u32) -> impl FnMut(&WorkerLine<'_>) {
        move |line| {
            let write = |text: &str| log::QueuedStderr::line(&format!("{}{text}", line.head()));
            log::from_worker(format_args!("client {client}"), line, write);
        }
    }

    fn read(&mut self) {
        self.output.read(Self::log(self.client));
    }
}

impl Server {
    /// What its workers serve: full paths, and of several variants of a library the one that was chosen.
    #[must_use]
    pub fn libraries(&self) -> &Libraries {
        &self.launch.libraries
    }

    /// Checks the options and listens. Call it before the process has other threads: it blocks the signals that
    /// [`Server::run`] waits for, and that holds for the calling thread and its children only.
    ///
    /// # Errors
    /// One line naming the option, what is wrong with it and the fix.
    pub fn bind(options: ServerOptions) -> Result<Self, Error> {
        let options = ServerOptions {
            plugin: plugin(&options.plugin)?,
            ggml_library: ggml_library(&options.ggml_library)?,
            ..options
        };
        log::open_file()?;
        let launch = Launch {
            program: worker_program()?,
            libraries: Libraries {
                plugin: Some(options.plugin.clone()),
                ggml_library: Some(options.ggml_library.clone()),
                ggml_reg: options.ggml_reg.clone(),
            },
            sandbox: options.sandbox.clone(),
            attach: false,
        };
        let serves = probe(&launch, PROBE_LIMIT)?;
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
            launch,
            serves,
            signals,
            listener,
            identity,
            waiting: Waiting::default(),
            workers: Vec::new(),
            last_client: 0,
            gone: 0,
            gone_told: None,
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
            let now = Instant::now();
            rest_until = rest_until.filter(|until| *until > now);
            let (accepting, readable) = match self.wait(rest_until) {
                Ok(ready) => ready,
                Err(errno) => {
                    self.stop();
                    return Err(Error::io("wait for clients")(errno));
                }
            };
            if self.told_to_stop() {
                self.stop();
                return Ok(());
            }
            for index in readable {
                self.workers[index].read();
            }
            self.reap();
            if accepting && !self.accept() {
                rest_until = Some(Instant::now() + ACCEPT_REST);
            }
            self.start_workers();
        }
    }

    /// Waits for something to do: whether clients can be accepted, and which workers have written something.
    fn wait(&mut self, rest_until: Option<Instant>) -> Result<(bool, Vec<usize>), Errno> {
        let now = Instant::now();
        let mut until = rest_until;
        let mut sooner = |time: Instant| until = Some(until.map_or(time, |until| until.min(time)));
        let mut readers = Vec::new();
        for (index, worker) in self.workers.iter_mut().enumerate() {
            match worker.output.wait_for(now) {
                Some(Wait::Readable) => readers.push(index),
                Some(Wait::Until(time)) => sooner(time),
                None => {}
            }
            if worker.is_starting(now) && self.waiting.len() > 0 {
                sooner(worker.start + START_LIMIT);
            }
        }
        let listens = rest_until.is_none() && self.waiting.len() < MAX_WAITING;
        let listener = if listens { PollFlags::POLLIN } else { PollFlags::empty() };
        let mut fds = vec![
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.listener.as_fd(), listener),
        ];
        fds.extend(
            readers.iter().map(|&index| PollFd::new(self.workers[index].output.as_fd(), PollFlags::POLLIN)),
        );
        match poll(&mut fds, timeout(until.map(|until| until.saturating_duration_since(now)))) {
            Ok(_) => {}
            Err(Errno::EINTR) => return Ok((false, Vec::new())),
            Err(errno) => return Err(errno),
        }
        let accepting = listens && fds[1].any() == Some(true);
        let ready = readers.iter().zip(&fds[2..]).filter(|(_, fd)| fd.any() == Some(true));
        Ok((accepting, ready.map(|(index, _)| *index).collect()))
    }

    /// Takes every signal that has come; true when one of them asks the server to stop.
    fn told_to_stop(&self) -> bool {
        let mut stop = false;
        while let Ok(Some(signal)) = self.signals.read_signal() {
            stop |= i32::try_from(signal.ssi_signo) != Ok(Signal::SIGCHLD as i32);
        }
        stop
    }

    /// Accepts the clients that wait; false when the system has no room for them now.
    fn accept(&mut self) -> bool {
        for _ in 0..ACCEPTS_PER_ROUND {
            if self.waiting.len() >= MAX_WAITING {
                break;
            }
            let client = match accept4(&self.listener, SockFlag::SOCK_CLOEXEC) {
                Ok(client) => client,
                Err(Errno::EAGAIN) => break,
                // The client has gone again, or another signal came first.
                Err(Errno::EINTR | Errno::ECONNABORTED) => continue,
                Err(errno) => {
                    let rest = ACCEPT_REST.as_millis();
                    log::warn(format_args!("cannot accept a client: {errno}; trying again in {rest} ms"));
                    return false;
                }
            };
            let peer = getsockopt(&client, sockopt::PeerCredentials);
            let peer = peer.map_or(Peer::default(), |peer| Peer { user: peer.uid(), process: peer.pid() });
            if !self.waiting.push(peer, client) {
                log::warn(format_args!(
                    "a client turned away: {MAX_PER_PEER} of process {} wait already",
                    peer.process
                ));
            }
        }
        true
    }

    /// Starts workers for clients that wait, as many as may start at a time.
    fn start_workers(&mut self) {
        let mut gone = self.gone;
        while self.waiting.len() > 0 {
            let now = Instant::now();
            let starting = || self.workers.iter().filter(|worker| worker.is_starting(now));
            if starting().count() >= MAX_STARTING {
                break;
            }
            let may_start =
                |peer| starting().filter(|worker| worker.peer == peer).count() < MAX_STARTING_PER_PEER;
            let Some((peer, client)) = self.waiting.next(may_start, &mut gone) else { break };
            let of_peer = self.workers.iter().filter(|worker| worker.peer == peer).count();
            if self.workers.len() >= MAX_WORKERS || of_peer >= MAX_WORKERS_PER_PEER {
                log::warn(format_args!(
                    "a client of process {} turned away: {} workers are running, the limit is {MAX_WORKERS}; \
                     {of_peer} are its own, the limit is {MAX_WORKERS_PER_PEER}",
                    peer.process,
                    self.workers.len()
                ));
                continue;
            }
            self.start_worker(peer, client);
        }
        self.gone = gone;
        if gone > 0 && self.gone_told.is_none_or(|told| told.elapsed() >= GONE_PERIOD) {
            log::info(format_args!("{gone} clients left before they had a worker"));
            (self.gone, self.gone_told) = (0, Some(Instant::now()));
        }
    }

    fn start_worker(&mut self, peer: Peer, client: OwnedFd) {
        self.last_client = self.last_client.wrapping_add(1).max(1);
        let number = self.last_client;
        match self.launch.spawn(client, number) {
            Ok((process, output)) => {
                log::info(format_args!(
                    "client {number} connected: process {}, worker {}",
                    peer.process,
                    process.id()
                ));
                self.workers.push(Worker { client: number, peer, process, output, start: Instant::now() });
            }
            Err(error) => log::warn(format_args!(
                "client {number} turned away: cannot start {}: {error}",
                self.launch.program.display()
            )),
        }
    }

    /// Forgets the workers that have ended, with what they wrote last and a line for each.
    fn reap(&mut self) {
        for mut worker in std::mem::take(&mut self.workers) {
            let (client, pid) = (worker.client, worker.process.id());
            let status = match worker.process.try_wait() {
                Ok(None) => {
                    self.workers.push(worker);
                    continue;
                }
                status => status,
            };
            worker.output.drain(Worker::log(client));
            match status {
                Ok(Some(status)) if status.success() => log::info(format_args!("client {client} left")),
                Ok(Some(status)) => {
                    log::warn(format_args!("client {client} lost: worker {pid} ended with {status}"));
                }
                Ok(None) => {}
                Err(error) => log::warn(format_args!("worker {pid} cannot be waited for: {error}")),
            }
        }
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
        )?;
        match self.serves.as_str() {
            "" => Ok(()),
            serves => write!(f, "; they serve {serves}"),
        }
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

/// The absolute path of the ggml library that the option names.
fn ggml_library(path: &Path) -> Result<PathBuf, Error> {
    const OPTION: &str = "--ggml-library";
    const WANTED: &str = "a ggml backend library such as libggml-cpu.so";
    let own = std::env::current_exe().map_err(Error::io("find this program's own file"))?;
    match choose(&own, path) {
        Ok(chosen) => library(OPTION, &chosen, WANTED),
        Err(reason) => Err(Error::Library { option: OPTION, path: path.to_owned(), reason, wanted: WANTED }),
    }
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
    let backlog = Backlog::new(BACKLOG).map_err(|errno| failed("listen")(errno.into()))?;
    listen(&listener, backlog).map_err(|errno| failed("listen")(errno.into()))?;
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
