//! The socket link: virtio-gpu's part played over a unix socket by `apir serve`.
use super::{Blob, Link, LinkError, Pulse, Unref};
use apir_protocol::socket::{
    ClientFrame, MAX_COMMAND, MAX_FRAME, SOCKET_VERSION, SUBMIT_PREFIX, ServerFrame,
};
use memmap2::{MmapOptions, MmapRaw};
use nix::cmsg_space;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, MsgFlags, Shutdown, SockFlag, SockType, UnixAddr, connect, recvmsg,
    sendmsg, setsockopt, shutdown, socket, sockopt,
};
use nix::sys::time::TimeVal;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A server has to start a worker before it says hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// A worker answers between two commands, and one command may compute for long. Counts for hosts without a sign of life.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a wait goes on without a look at the host's signs of life.
const LOOK: Duration = Duration::from_millis(250);
/// Blobs whose memory could change size would end the program with SIGBUS.
const SEALS: SealFlag = SealFlag::F_SEAL_SHRINK.union(SealFlag::F_SEAL_GROW).union(SealFlag::F_SEAL_SEAL);

/// A link to `apir serve`.
#[derive(Debug)]
pub struct SocketLink {
    connection: Arc<Connection>,
}

#[derive(Debug)]
struct Connection {
    socket: OwnedFd,
    // Held from a request to its answer: answers carry no number.
    requests: Mutex<()>,
    pulse: Pulse,
}

impl SocketLink {
    /// Connects to the server at `path` and greets it.
    ///
    /// # Errors
    /// [`LinkError::Connect`] when nobody answers, [`LinkError::Version`] for a server of another version.
    pub fn connect(path: &Path) -> Result<Self, LinkError> {
        Self::connect_within(path, HELLO_TIMEOUT)
    }

    fn connect_within(path: &Path, timeout: Duration) -> Result<Self, LinkError> {
        let refused = |errno: Errno| LinkError::Connect { path: path.to_owned(), source: errno.into() };
        let address = UnixAddr::new(path).map_err(refused)?;
        let socket = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)
            .map_err(io_error("make a socket"))?;
        let look = TimeVal::new(0, LOOK.as_micros() as i64);
        setsockopt(&socket, sockopt::SendTimeout, &look)
            .map_err(io_error("set the socket's send timeout"))?;
        // A server that is stopped accepts nobody, and once its queue is full a connection waits for ever without the timeout.
        let start = Instant::now();
        while let Err(errno) = connect(socket.as_raw_fd(), &address) {
            if !matches!(errno, Errno::EAGAIN | Errno::EINTR) || start.elapsed() >= timeout {
                return Err(refused(errno));
            }
        }
        // The system's default is a little less than the longest frame and its bookkeeping.
        setsockopt(&socket, sockopt::SndBuf, &MAX_FRAME).map_err(io_error("set the socket's send buffer"))?;
        let connection = Connection::new(socket);
        match connection.request(ClientFrame::hello().as_bytes(), timeout)?.0 {
            ServerFrame::Hello { version: SOCKET_VERSION } => Ok(Self { connection: Arc::new(connection) }),
            ServerFrame::Hello { version } => {
                Err(LinkError::Version { path: path.to_owned(), found: version, expected: SOCKET_VERSION })
            }
            other => Err(connection.unexpected("hello", other)),
        }
    }
}

impl Link for SocketLink {
    fn transport(&self) -> &'static str {
        "socket"
    }

    fn command_type_offset(&self) -> u32 {
        0
    }

    fn create_blob(&self, size: u64) -> Result<Blob, LinkError> {
        let request = ClientFrame::create_blob(size);
        let (answer, memory) = self.connection.request(request.as_bytes(), REQUEST_TIMEOUT)?;
        let (res_id, found) = match answer {
            ServerFrame::Blob { res_id, size } => (res_id, size),
            ServerFrame::BlobRefused { code } => {
                return Err(LinkError::Refused { size, reason: code.into() });
            }
            other => return Err(self.connection.unexpected("blob", other)),
        };
        let mapping = map_blob(size, found, memory);
        match mapping {
            Ok(mapping) => Ok(Blob::new(res_id, mapping, self.connection.clone())),
            Err(error) => {
                self.connection.unref(res_id);
                Err(error)
            }
        }
    }

    fn submit(&self, command: &[u8]) -> Result<(), LinkError> {
        if command.len() < 12 || command.len() > MAX_COMMAND || !command.len().is_multiple_of(4) {
            return Err(LinkError::Command { len: command.len(), limit: MAX_COMMAND });
        }
        self.connection.send(&[&SUBMIT_PREFIX, command])
    }

    fn check_peer(&self) -> Result<(), LinkError> {
        // Asking for nothing: a hang-up and an error are always told.
        let mut fds = [PollFd::new(self.connection.socket.as_fd(), PollFlags::empty())];
        match poll(&mut fds, PollTimeout::ZERO) {
            Ok(0) | Err(Errno::EINTR) => Ok(()),
            Ok(_) => Err(LinkError::Lost("its end of the socket is closed".into())),
            Err(errno) => Err(io_error("poll the socket")(errno)),
        }
    }

    fn pulse(&self) -> &Pulse {
        &self.connection.pulse
    }
}

