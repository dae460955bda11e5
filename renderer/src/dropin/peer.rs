//! A context's worker: the process beside the VMM, or a thread in it, and the socket to it.
//!
//! Nothing here waits for a worker but its own thread: a worker that is stuck must not stop the VMM.
#![forbid(unsafe_code)]

use super::log;
use crate::choose::choose;
use crate::context;
use crate::error::Error;
use crate::launch::{Launch, connection};
use crate::log::from_worker;
use crate::probe::probe;
use crate::relay::{Wait, WorkerLine, WorkerOutput};
use crate::sandbox::Sandbox;
use crate::worker::{self, Blobs, LIBRARY_VARIABLE, Libraries};
use apir_protocol::socket::{
    ClientFrame, MAX_COMMAND, MAX_FRAME, SOCKET_VERSION, SUBMIT_PREFIX, ServerFrame,
};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    ControlMessage, MsgFlags, Shutdown, UnixAddr, recv, sendmsg, setsockopt, shutdown, sockopt,
};
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

/// Environment variable with the program that is run as `PROGRAM worker …` for each context, or `inprocess`.
const WORKER_VARIABLE: &str = "APIR_WORKER";
const PROGRAM: &str = "apir";
/// The most workers at a time, as in virglrenderer's server.
const MAX_WORKERS: usize = 256;
/// How long a worker may take to end its plugin.
const GRACE: Duration = Duration::from_secs(2);
const REAP_STEP: Duration = Duration::from_millis(10);
/// How long trying out the library may keep the VMM from starting.
const PROBE_LIMIT: Duration = Duration::from_secs(10);

/// Why there is no worker, or none any more.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeerError {
    /// No file to run.
    #[error(
        "no worker program: {PROGRAM} is neither beside {} nor in PATH; set {WORKER_VARIABLE} to its full path",
        .library.display()
    )]
    NoProgram {
        /// The drop-in's own file.
        library: PathBuf,
    },
    /// The system would not run it.
    #[error(
        "cannot start the worker {}: {source}; where this process may not start others, {WORKER_VARIABLE}=inprocess \
         runs the plugin inside it",
        .program.display()
    )]
    Start {
        /// The program.
        program: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The system failed a call.
    #[error("cannot {what} for a worker: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// A variable of the sandbox is wrong.
    #[error("{0}")]
    Sandbox(Arc<Error>),
    /// As many workers as there may be.
    #[error("{MAX_WORKERS} workers are running, which is the limit")]
    TooMany,
    /// A command that no frame carries.
    #[error("command of {len} bytes: the limit is {MAX_COMMAND}")]
    TooLong {
        /// Its length in bytes.
        len: usize,
    },
    /// The worker takes nothing more.
    #[error("the worker has left its socket full: it is stuck, or the guest sends more than it can take")]
    Full,
    /// The worker has ended.
    #[error("the worker has ended")]
    Gone,
}

impl PeerError {
    fn io<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Self {
        move |source| Self::Io { what, source: source.into() }
    }
}

/// How workers are started.
#[derive(Debug, Clone)]
pub(crate) struct Launcher {
    way: Way,
    running: Arc<AtomicUsize>,
    // What a trial has shown, for the first line.
    trial: &'static str,
}

#[derive(Debug, Clone)]
enum Way {
    Process(Launch),
    Refused(Arc<Error>),
    Missing(PathBuf),
    InProcess(Libraries),
}

/// How a worker ended, for the log; nothing when it was told to.
pub(crate) type Ended = Option<String>;

