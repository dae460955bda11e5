//! `apir serve` and its workers as processes, under clients and signals of every kind.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use apir_protocol::socket::{ClientFrame, MAX_BLOB_SIZE, MAX_COMMAND, SUBMIT_PREFIX, ServerFrame};
use ggml_virtgpu::link::{Link, LinkError, wait};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, UnixAddr, connect, recv, send, socket};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use support::{Guest, Server, eventually, fake_plugin};

#[test]
fn a_guest_is_served_and_the_plugin_told_when_it_leaves() {
    let server = Server::start();
    let guest = Guest::ready(&server);
    guest.check();
    assert_eq!(
        guest.forward(8, &[u32::from_le_bytes(*b"ggml"), u32::from_le_bytes(*b".lib"), 0]).unwrap(),
        5
    );
    let blob = guest.link.create_blob(5000).unwrap();
    assert_eq!(blob.len(), 8192);
    blob.store_word(0, 77);
    assert_eq!(guest.forward(7, &[blob.res_id()]).unwrap(), 5);
    assert_eq!(guest.reply.load_word(4), 77);
    drop(blob);
    guest.check();
    drop(guest);
    eventually("deinit ran", || server.plugin_was_told());
    server.wait_for_line("client 1 left");
}

#[test]
fn blobs_of_impossible_sizes_are_refused_and_the_context_lives() {
    let server = Server::start();
    let guest = Guest::ready(&server);
    // The longest that a frame may ask for is more than a process may have.
    for size in [0, MAX_BLOB_SIZE, MAX_BLOB_SIZE + 1, u64::MAX] {
        assert!(matches!(guest.link.create_blob(size), Err(LinkError::Refused { size: s, .. }) if s == size));
    }
    assert_eq!(guest.link.create_blob(1 << 35).unwrap().len(), 1 << 35);
    guest.check();
}

#[test]
fn the_longest_command_passes_and_a_longer_one_is_not_sent() {
    let server = Server::start();
    let guest = Guest::ready(&server);
    assert_eq!(guest.forward(1, &vec![5; MAX_COMMAND / 4 - 3]).unwrap(), 5);
    for len in [0, 8, 13, MAX_COMMAND + 4] {
        assert!(matches!(guest.link.submit(&vec![0; len]), Err(LinkError::Command { .. })), "{len}");
    }
    guest.check();
}

#[test]
fn a_mapped_blob_leaves_nothing_behind() {
    // Its mappings are for root alone to read else.
    let server = Server::start_with(|command| {
        command.env("APIR_SANDBOX", "off");
    });
    let guest = Guest::ready(&server);
    let maps = |pid: &str| std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    let shared = |pid: &str| maps(pid).matches("apir-shmem").count();
    let worker = server.workers()[0].to_string();
    for _ in 0..2000 {
        drop(guest.link.create_blob(1 << 20).unwrap());
    }
    guest.check();
    assert_eq!(shared(&worker), 1);
}

#[test]
fn a_killed_worker_is_noticed_at_once_and_is_its_clients_alone() {
    let server = Server::start();
    let other = Guest::ready(&server);
    let others = server.workers();
    let guest = Guest::ready(&server);
    let worker = *server.workers().iter().find(|pid| !others.contains(pid)).unwrap();
    // A few milliseconds; the bound has room for a busy machine, and none for a wait that only a deadline ends.
    let (lost, after) = std::thread::scope(|scope| {
        guest.submit(2, 6, &[60_000]).unwrap();
        let waiting = scope.spawn(|| {
            let end = wait::until(&guest.link, None, || guest.reply.load_word(0) != 0);
            (end, Instant::now())
        });
        std::thread::sleep(Duration::from_millis(50));
        kill(worker, Signal::SIGKILL).unwrap();
        let killed = Instant::now();
        let (end, noticed) = waiting.join().unwrap();
        (end, noticed - killed)
    });
    println!("noticed after {after:?}");
    assert!(matches!(lost, Err(LinkError::Lost(_))), "{lost:?}");
    assert!(after < Duration::from_secs(5), "{after:?}");
    assert!(matches!(guest.submit(2, 1, &[]), Err(LinkError::Lost(_))));
    assert!(matches!(guest.link.create_blob(1), Err(LinkError::Lost(_))));
    server.wait_for_line("ended with signal: 9 (SIGKILL)");
    other.check();
    Guest::ready(&server).check();
}

