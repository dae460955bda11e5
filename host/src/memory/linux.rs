//! Mappings on Linux: sizes from /proc/self/maps, doubles by mremap.

use nix::libc::c_void;
use nix::sys::mman::{
    MRemapFlags, MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, mprotect, mremap, munmap,
};
use std::fs::{self, File};
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
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

/// A stretch of memory that a blob has, and which memory it is: equal regions are the same bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Region {
    /// Bytes to the end of the mapping.
    pub len: usize,
    /// Major and minor number of the file system.
    device: (u32, u32),
    inode: u64,
    /// Bytes into the file.
    offset: u64,
}

/// A mapping, as the kernel tells of it.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    start: u64,
    end: u64,
    offset: u64,
    device: (u32, u32),
    inode: u64,
    /// Shared, readable and writable.
    usable: bool,
}

/// What is mapped from `pointer` to the end of its mapping.
///
/// # Errors
/// When nothing is mapped there, or not shared and writable.
pub fn region(pointer: NonNull<u8>) -> io::Result<Region> {
    let address = pointer.as_ptr() as u64;
    let found = match query(address) {
        Some(found) => found?,
        None => search(&fs::read_to_string("/proc/self/maps")?, address)?,
    };
    if !found.usable {
        return Err(io::Error::other("the mapping is private or read-only"));
    }
    let Found { start, end, offset, device, inode, .. } = found;
    let offset = offset.wrapping_add(address - start);
    Ok(Region { len: (end - address) as usize, device, inode, offset })
}

/// The mapping at `address`, asked by ioctl; nothing where the kernel (before 6.11) has none.
fn query(address: u64) -> Option<io::Result<Found>> {
    static MAPS: OnceLock<Option<OwnedFd>> = OnceLock::new();
    let maps = MAPS.get_or_init(open_maps).as_ref()?;
    let mut query = ProcmapQuery {
        size: size_of::<ProcmapQuery>() as u64,
        query_addr: address,
        ..ProcmapQuery::default()
    };
    // SAFETY: the kernel fills the struct that it is given, whose size it is told.
    match unsafe { procmap_query(maps.as_raw_fd(), &mut query) } {
        Ok(_) => Some(Ok(Found {
            start: query.vma_start,
            end: query.vma_end,
            offset: query.vma_offset,
            device: (query.dev_major, query.dev_minor),
            inode: query.inode,
            usable: query.vma_flags & READ_WRITE_SHARED == READ_WRITE_SHARED,
        })),
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
fn search(maps: &str, address: u64) -> io::Result<Found> {
    maps.lines()
        .filter_map(read_line)
        .find(|found| (found.start..found.end).contains(&address))
        .ok_or_else(nothing_there)
}

/// `start-end mode offset major:minor inode path`, all but the inode in hexadecimal digits.
fn read_line(line: &str) -> Option<Found> {
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let mode = words.next()?;
    let offset = words.next()?;
    let (major, minor) = words.next()?.split_once(':')?;
    let hex = |digits| u64::from_str_radix(digits, 16).ok();
    let number = |digits| u32::from_str_radix(digits, 16).ok();
    Some(Found {
        start: hex(start)?,
        end: hex(end)?,
        offset: hex(offset)?,
        device: (number(major)?, number(minor)?),
        inode: words.next()?.parse().ok()?,
        usable: mode.starts_with("rw") && mode.ends_with('s'),
    })
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

/// Maps at least `size` zeroed bytes and behind them a page that cannot be touched; gives the address, the bytes of all that, and those that are usable.
///
/// # Errors
/// What the system says.
pub fn zeroed(size: usize) -> io::Result<(NonNull<u8>, usize, usize)> {
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)?.unwrap_or(4096);
    let page = usize::try_from(page).map_err(io::Error::other)?;
    let too_large = || io::Error::from(io::ErrorKind::OutOfMemory);
    let usable = size.checked_next_multiple_of(page).ok_or_else(too_large)?;
    let len = usable.checked_add(page).and_then(NonZeroUsize::new).ok_or_else(too_large)?;
    // SAFETY: a new mapping at an address of the system's choice.
    let start = unsafe { mmap_anonymous(None, len, ProtFlags::PROT_NONE, MapFlags::MAP_PRIVATE) }?;
    let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: the bytes are the start of the mapping above.
    if let Err(errno) = unsafe { mprotect(start, usable, access) } {
        // SAFETY: nobody has the mapping yet.
        unsafe { unmap(start.cast(), len.get()) };
        return Err(errno.into());
    }
    Ok((start.cast(), len.get(), usable))
}

/// That `bytes` of memory can be mapped now, which limits of the process and strict accounting decide.
///
/// # Errors
/// What the system says.
pub fn try_map(bytes: u64) -> io::Result<()> {
    let len = usize::try_from(bytes).ok().and_then(NonZeroUsize::new);
    let len = len.ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
    let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new mapping at an address of the system's choice.
    let start = unsafe { mmap_anonymous(None, len, access, MapFlags::MAP_PRIVATE) }?;
    // SAFETY: nobody else has the mapping.
    unsafe { unmap(start.cast(), len.get()) };
    Ok(())
}

/// Bytes that the machine, and the control groups of this process, have left; nothing where nobody tells.
pub fn available() -> Option<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let machine = meminfo.lines().find_map(|line| {
        let kib = line.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?;
        kib.trim().parse::<u64>().ok()?.checked_mul(1024)
    });
    machine.into_iter().chain(group_available()).min()
}

/// What the tightest control group (version 2) of this process has left.
fn group_available() -> Option<u64> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let root = Path::new("/sys/fs/cgroup");
    let group = root.join(path);
    let number = |file: PathBuf| fs::read_to_string(file).ok()?.trim().parse::<u64>().ok();
    let left = |group: &Path| {
        let most = number(group.join("memory.max"))?;
        Some(most.saturating_sub(number(group.join("memory.current"))?))
    };
    group.ancestors().take_while(|group| group.starts_with(root)).filter_map(left).min()
}

