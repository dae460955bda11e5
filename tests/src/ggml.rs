//! ggml through its public C API, opened at run time: what a program in any language does that uses ggml's libraries.
//!
//! Everything here is called as the headers `ggml.h`, `ggml-alloc.h` and `ggml-backend.h` say; the functions used have
//! the same signatures in backend API 2 and 3.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::fs;
use std::marker::PhantomData;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};

use crate::error::{Error, IoContext};

/// Whether the libraries' symbols are visible to libraries loaded later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Visibility {
    /// RTLD_LOCAL, as interpreters open their extensions.
    Local,
    /// RTLD_GLOBAL, as if the program were linked to ggml.
    Global,
}

/// ggml's number of the type F32.
const TYPE_F32: c_int = 0;

/// ggml's number of the status "success".
const STATUS_SUCCESS: c_int = 0;

/// ggml's number of the triangle below the diagonal.
const TRI_LOWER: c_int = 3;

/// ggml's number of the ascending order.
const SORT_ASCENDING: c_int = 0;

/// An operation whose number differs between releases of ggml, or one that has variants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// The triangle below the diagonal.
    Tri,
    /// A column and two rows of zeros.
    Pad,
    /// Each row's order.
    Argsort,
    /// Half of what is below 0.
    LeakyRelu,
    /// All the same.
    Fill,
    /// The last map of UNARY.
    Trunc,
    /// The first unit of GLU.
    Reglu,
}

impl Operation {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::Tri, Self::Pad, Self::Argsort, Self::LeakyRelu, Self::Fill, Self::Trunc, Self::Reglu];
    const COLUMNS: usize = 4;
    const ROWS: usize = 4;

    /// Even numbers and 0, different in each row.
    fn input() -> [f32; Self::COLUMNS * Self::ROWS] {
        std::array::from_fn(|at| (at * 7 % 16) as f32 * 2.0 - 14.0)
    }

    /// What must come of it.
    pub fn wanted(self) -> Vec<i32> {
        let a: Vec<i32> = Self::input().iter().map(|value| *value as i32).collect();
        let rows = a.chunks_exact(Self::COLUMNS);
        match self {
            Self::Tri => {
                let below = |(row, values): (usize, &[i32])| {
                    values.iter().enumerate().map(|(at, value)| if at < row { *value } else { 0 }).collect()
                };
                rows.enumerate().flat_map(|row| -> Vec<i32> { below(row) }).collect()
            }
            Self::Pad => {
                let padded = rows.flat_map(|row| row.iter().copied().chain([0]));
                padded.chain([0; 2 * (Self::COLUMNS + 1)]).collect()
            }
            Self::Argsort => rows
                .flat_map(|row| {
                    let mut order: Vec<i32> = (0..Self::COLUMNS as i32).collect();
                    order.sort_by_key(|at| row[*at as usize]);
                    order
                })
                .collect(),
            Self::LeakyRelu => a.iter().map(|value| if *value < 0 { value / 2 } else { *value }).collect(),
            Self::Fill => vec![7; a.len()],
            Self::Trunc => a,
            Self::Reglu => rows.flat_map(|row| [row[0].max(0) * row[2], row[1].max(0) * row[3]]).collect(),
        }
    }
}

/// The argument of `ggml_init`.
#[repr(C)]
struct InitParams {
    mem_size: usize,
    mem_buffer: *mut c_void,
    no_alloc: bool,
}

type LogCallback = unsafe extern "C" fn(c_int, *const c_char, *mut c_void);

macro_rules! api {
    ($(fn $name:ident($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions of ggml that are used here.
        #[derive(Debug)]
        struct Api {
            $($name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Api {
            fn load(library: &Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the type is the signature that ggml's headers give this function.
                        let symbol = unsafe { library.get(concat!(stringify!($name), "\0")) }?;
                        *symbol
                    },)*
                })
            }
        }
    };
}