#[test]
fn a_plugin_that_aborts_takes_one_client_with_it() {
    let server = Server::start();
    let other = Guest::ready(&server);
    let guest = Guest::ready(&server);
    assert!(matches!(guest.forward(5, &[]), Err(LinkError::Lost(_))));
    server.wait_for_line("ended with signal: 6 (SIGABRT)");
    other.check();
    Guest::ready(&server).check();
}

#[test]
fn workers_die_with_a_killed_server() {
    let mut server = Server::start();
    let guest = Guest::ready(&server);
    let worker = server.workers()[0];
    server.stop(Signal::SIGKILL);
    assert!(matches!(wait::until(&guest.link, Some(support::PATIENCE), || false), Err(LinkError::Lost(_))));
    eventually("the worker is gone", || {
        let state = std::fs::read_to_string(format!("/proc/{worker}/stat"));
        state.map_or(true, |stat| stat.contains(") Z"))
    });
}

#[test]
fn sigterm_and_sigint_remove_the_socket_and_end_the_workers() {
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let mut server = Server::start();
        let guest = Guest::ready(&server);
        assert_eq!(server.stop(signal).code(), Some(0));
        assert!(!server.socket().exists());
        assert!(matches!(guest.forward(1, &[]), Err(LinkError::Lost(_))));
        eventually("deinit ran", || server.plugin_was_told());
    }
}

#[test]
fn a_worker_that_does_not_stop_is_killed() {
    let mut server = Server::start();
    let _guest = Guest::ready(&server);
    // One that computes ends of its own accord.
    kill(server.workers()[0], Signal::SIGSTOP).unwrap();
    let start = Instant::now();
    assert_eq!(server.stop(Signal::SIGTERM).code(), Some(0));
    assert!(start.elapsed() < Duration::from_secs(10));
    server.wait_for_line("killed");
}

#[test]
fn a_server_leaves_the_socket_of_another_alone() {
    let mut server = Server::start();
    std::fs::remove_file(server.socket()).unwrap();
    std::fs::write(server.socket(), "another's").unwrap();
    server.stop(Signal::SIGTERM);
    assert!(server.socket().exists());
}

/// A client that says what it likes.
struct Raw(OwnedFd);

impl Raw {
    fn connect(path: &Path) -> Self {
        let fd = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
        connect(fd.as_raw_fd(), &UnixAddr::new(path).unwrap()).unwrap();
        Self(fd)
    }

    fn greet(path: &Path) -> Self {
        let raw = Self::connect(path);
        raw.send(ClientFrame::hello().as_bytes());
        assert!(matches!(raw.receive(), Some(ServerFrame::Hello { .. })));
        raw
    }

    fn send(&self, packet: &[u8]) {
        match send(self.0.as_raw_fd(), packet, MsgFlags::MSG_NOSIGNAL) {
            Ok(_) | Err(Errno::EPIPE | Errno::ECONNRESET) => {}
            Err(errno) => panic!("{errno}"),
        }
    }

    /// The next frame; `None` at the connection's end.
    fn receive(&self) -> Option<ServerFrame> {
        let mut bytes = [0; 64];
        match recv(self.0.as_raw_fd(), &mut bytes, MsgFlags::empty()) {
            Ok(0) | Err(Errno::ECONNRESET) => None,
            Ok(len) => Some(ServerFrame::parse(&bytes[..len]).unwrap()),
            Err(errno) => panic!("{errno}"),
        }
    }
}

