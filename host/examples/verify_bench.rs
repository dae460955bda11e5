//! How long the host takes over the graph of one token: 937 nodes of the kinds and numbers that SmolLM2-135M has, on 1,276 tensors.
//!
//! Prints one line of JSON with medians in microseconds: `verify_us` is the verifier alone, for a graph that it has not seen (`first`) and for
//! the same bytes again (copied and compared); `new_graph_us` is by how much the whole command takes longer for a graph that the context has not
//! seen: verifying, building, asking the device. Its matrices are small, since their size costs nothing here and time in the kernels.
//! `APIR_LLAMA_DIR` names the folder of libggml-cpu.so.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark ends where it cannot go on")]

use apir_ggml::abi::FLAG_COMPUTE;
use apir_ggml::{GgmlLibrary, TypeInfo};
use apir_protocol::Request;
use apir_protocol::codec::Encoder;
use apir_protocol::graph::{encode_graph, graph_size};
use apir_protocol::handle::BufferHandle;
use apir_protocol::messages::*;
use apir_protocol::tensor::TensorRecord;
use ggml_virtgpu_backend::plugin::{Callbacks, apir_backend_dispatcher, apir_backend_initialize};
use ggml_virtgpu_backend::verify::graph::{Terms, Verifier};
use ggml_virtgpu_backend::verify::indices::IndexCheck;
use ggml_virtgpu_backend::verify::rules::RuleBook;
use ggml_virtgpu_backend::verify::{BufferInfo, Buffers};
use memmap2::MmapMut;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

const F32: u32 = 0;
const F16: u32 = 1;
const Q4_1: u32 = 3;
const I32: u32 = 26;
const I64: u32 = 27;

const LAYERS: usize = 30;
const WIDTH: u32 = 64;
const HEADS: u32 = 1;
const HEAD: u32 = 64;
const KV: u32 = 64;
const INNER: u32 = 64;
const CELLS: u32 = 32;
const VOCABULARY: u32 = 64;
const ROUNDS: usize = 300;

/// A graph being sketched; ids are places from 1 on.
struct Sketch<'a> {
    ops: &'a HashMap<String, u32>,
    buffer: BufferHandle,
    tensors: Vec<TensorRecord>,
    nodes: Vec<u64>,
    end: u64,
}

