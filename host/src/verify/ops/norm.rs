//! Norms of rows and groups, soft max.
#![forbid(unsafe_code)]

use crate::verify::layout::divides;
use crate::verify::rules::{Clause, INTS, OpRule, ResultPlace, Since, counts, cpu_since, may, must, need};
use crate::verify::types::{F16, F32};
use crate::verify::work::{Shares, Tasks, Work};
use apir_ggml::Version;

const ALL_F32: Clause = must("all are F32", |n| n.all_are(F32));
const SHAPE_OF_A: Clause = must("the result has a's shape", |n| n.d.same_shape(n.s(0)));
const SHAPE_OF_B: Clause = must("b has a's shape", |n| n.s(1).same_shape(n.s(0)));
const PACKED: Clause = must("the rows of the sources and of the result are packed", |n| {
    n.d.has_packed_rows() && n.sources().all(|source| source.has_packed_rows())
});
const DENSE: Clause = must("the sources are dense, and so is the result", |n| {
    n.d.is_dense() && n.sources().all(|source| source.is_dense())
});
const EPS: Clause = must("eps is finite and not negative", |n| fit_eps(n.f(0)));

fn fit_eps(eps: f32) -> bool {
    eps.is_finite() && eps >= 0.0
}

const ROW_NORM: OpRule = OpRule {
    name: "",
    sources: &[need("a")],
    params: &["eps"],
    result: ResultPlace::InPlace,
    clauses: &[
        ALL_F32,
        EPS,
        SHAPE_OF_A,
        must("the rows of the result are packed", |n| n.d.has_packed_rows()),
    ],
    ..OpRule::BLANK
};

const ANY_ROWS: &[Since] =
    &[cpu_since(Version::new(0, 15, 3), "an a whose rows are not packed", |n| !n.s(0).has_packed_rows())];

pub const RULES: &[OpRule] = &[
    OpRule { name: "NORM", since: ANY_ROWS, ..ROW_NORM },
    OpRule { name: "L2_NORM", since: ANY_ROWS, ..ROW_NORM },
    OpRule { name: "RMS_NORM", clauses: &[ALL_F32, EPS, SHAPE_OF_A, PACKED], ..ROW_NORM },
    OpRule {
        name: "RMS_NORM_BACK",
        sources: &[need("gradient"), need("b")],
        clauses: &[ALL_F32, EPS, SHAPE_OF_A, SHAPE_OF_B, PACKED],
        ..ROW_NORM
    },
    OpRule {
        name: "GROUP_NORM",
        params: &["groups", "eps"],
        clauses: &[
            ALL_F32,
            must("eps is finite and not negative", |n| fit_eps(n.f(1))),
            SHAPE_OF_A,
            PACKED,
            must("there is a group or more, and no more than channels", |n| {
                n.d.is_empty() || (1..=n.s(0).ne()[2]).contains(&n.p(0))
            }),
            counts("groups times their channels, rounded up, are below 2^31", |n| {
                let groups = n.p(0).max(1);
                groups * ((n.s(0).ne()[2] + groups - 1) / groups) < INTS
            }),
        ],
        ..ROW_NORM
    },
    OpRule {
        name: "SILU_BACK",
        sources: &[need("gradient"), need("b")],
        result: ResultPlace::InPlace,
        clauses: &[
            must("all are F32, or all F16", |n| n.all_are(F32) || n.all_are(F16)),
            SHAPE_OF_A,
            SHAPE_OF_B,
            DENSE,
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "SOFT_MAX",
        sources: &[need("a"), may("mask"), may("sinks")],
        params: &["scale", "max bias"],
        result: ResultPlace::InPlace,
        clauses: &[
            must("a, sinks and the result are F32, mask F16 or F32", |n| {
                n.t() == F32
                    && n.s(0).type_() == F32
                    && n.fits(1, |mask| matches!(mask.type_(), F16 | F32))
                    && n.fits(2, |sinks| sinks.type_() == F32)
            }),
            // The scratch row is as long as the result's and filled with one of a's.
            SHAPE_OF_A,
            must("a, mask and the result are dense", |n| {
                n.s(0).is_dense() && n.d.is_dense() && n.fits(1, |mask| mask.is_dense())
            }),
            must("mask has rows as long as a's, and no fewer", |n| {
                n.fits(1, |mask| mask.ne()[0] == n.s(0).ne()[0] && mask.ne()[1] >= n.s(0).ne()[1])
            }),
            must("mask's third and fourth dimension divide a's", |n| {
                n.fits(1, |mask| (2..4).all(|dim| divides(mask.ne()[dim], n.s(0).ne()[dim])))
            }),
            must("sinks is a vector with an element for each of a's third dimension", |n| {
                n.fits(2, |sinks| {
                    sinks.is_vector() && sinks.ne()[0] == n.s(0).ne()[2] && sinks.has_packed_rows()
                })
            }),
            must("a bias needs a mask", |n| {
                let bias = n.f(1);
                bias == 0.0 || bias > 0.0 && bias.is_finite() && !n.lacks(1)
            }),
        ],
        tasks: Tasks::ROWS,
        work: Work {
            shares: Shares::Busy,
            ..Work::each("a row, if it has one to compute", |n| Some(4 * n.d.ne()[0] as u64))
        },
        ..OpRule::BLANK
    },
    OpRule {
        name: "SOFT_MAX_BACK",
        sources: &[need("gradient"), need("b")],
        params: &["scale", "max bias"],
        result: ResultPlace::InPlace,
        clauses: &[
            ALL_F32,
            SHAPE_OF_A,
            SHAPE_OF_B,
            DENSE,
            must("there is no bias on a CPU", |n| n.on_cpu(n.f(1) == 0.0)),
        ],
        ..OpRule::BLANK
    },
];
