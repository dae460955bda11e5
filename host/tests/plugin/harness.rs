//! A renderer of the test's own, and a guest of the plugin in the same process.

pub(crate) use crate::scene::*;
use ggml_virtgpu_backend::plugin::{
    Callbacks, apir_backend_deinit, apir_backend_dispatcher, apir_backend_initialize,
};
use memmap2::MmapMut;
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

#[derive(Default)]
pub(crate) struct World {
    pub(crate) blobs: HashMap<(u32, u32), MmapMut>,
    pub(crate) config: HashMap<(u32, String), CString>,
}

pub(crate) static WORLD: LazyLock<Mutex<World>> = LazyLock::new(Mutex::default);

pub(crate) fn world() -> MutexGuard<'static, World> {
    // One test's failure is not another's.
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) unsafe extern "C" fn get_config(ctx_id: u32, key: *const c_char) -> *const c_char {
    // SAFETY: the plugin gives a C string.
    let key = unsafe { CStr::from_ptr(key) }.to_str().unwrap().to_owned();
    world().config.get(&(ctx_id, key)).map_or(std::ptr::null(), |value| value.as_ptr())
}

pub(crate) unsafe extern "C" fn get_shmem_ptr(ctx_id: u32, res_id: u32) -> *mut c_void {
    let mut all = world();
    all.blobs.get_mut(&(ctx_id, res_id)).map_or(std::ptr::null_mut(), |blob| blob.as_mut_ptr().cast())
}

pub(crate) static CALLBACKS: Callbacks =
    Callbacks { get_config: Some(get_config), get_shmem_ptr: Some(get_shmem_ptr) };

pub(crate) fn shared(len: usize) -> MmapMut {
    let fd = nix::sys::memfd::memfd_create(c"apir-shmem", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
    nix::unistd::ftruncate(&fd, len as i64).unwrap();
    // SAFETY: the file is anonymous and nobody shortens it.
    unsafe { MmapMut::map_mut(&fd) }.unwrap()
}

pub(crate) fn llama_dir() -> String {
    std::env::var("APIR_LLAMA_DIR").expect("APIR_LLAMA_DIR must name the folder of libggml-cpu.so")
}

/// A guest of the plugin.
pub(crate) struct Guest {
    pub(crate) ctx_id: u32,
    next_res: u32,
}

impl Guest {
    /// A context that has its keys and has not started.
    pub(crate) fn configured(library: &str, registration: Option<&str>) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let ctx_id = NEXT.fetch_add(1, Ordering::Relaxed);
        let mut all = world();
        let mut set = |key: &str, value: &str| {
            all.config.insert((ctx_id, key.to_owned()), CString::new(value).unwrap());
        };
        set("ggml.library.path", library);
        if let Some(registration) = registration {
            set("ggml.library.reg", registration);
        }
        Self { ctx_id, next_res: 1 }
    }

    /// Starts the context; its ggml's work memory lies before a guard.
    pub(crate) fn initialize(&self) -> u32 {
        apir_guard::load();
        // SAFETY: the table is static.
        unsafe { apir_backend_initialize(self.ctx_id, &CALLBACKS) }
    }

    pub(crate) fn start() -> Self {
        Self::start_with(&[])
    }

    /// A context with keys of the renderer's.
    pub(crate) fn start_with(keys: &[(&str, &str)]) -> Self {
        let guest = Self::configured(&format!("{}/libggml-cpu.so", llama_dir()), None);
        for (key, value) in keys {
            world().config.insert((guest.ctx_id, (*key).to_owned()), CString::new(*value).unwrap());
        }
        assert_eq!(guest.initialize(), 6);
        guest
    }

    /// The code alone of a command without arguments, with a small reply page.
    pub(crate) fn raw_code(&self, number: u32) -> u32 {
        let mut page = [0u8; 64];
        let mut after = std::ptr::null_mut();
        let start = page.as_mut_ptr();
        // SAFETY: the ranges are those of the page, and of no request.
        unsafe {
            let (none, end) = (std::ptr::null(), start.add(page.len()));
            apir_backend_dispatcher(self.ctx_id, &CALLBACKS, number, none, none, start, end, &mut after)
        }
    }

    pub(crate) fn blob(&mut self, bytes: &[u8]) -> u32 {
        let mut memory = shared(bytes.len().max(1).next_multiple_of(4096));
        memory[..bytes.len()].copy_from_slice(bytes);
        let res_id = self.next_res;
        self.next_res += 1;
        world().blobs.insert((self.ctx_id, res_id), memory);
        res_id
    }

    pub(crate) fn drop_blob(&mut self, res_id: u32) {
        world().blobs.remove(&(self.ctx_id, res_id));
    }

    /// Address of a blob's memory, which lives as long as the blob.
    pub(crate) fn blob_address(&self, res_id: u32) -> usize {
        world().blobs.get_mut(&(self.ctx_id, res_id)).unwrap().as_mut_ptr().addr()
    }

    /// Whether a command of so many bytes can be sent at all.
    pub(crate) fn carries(_len: usize) -> bool {
        true
    }

    pub(crate) fn blob_bytes(&self, res_id: u32, len: usize) -> Vec<u8> {
        world().blobs[&(self.ctx_id, res_id)][..len].to_vec()
    }

    /// The code and the reply of raw bytes.
    pub(crate) fn raw(&self, number: u32, request: &[u8]) -> (u32, Vec<u8>) {
        let mut page = vec![0xaa; 16380];
        let mut after = std::ptr::null_mut();
        let (start, request) = (page.as_mut_ptr(), request.as_ptr_range());
        // SAFETY: the ranges are those of the two vectors.
        let code = unsafe {
            let end = start.add(page.len());
            apir_backend_dispatcher(
                self.ctx_id,
                &CALLBACKS,
                number,
                request.start,
                request.end,
                start,
                end,
                &mut after,
            )
        };
        let written = after.addr() - start.addr();
        assert!(written <= page.len());
        assert!(page[written..].iter().all(|byte| *byte == 0xaa), "bytes behind the reply");
        page.truncate(written);
        (code, page)
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        apir_backend_deinit(self.ctx_id);
        world().blobs.retain(|(ctx_id, _), _| *ctx_id != self.ctx_id);
    }
}