impl Sketch<'_> {
    fn leaf(&mut self, type_: u32, ne: &[u32]) -> u64 {
        let mut all = [1; 4];
        all[..ne.len()].copy_from_slice(ne);
        let nb = TypeInfo::get(type_).unwrap().dense_strides(all.map(i64::from)).unwrap();
        let id = self.tensors.len() as u64 + 1;
        let (buffer, data) = (self.buffer, self.end);
        self.end = (data + nb[3] * u64::from(all[3])).next_multiple_of(128);
        let nb = nb.map(|stride| stride as u32);
        self.tensors.push(TensorRecord { id, type_, buffer, ne: all, nb, data, ..TensorRecord::default() });
        id
    }

    fn node(&mut self, op: &str, type_: u32, ne: &[u32], sources: &[u64], params: &[i32]) -> u64 {
        let id = self.leaf(type_, ne);
        let op = self.ops[op];
        let record = self.get(id);
        (record.op, record.flags) = (op, FLAG_COMPUTE);
        record.src[..sources.len()].copy_from_slice(sources);
        record.op_params[..params.len()].copy_from_slice(params);
        self.nodes.push(id);
        id
    }

    /// A node over the memory of its source `of`, with these dimensions and strides.
    fn view(
        &mut self,
        op: &str,
        of: u64,
        sources: &[u64],
        ne: [u32; 4],
        nb: [u32; 4],
        params: &[i32],
    ) -> u64 {
        let viewed = *self.get(of);
        let end = self.end;
        let id = self.node(op, viewed.type_, &[1], sources, params);
        self.end = end;
        let root = if viewed.view_src == 0 { of } else { viewed.view_src };
        let record = self.get(id);
        (record.ne, record.nb, record.data) = (ne, nb, viewed.data);
        (record.view_src, record.view_offs) = (root, viewed.view_offs);
        id
    }

    fn reshape(&mut self, of: u64, ne: [u32; 4]) -> u64 {
        let type_ = self.get(of).type_;
        let nb = TypeInfo::get(type_).unwrap().dense_strides(ne.map(i64::from)).unwrap();
        self.view("RESHAPE", of, &[of], ne, nb.map(|stride| stride as u32), &[])
    }

    /// The tensor with its second and third dimension swapped.
    fn permute(&mut self, of: u64) -> u64 {
        let TensorRecord { ne, nb, .. } = *self.get(of);
        let (ne, nb) = ([ne[0], ne[2], ne[1], ne[3]], [nb[0], nb[2], nb[1], nb[3]]);
        self.view("PERMUTE", of, &[of], ne, nb, &[0, 2, 1, 3])
    }

    fn part(&mut self, of: u64, ne: [u32; 4]) -> u64 {
        let type_ = self.get(of).type_;
        let nb = TypeInfo::get(type_).unwrap().dense_strides(ne.map(i64::from)).unwrap();
        self.view("VIEW", of, &[of], ne, nb.map(|stride| stride as u32), &[])
    }

    fn set_rows(&mut self, rows: u64, ids: u64, target: u64) -> u64 {
        let TensorRecord { ne, nb, .. } = *self.get(target);
        self.view("SET_ROWS", target, &[rows, ids, target], ne, nb, &[])
    }

    fn get(&mut self, id: u64) -> &mut TensorRecord {
        &mut self.tensors[id as usize - 1]
    }

    fn norm(&mut self, x: u64) -> u64 {
        let eps = 1e-5f32.to_bits() as i32;
        let norm = self.node("RMS_NORM", F32, &[WIDTH], &[x], &[eps]);
        let weight = self.leaf(F32, &[WIDTH]);
        self.node("MUL", F32, &[WIDTH], &[norm, weight], &[])
    }

    fn product(&mut self, from: u32, to: u32, x: u64) -> u64 {
        let weight = self.leaf(Q4_1, &[from, to]);
        self.node("MUL_MAT", F32, &[to], &[weight, x], &[])
    }

    fn rope(&mut self, x: u64, positions: u64, heads: u32) -> u64 {
        let float = |value: f32| value.to_bits() as i32;
        let params = [0, 64, 0, 0, 8192, float(1e5), float(1.0), 0, float(1.0), float(32.0), float(1.0)];
        self.node("ROPE", F32, &[HEAD, heads, 1], &[x, positions], &params)
    }

    fn layer(&mut self, x: u64, inputs: &Inputs) -> u64 {
        let normed = self.norm(x);
        let (q, k, v) = (
            self.product(WIDTH, WIDTH, normed),
            self.product(WIDTH, KV, normed),
            self.product(WIDTH, KV, normed),
        );
        let (q, k, v) = (
            self.reshape(q, [HEAD, HEADS, 1, 1]),
            self.reshape(k, [HEAD, HEADS, 1, 1]),
            self.reshape(v, [HEAD, HEADS, 1, 1]),
        );
        let (q, k) = (self.rope(q, inputs.positions, HEADS), self.rope(k, inputs.positions, HEADS));
        let mut cached = [0; 2];
        for (slot, row) in [k, v].into_iter().enumerate() {
            let cache = self.leaf(F16, &[KV, CELLS]);
            let row = self.part(row, [KV, 1, 1, 1]);
            self.set_rows(row, inputs.cells, cache);
            let heads = self.part(cache, [HEAD, HEADS, CELLS, 1]);
            cached[slot] = self.permute(heads);
        }
        let q = self.permute(q);
        let scale = 0.125f32.to_bits() as i32;
        let sources = [q, cached[0], cached[1], inputs.mask];
        let attended = self.node("FLASH_ATTN_EXT", F32, &[HEAD, HEADS, 1], &sources, &[scale, 0, 0, 10]);
        let attended = self.reshape(attended, [WIDTH, 1, 1, 1]);
        let attended = self.product(WIDTH, WIDTH, attended);
        let residual = self.part(x, [WIDTH, 1, 1, 1]);
        let x = self.node("ADD", F32, &[WIDTH], &[attended, residual], &[]);
        let normed = self.norm(x);
        let (gate, up) = (self.product(WIDTH, INNER, normed), self.product(WIDTH, INNER, normed));
        let gated = self.node("GLU", F32, &[INNER], &[gate, up], &[2]);
        let down = self.product(INNER, WIDTH, gated);
        self.node("ADD", F32, &[WIDTH], &[down, x], &[])
    }
}

