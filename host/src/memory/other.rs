//! Systems on which nothing tells how large a mapping is: every blob is refused.

use std::io;
use std::ptr::NonNull;

/// A stretch of memory that a blob has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Region {
    /// Bytes to the end of the mapping.
    pub len: usize,
}

/// Never known here.
///
/// # Errors
/// Always.
pub fn region(_pointer: NonNull<u8>) -> io::Result<Region> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Never possible here.
///
/// # Errors
/// Always.
pub fn double(_pointer: NonNull<u8>, _len: usize) -> io::Result<NonNull<u8>> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Not done here: the library allocates.
///
/// # Errors
/// Always.
pub fn zeroed(_size: usize) -> io::Result<(NonNull<u8>, usize, usize)> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Not tried here.
///
/// # Errors
/// Never.
pub fn try_map(_bytes: u64) -> io::Result<()> {
    Ok(())
}

/// Not known here.
pub fn available() -> Option<u64> {
    None
}

/// A number that systems are known to allow.
pub fn max_mappings() -> u64 {
    65_530
}

/// Not known here.
pub fn commits_strictly() -> bool {
    false
}

/// Nothing to do here.
///
/// # Errors
/// Never.
pub fn populate(_pointer: NonNull<u8>, _len: usize) -> io::Result<()> {
    Ok(())
}

/// Nothing to undo here.
///
/// # Safety
/// None is needed.
pub unsafe fn unmap(_pointer: NonNull<u8>, _len: usize) {}
