//! A worker: the process of one client. It owns the client's socket from the start.
use crate::context::{Config, Context};
use crate::error::Error;
use crate::log::TARGET;
use crate::relay::STARTED;
use crate::sandbox::{Sandbox, Walls};
use apir_protocol::socket::{BlobRefusal, ClientFrame, MAX_FRAME, SOCKET_VERSION, ServerFrame};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal, sigaction, sigprocmask};
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, Shutdown, SockType, UnixAddr, getsockopt, recvmsg,
    sendmsg, setsockopt, shutdown, sockopt,
};
use nix::unistd::{dup2_stdin, getppid};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, IoSlice, IoSliceMut, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::Duration;

/// Alignment of a command's arguments: more than virglrenderer's 4, so that no plugin reads askew.
const ARGUMENT_ALIGN: usize = 16;

/// How long a command may go on for a client that has left.
const CLIENT_GRACE: Duration = Duration::from_secs(2);
/// Time from one look at the frames that wait to the next.
const LOOK: Duration = Duration::from_secs(1);
/// Bytes of waiting frames that are looked at in one call.
const LOOK_BYTES: usize = 16 << 10;
/// Looks in a row: more than a socket has frames.
const LOOKS: usize = 1024;

/// Environment variable with the plugin, as virglrenderer's APIR component reads it.
const PLUGIN_VARIABLE: &str = "VIRGL_APIR_BACKEND_LIBRARY";
/// The plugin beside the worker, where nothing names one.
const PLUGIN_FILE: &str = "libggml-virtgpu-backend.so";
/// Environment variable with the ggml library.
pub(crate) const LIBRARY_VARIABLE: &str = "APIR_LLAMA_CPP_GGML_LIBRARY_PATH";
/// What the plugin may ask for, and virglrenderer's environment variables for it.
const ENTRIES: [(&str, &str); 2] =
    [("ggml.library.path", LIBRARY_VARIABLE), ("ggml.library.reg", "APIR_LLAMA_CPP_GGML_LIBRARY_REG")];

/// The key that tells the plugin that it is alone in its process.
const OWN_PROCESS: &str = "apir.own_process";

/// What a worker serves.
#[derive(Debug, Clone, Default)]
pub struct Libraries {
    /// The APIR plugin; without it, loading the library fails with the code for a missing key.
    pub plugin: Option<PathBuf>,
    /// `ggml.library.path` for the plugin.
    pub ggml_library: Option<PathBuf>,
    /// `ggml.library.reg` for the plugin; without it the plugin has its own default.
    pub ggml_reg: Option<OsString>,
}

impl Libraries {
    /// Fills what is absent from virglrenderer's environment variables; the plugin is then looked for in `folder` too.
    #[must_use]
    pub fn or_environment(self, folder: Option<&Path>) -> Self {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let beside = || folder.map(|folder| folder.join(PLUGIN_FILE)).filter(|path| path.is_file());
        let [(_, library), (_, reg)] = ENTRIES;
        Self {
            plugin: self.plugin.or_else(|| variable(PLUGIN_VARIABLE).map(PathBuf::from)).or_else(beside),
            ggml_library: self.ggml_library.or_else(|| variable(library).map(PathBuf::from)),
            ggml_reg: self.ggml_reg.or_else(|| variable(reg)),
        }
    }

    pub(crate) fn config(&self) -> Result<Config, Error> {
        let mut config = Config::default();
        if let Some(plugin) = &self.plugin {
            config = config.plugin(plugin).set("apir.load_library.path", plugin)?;
        }
        let [(library, _), (reg, _)] = ENTRIES;
        if let Some(path) = &self.ggml_library {
            config = config.set(library, path)?;
        }
        match &self.ggml_reg {
            Some(symbol) => config.set(reg, symbol),
            None => Ok(config),
        }
    }
}

/// What a server tells its worker.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// The client's socket, which becomes the worker's.
    pub fd: i32,
    /// The context's id, which is the client's number.
    pub context: u32,
    /// The server's process id: the worker ends when the server does.
    pub server: i32,
    /// Who makes the blobs.
    pub blobs: Blobs,
    /// What to serve.
    pub libraries: Libraries,
    /// What walls the process in before it loads them.
    pub sandbox: Sandbox,
}

/// Who makes a context's blobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blobs {
    /// The worker, at the client's asking.
    Worker,
    /// The client, a VMM, which hands them over.
    Client,
}

