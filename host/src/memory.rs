//! Memory that the guest shares: how large a blob is, and mappings that outlive one.
//!
//! The renderer gives a bare pointer for a resource id. How many bytes lie behind it is asked of the system; whatever is kept
//! longer than a command is mapped a second time, since the guest may destroy the blob, and the renderer's mapping with
//! it, at any time.

use crate::budget::{Account, Exceeded, Taken};
use apir_ggml::abi;
use apir_ggml::library::{Buffer, BufferType, Device};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock, Weak};
use thiserror::Error;
use vm_memory::{Bytes, VolatileSlice};

#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
use linux as system;
#[cfg(not(target_os = "linux"))]
mod other;
#[cfg(not(target_os = "linux"))]
use other as system;

use system::Region;
pub use system::max_mappings;

/// Buffers of so many bytes are mapped, smaller ones come from the library's allocator, which maps none of these.
const MAPPED_FROM: usize = 64 << 10;
/// Mappings of a mapped buffer: its memory, and the page behind it that nobody may touch.
const MAPPINGS_OF_BUFFER: u64 = 2;
/// What is left to the rest of the process when a library is about to take memory, in bytes.
const HEADROOM: u64 = 16 << 20;
/// Amounts from here on, in bytes, are held against what the machine has left: looking that up takes longer than a small one is worth.
const LARGE: u64 = 64 << 20;

/// Why a blob cannot be used.
#[derive(Debug, Error)]
pub enum MemoryError {
    /// The renderer knows no such resource, or it is no shared memory.
    #[error("resource {0} is no shared memory of this context")]
    Unknown(u32),
    /// The mapping's size cannot be found, or it is private or read-only.
    #[error("resource {res_id}: {cause}")]
    Mapping {
        /// The resource.
        res_id: u32,
        /// What is wrong with it.
        cause: std::io::Error,
    },
    /// The blob is smaller than the command says.
    #[error("resource {res_id} has {len} bytes, the command speaks of {size}")]
    TooSmall {
        /// The resource.
        res_id: u32,
        /// Bytes of the blob.
        len: usize,
        /// Bytes of the command.
        size: u64,
    },
    /// No room for a private copy.
    #[error("no memory for a copy of {0} bytes")]
    OutOfMemory(usize),
    /// What a computation needs is more than the process can get.
    #[error("memory: the process cannot get it ({bytes} bytes: {cause})")]
    Unavailable {
        /// Bytes that are needed.
        bytes: u64,
        /// What the system says.
        cause: std::io::Error,
    },
    /// The process has as many mappings as it may have.
    #[error(transparent)]
    Mappings(#[from] Exceeded),
}

/// That the process can get `bytes` of memory, which a library is about to take: it would end the process where it got none.
///
/// # Errors
/// [`MemoryError::Unavailable`]
pub fn check_available(bytes: u64, alone: bool) -> Result<(), MemoryError> {
    let refuse = |cause| MemoryError::Unavailable { bytes, cause };
    let wanted = bytes.saturating_add(HEADROOM);
    system::try_map(wanted).map_err(refuse)?;
    // Elsewhere the system lends more than it has, and ends a process when that is used.
    let available = if alone || bytes < LARGE { None } else { system::available() };
    match available {
        Some(available) if wanted > available => {
            Err(refuse(std::io::Error::other("the machine has less left")))
        }
        _ => Ok(()),
    }
}

/// Finds the blobs of one context by the renderer's callback.
#[derive(Debug)]
pub struct Blobs {
    ctx_id: u32,
    get_shmem_ptr: GetShmemPtr,
    mappings: Account,
    /// The second mappings, one a blob.
    kept: RefCell<HashMap<Region, Weak<Mapping>>>,
}

/// The renderer's callback: address of a context's resource, null when it has none.
pub type GetShmemPtr = unsafe extern "C" fn(ctx_id: u32, res_id: u32) -> *mut std::ffi::c_void;

impl Blobs {
    /// Blobs of context `ctx_id`, whose second mappings are taken from `mappings`.
    ///
    /// # Safety
    /// `get_shmem_ptr` must be callable at any time with `ctx_id`, and what it returns must be null or the start of a
    /// mapping that stays until the command that asked for it ends.
    pub unsafe fn new(ctx_id: u32, get_shmem_ptr: GetShmemPtr, mappings: Account) -> Self {
        Self { ctx_id, get_shmem_ptr, mappings, kept: RefCell::default() }
    }

