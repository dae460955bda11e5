//! Matrix products.
#![forbid(unsafe_code)]

use crate::verify::layout::divides;
use crate::verify::node::Node;
use crate::verify::rules::{Blocks, Clause, INTS, OpRule, Read, counts, cpu_since, must, need};
use crate::verify::tensor::CheckedTensor;
use crate::verify::types::{BF16, F16, F32, I32, Q8_K, dot_type, is_readable_block};
use crate::verify::work::{Bytes, Work};
use apir_ggml::{TypeInfo, Version};

/// Scratch of a thread's tiles, and the lines that keep threads apart.
const TILES: u64 = (512 << 10) + 256;
/// Since ggml 0.26; before that panels of fewer than 16 bytes for each element of a row.
const TILED: Work = Work::each("tiles, where a is a k-quant or iq type", |n| {
    let panel = 16 * n.s(0).ne()[0] as u64;
    Some(if dot_type(n.s(0).type_()) == Some(Q8_K) { TILES.max(panel) } else { 0 })
});
/// Rows that OUT_PROD adds up at once.
const UNROLLED: i64 = 32;
/// Most bytes between two threads' counters.
const CACHE_LINE: u64 = 256;

/// Set when a is a Hadamard matrix: kernels then ignore it and transform b.
fn is_hadamard(n: &Node<'_>) -> bool {
    n.p(1) == 1
}

/// Whether CPU kernels multiply a with b as it is, or turn F32 into what they multiply with.
fn multiplies(n: &Node<'_>) -> bool {
    let b = n.s(1).type_();
    dot_type(n.s(0).type_()).is_some_and(|dot| b == F32 || b == dot)
}

/// Whether a kernel that multiplies with F32 also turns b into it.
fn widens(n: &Node<'_>) -> bool {
    dot_type(n.s(0).type_()) == Some(F32) && matches!(n.s(1).type_(), F16 | BF16)
}

/// Whether b is of a type that is turned into F32 for a.
fn is_widened(n: &Node<'_>, type_: u32) -> bool {
    n.s(1).type_() == type_ && dot_type(n.s(0).type_()) == Some(F32)
}

fn has_types(n: &Node<'_>, multiplies: bool) -> bool {
    n.t() == F32 && n.on_cpu(multiplies) && n.s(1).type_() != I32
}

/// Bytes of b as what a is multiplied with.
fn converted(n: &Node<'_>) -> Option<u64> {
    let dot = dot_type(n.s(0).type_()).and_then(TypeInfo::get)?;
    if n.s(1).type_() == dot.number {
        return Some(0);
    }
    dot.row_size(n.s(1).elements() as u64)
}

const CONVERTED: &str = "b as the type that a is multiplied with, unless it is that";

fn is_precision(value: i64) -> bool {
    matches!(value, 0 | 10 | 15 | 20 | 30 | 40)
}

const PACKED: Clause =
    must("the rows of a and b are packed", |n| n.s(0).has_packed_rows() && n.s(1).has_packed_rows());
const ROW_LENGTH: Clause =
    must("the rows of a and b have the same length", |n| n.s(0).ne()[0] == n.s(1).ne()[0]);
const PRECISION: Clause =
    must("precisions are ones that ggml has", |n| matches!(n.p(0), 0 | 10 | 15 | 20) && is_precision(n.p(3)));