/// How many mappings a process may have.
pub fn max_mappings() -> u64 {
    /// The kernel's default, for a process that may not look it up.
    const USUAL: u64 = 65_530;
    let told = fs::read_to_string("/proc/sys/vm/max_map_count");
    told.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(USUAL)
}

/// Whether the system promises no more memory than it has (`vm.overcommit_memory=2`): pages of a file in memory are then refused when they are first touched.
pub fn commits_strictly() -> bool {
    static STRICT: OnceLock<bool> = OnceLock::new();
    *STRICT.get_or_init(|| {
        fs::read_to_string("/proc/sys/vm/overcommit_memory").is_ok_and(|mode| mode.trim() == "2")
    })
}

/// Gets all pages of `len` bytes from `pointer` on, a page's first byte; a kernel before 5.14 cannot, and leaves them as they are.
///
/// # Errors
/// When the system has no page, where touching it would be a signal.
pub fn populate(pointer: NonNull<u8>, len: usize) -> io::Result<()> {
    if len == 0 {
        return Ok(());
    }
    // SAFETY: populating changes no byte.
    match unsafe { madvise(pointer.cast::<c_void>(), len, MmapAdvise::MADV_POPULATE_WRITE) } {
        Ok(()) | Err(nix::errno::Errno::EINVAL) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Unmaps what [`double`] or [`zeroed`] mapped.
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
        let first = search(maps, 0x7f00_0000_0000).unwrap();
        assert_eq!((first.start, first.end, first.usable), (0x7f00_0000_0000, 0x7f00_0000_3000, true));
        assert_eq!((first.offset, first.device, first.inode), (0, (0, 1), 1024));
        assert_eq!(search(maps, 0x7f00_0000_2fff).unwrap(), first);
        assert!(!search(maps, 0x7f00_0000_3000).unwrap().usable);
        assert!(!search(maps, 0x7f00_0000_4000).unwrap().usable);
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

    #[test]
    fn a_page_that_cannot_be_had_is_an_error_and_no_signal() {
        let fd =
            nix::sys::memfd::memfd_create(c"apir-shmem", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
        let file = File::from(fd);
        file.set_len(4096).unwrap();
        // SAFETY: the file is anonymous; nothing but `populate` touches its mapping.
        let mapping = unsafe { memmap2::MmapOptions::new().len(8192).map_mut(&file) }.unwrap();
        let pointer = NonNull::new(mapping.as_ptr().cast_mut()).unwrap();
        populate(pointer, 4096).unwrap();
        populate(pointer, 0).unwrap();
        assert!(populate(pointer, 8192).is_err(), "the second page lies behind the file");
    }

    #[test]
    fn memory_of_any_size_is_had_or_refused() {
        let (pointer, len, usable) = zeroed(100_000).unwrap();
        assert!(usable >= 100_000 && len > usable);
        // SAFETY: so many bytes are usable, and nobody else has them.
        let bytes = unsafe { std::slice::from_raw_parts_mut(pointer.as_ptr(), usable) };
        assert!(bytes.iter().all(|byte| *byte == 0));
        bytes.fill(1);
        // SAFETY: the bytes are not used any more.
        unsafe { unmap(pointer, len) };
        for size in [1 << 60, usize::MAX] {
            assert!(zeroed(size).is_err() && try_map(size as u64).is_err(), "{size}");
        }
        try_map(1 << 20).unwrap();
        assert!(max_mappings() > 0 && available().is_none_or(|bytes| bytes > 0));
    }
}
