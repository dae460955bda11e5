//! A host in this process: a link whose commands are answered before `submit` returns.
#![forbid(unsafe_code)]

use crate::link::{Blob, Link, LinkError, Pulse, Unref};
use apir_protocol::codec::{Decoder, Encoder};
use apir_protocol::command::{Command, CommandType, HandlerCode};
use apir_protocol::constants::{FORWARD_BASE, HANDSHAKE_MAGIC, REPLY_BLOB_SIZE};
use apir_protocol::handle::{BufferHandle, BufferTypeHandle};
use apir_protocol::header::{CommandHeader, HEADER_SIZE};
use apir_protocol::messages::*;
use apir_protocol::socket::BlobRefusal;
use apir_protocol::{Request, Wire};
use memmap2::MmapOptions;
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::collections::HashMap;
use std::fs::File;
use std::sync::{Arc, Mutex};

/// What the host is to do, and what it has seen.
#[derive(Debug)]
pub(crate) struct Script {
    /// Answer to the handshake.
    pub(crate) handshake: u32,
    /// Answer to the load.
    pub(crate) load: u32,
    /// Features beyond upstream's commands; without any the host knows upstream's alone.
    pub(crate) features: u64,
    /// What its numbers mean.
    pub(crate) names: Option<NamesReply>,
    /// Why it refuses commands.
    pub(crate) reason: Option<String>,
    /// The host is gone.
    pub(crate) gone: bool,
    /// The host is there and answers nothing.
    pub(crate) silent: bool,
    /// What every command is answered with, code and bytes, in place of an answer.
    pub(crate) rubbish: Option<(u32, Vec<u8>)>,
    /// Commands to be refused, with the handler's code.
    pub(crate) refused: HashMap<Command, u32>,
    /// The kind of the device.
    pub(crate) kind: u32,
    /// Whether buffers can be made over blobs.
    pub(crate) from_ptr: bool,
    /// The answer about `mmap_support`, none for a host that knows nothing of it.
    pub(crate) mmap_support: Option<bool>,
    /// The device's name.
    pub(crate) name: String,
    /// The alignment of buffers.
    pub(crate) alignment: u64,
    /// The size of every tensor that is asked about.
    pub(crate) alloc_size: u64,
    /// The answer about operations.
    pub(crate) supports: bool,
    /// Whether blobs beyond the session's two are refused.
    pub(crate) refuse_blobs: bool,
    /// Status of computations.
    pub(crate) status: i32,
    /// Commands seen, in order.
    pub(crate) seen: Vec<Command>,
    /// Command types as they came, Venus offset included.
    pub(crate) types: Vec<u32>,
    /// The last graph.
    pub(crate) graph: Vec<u8>,
    /// Bytes of the device buffers by handle.
    pub(crate) buffers: HashMap<u64, Vec<u8>>,
    /// Res ids of buffers made over blobs, by handle.
    pub(crate) mapped: HashMap<u64, u32>,
    /// The host's own mappings of the blobs.
    pub(crate) blobs: HashMap<u32, Blob>,
    /// Res id of the blob whose first word is the sign of life.
    pub(crate) word: Option<u32>,
    /// Res ids given back.
    pub(crate) unreferenced: Vec<u32>,
    next_handle: u64,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            handshake: HANDSHAKE_MAGIC,
            load: 0,
            features: 0,
            names: None,
            reason: None,
            gone: false,
            silent: false,
            rubbish: None,
            refused: HashMap::new(),
            kind: 1,
            from_ptr: false,
            mmap_support: Some(true),
            name: "Fake".into(),
            alignment: 64,
            alloc_size: 1000,
            supports: true,
            refuse_blobs: false,
            status: 0,
            seen: Vec::new(),
            types: Vec::new(),
            graph: Vec::new(),
            buffers: HashMap::new(),
            mapped: HashMap::new(),
            blobs: HashMap::new(),
            word: None,
            unreferenced: Vec::new(),
            next_handle: 0,
        }
    }
}

/// The link to such a host.
#[derive(Debug, Default)]
pub(crate) struct FakeLink {
    pub(crate) offset: u32,
    host: Arc<Host>,
    pulse: Pulse,
}

/// A host that tests and its links share.
#[derive(Debug, Default)]
pub(crate) struct Host(pub(crate) Mutex<Script>);

/// The host's own mappings need no giving back.
#[derive(Debug)]
struct Nobody;

impl Unref for Nobody {
    fn unref(&self, _: u32) {}
}

impl Unref for Host {
    fn unref(&self, res_id: u32) {
        let mut script = self.0.lock().unwrap();
        script.blobs.remove(&res_id);
        script.unreferenced.push(res_id);
    }
}

