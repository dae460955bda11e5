//! ggml's backend structs as they lie in memory: what a backend and the program that loads it share.
//!
//! The sizes and offsets hold from [`crate::layout::OLDEST_VERSION`] on for 64-bit targets; each is asserted at compile time, and a test compares them with ggml's own
//! headers. Only [`BufferTypeV2`] and [`BufferTypeV3`] differ between the backend API versions, see [`crate::layout`].
//!
//! Every slot of a vtable is an `Option`: a slot ggml calls optional, or that a backend leaves out, is a null pointer.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

/// Dimensions of a tensor (`GGML_MAX_DIMS`).
pub const MAX_DIMS: usize = 4;
/// Sources of a tensor (`GGML_MAX_SRC`).
pub const MAX_SRC: usize = 10;
/// 32-bit words of operation parameters (`GGML_MAX_OP_PARAMS` / 4).
pub const OP_PARAM_WORDS: usize = 16;
/// Bytes of a tensor's name, the closing NUL included (`GGML_MAX_NAME`).
pub const MAX_NAME: usize = 64;

/// The operation number of a tensor that computes nothing (`GGML_OP_NONE`); the other numbers move between ggml releases.
pub const OP_NONE: u32 = 0;

/// Tensor flag: input of the computation.
pub const FLAG_INPUT: i32 = 1;
/// Tensor flag: output of the computation, its data must be there afterwards.
pub const FLAG_OUTPUT: i32 = 2;
/// Tensor flag: trainable parameter.
pub const FLAG_PARAM: i32 = 4;
/// Tensor flag: loss.
pub const FLAG_LOSS: i32 = 8;
/// Tensor flag: backends execute this node; since ggml of 2026-01 a node without it is skipped.
pub const FLAG_COMPUTE: i32 = 16;

/// A backend's identity: 16 bytes (`ggml_guid`).
pub type Guid = [u8; 16];

/// What a library was built with or found in the processor (`ggml_backend_feature`), 16 bytes.
#[repr(C)]
#[derive(Debug)]
pub struct Feature {
    /// Its name; null behind the last.
    pub name: *const c_char,
    /// `1` for one that is there.
    pub value: *const c_char,
}

/// A backend registration (`ggml_backend_reg`), 48 bytes.
#[repr(C)]
#[derive(Debug)]
pub struct Reg {
    /// `GGML_BACKEND_API_VERSION` the backend was built with; the loader demands its own.
    pub api_version: c_int,
    /// The registration's functions.
    pub iface: RegIface,
    /// The backend's own data.
    pub context: *mut c_void,
}

/// Functions of a registration (`ggml_backend_reg_i`), 32 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RegIface {
    /// Name of the backend, a string that stays.
    pub get_name: Option<unsafe extern "C" fn(*mut Reg) -> *const c_char>,
    /// Number of devices.
    pub get_device_count: Option<unsafe extern "C" fn(*mut Reg) -> usize>,
    /// The device of an index below the count.
    pub get_device: Option<unsafe extern "C" fn(*mut Reg, usize) -> *mut Device>,
    /// Optional: a function of the backend by its name, null when it has none of that name.
    pub get_proc_address: Option<unsafe extern "C" fn(*mut Reg, *const c_char) -> *mut c_void>,
}

/// A device (`ggml_backend_device`), 136 bytes.
#[repr(C)]
#[derive(Debug)]
pub struct Device {
    /// The device's functions.
    pub iface: DeviceIface,
    /// The registration it belongs to.
    pub reg: *mut Reg,
    /// The backend's own data.
    pub context: *mut c_void,
}

