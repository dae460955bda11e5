//! The renderer inside a VMM: which contexts, resources and fences are ours, and what becomes of those.
//!
//! `virgl.rs` decodes virglrenderer's C calls and asks here. A call that belongs to the real library is made by a closure of
//! the caller's, or after an answer that says so; it is never made while the tables are locked, but for exports.
#![forbid(unsafe_code)]

mod contexts;
pub(crate) mod fences;
pub(crate) mod log;
mod peer;
mod resources;

use crate::blob::{self, BlobBytes, Refused};
use crate::chain::Chain;
use crate::error::Error;
use crate::log::warn;
use apir_protocol::constants::{CAPSET_APIR, CAPSET_VENUS, VENUS_COMMAND_TYPE_OFFSET};
use contexts::{Context, Side};
use fences::{Fence, Fences, Retire};
use nix::errno::Errno;
use nix::sys::signal::SigSet;
use peer::{Launcher, PeerError};
pub(crate) use resources::{Image, Iov, Memory};
use resources::{Resource, Resources};
use std::collections::HashMap;
use std::ffi::c_int;
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Memory of the host that the guest may map, as virtio-gpu numbers it.
pub(crate) const BLOB_MEM_HOST3D: u32 = 2;
/// Memory of the guest.
pub(crate) const BLOB_MEM_GUEST: u32 = 1;

/// The capset of APIR: version 1 of its layout, blobs supported, four words reserved.
pub(crate) const CAPSET: [u32; 6] = [1, 1, 0, 0, 0, 0];

/// Why a call is refused.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refusal {
    /// No such context.
    #[error("context {id} does not exist")]
    NoContext {
        /// Its id.
        id: u32,
    },
    /// A context cannot be made twice, nor with id 0.
    #[error("context {id} exists with another capset, or is 0")]
    ContextId {
        /// Its id.
        id: u32,
    },
    /// Nobody here serves contexts of this kind.
    #[error("context {id}: nobody serves capset {capset} without the real libvirglrenderer")]
    Capset {
        /// Its id.
        id: u32,
        /// What was asked for.
        capset: u32,
    },
    /// The real library did not want it.
    #[error("context {id} with capset {capset}: the real libvirglrenderer refused it with {code}")]
    ChainContext {
        /// Its id.
        id: u32,
        /// What was asked for.
        capset: u32,
        /// What it returned.
        code: c_int,
    },
    /// There is no worker for a context.
    #[error("context {id}: {cause}")]
    Worker {
        /// Its id.
        id: u32,
        /// Why.
        cause: PeerError,
    },
    /// A variable holds what it cannot hold.
    #[error("context {id}: {cause}")]
    Variable {
        /// Its id.
        id: u32,
        /// Which, and what it may hold.
        cause: Error,
    },
    /// The context was lost before.
    #[error("context {id} is lost")]
    Lost {
        /// Its id.
        id: u32,
    },
    /// A command that nobody understands.
    #[error("context {id}: its first command has type {found}, which is no APIR handshake on capset 4")]
    NotHandshake {
        /// Its id.
        id: u32,
        /// The command's first word.
        found: u32,
    },
    /// No such resource, or not one that can do this.
    #[error("resource {id} does not exist, or cannot {what}")]
    NoResource {
        /// Its id.
        id: u32,
        /// What was asked.
        what: &'static str,
    },
    /// A resource cannot be made twice, nor with id 0.
    #[error("resource {id} exists, or is 0")]
    ResourceId {
        /// Its id.
        id: u32,
    },
    /// A blob that nobody here can make.
    #[error(
        "resource {id}: a blob of memory {memory} with blob id {blob_id} in context {context}; ours are of memory 2, blob id 0"
    )]
    BlobKind {
        /// Its id.
        id: u32,
        /// Its context.
        context: u32,
        /// virtio-gpu's number of the memory.
        memory: u32,
        /// What the context would know it by.
        blob_id: u64,
    },
    /// The memory could not be had.
    #[error("blob of {size} bytes refused: {cause}")]
    Blob {
        /// Its size in bytes.
        size: u64,
        /// Why.
        cause: Refused,
    },
    /// As many blobs as descriptors allow.
    #[error("blob refused: {limit} exist, half of what this process may have open")]
    TooManyBlobs {
        /// The limit.
        limit: usize,
    },
    /// A blob is mapped once.
    #[error("resource {id} is mapped already")]
    Mapped {
        /// Its id.
        id: u32,
    },
    /// The system failed a call.
    #[error("resource {id}: cannot {what}: {source}")]
    Io {
        /// The resource.
        id: u32,
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

impl Refusal {
    /// The code for it, which virglrenderer's calls return as such or negated.
    pub(crate) fn errno(&self) -> c_int {
        match self {
            Self::Blob { cause: Refused { cause: Some(_), .. }, .. } | Self::TooManyBlobs { .. } => {
                Errno::ENOMEM as c_int
            }
            _ => Errno::EINVAL as c_int,
        }
    }
}

/// Who answers a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer<T = ()> {
    /// Ours, and done.
    Ours(T),
    /// The real library is to be asked.
    Chain,
}

