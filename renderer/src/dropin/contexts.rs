//! The contexts that a VMM has made for its guest, and whose they are.
#![forbid(unsafe_code)]

use super::peer::{Peer, PeerError};
use super::resources::Memory;
use crate::blob::BlobBytes;
use apir_protocol::header::CommandHeader;
use std::collections::{HashMap, HashSet};
use std::os::unix::fs::FileExt;

/// The answer for a command that no worker will answer: to a forwarded one "no dispatch", to the others an error too.
const NO_ANSWER: u32 = 2;

/// Who serves a context.
#[derive(Debug)]
pub(crate) enum Side {
    /// Nobody yet: capset 4 before its first command.
    Undecided,
    /// The real library.
    Chain,
    /// A worker of ours.
    Ours(Peer),
    /// Nobody any more.
    Lost,
}

/// A context.
#[derive(Debug)]
pub(crate) struct Context {
    /// The capset it was made with.
    pub(crate) capset: u32,
    /// Tells it from an earlier context of the same id.
    pub(crate) serial: u64,
    /// Whether the real library knows it.
    pub(crate) in_chain: bool,
    /// Who serves it.
    pub(crate) side: Side,
    /// The resources attached to it; those with memory are the worker's too, once there is one.
    pub(crate) attached: HashMap<u32, Option<Memory>>,
    /// The blobs that commands wanted their answers in.
    replies: HashSet<u32>,
    /// The bytes of the blobs that were made for it.
    pub(crate) blob_bytes: BlobBytes,
}

impl Context {
    pub(crate) fn new(capset: u32, serial: u64, in_chain: bool, side: Side, blob_bytes: BlobBytes) -> Self {
        Self { capset, serial, in_chain, side, attached: HashMap::new(), replies: HashSet::new(), blob_bytes }
    }

    /// Whether commands, blobs and fences of this context are ours.
    pub(crate) fn is_ours(&self) -> bool {
        match self.side {
            Side::Ours(_) | Side::Lost => true,
            Side::Undecided => !self.in_chain,
            Side::Chain => false,
        }
    }

    /// Attaches a resource, and hands its memory to the worker.
    pub(crate) fn attach(&mut self, res_id: u32, memory: Option<Memory>) -> Result<(), PeerError> {
        if matches!(self.attached.get(&res_id), Some(Some(_))) {
            return Ok(());
        }
        self.attached.insert(res_id, memory.clone());
        match (&self.side, memory) {
            (Side::Ours(peer), Some(memory)) => peer.attach(res_id, memory.size, &memory.file),
            _ => Ok(()),
        }
    }

    /// Detaches a resource, and takes it from the worker.
    pub(crate) fn detach(&mut self, res_id: u32) -> Result<(), PeerError> {
        self.replies.remove(&res_id);
        match (self.attached.remove(&res_id), &self.side) {
            (Some(Some(_)), Side::Ours(peer)) => peer.unref(res_id),
            _ => Ok(()),
        }
    }

    /// Makes `peer` the context's worker.
    pub(crate) fn take_over(&mut self, peer: Peer) -> Result<(), PeerError> {
        for (&res_id, memory) in &self.attached {
            if let Some(memory) = memory {
                peer.attach(res_id, memory.size, &memory.file)?;
            }
        }
        self.side = Side::Ours(peer);
        Ok(())
    }

    /// Sends a command to the worker.
    pub(crate) fn submit(&mut self, command: &[u8]) -> Result<(), PeerError> {
        if let Ok(header) = CommandHeader::from_bytes(command)
            && self.attached.contains_key(&header.reply_res_id)
        {
            self.replies.insert(header.reply_res_id);
        }
        match &self.side {
            Side::Ours(peer) => peer.submit(command),
            _ => Err(PeerError::Gone),
        }
    }

    /// Gives the context up, and answers the commands that wait.
    pub(crate) fn lose(&mut self) {
        self.side = Side::Lost;
        for res_id in std::mem::take(&mut self.replies) {
            self.answer(res_id);
        }
    }

    /// Answers a command that was not run.
    pub(crate) fn answer_command(&self, command: &[u8]) {
        if let Ok(header) = CommandHeader::from_bytes(command) {
            self.answer(header.reply_res_id);
        }
    }

    /// Tells the guest that waits at `res_id`, if it does, that no answer will come: otherwise it would wait for ever.
    fn answer(&self, res_id: u32) {
        let Some(Some(memory)) = self.attached.get(&res_id) else { return };
        let mut word = [0; 4];
        // The guest sees the file's own pages. A failure leaves it waiting, which cannot be helped.
        if memory.file.read_exact_at(&mut word, 0).is_ok() && word == [0; 4] {
            let _ = memory.file.write_all_at(&NO_ANSWER.to_le_bytes(), 0);
        }
    }
}