/// Functions of a device (`ggml_backend_device_i`), 120 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceIface {
    /// Short name, such as `CPU` or `CUDA0`.
    pub get_name: Option<unsafe extern "C" fn(*mut Device) -> *const c_char>,
    /// Human-readable name, often the model of the device.
    pub get_description: Option<unsafe extern "C" fn(*mut Device) -> *const c_char>,
    /// Free and total memory in bytes; both 0 say that there is none to report.
    pub get_memory: Option<unsafe extern "C" fn(*mut Device, *mut usize, *mut usize)>,
    /// Number of the device's type, see [`crate::values::DeviceType`].
    pub get_type: Option<unsafe extern "C" fn(*mut Device) -> c_int>,
    /// Fills properties that the caller zeroed.
    pub get_props: Option<unsafe extern "C" fn(*mut Device, *mut DeviceProps)>,
    /// Makes a backend (a stream of work); the string may be null.
    pub init_backend: Option<unsafe extern "C" fn(*mut Device, *const c_char) -> *mut Backend>,
    /// The device's own buffer type.
    pub get_buffer_type: Option<unsafe extern "C" fn(*mut Device) -> *mut BufferType>,
    /// Optional: buffer type in host memory with fast transfers to the device.
    pub get_host_buffer_type: Option<unsafe extern "C" fn(*mut Device) -> *mut BufferType>,
    /// Optional: a buffer over memory of the caller: pointer, bytes, bytes of the largest tensor.
    pub buffer_from_host_ptr:
        Option<unsafe extern "C" fn(*mut Device, *mut c_void, usize, usize) -> *mut Buffer>,
    /// Whether the device can compute this operation.
    pub supports_op: Option<unsafe extern "C" fn(*mut Device, *const Tensor) -> bool>,
    /// Whether the device can use tensors in buffers of this type.
    pub supports_buft: Option<unsafe extern "C" fn(*mut Device, *mut BufferType) -> bool>,
    /// Optional: whether the operation is worth moving its host weights to the device.
    pub offload_op: Option<unsafe extern "C" fn(*mut Device, *const Tensor) -> bool>,
    /// Optional: makes an event.
    pub event_new: Option<unsafe extern "C" fn(*mut Device) -> *mut Event>,
    /// Optional: frees an event.
    pub event_free: Option<unsafe extern "C" fn(*mut Device, *mut Event)>,
    /// Optional: waits for an event.
    pub event_synchronize: Option<unsafe extern "C" fn(*mut Device, *mut Event)>,
}

/// Properties of a device (`ggml_backend_dev_props`), 56 bytes.
#[repr(C)]
#[derive(Debug)]
pub struct DeviceProps {
    /// As [`DeviceIface::get_name`].
    pub name: *const c_char,
    /// As [`DeviceIface::get_description`].
    pub description: *const c_char,
    /// Free memory in bytes.
    pub memory_free: usize,
    /// Total memory in bytes.
    pub memory_total: usize,
    /// As [`DeviceIface::get_type`].
    pub type_: c_int,
    /// Address on the bus, such as `0000:c1:00.0`, or null.
    pub device_id: *const c_char,
    /// What the device can do.
    pub caps: DeviceCaps,
}

impl Default for DeviceProps {
    /// Zeroed, as ggml hands it to a device.
    fn default() -> Self {
        Self {
            name: ptr::null(),
            description: ptr::null(),
            memory_free: 0,
            memory_total: 0,
            type_: 0,
            device_id: ptr::null(),
            caps: DeviceCaps::default(),
        }
    }
}

/// Abilities of a device (`ggml_backend_dev_caps`), 5 bytes; 4 before ggml 0.19.
///
/// The fifth may be written for every version: before 0.19 it falls in the padding of [`DeviceProps`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceCaps {
    /// Asynchronous operations.
    pub async_: bool,
    /// A pinned host buffer type.
    pub host_buffer: bool,
    /// Buffers over the caller's memory.
    pub buffer_from_host_ptr: bool,
    /// Events.
    pub events: bool,
    /// Models may be loaded from a memory-mapped file (ggml 0.19 and newer).
    pub mmap_support: bool,
}

/// An event (`ggml_backend_event`), 16 bytes.
#[repr(C)]
#[derive(Debug)]
pub struct Event {
    /// The device that made it.
    pub device: *mut Device,
    /// The backend's own data.
    pub context: *mut c_void,
}

/// A buffer type of either version: only ever behind a pointer, see [`crate::layout::BufferTypeBox`] and the accessors of [`crate::Layout`].
#[repr(C)]
#[derive(Debug)]
pub struct BufferType {
    opaque: [u8; 0],
}

/// `get_name` of a buffer type.
pub type BufferTypeGetName = unsafe extern "C" fn(*mut BufferType) -> *const c_char;
/// `alloc_buffer` of a buffer type: bytes; null when there is no room.
pub type BufferTypeAllocBuffer = unsafe extern "C" fn(*mut BufferType, usize) -> *mut Buffer;
/// `alloc_buffer_n` of a buffer type: tensors and their number.
pub type BufferTypeAllocBufferN =
    unsafe extern "C" fn(*mut BufferType, *mut *mut Tensor, c_int) -> *mut Buffer;
