//! Memory of a worker's own in the place of files that a driver insists on writing.
#![forbid(unsafe_code)]

use super::super::shaders::PRIVATE;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::close;

/// Makes it, under the numbers where the caches' links lead; false when one of them is taken.
pub(super) fn make() -> bool {
    PRIVATE.iter().all(|&number| {
        let Ok(memory) = memfd_create(c"shaders", MFdFlags::empty()) else { return false };
        match fcntl(&memory, FcntlArg::F_DUPFD(number)) {
            // Left open: it lives as long as the process.
            Ok(found) if found == number => true,
            Ok(other) => {
                let _ = close(other);
                false
            }
            Err(_) => false,
        }
    })
}
