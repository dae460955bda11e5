//! The ggml of this process, for a backend that a program has loaded.
//!
//! A backend does not link libggml-base: it finds the one of the program it is in, even when the program keeps that library's symbols to itself.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem;
use std::ptr::NonNull;

use crate::abi;
use crate::error::Error;
use crate::layout::{Layout, Marks, Version};
use crate::names::{NameFunctions, NameOf, Names};
use crate::ops::{OpName, OpTable};

/// How grave a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum LogLevel {
    /// For those who debug.
    Debug = 1,
    /// Worth a line.
    Info = 2,
    /// Something is not as it should be.
    Warn = 3,
    /// Something failed.
    Error = 4,
}

type VersionFn = unsafe extern "C" fn() -> *const c_char;
type BufferInitFn =
    unsafe extern "C" fn(*mut abi::BufferType, abi::BufferIface, *mut c_void, usize) -> *mut abi::Buffer;
type LogFn = unsafe extern "C" fn(c_int, *const c_char, ...);
type RegCountFn = unsafe extern "C" fn() -> usize;
type RegGetFn = unsafe extern "C" fn(usize) -> *mut abi::Reg;

/// The libggml-base of this process.
#[derive(Clone, Copy, Debug)]
pub struct GgmlBase {
    layout: Layout,
    /// Where its `ggml_version` is, which tells it from others.
    version_at: usize,
    buffer_init: BufferInitFn,
    log: LogFn,
    op_name: OpName,
    names: NameFunctions,
}

impl GgmlBase {
    /// Finds the libggml-base that is loaded in this process: among the symbols open to all, else by its file's name.
    ///
    /// # Errors
    ///
    /// [`Error::BaseMissing`] without one, [`Error::BaseSymbolMissing`], [`Error::VersionUnreadable`] or [`Error::VersionUnsupported`] with one that
    /// cannot be used.
    pub fn find() -> Result<Self, Error> {
        if Symbols::DEFAULT.get(VERSION).is_some() {
            return Self::from_symbols(&Symbols::DEFAULT, "the ggml of this process");
        }
        for path in loaded_objects().iter().filter(|path| is_base(path)) {
            if let Some(symbols) = Symbols::loaded(path) {
                return Self::from_symbols(&symbols, &path.to_string_lossy());
            }
        }
        Err(Error::BaseMissing)
    }

    /// The registrations that programs find through this ggml, in its order; none where its list cannot be asked.
    pub fn registrations(&self) -> Vec<*mut abi::Reg> {
        let Some((count, get)) = self.registry() else { return Vec::new() };
        // SAFETY: the functions of these names have had these types in every supported version; every index is below the count.
        unsafe {
            let count = mem::transmute::<NonNull<c_void>, RegCountFn>(count);
            let get = mem::transmute::<NonNull<c_void>, RegGetFn>(get);
            (0..count()).map(|index| get(index)).filter(|reg| !reg.is_null()).collect()
        }
    }

    /// The functions of ggml's list. They are libggml's, of which a process may have several: the one that uses this libggml-base counts.
    fn registry(&self) -> Option<(NonNull<c_void>, NonNull<c_void>)> {
        let uses_this = |symbols: &Symbols| {
            symbols.get(VERSION).is_some_and(|found| found.addr().get() == self.version_at)
        };
        let list = |symbols: &Symbols| {
            let (count, get) =
                (symbols.get(c"ggml_backend_reg_count")?, symbols.get(c"ggml_backend_reg_get")?);
            uses_this(symbols).then_some((count, get))
        };
        list(&Symbols::DEFAULT).or_else(|| {
            loaded_objects()
                .iter()
                .filter_map(|path| Symbols::loaded(path))
                .find_map(|symbols| list(&symbols))
        })
    }

