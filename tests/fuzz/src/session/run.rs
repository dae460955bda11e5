//! Carrying out a session.
#![forbid(unsafe_code)]

use super::{Blob, Call, Handle, Inline, MAX_STEPS, Plain, Session, Size, Step, Tensor, Transfer};
use crate::graph::Graph;
use crate::guest::{self, Guest, Neighbour, encode};
use crate::threads::Threads;
use apir_ggml::TypeInfo;
use apir_protocol::handle::{BufferHandle, BufferTypeHandle};
use apir_protocol::messages::*;
use apir_protocol::tensor::{InlineTensor, MAX_SOURCES, RawTensor, TensorRecord};
use apir_protocol::{Request, Wire};
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Bytes of a buffer whose size is "fitting".
const FITTING: u64 = 4096;
/// Most pages of a blob.
const MAX_PAGES: usize = 16;
/// Most blobs of a guest, and most buffers.
const MAX_OBJECTS: usize = 32;

/// Runs an input beside this process's one neighbour.
pub fn run(input: &[u8]) {
    use crate::input::Input;
    thread_local! { static NEIGHBOUR: RefCell<Option<Neighbour>> = const { RefCell::new(None) }; }
    let Some(session) = Session::of(input) else { return };
    Machine::start(Threads::of(input)).run(&session);
    NEIGHBOUR.with_borrow_mut(|neighbour| neighbour.get_or_insert_with(Neighbour::start).check());
}

/// The two guests of a session.
#[derive(Debug)]
pub struct Machine {
    players: [Player; 2],
    scribblers: Vec<Scribbler>,
}

#[derive(Debug)]
struct Player {
    guest: Guest,
    started: bool,
    live: Vec<BufferHandle>,
    stale: Vec<BufferHandle>,
    type_: BufferTypeHandle,
    blobs: Vec<(u32, Arc<guest::Blob>, usize)>,
}

/// Writes one byte of a blob until it is dropped.
#[derive(Debug)]
struct Scribbler {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Scribbler {
    fn start(blob: Arc<guest::Blob>, offset: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut value = 0u8;
            while !stopped.load(Ordering::Relaxed) {
                value = value.wrapping_add(1);
                blob.write(offset, &[value]);
                std::thread::yield_now();
            }
        });
        Self { stop, thread: Some(thread) }
    }
}

impl Drop for Scribbler {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // It cannot fail: it only writes.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

impl Machine {
    /// Starts both guests.
    #[must_use]
    pub fn start(threads: Threads) -> Self {
        Self { players: [threads, threads].map(Player::started), scribblers: Vec::new() }
    }

    /// Takes every step, and then asks whether those contexts that run still answer.
    ///
    /// # Panics
    /// When one does not.
    pub fn run(&mut self, session: &Session) {
        for (who, step) in session.steps.iter().take(MAX_STEPS) {
            let who = usize::from(who % 2);
            if let Step::Scribble(blob, offset) = step {
                let blobs = &self.players[who].blobs;
                if let Some((_, blob, _)) = pick(blobs, *blob).filter(|_| self.scribblers.len() < 2) {
                    self.scribblers.push(Scribbler::start(blob.clone(), usize::from(*offset)));
                }
                continue;
            }
            let others = (self.players[1 - who].live.clone(), self.players[1 - who].type_);
            self.players[who].step(step, &others);
        }
        self.scribblers.clear();
        for player in &mut self.players {
            if player.started {
                player.guest.assert_alive();
            }
        }
    }
}

fn pick<T>(list: &[T], at: u8) -> Option<&T> {
    list.get(usize::from(at) % list.len().max(1))
}

/// The other guest's buffers and buffer type.
type Others = (Vec<BufferHandle>, BufferTypeHandle);

impl Player {
    fn started(threads: Threads) -> Self {
        let mut guest = Guest::started(threads);
        let type_ = guest.buffer_type();
        let live = vec![guest.buffer(FITTING as usize)];
        Self { guest, started: true, live, stale: Vec::new(), type_, blobs: Vec::new() }
    }

