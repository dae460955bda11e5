//! Requests, tensors and graphs that guests send, whatever way they take to the plugin: [`crate::harness`] says which one.

use crate::harness::Guest;
use apir_protocol::codec::{Decoder, Encoder};
use apir_protocol::graph::{encode_graph, graph_size};
use apir_protocol::handle::{BufferHandle, BufferTypeHandle};
use apir_protocol::messages::*;
use apir_protocol::tensor::TensorRecord;
use apir_protocol::{Request, Wire};

/// Operation numbers of ggml 0.26, whose library the tests load.
pub(crate) const OP_ADD: u32 = 2;
pub(crate) const OP_SQR: u32 = 9;
pub(crate) const OP_CPY: u32 = 34;
pub(crate) const OP_VIEW: u32 = 37;
pub(crate) const OP_MAP_CUSTOM1: u32 = 92;
pub(crate) const OP_CUSTOM: u32 = 95;
pub(crate) const TYPE_F32: u32 = 0;
pub(crate) const FLAG_COMPUTE: i32 = 16;

/// What a guest does with the bytes and blobs that it sends.
impl Guest {
    pub(crate) fn encode<R: Request>(request: &R) -> Vec<u8> {
        let mut bytes = vec![0; 8192];
        let mut encoder = Encoder::new(&mut bytes);
        request.encode(&mut encoder).unwrap();
        let len = encoder.len();
        bytes.truncate(len);
        bytes
    }

    pub(crate) fn try_call<R: Request>(&self, request: &R) -> Result<R::Reply, u32> {
        match self.raw(R::COMMAND.number(), &Self::encode(request)) {
            (0, reply) => Ok(R::Reply::decode(&mut Decoder::new(&reply)).unwrap()),
            (code, reply) => {
                assert!(
                    reply.is_empty() || !Self::reason(&reply).is_empty(),
                    "a refusal has no reply but its reason"
                );
                Err(code)
            }
        }
    }

    /// What a refusal's reply says.
    pub(crate) fn reason(reply: &[u8]) -> String {
        let mut decoder = Decoder::new(reply);
        let reason = decoder.string().unwrap();
        assert!(decoder.left() == 0 && reason.len() <= 256);
        reason
    }

    pub(crate) fn call<R: Request + std::fmt::Debug>(&self, request: &R) -> R::Reply {
        self.try_call(request).unwrap_or_else(|code| panic!("{request:?} answered {code}"))
    }

    pub(crate) fn buffer_type(&self) -> BufferTypeHandle {
        self.call(&DeviceGetBufferTypeRequest {}).buffer_type
    }

    pub(crate) fn buffer(&self, size: u64) -> BufferHandle {
        let buffer_type = self.buffer_type();
        let buffer = self.call(&BufferTypeAllocBufferRequest { buffer_type, size }).buffer;
        assert!(!buffer.is_null());
        buffer
    }

    pub(crate) fn set(&mut self, tensor: TensorRecord, bytes: &[u8]) {
        let res_id = self.blob(bytes);
        let (buffer, size) = (tensor.buffer, bytes.len() as u64);
        self.call(&BufferSetTensorRequest { buffer, tensor, res_id, offset: 0, size });
    }

    pub(crate) fn get(&mut self, tensor: TensorRecord, len: usize) -> Vec<u8> {
        let res_id = self.blob(&vec![0xee; len]);
        let (buffer, size) = (tensor.buffer, len as u64);
        self.call(&BufferGetTensorRequest { buffer, tensor, res_id, offset: 0, size });
        self.blob_bytes(res_id, len)
    }

    pub(crate) fn compute(&mut self, nodes: &[u64], tensors: &[TensorRecord]) -> Result<i32, u32> {
        let mut bytes = vec![0; graph_size(nodes.len() as u32, tensors.len() as u32) as usize];
        encode_graph(nodes, tensors, &mut bytes).unwrap();
        self.compute_bytes(&bytes)
    }

    pub(crate) fn compute_bytes(&mut self, bytes: &[u8]) -> Result<i32, u32> {
        let res_id = self.blob(bytes);
        let size = bytes.len() as u64;
        let status = self.try_call(&BackendGraphComputeRequest { res_id, size }).map(|reply| reply.status);
        self.drop_blob(res_id);
        status
    }

    /// The context still works.
    pub(crate) fn assert_alive(&self) {
        assert_eq!(self.call(&DeviceGetCountRequest {}).count, 1);
    }
}

pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
}

pub(crate) fn bytes(floats: &[f32]) -> Vec<u8> {
    floats.iter().flat_map(|float| float.to_le_bytes()).collect()
}