/// Serves one client until it leaves, the server ends or the process is told to stop.
///
/// # Errors
/// When the process was not started by a server, and when the client broke the rules; its context is gone either way.
pub fn run(options: &WorkerOptions) -> Result<(), Error> {
    let socket = take_socket(options.fd)?;
    if options.sandbox != Sandbox::Off {
        close_others(&socket)?;
    }
    end_with_server(options.server)?;
    close_on_signals(&socket)?;
    if matches!(options.blobs, Blobs::Worker) {
        bound_queues(&socket)?;
    }
    let walls = options.sandbox.enter(&options.libraries)?;
    // Before there is another thread.
    set_variables(walls.as_ref());
    end_with_client(&socket, options.context, options.blobs)?;
    // Whoever started this process knows now that it runs. Standard error may be gone.
    let _ = io::stderr().write_all(&[STARTED]);
    let config = options.libraries.config()?.set(OWN_PROCESS, "1")?;
    serve(&socket, options.context, config, options.blobs)
}

/// Tells this process's drivers what its walls leave them.
pub(crate) fn set_variables(walls: Option<&Walls>) {
    for (name, value) in walls.into_iter().flat_map(Walls::variables) {
        // SAFETY: the sandbox is entered by a process of one thread alone.
        unsafe { std::env::set_var(name, value) };
    }
}

/// The client's socket at a number that libraries do not take for standard input.
fn take_socket(fd: i32) -> Result<OwnedFd, Error> {
    if fd < 0 {
        return Err(Error::NotASocket { fd });
    }
    // SAFETY: borrowed for this statement only; a number that is not open is an error of the call.
    let kind = getsockopt(&unsafe { BorrowedFd::borrow_raw(fd) }, sockopt::SockType);
    if kind != Ok(SockType::SeqPacket) {
        return Err(Error::NotASocket { fd });
    }
    // SAFETY: the server opened it for this worker, and nobody else in this process has taken it.
    let given = unsafe { OwnedFd::from_raw_fd(fd) };
    let socket = given.try_clone().map_err(Error::io("duplicate the client's socket"))?;
    if fd == 0 {
        let null = File::open("/dev/null").map_err(Error::io("open /dev/null"))?;
        dup2_stdin(&null).map_err(Error::io("replace the standard input"))?;
        let _ = given.into_raw_fd();
    }
    Ok(socket)
}

/// Closes whatever else the starting program left open, but for the standard streams.
fn close_others(socket: &OwnedFd) -> Result<(), Error> {
    let failed = Error::io("close inherited descriptors");
    let socket = socket.as_raw_fd();
    // Listed before the first is closed, since the list is a descriptor too.
    let open = fs::read_dir("/proc/self/fd").and_then(|entries| {
        let numbers = entries.map(|entry| Ok(entry?.file_name().to_str().and_then(|name| name.parse().ok())));
        numbers.collect::<io::Result<Vec<Option<RawFd>>>>()
    });
    for fd in open.map_err(failed)?.into_iter().flatten().filter(|&fd| fd > 2 && fd != socket) {
        // The list's own descriptor is closed already.
        let _ = nix::unistd::close(fd);
    }
    Ok(())
}

fn end_with_server(server: i32) -> Result<(), Error> {
    set_pdeathsig(Some(Signal::SIGKILL)).map_err(Error::io("tie the worker to its server"))?;
    // It may have ended before the line above.
    if getppid().as_raw() != server {
        return Err(Error::ServerGone { server });
    }
    Ok(())
}

/// Prepares a socket for a client that nobody vouches for.
fn bound_queues(socket: &OwnedFd) -> Result<(), Error> {
    // Frames to the client are short. Descriptors that no client has taken count for all workers of a user, so few wait: the
    // kernel makes the least size of this one.
    setsockopt(socket, sockopt::SndBuf, &1).map_err(Error::io("set a socket's send buffer"))?;
    let start: nix::libc::c_int = 0;
    // Each look at waiting frames begins where the last one ended.
    // SAFETY: the call reads the integer, whose size it is told.
    let set = unsafe {
        nix::libc::setsockopt(
            socket.as_raw_fd(),
            nix::libc::SOL_SOCKET,
            nix::libc::SO_PEEK_OFF,
            (&raw const start).cast(),
            size_of_val(&start) as nix::libc::socklen_t,
        )
    };
    Errno::result(set).map(drop).map_err(Error::io("look at a socket's frames"))
}

/// Whether a frame that waits brings descriptors; the frames stay. One of them may be the client's own end of this socket, which then
/// stays open when the client leaves, for as long as nobody receives the frame.
fn descriptors_wait(socket: &OwnedFd, bytes: &mut [u8]) -> bool {
    for _ in 0..LOOKS {
        let mut parts = [IoSliceMut::new(bytes)];
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        match recvmsg::<UnixAddr>(socket.as_raw_fd(), &mut parts, None, flags) {
            Ok(message) if message.flags.contains(MsgFlags::MSG_CTRUNC) => return true,
            Ok(message) if message.bytes > 0 => {}
            Err(Errno::EINTR) => {}
            Ok(_) | Err(_) => return false,
        }
    }
    false
}

