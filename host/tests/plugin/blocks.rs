//! What a CPU kernel takes as it is, blocks above all, in every layout: row S24 of the cases.
//!
//! The varied tensor lies alone in a mapped buffer between two pages that nobody may touch. What its rows mean is told by the same node over dense
//! rows; a node with another layout has the same result, or is refused.

use crate::harness::*;
use apir_ggml::TypeInfo;
use apir_protocol::handle::BufferHandle;
use apir_protocol::messages::DeviceBufferFromPtrRequest;
use apir_protocol::tensor::TensorRecord;
use std::cell::Cell;
use std::ops::Range;
use std::sync::LazyLock;

/// Operation numbers of ggml 0.26.
mod op {
    pub(super) const DUP: u32 = 1;
    pub(super) const ADD: u32 = 2;
    pub(super) const ADD1: u32 = 4;
    pub(super) const CONCAT: u32 = 22;
    pub(super) const MUL_MAT: u32 = 29;
    pub(super) const MUL_MAT_ID: u32 = 30;
    pub(super) const OUT_PROD: u32 = 31;
    pub(super) const CPY: u32 = 34;
    pub(super) const CONT: u32 = 35;
    pub(super) const GET_ROWS: u32 = 40;
    pub(super) const SET_ROWS: u32 = 42;
    pub(super) const FLASH_ATTN_EXT: u32 = 74;
    pub(super) const LIGHTNING_INDEXER: u32 = 87;
}

const PAGE: usize = 4096;
/// What tensors start at multiples of.
const ALIGN: u64 = 64;
/// Id of the varied tensor, which each scene makes first.
const VARIED: u64 = 1;
/// Elements of a row: a block of the widest types.
const ROW: u32 = 256;
/// Two of them.
const WIDE: u32 = 512;

/// A node with one source that is made of blocks.
struct Case {
    name: &'static str,
    /// Dimensions of the varied tensor.
    ne: [u32; 4],
    /// The scene around the varied tensor of a type, which is there already; none when the operation has none for this type.
    build: fn(&mut Scene, u32) -> Option<()>,
    /// What is written is the varied tensor itself.
    writes: bool,
    /// No layout but the dense one passes.
    dense_only: bool,
    /// There is a scene for each type that is multiplied with the varied one.
    pairs: bool,
}

const fn read(name: &'static str, ne: [u32; 4], build: fn(&mut Scene, u32) -> Option<()>) -> Case {
    Case { name, ne, build, writes: false, dense_only: false, pairs: false }
}

/// What CPU kernels multiply a type with.
fn dot(type_: u32) -> Option<u32> {
    match type_ {
        TYPE_F32 | TYPE_F16 | 30 => Some(type_),
        2 | 6 | 8 | 20 | 39..=42 => Some(8),
        3 | 7 => Some(9),
        10..=14 | 16..=19 | 21..=23 | 29 => Some(15),
        _ => None,
    }
}

/// A tensor of the type that is tried with the varied one, if kernels multiply it with that.
fn multiplied_with(s: &mut Scene, type_: u32, ne: [u32; 4]) -> Option<u64> {
    let other = WITH.with(Cell::get);
    (dot(other) == Some(type_)).then(|| s.leaf(other, &ne))
}

