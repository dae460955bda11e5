//! The device: its facts, what it supports, and what went wrong on it.

use super::buffer::BufferMaker;
use super::ops::{OpClass, Ops};
use super::{buffer, buffer_type, compute, guard, log};
use crate::cache::Cache;
use crate::host_device::HostDevice;
use crate::record::{Place, RecordError, content_key, fits_records, inline, name};
use crate::session::{Session, SessionError};
use apir_ggml::layout::BufferTypeBox;
use apir_ggml::{Layout, TensorRef, TypeInfo, abi};
use apir_protocol::messages::{
    BufferTypeGetAllocSizeRequest, DeviceGetMemoryRequest, DeviceSupportsOpRequest,
};
use std::ffi::{CString, c_char, c_int};
use std::fmt::Display;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Put before the host's names, so that a program tells its own devices from the host's.
const PREFIX: &str = "[virtgpu] ";
/// Rows of quantized tensors that fill this many elements are never padded.
const ROW_PADDING: i64 = 512;

/// The device. It lives as long as the process, as ggml demands.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) session: Session,
    pub(super) host: HostDevice,
    pub(super) layout: Layout,
    pub(super) maker: BufferMaker,
    pub(super) name: CString,
    pub(super) buffer_type_name: CString,
    description: CString,
    ops: Ops,
    supported: Cache<bool>,
    alloc_sizes: Cache<u64>,
    memory: Mutex<(u64, u64)>,
    failed: AtomicBool,
    told_lost: AtomicBool,
    pointers: OnceLock<Pointers>,
}

/// What ggml knows the device and its buffer type by.
#[derive(Debug, Clone, Copy)]
struct Pointers {
    device: *mut abi::Device,
    buffer_type: *mut abi::BufferType,
}

// SAFETY: the structs are made once, never changed and never freed.
unsafe impl Send for Pointers {}
// SAFETY: as above.
unsafe impl Sync for Pointers {}

