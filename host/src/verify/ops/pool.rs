//! Pooling. Kernels step through source and result plane by plane until the bytes end.
#![forbid(unsafe_code)]

use crate::verify::node::Node;
use crate::verify::rules::{Clause, OpRule, must, need};
use crate::verify::types::{F16, F32};
use crate::verify::work::Tasks;

/// Pools stay far from the ends of a C int.
const MAX_STEP: i64 = 1 << 20;

/// Places of a pool along one dimension.
fn places(input: i64, size: i64, stride: i64, pad: i64) -> i64 {
    (input + 2 * pad - size).div_euclid(stride.max(1)) + 1
}

/// A pool's size, stride and pad along a dimension of `input` elements.
fn fits(input: i64, size: i64, stride: i64, pad: i64) -> bool {
    (0..=MAX_STEP).contains(&pad)
        && (1..=MAX_STEP).contains(&stride)
        && size >= 1
        && size <= (input + 2 * pad).min(MAX_STEP)
}

/// Whether words 1 to 6 pool an image of these dimensions.
fn fits_2d(n: &Node<'_>, image: [i64; 4]) -> bool {
    (0..2).all(|dim| fits(image[dim], n.p(1 + dim), n.p(3 + dim), n.p(5 + dim)))
}

/// What pooling makes of an image.
fn pooled(n: &Node<'_>, image: [i64; 4]) -> [i64; 4] {
    let out = |dim: usize| places(image[dim], n.p(1 + dim), n.p(3 + dim), n.p(5 + dim));
    [out(0), out(1), image[2], image[3]]
}

const MODE: Clause = must("the pool takes the largest or the mean", |n| matches!(n.p(0), 0 | 1));
const DENSE: Clause = must("the sources are dense", |n| n.sources().all(|source| source.is_dense()));
const PARAMS_2D: &[&str] = &["mode", "size 0", "size 1", "stride 0", "stride 1", "pad 0", "pad 1"];

pub const RULES: &[OpRule] = &[
    OpRule {
        name: "POOL_1D",
        tasks: Tasks::ONE,
        sources: &[need("a")],
        params: &["mode", "size", "stride", "pad"],
        clauses: &[
            must("a is F32 or F16, the result F32", |n| matches!(n.s(0).type_(), F32 | F16) && n.t() == F32),
            MODE,
            DENSE,
            must("the pool is no larger than a row with its pads, strides are 1 to 2^20", |n| {
                fits(n.s(0).ne()[0], n.p(1), n.p(2), n.p(3))
            }),
            must("the result has the pool's places in each row of a", |n| {
                let [length, ne1, ne2, ne3] = n.s(0).ne();
                n.d.ne() == [places(length, n.p(1), n.p(2), n.p(3)), ne1, ne2, ne3]
            }),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "POOL_2D",
        tasks: Tasks::ONE,
        sources: &[need("a")],
        params: PARAMS_2D,
        clauses: &[
            must("a is F32 or F16, the result F32", |n| matches!(n.s(0).type_(), F32 | F16) && n.t() == F32),
            MODE,
            DENSE,
            must("the pool is no larger than a with its pads, strides are 1 to 2^20", |n| {
                fits_2d(n, n.s(0).ne())
            }),
            must("the result has the pool's places in a", |n| n.d.ne() == pooled(n, n.s(0).ne())),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "POOL_2D_BACK",
        tasks: Tasks::ONE,
        sources: &[need("gradient"), need("input")],
        params: PARAMS_2D,
        clauses: &[
            must("gradient is F32, input F32 or F16, and the result as input", |n| {
                n.s(0).type_() == F32 && matches!(n.s(1).type_(), F32 | F16) && n.t() == n.s(1).type_()
            }),
            MODE,
            DENSE,
            must("the result has the input's shape", |n| n.d.same_shape(n.s(1))),
            must("the pool is no larger than the input with its pads, strides are 1 to 2^20", |n| {
                fits_2d(n, n.s(1).ne())
            }),
            must("gradient has the pool's places in the input", |n| n.s(0).ne() == pooled(n, n.s(1).ne())),
        ],
        ..OpRule::BLANK
    },
];
