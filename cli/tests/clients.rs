//! Clients of `apir serve` that leave in the middle, write without end, or come in a storm, beside others.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use apir_protocol::header::CommandHeader;
use apir_protocol::socket::{ClientFrame, SUBMIT_PREFIX};
use ggml_virtgpu::link::{Link, LinkError};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, connect, send, sendmsg, socket,
    socketpair,
};
use std::fs;
use std::fs::OpenOptions;
use std::io::IoSlice;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::{Guest, Server, eventually};

/// The fake plugin's commands.
const NO_CURSOR: u32 = 3;
const SLEEP: u32 = 6;

#[test]
fn s28_a_computation_ends_when_its_client_has_left() {
    for sandbox in ["strict", "off"] {
        let server = Server::start_with(|command| {
            command.env("APIR_SANDBOX", sandbox);
        });
        let other = Guest::ready(&server);
        for _ in 0..3 {
            Guest::ready(&server).submit(2, SLEEP, &[600_000]).unwrap();
        }
        let left = Instant::now();
        eventually("only the other's worker is left", || server.workers().len() == 1);
        println!("{sandbox}: the workers were gone after {:?}", left.elapsed());
        assert!(left.elapsed() >= Duration::from_secs(1), "a command may end after its client has left");
        server.wait_for_line("a command still runs 2 s after its client left");
        other.check();
        // One that computes for longer than that for a client that stays goes on.
        assert_eq!(other.forward(SLEEP, &[2500]).unwrap(), 5);
    }
}

/// A connection without a guest library.
struct Plain(OwnedFd);

impl Plain {
    fn connect(path: &Path) -> Self {
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
        connect(fd.as_raw_fd(), &UnixAddr::new(path).unwrap()).unwrap();
        Self(fd)
    }

    /// A packet with descriptors.
    fn send(&self, packet: &[u8], fds: &[RawFd]) {
        let rights = [ControlMessage::ScmRights(fds)];
        let control = if fds.is_empty() { &[][..] } else { &rights[..] };
        let part = [IoSlice::new(packet)];
        sendmsg::<UnixAddr>(self.0.as_raw_fd(), &part, control, MsgFlags::MSG_NOSIGNAL, None).unwrap();
    }

    /// A command that is answered in the first blob.
    fn submit(&self, type_: u32, flags: u32, words: &[u32]) {
        let mut packet = SUBMIT_PREFIX.to_vec();
        packet.extend(CommandHeader { type_, flags, reply_res_id: 1 }.to_bytes());
        packet.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        self.send(&packet, &[]);
    }

    /// Starts a command that takes long.
    fn compute(path: &Path) -> Self {
        let client = Self::connect(path);
        client.send(ClientFrame::hello().as_bytes(), &[]);
        client.send(ClientFrame::create_blob(0x4000).as_bytes(), &[]);
        client.submit(0, 0, &[0, 2]);
        client.submit(1, 0, &[]);
        client.submit(2, SLEEP, &[600_000]);
        client
    }
}

#[test]
fn s28_a_client_that_sends_its_own_socket_has_left_all_the_same() {
    let server = Server::start();
    let other = Guest::ready(&server);
    let socket = server.socket();
    {
        // The far end of each stays open in the queue of the near one, behind frames without descriptors, or in another's.
        let [alone, one, two] = [(); 3].map(|()| Plain::compute(&socket));
        for _ in 0..3 {
            alone.send(ClientFrame::unref(9).as_bytes(), &[]);
        }
        alone.send(ClientFrame::unref(9).as_bytes(), &[alone.0.as_raw_fd()]);
        one.send(ClientFrame::unref(9).as_bytes(), &[two.0.as_raw_fd()]);
        two.send(ClientFrame::unref(9).as_bytes(), &[one.0.as_raw_fd()]);
    }
    eventually("only the other's worker is left", || server.workers().len() == 1);
    server.wait_for_line("the client sent descriptors");
    other.check();
    // Whether it is found by who waits or by who receives.
    let client = Plain::connect(&socket);
    client.send(ClientFrame::hello().as_bytes(), &[client.0.as_raw_fd()]);
    eventually("only the other's worker is left", || server.workers().len() == 1);
    drop(client);
    other.check();
}

