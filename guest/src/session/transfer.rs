//! Tensor data and graphs, through the data blob.
#![forbid(unsafe_code)]

use super::{Session, SessionError};
use crate::link::{Blob, LinkError};
use apir_protocol::constants::DATA_BLOB_SIZE;
use apir_protocol::handle::BufferHandle;
use apir_protocol::messages::{BackendGraphComputeRequest, BufferGetTensorRequest, BufferSetTensorRequest};
use apir_protocol::tensor::TensorRecord;
use std::sync::atomic::Ordering;

/// The most bytes one command moves.
const PIECE: usize = DATA_BLOB_SIZE as usize;

impl Session {
    /// Writes `bytes` to `offset` bytes into a tensor of `buffer`, in pieces of the data blob's size.
    ///
    /// # Errors
    /// As [`Session::call`]; pieces before the failing one are written.
    pub fn set_tensor(
        &self,
        buffer: BufferHandle,
        tensor: &TensorRecord,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), SessionError> {
        let mut offset = offset;
        for piece in bytes.chunks(PIECE) {
            let mut channel = self.channel()?;
            channel.data.write(0, piece)?;
            let (res_id, size) = (channel.data.res_id(), piece.len() as u64);
            let request = BufferSetTensorRequest { buffer, tensor: *tensor, res_id, offset, size };
            self.call_on(&mut channel, &request)?;
            self.count_bytes(piece.len());
            offset += size;
        }
        Ok(())
    }

    /// Fills `out` from `offset` bytes into a tensor of `buffer`, in pieces of the data blob's size.
    ///
    /// # Errors
    /// As [`Session::call`]; `out` is then filled up to the failing piece.
    pub fn get_tensor(
        &self,
        buffer: BufferHandle,
        tensor: &TensorRecord,
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), SessionError> {
        let mut offset = offset;
        for piece in out.chunks_mut(PIECE) {
            let mut channel = self.channel()?;
            let (res_id, size) = (channel.data.res_id(), piece.len() as u64);
            let request = BufferGetTensorRequest { buffer, tensor: *tensor, res_id, offset, size };
            self.call_on(&mut channel, &request)?;
            channel.data.read(0, piece)?;
            self.count_bytes(piece.len());
            offset += size;
        }
        Ok(())
    }

    /// Has a graph computed, given as the bytes of its blob, and gives ggml's status number.
    ///
    /// # Errors
    /// As [`Session::call`].
    pub fn graph_compute(&self, graph: &[u8]) -> Result<i32, SessionError> {
        let size = graph.len() as u64;
        // Made before the turn is taken, dropped after the host has answered.
        let large = if graph.len() > PIECE { Some(self.create_blob(size)?) } else { None };
        let mut channel = self.channel()?;
        let blob = large.as_ref().unwrap_or(&channel.data);
        blob.write(0, graph)?;
        let res_id = blob.res_id();
        let request = BackendGraphComputeRequest { res_id, size };
        let reply = self.call_on(&mut channel, &request)?;
        self.count_bytes(graph.len());
        self.counters.graph_computes.fetch_add(1, Ordering::Relaxed);
        Ok(reply.status)
    }

    /// Makes a blob of at least `size` bytes that both sides see.
    ///
    /// # Errors
    /// [`SessionError::Link`] when the host or this system cannot, [`SessionError::Lost`].
    pub fn create_blob(&self, size: u64) -> Result<Blob, SessionError> {
        self.check()?;
        self.link.create_blob(size).map_err(|error| match self.link.check_peer() {
            Err(lost @ LinkError::Lost(_)) => self.link_failed(lost),
            _ => SessionError::Link(error),
        })
    }
}
