//! What a real program sends, as a session.
#![forbid(unsafe_code)]

use super::{
    Blob, Call, GraphBytes, Handle, Inline, MAX_STEPS, Plain, Session, Size, Step, Tensor, Transfer,
};
use crate::graph::Graph;
use apir_ggml::TypeInfo;
use apir_protocol::Wire;
use apir_protocol::codec::Decoder;
use apir_protocol::command::Command;
use apir_protocol::handle::BufferHandle;
use apir_protocol::messages::*;
use apir_protocol::tensor::{InlineTensor, RawTensor, TensorRecord};
use std::collections::HashMap;

/// How often a question about a node is kept: programs ask about each.
const QUESTIONS: usize = 2;
/// Bytes of a page of a blob.
const PAGE: usize = 4096;

/// The commands of a guest so far, its handles and blobs counted as a [`Session`] counts them.
#[derive(Debug, Default)]
pub struct Transcript {
    steps: Vec<Step>,
    live: Vec<u64>,
    stale: Vec<u64>,
    buffer_type: u64,
    blobs: Vec<u32>,
    asked: HashMap<u32, usize>,
}

impl Transcript {
    /// Adds a command, the bytes of its reply, and what the blob holds that it names.
    pub fn add(&mut self, number: u32, request: &[u8], reply: &[u8], blob: Option<&[u8]>) {
        let Some(command) = Command::from_number(number) else { return };
        let is_question = matches!(command, Command::DeviceSupportsOp | Command::BufferTypeGetAllocSize);
        let asked = self.asked.entry(number).or_default();
        *asked += 1;
        let wanted = self.steps.len() + 2 <= MAX_STEPS && !(is_question && *asked > QUESTIONS);
        if wanted && let Some(call) = self.call(command, request, blob) {
            self.steps.push(Step::Call(call));
        }
        self.follow(command, request, reply);
    }

    /// The session up to here.
    #[must_use]
    pub fn session(&self) -> Session {
        Session { steps: self.steps.iter().map(|step| (0, step.clone())).collect() }
    }

    /// Keeps account of the handles.
    fn follow(&mut self, command: Command, request: &[u8], reply: &[u8]) {
        let made = match command {
            Command::DeviceGetBufferType => {
                self.buffer_type =
                    decode::<DeviceGetBufferTypeReply>(reply).map_or(0, |reply| reply.buffer_type.0);
                None
            }
            Command::BufferTypeAllocBuffer => {
                decode::<BufferTypeAllocBufferReply>(reply).map(|reply| reply.buffer)
            }
            Command::DeviceBufferFromPtr => {
                decode::<DeviceBufferFromPtrReply>(reply).map(|reply| reply.buffer)
            }
            Command::BufferFreeBuffer => {
                let freed = decode::<BufferFreeBufferRequest>(request).map_or(0, |request| request.buffer.0);
                self.live.retain(|live| *live != freed);
                self.stale.push(freed);
                None
            }
            _ => None,
        };
        self.live.extend(made.filter(|buffer| !buffer.is_null()).map(|buffer| buffer.0));
    }