/// `get_alignment` and `get_max_size` of a buffer type: bytes.
pub type BufferTypeGetSize = unsafe extern "C" fn(*mut BufferType) -> usize;
/// `get_alloc_size` of a buffer type: bytes a tensor takes.
pub type BufferTypeGetAllocSize = unsafe extern "C" fn(*mut BufferType, *const Tensor) -> usize;
/// `get_alloc_size_n` of a buffer type: bytes that tensors take together.
pub type BufferTypeGetAllocSizeN = unsafe extern "C" fn(*mut BufferType, *mut *mut Tensor, c_int) -> usize;
/// `is_host` of a buffer type.
pub type BufferTypeIsHost = unsafe extern "C" fn(*mut BufferType) -> bool;

/// Functions of a buffer type in API 2 (`ggml_backend_buffer_type_i`), 48 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BufferTypeIfaceV2 {
    /// Name, a string that stays.
    pub get_name: Option<BufferTypeGetName>,
    /// Allocates a buffer.
    pub alloc_buffer: Option<BufferTypeAllocBuffer>,
    /// Alignment of a tensor's address in bytes.
    pub get_alignment: Option<BufferTypeGetSize>,
    /// Optional: bytes of the largest buffer; any size when absent.
    pub get_max_size: Option<BufferTypeGetSize>,
    /// Optional: bytes a tensor takes; its extent when absent.
    pub get_alloc_size: Option<BufferTypeGetAllocSize>,
    /// Optional: whether the data lies in host memory in ggml's plain layout; false when absent.
    pub is_host: Option<BufferTypeIsHost>,
}

/// A buffer type in API 2 (`ggml_backend_buffer_type`), 64 bytes.
#[repr(C)]
#[derive(Debug)]
pub struct BufferTypeV2 {
    /// The buffer type's functions.
    pub iface: BufferTypeIfaceV2,
    /// The device it belongs to.
    pub device: *mut Device,
    /// The backend's own data.
    pub context: *mut c_void,
}

/// Functions of a buffer type in API 3 (`ggml_backend_buffer_type_i`), 64 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BufferTypeIfaceV3 {
    /// Name, a string that stays.
    pub get_name: Option<BufferTypeGetName>,
    /// Allocates a buffer.
    pub alloc_buffer: Option<BufferTypeAllocBuffer>,
    /// Optional: allocates a buffer for tensors and places them.
    pub alloc_buffer_n: Option<BufferTypeAllocBufferN>,
    /// Alignment of a tensor's address in bytes.
    pub get_alignment: Option<BufferTypeGetSize>,
    /// Optional: bytes of the largest buffer; any size when absent.
    pub get_max_size: Option<BufferTypeGetSize>,
    /// Optional: bytes a tensor takes; its extent when absent.
    pub get_alloc_size: Option<BufferTypeGetAllocSize>,
    /// Optional: bytes that tensors take together.
    pub get_alloc_size_n: Option<BufferTypeGetAllocSizeN>,
    /// Optional: whether the data lies in host memory in ggml's plain layout; false when absent.
    pub is_host: Option<BufferTypeIsHost>,
}

/// A buffer type in API 3 (`ggml_backend_buffer_type`), 80 bytes.
#[repr(C)]
#[derive(Debug)]
pub struct BufferTypeV3 {
    /// The buffer type's functions.
    pub iface: BufferTypeIfaceV3,
    /// The device it belongs to.
    pub device: *mut Device,
    /// The backend's own data.
    pub context: *mut c_void,
}

/// A buffer (`ggml_backend_buffer`), 120 bytes; made by ggml's `ggml_backend_buffer_init` alone, since ggml frees the struct.
#[repr(C)]
#[derive(Debug)]
pub struct Buffer {
    /// The buffer's functions.
    pub iface: BufferIface,
    /// The type it was allocated from.
    pub buft: *mut BufferType,
    /// The backend's own data.
    pub context: *mut c_void,
    /// Bytes.
    pub size: usize,
    /// What the program keeps in it: 0 anything, 1 weights, 2 intermediate results.
    pub usage: c_int,
}

