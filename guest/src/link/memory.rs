//! Blobs: memory shared with the host.
use super::{LinkError, Process};
use memmap2::MmapRaw;
use std::fmt::Debug;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use vm_memory::{Bytes, VolatileSlice};

/// The end of a link that takes blobs back.
pub trait Unref: Send + Sync + Debug {
    /// Tells the host that the blob is done with; a host that is gone is no error.
    fn unref(&self, res_id: u32);
}

/// Memory shared with the host. Dropping it unmaps it here, then gives it back to the host.
///
/// The host may write at any time, so the bytes are only ever copied, never borrowed.
///
/// It belongs to the process that made it. A fork of that process does not inherit the mapping, so that what the process frees is free: there the blob
/// must not be accessed, and dropping it does nothing.
#[derive(Debug)]
pub struct Blob {
    mapping: ManuallyDrop<MmapRaw>,
    res_id: u32,
    owner: Arc<dyn Unref>,
    process: Process,
}

impl Drop for Blob {
    fn drop(&mut self) {
        if self.process.is_current() {
            // SAFETY: dropped once, here, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.mapping) };
            self.owner.unref(self.res_id);
        }
        // In a fork the addresses may be another mapping's by now, and the host's resource is still in use.
    }
}

impl Blob {
    /// A blob of the host's resource `res_id`, mapped whole at `mapping`; `owner` is told when it is dropped.
    pub fn new(res_id: u32, mapping: MmapRaw, owner: Arc<dyn Unref>) -> Self {
        // Where this fails, forks keep memory longer than needed.
        #[cfg(target_os = "linux")]
        let _ = mapping.advise(memmap2::Advice::DontFork);
        Self { mapping: ManuallyDrop::new(mapping), res_id, owner, process: Process::current() }
    }

    /// The resource id that commands name it by.
    pub fn res_id(&self) -> u32 {
        self.res_id
    }

    /// Its size in bytes: at least what was asked for.
    pub fn len(&self) -> usize {
        self.mapping.len()
    }

    /// Whether it has no bytes; a link makes no such blob.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its first byte, page-aligned and valid until the blob is dropped; for buffers whose base ggml hands out.
    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.as_mut_ptr()
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Errors
    /// [`LinkError::Bounds`] when they do not fit; nothing is written.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), LinkError> {
        self.slice(offset, bytes.len())?.copy_from(bytes);
        Ok(())
    }

    /// Fills `out` from `offset`.
    ///
    /// # Errors
    /// [`LinkError::Bounds`] when the blob ends before; nothing is read.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), LinkError> {
        self.slice(offset, out.len())?.copy_to(out);
        Ok(())
    }

    /// Stores a word with Release: what was written before is seen by whoever loads it.
    ///
    /// # Panics
    /// When `offset` is not a multiple of 4 inside the blob.
    pub fn store_word(&self, offset: usize, value: u32) {
        let stored = self.whole().store(value, offset, Ordering::Release);
        assert!(stored.is_ok(), "no word at {offset} in a blob of {}", self.len());
    }

    /// Loads a word with Acquire: what was written before it was stored is seen afterwards.
    ///
    /// # Panics
    /// When `offset` is not a multiple of 4 inside the blob.
    pub fn load_word(&self, offset: usize) -> u32 {
        match self.whole().load(offset, Ordering::Acquire) {
            Ok(value) => value,
            Err(_) => panic!("no word at {offset} in a blob of {}", self.len()),
        }
    }

    fn slice(&self, offset: usize, len: usize) -> Result<VolatileSlice<'_>, LinkError> {
        self.whole().subslice(offset, len).map_err(|_| LinkError::Bounds {
            res_id: self.res_id(),
            offset,
            len,
            size: self.len(),
        })
    }

    fn whole(&self) -> VolatileSlice<'_> {
        // SAFETY: the mapping is readable and writable over its whole length and outlives the slice, which borrows self.
        unsafe { VolatileSlice::new(self.mapping.as_mut_ptr(), self.mapping.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use memmap2::MmapOptions;
    use std::sync::Mutex;

    #[derive(Debug, Default)]
    struct Log(Mutex<Vec<u32>>);

    impl Unref for Log {
        fn unref(&self, res_id: u32) {
            self.0.lock().unwrap().push(res_id);
        }
    }

    fn blob(log: &Arc<Log>) -> Blob {
        let mapping = MmapOptions::new().len(4096).map_anon().unwrap().into();
        Blob::new(7, mapping, log.clone())
    }

    #[test]
    fn bytes_come_back_and_bounds_hold() {
        let blob = blob(&Arc::default());
        blob.write(1, b"hello").unwrap();
        let mut out = [0; 7];
        blob.read(0, &mut out).unwrap();
        assert_eq!(&out, b"\0hello\0");
        blob.write(4096, b"").unwrap();
        for (offset, len) in [(4096, 1), (4090, 7), (usize::MAX, 2), (0, 4097)] {
            let mut bytes = vec![0; len];
            assert!(matches!(blob.write(offset, &bytes), Err(LinkError::Bounds { .. })));
            assert!(matches!(blob.read(offset, &mut bytes), Err(LinkError::Bounds { .. })));
        }
    }

    #[test]
    fn words_are_little_endian_words_of_the_memory() {
        let blob = blob(&Arc::default());
        blob.store_word(4092, 0x0403_0201);
        assert_eq!(blob.load_word(4092), 0x0403_0201);
        let mut out = [0; 4];
        blob.read(4092, &mut out).unwrap();
        assert_eq!(out, 0x0403_0201u32.to_ne_bytes());
    }

    #[test]
    #[should_panic = "no word at 2"]
    fn a_ragged_word_panics() {
        blob(&Arc::default()).load_word(2);
    }

    #[test]
    fn t25_a_fork_neither_has_the_memory_nor_gives_it_back() {
        let log = Arc::new(Log::default());
        let blob = blob(&log);
        let address = blob.as_ptr();
        let status = crate::link::in_fork(|| {
            // The addresses are free in the child: a mapping of its own may be there.
            let len = 4096;
            // SAFETY: the flag keeps the call from replacing a mapping.
            let own = unsafe {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
                libc::mmap(address.cast(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
            };
            let inherited = own.cast() != address;
            drop(blob);
            // SAFETY: the child's own mapping, which the drop must leave alone.
            let kept = inherited || unsafe { address.read_volatile() } == 0;
            u8::from(!inherited && kept && log.0.lock().unwrap().is_empty())
        });
        assert_eq!(status, 1);
    }

    #[test]
    fn dropping_gives_the_resource_back_once() {
        let log = Arc::new(Log::default());
        drop(blob(&log));
        assert_eq!(*log.0.lock().unwrap(), [7]);
    }
}
