//! A context: one guest's blobs, plugin and command stream, apart from any transport.
#![forbid(unsafe_code)]

use crate::Error;
use crate::blob::{Blob, BlobBytes, Refused};
use crate::plugin::{LoadError, Plugin};
use crate::state::State;
use apir_protocol::command::{CommandType, ForwardCode, LoadLibraryCode};
use apir_protocol::constants::{
    FORWARD_BASE, HANDSHAKE_MAGIC, LOAD_LIBRARY_BASE, PROTOCOL_MAJOR, PROTOCOL_MINOR,
    VENUS_COMMAND_TYPE_OFFSET,
};
use apir_protocol::header::{CommandHeader, HEADER_SIZE};
use apir_protocol::socket::BlobRefusal;
use std::collections::BTreeMap;
use std::ffi::{CString, OsStr};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The word of a reply blob that the guest watches: 0 until the answer is complete.
const NOTIFICATION: usize = 0;
/// The notification word and one word of reply: what every command needs at least.
const SMALLEST_REPLY: usize = 8;
/// What a plugin's initialize returns beside 0 for success, as virglrenderer takes it.
const INITIALIZED: u32 = 6;

/// What a context is told by its host: the plugin and the strings that the plugin may ask for.
#[derive(Debug, Clone, Default)]
pub struct Config {
    plugin: Option<PathBuf>,
    entries: BTreeMap<CString, CString>,
}

impl Config {
    /// Names the plugin. Without one, loading the library answers that its key is missing.
    #[must_use]
    pub fn plugin(mut self, path: impl Into<PathBuf>) -> Self {
        self.plugin = Some(path.into());
        self
    }

    /// Sets what `get_config` answers for `key`.
    ///
    /// # Errors
    /// [`Error::ConfigNul`] for a NUL byte in either.
    pub fn set(mut self, key: &str, value: impl AsRef<OsStr>) -> Result<Self, Error> {
        let nul = |_| Error::ConfigNul { key: key.to_owned() };
        let name = CString::new(key).map_err(nul)?;
        let value = CString::new(value.as_ref().as_bytes()).map_err(nul)?;
        self.entries.insert(name, value);
        Ok(self)
    }
}

/// A blob that was made for a guest.
#[derive(Debug)]
pub struct CreatedBlob {
    /// Its resource id.
    pub res_id: u32,
    /// Its size in bytes: what was asked for, rounded up to the page.
    pub size: u64,
    /// Its memory: a memfd sealed against a change of size.
    pub memory: OwnedFd,
}

/// What ends a context: the guest broke the rules of the command stream, so nothing it says later can be believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Fatal {
    /// The header or the arguments that every such command has are not there.
    #[error("command of {len} bytes: a command of this type has at least {least}, in whole words")]
    Length {
        /// The command's length in bytes.
        len: usize,
        /// The least it must have.
        least: usize,
    },
    /// The first word names no command type.
    #[error("unknown command type {0}")]
    CommandType(u32),
    /// The reply blob does not exist.
    #[error("reply blob {0} does not exist")]
    ReplyBlob(u32),
    /// The reply blob cannot hold the answer.
    #[error("reply blob {res_id} of {size} bytes: the answer takes {least}")]
    ReplySize {
        /// Its resource id.
        res_id: u32,
        /// Its size in bytes.
        size: usize,
        /// The bytes that the answer takes.
        least: usize,
    },
    /// A command named a blob that does not exist; the command has been answered.
    #[error("a command named a blob that does not exist")]
    UnknownBlob,
}

#[derive(Debug)]
enum Library {
    NotLoaded,
    // As in virglrenderer, a context has one try.
    Failed,
    Ready(Plugin),
}

/// One guest's context.
///
/// Dropping it tells the plugin, then unmaps the blobs.
#[derive(Debug)]
pub struct Context {
    state: Arc<State>,
    plugin: Option<PathBuf>,
    library: Library,
    next_res_id: u32,
    blob_bytes: BlobBytes,
}

impl Context {
    /// A context with no blobs and no library loaded.
    ///
    /// # Errors
    /// [`Error::ContextExists`] while this process has a context of this id: the plugin knows contexts by their id;
    /// [`Error::Variable`].
    pub fn new(id: u32, config: Config) -> Result<Self, Error> {
        let Config { plugin, entries } = config;
        let blob_bytes = BlobBytes::from_environment()?;
        let state = State::register(id, entries).ok_or(Error::ContextExists { id })?;
        Ok(Self { state, plugin, library: Library::NotLoaded, next_res_id: 1, blob_bytes })
    }