/// Ends the process some time after the client has closed its end, should the thread that serves it not do so before: it may be in a
/// computation whose result nobody waits for. A connection that was shut down on this side counts as closed.
fn end_with_client(socket: &OwnedFd, context: u32, blobs: Blobs) -> Result<(), Error> {
    let socket = socket.try_clone().map_err(Error::io("duplicate the client's socket"))?;
    // A VMM hands descriptors over.
    let looks = matches!(blobs, Blobs::Worker);
    let look = PollTimeout::try_from(LOOK).unwrap_or(PollTimeout::MAX);
    let watch = move || {
        let mut bytes = vec![0; if looks { LOOK_BYTES } else { 0 }];
        let mut fds = [PollFd::new(socket.as_fd(), PollFlags::empty())];
        loop {
            match poll(&mut fds, if looks { look } else { PollTimeout::NONE }) {
                Ok(0) if looks && descriptors_wait(&socket, &mut bytes) => {
                    tracing::warn!(target: TARGET, "context {context}: {}; ending the worker", Error::Descriptors);
                    // SAFETY: as below.
                    unsafe { nix::libc::_exit(1) }
                }
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) | Err(_) => break,
            }
        }
        thread::sleep(CLIENT_GRACE);
        tracing::info!(
            target: TARGET,
            "context {context}: a command still runs {} s after its client left; ending the worker",
            CLIENT_GRACE.as_secs()
        );
        // SAFETY: it takes a number and does not return. Exit handlers would meet threads that compute.
        unsafe { nix::libc::_exit(0) }
    };
    // The receiving thread is told of every fault of the socket.
    thread::Builder::new()
        .name("apir-client".to_owned())
        .spawn(watch)
        .map(drop)
        .map_err(Error::io("start a thread"))
}

static CLIENT: AtomicI32 = AtomicI32::new(-1);

/// Makes SIGTERM and SIGINT end the worker as the client's leaving does: after the command that runs.
fn close_on_signals(socket: &OwnedFd) -> Result<(), Error> {
    extern "C" fn close(_: i32) {
        let errno = Errno::last_raw();
        // An async-signal-safe call; the receiving loop sees the end of the connection.
        let _ = shutdown(CLIENT.load(Ordering::Relaxed), Shutdown::Both);
        Errno::set_raw(errno);
    }
    CLIENT.store(socket.as_raw_fd(), Ordering::Relaxed);
    let action = SigAction::new(SigHandler::Handler(close), SaFlags::SA_RESTART, SigSet::empty());
    for signal in [Signal::SIGTERM, Signal::SIGINT] {
        // SAFETY: the handler makes only async-signal-safe calls and keeps errno; the socket is open until the process ends.
        unsafe { sigaction(signal, &action) }.map_err(Error::io("handle signals"))?;
    }
    // The server blocks signals for its own waiting, and a child inherits that.
    sigprocmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::empty()), None).map_err(Error::io("unblock signals"))
}

/// The client's frames, one after the other, until it leaves.
pub(crate) fn serve(socket: &OwnedFd, id: u32, config: Config, blobs: Blobs) -> Result<(), Error> {
    let mut context = Context::new(id, config)?;
    let mut memory = vec![0; MAX_FRAME + ARGUMENT_ALIGN];
    let start = memory.as_ptr().align_offset(ARGUMENT_ALIGN);
    // The frame's word and the command's header are 16 bytes, so the arguments lie aligned too.
    let buffer = &mut memory[start..start + MAX_FRAME];
    // Where nobody may hand over descriptors there is no room for them, and the kernel closes them.
    let mut control = match blobs {
        Blobs::Worker => Vec::new(),
        Blobs::Client => nix::cmsg_space!(RawFd),
    };

    let Some((packet, _)) = receive(socket, buffer, &mut control)? else {
        return Ok(());
    };
    match ClientFrame::parse(packet)? {
        ClientFrame::Hello { version } => {
            let hello = ServerFrame::Hello { version: SOCKET_VERSION };
            if !send(socket, hello, None)? {
                return Ok(());
            }
            if version != SOCKET_VERSION {
                return Err(Error::Version { found: version });
            }
        }
        other => return Err(out_of_turn(&other, "hello")),
    }
    while let Some((packet, memory)) = receive(socket, buffer, &mut control)? {
        match ClientFrame::parse(packet)? {
            ClientFrame::Submit { command } => {
                let start = packet.len() - command.len();
                context.submit(&mut packet[start..])?;
            }
            ClientFrame::CreateBlob { size } if blobs == Blobs::Worker => {
                let live = match context.create_blob(size) {
                    Ok(blob) => {
                        let frame = ServerFrame::Blob { res_id: blob.res_id, size: blob.size };
                        match try_send(socket, frame, Some(&blob.memory)) {
                            // The system counts those of all processes of a user.
                            Err(Errno::ETOOMANYREFS) => {
                                context.refuse_blob(&blob);
                                let code = BlobRefusal::Memory;
                                send(socket, ServerFrame::BlobRefused { code }, None)?
                            }
                            sent => sent.map_err(Error::io(ANSWER))?,
                        }
                    }
                    Err(code) => send(socket, ServerFrame::BlobRefused { code }, None)?,
                };
                if !live {
                    return Ok(());
                }
            }
            ClientFrame::Unref { res_id } => context.unref_blob(res_id),
            ClientFrame::Attach { res_id, size } if blobs == Blobs::Client => {
                context.attach_blob(res_id, size, memory.ok_or(Error::NoMemory { res_id })?)?;
            }
            frame => return Err(out_of_turn(&frame, "a request")),
        }
    }
    Ok(())
}