    /// The context's part of the process's mappings.
    #[must_use]
    pub fn mappings(&self) -> &Account {
        &self.mappings
    }

    /// The first `size` bytes of a blob, for as long as a command runs.
    ///
    /// # Errors
    /// [`MemoryError`] when there is no such blob, it is smaller, or the system has no pages for it.
    pub fn view(&self, res_id: u32, size: u64) -> Result<BlobView<'_>, MemoryError> {
        // SAFETY: `new`'s caller promised that the callback may be called.
        let pointer = unsafe { (self.get_shmem_ptr)(self.ctx_id, res_id) };
        let pointer = NonNull::new(pointer.cast::<u8>()).ok_or(MemoryError::Unknown(res_id))?;
        let refuse = |cause| MemoryError::Mapping { res_id, cause };
        let region = system::region(pointer).map_err(refuse)?;
        let len = match usize::try_from(size) {
            Ok(wanted) if wanted <= region.len => wanted,
            _ => return Err(MemoryError::TooSmall { res_id, len: region.len, size }),
        };
        if system::commits_strictly() {
            // A page of a sparse blob that the system does not have would be a signal.
            system::populate(pointer, len).map_err(refuse)?;
        }
        Ok(BlobView { blobs: self, res_id, pointer, region, len })
    }
}

/// Bytes of a blob, which the guest may change at any moment.
#[derive(Debug)]
pub struct BlobView<'a> {
    blobs: &'a Blobs,
    res_id: u32,
    pointer: NonNull<u8>,
    region: Region,
    len: usize,
}

impl BlobView<'_> {
    /// How many bytes there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies all bytes to private memory, whose capacity is used again.
    ///
    /// # Errors
    /// [`MemoryError::OutOfMemory`]
    pub fn copy_to(&self, private: &mut Vec<u8>) -> Result<(), MemoryError> {
        private.clear();
        private.try_reserve_exact(self.len).map_err(|_| MemoryError::OutOfMemory(self.len))?;
        private.resize(self.len, 0);
        // SAFETY: `Blobs::view` found `len` bytes mapped there, until the command ends.
        let shared = unsafe { VolatileSlice::new(self.pointer.as_ptr(), self.len) };
        shared.copy_to(&mut private[..]);
        Ok(())
    }

    /// A second mapping of the whole blob, which stays when the blob is destroyed. All who keep one blob share it.
    ///
    /// # Errors
    /// [`MemoryError::Mapping`] when the system refuses, [`MemoryError::Mappings`].
    pub fn keep(&self) -> Result<Arc<Mapping>, MemoryError> {
        let mut kept = self.blobs.kept.borrow_mut();
        if let Some(mapping) = kept.get(&self.region).and_then(Weak::upgrade) {
            return Ok(mapping);
        }
        let taken = self.blobs.mappings.take(1)?;
        let len = self.region.len;
        let pointer = system::double(self.pointer, len)
            .map_err(|cause| MemoryError::Mapping { res_id: self.res_id, cause })?;
        let mapping = Arc::new(Mapping { pointer, len, name: OnceLock::new(), _taken: taken });
        if kept.len() > 64 + 2 * self.blobs.mappings.held() as usize {
            kept.retain(|_, mapping| mapping.strong_count() > 0);
        }
        kept.insert(self.region, Arc::downgrade(&mapping));
        Ok(mapping)
    }
}

/// What a buffer lies in that is not the library's.
#[derive(Debug)]
enum Ground {
    /// The guest's memory.
    Shared(Arc<Mapping>),
    /// Memory of this process.
    Own { _memory: OwnMemory },
}

/// A ggml buffer, and the mapping that it lies in when it is not the library's own.
#[derive(Debug)]
pub struct HostBuffer {
    // Freed before the mapping that it lies in: fields drop in this order.
    ggml: Buffer,
    ground: Option<Ground>,
}

