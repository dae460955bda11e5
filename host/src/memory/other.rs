//! Systems on which nothing tells how large a mapping is: every blob is refused.

use std::io;
use std::ptr::NonNull;

/// Never known here.
///
/// # Errors
/// Always.
pub fn shared_len(_pointer: NonNull<u8>) -> io::Result<usize> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Never possible here.
///
/// # Errors
/// Always.
pub fn double(_pointer: NonNull<u8>, _len: usize) -> io::Result<NonNull<u8>> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Nothing to undo here.
///
/// # Safety
/// None is needed.
pub unsafe fn unmap(_pointer: NonNull<u8>, _len: usize) {}