const CASES: &[Case] = &[
    read("MUL_MAT a", [WIDE, 16, 2, 2], |s, _| {
        let b = s.leaf(TYPE_F32, &[WIDE, 9, 4, 2]);
        s.node(op::MUL_MAT, TYPE_F32, &[16, 9, 4, 2], &[VARIED, b], &[]);
        Some(())
    }),
    Case {
        dense_only: true,
        pairs: true,
        ..read("MUL_MAT b", [WIDE, 9, 4, 2], |s, type_| {
            let a = multiplied_with(s, type_, [WIDE, 16, 2, 2])?;
            s.node(op::MUL_MAT, TYPE_F32, &[16, 9, 4, 2], &[a, VARIED], &[]);
            Some(())
        })
    },
    read("MUL_MAT_ID a", [WIDE, 16, 3, 1], |s, _| {
        let (b, ids) = (s.leaf(TYPE_F32, &[WIDE, 2, 20]), s.leaf(TYPE_I32, &[2, 20]));
        s.node(op::MUL_MAT_ID, TYPE_F32, &[16, 2, 20], &[VARIED, b, ids], &[]);
        Some(())
    }),
    Case {
        dense_only: true,
        pairs: true,
        ..read("MUL_MAT_ID b", [WIDE, 2, 20, 1], |s, type_| {
            let a = multiplied_with(s, type_, [WIDE, 16, 3, 1])?;
            let ids = s.leaf(TYPE_I32, &[2, 20]);
            s.node(op::MUL_MAT_ID, TYPE_F32, &[16, 2, 20], &[a, VARIED, ids], &[]);
            Some(())
        })
    },
    read("OUT_PROD a", [ROW, 5, 2, 2], |s, _| {
        let b = s.leaf(TYPE_F32, &[3, 5, 2, 2]);
        s.node(op::OUT_PROD, TYPE_F32, &[ROW, 3, 2, 2], &[VARIED, b], &[]);
        Some(())
    }),
    read("GET_ROWS a", [ROW, 5, 2, 2], |s, _| {
        let ids = s.leaf(TYPE_I32, &[3, 2, 2]);
        s.node(op::GET_ROWS, TYPE_F32, &[ROW, 3, 2, 2], &[VARIED, ids], &[]);
        Some(())
    }),
    Case {
        writes: true,
        ..read("SET_ROWS target", [ROW, 5, 2, 2], |s, _| {
            let (a, ids) = (s.leaf(TYPE_F32, &[ROW, 3, 2, 2]), s.leaf(TYPE_I64, &[3, 2, 2]));
            s.over(op::SET_ROWS, VARIED, &[a, ids, VARIED], &[]);
            Some(())
        })
    },
    read("ADD a, floats", [ROW, 5, 2, 2], |s, _| {
        let b = s.leaf(TYPE_F32, &[ROW, 5, 2, 2]);
        s.node(op::ADD, TYPE_F32, &[ROW, 5, 2, 2], &[VARIED, b], &[]);
        Some(())
    }),
    read("ADD a, blocks", [ROW, 5, 2, 2], |s, type_| {
        let b = s.leaf(TYPE_F32, &[ROW, 5, 2, 2]);
        s.node(op::ADD, type_, &[ROW, 5, 2, 2], &[VARIED, b], &[]);
        Some(())
    }),
    read("ADD1 a", [ROW, 9, 4, 1], |s, type_| {
        let b = s.leaf(TYPE_F32, &[1]);
        s.node(op::ADD1, type_, &[ROW, 9, 4], &[VARIED, b], &[]);
        Some(())
    }),
    read("DUP a", [ROW, 5, 2, 2], |s, type_| {
        s.node(op::DUP, type_, &[ROW, 5, 2, 2], &[VARIED], &[]);
        Some(())
    }),
    read("CONT a", [ROW, 5, 2, 2], |s, type_| {
        s.node(op::CONT, type_, &[ROW, 5, 2, 2], &[VARIED], &[]);
        Some(())
    }),
    Case {
        dense_only: true,
        ..read("CONT a, reshaped", [ROW, 5, 2, 2], |s, type_| {
            s.node(op::CONT, type_, &[2 * ROW, 5, 2, 1], &[VARIED], &[]);
            Some(())
        })
    },
    read("CPY a to floats", [ROW, 5, 2, 2], |s, _| {
        let target = s.leaf(TYPE_F32, &[ROW, 5, 2, 2]);
        s.over(op::CPY, target, &[VARIED, target], &[]);
        Some(())
    }),
    read("CPY a to floats, reshaped", [ROW, 5, 2, 2], |s, _| {
        let target = s.leaf(TYPE_F32, &[ROW / 2, 10, 2, 2]);
        s.over(op::CPY, target, &[VARIED, target], &[]);
        Some(())
    }),
    read("CPY a to blocks", [ROW, 5, 2, 2], |s, type_| {
        let target = s.leaf(type_, &[ROW, 5, 2, 2]);
        s.over(op::CPY, target, &[VARIED, target], &[]);
        Some(())
    }),
    Case {
        writes: true,
        dense_only: true,
        ..read("CPY target of floats", [ROW, 5, 2, 2], |s, _| {
            let a = s.leaf(TYPE_F32, &[ROW, 5, 2, 2]);
            s.over(op::CPY, VARIED, &[a, VARIED], &[]);
            Some(())
        })
    },
    Case {
        writes: true,
        ..read("CPY target of blocks", [ROW, 5, 2, 2], |s, type_| {
            let a = s.leaf(type_, &[ROW, 5, 2, 2]);
            s.over(op::CPY, VARIED, &[a, VARIED], &[]);
            Some(())
        })
    },
    read("CONCAT a along rows", [ROW, 5, 2, 2], |s, type_| concat(s, type_, [2 * ROW, 5, 2, 2], 0, true)),
    read("CONCAT b along rows", [ROW, 5, 2, 2], |s, type_| concat(s, type_, [2 * ROW, 5, 2, 2], 0, false)),
    read("CONCAT a along planes", [ROW, 5, 2, 2], |s, type_| concat(s, type_, [ROW, 5, 4, 2], 2, true)),
    read("CONCAT b along planes", [ROW, 5, 2, 2], |s, type_| concat(s, type_, [ROW, 5, 4, 2], 2, false)),
    read("FLASH_ATTN_EXT k", [ROW, 16, 2, 2], |s, type_| attend(s, type_, true)),
    read("FLASH_ATTN_EXT v", [ROW, 16, 2, 2], |s, type_| attend(s, type_, false)),
    read("LIGHTNING_INDEXER k", [ROW, 1, 16, 2], |s, _| {
        let (q, weights) = (s.leaf(TYPE_F32, &[ROW, 4, 3, 2]), s.leaf(TYPE_F32, &[4, 3, 1, 2]));
        let mask = s.leaf(TYPE_F16, &[16, 3, 1, 2]);
        s.node(op::LIGHTNING_INDEXER, TYPE_F32, &[16, 3, 1, 2], &[q, VARIED, weights, mask], &[]);
        Some(())
    }),
];

