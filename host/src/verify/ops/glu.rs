//! One half of a tensor, or one of two, gates the other.
#![forbid(unsafe_code)]

use crate::verify::rules::{OpRule, cpu_since, may, must, need, since};
use crate::verify::types::{BF16, F16, F32, is_float};
use apir_ggml::Version;

/// With alpha and a limit.
const SWIGLU_OAI: i64 = 3;
/// With a limit.
const SWIGLU_CLAMP: i64 = 6;

/// The units by number, as every release so far has them.
pub const GLU: &[&str] =
    &["REGLU", "GEGLU", "SWIGLU", "SWIGLU_OAI", "GEGLU_ERF", "GEGLU_QUICK", "SWIGLU_CLAMP"];

pub const RULES: &[OpRule] = &[OpRule {
    name: "GLU",
    sources: &[need("a"), may("gate")],
    params: &["unit", "swapped", "alpha", "limit"],
    clauses: &[
        must("the unit is 0 to 6", |n| (0..=SWIGLU_CLAMP).contains(&n.variant())),
        must("swapped is 0 or 1", |n| matches!(n.p(1), 0 | 1)),
        must("only SWIGLU_OAI and SWIGLU_CLAMP have a limit, the first also alpha", |n| match n.variant() {
            SWIGLU_OAI => true,
            SWIGLU_CLAMP => n.p(2) == 0,
            _ => n.p(2) == 0 && n.p(3) == 0,
        }),
        must("the limit is not negative", |n| n.f(3) >= 0.0),
        must("a is a float type that the unit knows, and so are gate and result", |n| {
            let a = n.s(0).type_();
            let known = match n.variant() {
                SWIGLU_OAI => a == F32,
                SWIGLU_CLAMP => a == F32 || a == F16,
                _ => is_float(a),
            };
            n.on_cpu(known) && is_float(a) && n.t() == a && n.fits(1, |gate| gate.type_() == a)
        }),
        must("gate has a's shape", |n| n.fits(1, |gate| gate.same_shape(n.s(0)))),
        must("the result's rows are as long as a's, without a gate half as long", |n| {
            let a = n.s(0).ne()[0];
            n.d.ne()[0] == if n.lacks(1) { a / 2 } else { a }
        }),
        must("the result has as many rows as a", |n| n.d.ne()[1..] == n.s(0).ne()[1..]),
        must("the rows of a and gate are packed and even", |n| {
            n.s(0).has_even_rows() && n.fits(1, |gate| gate.has_even_rows())
        }),
    ],
    since: &[
        since(Version::new(0, 24, 0), "SWIGLU_CLAMP", |n| n.variant() == SWIGLU_CLAMP),
        cpu_since(Version::new(0, 25, 3), "BF16", |n| n.t() == BF16),
    ],
    ..OpRule::BLANK
}];
