//! Why a context could not start, and why a command was refused.
#![forbid(unsafe_code)]

use crate::budget::Exceeded;
use crate::memory::MemoryError;
use crate::verify::VerifyError;
use apir_protocol::codec::{DecodeError, EncodeError};
use apir_protocol::command::{HandlerCode, InitializeCode, PluginCode};
use apir_protocol::constants::{INITIALIZE_BASE, REASON_BYTES};
use std::ffi::OsString;
use thiserror::Error;

/// Why a context could not start.
#[derive(Debug, Error)]
pub enum InitializeError {
    /// Nothing says which ggml library to drive.
    #[error(
        "no ggml library: set the key ggml.library.path, or APIR_LLAMA_CPP_GGML_LIBRARY_PATH in the environment of the process that loads the plugin"
    )]
    NoLibrary,
    /// A variable holds what it cannot hold.
    #[error("{name}={}: {fix}", .value.display())]
    Variable {
        /// The variable.
        name: &'static str,
        /// What it holds.
        value: OsString,
        /// What it may hold.
        fix: String,
    },
    /// The ggml library cannot be used.
    #[error(transparent)]
    Ggml(#[from] apir_ggml::Error),
    /// The context has been initialized before.
    #[error("context {0} is initialized already")]
    Twice(u32),
    /// What to warm is written wrongly.
    #[error(transparent)]
    Layers(#[from] crate::warm::LayersError),
    /// The renderer handed over no callbacks.
    #[error("the renderer gave no callbacks")]
    NoCallbacks,
}

impl InitializeError {
    /// What initialize returns for it; always small, since the answer word wraps at its top.
    #[must_use]
    pub fn code(&self) -> u32 {
        use apir_ggml::Error as Ggml;
        let started = |code: InitializeCode| INITIALIZE_BASE + code.number();
        match self {
            Self::NoLibrary | Self::Layers(_) => PluginCode::ConfigMissing.number(),
            Self::Ggml(
                Ggml::LibraryMissing { .. } | Ggml::LibraryNotAFile { .. } | Ggml::LibraryOpen { .. },
            ) => PluginCode::CannotOpen.number(),
            Self::Ggml(Ggml::SymbolMissing { .. } | Ggml::NotABackend { .. }) => {
                PluginCode::SymbolMissing.number()
            }
            Self::Ggml(Ggml::RegistryNull { .. }) => started(InitializeCode::RegistrationFailed),
            Self::Ggml(Ggml::NoDevice { .. }) => started(InitializeCode::NoDevice),
            Self::Ggml(Ggml::SlotNull { object: "device", slot: "init_backend" }) => {
                started(InitializeCode::BackendInitFailed)
            }
            Self::Ggml(Ggml::ProcessorUnsupported { .. }) => started(InitializeCode::CannotOpenBackend),
            Self::Variable { .. } => started(InitializeCode::BadSetting),
            Self::Ggml(_) | Self::NoCallbacks => started(InitializeCode::BackendFailed),
            Self::Twice(_) => started(InitializeCode::AlreadyInitialized),
        }
    }
}

/// Why a command was refused.
#[derive(Debug, Error)]
pub enum CommandError {
    /// No handler has this number.
    #[error("no command has the number {0}")]
    Unknown(u32),
    /// The context never started, failed to start, or is gone.
    #[error("context {0} is not initialized")]
    NotInitialized(u32),
    /// The request is cut short.
    #[error("request: {0}")]
    Decode(#[from] DecodeError),
    /// The reply does not fit the reply page.
    #[error("reply: {0}")]
    Encode(#[from] EncodeError),
    /// The handle names nothing of its kind in this context.
    #[error("{0:#x} is no {1} of this context")]
    Handle(u64, &'static str),
    /// The blob cannot be used.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A tensor or a graph was refused.
    #[error(transparent)]
    Verify(#[from] VerifyError),
    /// A range does not lie inside the thing that it is about.
    #[error("bytes {offset} + {size} do not lie inside {what} of {len} bytes")]
    Range {
        /// What the range has to lie in.
        what: &'static str,
        /// First byte.
        offset: u64,
        /// Bytes.
        size: u64,
        /// Bytes that there are.
        len: u64,
    },
    /// The tensor lies in another buffer than the command is about.
    #[error("the tensor lies in buffer {tensor:#x}, the command is about {command:#x}")]
    OtherBuffer {
        /// The tensor's handle.
        tensor: u64,
        /// The command's handle.
        command: u64,
    },
    /// A copy between tensors that differ.
    #[error("copy between tensors of different {0}")]
    Unlike(&'static str),
    /// The device makes no buffers over memory that exists already.
    #[error("the device makes no buffers over shared memory")]
    NoSharedBuffers,
    /// The context has as much as it may have.
    #[error("{value} {what}, the limit is {limit}")]
    Limit {
        /// What there would be too much of.
        what: &'static str,
        /// How much there would be.
        value: u64,
        /// How much there may be.
        limit: u64,
    },
    /// The process has as much as it may have.
    #[error(transparent)]
    Exceeded(#[from] Exceeded),
    /// A node that obeys its rules and that the device does not have.
    #[error("{name:?}: the device does not support this {op}")]
    Unsupported {
        /// The node's name.
        name: String,
        /// The operation's name.
        op: String,
    },
    /// A tensor for which the device wants more room than there is.
    #[error("{name:?}: the device needs {need} bytes for it, there are {room} to the buffer's end")]
    NoRoom {
        /// The tensor's name.
        name: String,
        /// Bytes that the device needs.
        need: u64,
        /// Bytes that there are.
        room: u64,
    },
    /// An index that names no row.
    #[error("{name:?}: index {value}, there are {limit}")]
    Index {
        /// The name of the tensor of indices.
        name: String,
        /// The index.
        value: i64,
        /// What it must be below.
        limit: i64,
    },
    /// No room for the copies of a graph's indices.
    #[error("no memory for {0} bytes of indices")]
    NoIndexMemory(u64),
    /// A word that does not lie on its own boundary.
    #[error("a word at byte {0}: its place must be a multiple of 4")]
    Unaligned(u64),
    /// The system started no thread for the sign of life.
    #[error("no thread for the sign of life: {0}")]
    NoThread(#[from] std::io::Error),
    /// More buffers and buffer types than handles can name.
    #[error("no handle is left")]
    NoHandle,
    /// The real backend said no.
    #[error(transparent)]
    Ggml(#[from] apir_ggml::Error),
    /// The guest has had more commands refused than a context bears.
    #[error("too many refused commands; the context is lost")]
    TooManyRefusals,
    /// The guest's numbers may mean something else here, and the guest asks for none of ours.
    #[error(
        "ggml {0}: the guest's release may number operations differently, and it does not ask how: use apir's library in the guest, or set APIR_SAME_GGML=1 where its ggml is the same"
    )]
    OtherNumbers(apir_ggml::Version),
    /// A handler panicked: a fault of ours, and the end of the context.
    #[error("command {0} panicked; the context is lost")]
    Panic(u32),
}

/// What a guest is told about a refused command: the verifier's or the decoder's own words, about what the guest itself sent.
/// It has no path, no address of this process, and no words of the system's or of ggml's, which may have either.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reason(String);

impl Reason {
    /// The words, at most [`REASON_BYTES`] of them.
    #[must_use]
    pub fn text(&self) -> &str {
        let most = self.0.len().min(REASON_BYTES as usize);
        let end = (0..=most).rev().find(|at| self.0.is_char_boundary(*at)).unwrap_or(0);
        &self.0[..end]
    }
}

impl From<&CommandError> for Reason {
    fn from(error: &CommandError) -> Self {
        use CommandError as E;
        // No wildcard: whoever adds an error decides what a guest may know of it.
        Self(match error {
            E::Unknown(_)
            | E::NotInitialized(_)
            | E::Decode(_)
            | E::Encode(_)
            | E::Handle(..)
            | E::Verify(_)
            | E::Range { .. }
            | E::OtherBuffer { .. }
            | E::Unlike(_)
            | E::NoSharedBuffers
            | E::Limit { .. }
            | E::Unsupported { .. }
            | E::NoRoom { .. }
            | E::Index { .. }
            | E::NoIndexMemory(_)
            | E::Unaligned(_)
            | E::NoHandle
            | E::OtherNumbers(_)
            | E::TooManyRefusals
            | E::Panic(_) => error.to_string(),
            E::Memory(MemoryError::Mapping { res_id, .. }) => format!("resource {res_id}: not usable"),
            E::Memory(
                error
                @ (MemoryError::Unknown(_) | MemoryError::TooSmall { .. } | MemoryError::OutOfMemory(_)),
            ) => error.to_string(),
            // How much there is left tells of other contexts.
            E::Exceeded(error) | E::Memory(MemoryError::Mappings(error)) => {
                format!("{}: the host has no more", error.what())
            }
            E::Memory(MemoryError::Unavailable { bytes, .. }) => {
                format!("memory: the host has no more ({bytes} bytes)")
            }
            E::NoThread(_) => "no thread for the sign of life".to_owned(),
            E::Ggml(_) => "the host's ggml failed".to_owned(),
        })
    }
}

impl CommandError {
    /// What the dispatcher returns for it.
    #[must_use]
    pub fn code(&self) -> u32 {
        match self {
            Self::Unknown(_) => HandlerCode::UnknownCommand.number(),
            _ => HandlerCode::Failed.number(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e6_a_reason_has_no_address_no_path_and_no_word_of_others() {
        let address = 0x7f12_3456_7000;
        let ggml = apir_ggml::Error::Misaligned { address, alignment: 64 };
        let path = std::path::PathBuf::from("/secret/libggml.so");
        let system = std::io::Error::other("/proc/self/maps: secret");
        for (error, told) in [
            (CommandError::Ggml(ggml), "the host's ggml failed"),
            (CommandError::Ggml(apir_ggml::Error::LibraryNotAFile { path }), "the host's ggml failed"),
            (CommandError::NoThread(std::io::Error::other("secret")), "no thread for the sign of life"),
            (
                CommandError::Memory(MemoryError::Mapping { res_id: 7, cause: system }),
                "resource 7: not usable",
            ),
            (CommandError::Unaligned(6), "a word at byte 6: its place must be a multiple of 4"),
        ] {
            assert_eq!(Reason::from(&error).text(), told);
        }
    }

    #[test]
    fn e6_a_reason_is_bounded_and_stays_text() {
        let name = "é".repeat(400);
        let error = CommandError::Unsupported { name, op: "ADD".to_owned() };
        let reason = Reason::from(&error);
        assert!((REASON_BYTES as usize - 1..=REASON_BYTES as usize).contains(&reason.text().len()));
        assert!(reason.text().ends_with('é'));
    }
}