/// Functions of a buffer (`ggml_backend_buffer_i`), 88 bytes. Offsets are bytes from the start of the tensor's data.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BufferIface {
    /// Optional: frees what the buffer holds, not the struct.
    pub free_buffer: Option<unsafe extern "C" fn(*mut Buffer)>,
    /// Address of the first byte, in the device's terms.
    pub get_base: Option<unsafe extern "C" fn(*mut Buffer) -> *mut c_void>,
    /// Optional: prepares a tensor that was placed in the buffer; the number of a [`crate::values::Status`].
    pub init_tensor: Option<unsafe extern "C" fn(*mut Buffer, *mut Tensor) -> c_int>,
    /// Fills bytes of a tensor: value, offset, size.
    pub memset_tensor: Option<unsafe extern "C" fn(*mut Buffer, *mut Tensor, u8, usize, usize)>,
    /// Writes bytes of a tensor: data, offset, size.
    pub set_tensor: Option<unsafe extern "C" fn(*mut Buffer, *mut Tensor, *const c_void, usize, usize)>,
    /// Reads bytes of a tensor: data, offset, size.
    pub get_tensor: Option<unsafe extern "C" fn(*mut Buffer, *const Tensor, *mut c_void, usize, usize)>,
    /// Optional: writes pieces: data, offset, size, pieces, stride in the tensor, stride in the data.
    #[allow(clippy::type_complexity)]
    pub set_tensor_2d: Option<
        unsafe extern "C" fn(*mut Buffer, *mut Tensor, *const c_void, usize, usize, usize, usize, usize),
    >,
    /// Optional: reads pieces: data, offset, size, pieces, stride in the tensor, stride in the data.
    #[allow(clippy::type_complexity)]
    pub get_tensor_2d: Option<
        unsafe extern "C" fn(*mut Buffer, *const Tensor, *mut c_void, usize, usize, usize, usize, usize),
    >,
    /// Optional: copies a tensor of any buffer into one of this buffer; false when it cannot.
    pub cpy_tensor: Option<unsafe extern "C" fn(*mut Buffer, *const Tensor, *mut Tensor) -> bool>,
    /// Fills the whole buffer with a value.
    pub clear: Option<unsafe extern "C" fn(*mut Buffer, u8)>,
    /// Optional: forgets what `init_tensor` set up.
    pub reset: Option<unsafe extern "C" fn(*mut Buffer)>,
}

/// A backend, one stream of work on a device (`ggml_backend`), 152 bytes. Its `free` frees the struct.
#[repr(C)]
#[derive(Debug)]
pub struct Backend {
    /// Identity of the implementation.
    pub guid: *mut Guid,
    /// The backend's functions.
    pub iface: BackendIface,
    /// The device it runs on.
    pub device: *mut Device,
    /// The implementation's own data.
    pub context: *mut c_void,
}

/// `set_tensor_async` of a backend: data, offset, size.
pub type SetTensorAsync = unsafe extern "C" fn(*mut Backend, *mut Tensor, *const c_void, usize, usize);
/// `get_tensor_async` of a backend: data, offset, size.
pub type GetTensorAsync = unsafe extern "C" fn(*mut Backend, *const Tensor, *mut c_void, usize, usize);
/// `set_tensor_2d_async` of a backend: data, offset, size, pieces, stride in the tensor, stride in the data.
pub type SetTensor2dAsync =
    unsafe extern "C" fn(*mut Backend, *mut Tensor, *const c_void, usize, usize, usize, usize, usize);
/// `get_tensor_2d_async` of a backend: data, offset, size, pieces, stride in the tensor, stride in the data.
pub type GetTensor2dAsync =
    unsafe extern "C" fn(*mut Backend, *const Tensor, *mut c_void, usize, usize, usize, usize, usize);
/// `graph_optimize` of a backend. The last argument came between ggml 0.21 and 0.25; older callers leave it undefined, so a callee
/// looks at it only when [`crate::Layout::graph_optimize_has_params`] says it is there.
pub type GraphOptimize = unsafe extern "C" fn(*mut Backend, *mut CGraph, *mut GraphOptimizeParams);