impl Launcher {
    /// The launcher that the environment asks for; `library` is the drop-in's own file.
    pub(crate) fn from_environment(library: &Path) -> Self {
        let mut fault = None;
        let mut process = |program: PathBuf| match Sandbox::from_environment() {
            Ok(sandbox) => {
                let ggml_library = chosen(&program).unwrap_or_else(|error| {
                    fault = Some(error);
                    None
                });
                let libraries = Libraries { ggml_library, ..Libraries::default() };
                Way::Process(Launch { program, libraries, sandbox, attach: true })
            }
            Err(error) => Way::Refused(Arc::new(error)),
        };
        let way = match std::env::var_os(WORKER_VARIABLE).filter(|value| !value.is_empty()) {
            Some(value) if value == "inprocess" => {
                Way::InProcess(Libraries::default().or_environment(library.parent()))
            }
            Some(path) => process(path.into()),
            None => {
                let path = std::env::var_os("PATH").unwrap_or_default();
                let folders =
                    library.parent().map(Path::to_owned).into_iter().chain(std::env::split_paths(&path));
                let mut programs = folders.map(|folder| folder.join(PROGRAM));
                programs
                    .find(|program| program.is_file())
                    .map_or_else(|| Way::Missing(library.to_owned()), process)
            }
        };
        // Once for the process: what is tried out does not change between two inits of a VMM.
        static TRIAL: OnceLock<String> = OnceLock::new();
        let trial = match &way {
            Way::Process(launch) => TRIAL.get_or_init(|| {
                let tried = match fault {
                    Some(fault) => Err(fault),
                    None => probe(launch, PROBE_LIMIT).map_err(Error::from),
                };
                match tried {
                    Ok(serves) if serves.is_empty() => String::new(),
                    Ok(serves) => format!("; they serve {serves}"),
                    Err(error) => format!("; no guest can be served: {error}"),
                }
            }),
            _ => "",
        };
        Self { way, running: Arc::default(), trial }
    }

    /// Starts a worker for a context of the VMM's; `on_end` is told when it has ended, from another thread.
    pub(crate) fn start(
        &self,
        context: u32,
        on_end: impl FnOnce(Ended) + Send + 'static,
    ) -> Result<Peer, PeerError> {
        // The plugin knows contexts by their ids, and the VMM's come again while an old worker still ends.
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let ticket = Ticket::take(&self.running)?;
        let way = match &self.way {
            Way::Missing(library) => return Err(PeerError::NoProgram { library: library.clone() }),
            Way::Refused(error) => return Err(PeerError::Sandbox(error.clone())),
            way => way.clone(),
        };
        let (socket, far) = connection().map_err(PeerError::io("make a socket"))?;
        // The system's default is a little less than the longest frame and its bookkeeping.
        setsockopt(&socket, sockopt::SndBuf, &MAX_FRAME)
            .map_err(PeerError::io("set a socket's send buffer"))?;
        let socket = Arc::new(socket);
        let leaving = Arc::<AtomicBool>::default();
        let (started, answer) = channel();
        let watch = Watch { context, socket: socket.clone(), leaving: leaving.clone() };
        // The kernel kills a worker when the thread that started it ends: this one ends after it.
        thread::Builder::new()
            .name(format!("apir-worker-{number}"))
            .spawn(move || {
                super::block_signals();
                let _ticket = ticket;
                if let Some(ended) = watch.run(way, far, number, &started) {
                    on_end(ended);
                }
            })
            .map_err(PeerError::io("start a thread"))?;
        answer.recv().unwrap_or(Err(PeerError::Gone))?;
        let peer = Peer { socket, leaving, gone: AtomicBool::new(false) };
        peer.send(&[ClientFrame::hello().as_bytes()], None)?;
        Ok(peer)
    }
}

impl std::fmt::Display for Launcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.way {
            Way::Process(Launch { program, libraries, sandbox, .. }) => {
                let library = libraries.clone().or_environment(None).ggml_library;
                write!(f, "{}, {}{}", program.display(), sandbox.describe(library.as_deref()), self.trial)
            }
            Way::Refused(error) => write!(f, "none: {error}"),
            Way::Missing(_) => write!(f, "none found"),
            Way::InProcess(_) => write!(f, "inside this process, not sandboxed"),
        }
    }
}

/// A place among the running workers.
struct Ticket(Arc<AtomicUsize>);