api! {
    fn ggml_version() -> *const c_char;
    fn ggml_log_set(LogCallback, *mut c_void);
    fn ggml_init(InitParams) -> *mut c_void;
    fn ggml_free(*mut c_void);
    fn ggml_tensor_overhead() -> usize;
    fn ggml_graph_overhead_custom(usize, bool) -> usize;
    fn ggml_new_tensor_2d(*mut c_void, c_int, i64, i64) -> *mut c_void;
    fn ggml_nbytes(*const c_void) -> usize;
    fn ggml_add(*mut c_void, *mut c_void, *mut c_void) -> *mut c_void;
    fn ggml_mul_mat(*mut c_void, *mut c_void, *mut c_void) -> *mut c_void;
    fn ggml_sqr(*mut c_void, *mut c_void) -> *mut c_void;
    fn ggml_leaky_relu(*mut c_void, *mut c_void, f32, bool) -> *mut c_void;
    fn ggml_tri(*mut c_void, *mut c_void, c_int) -> *mut c_void;
    fn ggml_pad(*mut c_void, *mut c_void, c_int, c_int, c_int, c_int) -> *mut c_void;
    fn ggml_argsort(*mut c_void, *mut c_void, c_int) -> *mut c_void;
    fn ggml_fill(*mut c_void, *mut c_void, f32) -> *mut c_void;
    fn ggml_trunc(*mut c_void, *mut c_void) -> *mut c_void;
    fn ggml_reglu(*mut c_void, *mut c_void) -> *mut c_void;
    fn ggml_new_graph_custom(*mut c_void, usize, bool) -> *mut c_void;
    fn ggml_build_forward_expand(*mut c_void, *mut c_void);
    fn ggml_backend_alloc_ctx_tensors(*mut c_void, *mut c_void) -> *mut c_void;
    fn ggml_backend_load(*const c_char) -> *mut c_void;
    fn ggml_backend_unload(*mut c_void);
    fn ggml_backend_dev_count() -> usize;
    fn ggml_backend_dev_get(usize) -> *mut c_void;
    fn ggml_backend_dev_backend_reg(*mut c_void) -> *mut c_void;
    fn ggml_backend_reg_dev_count(*mut c_void) -> usize;
    fn ggml_backend_reg_dev_get(*mut c_void, usize) -> *mut c_void;
    fn ggml_backend_dev_name(*mut c_void) -> *const c_char;
    fn ggml_backend_dev_description(*mut c_void) -> *const c_char;
    fn ggml_backend_dev_type(*mut c_void) -> c_int;
    fn ggml_backend_dev_memory(*mut c_void, *mut usize, *mut usize);
    fn ggml_backend_dev_init(*mut c_void, *const c_char) -> *mut c_void;
    fn ggml_backend_dev_buffer_type(*mut c_void) -> *mut c_void;
    fn ggml_backend_dev_supports_op(*mut c_void, *const c_void) -> bool;
    fn ggml_backend_buft_alloc_buffer(*mut c_void, usize) -> *mut c_void;
    fn ggml_backend_buffer_name(*mut c_void) -> *const c_char;
    fn ggml_backend_buffer_get_base(*mut c_void) -> *mut c_void;
    fn ggml_backend_buffer_clear(*mut c_void, u8);
    fn ggml_backend_buffer_free(*mut c_void);
    fn ggml_backend_tensor_set(*mut c_void, *const c_void, usize, usize);
    fn ggml_backend_tensor_get(*const c_void, *mut c_void, usize, usize);
    fn ggml_backend_graph_compute(*mut c_void, *mut c_void) -> c_int;
    fn ggml_backend_free(*mut c_void);
}

/// ggml's libraries, open for the rest of the process.
#[derive(Debug)]
pub struct Ggml {
    api: Api,
}

/// A device of a loaded backend.
#[derive(Debug, Clone, Copy)]
pub struct Device<'g> {
    ggml: &'g Ggml,
    ptr: NonNull<c_void>,
}

// SAFETY: ggml lets any thread ask a device and initialise backends on it; it is never freed.
unsafe impl Send for Device<'_> {}
// SAFETY: as above.
unsafe impl Sync for Device<'_> {}

/// A buffer of a device's own type, freed when dropped.
#[derive(Debug)]
pub struct Buffer<'g> {
    ggml: &'g Ggml,
    ptr: NonNull<c_void>,
}

/// A backend on a device with one small graph, `(a × b + c)²`, of square matrices of F32.
#[derive(Debug)]
pub struct Calculation<'g> {
    ggml: &'g Ggml,
    backend: NonNull<c_void>,
    context: NonNull<c_void>,
    buffer: NonNull<c_void>,
    graph: NonNull<c_void>,
    inputs: [NonNull<c_void>; 3],
    result: NonNull<c_void>,
    side: usize,
    // A backend is used by one thread at a time.
    _not_sync: PhantomData<*mut c_void>,
}