/// A row of `n` floats.
pub(crate) fn row(id: u64, buffer: BufferHandle, data: u64, n: u32) -> TensorRecord {
    let nb = [4, 4 * n, 4 * n, 4 * n];
    TensorRecord { id, type_: TYPE_F32, buffer, ne: [n, 1, 1, 1], nb, data, ..TensorRecord::default() }
}

pub(crate) fn node(
    id: u64,
    buffer: BufferHandle,
    data: u64,
    n: u32,
    op: u32,
    sources: &[u64],
) -> TensorRecord {
    let mut record = TensorRecord { op, flags: FLAG_COMPUTE, ..row(id, buffer, data, n) };
    record.src[..sources.len()].copy_from_slice(sources);
    record
}

/// A graph to be, with its tensors side by side in one buffer.
pub(crate) struct Scene {
    pub(crate) buffer: BufferHandle,
    pub(crate) tensors: Vec<TensorRecord>,
    pub(crate) nodes: Vec<u64>,
    next: u64,
}

pub(crate) const TYPE_F16: u32 = 1;
pub(crate) const TYPE_Q8_0: u32 = 8;
pub(crate) const TYPE_I32: u32 = 26;
pub(crate) const TYPE_I64: u32 = 27;

impl Scene {
    pub(crate) fn new(buffer: BufferHandle) -> Self {
        Self { buffer, tensors: Vec::new(), nodes: Vec::new(), next: 0 }
    }

    /// A dense tensor behind the others; its id.
    pub(crate) fn leaf(&mut self, type_: u32, ne: &[u32]) -> u64 {
        let mut all = [1; 4];
        all[..ne.len()].copy_from_slice(ne);
        let info = apir_ggml::TypeInfo::get(type_).unwrap();
        let wide = info.dense_strides(all.map(i64::from)).unwrap();
        let id = self.tensors.len() as u64 + 1;
        let (buffer, data) = (self.buffer, self.next);
        self.next = (data + wide[3] * u64::from(all[3])).next_multiple_of(64);
        self.tensors.push(TensorRecord {
            id,
            type_,
            buffer,
            ne: all,
            nb: wide.map(|stride| stride as u32),
            data,
            ..TensorRecord::default()
        });
        id
    }

    pub(crate) fn node(&mut self, op: u32, type_: u32, ne: &[u32], sources: &[u64], params: &[i32]) -> u64 {
        let id = self.leaf(type_, ne);
        let record = self.get(id);
        (record.op, record.flags) = (op, FLAG_COMPUTE);
        record.src[..sources.len()].copy_from_slice(sources);
        record.op_params[..params.len()].copy_from_slice(params);
        self.nodes.push(id);
        id
    }

    /// A node over a tensor that is there.
    pub(crate) fn over(&mut self, op: u32, target: u64, sources: &[u64], params: &[i32]) -> u64 {
        let like = *self.get(target);
        let id = self.node(op, like.type_, &like.ne, sources, params);
        let record = self.get(id);
        (record.view_src, record.data, record.nb) = (target, like.data, like.nb);
        id
    }

    pub(crate) fn get(&mut self, id: u64) -> &mut TensorRecord {
        &mut self.tensors[id as usize - 1]
    }

    pub(crate) fn compute(&self, guest: &mut Guest) -> Result<i32, u32> {
        guest.compute(&self.nodes, &self.tensors)
    }
}

/// Runs the body in a process of its own, since a check that is missing may end it. `test` is the path of the calling test.
pub(crate) fn in_child(test: &str, body: impl FnOnce()) {
    const CHILD: &str = "APIR_TEST_CHILD";
    if std::env::var_os(CHILD).is_some_and(|name| name == test) {
        return body();
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args([test, "--exact", "--include-ignored", "--nocapture"]).env(CHILD, test);
    let output = child.output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{test}: {}\n{out}\n{err}", output.status);
}

pub(crate) fn ints(values: &[i32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// What comes of every command that uses a blob, for so many bytes of this one.
pub(crate) fn every_use(guest: &Guest, buffer: BufferHandle, res_id: u32, size: u64) -> [Result<(), u32>; 4] {
    let tensor = row(1, buffer, 0, 4096);
    [
        guest.try_call(&BufferSetTensorRequest { buffer, tensor, res_id, offset: 0, size }).map(|_| ()),
        guest.try_call(&BufferGetTensorRequest { buffer, tensor, res_id, offset: 0, size }).map(|_| ()),
        guest.try_call(&BackendGraphComputeRequest { res_id, size }).map(|_| ()),
        guest.try_call(&DeviceBufferFromPtrRequest { res_id, size, max_tensor_size: size }).map(|_| ()),
    ]
}