    /// Makes a zeroed blob.
    ///
    /// # Errors
    /// The reason to tell the guest; the context lives on.
    pub fn create_blob(&mut self, size: u64) -> Result<CreatedBlob, BlobRefusal> {
        let res_id = self.next_res_id;
        let refused = |refused: Refused| {
            self.state.warn(format_args!("blob of {size} bytes refused: {refused}"));
            refused.reason
        };
        let next = res_id.checked_add(1).ok_or(Refused::from(BlobRefusal::ResourceIds)).map_err(refused)?;
        let (blob, memory) = Blob::create(size, &self.blob_bytes).map_err(refused)?;
        let size = blob.len() as u64;
        self.state.add_blob(res_id, blob);
        self.next_res_id = next;
        Ok(CreatedBlob { res_id, size, memory })
    }

    /// Takes a blob back that cannot be sent to the guest.
    pub(crate) fn refuse_blob(&self, blob: &CreatedBlob) {
        let CreatedBlob { res_id, size, .. } = blob;
        self.state.remove_blob(*res_id);
        self.state.warn(format_args!(
            "blob of {size} bytes refused: too many descriptors on their way to this user's processes"
        ));
    }

    /// Takes a blob of the transport's making: `size` bytes of a memfd sealed against shrinking and growing.
    ///
    /// # Errors
    /// [`Error::Attach`] for an id that is 0 or in use, and for memory that is not so.
    pub fn attach_blob(&mut self, res_id: u32, size: u64, memory: OwnedFd) -> Result<(), Error> {
        let refused = |source| Error::Attach { res_id, source };
        if res_id == 0 || self.state.blob(res_id).is_some() {
            return Err(refused(io::Error::other("the id is in use, or 0")));
        }
        let blob = Blob::attach(memory, size).map_err(refused)?;
        self.state.add_blob(res_id, blob);
        Ok(())
    }

    /// Unmaps a blob; an unknown id is only logged.
    pub fn unref_blob(&mut self, res_id: u32) {
        if !self.state.remove_blob(res_id) {
            self.state.warn(format_args!("blob {res_id} given back, but it does not exist"));
        }
    }

    /// Runs one whole command and answers it in its reply blob, the notification word last (Release).
    ///
    /// # Errors
    /// The context is lost, and its guest with it: there was no answer, but for [`Fatal::UnknownBlob`].
    pub fn submit(&mut self, command: &mut [u8]) -> Result<(), Fatal> {
        let len = command.len();
        let short = |least| Fatal::Length { len, least };
        let header = CommandHeader::from_bytes(command).map_err(|_| short(HEADER_SIZE))?;
        if !len.is_multiple_of(4) {
            return Err(short(HEADER_SIZE));
        }
        let arguments = &mut command[HEADER_SIZE..];
        let command_type = command_type(header.type_)?;
        let res_id = header.reply_res_id;
        let reply = self.state.blob(res_id).ok_or(Fatal::ReplyBlob(res_id))?;
        let too_small = |least| Fatal::ReplySize { res_id, size: reply.len(), least };
        if reply.len() < SMALLEST_REPLY {
            return Err(too_small(SMALLEST_REPLY));
        }
        let word = match command_type {
            CommandType::Handshake => {
                let Some((guest, _)) = arguments.split_first_chunk::<8>() else {
                    return Err(short(HEADER_SIZE + 8));
                };
                self.check_version(guest);
                for (offset, word) in [(4, PROTOCOL_MAJOR), (8, PROTOCOL_MINOR)] {
                    if !reply.store_word(offset, word, Ordering::Relaxed) {
                        return Err(too_small(12));
                    }
                }
                HANDSHAKE_MAGIC + 1
            }
            CommandType::LoadLibrary => self.load_library(),
            CommandType::Forward => self.forward(header.flags, arguments, &reply),
        };
        // Release: whoever sees the word sees the reply.
        reply.store_word(NOTIFICATION, word, Ordering::Release);
        if self.state.had_bad_lookup() {
            return Err(Fatal::UnknownBlob);
        }
        Ok(())
    }

    /// Has the plugin compute graphs of its own, without a guest.
    ///
    /// # Errors
    /// [`Error::NotWarmed`] without a plugin that can, and when nothing was computed.
    pub(crate) fn warm(&self) -> Result<(), Error> {
        let path = self.plugin.as_ref().ok_or(Error::NotWarmed("no plugin is configured"))?;
        let plugin = Plugin::load(path).map_err(|error| {
            self.state.warn(format_args!("{}: {error}", path.display()));
            Error::NotWarmed("the plugin cannot be loaded")
        })?;
        match plugin.warm(self.state.id()) {
            None => Err(Error::NotWarmed("the plugin has no apir_backend_warm")),
            Some(0) => Err(Error::NotWarmed("the plugin computed nothing")),
            Some(_) => Ok(()),
        }
    }

