//! virglrenderer's public functions, by which a VMM uses this library in place of libvirglrenderer.so.1.
//!
//! Each decodes its arguments, asks [`Device`] whose the call is, and makes it here or in the real library. No panic leaves them.
//! Pointers are what virglrenderer's header says: valid for the call, or null. Some calls return a positive errno and some a
//! negative one, as virglrenderer's do; VMMs test for zero.
use crate::chain::{
    Callbacks, Chain, ChainError, CreateArgs, CreateBlobArgs, FD_TYPE_SHM, FreeCallback, ImportBlobArgs,
    LogCallback, ResourceInfo, own_file,
};
use crate::dropin::fences::{Fence, Retire};
use crate::dropin::{Answer, BlobRequest, CAPSET, Device, Image, Iov, Refusal, log};
use crate::log::TARGET;
use apir_protocol::constants::{CAPSET_APIR, CAPSET_VENUS};
use nix::libc::{self, EINVAL, EOPNOTSUPP, iovec};
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, IntoRawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use tracing::Level;

/// Fences are to be told from a thread of the library's, not at polls.
const ASYNC_FENCE_CB: c_int = 1 << 8;
/// Memory that both sides' caches see alike.
const MAP_CACHE_CACHED: u32 = 1;
/// The part of a context's flags that names its capset.
const CAPSET_MASK: u32 = 0xff;

static DEVICE: RwLock<Option<Arc<Device>>> = RwLock::new(None);
/// The real library; an error when one was named that cannot be used.
static CHAIN: OnceLock<Result<Option<Chain>, ChainError>> = OnceLock::new();
/// The VMM's log callback, for a real library that is loaded later.
static LOG: Mutex<Option<Log>> = Mutex::new(None);

/// Tells other copies of this library that it is one.
#[unsafe(no_mangle)]
pub extern "C" fn apir_virglrenderer_dropin() -> u32 {
    CAPSET_APIR
}

/// Runs a call, keeping panics from the VMM.
fn guard<T>(otherwise: T, call: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or(otherwise)
}