impl Ggml {
    /// Opens the ggml libraries of a folder; they stay open for the rest of the process, as ggml expects.
    pub fn open(folder: &Path, visibility: Visibility) -> Result<Self, Error> {
        let flags = RTLD_NOW | if visibility == Visibility::Global { RTLD_GLOBAL } else { RTLD_LOCAL };
        let open = |path: &Path| {
            // SAFETY: ggml's libraries only register themselves when they are loaded.
            unsafe { Library::open(Some(path), flags) }
                .map_err(|source| Error::Library { path: path.to_owned(), source })
        };
        std::mem::forget(open(&folder.join("libggml-base.so"))?);
        let path = main_library(folder)?;
        let library = open(&path)?;
        // Symbols are looked up in the library and in those it needs, so this finds those of libggml-base too.
        let api = Api::load(&library).map_err(|source| Error::Library { path, source })?;
        std::mem::forget(library);
        // SAFETY: the callback takes any message and keeps nothing.
        unsafe { (api.ggml_log_set)(print_log, std::ptr::null_mut()) };
        Ok(Self { api })
    }

    /// ggml's own version.
    pub fn version(&self) -> String {
        // SAFETY: it returns a static string.
        text(unsafe { (self.api.ggml_version)() })
    }

    /// Loads a backend library and gives its devices; `None` when ggml refused it.
    pub fn load_backend(&self, path: &Path) -> Result<Option<Vec<Device<'_>>>, Error> {
        let path = CString::new(path.as_os_str().as_bytes())
            .map_err(|_| Error::Unexpected(format!("{} holds a zero byte", path.display())))?;
        // SAFETY: the path is a string that ends with a zero byte.
        let registry = unsafe { (self.api.ggml_backend_load)(path.as_ptr()) };
        if registry.is_null() {
            return Ok(None);
        }
        // SAFETY: a registry that ggml returned is valid for the rest of the process.
        let count = unsafe { (self.api.ggml_backend_reg_dev_count)(registry) };
        // SAFETY: as above, with an index below the count.
        let device = |index| unsafe { (self.api.ggml_backend_reg_dev_get)(registry, index) };
        (0..count)
            .map(|index| Ok(Device { ggml: self, ptr: given(device(index), "a device")? }))
            .collect::<Result<_, _>>()
            .map(Some)
    }

    /// The devices of all backends that are loaded, in ggml's order.
    pub fn devices(&self) -> Result<Vec<Device<'_>>, Error> {
        // SAFETY: the functions take nothing, and an index below the count.
        let count = unsafe { (self.api.ggml_backend_dev_count)() };
        // SAFETY: as above.
        let device = |index| unsafe { (self.api.ggml_backend_dev_get)(index) };
        (0..count).map(|index| Ok(Device { ggml: self, ptr: given(device(index), "a device")? })).collect()
    }

    /// Unloads the backend of a device, which takes the device out of ggml's list.
    pub fn unload(&self, device: Device<'_>) {
        // SAFETY: the device and its registry are valid; nothing made with them is used any more.
        unsafe {
            (self.api.ggml_backend_unload)((self.api.ggml_backend_dev_backend_reg)(device.ptr.as_ptr()));
        }
    }
}

impl<'g> Device<'g> {
    /// Its name.
    pub fn name(&self) -> String {
        // SAFETY: the device is valid and returns a string of its own.
        text(unsafe { (self.ggml.api.ggml_backend_dev_name)(self.ptr.as_ptr()) })
    }

    /// Its description.
    pub fn description(&self) -> String {
        // SAFETY: as for the name.
        text(unsafe { (self.ggml.api.ggml_backend_dev_description)(self.ptr.as_ptr()) })
    }

    /// ggml's number of its kind: 0 CPU, 1 GPU, 2 integrated GPU, 3 accelerator.
    pub fn kind(&self) -> i32 {
        // SAFETY: the device is valid.
        unsafe { (self.ggml.api.ggml_backend_dev_type)(self.ptr.as_ptr()) }
    }

    /// Its free and total memory in bytes.
    pub fn memory(&self) -> (usize, usize) {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the device is valid and writes to two integers.
        unsafe { (self.ggml.api.ggml_backend_dev_memory)(self.ptr.as_ptr(), &raw mut free, &raw mut total) };
        (free, total)
    }

