//! The real libvirglrenderer, loaded beside us for what is not ours.
//!
//! `unsafe` is here since loading a library and calling it is nothing else. The library calls its own public functions by name:
//! it is opened so that those names mean itself (RTLD_DEEPBIND) and nobody else sees them (RTLD_LOCAL).
use crate::blob;
use crate::log::TARGET;
use crate::plugin::loader_text;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use nix::libc::{self, Dl_info, iovec};
use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};
use std::fs::{self, File};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Environment variable with the real library's path, or `none`.
const CHAIN_VARIABLE: &str = "APIR_CHAIN";
const FILE_NAME: &str = "libvirglrenderer.so.1";
/// A symbol that only this library has: a copy of it elsewhere is no real library.
const MARK: &str = "apir_virglrenderer_dropin";
/// Where distributions put the library; the last ones are Debian's.
const FOLDERS: [&str; 6] = [
    "/usr/local/lib64",
    "/usr/local/lib",
    "/usr/lib64",
    "/usr/lib",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
];
/// virglrenderer's number for a descriptor of plain shared memory.
pub(crate) const FD_TYPE_SHM: u32 = 3;

#[cfg(target_env = "gnu")]
const DEEPBIND: c_int = libc::RTLD_DEEPBIND;
#[cfg(not(target_env = "gnu"))]
const DEEPBIND: c_int = 0;

/// virglrenderer's arguments for a blob.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CreateBlobArgs {
    pub(crate) res_handle: u32,
    pub(crate) ctx_id: u32,
    pub(crate) blob_mem: u32,
    pub(crate) blob_flags: u32,
    pub(crate) blob_id: u64,
    pub(crate) size: u64,
    pub(crate) iovecs: *const iovec,
    pub(crate) num_iovs: u32,
}

/// virglrenderer's arguments for a picture or a buffer.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CreateArgs {
    pub(crate) handle: u32,
    pub(crate) target: u32,
    pub(crate) format: u32,
    pub(crate) bind: u32,
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) depth: u32,
    pub(crate) array_size: u32,
    pub(crate) last_level: u32,
    pub(crate) nr_samples: u32,
    pub(crate) flags: u32,
}

/// virglrenderer's arguments for memory of the VMM's.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct ImportBlobArgs {
    pub(crate) res_handle: u32,
    pub(crate) blob_mem: u32,
    pub(crate) fd_type: u32,
    pub(crate) fd: c_int,
    pub(crate) size: u64,
}

/// What virglrenderer tells of a resource.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct ResourceInfo {
    pub(crate) handle: u32,
    pub(crate) virgl_format: u32,
    pub(crate) width: u32,
    pub(crate) height: u32,
    pub(crate) depth: u32,
    pub(crate) flags: u32,
    pub(crate) tex_id: u32,
    pub(crate) stride: u32,
    pub(crate) drm_fourcc: c_int,
    pub(crate) fd: c_int,
}

/// The VMM's callbacks, as far as we call them ourselves; the table goes to the real library as it came.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Callbacks {
    pub(crate) version: c_int,
    pub(crate) write_fence: Option<unsafe extern "C" fn(*mut c_void, u32)>,
    pub(crate) create_gl_context: *mut c_void,
    pub(crate) destroy_gl_context: *mut c_void,
    pub(crate) make_current: *mut c_void,
    pub(crate) get_drm_fd: *mut c_void,
    /// From version 3 on.
    pub(crate) write_context_fence: Option<unsafe extern "C" fn(*mut c_void, u32, u32, u64)>,
}

pub(crate) type LogCallback = unsafe extern "C" fn(c_uint, *const c_char, *mut c_void);
pub(crate) type FreeCallback = unsafe extern "C" fn(*mut c_void);

