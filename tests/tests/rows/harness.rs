//! A guest of a worker process, on a server that has a witness too.

pub(crate) use crate::scene::*;

use apir_protocol::constants::{FORWARD_BASE, PROTOCOL_MAJOR, PROTOCOL_MINOR};
use apir_protocol::handle::BufferHandle;
use apir_protocol::header::CommandHeader;
use apir_protocol::messages::BufferClearRequest;
use apir_tests::peers::{Dist, LlamaDir};
use apir_tests::server::{Serve, Server};
use ggml_virtgpu::link::{Blob, Link, SocketLink, wait};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

/// Longer than any command of these tests takes on a busy machine, a compiler of shaders included.
const PATIENCE: Duration = Duration::from_secs(600);
/// Bytes of a reply blob, and of its first word, which says that the reply is there.
const REPLY: usize = 16384;
const WORD: usize = 4;
/// No reply of the protocol is longer, that with the names of operations and types included.
const LONGEST_REPLY: usize = 8192;
/// What lies in a reply blob before the reply.
const BLANK: u8 = 0xaa;

pub(crate) const HANDSHAKE: u32 = 0;
pub(crate) const LOAD_LIBRARY: u32 = 1;
pub(crate) const FORWARD: u32 = 2;
/// The code of a command whose worker ended before it answered.
pub(crate) const LOST: u32 = u32::MAX;

/// A server and its witness; guests that live at the same time share them.
pub(crate) struct Beside {
    witness: Mutex<(Guest, BufferHandle)>,
    pub(crate) server: Server,
    /// Whether a kernel may end its worker.
    unchecked: bool,
}

/// Bytes of the witness's buffer.
const WITNESSED: u32 = 64 << 10;
const WITNESS: u8 = 0x5a;

impl Beside {
    /// A server with these variables, and a context that has stored something.
    pub(crate) fn start(variables: &[(&str, &str)]) -> Arc<Self> {
        let (dist, llama) = (Dist::from_env().unwrap(), LlamaDir::from_env().unwrap());
        let serve = Serve::new(&dist, &llama.cpu_library());
        let serve = variables.iter().fold(serve, |serve, (key, value)| serve.env(key, value));
        let server = serve.start().unwrap();
        let witness = Guest::of(&server);
        witness.load();
        let buffer = witness.buffer(WITNESSED.into());
        witness.call(&BufferClearRequest { buffer, value: WITNESS });
        let unchecked = variables.iter().any(|(key, _)| *key == "APIR_INDEX_CHECK");
        Arc::new(Self { witness: Mutex::new((witness, buffer)), server, unchecked })
    }

    /// The server of the guests that live now, else a new one.
    fn now() -> Arc<Self> {
        static NOW: Mutex<Weak<Beside>> = Mutex::new(Weak::new());
        let mut now = NOW.lock().unwrap_or_else(PoisonError::into_inner);
        now.upgrade().unwrap_or_else(|| {
            let beside = Self::start(&[]);
            *now = Arc::downgrade(&beside);
            beside
        })
    }

    /// Fails unless the witness still has what it stored, and computes.
    pub(crate) fn check(&self) {
        let mut witness = self.witness.lock().unwrap_or_else(PoisonError::into_inner);
        let (guest, buffer) = &mut *witness;
        let stored = row(1, *buffer, 0, WITNESSED / 4 - 16);
        let bytes = guest.get(stored, WITNESSED as usize - 64);
        assert!(bytes.iter().all(|byte| *byte == WITNESS), "another context's buffer has changed");
        let place = u64::from(WITNESSED - 64);
        let square = node(2, *buffer, place, 4, OP_SQR, &[1]);
        assert_eq!(guest.compute(&[2], &[row(1, *buffer, 0, 4), square]), Ok(0), "another context computes");
    }

    /// Whether a worker was ended by a signal: one that refuses is never.
    pub(crate) fn has_crashed_workers(&self) -> bool {
        self.server.stderr().contains("signal:")
    }
}

/// A guest of a worker.
pub(crate) struct Guest {
    link: SocketLink,
    reply: Blob,
    blobs: HashMap<u32, Blob>,
    pub(crate) beside: Option<Arc<Beside>>,
}