impl HostBuffer {
    /// A buffer full of zeros; nothing when there is no room for it. Pages of host memory are taken when they are written.
    ///
    /// # Errors
    /// [`MemoryError::Mappings`], or what the device says.
    pub fn zeroed(
        device: &Device,
        buffer_type: &BufferType,
        size: usize,
        mappings: &Account,
    ) -> Result<Option<Self>, crate::error::CommandError> {
        let takes_memory = device.props().caps.buffer_from_host_ptr && buffer_type.is_host();
        if size >= MAPPED_FROM && takes_memory && *buffer_type == device.buffer_type()? {
            let taken = mappings.take(MAPPINGS_OF_BUFFER).map_err(MemoryError::from)?;
            return match OwnMemory::new(size, buffer_type.alignment(), taken) {
                Ok(memory) => Self::over(memory, size, device),
                Err(error) if error.kind() == std::io::ErrorKind::Unsupported => {
                    Self::cleared(buffer_type, size)
                }
                Err(_) => Ok(None),
            };
        }
        Self::cleared(buffer_type, size)
    }

    fn over(
        memory: OwnMemory,
        size: usize,
        device: &Device,
    ) -> Result<Option<Self>, crate::error::CommandError> {
        let start = memory.start.as_ptr();
        // SAFETY: the memory is kept until the buffer is freed, and Rust makes no reference into it.
        let made = unsafe { device.buffer_from_host_ptr(start, size, size) }?;
        Ok(made.map(|ggml| Self { ggml, ground: Some(Ground::Own { _memory: memory }) }))
    }

    /// Memory of the library's may have held another context's data.
    fn cleared(buffer_type: &BufferType, size: usize) -> Result<Option<Self>, crate::error::CommandError> {
        let Some(ggml) = buffer_type.alloc_buffer(size) else { return Ok(None) };
        ggml.clear(0)?;
        Ok(Some(Self { ggml, ground: None }))
    }

    /// A buffer over the first `len` bytes of shared memory; nothing when the device makes none.
    ///
    /// # Errors
    /// What the device says.
    pub fn shared(
        mapping: Arc<Mapping>,
        len: usize,
        device: &Device,
        max_tensor_size: usize,
    ) -> Result<Option<Self>, apir_ggml::Error> {
        let len = len.min(mapping.len);
        // SAFETY: the mapping is kept until the buffer is freed, and Rust makes no reference into it.
        let made =
            unsafe { device.buffer_from_host_ptr(mapping.pointer.as_ptr(), len, max_tensor_size.min(len)) }?;
        Ok(made.map(|ggml| Self { ggml, ground: Some(Ground::Shared(mapping)) }))
    }

    /// Whether the guest can write it at any time.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        matches!(self.ground, Some(Ground::Shared(_)))
    }

    /// The number of its memory, the same for all buffers over one blob; `own`, a number that is its own, for all others.
    #[must_use]
    pub fn number(&self, own: u64) -> u64 {
        match &self.ground {
            Some(Ground::Shared(mapping)) => *mapping.name.get_or_init(|| own),
            _ => own,
        }
    }

    /// The ggml buffer.
    #[must_use]
    pub fn ggml(&self) -> &Buffer {
        &self.ggml
    }

    /// Copies all of `blob` to `offset` bytes into the tensor.
    ///
    /// # Errors
    /// What the buffer says; nothing is copied then.
    pub fn set_tensor(
        &self,
        tensor: &abi::Tensor,
        offset: u64,
        blob: &BlobView<'_>,
    ) -> Result<(), crate::error::CommandError> {
        if self.is_shared() {
            // The blob may be this buffer's own memory, where a backend's plain copy must not overlap.
            let mut private = Vec::new();
            blob.copy_to(&mut private)?;
            return Ok(self.ggml.set_tensor(tensor, &private, offset)?);
        }
        // SAFETY: `Blobs::view` found `len` bytes mapped there; the buffer lies in memory of the backend's own.
        Ok(unsafe { self.ggml.set_tensor_from(tensor, blob.pointer.as_ptr(), offset, blob.len) }?)
    }

    /// Fills `blob` from `offset` bytes into the tensor.
    ///
    /// # Errors
    /// What the buffer says; nothing is copied then.
    pub fn get_tensor(
        &self,
        tensor: &abi::Tensor,
        offset: u64,
        blob: &BlobView<'_>,
    ) -> Result<(), crate::error::CommandError> {
        if self.is_shared() {
            let mut private = Vec::new();
            private.try_reserve_exact(blob.len).map_err(|_| MemoryError::OutOfMemory(blob.len))?;
            private.resize(blob.len, 0);
            self.ggml.get_tensor(tensor, &mut private, offset)?;
            // SAFETY: `Blobs::view` found `len` bytes mapped there, until the command ends.
            let shared = unsafe { VolatileSlice::new(blob.pointer.as_ptr(), blob.len) };
            shared.copy_from(&private);
            return Ok(());
        }
        // SAFETY: `Blobs::view` found `len` bytes mapped there; the buffer lies in memory of the backend's own.
        Ok(unsafe { self.ggml.get_tensor_into(tensor, blob.pointer.as_ptr(), offset, blob.len) }?)
    }
}