macro_rules! functions {
    ($($field:ident: $symbol:literal, fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// virglrenderer's functions, as far as this version of the library has them.
        #[derive(Debug, Clone, Copy)]
        pub(crate) struct Functions {
            $(pub(crate) $field: Option<unsafe extern "C" fn($($argument),*) $(-> $result)?>,)*
        }

        impl Functions {
            /// # Safety
            /// The library is a libvirglrenderer.
            unsafe fn of(library: &Library) -> Self {
                Self {
                    // SAFETY: the types are those of virglrenderer's public header.
                    $($field: unsafe {
                        library
                            .get::<unsafe extern "C" fn($($argument),*) $(-> $result)?>($symbol.as_bytes())
                            .ok()
                            .map(|symbol| *symbol)
                    },)*
                }
            }
        }
    };
}

functions! {
    init: "virgl_renderer_init", fn(*mut c_void, c_int, *mut Callbacks) -> c_int;
    cleanup: "virgl_renderer_cleanup", fn(*mut c_void);
    reset: "virgl_renderer_reset", fn();
    poll: "virgl_renderer_poll", fn();
    get_poll_fd: "virgl_renderer_get_poll_fd", fn() -> c_int;
    force_ctx_0: "virgl_renderer_force_ctx_0", fn();
    execute: "virgl_renderer_execute", fn(*mut c_void, u32) -> c_int;
    get_cap_set: "virgl_renderer_get_cap_set", fn(u32, *mut u32, *mut u32);
    fill_caps: "virgl_renderer_fill_caps", fn(u32, u32, *mut c_void);
    set_log_callback: "virgl_set_log_callback", fn(Option<LogCallback>, *mut c_void, Option<FreeCallback>);
    set_debug_callback: "virgl_set_debug_callback", fn(*mut c_void) -> *mut c_void;
    context_create: "virgl_renderer_context_create", fn(u32, u32, *const c_char) -> c_int;
    context_create_with_flags: "virgl_renderer_context_create_with_flags", fn(u32, u32, u32, *const c_char) -> c_int;
    context_destroy: "virgl_renderer_context_destroy", fn(u32);
    context_poll: "virgl_renderer_context_poll", fn(u32);
    context_get_poll_fd: "virgl_renderer_context_get_poll_fd", fn(u32) -> c_int;
    ctx_attach_resource: "virgl_renderer_ctx_attach_resource", fn(c_int, c_int);
    ctx_detach_resource: "virgl_renderer_ctx_detach_resource", fn(c_int, c_int);
    submit_cmd: "virgl_renderer_submit_cmd", fn(*mut c_void, c_int, c_int) -> c_int;
    submit_cmd2: "virgl_renderer_submit_cmd2", fn(*mut c_void, c_int, c_int, *mut u64, u32) -> c_int;
    create_fence: "virgl_renderer_create_fence", fn(c_int, u32) -> c_int;
    context_create_fence: "virgl_renderer_context_create_fence", fn(u32, u32, u32, u64) -> c_int;
    export_fence: "virgl_renderer_export_fence", fn(u64, *mut c_int) -> c_int;
    export_signalled_fence: "virgl_renderer_export_signalled_fence", fn() -> c_int;
    resource_create: "virgl_renderer_resource_create", fn(*mut CreateArgs, *mut iovec, u32) -> c_int;
    resource_create_blob: "virgl_renderer_resource_create_blob", fn(*const CreateBlobArgs) -> c_int;
    resource_import_blob: "virgl_renderer_resource_import_blob", fn(*const ImportBlobArgs) -> c_int;
    resource_import_eglimage: "virgl_renderer_resource_import_eglimage", fn(*mut CreateArgs, *mut c_void) -> c_int;
    resource_unref: "virgl_renderer_resource_unref", fn(u32);
    resource_set_priv: "virgl_renderer_resource_set_priv", fn(u32, *mut c_void);
    resource_get_priv: "virgl_renderer_resource_get_priv", fn(u32) -> *mut c_void;
    resource_attach_iov: "virgl_renderer_resource_attach_iov", fn(c_int, *mut iovec, c_int) -> c_int;
    resource_detach_iov: "virgl_renderer_resource_detach_iov", fn(c_int, *mut *mut iovec, *mut c_int);
    resource_map: "virgl_renderer_resource_map", fn(u32, *mut *mut c_void, *mut u64) -> c_int;
    resource_map_fixed: "virgl_renderer_resource_map_fixed", fn(u32, *mut c_void) -> c_int;
    resource_map2: "virgl_renderer_resource_map2", fn(u32, *mut c_void, u64, c_int, c_int) -> c_int;
    resource_get_map_ptr: "virgl_renderer_resource_get_map_ptr", fn(u32, *mut u64) -> c_int;
    resource_unmap: "virgl_renderer_resource_unmap", fn(u32) -> c_int;
    resource_get_map_info: "virgl_renderer_resource_get_map_info", fn(u32, *mut u32) -> c_int;
    resource_export_blob: "virgl_renderer_resource_export_blob", fn(u32, *mut u32, *mut c_int) -> c_int;
    resource_get_info: "virgl_renderer_resource_get_info", fn(c_int, *mut ResourceInfo) -> c_int;
    resource_get_info_ext: "virgl_renderer_resource_get_info_ext", fn(c_int, *mut c_void) -> c_int;
    transfer_read_iov: "virgl_renderer_transfer_read_iov",
        fn(u32, u32, u32, u32, u32, *mut c_void, u64, *mut iovec, c_int) -> c_int;
    transfer_write_iov: "virgl_renderer_transfer_write_iov",
        fn(u32, u32, c_int, u32, u32, *mut c_void, u64, *mut iovec, c_uint) -> c_int;
    get_cursor_data: "virgl_renderer_get_cursor_data", fn(u32, *mut u32, *mut u32) -> *mut c_void;
    get_rect: "virgl_renderer_get_rect", fn(c_int, *mut iovec, c_uint, u32, c_int, c_int, c_int, c_int);
    get_fd_for_texture: "virgl_renderer_get_fd_for_texture", fn(u32, *mut c_int) -> c_int;
    get_fd_for_texture2: "virgl_renderer_get_fd_for_texture2", fn(u32, *mut c_int, *mut c_int, *mut c_int) -> c_int;
}

/// Why a library cannot be chained to.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ChainError {
    /// Not a path that means the same everywhere.
    #[error("{CHAIN_VARIABLE}={}: not an absolute path, nor `none`", .path.display())]
    Relative {
        /// The path.
        path: PathBuf,
    },
    /// Nothing to open.
    #[error("{CHAIN_VARIABLE}={}: {source}", .path.display())]
    Missing {
        /// The path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The drop-in, or a copy of it.
    #[error("{CHAIN_VARIABLE}={}: this is apir's own library; name the real libvirglrenderer, or `none`", .path.display())]
    Own {
        /// The path.
        path: PathBuf,
    },
    /// No library, or one it needs is missing.
    #[error("the real libvirglrenderer cannot be loaded: {}", loader_text(.0))]
    Open(libloading::Error),
    /// Some other library.
    #[error("{} is no libvirglrenderer: it has no virgl_renderer_init", .path.display())]
    Foreign {
        /// The path.
        path: PathBuf,
    },
}

/// The real libvirglrenderer. Never unloaded: it may have started threads.
#[derive(Debug)]
pub(crate) struct Chain {
    path: PathBuf,
    /// Whether the environment named it: then it has to work.
    named: bool,
    /// Its functions.
    pub(crate) call: Functions,
}

impl Chain {
    /// The library that the environment names, else one in a standard place that loads; none with `none`.
    ///
    /// # Errors
    /// Only about a library that was named.
    pub(crate) fn find(own: &Path) -> Result<Option<Self>, ChainError> {
        match std::env::var_os(CHAIN_VARIABLE).filter(|value| !value.is_empty()) {
            Some(value) if value == "none" => Ok(None),
            Some(path) => Self::open(Path::new(&path), own, true).map(Some),
            None => Ok(FOLDERS.iter().find_map(|folder| {
                match Self::open(&Path::new(folder).join(FILE_NAME), own, false) {
                    Ok(chain) => Some(chain),
                    Err(ChainError::Missing { .. } | ChainError::Own { .. }) => None,
                    Err(error) => {
                        tracing::warn!(target: TARGET, "{error}");
                        None
                    }
                }
            })),
        }
    }

    fn open(path: &Path, own: &Path, named: bool) -> Result<Self, ChainError> {
        if !path.is_absolute() {
            return Err(ChainError::Relative { path: path.to_owned() });
        }
        let identity = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
        let found = identity(path).map_err(|source| ChainError::Missing { path: path.to_owned(), source })?;
        if identity(own).is_ok_and(|own| own == found) {
            return Err(ChainError::Own { path: path.to_owned() });
        }
        // SAFETY: the user or the distribution put this library there to be run; its initialisers run here.
        let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL | DEEPBIND) }
            .map_err(ChainError::Open)?;
        // SAFETY: only its presence is asked for.
        if unsafe { library.get::<*const c_void>(MARK.as_bytes()) }.is_ok() {
            return Err(ChainError::Own { path: path.to_owned() });
        }
        // SAFETY: its functions are looked up by virglrenderer's own names.
        let call = unsafe { Functions::of(&library) };
        std::mem::forget(library);
        if call.init.is_none() {
            return Err(ChainError::Foreign { path: path.to_owned() });
        }
        Ok(Self { path: path.to_owned(), named, call })
    }

    /// Its file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the environment named it.
    pub(crate) fn is_named(&self) -> bool {
        self.named
    }

    /// Version and size of a capset of its; a size of 0 where it has none.
    pub(crate) fn capset(&self, capset: u32) -> (u32, u32) {
        let (mut version, mut size) = (0, 0);
        if let Some(get_cap_set) = self.call.get_cap_set {
            // SAFETY: both words are ours, and live as long as the call.
            unsafe { get_cap_set(capset, &raw mut version, &raw mut size) };
        }
        (version, size)
    }

    /// The memory of a blob and its size in bytes, sealed against a change of size.
    pub(crate) fn export_memory(&self, res_id: u32) -> io::Result<(File, u64)> {
        let export =
            self.call.resource_export_blob.ok_or_else(|| io::Error::other("this library exports none"))?;
        let (mut kind, mut fd) = (0, -1);
        // SAFETY: both words are ours, and live as long as the call.
        let code = unsafe { export(res_id, &raw mut kind, &raw mut fd) };
        if code != 0 || fd < 0 {
            return Err(io::Error::other(format!("its export failed with {code}")));
        }
        // SAFETY: the library has just made this descriptor for its caller.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        if kind != FD_TYPE_SHM {
            return Err(io::Error::other(format!("its memory is of kind {kind}, not plain shared memory")));
        }
        blob::seal(&file)?;
        let size = file.metadata()?.len();
        Ok((file, size))
    }
}

/// The file that this code was loaded from.
pub(crate) fn own_file() -> PathBuf {
    let mut info = MaybeUninit::<Dl_info>::zeroed();
    let address = (own_file as *const ()).cast::<c_void>();
    // SAFETY: the struct is ours; the address is in a loaded object.
    let found = unsafe { libc::dladdr(address, info.as_mut_ptr()) };
    // SAFETY: all zeroes are a value of this struct of pointers.
    let info = unsafe { info.assume_init() };
    if found == 0 || info.dli_fname.is_null() {
        return PathBuf::new();
    }
    // SAFETY: a C string of the loader's, which lives as long as the object: as this code.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    let path = Path::new(OsStr::from_bytes(name.to_bytes()));
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}
