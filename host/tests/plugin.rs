//! The plugin under a renderer of the test's own, driving the real libggml-cpu.
//!
//! `APIR_LLAMA_DIR` names the folder that has libggml-cpu.so; `cargo xtask test` sets it.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test's helpers fail the test")]

use apir_protocol::codec::{Decoder, Encoder};
use apir_protocol::command::Command;
use apir_protocol::graph::{encode_graph, graph_size};
use apir_protocol::handle::{BufferHandle, BufferTypeHandle};
use apir_protocol::messages::*;
use apir_protocol::tensor::{InlineTensor, RawTensor, TensorRecord};
use apir_protocol::{Request, Wire};
use ggml_virtgpu_backend::plugin::{
    Callbacks, apir_backend_deinit, apir_backend_dispatcher, apir_backend_initialize,
};
use memmap2::MmapMut;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// Operation numbers of ggml 0.26, whose library the tests load.
const OP_ADD: u32 = 2;
const OP_SQR: u32 = 9;
const OP_CPY: u32 = 34;
const OP_VIEW: u32 = 37;
const OP_MAP_CUSTOM1: u32 = 92;
const OP_CUSTOM: u32 = 95;
const TYPE_F32: u32 = 0;
const FLAG_COMPUTE: i32 = 16;

#[derive(Default)]
struct World {
    blobs: HashMap<(u32, u32), MmapMut>,
    config: HashMap<(u32, String), CString>,
}

static WORLD: LazyLock<Mutex<World>> = LazyLock::new(Mutex::default);

fn world() -> MutexGuard<'static, World> {
    // One test's failure is not another's.
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

unsafe extern "C" fn get_config(ctx_id: u32, key: *const c_char) -> *const c_char {
    // SAFETY: the plugin gives a C string.
    let key = unsafe { CStr::from_ptr(key) }.to_str().unwrap().to_owned();
    world().config.get(&(ctx_id, key)).map_or(std::ptr::null(), |value| value.as_ptr())
}

unsafe extern "C" fn get_shmem_ptr(ctx_id: u32, res_id: u32) -> *mut c_void {
    let mut all = world();
    all.blobs.get_mut(&(ctx_id, res_id)).map_or(std::ptr::null_mut(), |blob| blob.as_mut_ptr().cast())
}

static CALLBACKS: Callbacks = Callbacks { get_config: Some(get_config), get_shmem_ptr: Some(get_shmem_ptr) };

