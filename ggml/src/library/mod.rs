//! A ggml library of the host, driven through its vtables.
//!
//! A [`GgmlLibrary`] is loaded for good: ggml keeps global state and threads, so nothing ever unloads it. Everything made from it holds it, so
//! objects may be dropped in any order.

mod backend;
mod buffer;
mod buffer_type;
mod device;
mod load;
mod runtime;

pub use backend::Backend;
pub use buffer::Buffer;
pub(crate) use buffer::BufferHold;
pub use buffer_type::BufferType;
pub use device::{Device, DeviceProps, Registry};
pub use load::{Candidate, DEFAULT_REG_SYMBOL, GgmlLibrary, LogSink};

use std::ffi::{CStr, c_char};

/// A string of a backend; empty for null.
///
/// # Safety
///
/// `text` is null or a C string.
unsafe fn string(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller says that it is a C string.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