fn concat(s: &mut Scene, type_: u32, ne: [u32; 4], dim: i32, first: bool) -> Option<()> {
    let other = s.leaf(type_, &[ROW, 5, 2, 2]);
    let sources = if first { [VARIED, other] } else { [other, VARIED] };
    s.node(op::CONCAT, type_, &ne, &sources, &[dim]);
    Some(())
}

fn attend(s: &mut Scene, type_: u32, key: bool) -> Option<()> {
    let (q, other) = (s.leaf(TYPE_F32, &[ROW, 3, 4, 2]), s.leaf(type_, &[ROW, 16, 2, 2]));
    let (k, v) = if key { (VARIED, other) } else { (other, VARIED) };
    // Small enough that every key counts.
    let scale = (1.0f32 / 8192.0).to_bits() as i32;
    s.node(op::FLASH_ATTN_EXT, TYPE_F32, &[ROW, 4, 3, 2], &[q, k, v], &[scale]);
    Some(())
}

thread_local! {
    /// The type that the varied one is multiplied with, where that makes a scene.
    static WITH: Cell<u32> = const { Cell::new(0) };
}

/// Strides of elements, or blocks, of `size` bytes: dense, with gaps, in another order, over one another.
fn layouts(info: &TypeInfo, [n0, n1, n2, n3]: [u64; 4]) -> Vec<(&'static str, [u64; 4])> {
    let (size, row) = (u64::from(info.size), info.row_size(n0).unwrap());
    let (plane, batch) = (row * n1, row * n1 * n2);
    let mut all = vec![
        ("dense", [size, row, plane, batch]),
        ("gaps of a row between rows", [size, 2 * row, 2 * plane, 2 * batch]),
        ("gaps of a block between rows", [size, row + size, (row + size) * n1, (row + size) * n1 * n2]),
        ("gaps between planes", [size, row, plane + 3 * row, (plane + 3 * row) * n2]),
        ("gaps of a block between planes", [size, row, plane + size, (plane + size) * n2]),
        ("gaps between batches", [size, row, plane, batch + row]),
        ("planes far apart", [size, row, 4 * plane, 4 * batch]),
        ("rows and planes swapped", [size, row * n2, row, batch]),
        ("planes and batches swapped", [size, row, plane * n3, plane]),
        ("rows and batches swapped", [size, row * n3 * n2, row * n3, row]),
        ("a window that slides", [size, row, row, 2 * row]),
        ("batches over one another", [size, row, plane, row]),
    ];
    if !info.is_block() {
        all.extend([
            ("gaps between elements", [2 * size, 2 * row, 2 * plane, 2 * batch]),
            ("elements and rows swapped", [size * n1, size, plane, batch]),
            ("elements and planes swapped", [size * n2, row * n2, size, batch]),
        ]);
    }
    all
}

