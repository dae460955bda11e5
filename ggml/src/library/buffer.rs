//! Memory of a device, and the bytes of tensors in it.

use std::cell::Cell;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::BufferType;
use super::load::Loaded;
use crate::abi;
use crate::error::Error;
use crate::types::extent;
use crate::values::Status;

/// A buffer. Its memory is freed when it and every [`crate::graph::Graph`] that uses it are dropped.
///
/// A tensor given to its functions says by `type_`, `ne`, `nb` and `data` which bytes are meant; its other fields are ignored. The data must lie
/// in the buffer whole, and ranges inside the tensor, or the call is refused.
#[derive(Debug)]
pub struct Buffer {
    memory: Arc<Memory>,
    /// A buffer may be used by any thread, by one at a time.
    not_sync: PhantomData<Cell<()>>,
}

/// Keeps a buffer's memory, and allows nothing else.
#[derive(Debug)]
pub(crate) struct BufferHold(Arc<Memory>);

impl BufferHold {
    /// Whether it keeps this buffer.
    pub(crate) fn is(&self, buffer: &Buffer) -> bool {
        Arc::ptr_eq(&self.0, &buffer.memory)
    }
}

#[derive(Debug)]
struct Memory {
    loaded: Arc<Loaded>,
    raw: NonNull<abi::Buffer>,
    base: usize,
    size: usize,
}

// SAFETY: all that can be done with it alone is to free it, which any thread may.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the buffer is ours and nothing uses it afterwards. The buffer's own `free_buffer` would leave the struct, and may be null.
        unsafe { (self.loaded.buffer_free)(self.raw.as_ptr()) };
    }
}

impl Buffer {
    /// The buffer at a pointer; none for null, and for a buffer without an address.
    ///
    /// # Safety
    ///
    /// `raw` is null or a buffer of the library that nobody else frees.
    pub(super) unsafe fn from_raw(loaded: &Arc<Loaded>, raw: *mut abi::Buffer) -> Option<Self> {
        let raw = NonNull::new(raw)?;
        // SAFETY: the caller says that it is a buffer; `get_base` is called with its own object.
        let (base, size) = unsafe {
            let base = (*raw.as_ptr()).iface.get_base.map_or(ptr::null_mut(), |get| get(raw.as_ptr()));
            (base.expose_provenance(), (*raw.as_ptr()).size)
        };
        let memory = Arc::new(Memory { loaded: Arc::clone(loaded), raw, base, size });
        (base != 0).then_some(Self { memory, not_sync: PhantomData })
    }

    fn iface(&self) -> &abi::BufferIface {
        // SAFETY: the buffer lives and its functions are not changed.
        unsafe { &(*self.as_ptr()).iface }
    }

    pub(crate) fn as_ptr(&self) -> *mut abi::Buffer {
        self.memory.raw.as_ptr()
    }

    pub(crate) fn hold(&self) -> BufferHold {
        BufferHold(Arc::clone(&self.memory))
    }

    /// Address of its first byte, in the device's terms.
    pub fn base(&self) -> usize {
        self.memory.base
    }

    /// Its bytes.
    pub fn size(&self) -> usize {
        self.memory.size
    }

    /// Its type.
    ///
    /// # Errors
    ///
    /// [`Error::SlotNull`] when the backend did not say.
    pub fn buffer_type(&self) -> Result<BufferType, Error> {
        // SAFETY: the buffer lives, and its type stays.
        unsafe { BufferType::from_raw(&self.memory.loaded, (*self.as_ptr()).buft) }
            .ok_or(Error::SlotNull { object: "buffer", slot: "buft" })
    }

    /// Writes `data` at `offset` bytes into the tensor.
    ///
    /// # Errors
    ///
    /// [`Error::Extent`], [`Error::OutsideBuffer`] or [`Error::OutsideTensor`]; nothing is written then.
    pub fn set_tensor(&self, tensor: &abi::Tensor, data: &[u8], offset: u64) -> Result<(), Error> {
        // SAFETY: the slice is readable.
        unsafe { self.set_tensor_from(tensor, data.as_ptr(), offset, data.len()) }
    }