    fn step(&mut self, step: &Step, others: &Others) {
        match step {
            Step::Call(call) => self.call(call, others),
            Step::Cut(call, len) => {
                let (number, mut request) = self.request(call, others);
                request.truncate(usize::from(*len) % (request.len() + 1));
                self.guest.raw(number, &request);
            }
            Step::Trailing(call, bytes) => {
                let (number, mut request) = self.request(call, others);
                request.extend(bytes);
                self.send(call, number, &request);
            }
            Step::Raw(number, request) => {
                self.guest.raw(*number, request);
            }
            Step::MakeBlob(pages, fill) => {
                let bytes = vec![*fill; 4096 * (usize::from(*pages) % MAX_PAGES + 1)];
                self.add_blob(&bytes);
            }
            Step::MakeGraph(bytes) => match Graph::from_blob(&bytes.0) {
                Some(mut graph) => {
                    graph.resolve(&self.live);
                    self.add_blob(&graph.to_blob());
                }
                None => self.add_blob(&bytes.0),
            },
            Step::WriteBlob(blob, offset, bytes) => {
                if let Some((_, blob, _)) = pick(&self.blobs, *blob) {
                    blob.write(usize::from(*offset), bytes);
                }
            }
            Step::DropBlob(blob) => {
                if !self.blobs.is_empty() {
                    let (res_id, ..) = self.blobs.remove(usize::from(*blob) % self.blobs.len());
                    self.guest.drop_blob(res_id);
                }
            }
            Step::Start => {
                let code = self.guest.initialize();
                assert_eq!(code == guest::STARTED, !self.started, "initialize answered {code}");
                if !self.started {
                    self.started = true;
                    self.type_ = self.guest.buffer_type();
                }
            }
            Step::Stop => {
                self.guest.deinit();
                self.started = false;
                self.stale.append(&mut self.live);
            }
            Step::Scribble(..) => {}
        }
    }

    fn add_blob(&mut self, bytes: &[u8]) {
        if self.blobs.len() < MAX_OBJECTS {
            let (res_id, blob) = self.guest.blob(bytes);
            self.blobs.push((res_id, blob, bytes.len()));
        }
    }

    fn handle(&self, handle: Handle, (others, others_type): &Others) -> u64 {
        let buffer = |list: &[BufferHandle], at| pick(list, at).map_or(0, |handle| handle.0);
        match handle {
            Handle::Live(at) => buffer(&self.live, at),
            Handle::Stale(at) => buffer(&self.stale, at),
            Handle::Type => self.type_.0,
            Handle::Others(at) => buffer(others, at),
            Handle::OthersType => others_type.0,
            Handle::Raw(number) => number,
        }
    }

    /// The resource id, and how many bytes were put into the blob.
    fn blob(&self, blob: Blob) -> (u32, u64) {
        match blob {
            Blob::Live(at) => pick(&self.blobs, at).map_or((0, FITTING), |(id, _, len)| (*id, *len as u64)),
            Blob::Raw(number) => (number, FITTING),
        }
    }

    fn tensor(&self, tensor: &Tensor, others: &Others) -> TensorRecord {
        let type_ = u32::from(tensor.type_);
        TensorRecord {
            id: 1,
            type_,
            buffer: BufferHandle(self.handle(tensor.buffer, others)),
            ne: tensor.ne,
            nb: tensor
                .nb
                .unwrap_or_else(|| dense(type_, tensor.ne.map(i64::from)).map(|stride| stride as u32)),
            data: amount(tensor.data, 0),
            ..TensorRecord::default()
        }
    }

    fn inline(&self, inline: &Inline, others: &Others) -> InlineTensor {
        let mut tensor = plain(&inline.tensor);
        tensor.op = u32::from(inline.op);
        for (word, value) in tensor.op_params.iter_mut().zip(&inline.params) {
            *word = *value;
        }
        InlineTensor {
            tensor,
            buffer: BufferHandle(self.handle(inline.buffer, others)),
            view_src: inline.view.as_ref().map(plain),
            sources: inline.sources.iter().take(MAX_SOURCES).map(plain).collect(),
        }
    }

