//! The socket's frames, and a renderer's context under a stream of them.
#![forbid(unsafe_code)]

use crate::input::{Input as _, change_list};
use apir_protocol::header::CommandHeader;
use apir_protocol::socket::{ClientFrame, ServerFrame};
use arbitrary::{Arbitrary, Unstructured};
use serde::{Deserialize, Serialize};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering};
use virglrenderer::{Config, Context, CreatedBlob};

/// The most packets of a stream: later ones are not sent.
const MAX_PACKETS: usize = 48;
/// The largest blob that a stream makes: the memory is shared out only where it is written, but maps take time.
const MAX_BLOB: u64 = 1 << 24;

/// What comes over a socket.
#[derive(Debug, Clone, PartialEq, Eq, Arbitrary, Serialize, Deserialize)]
pub enum Input {
    /// A packet to a server.
    Client(Vec<u8>),
    /// A packet to a client.
    Server(Vec<u8>),
    /// Packets to a server, whose plugin is of this kind.
    Stream(Plugin, Vec<Packet>),
}

/// The plugin of a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Arbitrary, Serialize, Deserialize)]
pub enum Plugin {
    /// None is configured.
    None,
    /// A file that is not there.
    Missing,
    /// A library that is no plugin.
    Other,
    /// The real one, where `APIR_DIST` names its folder.
    Real,
}

/// A packet of a client.
#[derive(Debug, Clone, PartialEq, Eq, Arbitrary, Serialize, Deserialize)]
pub enum Packet {
    /// Bytes.
    Raw(Vec<u8>),
    /// Asks for a blob.
    CreateBlob(u32),
    /// Gives one back.
    Unref(u8),
    /// A command: type, flags, whether the type has the Venus offset, the blob of the reply, the words behind.
    Submit {
        /// The command type.
        type_: u8,
        /// The number of a forwarded command.
        flags: u32,
        /// Whether the type is counted from Venus' on.
        venus: bool,
        /// The reply's blob, counted from 1.
        reply: u8,
        /// What follows.
        words: Vec<u32>,
    },
}

impl crate::input::Input for Input {
    fn change(&mut self, u: &mut Unstructured<'_>) {
        let bytes = |bytes: &mut Vec<u8>, u: &mut Unstructured<'_>| {
            change_list(bytes, u, |byte, u| *byte = u.arbitrary().unwrap_or(*byte));
        };
        match self {
            Self::Client(packet) | Self::Server(packet) => bytes(packet, u),
            Self::Stream(_, packets) => {
                change_list(packets, u, |packet, u| match packet {
                    Packet::Raw(packet) => bytes(packet, u),
                    Packet::Submit { words, .. } => {
                        change_list(words, u, |word, u| *word = u.arbitrary().unwrap_or(*word));
                    }
                    packet => *packet = Packet::arbitrary(u).unwrap_or(packet.clone()),
                });
                packets.truncate(MAX_PACKETS);
            }
        }
    }
}

impl Packet {
    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> Vec<u8> {
        match self {
            Self::Raw(bytes) => bytes.clone(),
            Self::CreateBlob(size) => ClientFrame::create_blob((*size).into()).as_bytes().to_vec(),
            Self::Unref(res_id) => ClientFrame::unref((*res_id).into()).as_bytes().to_vec(),
            Self::Submit { type_, flags, venus, reply, words } => {
                let type_ = u32::from(*type_) + if *venus { 331 } else { 0 };
                let header = CommandHeader { type_, flags: *flags, reply_res_id: (*reply).into() };
                let mut bytes = apir_protocol::socket::SUBMIT_PREFIX.to_vec();
                bytes.extend(header.to_bytes());
                bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
                bytes
            }
        }
    }
}

/// Runs an input.
///
/// # Panics
/// When a frame does not survive a round, or an answer is none.
pub fn run(input: &[u8]) {
    match Input::of(input) {
        Some(Input::Client(packet)) => client(&packet),
        Some(Input::Server(packet)) => server(&packet),
        Some(Input::Stream(plugin, packets)) => stream(plugin, &packets),
        None => {}
    }
}