    /// Writes `len` bytes from `data` at `offset` bytes into the tensor, from memory that others may change meanwhile.
    ///
    /// # Errors
    ///
    /// As [`Buffer::set_tensor`].
    ///
    /// # Safety
    ///
    /// `len` bytes at `data` are readable and no part of this buffer.
    pub unsafe fn set_tensor_from(
        &self,
        tensor: &abi::Tensor,
        data: *const u8,
        offset: u64,
        len: usize,
    ) -> Result<(), Error> {
        let set = self.iface().set_tensor.ok_or(missing("set_tensor"))?;
        let mut tensor = self.place(tensor)?;
        let offset = range(&tensor, offset, len)?;
        if len > 0 {
            // SAFETY: the function is called with its own object, a tensor in it and a range in the tensor; the caller answers for `data`.
            unsafe { set(self.as_ptr(), &raw mut tensor, data.cast::<c_void>(), offset, len) };
        }
        Ok(())
    }

    /// Reads bytes of the tensor from `offset` on until `data` is full.
    ///
    /// # Errors
    ///
    /// As [`Buffer::set_tensor`].
    pub fn get_tensor(&self, tensor: &abi::Tensor, data: &mut [u8], offset: u64) -> Result<(), Error> {
        // SAFETY: the slice is writable.
        unsafe { self.get_tensor_into(tensor, data.as_mut_ptr(), offset, data.len()) }
    }

    /// Reads `len` bytes of the tensor from `offset` on into `data`, memory that others may look at meanwhile.
    ///
    /// # Errors
    ///
    /// As [`Buffer::set_tensor`].
    ///
    /// # Safety
    ///
    /// `len` bytes at `data` are writable and no part of this buffer.
    pub unsafe fn get_tensor_into(
        &self,
        tensor: &abi::Tensor,
        data: *mut u8,
        offset: u64,
        len: usize,
    ) -> Result<(), Error> {
        let get = self.iface().get_tensor.ok_or(missing("get_tensor"))?;
        let tensor = self.place(tensor)?;
        let offset = range(&tensor, offset, len)?;
        if len > 0 {
            // SAFETY: the function is called with its own object, a tensor in it and a range in the tensor; the caller answers for `data`.
            unsafe { get(self.as_ptr(), &raw const tensor, data.cast::<c_void>(), offset, len) };
        }
        Ok(())
    }

    /// Fills `len` bytes of the tensor from `offset` on with `value`.
    ///
    /// # Errors
    ///
    /// As [`Buffer::set_tensor`], and [`Error::SlotMissing`] from a backend that cannot.
    pub fn memset_tensor(
        &self,
        tensor: &abi::Tensor,
        value: u8,
        offset: u64,
        len: usize,
    ) -> Result<(), Error> {
        let memset = self.iface().memset_tensor.ok_or(missing("memset_tensor"))?;
        let mut tensor = self.place(tensor)?;
        let offset = range(&tensor, offset, len)?;
        if len > 0 {
            // SAFETY: the function is called with its own object, a tensor in it and a range in the tensor.
            unsafe { memset(self.as_ptr(), &raw mut tensor, value, offset, len) };
        }
        Ok(())
    }

