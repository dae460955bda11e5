//! Records the graphs of a program: a server of the socket link that keeps what it is told to compute.
//!
//! `record OUT EACH PROGRAM [ARGUMENT]...` runs the program with the guest's library of `APIR_DIST` and ggml's of `APIR_LLAMA_DIR`, and writes to
//! the archive OUT the EACH smallest graphs of every sequence of operations. With EACH 0 it writes the first commands to OUT, as a session.
#![allow(missing_docs)]
#![forbid(unsafe_code)]

use apir_fuzz::graph::Graph;
use apir_fuzz::guest::library;
use apir_fuzz::input::Input;
use apir_fuzz::recorded::{pack, sizes};
use apir_fuzz::session::Transcript;
use apir_protocol::Wire;
use apir_protocol::codec::Decoder;
use apir_protocol::command::{Command as Number, CommandType};
use apir_protocol::header::CommandHeader;
use apir_protocol::messages::{
    BackendGraphComputeRequest, BufferGetTensorRequest, BufferSetTensorRequest, DeviceBufferFromPtrRequest,
    LivenessRequest,
};
use apir_protocol::socket::{ClientFrame, MAX_FRAME, SOCKET_VERSION, ServerFrame};
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, accept, bind, listen,
    recv, sendmsg, socket,
};
use std::collections::{BTreeMap, HashMap};
use std::error::Error;
use std::fs::File;
use std::io::IoSlice;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex, PoisonError};
use virglrenderer::{Config, Context};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// What a program has sent.
#[derive(Debug, Default)]
struct Record {
    /// Graphs by their operations.
    graphs: BTreeMap<Vec<u32>, Vec<Graph>>,
    /// The commands.
    transcript: Transcript,
}

type Found = Arc<Mutex<Record>>;

fn main() -> Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    let mut next = || arguments.next().ok_or("record OUT EACH PROGRAM [ARGUMENT]...");
    let (out, each, program) = (PathBuf::from(next()?), next()?, next()?);
    let each: usize = each.to_str().ok_or("EACH is a number")?.parse()?;
    let dist = PathBuf::from(std::env::var_os("APIR_DIST").ok_or("APIR_DIST is not set")?);

    let folder = tempfile::tempdir()?;
    let path = folder.path().join("socket");
    let server = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
    bind(server.as_raw_fd(), &UnixAddr::new(&path)?)?;
    listen(&server, Backlog::new(4)?)?;
    let found = Found::default();
    let (keeper, plugin) = (found.clone(), dist.join("libggml-virtgpu-backend.so"));
    std::thread::spawn(move || {
        for id in 1.. {
            let Ok(client) = accept(&server) else { return };
            let (keeper, plugin) = (keeper.clone(), plugin.clone());
            std::thread::spawn(move || {
                if let Err(error) = serve(&client, id, plugin, each, &keeper) {
                    eprintln!("client {id}: {error}");
                }
            });
        }
    });
    let status = Command::new(program)
        .args(arguments)
        .env("APIR_SOCKET", &path)
        .env("GGML_BACKEND_PATH", dist.join("libggml-virtgpu.so"))
        .status()?;
    eprintln!("the program ended with {status}");
    let found = found.lock().unwrap_or_else(PoisonError::into_inner);
    let graphs: Vec<_> = found.graphs.values().flatten().cloned().collect();
    let session = found.transcript.session();
    let (what, count, bytes) = match each {
        0 => ("steps", session.steps.len(), session.store()),
        _ => ("graphs", graphs.len(), pack(&graphs)),
    };
    eprintln!("{count} {what} in {} bytes", bytes.len());
    Ok(std::fs::write(out, bytes)?)
}