impl Device {
    /// Makes the device of an open session, for good.
    pub(super) fn make(
        session: Session,
        layout: Layout,
        maker: BufferMaker,
        ops: Ops,
        registry: *mut abi::Reg,
    ) -> Result<&'static Self, SessionError> {
        let host = HostDevice::ask(&session)?;
        let device: &'static Self = Box::leak(Box::new(Self {
            name: text(&format!("{PREFIX}{}", host.name)),
            buffer_type_name: text(&format!("{PREFIX}{}", host.buffer_type_name)),
            description: text(&host.description),
            memory: Mutex::new(host.memory),
            session,
            host,
            layout,
            maker,
            ops,
            supported: Cache::new(),
            alloc_sizes: Cache::new(),
            failed: AtomicBool::new(false),
            told_lost: AtomicBool::new(false),
            pointers: OnceLock::new(),
        }));
        let context = ptr::from_ref(device).cast_mut().cast();
        let known = Box::leak(Box::new(abi::Device { iface: IFACE, reg: registry, context }));
        let known: *mut abi::Device = known;
        let iface = buffer_type::iface(&layout);
        let buffer_type = Box::leak(Box::new(BufferTypeBox::new(&layout, iface, known, context)));
        let _ = device.pointers.set(Pointers { device: known, buffer_type: buffer_type.as_ptr() });
        Ok(device)
    }

    /// The pointer ggml knows the device by.
    pub(super) fn as_ptr(&self) -> *mut abi::Device {
        self.pointers.get().map_or(ptr::null_mut(), |pointers| pointers.device)
    }

    /// The pointer ggml knows its buffer type by.
    pub(super) fn buffer_type(&self) -> *mut abi::BufferType {
        self.pointers.get().map_or(ptr::null_mut(), |pointers| pointers.buffer_type)
    }

    /// Its name, as the counters' lines have it.
    pub(super) fn display_name(&self) -> String {
        self.name.to_string_lossy().into_owned()
    }

    /// Tells of a failure that ggml has no way to hear of; the next computation then fails.
    pub(super) fn fail(&self, what: &str, error: &dyn Display) {
        self.failed.store(true, Ordering::Relaxed);
        self.tell(what, error);
    }

    /// Logs a failure; a lost host only once.
    pub(super) fn tell(&self, what: &str, error: &dyn Display) {
        if !(self.session.is_lost() && self.told_lost.swap(true, Ordering::Relaxed)) {
            log::error(format_args!("{what}: {error}"));
        }
    }

    /// Whether a transfer has failed since the last time this was asked.
    pub(super) fn take_failed(&self) -> bool {
        self.failed.swap(false, Ordering::Relaxed)
    }

    /// Where the data of a tensor lies.
    pub(super) fn locate(&self, tensor: TensorRef<'_>) -> Result<Place, RecordError> {
        let own = tensor.buffer();
        let pointer =
            if own.is_null() { tensor.view_src().map_or(ptr::null_mut(), TensorRef::buffer) } else { own };
        // SAFETY: a tensor's buffer is null or valid while the tensor is.
        if let Some(buffer) = unsafe { buffer::of_device(self, pointer) } {
            return buffer.place(tensor);
        }
        // SAFETY: as above.
        let empty = unsafe { buffer::is_empty_of_device(self, pointer) };
        match () {
            () if empty || (pointer.is_null() && tensor.data().is_null()) => Ok(Place::default()),
            () if pointer.is_null() => Err(RecordError::Homeless { name: name(tensor) }),
            () => Err(RecordError::Foreign { name: name(tensor) }),
        }
    }

    /// Free and total memory in bytes, as the host says now or as it last said.
    fn memory(&self) -> (u64, u64) {
        let answer = self.session.device_get_memory(&DeviceGetMemoryRequest {});
        let mut last = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(now) = answer {
            *last = (now.free, now.total);
        }
        *last
    }

    /// Whether a node moves no data.
    pub(super) fn is_view(&self, node: TensorRef<'_>) -> bool {
        self.ops.class(node.op()) == OpClass::NoOp
    }

    /// Whether the host can compute a node.
    fn supports(&self, node: TensorRef<'_>) -> bool {
        match self.ops.class(node.op()) {
            OpClass::NoOp => return true,
            OpClass::Custom => return false,
            OpClass::Padded | OpClass::Plain => {}
        }
        if !fits_records(node) {
            return false;
        }
        let answer = self.supported.get_or_ask(content_key(node), || {
            match self.session.device_supports_op(&DeviceSupportsOpRequest { node: inline(node) }) {
                Ok(reply) => Ok(reply.supported),
                // A node that the host will not look at is one it will not compute.
                Err(SessionError::Refused { .. }) => Ok(false),
                Err(error) => Err(error),
            }
        });
        answer.unwrap_or_else(|error| {
            self.tell("cannot ask whether an operation is supported", &error);
            // ggml aborts over a "no" for tensors that lie here; a computation on a lost host fails instead.
            self.session.is_lost()
        })
    }

    /// Bytes that a tensor takes in a buffer.
    pub(super) fn alloc_size(&self, tensor: TensorRef<'_>) -> usize {
        let extent = tensor.nbytes();
        let known_type = TypeInfo::get(tensor.type_number());
        let odd_row = known_type.is_none_or(TypeInfo::is_block) && tensor.shape()[0] % ROW_PADDING != 0;
        let local = extent.unwrap_or_else(|_| spanned(tensor));
        if extent.is_ok() && !odd_row && self.ops.class(tensor.op()) != OpClass::Padded {
            return to_size(local);
        }
        let answer = self.alloc_sizes.get_or_ask(content_key(tensor), || {
            let buffer_type = self.host.buffer_type;
            let request = BufferTypeGetAllocSizeRequest { buffer_type, tensor: inline(tensor) };
            self.session.buffer_type_get_alloc_size(&request).map(|reply| reply.size)
        });
        match answer {
            Ok(told) => to_size(told.max(local)),
            Err(error) => {
                self.tell("cannot ask for the size of a tensor", &error);
                to_size(local)
            }
        }
    }
}

/// An upper bound of the bytes that a tensor of an unknown type spans.
fn spanned(tensor: TensorRef<'_>) -> u64 {
    let sizes = tensor.shape().into_iter().zip(tensor.strides());
    sizes.map(|(ne, nb)| u64::try_from(ne).unwrap_or(0).saturating_mul(nb)).max().unwrap_or(0)
}