    /// Allocates a buffer of `size` bytes.
    pub fn buffer(&self, size: usize) -> Result<Buffer<'g>, Error> {
        let api = &self.ggml.api;
        // SAFETY: the device is valid, and so is its buffer type.
        let ptr = unsafe {
            (api.ggml_backend_buft_alloc_buffer)((api.ggml_backend_dev_buffer_type)(self.ptr.as_ptr()), size)
        };
        Ok(Buffer { ggml: self.ggml, ptr: given(ptr, "a buffer")? })
    }

    /// Computes one operation of a fixed matrix; gives what came of it, as whole numbers. None where the device says that it cannot.
    pub fn compute_one(&self, operation: Operation) -> Result<Option<Vec<i32>>, Error> {
        let api = &self.ggml.api;
        // SAFETY: the device is valid; it takes no parameters here.
        let backend =
            given(unsafe { (api.ggml_backend_dev_init)(self.ptr.as_ptr(), std::ptr::null()) }, "a backend")?;
        const TENSORS: usize = 4;
        // SAFETY: the context has room for four tensors and a graph of four nodes; all pointers come from ggml, each is used with the
        // context or backend that made it and freed once, and the values are as large as their tensors.
        unsafe {
            let mem_size =
                TENSORS * (api.ggml_tensor_overhead)() + (api.ggml_graph_overhead_custom)(TENSORS, false);
            let params = InitParams { mem_size, mem_buffer: std::ptr::null_mut(), no_alloc: true };
            let context = given((api.ggml_init)(params), "a context")?.as_ptr();
            let (columns, rows) = (Operation::COLUMNS, Operation::ROWS);
            let input = (api.ggml_new_tensor_2d)(context, TYPE_F32, columns as i64, rows as i64);
            let result = match operation {
                Operation::Tri => (api.ggml_tri)(context, input, TRI_LOWER),
                Operation::Pad => (api.ggml_pad)(context, input, 1, 2, 0, 0),
                Operation::Argsort => (api.ggml_argsort)(context, input, SORT_ASCENDING),
                Operation::LeakyRelu => (api.ggml_leaky_relu)(context, input, 0.5, false),
                Operation::Fill => (api.ggml_fill)(context, input, 7.0),
                Operation::Trunc => (api.ggml_trunc)(context, input),
                Operation::Reglu => (api.ggml_reglu)(context, input),
            };
            let graph = given((api.ggml_new_graph_custom)(context, TENSORS, false), "a graph")?;
            (api.ggml_build_forward_expand)(graph.as_ptr(), result);
            let buffer = given((api.ggml_backend_alloc_ctx_tensors)(context, backend.as_ptr()), "memory")?;
            let supported = (api.ggml_backend_dev_supports_op)(self.ptr.as_ptr(), result);
            let values = Operation::input();
            (api.ggml_backend_tensor_set)(input, values.as_ptr().cast(), 0, size_of_val(&values[..]));
            let status = match supported {
                true => (api.ggml_backend_graph_compute)(backend.as_ptr(), graph.as_ptr()),
                false => STATUS_SUCCESS,
            };
            let mut bytes = vec![0u8; (api.ggml_nbytes)(result)];
            (api.ggml_backend_tensor_get)(result, bytes.as_mut_ptr().cast(), 0, bytes.len());
            (api.ggml_backend_buffer_free)(buffer.as_ptr());
            (api.ggml_free)(context);
            (api.ggml_backend_free)(backend.as_ptr());
            let words = bytes.chunks_exact(4).map(|four| [four[0], four[1], four[2], four[3]]);
            let number = |word| match operation {
                Operation::Argsort => i32::from_le_bytes(word),
                _ => f32::from_le_bytes(word) as i32,
            };
            match status {
                STATUS_SUCCESS => Ok(supported.then(|| words.map(number).collect())),
                other => Err(Error::Unexpected(format!("graph_compute of {operation:?} answered {other}"))),
            }
        }
    }

    /// Sets up a calculation with matrices of `side` × `side`.
    pub fn calculation(&self, side: usize) -> Result<Calculation<'g>, Error> {
        let api = &self.ggml.api;
        let columns =
            i64::try_from(side).map_err(|_| Error::Unexpected(format!("{side} is too many columns")))?;
        // SAFETY: the device is valid; it takes no parameters here.
        let backend =
            given(unsafe { (api.ggml_backend_dev_init)(self.ptr.as_ptr(), std::ptr::null()) }, "a backend")?;
        const TENSORS: usize = 8;
        // SAFETY: the context has room for eight tensors and one graph of eight nodes, more than is made of it; all
        // pointers come from ggml, and each is used with the context or backend that made it.
        unsafe {
            let mem_size =
                TENSORS * (api.ggml_tensor_overhead)() + (api.ggml_graph_overhead_custom)(TENSORS, false);
            let params = InitParams { mem_size, mem_buffer: std::ptr::null_mut(), no_alloc: true };
            let context = given((api.ggml_init)(params), "a context")?;
            let tensor = || (api.ggml_new_tensor_2d)(context.as_ptr(), TYPE_F32, columns, columns);
            let inputs = [tensor(), tensor(), tensor()];
            let product = (api.ggml_mul_mat)(context.as_ptr(), inputs[0], inputs[1]);
            let sum = (api.ggml_add)(context.as_ptr(), product, inputs[2]);
            let result = (api.ggml_sqr)(context.as_ptr(), sum);
            let graph = given((api.ggml_new_graph_custom)(context.as_ptr(), TENSORS, false), "a graph")?;
            (api.ggml_build_forward_expand)(graph.as_ptr(), result);
            let buffer =
                given((api.ggml_backend_alloc_ctx_tensors)(context.as_ptr(), backend.as_ptr()), "memory")?;
            let inputs =
                [given(inputs[0], "a tensor")?, given(inputs[1], "a tensor")?, given(inputs[2], "a tensor")?];
            let result = given(result, "a tensor")?;
            Ok(Calculation {
                ggml: self.ggml,
                backend,
                context,
                buffer,
                graph,
                inputs,
                result,
                side,
                _not_sync: PhantomData,
            })
        }
    }
}

