//! Which requests of ioctl a worker may make: by type, number and direction, for each kind of driver.
//!
//! A request is a direction (2 bits), a size (14), a type (8) and a number (8). Types are letters that subsystems share, so
//! a family states all three; the size is left open, since it grows with a driver's releases.
#![forbid(unsafe_code)]

use super::super::Profile;
use seccompiler::SeccompCmpOp;

/// Requests of one driver.
#[derive(Debug, Clone, Copy)]
struct Family {
    /// The type; 0 also for numbers that have none.
    kind: u8,
    /// The first and the last number.
    numbers: (u8, u8),
    direction: Direction,
}

/// Which way a request's argument is copied.
#[derive(Debug, Clone, Copy)]
enum Direction {
    /// Not at all, as old requests say whatever they do.
    None,
    /// In, out or both: what `_IOW`, `_IOR` and `_IOWR` make.
    Some,
    /// Both.
    Both,
}

const IN: u64 = 1 << 30;
const OUT: u64 = 1 << 31;

/// Whole requests on terminals, pipes and sockets that ask or set nothing but the descriptor's own state.
const PLAIN: &[u32] = &[
    0x5401, // TCGETS
    0x5413, // TIOCGWINSZ
    0x541b, // FIONREAD
    0x5421, // FIONBIO
    0x5450, // FIONCLEX
    0x5451, // FIOCLEX
];

const fn family(kind: u8, first: u8, last: u8, direction: Direction) -> Family {
    Family { kind, numbers: (first, last), direction }
}

/// PROCMAP_QUERY on /proc/self/maps. The same type and number without a direction swaps ext4's boot loader.
const COMMON: &[Family] = &[family(b'f', 17, 17, Direction::Both)];

/// DRM: what render nodes know of its core, what drivers add, and sync objects. Not global names of buffers (10, 11),
/// authentication (16, 17), mastery (30, 31), nor modes (160 to 190).
const DRM: &[Family] = &[
    family(b'd', 0x00, 0x09, Direction::Some),
    family(b'd', 0x0c, 0x0d, Direction::Some),
    family(b'd', 0x2d, 0x2e, Direction::Some),
    family(b'd', 0x40, 0x9f, Direction::Some),
    // Some drivers have requests without an argument.
    family(b'd', 0x40, 0x9f, Direction::None),
    family(b'd', 0xbf, 0xc5, Direction::Some),
    family(b'd', 0xca, 0xcd, Direction::Some),
    family(b'd', 0xcf, 0xcf, Direction::Some),
    family(b'd', 0xd1, 0xd1, Direction::Some),
];

/// Buffers and fences that drivers share between devices: dma-buf without naming, and sync files.
const SHARED: &[Family] = &[
    family(b'b', 0, 0, Direction::Some),
    family(b'b', 2, 3, Direction::Some),
    family(b'>', 3, 5, Direction::Some),
];

/// NVIDIA's control devices, unified memory and mode setting device, and the GPU of Windows below a Linux of its own.
const NVIDIA: &[Family] = &[
    family(b'F', 0x00, 0xff, Direction::Both),
    family(b'm', 0x00, 0x00, Direction::Both),
    // Unified memory numbers its requests plainly; 1 and 2 are any file's FIBMAP and FIGETBSZ, and no longer used there.
    family(0, 3, 0xff, Direction::None),
    family(b'G', 0x00, 0x45, Direction::Both),
];

/// Whole requests that begin and end a use of NVIDIA's unified memory.
const NVIDIA_UNIFIED_MEMORY: &[u32] = &[0x3000_0001, 0x3000_0002];

/// NVIDIA's embedded processors: memory, channels, address spaces, groups, the GPU itself. Terminals have the groups' type, with
/// other numbers or no direction.
const TEGRA: &[Family] = &[
    family(b'N', 0x00, 0xff, Direction::Some),
    family(b'H', 0x00, 0xff, Direction::Some),
    family(b'A', 0x00, 0xff, Direction::Some),
    family(b'G', 0x00, 0xff, Direction::Some),
    family(b'T', 0x00, 0x1f, Direction::Some),
];

/// AMD's compute device, without the tracing of other processes (38). A console's requests have its type and no direction.
const KFD: &[Family] = &[family(b'K', 0x01, 0x25, Direction::Some)];

/// A comparison of the whole request.
pub(super) type Condition = (SeccompCmpOp, u64);