/// Bytes that make small finite numbers of every type, as scales, factors and values.
static NUMBERS: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        0x10 + ((state >> 33) % 0x34) as u8
    };
    (0..1 << 20).map(|_| next()).collect()
});

fn numbers(len: usize, seed: u32) -> Vec<u8> {
    NUMBERS[seed as usize * 64..][..len].to_vec()
}

fn fill_leaf(type_: u32, len: usize) -> Vec<u8> {
    let mut bytes = numbers(len, type_ + 100);
    match type_ {
        TYPE_F32 => bytes.chunks_exact_mut(4).enumerate().for_each(|(at, four)| {
            four.copy_from_slice(&(((at * 37) % 29) as f32 / 8.0 - 1.5).to_le_bytes());
        }),
        TYPE_I32 => bytes.chunks_exact_mut(4).enumerate().for_each(|(at, four)| {
            four.copy_from_slice(&((at * 5 % 3) as i32).to_le_bytes());
        }),
        // Rows of SET_ROWS are told apart, so that threads do not write the same.
        TYPE_I64 => bytes.chunks_exact_mut(8).enumerate().for_each(|(at, eight)| {
            eight.copy_from_slice(&((at % 3) as i64 + 1).to_le_bytes());
        }),
        _ => {}
    }
    bytes
}

/// A mapped buffer.
struct Mapped {
    blob: u32,
    buffer: BufferHandle,
}

impl Mapped {
    fn new(guest: &mut Guest, len: usize) -> Self {
        let blob = guest.blob(&vec![0; len]);
        let size = len as u64;
        let request = DeviceBufferFromPtrRequest { res_id: blob, size, max_tensor_size: size };
        Self { blob, buffer: guest.call(&request).buffer }
    }

    fn memory<T>(&self, guest: &Guest, change: impl FnOnce(&mut [u8]) -> T) -> T {
        change(world().blobs.get_mut(&(guest.ctx_id, self.blob)).unwrap())
    }
}

/// A mapped buffer whose first and last page nobody may touch.
struct Guarded {
    mapped: Mapped,
    len: usize,
}

impl Guarded {
    fn new(guest: &mut Guest, pages: usize) -> Self {
        let len = pages * PAGE;
        let mapped = Mapped::new(guest, len);
        let base = other_mapping(guest.blob_address(mapped.blob));
        for page in [base, base + len - PAGE] {
            // SAFETY: the page belongs to the plugin's mapping of the blob; whoever touches it is to end.
            let status = unsafe { libc::mprotect(page as *mut _, PAGE, libc::PROT_NONE) };
            assert_eq!(status, 0);
        }
        Self { mapped, len }
    }

    /// Where a tensor of so many bytes starts, before the last page or behind the first.
    fn place(&self, extent: u64, at_end: bool) -> u64 {
        match at_end {
            true => ((self.len - PAGE) as u64 - extent) / ALIGN * ALIGN,
            false => PAGE as u64,
        }
    }
}