fn serve(client: &OwnedFd, id: u32, plugin: PathBuf, each: usize, found: &Found) -> Result<()> {
    let mut context =
        Context::new(id, Config::default().plugin(plugin).set("ggml.library.path", library())?)?;
    let mut blobs: HashMap<u32, File> = HashMap::new();
    let mut buffer = vec![0; MAX_FRAME];
    loop {
        let len = recv(client.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        if len == 0 {
            return Ok(());
        }
        let packet = &mut buffer[..len];
        match ClientFrame::parse(packet)? {
            ClientFrame::Hello { .. } => send(client, ServerFrame::Hello { version: SOCKET_VERSION }, None)?,
            ClientFrame::CreateBlob { size } => match context.create_blob(size) {
                Ok(blob) => {
                    let frame = ServerFrame::Blob { res_id: blob.res_id, size: blob.size };
                    send(client, frame, Some(&blob.memory))?;
                    blobs.insert(blob.res_id, blob.memory.into());
                }
                Err(code) => send(client, ServerFrame::BlobRefused { code }, None)?,
            },
            ClientFrame::Unref { res_id } => {
                context.unref_blob(res_id);
                blobs.remove(&res_id);
            }
            ClientFrame::Submit { command } => {
                let at = len - command.len();
                let told = Told::of(command, &blobs);
                context.submit(&mut packet[at..])?;
                if let Some(told) = told {
                    told.keep(each, &blobs, found);
                }
            }
            ClientFrame::Attach { .. } => return Err("a client that makes blobs".into()),
        }
    }
}

fn send(client: &OwnedFd, frame: ServerFrame, memory: Option<&OwnedFd>) -> Result<()> {
    let frame = frame.to_frame();
    let fds: Vec<_> = memory.iter().map(|fd| fd.as_raw_fd()).collect();
    let rights = [ControlMessage::ScmRights(&fds)];
    let control = if fds.is_empty() { &rights[..0] } else { &rights[..] };
    let parts = [IoSlice::new(frame.as_bytes())];
    sendmsg::<UnixAddr>(client.as_raw_fd(), &parts, control, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}

/// A forwarded command.
#[derive(Debug)]
struct Told {
    number: u32,
    request: Vec<u8>,
    reply: u32,
    /// What the blob holds that the request names.
    blob: Option<Vec<u8>>,
}

impl Told {
    fn of(command: &[u8], blobs: &HashMap<u32, File>) -> Option<Self> {
        let header = CommandHeader::from_bytes(command).ok()?;
        if header.type_ != CommandType::Forward.number() {
            return None;
        }
        let request = command.get(12..)?.to_vec();
        let res_id = match Number::from_number(header.flags)? {
            Number::BackendGraphCompute => decode::<BackendGraphComputeRequest>(&request)?.res_id,
            Number::BufferSetTensor => decode::<BufferSetTensorRequest>(&request)?.res_id,
            Number::BufferGetTensor => decode::<BufferGetTensorRequest>(&request)?.res_id,
            Number::Liveness => decode::<LivenessRequest>(&request)?.res_id,
            Number::DeviceBufferFromPtr => decode::<DeviceBufferFromPtrRequest>(&request)?.res_id,
            _ => 0,
        };
        let blob = blobs.get(&res_id).and_then(read);
        Some(Self { number: header.flags, request, reply: header.reply_res_id, blob })
    }

    fn keep(self, each: usize, blobs: &HashMap<u32, File>, found: &Found) {
        let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
        if each == 0 {
            let page = blobs.get(&self.reply).and_then(read).unwrap_or_default();
            // The reply lies behind the notification word.
            let reply = page.get(4..).unwrap_or_default();
            found.transcript.add(self.number, &self.request, reply, self.blob.as_deref());
        } else if self.number == Number::BackendGraphCompute.number()
            && let Some(graph) = self.blob.as_deref().and_then(Graph::from_blob)
        {
            keep(graph, each, &mut found.graphs);
        }
    }
}

fn decode<T: Wire>(bytes: &[u8]) -> Option<T> {
    T::decode(&mut Decoder::new(bytes)).ok()
}

/// All bytes of a blob.
fn read(file: &File) -> Option<Vec<u8>> {
    let mut bytes = vec![0; usize::try_from(file.metadata().ok()?.len()).ok()?];
    file.read_exact_at(&mut bytes, 0).ok()?;
    Some(bytes)
}

/// Keeps a graph unless there are smaller ones.
fn keep(mut graph: Graph, each: usize, found: &mut BTreeMap<Vec<u32>, Vec<Graph>>) {
    let operations = |graph: &Graph| {
        graph.nodes.iter().filter_map(|id| graph.find(*id)).map(|tensor| tensor.op).collect::<Vec<_>>()
    };
    let bytes = |graph: &Graph| sizes(graph).values().sum::<u64>();
    plain(&mut graph);
    let key = operations(&graph);
    let kept = found.entry(key).or_default();
    // A step later only positions differ, which are contents.
    if !kept.contains(&graph) {
        kept.push(graph);
        kept.sort_by_key(bytes);
        kept.truncate(each);
    }
}

/// Larger buffers are made smaller where that changes nothing for a graph's nodes.
const SMALL: u64 = 1 << 20;

/// Numbers ids and buffers from 1, forgets names, and lets all that lies in a large buffer of nothing but leafs lie at its start.
fn plain(graph: &mut Graph) {
    let sizes = sizes(graph);
    let mut ids = HashMap::from([(0, 0)]);
    let mut buffers = HashMap::from([(0, 0)]);
    let mut computed = HashMap::new();
    for tensor in &graph.tensors {
        let next = ids.len() as u64;
        ids.entry(tensor.id).or_insert(next);
        let next = buffers.len() as u64;
        buffers.entry(tensor.buffer.0).or_insert(next);
        *computed.entry(tensor.buffer.0).or_insert(false) |= tensor.op != 0 && tensor.view_src == 0;
    }
    let starts: HashMap<u64, u64> = graph.tensors.iter().map(|tensor| (tensor.id, tensor.data)).collect();
    let number = |id: &mut u64| *id = ids.get(id).copied().unwrap_or(*id);
    graph.nodes.iter_mut().for_each(number);
    for tensor in &mut graph.tensors {
        let large = sizes.get(&tensor.buffer.0).is_some_and(|size| *size > SMALL);
        if large && computed.get(&tensor.buffer.0) == Some(&false) {
            let root = if tensor.view_src == 0 { tensor.id } else { tensor.view_src };
            tensor.data -= starts.get(&root).copied().unwrap_or_default();
        }
        tensor.buffer.0 = buffers.get(&tensor.buffer.0).copied().unwrap_or_default();
        number(&mut tensor.id);
        tensor.src.iter_mut().for_each(number);
        number(&mut tensor.view_src);
        tensor.name = [0; 64];
    }
}
