//! A library's registration and its devices.

use std::ffi::{CStr, c_void};
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use super::load::Loaded;
use super::{Backend, Buffer, BufferType, string};
use crate::abi;
use crate::error::Error;
use crate::tensor::TensorRef;
use crate::values::DeviceType;

type GetFeatures = unsafe extern "C" fn(*mut abi::Reg) -> *const abi::Feature;

/// The registration of a library: its name and devices.
#[derive(Clone, Debug)]
pub struct Registry {
    loaded: Arc<Loaded>,
}

impl Registry {
    pub(super) fn new(loaded: Arc<Loaded>) -> Self {
        Self { loaded }
    }

    fn iface(&self) -> &abi::RegIface {
        // SAFETY: the registration stays and is not changed.
        unsafe { &(*self.loaded.reg.as_ptr()).iface }
    }

    /// Name of the backend, such as `CPU` or `CUDA`.
    pub fn name(&self) -> String {
        // SAFETY: the function is called with its own object and gives a C string.
        self.iface().get_name.map_or_else(String::new, |get| unsafe { string(get(self.loaded.reg.as_ptr())) })
    }

    /// Number of devices.
    pub fn device_count(&self) -> usize {
        // SAFETY: the function is called with its own object.
        self.iface().get_device_count.map_or(0, |count| unsafe { count(self.loaded.reg.as_ptr()) })
    }

    /// The device of an index.
    ///
    /// # Errors
    ///
    /// [`Error::NoDevice`] past the last; [`Error::SlotMissing`] or [`Error::SlotNull`] from a backend that does not give it.
    pub fn device(&self, index: usize) -> Result<Device, Error> {
        let count = self.device_count();
        if index >= count {
            return Err(Error::NoDevice { index, count, registry: self.name() });
        }
        let get =
            self.iface().get_device.ok_or(Error::SlotMissing { object: "registry", slot: "get_device" })?;
        // SAFETY: the function is called with its own object and an index below the count.
        let device = unsafe { get(self.loaded.reg.as_ptr(), index) };
        let raw = NonNull::new(device).ok_or(Error::SlotNull { object: "registry", slot: "get_device" })?;
        Ok(Device { loaded: Arc::clone(&self.loaded), raw })
    }

    /// Whether the library was built with a feature, such as `OPENMP`; false when it does not list its features.
    pub fn has_feature(&self, name: &CStr) -> bool {
        let Some(get) = self.proc_address(c"ggml_backend_get_features") else { return false };
        // SAFETY: the function of this name has had this type in every supported version, and is called with its own object.
        let mut feature =
            unsafe { mem::transmute::<NonNull<c_void>, GetFeatures>(get)(self.loaded.reg.as_ptr()) };
        if feature.is_null() {
            return false;
        }
        // SAFETY: the list ends with an entry without a name; names and values are C strings.
        unsafe {
            while !(*feature).name.is_null() {
                if CStr::from_ptr((*feature).name) == name {
                    return string((*feature).value) != "0";
                }
                feature = feature.add(1);
            }
        }
        false
    }

    /// A function of the backend that is not in its vtables; none when it has none of that name.
    pub fn proc_address(&self, name: &CStr) -> Option<NonNull<c_void>> {
        let get = self.iface().get_proc_address?;
        // SAFETY: the function is called with its own object and a C string.
        NonNull::new(unsafe { get(self.loaded.reg.as_ptr(), name.as_ptr()) })
    }
}

/// A device of a library.
#[derive(Clone, Debug)]
pub struct Device {
    loaded: Arc<Loaded>,
    raw: NonNull<abi::Device>,
}

// SAFETY: ggml programs call a device's functions from any thread, as llama.cpp does with several contexts.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// Properties of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceProps {
    /// Short name, such as `CUDA0`.
    pub name: String,
    /// Human-readable name.
    pub description: String,
    /// Free memory in bytes.
    pub memory_free: u64,
    /// Total memory in bytes.
    pub memory_total: u64,
    /// Its kind.
    pub type_: DeviceType,
    /// Address on the bus, where there is one.
    pub device_id: Option<String>,
    /// What it can do. `mmap_support` is true for a ggml that does not know it yet.
    pub caps: abi::DeviceCaps,
}

impl Device {
    fn iface(&self) -> &abi::DeviceIface {
        // SAFETY: a device stays as long as its library and its functions are not changed.
        unsafe { &(*self.raw.as_ptr()).iface }
    }

    /// Short name, such as `CUDA0`.
    pub fn name(&self) -> String {
        // SAFETY: the function is called with its own object and gives a C string.
        self.iface().get_name.map_or_else(String::new, |get| unsafe { string(get(self.raw.as_ptr())) })
    }

    /// Human-readable name.
    pub fn description(&self) -> String {
        // SAFETY: the function is called with its own object and gives a C string.
        self.iface().get_description.map_or_else(String::new, |get| unsafe { string(get(self.raw.as_ptr())) })
    }

