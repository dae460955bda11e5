//! Repeating, joining, padding, resizing, and tensors made of parameters.
#![forbid(unsafe_code)]

use crate::verify::rules::{Blocks, Clause, INTS, OpRule, counts, cpu_since, must, need};
use crate::verify::types::{BF16, F16, F32, I8, I16, I32};
use crate::verify::work::Tasks;
use apir_ggml::Version;

const ALL_F32: Clause = must("all are F32", |n| n.all_are(F32));
const PACKED: Clause = must("the rows of a are packed", |n| n.s(0).has_packed_rows());

/// The kernel zeroes so many floats at once.
const RESULT_COUNTS: Clause = counts("the result has fewer than 2^31 elements", |n| n.d.elements() < INTS);

/// Most elements of a dimension that may be resized: positions are computed in F32.
const MAX_RESIZED: i64 = 1 << 22;
/// Most steps of a range computed in F32.
const MAX_STEPS: f32 = (1 << 24) as f32;
/// Pads stay far from the ends of a C int.
const MAX_PAD: i64 = 1 << 30;

pub const RULES: &[OpRule] = &[
    OpRule {
        name: "REPEAT",
        tasks: Tasks::ONE,
        sources: &[need("a")],
        clauses: &[
            must("a is F32, I32, F16, BF16 or I16, and so is the result", |n| {
                let a = n.s(0).type_();
                n.t() == a && (matches!(a, F32 | I32 | F16 | BF16 | I16) || !n.target.cpu)
            }),
            must("a repeats to the result's shape", |n| n.s(0).repeats_into(n.d)),
            PACKED,
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "REPEAT_BACK",
        tasks: Tasks::ONE,
        sources: &[need("a").or_empty()],
        clauses: &[
            ALL_F32,
            must("the result repeats to a's shape", |n| n.d.repeats_into(n.s(0))),
            PACKED,
            RESULT_COUNTS,
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "CONCAT",
        sources: &[
            need("a").or_empty().blocks(Blocks::ByStrides),
            need("b").or_empty().blocks(Blocks::ByStrides),
        ],
        params: &["dim"],
        clauses: &[
            must("all have one type", |n| n.all_are(n.t())),
            must("dim is 0 to 3", |n| (0..=3).contains(&n.p(0))),
            must("along dim the result is as long as a and b together, elsewhere as each of them", |n| {
                let (a, b, d) = (n.s(0).ne(), n.s(1).ne(), n.d.ne());
                (0..4).all(|dim| {
                    if dim as i64 == n.p(0) {
                        d[dim] == a[dim] + b[dim]
                    } else {
                        a[dim] == b[dim] && a[dim] == d[dim]
                    }
                })
            }),
            must("rows of other types than F32, I32, F16, BF16, I16, I8 are packed", |n| {
                matches!(n.t(), F32 | I32 | F16 | BF16 | I16 | I8)
                    || n.sources().all(|source| source.has_packed_rows())
            }),
        ],
        since: &[cpu_since(Version::new(0, 17, 0), "blocks", |n| n.d.info().is_block())],
        ..OpRule::BLANK
    },
    OpRule {
        name: "PAD",
        sources: &[need("a").or_empty()],
        params: &[
            "left 0", "right 0", "left 1", "right 1", "left 2", "right 2", "left 3", "right 3", "circular",
        ],
        clauses: &[
            must("all have one type, on a CPU F32", |n| n.all_are(n.t()) && n.on_cpu(n.t() == F32)),
            must("pads are within 2^30", |n| (0..8).all(|word| n.p(word).abs() <= MAX_PAD)),
            must("each dimension of the result is a's with its pads", |n| {
                (0..4).all(|dim| n.d.ne()[dim] == n.s(0).ne()[dim] + n.p(2 * dim) + n.p(2 * dim + 1))
            }),
            must("circular is 0 or 1", |n| matches!(n.p(8), 0 | 1)),
            must("circular pads are 0 to a's dimension", |n| {
                n.p(8) == 0 || (0..8).all(|word| (0..=n.s(0).ne()[word / 2]).contains(&n.p(word)))
            }),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "PAD_REFLECT_1D",
        sources: &[need("a")],
        params: &["left", "right"],
        clauses: &[
            ALL_F32,
            must("a is dense", |n| n.s(0).is_dense()),
            must("pads are 0 to below a row of a", |n| {
                (0..2).all(|word| (0..n.s(0).ne()[0]).contains(&n.p(word)))
            }),
            must("the rows of the result are a's with their pads", |n| {
                n.d.ne()[0] == n.s(0).ne()[0] + n.p(0) + n.p(1) && n.d.ne()[1..] == n.s(0).ne()[1..]
            }),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "ROLL",
        sources: &[need("a")],
        params: &["shift 0", "shift 1", "shift 2", "shift 3"],
        clauses: &[
            ALL_F32,
            PACKED,
            must("the result has a's shape", |n| n.d.same_shape(n.s(0))),
            must("each shift is smaller than its dimension", |n| {
                n.d.is_empty() || (0..4).all(|dim| n.p(dim).abs() < n.s(0).ne()[dim])
            }),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "UPSCALE",
        sources: &[need("a")],
        params: &["mode"],
        clauses: &[
            must("all have one type, on a CPU F32", |n| n.all_are(n.t()) && n.on_cpu(n.t() == F32)),
            must(
                "the mode is nearest, bilinear or bicubic, with corners aligned or, bilinear, antialiased",
                |n| matches!(n.p(0), 0 | 1 | 2 | 0x100 | 0x101 | 0x102 | 0x201 | 0x301),
            ),
            must("dimensions are at most 2^22", |n| {
                n.d.ne().iter().chain(&n.s(0).ne()).all(|elements| *elements <= MAX_RESIZED)
            }),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "ARANGE",
        params: &["start", "stop", "step"],
        clauses: &[
            ALL_F32,
            must("the result is a vector", |n| n.d.is_vector()),
            must("start, stop and step are finite, step not 0", |n| {
                (0..3).all(|word| n.f(word).is_finite()) && n.f(2) != 0.0
            }),
            must("the result has an element for each step, fewer than 2^24", |n| {
                let steps = ((n.f(1) - n.f(0)) / n.f(2)).ceil();
                (0.0..MAX_STEPS).contains(&steps) && steps as i64 == n.d.ne()[0]
            }),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "TIMESTEP_EMBEDDING",
        sources: &[need("timesteps")],
        params: &["dim", "max period"],
        clauses: &[
            ALL_F32,
            must("timesteps is a vector with packed elements", |n| {
                n.s(0).is_vector() && n.s(0).has_packed_rows()
            }),
            must("the result has dim elements, 1 or more, for each timestep", |n| {
                n.p(0) >= 1 && n.d.ne() == [n.p(0), n.s(0).ne()[0], 1, 1]
            }),
            must("the period is 1 or more", |n| n.p(1) >= 1),
        ],
        ..OpRule::BLANK
    },
];