fn to_size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// A host's text for ggml; a text with a NUL cannot come from a host, whose texts end at the first.
fn text(text: &str) -> CString {
    CString::new(text).unwrap_or_default()
}

const IFACE: abi::DeviceIface = abi::DeviceIface {
    get_name: Some(get_name),
    get_description: Some(get_description),
    get_memory: Some(get_memory),
    get_type: Some(get_type),
    get_props: Some(get_props),
    init_backend: Some(init_backend),
    get_buffer_type: Some(get_buffer_type),
    get_host_buffer_type: None,
    buffer_from_host_ptr: None,
    supports_op: Some(supports_op),
    supports_buft: Some(supports_buft),
    offload_op: None,
    event_new: None,
    event_free: None,
    event_synchronize: None,
};

/// The device behind ggml's pointer.
///
/// # Safety
/// `device` was made by [`Device::make`].
unsafe fn of(device: *mut abi::Device) -> &'static Device {
    // SAFETY: the context was set to a device that is never freed.
    unsafe { &*(*device).context.cast::<Device>() }
}

unsafe extern "C" fn get_name(device: *mut abi::Device) -> *const c_char {
    // SAFETY: ggml calls with a device that has this function.
    unsafe { of(device) }.name.as_ptr()
}

unsafe extern "C" fn get_description(device: *mut abi::Device) -> *const c_char {
    // SAFETY: ggml calls with a device that has this function.
    unsafe { of(device) }.description.as_ptr()
}

unsafe extern "C" fn get_memory(device: *mut abi::Device, free: *mut usize, total: *mut usize) {
    guard("get_memory", (), || {
        // SAFETY: ggml calls with a device that has this function.
        let (now_free, all) = unsafe { of(device) }.memory();
        // SAFETY: ggml gives two places to write to.
        unsafe {
            free.write(to_size(now_free));
            total.write(to_size(all));
        }
    });
}

unsafe extern "C" fn get_type(device: *mut abi::Device) -> c_int {
    // SAFETY: ggml calls with a device that has this function.
    unsafe { of(device) }.host.kind.number()
}

unsafe extern "C" fn get_props(device: *mut abi::Device, props: *mut abi::DeviceProps) {
    guard("get_props", (), || {
        // SAFETY: ggml calls with a device that has this function.
        let known = unsafe { of(device) };
        let (free, total) = known.memory();
        let filled = abi::DeviceProps {
            name: known.name.as_ptr(),
            description: known.description.as_ptr(),
            memory_free: to_size(free),
            memory_total: to_size(total),
            type_: known.host.kind.number(),
            device_id: ptr::null(),
            caps: abi::DeviceCaps {
                async_: false,
                host_buffer: false,
                buffer_from_host_ptr: false,
                events: false,
                mmap_support: known.host.mmap_support,
            },
        };
        // SAFETY: ggml gives a struct of its own to fill; its size is the same in every supported version.
        unsafe { props.write(filled) };
    });
}

unsafe extern "C" fn init_backend(device: *mut abi::Device, _parameters: *const c_char) -> *mut abi::Backend {
    guard("init_backend", ptr::null_mut(), || {
        // SAFETY: ggml calls with a device that has this function.
        compute::make(unsafe { of(device) })
    })
}

unsafe extern "C" fn get_buffer_type(device: *mut abi::Device) -> *mut abi::BufferType {
    // SAFETY: ggml calls with a device that has this function.
    unsafe { of(device) }.buffer_type()
}

unsafe extern "C" fn supports_op(device: *mut abi::Device, node: *const abi::Tensor) -> bool {
    guard("supports_op", false, || {
        // SAFETY: ggml calls with a device that has this function, and a valid tensor that nobody changes meanwhile.
        let (device, node) = unsafe { (of(device), TensorRef::from_ptr(node)) };
        node.is_some_and(|node| device.supports(node))
    })
}

unsafe extern "C" fn supports_buft(device: *mut abi::Device, buffer_type: *mut abi::BufferType) -> bool {
    // SAFETY: ggml calls with a device that has this function.
    !buffer_type.is_null() && unsafe { of(device) }.buffer_type() == buffer_type
}
