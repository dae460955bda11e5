//! libllama through its public C API, opened at run time: a real llama.cpp program of whatever release its folder holds.
//!
//! The parameter structs grow from release to release, so they are taken from the library and given back as they are, in room for the
//! largest: the C ABI gives and takes structs of this size in memory, of which a function uses what it knows.

use std::ffi::{CString, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr::NonNull;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::error::{Error, IoContext};

/// Room for `llama_model_params` or `llama_context_params` of any release.
#[repr(C)]
struct Params([MaybeUninit<u64>; 128]);

/// `llama_batch`, the same in every release.
#[repr(C)]
struct Batch([MaybeUninit<u64>; 7]);

/// A loaded model with a context.
#[derive(Debug)]
pub struct Llama {
    library: Library,
    context: NonNull<c_void>,
    tokens: usize,
}

impl Llama {
    /// Loads the model with the library in the folder `release`, after these backends; everything stays for the rest of the process.
    pub fn load(release: &Path, backends: &[&Path], model: &Path) -> Result<Self, Error> {
        let path = release.join("libllama.so");
        let missing = |source| Error::Library { path: path.clone(), source };
        // SAFETY: llama.cpp's libraries only register themselves when they are loaded.
        let library = unsafe { Library::open(Some(&path), RTLD_NOW | RTLD_LOCAL) }.map_err(missing)?;
        let c_string = |path: &Path| {
            CString::new(path.as_os_str().as_bytes()).map_err(std::io::Error::other).at("name", path)
        };
        let model = c_string(model)?;
        // SAFETY: each function has the type that llama.h and ggml-backend.h give it, with room for larger structs, and gets pointers
        // that it has made or strings that live on.
        unsafe {
            let load =
                library.get::<unsafe extern "C" fn(*const c_char) -> *mut c_void>(b"ggml_backend_load\0");
            let load = load.map_err(missing)?;
            for backend in backends {
                load(c_string(backend)?.as_ptr());
            }
            let start = library.get::<unsafe extern "C" fn()>(b"llama_backend_init\0").map_err(missing)?;
            start();
            let params = |name: &[u8]| {
                library.get::<unsafe extern "C" fn() -> Params>(name).map(|params| params()).map_err(missing)
            };
            let open = library
                .get::<unsafe extern "C" fn(*const c_char, Params) -> *mut c_void>(
                    b"llama_model_load_from_file\0",
                )
                .map_err(missing)?;
            let model = open(model.as_ptr(), params(b"llama_model_default_params\0")?);
            let model = NonNull::new(model).ok_or_else(|| Error::Unexpected("no model".to_owned()))?;
            let init = library
                .get::<unsafe extern "C" fn(*mut c_void, Params) -> *mut c_void>(b"llama_init_from_model\0")
                .map_err(missing)?;
            let context = init(model.as_ptr(), params(b"llama_context_default_params\0")?);
            let context = NonNull::new(context).ok_or_else(|| Error::Unexpected("no context".to_owned()))?;
            let vocab = library
                .get::<unsafe extern "C" fn(*const c_void) -> *const c_void>(b"llama_model_get_vocab\0")
                .map_err(missing)?;
            let count = library
                .get::<unsafe extern "C" fn(*const c_void) -> c_int>(b"llama_vocab_n_tokens\0")
                .map_err(missing)?;
            let tokens = usize::try_from(count(vocab(model.as_ptr()))).unwrap_or(0);
            Ok(Self { library, context, tokens })
        }
    }

    /// The logits behind these tokens, which follow those of earlier calls.
    pub fn decode(&self, tokens: &mut [i32]) -> Result<Vec<f32>, Error> {
        let missing = |source| Error::Library { path: "libllama.so".into(), source };
        let count = c_int::try_from(tokens.len()).unwrap_or(c_int::MAX);
        // SAFETY: as above; the batch borrows the tokens for the call alone, and the logits of the last token are one for each of the
        // vocabulary.
        unsafe {
            let batch = self
                .library
                .get::<unsafe extern "C" fn(*mut i32, c_int) -> Batch>(b"llama_batch_get_one\0")
                .map_err(missing)?;
            let decode = self
                .library
                .get::<unsafe extern "C" fn(*mut c_void, Batch) -> c_int>(b"llama_decode\0")
                .map_err(missing)?;
            let logits = self
                .library
                .get::<unsafe extern "C" fn(*mut c_void, c_int) -> *const f32>(b"llama_get_logits_ith\0")
                .map_err(missing)?;
            let status = decode(self.context.as_ptr(), batch(tokens.as_mut_ptr(), count));
            let found = logits(self.context.as_ptr(), -1);
            if status != 0 || found.is_null() {
                return Err(Error::Unexpected(format!("llama_decode answered {status}")));
            }
            Ok(std::slice::from_raw_parts(found, self.tokens).to_vec())
        }
    }
}
