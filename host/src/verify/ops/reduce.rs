//! Sums, means, the largest, counts.
#![forbid(unsafe_code)]

use crate::verify::rules::{Clause, OpRule, counts, must, need};
use crate::verify::types::{F32, I32, I64, is_float};
use crate::verify::work::{Tasks, Work};

const ALL_F32: Clause = must("all are F32", |n| n.all_are(F32));
const PACKED: Clause = must("the rows of a are packed", |n| n.s(0).has_packed_rows());
const ROW_SUMS: Clause = must("the result has one element for each row of a", |n| {
    n.d.ne()[0] == 1 && n.d.ne()[1..] == n.s(0).ne()[1..]
});

pub const RULES: &[OpRule] = &[
    OpRule {
        name: "SUM",
        tasks: Tasks::ONE,
        sources: &[need("a").or_empty()],
        clauses: &[
            must("a is a float type, and so is the result", |n| {
                is_float(n.s(0).type_()) && n.t() == n.s(0).type_()
            }),
            must("the result is a scalar", |n| n.d.is_scalar()),
            // The CPU kernel reads rows as if they were packed, and so stays inside.
            must("elsewhere than on a CPU the rows of a are packed", |n| {
                n.target.cpu || n.s(0).has_packed_rows()
            }),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "SUM_ROWS",
        tasks: Tasks::ONE,
        sources: &[need("a").or_empty()],
        clauses: &[ALL_F32, ROW_SUMS, PACKED],
        ..OpRule::BLANK
    },
    OpRule {
        name: "MEAN",
        tasks: Tasks::ONE,
        sources: &[need("a").or_empty()],
        clauses: &[ALL_F32, ROW_SUMS, PACKED],
        ..OpRule::BLANK
    },
    OpRule {
        name: "ARGMAX",
        tasks: Tasks::ONE,
        sources: &[need("a").or_empty()],
        clauses: &[
            must("a is F32, the result I32", |n| n.s(0).type_() == F32 && n.t() == I32),
            must("a is a matrix", |n| n.s(0).is_matrix()),
            must("the result is a vector with one element for each row of a", |n| {
                n.d.is_vector() && n.d.ne()[0] == n.s(0).ne()[1]
            }),
            PACKED,
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "COUNT_EQUAL",
        sources: &[need("a").or_empty(), need("b").or_empty()],
        clauses: &[
            must("a and b are I32, the result I64", |n| {
                [n.s(0).type_(), n.s(1).type_(), n.t()] == [I32, I32, I64]
            }),
            must("b has a's shape", |n| n.s(1).same_shape(n.s(0))),
            must("the result is a scalar", |n| n.d.is_scalar()),
            // The kernel takes rows of further dimensions for rows of the first.
            must("a is a matrix", |n| n.s(0).is_matrix()),
            counts("there are fewer than 2^30 elements", |n| n.s(0).elements() < 1 << 30),
        ],
        work: Work::each("a count", |_| Some(8)),
        ..OpRule::BLANK
    },
];
