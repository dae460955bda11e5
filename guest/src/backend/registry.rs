//! The registration: what ggml asks for when it loads this library.

use super::attachment::Attachment;
use super::buffer::BufferMaker;
use super::device::{Device, Opener};
use super::lost::{OnLost, OnLostError};
use super::once::ForkOnce;
use super::{guard, log};
use crate::link::Process;
use crate::numbers::OwnNumbers;
use crate::session::{Session, SessionError};
use crate::stats;
use apir_ggml::abi;
use apir_ggml::process::GgmlBase;
use apir_protocol::constants::{PROTOCOL_MAJOR, PROTOCOL_MINOR};
use std::ffi::{CStr, OsStr, OsString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::{mem, ptr};

/// What ggml is told where its version is not known: a newer one refuses the library by this number.
const NEWEST_API: u32 = 3;

/// The registration's name. Upstream's library has the same, and stands for the same devices.
const NAME: &CStr = c"ggml-virtgpu";

static REGISTRY: ForkOnce<Registry> = ForkOnce::new();

/// The registration and its device, which live as long as the process.
#[derive(Debug)]
struct Registry {
    reg: *mut abi::Reg,
    /// A registration without a device, for whoever loads the library once more.
    spare: *mut abi::Reg,
    device: Option<&'static Device>,
    /// The process that ggml's loader last got `reg` in.
    given_in: AtomicU64,
}

// SAFETY: the registrations are made once, never changed and never freed; the device bears any thread.
unsafe impl Send for Registry {}
// SAFETY: as above.
unsafe impl Sync for Registry {}

/// Why there is no device.
#[derive(Debug, thiserror::Error)]
enum StartError {
    /// No usable ggml in this process.
    #[error(transparent)]
    Ggml(#[from] apir_ggml::Error),
    /// The program's ggml has the devices already.
    #[error(
        "this program has loaded {} before, which has the same devices; remove one of the two files, or unset GGML_BACKEND_PATH", .0.display()
    )]
    Twice(PathBuf),
    /// A variable is wrong.
    #[error(transparent)]
    OnLost(#[from] OnLostError),
    /// No host, or none with a device for us.
    #[error(transparent)]
    Session(#[from] SessionError),
}

/// The registration for ggml's loader. There is always one: without a host it has no device, and ggml's log one line why.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_init() -> *mut abi::Reg {
    guard("ggml_backend_init", ptr::null_mut(), || REGISTRY.get_or_make(Registry::new).give())
}

/// The same registration, for programs that name their backends.
#[unsafe(no_mangle)]
pub extern "C" fn ggml_backend_virtgpu_reg() -> *mut abi::Reg {
    guard("ggml_backend_virtgpu_reg", ptr::null_mut(), || REGISTRY.get_or_make(Registry::new).reg)
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
        let make = || -> *mut abi::Reg {
            let api_version = api_version.cast_signed();
            Box::leak(Box::new(abi::Reg { api_version, iface: IFACE, context: ptr::null_mut() }))
        };
        let (reg, spare) = (make(), make());
        let device = match base.map_err(StartError::from).and_then(|base| start(base, reg)) {
            Ok(device) => Some(device),
            Err(error) => {
                log::warn(format_args!("no device: {error}"));
                None
            }
        };
        Self { reg, spare, device, given_in: AtomicU64::new(0) }
    }

    /// The registration for ggml's loader. One that its list has already would be a second device there, in older releases; a fork may load it anew.
    fn give(&self) -> *mut abi::Reg {
        let here = Process::current().generation();
        let again = self.given_in.swap(here, Ordering::Relaxed) == here;
        let listed = || GgmlBase::find().is_ok_and(|base| base.registrations().contains(&self.reg));
        if self.device.is_some() && again && listed() {
            log::warn(format_args!("no device: {}", StartError::Twice(file_of(get_name))));
            return self.spare;
        }
        self.reg
    }

    /// The device of a registration of this library.
    fn device_of(&self, reg: *mut abi::Reg) -> Option<&'static Device> {
        self.device.filter(|_| ptr::eq(reg, self.reg))
    }
}

