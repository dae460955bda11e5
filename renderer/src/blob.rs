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
        let (file, size) = create_memory(size)?;
        Ok((Self { mapping: map(&file, size)? }, file.into()))
    }

    /// Maps a blob of another's making: `size` bytes of a memfd that can neither shrink nor grow.
    pub(crate) fn attach(memory: OwnedFd, size: u64) -> io::Result<Self> {
        let file = File::from(memory);
        check_seals(&file)?;
        let found = file.metadata()?.len();
        if size == 0 || size > found || found > MAX_BLOB_SIZE {
            return Err(io::Error::other(format!("{size} bytes of a memory of {found}")));
        }
        Ok(Self { mapping: map(&file, size)? })
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

/// Makes the memory of a blob: zeroed, sealed, `size` bytes rounded up to the page, which is returned too.
pub(crate) fn create_memory(size: u64) -> Result<(File, u64), Refused> {
    if size == 0 || size > MAX_BLOB_SIZE {
        return Err(BlobRefusal::Size.into());
    }
    let size = size.next_multiple_of(page_size()?);
    // The name virglrenderer gives: plugins learn a blob's size from the mapping of this name.
    let fd = memfd_create(c"apir-shmem", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)
        .map_err(io::Error::from)?;
    let file = File::from(fd);
    file.set_len(size)?;
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).map_err(io::Error::from)?;
    Ok((file, size))
}

/// Maps `size` bytes of a blob's memory.
pub(crate) fn map(memory: &File, size: u64) -> io::Result<MmapRaw> {
    MmapOptions::new().len(usize::try_from(size).map_err(io::Error::other)?).map_raw(memory)
}

/// Seals memory of another's making against a change of size, where it is not yet.
pub(crate) fn seal(memory: &File) -> io::Result<()> {
    check_seals(memory).or_else(|_| {
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
        // It fails where the memory may not be sealed, which is then told.
        let _ = fcntl(memory, FcntlArg::F_ADD_SEALS(seals));
        check_seals(memory)
    })
}

/// That nobody can take pages away from under a mapping, or add some.
fn check_seals(memory: &File) -> io::Result<()> {
    let seals = fcntl(memory, FcntlArg::F_GET_SEALS).map_err(io::Error::from)?;
    let needed = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW;
    if SealFlag::from_bits_retain(seals).contains(needed) {
        Ok(())
    } else {
        Err(io::Error::other(format!("its memory has seals {seals:#x}, needed are {:#x}", needed.bits())))
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
    fn foreign_memory_has_to_be_sealed_and_large_enough() {
        let (file, size) = create_memory(10_000).unwrap();
        assert_eq!(Blob::attach(file.try_clone().unwrap().into(), size).unwrap().len() as u64, size);
        assert_eq!(Blob::attach(file.try_clone().unwrap().into(), 9).unwrap().len(), 9);
        for wrong in [0, size + 1, u64::MAX] {
            assert!(Blob::attach(file.try_clone().unwrap().into(), wrong).is_err(), "{wrong}");
        }
        assert!(Blob::attach(tempfile::tempfile().unwrap().into(), 1).is_err());
        for seals in [SealFlag::empty(), SealFlag::F_SEAL_GROW, SealFlag::F_SEAL_SHRINK] {
            let open = File::from(memfd_create(c"open", MFdFlags::MFD_ALLOW_SEALING).unwrap());
            open.set_len(4096).unwrap();
            fcntl(&open, FcntlArg::F_ADD_SEALS(seals)).unwrap();
            assert!(Blob::attach(open.into(), 4096).is_err(), "{seals:?}");
        }
    }

    #[test]
    fn the_largest_blob_is_sparse() {
        let (blob, _fd) = Blob::create(MAX_BLOB_SIZE).unwrap();
        assert!(blob.store_word((1 << 46) - 4, 7, Ordering::Relaxed));
    }
}