    /// Copies `source`, a tensor in `source_buffer`, onto `destination`, a tensor in this buffer; false when the backend cannot and nothing
    /// was copied.
    ///
    /// # Errors
    ///
    /// As [`Buffer::set_tensor`] for either tensor, [`Error::LayoutsDiffer`] and [`Error::TensorsOverlap`].
    pub fn cpy_tensor(
        &self,
        source: &abi::Tensor,
        source_buffer: &Buffer,
        destination: &abi::Tensor,
    ) -> Result<bool, Error> {
        let source = source_buffer.place(source)?;
        let mut destination = self.place(destination)?;
        if (source.type_, source.ne, source.nb) != (destination.type_, destination.ne, destination.nb) {
            return Err(Error::LayoutsDiffer);
        }
        let nbytes = extent(source.type_, source.ne, source.nb)?;
        if nbytes == 0 {
            return Ok(true);
        }
        // Buffers over shared memory may be two over the same.
        let is_host = |buffer: &Buffer| buffer.buffer_type().is_ok_and(|type_| type_.is_host());
        if self.as_ptr() == source_buffer.as_ptr() || is_host(self) && is_host(source_buffer) {
            let apart = source.data.addr().abs_diff(destination.data.addr()) as u64;
            match apart {
                0 => return Ok(true),
                1.. if apart < nbytes => return Err(Error::TensorsOverlap { nbytes, apart }),
                _ => {}
            }
        }
        let Some(copy) = self.iface().cpy_tensor else { return Ok(false) };
        // SAFETY: the function is called with its own object, a tensor in it and one in a live buffer, of the same layout and apart.
        Ok(unsafe { copy(self.as_ptr(), &raw const source, &raw mut destination) })
    }

    /// Prepares a tensor that a program has placed in the buffer, where the backend needs that (padding of quantized rows).
    ///
    /// # Errors
    ///
    /// As [`Buffer::set_tensor`].
    pub fn init_tensor(&self, tensor: &abi::Tensor) -> Result<Status, Error> {
        let mut tensor = self.place(tensor)?;
        let Some(init) = self.iface().init_tensor else { return Ok(Status::Success) };
        // SAFETY: the function is called with its own object and a tensor in it.
        Ok(Status::from_number(unsafe { init(self.as_ptr(), &raw mut tensor) }))
    }

    /// Fills the whole buffer with `value`.
    ///
    /// # Errors
    ///
    /// [`Error::SlotMissing`] from a backend that cannot.
    pub fn clear(&self, value: u8) -> Result<(), Error> {
        let clear = self.iface().clear.ok_or(missing("clear"))?;
        // SAFETY: the function is called with its own object.
        unsafe { clear(self.as_ptr(), value) };
        Ok(())
    }

    /// A copy of the tensor with only what says where its bytes are, once these are known to be in the buffer.
    fn place(&self, tensor: &abi::Tensor) -> Result<abi::Tensor, Error> {
        self.check_inside(tensor.data.addr(), extent(tensor.type_, tensor.ne, tensor.nb)?)?;
        Ok(abi::Tensor {
            type_: tensor.type_,
            buffer: self.as_ptr(),
            ne: tensor.ne,
            nb: tensor.nb,
            data: tensor.data,
            name: tensor.name,
            ..abi::Tensor::default()
        })
    }

    /// Refuses bytes that are not all in the buffer.
    pub(crate) fn check_inside(&self, data: usize, extent: u64) -> Result<(), Error> {
        let inside = data
            .checked_sub(self.base())
            .and_then(|offset| self.size().checked_sub(offset))
            .is_some_and(|room| extent <= room as u64);
        if inside {
            return Ok(());
        }
        Err(Error::OutsideBuffer { data, extent, base: self.base(), size: self.size() })
    }
}

fn missing(slot: &'static str) -> Error {
    Error::SlotMissing { object: "buffer", slot }
}

/// The offset for ggml, once the range is known to be in the tensor.
fn range(tensor: &abi::Tensor, offset: u64, len: usize) -> Result<usize, Error> {
    let extent = extent(tensor.type_, tensor.ne, tensor.nb)?;
    match usize::try_from(offset) {
        Ok(start) if offset.checked_add(len as u64).is_some_and(|end| end <= extent) => Ok(start),
        _ => Err(Error::OutsideTensor { offset, len, extent }),
    }
}