#[test]
fn every_broken_frame_ends_its_own_connection_only() {
    let server = Server::start();
    let good = Guest::ready(&server);
    let path = server.socket();
    let mut packets = vec![vec![], vec![1], vec![0; 4], vec![0xff; 100], vec![0; 200 * 1024]];
    for frame in [ClientFrame::hello(), ClientFrame::create_blob(4096), ClientFrame::unref(1)] {
        let bytes = frame.as_bytes();
        packets.extend((1..bytes.len()).map(|len| bytes[..len].to_vec()));
        packets.push([bytes, &[0]].concat());
    }
    // A command too short, one that is not whole words, and an unknown type.
    for command in [&[0; 8][..], &[0; 13], &[9; 12]] {
        packets.push([&SUBMIT_PREFIX, command].concat());
    }
    // Blobs are the server's to make.
    packets.push(ClientFrame::attach(7, 4096).as_bytes().to_vec());
    // A second hello.
    packets.push(ClientFrame::hello().as_bytes().to_vec());
    for packet in &packets {
        let raw = Raw::greet(&path);
        raw.send(packet);
        assert_eq!(raw.receive(), None, "{} bytes: {:x?}", packet.len(), packet.get(..16));
    }
    for packet in &packets[..packets.len() - 1] {
        let raw = Raw::connect(&path);
        raw.send(packet);
        assert_eq!(raw.receive(), None, "before hello: {:x?}", packet.get(..16));
    }
    // Requests before the hello, however well formed.
    let raw = Raw::connect(&path);
    raw.send(ClientFrame::create_blob(4096).as_bytes());
    assert_eq!(raw.receive(), None);
    // A version that does not exist is told ours.
    let raw = Raw::connect(&path);
    let mut hello = ClientFrame::hello().as_bytes().to_vec();
    hello[8] = 99;
    raw.send(&hello);
    assert!(matches!(raw.receive(), Some(ServerFrame::Hello { .. })));
    assert_eq!(raw.receive(), None);
    good.check();
    Guest::ready(&server).check();
    eventually("no worker is left over", || server.workers().len() == 1);
}

#[test]
fn random_packets_end_or_keep_a_connection_but_never_the_server() {
    let server = Server::start_with(|command| {
        command.env("APIR_LOG", "error");
    });
    let good = Guest::ready(&server);
    let kind = prop_oneof![8 => 0u32..6, 1 => any::<u32>()];
    let word = prop_oneof![4 => 0u32..4, 1 => 331u32..335, 1 => any::<u32>()];
    // Not the fake plugin's abort and sleep.
    let words =
        proptest::collection::vec(word.prop_filter("abort, sleep", |word| *word != 5 && *word != 6), 0..8);
    let packet = (kind, words, 0usize..4).prop_map(|(kind, words, cut)| {
        let mut bytes: Vec<u8> = std::iter::once(kind).chain(words).flat_map(u32::to_le_bytes).collect();
        if kind > 4 {
            bytes.truncate(bytes.len() - cut);
        }
        bytes
    });
    let session = proptest::collection::vec(packet, 1..12);
    TestRunner::new(Config { cases: 100, failure_persistence: None, ..Config::default() })
        .run(&session, |packets| {
            let raw = Raw::greet(&server.socket());
            raw.send(ClientFrame::create_blob(4096).as_bytes());
            for packet in &packets {
                raw.send(packet);
            }
            Ok(())
        })
        .unwrap();
    good.check();
    Guest::ready(&server).check();
    for line in server.lines() {
        assert!(!line.contains("panicked") && !line.contains("SIG"), "{line}");
    }
}

#[test]
fn lines_about_one_guest_are_bounded() {
    let server = Server::start();
    let guest = Guest::ready(&server);
    for _ in 0..5000 {
        assert!(guest.link.create_blob(0).is_err());
    }
    guest.check();
    let about = |lines: Vec<String>| lines.iter().filter(|line| line.contains("refused")).count();
    std::thread::sleep(Duration::from_millis(1100));
    assert!(guest.link.create_blob(0).is_err());
    server.wait_for_line("earlier lines left out");
    let count = about(server.lines());
    assert!(count <= 60, "{count} lines for 5000 refusals");
}

#[test]
fn a_server_out_of_descriptors_waits_and_does_not_spin() {
    let server = Server::start();
    let limit = |files: &str| {
        let pid = server.process.id().to_string();
        let status = Command::new("prlimit").args(["--pid", &pid, &format!("--nofile={files}:")]).status();
        assert!(status.unwrap().success());
    };
    let ticks = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", server.process.id())).unwrap();
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    limit("5");
    let path = server.socket();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| Guest::connect(&path));
        server.wait_for_line("cannot accept a client");
        let before = ticks();
        std::thread::sleep(Duration::from_millis(500));
        // A tick is 10 ms; spinning would take 50.
        assert!(ticks() - before < 10);
        limit("1024");
        waiting.join().unwrap();
    });
    Guest::ready(&server).check();
    let warnings = server.lines().iter().filter(|line| line.contains("cannot accept")).count();
    assert!(warnings <= 60, "{warnings}");
}

