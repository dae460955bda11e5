//! Tensors on the wire: the 304-byte record and the inline form of commands 6 and 15.

use crate::Wire;
use crate::codec::{DecodeError, Decoder, EncodeError, Encoder};
use crate::handle::BufferHandle;
use alloc::vec::Vec;

/// Dimensions of a tensor.
pub const MAX_DIMS: usize = 4;
/// Sources of a node, at most.
pub const MAX_SOURCES: usize = 10;
/// Words of an operation's parameters.
pub const PARAM_WORDS: usize = 16;
/// Bytes of a tensor's name, its NUL included.
pub const NAME_SIZE: usize = 64;
/// Bytes of a [`TensorRecord`] on the wire.
pub const RECORD_SIZE: usize = 304;
/// Bytes of a [`RawTensor`] on the wire.
pub const RAW_SIZE: usize = 336;

/// A tensor of a graph or of a transfer. Untrusted as it comes: every number is the peer's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorRecord {
    /// Names the tensor within its graph; 0 names none.
    pub id: u64,
    /// ggml's number of the element type.
    pub type_: u32,
    /// The buffer that holds the data.
    pub buffer: BufferHandle,
    /// Elements in each dimension.
    pub ne: [u32; MAX_DIMS],
    /// Bytes from one element to the next in each dimension.
    pub nb: [u32; MAX_DIMS],
    /// ggml's number of the operation.
    pub op: u32,
    /// The operation's parameters.
    pub op_params: [i32; PARAM_WORDS],
    /// ggml's flags; bit 16 makes backends execute the node.
    pub flags: i32,
    /// Ids of the sources, 0 where there is none.
    pub src: [u64; MAX_SOURCES],
    /// Id of the tensor that this one views, or 0.
    pub view_src: u64,
    /// Bytes into the viewed tensor.
    pub view_offs: u64,
    /// Bytes from the buffer's base to the data.
    pub data: u64,
    /// Name for people, NUL-terminated.
    pub name: [u8; NAME_SIZE],
}

impl Default for TensorRecord {
    fn default() -> Self {
        Self {
            id: 0,
            type_: 0,
            buffer: BufferHandle::default(),
            ne: [0; MAX_DIMS],
            nb: [0; MAX_DIMS],
            op: 0,
            op_params: [0; PARAM_WORDS],
            flags: 0,
            src: [0; MAX_SOURCES],
            view_src: 0,
            view_offs: 0,
            data: 0,
            name: [0; NAME_SIZE],
        }
    }
}

impl Wire for TensorRecord {
    fn encode(&self, encoder: &mut Encoder<'_>) -> Result<(), EncodeError> {
        // Put together first and bounds-checked once: a graph has thousands of records.
        let mut bytes = [0; RECORD_SIZE];
        let mut at = 0;
        let mut put = |field: &[u8]| {
            bytes[at..at + field.len()].copy_from_slice(field);
            at += field.len();
        };
        put(&self.id.to_le_bytes());
        put(&self.type_.to_le_bytes());
        put(&[0; 4]);
        put(&self.buffer.0.to_le_bytes());
        self.ne.iter().for_each(|ne| put(&ne.to_le_bytes()));
        self.nb.iter().for_each(|nb| put(&nb.to_le_bytes()));
        put(&self.op.to_le_bytes());
        self.op_params.iter().for_each(|word| put(&word.to_le_bytes()));
        put(&self.flags.to_le_bytes());
        self.src.iter().for_each(|id| put(&id.to_le_bytes()));
        put(&self.view_src.to_le_bytes());
        put(&self.view_offs.to_le_bytes());
        put(&self.data.to_le_bytes());
        put(&self.name);
        encoder.bytes(&bytes)
    }

