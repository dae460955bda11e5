use super::*;
use memmap2::MmapMut;
use std::ffi::c_void;
use std::sync::Mutex;

/// What the callback below answers: resource 1 is `POINTER`.
static POINTER: Mutex<usize> = Mutex::new(0);

unsafe extern "C" fn get_shmem_ptr(_ctx_id: u32, res_id: u32) -> *mut c_void {
    if res_id == 1 { *POINTER.lock().unwrap() as *mut c_void } else { std::ptr::null_mut() }
}

fn blobs(pointer: *const u8) -> Blobs {
    *POINTER.lock().unwrap() = pointer as usize;
    // SAFETY: the callback answers null or the mapping that the test keeps.
    unsafe { Blobs::new(7, get_shmem_ptr) }
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
    let blobs = blobs(memory.as_ptr());
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