#[test]
fn a_worker_that_cannot_start_turns_its_client_away() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("worker");
    std::fs::copy(env!("CARGO_BIN_EXE_apir"), &program).unwrap();
    let server = Server::start_with(|command| {
        command.env("APIR_WORKER", &program);
    });
    Guest::ready(&server).check();
    std::fs::remove_file(&program).unwrap();
    for _ in 0..3 {
        assert_eq!(Raw::connect(&server.socket()).receive(), None);
    }
    server.wait_for_line("turned away: cannot start");
}

#[test]
fn t31_a_worker_program_that_serves_nobody_is_found_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let (socket, plugin, empty) = (folder.path().join("socket"), fake_plugin(), folder.path().join("empty"));
    std::fs::write(&empty, "").unwrap();
    let line = refused(&socket, &plugin, &plugin, Some(&empty));
    assert!(
        line.contains("worker program") && line.contains("set APIR_WORKER to the apir program"),
        "{line}"
    );
    let line = refused(&socket, &plugin, &plugin, Some(Path::new("/bin/false")));
    assert!(line.contains("a trial worker ended with exit status: 1 before it had loaded"), "{line}");
}

#[test]
fn t31_a_plugin_that_does_not_start_is_found_at_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_apir"))
        .arg("serve")
        .arg("--socket")
        .arg(folder.path().join("socket"))
        .arg("--plugin")
        .arg(fake_plugin())
        .arg("--ggml-library")
        .arg(fake_plugin())
        .args(["--ggml-reg", "code=3"])
        .output()
        .unwrap();
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), line.lines().count()), (Some(1), 1), "{line}");
    assert!(line.contains("the plugin did not start: code 3"), "{line}");
}

#[test]
fn a_worker_by_hand_says_who_starts_it() {
    let fake = fake_plugin();
    let output = Command::new(env!("CARGO_BIN_EXE_apir"))
        .args(["worker", "--fd", "0", "--context", "1", "--server", "1"])
        .arg("--plugin")
        .arg(&fake)
        .arg("--ggml-library")
        .arg(&fake)
        .stdin(std::process::Stdio::null())
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("started by `apir serve`"));
}

/// A library that is no plugin.
fn c_library() -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let path =
        maps.lines().filter_map(|line| line.split_whitespace().nth(5)).find(|path| path.contains("/libc.so"));
    path.unwrap().into()
}

/// Runs `apir serve` with options that must fail, and returns its one line.
fn refused(socket: &Path, plugin: &Path, ggml: &Path, worker: Option<&Path>) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_apir"));
    command.arg("serve").arg("--socket").arg(socket);
    command.arg("--plugin").arg(plugin).arg("--ggml-library").arg(ggml).env_remove("APIR_WORKER");
    if let Some(worker) = worker {
        command.env("APIR_WORKER", worker);
    }
    let output = command.output().unwrap();
    let line = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{line}");
    assert_eq!(line.lines().count(), 1, "{line}");
    println!("{line}");
    line
}

#[test]
fn bad_options_get_one_line_with_the_fix() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let (socket, plugin, missing) = (path("socket"), fake_plugin(), path("missing.so"));
    let check = |line: String, parts: &[&str]| {
        for part in parts {
            assert!(line.contains(part), "{part:?} in {line}");
        }
    };
    check(
        refused(&socket, &missing, &plugin, None),
        &["--plugin", "missing.so", "No such file", "full path"],
    );
    check(refused(&socket, folder.path(), &plugin, None), &["--plugin", "not a regular file"]);
    let text = path("plugin.so");
    std::fs::write(&text, "no library").unwrap();
    // The loader's own words.
    check(
        refused(&socket, &text, &plugin, None),
        &["--plugin", "plugin.so", "cannot open", "file too short"],
    );
    let parts = ["not an APIR plugin", "undefined symbol: apir_backend_initialize"];
    check(refused(&socket, &c_library(), &plugin, None), &parts);
    check(refused(&socket, &plugin, &missing, None), &["--ggml-library", "missing.so", "libggml-cpu.so"]);
    check(refused(&socket, &plugin, &plugin, Some(&missing)), &["missing.so", "APIR_WORKER"]);
    check(refused(&path("no/socket"), &plugin, &plugin, None), &["no does not exist", "make it"]);
    let long = path(&"x".repeat(120));
    check(refused(&long, &plugin, &plugin, None), &["the limit is 107", "shorter"]);
    let file = path("file");
    std::fs::write(&file, "precious").unwrap();
    check(refused(&file, &plugin, &plugin, None), &["not a socket", "another path"]);
    assert_eq!(std::fs::read_to_string(file).unwrap(), "precious");
}

