//! The 12 bytes before a command's arguments.

use crate::codec::{DecodeError, Decoder};

/// Bytes of a [`CommandHeader`].
pub const HEADER_SIZE: usize = 12;

/// The first three words of every command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommandHeader {
    /// Command type, with the Venus offset where APIR travels under Venus.
    pub type_: u32,
    /// The command's number for FORWARD, else 0.
    pub flags: u32,
    /// Resource id of the blob that the answer goes to.
    pub reply_res_id: u32,
}

impl CommandHeader {
    /// The header as it lies on the wire.
    #[must_use]
    pub fn to_bytes(self) -> [u8; HEADER_SIZE] {
        let mut bytes = [0; HEADER_SIZE];
        bytes[..4].copy_from_slice(&self.type_.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.flags.to_le_bytes());
        bytes[8..].copy_from_slice(&self.reply_res_id.to_le_bytes());
        bytes
    }

    /// Reads the header in front of a command.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`] when fewer than 12 bytes are there.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut decoder = Decoder::new(bytes);
        Ok(Self { type_: decoder.u32()?, flags: decoder.u32()?, reply_res_id: decoder.u32()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_lies_as_three_words() {
        let header = CommandHeader { type_: 333, flags: 22, reply_res_id: 7 };
        let bytes = header.to_bytes();
        assert_eq!(bytes, [0x4d, 1, 0, 0, 22, 0, 0, 0, 7, 0, 0, 0]);
        assert_eq!(CommandHeader::from_bytes(&bytes), Ok(header));
        for len in 0..HEADER_SIZE {
            assert!(CommandHeader::from_bytes(&bytes[..len]).is_err());
        }
    }
}
