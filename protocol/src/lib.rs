//! The APIR wire: commands, codec, tensor records, graph blobs and socket frames.
//!
//! Everything is little-endian and LP64. This crate parses private bytes only: shared memory is copied by its
//! callers before it comes here. `commands.toml` is the specification; [`generated`](messages) follows it.
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod codec;
pub mod graph;
pub mod handle;
pub mod header;
pub mod log;
pub mod settings;
pub mod socket;
pub mod tensor;

#[rustfmt::skip]
mod generated;

/// Numbers both sides agree on.
pub mod constants {
    pub use crate::generated::constants::*;
}

/// Command numbers, command types and return codes.
pub mod command {
    pub use crate::generated::{
        Command, CommandType, ForwardCode, HandlerCode, InitializeCode, LoadLibraryCode, PluginCode,
    };
}

/// The request and the reply of each command.
pub mod messages {
    pub use crate::generated::messages::*;
}

use codec::{DecodeError, Decoder, EncodeError, Encoder};

/// A value with a place on the wire.
pub trait Wire: Sized {
    /// Appends the value.
    ///
    /// # Errors
    /// [`EncodeError`] when it does not fit; what was written before it stays.
    fn encode(&self, encoder: &mut Encoder<'_>) -> Result<(), EncodeError>;

    /// Takes the value from the front.
    ///
    /// # Errors
    /// [`DecodeError`] when the bytes end too early or cannot be this value.
    fn decode(decoder: &mut Decoder<'_>) -> Result<Self, DecodeError>;
}

/// The request of a command.
pub trait Request: Wire {
    /// The command that carries it.
    const COMMAND: command::Command;
    /// What answers it.
    type Reply: Wire;
}