impl Calculation<'_> {
    /// Whether the device says that it can multiply these matrices.
    pub fn is_supported_by(&self, device: &Device<'_>) -> bool {
        // SAFETY: both are valid; the device only reads the tensor.
        unsafe { (self.ggml.api.ggml_backend_dev_supports_op)(device.ptr.as_ptr(), self.result.as_ptr()) }
    }

    /// Writes the inputs, made from `seed`; small whole numbers, so that every order of sums gives the same result.
    pub fn set_inputs(&self, seed: usize) -> Result<(), Error> {
        for (which, &tensor) in self.inputs.iter().enumerate() {
            self.write(tensor, &self.input(which, seed))?;
        }
        Ok(())
    }

    /// Fails unless the inputs read back as they were written.
    pub fn check_inputs(&self, seed: usize) -> Result<(), Error> {
        for (which, &tensor) in self.inputs.iter().enumerate() {
            self.compare("input", seed, &self.read(tensor)?, &self.input(which, seed))?;
        }
        Ok(())
    }

    /// Fails unless the inputs read back as zeros, which is what a read that fails gives.
    pub fn check_inputs_are_lost(&self) -> Result<(), Error> {
        for &tensor in &self.inputs {
            self.compare("input", 0, &self.read(tensor)?, &vec![0.0; self.side * self.side])?;
        }
        Ok(())
    }

    /// Runs the graph.
    pub fn compute(&self) -> Result<(), Error> {
        // SAFETY: the graph's tensors lie in a buffer of this backend.
        let status =
            unsafe { (self.ggml.api.ggml_backend_graph_compute)(self.backend.as_ptr(), self.graph.as_ptr()) };
        match status {
            STATUS_SUCCESS => Ok(()),
            other => Err(Error::Unexpected(format!("graph_compute answered {other}"))),
        }
    }

    /// Fails unless the result is the one of the inputs of `seed`.
    pub fn check_result(&self, seed: usize) -> Result<(), Error> {
        let [a, b, c] = [0, 1, 2].map(|which| self.input(which, seed));
        let side = self.side;
        let mut wanted = vec![0.0; side * side];
        for row in 0..side {
            for column in 0..side {
                // ggml multiplies the rows of both matrices.
                let product: f32 = (0..side).map(|k| a[column * side + k] * b[row * side + k]).sum();
                wanted[row * side + column] = (product + c[row * side + column]).powi(2);
            }
        }
        self.compare("result", seed, &self.read(self.result)?, &wanted)
    }

    /// The name of the buffer that holds its tensors.
    pub fn buffer_name(&self) -> String {
        // SAFETY: the buffer is valid and its name is a string of its type's.
        text(unsafe { (self.ggml.api.ggml_backend_buffer_name)(self.buffer.as_ptr()) })
    }

    fn input(&self, which: usize, seed: usize) -> Vec<f32> {
        (0..self.side * self.side)
            .map(|index| ((index * (which + 3) + seed * 7 + which) % 5) as f32 - 1.0)
            .collect()
    }

    fn write(&self, tensor: NonNull<c_void>, values: &[f32]) -> Result<(), Error> {
        let size = self.checked_size(tensor, values)?;
        // SAFETY: the tensor is as large as the values and lies in this calculation's buffer.
        unsafe { (self.ggml.api.ggml_backend_tensor_set)(tensor.as_ptr(), values.as_ptr().cast(), 0, size) };
        Ok(())
    }

    fn read(&self, tensor: NonNull<c_void>) -> Result<Vec<f32>, Error> {
        let mut values = vec![f32::NAN; self.side * self.side];
        let size = self.checked_size(tensor, &values)?;
        // SAFETY: the tensor is as large as the values and lies in this calculation's buffer.
        unsafe {
            (self.ggml.api.ggml_backend_tensor_get)(tensor.as_ptr(), values.as_mut_ptr().cast(), 0, size)
        };
        Ok(values)
    }

    fn checked_size(&self, tensor: NonNull<c_void>, values: &[f32]) -> Result<usize, Error> {
        // SAFETY: the tensor is valid.
        let size = unsafe { (self.ggml.api.ggml_nbytes)(tensor.as_ptr()) };
        match size == size_of_val(values) {
            true => Ok(size),
            false => Err(Error::Unexpected(format!("a tensor of {size} bytes for {} values", values.len()))),
        }
    }

    fn compare(&self, what: &str, seed: usize, found: &[f32], wanted: &[f32]) -> Result<(), Error> {
        match found.iter().zip(wanted).position(|(found, wanted)| found != wanted) {
            None => Ok(()),
            Some(index) => Err(Error::Unexpected(format!(
                "{what} of seed {seed} is {} at {index}, must be {}",
                found[index], wanted[index]
            ))),
        }
    }
}

