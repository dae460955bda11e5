//! The device: its facts, what it supports, and what went wrong on it.

use super::attachment::Attachment;
use super::buffer::BufferMaker;
use super::lost::OnLost;
use super::ops::{OpClass, Ops};
use super::{buffer, buffer_type, compute, guard, log};
use crate::link::Process;
use crate::numbers::OwnNumbers;
use crate::record::{Place, RecordError, content_key, fits_records, inline, name};
use crate::session::{Session, SessionError};
use apir_ggml::layout::BufferTypeBox;
use apir_ggml::{DeviceType, Layout, TensorRef, TypeInfo, abi};
use apir_protocol::messages::{BufferTypeGetAllocSizeRequest, DeviceSupportsOpRequest};
use apir_protocol::socket::MAX_BLOB_SIZE;
use std::convert::Infallible;
use std::ffi::{CString, c_char, c_int};
use std::fmt;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

/// Put before the host's names, so that a program tells its own devices from the host's.
const PREFIX: &str = "[virtgpu] ";
/// Rows of quantized tensors that fill this many elements are never padded.
const ROW_PADDING: i64 = 512;

/// The device. It lives as long as the process, as ggml demands.
///
/// It is the library's, and forks inherit it; its session, and the backends and buffers made with that, are one process's. A fork that asks the device for
/// anything gets a session of its own.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) layout: Layout,
    pub(super) maker: BufferMaker,
    pub(super) name: CString,
    pub(super) buffer_type_name: CString,
    pub(super) on_lost: OnLost,
    description: CString,
    kind: DeviceType,
    ops: Ops,
    own: OwnNumbers,
    opener: Opener,
    /// The last process's that used the device; never null and never freed.
    attachment: AtomicPtr<Attachment>,
    /// The process that could not open a session.
    refused: AtomicU64,
    pointers: OnceLock<Pointers>,
}

/// Opens a session for the process that calls.
pub(super) struct Opener(Box<dyn Fn() -> Result<Session, SessionError> + Send + Sync>);