/// What a blob is made from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlobRequest {
    /// The resource's id.
    pub(crate) id: u32,
    /// The context that asks for it.
    pub(crate) context: u32,
    /// virtio-gpu's number of the memory.
    pub(crate) memory: u32,
    /// What the context knows it by; 0 for plain memory.
    pub(crate) blob_id: u64,
    /// In bytes.
    pub(crate) size: u64,
    /// The guest's memory.
    pub(crate) iov: Option<Iov>,
}

/// The state behind virglrenderer's calls.
pub(crate) struct Device {
    tables: Arc<Mutex<Tables>>,
    fences: Fences,
    chain: Option<&'static Chain>,
    launcher: Launcher,
}

struct Tables {
    contexts: HashMap<u32, Context>,
    resources: Resources,
    last_serial: u64,
}

impl Device {
    /// A device whose fences go to `vmm`, at once or at its polls; `before` is the device it takes the place of.
    pub(crate) fn new(
        library: &Path,
        chain: Option<&'static Chain>,
        vmm: Arc<dyn Retire>,
        at_once: bool,
        before: Option<&Self>,
    ) -> io::Result<Self> {
        let fresh = || {
            Arc::new(Mutex::new(Tables {
                contexts: HashMap::new(),
                resources: Resources::new(),
                last_serial: 0,
            }))
        };
        Ok(Self {
            tables: before.map_or_else(fresh, |before| before.tables.clone()),
            fences: Fences::new(vmm, at_once)?,
            chain,
            launcher: match before {
                Some(before) => before.launcher.clone(),
                None => Launcher::from_environment(library),
            },
        })
    }