impl Ticket {
    fn take(running: &Arc<AtomicUsize>) -> Result<Self, PeerError> {
        let ticket = Self(running.clone());
        if running.fetch_add(1, Ordering::Relaxed) < MAX_WORKERS {
            Ok(ticket)
        } else {
            Err(PeerError::TooMany)
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A running worker, which ends when this is dropped: by itself, or killed after a grace time.
#[derive(Debug)]
pub(crate) struct Peer {
    socket: Arc<OwnedFd>,
    leaving: Arc<AtomicBool>,
    // It ended by itself, which its thread then tells.
    gone: AtomicBool,
}

impl Peer {
    /// Sends a command.
    pub(crate) fn submit(&self, command: &[u8]) -> Result<(), PeerError> {
        if command.len() > MAX_COMMAND {
            return Err(PeerError::TooLong { len: command.len() });
        }
        self.send(&[&SUBMIT_PREFIX, command], None)
    }

    /// Hands a blob over.
    pub(crate) fn attach(&self, res_id: u32, size: u64, memory: &File) -> Result<(), PeerError> {
        self.send(&[ClientFrame::attach(res_id, size).as_bytes()], Some(memory))
    }

    /// Takes a blob away.
    pub(crate) fn unref(&self, res_id: u32) -> Result<(), PeerError> {
        self.send(&[ClientFrame::unref(res_id).as_bytes()], None)
    }

    fn send(&self, parts: &[&[u8]], memory: Option<&File>) -> Result<(), PeerError> {
        let parts: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let fds: Vec<_> = memory.iter().map(|file| file.as_raw_fd()).collect();
        let control: &[_] = match fds.as_slice() {
            [] => &[],
            fds => &[ControlMessage::ScmRights(fds)],
        };
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        loop {
            return match sendmsg::<UnixAddr>(self.socket.as_raw_fd(), &parts, control, flags, None) {
                Ok(_) => Ok(()),
                Err(Errno::EINTR) => continue,
                // The second one: too many descriptors on their way.
                Err(Errno::EAGAIN | Errno::ETOOMANYREFS) => Err(PeerError::Full),
                Err(Errno::EPIPE | Errno::ECONNRESET | Errno::ENOTCONN) => {
                    self.gone.store(true, Ordering::Relaxed);
                    Err(PeerError::Gone)
                }
                Err(errno) => Err(PeerError::io("send a frame")(errno)),
            };
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.leaving.store(!self.gone.load(Ordering::Relaxed), Ordering::Release);
        // It wakes the worker and the thread that watches it.
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
    }
}

/// The life of a worker, on its own thread.
struct Watch {
    context: u32,
    socket: Arc<OwnedFd>,
    leaving: Arc<AtomicBool>,
}

impl Watch {
    /// From start to end; nothing when it did not start.
    fn run(
        &self,
        way: Way,
        far: OwnedFd,
        number: u32,
        started: &Sender<Result<(), PeerError>>,
    ) -> Option<Ended> {
        match way {
            Way::Process(launch) => match launch.spawn(far, number) {
                Ok((process, output)) => {
                    let _ = started.send(Ok(()));
                    Some(self.attend(process, output))
                }
                Err(source) => {
                    let _ = started.send(Err(PeerError::Start { program: launch.program, source }));
                    None
                }
            },
            Way::InProcess(libraries) => {
                let _ = started.send(Ok(()));
                let result = thread::scope(|scope| {
                    let (running, ended) = channel();
                    let stop = move || self.stop_late(number, &ended);
                    // Where no thread can be had, a computation goes on to its end.
                    let _ = thread::Builder::new().spawn_scoped(scope, stop);
                    let result = libraries
                        .config()
                        .and_then(|config| worker::serve(&far, number, config, Blobs::Client));
                    drop((far, running));
                    result
                });
                Some(match result {
                    Err(error) => Some(error.to_string()),
                    Ok(()) => (!self.told_to_leave()).then(|| "the worker's thread ended".to_owned()),
                })
            }
            Way::Missing(_) | Way::Refused(_) => None,
        }
    }

    /// Passes on what the worker writes until it ends or is told to, and sees to it that it does.
    fn attend(&self, mut process: Child, mut output: WorkerOutput) -> Ended {
        while !self.has_ended(&mut output) {
            output.read(|line| self.log(line));
        }
        let told = self.told_to_leave();
        let id = process.id();
        let how = match reap(&mut process) {
            Ok(status) => format!("worker {id} ended with {status}"),
            Err(error) => format!("worker {id} cannot be waited for: {error}"),
        };
        output.drain(|line| self.log(line));
        (!told).then(|| match self.other_version() {
            Some(version) => {
                format!("{how}: it speaks socket version {version}, this library {SOCKET_VERSION}")
            }
            None => how,
        })
    }

    /// Waits for more of what the worker writes, or for the end of the connection, which is then told.
    fn has_ended(&self, output: &mut WorkerOutput) -> bool {
        loop {
            let now = Instant::now();
            let wait = output.wait_for(now);
            let limit = match wait {
                Some(Wait::Until(time)) => {
                    PollTimeout::try_from((time - now).as_millis() + 1).unwrap_or(PollTimeout::MAX)
                }
                _ => PollTimeout::NONE,
            };
            // Asking for nothing: a hang-up and an error are always told, and shutting down is one of them.
            let mut fds = vec![PollFd::new(self.socket.as_fd(), PollFlags::empty())];
            if wait == Some(Wait::Readable) {
                fds.push(PollFd::new(output.as_fd(), PollFlags::POLLIN));
            }
            match poll(&mut fds, limit) {
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) if fds[0].any() == Some(true) => return true,
                Ok(_) => return false,
                Err(_) => return true,
            }
        }
    }

    fn log(&self, line: &WorkerLine<'_>) {
        let write = |text: &str| log::write(line.level, text);
        from_worker(format_args!("apir: context {}", self.context), line, write);
    }

    /// Stops what a context in this process computes when it has been told to leave and has not `ended` after the grace time.
    fn stop_late(&self, number: u32, ended: &Receiver<()>) {
        self.wait_for_end();
        if ended.recv_timeout(GRACE) == Err(RecvTimeoutError::Timeout) {
            context::stop_computation(number);
        }
    }

    /// Waits until either side has closed the connection.
    fn wait_for_end(&self) {
        // Asking for nothing: a hang-up and an error are always told, and shutting down is one of them.
        let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::empty())];
        while poll(&mut fds, PollTimeout::NONE) == Err(Errno::EINTR) {}
    }

    fn told_to_leave(&self) -> bool {
        self.leaving.load(Ordering::Acquire)
    }

    /// The version in the worker's hello, when it is another: it has then closed the connection.
    fn other_version(&self) -> Option<u32> {
        let mut packet = [0; 16];
        let len = recv(self.socket.as_raw_fd(), &mut packet, MsgFlags::MSG_DONTWAIT).ok()?;
        match ServerFrame::parse(&packet[..len]) {
            Ok(ServerFrame::Hello { version }) if version != SOCKET_VERSION => Some(version),
            _ => None,
        }
    }
}

/// The ggml library that workers are told to load where the environment names a folder or a pattern; a file they find there themselves.
fn chosen(program: &Path) -> Result<Option<PathBuf>, Error> {
    let Some(named) = Libraries::default().or_environment(None).ggml_library else { return Ok(None) };
    match choose(program, &named) {
        Ok(chosen) => Ok((chosen != named).then_some(chosen)),
        Err(fix) => Err(Error::Variable { name: LIBRARY_VARIABLE, value: named.into(), fix }),
    }
}

/// Waits for the worker, and kills it after the grace time.
fn reap(process: &mut Child) -> io::Result<ExitStatus> {
    let end = Instant::now() + GRACE;
    while Instant::now() < end {
        if let Some(status) = process.try_wait()? {
            return Ok(status);
        }
        thread::sleep(REAP_STEP);
    }
    process.kill()?;
    process.wait()
}