    fn decode(decoder: &mut Decoder<'_>) -> Result<Self, DecodeError> {
        // Taken whole first, so that a short record leaves the decoder where it was.
        let mut fields = Decoder::new(decoder.bytes(RECORD_SIZE as u64)?);
        let mut record = Self { id: fields.u64()?, type_: fields.u32()?, ..Self::default() };
        fields.u32()?;
        record.buffer = BufferHandle::decode(&mut fields)?;
        for ne in &mut record.ne {
            *ne = fields.u32()?;
        }
        for nb in &mut record.nb {
            *nb = fields.u32()?;
        }
        record.op = fields.u32()?;
        for word in &mut record.op_params {
            *word = fields.i32()?;
        }
        record.flags = fields.i32()?;
        for id in &mut record.src {
            *id = fields.u64()?;
        }
        record.view_src = fields.u64()?;
        record.view_offs = fields.u64()?;
        record.data = fields.u64()?;
        record.name.copy_from_slice(fields.bytes(NAME_SIZE as u64)?);
        Ok(record)
    }
}

/// What counts of a guest's `struct ggml_tensor`, as commands 6 and 15 carry it. Pointers are kept only as
/// "present or not": their values mean nothing on another machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RawTensor {
    /// ggml's number of the element type.
    pub type_: u32,
    /// Whether the tensor has a buffer.
    pub has_buffer: bool,
    /// Elements in each dimension.
    pub ne: [i64; MAX_DIMS],
    /// Bytes from one element to the next in each dimension.
    pub nb: [u64; MAX_DIMS],
    /// ggml's number of the operation.
    pub op: u32,
    /// The operation's parameters.
    pub op_params: [i32; PARAM_WORDS],
    /// ggml's flags.
    pub flags: i32,
    /// Which sources there are.
    pub has_source: [bool; MAX_SOURCES],
    /// Whether the tensor views another.
    pub has_view_src: bool,
    /// Bytes into the viewed tensor.
    pub view_offs: u64,
    /// Name for people, NUL-terminated.
    pub name: [u8; NAME_SIZE],
}

impl Default for RawTensor {
    fn default() -> Self {
        Self {
            type_: 0,
            has_buffer: false,
            ne: [0; MAX_DIMS],
            nb: [0; MAX_DIMS],
            op: 0,
            op_params: [0; PARAM_WORDS],
            flags: 0,
            has_source: [false; MAX_SOURCES],
            has_view_src: false,
            view_offs: 0,
            name: [0; NAME_SIZE],
        }
    }
}

impl Wire for RawTensor {
    fn encode(&self, encoder: &mut Encoder<'_>) -> Result<(), EncodeError> {
        encoder.u32(self.type_)?;
        encoder.u32(0)?;
        encoder.u64(u64::from(self.has_buffer))?;
        for ne in self.ne {
            encoder.i64(ne)?;
        }
        for nb in self.nb {
            encoder.u64(nb)?;
        }
        encoder.u32(self.op)?;
        for word in self.op_params {
            encoder.i32(word)?;
        }
        encoder.i32(self.flags)?;
        for present in self.has_source {
            encoder.u64(u64::from(present))?;
        }
        encoder.u64(u64::from(self.has_view_src))?;
        encoder.u64(self.view_offs)?;
        encoder.u64(0)?;
        encoder.bytes(&self.name)?;
        // extra and padding
        encoder.u64(0)?;
        encoder.u64(0)
    }

    fn decode(decoder: &mut Decoder<'_>) -> Result<Self, DecodeError> {
        let mut fields = Decoder::new(decoder.bytes(RAW_SIZE as u64)?);
        let mut tensor = Self { type_: fields.u32()?, ..Self::default() };
        fields.u32()?;
        tensor.has_buffer = fields.u64()? != 0;
        for ne in &mut tensor.ne {
            *ne = fields.i64()?;
        }
        for nb in &mut tensor.nb {
            *nb = fields.u64()?;
        }
        tensor.op = fields.u32()?;
        for word in &mut tensor.op_params {
            *word = fields.i32()?;
        }
        tensor.flags = fields.i32()?;
        for present in &mut tensor.has_source {
            *present = fields.u64()? != 0;
        }
        tensor.has_view_src = fields.u64()? != 0;
        tensor.view_offs = fields.u64()?;
        // data
        fields.u64()?;
        tensor.name.copy_from_slice(fields.bytes(NAME_SIZE as u64)?);
        Ok(tensor)
    }
}