    fn check_version(&self, guest: &[u8; 8]) {
        let [a, b, c, d, e, f, g, h] = *guest;
        let (major, minor) = (u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]));
        self.state.set_guest_protocol(major, minor);
        if major != PROTOCOL_MAJOR {
            self.state.warn(format_args!(
                "the guest speaks protocol {major}.{minor}, this host {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
            ));
        }
    }

    /// Loads and initialises the plugin; returns the notification word.
    fn load_library(&mut self) -> u32 {
        let code = match (&self.library, &self.plugin) {
            (Library::Ready(_) | Library::Failed, _) => Err(LoadLibraryCode::AlreadyLoaded),
            (Library::NotLoaded, None) => {
                self.state.warn(format_args!("no plugin is configured"));
                Err(LoadLibraryCode::ConfigMissing)
            }
            (Library::NotLoaded, Some(path)) => {
                let loaded = Plugin::load(path).map_err(|error| {
                    self.state.warn(format_args!("{}: {error}", path.display()));
                    match error {
                        LoadError::Open(_) => LoadLibraryCode::CannotOpen,
                        LoadError::Symbol(_) => LoadLibraryCode::SymbolMissing,
                    }
                });
                self.library = Library::Failed;
                loaded
            }
        };
        let plugin = match code {
            Ok(plugin) => plugin,
            Err(code) => return code.number() + 1,
        };
        match plugin.initialize(self.state.id()) {
            0 | INITIALIZED => {
                if !plugin.has_deinit() {
                    self.state.warn(format_args!("the plugin has no apir_backend_deinit"));
                }
                self.state.set_plugin(plugin);
                self.library = Library::Ready(plugin);
                LoadLibraryCode::Success.number() + 1
            }
            code => {
                self.state.warn(format_args!("the plugin did not start: code {code}"));
                notification(LOAD_LIBRARY_BASE, code).unwrap_or(LoadLibraryCode::HypercallError.number() + 1)
            }
        }
    }

    /// Hands a command to the plugin; returns the notification word.
    fn forward(&self, command: u32, arguments: &mut [u8], reply: &Blob) -> u32 {
        let Library::Ready(plugin) = &self.library else {
            return ForwardCode::NoDispatch.number() + 1;
        };
        let Some(code) = plugin.dispatch(self.state.id(), command, arguments, reply) else {
            self.state.warn(format_args!("command {command}: the plugin left no cursor inside the reply"));
            return ForwardCode::NoDispatch.number() + 1;
        };
        notification(FORWARD_BASE, code).unwrap_or_else(|| {
            self.state.warn(format_args!(
                "command {command}: the plugin's code {code:#x} has no place in the answer"
            ));
            ForwardCode::NoDispatch.number() + 1
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // As in virglrenderer: callbacks find nothing during deinit, and mappings go last.
        self.state.unregister();
        if let Library::Ready(plugin) = &self.library {
            plugin.deinit(self.state.id());
        }
    }
}

/// Ends the computation of a context of this process, from any thread, where its plugin can.
pub(crate) fn stop_computation(id: u32) {
    if let Some(state) = State::find(id) {
        state.stop_computation();
    }
}

/// The command type of a first word, in the plain form or in that of the Venus capset.
fn command_type(word: u32) -> Result<CommandType, Fatal> {
    CommandType::from_number(word)
        .or_else(|| CommandType::from_number(word.checked_sub(VENUS_COMMAND_TYPE_OFFSET)?))
        .ok_or(Fatal::CommandType(word))
}

/// The word for a code above `base`; `None` for one that would wrap, to 0 above all: the guest would wait for ever.
fn notification(base: u32, code: u32) -> Option<u32> {
    code.checked_add(base + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_of_a_command_type_and_no_other() {
        for (word, expected) in [
            (0, CommandType::Handshake),
            (2, CommandType::Forward),
            (331, CommandType::Handshake),
            (333, CommandType::Forward),
        ] {
            assert_eq!(command_type(word), Ok(expected));
        }
        for word in [3, 330, 334, u32::MAX] {
            assert_eq!(command_type(word), Err(Fatal::CommandType(word)));
        }
    }

    #[test]
    fn no_code_becomes_the_word_for_no_answer() {
        assert_eq!(notification(FORWARD_BASE, 0), Some(5));
        assert_eq!(notification(FORWARD_BASE, u32::MAX - 5), Some(u32::MAX));
        assert_eq!(notification(FORWARD_BASE, u32::MAX - 4), None);
    }
}
