//! Guests of the plugin in this process, under a renderer of this module's own.

use crate::graph::{FLAG_COMPUTE, Graph};
use crate::ops::op;
use crate::threads::Threads;
use apir_protocol::codec::{Decoder, Encoder};
use apir_protocol::constants::REASON_BYTES;
use apir_protocol::handle::{BufferHandle, BufferTypeHandle};
use apir_protocol::messages::*;
use apir_protocol::tensor::TensorRecord;
use apir_protocol::{Request, Wire};
use ggml_virtgpu_backend::plugin::{
    Callbacks, apir_backend_deinit, apir_backend_dispatcher, apir_backend_initialize,
};
use memmap2::MmapRaw;
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// What initialize returns for a context that has started.
pub const STARTED: u32 = 6;
/// The codes that a command may end with: done, refused, unknown.
const CODES: [u32; 3] = [0, 1, 6];
/// Bytes of a page that nobody has written.
const UNWRITTEN: u8 = 0xaa;
/// Bytes of a reply page behind its notification word.
const PAGE: usize = 16380;

/// Keys of every context: a guest's share of memory is small, and its refusals are not told.
const KEYS: [(&str, &str); 4] = [
    ("apir.max_device_bytes", "134217728"),
    ("apir.max_mapped_bytes", "134217728"),
    ("apir.max_bad_commands", "18446744073709551615"),
    ("apir.max_log_lines", "0"),
];

#[derive(Debug)]
struct World {
    blobs: HashMap<(u32, u32), Arc<Blob>>,
    threads: HashMap<u32, Threads>,
    config: HashMap<&'static str, CString>,
}

static WORLD: LazyLock<Mutex<World>> = LazyLock::new(|| {
    let mut config = HashMap::new();
    config.extend(KEYS.map(|(key, value)| (key, CString::new(value).unwrap_or_default())));
    let library = CString::new(library().into_os_string().into_encoded_bytes()).unwrap_or_default();
    config.insert("ggml.library.path", library);
    Mutex::new(World { blobs: HashMap::new(), threads: HashMap::new(), config })
});

fn world() -> MutexGuard<'static, World> {
    WORLD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// libggml-cpu.so in the folder of `APIR_LLAMA_DIR`.
///
/// # Panics
/// When the variable is not set.
#[must_use]
pub fn library() -> PathBuf {
    let folder = std::env::var_os("APIR_LLAMA_DIR");
    PathBuf::from(folder.expect("APIR_LLAMA_DIR must name the folder of libggml-cpu.so"))
        .join("libggml-cpu.so")
}

unsafe extern "C" fn get_config(ctx_id: u32, key: *const c_char) -> *const c_char {
    // SAFETY: the plugin gives a C string.
    let key = unsafe { CStr::from_ptr(key) }.to_str().unwrap_or_default();
    let world = world();
    match key {
        "apir.host_threads" => {
            world.threads.get(&ctx_id).map_or(std::ptr::null(), |threads| threads.text().as_ptr())
        }
        // The table is never changed, so that the text stays.
        _ => world.config.get(key).map_or(std::ptr::null(), |value| value.as_ptr()),
    }
}

unsafe extern "C" fn get_shmem_ptr(ctx_id: u32, res_id: u32) -> *mut c_void {
    world().blobs.get(&(ctx_id, res_id)).map_or(std::ptr::null_mut(), |blob| blob.map.as_mut_ptr().cast())
}

static CALLBACKS: Callbacks = Callbacks { get_config: Some(get_config), get_shmem_ptr: Some(get_shmem_ptr) };

/// Shared memory of a guest.
#[derive(Debug)]
pub struct Blob {
    map: MmapRaw,
}

impl Blob {
    /// Zeroed memory of at least `len` bytes.
    ///
    /// # Panics
    /// When the system has none.
    #[must_use]
    pub fn new(len: usize) -> Self {
        let len = len.max(1).next_multiple_of(4096);
        let file = File::from(memfd_create(c"apir-shmem", MFdFlags::MFD_CLOEXEC).expect("a memfd"));
        file.set_len(len as u64).expect("memory for a blob");
        Self { map: MmapRaw::map_raw(&file).expect("a mapping of a blob") }
    }

    /// How many bytes there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.map.len() == 0
    }

    /// Writes as many of the bytes as lie inside.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let offset = offset.min(self.len());
        let len = bytes.len().min(self.len() - offset);
        // SAFETY: the range lies in the mapping. Whoever else uses it does so through raw pointers too.
        unsafe { self.map.as_mut_ptr().add(offset).copy_from(bytes.as_ptr(), len) };
    }

    /// The first `len` bytes, or all.
    #[must_use]
    pub fn read(&self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len.min(self.len())];
        // SAFETY: as above.
        unsafe { bytes.as_mut_ptr().copy_from(self.map.as_mut_ptr(), bytes.len()) };
        bytes
    }
}

