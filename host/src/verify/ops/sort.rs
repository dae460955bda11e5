//! Sorting rows. The results are indices below the length of a row, whatever the values.
#![forbid(unsafe_code)]

use crate::verify::rules::{Clause, OpRule, Read, must, need};
use crate::verify::types::{F32, I32};
use crate::verify::work::Work;

const TYPES: Clause = must("a is F32, the result I32", |n| n.s(0).type_() == F32 && n.t() == I32);
const DENSE: Clause = must("a is dense", |n| n.s(0).is_dense());

pub const RULES: &[OpRule] = &[
    OpRule {
        name: "ARGSORT",
        sources: &[need("a")],
        params: &["order"],
        reads: &[Read::Steady { source: 0 }],
        // It numbers the elements there and sorts the numbers by what they name.
        reads_result: true,
        clauses: &[
            TYPES,
            DENSE,
            must("the result has a's shape", |n| n.d.same_shape(n.s(0))),
            must("the order is rising or falling", |n| matches!(n.p(0), 0 | 1)),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "TOP_K",
        sources: &[need("a")],
        reads: &[Read::Steady { source: 0 }],
        clauses: &[
            TYPES,
            DENSE,
            must("the result has one to all elements of each row of a", |n| {
                n.d.ne()[0] >= 1 && n.d.ne()[0] <= n.s(0).ne()[0] && n.d.ne()[1..] == n.s(0).ne()[1..]
            }),
        ],
        work: Work::each("an index for each element of a row", |n| Some(4 * n.s(0).ne()[0] as u64)),
        ..OpRule::BLANK
    },
];
