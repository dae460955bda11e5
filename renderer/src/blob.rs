//! Blobs: sealed memfds that host and guest both map.
#![forbid(unsafe_code)]

use crate::plugin;
use apir_protocol::socket::{BlobRefusal, MAX_BLOB_SIZE};
use memmap2::{MmapOptions, MmapRaw};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::{SysconfVar, sysconf};
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use vm_memory::{Bytes, VolatileSlice};

/// One blob's mapping. The guest may write to it at any time.
#[derive(Debug)]
pub(crate) struct Blob {
    mapping: MmapRaw,
}

/// Why there is no blob, and for the log what the system said.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) reason: BlobRefusal,
    pub(crate) cause: Option<io::Error>,
}

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.cause {
            Some(cause) => write!(f, "{}: {cause}", self.reason),
            None => self.reason.fmt(f),
        }
    }
}

impl From<BlobRefusal> for Refused {
    fn from(reason: BlobRefusal) -> Self {
        Self { reason, cause: None }
    }
}

impl From<io::Error> for Refused {
    fn from(cause: io::Error) -> Self {
        Self { reason: BlobRefusal::Memory, cause: Some(cause) }
    }
}

impl Blob {
    /// Makes a zeroed blob of `size` bytes rounded up to the page; the descriptor is the guest's.
    pub(crate) fn create(size: u64) -> Result<(Self, OwnedFd), Refused> {
        if size == 0 || size > MAX_BLOB_SIZE {
            return Err(BlobRefusal::Size.into());
        }
        let size = size.next_multiple_of(page_size()?);
        let len = usize::try_from(size).map_err(io::Error::other)?;
        // The name virglrenderer gives: plugins learn a blob's size from the mapping of this name.
        let fd = memfd_create(c"apir-shmem", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)
            .map_err(io::Error::from)?;
        let file = File::from(fd);
        file.set_len(size)?;
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).map_err(io::Error::from)?;
        let mapping = MmapOptions::new().len(len).map_raw(&file)?;
        Ok((Self { mapping }, file.into()))
    }

    /// Its size in bytes.
    pub(crate) fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Its first byte, for the plugin.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.mapping.as_mut_ptr()
    }

    /// Stores a word; false when it does not lie inside.
    pub(crate) fn store_word(&self, offset: usize, value: u32, order: Ordering) -> bool {
        self.bytes().store(value, offset, order).is_ok()
    }

    fn bytes(&self) -> VolatileSlice<'_> {
        plugin::shared_bytes(&self.mapping)
    }
}

fn page_size() -> io::Result<u64> {
    let size = sysconf(SysconfVar::PAGE_SIZE)?;
    size.and_then(|size| u64::try_from(size).ok())
        .ok_or_else(|| io::Error::other("the system does not tell its page size"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_sealed_and_bounded() {
        let (blob, fd) = Blob::create(5).unwrap();
        let page = usize::try_from(page_size().unwrap()).unwrap();
        assert_eq!(blob.len(), page);
        let file = File::from(fd);
        assert!(file.set_len(0).is_err());
        assert!(file.set_len(1 << 20).is_err());
        assert!(blob.store_word(page - 4, 1, Ordering::Release));
        assert!(!blob.store_word(page, 1, Ordering::Release));
        for size in [0, MAX_BLOB_SIZE + 1, u64::MAX] {
            assert_eq!(Blob::create(size).unwrap_err().reason, BlobRefusal::Size);
        }
    }

    #[test]
    fn the_largest_blob_is_sparse() {
        let (blob, _fd) = Blob::create(MAX_BLOB_SIZE).unwrap();
        assert!(blob.store_word((1 << 46) - 4, 7, Ordering::Relaxed));
    }
}
