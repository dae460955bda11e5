//! What can go wrong between a session and its host.
#![forbid(unsafe_code)]

use super::TIMEOUT_VARIABLE;
use crate::host_device::MAX_ALIGNMENT;
use crate::link::{LinkError, Process};
use crate::numbers::SAME_GGML_VARIABLE;
use apir_protocol::codec::{DecodeError, EncodeError};
use apir_protocol::command::{Command, ForwardCode, InitializeCode, LoadLibraryCode, PluginCode};
use apir_protocol::constants::{HANDSHAKE_MAGIC, INITIALIZE_BASE, LOAD_LIBRARY_BASE};
use std::ffi::OsString;
use std::fmt;

/// Why a session could not be opened, or a command not be carried out.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// The link failed this once and lives on.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The host is lost: every later call fails too.
    #[error("{0}")]
    Lost(String),
    /// This process is a fork of the one that opened the session.
    #[error(
        "it belongs to {0}, of which this process is a fork; make backends and buffers anew here, or load the model after the fork"
    )]
    Forked(Process),
    /// Nobody shakes hands behind any render node.
    #[error("no APIR host answers: {0}; start the VMM on apir's libvirglrenderer.so.1 if it is not")]
    NoAnswer(String),
    /// The environment's timeout is no number of milliseconds.
    #[error("{TIMEOUT_VARIABLE}={} is no number of milliseconds above 0; set one, or unset it", .0.display())]
    Timeout(OsString),
    /// What answered the handshake is no APIR host.
    #[error(
        "the handshake was answered with {found:#x} in place of {HANDSHAKE_MAGIC:#x}: no APIR host is there; \
         start the host with APIR"
    )]
    Handshake {
        /// The answer.
        found: u32,
    },
    /// The host could not load its plugin or start its device.
    #[error(transparent)]
    LoadLibrary(LoadFailure),
    /// A request does not fit a command.
    #[error("{}: the request does not fit a command: {source}", command.name())]
    Encode {
        /// The command.
        command: Command,
        /// What did not fit.
        source: EncodeError,
    },
    /// A reply cannot be read.
    #[error("{}: the host's reply cannot be read: {source}", command.name())]
    Decode {
        /// The command.
        command: Command,
        /// What is wrong with it.
        source: DecodeError,
    },
    /// The command did not reach a handler.
    #[error(
        "{}: the host did not carry the command: {} (code {code}); its output says why",
        command.name(),
        transport(*code)
    )]
    Transport {
        /// The command.
        command: Command,
        /// The answer, below 4.
        code: u32,
    },
    /// The handler refused the command or failed.
    #[error(
        "{}: the host refused the command or failed (code {code}){}",
        command.name(),
        reason.as_ref().map_or_else(|| "; its output says why".to_owned(), |reason| format!(": {reason}"))
    )]
    Refused {
        /// The command.
        command: Command,
        /// The handler's code, not 0.
        code: u32,
        /// Why, from a host that tells.
        reason: Option<String>,
    },
    /// The host's numbers for operations are not known.
    #[error(
        "the host does not tell how its ggml, {host}, numbers operations, and ggml {guest} here may number them otherwise: \
         give the host apir's plugin of this release, or set {SAME_GGML_VARIABLE}=1 where both are the same release"
    )]
    OtherGgml {
        /// What is known of the host's ggml.
        host: &'static str,
        /// The version of the guest's.
        guest: String,
    },
    /// The host's lists of names are none.
    #[error("the host's list of {0} is not one of ggml's")]
    Names(&'static str),
    /// ggml cannot place tensors by the host's alignment.
    #[error(
        "the host's buffers have an alignment of {0} bytes, not a power of two up to {MAX_ALIGNMENT}; \
         give it apir's plugin, or another ggml library"
    )]
    Alignment(u64),
    /// The host offers no device.
    #[error("the host offers no device (it counts {count}); give it a ggml library with one")]
    NoDevice {
        /// The host's count.
        count: i32,
    },
}

fn transport(code: u32) -> &'static str {
    ForwardCode::from_number(code).map_or("an unknown reason", ForwardCode::description)
}

/// The code that answered LOADLIBRARY, not 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub struct LoadFailure(pub u32);

impl fmt::Display for LoadFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = self.0;
        let (what, fix) = self.explain();
        write!(f, "the host could not start its device: {what} (code {code}); {fix}")
    }
}

impl LoadFailure {
    /// What the code says, and what to do about it.
    fn explain(self) -> (&'static str, &'static str) {
        let plugin = self.0.checked_sub(LOAD_LIBRARY_BASE);
        let initialize = plugin.and_then(|code| code.checked_sub(INITIALIZE_BASE));
        if let Some(code) = LoadLibraryCode::from_number(self.0) {
            (code.description(), loader_fix(code))
        } else if let Some(code) = plugin.and_then(PluginCode::from_number) {
            (code.description(), plugin_fix(code))
        } else if let Some(code) = initialize.filter(|code| *code != 0).and_then(InitializeCode::from_number)
        {
            (code.description(), initialize_fix(code))
        } else {
            ("an unknown reason", SEE_OUTPUT)
        }
    }
}

const SEE_OUTPUT: &str = "the host's output says why";

fn loader_fix(code: LoadLibraryCode) -> &'static str {
    match code {
        LoadLibraryCode::Success | LoadLibraryCode::HypercallError => SEE_OUTPUT,
        LoadLibraryCode::AlreadyLoaded => "run the program again for a context of its own",
        LoadLibraryCode::ConfigMissing => {
            "name it on the host: apir serve --plugin FILE, or VIRGL_APIR_BACKEND_LIBRARY"
        }
        LoadLibraryCode::CannotOpen => {
            "check on the host that the file of --plugin (VIRGL_APIR_BACKEND_LIBRARY) and what it links load"
        }
        LoadLibraryCode::SymbolMissing => {
            "name an APIR plugin on the host, such as libggml-virtgpu-backend.so"
        }
    }
}

fn plugin_fix(code: PluginCode) -> &'static str {
    match code {
        PluginCode::ConfigMissing => {
            "name it on the host: apir serve --ggml-library FILE, or APIR_LLAMA_CPP_GGML_LIBRARY_PATH"
        }
        PluginCode::CannotOpen => {
            "check on the host that the file of --ggml-library (APIR_LLAMA_CPP_GGML_LIBRARY_PATH) and what it \
             links load"
        }
        PluginCode::SymbolMissing => {
            "name a ggml backend on the host, such as libggml-cpu.so (--ggml-library, APIR_LLAMA_CPP_GGML_LIBRARY_PATH), \
             or the registration function that it has (--ggml-reg, APIR_LLAMA_CPP_GGML_LIBRARY_REG); the host's output \
             says what it lacks"
        }
    }
}

fn initialize_fix(code: InitializeCode) -> &'static str {
    match code {
        InitializeCode::CannotOpenBackend
        | InitializeCode::CannotOpenGgml
        | InitializeCode::BackendSymbols
        | InitializeCode::GgmlSymbols
        | InitializeCode::RegistrationFailed => {
            "give the host another ggml library or registration function: --ggml-library, --ggml-reg"
        }
        InitializeCode::BackendFailed => "give the host a ggml library that its plugin supports",
        InitializeCode::AlreadyInitialized => {
            "this host's plugin serves one context a process: end the other guest, or use apir serve"
        }
        InitializeCode::BadSetting => "the host's output names the variable and its right form",
        InitializeCode::NoDevice => "check on the host that the GPU and its driver are there",
        InitializeCode::Success | InitializeCode::BackendInitFailed => SEE_OUTPUT,
    }
}
