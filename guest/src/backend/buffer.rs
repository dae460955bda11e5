//! Buffers: mapped ones, whose bytes both sides see, and device buffers, whose bytes travel through the session.

use super::attachment::{Attachment, Silent};
use super::device::Device;
use super::{guard, log};
use crate::link::{Blob, LinkError};
use crate::record::{Place, RecordError, data_record, name};
use crate::session::SessionError;
use apir_ggml::process::GgmlBase;
use apir_ggml::{ExtentError, TensorRef, abi};
use apir_protocol::handle::BufferHandle;
use apir_protocol::messages::{
    BufferClearRequest, BufferCpyTensorRequest, BufferFreeBufferRequest, BufferGetBaseRequest,
    BufferTypeAllocBufferRequest, DeviceBufferFromPtrRequest,
};
use std::ffi::c_void;
use std::sync::atomic::Ordering;
use std::{ptr, slice};

/// Bytes of one piece of a fill.
const FILL_PIECE: usize = 1 << 20;
/// Where a device buffer lies for ggml when the host's address cannot be used. Never accessed.
const INVENTED_BASE: usize = 1 << 32;

/// Who makes the buffer structs that ggml frees.
#[derive(Debug, Clone, Copy)]
pub(super) enum BufferMaker {
    /// The ggml of this process.
    Ggml(GgmlBase),
    /// The tests, which have no ggml.
    #[cfg(test)]
    Boxes,
}

impl BufferMaker {
    /// # Safety
    /// As [`GgmlBase::buffer_init`].
    unsafe fn make(
        self,
        buffer_type: *mut abi::BufferType,
        context: *mut c_void,
        size: usize,
    ) -> *mut abi::Buffer {
        match self {
            // SAFETY: the caller vouches for the arguments.
            Self::Ggml(base) => unsafe { base.buffer_init(buffer_type, IFACE, context, size) },
            #[cfg(test)]
            Self::Boxes => {
                let buffer = abi::Buffer { iface: IFACE, buft: buffer_type, context, size, usage: 0 };
                Box::into_raw(Box::new(buffer))
            }
        }
    }
}

/// A buffer of the host.
#[derive(Debug)]
pub(super) struct Buffer {
    device: &'static Device,
    attachment: &'static Attachment,
    handle: BufferHandle,
    /// What ggml counts tensors' addresses from.
    base: usize,
    size: usize,
    /// The bytes of a mapped buffer.
    blob: Option<Blob>,
}

/// Why an access failed.
#[derive(Debug, thiserror::Error)]
enum BufferError {
    /// The host failed.
    #[error(transparent)]
    Session(#[from] SessionError),
    /// The tensor cannot travel.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// The mapping was left.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The tensor has no size.
    #[error(transparent)]
    Extent(#[from] ExtentError),
}

/// Allocates a buffer; null, and a line, when the host cannot.
pub(super) fn allocate(device: &'static Device, size: usize) -> *mut abi::Buffer {
    let attachment = device.attached();
    let buffer = if attachment.host.maps_buffers { mapped(device, attachment, size) } else { None };
    let buffer = match buffer.map_or_else(|| on_device(device, attachment, size), Ok) {
        Ok(buffer) => buffer,
        Err(error) => {
            attachment.fail_allocation(&error);
            return ptr::null_mut();
        }
    };
    let context = Box::into_raw(Box::new(buffer));
    // SAFETY: the buffer type lives for good, and the functions are those of this context.
    let made = unsafe { device.maker.make(device.buffer_type(), context.cast(), size) };
    if made.is_null() {
        // SAFETY: nobody else got the pointer.
        drop(unsafe { Box::from_raw(context) });
    }
    made
}

/// A buffer over a blob, or none when the host or this system has no room for one.
fn mapped(device: &'static Device, attachment: &'static Attachment, size: usize) -> Option<Buffer> {
    let attempt = || -> Result<Buffer, SessionError> {
        let bytes = size as u64;
        let blob = attachment.session.create_blob(bytes)?;
        let request =
            DeviceBufferFromPtrRequest { res_id: blob.res_id(), size: bytes, max_tensor_size: bytes };
        let handle = attachment.session.device_buffer_from_ptr(&request)?.buffer;
        Ok(Buffer { device, attachment, handle, base: blob.as_ptr().addr(), size, blob: Some(blob) })
    };
    match attempt() {
        Ok(buffer) if !buffer.handle.is_null() => Some(buffer),
        Ok(_) => None,
        Err(error) => {
            // Once a limit is reached, every later buffer may meet it.
            if !attachment.told_unmapped.swap(true, Ordering::Relaxed) {
                log::info(format_args!(
                    "no mapped buffer of {size} bytes, using a device buffer (told once): {error}"
                ));
            }
            None
        }
    }
}

fn on_device(
    device: &'static Device,
    attachment: &'static Attachment,
    size: usize,
) -> Result<Buffer, String> {
    let (session, host) = (&attachment.session, &attachment.host);
    let request = BufferTypeAllocBufferRequest { buffer_type: host.buffer_type, size: size as u64 };
    let reply = session.buffer_type_alloc_buffer(&request).map_err(|error| error.to_string())?;
    let handle = reply.buffer;
    if handle.is_null() {
        return Err(format!("the host has no room for {size} bytes"));
    }
    let told = session.buffer_get_base(&BufferGetBaseRequest { buffer: handle });
    let base = told.ok().and_then(|reply| usize::try_from(reply.base).ok());
    let base = base.filter(|base| usable(*base, size, host.alignment));
    let base = base.unwrap_or_else(|| INVENTED_BASE.next_multiple_of(host.alignment));
    Ok(Buffer { device, attachment, handle, base, size, blob: None })
}

/// Whether ggml can place tensors from an address on.
fn usable(base: usize, size: usize, alignment: usize) -> bool {
    base != 0 && base.is_multiple_of(alignment) && base.checked_add(size).is_some()
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // In a fork the buffer is another process's.
        if self.handle.is_null() || !self.attachment.session.is_ours() {
            return;
        }
        // Before the blob goes: the host's buffer lies in it.
        let request = BufferFreeBufferRequest { buffer: self.handle };
        if let Err(error) = self.attachment.session.buffer_free_buffer(&request) {
            self.attachment.tell("cannot free a buffer", &error);
        }
    }
}

impl Buffer {
    /// Where a tensor of this buffer lies, for commands on this session; another session's buffers are a stranger's there.
    pub(super) fn place_on(
        &self,
        attachment: &Attachment,
        tensor: TensorRef<'_>,
    ) -> Result<Place, RecordError> {
        match ptr::eq(self.attachment, attachment) {
            true => self.place(tensor),
            false => Err(RecordError::Foreign { name: name(tensor) }),
        }
    }

