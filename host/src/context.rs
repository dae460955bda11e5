//! The state of one context: its device, its handles, and memory that its commands use again.
#![forbid(unsafe_code)]

use crate::budget::{Account, BUFFERS, MAPPINGS, Sharing, Taken, WORK};
use crate::config::Config;
use crate::error::{CommandError, InitializeError, Reason};
use crate::generated::dispatch;
use crate::graphs::{GraphCache, SupportCache};
use crate::handle::HandleTable;
use crate::limits::Limits;
use crate::liveness::{Activity, Heart};
use crate::memory::{Blobs, HostBuffer, check_available, max_mappings};
use crate::threads::{self, Habits};
use crate::verify::graph::Verifier;
use crate::verify::indices::IndexCheck;
use crate::verify::rules::RuleBook;
use crate::verify::{BufferInfo, Buffers};
use apir_ggml::library::{Backend, BufferType, Device};
use apir_ggml::{DeviceType, GgmlLibrary, GraphBuilder, Names};
use apir_protocol::codec::{Decoder, Encoder};
use apir_protocol::command::Command;
use apir_protocol::handle::{BufferHandle, BufferTypeHandle};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Bases of buffers start here: not 0, and no address of anything.
const FIRST_BASE: u64 = 1 << 20;
/// Bases stay below this, where a pointer's arithmetic cannot wrap.
const LAST_BASE: u64 = 1 << 62;
/// Bases have at least this alignment and distance, a large page's.
const BASE_ALIGN: u64 = 64 << 10;
/// Of how many mappings that a process may have one is for the contexts: the renderer has one for each blob too, and a VMM has its own.
const MAPPINGS_SHARE: u64 = 4;
/// The part of a CPU's memory that buffers may take when nothing says how much, in quarters; the rest is for work memory and graphs.
const QUARTERS_FOR_BUFFERS: u64 = 3;
/// What a CPU backend takes beside the work memory of a node, in bytes.
const WORK_SLACK: u64 = 64 << 10;

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
    pub(crate) buffer_type: BufferType,
    info: BufferInfo,
    _taken: Option<Taken>,
}

/// The handles of a context.
#[derive(Debug)]
pub(crate) struct Objects {
    /// Bytes of the process's buffers.
    account: Account,
    table: HandleTable<Object>,
    /// Buffer types have one handle each, however often they are asked for.
    buffer_types: Vec<(BufferType, BufferTypeHandle)>,
    next_base: u64,
    /// How many buffers there are, the bytes of all of them, and of those in shared memory.
    count: u64,
    bytes: u64,
    mapped_bytes: u64,
}

impl Objects {
    fn new(account: Account) -> Self {
        Self {
            account,
            table: HandleTable::default(),
            buffer_types: Vec::new(),
            next_base: 0,
            count: 0,
            bytes: 0,
            mapped_bytes: 0,
        }
    }

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

    /// Takes bytes of the process's buffers.
    pub(crate) fn take(&self, bytes: u64) -> Result<Taken, CommandError> {
        Ok(self.account.take(bytes)?)
    }

    /// Adds a buffer, with what it has taken of the process's bytes.
    pub(crate) fn add_buffer(
        &mut self,
        memory: HostBuffer,
        taken: Option<Taken>,
    ) -> Result<BufferHandle, CommandError> {
        let buffer_type = memory.ggml().buffer_type()?;
        let info = BufferInfo {
            size: memory.ggml().size() as u64,
            alignment: buffer_type.alignment() as u64,
            host: buffer_type.is_host(),
            shared: memory.is_shared(),
        };
        let base = self.invent_base(info.size, info.alignment);
        let buffer = ContextBuffer { memory, base, buffer_type, info, _taken: taken };
        let added = self.table.insert(Object::Buffer(buffer));
        let handle = added.map(BufferHandle).map_err(|_| CommandError::NoHandle)?;
        self.count += 1;
        self.bytes = self.bytes.saturating_add(info.size);
        self.mapped_bytes = self.mapped_bytes.saturating_add(if info.shared { info.size } else { 0 });
        Ok(handle)
    }

    pub(crate) fn free_buffer(&mut self, handle: BufferHandle) -> Result<(), CommandError> {
        let info = self.buffer(handle)?.info;
        self.table.remove(handle.0);
        self.count -= 1;
        self.bytes = self.bytes.saturating_sub(info.size);
        self.mapped_bytes = self.mapped_bytes.saturating_sub(if info.shared { info.size } else { 0 });
        Ok(())
    }