impl Unref for Connection {
    fn unref(&self, res_id: u32) {
        // A host that cannot be told is gone, and its blobs with it.
        let _ = self.send(&[ClientFrame::unref(res_id).as_bytes()]);
    }
}

impl Connection {
    fn new(socket: OwnedFd) -> Self {
        Self { socket, requests: Mutex::new(()), pulse: Pulse::default() }
    }

    /// Sends one packet, whole or not at all.
    fn send(&self, parts: &[&[u8]]) -> Result<(), LinkError> {
        let parts: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let mut patience = self.pulse.wait(Some(REQUEST_TIMEOUT));
        loop {
            let sent =
                sendmsg::<UnixAddr>(self.socket.as_raw_fd(), &parts, &[], MsgFlags::MSG_NOSIGNAL, None);
            return match sent {
                Ok(_) => Ok(()),
                Err(Errno::EINTR) => continue,
                // The socket is full: the host takes nothing at the moment.
                Err(Errno::EAGAIN) => {
                    patience.check()?;
                    continue;
                }
                Err(errno) => Err(lost_or_io("send to the host", errno)),
            };
        }
    }

    fn request(&self, packet: &[u8], timeout: Duration) -> Result<(ServerFrame, Option<OwnedFd>), LinkError> {
        let _turn = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        self.send(&[packet])?;
        let answer = self.receive(timeout);
        if answer.is_err() {
            // A late answer would be taken for that of the next request.
            self.close();
        }
        answer
    }

    fn unexpected(&self, awaited: &str, found: ServerFrame) -> LinkError {
        self.close();
        LinkError::Protocol(format!("{found:?} where {awaited} was awaited"))
    }

    /// Ends the connection for both sides; it only fails when it has ended before.
    fn close(&self) {
        let _ = shutdown(self.socket.as_raw_fd(), Shutdown::Both);
    }

    fn receive(&self, timeout: Duration) -> Result<(ServerFrame, Option<OwnedFd>), LinkError> {
        let mut patience = self.pulse.wait(Some(timeout));
        // Rounded up, so that a short wait does not turn into a spin.
        let look = PollTimeout::try_from(LOOK.min(timeout).as_millis() + 1).unwrap_or(PollTimeout::MAX);
        loop {
            let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::POLLIN)];
            match poll(&mut fds, look) {
                Ok(0) | Err(Errno::EINTR) => patience.check()?,
                Ok(_) => break,
                Err(errno) => return Err(io_error("poll the socket")(errno)),
            }
        }
        let mut bytes = [0; 64];
        let (len, memory) = {
            let mut parts = [IoSliceMut::new(&mut bytes)];
            let mut control = cmsg_space!([RawFd; 1]);
            let message = loop {
                match recvmsg::<UnixAddr>(
                    self.socket.as_raw_fd(),
                    &mut parts,
                    Some(&mut control),
                    MsgFlags::MSG_CMSG_CLOEXEC,
                ) {
                    Err(Errno::EINTR) => {}
                    Err(errno) => return Err(lost_or_io("receive from the host", errno)),
                    Ok(message) => break message,
                }
            };
            let mut memory = None;
            for part in message.cmsgs().map_err(io_error("read a packet's descriptors"))? {
                if let ControlMessageOwned::ScmRights(fds) = part {
                    for fd in fds {
                        // SAFETY: the kernel has just made this descriptor for us, and nobody else knows it.
                        memory = Some(unsafe { OwnedFd::from_raw_fd(fd) });
                    }
                }
            }
            (message.bytes, memory)
        };
        if len == 0 {
            return Err(LinkError::Lost("it closed the connection".into()));
        }
        Ok((ServerFrame::parse(&bytes[..len])?, memory))
    }
}