/// Where the file that is mapped at one address is mapped too.
fn other_mapping(own: usize) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let parse = |line: &str| {
        let (range, rest) = line.split_once(' ').unwrap();
        let start = usize::from_str_radix(range.split_once('-').unwrap().0, 16).unwrap();
        (start, rest.split_whitespace().nth(3).unwrap().to_owned())
    };
    let all: Vec<_> = maps.lines().map(parse).collect();
    let inode = &all.iter().find(|(start, _)| *start == own).unwrap().1;
    all.iter().find(|(start, other)| other == inode && *start != own).unwrap().0
}

/// A guest with a buffer for the varied tensor and one for all others.
struct Bench {
    guest: Guest,
    varied: Guarded,
    rest: Mapped,
    /// Case, type and partner whose leaves lie in `rest`.
    filled: (&'static str, u32, u32),
}

/// Bytes of a dense tensor.
fn dense_bytes(tensor: &TensorRecord) -> usize {
    let info = TypeInfo::get(tensor.type_).unwrap();
    let wide = info.dense_strides(tensor.ne.map(i64::from)).unwrap();
    (wide[3] * u64::from(tensor.ne[3])) as usize
}

impl Bench {
    fn new(threads: &str) -> Self {
        let mut guest = Guest::start_with(&[("apir.host_threads", threads)]);
        let (varied, rest) = (Guarded::new(&mut guest, 256), Mapped::new(&mut guest, 8 << 20));
        Self { guest, varied, rest, filled: ("", 0, 0) }
    }

