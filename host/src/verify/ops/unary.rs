//! Maps of one tensor, element by element.
#![forbid(unsafe_code)]

use crate::verify::node::Node;
use crate::verify::rules::{Clause, OpRule, ResultPlace, cpu_since, must, need};
use crate::verify::types::{BF16, F16, F32, is_float};
use crate::verify::work::Tasks;
use apir_ggml::Version;

const SHAPE_OF_A: Clause = must("the result has a's shape", |n| n.d.same_shape(n.s(0)));
const PACKED: Clause =
    must("the rows of a and of the result are packed", |n| n.s(0).has_packed_rows() && n.d.has_packed_rows());
const EVEN: Clause = must("the rows of a and of the result are packed and even", |n| {
    n.s(0).has_even_rows() && n.d.has_even_rows()
});
const DENSE: Clause = must("a is dense, and so is the result", |n| n.s(0).is_dense() && n.d.is_dense());
const F32_OR_F16: Clause = must("a is F32 or F16, and so is the result", |n| {
    matches!(n.s(0).type_(), F32 | F16) && n.t() == n.s(0).type_()
});

/// The result is of a's float type, or F32.
fn maps(n: &Node<'_>) -> bool {
    is_float(n.s(0).type_()) && (n.t() == n.s(0).type_() || n.t() == F32)
}

/// The maps as the rules number them; [`UNARY`] names them. Kernels that look at a's type only.
const GELU: i64 = 8;
const GELU_QUICK: i64 = 9;
const SILU: i64 = 10;
const GELU_ERF: i64 = 16;
/// The map with four parameters.
const XIELU: i64 = 17;

/// The maps by number, as every release so far has them. A release that numbers them otherwise is asked for their names.
pub const UNARY: &[&str] = &[
    "ABS",
    "SGN",
    "NEG",
    "STEP",
    "TANH",
    "ELU",
    "RELU",
    "SIGMOID",
    "GELU",
    "GELU_QUICK",
    "SILU",
    "HARDSWISH",
    "HARDSIGMOID",
    "EXP",
    "EXPM1",
    "SOFTPLUS",
    "GELU_ERF",
    "XIELU",
    "FLOOR",
    "CEIL",
    "ROUND",
    "TRUNC",
];

const MAP: OpRule = OpRule {
    name: "",
    tasks: Tasks::ONE,
    sources: &[need("a")],
    result: ResultPlace::InPlace,
    clauses: &[must("a is a float type, the result of the same or F32", maps), SHAPE_OF_A, PACKED],
    ..OpRule::BLANK
};

pub const RULES: &[OpRule] = &[
    OpRule { name: "SQR", ..MAP },
    OpRule { name: "SQRT", ..MAP },
    OpRule { name: "LOG", ..MAP },
    OpRule { name: "SIN", ..MAP },
    OpRule { name: "COS", ..MAP },
    OpRule {
        name: "UNARY",
        tasks: Tasks {
            what: "1; GELU, its variants, SILU and XIELU all threads",
            most: |n| {
                if matches!(n.variant(), GELU | GELU_QUICK | SILU | GELU_ERF | XIELU) { u64::MAX } else { 1 }
            },
        },
        params: &["map", "alpha n", "alpha p", "beta", "eps"],
        clauses: &[
            must("map is 0 to 21", |n| (0..=21).contains(&n.variant())),
            must("only XIELU has more parameters", |n| {
                n.variant() == XIELU || n.d.op_params()[1..] == [0; 15]
            }),
            must("a is a float type, the result of the same or F32", maps),
            must("GELU, its variants and SILU keep a's type", |n| {
                !matches!(n.variant(), GELU | GELU_QUICK | SILU | GELU_ERF) || n.t() == n.s(0).type_()
            }),
            SHAPE_OF_A,
            PACKED,
            must("XIELU's rows are even", |n| {
                n.variant() != XIELU || n.s(0).has_even_rows() && n.d.has_even_rows()
            }),
        ],
        since: &[cpu_since(Version::new(0, 25, 3), "BF16 in GELU, its variants or SILU", |n| {
            n.t() == BF16 && matches!(n.variant(), GELU | GELU_QUICK | SILU | GELU_ERF)
        })],
        ..MAP
    },
    OpRule { name: "LEAKY_RELU", params: &["slope"], clauses: &[F32_OR_F16, SHAPE_OF_A, EVEN], ..MAP },
    OpRule { name: "CLAMP", params: &["min", "max"], clauses: &[F32_OR_F16, SHAPE_OF_A, EVEN], ..MAP },
    OpRule {
        name: "SCALE",
        params: &["scale", "bias"],
        clauses: &[
            must("a is F32 or BF16, and so is the result", |n| {
                let a = n.s(0).type_();
                n.t() == a && (a == F32 || a == BF16 || a == F16 && !n.target.cpu)
            }),
            SHAPE_OF_A,
            DENSE,
        ],
        since: &[cpu_since(Version::new(0, 25, 3), "BF16", |n| n.t() == BF16)],
        ..MAP
    },
];
