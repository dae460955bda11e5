//! The vtables as ggml calls them, over a host in this process.

mod buffers;
mod devices;
mod forks;
mod graphs;

use super::buffer::BufferMaker;
use super::device::{Device, Opener};
use super::lost::OnLost;
use crate::numbers::OwnNumbers;
use crate::session::fake::{FakeLink, Host, Script};
use crate::session::{Session, SessionError};
use apir_ggml::layout::{Marks, Version};
use apir_ggml::ops::OpTable;
use apir_ggml::{Layout, Names, abi};
use std::ptr;
use std::sync::{Arc, Mutex};

const NONE: u32 = 0;
const ADD: u32 = 1;
const MUL_MAT: u32 = 2;
const VIEW: u32 = 3;
const CUSTOM: u32 = 4;
const GLU: u32 = 5;
const F32: u32 = 0;
const Q4_0: u32 = 2;

fn layout(api: u32) -> Layout {
    let marks = Marks { alloc_buffer_n: api == 3, graph_next_uid: true };
    Layout::new(Version { major: 0, minor: 26, patch: 0 }, marks).unwrap()
}

/// A device of API 3, and its host.
fn device(prepare: impl FnOnce(&mut Script)) -> (&'static Device, Arc<Host>) {
    device_of(3, prepare)
}

fn device_of(api: u32, prepare: impl FnOnce(&mut Script)) -> (&'static Device, Arc<Host>) {
    let (link, host) = FakeLink::new();
    prepare(&mut host.0.lock().unwrap());
    (device_over(api, Opener::new(forks_of(link)), OnLost::Fail), host)
}

fn device_over(api: u32, opener: Opener, on_lost: OnLost) -> &'static Device {
    Device::make(opener, layout(api), BufferMaker::Boxes, own(), on_lost, ptr::null_mut()).unwrap()
}

/// What the numbers of these tests mean.
fn own() -> OwnNumbers {
    let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let names = Names {
        version: Version { major: 0, minor: 26, patch: 0 },
        ops: OpTable::from_names(["NONE", "ADD", "MUL_MAT", "VIEW", "CUSTOM", "GLU"]),
        unary: list(&["ABS"]),
        glu: list(&["REGLU", "GEGLU"]),
        types: list(&["f32", "f16", "q4_0"]),
    };
    OwnNumbers { names, same_ggml: true }
}

/// Opens the link the first time; later, in forks, another host's.
fn forks_of(link: Box<FakeLink>) -> impl Fn() -> Result<Session, SessionError> {
    let link = Mutex::new(Some(link));
    move || Session::open(link.lock().unwrap().take().unwrap_or_else(|| FakeLink::new().0))
}

/// A dense tensor without data.
fn tensor(type_: u32, ne: [i64; 4]) -> abi::Tensor {
    let nb = apir_ggml::TypeInfo::get(type_).unwrap().dense_strides(ne).unwrap();
    abi::Tensor { type_, ne, nb, ..abi::Tensor::default() }
}

/// A buffer as ggml holds it, freed as ggml frees it.
struct Held(*mut abi::Buffer);

impl Held {
    /// None when the device has no room.
    fn new(device: &Device, size: usize) -> Option<Self> {
        let buffer_type = device.buffer_type();
        // SAFETY: the buffer type is the device's own and has all functions.
        let buffer = unsafe {
            (device.layout.buffer_type_iface(buffer_type).alloc_buffer.unwrap())(buffer_type, size)
        };
        (!buffer.is_null()).then(|| Self(buffer))
    }

    fn iface(&self) -> abi::BufferIface {
        // SAFETY: the buffer lives as long as self.
        unsafe { (*self.0).iface }
    }

    fn base(&self) -> usize {
        // SAFETY: the buffer lives as long as self.
        unsafe { (self.iface().get_base.unwrap())(self.0) }.addr()
    }

    /// Places a tensor `offset` bytes into the buffer.
    fn place(&self, tensor: &mut abi::Tensor, offset: usize) {
        tensor.buffer = self.0;
        tensor.data = ptr::without_provenance_mut(self.base() + offset);
    }

    fn set(&self, tensor: &mut abi::Tensor, offset: usize, bytes: &[u8]) {
        // SAFETY: buffer, tensor and bytes are valid during the call.
        unsafe {
            (self.iface().set_tensor.unwrap())(self.0, tensor, bytes.as_ptr().cast(), offset, bytes.len());
        }
    }

    fn get(&self, tensor: &abi::Tensor, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0xee; len];
        // SAFETY: buffer, tensor and bytes are valid during the call.
        unsafe { (self.iface().get_tensor.unwrap())(self.0, tensor, out.as_mut_ptr().cast(), offset, len) };
        out
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: the buffer is freed once, and was boxed by the tests' maker.
        unsafe {
            (self.iface().free_buffer.unwrap())(self.0);
            drop(Box::from_raw(self.0));
        }
    }
}

/// A graph of these nodes, which it borrows.
fn graph_of(nodes: &mut [*mut abi::Tensor], uid: u64) -> abi::CGraph {
    abi::CGraph {
        size: nodes.len() as i32,
        n_nodes: nodes.len() as i32,
        n_leafs: 0,
        nodes: nodes.as_mut_ptr(),
        grads: ptr::null_mut(),
        grad_accs: ptr::null_mut(),
        leafs: ptr::null_mut(),
        use_counts: ptr::null_mut(),
        visited_hash_set: abi::HashSet { size: 0, used: ptr::null_mut(), keys: ptr::null_mut() },
        order: 0,
        uid,
    }
}

/// A backend as ggml holds it, freed as ggml frees it.
struct HeldBackend(*mut abi::Backend);

impl HeldBackend {
    fn new(device: &'static Device) -> Self {
        // SAFETY: the device has all functions.
        Self(unsafe { ((*device.as_ptr()).iface.init_backend.unwrap())(device.as_ptr(), ptr::null()) })
    }

    /// Computes nodes; gives ggml's status number.
    fn compute(&self, nodes: &mut [*mut abi::Tensor], uid: u64) -> i32 {
        let mut graph = graph_of(nodes, uid);
        // SAFETY: the backend has these functions; the graph and its tensors are valid during the call.
        unsafe {
            let status = ((*self.0).iface.graph_compute.unwrap())(self.0, &raw mut graph);
            ((*self.0).iface.synchronize.unwrap())(self.0);
            status
        }
    }
}

impl Drop for HeldBackend {
    fn drop(&mut self) {
        // SAFETY: the backend is freed once.
        unsafe { ((*self.0).iface.free.unwrap())(self.0) };
    }
}

/// Computes nodes on a backend of its own; gives ggml's status number.
fn compute(device: &'static Device, nodes: &mut [*mut abi::Tensor]) -> i32 {
    HeldBackend::new(device).compute(nodes, 0)
}

fn supports(device: &Device, node: &abi::Tensor) -> bool {
    // SAFETY: the device has all functions; the tensor is valid during the call.
    unsafe { ((*device.as_ptr()).iface.supports_op.unwrap())(device.as_ptr(), node) }
}

#[test]
fn a_panic_becomes_the_error_value_and_one_line() {
    assert_eq!(super::guard("get_type", 7, || panic!("no {}", "luck")), 7);
    let lines = super::log::captured::take();
    assert_eq!(lines, ["ggml-virtgpu: get_type failed: no luck; this is a bug in apir"]);
}