/// A context of the plugin, and the blobs of its guest.
#[derive(Debug)]
pub struct Guest {
    ctx_id: u32,
    next_res: u32,
    page: Vec<u8>,
}

impl Guest {
    /// A context that has not started.
    #[must_use]
    pub fn new(threads: Threads) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let ctx_id = NEXT.fetch_add(1, Ordering::Relaxed);
        world().threads.insert(ctx_id, threads);
        Self { ctx_id, next_res: 1, page: vec![UNWRITTEN; PAGE] }
    }

    /// A context that has started.
    ///
    /// # Panics
    /// When it does not.
    #[must_use]
    pub fn started(threads: Threads) -> Self {
        let guest = Self::new(threads);
        assert_eq!(guest.initialize(), STARTED, "a context does not start");
        guest
    }

    /// Starts the context; its ggml's work memory lies before a guard.
    #[must_use]
    pub fn initialize(&self) -> u32 {
        apir_guard::load();
        // SAFETY: the table is static.
        unsafe { apir_backend_initialize(self.ctx_id, &CALLBACKS) }
    }

    /// Ends the context; its blobs stay.
    pub fn deinit(&self) {
        apir_backend_deinit(self.ctx_id);
    }

    /// Makes a blob that starts with `bytes`.
    pub fn blob(&mut self, bytes: &[u8]) -> (u32, Arc<Blob>) {
        let blob = Arc::new(Blob::new(bytes.len()));
        blob.write(0, bytes);
        let res_id = self.next_res;
        self.next_res += 1;
        world().blobs.insert((self.ctx_id, res_id), blob.clone());
        (res_id, blob)
    }

    /// Takes a blob away, whether the host uses it or not.
    pub fn drop_blob(&self, res_id: u32) {
        world().blobs.remove(&(self.ctx_id, res_id));
    }

    /// The code and the reply of a command that is no more than bytes.
    ///
    /// # Panics
    /// When the plugin answers what no plugin may: another code, a refusal with a reply that is no reason, bytes behind the reply.
    pub fn raw(&mut self, number: u32, request: &[u8]) -> (u32, Vec<u8>) {
        let mut after = std::ptr::null_mut();
        let start = self.page.as_mut_ptr();
        // A copy that is no longer than the request, so that reading past its end is noticed.
        let request = request.to_vec();
        let range = request.as_ptr_range();
        // SAFETY: the ranges are those of the two vectors.
        let code = unsafe {
            let end = start.add(PAGE);
            apir_backend_dispatcher(
                self.ctx_id,
                &CALLBACKS,
                number,
                range.start,
                range.end,
                start,
                end,
                &mut after,
            )
        };
        assert!(CODES.contains(&code), "command {number} ended with {code}");
        let written = after.addr().wrapping_sub(start.addr());
        assert!(written <= PAGE, "command {number} left its cursor {written} bytes into the page");
        let (reply, rest) = self.page.split_at_mut(written);
        assert!(code == 0 || is_reason(reply), "command {number} was refused with {code} and a reply");
        assert!(rest.iter().all(|byte| *byte == UNWRITTEN), "command {number} wrote behind its reply");
        let bytes = reply.to_vec();
        reply.fill(UNWRITTEN);
        (code, bytes)
    }

    /// The reply of a command, or the code of its refusal.
    ///
    /// # Errors
    /// The code.
    ///
    /// # Panics
    /// When the reply is none of this command.
    pub fn call<R: Request>(&mut self, request: &R) -> Result<R::Reply, u32> {
        match self.raw(R::COMMAND.number(), &encode(request)) {
            (0, reply) => {
                let mut decoder = Decoder::new(&reply);
                let value = R::Reply::decode(&mut decoder);
                let value = value.unwrap_or_else(|error| panic!("{}: {error}", R::COMMAND.name()));
                assert_eq!(decoder.left(), 0, "{}: bytes behind the reply", R::COMMAND.name());
                Ok(value)
            }
            (code, _) => Err(code),
        }
    }

    /// The device's buffer type.
    ///
    /// # Panics
    /// When the context has not started.
    pub fn buffer_type(&mut self) -> BufferTypeHandle {
        self.call(&DeviceGetBufferTypeRequest {}).expect("a buffer type").buffer_type
    }

    /// A buffer in the host's memory.
    ///
    /// # Panics
    /// When there is none.
    pub fn buffer(&mut self, size: usize) -> BufferHandle {
        let buffer_type = self.buffer_type();
        let request = BufferTypeAllocBufferRequest { buffer_type, size: size as u64 };
        let buffer = self.call(&request).expect("an answer").buffer;
        assert!(!buffer.is_null(), "no buffer of {size} bytes");
        buffer
    }

    /// A buffer that lies in shared memory.
    ///
    /// # Panics
    /// When there is none.
    pub fn shared_buffer(&mut self, size: usize) -> (BufferHandle, Arc<Blob>) {
        let (res_id, blob) = self.blob(&vec![0; size]);
        let request = DeviceBufferFromPtrRequest { res_id, size: size as u64, max_tensor_size: size as u64 };
        (self.call(&request).expect("a shared buffer").buffer, blob)
    }

    /// Computes a graph that lies in a blob of this guest.
    ///
    /// # Errors
    /// The code of a refusal.
    pub fn compute(&mut self, blob: &[u8]) -> Result<i32, u32> {
        let (res_id, _) = self.blob(blob);
        let status = self.compute_blob(res_id, blob.len());
        self.drop_blob(res_id);
        status
    }

    /// Computes the graph that is the first `len` bytes of a blob.
    ///
    /// # Errors
    /// The code of a refusal.
    pub fn compute_blob(&mut self, res_id: u32, len: usize) -> Result<i32, u32> {
        self.call(&BackendGraphComputeRequest { res_id, size: len as u64 }).map(|reply| reply.status)
    }

    /// Fails unless the context answers.
    ///
    /// # Panics
    /// When it does not.
    pub fn assert_alive(&mut self) {
        let count = self.call(&DeviceGetCountRequest {}).map(|reply| reply.count);
        assert_eq!(count, Ok(1), "the context does not answer any more");
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.deinit();
        world().threads.remove(&self.ctx_id);
        world().blobs.retain(|(ctx_id, _), _| *ctx_id != self.ctx_id);
    }
}

