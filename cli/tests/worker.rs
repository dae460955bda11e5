//! A worker whose client makes the blobs, as the drop-in in a VMM does.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use apir_protocol::header::CommandHeader;
use apir_protocol::socket::{ClientFrame, SUBMIT_PREFIX};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, recv, sendmsg, socketpair,
};
use std::fs::File;
use std::io::IoSlice;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Stdio};
use support::{eventually, fake_plugin};

struct Worker {
    socket: OwnedFd,
    process: Child,
}

impl Worker {
    fn start() -> Self {
        Self::start_with("strict")
    }

    fn start_with(sandbox: &str) -> Self {
        let (socket, far) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).unwrap();
        let process = Command::new(env!("CARGO_BIN_EXE_apir"))
            .args(["worker", "--fd", "0", "--attach", "--context", "1"])
            .args(["--server", &std::process::id().to_string()])
            .env("VIRGL_APIR_BACKEND_LIBRARY", fake_plugin())
            .env("APIR_SANDBOX", sandbox)
            .stdin(Stdio::from(far))
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let worker = Self { socket, process };
        worker.send(ClientFrame::hello().as_bytes(), &[]);
        assert_eq!(recv(worker.socket.as_raw_fd(), &mut [0; 16], MsgFlags::empty()), Ok(12));
        worker
    }

    fn send(&self, packet: &[u8], memory: &[&File]) {
        let fds: Vec<_> = memory.iter().map(|file| file.as_raw_fd()).collect();
        let control = ControlMessage::ScmRights(&fds);
        let control = if fds.is_empty() { &[][..] } else { std::slice::from_ref(&control) };
        let part = [IoSlice::new(packet)];
        sendmsg::<UnixAddr>(self.socket.as_raw_fd(), &part, control, MsgFlags::MSG_NOSIGNAL, None).unwrap();
    }

    fn attach(&self, res_id: u32, size: u64, memory: &[&File]) {
        self.send(ClientFrame::attach(res_id, size).as_bytes(), memory);
    }

    /// Runs a command that is answered in the blob 5.
    fn call(&self, reply: &File, type_: u32, flags: u32, words: &[u32]) -> u32 {
        reply.write_all_at(&[0; 4], 0).unwrap();
        let mut packet = SUBMIT_PREFIX.to_vec();
        packet.extend(CommandHeader { type_, flags, reply_res_id: 5 }.to_bytes());
        packet.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        self.send(&packet, &[]);
        eventually("an answer", || word(reply, 0) != 0);
        word(reply, 0)
    }

    /// Its last line, once it has ended.
    fn end(mut self) -> String {
        assert_eq!(recv(self.socket.as_raw_fd(), &mut [0; 16], MsgFlags::empty()), Ok(0));
        let output = {
            let Self { ref mut process, .. } = self;
            let status = process.wait().unwrap();
            let mut lines = String::new();
            std::io::Read::read_to_string(&mut process.stderr.take().unwrap(), &mut lines).unwrap();
            assert!(!status.success());
            lines
        };
        println!("{output}");
        output
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn word(file: &File, offset: u64) -> u32 {
    let mut bytes = [0; 4];
    file.read_exact_at(&mut bytes, offset).unwrap();
    u32::from_le_bytes(bytes)
}

fn memory(size: u64, seals: SealFlag) -> File {
    let file = File::from(memfd_create(c"test", MFdFlags::MFD_ALLOW_SEALING).unwrap());
    file.set_len(size).unwrap();
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).unwrap();
    file
}

fn sealed(size: u64) -> File {
    memory(size, SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW)
}

#[test]
fn blobs_of_the_client_serve_as_reply_and_as_data() {
    let worker = Worker::start();
    let (reply, data) = (sealed(4096), sealed(10_000));
    worker.attach(5, 4096, &[&reply]);
    worker.attach(u32::MAX, 10_000, &[&data]);
    assert_eq!(worker.call(&reply, 0, 0, &[0, 2]), 0xab1f);
    assert_eq!(worker.call(&reply, 1, 0, &[]), 1);
    data.write_all_at(&77u32.to_le_bytes(), 0).unwrap();
    assert_eq!(worker.call(&reply, 2, 7, &[u32::MAX]), 5);
    assert_eq!(word(&reply, 4), 77);
    // An id may come again once it was given back.
    worker.send(ClientFrame::unref(u32::MAX).as_bytes(), &[]);
    worker.attach(u32::MAX, 4096, &[&sealed(4096)]);
    assert_eq!(worker.call(&reply, 2, 7, &[u32::MAX]), 5);
    assert_eq!(word(&reply, 4), 0);
}

#[test]
fn descriptors_do_not_pile_up() {
    // Its descriptors are for root alone to list else.
    let worker = Worker::start_with("off");
    let reply = sealed(4096);
    worker.attach(5, 4096, &[&reply]);
    assert_eq!(worker.call(&reply, 0, 0, &[0, 2]), 0xab1f);
    let open = || std::fs::read_dir(format!("/proc/{}/fd", worker.process.id())).unwrap().count();
    let before = open();
    for id in 10..200 {
        // Two come where one is awaited, and one where none is.
        worker.attach(id, 4096, &[&sealed(4096), &reply]);
        worker.send(ClientFrame::unref(id).as_bytes(), &[&reply]);
    }
    assert_eq!(worker.call(&reply, 0, 0, &[0, 2]), 0xab1f);
    assert_eq!(open(), before);
}

#[test]
fn what_is_no_blob_ends_the_worker() {
    let half = |seals| memory(4096, seals);
    let cases: [(&str, u32, u64, Vec<File>); 8] = [
        ("came without its memory", 7, 4096, vec![]),
        ("the id is in use, or 0", 0, 4096, vec![sealed(4096)]),
        ("the id is in use, or 0", 5, 4096, vec![sealed(4096)]),
        ("0 bytes of a memory of 4096", 7, 0, vec![sealed(4096)]),
        ("4097 bytes of a memory of 4096", 7, 4097, vec![sealed(4096)]),
        ("seals 0x4, needed are 0x6", 7, 4096, vec![half(SealFlag::F_SEAL_GROW)]),
        ("seals 0x2, needed are 0x6", 7, 4096, vec![half(SealFlag::F_SEAL_SHRINK)]),
        ("blob 7 cannot be attached", 7, 4096, vec![tempfile::tempfile().unwrap()]),
    ];
    for (wanted, res_id, size, files) in cases {
        let worker = Worker::start();
        worker.attach(5, 4096, &[&sealed(4096)]);
        worker.attach(res_id, size, &files.iter().collect::<Vec<_>>());
        let lines = worker.end();
        assert!(lines.contains(wanted), "{wanted:?} in {lines}");
    }
    let worker = Worker::start();
    worker.send(ClientFrame::create_blob(4096).as_bytes(), &[]);
    assert!(worker.end().contains("the client sent create blob where a request was awaited"));
}