/// Maps a blob's memory after checking that the host keeps the rules for it.
fn map_blob(asked: u64, found: u64, memory: Option<OwnedFd>) -> Result<MmapRaw, LinkError> {
    let Some(memory) = memory else {
        return Err(LinkError::Protocol(format!(
            "a blob of {found} bytes came without memory (or this program has no descriptor left)"
        )));
    };
    let memory = File::from(memory);
    let length = memory.metadata().map_err(|source| LinkError::Io { what: "stat a blob", source })?.len();
    if found < asked || length < found {
        return Err(LinkError::Protocol(format!(
            "a blob of {found} bytes with {length} of memory, where {asked} were asked for"
        )));
    }
    let seals = fcntl(&memory, FcntlArg::F_GET_SEALS).map_err(io_error("read a blob's seals"))?;
    if !SealFlag::from_bits_retain(seals).contains(SEALS) {
        return Err(LinkError::Protocol(format!(
            "a blob is not sealed against a change of size (seals {seals:#x})"
        )));
    }
    usize::try_from(found)
        .map_err(|_| io::ErrorKind::OutOfMemory.into())
        .and_then(|len| MmapOptions::new().len(len).map_raw(&memory))
        .map_err(|source| LinkError::Io { what: "map a blob", source })
}

fn lost_or_io(what: &'static str, errno: Errno) -> LinkError {
    match errno {
        Errno::EPIPE | Errno::ECONNRESET | Errno::ENOTCONN => LinkError::Lost(errno.desc().into()),
        errno => io_error(what)(errno),
    }
}

