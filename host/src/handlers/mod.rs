//! What each command does, once its request is read.
#![forbid(unsafe_code)]

mod compute;
mod inline;
mod transfer;

use crate::context::Context;
use crate::error::CommandError;
use crate::generated::Handlers;
use crate::liveness::{Heart, INTERVAL};
use crate::memory::{HostBuffer, SharedWord};
use apir_ggml::{Names, Version};
use apir_protocol::command::Command;
use apir_protocol::constants::{FEATURE_LIVENESS, FEATURE_NAMES, FEATURE_REASONS};
use apir_protocol::handle::BufferHandle;
use apir_protocol::messages::*;

/// What this host offers beyond upstream's commands.
const FEATURES: u64 = FEATURE_LIVENESS | FEATURE_NAMES | FEATURE_REASONS;

impl Handlers for Context {
    fn device_get_device_count(
        &mut self,
        _request: DeviceGetDeviceCountRequest,
    ) -> Result<DeviceGetDeviceCountReply, CommandError> {
        Ok(DeviceGetDeviceCountReply { count: self.device_count()? })
    }

    fn device_get_count(
        &mut self,
        _request: DeviceGetCountRequest,
    ) -> Result<DeviceGetCountReply, CommandError> {
        Ok(DeviceGetCountReply { count: self.device_count()? })
    }

    fn device_get_name(
        &mut self,
        _request: DeviceGetNameRequest,
    ) -> Result<DeviceGetNameReply, CommandError> {
        Ok(DeviceGetNameReply { name: self.device.name() })
    }

    fn device_get_description(
        &mut self,
        _request: DeviceGetDescriptionRequest,
    ) -> Result<DeviceGetDescriptionReply, CommandError> {
        Ok(DeviceGetDescriptionReply { description: self.device.description() })
    }

    fn device_get_type(
        &mut self,
        _request: DeviceGetTypeRequest,
    ) -> Result<DeviceGetTypeReply, CommandError> {
        Ok(DeviceGetTypeReply { type_: self.presented.number() as u32 })
    }

    fn device_get_memory(
        &mut self,
        _request: DeviceGetMemoryRequest,
    ) -> Result<DeviceGetMemoryReply, CommandError> {
        let (free, total) = self.device.memory();
        let quota = self.limits.device_bytes.unwrap_or(u64::MAX);
        let left = self.objects.left_of(quota);
        Ok(DeviceGetMemoryReply { free: free.min(left), total: total.min(quota) })
    }

    fn device_supports_op(
        &mut self,
        request: DeviceSupportsOpRequest,
    ) -> Result<DeviceSupportsOpReply, CommandError> {
        let supported = self.supports(&request.node)?;
        Ok(DeviceSupportsOpReply { supported })
    }

    fn device_get_buffer_type(
        &mut self,
        _request: DeviceGetBufferTypeRequest,
    ) -> Result<DeviceGetBufferTypeReply, CommandError> {
        let buffer_type = self.objects.handle_of(self.device.buffer_type()?)?;
        Ok(DeviceGetBufferTypeReply { buffer_type })
    }

    fn device_get_props(
        &mut self,
        _request: DeviceGetPropsRequest,
    ) -> Result<DeviceGetPropsReply, CommandError> {
        let caps = self.device.props().caps;
        Ok(DeviceGetPropsReply {
            async_: caps.async_,
            host_buffer: caps.host_buffer,
            buffer_from_host_ptr: caps.buffer_from_host_ptr,
            events: caps.events,
            mmap_support: caps.mmap_support,
        })
    }

