//! The registration: what ggml asks for when it loads this library.

use super::buffer::BufferMaker;
use super::device::Device;
use super::ops::Ops;
use super::{guard, log};
use crate::session::{Session, SessionError};
use crate::stats;
use apir_ggml::abi;
use apir_ggml::process::GgmlBase;
use apir_protocol::constants::{PROTOCOL_MAJOR, PROTOCOL_MINOR};
use std::ffi::{OsString, c_char, c_int};
use std::path::PathBuf;
use std::ptr;
use std::sync::{Once, OnceLock};

/// What ggml is told where its version is not known: a newer one refuses the library by this number.
const NEWEST_API: u32 = 3;

static REGISTRY: OnceLock<Registry> = OnceLock::new();

/// The registration and its device, which live as long as the process.
#[derive(Debug)]
struct Registry {
    reg: *mut abi::Reg,
    device: Option<&'static Device>,
}

// SAFETY: the registration is made once, never changed and never freed; the device bears any thread.
unsafe impl Send for Registry {}
// SAFETY: as above.
unsafe impl Sync for Registry {}

/// Why there is no device.
#[derive(Debug, thiserror::Error)]
enum StartError {
    /// No usable ggml in this process.
    #[error(transparent)]
    Ggml(#[from] apir_ggml::Error),
    /// No host, or none with a device for us.
    #[error(transparent)]
    Session(#[from] SessionError),
}

/// The registration for ggml's loader. There is always one: without a host it has no device, and ggml's log one line why.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_init() -> *mut abi::Reg {
    guard("ggml_backend_init", ptr::null_mut(), || REGISTRY.get_or_init(Registry::new).reg)
}

/// The same registration, for programs that name their backends.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_virtgpu_reg() -> *mut abi::Reg {
    ggml_backend_init()
}

/// How well the library suits this machine, for ggml's loader to choose by: there is one variant, and it suits all.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_score() -> c_int {
    1
}

impl Registry {
    fn new() -> Self {
        let base = GgmlBase::find();
        let api_version = base.as_ref().map_or(NEWEST_API, |base| base.layout().api_version());
        let reg: *mut abi::Reg = Box::leak(Box::new(abi::Reg {
            api_version: api_version.cast_signed(),
            iface: IFACE,
            context: ptr::null_mut(),
        }));
        let device = match base.map_err(StartError::from).and_then(|base| start(base, reg)) {
            Ok(device) => Some(device),
            Err(error) => {
                log::warn(format_args!("no device: {error}"));
                None
            }
        };
        Self { reg, device }
    }
}

fn start(base: GgmlBase, reg: *mut abi::Reg) -> Result<&'static Device, StartError> {
    log::to_ggml(base);
    let ops = Ops::new(&base.ops()?);
    let session = Session::connect()?;
    if session.host_version() != (PROTOCOL_MAJOR, PROTOCOL_MINOR) {
        let (major, minor) = session.host_version();
        log::debug(format_args!(
            "the host speaks APIR {major}.{minor}, this library {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
        ));
    }
    let device = Device::make(session, *base.layout(), BufferMaker::Ggml(base), ops, reg)?;
    if stats_file().is_some() {
        // SAFETY: the function never unwinds, and the library is never unloaded.
        unsafe { libc::atexit(at_exit) };
    }
    Ok(device)
}

/// Appends the device's counters to the file that the environment names, if it names one.
pub(super) fn write_statistics(device: &Device) {
    static TOLD: Once = Once::new();
    let Some(path) = stats_file() else { return };
    if let Err(error) = stats::append(&path, &device.display_name(), &device.session) {
        TOLD.call_once(|| {
            log::warn(format_args!(
                "cannot write to {} ({}): {error}",
                path.display(),
                stats::STATS_VARIABLE
            ));
        });
    }
}

fn stats_file() -> Option<PathBuf> {
    std::env::var_os(stats::STATS_VARIABLE).filter(|path: &OsString| !path.is_empty()).map(PathBuf::from)
}

extern "C" fn at_exit() {
    guard("at_exit", (), || {
        if let Some(device) = REGISTRY.get().and_then(|registry| registry.device) {
            write_statistics(device);
        }
    });
}

const IFACE: abi::RegIface = abi::RegIface {
    get_name: Some(get_name),
    get_device_count: Some(get_device_count),
    get_device: Some(get_device),
    get_proc_address: None,
};

unsafe extern "C" fn get_name(_reg: *mut abi::Reg) -> *const c_char {
    c"ggml-virtgpu".as_ptr()
}

unsafe extern "C" fn get_device_count(_reg: *mut abi::Reg) -> usize {
    guard("get_device_count", 0, || REGISTRY.get().map_or(0, |registry| registry.device.iter().len()))
}

unsafe extern "C" fn get_device(_reg: *mut abi::Reg, index: usize) -> *mut abi::Device {
    guard("get_device", ptr::null_mut(), || {
        let device = REGISTRY.get().and_then(|registry| registry.device).filter(|_| index == 0);
        device.map_or(ptr::null_mut(), Device::as_ptr)
    })
}
