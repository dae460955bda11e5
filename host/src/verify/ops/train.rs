//! Losses and optimizer steps.
#![forbid(unsafe_code)]

use crate::verify::rules::{Clause, OpRule, ResultPlace, must, need};
use crate::verify::types::F32;
use crate::verify::work::Work;
use apir_ggml::abi::FLAG_PARAM;

const ALL_F32: Clause = must("all are F32", |n| n.all_are(F32));
const DENSE: Clause = must("the sources are dense, and so is the result", |n| {
    n.d.is_dense() && n.sources().all(|source| source.is_dense())
});
const TRAINABLE: Clause = must("the weights are marked as a parameter", |n| n.s(0).flags() & FLAG_PARAM != 0);

pub const RULES: &[OpRule] = &[
    OpRule {
        name: "CROSS_ENTROPY_LOSS",
        sources: &[need("logits").or_empty(), need("labels").or_empty()],
        clauses: &[
            ALL_F32,
            DENSE,
            must("labels has the shape of logits", |n| n.s(1).same_shape(n.s(0))),
            must("the result is a scalar", |n| n.d.is_scalar()),
        ],
        work: Work::each("a sum and a row of logits", |n| Some(4 * (n.s(0).ne()[0] as u64 + 1))),
        ..OpRule::BLANK
    },
    OpRule {
        name: "CROSS_ENTROPY_LOSS_BACK",
        sources: &[need("gradient"), need("logits"), need("labels")],
        clauses: &[
            ALL_F32,
            DENSE,
            must("gradient is a scalar", |n| n.s(0).is_scalar()),
            must("logits, labels and the result have the same shape", |n| {
                n.d.same_shape(n.s(1)) && n.d.same_shape(n.s(2))
            }),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "OPT_STEP_ADAMW",
        sources: &[need("weights"), need("gradient"), need("m"), need("v"), need("settings")],
        result: ResultPlace::Over(0),
        writes: &[2, 3],
        clauses: &[
            ALL_F32,
            TRAINABLE,
            DENSE,
            must("gradient, m and v have the weights' shape", |n| {
                (1..4).all(|slot| n.s(slot).same_shape(n.s(0)))
            }),
            must("settings is a vector of 7", |n| n.s(4).ne() == [7, 1, 1, 1]),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "OPT_STEP_SGD",
        sources: &[need("weights"), need("gradient"), need("settings")],
        result: ResultPlace::Over(0),
        clauses: &[
            ALL_F32,
            TRAINABLE,
            DENSE,
            must("gradient has the weights' shape", |n| n.s(1).same_shape(n.s(0))),
            must("settings is a vector of 2", |n| n.s(2).ne() == [2, 1, 1, 1]),
        ],
        ..OpRule::BLANK
    },
];