impl FakeLink {
    /// A link, and the host behind it.
    pub(crate) fn new() -> (Box<Self>, Arc<Host>) {
        let host = Arc::<Host>::default();
        (Box::new(Self { offset: 0, host: host.clone(), pulse: Pulse::default() }), host)
    }
}

impl Link for FakeLink {
    fn transport(&self) -> &'static str {
        "fake"
    }

    fn command_type_offset(&self) -> u32 {
        self.offset
    }

    fn create_blob(&self, size: u64) -> Result<Blob, LinkError> {
        let mut script = self.host.0.lock().unwrap();
        let res_id = (script.blobs.len() + script.unreferenced.len() + 1) as u32;
        if script.refuse_blobs && res_id > 2 {
            return Err(LinkError::Refused { size, reason: BlobRefusal::Memory.into() });
        }
        let memory = File::from(memfd_create(c"fake", MFdFlags::empty()).unwrap());
        memory.set_len(size.next_multiple_of(4096)).unwrap();
        let map = || MmapOptions::new().map_raw(&memory).unwrap();
        script.blobs.insert(res_id, Blob::new(res_id, map(), Arc::new(Nobody)));
        Ok(Blob::new(res_id, map(), self.host.clone()))
    }

    fn submit(&self, command: &[u8]) -> Result<(), LinkError> {
        let mut script = self.host.0.lock().unwrap();
        if !script.gone && !script.silent {
            script.answer(self.offset, command);
        }
        Ok(())
    }

    fn check_peer(&self) -> Result<(), LinkError> {
        if self.host.0.lock().unwrap().gone { Err(LinkError::Lost("it left".into())) } else { Ok(()) }
    }

    fn pulse(&self) -> &Pulse {
        &self.pulse
    }
}

impl Script {
    fn answer(&mut self, offset: u32, command: &[u8]) {
        assert!(command.len().is_multiple_of(4));
        let header = CommandHeader::from_bytes(command).unwrap();
        self.types.push(header.type_);
        if let Some((code, bytes)) = &self.rubbish {
            let page = &self.blobs[&header.reply_res_id];
            page.write(4, bytes).unwrap();
            page.store_word(0, code.wrapping_add(1).max(1));
            return;
        }
        let mut reply = vec![0; REPLY_BLOB_SIZE as usize - 4];
        let mut encoder = Encoder::new(&mut reply);
        let code = match CommandType::from_number(header.type_ - offset).unwrap() {
            CommandType::Handshake => {
                encoder.u32(0).and_then(|()| encoder.u32(1)).unwrap();
                self.handshake
            }
            CommandType::LoadLibrary => self.load,
            CommandType::Forward => {
                let number = Command::from_number(header.flags).unwrap();
                if number == Command::Hello && self.features == 0 {
                    let page = &self.blobs[&header.reply_res_id];
                    page.store_word(0, HandlerCode::UnknownCommand.number() + FORWARD_BASE + 1);
                    return;
                }
                self.seen.push(number);
                let refused = self.refused.get(&number).copied();
                if let (Some(_), Some(reason)) = (refused, &self.reason) {
                    encoder.string(reason).unwrap();
                }
                refused
                    .unwrap_or_else(|| {
                        self.handle(number, &mut Decoder::new(&command[HEADER_SIZE..]), &mut encoder)
                    })
                    .wrapping_add(FORWARD_BASE)
            }
        };
        let len = encoder.len();
        let page = &self.blobs[&header.reply_res_id];
        page.write(4, &reply[..len]).unwrap();
        page.store_word(0, code + 1);
    }