    fn call(&mut self, command: Command, request: &[u8], blob: Option<&[u8]>) -> Option<Call> {
        let buffer_type = Handle::Type;
        Some(match command {
            Command::DeviceGetDeviceCount => Call::GetDeviceCount,
            Command::DeviceGetCount => Call::GetCount,
            Command::DeviceGetName => Call::GetName,
            Command::DeviceGetDescription => Call::GetDescription,
            Command::DeviceGetType => Call::GetType,
            Command::DeviceGetMemory => Call::GetMemory,
            Command::DeviceSupportsOp => {
                Call::SupportsOp(self.inline(&decode::<DeviceSupportsOpRequest>(request)?.node))
            }
            Command::DeviceGetBufferType => Call::GetBufferType,
            Command::DeviceGetProps => Call::GetProps,
            Command::DeviceBufferFromPtr => {
                let asked = decode::<DeviceBufferFromPtrRequest>(request)?;
                let blob = self.blob(asked.res_id, blob);
                Call::BufferFromPtr { blob, size: Size::Fitting, max_tensor_size: Size::Fitting }
            }
            Command::BufferTypeGetName => Call::TypeName(buffer_type),
            Command::BufferTypeGetAlignment => Call::TypeAlignment(buffer_type),
            Command::BufferTypeGetMaxSize => Call::TypeMaxSize(buffer_type),
            Command::BufferTypeIsHost => Call::TypeIsHost(buffer_type),
            Command::BufferTypeAllocBuffer => {
                Call::Alloc(buffer_type, Size::Raw(decode::<BufferTypeAllocBufferRequest>(request)?.size))
            }
            Command::BufferTypeGetAllocSize => Call::AllocSize(
                buffer_type,
                self.inline(&decode::<BufferTypeGetAllocSizeRequest>(request)?.tensor),
            ),
            Command::BufferGetBase => {
                Call::GetBase(self.handle(decode::<BufferGetBaseRequest>(request)?.buffer))
            }
            Command::BufferSetTensor => {
                let asked = decode::<BufferSetTensorRequest>(request)?;
                let place = (asked.buffer, asked.offset, asked.size);
                Call::Set(self.transfer(place, &asked.tensor, asked.res_id, blob))
            }
            Command::BufferGetTensor => {
                let asked = decode::<BufferGetTensorRequest>(request)?;
                let place = (asked.buffer, asked.offset, asked.size);
                Call::Get(self.transfer(place, &asked.tensor, asked.res_id, blob))
            }
            Command::BufferCpyTensor => {
                let asked = decode::<BufferCpyTensorRequest>(request)?;
                let (from, to) = (self.tensor(&asked.source), self.tensor(&asked.destination));
                Call::Copy { buffer: self.handle(asked.buffer), from, to }
            }
            Command::BufferClear => {
                let asked = decode::<BufferClearRequest>(request)?;
                Call::Clear(self.handle(asked.buffer), asked.value)
            }
            Command::BufferFreeBuffer => {
                Call::Free(self.handle(decode::<BufferFreeBufferRequest>(request)?.buffer))
            }
            Command::Hello => Call::Hello(decode::<HelloRequest>(request)?.features),
            Command::Names => Call::Names,
            Command::Liveness => {
                let asked = decode::<LivenessRequest>(request)?;
                Call::Liveness(self.blob(asked.res_id, blob), Size::Raw(asked.offset))
            }
            Command::BackendGraphCompute => {
                let mut graph = Graph::from_blob(blob?)?;
                for tensor in &mut graph.tensors {
                    // A session's own buffer comes before those that it makes.
                    let place = self.live.iter().position(|live| *live == tensor.buffer.0);
                    tensor.buffer = BufferHandle(place.map_or(0, |place| place as u64 + 2));
                    tensor.name = [0; 64];
                }
                self.steps.push(Step::MakeGraph(GraphBytes(graph.to_blob())));
                // No command names it, so that it stays.
                self.blobs.push(0);
                Call::Compute(Blob::Live(self.blobs.len() as u8 - 1), Size::Fitting)
            }
        })
    }

    fn handle(&self, buffer: BufferHandle) -> Handle {
        let place = |list: &[u64]| list.iter().position(|known| *known == buffer.0).map(|at| at as u8);
        match (place(&self.live), place(&self.stale)) {
            (Some(at), _) => Handle::Live(at + 1),
            (None, Some(at)) => Handle::Stale(at),
            (None, None) if buffer.0 == self.buffer_type => Handle::Type,
            (None, None) => Handle::Raw(buffer.0),
        }
    }

    /// The blob of a resource, made of as many pages where it is new.
    fn blob(&mut self, res_id: u32, bytes: Option<&[u8]>) -> Blob {
        let at = self.blobs.iter().position(|known| *known == res_id).unwrap_or_else(|| {
            let pages = bytes.map_or(1, <[u8]>::len).div_ceil(PAGE).clamp(1, 16);
            self.steps.push(Step::MakeBlob(pages as u8 - 1, 0));
            self.blobs.push(res_id);
            self.blobs.len() - 1
        });
        Blob::Live(at as u8)
    }

