//! Memory that the guest shares: how large a blob is, and mappings that outlive one.
//!
//! The renderer gives a bare pointer for a resource id. How many bytes lie behind it is asked of the system; whatever is kept
//! longer than a command is mapped a second time, since the guest may destroy the blob, and the renderer's mapping with
//! it, at any time.

use apir_ggml::abi;
use apir_ggml::library::{Buffer, Device};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
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
}

/// Finds the blobs of one context by the renderer's callback.
#[derive(Debug, Clone, Copy)]
pub struct Blobs {
    ctx_id: u32,
    get_shmem_ptr: GetShmemPtr,
}

/// The renderer's callback: address of a context's resource, null when it has none.
pub type GetShmemPtr = unsafe extern "C" fn(ctx_id: u32, res_id: u32) -> *mut std::ffi::c_void;

impl Blobs {
    /// Blobs of context `ctx_id`.
    ///
    /// # Safety
    /// `get_shmem_ptr` must be callable at any time with `ctx_id`, and what it returns must be null or the start of a
    /// mapping that stays until the command that asked for it ends.
    pub unsafe fn new(ctx_id: u32, get_shmem_ptr: GetShmemPtr) -> Self {
        Self { ctx_id, get_shmem_ptr }
    }

    /// The first `size` bytes of a blob, for as long as a command runs.
    ///
    /// # Errors
    /// [`MemoryError`] when there is no such blob, or it is smaller.
    pub fn view(&self, res_id: u32, size: u64) -> Result<BlobView<'_>, MemoryError> {
        // SAFETY: `new`'s caller promised that the callback may be called.
        let pointer = unsafe { (self.get_shmem_ptr)(self.ctx_id, res_id) };
        let pointer = NonNull::new(pointer.cast::<u8>()).ok_or(MemoryError::Unknown(res_id))?;
        let len = system::shared_len(pointer).map_err(|cause| MemoryError::Mapping { res_id, cause })?;
        match usize::try_from(size) {
            Ok(wanted) if wanted <= len => {
                Ok(BlobView { res_id, pointer, len: wanted, blobs: std::marker::PhantomData })
            }
            _ => Err(MemoryError::TooSmall { res_id, len, size }),
        }
    }
}

/// Bytes of a blob, which the guest may change at any moment.
#[derive(Debug)]
pub struct BlobView<'a> {
    res_id: u32,
    pointer: NonNull<u8>,
    len: usize,
    blobs: std::marker::PhantomData<&'a Blobs>,
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

    /// A second mapping of the same bytes, which stays when the blob is destroyed.
    ///
    /// # Errors
    /// [`MemoryError::Mapping`] when the system refuses.
    pub fn keep(&self) -> Result<Mapping, MemoryError> {
        system::double(self.pointer, self.len)
            .map(|pointer| Mapping { pointer, len: self.len })
            .map_err(|cause| MemoryError::Mapping { res_id: self.res_id, cause })
    }
}

/// A ggml buffer, and the mapping that it lies in when the guest shares its memory.
#[derive(Debug)]
pub struct HostBuffer {
    // Freed before the mapping that it lies in: fields drop in this order.
    ggml: Buffer,
    mapping: Option<Mapping>,
}

impl HostBuffer {
    /// A buffer in memory of the backend's own.
    #[must_use]
    pub fn allocated(ggml: Buffer) -> Self {
        Self { ggml, mapping: None }
    }

    /// A buffer over shared memory; nothing when the device makes none.
    ///
    /// # Errors
    /// What the device says.
    pub fn shared(
        mapping: Mapping,
        device: &Device,
        max_tensor_size: usize,
    ) -> Result<Option<Self>, apir_ggml::Error> {
        let (pointer, len) = (mapping.pointer.as_ptr(), mapping.len);
        // SAFETY: the mapping is kept until the buffer is freed, and Rust makes no reference into it.
        let made = unsafe { device.buffer_from_host_ptr(pointer, len, max_tensor_size.min(len)) }?;
        Ok(made.map(|ggml| Self { ggml, mapping: Some(mapping) }))
    }

    /// Whether the guest can write it at any time.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.mapping.is_some()
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
        if self.mapping.is_some() {
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
        if self.mapping.is_some() {
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

/// A mapping of our own.
#[derive(Debug)]
pub struct Mapping {
    pointer: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value alone and may be used and unmapped on any thread.
unsafe impl Send for Mapping {}

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
    mapping: Mapping,
    offset: usize,
}

impl SharedWord {
    /// The word `offset` bytes into `mapping`; nothing when it does not lie there or is not aligned.
    #[must_use]
    pub fn new(mapping: Mapping, offset: usize) -> Option<Self> {
        let end = offset.checked_add(size_of::<u32>())?;
        (offset.is_multiple_of(size_of::<u32>()) && end <= mapping.len).then_some(Self { mapping, offset })
    }

    /// Stores a value, after everything that was written before.
    pub fn store(&self, value: u32) {
        // SAFETY: the mapping is readable and writable over its whole length, and this value owns it.
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
