//! The encoder and the decoder: fixed sizes, 4-byte granules, no alignment.

use alloc::string::String;
use alloc::vec::Vec;
use thiserror::Error;

/// Why a value could not be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum EncodeError {
    /// The value does not fit what is left.
    #[error("{need} bytes to write, {left} bytes left")]
    Full {
        /// Bytes that the value takes.
        need: usize,
        /// Bytes left in the buffer.
        left: usize,
    },
    /// A text holds a NUL, which would cut it on the other side.
    #[error("a text with a NUL at byte {at}")]
    Nul {
        /// Index of the NUL.
        at: usize,
    },
}

/// Why a value could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// The bytes end before the value does.
    #[error("{need} bytes to read, {left} bytes left")]
    Truncated {
        /// Bytes that the value takes.
        need: u64,
        /// Bytes left to read.
        left: usize,
    },
    /// A text of no bytes: even an empty one has its NUL.
    #[error("a text of length 0")]
    EmptyText,
}

/// Bytes that `len` bytes take on the wire, or nothing when they are too many to count.
const fn padded(len: usize) -> Option<usize> {
    match len.checked_add(3) {
        Some(sum) => Some(sum & !3),
        None => None,
    }
}

/// Writes values one after the other into a buffer, zeroing the padding.
#[derive(Debug)]
pub struct Encoder<'a> {
    buffer: &'a mut [u8],
    len: usize,
}

impl<'a> Encoder<'a> {
    /// An encoder that fills `buffer` from its start.
    pub fn new(buffer: &'a mut [u8]) -> Self {
        Self { buffer, len: 0 }
    }

    /// Bytes written so far, a multiple of 4.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing has been written.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends raw bytes, padded with zeros to 4.
    ///
    /// # Errors
    /// [`EncodeError::Full`]; nothing is written then.
    pub fn bytes(&mut self, bytes: &[u8]) -> Result<(), EncodeError> {
        let left = self.buffer.len() - self.len;
        let need = padded(bytes.len()).filter(|need| *need <= left);
        let Some(need) = need else {
            return Err(EncodeError::Full { need: bytes.len(), left });
        };
        let (value, padding) = self.buffer[self.len..self.len + need].split_at_mut(bytes.len());
        value.copy_from_slice(bytes);
        padding.fill(0);
        self.len += need;
        Ok(())
    }

    /// Appends a byte in 4 bytes.
    ///
    /// # Errors
    /// [`EncodeError::Full`]
    pub fn u8(&mut self, value: u8) -> Result<(), EncodeError> {
        self.bytes(&[value])
    }

    /// Appends a bool in 4 bytes.
    ///
    /// # Errors
    /// [`EncodeError::Full`]
    pub fn bool(&mut self, value: bool) -> Result<(), EncodeError> {
        self.u8(u8::from(value))
    }

    /// Appends 4 bytes.
    ///
    /// # Errors
    /// [`EncodeError::Full`]
    pub fn i32(&mut self, value: i32) -> Result<(), EncodeError> {
        self.bytes(&value.to_le_bytes())
    }

    /// Appends 4 bytes.
    ///
    /// # Errors
    /// [`EncodeError::Full`]
    pub fn u32(&mut self, value: u32) -> Result<(), EncodeError> {
        self.bytes(&value.to_le_bytes())
    }

    /// Appends 8 bytes.
    ///
    /// # Errors
    /// [`EncodeError::Full`]
    pub fn u64(&mut self, value: u64) -> Result<(), EncodeError> {
        self.bytes(&value.to_le_bytes())
    }

    /// Appends 8 bytes.
    ///
    /// # Errors
    /// [`EncodeError::Full`]
    pub fn i64(&mut self, value: i64) -> Result<(), EncodeError> {
        self.bytes(&value.to_le_bytes())
    }

    /// Appends a text: its length with the NUL in 8 bytes, the bytes, the NUL, padding.
    ///
    /// # Errors
    /// [`EncodeError::Full`], [`EncodeError::Nul`]; nothing is written then.
    pub fn string(&mut self, text: &str) -> Result<(), EncodeError> {
        if let Some(at) = text.bytes().position(|byte| byte == 0) {
            return Err(EncodeError::Nul { at });
        }
        let left = self.buffer.len() - self.len;
        let need = padded(text.len() + 1).and_then(|array| array.checked_add(8));
        let Some(need) = need.filter(|need| *need <= left) else {
            return Err(EncodeError::Full { need: text.len() + 9, left });
        };
        let place = &mut self.buffer[self.len..self.len + need];
        place.fill(0);
        place[..8].copy_from_slice(&(text.len() as u64 + 1).to_le_bytes());
        place[8..8 + text.len()].copy_from_slice(text.as_bytes());
        self.len += need;
        Ok(())
    }

