//! Windows of an image, and positions relative to each other. Kernels check nothing and count elements, not strides.
#![forbid(unsafe_code)]

use crate::verify::rules::{Clause, OpRule, ResultPlace, must, need};
use crate::verify::types::{BF16, F16, F32};
use crate::verify::work::Tasks;

const ALL_F32: Clause = must("all are F32", |n| n.all_are(F32));
const DENSE: Clause = must("the sources are dense, and so is the result", |n| {
    n.d.is_dense() && n.sources().all(|source| source.is_dense())
});

/// How many windows of a width cover a length.
fn windows(length: i64, width: i64) -> i64 {
    (length + width - 1) / width.max(1)
}

pub const RULES: &[OpRule] = &[
    OpRule {
        name: "WIN_PART",
        tasks: Tasks::ONE,
        sources: &[need("a")],
        params: &["windows 0", "windows 1", "width"],
        clauses: &[
            ALL_F32,
            DENSE,
            must("windows are one wide or more and cover a", |n| {
                let [_, across, down, images] = n.s(0).ne();
                n.p(2) >= 1
                    && images == 1
                    && n.p(0) == windows(across, n.p(2))
                    && n.p(1) == windows(down, n.p(2))
            }),
            must("the result has the windows", |n| {
                n.d.ne() == [n.s(0).ne()[0], n.p(2), n.p(2), n.p(0) * n.p(1)]
            }),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "WIN_UNPART",
        tasks: Tasks::ONE,
        sources: &[need("a")],
        params: &["width"],
        clauses: &[
            ALL_F32,
            DENSE,
            must("a's windows are one wide or more and cover the result", |n| {
                let [channels, across, down, images] = n.d.ne();
                let count = windows(across, n.p(0)) * windows(down, n.p(0));
                n.p(0) >= 1 && images == 1 && n.s(0).ne() == [channels, n.p(0), n.p(0), count]
            }),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "GET_REL_POS",
        tasks: Tasks::ONE,
        sources: &[need("a")],
        clauses: &[
            must("a is F16 or BF16, and so is the result", |n| {
                matches!(n.s(0).type_(), F16 | BF16) && matches!(n.t(), F16 | BF16)
            }),
            DENSE,
            must("a is a matrix of one row for each distance in a square of the result", |n| {
                let [channels, across, down, count] = n.d.ne();
                across == down && count == 1 && n.s(0).ne() == [channels, 2 * across - 1, 1, 1]
            }),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "ADD_REL_POS",
        sources: &[need("a"), need("across"), need("down")],
        params: &["in place"],
        result: ResultPlace::OverIf(0),
        clauses: &[
            ALL_F32,
            DENSE,
            must("the result has a's shape", |n| n.d.same_shape(n.s(0))),
            must("across and down have the same shape", |n| n.s(1).same_shape(n.s(2))),
            must("a's rows are squares, and its rows and matrices are those of across", |n| {
                let (a, across) = (n.s(0).ne(), n.s(1).ne());
                a[0] == across[0] * across[0]
                    && a[1] == across[1] * across[2]
                    && a[2] == across[3]
                    && a[3] == 1
            }),
        ],
        ..OpRule::BLANK
    },
];