pub const RULES: &[OpRule] = &[
    OpRule {
        name: "MUL_MAT",
        sources: &[need("a").blocks(Blocks::ByStrides), need("b").blocks(Blocks::Counted)],
        params: &["precision", "hint", "", "precision of b"],
        clauses: &[
            must(
                "the result is F32; on a CPU, a has a dot product, and b is F32 or the type of it; F16 or BF16 too where that is F32",
                |n| has_types(n, multiplies(n) || widens(n)),
            ),
            PACKED,
            ROW_LENGTH,
            must("a's third and fourth dimension divide b's", |n| {
                (2..4).all(|dim| divides(n.s(0).ne()[dim], n.s(1).ne()[dim]))
            }),
            must("the result has a row for each of b's, as long as a has rows", |n| {
                let (a, b) = (n.s(0).ne(), n.s(1).ne());
                n.d.ne() == [a[1], b[1], b[2], b[3]]
            }),
            PRECISION,
            must("the hint is none, or that a is a Hadamard matrix", |n| matches!(n.p(1), 0 | 1)),
            must("a Hadamard matrix is F32, square, a power of two wide, and b F32 or F16", |n| {
                let [width, height, ..] = n.s(0).ne();
                !is_hadamard(n)
                    || n.s(0).type_() == F32
                        && matches!(n.s(1).type_(), F32 | F16)
                        && width == height
                        && width.count_ones() == 1
            }),
        ],
        since: &[
            cpu_since(Version::new(0, 24, 0), "b of F16 for an a of F32", |n| is_widened(n, F16)),
            cpu_since(Version::new(0, 25, 3), "b of BF16 for an a of F32", |n| is_widened(n, BF16)),
        ],
        work: Work {
            together: Bytes {
                what: CONVERTED,
                of: |n| converted(n).unwrap_or(0).checked_next_multiple_of(64),
            },
            ..TILED
        },
        ..OpRule::BLANK
    },
    OpRule {
        name: "MUL_MAT_ID",
        sources: &[need("a").blocks(Blocks::ByStrides), need("b").blocks(Blocks::Counted), need("ids")],
        params: &["precision", "", "", "precision of b"],
        reads: &[Read::Index { source: 2, below: "the matrices of a", bound: |n| n.s(0).ne()[2] }],
        clauses: &[
            must("the result is F32; on a CPU, a has a dot product, and b is F32 or the type of it", |n| {
                has_types(n, multiplies(n))
            }),
            must("ids is I32", |n| n.s(2).type_() == I32),
            PACKED,
            ROW_LENGTH,
            must("a and b have three dimensions, ids is a matrix", |n| {
                n.s(0).is_3d() && n.s(1).is_3d() && n.s(2).is_matrix()
            }),
            must("ids has a row for each of b's matrices", |n| n.s(2).ne()[1] == n.s(1).ne()[2]),
            must("b's rows divide those that are used for a token", |n| {
                divides(n.s(1).ne()[1], n.s(2).ne()[0])
            }),
            must("the result has a row for each id, as long as a has rows", |n| {
                n.d.ne() == [n.s(0).ne()[1], n.s(2).ne()[0], n.s(2).ne()[1], 1]
            }),
            PRECISION,
        ],
        work: Work {
            together: Bytes {
                what: "b as in MUL_MAT, and for each matrix a counter and room for all ids",
                of: |n| {
                    let (experts, ids) = (n.s(0).ne()[2] as u64, n.s(2).elements() as u64);
                    let map = ids.checked_mul(8)?.checked_add(8 + CACHE_LINE)?.checked_mul(experts)?;
                    converted(n).unwrap_or(0).checked_add(map)?.checked_add(CACHE_LINE)
                },
            },
            ..TILED
        },
        ..OpRule::BLANK
    },
    OpRule {
        name: "OUT_PROD",
        sources: &[need("a").blocks(Blocks::ByStrides).or_empty(), need("b").or_empty()],
        clauses: &[
            must("a is F32, F16 or blocks that become floats, b and the result F32", |n| {
                let a = n.s(0).type_();
                (matches!(a, F32 | F16) || is_readable_block(a)) && n.s(1).type_() == F32 && n.t() == F32
            }),
            must("a has as many rows as b", |n| n.s(0).ne()[1] == n.s(1).ne()[1]),
            must("a's third and fourth dimension divide b's; on a CPU they are b's unless a is F32", |n| {
                (2..4).all(|dim| {
                    let (a, b) = (n.s(0).ne()[dim], n.s(1).ne()[dim]);
                    divides(a, b) && (a == b || n.s(0).type_() == F32 || !n.target.cpu)
                })
            }),
            must("the result has a row for each element of b's rows, as long as a's", |n| {
                let (a, b) = (n.s(0).ne(), n.s(1).ne());
                n.d.ne() == [a[0], b[0], b[2], b[3]]
            }),
            must("the rows of a are packed", |n| n.s(0).has_packed_rows()),
            // The kernel zeroes so many floats at once.
            counts("the result has fewer than 2^31 elements", |n| n.d.elements() < INTS),
            // The kernel takes so many rows of both at once, and multiplies their strides in ints.
            counts(
                "where a is F32, the first and the last of 32 rows of a and b lie less than 2^31 bytes apart",
                |n| {
                    let near = |source: &CheckedTensor| (UNROLLED - 1) * (source.nb()[1] as i64) < INTS;
                    n.s(0).type_() != F32 || n.s(0).ne()[1] < UNROLLED || near(n.s(0)) && near(n.s(1))
                },
            ),
        ],
        since: &[cpu_since(Version::new(0, 17, 0), "a of F16", |n| n.s(0).type_() == F16)],
        work: Work::each("a row of a as F32, unless it is that", |n| {
            let floats = n.s(0).type_() == F32;
            Some(if floats { 0 } else { 4 * n.s(0).ne()[0] as u64 })
        }),
        ..OpRule::BLANK
    },
];