impl Opener {
    pub(super) fn new(open: impl Fn() -> Result<Session, SessionError> + Send + Sync + 'static) -> Self {
        Self(Box::new(open))
    }
}

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Opener")
    }
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
    /// Makes the device for good, with the session that `opener` opens.
    pub(super) fn make(
        opener: Opener,
        layout: Layout,
        maker: BufferMaker,
        own: OwnNumbers,
        on_lost: OnLost,
        registry: *mut abi::Reg,
    ) -> Result<&'static Self, SessionError> {
        let attachment = Attachment::new((opener.0)()?, &own)?;
        let host = &attachment.host;
        let device: &'static Self = Box::leak(Box::new(Self {
            name: text(&format!("{PREFIX}{}", host.name)),
            buffer_type_name: text(&format!("{PREFIX}{}", host.buffer_type_name)),
            description: text(&host.description),
            kind: host.kind,
            layout,
            maker,
            on_lost,
            ops: Ops::new(&own.names.ops),
            own,
            opener,
            attachment: AtomicPtr::new(Box::into_raw(Box::new(attachment))),
            refused: AtomicU64::new(0),
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

    /// The session of this process, opened now if this process is a fork that has none. Where it cannot be opened, it is one that fails every call.
    ///
    /// No lock is taken: a fork may have copied it while it was held.
    pub(super) fn attached(&self) -> &'static Attachment {
        let known = self.last_attached();
        let here = Process::current().generation();
        if known.session.is_ours() || self.refused.load(Ordering::Relaxed) == here {
            return known;
        }
        match (self.opener.0)().and_then(|session| Attachment::new(session, &self.own)) {
            Ok(fresh) => self.attach(known, fresh),
            Err(error) => {
                self.refused.store(here, Ordering::Relaxed);
                log::error(format_args!("no session for this fork of a process that has one: {error}"));
                known
            }
        }
    }

    /// The session that was opened last, by this process or by the one that it is a fork of.
    pub(super) fn last_attached(&self) -> &'static Attachment {
        // SAFETY: never null, and never freed.
        unsafe { &*self.attachment.load(Ordering::Acquire) }
    }

    /// Puts `fresh` in the place of `known`, unless another thread was quicker.
    fn attach(&self, known: &'static Attachment, fresh: Attachment) -> &'static Attachment {
        let (known, fresh) = (ptr::from_ref(known).cast_mut(), Box::into_raw(Box::new(fresh)));
        if self.attachment.compare_exchange(known, fresh, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: boxed above, and nobody else got the pointer.
            drop(unsafe { Box::from_raw(fresh) });
        } else {
            log::debug(format_args!("this process is a fork; it has a session of its own now"));
        }
        self.last_attached()
    }

    /// Where the data of a tensor lies, for graphs that are sent on this session.
    pub(super) fn locate(
        &self,
        attachment: &Attachment,
        tensor: TensorRef<'_>,
    ) -> Result<Place, RecordError> {
        let own = tensor.buffer();
        let pointer =
            if own.is_null() { tensor.view_src().map_or(ptr::null_mut(), TensorRef::buffer) } else { own };
        // SAFETY: a tensor's buffer is null or valid while the tensor is.
        if let Some(buffer) = unsafe { buffer::of_device(self, pointer) } {
            return buffer.place_on(attachment, tensor);
        }
        // SAFETY: as above.
        let empty = unsafe { buffer::is_empty_of_device(self, pointer) };
        match () {
            () if empty || (pointer.is_null() && tensor.data().is_null()) => Ok(Place::default()),
            () if pointer.is_null() => Err(RecordError::Homeless { name: name(tensor) }),
            () => Err(RecordError::Foreign { name: name(tensor) }),
        }
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
        let attachment = self.attached();
        if !attachment.session.is_ours() {
            return true;
        }
        let answer = attachment.supported.get_or_ask(content_key(node), || {
            let Ok(node) = inline(node, &attachment.numbers) else { return Ok(false) };
            match attachment.session.device_supports_op(&DeviceSupportsOpRequest { node }) {
                Ok(reply) => Ok(reply.supported),
                // A node that the host will not look at is one it will not compute.
                Err(SessionError::Refused { .. }) => Ok(false),
                Err(error) => Err(error),
            }
        });
        answer.unwrap_or_else(|error| {
            attachment.tell("cannot ask whether an operation is supported", &error);
            // ggml aborts over a "no" for tensors that lie here; a computation on a lost host fails instead.
            attachment.session.is_lost()
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
        let attachment = self.attached();
        if !attachment.session.is_ours() {
            return to_size(local);
        }
        let answer = attachment.alloc_sizes.get_or_ask(content_key(tensor), || {
            let buffer_type = attachment.host.buffer_type;
            // What the host does not have is never computed there.
            let Ok(tensor) = inline(tensor, &attachment.numbers) else { return Ok(local) };
            let request = BufferTypeGetAllocSizeRequest { buffer_type, tensor };
            // A failure is remembered: ggml aborts over a tensor that needs more than it did when its buffer was made.
            Ok::<_, Infallible>(match attachment.session.buffer_type_get_alloc_size(&request) {
                Ok(reply) => reply.size,
                Err(error) => {
                    attachment.tell("cannot ask for the size of a tensor", &error);
                    local
                }
            })
        });
        let Ok(told) = answer;
        // ggml adds sizes up without a look at overflows.
        to_size(told.min(MAX_BLOB_SIZE).max(local))
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
        let (now_free, all) = unsafe { of(device) }.attached().memory();
        // SAFETY: ggml gives two places to write to.
        unsafe {
            free.write(to_size(now_free));
            total.write(to_size(all));
        }
    });
}

unsafe extern "C" fn get_type(device: *mut abi::Device) -> c_int {
    // SAFETY: ggml calls with a device that has this function.
    unsafe { of(device) }.kind.number()
}

unsafe extern "C" fn get_props(device: *mut abi::Device, props: *mut abi::DeviceProps) {
    guard("get_props", (), || {
        // SAFETY: ggml calls with a device that has this function.
        let known = unsafe { of(device) };
        let attachment = known.attached();
        let (free, total) = attachment.memory();
        let filled = abi::DeviceProps {
            name: known.name.as_ptr(),
            description: known.description.as_ptr(),
            memory_free: to_size(free),
            memory_total: to_size(total),
            type_: known.kind.number(),
            device_id: ptr::null(),
            caps: abi::DeviceCaps {
                async_: false,
                host_buffer: false,
                buffer_from_host_ptr: false,
                events: false,
                mmap_support: attachment.host.mmap_support,
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