/// What a profile may ask: a request has to meet all conditions of one entry.
pub(super) fn allowed(profile: Profile) -> Vec<Vec<Condition>> {
    let tegra: &[Family] = if cfg!(target_arch = "aarch64") { TEGRA } else { &[] };
    let families: &[&[Family]] = match profile {
        Profile::Cpu => &[COMMON],
        Profile::Vulkan => &[COMMON, DRM, SHARED, NVIDIA, tegra],
        Profile::Cuda => &[COMMON, SHARED, NVIDIA, tegra],
        Profile::Rocm => &[COMMON, DRM, SHARED, KFD],
        Profile::Any => &[COMMON, DRM, SHARED, NVIDIA, tegra, KFD],
    };
    let nvidia = matches!(profile, Profile::Vulkan | Profile::Cuda | Profile::Any);
    let unified = if nvidia { NVIDIA_UNIFIED_MEMORY } else { &[] };
    let whole = PLAIN.iter().chain(unified).map(|&request| vec![(SeccompCmpOp::Eq, request.into())]);
    whole.chain(families.iter().flat_map(|families| families.iter()).flat_map(Family::conditions)).collect()
}

impl Family {
    /// An entry for each block of numbers that a mask can name, and each direction.
    fn conditions(&self) -> Vec<Vec<Condition>> {
        // Plain numbers have no size either.
        let size: u64 = if self.kind == 0 { 0x3fff_0000 } else { 0 };
        // Bits that are looked at, and their value.
        let directions: &[(u64, u64)] = match self.direction {
            Direction::None => &[(IN | OUT, 0)],
            Direction::Some => &[(IN, IN), (OUT, OUT)],
            Direction::Both => &[(IN | OUT, IN | OUT)],
        };
        let blocks = blocks(self.numbers);
        let entries = directions.iter().flat_map(|(looked_at, direction)| {
            blocks.iter().map(move |(first, shared)| {
                let mask = looked_at | size | 0xff00 | u64::from(*shared);
                let value = direction | u64::from(self.kind) << 8 | u64::from(*first);
                vec![(SeccompCmpOp::MaskedEq(mask), value)]
            })
        });
        entries.collect()
    }
}

/// A range as aligned blocks of powers of two: the first number of each, and the bits that all numbers of it share.
fn blocks((first, last): (u8, u8)) -> Vec<(u8, u8)> {
    let mut found = Vec::new();
    let mut next = u16::from(first);
    while next <= u16::from(last) {
        let mut len: u16 = 256;
        while next % len != 0 || next + len - 1 > u16::from(last) {
            len /= 2;
        }
        // Both fit: the block lies inside a range of bytes.
        found.push(((next & 0xff) as u8, (!(len - 1) & 0xff) as u8));
        next += len;
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admits(entries: &[Vec<Condition>], request: u32) -> bool {
        entries.iter().any(|entry| {
            entry.iter().all(|(operator, value)| match operator {
                SeccompCmpOp::Eq => u64::from(request) == *value,
                SeccompCmpOp::MaskedEq(mask) => u64::from(request) & mask == *value,
                _ => panic!("{operator:?} is not used"),
            })
        })
    }

    #[test]
    fn blocks_are_the_range() {
        for range in [(0, 255), (3, 255), (17, 17), (0, 9), (0x40, 0x9f), (0xca, 0xcd), (1, 0x25), (255, 255)]
        {
            let blocks = blocks(range);
            for number in 0..=255u8 {
                let inside = blocks.iter().filter(|(first, bits)| number & bits == *first).count();
                assert_eq!(inside, usize::from((range.0..=range.1).contains(&number)), "{range:?} {number}");
            }
        }
    }

    #[test]
    fn s29_of_all_requests_a_profile_has_its_families_only() {
        let kinds = |profile| {
            let entries = allowed(profile);
            let has = |kind: u32| {
                let of_kind = move |direction: u32| {
                    (0..=255).map(move |number| direction << 30 | 8 << 16 | kind << 8 | number)
                };
                (0..4).flat_map(of_kind).any(|request| admits(&entries, request))
            };
            (0..=255u8).filter(|kind| has(u32::from(*kind))).map(char::from).collect::<String>()
        };
        assert_eq!(kinds(Profile::Cpu), "f");
        assert_eq!(kinds(Profile::Rocm), ">Kbdf");
        if cfg!(target_arch = "x86_64") {
            assert_eq!(kinds(Profile::Cuda), ">FGbfm");
            assert_eq!(kinds(Profile::Vulkan), ">FGbdfm");
            assert_eq!(kinds(Profile::Any), ">FGKbdfm");
        }
    }
}