    /// Free and total memory in bytes; both 0 when the device has none to report.
    pub fn memory(&self) -> (u64, u64) {
        let (mut free, mut total) = (0usize, 0usize);
        if let Some(get) = self.iface().get_memory {
            // SAFETY: the function is called with its own object and fills the two numbers.
            unsafe { get(self.raw.as_ptr(), &raw mut free, &raw mut total) };
        }
        (free as u64, total as u64)
    }

    /// Its kind.
    pub fn type_(&self) -> DeviceType {
        // SAFETY: the function is called with its own object.
        let number = self.iface().get_type.map_or(0, |get| unsafe { get(self.raw.as_ptr()) });
        DeviceType::from_number(number)
    }

    /// Its properties.
    pub fn props(&self) -> DeviceProps {
        let mut props = abi::DeviceProps::default();
        if let Some(get) = self.iface().get_props {
            // SAFETY: the function is called with its own object and fills the zeroed struct, whose size no version exceeds.
            unsafe { get(self.raw.as_ptr(), &raw mut props) };
        }
        if !self.loaded.layout.has_mmap_cap() {
            props.caps.mmap_support = true;
        }
        // SAFETY: the device gives C strings or null.
        unsafe {
            DeviceProps {
                name: string(props.name),
                description: string(props.description),
                memory_free: props.memory_free as u64,
                memory_total: props.memory_total as u64,
                type_: DeviceType::from_number(props.type_),
                device_id: (!props.device_id.is_null()).then(|| string(props.device_id)),
                caps: props.caps,
            }
        }
    }

    /// Its own buffer type.
    ///
    /// # Errors
    ///
    /// [`Error::SlotMissing`] or [`Error::SlotNull`] from a device without one.
    pub fn buffer_type(&self) -> Result<BufferType, Error> {
        let get = self
            .iface()
            .get_buffer_type
            .ok_or(Error::SlotMissing { object: "device", slot: "get_buffer_type" })?;
        // SAFETY: the function is called with its own object; a buffer type stays.
        unsafe { BufferType::from_raw(&self.loaded, get(self.raw.as_ptr())) }
            .ok_or(Error::SlotNull { object: "device", slot: "get_buffer_type" })
    }

    /// A new backend, a stream of work on the device.
    ///
    /// # Errors
    ///
    /// [`Error::SlotMissing`] from a device that cannot compute, [`Error::SlotNull`] when it fails to make one.
    pub fn init_backend(&self) -> Result<Backend, Error> {
        let init =
            self.iface().init_backend.ok_or(Error::SlotMissing { object: "device", slot: "init_backend" })?;
        // SAFETY: the function is called with its own object; no parameters is allowed. The backend it gives is ours to free.
        unsafe { Backend::from_raw(&self.loaded, init(self.raw.as_ptr(), ptr::null())) }
    }

    /// Whether the device can compute this operation on tensors of these types and shapes.
    pub fn supports_op(&self, op: TensorRef<'_>) -> bool {
        // SAFETY: the function is called with its own object and a tensor that is valid with all it reaches; `GgmlLibrary::open`'s caller
        // answers for the operation.
        self.iface().supports_op.is_some_and(|supports| unsafe { supports(self.raw.as_ptr(), op.as_ptr()) })
    }

    /// Whether the device can work on tensors in buffers of this type.
    pub fn supports_buffer_type(&self, buffer_type: &BufferType) -> bool {
        // SAFETY: the function is called with its own object and a buffer type.
        self.iface()
            .supports_buft
            .is_some_and(|supports| unsafe { supports(self.raw.as_ptr(), buffer_type.as_ptr()) })
    }

    /// A buffer over `len` bytes of host memory at `ptr`, in which a tensor may take up to `max_tensor_size` bytes; none when the device cannot.
    /// Ask [`DeviceProps::caps`] first.
    ///
    /// # Errors
    ///
    /// [`Error::Misaligned`] when `ptr` does not have the buffer type's alignment: the CPU backend would end the process.
    ///
    /// # Safety
    ///
    /// The memory is readable and writable, outlives the buffer and every graph that uses it, and is not reached through Rust references
    /// meanwhile.
    pub unsafe fn buffer_from_host_ptr(
        &self,
        ptr: *mut u8,
        len: usize,
        max_tensor_size: usize,
    ) -> Result<Option<Buffer>, Error> {
        let Some(make) = self.iface().buffer_from_host_ptr else { return Ok(None) };
        let alignment = self.buffer_type()?.alignment();
        if !ptr.addr().is_multiple_of(alignment) {
            return Err(Error::Misaligned { address: ptr.addr(), alignment });
        }
        if len == 0 {
            return Ok(None);
        }
        // SAFETY: the function is called with its own object and memory that the caller answers for; the buffer it gives is ours to free.
        Ok(unsafe {
            Buffer::from_raw(&self.loaded, make(self.raw.as_ptr(), ptr.cast(), len, max_tensor_size))
        })
    }
}