fn io_error(what: &'static str) -> impl Fn(Errno) -> LinkError {
    move |errno| LinkError::Io { what, source: errno.into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::memfd::{MFdFlags, memfd_create};
    use nix::sys::socket::{Backlog, ControlMessage, bind, listen, recv, socketpair};
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::UnixListener;

    /// A link whose server is the test.
    fn pair() -> (SocketLink, OwnedFd) {
        let (socket, server) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
        (SocketLink { connection: Arc::new(Connection::new(socket)) }, server)
    }

    fn send(server: &OwnedFd, packet: &[u8], memory: Option<&File>) {
        let fds: Vec<_> = memory.iter().map(|file| file.as_raw_fd()).collect();
        let rights = [ControlMessage::ScmRights(&fds)];
        let control = if fds.is_empty() { &[][..] } else { &rights[..] };
        sendmsg::<UnixAddr>(server.as_raw_fd(), &[IoSlice::new(packet)], control, MsgFlags::empty(), None)
            .unwrap();
    }

    fn packet(server: &OwnedFd) -> Vec<u8> {
        let mut bytes = vec![0; 64];
        let len = recv(server.as_raw_fd(), &mut bytes, MsgFlags::MSG_DONTWAIT).unwrap();
        bytes.truncate(len);
        bytes
    }

    fn memory(len: u64, seals: SealFlag) -> File {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create(c"apir-shmem", flags).unwrap());
        file.set_len(len).unwrap();
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
        file
    }

    fn blob(res_id: u32, size: u64) -> Vec<u8> {
        ServerFrame::Blob { res_id, size }.to_frame().as_bytes().to_vec()
    }

    #[test]
    fn a_blob_is_mapped_and_given_back() {
        let (link, server) = pair();
        send(&server, &blob(3, 8192), Some(&memory(8192, SEALS)));
        let made = link.create_blob(5000).unwrap();
        assert_eq!((made.res_id(), made.len()), (3, 8192));
        assert_eq!(packet(&server), ClientFrame::create_blob(5000).as_bytes());
        drop(made);
        assert_eq!(packet(&server), ClientFrame::unref(3).as_bytes());
    }

    #[test]
    fn memory_that_breaks_the_rules_is_given_back_unmapped() {
        let without_grow = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_SEAL;
        for (said, found) in [
            (8192, Some(memory(8192, without_grow))),
            (8192, Some(memory(8192, SealFlag::empty()))),
            (8192, Some(memory(4096, SEALS))),
            (4096, Some(memory(8192, SEALS))),
            (u64::MAX, Some(memory(8192, SEALS))),
            (8192, None),
        ] {
            let (link, server) = pair();
            send(&server, &blob(3, said), found.as_ref());
            let error = link.create_blob(5000).unwrap_err();
            assert!(matches!(error, LinkError::Protocol(_)), "{error}");
            packet(&server);
            assert_eq!(packet(&server), ClientFrame::unref(3).as_bytes());
        }
    }

    #[test]
    fn a_server_that_answers_nonsense_is_left() {
        for nonsense in [&[1, 2][..], &[9; 8], &[9; 60]] {
            let (link, server) = pair();
            send(&server, nonsense, None);
            assert!(matches!(link.create_blob(1), Err(LinkError::Frame(_))));
            assert!(matches!(link.create_blob(1), Err(LinkError::Lost(_))));
            assert!(matches!(link.check_peer(), Err(LinkError::Lost(_))));
        }
        let (link, server) = pair();
        send(&server, ServerFrame::Hello { version: 1 }.to_frame().as_bytes(), None);
        assert!(matches!(link.create_blob(1), Err(LinkError::Protocol(_))));
        assert!(matches!(link.create_blob(1), Err(LinkError::Lost(_))));
    }

    #[test]
    fn a_late_answer_is_not_taken_for_another() {
        let (link, server) = pair();
        let late = link.connection.request(ClientFrame::create_blob(1).as_bytes(), Duration::from_millis(5));
        assert!(matches!(late, Err(LinkError::Timeout(_))));
        let answered = nix::sys::socket::send(server.as_raw_fd(), &blob(1, 4096), MsgFlags::MSG_NOSIGNAL);
        assert_eq!(answered, Err(Errno::EPIPE));
        assert!(matches!(link.create_blob(1), Err(LinkError::Lost(_))));
    }

    #[test]
    fn t31_a_failed_connection_names_what_to_do_about_it() {
        let folder = std::env::temp_dir().join(OsStr::from_bytes(b"apir-connect-\xe9"));
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        let at = |name: &str| folder.join(name);
        let line = |path: &Path| SocketLink::connect(path).unwrap_err().to_string();
        std::fs::write(at("file"), "").unwrap();
        drop(UnixListener::bind(at("left")).unwrap());
        let _stream = UnixListener::bind(at("stream")).unwrap();
        for (path, what) in [
            (at("missing"), "start the server with: apir serve"),
            (at("file"), "this is not a socket"),
            (folder.clone(), "this is not a socket"),
            (at("file").join("below"), "check APIR_SOCKET"),
            (at("left"), "the server that made it has ended"),
            (at("stream"), "another program than apir serve listens there"),
            (at(&"x".repeat(200)), "at most 107 bytes"),
        ] {
            let line = line(&path);
            assert!(line.contains(what) && !line.contains('\n'), "{line}");
            assert_eq!(line.contains("start"), what.contains("start") || what.contains("ended"), "{line}");
        }
        let denied = LinkError::Connect { path: at("missing"), source: Errno::EACCES.into() }.to_string();
        assert!(denied.contains("run this program as that user"), "{denied}");
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn t20_a_server_that_accepts_nobody_is_given_up() {
        let path = std::env::temp_dir().join(format!("apir-full-{}", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let address = UnixAddr::new(&path).unwrap();
        let make =
            || socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_NONBLOCK, None).unwrap();
        let server = make();
        bind(server.as_raw_fd(), &address).unwrap();
        listen(&server, Backlog::new(0).unwrap()).unwrap();
        // The first waits in the queue, and the others do not fit.
        let waiting: Vec<_> = (0..4).map(|_| make()).collect();
        let full = waiting.iter().any(|client| connect(client.as_raw_fd(), &address) == Err(Errno::EAGAIN));
        assert!(full);
        let (sender, receiver) = std::sync::mpsc::channel();
        let ours = path.clone();
        std::thread::spawn(move || {
            sender.send(SocketLink::connect_within(&ours, Duration::from_millis(20)).unwrap_err().to_string())
        });
        let line = receiver.recv_timeout(Duration::from_secs(20)).expect("the connection waits for ever");
        assert!(line.contains("the server is busy") && line.contains("or stopped"), "{line}");
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_closed_socket_is_a_lost_host() {
        let (link, server) = pair();
        link.check_peer().unwrap();
        drop(server);
        assert!(matches!(link.check_peer(), Err(LinkError::Lost(_))));
        assert!(matches!(link.submit(&[0; 12]), Err(LinkError::Lost(_))));
        assert!(matches!(link.create_blob(1), Err(LinkError::Lost(_))));
    }

    #[test]
    fn a_command_goes_out_as_one_packet() {
        let (link, server) = pair();
        link.submit(&[7; 12]).unwrap();
        assert_eq!(packet(&server), [&SUBMIT_PREFIX[..], &[7; 12]].concat());
    }
}