    fn place(&self, tensor: TensorRef<'_>) -> Result<Place, RecordError> {
        Ok(Place { buffer: self.handle, offset: self.offset(tensor, 0, 0)? as u64 })
    }

    /// Bytes from the base to `offset` bytes into a tensor, `len` of which lie in the buffer.
    fn offset(&self, tensor: TensorRef<'_>, offset: usize, len: usize) -> Result<usize, RecordError> {
        let from_base = tensor.data().addr().wrapping_sub(self.base);
        let first = from_base.checked_add(offset);
        let end = first.and_then(|first| first.checked_add(len));
        first.filter(|_| end.is_some_and(|end| end <= self.size)).ok_or_else(|| RecordError::Outside {
            name: name(tensor),
            offset: from_base.wrapping_add(offset),
            len,
            size: self.size,
        })
    }

    /// The memory of a mapped buffer, which forks do not have.
    fn shared<'a>(&self, blob: &'a Blob) -> Result<&'a Blob, SessionError> {
        match self.attachment.session.check() {
            Err(forked @ SessionError::Forked(_)) => Err(forked),
            _ => Ok(blob),
        }
    }

    fn set(&self, tensor: TensorRef<'_>, offset: usize, bytes: &[u8]) -> Result<(), BufferError> {
        let at = self.offset(tensor, offset, bytes.len())?;
        match &self.blob {
            Some(blob) => self.shared(blob)?.write(at, bytes)?,
            None => {
                let record = data_record(tensor, self.place(tensor)?, &self.attachment.numbers)?;
                self.attachment.session.set_tensor(self.handle, &record, offset as u64, bytes)?;
            }
        }
        Ok(())
    }

    fn get(&self, tensor: TensorRef<'_>, offset: usize, out: &mut [u8]) -> Result<(), BufferError> {
        let at = self.offset(tensor, offset, out.len())?;
        match &self.blob {
            Some(blob) => {
                self.shared(blob)?.read(at, out)?;
                self.attachment.session.check()?;
            }
            None => {
                let record = data_record(tensor, self.place(tensor)?, &self.attachment.numbers)?;
                self.attachment.session.get_tensor(self.handle, &record, offset as u64, out)?;
            }
        }
        Ok(())
    }

    fn fill(&self, tensor: TensorRef<'_>, value: u8, offset: usize, size: usize) -> Result<(), BufferError> {
        self.offset(tensor, offset, size)?;
        let piece = vec![value; size.min(FILL_PIECE)];
        let mut done = 0;
        while done < size {
            let len = piece.len().min(size - done);
            self.set(tensor, offset + done, &piece[..len])?;
            done += len;
        }
        Ok(())
    }

    fn clear(&self, value: u8) -> Result<(), BufferError> {
        match &self.blob {
            Some(blob) => {
                let blob = self.shared(blob)?;
                let piece = vec![value; self.size.min(FILL_PIECE)];
                for at in (0..self.size).step_by(FILL_PIECE) {
                    blob.write(at, &piece[..piece.len().min(self.size - at)])?;
                }
            }
            None => {
                self.attachment.session.buffer_clear(&BufferClearRequest { buffer: self.handle, value })?;
            }
        }
        Ok(())
    }

    /// Copies a tensor of `from` into one of this buffer; false when that takes the way over the program.
    fn copy(&self, from: &Self, source: TensorRef<'_>, target: TensorRef<'_>) -> Result<bool, BufferError> {
        if !ptr::eq(self.attachment, from.attachment) {
            return Ok(false);
        }
        self.attachment.session.check()?;
        if let (Some(from_blob), Some(blob)) = (&from.blob, &self.blob) {
            let len = to_len(source.nbytes()?);
            if !same_dense_layout(source, target) {
                return Ok(false);
            }
            let read_at = from.offset(source, 0, len)?;
            let write_at = self.offset(target, 0, len)?;
            let mut piece = vec![0; len.min(FILL_PIECE)];
            for done in (0..len).step_by(FILL_PIECE) {
                let piece_len = piece.len().min(len - done);
                from_blob.read(read_at + done, &mut piece[..piece_len])?;
                blob.write(write_at + done, &piece[..piece_len])?;
            }
            return Ok(true);
        }
        let request = BufferCpyTensorRequest {
            buffer: self.handle,
            source: data_record(source, from.place(source)?, &self.attachment.numbers)?,
            destination: data_record(target, self.place(target)?, &self.attachment.numbers)?,
        };
        Ok(self.attachment.session.buffer_cpy_tensor(&request)?.copied)
    }
}

