//! Frames of the socket link: what virtio-gpu does for APIR, over a `SOCK_SEQPACKET` unix socket.
//!
//! One packet holds one frame: little-endian u32 words, of which word 0 names the frame. A u64 is two words, low first.
//! The client says hello first; a server of another version answers with its own hello and closes.
//!
//! | word 0 | frame | from | words 1.. |
//! |---|---|---|---|
//! | 1 | hello | client | magic, version |
//! | 2 | create blob | client | size (2 words) |
//! | 3 | unref | client | resource id |
//! | 4 | submit | client | the command: type, flags, reply resource id, arguments |
//! | 5 | attach, with one descriptor | client | resource id, size (2 words) |
//! | 0x101 | hello | server | magic, version |
//! | 0x102 | blob, with one descriptor | server | resource id, size (2 words) |
//! | 0x103 | blob refused | server | code |
//!
//! Submit, attach and unref have no answer: a command is answered in the first word of its reply blob. Attach is for clients
//! that make the blobs themselves, as a VMM does for its guest; a server takes it only from those it was told to trust so.
#![forbid(unsafe_code)]

/// Word 1 of both hello frames: the bytes `apir`.
pub const SOCKET_MAGIC: u32 = u32::from_le_bytes(*b"apir");
/// Version of the frames in this module.
pub const SOCKET_VERSION: u32 = 1;
/// The longest frame in bytes, near what virtio-gpu's path carries. Linux takes it in one packet from a socket whose send
/// buffer is set to this size; its default is 32 bytes short.
pub const MAX_FRAME: usize = 208 * 1024;
/// The longest command in bytes that a submit frame can carry.
pub const MAX_COMMAND: usize = MAX_FRAME - 4;
/// The largest blob in bytes, as in virglrenderer.
pub const MAX_BLOB_SIZE: u64 = 1 << 46;
/// Word 0 of a submit frame, to be sent in front of the command.
pub const SUBMIT_PREFIX: [u8; 4] = SUBMIT.to_le_bytes();

const HELLO: u32 = 1;
const CREATE_BLOB: u32 = 2;
const UNREF: u32 = 3;
const SUBMIT: u32 = 4;
const ATTACH: u32 = 5;
const SERVER_HELLO: u32 = 0x101;
const BLOB: u32 = 0x102;
const BLOB_REFUSED: u32 = 0x103;

/// Why a packet is not a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// No frame is shorter than one word.
    #[error("socket frame of {0} bytes: shorter than its first word")]
    Empty(usize),
    /// Word 0 names no frame of this direction.
    #[error("socket frame of unknown kind {0:#x}")]
    UnknownKind(u32),
    /// A frame of fixed length with another length.
    #[error("socket frame {name}: {found} bytes, expected {expected}")]
    Length {
        /// The frame's name.
        name: &'static str,
        /// Its length in bytes.
        found: usize,
        /// The length it must have.
        expected: usize,
    },
    /// A hello that does not carry [`SOCKET_MAGIC`].
    #[error("socket hello with magic {0:#010x}: the peer does not speak apir")]
    Magic(u32),
    /// A command that is not whole words.
    #[error("socket frame submit: command of {0} bytes, not a multiple of 4")]
    RaggedCommand(usize),
    /// A frame longer than [`MAX_FRAME`].
    #[error("socket frame of {0} bytes: the limit is {MAX_FRAME}")]
    TooLong(usize),
}

/// A frame of fixed length, ready to be sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame {
    bytes: [u8; 16],
    len: usize,
}

impl Frame {
    fn new(words: &[u32]) -> Self {
        let mut bytes = [0; 16];
        for (place, word) in bytes.chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        Self { bytes, len: words.len() * 4 }
    }

    /// The packet.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// What a client sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientFrame<'a> {
    /// The first frame of a connection.
    Hello {
        /// The client's [`SOCKET_VERSION`].
        version: u32,
    },
    /// Asks for a blob; answered by [`ServerFrame::Blob`] or [`ServerFrame::BlobRefused`], in the order of asking.
    CreateBlob {
        /// Size in bytes; the server rounds it up to its page.
        size: u64,
    },
    /// Gives a blob back.
    Unref {
        /// Its resource id.
        res_id: u32,
    },
    /// Runs a command.
    Submit {
        /// The whole command with its 12-byte header, a multiple of 4 bytes.
        command: &'a [u8],
    },
    /// Hands over a blob of the client's making; its memfd, sealed against shrinking and growing, comes with the packet.
    Attach {
        /// The resource id, of the client's choosing; 1 or more.
        res_id: u32,
        /// Size in bytes.
        size: u64,
    },
}

