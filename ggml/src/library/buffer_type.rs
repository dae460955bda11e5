//! What buffers of a device are like, and allocating one.

use std::ptr::NonNull;
use std::sync::Arc;

use super::load::Loaded;
use super::{Buffer, string};
use crate::abi;
use crate::error::Error;
use crate::tensor::TensorRef;

/// A buffer type of a library.
#[derive(Clone, Debug)]
pub struct BufferType {
    loaded: Arc<Loaded>,
    raw: NonNull<abi::BufferType>,
}

// SAFETY: ggml programs call a buffer type's functions from any thread, as llama.cpp does with several contexts.
unsafe impl Send for BufferType {}
// SAFETY: as above.
unsafe impl Sync for BufferType {}

impl PartialEq for BufferType {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw
    }
}

impl Eq for BufferType {}

impl BufferType {
    /// The buffer type at a pointer, none for null.
    ///
    /// # Safety
    ///
    /// `raw` is null or a buffer type of the library that stays.
    pub(super) unsafe fn from_raw(loaded: &Arc<Loaded>, raw: *mut abi::BufferType) -> Option<Self> {
        NonNull::new(raw).map(|raw| Self { loaded: Arc::clone(loaded), raw })
    }

    pub(super) fn as_ptr(&self) -> *mut abi::BufferType {
        self.raw.as_ptr()
    }

    fn iface(&self) -> abi::BufferTypeIfaceV2 {
        // SAFETY: the buffer type is of the library whose layout this is.
        unsafe { self.loaded.layout.buffer_type_iface(self.raw.as_ptr()) }
    }

    /// Its name, such as `CUDA0`.
    pub fn name(&self) -> String {
        // SAFETY: the function is called with its own object and gives a C string.
        self.iface().get_name.map_or_else(String::new, |get| unsafe { string(get(self.as_ptr())) })
    }

    /// Bytes that a tensor's address must be a multiple of; never 0.
    pub fn alignment(&self) -> usize {
        // SAFETY: the function is called with its own object.
        self.iface().get_alignment.map_or(1, |get| unsafe { get(self.as_ptr()) }).max(1)
    }

    /// Bytes of the largest buffer; `usize::MAX` when there is no limit.
    pub fn max_size(&self) -> usize {
        // SAFETY: the function is called with its own object.
        self.iface().get_max_size.map_or(usize::MAX, |get| unsafe { get(self.as_ptr()) })
    }

    /// Bytes to set aside for a tensor: at least those it spans.
    ///
    /// # Errors
    ///
    /// [`Error::Extent`] for a tensor that spans no known number of bytes.
    pub fn alloc_size(&self, tensor: TensorRef<'_>) -> Result<u64, Error> {
        let nbytes = tensor.nbytes()?;
        // SAFETY: the function is called with its own object and a tensor that is valid with all it reaches; `GgmlLibrary::open`'s caller
        // answers for its operation.
        Ok(self
            .iface()
            .get_alloc_size
            .map_or(nbytes, |get| unsafe { get(self.as_ptr(), tensor.as_ptr()) as u64 }))
    }

    /// A new buffer of `size` bytes, with any content; none when there is no room, or for 0 bytes, which ggml's own programs never ask for.
    pub fn alloc_buffer(&self, size: usize) -> Option<Buffer> {
        let alloc = self.iface().alloc_buffer.filter(|_| size > 0)?;
        // SAFETY: the function is called with its own object; the buffer it gives is ours to free.
        unsafe { Buffer::from_raw(&self.loaded, alloc(self.as_ptr(), size)) }
    }

    /// Whether the data lies in host memory, in ggml's plain layout.
    pub fn is_host(&self) -> bool {
        // SAFETY: the function is called with its own object.
        self.iface().is_host.is_some_and(|is_host| unsafe { is_host(self.as_ptr()) })
    }
}
