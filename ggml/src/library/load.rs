//! Loading a ggml backend library and checking that its structs are known.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::fs;
use std::mem::{self, ManuallyDrop};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::Registry;
use crate::abi;
use crate::error::Error;
use crate::layout::{Layout, Marks, OLDEST_VERSION, Version};
use crate::names::{NameFunctions, NameOf, Names};
use crate::ops::{OpName, OpTable};

/// The function that gives the registration of a backend built for dynamic loading.
pub const DEFAULT_REG_SYMBOL: &str = "ggml_backend_init";

/// `ggml_backend_buffer_free` of libggml-base.
type BufferFreeFn = unsafe extern "C" fn(*mut abi::Buffer);

/// How well a variant fits this processor; 0 when it cannot run.
type ScoreFn = unsafe extern "C" fn() -> c_int;
/// Its name; libraries that come as variants have it.
const SCORE_SYMBOL: &str = "ggml_backend_score";

/// A function that gets ggml's log lines: level (1 debug, 2 info, 3 warning, 4 error, 5 the line before goes on) and text.
pub type LogSink = fn(level: c_int, text: &str);

/// `ggml_log_callback`: level, text, user data.
type LogCallback = unsafe extern "C" fn(c_int, *const c_char, *mut c_void);
/// `ggml_log_set` of libggml-base.
type LogSetFn = unsafe extern "C" fn(LogCallback, *mut c_void);

/// Hands a line to the [`LogSink`] that is the user data.
unsafe extern "C" fn forward_log(level: c_int, text: *const c_char, sink: *mut c_void) {
    if text.is_null() {
        return;
    }
    // SAFETY: `log_to` gives a sink as user data, and ggml gives a C string.
    let (sink, text) = unsafe { (mem::transmute::<*mut c_void, LogSink>(sink), CStr::from_ptr(text)) };
    sink(level, &text.to_string_lossy());
}

/// What everything made from a library holds.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) layout: Layout,
    pub(super) reg: NonNull<abi::Reg>,
    pub(super) buffer_free: BufferFreeFn,
    pub(super) names: Names,
    log_set: LogSetFn,
}

// SAFETY: ggml lets any thread call a registration, and libggml-base's functions; neither changes after loading.
unsafe impl Send for Loaded {}
// SAFETY: as above.
unsafe impl Sync for Loaded {}

/// A ggml backend library, loaded for as long as the process lives.
#[derive(Clone)]
pub struct GgmlLibrary {
    path: PathBuf,
    loaded: Arc<Loaded>,
}

impl GgmlLibrary {
    /// Loads the library at `path`, with its symbols kept to itself, and calls its registration function ([`DEFAULT_REG_SYMBOL`] when none is
    /// given; a library not built for dynamic loading has one such as `ggml_backend_cpu_reg`).
    ///
    /// # Errors
    ///
    /// One line that names the file, the symbol, what was found and what is supported: the file is missing or no library, lacks a symbol
    /// (libggml-base's are looked for in the library and in those it needs), gives no registration, or is of a version or API that is not
    /// supported.
    ///
    /// # Safety
    ///
    /// The file is a ggml backend: its code runs in this process. ggml checks next to nothing of what it is told to compute, so the caller
    /// answers, for everything made from this library, that
    /// * each graph computed, and each operation asked about or measured, obeys ggml's rules for its operations (operands, types, shapes,
    ///   strides, parameters, the values that index memory);
    /// * no two threads use the same buffer, or a graph and a buffer it works on, at the same time.
    pub unsafe fn open(path: &Path, reg_symbol: Option<&str>) -> Result<Self, Error> {
        let reg_symbol = reg_symbol.unwrap_or(DEFAULT_REG_SYMBOL);
        let found =
            fs::metadata(path).map_err(|source| Error::LibraryMissing { path: path.to_owned(), source })?;
        if !found.is_file() {
            return Err(Error::LibraryNotAFile { path: path.to_owned() });
        }
        // SAFETY: the caller trusts the file.
        let opened = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
        let file =
            File {
                path,
                // Never closed: a library that has once run may have left threads and exit handlers behind.
                library: ManuallyDrop::new(opened.map_err(|error| Error::LibraryOpen {
                    path: path.to_owned(),
                    reason: one_line(&error),
                })?),
            };
        file.check_kind(reg_symbol)?;
        file.check_processor()?;
        super::runtime::open_to_all();
        let layout = file.layout()?;
        // SAFETY: the function of this name has had this type in every supported version.
        let buffer_free = unsafe { file.function::<BufferFreeFn>("ggml_backend_buffer_free")? };
        // SAFETY: as above; and it is ggml's own list of operations.
        let names = unsafe {
            let functions = NameFunctions {
                unary: file.function::<NameOf>("ggml_unary_op_name")?,
                glu: file.function::<NameOf>("ggml_glu_op_name")?,
                types: file.function::<NameOf>("ggml_type_name")?,
            };
            let ops = OpTable::read(file.function::<OpName>("ggml_op_name")?)?;
            Names::read(layout.version(), ops, functions)
        };
        // SAFETY: as above.
        let log_set = unsafe { file.function::<LogSetFn>("ggml_log_set")? };
        let reg = file.registration(reg_symbol, &layout)?;
        Ok(Self {
            path: path.to_owned(),
            loaded: Arc::new(Loaded { layout, reg, buffer_free, names, log_set }),
        })
    }