/// Functions of a backend (`ggml_backend_i`), 128 bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct BackendIface {
    /// Name, a string that stays.
    pub get_name: Option<unsafe extern "C" fn(*mut Backend) -> *const c_char>,
    /// Frees the backend, the struct included.
    pub free: Option<unsafe extern "C" fn(*mut Backend)>,
    /// Optional: writes bytes of a tensor without waiting.
    pub set_tensor_async: Option<SetTensorAsync>,
    /// Optional: reads bytes of a tensor without waiting.
    pub get_tensor_async: Option<GetTensorAsync>,
    /// Optional: writes pieces of a tensor without waiting.
    pub set_tensor_2d_async: Option<SetTensor2dAsync>,
    /// Optional: reads pieces of a tensor without waiting.
    pub get_tensor_2d_async: Option<GetTensor2dAsync>,
    /// Optional: copies between backends (source, destination) without waiting; false when it cannot.
    pub cpy_tensor_async:
        Option<unsafe extern "C" fn(*mut Backend, *mut Backend, *const Tensor, *mut Tensor) -> bool>,
    /// Optional: waits for all work; needed by a backend that has any asynchronous function.
    pub synchronize: Option<unsafe extern "C" fn(*mut Backend)>,
    /// Optional: makes a plan of a graph.
    pub graph_plan_create: Option<unsafe extern "C" fn(*mut Backend, *const CGraph) -> *mut c_void>,
    /// Optional: frees a plan.
    pub graph_plan_free: Option<unsafe extern "C" fn(*mut Backend, *mut c_void)>,
    /// Optional: changes a plan to a new graph.
    pub graph_plan_update: Option<unsafe extern "C" fn(*mut Backend, *mut c_void, *const CGraph)>,
    /// Optional: computes a plan; the number of a [`crate::values::Status`].
    pub graph_plan_compute: Option<unsafe extern "C" fn(*mut Backend, *mut c_void) -> c_int>,
    /// Computes a graph, without waiting when the backend is asynchronous; the number of a [`crate::values::Status`].
    pub graph_compute: Option<unsafe extern "C" fn(*mut Backend, *mut CGraph) -> c_int>,
    /// Optional: records an event on this stream.
    pub event_record: Option<unsafe extern "C" fn(*mut Backend, *mut Event)>,
    /// Optional: makes this stream wait for an event.
    pub event_wait: Option<unsafe extern "C" fn(*mut Backend, *mut Event)>,
    /// Optional: reorders a graph before its tensors are placed.
    pub graph_optimize: Option<GraphOptimize>,
}

/// What `graph_optimize` may call (`ggml_backend_graph_optimize_params`), 16 bytes.
#[repr(C)]
#[derive(Debug)]
pub struct GraphOptimizeParams {
    /// Keeps a tensor allocated at least until a node has been computed: user data, tensor, node.
    pub add_alloc_dep: Option<unsafe extern "C" fn(*mut c_void, *mut Tensor, *mut Tensor)>,
    /// First argument of `add_alloc_dep`.
    pub user_data: *mut c_void,
}

/// A tensor (`ggml_tensor`), 336 bytes. C's `size_t` fields are `u64` here: every supported target has 64-bit pointers.
#[repr(C)]
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Number of the element type, see [`crate::types`].
    pub type_: u32,
    /// The buffer its data lies in, null while it has none.
    pub buffer: *mut Buffer,
    /// Elements in each dimension.
    pub ne: [i64; MAX_DIMS],
    /// Bytes between elements (blocks for dimension 0) in each dimension.
    pub nb: [u64; MAX_DIMS],
    /// Number of the operation that makes it, [`OP_NONE`] for none.
    pub op: u32,
    /// Parameters of the operation.
    pub op_params: [i32; OP_PARAM_WORDS],
    /// `FLAG_*` bits.
    pub flags: i32,
    /// Operands of the operation; null for none.
    pub src: [*mut Tensor; MAX_SRC],
    /// The tensor it is a view of, or null.
    pub view_src: *mut Tensor,
    /// Bytes from the data of `view_src` to its own.
    pub view_offs: u64,
    /// Its first byte, in the terms of its buffer's device.
    pub data: *mut c_void,
    /// Its name, closed by a NUL.
    pub name: [u8; MAX_NAME],
    /// Data of the backend.
    pub extra: *mut c_void,
    /// Keeps the size a multiple of 16.
    pub padding: [u8; 8],
}