    /// Refuses a buffer that would be one too many or too large.
    pub(crate) fn check_limits(&self, limits: &Limits, size: u64, shared: bool) -> Result<(), CommandError> {
        let fits = |what, value: u64, limit: Option<u64>| match limit {
            Some(limit) if value > limit => Err(CommandError::Limit { what, value, limit }),
            _ => Ok(()),
        };
        fits("buffers", self.count + 1, Some(limits.buffers))?;
        fits("bytes of buffers", self.bytes.saturating_add(size), limits.device_bytes)?;
        if shared {
            fits("bytes of shared buffers", self.mapped_bytes.saturating_add(size), limits.mapped_bytes)?;
        }
        Ok(())
    }

    /// Bytes that are left of `quota`, and of what all contexts of the process may have.
    pub(crate) fn left_of(&self, quota: u64) -> u64 {
        quota.saturating_sub(self.bytes).min(self.account.left())
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

impl Buffers for Objects {
    fn find(&self, token: u64) -> Option<BufferInfo> {
        self.buffer(BufferHandle(token)).ok().map(|buffer| buffer.info)
    }

    fn memory(&self, token: u64) -> u64 {
        self.buffer(BufferHandle(token)).map_or(token, |buffer| buffer.memory.number(token))
    }
}

/// One guest process's device.
#[derive(Debug)]
pub struct Context {
    pub(crate) id: u32,
    pub(crate) blobs: Blobs,
    // Freed in this order: what holds buffers, the buffers, the backend.
    pub(crate) builder: Option<GraphBuilder>,
    pub(crate) graphs: GraphCache,
    pub(crate) objects: Objects,
    pub(crate) backend: Backend,
    pub(crate) device: Device,
    pub(crate) presented: DeviceType,
    pub(crate) rules: RuleBook,
    pub(crate) index_check: IndexCheck,
    pub(crate) verifier: Verifier,
    pub(crate) support: SupportCache,
    /// The private copy of the graph being read.
    pub(crate) private: Vec<u8>,
    /// Bytes of indices being looked at.
    pub(crate) scratch: Vec<u8>,
    pub(crate) limits: Limits,
    pub(crate) activity: Arc<Activity>,
    pub(crate) heart: Option<Heart>,
    /// What this ggml's numbers mean.
    pub(crate) names: Names,
    /// The guest's ggml surely has the same numbers, or the guest writes ours.
    pub(crate) same_numbers: bool,
    /// The guest reads why a command is refused.
    pub(crate) tells_reasons: bool,
    /// Bytes of work memory and graphs, of all contexts of the process.
    pub(crate) work: Account,
    /// What the backend has taken of it, which it keeps.
    work_taken: Vec<Taken>,
    /// Bytes of that.
    work_bytes: u64,
    /// True once the context is to end: a computation then ends too.
    pub(crate) stop: Arc<AtomicBool>,
    wanted_threads: usize,
    set_threads: usize,
    habits: Habits,
    bad_commands: u64,
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
        let registry = library.registry();
        let device = registry.device(0)?;
        let mut backend = device.init_backend()?;
        let stop = Arc::<AtomicBool>::default();
        // Other backends end at the next stop of a graph.
        backend.stop_by(stop.clone());
        let habits = Habits { keeps_teams: registry.has_feature(c"OPENMP"), alone: config.alone };
        let presented = config.present_as.of(device.type_());
        let cpu = device.type_() == DeviceType::Cpu;
        let rules = RuleBook::new(library.ops(), library.version(), cpu, config.threads)
            .with_variants(library.names());
        let mut limits = config.limits.clone();
        // A device that does not know its memory sets no limit.
        let (_, total) = device.memory();
        let for_buffers = if cpu { total / 4 * QUARTERS_FOR_BUFFERS } else { total };
        let chosen = limits.device_bytes.is_some();
        limits.device_bytes = limits.device_bytes.or((total > 0).then_some(for_buffers));
        // All contexts of a process share its memory, unless somebody has said how much each may have.
        let shared = (cpu && !chosen && total > 0).then_some(for_buffers);
        let buffers = Account::new("bytes of buffers", &BUFFERS, shared.unwrap_or(u64::MAX), Sharing::Open);
        let for_work = if cpu && !config.alone && total > 0 { total - for_buffers } else { u64::MAX };
        let work = Account::new("bytes of work memory and graphs", &WORK, for_work, Sharing::Fair);
        let usual = IndexCheck::usual(device.buffer_type()?.is_host(), config.alone);
        Ok(Self {
            id,
            blobs,
            builder: Some(GraphBuilder::new()),
            graphs: GraphCache::new(limits.cached_graphs),
            objects: Objects::new(buffers),
            backend,
            device,
            presented,
            rules,
            index_check: limits.index_check.unwrap_or(usual),
            verifier: Verifier::default(),
            support: SupportCache::default(),
            private: Vec::new(),
            scratch: Vec::new(),
            activity: Arc::default(),
            heart: None,
            names: library.names().clone(),
            same_numbers: library.names().is_settled() && !config.old_guest || config.same_ggml,
            tells_reasons: false,
            work,
            work_taken: Vec::new(),
            work_bytes: 0,
            stop,
            wanted_threads: config.threads,
            set_threads: 0,
            habits,
            bad_commands: 0,
            limits,
        })
    }

    /// A context's part of the process's mappings.
    #[must_use]
    pub fn mappings(config: &Config) -> Account {
        let sharing = if config.alone { Sharing::Open } else { Sharing::Fair };
        Account::new("mappings", &MAPPINGS, max_mappings() / MAPPINGS_SHARE, sharing)
    }

    /// Sees to it that a computation that takes `work` bytes of work memory finds what a CPU backend ends the process without.
    pub(crate) fn prepare(&mut self, work: u64) -> Result<(), CommandError> {
        if !self.rules.target().cpu {
            return Ok(());
        }
        let threads = threads::granted(self.wanted_threads, self.habits);
        if threads != self.set_threads {
            self.backend.set_n_threads(i32::try_from(threads).unwrap_or(i32::MAX));
            self.set_threads = threads;
        }
        let bytes = if work == 0 { 0 } else { work + WORK_SLACK };
        if bytes > self.work_bytes {
            let taken = self.work.take(bytes - self.work_bytes)?;
            check_available(bytes, self.habits.alone)?;
            self.work_taken.push(taken);
            self.work_bytes = bytes;
        }
        Ok(())
    }

    /// That the process can get `bytes` more beside work memory.
    pub(crate) fn check_available(&self, bytes: u64) -> Result<(), CommandError> {
        if self.habits.alone { Ok(()) } else { Ok(check_available(bytes, false)?) }
    }

    /// Refuses a command that is too long to be copied.
    ///
    /// # Errors
    /// [`CommandError::Limit`]
    pub fn check_length(&self, bytes: usize) -> Result<(), CommandError> {
        let (value, limit) = (bytes as u64, self.limits.command_bytes);
        if value > limit {
            return Err(CommandError::Limit { what: "bytes of a command", value, limit });
        }
        Ok(())
    }

    /// Carries out a command; gives the bytes of its reply.
    ///
    /// # Errors
    /// [`CommandError`]; the context goes on.
    pub fn dispatch(&mut self, number: u32, request: &[u8], reply: &mut [u8]) -> Result<usize, CommandError> {
        let command = Command::from_number(number).ok_or(CommandError::Unknown(number))?;
        let mut encoder = Encoder::new(reply);
        self.activity.begin(command != Command::BackendGraphCompute);
        let done = dispatch(self, command, &mut Decoder::new(request), &mut encoder);
        self.activity.end();
        done.map(|()| encoder.len())
    }

    /// Writes why a command is refused into its reply, for a guest that reads it; gives the bytes written.
    pub fn write_reason(&self, error: &CommandError, reply: &mut [u8]) -> usize {
        let mut encoder = Encoder::new(reply);
        match self.tells_reasons && encoder.string(Reason::from(error).text()).is_ok() {
            true => encoder.len(),
            false => 0,
        }
    }

    /// Counts a refused command; false when the guest has sent so many that the context has to go.
    #[must_use]
    pub fn bears_refusal(&mut self) -> bool {
        self.bad_commands += 1;
        self.bad_commands < self.limits.bad_commands
    }

    /// Logs a refusal.
    pub fn log_refusal(&self, number: u32, error: &CommandError) {
        let name = Command::from_number(number).map_or("unknown command", Command::name);
        tracing::warn!("context {}: {name} ({number}) refused: {error}", self.id);
    }

    /// One line on its device: `CPU (AMD EPYC …), 24576 MiB`.
    #[must_use]
    pub fn describe_device(&self) -> String {
        let (_, total) = self.device.memory();
        let reported = self.limits.device_bytes.unwrap_or(total);
        format!("{} ({}), {} MiB", self.device.name(), self.device.description(), reported >> 20)
    }
}