    fn from_symbols(symbols: &Symbols, library: &str) -> Result<Self, Error> {
        let require = |name: &'static CStr| {
            symbols.get(name).ok_or_else(|| Error::BaseSymbolMissing {
                library: library.to_owned(),
                symbol: name.to_str().unwrap_or_default(),
            })
        };
        let version = require(VERSION)?;
        let version_at = version.addr().get();
        // SAFETY: ggml_version takes nothing and gives a string that stays.
        let version = unsafe {
            let text = mem::transmute::<NonNull<c_void>, VersionFn>(version)();
            if text.is_null() { c"" } else { CStr::from_ptr(text) }
        };
        let marks = Marks {
            alloc_buffer_n: symbols.get(Marks::ALLOC_BUFFER_N).is_some(),
            graph_next_uid: symbols.get(Marks::GRAPH_NEXT_UID).is_some(),
        };
        let version: Version = version.to_string_lossy().parse()?;
        let layout = Layout::new(version, marks)?;
        let buffer_init = require(c"ggml_backend_buffer_init")?;
        let log = require(c"ggml_log_internal")?;
        let op_name = require(c"ggml_op_name")?;
        let lists = [c"ggml_unary_op_name", c"ggml_glu_op_name", c"ggml_type_name"];
        let [unary, glu, types] = [require(lists[0])?, require(lists[1])?, require(lists[2])?];
        // SAFETY: the functions of these names have had these types in every supported version.
        let (buffer_init, log, op_name, names) = unsafe {
            let name_of = |function| mem::transmute::<NonNull<c_void>, NameOf>(function);
            (
                mem::transmute::<NonNull<c_void>, BufferInitFn>(buffer_init),
                mem::transmute::<NonNull<c_void>, LogFn>(log),
                mem::transmute::<NonNull<c_void>, OpName>(op_name),
                NameFunctions { unary: name_of(unary), glu: name_of(glu), types: name_of(types) },
            )
        };
        Ok(Self { layout, version_at, buffer_init, log, op_name, names })
    }

    /// The layout of its structs.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.layout.version()
    }

    /// What its numbers mean.
    ///
    /// # Errors
    ///
    /// [`Error::Operations`] when the list of operations does not end as every known one does.
    pub fn names(&self) -> Result<Names, Error> {
        // SAFETY: the functions are this ggml's own.
        unsafe { Ok(Names::read(self.version(), OpTable::read(self.op_name)?, self.names)) }
    }

    /// Makes a buffer struct that ggml frees with `ggml_backend_buffer_free`.
    ///
    /// # Safety
    ///
    /// `buffer_type` points to a buffer type that outlives the buffer; the functions of `iface` do what [`abi::BufferIface`] says for a buffer with
    /// this `context`.
    pub unsafe fn buffer_init(
        &self,
        buffer_type: *mut abi::BufferType,
        iface: abi::BufferIface,
        context: *mut c_void,
        size: usize,
    ) -> *mut abi::Buffer {
        // SAFETY: ggml only stores the arguments; the caller vouches for them.
        unsafe { (self.buffer_init)(buffer_type, iface, context, size) }
    }

    /// Writes a line to ggml's log, where the program may catch it. The newline is added here.
    pub fn log(&self, level: LogLevel, line: &CStr) {
        // SAFETY: the format takes one C string.
        unsafe { (self.log)(level as c_int, c"%s\n".as_ptr(), line.as_ptr()) }
    }
}

const VERSION: &CStr = c"ggml_version";

/// Where to look symbols up: a handle of the loader.
struct Symbols(*mut c_void);

impl Symbols {
    const DEFAULT: Self = Self(libc::RTLD_DEFAULT);

    /// Those of a loaded object and of what it is linked to.
    fn loaded(path: &CStr) -> Option<Self> {
        // SAFETY: RTLD_NOLOAD runs no code; the name is a C string. The handle keeps the library loaded and is kept for good.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
        (!handle.is_null()).then_some(Self(handle))
    }

    fn get(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the handle is RTLD_DEFAULT or one that dlopen gave and nobody closes.
        NonNull::new(unsafe { libc::dlsym(self.0, name.as_ptr()) })
    }
}

/// Names of the loaded objects; the program itself has none.
fn loaded_objects() -> Vec<CString> {
    unsafe extern "C" fn collect(info: *mut libc::dl_phdr_info, _size: usize, objects: *mut c_void) -> c_int {
        // SAFETY: the loader gives a valid info; `objects` is the vector below.
        unsafe {
            let name = (*info).dlpi_name;
            if !name.is_null() && !CStr::from_ptr(name).is_empty() {
                (*objects.cast::<Vec<CString>>()).push(CStr::from_ptr(name).to_owned());
            }
        }
        0
    }
    let mut objects: Vec<CString> = Vec::new();
    // SAFETY: `collect` gets the vector it expects, and the loader calls it only during this call.
    unsafe { libc::dl_iterate_phdr(Some(collect), (&raw mut objects).cast()) };
    objects
}

/// Whether an object is a libggml-base, by its file's name. Its folder's name may be of any bytes.
fn is_base(name: &CStr) -> bool {
    let file = name.to_bytes().rsplit(|byte| *byte == b'/').next();
    file.is_some_and(|file| file.starts_with(b"libggml-base"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_is_told_by_its_file_name() {
        for name in [
            c"/usr/lib/libggml-base.so.0",
            c"libggml-base.so",
            c"a/libggml-base-1f2e.so",
            c"/\xe9/libggml-base.so",
        ] {
            assert!(is_base(name));
        }
        for name in [c"", c"/libggml-base.so/libc.so", c"/usr/lib/libggml.so", c"xlibggml-base.so"] {
            assert!(!is_base(name));
        }
    }

    #[test]
    fn a_process_without_ggml_says_so() {
        assert!(matches!(GgmlBase::find(), Err(Error::BaseMissing)));
    }
}