    /// The file it was loaded from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Version of its ggml.
    pub fn version(&self) -> Version {
        self.loaded.layout.version()
    }

    /// Layout of its structs.
    pub fn layout(&self) -> &Layout {
        &self.loaded.layout
    }

    /// Sends the log lines of this ggml to `sink` from now on, for all that use the same libggml-base. The sink must not panic.
    pub fn log_to(&self, sink: LogSink) {
        // SAFETY: the callback takes the sink back out of its user data.
        unsafe { (self.loaded.log_set)(forward_log, sink as *mut c_void) };
    }

    /// Its operations.
    pub fn ops(&self) -> &OpTable {
        &self.loaded.names.ops
    }

    /// What its numbers mean.
    pub fn names(&self) -> &Names {
        &self.loaded.names
    }

    /// Its registration.
    pub fn registry(&self) -> Registry {
        Registry::new(Arc::clone(&self.loaded))
    }

    /// One line on what it is, and what could be supported: `ggml 0.26.0, backend API 3, registry CPU with 1 device; supported: …`.
    pub fn describe(&self) -> String {
        let registry = self.registry();
        let devices = registry.device_count();
        format!(
            "ggml {}, backend API {}, registry {} with {devices} device{}; oldest supported {OLDEST_VERSION}",
            self.version(),
            self.layout().api_version(),
            registry.name(),
            if devices == 1 { "" } else { "s" },
        )
    }
}

/// What a file is, for a choice among several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Candidate {
    /// One of the variants of a backend, with its score: how well it fits this processor, 0 when it cannot run.
    Variant(c_int),
    /// A backend built for dynamic loading that has no score.
    Backend,
    /// Another library, or none.
    Other,
}

impl Candidate {
    /// Loads the file and asks it for its score; its backend is not started.
    ///
    /// # Safety
    ///
    /// The file is a library whose code may run in this process when it is loaded.
    pub unsafe fn ask(path: &Path) -> Self {
        // SAFETY: the caller trusts the file.
        let Ok(library) = (unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }) else {
            return Self::Other;
        };
        let file = File { path, library: ManuallyDrop::new(library) };
        match (file.has(DEFAULT_REG_SYMBOL), file.score()) {
            (true, Some(score)) => Self::Variant(score),
            (true, None) => Self::Backend,
            (false, _) => Self::Other,
        }
    }
}

impl fmt::Debug for GgmlLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GgmlLibrary")
            .field("path", &self.path)
            .field("layout", &self.loaded.layout)
            .finish_non_exhaustive()
    }
}

/// An open library on its way to be checked.
struct File<'a> {
    path: &'a Path,
    library: ManuallyDrop<Library>,
}

