//! What the host says about its device.
#![forbid(unsafe_code)]

use crate::session::{Properties, Session, SessionError};
use crate::text::plain;
use apir_ggml::DeviceType;
use apir_protocol::handle::BufferTypeHandle;
use apir_protocol::messages::{
    BufferTypeGetAlignmentRequest, BufferTypeGetMaxSizeRequest, BufferTypeGetNameRequest,
    DeviceGetBufferTypeRequest, DeviceGetCountRequest, DeviceGetDescriptionRequest, DeviceGetMemoryRequest,
    DeviceGetNameRequest, DeviceGetTypeRequest,
};

/// The smallest page of any guest: what a mapped blob is surely aligned to.
const PAGE: u64 = 4096;

/// The largest alignment of a buffer type, in bytes; those of ggml's backends are below 64 KiB.
pub(crate) const MAX_ALIGNMENT: u64 = 1 << 20;
/// Bytes of a host's name and of its description that are taken over.
const MAX_NAME: usize = 128;
const MAX_DESCRIPTION: usize = 256;

/// The host's first device, the one that APIR reaches, as it was when the session was opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostDevice {
    pub(crate) name: String,
    pub(crate) description: String,
    /// The kind to tell ggml.
    pub(crate) kind: DeviceType,
    /// Free and total memory in bytes.
    pub(crate) memory: (u64, u64),
    /// Whether models may be loaded from mapped files.
    pub(crate) mmap_support: bool,
    /// Whether it says so: upstream's plugin does since ggml 0.19.
    pub(crate) tells_mmap_support: bool,
    /// Whether buffers are to be made over blobs.
    pub(crate) maps_buffers: bool,
    pub(crate) buffer_type: BufferTypeHandle,
    pub(crate) buffer_type_name: String,
    /// Bytes, at least 1.
    pub(crate) alignment: usize,
    /// Bytes of the largest buffer.
    pub(crate) max_size: usize,
}

impl HostDevice {
    /// Asks the host.
    pub(crate) fn ask(session: &Session) -> Result<Self, SessionError> {
        let count = session.device_get_count(&DeviceGetCountRequest {})?.count;
        if count < 1 {
            return Err(SessionError::NoDevice { count });
        }
        let name = session.device_get_name(&DeviceGetNameRequest {})?.name;
        let description = session.device_get_description(&DeviceGetDescriptionRequest {})?.description;
        let told = session.device_get_type(&DeviceGetTypeRequest {})?.type_;
        let told = DeviceType::from_number(told.try_into().unwrap_or(i32::MAX));
        let memory = session.device_get_memory(&DeviceGetMemoryRequest {})?;
        let buffer_type = session.device_get_buffer_type(&DeviceGetBufferTypeRequest {})?.buffer_type;
        let Properties { reply: properties, tells_mmap_support } = session.properties()?;
        let buffer_type_name = session.buffer_type_get_name(&BufferTypeGetNameRequest { buffer_type })?.name;
        let alignment = session
            .buffer_type_get_alignment(&BufferTypeGetAlignmentRequest { buffer_type })?
            .alignment
            .max(1);
        // ggml aborts the program over others: it counts with masks and adds without a look at overflows.
        if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
            return Err(SessionError::Alignment(alignment));
        }
        let max_size =
            session.buffer_type_get_max_size(&BufferTypeGetMaxSizeRequest { buffer_type })?.max_size;
        Ok(Self {
            name: plain(&name, MAX_NAME),
            description: plain(&description, MAX_DESCRIPTION),
            kind: presented(told),
            memory: (memory.free, memory.total),
            mmap_support: properties.mmap_support,
            tells_mmap_support,
            maps_buffers: properties.buffer_from_host_ptr && frees_mapped(told) && alignment <= PAGE,
            buffer_type,
            buffer_type_name: plain(&buffer_type_name, MAX_NAME),
            alignment: alignment.try_into().unwrap_or(usize::MAX),
            max_size: max_size.try_into().unwrap_or(usize::MAX),
        })
    }
}

/// The kind to tell ggml: programs take the first device that says CPU for the processor itself.
fn presented(told: DeviceType) -> DeviceType {
    match told {
        DeviceType::Gpu | DeviceType::Igpu | DeviceType::Accel => told,
        DeviceType::Cpu | DeviceType::Meta | DeviceType::Unknown(_) => DeviceType::Gpu,
    }
}

/// Whether a mapped buffer can be freed. Only upstream's plugin says CPU, and it dies of freeing one there: the buffers that ggml's CPU
/// backend makes over a pointer have no free function.
fn frees_mapped(told: DeviceType) -> bool {
    told != DeviceType::Cpu
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_see_a_gpu_or_an_accelerator() {
        for (told, presented_as) in [(0, 1), (1, 1), (2, 2), (3, 3), (4, 1), (5, 1), (-1, 1)] {
            assert_eq!(presented(DeviceType::from_number(told)).number(), presented_as);
        }
    }
}
