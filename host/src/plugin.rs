//! The three C symbols, as virglrenderer calls them, and those of our own renderer.
//!
//! A renderer may run every context in a process of its own, or several in one, on one thread or on many; deinit may never come.
//! Nothing unwinds out of here: a panic is a refusal, and the end of the context.

use crate::config::Config;
use crate::context::Context;
use crate::error::{CommandError, InitializeError};
use crate::memory::{Blobs, GetShmemPtr, publish};
use crate::warm::Layers;
use apir_ggml::GgmlLibrary;
use apir_protocol::command::{HandlerCode, InitializeCode};
use apir_protocol::constants::INITIALIZE_BASE;
use std::collections::HashMap;
use std::ffi::{CStr, CString, OsStr, OsString, c_char};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, Once, PoisonError};

/// What the renderer offers: one static table, the same for every context.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Callbacks {
    /// The value of a key, null when it has none; the renderer owns the text.
    pub get_config: Option<unsafe extern "C" fn(ctx_id: u32, key: *const c_char) -> *const c_char>,
    /// The address of a resource, null when it is no shared memory. Asking for an unknown one ends the context.
    pub get_shmem_ptr: Option<GetShmemPtr>,
}

static START_LOG: Once = Once::new();

/// A context that has started.
#[derive(Debug)]
struct Entry {
    context: Arc<Mutex<Context>>,
    /// Ends its computation, without waiting for it.
    stop: Arc<AtomicBool>,
}

/// The contexts that have started.
static CONTEXTS: LazyLock<Mutex<HashMap<u32, Entry>>> = LazyLock::new(Mutex::default);

/// The longest reply written: every reply of the protocol fits many times over.
const REPLY_CAPACITY: usize = 64 << 10;

fn contexts() -> std::sync::MutexGuard<'static, HashMap<u32, Entry>> {
    // The map is whole after any panic: its entries are put in and taken out in one step.
    CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a context: opens the ggml library and its first device.
///
/// Returns 6 on success, else what [`InitializeError::code`] says.
///
/// # Safety
/// `callbacks` must be null or point to the renderer's table, which stays while the context lives.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn apir_backend_initialize(ctx_id: u32, callbacks: *const Callbacks) -> u32 {
    let started = catch_unwind(|| {
        START_LOG.call_once(crate::log::start);
        // SAFETY: the caller's promise.
        match unsafe { initialize(ctx_id, callbacks) } {
            Ok(()) => INITIALIZE_BASE + InitializeCode::Success.number(),
            Err(error) => {
                tracing::error!("context {ctx_id}: {error}");
                error.code()
            }
        }
    });
    started.unwrap_or(INITIALIZE_BASE + InitializeCode::BackendFailed.number())
}

/// # Safety
/// As [`apir_backend_initialize`].
unsafe fn initialize(ctx_id: u32, callbacks: *const Callbacks) -> Result<(), InitializeError> {
    if contexts().contains_key(&ctx_id) {
        return Err(InitializeError::Twice(ctx_id));
    }
    // SAFETY: the caller's promise.
    let callbacks = unsafe { callbacks.as_ref() }.copied().ok_or(InitializeError::NoCallbacks)?;
    let get_shmem_ptr = callbacks.get_shmem_ptr.ok_or(InitializeError::NoCallbacks)?;
    // SAFETY: the caller's promise.
    let key = |name: &str| unsafe { setting(&callbacks, ctx_id, name) };
    let config = Config::read(key, |name| std::env::var_os(name))?;
    crate::log::set_limit(config.limits.log_lines);
    // SAFETY: whoever set the path trusts the file. Graphs and operations pass the verifier first, and a context's
    // buffers are used under its lock alone.
    let library = unsafe { GgmlLibrary::open(&config.library, Some(&config.registration)) }?;
    library.log_to(crate::log::from_ggml);
    let found = library.describe();
    // SAFETY: the renderer's function may be called while the context lives, and a blob stays while a command runs.
    let blobs = unsafe { Blobs::new(ctx_id, get_shmem_ptr, Context::mappings(&config)) };
    let context = Context::new(ctx_id, blobs, library, &config)?;
    let device = context.describe_device();
    tracing::info!("context {ctx_id}: {}: {found}; device {device}", config.library.display());
    let stop = context.stop.clone();
    contexts().insert(ctx_id, Entry { context: Arc::new(Mutex::new(context)), stop });
    Ok(())
}

/// Computes layers of models on every device, so that drivers compile their kernels; `apir.warm.weights`, `apir.warm.heads` and
/// `apir.warm.tokens` choose which.
///
/// Returns how many were computed. No context is needed, and none is started.
///
/// # Safety
/// As [`apir_backend_initialize`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn apir_backend_warm(ctx_id: u32, callbacks: *const Callbacks) -> u32 {
    let warmed = catch_unwind(|| {
        START_LOG.call_once(crate::log::start);
        // SAFETY: the caller's promise.
        unsafe { warm(ctx_id, callbacks) }.unwrap_or_else(|error| {
            tracing::error!("{error}");
            0
        })
    });
    warmed.unwrap_or(0)
}