/// Whether these bytes may come with a refusal: none, or a reason.
fn is_reason(reply: &[u8]) -> bool {
    let mut decoder = Decoder::new(reply);
    let is_bounded = |text: String| text.len() as u64 <= REASON_BYTES;
    reply.is_empty() || decoder.string().is_ok_and(is_bounded) && decoder.left() == 0
}

/// The bytes of a request.
///
/// # Panics
/// Never: every request fits.
pub fn encode<T: Wire>(value: &T) -> Vec<u8> {
    let mut bytes = vec![0; 8192];
    let mut encoder = Encoder::new(&mut bytes);
    value.encode(&mut encoder).expect("a request of at most 8192 bytes");
    let len = encoder.len();
    bytes.truncate(len);
    bytes
}

/// All bytes of a buffer as one tensor.
#[must_use]
pub fn whole(buffer: BufferHandle, size: usize) -> TensorRecord {
    let n = size as u32;
    // Type 24 is one byte an element.
    TensorRecord { id: 1, type_: 24, buffer, ne: [n, 1, 1, 1], nb: [1, n, n, n], ..TensorRecord::default() }
}

/// Computes a graph with work memory, which lies before a guard.
fn assert_guarded(guest: &mut Guest, buffer: BufferHandle) {
    let before = apir_guard::count();
    let row =
        TensorRecord { id: 1, buffer, ne: [32, 1, 1, 1], nb: [4, 128, 128, 128], ..TensorRecord::default() };
    let mut node = TensorRecord { id: 2, op: op("SOFT_MAX"), flags: FLAG_COMPUTE, data: 128, ..row };
    (node.src[0], node.op_params[0]) = (1, 1.0f32.to_bits() as i32);
    let graph = Graph { nodes: vec![2], tensors: vec![row, node] };
    assert_eq!(guest.compute(&graph.to_blob()), Ok(0), "a graph with work memory");
    assert!(apir_guard::count() > before, "ggml's work memory has no guard");
}

/// A guest that does nothing wrong, and what it has stored: the neighbour of those that do.
#[derive(Debug)]
pub struct Neighbour {
    guest: Guest,
    buffer: BufferHandle,
    res_id: u32,
    blob: Arc<Blob>,
}

/// Bytes of the neighbour's buffer.
const STORED: usize = 4096;

impl Neighbour {
    /// Starts it and stores its bytes.
    ///
    /// # Panics
    /// When that does not work.
    #[must_use]
    pub fn start() -> Self {
        let mut guest = Guest::started(Threads::One);
        let buffer = guest.buffer(STORED);
        assert_guarded(&mut guest, buffer);
        let (res_id, blob) = guest.blob(&Self::pattern());
        let (tensor, size) = (whole(buffer, STORED), STORED as u64);
        let request = BufferSetTensorRequest { buffer, tensor, res_id, offset: 0, size };
        guest.call(&request).expect("a write of the neighbour's");
        Self { guest, buffer, res_id, blob }
    }

    fn pattern() -> Vec<u8> {
        (0..STORED).map(|at| (at * 7 + at / 256) as u8).collect()
    }

    /// Fails unless what it has stored is what it reads.
    ///
    /// # Panics
    /// When it is not.
    pub fn check(&mut self) {
        self.blob.write(0, &[0; STORED]);
        let (tensor, size) = (whole(self.buffer, STORED), STORED as u64);
        let request =
            BufferGetTensorRequest { buffer: self.buffer, tensor, res_id: self.res_id, offset: 0, size };
        self.guest.call(&request).expect("a read of the neighbour's");
        assert!(self.blob.read(STORED) == Self::pattern(), "another context's buffer has changed");
    }
}