fn shared(len: usize) -> MmapMut {
    let fd = nix::sys::memfd::memfd_create(c"apir-shmem", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
    nix::unistd::ftruncate(&fd, len as i64).unwrap();
    // SAFETY: the file is anonymous and nobody shortens it.
    unsafe { MmapMut::map_mut(&fd) }.unwrap()
}

fn llama_dir() -> String {
    std::env::var("APIR_LLAMA_DIR").expect("APIR_LLAMA_DIR must name the folder of libggml-cpu.so")
}

/// A guest of the plugin.
struct Guest {
    ctx_id: u32,
    next_res: u32,
}

impl Guest {
    /// A context that has its keys and has not started.
    fn configured(library: &str, registration: Option<&str>) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let ctx_id = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut all = world();
        let mut set = |key: &str, value: &str| {
            all.config.insert((ctx_id, key.to_owned()), CString::new(value).unwrap());
        };
        set("ggml.library.path", library);
        if let Some(registration) = registration {
            set("ggml.library.reg", registration);
        }
        Self { ctx_id, next_res: 1 }
    }

    fn initialize(&self) -> u32 {
        // SAFETY: the table is static.
        unsafe { apir_backend_initialize(self.ctx_id, &CALLBACKS) }
    }

    fn start() -> Self {
        let guest = Self::configured(&format!("{}/libggml-cpu.so", llama_dir()), None);
        assert_eq!(guest.initialize(), 6);
        guest
    }

    fn blob(&mut self, bytes: &[u8]) -> u32 {
        let mut memory = shared(bytes.len().max(1).next_multiple_of(4096));
        memory[..bytes.len()].copy_from_slice(bytes);
        let res_id = self.next_res;
        self.next_res += 1;
        world().blobs.insert((self.ctx_id, res_id), memory);
        res_id
    }

    fn blob_bytes(&self, res_id: u32, len: usize) -> Vec<u8> {
        world().blobs[&(self.ctx_id, res_id)][..len].to_vec()
    }

    /// The code and the reply of raw bytes.
    fn raw(&self, number: u32, request: &[u8]) -> (u32, Vec<u8>) {
        let mut page = vec![0xaa; 16380];
        let mut after = std::ptr::null_mut();
        let (start, request) = (page.as_mut_ptr(), request.as_ptr_range());
        // SAFETY: the ranges are those of the two vectors.
        let code = unsafe {
            let end = start.add(page.len());
            apir_backend_dispatcher(
                self.ctx_id,
                &CALLBACKS,
                number,
                request.start,
                request.end,
                start,
                end,
                &mut after,
            )
        };
        let written = after.addr() - start.addr();
        assert!(written <= page.len());
        assert!(page[written..].iter().all(|byte| *byte == 0xaa), "bytes behind the reply");
        page.truncate(written);
        (code, page)
    }

    fn encode<R: Request>(request: &R) -> Vec<u8> {
        let mut bytes = vec![0; 8192];
        let mut encoder = Encoder::new(&mut bytes);
        request.encode(&mut encoder).unwrap();
        let len = encoder.len();
        bytes.truncate(len);
        bytes
    }

    fn try_call<R: Request>(&self, request: &R) -> Result<R::Reply, u32> {
        match self.raw(R::COMMAND.number(), &Self::encode(request)) {
            (0, reply) => Ok(R::Reply::decode(&mut Decoder::new(&reply)).unwrap()),
            (code, reply) => {
                assert!(reply.is_empty(), "a refusal has no reply");
                Err(code)
            }
        }
    }

    fn call<R: Request + std::fmt::Debug>(&self, request: &R) -> R::Reply {
        self.try_call(request).unwrap_or_else(|code| panic!("{request:?} answered {code}"))
    }

    fn buffer_type(&self) -> BufferTypeHandle {
        self.call(&DeviceGetBufferTypeRequest {}).buffer_type
    }

    fn buffer(&self, size: u64) -> BufferHandle {
        let buffer_type = self.buffer_type();
        let buffer = self.call(&BufferTypeAllocBufferRequest { buffer_type, size }).buffer;
        assert!(!buffer.is_null());
        buffer
    }

    fn set(&mut self, tensor: TensorRecord, bytes: &[u8]) {
        let res_id = self.blob(bytes);
        let (buffer, size) = (tensor.buffer, bytes.len() as u64);
        self.call(&BufferSetTensorRequest { buffer, tensor, res_id, offset: 0, size });
    }

    fn get(&mut self, tensor: TensorRecord, len: usize) -> Vec<u8> {
        let res_id = self.blob(&vec![0xee; len]);
        let (buffer, size) = (tensor.buffer, len as u64);
        self.call(&BufferGetTensorRequest { buffer, tensor, res_id, offset: 0, size });
        self.blob_bytes(res_id, len)
    }

    fn compute(&mut self, nodes: &[u64], tensors: &[TensorRecord]) -> Result<i32, u32> {
        let mut bytes = vec![0; graph_size(nodes.len() as u32, tensors.len() as u32) as usize];
        encode_graph(nodes, tensors, &mut bytes).unwrap();
        self.compute_bytes(&bytes)
    }

    fn compute_bytes(&mut self, bytes: &[u8]) -> Result<i32, u32> {
        let res_id = self.blob(bytes);
        let size = bytes.len() as u64;
        let status = self.try_call(&BackendGraphComputeRequest { res_id, size }).map(|reply| reply.status);
        world().blobs.remove(&(self.ctx_id, res_id));
        status
    }

    /// The context still works.
    fn assert_alive(&self) {
        assert_eq!(self.call(&DeviceGetCountRequest {}).count, 1);
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        apir_backend_deinit(self.ctx_id);
        world().blobs.retain(|(ctx_id, _), _| *ctx_id != self.ctx_id);
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
}

fn bytes(floats: &[f32]) -> Vec<u8> {
    floats.iter().flat_map(|float| float.to_le_bytes()).collect()
}

/// A row of `n` floats.
fn row(id: u64, buffer: BufferHandle, data: u64, n: u32) -> TensorRecord {
    let nb = [4, 4 * n, 4 * n, 4 * n];
    TensorRecord { id, type_: TYPE_F32, buffer, ne: [n, 1, 1, 1], nb, data, ..TensorRecord::default() }
}

fn node(id: u64, buffer: BufferHandle, data: u64, n: u32, op: u32, sources: &[u64]) -> TensorRecord {
    let mut record = TensorRecord { op, flags: FLAG_COMPUTE, ..row(id, buffer, data, n) };
    record.src[..sources.len()].copy_from_slice(sources);
    record
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_guest_lists_fills_computes_and_reads() {
    let mut guest = Guest::start();
    assert_eq!(guest.call(&DeviceGetDeviceCountRequest {}).count, 1);
    assert_eq!(guest.call(&DeviceGetNameRequest {}).name, "CPU");
    assert!(!guest.call(&DeviceGetDescriptionRequest {}).description.is_empty());
    assert_eq!(guest.call(&DeviceGetTypeRequest {}).type_, 1, "a CPU is presented as a GPU");
    let memory = guest.call(&DeviceGetMemoryRequest {});
    assert!(memory.total > 0 && memory.free <= memory.total);
    let props = guest.call(&DeviceGetPropsRequest {});
    assert!(props.buffer_from_host_ptr && props.mmap_support && !props.async_ && !props.events);
    let buffer_type = guest.buffer_type();
    assert_eq!(guest.buffer_type(), buffer_type, "one handle for one buffer type");
    assert_eq!(guest.call(&BufferTypeGetNameRequest { buffer_type }).name, "CPU");
    assert_eq!(guest.call(&BufferTypeGetAlignmentRequest { buffer_type }).alignment, 32);
    assert_eq!(guest.call(&BufferTypeGetMaxSizeRequest { buffer_type }).max_size, u64::MAX);
    assert!(!guest.call(&BufferTypeIsHostRequest { buffer_type }).is_host);

    let buffer = guest.buffer(4096);
    let base = guest.call(&BufferGetBaseRequest { buffer }).base;
    assert!(base != 0 && base.is_multiple_of(64));
    assert_eq!(guest.get(row(1, buffer, 0, 1024), 4096), [0; 4096], "a fresh buffer holds zeros");
    let a = row(1, buffer, 0, 4);
    guest.set(a, &bytes(&[1.0, 2.0, 3.0, 4.0]));
    // b = a * a; v = the last two of b; c = v * v
    let b = node(2, buffer, 64, 4, OP_SQR, &[1]);
    let v = TensorRecord { view_src: 2, view_offs: 8, ..node(3, buffer, 72, 2, OP_VIEW, &[2]) };
    let c = node(4, buffer, 128, 2, OP_SQR, &[3]);
    assert_eq!(guest.compute(&[2, 3, 4], &[a, b, v, c]), Ok(0));
    assert_eq!(floats(&guest.get(b, 16)), [1.0, 4.0, 9.0, 16.0]);
    assert_eq!(floats(&guest.get(c, 8)), [81.0, 256.0]);

    let copy = row(5, buffer, 256, 4);
    let request = BufferCpyTensorRequest { buffer, source: b, destination: copy };
    assert!(guest.call(&request).copied);
    assert_eq!(floats(&guest.get(copy, 16)), [1.0, 4.0, 9.0, 16.0]);
    guest.call(&BufferClearRequest { buffer, value: 0x3f });
    assert_eq!(guest.get(copy, 16), [0x3f; 16]);
    guest.call(&BufferFreeBufferRequest { buffer });
    assert_eq!(guest.try_call(&BufferFreeBufferRequest { buffer }), Err(1));
    assert_eq!(guest.compute(&[2], &[a, b]), Err(1), "a graph sent again after its buffer was freed");
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_shared_buffer_is_the_blob_and_outlives_it() {
    let mut guest = Guest::start();
    let res_id = guest.blob(&bytes(&[1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]));
    let request = DeviceBufferFromPtrRequest { res_id, size: 4096, max_tensor_size: 4096 };
    let made = guest.call(&request);
    let (buffer, buffer_type) = (made.buffer, made.buffer_type);
    assert!(!guest.call(&BufferTypeGetNameRequest { buffer_type }).name.is_empty());
    let a = row(1, buffer, 0, 4);
    let b = node(2, buffer, 32, 4, OP_SQR, &[1]);
    assert_eq!(guest.compute(&[2], &[a, b]), Ok(0));
    assert_eq!(floats(&guest.blob_bytes(res_id, 48)[32..]), [1.0, 4.0, 9.0, 16.0]);
    // Transfers by way of the buffer's own blob overlap nothing.
    let request = BufferGetTensorRequest { buffer, tensor: b, res_id, offset: 0, size: 16 };
    guest.call(&request);
    assert_eq!(floats(&guest.blob_bytes(res_id, 16)), [1.0, 4.0, 9.0, 16.0]);

    world().blobs.remove(&(guest.ctx_id, res_id));
    assert_eq!(guest.compute(&[2], &[a, b]), Ok(0), "the blob is gone, its memory is not");
    assert_eq!(floats(&guest.get(b, 16)), [1.0, 16.0, 81.0, 256.0]);
    guest.call(&BufferFreeBufferRequest { buffer });

    let small = guest.blob(&[0; 100]);
    for (res_id, size) in [(small, 4097), (small, u64::MAX), (small, 0), (999, 1)] {
        let request = DeviceBufferFromPtrRequest { res_id, size, max_tensor_size: size };
        assert_eq!(guest.try_call(&request), Err(1), "resource {res_id}, {size} bytes");
    }
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn handles_of_nothing_of_another_kind_and_of_another_context_are_refused() {
    let (guest, other) = (Guest::start(), Guest::start());
    let (buffer, buffer_type) = (guest.buffer(64), guest.buffer_type());
    let theirs = other.buffer(64);
    for wrong in [0, 1, u64::MAX, buffer_type.0, theirs.0, buffer.0 ^ 1 << 32] {
        let wrong = BufferHandle(wrong);
        assert_eq!(guest.try_call(&BufferGetBaseRequest { buffer: wrong }), Err(1));
        assert_eq!(guest.try_call(&BufferClearRequest { buffer: wrong, value: 1 }), Err(1));
        assert_eq!(guest.try_call(&BufferFreeBufferRequest { buffer: wrong }), Err(1));
    }
    for wrong in [0, 1, 0x7fff_dead_beef, buffer.0, other.buffer_type().0] {
        let wrong = BufferTypeHandle(wrong);
        assert_eq!(guest.try_call(&BufferTypeGetNameRequest { buffer_type: wrong }), Err(1));
        assert_eq!(guest.try_call(&BufferTypeGetAlignmentRequest { buffer_type: wrong }), Err(1));
        assert_eq!(guest.try_call(&BufferTypeGetMaxSizeRequest { buffer_type: wrong }), Err(1));
        assert_eq!(guest.try_call(&BufferTypeAllocBufferRequest { buffer_type: wrong, size: 64 }), Err(1));
        let tensor = InlineTensor {
            tensor: RawTensor { ne: [4, 1, 1, 1], nb: [4, 16, 16, 16], ..RawTensor::default() },
            ..InlineTensor::default()
        };
        assert_eq!(guest.try_call(&BufferTypeGetAllocSizeRequest { buffer_type: wrong, tensor }), Err(1));
    }
    guest.assert_alive();
    assert!(other.call(&BufferGetBaseRequest { buffer: theirs }).base != 0);
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn transfers_outside_tensor_buffer_or_blob_are_refused() {
    let mut guest = Guest::start();
    let buffer = guest.buffer(4096);
    let res_id = guest.blob(&[7; 4096]);
    let inside = row(1, buffer, 0, 16);
    let with = |change: fn(&mut TensorRecord)| {
        let mut record = inside;
        change(&mut record);
        record
    };
    let cases: &[(&str, TensorRecord, u32, u64, u64)] = &[
        ("past the tensor", inside, res_id, 60, 8),
        ("wrapping", inside, res_id, u64::MAX, 2),
        ("wrapping to the start", inside, res_id, u64::MAX - 3, 8),
        ("size of everything", inside, res_id, 0, u64::MAX),
        ("past the buffer", with(|t| t.data = 4092), res_id, 0, 4),
        ("far outside", with(|t| t.data = 1 << 40), res_id, 0, 4),
        ("wrapping data", with(|t| t.data = u64::MAX - 15), res_id, 0, 4),
        ("stride outside", with(|t| (t.ne[1], t.nb[1]) = (2, 1 << 31)), res_id, 0, 4),
        ("overflowing strides", with(|t| (t.ne, t.nb) = ([u32::MAX; 4], [u32::MAX; 4])), res_id, 0, 4),
        (
            "no buffer, absolute address",
            with(|t| (t.buffer, t.data) = (BufferHandle(0), 1 << 46)),
            res_id,
            0,
            4,
        ),
        ("unknown buffer", with(|t| t.buffer = BufferHandle(77)), res_id, 0, 4),
        ("removed type", with(|t| t.type_ = 4), res_id, 0, 4),
        ("type past the table", with(|t| t.type_ = 4_000_000), res_id, 0, 4),
        ("part of a block", with(|t| (t.type_, t.ne[0], t.nb[0]) = (2, 31, 18)), res_id, 0, 4),
        ("unknown blob", inside, 999, 0, 4),
    ];
    for (what, tensor, res_id, offset, size) in cases.iter().copied() {
        let set = BufferSetTensorRequest { buffer, tensor, res_id, offset, size };
        assert_eq!(guest.try_call(&set), Err(1), "set {what}");
        let get = BufferGetTensorRequest { buffer, tensor, res_id, offset, size };
        assert_eq!(guest.try_call(&get), Err(1), "get {what}");
        let copy = BufferCpyTensorRequest { buffer, source: tensor, destination: tensor };
        if offset == 0 && size == 4 && res_id != 999 {
            assert_eq!(guest.try_call(&copy), Err(1), "copy {what}");
        }
    }
    // A blob of one page behind a tensor of two.
    let large = guest.buffer(16384);
    let tensor = row(1, large, 0, 2048);
    let set = BufferSetTensorRequest { buffer: large, tensor, res_id, offset: 0, size: 8192 };
    assert_eq!(guest.try_call(&set), Err(1));
    // Nothing to move is not an error, whatever the blob.
    for offset in [0, 64] {
        let none = BufferSetTensorRequest { buffer, tensor: inside, res_id: 999, offset, size: 0 };
        guest.call(&none);
    }
    // Unlike tensors are not copied.
    for unlike in [row(2, buffer, 128, 8), TensorRecord { type_: 26, ..row(2, buffer, 128, 16) }] {
        let copy = BufferCpyTensorRequest { buffer, source: inside, destination: unlike };
        assert_eq!(guest.try_call(&copy), Err(1));
    }
    assert_eq!(guest.get(row(1, buffer, 0, 1024), 4096), [0; 4096], "nothing was written");
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn graphs_that_are_none_are_refused() {
    let mut guest = Guest::start();
    let buffer = guest.buffer(4096);
    let a = row(1, buffer, 0, 4);
    let b = node(2, buffer, 64, 4, OP_SQR, &[1]);
    let c = node(3, buffer, 128, 4, OP_ADD, &[1, 2]);
    assert_eq!(guest.compute(&[2, 3], &[a, b, c]), Ok(0));
    let edit = |record: TensorRecord, change: fn(&mut TensorRecord)| {
        let mut record = record;
        change(&mut record);
        record
    };
    let cases: &[(&str, &[u64], &[TensorRecord])] = &[
        ("no nodes", &[], &[a]),
        ("id 0 as a node", &[0], &[a, b]),
        ("unknown node", &[9], &[a, b]),
        ("unknown source", &[2], &[b]),
        ("id 0 as a tensor", &[2], &[edit(a, |t| t.id = 0), a, b]),
        ("duplicate ids", &[2], &[a, a, b]),
        ("a node twice", &[2, 2], &[a, b]),
        ("nodes in the wrong order", &[3, 2], &[a, b, c]),
        ("tensors in the wrong order", &[2, 3], &[a, c, b]),
        ("its own source", &[2], &[a, edit(b, |t| t.src[0] = 2)]),
        ("its own view", &[2], &[a, edit(b, |t| t.view_src = 2)]),
        ("a cycle", &[2, 3], &[a, edit(b, |t| t.src[0] = 3), c]),
        ("a source without buffer", &[2], &[edit(a, |t| t.buffer = BufferHandle(0)), b]),
        ("an absolute address", &[2], &[edit(a, |t| (t.buffer, t.data) = (BufferHandle(0), 1 << 46)), b]),
        ("a node without buffer", &[2], &[a, edit(b, |t| (t.buffer, t.data) = (BufferHandle(0), 0))]),
        ("a node outside its buffer", &[2], &[a, edit(b, |t| t.data = 4092)]),
        ("a view elsewhere", &[3], &[a, b, edit(c, |t| (t.view_src, t.view_offs) = (1, 32))]),
        (
            "a view offset that wraps",
            &[3],
            &[a, edit(b, |t| t.data = 64), edit(c, |t| (t.view_src, t.view_offs) = (2, u64::MAX))],
        ),
        ("an unknown operation", &[2], &[a, edit(b, |t| t.op = 101)]),
        ("the largest operation", &[2], &[a, edit(b, |t| t.op = u32::MAX)]),
        ("a callback", &[2], &[a, edit(b, |t| t.op = OP_MAP_CUSTOM1)]),
        ("a callback without sources", &[2], &[a, edit(b, |t| t.op = OP_CUSTOM)]),
        ("a removed type", &[2], &[edit(a, |t| t.type_ = 33), b]),
    ];
    for (what, nodes, tensors) in cases {
        assert_eq!(guest.compute(nodes, tensors), Err(1), "{what}");
    }
    // A cast is its own second source, and that is no cycle.
    let cast = node(4, buffer, 192, 4, OP_CPY, &[1, 4]);
    assert_eq!(guest.compute(&[4], &[a, cast]), Ok(0));
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn every_truncation_and_every_count_of_a_graph_is_refused() {
    let mut guest = Guest::start();
    let buffer = guest.buffer(4096);
    let tensors = [row(1, buffer, 0, 4), node(2, buffer, 64, 4, OP_SQR, &[1])];
    let mut graph = vec![0; graph_size(1, 2) as usize];
    encode_graph(&[2], &tensors, &mut graph).unwrap();
    for len in 0..graph.len() {
        assert_eq!(guest.compute_bytes(&graph[..len]), Err(1), "{len} bytes");
    }
    for at in [0, 12] {
        for count in [0x1000_0000u32, 0x2000_0000, 0x8000_0000, u32::MAX] {
            let mut forged = graph.clone();
            forged[at..at + 4].copy_from_slice(&count.to_le_bytes());
            assert_eq!(guest.compute_bytes(&forged), Err(1), "count {count:#x} at {at}");
        }
    }
    let res_id = guest.blob(&graph);
    for size in [4097, 1 << 40, u64::MAX] {
        assert_eq!(guest.try_call(&BackendGraphComputeRequest { res_id, size }), Err(1));
    }
    graph.extend([0xff; 64]);
    assert_eq!(guest.compute_bytes(&graph), Ok(0), "bytes behind the graph are not looked at");
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_chain_of_100_000_tensors_is_walked_without_recursion() {
    let mut guest = Guest::start();
    let buffer = guest.buffer(4096);
    let mut tensors = vec![row(1, buffer, 0, 1)];
    // Views of views, and one node at their end.
    for id in 2..=100_000 {
        let view = TensorRecord { view_src: id - 1, ..node(id, buffer, 0, 1, OP_VIEW, &[id - 1]) };
        tensors.push(view);
    }
    tensors.push(node(100_001, buffer, 64, 1, OP_SQR, &[100_000]));
    assert_eq!(guest.compute(&[100_001], &tensors), Ok(0));
    guest.assert_alive();
}

/// A valid request of every command, as bytes.
fn every_request(guest: &mut Guest) -> Vec<(Command, Vec<u8>)> {
    let (buffer, buffer_type) = (guest.buffer(4096), guest.buffer_type());
    let res_id = guest.blob(&[0; 4096]);
    let tensor = row(1, buffer, 0, 4);
    let raw = RawTensor { ne: [4, 1, 1, 1], nb: [4, 16, 16, 16], ..RawTensor::default() };
    let node = InlineTensor {
        tensor: RawTensor { op: OP_SQR, ..raw },
        buffer,
        view_src: Some(raw),
        sources: vec![raw],
    };
    let mut requests = Vec::new();
    for command in Command::ALL {
        let bytes = match command {
            Command::DeviceGetDeviceCount => Guest::encode(&DeviceGetDeviceCountRequest {}),
            Command::DeviceGetCount => Guest::encode(&DeviceGetCountRequest {}),
            Command::DeviceGetName => Guest::encode(&DeviceGetNameRequest {}),
            Command::DeviceGetDescription => Guest::encode(&DeviceGetDescriptionRequest {}),
            Command::DeviceGetType => Guest::encode(&DeviceGetTypeRequest {}),
            Command::DeviceGetMemory => Guest::encode(&DeviceGetMemoryRequest {}),
            Command::DeviceSupportsOp => Guest::encode(&DeviceSupportsOpRequest { node: node.clone() }),
            Command::DeviceGetBufferType => Guest::encode(&DeviceGetBufferTypeRequest {}),
            Command::DeviceGetProps => Guest::encode(&DeviceGetPropsRequest {}),
            Command::DeviceBufferFromPtr => {
                Guest::encode(&DeviceBufferFromPtrRequest { res_id, size: 4096, max_tensor_size: 64 })
            }
            Command::BufferTypeGetName => Guest::encode(&BufferTypeGetNameRequest { buffer_type }),
            Command::BufferTypeGetAlignment => Guest::encode(&BufferTypeGetAlignmentRequest { buffer_type }),
            Command::BufferTypeGetMaxSize => Guest::encode(&BufferTypeGetMaxSizeRequest { buffer_type }),
            Command::BufferTypeIsHost => Guest::encode(&BufferTypeIsHostRequest { buffer_type }),
            Command::BufferTypeAllocBuffer => {
                Guest::encode(&BufferTypeAllocBufferRequest { buffer_type, size: 64 })
            }
            Command::BufferTypeGetAllocSize => {
                Guest::encode(&BufferTypeGetAllocSizeRequest { buffer_type, tensor: node.clone() })
            }
            Command::BufferGetBase => Guest::encode(&BufferGetBaseRequest { buffer }),
            Command::BufferSetTensor => {
                Guest::encode(&BufferSetTensorRequest { buffer, tensor, res_id, offset: 0, size: 16 })
            }
            Command::BufferGetTensor => {
                Guest::encode(&BufferGetTensorRequest { buffer, tensor, res_id, offset: 0, size: 16 })
            }
            Command::BufferCpyTensor => {
                let destination = row(2, buffer, 64, 4);
                Guest::encode(&BufferCpyTensorRequest { buffer, source: tensor, destination })
            }
            Command::BufferClear => Guest::encode(&BufferClearRequest { buffer, value: 1 }),
            Command::BufferFreeBuffer => Guest::encode(&BufferFreeBufferRequest { buffer: guest.buffer(64) }),
            Command::BackendGraphCompute => {
                let tensors = [tensor, self::node(2, buffer, 64, 4, OP_SQR, &[1])];
                let mut graph = vec![0; graph_size(1, 2) as usize];
                encode_graph(&[2], &tensors, &mut graph).unwrap();
                let size = graph.len() as u64;
                Guest::encode(&BackendGraphComputeRequest { res_id: guest.blob(&graph), size })
            }
        };
        requests.push((*command, bytes));
    }
    requests
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn every_command_is_refused_at_every_truncation_and_bears_trailing_bytes() {
    let mut guest = Guest::start();
    for (command, mut request) in every_request(&mut guest) {
        for len in (0..request.len()).filter(|_| command != Command::BufferTypeIsHost) {
            let (code, reply) = guest.raw(command.number(), &request[..len]);
            assert_eq!((code, reply.len()), (1, 0), "{} of {len} bytes", command.name());
        }
        request.extend([0xff; 32]);
        assert_eq!(guest.raw(command.number(), &request).0, 0, "{} with trailing bytes", command.name());
    }
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_reply_page_that_is_too_small_is_a_refusal() {
    let guest = Guest::start();
    let mut page = [0xaau8; 8];
    let mut after = std::ptr::null_mut();
    let start = page.as_mut_ptr();
    // SAFETY: the ranges are those of the page, and of no request.
    let code = unsafe {
        let (none, end) = (std::ptr::null(), start.add(page.len()));
        let name = Command::DeviceGetName.number();
        apir_backend_dispatcher(guest.ctx_id, &CALLBACKS, name, none, none, start, end, &mut after)
    };
    assert_eq!((code, after, page), (1, start, [0xaa; 8]));
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn contexts_that_have_not_started_refuse_everything() {
    let cpu = format!("{}/libggml-cpu.so", llama_dir());
    let guest = Guest::configured(&cpu, None);
    let count = Command::DeviceGetCount.number();
    assert_eq!(guest.raw(count, &[]), (1, vec![]), "before initialize");
    assert_eq!(guest.initialize(), 6);
    assert_eq!(guest.raw(count, &[]).0, 0);
    assert_eq!(guest.initialize(), 13, "twice");
    assert_eq!(guest.raw(count, &[]).0, 0, "the first start stands");
    for number in [23, 1024, u32::MAX] {
        assert_eq!(guest.raw(number, &[]), (6, vec![]));
    }
    apir_backend_deinit(guest.ctx_id);
    assert_eq!(guest.raw(count, &[]), (1, vec![]), "after deinit");
    assert_eq!(guest.initialize(), 6, "a context may start again");
    guest.assert_alive();

    for (library, registration, code) in [
        ("/nowhere/libggml-cpu.so", None, 4),
        ("/proc/self/maps", None, 4),
        ("/proc/self", None, 4),
        (cpu.as_str(), Some("ggml_backend_none_reg"), 5),
    ] {
        let failed = Guest::configured(library, registration);
        assert_eq!(failed.initialize(), code, "{library} {registration:?}");
        assert_eq!(failed.raw(count, &[]), (1, vec![]), "after a failed initialize");
    }
    // SAFETY: a null table is allowed.
    assert_eq!(unsafe { apir_backend_initialize(u32::MAX, std::ptr::null()) }, 11);
    apir_backend_deinit(u32::MAX);
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn allocations_that_cannot_be_are_null_and_the_next_one_works() {
    let guest = Guest::start();
    let buffer_type = guest.buffer_type();
    for size in [0, 1 << 50, u64::MAX] {
        let request = BufferTypeAllocBufferRequest { buffer_type, size };
        assert!(guest.call(&request).buffer.is_null(), "{size} bytes");
    }
    let buffer = guest.buffer(1 << 20);
    guest.call(&BufferFreeBufferRequest { buffer });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn nodes_outside_a_graph_are_asked_about_and_hostile_ones_are_refused() {
    let guest = Guest::start();
    let raw = RawTensor { ne: [4, 1, 1, 1], nb: [4, 16, 16, 16], ..RawTensor::default() };
    let ask = |tensor: RawTensor, source: RawTensor| {
        let node = InlineTensor {
            tensor,
            // Upstream's guests send a stack address here.
            buffer: BufferHandle(0x7fff_1234_5678),
            view_src: None,
            sources: vec![source],
        };
        guest.try_call(&DeviceSupportsOpRequest { node }).map(|reply| reply.supported)
    };
    let sqr = RawTensor { op: OP_SQR, ..raw };
    assert_eq!(ask(sqr, raw), Ok(true));
    for (what, tensor, source) in [
        ("removed type", sqr, RawTensor { type_: 5, ..raw }),
        ("type past the table", RawTensor { type_: 99, ..sqr }, raw),
        ("unknown operation", RawTensor { op: 1000, ..raw }, raw),
        ("callback", RawTensor { op: OP_CUSTOM, ..raw }, raw),
        ("negative dimension", sqr, RawTensor { ne: [4, -1, 1, 1], ..raw }),
        ("overflowing extent", sqr, RawTensor { ne: [4, i64::MAX, 3, 1], nb: [4, 1 << 62, 8, 8], ..raw }),
    ] {
        assert_eq!(ask(tensor, source), Err(1), "{what}");
    }
    let buffer_type = guest.buffer_type();
    let tensor = InlineTensor { tensor: sqr, sources: vec![raw], ..InlineTensor::default() };
    assert_eq!(guest.call(&BufferTypeGetAllocSizeRequest { buffer_type, tensor }).size, 16);
    guest.assert_alive();
}