/// # Safety
/// As [`apir_backend_initialize`].
unsafe fn warm(ctx_id: u32, callbacks: *const Callbacks) -> Result<u32, InitializeError> {
    // SAFETY: the caller's promise.
    let callbacks = unsafe { callbacks.as_ref() }.copied().ok_or(InitializeError::NoCallbacks)?;
    // SAFETY: the caller's promise.
    let key = |name: &str| unsafe { setting(&callbacks, ctx_id, name) };
    let config = Config::read(key, |name| std::env::var_os(name))?;
    let list = |name: &str, otherwise: &str| {
        key(name).map_or_else(|| otherwise.to_owned(), |list| list.to_string_lossy().into_owned())
    };
    let layers = Layers::parse(
        &list("apir.warm.weights", Layers::WEIGHTS),
        &list("apir.warm.heads", Layers::HEADS),
        &list("apir.warm.tokens", Layers::TOKENS),
    )?;
    // SAFETY: whoever set the path trusts the file, and the layers obey ggml's rules.
    let library = unsafe { GgmlLibrary::open(&config.library, Some(&config.registration)) }?;
    library.log_to(crate::log::from_ggml);
    let summary = crate::warm::run(&library, &layers, |line| tracing::info!("{line}"));
    tracing::info!("{}: {summary}", config.library.display());
    Ok(u32::try_from(summary.computed).unwrap_or(u32::MAX))
}

/// The value of a renderer's key.
///
/// # Safety
/// The renderer's function may be called for this context.
unsafe fn setting(callbacks: &Callbacks, ctx_id: u32, name: &str) -> Option<OsString> {
    let (get, name) = (callbacks.get_config?, CString::new(name).ok()?);
    // SAFETY: the renderer's function takes a C string and gives one, or null.
    let value = unsafe { get(ctx_id, name.as_ptr()) };
    // SAFETY: as above; the text is copied before anything else is asked for.
    (!value.is_null()).then(|| OsStr::from_bytes(unsafe { CStr::from_ptr(value) }.to_bytes()).to_owned())
}

/// Ends a context; buffers and backend are freed. An unknown context is left alone.
///
/// It may be called while another thread runs a command of the context. A computation then stops before its next node, where the backend can; the context is
/// freed at the command's end.
#[unsafe(no_mangle)]
pub extern "C" fn apir_backend_deinit(ctx_id: u32) {
    let ended = contexts().remove(&ctx_id);
    if let Some(entry) = &ended {
        entry.stop.store(true, Ordering::Relaxed);
    }
    // A backend that panics while it is freed takes nothing with it.
    let _ = catch_unwind(AssertUnwindSafe(|| drop(ended)));
}

/// Ends a computation of a context, from any thread, before its next node, where the backend can; so it is with every later one. The context goes on.
///
/// It is no part of virglrenderer's interface.
#[unsafe(no_mangle)]
pub extern "C" fn apir_backend_stop(ctx_id: u32) {
    if let Some(entry) = contexts().get(&ctx_id) {
        entry.stop.store(true, Ordering::Relaxed);
    }
}

/// Carries out the command `cmd` of a context.
///
/// Returns 0 on success, else what [`CommandError::code`] says; `enc_cur_after` is set in any case.
///
/// # Safety
/// `dec_cur..dec_end` must be readable, `enc_cur..enc_end` writable, and `enc_cur_after` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn apir_backend_dispatcher(
    ctx_id: u32,
    _callbacks: *const Callbacks,
    cmd: u32,
    dec_cur: *const u8,
    dec_end: *const u8,
    enc_cur: *mut u8,
    enc_end: *const u8,
    enc_cur_after: *mut *mut u8,
) -> u32 {
    let len = |from: *const u8, to: *const u8| {
        if from.is_null() { 0 } else { to.addr().saturating_sub(from.addr()) }
    };
    let (request_len, page_len) = (len(dec_cur, dec_end), len(enc_cur, enc_end));
    let request = || {
        if request_len == 0 {
            return Vec::new();
        }
        // SAFETY: the caller promises the bytes; they are copied before they are looked at.
        unsafe { std::slice::from_raw_parts(dec_cur, request_len) }.to_vec()
    };
    let mut reply = vec![0; page_len.min(REPLY_CAPACITY)];
    let done = catch_unwind(AssertUnwindSafe(|| dispatch(ctx_id, cmd, request_len, request, &mut reply)));
    let (code, written) = match done {
        Ok(answer) => answer,
        Err(_) => {
            tracing::error!("context {ctx_id}: {}", CommandError::Panic(cmd));
            apir_backend_deinit(ctx_id);
            (HandlerCode::Failed.number(), 0)
        }
    };
    // SAFETY: the caller promises `page_len` bytes, and `written` is no more.
    unsafe { publish(enc_cur, &reply[..written]) };
    if !enc_cur_after.is_null() {
        // SAFETY: the caller's promise; the sum stays inside the page.
        unsafe { enc_cur_after.write(enc_cur.add(written)) };
    }
    code
}

/// The code, and the bytes of the reply or of the reason of the refusal. The request is copied once its length is known to be within the context's limit.
fn dispatch(
    ctx_id: u32,
    cmd: u32,
    request_len: usize,
    request: impl FnOnce() -> Vec<u8>,
    reply: &mut [u8],
) -> (u32, usize) {
    let context = contexts().get(&ctx_id).map(|entry| entry.context.clone());
    // A poisoned context has been taken out of the map by the panic that poisoned it.
    let Some(Ok(mut context)) = context.as_ref().map(|context| context.lock()) else {
        return (CommandError::NotInitialized(ctx_id).code(), 0);
    };
    let done = context.check_length(request_len).and_then(|()| context.dispatch(cmd, &request(), reply));
    match done {
        Ok(written) => (HandlerCode::Success.number(), written),
        Err(error) => {
            context.log_refusal(cmd, &error);
            if !context.bears_refusal() {
                tracing::error!("context {ctx_id}: {}", CommandError::TooManyRefusals);
                apir_backend_deinit(ctx_id);
            }
            (error.code(), context.write_reason(&error, reply))
        }
    }
}
