use super::*;
use crate::budget::{Budget, Sharing};
use memmap2::MmapMut;
use std::ffi::c_void;
use std::sync::Mutex;

/// What the callback below answers: resource 1 is `POINTER`.
static POINTER: Mutex<usize> = Mutex::new(0);

unsafe extern "C" fn get_shmem_ptr(_ctx_id: u32, res_id: u32) -> *mut c_void {
    if res_id == 1 { *POINTER.lock().unwrap() as *mut c_void } else { std::ptr::null_mut() }
}

fn blobs(pointer: *const u8, budget: &'static Budget) -> Blobs {
    *POINTER.lock().unwrap() = pointer as usize;
    let mappings = Account::new("mappings", budget, 2, Sharing::Open);
    // SAFETY: the callback answers null or the mapping that the test keeps.
    unsafe { Blobs::new(7, get_shmem_ptr, mappings) }
}

fn shared(len: usize) -> MmapMut {
    let fd = nix::sys::memfd::memfd_create(c"apir-shmem", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
    nix::unistd::ftruncate(&fd, len as i64).unwrap();
    // SAFETY: the file is anonymous and nobody shortens it.
    unsafe { MmapMut::map_mut(&fd) }.unwrap()
}

#[test]
fn blobs_have_their_mapping_s_size_and_outlive_it_when_kept() {
    let mut memory = shared(3 * 4096);
    memory[..5].copy_from_slice(b"hello");
    static BUDGET: Budget = Budget::new();
    let blobs = blobs(memory.as_ptr(), &BUDGET);
    assert!(matches!(blobs.view(2, 1), Err(MemoryError::Unknown(2))));
    for size in [3 * 4096 + 1, 1 << 40, u64::MAX] {
        let error = blobs.view(1, size).unwrap_err();
        assert!(matches!(error, MemoryError::TooSmall { res_id: 1, len: 12288, .. }), "{error}");
    }
    let view = blobs.view(1, 3 * 4096).unwrap();
    let mut private = Vec::new();
    view.copy_to(&mut private).unwrap();
    assert_eq!((private.len(), &private[..5]), (3 * 4096, &b"hello"[..]));
    assert_eq!(blobs.view(1, 0).unwrap().len(), 0);

    let kept = view.keep().unwrap();
    for size in [0, 1, 4096] {
        let again = blobs.view(1, size).unwrap().keep().unwrap();
        assert!(Arc::ptr_eq(&kept, &again), "a blob is mapped once");
        assert_eq!(blobs.mappings().held(), 1);
    }
    let others = [shared(4096), shared(4096)];
    let keep = |memory: &MmapMut| {
        *POINTER.lock().unwrap() = memory.as_ptr() as usize;
        blobs.view(1, 1).unwrap().keep()
    };
    let second = keep(&others[0]).unwrap();
    assert_ne!(second.pointer(), kept.pointer());
    let error = keep(&others[1]).unwrap_err().to_string();
    assert_eq!(error, "mappings: too many for this process (3, limit 2)");
    drop(second);
    assert!(keep(&others[1]).is_ok() && keep(&others[0]).is_ok(), "what is given back can be had");

    memory[0] = b'J';
    drop(memory);
    // SAFETY: the second mapping has `len` bytes and is still there.
    let bytes = unsafe { std::slice::from_raw_parts(kept.pointer().as_ptr(), kept.len()) };
    assert_eq!(&bytes[..5], b"Jello");

    let private = vec![0u8; 1 << 20];
    *POINTER.lock().unwrap() = private.as_ptr() as usize;
    let error = blobs.view(1, 8).unwrap_err().to_string();
    assert_eq!(error, "resource 1: the mapping is private or read-only");
}