#[test]
fn s28_descriptors_on_their_way_lose_no_guest() {
    // The system counts those of all processes of a user, and holds them against the sender's limit.
    let server = Server::start_with(|command| {
        // SAFETY: a system call and nothing else.
        unsafe { command.pre_exec(|| Ok(setrlimit(Resource::RLIMIT_NOFILE, 200, 200)?)) };
    });
    let guest = Guest::ready(&server);
    let (near, far) =
        socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
    let null = fs::File::open("/dev/null").unwrap();
    let near = Plain(near);
    near.send(&[0], &[null.as_raw_fd(); 250]);
    assert!(matches!(guest.link.create_blob(1), Err(LinkError::Refused { size: 1, .. })));
    server.wait_for_line("descriptors on their way");
    guest.check();
    drop((near, far));
    guest.link.create_blob(1).unwrap();
    guest.check();
}

/// The lines that name a client.
fn about_clients(lines: &[String]) -> usize {
    lines.iter().filter(|line| line.contains("client ")).count()
}

/// Connects again and again for a while, and makes the worker write each time.
fn reconnect(server: &Server, time: Duration) -> usize {
    let start = Instant::now();
    let mut connections = 0;
    while start.elapsed() < time || connections < 20 {
        let guest = Guest::ready(server);
        for _ in 0..20 {
            assert_eq!(guest.forward(NO_CURSOR, &[]).unwrap(), 2);
        }
        connections += 1;
    }
    connections
}

#[test]
fn t21_s28_reconnecting_does_not_multiply_log_lines() {
    let server = Server::start();
    let start = Instant::now();
    let connections = reconnect(&server, Duration::from_secs(3));
    let most = 10 * (start.elapsed().as_secs() as usize + 2);
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(Guest::ready(&server).forward(NO_CURSOR, &[]).unwrap(), 2);
    server.wait_for_line("earlier lines left out");
    let count = about_clients(&server.lines());
    println!("{count} lines for {connections} connections, {most} may be");
    assert!(count <= most && count >= 10, "{count} lines, {most} may be");
    // A worker's line says whose it is.
    let line = server.lines().into_iter().find(|line| line.contains("the plugin left no cursor")).unwrap();
    assert!(line.contains(" WARN client ") && line.contains(": context "), "{line}");
}

#[test]
fn s28_a_guest_s_traces_stay_in_the_log_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("log");
    fs::write(&file, "what was there before\n").unwrap();
    let server = Server::start_with(|command| {
        command.env("APIR_LLAMA_CPP_LOG_TO_FILE", &file);
    });
    let text = || fs::read_to_string(&file).unwrap();
    assert_eq!(Guest::ready(&server).forward(NO_CURSOR, &[]).unwrap(), 2);
    eventually("the line is in the file", || text().contains("client 1: context 1: command 3"));
    let start = Instant::now();
    reconnect(&server, Duration::from_secs(1));
    let most = 10 * (start.elapsed().as_secs() as usize + 3);
    let text = text();
    assert!(text.starts_with("what was there before\n"), "{text}");
    assert!(text.contains("client 1: context 1: command 3"), "{text}");
    assert!(text.lines().count() <= most, "{} lines, {most} may be", text.lines().count());
    assert!(!server.has_line("left no cursor"), "{:?}", server.lines());
}

