//! The state of one context: its device, its handles, and memory that its commands use again.
#![forbid(unsafe_code)]

use crate::config::Config;
use crate::error::{CommandError, InitializeError};
use crate::generated::dispatch;
use crate::handle::HandleTable;
use crate::log::{LogBudget, Verdict};
use crate::memory::{Blobs, HostBuffer};
use crate::verify::BufferSizes;
use crate::verify::graph::Verifier;
use apir_ggml::library::{Backend, BufferType, Device};
use apir_ggml::{DeviceType, GgmlLibrary, GraphBuilder, OpTable};
use apir_protocol::codec::{Decoder, Encoder};
use apir_protocol::command::Command;
use apir_protocol::handle::{BufferHandle, BufferTypeHandle};
use std::time::Instant;

/// Bases of buffers start here: not 0, and no address of anything.
const FIRST_BASE: u64 = 1 << 20;
/// Bases stay below this, where a pointer's arithmetic cannot wrap.
const LAST_BASE: u64 = 1 << 62;
/// Bases have at least this alignment and distance, a large page's.
const BASE_ALIGN: u64 = 64 << 10;

/// What a handle of a context names.
#[derive(Debug)]
pub(crate) enum Object {
    Buffer(ContextBuffer),
    BufferType(BufferType),
}

/// A buffer and the address that the guest counts from.
#[derive(Debug)]
pub(crate) struct ContextBuffer {
    pub(crate) memory: HostBuffer,
    pub(crate) base: u64,
}

/// The handles of a context.
#[derive(Debug, Default)]
pub(crate) struct Objects {
    table: HandleTable<Object>,
    /// Buffer types have one handle each, however often they are asked for.
    buffer_types: Vec<(BufferType, BufferTypeHandle)>,
    next_base: u64,
}

impl Objects {
    pub(crate) fn buffer(&self, handle: BufferHandle) -> Result<&ContextBuffer, CommandError> {
        match self.table.get(handle.0) {
            Some(Object::Buffer(buffer)) => Ok(buffer),
            _ => Err(CommandError::Handle(handle.0, "buffer")),
        }
    }

    pub(crate) fn buffer_type(&self, handle: BufferTypeHandle) -> Result<&BufferType, CommandError> {
        match self.table.get(handle.0) {
            Some(Object::BufferType(buffer_type)) => Ok(buffer_type),
            _ => Err(CommandError::Handle(handle.0, "buffer type")),
        }
    }

    pub(crate) fn add_buffer(&mut self, memory: HostBuffer) -> Result<BufferHandle, CommandError> {
        let alignment = memory.ggml().buffer_type()?.alignment() as u64;
        let base = self.invent_base(memory.ggml().size() as u64, alignment);
        let added = self.table.insert(Object::Buffer(ContextBuffer { memory, base }));
        added.map(BufferHandle).map_err(|_| CommandError::NoHandle)
    }

    pub(crate) fn free_buffer(&mut self, handle: BufferHandle) -> Result<(), CommandError> {
        self.buffer(handle)?;
        self.table.remove(handle.0);
        Ok(())
    }

    pub(crate) fn handle_of(&mut self, buffer_type: BufferType) -> Result<BufferTypeHandle, CommandError> {
        if let Some((_, handle)) = self.buffer_types.iter().find(|(known, _)| *known == buffer_type) {
            return Ok(*handle);
        }
        let added = self.table.insert(Object::BufferType(buffer_type.clone()));
        let handle = added.map(BufferTypeHandle).map_err(|_| CommandError::NoHandle)?;
        self.buffer_types.push((buffer_type, handle));
        Ok(handle)
    }

    /// An address for a buffer of `size` bytes that no other live buffer has, as far as 2^62 bytes go.
    fn invent_base(&mut self, size: u64, alignment: u64) -> u64 {
        let align = alignment.max(1).next_power_of_two().max(BASE_ALIGN);
        let base = self.next_base.max(FIRST_BASE).next_multiple_of(align);
        let end = base.checked_add(size).and_then(|end| end.checked_add(BASE_ALIGN));
        match end {
            Some(end) if end < LAST_BASE => {
                self.next_base = end;
                base
            }
            // Nothing lies at these addresses: starting over costs no more than a look-alike.
            _ => {
                self.next_base = FIRST_BASE;
                FIRST_BASE.next_multiple_of(align)
            }
        }
    }
}

impl BufferSizes for Objects {
    fn buffer_size(&self, token: u64) -> Option<u64> {
        self.buffer(BufferHandle(token)).ok().map(|buffer| buffer.memory.ggml().size() as u64)
    }
}

/// One guest process's device.
#[derive(Debug)]
pub struct Context {
    pub(crate) id: u32,
    pub(crate) blobs: Blobs,
    // Freed in this order: what holds buffers, the buffers, the backend.
    pub(crate) builder: Option<GraphBuilder>,
    pub(crate) objects: Objects,
    pub(crate) backend: Backend,
    pub(crate) device: Device,
    pub(crate) library: GgmlLibrary,
    pub(crate) presented: DeviceType,
    pub(crate) verifier: Verifier,
    /// The private copy of the graph being read.
    pub(crate) private: Vec<u8>,
    log: LogBudget,
}

impl Context {
    /// Starts the library's first device.
    ///
    /// # Errors
    /// [`InitializeError`] when the library has none, or it does not start.
    pub fn new(
        id: u32,
        blobs: Blobs,
        library: GgmlLibrary,
        config: &Config,
    ) -> Result<Self, InitializeError> {
        let device = library.registry().device(0)?;
        let backend = device.init_backend()?;
        // Only a CPU backend has threads to set.
        backend.set_n_threads(i32::try_from(config.threads).unwrap_or(i32::MAX));
        let presented = config.present_as.of(device.type_());
        Ok(Self {
            id,
            blobs,
            builder: Some(GraphBuilder::new()),
            objects: Objects::default(),
            backend,
            device,
            library,
            presented,
            verifier: Verifier::default(),
            private: Vec::new(),
            log: LogBudget::new(Instant::now()),
        })
    }

    /// Carries out a command; gives the bytes of its reply.
    ///
    /// # Errors
    /// [`CommandError`]; the context goes on.
    pub fn dispatch(&mut self, number: u32, request: &[u8], reply: &mut [u8]) -> Result<usize, CommandError> {
        let command = Command::from_number(number).ok_or(CommandError::Unknown(number))?;
        let mut encoder = Encoder::new(reply);
        dispatch(self, command, &mut Decoder::new(request), &mut encoder)?;
        Ok(encoder.len())
    }

    /// Logs a refusal, within what the guest may cause.
    pub fn log_refusal(&mut self, number: u32, error: &CommandError) {
        if let Verdict::Write { suppressed } = self.log.ask(Instant::now()) {
            let name = Command::from_number(number).map_or("unknown command", Command::name);
            if suppressed > 0 {
                tracing::warn!("context {}: {suppressed} lines suppressed", self.id);
            }
            tracing::warn!("context {}: {name} ({number}) refused: {error}", self.id);
        }
    }

    /// The operations of the library's ggml.
    pub(crate) fn ops(&self) -> &OpTable {
        self.library.ops()
    }
}