impl Drop for Calculation<'_> {
    fn drop(&mut self) {
        let api = &self.ggml.api;
        // SAFETY: each was made for this calculation alone and is freed once, the buffer before its backend.
        unsafe {
            (api.ggml_backend_buffer_free)(self.buffer.as_ptr());
            (api.ggml_free)(self.context.as_ptr());
            (api.ggml_backend_free)(self.backend.as_ptr());
        }
    }
}

impl Buffer<'_> {
    /// Fills the buffer with a byte, so that its pages are really there.
    pub fn clear(&self, value: u8) {
        // SAFETY: the buffer is valid.
        unsafe { (self.ggml.api.ggml_backend_buffer_clear)(self.ptr.as_ptr(), value) };
    }

    /// The address it says it starts at.
    pub fn base(&self) -> usize {
        // SAFETY: the buffer is valid.
        unsafe { (self.ggml.api.ggml_backend_buffer_get_base)(self.ptr.as_ptr()) as usize }
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        // SAFETY: the buffer is valid and freed once.
        unsafe { (self.ggml.api.ggml_backend_buffer_free)(self.ptr.as_ptr()) };
    }
}

/// `libggml.so`, or a name with a version in it, as some packages have.
fn main_library(folder: &Path) -> Result<PathBuf, Error> {
    let plain = folder.join("libggml.so");
    if plain.is_file() {
        return Ok(plain);
    }
    let entries = fs::read_dir(folder).at("read", folder)?;
    entries
        .flatten()
        .map(|entry| entry.path())
        .find(|path| path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"libggml.")))
        .ok_or(Error::Missing { path: plain, what: "ggml's library" })
}

fn given(ptr: *mut c_void, what: &str) -> Result<NonNull<c_void>, Error> {
    NonNull::new(ptr).ok_or_else(|| Error::Unexpected(format!("ggml gave no {what}")))
}

fn text(ptr: *const c_char) -> String {
    if ptr.is_null() {
        return String::new();
    }
    // SAFETY: ggml's strings end with a zero byte and outlive this call.
    unsafe { CStr::from_ptr(ptr) }.to_string_lossy().into_owned()
}

/// Prints ggml's messages as `log LEVEL text`; 3 is a warning, 4 an error.
unsafe extern "C" fn print_log(level: c_int, message: *const c_char, _: *mut c_void) {
    eprint!("log {level} {}", text(message));
}