    /// The real library, when there is one.
    pub(crate) fn chain(&self) -> Option<&'static Chain> {
        self.chain
    }

    /// The fences that are ours.
    pub(crate) fn fences(&self) -> &Fences {
        &self.fences
    }

    /// Logs at a bounded rate: lines follow from what the guest does.
    pub(crate) fn warn(&self, line: fmt::Arguments<'_>) {
        warn(line);
    }

    /// Forgets every context and resource.
    pub(crate) fn reset(&self) {
        let mut tables = self.lock();
        tables.contexts.clear();
        tables.resources.clear();
        self.fences.clear();
    }

    /// Makes a context; `ask` makes it in the real library and returns that library's answer.
    pub(crate) fn create_context(
        &self,
        id: u32,
        capset: u32,
        ask: impl FnOnce(&Chain) -> c_int,
    ) -> Result<(), Refusal> {
        if id == 0 {
            return Err(Refusal::ContextId { id });
        }
        if let Some(context) = self.lock().contexts.get(&id) {
            // As in virglrenderer.
            return if context.capset == capset { Ok(()) } else { Err(Refusal::ContextId { id }) };
        }
        let serial = self.next_serial();
        let blob_bytes = BlobBytes::from_environment().map_err(|cause| Refusal::Variable { id, cause })?;
        let context = match (capset, self.chain) {
            (CAPSET_APIR, _) => {
                let mut context = Context::new(capset, serial, false, Side::Undecided, blob_bytes);
                let peer = self.start_worker(id, serial)?;
                context.take_over(peer).map_err(|cause| Refusal::Worker { id, cause })?;
                context
            }
            (CAPSET_VENUS, chain) => {
                let in_chain = chain.is_some_and(|chain| ask(chain) == 0);
                Context::new(capset, serial, in_chain, Side::Undecided, blob_bytes)
            }
            (_, Some(chain)) => match ask(chain) {
                0 => Context::new(capset, serial, true, Side::Chain, blob_bytes),
                code => return Err(Refusal::ChainContext { id, capset, code }),
            },
            (_, None) => return Err(Refusal::Capset { id, capset }),
        };
        self.lock().contexts.insert(id, context);
        Ok(())
    }

    /// Ends a context; says whether the real library has it too.
    pub(crate) fn destroy_context(&self, id: u32) -> Answer {
        match self.lock().contexts.remove(&id) {
            Some(Context { in_chain: true, .. }) => Answer::Chain,
            _ => Answer::Ours(()),
        }
    }

    /// Whose a context is.
    pub(crate) fn context(&self, id: u32) -> Result<Answer, Refusal> {
        let tables = self.lock();
        let context = tables.contexts.get(&id).ok_or(Refusal::NoContext { id })?;
        Ok(if context.is_ours() { Answer::Ours(()) } else { Answer::Chain })
    }

    /// Runs a command, or says that the real library is to.
    pub(crate) fn submit(&self, id: u32, command: &[u8]) -> Result<Answer, Refusal> {
        let mut tables = self.lock();
        let Tables { contexts, .. } = &mut *tables;
        let context = contexts.get_mut(&id).ok_or(Refusal::NoContext { id })?;
        let Some(first) = command.first_chunk().map(|word| u32::from_le_bytes(*word)) else {
            return Ok(if context.is_ours() { Answer::Ours(()) } else { Answer::Chain });
        };
        match context.side {
            Side::Chain => return Ok(Answer::Chain),
            Side::Lost => {
                context.answer_command(command);
                return Err(Refusal::Lost { id });
            }
            Side::Ours(_) => {}
            Side::Undecided if first == VENUS_COMMAND_TYPE_OFFSET => {
                if let Err(refusal) = self.take_over(id, context) {
                    context.lose();
                    context.answer_command(command);
                    return Err(refusal);
                }
            }
            Side::Undecided if context.in_chain => {
                context.side = Side::Chain;
                return Ok(Answer::Chain);
            }
            Side::Undecided => return Err(Refusal::NotHandshake { id, found: first }),
        }
        match context.submit(command) {
            Ok(()) => Ok(Answer::Ours(())),
            Err(cause @ PeerError::TooLong { .. }) => {
                context.answer_command(command);
                Err(Refusal::Worker { id, cause })
            }
            Err(cause) => {
                context.lose();
                context.answer_command(command);
                Err(Refusal::Worker { id, cause })
            }
        }
    }

    /// Makes an undecided context ours, with the blobs that it has by now.
    fn take_over(&self, id: u32, context: &mut Context) -> Result<(), Refusal> {
        for (&res_id, memory) in &mut context.attached {
            if memory.is_none() {
                *memory = self.export_from_chain(res_id);
            }
        }
        let peer = self.start_worker(id, context.serial)?;
        context.take_over(peer).map_err(|cause| Refusal::Worker { id, cause })
    }

    fn start_worker(&self, id: u32, serial: u64) -> Result<peer::Peer, Refusal> {
        let tables = Arc::downgrade(&self.tables);
        self.launcher
            .start(id, move |ended| worker_ended(&tables, id, serial, ended))
            .map_err(|cause| Refusal::Worker { id, cause })
    }

    /// The memory of a blob of the real library's, to be shared with a worker; none when it is not plain shared memory.
    fn export_from_chain(&self, res_id: u32) -> Option<Memory> {
        let (file, size) = match self.chain?.export_memory(res_id) {
            Ok(memory) => memory,
            Err(error) => {
                self.warn(format_args!("resource {res_id} cannot be shared with a worker: {error}"));
                return None;
            }
        };
        Some(Memory { file: Arc::new(file), size, _taken: None })
    }

    /// Makes a blob; `ask` makes it in the real library and returns that library's answer, which is then returned.
    pub(crate) fn create_blob(
        &self,
        request: &BlobRequest,
        ask: impl FnOnce(&Chain) -> c_int,
    ) -> Result<c_int, Refusal> {
        let &BlobRequest { id, context: context_id, memory, blob_id, size, iov } = request;
        let unknown = Refusal::BlobKind { id, context: context_id, memory, blob_id };
        {
            let mut tables = self.lock();
            let Tables { contexts, resources, .. } = &mut *tables;
            resources.check_free(id)?;
            let ours = contexts.get_mut(&context_id).filter(|context| context.is_ours());
            match (memory, ours, self.chain) {
                (BLOB_MEM_HOST3D, Some(context), _) => {
                    if blob_id != 0 {
                        return Err(unknown);
                    }
                    let memory = resources.create_blob(id, size, &context.blob_bytes)?;
                    let attached = context.attach(id, Some(memory));
                    self.keep_or_lose(context_id, context, attached);
                    return Ok(0);
                }
                (BLOB_MEM_GUEST, _, None) => {
                    resources.insert(id, Resource::Inert { image: Image::default(), iov });
                    return Ok(0);
                }
                (BLOB_MEM_GUEST, _, Some(_)) | (_, None, Some(_)) => {}
                _ => return Err(unknown),
            }
        }
        let Some(chain) = self.chain else { return Err(unknown) };
        let code = ask(chain);
        if code == 0 {
            let mut tables = self.lock();
            let Tables { contexts, resources, .. } = &mut *tables;
            resources.insert(id, Resource::Chain { blob: memory != BLOB_MEM_GUEST });
            if memory != BLOB_MEM_GUEST
                && let Some(context) = contexts.get_mut(&context_id)
            {
                context.attached.insert(id, None);
            }
        }
        Ok(code)
    }

    /// Makes a picture or a buffer of the real library's, or one that nobody draws.
    pub(crate) fn create_resource(
        &self,
        id: u32,
        image: Image,
        iov: Option<Iov>,
        ask: impl FnOnce(&Chain) -> c_int,
    ) -> Result<c_int, Refusal> {
        self.lock().resources.check_free(id)?;
        let resource = match self.chain {
            Some(chain) => match ask(chain) {
                0 => Resource::Chain { blob: false },
                code => return Ok(code),
            },
            None => Resource::Inert { image, iov },
        };
        self.lock().resources.insert(id, resource);
        Ok(0)
    }

    /// Takes up a resource that the real library has made from the VMM's memory.
    pub(crate) fn import_resource(
        &self,
        id: u32,
        ask: impl FnOnce(&Chain) -> Option<c_int>,
    ) -> Result<c_int, Refusal> {
        self.lock().resources.check_free(id)?;
        let code = self.chain.and_then(ask).ok_or(Refusal::NoResource { id, what: "be imported" })?;
        if code == 0 {
            self.lock().resources.insert(id, Resource::Chain { blob: true });
        }
        Ok(code)
    }

    /// Destroys a resource.
    pub(crate) fn unref_resource(&self, id: u32) -> Answer {
        let mut tables = self.lock();
        let Tables { contexts, resources, .. } = &mut *tables;
        for (&context_id, context) in contexts.iter_mut() {
            let detached = context.detach(id);
            self.keep_or_lose(context_id, context, detached);
        }
        match resources.remove(id) {
            Some(Resource::Chain { .. }) => Answer::Chain,
            Some(Resource::Blob { .. } | Resource::Inert { .. }) => Answer::Ours(()),
            None => {
                self.warn(format_args!("resource {id} given back, but it does not exist"));
                Answer::Ours(())
            }
        }
    }

    /// Attaches a resource to a context.
    pub(crate) fn attach(&self, context_id: u32, res_id: u32) -> Result<Answer, Refusal> {
        let mut tables = self.lock();
        let Tables { contexts, resources, .. } = &mut *tables;
        let resource =
            resources.get(res_id).ok_or(Refusal::NoResource { id: res_id, what: "be attached" })?;
        let context = contexts.get_mut(&context_id).ok_or(Refusal::NoContext { id: context_id })?;
        let (memory, of_chain) = match resource {
            Resource::Blob { memory, .. } => (Some(memory.clone()), false),
            Resource::Chain { blob } => {
                let wanted = *blob && matches!(context.side, Side::Ours(_));
                let known = matches!(context.attached.get(&res_id), Some(Some(_)));
                (if wanted && !known { self.export_from_chain(res_id) } else { None }, true)
            }
            // Nobody here uses the guest's own memory or pictures.
            Resource::Inert { .. } => return Ok(Answer::Ours(())),
        };
        let attached = context.attach(res_id, memory);
        self.keep_or_lose(context_id, context, attached);
        Ok(if of_chain && context.in_chain { Answer::Chain } else { Answer::Ours(()) })
    }

    /// Detaches a resource from a context.
    pub(crate) fn detach(&self, context_id: u32, res_id: u32) -> Result<Answer, Refusal> {
        let mut tables = self.lock();
        let Tables { contexts, resources, .. } = &mut *tables;
        let context = contexts.get_mut(&context_id).ok_or(Refusal::NoContext { id: context_id })?;
        let detached = context.detach(res_id);
        self.keep_or_lose(context_id, context, detached);
        let of_chain = matches!(resources.get(res_id), Some(Resource::Chain { .. }));
        Ok(if of_chain && context.in_chain { Answer::Chain } else { Answer::Ours(()) })
    }

    /// Maps a blob into this process: its address and size.
    pub(crate) fn map(&self, id: u32) -> Result<Answer<(*mut u8, u64)>, Refusal> {
        self.with_blob(id, "be mapped", |memory, mapping| {
            if mapping.is_some() {
                return Err(Refusal::Mapped { id });
            }
            Ok((mapped(id, memory, mapping)?, memory.size))
        })
    }

    /// Where a blob is mapped, once it is.
    pub(crate) fn map_address(&self, id: u32) -> Result<Answer<*mut u8>, Refusal> {
        self.with_blob(id, "be mapped", |memory, mapping| mapped(id, memory, mapping))
    }

    /// Unmaps a blob.
    pub(crate) fn unmap(&self, id: u32) -> Result<Answer, Refusal> {
        self.with_blob(id, "be unmapped", |_, mapping| match mapping.take() {
            Some(_) => Ok(()),
            None => Err(Refusal::NoResource { id, what: "be unmapped: it is not mapped" }),
        })
    }

    /// The memory of a blob.
    pub(crate) fn memory(&self, id: u32, what: &'static str) -> Result<Answer<Memory>, Refusal> {
        self.with_blob(id, what, |memory, _| Ok(memory.clone()))
    }

    /// A descriptor of a blob's memory for the VMM.
    pub(crate) fn export(&self, id: u32) -> Result<Answer<OwnedFd>, Refusal> {
        self.with_blob(id, "be exported", |memory, _| {
            let failed = |source| Refusal::Io { id, what: "duplicate its descriptor", source };
            memory.file.try_clone().map(OwnedFd::from).map_err(failed)
        })
    }

    /// What the VMM told of a resource when it made it.
    pub(crate) fn image(&self, id: u32) -> Result<Answer<Image>, Refusal> {
        match self.lock().resources.get(id) {
            Some(Resource::Chain { .. }) => Ok(Answer::Chain),
            Some(Resource::Blob { .. }) => Ok(Answer::Ours(Image::default())),
            Some(Resource::Inert { image, .. }) => Ok(Answer::Ours(*image)),
            None => Err(Refusal::NoResource { id, what: "be asked about" }),
        }
    }

    /// Takes the guest's memory of a resource that has none; gives it back for another.
    pub(crate) fn attach_iov(&self, id: u32, new: Iov) -> Result<Answer, Refusal> {
        match self.lock().resources.get_mut(id) {
            Some(Resource::Chain { .. }) => Ok(Answer::Chain),
            Some(Resource::Inert { iov: iov @ None, .. }) => {
                *iov = Some(new);
                Ok(Answer::Ours(()))
            }
            _ => Err(Refusal::NoResource { id, what: "have guest memory attached" }),
        }
    }

    /// Gives the guest's memory of a resource back.
    pub(crate) fn detach_iov(&self, id: u32) -> Result<Answer<Option<Iov>>, Refusal> {
        match self.lock().resources.get_mut(id) {
            Some(Resource::Chain { .. }) => Ok(Answer::Chain),
            Some(Resource::Inert { iov, .. }) => Ok(Answer::Ours(iov.take())),
            Some(Resource::Blob { .. }) => Ok(Answer::Ours(None)),
            None => Err(Refusal::NoResource { id, what: "have guest memory detached" }),
        }
    }

    /// Whose a resource's pixels are. Those of ours go nowhere.
    pub(crate) fn transfer(&self, id: u32) -> Result<Answer, Refusal> {
        match self.lock().resources.get(id) {
            Some(Resource::Chain { .. }) => Ok(Answer::Chain),
            Some(Resource::Inert { .. }) => Ok(Answer::Ours(())),
            _ => Err(Refusal::NoResource { id, what: "be transferred" }),
        }
    }

    /// Adds a fence of a context, or says that the real library is to.
    pub(crate) fn context_fence(&self, context: u32, ring: u32, id: u64) -> Result<Answer, Refusal> {
        let answer = self.context(context)?;
        if answer == Answer::Ours(()) {
            self.fences.add(Fence::Context { context, ring, id });
        }
        Ok(answer)
    }

    fn with_blob<T>(
        &self,
        id: u32,
        what: &'static str,
        act: impl FnOnce(&Memory, &mut Option<memmap2::MmapRaw>) -> Result<T, Refusal>,
    ) -> Result<Answer<T>, Refusal> {
        match self.lock().resources.get_mut(id) {
            Some(Resource::Chain { .. }) => Ok(Answer::Chain),
            Some(Resource::Blob { memory, mapping }) => act(memory, mapping).map(Answer::Ours),
            _ => Err(Refusal::NoResource { id, what }),
        }
    }

    /// Loses a context whose worker could not be told something.
    fn keep_or_lose(&self, id: u32, context: &mut Context, told: Result<(), PeerError>) {
        if let Err(cause) = told {
            context.lose();
            self.warn(format_args!("context {id} lost: {cause}"));
        }
    }

    fn next_serial(&self) -> u64 {
        let mut tables = self.lock();
        tables.last_serial += 1;
        tables.last_serial
    }

    fn lock(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Display for Device {
    /// One line: what it serves and with what.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.chain {
            Some(chain) => write!(f, "capset {CAPSET_APIR}, all else by {}", chain.path().display())?,
            None => write!(f, "capsets {CAPSET_APIR} and {CAPSET_VENUS}, no other libvirglrenderer")?,
        }
        write!(f, "; workers: {}", self.launcher)
    }
}

fn mapped(id: u32, memory: &Memory, mapping: &mut Option<memmap2::MmapRaw>) -> Result<*mut u8, Refusal> {
    let mapping = match mapping.take() {
        Some(there) => mapping.insert(there),
        None => {
            let new = blob::map(&memory.file, memory.size).map_err(|source| Refusal::Io {
                id,
                what: "map it",
                source,
            })?;
            mapping.insert(new)
        }
    };
    Ok(mapping.as_mut_ptr())
}

/// A worker has ended: unless its context has too, that one is lost.
fn worker_ended(tables: &Weak<Mutex<Tables>>, id: u32, serial: u64, ended: peer::Ended) {
    let Some(how) = ended else { return };
    warn(format_args!("context {id} lost: {how}"));
    let Some(tables) = tables.upgrade() else { return };
    let mut tables = tables.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(context) = tables.contexts.get_mut(&id).filter(|context| context.serial == serial) {
        context.lose();
    }
}

/// Signals of the VMM are not for the threads of ours.
fn block_signals() {
    // It fails for no argument of ours.
    let _ = SigSet::all().thread_block();
}