fn out_of_turn(frame: &ClientFrame<'_>, awaited: &'static str) -> Error {
    let found = match frame {
        ClientFrame::Hello { .. } => "hello",
        ClientFrame::CreateBlob { .. } => "create blob",
        ClientFrame::Unref { .. } => "unref",
        ClientFrame::Submit { .. } => "submit",
        ClientFrame::Attach { .. } => "attach",
    };
    Error::OutOfTurn { found, awaited }
}

/// A packet and the descriptor that came with it.
type Received<'a> = (&'a mut [u8], Option<OwnedFd>);

/// The next packet; `None` once the client has left.
fn receive<'a>(
    socket: &OwnedFd,
    buffer: &'a mut [u8],
    control: &mut [u8],
) -> Result<Option<Received<'a>>, Error> {
    let failed = Error::io("receive from the client");
    let may_bring = !control.is_empty();
    let (len, memory) = loop {
        let mut parts = [IoSliceMut::new(buffer)];
        let room = may_bring.then_some(&mut *control);
        // MSG_TRUNC: the packet's own length, also when it did not fit.
        let flags = MsgFlags::MSG_TRUNC | MsgFlags::MSG_CMSG_CLOEXEC;
        match recvmsg::<UnixAddr>(socket.as_raw_fd(), &mut parts, room, flags) {
            Ok(message) => {
                if !may_bring && message.flags.contains(MsgFlags::MSG_CTRUNC) {
                    return Err(Error::Descriptors);
                }
                let mut memory = None;
                // A packet without a control message has none to look at.
                for control in message.cmsgs().into_iter().flatten() {
                    if let ControlMessageOwned::ScmRights(fds) = control {
                        for fd in fds {
                            // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
                            memory = Some(unsafe { OwnedFd::from_raw_fd(fd) });
                        }
                    }
                }
                break (message.bytes, memory);
            }
            Err(Errno::EINTR) => {}
            Err(Errno::ECONNRESET) => return Ok(None),
            Err(errno) => return Err(failed(errno)),
        }
    };
    match buffer.get_mut(..len) {
        Some([]) => Ok(None),
        Some(packet) => Ok(Some((packet, memory))),
        None => Err(apir_protocol::socket::FrameError::TooLong(len).into()),
    }
}

const ANSWER: &str = "answer the client";

/// Sends a frame, with a blob's memory; false once the client has left.
fn send(socket: &OwnedFd, frame: ServerFrame, memory: Option<&OwnedFd>) -> Result<bool, Error> {
    try_send(socket, frame, memory).map_err(Error::io(ANSWER))
}

fn try_send(socket: &OwnedFd, frame: ServerFrame, memory: Option<&OwnedFd>) -> Result<bool, Errno> {
    let frame = frame.to_frame();
    let fds: Vec<_> = memory.iter().map(|fd| fd.as_raw_fd()).collect();
    let control: &[_] = match fds.as_slice() {
        [] => &[],
        fds => &[ControlMessage::ScmRights(fds)],
    };
    loop {
        let sent = sendmsg::<UnixAddr>(
            socket.as_raw_fd(),
            &[IoSlice::new(frame.as_bytes())],
            control,
            MsgFlags::MSG_NOSIGNAL,
            None,
        );
        return match sent {
            Ok(_) => Ok(true),
            Err(Errno::EINTR) => continue,
            Err(Errno::EPIPE | Errno::ECONNRESET) => Ok(false),
            Err(errno) => Err(errno),
        };
    }
}
