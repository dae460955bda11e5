//! Values by position: fills, triangles, diagonals, masks, running sums.
#![forbid(unsafe_code)]

use crate::verify::node::Node;
use crate::verify::rules::{Clause, OpRule, ResultPlace, cpu_since, must, need};
use crate::verify::types::{F16, F32};
use crate::verify::work::Tasks;
use apir_ggml::Version;

const SHAPE_OF_A: Clause = must("the result has a's shape", |n| n.d.same_shape(n.s(0)));
const DENSE: Clause = must("a is dense, and so is the result", |n| n.s(0).is_dense() && n.d.is_dense());
const ALL_F32: Clause = must("all are F32", |n| n.all_are(F32));

/// One float type for all; on a CPU it is F32.
fn one_float(n: &Node<'_>) -> bool {
    n.all_are(F32) || !n.target.cpu && n.all_are(F16)
}

const MASK: OpRule = OpRule {
    name: "",
    sources: &[need("a")],
    params: &["n_past"],
    result: ResultPlace::InPlace,
    clauses: &[ALL_F32, SHAPE_OF_A, DENSE, must("n_past is not negative", |n| n.p(0) >= 0)],
    ..OpRule::BLANK
};

pub const RULES: &[OpRule] = &[
    OpRule {
        name: "FILL",
        sources: &[need("a")],
        params: &["value"],
        result: ResultPlace::InPlace,
        clauses: &[
            must("a is F32 or F16, and so is the result", |n| n.all_are(F32) || n.all_are(F16)),
            SHAPE_OF_A,
            DENSE,
        ],
        // Earlier kernels write floats all the same, past the end.
        since: &[cpu_since(Version::new(0, 13, 1), "F16", |n| n.t() == F16)],
        ..OpRule::BLANK
    },
    OpRule {
        name: "TRI",
        sources: &[need("a")],
        params: &["which triangle"],
        clauses: &[
            must("all are F32, or F16 elsewhere than on a CPU", one_float),
            must("the triangle is 0 to 3", |n| (0..=3).contains(&n.p(0))),
            SHAPE_OF_A,
            must("a is square", |n| n.s(0).ne()[0] == n.s(0).ne()[1]),
            DENSE,
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "DIAG",
        tasks: Tasks::ONE,
        sources: &[need("a")],
        clauses: &[
            ALL_F32,
            must("a has one row in each matrix", |n| n.s(0).ne()[1] == 1),
            must("the result's matrices are square, as long as a's rows", |n| {
                let [length, _, ne2, ne3] = n.s(0).ne();
                n.d.ne() == [length, length, ne2, ne3]
            }),
            must("the rows of a are packed", |n| n.s(0).has_packed_rows()),
        ],
        ..OpRule::BLANK
    },
    OpRule { name: "DIAG_MASK_INF", ..MASK },
    OpRule { name: "DIAG_MASK_ZERO", ..MASK },
    OpRule {
        name: "CUMSUM",
        sources: &[need("a")],
        clauses: &[ALL_F32, SHAPE_OF_A, must("the rows of a are packed", |n| n.s(0).has_packed_rows())],
        ..OpRule::BLANK
    },
];