impl<'a> ClientFrame<'a> {
    /// Parses a whole packet.
    ///
    /// # Errors
    /// Any packet that is not exactly one frame of a client.
    pub fn parse(packet: &'a [u8]) -> Result<Self, FrameError> {
        let (kind, body) = split(packet)?;
        match kind {
            HELLO => {
                let [magic, version] = words("hello", body)?;
                check_magic(magic)?;
                Ok(Self::Hello { version })
            }
            CREATE_BLOB => {
                let [low, high] = words("create blob", body)?;
                Ok(Self::CreateBlob { size: join(low, high) })
            }
            UNREF => {
                let [res_id] = words("unref", body)?;
                Ok(Self::Unref { res_id })
            }
            SUBMIT if !body.len().is_multiple_of(4) => Err(FrameError::RaggedCommand(body.len())),
            SUBMIT => Ok(Self::Submit { command: body }),
            ATTACH => {
                let [res_id, low, high] = words("attach", body)?;
                Ok(Self::Attach { res_id, size: join(low, high) })
            }
            _ => Err(FrameError::UnknownKind(kind)),
        }
    }

    /// A hello of this version.
    pub fn hello() -> Frame {
        Frame::new(&[HELLO, SOCKET_MAGIC, SOCKET_VERSION])
    }

    /// Asks for a blob of `size` bytes.
    pub fn create_blob(size: u64) -> Frame {
        let (low, high) = halves(size);
        Frame::new(&[CREATE_BLOB, low, high])
    }

    /// Gives the blob `res_id` back.
    pub fn unref(res_id: u32) -> Frame {
        Frame::new(&[UNREF, res_id])
    }

    /// Hands over the blob `res_id` of `size` bytes.
    pub fn attach(res_id: u32, size: u64) -> Frame {
        let (low, high) = halves(size);
        Frame::new(&[ATTACH, res_id, low, high])
    }
}

/// What a server sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ServerFrame {
    /// The answer to the client's hello.
    Hello {
        /// The server's [`SOCKET_VERSION`].
        version: u32,
    },
    /// A blob; its memfd, sealed against shrinking and growing, comes with the packet.
    Blob {
        /// The resource id: 1 or more, never used twice in a connection.
        res_id: u32,
        /// Size in bytes: what was asked for, rounded up to the server's page.
        size: u64,
    },
    /// No blob.
    BlobRefused {
        /// Why.
        code: BlobRefusal,
    },
}

impl ServerFrame {
    /// Parses a whole packet.
    ///
    /// # Errors
    /// Any packet that is not exactly one frame of a server.
    pub fn parse(packet: &[u8]) -> Result<Self, FrameError> {
        let (kind, body) = split(packet)?;
        match kind {
            SERVER_HELLO => {
                let [magic, version] = words("hello", body)?;
                check_magic(magic)?;
                Ok(Self::Hello { version })
            }
            BLOB => {
                let [res_id, low, high] = words("blob", body)?;
                Ok(Self::Blob { res_id, size: join(low, high) })
            }
            BLOB_REFUSED => {
                let [code] = words("blob refused", body)?;
                Ok(Self::BlobRefused { code: BlobRefusal::from_code(code) })
            }
            _ => Err(FrameError::UnknownKind(kind)),
        }
    }

    /// The packet of this frame.
    pub fn to_frame(self) -> Frame {
        match self {
            Self::Hello { version } => Frame::new(&[SERVER_HELLO, SOCKET_MAGIC, version]),
            Self::Blob { res_id, size } => {
                let (low, high) = halves(size);
                Frame::new(&[BLOB, res_id, low, high])
            }
            Self::BlobRefused { code } => Frame::new(&[BLOB_REFUSED, code.code()]),
        }
    }
}

/// Why a blob was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlobRefusal {
    /// The size is 0 or above [`MAX_BLOB_SIZE`].
    Size,
    /// The host could not make or map the memory.
    Memory,
    /// Every resource id of the connection has been used.
    ResourceIds,
    /// A code of a newer server.
    Other(u32),
}

impl BlobRefusal {
    /// The code on the wire.
    pub fn code(self) -> u32 {
        match self {
            Self::Size => 1,
            Self::Memory => 2,
            Self::ResourceIds => 3,
            Self::Other(code) => code,
        }
    }

    /// The refusal with this code.
    pub fn from_code(code: u32) -> Self {
        match code {
            1 => Self::Size,
            2 => Self::Memory,
            3 => Self::ResourceIds,
            other => Self::Other(other),
        }
    }
}

impl core::fmt::Display for BlobRefusal {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Size => write!(f, "the size must be 1 to {MAX_BLOB_SIZE} bytes"),
            Self::Memory => write!(f, "the host could not make or map the memory"),
            Self::ResourceIds => write!(f, "the connection has used every resource id"),
            Self::Other(code) => write!(f, "refused with code {code}"),
        }
    }
}