impl File<'_> {
    /// A function of the library, or of a library it needs.
    ///
    /// # Safety
    ///
    /// The function of this name has the type `F`, a function pointer.
    unsafe fn function<F: Copy>(&self, name: &str) -> Result<F, Error> {
        // SAFETY: the caller knows the function's type; the library is never closed.
        let symbol = unsafe { self.library.get::<F>(name) };
        symbol
            .map(|symbol| *symbol)
            .map_err(|_| Error::SymbolMissing { path: self.path.to_owned(), symbol: name.to_owned() })
    }

    /// Whether it, or a library that it needs, has a symbol.
    fn has(&self, name: &str) -> bool {
        // SAFETY: the symbol is only looked for.
        unsafe { self.library.get::<*const ()>(name) }.is_ok()
    }

    /// Refuses what is no ggml backend, with what to name in its place.
    fn check_kind(&self, reg_symbol: &str) -> Result<(), Error> {
        let no = |reason| Err(Error::NotABackend { path: self.path.to_owned(), reason });
        if !self.has("ggml_version") {
            let example = "name one such as libggml-cpu.so or libggml-cuda.so";
            return no(format!("neither it nor a library that it needs is ggml's; {example}"));
        }
        if self.has(reg_symbol) {
            return Ok(());
        }
        if reg_symbol != DEFAULT_REG_SYMBOL && self.has(DEFAULT_REG_SYMBOL) {
            return no(format!("it has no function {reg_symbol}, but {DEFAULT_REG_SYMBOL}, the default"));
        }
        // ggml's own names: libggml-cpu.so without dynamic loading has ggml_backend_cpu_reg.
        let backends = ["cpu", "cuda", "vk", "metal", "sycl", "opencl", "cann", "musa", "blas", "rpc"];
        let name = |backend| format!("ggml_backend_{backend}_reg");
        match backends.map(name).into_iter().find(|symbol| self.has(symbol)) {
            Some(symbol) => {
                no(format!("it has no function {reg_symbol}; its registration function is {symbol}"))
            }
            None => no(format!(
                "it has no function {reg_symbol}, as libggml.so and libggml-base.so have none; \
                 name a backend beside it such as libggml-cpu.so"
            )),
        }
    }

    /// Refuses a variant that this processor cannot run, which would end the process by SIGILL.
    fn check_processor(&self) -> Result<(), Error> {
        match self.score() {
            Some(0) => Err(Error::ProcessorUnsupported { path: self.path.to_owned() }),
            // A library of which there is one variant has no score.
            Some(_) | None => Ok(()),
        }
    }

    fn score(&self) -> Option<c_int> {
        // SAFETY: the function takes nothing, gives an int, and only asks the processor what it has.
        unsafe { self.library.get::<ScoreFn>(SCORE_SYMBOL).ok().map(|score| score()) }
    }

    fn layout(&self) -> Result<Layout, Error> {
        // SAFETY: ggml_version takes nothing and gives a string that stays.
        let text = unsafe {
            let version = self.function::<unsafe extern "C" fn() -> *const c_char>("ggml_version")?;
            super::string(version())
        };
        // SAFETY: the symbols are only looked for.
        let has = |mark: &CStr| unsafe { self.library.get::<*const ()>(mark.to_bytes_with_nul()).is_ok() };
        let marks =
            Marks { alloc_buffer_n: has(Marks::ALLOC_BUFFER_N), graph_next_uid: has(Marks::GRAPH_NEXT_UID) };
        text.parse::<Version>()
            .and_then(|version| Layout::new(version, marks))
            .map_err(|source| Error::LibraryVersion { path: self.path.to_owned(), source: Box::new(source) })
    }

    fn registration(&self, symbol: &str, layout: &Layout) -> Result<NonNull<abi::Reg>, Error> {
        // SAFETY: a registration function takes nothing and gives a struct that stays; its first field is the API version in every version.
        let (reg, found) = unsafe {
            let register = self.function::<unsafe extern "C" fn() -> *mut abi::Reg>(symbol)?;
            let reg = NonNull::new(register()).ok_or_else(|| Error::RegistryNull {
                path: self.path.to_owned(),
                symbol: symbol.to_owned(),
            })?;
            (reg, (*reg.as_ptr()).api_version)
        };
        if u32::try_from(found) != Ok(layout.api_version()) {
            return Err(Error::ApiVersion {
                path: self.path.to_owned(),
                symbol: symbol.to_owned(),
                found,
                expected: layout.api_version(),
                version: layout.version(),
            });
        }
        Ok(reg)
    }
}

/// An error with its causes, on one line.
fn one_line(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text.replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open(path: &str) -> String {
        // SAFETY: none of these files is a library with code of its own.
        unsafe { GgmlLibrary::open(Path::new(path), None) }.unwrap_err().to_string()
    }

    #[test]
    fn what_is_no_library_is_named() {
        assert!(
            open("/nowhere/libggml-cpu.so").starts_with("ggml library /nowhere/libggml-cpu.so: No such file")
        );
        assert_eq!(open("/"), "ggml library /: not a file");
        let text = open("/etc/passwd");
        assert!(text.starts_with("ggml library /etc/passwd: cannot be loaded: "), "{text}");
        assert!(!text.contains('\n'));
    }
}