    /// The type and bytes of what a case gives for a layout of its varied tensor, whose memory is `spread`; none when the operation has no such scene.
    fn outcome(
        &mut self,
        case: &'static Case,
        type_: u32,
        nb: [u64; 4],
        spread: &[u8],
        at_end: bool,
    ) -> Option<Result<(u32, Vec<u8>), u32>> {
        let mut scene = Scene::new(self.rest.buffer);
        assert_eq!(scene.leaf(type_, &case.ne), VARIED);
        let buffer = self.varied.mapped.buffer;
        let data = self.varied.place(spread.len() as u64, at_end);
        let record = scene.get(VARIED);
        (record.buffer, record.data, record.nb) = (buffer, data, nb.map(|stride| stride as u32));
        (case.build)(&mut scene, type_)?;
        let node = scene.tensors.last_mut().unwrap();
        if case.writes {
            node.buffer = buffer;
        }
        let node = *node;
        let filled = std::mem::replace(&mut self.filled, (case.name, type_, WITH.with(Cell::get)));
        let filled = filled == self.filled;
        self.varied.mapped.memory(&self.guest, |memory| {
            memory[data as usize..][..spread.len()].copy_from_slice(spread);
        });
        self.rest.memory(&self.guest, |memory| {
            let leaves = scene.tensors.iter().filter(|tensor| tensor.op == 0 && tensor.id != VARIED);
            for leaf in leaves.filter(|leaf| !filled || leaf.id == node.view_src) {
                let bytes = fill_leaf(leaf.type_, dense_bytes(leaf));
                memory[leaf.data as usize..][..bytes.len()].copy_from_slice(&bytes);
            }
            if !case.writes {
                memory[node.data as usize..][..dense_bytes(&node)].fill(0xee);
            }
        });
        Some(scene.compute(&mut self.guest).map(|status| {
            assert_eq!(status, 0);
            let (mapped, at, len) = match case.writes {
                true => (&self.varied.mapped, data, spread.len()),
                false => (&self.rest, node.data, dense_bytes(&node)),
            };
            (node.type_, mapped.memory(&self.guest, |memory| memory[at as usize..][..len].to_vec()))
        }))
    }
}

/// Bytes that elements at these strides span, and what bytes each has: a row in one piece where it is one.
fn pieces(info: &TypeInfo, ne: [u64; 4], nb: [u64; 4]) -> (usize, Vec<Range<usize>>) {
    let size = u64::from(info.size);
    let (count, len) = if nb[0] == size { (1, info.row_size(ne[0]).unwrap()) } else { (ne[0], size) };
    let mut all = Vec::new();
    for i3 in 0..ne[3] {
        for i2 in 0..ne[2] {
            for i1 in 0..ne[1] {
                for i0 in 0..count {
                    let start = i0 * nb[0] + i1 * nb[1] + i2 * nb[2] + i3 * nb[3];
                    all.push(start as usize..(start + len) as usize);
                }
            }
        }
    }
    (all.iter().map(|piece| piece.end).max().unwrap(), all)
}

/// Whether two results are the same: floats as far as another order of summands goes.
fn same(type_: u32, found: &[u8], expected: &[u8]) -> bool {
    if type_ != TYPE_F32 {
        return found == expected;
    }
    let (found, expected) = (floats(found), floats(expected));
    let largest = expected.iter().fold(0.0, |most: f32, value| most.max(value.abs()));
    assert!(largest > 0.0, "a result that shows nothing");
    found.iter().zip(&expected).all(|(a, b)| a == b || (a - b).abs() <= largest * 1e-4)
}

/// Tries every layout of a case with a type; counts those that were computed and those that were refused.
fn try_layouts(bench: &mut Bench, case: &'static Case, type_: u32) -> Option<[usize; 2]> {
    let info = TypeInfo::get(type_).unwrap();
    let ne = case.ne.map(u64::from);
    let mut counts = [0; 2];
    let all = layouts(info, ne);
    let dense = all[0].1;
    for (at, (what, layout)) in all.into_iter().enumerate() {
        let (extent, pieces) = pieces(info, ne, layout);
        let spread = numbers(extent, type_);
        let gather = |bytes: &[u8]| {
            let mut all = Vec::with_capacity(bytes.len());
            pieces.iter().for_each(|piece| all.extend_from_slice(&bytes[piece.clone()]));
            all
        };
        let mut expected = None;
        for at_end in [at % 2 == 0, at % 2 == 1].into_iter().take(if at == 0 { 2 } else { 1 }) {
            let found = bench.outcome(case, type_, layout, &spread, at_end)?;
            if at == 0 && found.is_err() {
                return None;
            }
            let is_dense = (0..4).all(|dim| ne[dim] == 1 || layout[dim] == dense[dim]);
            let words = || format!("{} of {}: {what}, at the end: {at_end}", case.name, info.name);
            let Ok((_, found)) = found else {
                counts[1] += 1;
                assert!(!is_dense, "{}", words());
                continue;
            };
            assert!(is_dense || !info.is_block() || !case.dense_only, "{}", words());
            counts[0] += 1;
            let (result, expected) = match &mut expected {
                Some(expected) => expected,
                none => none.insert(bench.outcome(case, type_, dense, &gather(&spread), true)?.ok()?),
            };
            if case.writes {
                let mut gaps = vec![true; spread.len()];
                pieces.iter().for_each(|piece| gaps[piece.clone()].fill(false));
                assert!((0..spread.len()).all(|at| !gaps[at] || found[at] == spread[at]), "{}", words());
                assert!(gather(&found) == *expected, "{}", words());
            } else {
                assert!(same(*result, &found, expected), "{}", words());
            }
        }
    }
    Some(counts)
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s24_blocks_in_every_layout_give_what_dense_ones_do_or_are_refused() {
    in_child("blocks::s24_blocks_in_every_layout_give_what_dense_ones_do_or_are_refused", || {
        let mut benches = ["1", "2"].map(Bench::new);
        let types: Vec<_> = TypeInfo::all().iter().map(|info| info.number).collect();
        for case in CASES {
            let (mut computed, mut refused, mut admitted) = (0, 0, 0);
            for type_ in &types {
                let partners = if case.pairs { &types[..] } else { &[0][..] };
                for partner in partners {
                    WITH.with(|with| with.set(*partner));
                    let bench = &mut benches[(type_ + partner) as usize % 2];
                    let Some([done, not]) = try_layouts(bench, case, *type_) else { continue };
                    (computed, refused, admitted) = (computed + done, refused + not, admitted + 1);
                }
            }
            eprintln!("{}: {admitted} types, {computed} computed, {refused} refused", case.name);
            assert!(admitted > 0 && (case.dense_only || computed > 4 * admitted), "{}", case.name);
        }
        benches.iter().for_each(|bench| bench.guest.assert_alive());
    });
}
