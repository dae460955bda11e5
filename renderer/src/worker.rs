//! A worker: the process of one client. It owns the client's socket from the start.
use crate::context::{Config, Context};
use crate::error::Error;
use apir_protocol::socket::{ClientFrame, MAX_FRAME, SOCKET_VERSION, ServerFrame};
use nix::errno::Errno;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal, sigaction, sigprocmask};
use nix::sys::socket::{
    ControlMessage, MsgFlags, Shutdown, SockType, UnixAddr, getsockopt, recv, sendmsg, shutdown, sockopt,
};
use nix::unistd::{dup2_stdin, getppid};
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, Ordering};

/// Alignment of a command's arguments: more than virglrenderer's 4, so that no plugin reads askew.
const ARGUMENT_ALIGN: usize = 16;

/// What a server tells its worker.
#[derive(Debug, Clone)]
pub struct WorkerOptions {
    /// The client's socket, which becomes the worker's.
    pub fd: i32,
    /// The context's id, which is the client's number.
    pub context: u32,
    /// The server's process id: the worker ends when the server does.
    pub server: i32,
    /// The APIR plugin.
    pub plugin: PathBuf,
    /// `ggml.library.path` for the plugin.
    pub ggml_library: PathBuf,
    /// `ggml.library.reg` for the plugin; without it the plugin has its own default.
    pub ggml_reg: Option<OsString>,
}

/// Serves one client until it leaves, the server ends or the process is told to stop.
///
/// # Errors
/// When the process was not started by a server, and when the client broke the rules; its context is gone either way.
pub fn run(options: &WorkerOptions) -> Result<(), Error> {
    let socket = take_socket(options.fd)?;
    end_with_server(options.server)?;
    close_on_signals(&socket)?;
    let mut config = Config::default()
        .plugin(&options.plugin)
        .set("apir.load_library.path", &options.plugin)?
        .set("ggml.library.path", &options.ggml_library)?;
    if let Some(symbol) = &options.ggml_reg {
        config = config.set("ggml.library.reg", symbol)?;
    }
    let context = Context::new(options.context, config)?;
    serve(&socket, context)
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

fn end_with_server(server: i32) -> Result<(), Error> {
    set_pdeathsig(Some(Signal::SIGKILL)).map_err(Error::io("tie the worker to its server"))?;
    // It may have ended before the line above.
    if getppid().as_raw() != server {
        return Err(Error::ServerGone { server });
    }
    Ok(())
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
fn serve(socket: &OwnedFd, mut context: Context) -> Result<(), Error> {
    let mut memory = vec![0; MAX_FRAME + ARGUMENT_ALIGN];
    let start = memory.as_ptr().align_offset(ARGUMENT_ALIGN);
    // The frame's word and the command's header are 16 bytes, so the arguments lie aligned too.
    let buffer = &mut memory[start..start + MAX_FRAME];

    let Some(packet) = receive(socket, buffer)? else {
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
    while let Some(packet) = receive(socket, buffer)? {
        match ClientFrame::parse(packet)? {
            ClientFrame::Submit { command } => {
                let start = packet.len() - command.len();
                context.submit(&mut packet[start..])?;
            }
            ClientFrame::CreateBlob { size } => {
                let live = match context.create_blob(size) {
                    Ok(blob) => {
                        let frame = ServerFrame::Blob { res_id: blob.res_id, size: blob.size };
                        send(socket, frame, Some(&blob.memory))?
                    }
                    Err(code) => send(socket, ServerFrame::BlobRefused { code }, None)?,
                };
                if !live {
                    return Ok(());
                }
            }
            ClientFrame::Unref { res_id } => context.unref_blob(res_id),
            frame @ ClientFrame::Hello { .. } => {
                return Err(out_of_turn(&frame, "a request"));
            }
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
    };
    Error::OutOfTurn { found, awaited }
}

/// The next packet; `None` once the client has left. Descriptors that come with it are closed by the kernel.
fn receive<'a>(socket: &OwnedFd, buffer: &'a mut [u8]) -> Result<Option<&'a mut [u8]>, Error> {
    loop {
        // MSG_TRUNC: the packet's own length, also when it did not fit.
        return match recv(socket.as_raw_fd(), buffer, MsgFlags::MSG_TRUNC) {
            Ok(0) | Err(Errno::ECONNRESET) => Ok(None),
            Ok(len) => match buffer.get_mut(..len) {
                Some(packet) => Ok(Some(packet)),
                None => Err(apir_protocol::socket::FrameError::TooLong(len).into()),
            },
            Err(Errno::EINTR) => continue,
            Err(errno) => Err(Error::io("receive from the client")(errno)),
        };
    }
}

/// Sends a frame, with a blob's memory; false once the client has left.
fn send(socket: &OwnedFd, frame: ServerFrame, memory: Option<&OwnedFd>) -> Result<bool, Error> {
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
            Err(errno) => Err(Error::io("answer the client")(io::Error::from(errno))),
        };
    }
}