    /// Appends texts: their number in 4 bytes, and each text.
    ///
    /// # Errors
    /// [`EncodeError::Full`], [`EncodeError::Nul`]; some are written then.
    pub fn strings(&mut self, texts: &[String]) -> Result<(), EncodeError> {
        let left = self.buffer.len() - self.len;
        self.u32(u32::try_from(texts.len()).map_err(|_| EncodeError::Full { need: texts.len(), left })?)?;
        texts.iter().try_for_each(|text| self.string(text))
    }
}

/// Reads values one after the other; never past the end.
#[derive(Debug, Clone)]
pub struct Decoder<'a> {
    bytes: &'a [u8],
}

impl<'a> Decoder<'a> {
    /// A decoder that starts at the front of `bytes`.
    #[must_use]
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes }
    }

    /// Bytes not read yet.
    #[must_use]
    pub fn left(&self) -> usize {
        self.bytes.len()
    }

    /// Takes `len` bytes and the padding behind them.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`]; nothing is taken then.
    pub fn bytes(&mut self, len: u64) -> Result<&'a [u8], DecodeError> {
        let truncated = DecodeError::Truncated { need: len, left: self.bytes.len() };
        let len = usize::try_from(len).map_err(|_| truncated)?;
        let taken = padded(len).ok_or(truncated)?;
        if taken > self.bytes.len() {
            return Err(truncated);
        }
        let (front, rest) = self.bytes.split_at(taken);
        self.bytes = rest;
        Ok(&front[..len])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let mut value = [0; N];
        value.copy_from_slice(self.bytes(N as u64)?);
        Ok(value)
    }

    /// Takes a byte out of 4; the other three are not looked at.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`]
    pub fn u8(&mut self) -> Result<u8, DecodeError> {
        Ok(self.array::<4>()?[0])
    }

    /// Takes a bool out of 4 bytes; only the first is looked at.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`]
    pub fn bool(&mut self) -> Result<bool, DecodeError> {
        Ok(self.u8()? != 0)
    }

    /// Takes 4 bytes.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`]
    pub fn i32(&mut self) -> Result<i32, DecodeError> {
        self.array().map(i32::from_le_bytes)
    }

    /// Takes 4 bytes.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`]
    pub fn u32(&mut self) -> Result<u32, DecodeError> {
        self.array().map(u32::from_le_bytes)
    }

    /// Takes 8 bytes.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`]
    pub fn u64(&mut self) -> Result<u64, DecodeError> {
        self.array().map(u64::from_le_bytes)
    }

    /// Takes 8 bytes.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`]
    pub fn i64(&mut self) -> Result<i64, DecodeError> {
        self.array().map(i64::from_le_bytes)
    }

    /// Takes a text: up to its first NUL, and never its last byte, which counts as one.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`], [`DecodeError::EmptyText`]
    pub fn string(&mut self) -> Result<String, DecodeError> {
        let len = self.u64()?;
        if len == 0 {
            return Err(DecodeError::EmptyText);
        }
        let bytes = self.bytes(len)?;
        let text = &bytes[..bytes.len() - 1];
        let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
        Ok(String::from_utf8_lossy(&text[..end]).into_owned())
    }

    /// Takes texts, with their number in front. Room is made for as many as come, not for as many as the number says.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`], [`DecodeError::EmptyText`]
    pub fn strings(&mut self) -> Result<Vec<String>, DecodeError> {
        (0..self.u32()?).map(|_| self.string()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;
    use alloc::vec;
    use proptest::prelude::*;

    #[test]
    fn small_values_take_four_bytes_and_leave_no_residue() {
        let mut buffer = [0xff; 12];
        let mut encoder = Encoder::new(&mut buffer);
        encoder.u8(7).unwrap();
        encoder.bool(true).unwrap();
        encoder.i32(-2).unwrap();
        assert_eq!(encoder.u8(1), Err(EncodeError::Full { need: 1, left: 0 }));
        assert_eq!(buffer, [7, 0, 0, 0, 1, 0, 0, 0, 0xfe, 0xff, 0xff, 0xff]);
    }

    #[test]
    fn only_the_first_byte_of_a_bool_counts() {
        assert_eq!(Decoder::new(&[0, 0xff, 0xff, 0xff]).bool(), Ok(false));
        assert_eq!(Decoder::new(&[1, 0xff, 0, 0]).bool(), Ok(true));
    }

    #[test]
    fn string_is_length_bytes_nul_padding() {
        let mut buffer = [0xff; 16];
        let mut encoder = Encoder::new(&mut buffer);
        encoder.string("CPU").unwrap();
        assert_eq!(encoder.len(), 12);
        assert_eq!(buffer[..12], [4, 0, 0, 0, 0, 0, 0, 0, b'C', b'P', b'U', 0]);
        let mut small = [0; 11];
        assert!(Encoder::new(&mut small).string("CPU").is_err());
        assert_eq!(Encoder::new(&mut buffer).string("a\0b"), Err(EncodeError::Nul { at: 1 }));
    }

    #[test]
    fn string_decoder_bears_any_length() {
        let with_len = |len: u64, tail: &[u8]| {
            let mut bytes = len.to_le_bytes().to_vec();
            bytes.extend_from_slice(tail);
            Decoder::new(&bytes).string()
        };
        assert_eq!(with_len(0, b""), Err(DecodeError::EmptyText));
        assert_eq!(with_len(4, b"abcd"), Ok("abc".to_string()));
        assert_eq!(with_len(4, b"a\0cd"), Ok("a".to_string()));
        for len in [5, 1 << 32, u64::MAX - 2, u64::MAX] {
            assert_eq!(with_len(len, b"abcd"), Err(DecodeError::Truncated { need: len, left: 4 }));
        }
    }

    #[test]
    fn a_failed_read_takes_nothing() {
        let mut decoder = Decoder::new(&[1, 0, 0, 0, 2, 0]);
        assert!(decoder.u64().is_err());
        assert_eq!(decoder.u32(), Ok(1));
        assert_eq!(decoder.u8(), Err(DecodeError::Truncated { need: 4, left: 2 }));
    }

    #[test]
    fn strings_are_their_number_and_each() {
        let texts = ["", "ADD", "MUL_MAT"].map(String::from).to_vec();
        let mut buffer = [0xff; 64];
        let mut encoder = Encoder::new(&mut buffer);
        encoder.strings(&texts).unwrap();
        let len = encoder.len();
        assert_eq!((len, buffer[0]), (4 + 12 + 12 + 16, 3));
        assert_eq!(Decoder::new(&buffer[..len]).strings(), Ok(texts.clone()));
        for short in 0..len {
            assert!(Decoder::new(&buffer[..short]).strings().is_err());
            assert!(Encoder::new(&mut vec![0; short]).strings(&texts).is_err());
        }
        // A number without texts behind it takes no memory.
        assert!(Decoder::new(&u32::MAX.to_le_bytes()).strings().is_err());
    }

    proptest! {
        #[test]
        fn values_survive_the_round_trip(a: u8, b: bool, c: i32, d: u64, text in "[^\0]{0,40}", e: u32) {
            let mut buffer = vec![0xa5; 256];
            let mut encoder = Encoder::new(&mut buffer);
            encoder.u8(a).unwrap();
            encoder.bool(b).unwrap();
            encoder.i32(c).unwrap();
            encoder.string(&text).unwrap();
            encoder.u64(d).unwrap();
            encoder.u32(e).unwrap();
            let len = encoder.len();
            prop_assert_eq!(len % 4, 0);
            let mut decoder = Decoder::new(&buffer[..len]);
            prop_assert_eq!(decoder.u8(), Ok(a));
            prop_assert_eq!(decoder.bool(), Ok(b));
            prop_assert_eq!(decoder.i32(), Ok(c));
            prop_assert_eq!(decoder.string(), Ok(text));
            prop_assert_eq!(decoder.u64(), Ok(d));
            prop_assert_eq!(decoder.u32(), Ok(e));
            prop_assert_eq!(decoder.left(), 0);
        }
    }
}