/// A length that no buffer holds stands for one that memory does not.
fn to_len(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// Whether two tensors have the same bytes in the same order, without gaps.
fn same_dense_layout(a: TensorRef<'_>, b: TensorRef<'_>) -> bool {
    let info = apir_ggml::TypeInfo::get(a.type_number());
    let dense = info.and_then(|info| info.dense_strides(a.shape()));
    (a.type_number(), a.shape(), a.strides()) == (b.type_number(), b.shape(), b.strides())
        && dense == Some(a.strides())
}

/// The buffer behind ggml's pointer, if it is one of this device: told by its type and its functions, since ggml also makes
/// buffers of other kinds with this type.
///
/// # Safety
/// `buffer` is null or valid, and stays so while the reference is used.
pub(super) unsafe fn of_device<'a>(device: &Device, buffer: *mut abi::Buffer) -> Option<&'a Buffer> {
    // SAFETY: the caller says that a pointer that is not null is valid.
    let known = unsafe { buffer.as_ref() }?;
    let ours = known.buft == device.buffer_type()
        && !known.context.is_null()
        && known.iface.free_buffer.is_some_and(|function| ptr::fn_addr_eq(function, FREE));
    // SAFETY: buffers with this function have a `Buffer` for their context.
    ours.then(|| unsafe { &*known.context.cast::<Buffer>() })
}

/// Whether this is what ggml makes for 0 bytes of this device's type: a buffer without functions.
///
/// # Safety
/// `buffer` is null or valid.
pub(super) unsafe fn is_empty_of_device(device: &Device, buffer: *mut abi::Buffer) -> bool {
    // SAFETY: the caller says that a pointer that is not null is valid.
    unsafe { buffer.as_ref() }.is_some_and(|known| known.buft == device.buffer_type() && known.size == 0)
}

const FREE: unsafe extern "C" fn(*mut abi::Buffer) = free_buffer;

const IFACE: abi::BufferIface = abi::BufferIface {
    free_buffer: Some(FREE),
    get_base: Some(get_base),
    init_tensor: None,
    memset_tensor: Some(memset_tensor),
    set_tensor: Some(set_tensor),
    get_tensor: Some(get_tensor),
    set_tensor_2d: None,
    get_tensor_2d: None,
    cpy_tensor: Some(cpy_tensor),
    clear: Some(clear),
    reset: None,
};

/// The buffer behind ggml's pointer.
///
/// # Safety
/// `buffer` has the functions above and is not freed while the reference is used.
unsafe fn of<'a>(buffer: *mut abi::Buffer) -> &'a Buffer {
    // SAFETY: the context was boxed in `allocate`.
    unsafe { &*(*buffer).context.cast::<Buffer>() }
}

unsafe extern "C" fn free_buffer(buffer: *mut abi::Buffer) {
    guard("free_buffer", (), || {
        // SAFETY: ggml frees a buffer once, and its context was boxed in `allocate`.
        drop(unsafe { Box::from_raw((*buffer).context.cast::<Buffer>()) });
    });
}

unsafe extern "C" fn get_base(buffer: *mut abi::Buffer) -> *mut c_void {
    // SAFETY: ggml calls with a buffer that has this function.
    let buffer = unsafe { of(buffer) };
    match &buffer.blob {
        Some(blob) => blob.as_ptr().cast(),
        None => ptr::without_provenance_mut(buffer.base),
    }
}

unsafe extern "C" fn memset_tensor(
    buffer: *mut abi::Buffer,
    tensor: *mut abi::Tensor,
    value: u8,
    offset: usize,
    size: usize,
) {
    guard("memset_tensor", (), || {
        // SAFETY: ggml calls with a buffer that has this function, and a valid tensor that nobody changes meanwhile.
        let (buffer, tensor) = unsafe { (of(buffer), TensorRef::from_ptr(tensor)) };
        if let Some(Err(error)) = tensor.map(|tensor| buffer.fill(tensor, value, offset, size)) {
            buffer.attachment.fail(Silent::Fill, &error);
        }
    });
}

unsafe extern "C" fn set_tensor(
    buffer: *mut abi::Buffer,
    tensor: *mut abi::Tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    guard("set_tensor", (), || {
        // SAFETY: ggml calls with a buffer that has this function, and a valid tensor that nobody changes meanwhile.
        let (buffer, tensor) = unsafe { (of(buffer), TensorRef::from_ptr(tensor)) };
        let Some(tensor) = tensor.filter(|_| size != 0) else { return };
        // SAFETY: ggml gives `size` readable bytes.
        let bytes = unsafe { slice::from_raw_parts(data.cast::<u8>(), size) };
        if let Err(error) = buffer.set(tensor, offset, bytes) {
            buffer.attachment.fail(Silent::Write, &error);
        }
    });
}

unsafe extern "C" fn get_tensor(
    buffer: *mut abi::Buffer,
    tensor: *const abi::Tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    guard("get_tensor", (), || {
        // SAFETY: ggml calls with a buffer that has this function, and a valid tensor that nobody changes meanwhile.
        let (buffer, tensor) = unsafe { (of(buffer), TensorRef::from_ptr(tensor)) };
        let Some(tensor) = tensor.filter(|_| size != 0) else { return };
        // SAFETY: ggml gives `size` writable bytes; u8 has no invalid value.
        let out = unsafe { slice::from_raw_parts_mut(data.cast::<u8>(), size) };
        if let Err(error) = buffer.get(tensor, offset, out) {
            // Mapped memory is still there when the host is lost, and may be of use, though the host may have been writing to it.
            let still_there =
                buffer.blob.is_some() && matches!(error, BufferError::Session(SessionError::Lost(_)));
            if !still_there {
                out.fill(0);
            }
            buffer.attachment.fail_read(&error);
            buffer.device.on_lost.act();
        }
    });
}

unsafe extern "C" fn cpy_tensor(
    buffer: *mut abi::Buffer,
    source: *const abi::Tensor,
    target: *mut abi::Tensor,
) -> bool {
    guard("cpy_tensor", false, || {
        // SAFETY: ggml calls with a buffer that has this function, and valid tensors that nobody changes meanwhile.
        let (buffer, source, target) =
            unsafe { (of(buffer), TensorRef::from_ptr(source), TensorRef::from_ptr(target)) };
        let (Some(source), Some(target)) = (source, target) else { return false };
        // ggml too takes the viewed tensor's buffer for that of a view.
        let home = source.view_src().unwrap_or(source).buffer();
        // SAFETY: a tensor's buffer is null or valid while the tensor is.
        let Some(from) = (unsafe { of_device(buffer.device, home) }) else { return false };
        // ggml goes over the program when this fails, and failures there are told.
        buffer.copy(from, source, target).unwrap_or(false)
    })
}

unsafe extern "C" fn clear(buffer: *mut abi::Buffer, value: u8) {
    guard("clear", (), || {
        // SAFETY: ggml calls with a buffer that has this function.
        let buffer = unsafe { of(buffer) };
        if let Err(error) = buffer.clear(value) {
            buffer.attachment.fail(Silent::Clear, &error);
        }
    });
}
