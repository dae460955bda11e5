//! Mappings on Linux: sizes from /proc/self/maps, doubles by mremap.

use nix::libc::c_void;
use nix::sys::mman::{MRemapFlags, mremap, munmap};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::OnceLock;

/// Descriptors of ours start here: a renderer that closes a stale number closes none of them.
const DESCRIPTOR_FLOOR: i32 = 512;

/// What the kernel tells of the mapping at an address (`struct procmap_query`).
#[repr(C)]
#[derive(Default)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

/// Bits of `vma_flags`: readable, writable, shared.
const READ_WRITE_SHARED: u64 = 1 | 2 | 8;

nix::ioctl_readwrite!(procmap_query, b'f', 17, ProcmapQuery);

/// Bytes from `pointer` to the end of its mapping.
///
/// # Errors
/// When nothing is mapped there, or not shared and writable.
pub fn shared_len(pointer: NonNull<u8>) -> io::Result<usize> {
    let address = pointer.as_ptr() as u64;
    let (end, usable) = match query(address) {
        Some(found) => found?,
        None => search(&std::fs::read_to_string("/proc/self/maps")?, address)?,
    };
    if usable {
        Ok((end - address) as usize)
    } else {
        Err(io::Error::other("the mapping is private or read-only"))
    }
}

/// End of the mapping at `address` and whether it is shared and writable, asked by ioctl; nothing where the kernel (before 6.11) has none.
fn query(address: u64) -> Option<io::Result<(u64, bool)>> {
    static MAPS: OnceLock<Option<OwnedFd>> = OnceLock::new();
    let maps = MAPS.get_or_init(open_maps).as_ref()?;
    let mut query = ProcmapQuery {
        size: size_of::<ProcmapQuery>() as u64,
        query_addr: address,
        ..ProcmapQuery::default()
    };
    // SAFETY: the kernel fills the struct that it is given, whose size it is told.
    match unsafe { procmap_query(maps.as_raw_fd(), &mut query) } {
        Ok(_) => Some(Ok((query.vma_end, query.vma_flags & READ_WRITE_SHARED == READ_WRITE_SHARED))),
        Err(nix::errno::Errno::ENOENT) => Some(Err(nothing_there())),
        // An older kernel, or a renderer that closed our descriptor: the text tells the same.
        Err(_) => None,
    }
}

fn open_maps() -> Option<OwnedFd> {
    let low = File::open("/proc/self/maps").ok()?;
    let high = nix::fcntl::fcntl(&low, nix::fcntl::FcntlArg::F_DUPFD_CLOEXEC(DESCRIPTOR_FLOOR)).ok()?;
    // SAFETY: fcntl has just made this descriptor, and it is kept nowhere else.
    Some(unsafe { OwnedFd::from_raw_fd(high) })
}

/// The same from the text of /proc/self/maps.
fn search(maps: &str, address: u64) -> io::Result<(u64, bool)> {
    for line in maps.lines() {
        let mut words = line.split(' ');
        let range = words.next().and_then(|range| range.split_once('-'));
        let (Some((start, end)), Some(mode)) = (range, words.next()) else { continue };
        let (Ok(start), Ok(end)) = (u64::from_str_radix(start, 16), u64::from_str_radix(end, 16)) else {
            continue;
        };
        if (start..end).contains(&address) {
            return Ok((end, mode.starts_with("rw") && mode.ends_with('s')));
        }
    }
    Err(nothing_there())
}

fn nothing_there() -> io::Error {
    io::Error::other("nothing is mapped at its address")
}

/// Maps `len` bytes from `pointer` a second time.
///
/// # Errors
/// What the system says.
pub fn double(pointer: NonNull<u8>, len: usize) -> io::Result<NonNull<u8>> {
    // SAFETY: an old size of 0 makes a new mapping of the same pages and leaves the old one alone.
    let doubled = unsafe { mremap(pointer.cast::<c_void>(), 0, len, MRemapFlags::MREMAP_MAYMOVE, None) };
    doubled.map(NonNull::cast).map_err(io::Error::from)
}

/// Unmaps what [`double`] mapped.
///
/// # Safety
/// Nobody may use the bytes any more.
pub unsafe fn unmap(pointer: NonNull<u8>, len: usize) {
    // SAFETY: the caller gives up the mapping. It fails only for a range that was never mapped.
    let _ = unsafe { munmap(pointer.cast::<c_void>(), len) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_of_maps_is_understood() {
        let maps = "7f0000000000-7f0000003000 rw-s 00000000 00:01 1024 /memfd:apir-shmem (deleted)\n\
                    7f0000003000-7f0000004000 r--s 00000000 00:01 1025 /memfd:apir-shmem (deleted)\n\
                    7f0000004000-7f0000005000 rw-p 00000000 00:00 0\n";
        assert_eq!(search(maps, 0x7f00_0000_0000).unwrap(), (0x7f00_0000_3000, true));
        assert_eq!(search(maps, 0x7f00_0000_2fff).unwrap(), (0x7f00_0000_3000, true));
        assert!(!search(maps, 0x7f00_0000_3000).unwrap().1);
        assert!(!search(maps, 0x7f00_0000_4000).unwrap().1);
        assert!(search(maps, 0x7f00_0000_5000).is_err());
        assert!(search("rubbish\n", 0).is_err());
    }

    #[test]
    fn ioctl_and_text_agree() {
        let text = std::fs::read_to_string("/proc/self/maps").unwrap();
        let here = &raw const text as u64;
        if let Some(found) = query(here) {
            assert_eq!(found.unwrap(), search(&text, here).unwrap());
            assert!(query(8).unwrap().is_err());
        }
    }
}