struct Inputs {
    positions: u64,
    cells: u64,
    mask: u64,
}

/// The graph of one token.
fn sketch(ops: &HashMap<String, u32>, buffer: BufferHandle) -> Sketch<'_> {
    let mut graph = Sketch { ops, buffer, tensors: Vec::new(), nodes: Vec::new(), end: 0 };
    let inputs = Inputs {
        positions: graph.leaf(I32, &[1]),
        cells: graph.leaf(I64, &[1]),
        mask: graph.leaf(F16, &[CELLS, 1]),
    };
    let (embedded, mixed, slots) =
        (graph.leaf(F32, &[WIDTH]), graph.leaf(F32, &[WIDTH, 2]), graph.leaf(I32, &[1]));
    graph.set_rows(embedded, slots, mixed);
    let out_ids = graph.leaf(I32, &[1]);
    let mut x = graph.node("GET_ROWS", F32, &[WIDTH], &[mixed, out_ids], &[]);
    for _ in 0..LAYERS {
        x = graph.layer(x, &inputs);
    }
    let x = graph.node("GET_ROWS", F32, &[WIDTH], &[x, out_ids], &[]);
    let normed = graph.norm(x);
    let logits = graph.product(WIDTH, VOCABULARY, normed);
    graph.node("DUP", F32, &[VOCABULARY], &[logits], &[]);
    graph
}

struct One(u64);

impl Buffers for One {
    fn find(&self, _token: u64) -> Option<BufferInfo> {
        Some(BufferInfo { size: self.0, alignment: 32, host: true, shared: true })
    }
}

static BLOBS: Mutex<Vec<MmapMut>> = Mutex::new(Vec::new());
static LIBRARY: Mutex<Option<CString>> = Mutex::new(None);

unsafe extern "C" fn get_config(_ctx_id: u32, key: *const c_char) -> *const c_char {
    // SAFETY: the plugin gives a C string.
    let key = unsafe { CStr::from_ptr(key) };
    let library = LIBRARY.lock().unwrap();
    if key == c"ggml.library.path" { library.as_ref().unwrap().as_ptr() } else { std::ptr::null() }
}

unsafe extern "C" fn get_shmem_ptr(_ctx_id: u32, res_id: u32) -> *mut c_void {
    BLOBS.lock().unwrap()[res_id as usize].as_mut_ptr().cast()
}

static CALLBACKS: Callbacks = Callbacks { get_config: Some(get_config), get_shmem_ptr: Some(get_shmem_ptr) };