/// Zeroed memory of this process, with a page behind it that nobody may touch.
#[derive(Debug)]
struct OwnMemory {
    start: NonNull<u8>,
    /// All that is mapped.
    pointer: NonNull<u8>,
    len: usize,
    _taken: Taken,
}

// SAFETY: the memory belongs to this value alone and may be used and unmapped on any thread.
unsafe impl Send for OwnMemory {}

impl OwnMemory {
    /// `size` bytes that end as near to the untouchable page as the alignment allows.
    fn new(size: usize, alignment: usize, taken: Taken) -> std::io::Result<Self> {
        let (pointer, len, usable) = system::zeroed(size)?;
        // Alignments are powers of two below a page.
        let slack = (usable - size) & !(alignment.max(1).next_power_of_two() - 1);
        // SAFETY: the slack and the size make no more than the usable bytes.
        let start = unsafe { pointer.add(slack) };
        Ok(Self { start, pointer, len, _taken: taken })
    }
}

impl Drop for OwnMemory {
    fn drop(&mut self) {
        // SAFETY: `system::zeroed` made the mapping, and the buffer over it is freed.
        unsafe { system::unmap(self.pointer, self.len) };
    }
}

/// A mapping of our own.
#[derive(Debug)]
pub struct Mapping {
    pointer: NonNull<u8>,
    len: usize,
    /// The number of the memory behind it.
    name: OnceLock<u64>,
    _taken: Taken,
}

// SAFETY: the mapping belongs to this value alone and may be used and unmapped on any thread.
unsafe impl Send for Mapping {}
// SAFETY: it gives out no more than an address and a length; what is done with these answers for itself.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Address of the first byte, on a page's border.
    #[must_use]
    pub fn pointer(&self) -> NonNull<u8> {
        self.pointer
    }

    /// How many bytes are mapped.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is mapped.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// A word that the guest sees.
#[derive(Debug)]
pub struct SharedWord {
    mapping: Arc<Mapping>,
    offset: usize,
}

impl SharedWord {
    /// The word `offset` bytes into `mapping`; nothing when it does not lie there or is not aligned.
    #[must_use]
    pub fn new(mapping: Arc<Mapping>, offset: usize) -> Option<Self> {
        let end = offset.checked_add(size_of::<u32>())?;
        (offset.is_multiple_of(size_of::<u32>()) && end <= mapping.len).then_some(Self { mapping, offset })
    }

    /// Stores a value, after everything that was written before.
    pub fn store(&self, value: u32) {
        // SAFETY: the mapping is readable and writable over its whole length, and this value keeps it.
        let shared = unsafe { VolatileSlice::new(self.mapping.pointer.as_ptr(), self.mapping.len) };
        // `new` has seen to it that the word is there.
        let _ = shared.store(value, self.offset, Ordering::Release);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `system::double` made the mapping, and nobody else has it.
        unsafe { system::unmap(self.pointer, self.len) };
    }
}

/// Copies a reply into the guest's reply page and puts it in order before what the renderer stores next.
///
/// # Safety
/// `page` must be the start of `reply.len()` writable bytes.
pub unsafe fn publish(page: *mut u8, reply: &[u8]) {
    // SAFETY: the caller promises the bytes.
    let shared = unsafe { VolatileSlice::new(page, reply.len()) };
    shared.copy_from(reply);
    std::sync::atomic::fence(Ordering::Release);
}

#[cfg(test)]
mod tests;