/// A node outside any graph, with its view source and its sources up to the first absent one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct InlineTensor {
    /// The node itself.
    pub tensor: RawTensor,
    /// The node's buffer, if it has one. Upstream's guests send a wrong one: never rely on it.
    pub buffer: BufferHandle,
    /// The tensor that the node views.
    pub view_src: Option<RawTensor>,
    /// The sources, the first absent one ends them; 10 at most.
    pub sources: Vec<RawTensor>,
}

impl InlineTensor {
    /// How many sources the node says lie behind it.
    fn leading_sources(tensor: &RawTensor) -> usize {
        tensor.has_source.iter().take_while(|present| **present).count()
    }
}

impl Wire for InlineTensor {
    fn encode(&self, encoder: &mut Encoder<'_>) -> Result<(), EncodeError> {
        // The presence flags come from what follows, so that the two cannot disagree.
        let mut tensor = self.tensor;
        tensor.has_buffer = !self.buffer.is_null();
        tensor.has_view_src = self.view_src.is_some();
        let sources = &self.sources[..self.sources.len().min(MAX_SOURCES)];
        for (index, present) in tensor.has_source.iter_mut().enumerate() {
            *present = index < sources.len();
        }
        tensor.encode(encoder)?;
        if tensor.has_buffer {
            self.buffer.encode(encoder)?;
        }
        for nested in self.view_src.iter().chain(sources) {
            // Upstream's host leaves nested pointers as they are: they must all be null.
            let plain = RawTensor {
                has_buffer: false,
                has_view_src: false,
                has_source: [false; MAX_SOURCES],
                ..*nested
            };
            plain.encode(encoder)?;
        }
        Ok(())
    }

