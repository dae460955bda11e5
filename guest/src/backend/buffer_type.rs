//! The device's buffer type.

use super::device::Device;
use super::{buffer, guard};
use apir_ggml::{Layout, TensorRef, abi};
use std::ffi::c_char;
use std::ptr;

/// The functions of the buffer type in this layout: the device lies behind another offset in each.
pub(super) fn iface(layout: &Layout) -> abi::BufferTypeIfaceV2 {
    match layout.api_version() {
        2 => functions::<2>(),
        _ => functions::<3>(),
    }
}

fn functions<const API: u32>() -> abi::BufferTypeIfaceV2 {
    abi::BufferTypeIfaceV2 {
        get_name: Some(get_name::<API>),
        alloc_buffer: Some(alloc_buffer::<API>),
        get_alignment: Some(get_alignment::<API>),
        get_max_size: Some(get_max_size::<API>),
        get_alloc_size: Some(get_alloc_size::<API>),
        is_host: None,
    }
}

/// The device of a buffer type.
///
/// # Safety
/// `buffer_type` is a device's own, in the layout of `API`.
unsafe fn device<const API: u32>(buffer_type: *mut abi::BufferType) -> &'static Device {
    // SAFETY: the struct has this layout, and its context is a device that is never freed.
    unsafe {
        let context = match API {
            2 => (*buffer_type.cast::<abi::BufferTypeV2>()).context,
            _ => (*buffer_type.cast::<abi::BufferTypeV3>()).context,
        };
        &*context.cast::<Device>()
    }
}

unsafe extern "C" fn get_name<const API: u32>(buffer_type: *mut abi::BufferType) -> *const c_char {
    // SAFETY: ggml calls with a buffer type that has this function.
    unsafe { device::<API>(buffer_type) }.buffer_type_name.as_ptr()
}

unsafe extern "C" fn alloc_buffer<const API: u32>(
    buffer_type: *mut abi::BufferType,
    size: usize,
) -> *mut abi::Buffer {
    guard("alloc_buffer", ptr::null_mut(), || {
        // SAFETY: ggml calls with a buffer type that has this function.
        buffer::allocate(unsafe { device::<API>(buffer_type) }, size)
    })
}

unsafe extern "C" fn get_alignment<const API: u32>(buffer_type: *mut abi::BufferType) -> usize {
    // SAFETY: ggml calls with a buffer type that has this function.
    unsafe { device::<API>(buffer_type) }.last_attached().host.alignment
}

unsafe extern "C" fn get_max_size<const API: u32>(buffer_type: *mut abi::BufferType) -> usize {
    // SAFETY: ggml calls with a buffer type that has this function.
    unsafe { device::<API>(buffer_type) }.last_attached().host.max_size
}

unsafe extern "C" fn get_alloc_size<const API: u32>(
    buffer_type: *mut abi::BufferType,
    tensor: *const abi::Tensor,
) -> usize {
    guard("get_alloc_size", 0, || {
        // SAFETY: ggml calls with a buffer type that has this function, and a valid tensor that nobody changes meanwhile.
        let (device, tensor) = unsafe { (device::<API>(buffer_type), TensorRef::from_ptr(tensor)) };
        tensor.map_or(0, |tensor| device.alloc_size(tensor))
    })
}