    fn device_buffer_from_ptr(
        &mut self,
        request: DeviceBufferFromPtrRequest,
    ) -> Result<DeviceBufferFromPtrReply, CommandError> {
        if !self.device.props().caps.buffer_from_host_ptr {
            return Err(CommandError::NoSharedBuffers);
        }
        if request.size == 0 {
            return Err(CommandError::Range { what: "a buffer", offset: 0, size: 0, len: 0 });
        }
        self.objects.check_limits(&self.limits, request.size, true)?;
        let mapping = self.blobs.view(request.res_id, request.size)?.keep()?;
        let max_tensor_size = usize::try_from(request.max_tensor_size).unwrap_or(usize::MAX);
        // A blob of this size has been found, so that it fits.
        let len = usize::try_from(request.size).unwrap_or(usize::MAX);
        let memory = HostBuffer::shared(mapping, len, &self.device, max_tensor_size)?
            .ok_or(CommandError::NoSharedBuffers)?;
        let buffer_type = self.objects.handle_of(memory.ggml().buffer_type()?)?;
        let buffer = self.objects.add_buffer(memory, None)?;
        Ok(DeviceBufferFromPtrReply { buffer, buffer_type })
    }

    fn buffer_type_get_name(
        &mut self,
        request: BufferTypeGetNameRequest,
    ) -> Result<BufferTypeGetNameReply, CommandError> {
        Ok(BufferTypeGetNameReply { name: self.objects.buffer_type(request.buffer_type)?.name() })
    }

    fn buffer_type_get_alignment(
        &mut self,
        request: BufferTypeGetAlignmentRequest,
    ) -> Result<BufferTypeGetAlignmentReply, CommandError> {
        let alignment = self.objects.buffer_type(request.buffer_type)?.alignment() as u64;
        Ok(BufferTypeGetAlignmentReply { alignment })
    }

    fn buffer_type_get_max_size(
        &mut self,
        request: BufferTypeGetMaxSizeRequest,
    ) -> Result<BufferTypeGetMaxSizeReply, CommandError> {
        let max_size = self.objects.buffer_type(request.buffer_type)?.max_size() as u64;
        Ok(BufferTypeGetMaxSizeReply { max_size })
    }

    fn buffer_type_is_host(
        &mut self,
        _request: BufferTypeIsHostRequest,
    ) -> Result<BufferTypeIsHostReply, CommandError> {
        Ok(BufferTypeIsHostReply { is_host: false })
    }

    fn buffer_type_alloc_buffer(
        &mut self,
        request: BufferTypeAllocBufferRequest,
    ) -> Result<BufferTypeAllocBufferReply, CommandError> {
        let buffer = match self.alloc_buffer(&request) {
            Ok(buffer) => buffer,
            Err(error @ CommandError::Handle(..)) => return Err(error),
            Err(error) => {
                // Not having so much is an answer and no refusal; why is for the log.
                self.log_refusal(Command::BufferTypeAllocBuffer.number(), &error);
                None
            }
        };
        Ok(BufferTypeAllocBufferReply { buffer: buffer.unwrap_or_default() })
    }

    fn buffer_type_get_alloc_size(
        &mut self,
        request: BufferTypeGetAllocSizeRequest,
    ) -> Result<BufferTypeGetAllocSizeReply, CommandError> {
        let size = self.alloc_size(request.buffer_type, &request.tensor)?;
        Ok(BufferTypeGetAllocSizeReply { size })
    }

    fn buffer_get_base(&mut self, request: BufferGetBaseRequest) -> Result<BufferGetBaseReply, CommandError> {
        Ok(BufferGetBaseReply { base: self.objects.buffer(request.buffer)?.base })
    }

    fn buffer_set_tensor(
        &mut self,
        request: BufferSetTensorRequest,
    ) -> Result<BufferSetTensorReply, CommandError> {
        self.set_tensor(&request)?;
        Ok(BufferSetTensorReply {})
    }

    fn buffer_get_tensor(
        &mut self,
        request: BufferGetTensorRequest,
    ) -> Result<BufferGetTensorReply, CommandError> {
        self.get_tensor(&request)?;
        Ok(BufferGetTensorReply {})
    }