    fn decode(decoder: &mut Decoder<'_>) -> Result<Self, DecodeError> {
        let tensor = RawTensor::decode(decoder)?;
        let buffer = if tensor.has_buffer { BufferHandle::decode(decoder)? } else { BufferHandle::default() };
        let view_src = if tensor.has_view_src { Some(RawTensor::decode(decoder)?) } else { None };
        let mut sources = Vec::new();
        for _ in 0..Self::leading_sources(&tensor) {
            sources.push(RawTensor::decode(decoder)?);
        }
        Ok(Self { tensor, buffer, view_src, sources })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    /// A record whose every byte is told apart from the others.
    fn record() -> TensorRecord {
        TensorRecord {
            id: 0x0102_0304_0506_0708,
            type_: 26,
            buffer: BufferHandle(0x1112_1314_1516_1718),
            ne: [1, 2, 3, 4],
            nb: [5, 6, 7, u32::MAX],
            op: 29,
            op_params: core::array::from_fn(|i| i as i32 - 8),
            flags: 16,
            src: core::array::from_fn(|i| 0x100 + i as u64),
            view_src: 0x200,
            view_offs: 0x300,
            data: 0x400,
            name: core::array::from_fn(|i| if i < 63 { b'a' + (i % 26) as u8 } else { 0 }),
        }
    }

    #[test]
    fn record_fields_lie_where_upstream_has_them() {
        let mut bytes = [0xff; RECORD_SIZE];
        let mut encoder = Encoder::new(&mut bytes);
        record().encode(&mut encoder).unwrap();
        assert_eq!(encoder.len(), RECORD_SIZE);
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        assert_eq!(u64_at(0), 0x0102_0304_0506_0708);
        assert_eq!((u32_at(8), u32_at(12)), (26, 0));
        assert_eq!(u64_at(16), 0x1112_1314_1516_1718);
        assert_eq!((u32_at(24), u32_at(36), u32_at(40), u32_at(52)), (1, 4, 5, u32::MAX));
        assert_eq!((u32_at(56), u32_at(60) as i32, u32_at(120) as i32), (29, -8, 7));
        assert_eq!(u32_at(124), 16);
        assert_eq!((u64_at(128), u64_at(200), u64_at(208)), (0x100, 0x109, 0x200));
        assert_eq!((u64_at(216), u64_at(224)), (0x300, 0x400));
        assert_eq!((bytes[232], bytes[295], u64_at(296)), (b'a', 0, 0));
    }

    #[test]
    fn record_survives_the_round_trip_and_no_truncation() {
        let mut bytes = [0; RECORD_SIZE];
        record().encode(&mut Encoder::new(&mut bytes)).unwrap();
        assert_eq!(TensorRecord::decode(&mut Decoder::new(&bytes)), Ok(record()));
        for len in 0..RECORD_SIZE {
            let mut decoder = Decoder::new(&bytes[..len]);
            assert!(TensorRecord::decode(&mut decoder).is_err());
            assert_eq!(decoder.left(), len);
            assert!(record().encode(&mut Encoder::new(&mut vec![0; len])).is_err());
        }
    }

    #[test]
    fn record_holes_may_hold_anything() {
        let mut bytes = [0; RECORD_SIZE];
        record().encode(&mut Encoder::new(&mut bytes)).unwrap();
        bytes[12..16].fill(0xff);
        bytes[296..].fill(0xff);
        assert_eq!(TensorRecord::decode(&mut Decoder::new(&bytes)), Ok(record()));
    }

    fn inline(sources: usize, view: bool, buffer: u64) -> InlineTensor {
        let source =
            RawTensor { type_: 1, ne: [32, -1, 1, 1], nb: [2, u64::MAX, 9, 9], ..RawTensor::default() };
        InlineTensor {
            tensor: RawTensor {
                type_: 2,
                has_buffer: buffer != 0,
                has_view_src: view,
                has_source: core::array::from_fn(|i| i < sources),
                op: 7,
                ..RawTensor::default()
            },
            buffer: BufferHandle(buffer),
            view_src: view.then_some(source),
            sources: vec![source; sources],
        }
    }

    #[test]
    fn inline_tensor_survives_the_round_trip_and_no_truncation() {
        for (sources, view, buffer) in [(0, false, 0), (1, false, 9), (3, true, 0), (10, true, 9)] {
            let tensor = inline(sources, view, buffer);
            let mut bytes = vec![0; 4096];
            let mut encoder = Encoder::new(&mut bytes);
            tensor.encode(&mut encoder).unwrap();
            let len = encoder.len();
            assert_eq!(len, RAW_SIZE * (1 + sources + usize::from(view)) + if buffer == 0 { 0 } else { 8 });
            assert_eq!(InlineTensor::decode(&mut Decoder::new(&bytes[..len])), Ok(tensor));
            for short in 0..len {
                assert!(InlineTensor::decode(&mut Decoder::new(&bytes[..short])).is_err());
            }
        }
    }

    #[test]
    fn inline_sources_end_at_the_first_absent_one() {
        let mut bytes = vec![0; 4096];
        inline(3, false, 0).encode(&mut Encoder::new(&mut bytes)).unwrap();
        // src[1] := null, as a node whose second source is absent has it
        bytes[152 + 8..152 + 16].fill(0);
        let decoded = InlineTensor::decode(&mut Decoder::new(&bytes)).unwrap();
        assert_eq!(decoded.sources.len(), 1);
        assert!(decoded.tensor.has_source[2]);
    }

    #[test]
    fn the_longest_inline_command_fits_the_command_buffer() {
        let mut bytes = vec![0; crate::constants::COMMAND_CAPACITY as usize - 12 - 8];
        assert!(inline(10, true, 9).encode(&mut Encoder::new(&mut bytes)).is_ok());
    }
}