#[test]
fn s28_a_log_that_nobody_reads_stops_no_guest() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let mut server = Command::new(env!("CARGO_BIN_EXE_apir"))
        .args(["serve", "--plugin"])
        .arg(support::fake_plugin())
        .arg("--ggml-library")
        .arg(support::fake_plugin())
        .arg("--socket")
        .arg(&socket)
        .env("APIR_MAX_LOG_LINES", "1000000")
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    eventually("the server listens", || socket.exists());
    let guest = Guest::connect(&socket);
    assert_eq!(guest.call(0, 0, &[0, 2]).unwrap(), 0xab1f);
    assert_eq!(guest.call(1, 0, &[]).unwrap(), 1);
    // More than the server's standard error and the worker's pipe hold together.
    for _ in 0..3000 {
        assert_eq!(guest.forward(NO_CURSOR, &[]).unwrap(), 2);
    }
    guest.check();
    let newcomer = Guest::connect(&socket);
    assert_eq!(newcomer.call(0, 0, &[0, 2]).unwrap(), 0xab1f);
    drop((guest, newcomer));
    server.kill().unwrap();
    server.wait().unwrap();
}

#[test]
fn s28_a_log_file_that_is_a_full_pipe_stops_no_guest() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("log");
    nix::unistd::mkfifo(&file, nix::sys::stat::Mode::S_IRWXU).unwrap();
    // It is there, and does not read.
    let reader = OpenOptions::new().read(true).write(true).open(&file).unwrap();
    let server = Server::start_with(|command| {
        command.env("APIR_LLAMA_CPP_LOG_TO_FILE", &file).env("APIR_MAX_LOG_LINES", "1000000");
    });
    let guest = Guest::ready(&server);
    for _ in 0..3000 {
        assert_eq!(guest.forward(NO_CURSOR, &[]).unwrap(), 2);
    }
    guest.check();
    Guest::ready(&server).check();
    drop(reader);
}

/// Set in the process that makes a storm: the socket.
const STORM: &str = "APIR_TEST_STORM";
const STORM_TIME: Duration = Duration::from_secs(4);

/// Another process that connects as fast as it can: says hello and junk, and leaves.
fn storm(socket: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "s28_a_newcomer_is_served_during_a_storm", "--nocapture"])
        .env(STORM, socket)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

fn make_a_storm(path: &Path) {
    let address = UnixAddr::new(path).unwrap();
    let start = Instant::now();
    let mut count = 0;
    while start.elapsed() < STORM_TIME {
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
        // A full backlog makes it wait.
        if connect(fd.as_raw_fd(), &address).is_ok() {
            let _ = send(fd.as_raw_fd(), ClientFrame::hello().as_bytes(), MsgFlags::MSG_NOSIGNAL);
            let _ = send(fd.as_raw_fd(), &[0xff; 100], MsgFlags::MSG_NOSIGNAL);
            count += 1;
        }
    }
    eprintln!("{count} connections in {:?}", start.elapsed());
}

#[test]
fn s28_a_newcomer_is_served_during_a_storm() {
    if let Some(path) = std::env::var_os(STORM) {
        return make_a_storm(&PathBuf::from(path));
    }
    let server = Server::start();
    let socket = server.socket();
    let mut storms: Vec<_> = (0..2).map(|_| storm(&socket)).collect();
    server.wait_for_line("clients left before they had a worker");
    let mut slowest = Duration::ZERO;
    let start = Instant::now();
    while start.elapsed() < STORM_TIME / 2 {
        let connecting = Instant::now();
        Guest::connect(&socket);
        slowest = slowest.max(connecting.elapsed());
    }
    println!("the slowest hello and blob of a newcomer took {slowest:?}");
    // A second on a quiet machine, where each connection got a worker it was a minute.
    assert!(slowest < Duration::from_secs(5), "{slowest:?}");
    for storm in &mut storms {
        assert!(storm.wait().unwrap().success());
    }
    // What the storm has left behind is cleared at once.
    let start = Instant::now();
    Guest::ready(&server).check();
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    eventually("the storm's workers are gone", || server.workers().is_empty());
}