    fn buffer_cpy_tensor(
        &mut self,
        request: BufferCpyTensorRequest,
    ) -> Result<BufferCpyTensorReply, CommandError> {
        Ok(BufferCpyTensorReply { copied: self.cpy_tensor(&request)? })
    }

    fn buffer_clear(&mut self, request: BufferClearRequest) -> Result<BufferClearReply, CommandError> {
        self.objects.buffer(request.buffer)?.memory.ggml().clear(request.value)?;
        Ok(BufferClearReply {})
    }

    fn buffer_free_buffer(
        &mut self,
        request: BufferFreeBufferRequest,
    ) -> Result<BufferFreeBufferReply, CommandError> {
        self.graphs.forget(self.objects.buffer(request.buffer)?.memory.ggml());
        self.objects.free_buffer(request.buffer)?;
        Ok(BufferFreeBufferReply {})
    }

    fn backend_graph_compute(
        &mut self,
        request: BackendGraphComputeRequest,
    ) -> Result<BackendGraphComputeReply, CommandError> {
        let status = self.graph_compute(&request)?;
        Ok(BackendGraphComputeReply { status: status.number() })
    }

    fn hello(&mut self, request: HelloRequest) -> Result<HelloReply, CommandError> {
        let features = request.features & FEATURES;
        self.tells_reasons = features & FEATURE_REASONS != 0;
        Ok(HelloReply { features })
    }

    fn names(&mut self, request: NamesRequest) -> Result<NamesReply, CommandError> {
        let Names { version, ops, unary, glu, types } = &self.names;
        // A version is short; what else a guest may send here stays out of the log.
        if let Ok(theirs) = request.version.parse::<Version>() {
            tracing::debug!("context {}: the guest has ggml {theirs}, the host {version}", self.id);
        }
        self.same_numbers = true;
        Ok(NamesReply {
            version: version.to_string(),
            ops: ops.names().to_vec(),
            unary: unary.clone(),
            glu: glu.clone(),
            types: types.clone(),
        })
    }

    fn liveness(&mut self, request: LivenessRequest) -> Result<LivenessReply, CommandError> {
        let LivenessRequest { res_id, offset } = request;
        let end = offset.saturating_add(size_of::<u32>() as u64);
        let mapping = self.blobs.view(res_id, end)?.keep()?;
        let at = usize::try_from(offset).ok();
        let word = at.and_then(|at| SharedWord::new(mapping, at)).ok_or(CommandError::Unaligned(offset))?;
        self.heart = Some(Heart::start(word, self.activity.clone(), self.limits.command_time)?);
        Ok(LivenessReply { interval_ms: u32::try_from(INTERVAL.as_millis()).unwrap_or(u32::MAX) })
    }
}

impl Context {
    /// The wire names no device: however many the library has, a guest reaches the first. A guest is given none when its
    /// numbers would mean other operations here.
    fn device_count(&self) -> Result<i32, CommandError> {
        match self.same_numbers {
            true => Ok(1),
            false => Err(CommandError::OtherNumbers(self.names.version)),
        }
    }

    /// A buffer full of zeros; nothing when the device has no room for it.
    fn alloc_buffer(
        &mut self,
        request: &BufferTypeAllocBufferRequest,
    ) -> Result<Option<BufferHandle>, CommandError> {
        let buffer_type = self.objects.buffer_type(request.buffer_type)?;
        let (_, total) = self.device.memory();
        let fits = |size: &usize| {
            *size > 0 && *size <= buffer_type.max_size() && (total == 0 || *size as u64 <= total)
        };
        let Some(size) = usize::try_from(request.size).ok().filter(fits) else { return Ok(None) };
        self.objects.check_limits(&self.limits, request.size, false)?;
        let taken = self.objects.take(request.size)?;
        let memory = HostBuffer::zeroed(&self.device, buffer_type, size, self.blobs.mappings())?;
        memory.map(|memory| self.objects.add_buffer(memory, Some(taken))).transpose()
    }
}