fn blob(len: usize) -> u32 {
    let fd = nix::sys::memfd::memfd_create(c"apir-shmem", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
    nix::unistd::ftruncate(&fd, len.next_multiple_of(4096) as i64).unwrap();
    // SAFETY: the file is anonymous and nobody shortens it.
    let memory = unsafe { MmapMut::map_mut(&fd) }.unwrap();
    let mut blobs = BLOBS.lock().unwrap();
    blobs.push(memory);
    blobs.len() as u32 - 1
}

fn call<R: Request>(request: &R) -> R::Reply {
    let (mut bytes, mut page) = ([0u8; 1024], [0u8; 1024]);
    let mut encoder = Encoder::new(&mut bytes);
    request.encode(&mut encoder).unwrap();
    let len = encoder.len();
    let (start, mut after) = (page.as_mut_ptr(), std::ptr::null_mut());
    // SAFETY: the ranges are those of the two arrays.
    let code = unsafe {
        let (number, end) = (R::COMMAND.number(), start.add(page.len()));
        let from = bytes.as_ptr();
        apir_backend_dispatcher(1, &CALLBACKS, number, from, from.add(len), start, end, &mut after)
    };
    assert_eq!(code, 0, "{}", R::COMMAND.name());
    apir_protocol::Wire::decode(&mut apir_protocol::codec::Decoder::new(&page)).unwrap()
}

/// The median of many rounds.
fn median(mut round: impl FnMut(usize) -> Duration) -> f64 {
    let mut times: Vec<_> = (0..ROUNDS).map(&mut round).collect();
    times.sort();
    times[ROUNDS / 2].as_secs_f64() * 1e6
}

fn main() {
    let folder =
        std::env::var("APIR_LLAMA_DIR").expect("APIR_LLAMA_DIR must name the folder of libggml-cpu.so");
    let path = format!("{folder}/libggml-cpu.so");
    // SAFETY: whoever set the path trusts the file; nothing is computed with this handle.
    let library = unsafe { GgmlLibrary::open(Path::new(&path), None) }.unwrap();
    let ops: HashMap<_, _> =
        (0..library.ops().count()).map(|op| (library.ops().name(op).unwrap().to_owned(), op)).collect();
    let bytes = sketch(&ops, BufferHandle(1)).end;

    *LIBRARY.lock().unwrap() = Some(CString::new(path).unwrap());
    // SAFETY: the table is static.
    assert_eq!(unsafe { apir_backend_initialize(1, &CALLBACKS) }, 6);
    let memory = blob(bytes as usize);
    let size = (bytes as usize).next_multiple_of(4096) as u64;
    let buffer = call(&DeviceBufferFromPtrRequest { res_id: memory, size, max_tensor_size: size }).buffer;
    let mut graph = sketch(&ops, buffer);
    let (nodes, tensors) = (graph.nodes.len(), graph.tensors.len());
    let mut encoded = vec![0; graph_size(nodes as u32, tensors as u32) as usize];
    let encode =
        |graph: &Sketch<'_>, out: &mut [u8]| encode_graph(&graph.nodes, &graph.tensors, out).unwrap();
    encode(&graph, &mut encoded);

    let rules = RuleBook::new(library.ops(), library.version(), true, 1);
    let buffers = One(size);
    let terms = Terms { rules: &rules, buffers: &buffers, index_check: IndexCheck::All, max_nodes: 1 << 20 };
    let mut verifier = Verifier::default();
    let first = median(|_| {
        let start = Instant::now();
        verifier.verify(&encoded, &terms).unwrap();
        start.elapsed()
    });
    let mut private = Vec::new();
    let again = median(|_| {
        let start = Instant::now();
        private.clear();
        private.extend_from_slice(&encoded);
        assert!(private == encoded);
        start.elapsed()
    });

    let res_id = blob(encoded.len());
    let length = encoded.len() as u64;
    let command = |fresh: bool| {
        median(|round| {
            if fresh {
                // A name that no graph before had.
                graph.get(1).name[..8].copy_from_slice(&(round as u64 + 1).to_le_bytes());
                encode(&graph, &mut encoded);
            }
            BLOBS.lock().unwrap()[res_id as usize][..encoded.len()].copy_from_slice(&encoded);
            let start = Instant::now();
            let reply = call(&BackendGraphComputeRequest { res_id, size: length });
            let elapsed = start.elapsed();
            assert_eq!(reply.status, 0);
            elapsed
        })
    };
    let mut command = command;
    let (known, new) = (command(false), command(true));
    let new_graph = new - known;
    println!(
        "{{\"verify_us\":{{\"first\":{first:.1},\"again\":{again:.1}}},\"new_graph_us\":{new_graph:.1},\"nodes\":{nodes},\"tensors\":{tensors},\"bytes\":{length}}}"
    );
}