impl Guest {
    /// A client of this server, of which nobody is a witness.
    pub(crate) fn of(server: &Server) -> Self {
        let link = SocketLink::connect(server.socket()).unwrap();
        let reply = link.create_blob(REPLY as u64).unwrap();
        Self { link, reply, blobs: HashMap::new(), beside: None }
    }

    /// A client of this server that has said nothing yet.
    pub(crate) fn connected(beside: &Arc<Beside>) -> Self {
        let mut guest = Self::of(&beside.server);
        guest.beside = Some(beside.clone());
        guest
    }

    /// A client of this server with its library loaded.
    pub(crate) fn started(beside: &Arc<Beside>) -> Self {
        let guest = Self::connected(beside);
        guest.load();
        guest
    }

    pub(crate) fn start() -> Self {
        Self::started(&Beside::now())
    }

    pub(crate) fn load(&self) {
        let version: Vec<u8> =
            [PROTOCOL_MAJOR, PROTOCOL_MINOR].iter().flat_map(|word| word.to_le_bytes()).collect();
        self.submit(HANDSHAKE, 0, &version);
        assert_eq!(self.submit(LOAD_LIBRARY, 0, &[]), 1, "the library is loaded");
    }

    /// The notification word of a command, or [`LOST`].
    pub(crate) fn submit(&self, type_: u32, flags: u32, arguments: &[u8]) -> u32 {
        let header = CommandHeader { type_, flags, reply_res_id: self.reply.res_id() };
        let command = [&header.to_bytes()[..], arguments].concat();
        self.reply.write(WORD, &[BLANK; REPLY - WORD]).unwrap();
        self.reply.store_word(0, 0);
        let answered = self
            .link
            .submit(&command)
            .and_then(|()| wait::until(&self.link, Some(PATIENCE), || self.reply.load_word(0) != 0));
        if answered.is_ok() { self.reply.load_word(0) } else { LOST }
    }

    /// The code and the reply of raw bytes. The whole page stands for a reply, whose length only the plugin knows.
    pub(crate) fn raw(&self, number: u32, request: &[u8]) -> (u32, Vec<u8>) {
        let word = self.submit(FORWARD, number, request);
        let mut page = vec![0; REPLY - WORD];
        self.reply.read(WORD, &mut page).unwrap();
        assert!(page[LONGEST_REPLY..].iter().all(|byte| *byte == BLANK), "bytes behind the reply");
        if word == LOST || word <= FORWARD_BASE {
            return (word, Vec::new());
        }
        let code = word - FORWARD_BASE - 1;
        if code != 0 && page.iter().all(|byte| *byte == BLANK) {
            page.clear();
        }
        (code, page)
    }

    pub(crate) fn blob(&mut self, bytes: &[u8]) -> u32 {
        let blob = self.link.create_blob(bytes.len().max(1) as u64).unwrap();
        blob.write(0, bytes).unwrap();
        let res_id = blob.res_id();
        self.blobs.insert(res_id, blob);
        res_id
    }

    /// Gives a blob back.
    pub(crate) fn drop_blob(&mut self, res_id: u32) {
        self.blobs.remove(&res_id);
    }

    pub(crate) fn blob_bytes(&self, res_id: u32, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.blobs[&res_id].read(0, &mut bytes).unwrap();
        bytes
    }

    /// Address of a blob's memory here, which lives as long as the blob.
    pub(crate) fn blob_address(&self, res_id: u32) -> usize {
        self.blobs[&res_id].as_ptr().addr()
    }

    /// A command is whole words; others end the connection.
    pub(crate) fn carries(len: usize) -> bool {
        len.is_multiple_of(4)
    }

    /// Whether the worker is there.
    pub(crate) fn is_connected(&self) -> bool {
        self.link.check_peer().is_ok()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        if let Some(beside) = self.beside.take().filter(|_| !std::thread::panicking()) {
            beside.check();
        }
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        if !std::thread::panicking() && !self.unchecked {
            assert!(!self.has_crashed_workers(), "a worker crashed:\n{}", self.server.stderr());
        }
    }
}