fn split(packet: &[u8]) -> Result<(u32, &[u8]), FrameError> {
    if packet.len() > MAX_FRAME {
        return Err(FrameError::TooLong(packet.len()));
    }
    match packet.split_first_chunk::<4>() {
        Some((kind, body)) => Ok((u32::from_le_bytes(*kind), body)),
        None => Err(FrameError::Empty(packet.len())),
    }
}

fn words<const N: usize>(name: &'static str, body: &[u8]) -> Result<[u32; N], FrameError> {
    if body.len() != N * 4 {
        return Err(FrameError::Length { name, found: body.len() + 4, expected: N * 4 + 4 });
    }
    let mut out = [0; N];
    for (word, bytes) in out.iter_mut().zip(body.chunks_exact(4)) {
        *word = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
    Ok(out)
}

fn check_magic(magic: u32) -> Result<(), FrameError> {
    if magic == SOCKET_MAGIC { Ok(()) } else { Err(FrameError::Magic(magic)) }
}

fn halves(value: u64) -> (u32, u32) {
    (value as u32, (value >> 32) as u32)
}

fn join(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    fn server_frame() -> impl Strategy<Value = ServerFrame> {
        prop_oneof![
            any::<u32>().prop_map(|version| ServerFrame::Hello { version }),
            (any::<u32>(), any::<u64>()).prop_map(|(res_id, size)| ServerFrame::Blob { res_id, size }),
            any::<u32>().prop_map(|code| ServerFrame::BlobRefused { code: BlobRefusal::from_code(code) }),
        ]
    }

    fn client_packets() -> Vec<Vec<u8>> {
        let mut submit = SUBMIT_PREFIX.to_vec();
        submit.extend([7; 12]);
        [
            ClientFrame::hello(),
            ClientFrame::create_blob(1 << 40 | 5),
            ClientFrame::unref(9),
            ClientFrame::attach(7, 1 << 33 | 3),
        ]
        .iter()
        .map(|frame| frame.as_bytes().to_vec())
        .chain([submit])
        .collect()
    }

    #[test]
    fn client_frames_round_trip() {
        let packets = client_packets();
        let frames: Vec<_> = packets.iter().map(|p| ClientFrame::parse(p)).collect();
        assert_eq!(
            frames,
            [
                Ok(ClientFrame::Hello { version: SOCKET_VERSION }),
                Ok(ClientFrame::CreateBlob { size: 1 << 40 | 5 }),
                Ok(ClientFrame::Unref { res_id: 9 }),
                Ok(ClientFrame::Attach { res_id: 7, size: 1 << 33 | 3 }),
                Ok(ClientFrame::Submit { command: &[7; 12] }),
            ]
        );
    }

    #[test]
    fn every_truncation_of_a_fixed_frame_is_an_error() {
        for packet in client_packets().iter().take(4) {
            for len in 0..packet.len() {
                assert!(ClientFrame::parse(&packet[..len]).is_err(), "{packet:?}[..{len}]");
            }
        }
        for frame in [
            ServerFrame::Hello { version: 1 },
            ServerFrame::Blob { res_id: 1, size: 4096 },
            ServerFrame::BlobRefused { code: BlobRefusal::Size },
        ] {
            let frame = frame.to_frame();
            for len in 0..frame.as_bytes().len() {
                assert!(ServerFrame::parse(&frame.as_bytes()[..len]).is_err());
            }
        }
    }

    #[test]
    fn a_submit_is_whole_words() {
        let submit = &client_packets()[4];
        for len in 4..submit.len() {
            assert_eq!(ClientFrame::parse(&submit[..len]).is_ok(), len % 4 == 0);
        }
    }

    #[test]
    fn the_longest_frame_passes_and_one_more_byte_does_not() {
        let mut packet = SUBMIT_PREFIX.to_vec();
        packet.resize(MAX_FRAME, 0);
        assert!(ClientFrame::parse(&packet).is_ok());
        packet.push(0);
        assert_eq!(ClientFrame::parse(&packet), Err(FrameError::TooLong(MAX_FRAME + 1)));
    }

    proptest! {
        #[test]
        fn server_frames_round_trip(frame in server_frame()) {
            prop_assert_eq!(ServerFrame::parse(frame.to_frame().as_bytes()), Ok(frame));
        }

        #[test]
        fn any_bytes_parse_or_fail_without_panic(
            kind in prop_oneof![0u32..7, 0x100u32..0x105, any::<u32>()],
            body in proptest::collection::vec(any::<u8>(), 0..64),
        ) {
            let mut packet = kind.to_le_bytes().to_vec();
            packet.extend(&body);
            for len in 0..=packet.len() {
                let _ = ServerFrame::parse(&packet[..len]);
                if let Ok(ClientFrame::Submit { command }) = ClientFrame::parse(&packet[..len]) {
                    prop_assert_eq!(command, &packet[4..len]);
                }
            }
        }
    }
}
