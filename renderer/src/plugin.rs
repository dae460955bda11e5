//! The C boundary: virglrenderer's callbacks and the plugin's three symbols.
//!
//! Signatures are those of virglrenderer's APIR component; a plugin cannot tell this process from its worker.
use crate::blob::Blob;
use crate::state::State;
use apir_ggml::library::Candidate;
use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use memmap2::MmapRaw;
use std::error::Error;
use std::ffi::{CStr, c_char, c_void};
use std::path::Path;
use std::ptr;
use vm_memory::VolatileSlice;

#[repr(C)]
struct Callbacks {
    get_config: unsafe extern "C" fn(u32, *const c_char) -> *const c_char,
    get_shmem_ptr: extern "C" fn(u32, u32) -> *mut c_void,
}

type Initialize = unsafe extern "C" fn(u32, *const Callbacks) -> u32;
type Warm = unsafe extern "C" fn(u32, *const Callbacks) -> u32;
type Deinit = unsafe extern "C" fn(u32);
type Stop = unsafe extern "C" fn(u32);
type Dispatcher = unsafe extern "C" fn(
    u32,
    *const Callbacks,
    u32,
    *mut c_char,
    *const c_char,
    *mut c_char,
    *const c_char,
    *mut *mut c_char,
) -> u32;

/// One table for the process: plugins keep its address.
static CALLBACKS: Callbacks = Callbacks { get_config, get_shmem_ptr };

/// The string for `key`, valid until the context is destroyed, or null.
///
/// # Safety
/// `key` is null or a C string.
unsafe extern "C" fn get_config(context: u32, key: *const c_char) -> *const c_char {
    if key.is_null() {
        return ptr::null();
    }
    // SAFETY: not null, so a C string, as the caller promises.
    let key = unsafe { CStr::from_ptr(key) };
    // The context keeps its state, and the state its strings, until after deinit.
    State::find(context).and_then(|state| state.config(key).map(CStr::as_ptr)).unwrap_or(ptr::null())
}

/// The first byte of a blob, valid until the guest gives it back, or null.
extern "C" fn get_shmem_ptr(context: u32, res_id: u32) -> *mut c_void {
    State::find(context)
        .and_then(|state| state.look_up(res_id))
        .map_or(ptr::null_mut(), |blob| blob.as_ptr().cast())
}

/// What a library is, in the words that a choice among several reads: `variant SCORE`, `backend` or `other`.
pub fn score(library: &Path) -> String {
    // SAFETY: the host's user named this library, or the folder that it is in, to be run.
    match unsafe { Candidate::ask(library) } {
        Candidate::Variant(score) => format!("variant {score}"),
        Candidate::Backend => "backend".to_owned(),
        Candidate::Other => "other".to_owned(),
    }
}

/// Why a plugin could not be loaded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    /// The file is no library, or one it needs is missing.
    #[error("cannot open the plugin: {}", loader_text(.0))]
    Open(libloading::Error),
    /// The library is not an APIR plugin.
    #[error("not an APIR plugin: {}", loader_text(.0))]
    Symbol(libloading::Error),
}

/// What the loader says: the file or the symbol, and what is wrong with it.
pub(crate) fn loader_text(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

/// A loaded plugin. Never unloaded: it may have started threads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plugin {
    initialize: Initialize,
    deinit: Option<Deinit>,
    stop: Option<Stop>,
    warm: Option<Warm>,
    dispatcher: Dispatcher,
}

impl Plugin {
    /// Opens the library at `path`.
    pub(crate) fn load(path: &Path) -> Result<Self, LoadError> {
        // SAFETY: the host's user named this library to be run; its initialisers run here.
        let library =
            unsafe { Library::open(Some(path), RTLD_LAZY | RTLD_LOCAL) }.map_err(LoadError::Open)?;
        // SAFETY: the signatures are those of virglrenderer's plugin interface.
        let plugin = unsafe {
            Self {
                initialize: *library
                    .get::<Initialize>(b"apir_backend_initialize\0")
                    .map_err(LoadError::Symbol)?,
                dispatcher: *library
                    .get::<Dispatcher>(b"apir_backend_dispatcher\0")
                    .map_err(LoadError::Symbol)?,
                warm: library.get::<Warm>(b"apir_backend_warm\0").ok().map(|symbol| *symbol),
                deinit: library.get::<Deinit>(b"apir_backend_deinit\0").ok().map(|symbol| *symbol),
                // Not virglrenderer's: only our plugin has it.
                stop: library.get::<Stop>(b"apir_backend_stop\0").ok().map(|symbol| *symbol),
            }
        };
        std::mem::forget(library);
        Ok(plugin)
    }

    /// Whether it can be told of a context's end.
    pub(crate) fn has_deinit(&self) -> bool {
        self.deinit.is_some()
    }

    /// Starts a context; 0 and 6 are success.
    pub(crate) fn initialize(&self, context: u32) -> u32 {
        // SAFETY: the library is never unloaded; the callbacks live as long as the process.
        unsafe { (self.initialize)(context, &raw const CALLBACKS) }
    }

    /// Computes graphs of its own, so that drivers compile what these need; how many, or `None` where the plugin has none.
    pub(crate) fn warm(&self, context: u32) -> Option<u32> {
        // SAFETY: the library is never unloaded; the callbacks live as long as the process.
        self.warm.map(|warm| unsafe { warm(context, &raw const CALLBACKS) })
    }

    /// Ends a context.
    pub(crate) fn deinit(&self, context: u32) {
        if let Some(deinit) = self.deinit {
            // SAFETY: the library is never unloaded.
            unsafe { deinit(context) }
        }
    }

    /// Ends a computation of a context, from any thread, where the plugin can; the context goes on until its end.
    pub(crate) fn stop(&self, context: u32) {
        if let Some(stop) = self.stop {
            // SAFETY: the library is never unloaded.
            unsafe { stop(context) }
        }
    }

    /// Runs a forwarded command; its reply goes to the blob from byte 4. `None` when the plugin left no cursor inside the reply.
    pub(crate) fn dispatch(
        &self,
        context: u32,
        command: u32,
        arguments: &mut [u8],
        reply: &Blob,
    ) -> Option<u32> {
        let arguments = arguments.as_mut_ptr_range();
        let start = reply.as_ptr().wrapping_add(4);
        let end = reply.as_ptr().wrapping_add(reply.len());
        let mut after: *mut c_char = ptr::null_mut();
        // SAFETY: the arguments are ours alone for the call; the reply is a live mapping, held by the caller's reference,
        // and lies at 4.. as the caller has checked that it holds at least 8 bytes; the plugin keeps inside both.
        let code = unsafe {
            (self.dispatcher)(
                context,
                &raw const CALLBACKS,
                command,
                arguments.start.cast(),
                arguments.end.cast(),
                start.cast(),
                end.cast(),
                &raw mut after,
            )
        };
        let after: *mut u8 = after.cast();
        (start..=end).contains(&after).then_some(code)
    }
}

/// The bytes of a mapping that the guest also writes to.
pub(crate) fn shared_bytes(mapping: &MmapRaw) -> VolatileSlice<'_> {
    // SAFETY: the mapping is readable and writable over its whole length and outlives the slice, which borrows it.
    unsafe { VolatileSlice::new(mapping.as_mut_ptr(), mapping.len()) }
}