fn device() -> Option<Arc<Device>> {
    DEVICE.read().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Runs a call on the device; `otherwise` before init, after a refusal and after a panic.
fn with<T>(otherwise: T, call: impl FnOnce(&Device) -> Result<T, Refusal>) -> T
where
    T: Clone,
{
    let spare = otherwise.clone();
    guard(otherwise, || {
        let Some(device) = device() else { return spare };
        call(&device).unwrap_or_else(|refusal| {
            device.warn(format_args!("{refusal}"));
            spare
        })
    })
}

/// The same for calls that return an errno times `sign`.
fn status(sign: c_int, call: impl FnOnce(&Device) -> Result<c_int, Refusal>) -> c_int {
    with(sign * EINVAL, |device| {
        call(device).or_else(|refusal| {
            let code = sign * refusal.errno();
            device.warn(format_args!("{refusal}"));
            Ok(code)
        })
    })
}

/// Calls a function of the real library's, when there is such a library and it has the function.
macro_rules! chain {
    ($device:expr, $function:ident($($argument:expr),*)) => {
        $device.chain().and_then(|chain| chain.call.$function).map(|function| {
            // SAFETY: the arguments are the VMM's own for the function of this name, or as that one's header wants them.
            unsafe { function($($argument),*) }
        })
    };
}

/// The VMM's callbacks.
struct Vmm {
    cookie: *mut c_void,
    write_fence: Option<unsafe extern "C" fn(*mut c_void, u32)>,
    write_context_fence: Option<unsafe extern "C" fn(*mut c_void, u32, u32, u64)>,
}

// SAFETY: a VMM that asks for fences from a thread has callbacks for that; otherwise they are called in its own polls.
unsafe impl Send for Vmm {}
// SAFETY: as above.
unsafe impl Sync for Vmm {}

impl Retire for Vmm {
    fn retire(&self, fence: Fence) {
        match (fence, self.write_fence, self.write_context_fence) {
            (Fence::Device { id }, Some(write), _) => {
                // SAFETY: the VMM gave this callback for this cookie, until its cleanup.
                unsafe { write(self.cookie, id) }
            }
            (Fence::Context { context, ring, id }, _, Some(write)) => {
                // SAFETY: as above.
                unsafe { write(self.cookie, context, ring, id) }
            }
            _ => {}
        }
    }
}

/// The VMM's log callback and what it goes with.
#[derive(Clone, Copy)]
struct Log {
    callback: LogCallback,
    data: *mut c_void,
    free: Option<FreeCallback>,
}

// SAFETY: virglrenderer logs from whatever thread, and the VMM's callback is made for that.
unsafe impl Send for Log {}
// SAFETY: as above.
unsafe impl Sync for Log {}

impl Log {
    fn line(&self, level: Level, line: &str) {
        let level = match level {
            Level::ERROR => 3,
            Level::WARN => 2,
            Level::INFO => 1,
            _ => 0,
        };
        let line = CString::new(line.replace('\0', "?")).unwrap_or_default();
        // SAFETY: the VMM gave this callback for this data, until it gives another.
        unsafe { (self.callback)(level, line.as_ptr(), self.data) }
    }
}

/// The real library, looked for once in a process.
fn chain(own: &Path) -> Result<Option<&'static Chain>, &'static ChainError> {
    let chain = CHAIN.get_or_init(|| {
        let chain = Chain::find(own)?;
        if let Some(chain) = &chain
            && let Some(log) = *LOG.lock().unwrap_or_else(PoisonError::into_inner)
            && let Some(set) = chain.call.set_log_callback
        {
            // SAFETY: the VMM's own arguments; freeing the data stays with us.
            unsafe { set(Some(log.callback), log.data, None) }
        }
        Ok(chain)
    });
    chain.as_ref().map(Option::as_ref)
}

/// The real library, when it has been looked for and found.
fn known_chain() -> Option<&'static Chain> {
    CHAIN.get()?.as_ref().ok()?.as_ref()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_init(
    cookie: *mut c_void,
    flags: c_int,
    callbacks: *mut Callbacks,
) -> c_int {
    guard(-1, || {
        log::start();
        if callbacks.is_null() {
            return -1;
        }
        // SAFETY: not null, so the VMM's table; its version says how long it is.
        let version = unsafe { (*callbacks).version };
        if version < 1 {
            return -1;
        }
        let vmm = Vmm {
            cookie,
            // SAFETY: every version has this field.
            write_fence: unsafe { (*callbacks).write_fence },
            // SAFETY: as above for versions that have it.
            write_context_fence: (version >= 3)
                .then(|| unsafe { (*callbacks).write_context_fence })
                .flatten(),
        };
        let own = own_file();
        let mut chain = match chain(&own) {
            Ok(chain) => chain,
            Err(error) => {
                tracing::error!(target: TARGET, "{error}");
                return -1;
            }
        };
        if let Some((real, init)) = chain.and_then(|chain| Some((chain, chain.call.init?))) {
            // SAFETY: the VMM's own arguments.
            let code = unsafe { init(cookie, flags, callbacks) };
            if code != 0 {
                tracing::warn!(target: TARGET, "{} did not start: code {code}", real.path().display());
                if real.is_named() {
                    return code;
                }
                chain = None;
            }
        }
        let at_once = flags & ASYNC_FENCE_CB != 0;
        let before = device();
        match Device::new(&own, chain, Arc::new(vmm), at_once, before.as_deref()) {
            Ok(new) => {
                tracing::info!(target: TARGET, "virglrenderer with APIR: {new}");
                *DEVICE.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(new));
                0
            }
            Err(error) => {
                tracing::error!(target: TARGET, "virglrenderer with APIR cannot start: {error}");
                -1
            }
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_cleanup(cookie: *mut c_void) {
    guard((), || {
        let device = DEVICE.write().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(device) = device {
            device.reset();
            chain!(device, cleanup(cookie));
        }
    });
}

#[unsafe(no_mangle)]
extern "C" fn virgl_renderer_reset() {
    with((), |device| {
        device.reset();
        chain!(device, reset());
        Ok(())
    });
}

#[unsafe(no_mangle)]
extern "C" fn virgl_renderer_poll() {
    with((), |device| {
        chain!(device, poll());
        device.fences().poll();
        Ok(())
    });
}

#[unsafe(no_mangle)]
extern "C" fn virgl_renderer_get_poll_fd() -> c_int {
    with(-1, |device| {
        let Some(theirs) = chain!(device, get_poll_fd()) else {
            return Ok(device.fences().event().map_or(-1, |event| event.as_raw_fd()));
        };
        if theirs < 0 {
            // The real library wants to be polled now and then, and so we are.
            return Ok(-1);
        }
        // SAFETY: the real library's own, open until its cleanup.
        let theirs = unsafe { BorrowedFd::borrow_raw(theirs) };
        Ok(device.fences().event_with(theirs).unwrap_or_else(|error| {
            device.warn(format_args!("fences cannot be waited for: {error}"));
            -1
        }))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_set_log_callback(
    callback: Option<LogCallback>,
    data: *mut c_void,
    free: Option<FreeCallback>,
) {
    guard((), || {
        let new = callback.map(|callback| Log { callback, data, free });
        log::set_sink(new.map(|log| -> log::Sink { Arc::new(move |level, line| log.line(level, line)) }));
        if let Some(set) = known_chain().and_then(|chain| chain.call.set_log_callback) {
            // SAFETY: the VMM's own arguments; freeing the data stays with us.
            unsafe { set(callback, data, None) }
        }
        let old = std::mem::replace(&mut *LOG.lock().unwrap_or_else(PoisonError::into_inner), new);
        if let Some(Log { data, free: Some(free), .. }) = old {
            // SAFETY: nobody uses the data any more.
            unsafe { free(data) }
        }
    });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_set_debug_callback(callback: *mut c_void) -> *mut c_void {
    let chain = known_chain().and_then(|chain| chain.call.set_debug_callback);
    guard(std::ptr::null_mut(), || {
        // SAFETY: the VMM's own argument.
        chain.map_or(std::ptr::null_mut(), |set| unsafe { set(callback) })
    })
}

/// Version and size of a capset, and the real library where it is that one's. VMMs ask before init too.
fn capset(capset: u32) -> (Option<&'static Chain>, u32, u32) {
    let chain = match device() {
        Some(device) => device.chain(),
        None => {
            log::start();
            // An error is told by init.
            chain(&own_file()).unwrap_or_default()
        }
    };
    if capset != CAPSET_APIR
        && let Some(chain) = chain
        && let (version, size @ 1..) = chain.capset(capset)
    {
        return (Some(chain), version, size);
    }
    match capset {
        CAPSET_APIR | CAPSET_VENUS => (None, 0, size_of_val(&CAPSET) as u32),
        _ => (None, 0, 0),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_get_cap_set(set: u32, max_ver: *mut u32, max_size: *mut u32) {
    let (version, size) = guard((0, 0), || {
        let (_, version, size) = capset(set);
        (version, size)
    });
    for (place, value) in [(max_ver, version), (max_size, size)] {
        if !place.is_null() {
            // SAFETY: not null, so the VMM's word.
            unsafe { place.write(value) }
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_fill_caps(set: u32, version: u32, caps: *mut c_void) {
    guard((), || match capset(set) {
        _ if caps.is_null() => {}
        (Some(chain), ..) => {
            if let Some(fill_caps) = chain.call.fill_caps {
                // SAFETY: the VMM's own arguments.
                unsafe { fill_caps(set, version, caps) }
            }
        }
        (None, _, 1..) => {
            // SAFETY: the VMM has room for the size that it was told.
            unsafe { caps.cast::<[u32; 6]>().write_unaligned(CAPSET) }
        }
        (None, _, 0) => {}
    });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_context_create(handle: u32, nlen: u32, name: *const c_char) -> c_int {
    /// The capset that such a context has.
    const VIRGL2: u32 = 2;
    status(1, |device| {
        device.create_context(handle, VIRGL2, |_| {
            chain!(device, context_create(handle, nlen, name)).unwrap_or(EINVAL)
        })?;
        Ok(0)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_context_create_with_flags(
    ctx_id: u32,
    ctx_flags: u32,
    nlen: u32,
    name: *const c_char,
) -> c_int {
    status(1, |device| {
        device.create_context(ctx_id, ctx_flags & CAPSET_MASK, |_| {
            chain!(device, context_create_with_flags(ctx_id, ctx_flags, nlen, name)).unwrap_or(EINVAL)
        })?;
        Ok(0)
    })
}

#[unsafe(no_mangle)]
extern "C" fn virgl_renderer_context_destroy(handle: u32) {
    with((), |device| {
        if device.destroy_context(handle) == Answer::Chain {
            chain!(device, context_destroy(handle));
        }
        Ok(())
    });
}

#[unsafe(no_mangle)]
extern "C" fn virgl_renderer_context_poll(ctx_id: u32) {
    with((), |device| {
        match device.context(ctx_id)? {
            Answer::Chain => drop(chain!(device, context_poll(ctx_id))),
            Answer::Ours(()) => device.fences().poll(),
        }
        Ok(())
    });
}

#[unsafe(no_mangle)]
extern "C" fn virgl_renderer_context_get_poll_fd(ctx_id: u32) -> c_int {
    with(-1, |device| match device.context(ctx_id)? {
        Answer::Chain => Ok(chain!(device, context_get_poll_fd(ctx_id)).unwrap_or(-1)),
        Answer::Ours(()) => Ok(device.fences().event().map_or(-1, |event| event.as_raw_fd())),
    })
}

/// Runs a command of `ndw` words; `ask` hands it to the real library.
///
/// # Safety
/// `buffer` is null or has so many words, which nobody changes meanwhile.
unsafe fn submit(
    buffer: *const c_void,
    ctx_id: c_int,
    ndw: c_int,
    ask: impl FnOnce(&Device) -> Option<c_int>,
) -> c_int {
    status(1, |device| {
        let id = ctx_id.cast_unsigned();
        let words = usize::try_from(ndw).unwrap_or(0);
        let command: &[u8] = if buffer.is_null() || words == 0 {
            &[]
        } else {
            // SAFETY: as the caller promises; a VMM's length does not overflow.
            unsafe { std::slice::from_raw_parts(buffer.cast(), words * 4) }
        };
        match device.submit(id, command)? {
            Answer::Ours(()) => Ok(0),
            Answer::Chain => Ok(ask(device).unwrap_or(EINVAL)),
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_submit_cmd(buffer: *mut c_void, ctx_id: c_int, ndw: c_int) -> c_int {
    let ask = |device: &Device| chain!(device, submit_cmd(buffer, ctx_id, ndw));
    // SAFETY: the VMM's own buffer.
    unsafe { submit(buffer, ctx_id, ndw, ask) }
}

/// Fences to wait for are the real library's alone: ours have passed when they are made.
#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_submit_cmd2(
    buffer: *mut c_void,
    ctx_id: c_int,
    ndw: c_int,
    in_fence_ids: *mut u64,
    num_in_fences: u32,
) -> c_int {
    let ask = |device: &Device| {
        chain!(device, submit_cmd2(buffer, ctx_id, ndw, in_fence_ids, num_in_fences))
            .or_else(|| chain!(device, submit_cmd(buffer, ctx_id, ndw)))
    };
    // SAFETY: the VMM's own buffer.
    unsafe { submit(buffer, ctx_id, ndw, ask) }
}

#[unsafe(no_mangle)]
extern "C" fn virgl_renderer_create_fence(client_fence_id: c_int, ctx_id: u32) -> c_int {
    status(1, |device| {
        // Without its OpenGL part the real library has no such fences.
        if chain!(device, create_fence(client_fence_id, ctx_id)) != Some(0) {
            device.fences().add(Fence::Device { id: client_fence_id.cast_unsigned() });
        }
        Ok(0)
    })
}

#[unsafe(no_mangle)]
extern "C" fn virgl_renderer_context_create_fence(
    ctx_id: u32,
    flags: u32,
    ring_idx: u32,
    fence_id: u64,
) -> c_int {
    status(-1, |device| match device.context_fence(ctx_id, ring_idx, fence_id)? {
        Answer::Ours(()) => Ok(0),
        Answer::Chain => {
            Ok(chain!(device, context_create_fence(ctx_id, flags, ring_idx, fence_id)).unwrap_or(-EINVAL))
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_export_fence(client_fence_id: u64, fd: *mut c_int) -> c_int {
    status(-1, |device| Ok(chain!(device, export_fence(client_fence_id, fd)).unwrap_or(-EINVAL)))
}

#[unsafe(no_mangle)]
extern "C" fn virgl_renderer_export_signalled_fence() -> c_int {
    with(-1, |device| Ok(chain!(device, export_signalled_fence()).unwrap_or(-1)))
}

/// The scatter list at `iov`, when there is one.
fn scatter_list(iov: *const iovec, count: u32) -> Option<Iov> {
    (!iov.is_null() && count > 0).then_some(Iov { address: iov as usize, count })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_resource_create(
    args: *mut CreateArgs,
    iov: *mut iovec,
    num_iovs: u32,
) -> c_int {
    status(1, |device| {
        if args.is_null() {
            return Ok(EINVAL);
        }
        // SAFETY: not null, so the VMM's arguments.
        let CreateArgs { handle, format, width, height, depth, flags, .. } = unsafe { args.read() };
        let image = Image { format, width, height, depth, flags };
        device.create_resource(handle, image, scatter_list(iov, num_iovs), |_| {
            chain!(device, resource_create(args, iov, num_iovs)).unwrap_or(EINVAL)
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_resource_create_blob(args: *const CreateBlobArgs) -> c_int {
    status(-1, |device| {
        if args.is_null() {
            return Ok(-EINVAL);
        }
        // SAFETY: not null, so the VMM's arguments.
        let blob = unsafe { args.read() };
        let request = BlobRequest {
            id: blob.res_handle,
            context: blob.ctx_id,
            memory: blob.blob_mem,
            blob_id: blob.blob_id,
            size: blob.size,
            iov: scatter_list(blob.iovecs, blob.num_iovs),
        };
        device.create_blob(&request, |_| chain!(device, resource_create_blob(args)).unwrap_or(-EINVAL))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_resource_import_blob(args: *const ImportBlobArgs) -> c_int {
    status(-1, |device| {
        if args.is_null() {
            return Ok(-EINVAL);
        }
        // SAFETY: not null, so the VMM's arguments.
        let id = unsafe { (*args).res_handle };
        device.import_resource(id, |_| chain!(device, resource_import_blob(args)))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_resource_import_eglimage(
    args: *mut CreateArgs,
    image: *mut c_void,
) -> c_int {
    status(1, |device| {
        if args.is_null() {
            return Ok(EINVAL);
        }
        // SAFETY: not null, so the VMM's arguments.
        let id = unsafe { (*args).handle };
        device.import_resource(id, |_| chain!(device, resource_import_eglimage(args, image)))
    })
}

#[unsafe(no_mangle)]
extern "C" fn virgl_renderer_resource_unref(res_handle: u32) {
    with((), |device| {
        if device.unref_resource(res_handle) == Answer::Chain {
            chain!(device, resource_unref(res_handle));
        }
        Ok(())
    });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_resource_set_priv(res_handle: u32, data: *mut c_void) {
    with((), |device| {
        chain!(device, resource_set_priv(res_handle, data));
        Ok(())
    });
}

#[unsafe(no_mangle)]
extern "C" fn virgl_renderer_resource_get_priv(res_handle: u32) -> *mut c_void {
    let none = std::ptr::null_mut();
    with(none, |device| Ok(chain!(device, resource_get_priv(res_handle)).unwrap_or(none)))
}

#[unsafe(no_mangle)]
extern "C" fn virgl_renderer_ctx_attach_resource(ctx_id: c_int, res_handle: c_int) {
    with((), |device| {
        if device.attach(ctx_id.cast_unsigned(), res_handle.cast_unsigned())? == Answer::Chain {
            chain!(device, ctx_attach_resource(ctx_id, res_handle));
        }
        Ok(())
    });
}

#[unsafe(no_mangle)]
extern "C" fn virgl_renderer_ctx_detach_resource(ctx_id: c_int, res_handle: c_int) {
    with((), |device| {
        if device.detach(ctx_id.cast_unsigned(), res_handle.cast_unsigned())? == Answer::Chain {
            chain!(device, ctx_detach_resource(ctx_id, res_handle));
        }
        Ok(())
    });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_resource_attach_iov(
    res_handle: c_int,
    iov: *mut iovec,
    num_iovs: c_int,
) -> c_int {
    status(1, |device| {
        let new = Iov { address: iov as usize, count: u32::try_from(num_iovs).unwrap_or(0) };
        match device.attach_iov(res_handle.cast_unsigned(), new)? {
            Answer::Ours(()) => Ok(0),
            Answer::Chain => {
                Ok(chain!(device, resource_attach_iov(res_handle, iov, num_iovs)).unwrap_or(EINVAL))
            }
        }
    })
}

/// Gives back the list that was attached: the VMM unmaps the guest's memory by it.
#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_resource_detach_iov(
    res_handle: c_int,
    iov: *mut *mut iovec,
    num_iovs: *mut c_int,
) {
    let ours = with(Answer::Ours(None), |device| {
        let answer = device.detach_iov(res_handle.cast_unsigned())?;
        if answer == Answer::Chain {
            chain!(device, resource_detach_iov(res_handle, iov, num_iovs));
        }
        Ok(answer)
    });
    if let Answer::Ours(list) = ours {
        let Iov { address, count } = list.unwrap_or(Iov { address: 0, count: 0 });
        if !iov.is_null() {
            // SAFETY: not null, so the VMM's pointer.
            unsafe { iov.write(address as *mut iovec) }
        }
        if !num_iovs.is_null() {
            // SAFETY: not null, so the VMM's word.
            unsafe { num_iovs.write(count.cast_signed()) }
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_resource_map(
    res_handle: u32,
    map: *mut *mut c_void,
    out_size: *mut u64,
) -> c_int {
    status(-1, |device| {
        if map.is_null() || out_size.is_null() {
            return Ok(-EINVAL);
        }
        match device.map(res_handle)? {
            Answer::Ours((address, size)) => {
                // SAFETY: neither is null, so they are the VMM's.
                unsafe {
                    map.write(address.cast());
                    out_size.write(size);
                }
                Ok(0)
            }
            Answer::Chain => Ok(chain!(device, resource_map(res_handle, map, out_size)).unwrap_or(-EINVAL)),
        }
    })
}

/// Maps a blob of ours over the VMM's own address range, which is the VMM's to unmap.
///
/// # Safety
/// The range of `size` bytes, or of the blob's size, is the VMM's and may be mapped over.
unsafe fn map_over(
    device: &Device,
    id: u32,
    address: *mut c_void,
    size: Option<u64>,
    protection: c_int,
    flags: c_int,
) -> Result<Answer<c_int>, Refusal> {
    let memory = match device.memory(id, "be mapped")? {
        Answer::Ours(memory) => memory,
        Answer::Chain => return Ok(Answer::Chain),
    };
    let size = size.unwrap_or(memory.size);
    let Some(len) = usize::try_from(size).ok().filter(|_| !address.is_null() && size <= memory.size) else {
        return Ok(Answer::Ours(-EINVAL));
    };
    // SAFETY: as the caller promises; the memory is as long, and sealed.
    let found = unsafe { libc::mmap(address, len, protection, flags, memory.file.as_raw_fd(), 0) };
    if found == libc::MAP_FAILED {
        return Err(Refusal::Io { id, what: "map it", source: std::io::Error::last_os_error() });
    }
    Ok(Answer::Ours(0))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_resource_map_fixed(res_handle: u32, map: *mut c_void) -> c_int {
    status(-1, |device| {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: as virglrenderer asks of the VMM.
        match unsafe { map_over(device, res_handle, map, None, protection, flags) }? {
            Answer::Ours(code) => Ok(code),
            // VMMs then map in another way.
            Answer::Chain => Ok(chain!(device, resource_map_fixed(res_handle, map)).unwrap_or(-EOPNOTSUPP)),
        }
    })
}

/// libkrun's own addition to virglrenderer.
#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_resource_map2(
    res_handle: u32,
    map: *mut c_void,
    size: u64,
    protection: c_int,
    flags: c_int,
) -> c_int {
    status(-1, |device| {
        // SAFETY: as virglrenderer asks of the VMM.
        match unsafe { map_over(device, res_handle, map, Some(size), protection, flags) }? {
            Answer::Ours(code) => Ok(code),
            Answer::Chain => Ok(chain!(device, resource_map2(res_handle, map, size, protection, flags))
                .unwrap_or(-EOPNOTSUPP)),
        }
    })
}

/// The macOS fork's addition to virglrenderer.
#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_resource_get_map_ptr(res_handle: u32, map_ptr: *mut u64) -> c_int {
    status(-1, |device| {
        if map_ptr.is_null() {
            return Ok(-EINVAL);
        }
        match device.map_address(res_handle)? {
            Answer::Ours(address) => {
                // SAFETY: not null, so the VMM's word.
                unsafe { map_ptr.write(address as u64) }
                Ok(0)
            }
            Answer::Chain => {
                Ok(chain!(device, resource_get_map_ptr(res_handle, map_ptr)).unwrap_or(-EOPNOTSUPP))
            }
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn virgl_renderer_resource_unmap(res_handle: u32) -> c_int {
    status(-1, |device| match device.unmap(res_handle)? {
        Answer::Ours(()) => Ok(0),
        Answer::Chain => Ok(chain!(device, resource_unmap(res_handle)).unwrap_or(-EINVAL)),
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_resource_get_map_info(res_handle: u32, map_info: *mut u32) -> c_int {
    status(-1, |device| {
        if map_info.is_null() {
            return Ok(-EINVAL);
        }
        match device.memory(res_handle, "be mapped")? {
            Answer::Ours(_) => {
                // SAFETY: not null, so the VMM's word.
                unsafe { map_info.write(MAP_CACHE_CACHED) }
                Ok(0)
            }
            Answer::Chain => {
                Ok(chain!(device, resource_get_map_info(res_handle, map_info)).unwrap_or(-EINVAL))
            }
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_resource_export_blob(
    res_id: u32,
    fd_type: *mut u32,
    fd: *mut c_int,
) -> c_int {
    status(-1, |device| {
        if fd_type.is_null() || fd.is_null() {
            return Ok(-EINVAL);
        }
        match device.export(res_id)? {
            Answer::Ours(memory) => {
                // SAFETY: neither is null, so they are the VMM's; the descriptor becomes the VMM's too.
                unsafe {
                    fd_type.write(FD_TYPE_SHM);
                    fd.write(memory.into_raw_fd());
                }
                Ok(0)
            }
            Answer::Chain => Ok(chain!(device, resource_export_blob(res_id, fd_type, fd)).unwrap_or(-EINVAL)),
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_resource_get_info(res_handle: c_int, info: *mut ResourceInfo) -> c_int {
    status(1, |device| {
        if info.is_null() {
            return Ok(EINVAL);
        }
        match device.image(res_handle.cast_unsigned())? {
            Answer::Ours(image) => {
                let answer = ResourceInfo {
                    handle: res_handle.cast_unsigned(),
                    virgl_format: image.format,
                    width: image.width,
                    height: image.height,
                    depth: image.depth,
                    flags: image.flags,
                    tex_id: 0,
                    stride: 0,
                    drm_fourcc: 0,
                    fd: -1,
                };
                // SAFETY: not null, so the VMM's struct.
                unsafe { info.write(answer) }
                Ok(0)
            }
            Answer::Chain => Ok(chain!(device, resource_get_info(res_handle, info)).unwrap_or(EINVAL)),
        }
    })
}

/// VMMs ask this before they show a resource. Ours have no picture, and an error makes the VMM show none.
#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_resource_get_info_ext(res_handle: c_int, info: *mut c_void) -> c_int {
    status(1, |device| match device.image(res_handle.cast_unsigned())? {
        Answer::Ours(_) => Ok(EINVAL),
        Answer::Chain => Ok(chain!(device, resource_get_info_ext(res_handle, info)).unwrap_or(EINVAL)),
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_transfer_read_iov(
    handle: u32,
    ctx_id: u32,
    level: u32,
    stride: u32,
    layer_stride: u32,
    region: *mut c_void,
    offset: u64,
    iov: *mut iovec,
    iovec_cnt: c_int,
) -> c_int {
    status(1, |device| match device.transfer(handle)? {
        Answer::Ours(()) => Ok(0),
        Answer::Chain => Ok(chain!(
            device,
            transfer_read_iov(handle, ctx_id, level, stride, layer_stride, region, offset, iov, iovec_cnt)
        )
        .unwrap_or(EINVAL)),
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_transfer_write_iov(
    handle: u32,
    ctx_id: u32,
    level: c_int,
    stride: u32,
    layer_stride: u32,
    region: *mut c_void,
    offset: u64,
    iov: *mut iovec,
    iovec_cnt: c_uint,
) -> c_int {
    status(1, |device| match device.transfer(handle)? {
        Answer::Ours(()) => Ok(0),
        Answer::Chain => Ok(chain!(
            device,
            transfer_write_iov(handle, ctx_id, level, stride, layer_stride, region, offset, iov, iovec_cnt)
        )
        .unwrap_or(EINVAL)),
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_get_cursor_data(
    resource_id: u32,
    width: *mut u32,
    height: *mut u32,
) -> *mut c_void {
    let none = std::ptr::null_mut();
    with(none, |device| Ok(chain!(device, get_cursor_data(resource_id, width, height)).unwrap_or(none)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_get_rect(
    resource_id: c_int,
    iov: *mut iovec,
    num_iovs: c_uint,
    offset: u32,
    x: c_int,
    y: c_int,
    width: c_int,
    height: c_int,
) {
    with((), |device| {
        chain!(device, get_rect(resource_id, iov, num_iovs, offset, x, y, width, height));
        Ok(())
    });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_get_fd_for_texture(tex_id: u32, fd: *mut c_int) -> c_int {
    status(1, |device| Ok(chain!(device, get_fd_for_texture(tex_id, fd)).unwrap_or(EINVAL)))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_get_fd_for_texture2(
    tex_id: u32,
    fd: *mut c_int,
    stride: *mut c_int,
    offset: *mut c_int,
) -> c_int {
    status(1, |device| Ok(chain!(device, get_fd_for_texture2(tex_id, fd, stride, offset)).unwrap_or(EINVAL)))
}

#[unsafe(no_mangle)]
extern "C" fn virgl_renderer_force_ctx_0() {
    with((), |device| {
        chain!(device, force_ctx_0());
        Ok(())
    });
}

#[unsafe(no_mangle)]
unsafe extern "C" fn virgl_renderer_execute(execute_args: *mut c_void, execute_size: u32) -> c_int {
    status(1, |device| Ok(chain!(device, execute(execute_args, execute_size)).unwrap_or(EINVAL)))
}
