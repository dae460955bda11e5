//! Tensors to, from and between buffers.
#![forbid(unsafe_code)]

use crate::context::{Context, ContextBuffer};
use crate::error::CommandError;
use crate::verify::tensor::CheckedTensor;
use apir_ggml::abi;
use apir_protocol::handle::BufferHandle;
use apir_protocol::messages::{BufferCpyTensorRequest, BufferGetTensorRequest, BufferSetTensorRequest};
use apir_protocol::tensor::TensorRecord;

impl Context {
    pub(super) fn set_tensor(&self, request: &BufferSetTensorRequest) -> Result<(), CommandError> {
        let (tensor, buffer) = self.tensor_in(request.buffer, &request.tensor)?;
        check_range(&tensor, request.offset, request.size)?;
        if request.size == 0 {
            return Ok(());
        }
        let blob = self.blobs.view(request.res_id, request.size)?;
        buffer.memory.set_tensor(&placed(&tensor, buffer), request.offset, &blob)
    }

    pub(super) fn get_tensor(&self, request: &BufferGetTensorRequest) -> Result<(), CommandError> {
        let (tensor, buffer) = self.tensor_in(request.buffer, &request.tensor)?;
        check_range(&tensor, request.offset, request.size)?;
        if request.size == 0 {
            return Ok(());
        }
        let blob = self.blobs.view(request.res_id, request.size)?;
        buffer.memory.get_tensor(&placed(&tensor, buffer), request.offset, &blob)
    }

    /// Whether the backend could copy; the guest does by itself what it could not.
    pub(super) fn cpy_tensor(&self, request: &BufferCpyTensorRequest) -> Result<bool, CommandError> {
        let (destination, buffer) = self.tensor_in(request.buffer, &request.destination)?;
        let (source, source_buffer) = self.tensor_in(request.source.buffer, &request.source)?;
        if source.type_() != destination.type_() {
            return Err(CommandError::Unlike("types"));
        }
        if source.ne() != destination.ne() {
            return Err(CommandError::Unlike("dimensions"));
        }
        if !source.is_like(&destination) {
            return Err(CommandError::Unlike("strides"));
        }
        Ok(buffer.memory.ggml().cpy_tensor(
            &placed(&source, source_buffer),
            source_buffer.memory.ggml(),
            &placed(&destination, buffer),
        )?)
    }

    /// The checked tensor of a record that must lie in the buffer `handle`.
    fn tensor_in(
        &self,
        handle: BufferHandle,
        record: &TensorRecord,
    ) -> Result<(CheckedTensor, &ContextBuffer), CommandError> {
        let buffer = self.objects.buffer(handle)?;
        if record.buffer != handle {
            return Err(CommandError::OtherBuffer { tensor: record.buffer.0, command: handle.0 });
        }
        Ok((CheckedTensor::from_record(record, &self.rules, &self.objects)?, buffer))
    }
}

/// `offset + size` must lie inside the tensor.
fn check_range(tensor: &CheckedTensor, offset: u64, size: u64) -> Result<(), CommandError> {
    let len = tensor.extent();
    if offset.checked_add(size).is_none_or(|end| end > len) {
        return Err(CommandError::Range { what: "the tensor", offset, size, len });
    }
    Ok(())
}

/// The tensor at its address in the backend's terms.
fn placed(tensor: &CheckedTensor, buffer: &ContextBuffer) -> abi::Tensor {
    // A checked tensor ends inside its buffer, so that the sum is an address in it.
    let offset = tensor.place().map_or(0, |place| place.offset as usize);
    abi::Tensor {
        type_: tensor.type_(),
        ne: tensor.ne(),
        nb: tensor.nb(),
        data: std::ptr::with_exposed_provenance_mut(buffer.memory.ggml().base() + offset),
        ..abi::Tensor::default()
    }
}