type GetName = unsafe extern "C" fn(*mut abi::Reg) -> *const c_char;

/// The file of another copy of this library, or of upstream's, that has given the ggml of this program its devices.
fn other_copy(base: &GgmlBase) -> Option<PathBuf> {
    base.registrations().into_iter().find_map(|reg| {
        // SAFETY: ggml lists valid registrations, whose functions may be called from anywhere.
        unsafe {
            let iface = (*reg).iface;
            let (name, count) = (iface.get_name?, iface.get_device_count?);
            let text = name(reg);
            let ours = !text.is_null() && CStr::from_ptr(text) == NAME;
            (ours && count(reg) > 0).then(|| file_of(name))
        }
    })
}

/// The file that a function comes from.
fn file_of(function: GetName) -> PathBuf {
    // SAFETY: the struct is plain old data, for which zeros are valid.
    let mut found: libc::Dl_info = unsafe { mem::zeroed() };
    // SAFETY: any address may be asked about; the struct is ours.
    let known = unsafe { libc::dladdr(function as *const c_void, &raw mut found) } != 0;
    if !known || found.dli_fname.is_null() {
        return "another copy".into();
    }
    // SAFETY: the loader gives the name of a library that stays loaded.
    OsStr::from_bytes(unsafe { CStr::from_ptr(found.dli_fname) }.to_bytes()).into()
}

fn start(base: GgmlBase, reg: *mut abi::Reg) -> Result<&'static Device, StartError> {
    log::to_ggml(base);
    if let Some(file) = other_copy(&base) {
        return Err(StartError::Twice(file));
    }
    let on_lost = OnLost::from_environment()?;
    let own = OwnNumbers::from_environment(base.names()?);
    let opener = Opener::new(Session::connect);
    let device = Device::make(opener, *base.layout(), BufferMaker::Ggml(base), own, on_lost, reg)?;
    let host_version = device.attached().session.host_version();
    if host_version != (PROTOCOL_MAJOR, PROTOCOL_MINOR) {
        let (major, minor) = host_version;
        log::debug(format_args!(
            "the host speaks APIR {major}.{minor}, this library {PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
        ));
    }
    if stats_file().is_some() {
        // SAFETY: the function never unwinds, and the library is never unloaded.
        unsafe { libc::atexit(at_exit) };
    }
    Ok(device)
}

/// Appends the counters of this process's session to the file that the environment names, if it names one.
pub(super) fn write_statistics(device: &Device, attachment: &Attachment) {
    static TOLD: AtomicBool = AtomicBool::new(false);
    let Some(path) = stats_file().filter(|_| attachment.session.is_ours()) else { return };
    if let Err(error) = stats::append(&path, &device.display_name(), &attachment.session)
        && !TOLD.swap(true, Ordering::Relaxed)
    {
        let name = stats::STATS_VARIABLE;
        log::warn(format_args!("cannot write to {} ({name}): {error}", path.display()));
    }
}

fn stats_file() -> Option<PathBuf> {
    std::env::var_os(stats::STATS_VARIABLE).filter(|path: &OsString| !path.is_empty()).map(PathBuf::from)
}

extern "C" fn at_exit() {
    guard("at_exit", (), || {
        if let Some(device) = REGISTRY.get().and_then(|registry| registry.device) {
            write_statistics(device, device.last_attached());
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
    NAME.as_ptr()
}

unsafe extern "C" fn get_device_count(reg: *mut abi::Reg) -> usize {
    guard("get_device_count", 0, || {
        REGISTRY.get().and_then(|registry| registry.device_of(reg)).map_or(0, |_| 1)
    })
}

unsafe extern "C" fn get_device(reg: *mut abi::Reg, index: usize) -> *mut abi::Device {
    guard("get_device", ptr::null_mut(), || {
        let device = REGISTRY.get().and_then(|registry| registry.device_of(reg)).filter(|_| index == 0);
        device.map_or(ptr::null_mut(), Device::as_ptr)
    })
}