    fn transfer(
        &mut self,
        (buffer, offset, size): (BufferHandle, u64, u64),
        tensor: &TensorRecord,
        res_id: u32,
        bytes: Option<&[u8]>,
    ) -> Transfer {
        Transfer {
            buffer: self.handle(buffer),
            tensor: self.tensor(tensor),
            blob: self.blob(res_id, bytes),
            offset: Size::Raw(offset),
            size: Size::Raw(size),
        }
    }

    fn tensor(&self, tensor: &TensorRecord) -> Tensor {
        let dense = dense(tensor.type_, tensor.ne.map(i64::from)) == Some(tensor.nb.map(u64::from));
        Tensor {
            buffer: self.handle(tensor.buffer),
            type_: tensor.type_ as u8,
            ne: tensor.ne,
            nb: (!dense).then_some(tensor.nb),
            data: Size::Raw(tensor.data),
        }
    }

    fn inline(&self, node: &InlineTensor) -> Box<Inline> {
        let params = &node.tensor.op_params;
        let used = params.iter().rposition(|word| *word != 0).map_or(0, |at| at + 1);
        Box::new(Inline {
            op: node.tensor.op as u8,
            params: params[..used].to_vec(),
            tensor: plain(&node.tensor),
            buffer: self.handle(node.buffer),
            view: node.view_src.as_ref().map(plain),
            sources: node.sources.iter().map(plain).collect(),
        })
    }
}

fn plain(tensor: &RawTensor) -> Plain {
    let is_dense = dense(tensor.type_, tensor.ne) == Some(tensor.nb);
    Plain { type_: tensor.type_ as u8, ne: tensor.ne, nb: (!is_dense).then_some(tensor.nb) }
}

fn dense(type_: u32, ne: [i64; 4]) -> Option<[u64; 4]> {
    TypeInfo::get(type_)?.dense_strides(ne)
}

fn decode<T: Wire>(bytes: &[u8]) -> Option<T> {
    T::decode(&mut Decoder::new(bytes)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::{encode, whole};

    #[test]
    fn handles_and_blobs_are_counted_as_a_session_counts_them() {
        let mut transcript = Transcript::default();
        let mut add = |number: Command, request: &[u8], reply: &[u8], blob: Option<&[u8]>| {
            transcript.add(number.number(), request, reply, blob);
        };
        let buffer = BufferHandle(77);
        let made = encode(&BufferTypeAllocBufferReply { buffer });
        let asked = encode(&BufferTypeAllocBufferRequest { size: 640, ..Default::default() });
        add(Command::BufferTypeAllocBuffer, &asked, &made, None);
        let request =
            BufferSetTensorRequest { buffer, tensor: whole(buffer, 8), res_id: 5, offset: 0, size: 8 };
        add(Command::BufferSetTensor, &encode(&request), &[], Some(&[0; 5000]));
        add(Command::BufferFreeBuffer, &encode(&BufferFreeBufferRequest { buffer }), &[], None);
        add(Command::BufferGetBase, &encode(&BufferGetBaseRequest { buffer }), &[], None);
        let steps: Vec<_> = transcript.session().steps.into_iter().map(|(_, step)| step).collect();
        assert_eq!(steps[0], Step::Call(Call::Alloc(Handle::Type, Size::Raw(640))));
        assert_eq!(steps[1], Step::MakeBlob(1, 0));
        let Step::Call(Call::Set(transfer)) = &steps[2] else { panic!("{:?}", steps[2]) };
        assert_eq!((transfer.buffer, transfer.blob), (Handle::Live(1), Blob::Live(0)));
        assert_eq!(steps[3], Step::Call(Call::Free(Handle::Live(1))));
        assert_eq!(steps[4], Step::Call(Call::GetBase(Handle::Stale(0))));
    }
}