    fn handle(&mut self, command: Command, arguments: &mut Decoder<'_>, out: &mut Encoder<'_>) -> u32 {
        fn request<R: Request>(arguments: &mut Decoder<'_>) -> R {
            let request = R::decode(arguments).unwrap();
            assert_eq!(arguments.left(), 0);
            request
        }
        match command {
            Command::Hello => {
                let asked: HelloRequest = request(arguments);
                HelloReply { features: asked.features & self.features }.encode(out)
            }
            Command::Names => {
                let _asked: NamesRequest = request(arguments);
                self.names.clone().unwrap_or_default().encode(out)
            }
            Command::Liveness => {
                let asked: LivenessRequest = request(arguments);
                assert_eq!(asked.offset, 0);
                self.word = Some(asked.res_id);
                LivenessReply { interval_ms: 1 }.encode(out)
            }
            Command::DeviceGetCount => DeviceGetCountReply { count: 1 }.encode(out),
            Command::DeviceGetName => DeviceGetNameReply { name: self.name.clone() }.encode(out),
            Command::DeviceGetDescription => {
                DeviceGetDescriptionReply { description: "A device".repeat(100) }.encode(out)
            }
            Command::DeviceGetType => DeviceGetTypeReply { type_: self.kind }.encode(out),
            Command::DeviceGetMemory => DeviceGetMemoryReply { free: 5, total: 7 }.encode(out),
            Command::DeviceGetBufferType => {
                DeviceGetBufferTypeReply { buffer_type: BufferTypeHandle(0xb) }.encode(out)
            }
            Command::DeviceGetProps => [false, false, self.from_ptr, false]
                .into_iter()
                .chain(self.mmap_support)
                .try_for_each(|ability| out.bool(ability)),
            Command::BufferTypeGetName => BufferTypeGetNameReply { name: "FakeBuffers".into() }.encode(out),
            Command::BufferTypeGetAlignment => {
                BufferTypeGetAlignmentReply { alignment: self.alignment }.encode(out)
            }
            Command::BufferTypeGetMaxSize => BufferTypeGetMaxSizeReply { max_size: 1 << 30 }.encode(out),
            Command::DeviceSupportsOp => {
                let _: DeviceSupportsOpRequest = request(arguments);
                DeviceSupportsOpReply { supported: self.supports }.encode(out)
            }
            Command::BufferTypeGetAllocSize => {
                let _: BufferTypeGetAllocSizeRequest = request(arguments);
                BufferTypeGetAllocSizeReply { size: self.alloc_size }.encode(out)
            }
            Command::DeviceBufferFromPtr => {
                let over: DeviceBufferFromPtrRequest = request(arguments);
                assert!(self.blobs[&over.res_id].len() as u64 >= over.size);
                self.next_handle += 1;
                self.mapped.insert(self.next_handle, over.res_id);
                let buffer = BufferHandle(self.next_handle);
                DeviceBufferFromPtrReply { buffer, buffer_type: BufferTypeHandle(0xb) }.encode(out)
            }
            Command::BufferTypeAllocBuffer => {
                let wanted: BufferTypeAllocBufferRequest = request(arguments);
                self.next_handle += 1;
                self.buffers.insert(self.next_handle, vec![0; wanted.size as usize]);
                BufferTypeAllocBufferReply { buffer: BufferHandle(self.next_handle) }.encode(out)
            }
            // Not aligned: the guest has to invent a base.
            Command::BufferGetBase => BufferGetBaseReply { base: 0x1001 }.encode(out),
            Command::BufferSetTensor => {
                let set: BufferSetTensorRequest = request(arguments);
                let at = (set.tensor.data + set.offset) as usize;
                let place = &mut self.buffers.get_mut(&set.buffer.0).unwrap()[at..at + set.size as usize];
                self.blobs[&set.res_id].read(0, place).unwrap();
                Ok(())
            }
            Command::BufferGetTensor => {
                let get: BufferGetTensorRequest = request(arguments);
                let at = (get.tensor.data + get.offset) as usize;
                let place = &self.buffers[&get.buffer.0][at..at + get.size as usize];
                self.blobs[&get.res_id].write(0, place).unwrap();
                Ok(())
            }
            Command::BufferClear => {
                let clear: BufferClearRequest = request(arguments);
                self.buffers.get_mut(&clear.buffer.0).unwrap().fill(clear.value);
                Ok(())
            }
            Command::BufferCpyTensor => {
                let copy: BufferCpyTensorRequest = request(arguments);
                let (from, to) = (copy.source, copy.destination);
                let len = (from.ne[0] * from.nb[0]) as usize;
                let at = from.data as usize;
                let bytes = self.buffers[&from.buffer.0][at..at + len].to_vec();
                let at = to.data as usize;
                self.buffers.get_mut(&copy.buffer.0).unwrap()[at..at + len].copy_from_slice(&bytes);
                BufferCpyTensorReply { copied: true }.encode(out)
            }
            Command::BufferFreeBuffer => {
                let free: BufferFreeBufferRequest = request(arguments);
                let known = self.buffers.remove(&free.buffer.0).is_some();
                // The blob outlives the buffer in it.
                let mapped = self.mapped.remove(&free.buffer.0);
                assert!(known || self.blobs.contains_key(&mapped.unwrap()));
                Ok(())
            }
            Command::BackendGraphCompute => {
                let compute: BackendGraphComputeRequest = request(arguments);
                self.graph = vec![0; compute.size as usize];
                self.blobs[&compute.res_id].read(0, &mut self.graph).unwrap();
                BackendGraphComputeReply { status: self.status }.encode(out)
            }
            other => panic!("the guest never sends {}", other.name()),
        }
        .map_or(1, |()| 0)
    }
}
