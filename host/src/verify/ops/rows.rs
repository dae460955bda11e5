//! Rows by index.
#![forbid(unsafe_code)]

use crate::verify::layout::divides;
use crate::verify::rules::{Blocks, Clause, OpRule, Read, ResultPlace, cpu_since, must, need};
use crate::verify::types::{F16, F32, I32, I64, is_float, is_readable_block, is_writable_block};
use crate::verify::work::{Tasks, Work};
use apir_ggml::Version;

const PACKED_A: Clause = must("the rows of a are packed", |n| n.s(0).has_packed_rows());

pub const RULES: &[OpRule] = &[
    OpRule {
        name: "GET_ROWS",
        tasks: Tasks::ONE,
        sources: &[need("a").blocks(Blocks::ByStrides), need("ids")],
        reads: &[Read::Index { source: 1, below: "the rows of a", bound: |n| n.s(0).ne()[1] }],
        clauses: &[
            must(
                "a is a float type, I32 or blocks that become floats; the result is I32 if a is, else F32",
                |n| {
                    let a = n.s(0).type_();
                    (is_float(a) || a == I32 || is_readable_block(a))
                        && n.t() == if a == I32 { I32 } else { F32 }
                },
            ),
            must("ids is I32", |n| n.s(1).type_() == I32),
            must("ids has three dimensions, of which the higher are a's", |n| {
                n.s(1).is_3d() && n.s(0).ne()[2..] == n.s(1).ne()[1..3]
            }),
            must("the result has a row of a for each id", |n| {
                let ids = n.s(1).ne();
                n.d.ne() == [n.s(0).ne()[0], ids[0], ids[1], ids[2]]
            }),
            PACKED_A,
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "GET_ROWS_BACK",
        tasks: Tasks::ONE,
        sources: &[need("a").or_empty(), need("ids").or_empty()],
        reads: &[Read::Index { source: 1, below: "the rows of the result", bound: |n| n.d.ne()[1] }],
        clauses: &[
            must("a is F32 or F16, ids I32, the result F32", |n| {
                matches!(n.s(0).type_(), F32 | F16) && n.s(1).type_() == I32 && n.t() == F32
            }),
            must("a and the result are matrices with rows of the same length", |n| {
                n.s(0).is_matrix() && n.d.is_matrix() && n.s(0).ne()[0] == n.d.ne()[0]
            }),
            must("ids is dense, and a has a row for each of them", |n| {
                n.s(1).is_dense() && n.s(0).ne()[1] >= n.s(1).elements()
            }),
            PACKED_A,
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "SET_ROWS",
        tasks: Tasks {
            what: "1; since 0.27 all threads",
            most: |n| if n.target.version < Version::new(0, 27, 0) { 1 } else { u64::MAX },
        },
        sources: &[need("a").or_empty(), need("ids").or_empty(), need("target").blocks(Blocks::ByStrides)],
        result: ResultPlace::Over(2),
        reads: &[Read::Index { source: 1, below: "the rows of the target", bound: |n| n.d.ne()[1] }],
        clauses: &[
            must(
                "a is F32 or F16, ids I64 or I32, the target a float type, I32 or blocks made of floats",
                |n| {
                    let (a, ids, target) = (n.s(0).type_(), n.s(1).type_(), n.t());
                    matches!(a, F32 | F16)
                        && matches!(ids, I64 | I32)
                        && (is_float(target) || target == I32 || is_writable_block(target))
                },
            ),
            must("a's rows are as long as the target's, and its higher dimensions are the target's", |n| {
                let (a, d) = (n.s(0).ne(), n.d.ne());
                (a[0], a[2], a[3]) == (d[0], d[2], d[3])
            }),
            must("ids has three dimensions: one element for each row of a, the others divide a's", |n| {
                let (a, ids) = (n.s(0).ne(), n.s(1).ne());
                n.s(1).is_3d() && ids[0] == a[1] && divides(ids[1], a[2]) && divides(ids[2], a[3])
            }),
            must("the rows of a and of the target are packed", |n| {
                n.s(0).has_packed_rows() && n.d.has_packed_rows()
            }),
        ],
        since: &[cpu_since(Version::new(0, 17, 0), "a of F16", |n| n.s(0).type_() == F16)],
        work: Work::each("a row of a as F32, from F16 to another type", |n| {
            let through_floats = n.s(0).type_() == F16 && n.t() != F16;
            Some(if through_floats { 4 * n.s(0).ne()[0] as u64 } else { 0 })
        }),
        ..OpRule::BLANK
    },
];