impl Default for Tensor {
    /// Zeroed: an F32 tensor of no elements that computes nothing.
    fn default() -> Self {
        Self {
            type_: 0,
            buffer: ptr::null_mut(),
            ne: [0; MAX_DIMS],
            nb: [0; MAX_DIMS],
            op: OP_NONE,
            op_params: [0; OP_PARAM_WORDS],
            flags: 0,
            src: [ptr::null_mut(); MAX_SRC],
            view_src: ptr::null_mut(),
            view_offs: 0,
            data: ptr::null_mut(),
            name: [0; MAX_NAME],
            extra: ptr::null_mut(),
            padding: [0; 8],
        }
    }
}

/// The set of tensors a graph has met (`ggml_hash_set`), 24 bytes: open addressing by `(address >> 4) % size`, step 1.
#[repr(C)]
#[derive(Debug)]
pub struct HashSet {
    /// Slots, a prime.
    pub size: usize,
    /// One bit for each slot in use.
    pub used: *mut u32,
    /// The tensor in each used slot.
    pub keys: *mut *mut Tensor,
}

/// A graph (`ggml_cgraph`), 96 bytes.
#[repr(C)]
#[derive(Debug)]
pub struct CGraph {
    /// Room in `nodes` and in `leafs`.
    pub size: c_int,
    /// Entries of `nodes`.
    pub n_nodes: c_int,
    /// Entries of `leafs`.
    pub n_leafs: c_int,
    /// What to compute, in order.
    pub nodes: *mut *mut Tensor,
    /// Gradients, null when there are none.
    pub grads: *mut *mut Tensor,
    /// Sums of gradients, null when there are none.
    pub grad_accs: *mut *mut Tensor,
    /// Tensors that are not computed.
    pub leafs: *mut *mut Tensor,
    /// For each slot of the hash set, how often that tensor is a source.
    pub use_counts: *mut i32,
    /// All tensors of the graph.
    pub visited_hash_set: HashSet,
    /// Order in which sources were visited.
    pub order: c_int,
    /// Equal and not 0: the same graph. Present only when [`crate::Layout::graph_has_uid`] says so.
    pub uid: u64,
}

/// Sizes and offsets ggml relies on.
const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<usize>() == 8, "ggml's structs are known for 64-bit targets only");
    assert!(size_of::<RegIface>() == 32 && size_of::<Reg>() == 48);
    assert!(offset_of!(Reg, iface) == 8 && offset_of!(Reg, context) == 40);
    assert!(size_of::<DeviceIface>() == 120 && size_of::<Device>() == 136);
    assert!(offset_of!(Device, reg) == 120 && offset_of!(Device, context) == 128);
    assert!(size_of::<DeviceCaps>() == 5 && size_of::<DeviceProps>() == 56);
    assert!(offset_of!(DeviceProps, type_) == 32 && offset_of!(DeviceProps, caps) == 48);
    assert!(size_of::<Event>() == 16);
    assert!(size_of::<BufferTypeIfaceV2>() == 48 && size_of::<BufferTypeV2>() == 64);
    assert!(offset_of!(BufferTypeV2, device) == 48 && offset_of!(BufferTypeV2, context) == 56);
    assert!(size_of::<BufferTypeIfaceV3>() == 64 && size_of::<BufferTypeV3>() == 80);
    assert!(offset_of!(BufferTypeV3, device) == 64 && offset_of!(BufferTypeV3, context) == 72);
    assert!(size_of::<BufferIface>() == 88 && size_of::<Buffer>() == 120);
    assert!(offset_of!(Buffer, size) == 104 && offset_of!(Buffer, usage) == 112);
    assert!(size_of::<BackendIface>() == 128 && size_of::<Backend>() == 152);
    assert!(offset_of!(BackendIface, graph_compute) == 96);
    assert!(offset_of!(Backend, device) == 136 && offset_of!(Backend, context) == 144);
    assert!(size_of::<GraphOptimizeParams>() == 16);
    assert!(size_of::<Tensor>() == 336);
    assert!(offset_of!(Tensor, op_params) == 84 && offset_of!(Tensor, src) == 152);
    assert!(offset_of!(Tensor, data) == 248 && offset_of!(Tensor, extra) == 320);
    assert!(size_of::<HashSet>() == 24 && size_of::<CGraph>() == 96);
    assert!(offset_of!(CGraph, visited_hash_set) == 56 && offset_of!(CGraph, uid) == 88);
};