    /// Number and bytes of a command.
    fn request(&self, call: &Call, others: &Others) -> (u32, Vec<u8>) {
        fn bytes<R: Request>(request: &R) -> (u32, Vec<u8>) {
            (R::COMMAND.number(), encode(request))
        }
        let buffer = |handle: &Handle| BufferHandle(self.handle(*handle, others));
        let buffer_type = |handle: &Handle| BufferTypeHandle(self.handle(*handle, others));
        let moved = |transfer: &Transfer| {
            let (res_id, len) = self.blob(transfer.blob);
            let (offset, size) = (amount(transfer.offset, 0), amount(transfer.size, len));
            (buffer(&transfer.buffer), self.tensor(&transfer.tensor, others), res_id, offset, size)
        };
        match call {
            Call::GetDeviceCount => bytes(&DeviceGetDeviceCountRequest {}),
            Call::GetCount => bytes(&DeviceGetCountRequest {}),
            Call::GetName => bytes(&DeviceGetNameRequest {}),
            Call::GetDescription => bytes(&DeviceGetDescriptionRequest {}),
            Call::GetType => bytes(&DeviceGetTypeRequest {}),
            Call::GetMemory => bytes(&DeviceGetMemoryRequest {}),
            Call::SupportsOp(node) => bytes(&DeviceSupportsOpRequest { node: self.inline(node, others) }),
            Call::GetBufferType => bytes(&DeviceGetBufferTypeRequest {}),
            Call::GetProps => bytes(&DeviceGetPropsRequest {}),
            Call::BufferFromPtr { blob, size, max_tensor_size } => {
                let (res_id, len) = self.blob(*blob);
                let (size, max_tensor_size) = (amount(*size, len), amount(*max_tensor_size, len));
                bytes(&DeviceBufferFromPtrRequest { res_id, size, max_tensor_size })
            }
            Call::TypeName(handle) => bytes(&BufferTypeGetNameRequest { buffer_type: buffer_type(handle) }),
            Call::TypeAlignment(handle) => {
                bytes(&BufferTypeGetAlignmentRequest { buffer_type: buffer_type(handle) })
            }
            Call::TypeMaxSize(handle) => {
                bytes(&BufferTypeGetMaxSizeRequest { buffer_type: buffer_type(handle) })
            }
            Call::TypeIsHost(handle) => bytes(&BufferTypeIsHostRequest { buffer_type: buffer_type(handle) }),
            Call::Alloc(handle, size) => {
                let (buffer_type, size) = (buffer_type(handle), amount(*size, FITTING));
                bytes(&BufferTypeAllocBufferRequest { buffer_type, size })
            }
            Call::AllocSize(handle, node) => {
                let (buffer_type, tensor) = (buffer_type(handle), self.inline(node, others));
                bytes(&BufferTypeGetAllocSizeRequest { buffer_type, tensor })
            }
            Call::GetBase(handle) => bytes(&BufferGetBaseRequest { buffer: buffer(handle) }),
            Call::Set(transfer) => {
                let (buffer, tensor, res_id, offset, size) = moved(transfer);
                bytes(&BufferSetTensorRequest { buffer, tensor, res_id, offset, size })
            }
            Call::Get(transfer) => {
                let (buffer, tensor, res_id, offset, size) = moved(transfer);
                bytes(&BufferGetTensorRequest { buffer, tensor, res_id, offset, size })
            }
            Call::Copy { buffer: handle, from, to } => {
                let (source, destination) = (self.tensor(from, others), self.tensor(to, others));
                bytes(&BufferCpyTensorRequest { buffer: buffer(handle), source, destination })
            }
            Call::Clear(handle, value) => {
                bytes(&BufferClearRequest { buffer: buffer(handle), value: *value })
            }
            Call::Free(handle) => bytes(&BufferFreeBufferRequest { buffer: buffer(handle) }),
            Call::Compute(blob, size) => {
                let (res_id, len) = self.blob(*blob);
                bytes(&BackendGraphComputeRequest { res_id, size: amount(*size, len) })
            }
            Call::Hello(features) => bytes(&HelloRequest { features: *features }),
            Call::Names => bytes(&NamesRequest { version: "0.13.1".to_owned() }),
            Call::Liveness(blob, offset) => {
                let (res_id, len) = self.blob(*blob);
                bytes(&LivenessRequest { res_id, offset: amount(*offset, len.saturating_sub(4)) })
            }
        }
    }

    fn call(&mut self, call: &Call, others: &Others) {
        let (number, request) = self.request(call, others);
        self.send(call, number, &request);
    }

    /// Sends a whole command, and keeps account of the buffers.
    fn send(&mut self, call: &Call, number: u32, request: &[u8]) {
        if matches!(call, Call::Alloc(..) | Call::BufferFromPtr { .. }) && self.live.len() >= MAX_OBJECTS {
            return;
        }
        let (code, reply) = self.guest.raw(number, request);
        assert!(self.started || code != 0, "a context that does not run answers command {number}");
        if code != 0 {
            return;
        }
        let mut reply = apir_protocol::codec::Decoder::new(&reply);
        match call {
            Call::Alloc(..) => {
                let made = BufferTypeAllocBufferReply::decode(&mut reply);
                self.live.extend(made.ok().map(|made| made.buffer).filter(|buffer| !buffer.is_null()));
            }
            Call::BufferFromPtr { .. } => {
                let made = DeviceBufferFromPtrReply::decode(&mut reply);
                self.live.extend(made.ok().map(|made| made.buffer));
            }
            Call::Free(_) => {
                let request =
                    BufferFreeBufferRequest::decode(&mut apir_protocol::codec::Decoder::new(request));
                let freed = request.map(|request| request.buffer).unwrap_or_default();
                assert!(self.live.contains(&freed), "a buffer was freed that is none");
                self.live.retain(|live| *live != freed);
                self.stale.push(freed);
            }
            _ => {}
        }
    }
}

fn amount(size: Size, fitting: u64) -> u64 {
    match size {
        Size::Fitting => fitting,
        Size::Small(number) => number.into(),
        Size::Raw(number) => number,
    }
}

fn dense(type_: u32, ne: [i64; 4]) -> [u64; 4] {
    TypeInfo::get(type_).and_then(|info| info.dense_strides(ne)).unwrap_or_default()
}

fn plain(plain: &Plain) -> RawTensor {
    let type_ = u32::from(plain.type_);
    RawTensor {
        type_,
        ne: plain.ne,
        nb: plain.nb.unwrap_or_else(|| dense(type_, plain.ne)),
        ..RawTensor::default()
    }
}