#[test]
fn t31_wrong_variables_and_an_empty_symbol_are_refused_with_the_fix() {
    let folder = tempfile::tempdir().unwrap();
    let run = |option: &[&str], variable: (&str, &str)| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_apir"));
        command.arg("serve").arg("--socket").arg(folder.path().join("socket"));
        command.arg("--plugin").arg(fake_plugin()).arg("--ggml-library").arg(fake_plugin());
        command.args(option).env_remove("APIR_LOG").env(variable.0, variable.1);
        let output = command.output().unwrap();
        assert!(!output.status.success());
        let lines = String::from_utf8(output.stderr).unwrap();
        println!("{lines}");
        lines
    };
    for (name, value, wanted) in [
        (
            "APIR_LOG",
            "loud",
            "apir: APIR_LOG=loud: must be error, warn, info, debug, trace, off, or a tracing filter",
        ),
        ("APIR_SANDBOX", "on", "apir: APIR_SANDBOX=on: must be strict or off"),
        (
            "APIR_SANDBOX_PROFILE",
            "gpu",
            "apir: APIR_SANDBOX_PROFILE=gpu: must be cpu, vulkan, cuda, rocm or any",
        ),
        ("APIR_SANDBOX_READ", "lib", "apir: APIR_SANDBOX_READ=lib: must be full paths"),
        (
            "APIR_LLAMA_CPP_LOG_TO_FILE",
            "/nonexistent/log",
            "apir: APIR_LLAMA_CPP_LOG_TO_FILE=/nonexistent/log: cannot be opened to append to: No such file",
        ),
    ] {
        let line = run(&[], (name, value));
        assert!(line.starts_with(wanted) && line.lines().count() == 1, "{line}");
    }
    let lines = run(&["--ggml-reg", ""], ("APIR_LOG", ""));
    assert!(lines.contains("--ggml-reg") && lines.contains("leave the option out"), "{lines}");
}

#[test]
fn log_lines_carry_the_program_s_name() {
    let server = Server::start();
    drop(Guest::ready(&server));
    server.wait_for_line("INFO apir: client 1 connected");
    server.wait_for_line("INFO apir: client 1 left");
    assert!(!server.has_line("virglrenderer"), "{:?}", server.lines());
}

#[test]
fn a_live_socket_is_refused_and_a_stale_one_replaced() {
    let mut server = Server::start();
    let plugin = fake_plugin();
    let line = refused(&server.socket(), &plugin, &plugin, None);
    assert!(line.contains("another server is listening"), "{line}");
    Guest::ready(&server).check();
    server.stop(Signal::SIGKILL);
    assert!(server.socket().exists());
    let folder = std::mem::replace(&mut server.folder, tempfile::tempdir().unwrap());
    let ggml = folder.path().join("ggml.so");
    let again = Server::serve(folder, &plugin, &ggml, |_| {});
    Guest::ready(&again).check();
}

#[test]
fn a_guest_without_a_server_gets_one_line_with_the_fix() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nobody");
    let line = ggml_virtgpu::link::SocketLink::connect(&path).unwrap_err().to_string();
    println!("{line}");
    for part in [path.to_str().unwrap(), "APIR_SOCKET", "apir serve --socket"] {
        assert!(line.contains(part), "{part:?} in {line}");
    }
    assert_eq!(line.lines().count(), 1);
}

#[test]
fn only_the_owner_may_connect() {
    use std::os::unix::fs::PermissionsExt;
    let server = Server::start();
    let mode = std::fs::metadata(server.socket()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn upstreams_plugin_runs_in_a_worker() {
    let peers =
        std::env::var_os("APIR_LLAMA_DIR").expect("APIR_LLAMA_DIR: the folder of llama.cpp's libraries");
    let peers = Path::new(&peers);
    let folder = tempfile::tempdir().unwrap();
    let plugin = peers.join("libggml-virtgpu-backend.so");
    let server = Server::serve(folder, &plugin, &peers.join("libggml-cpu.so"), |_| {});
    let guest = Guest::ready(&server);
    for _ in 0..100 {
        assert_eq!(guest.forward(1, &[]).unwrap(), 5);
        assert_eq!(guest.reply.load_word(4), 1);
    }
    // It sets no cursor for a command it does not know.
    assert_eq!(guest.forward(1000, &[]).unwrap(), 2);
}
