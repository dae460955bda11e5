//! Blobs: sealed memfds that host and guest both map.
#![forbid(unsafe_code)]

use crate::error::Error;
use crate::plugin;
use apir_protocol::settings::{SIZE_FORM, parse_size};
use apir_protocol::socket::{BlobRefusal, MAX_BLOB_SIZE};
use memmap2::{MmapOptions, MmapRaw};
use nix::fcntl::{FcntlArg, SealFlag, fcntl, posix_fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::{SysconfVar, sysconf};
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use vm_memory::{Bytes, VolatileSlice};

/// Environment variable with the most bytes of blobs that a context may have.
const LIMIT_VARIABLE: &str = "APIR_MAX_BLOB_BYTES";
/// The same when it is not set: 64 GiB.
const MAX_CONTEXT_BYTES: u64 = 64 << 30;
/// The most bytes of blobs that all contexts of a process may have, 1 TiB: a mapping takes addresses, of which there are 128 TiB, and a blob has up to three.
const MAX_PROCESS_BYTES: u64 = 1 << 40;

/// Bytes of blobs of all contexts of this process.
static PROCESS: Counter = Counter::new();

/// Bytes that are in use.
#[derive(Debug, Default)]
struct Counter(AtomicU64);

impl Counter {
    const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Adds bytes that keep within a limit; else gives what there would be.
    fn add(&self, bytes: u64, limit: u64) -> Result<(), u64> {
        let sum = |used: u64| used.saturating_add(bytes);
        let fits = |used| (sum(used) <= limit).then(|| sum(used));
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).map(drop).map_err(sum)
    }

    fn subtract(&self, bytes: u64) {
        self.0.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// The bytes of one context's blobs.
#[derive(Debug, Clone)]
pub(crate) struct BlobBytes {
    limit: u64,
    context: Arc<Counter>,
}

impl BlobBytes {
    /// For a context of the limit that the environment names.
    ///
    /// # Errors
    /// [`Error::Variable`]
    pub(crate) fn from_environment() -> Result<Self, Error> {
        let value = std::env::var_os(LIMIT_VARIABLE).filter(|value| !value.is_empty());
        let Some(value) = value else { return Ok(Self::new(MAX_CONTEXT_BYTES)) };
        match value.to_str().and_then(parse_size) {
            Some(limit @ 1..) => Ok(Self::new(limit)),
            _ => {
                let fix = format!("must be {SIZE_FORM}");
                Err(Error::Variable { name: LIMIT_VARIABLE, value, fix })
            }
        }
    }

    pub(crate) fn new(limit: u64) -> Self {
        Self { limit, context: Arc::default() }
    }

    /// Takes bytes for a blob.
    fn take(&self, bytes: u64) -> Result<TakenBytes, Refused> {
        let refuse = |whose: &str, value: u64, limit: u64| {
            let text = format!("bytes of blobs of {whose}: too many ({value}, limit {limit})");
            Refused::from(io::Error::other(text))
        };
        self.context.add(bytes, self.limit).map_err(|value| refuse("this context", value, self.limit))?;
        if let Err(value) = PROCESS.add(bytes, MAX_PROCESS_BYTES) {
            self.context.subtract(bytes);
            return Err(refuse("all contexts", value, MAX_PROCESS_BYTES));
        }
        Ok(TakenBytes { context: self.context.clone(), bytes })
    }
}

/// Bytes of a blob, given back when dropped.
#[derive(Debug)]
pub(crate) struct TakenBytes {
    context: Arc<Counter>,
    bytes: u64,
}

impl Drop for TakenBytes {
    fn drop(&mut self) {
        self.context.subtract(self.bytes);
        PROCESS.subtract(self.bytes);
    }
}

/// One blob's mapping. The guest may write to it at any time.
#[derive(Debug)]
pub(crate) struct Blob {
    mapping: MmapRaw,
    /// None for memory of another's making, which its maker has counted.
    _taken: Option<TakenBytes>,
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
    pub(crate) fn create(size: u64, bytes: &BlobBytes) -> Result<(Self, OwnedFd), Refused> {
        let (file, size, taken) = create_memory(size, bytes)?;
        Ok((Self { mapping: map(&file, size)?, _taken: Some(taken) }, file.into()))
    }

    /// Maps a blob of another's making: `size` bytes of a memfd that can neither shrink nor grow.
    pub(crate) fn attach(memory: OwnedFd, size: u64) -> io::Result<Self> {
        let file = File::from(memory);
        check_seals(&file)?;
        let found = file.metadata()?.len();
        if size == 0 || size > found || found > MAX_BLOB_SIZE {
            return Err(io::Error::other(format!("{size} bytes of a memory of {found}")));
        }
        Ok(Self { mapping: map(&file, size)?, _taken: None })
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

/// Makes the memory of a blob: zeroed, sealed, `size` bytes rounded up to the page, which is returned too, and which are taken from `bytes`.
pub(crate) fn create_memory(size: u64, bytes: &BlobBytes) -> Result<(File, u64, TakenBytes), Refused> {
    if size == 0 || size > MAX_BLOB_SIZE {
        return Err(BlobRefusal::Size.into());
    }
    let size = size.next_multiple_of(page_size()?);
    let taken = bytes.take(size)?;
    Ok((sealed(size, commits_strictly())?, size, taken))
}

/// Whether the system promises no more memory than it has (`vm.overcommit_memory=2`).
fn commits_strictly() -> bool {
    static STRICT: OnceLock<bool> = OnceLock::new();
    *STRICT.get_or_init(|| {
        fs::read_to_string("/proc/sys/vm/overcommit_memory").is_ok_and(|mode| mode.trim() == "2")
    })
}

/// A zeroed memory of whole pages that can neither shrink nor grow. One that is `whole` has all its pages from the start: where the system has none left
/// it is then an error here, and no signal when one is first touched.
fn sealed(size: u64, whole: bool) -> Result<File, Refused> {
    // The name virglrenderer gives: plugins learn a blob's size from the mapping of this name.
    let fd = memfd_create(c"apir-shmem", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)
        .map_err(io::Error::from)?;
    let file = File::from(fd);
    file.set_len(size)?;
    if whole {
        let len = size.try_into().map_err(io::Error::other)?;
        posix_fallocate(&file, 0, len).map_err(io::Error::from)?;
    }
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals)).map_err(io::Error::from)?;
    Ok(file)
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
        let bytes = BlobBytes::new(u64::MAX);
        let (blob, fd) = Blob::create(5, &bytes).unwrap();
        let page = usize::try_from(page_size().unwrap()).unwrap();
        assert_eq!(blob.len(), page);
        let file = File::from(fd);
        assert!(file.set_len(0).is_err());
        assert!(file.set_len(1 << 20).is_err());
        assert!(blob.store_word(page - 4, 1, Ordering::Release));
        assert!(!blob.store_word(page, 1, Ordering::Release));
        for size in [0, MAX_BLOB_SIZE + 1, u64::MAX] {
            assert_eq!(Blob::create(size, &bytes).unwrap_err().reason, BlobRefusal::Size);
        }
    }

    #[test]
    fn foreign_memory_has_to_be_sealed_and_large_enough() {
        let (file, size, _taken) = create_memory(10_000, &BlobBytes::new(u64::MAX)).unwrap();
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
        let file = sealed(MAX_BLOB_SIZE, false).unwrap();
        let blob = Blob::attach(file.into(), MAX_BLOB_SIZE).unwrap();
        assert!(blob.store_word((1 << 46) - 4, 7, Ordering::Relaxed));
    }

    #[test]
    fn s27_bytes_of_blobs_are_counted_for_a_context_and_a_process() {
        let (one, others) = (BlobBytes::new(1 << 20), [(); 16].map(|()| BlobBytes::new(64 << 30)));
        let refusal = |size, bytes| match Blob::create(size, bytes) {
            Err(refused) => refused.to_string(),
            Ok(_) => panic!("{size} bytes"),
        };
        let words = |value: u64, limit: u64| {
            let cause = format!("bytes of blobs of this context: too many ({value}, limit {limit})");
            format!("{}: {cause}", BlobRefusal::Memory)
        };
        assert_eq!(refusal(1 << 46, &others[0]), words(1 << 46, 64 << 30));
        let first = Blob::create(1 << 19, &one).unwrap();
        assert_eq!(refusal((1 << 19) + 1, &one), words((1 << 20) + 4096, 1 << 20));
        let second = Blob::create(1 << 19, &one).unwrap();
        drop(first);
        assert!(Blob::create(1 << 19, &one).is_ok(), "what is given back can be had");
        drop(second);
        // 1 TiB in all, less what other tests have at the moment.
        let mut all: Vec<_> =
            others[..15].iter().map(|other| Blob::create(64 << 30, other).unwrap()).collect();
        let mut left = 64 << 30;
        while let Ok(blob) = Blob::create(left, &others[15]) {
            all.push(blob);
            left = 16 << 30;
        }
        let text = refusal(64 << 30, &BlobBytes::new(u64::MAX));
        assert!(text.contains("bytes of blobs of all contexts: too many ("), "{text}");
        assert!(text.ends_with(", limit 1099511627776)"), "{text}");
    }

    #[test]
    fn s27_whole_memory_has_its_pages_from_the_start() {
        use std::os::unix::fs::MetadataExt;
        let blocks = |whole| sealed(1 << 20, whole).unwrap().metadata().unwrap().blocks();
        assert_eq!((blocks(false), blocks(true)), (0, 2048));
        // More than any machine has, where a sparse one is made without a word.
        assert!(sealed(1 << 45, false).is_ok());
    }
}