fn client(packet: &[u8]) {
    let Ok(frame) = ClientFrame::parse(packet) else { return };
    let again = match frame {
        ClientFrame::Hello { .. } => return,
        ClientFrame::CreateBlob { size } => ClientFrame::create_blob(size),
        ClientFrame::Unref { res_id } => ClientFrame::unref(res_id),
        ClientFrame::Attach { res_id, size } => ClientFrame::attach(res_id, size),
        ClientFrame::Submit { command } => {
            assert_eq!(command, &packet[4..], "a command is not what follows the first word");
            return;
        }
    };
    assert_eq!(again.as_bytes(), packet, "a frame is not the packet that it came from");
}

fn server(packet: &[u8]) {
    if let Ok(frame) = ServerFrame::parse(packet) {
        assert_eq!(frame.to_frame().as_bytes(), packet, "a frame is not the packet that it came from");
    }
}

fn config(plugin: Plugin) -> Option<Config> {
    let config = Config::default();
    Some(match plugin {
        Plugin::None => config,
        Plugin::Missing => config.plugin("/proc/self/no-such-plugin.so"),
        Plugin::Other => config.plugin("libc.so.6"),
        Plugin::Real => match std::env::var_os("APIR_DIST") {
            Some(dist) => {
                let plugin = std::path::Path::new(&dist).join("libggml-virtgpu-backend.so");
                let config = config.plugin(plugin).set("ggml.library.path", crate::guest::library()).ok()?;
                config.set("apir.max_log_lines", "0").ok()?
            }
            None => config,
        },
    })
}

/// A context as a worker feeds it.
fn stream(plugin: Plugin, packets: &[Packet]) {
    static NEXT: AtomicU32 = AtomicU32::new(1 << 24);
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let Some(mut context) = config(plugin).and_then(|config| Context::new(id, config).ok()) else { return };
    let mut blobs: Vec<CreatedBlob> = Vec::new();
    for packet in packets.iter().take(MAX_PACKETS) {
        let mut bytes = packet.bytes();
        match ClientFrame::parse(&bytes) {
            Ok(ClientFrame::CreateBlob { size }) if size <= MAX_BLOB || size > 1 << 46 => {
                if let Ok(blob) = context.create_blob(size) {
                    assert!(blob.size >= size, "a blob of {} bytes, asked for {size}", blob.size);
                    blobs.push(blob);
                }
            }
            Ok(ClientFrame::Unref { res_id }) => context.unref_blob(res_id),
            Ok(ClientFrame::Submit { command }) => {
                let at = bytes.len() - command.len();
                let reply = CommandHeader::from_bytes(command).map(|header| header.reply_res_id);
                let reply = blobs.iter().find(|blob| Ok(blob.res_id) == reply);
                clear_word(reply);
                if context.submit(&mut bytes[at..]).is_err() {
                    return;
                }
                assert_ne!(word(reply), Some(0), "a command went without answer");
            }
            // A worker ends here.
            Ok(ClientFrame::Hello { .. } | ClientFrame::Attach { .. }) | Err(_) => return,
            Ok(ClientFrame::CreateBlob { .. }) => {}
        }
    }
}

fn clear_word(blob: Option<&CreatedBlob>) {
    if let Some(file) = blob.and_then(|blob| blob.memory.try_clone().ok()).map(File::from) {
        // Sealed against another size, not against writing.
        let _ = file.write_at(&[0; 4], 0);
    }
}

fn word(blob: Option<&CreatedBlob>) -> Option<u32> {
    let file = File::from(blob?.memory.try_clone().ok()?);
    let mut bytes = [0; 4];
    file.read_exact_at(&mut bytes, 0).ok()?;
    Some(u32::from_le_bytes(bytes))
}
