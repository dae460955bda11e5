//! Sums and products of two tensors.
#![forbid(unsafe_code)]

use crate::verify::layout::lie_apart;
use crate::verify::node::Node;
use crate::verify::rules::{Blocks, Clause, OpRule, Read, ResultPlace, must, need};
use crate::verify::types::{BF16, F16, F32, I32, is_float, is_writable_block};
use crate::verify::work::{Tasks, Work};

const SHAPE_OF_A: Clause = must("the result has a's shape", |n| n.d.same_shape(n.s(0)));
const PACKED: Clause =
    must("the rows of a and of the result are packed", |n| n.s(0).has_packed_rows() && n.d.has_packed_rows());
const REPEATS: Clause = must("b repeats to a's shape", |n| n.s(1).repeats_into(n.s(0)));
const ALL_F32: Clause = must("all are F32", |n| n.all_are(F32));

/// Types of a, b and the result that the float kernels know; others than CPUs also mix F32 and F16 at will.
fn float_types(n: &Node<'_>) -> bool {
    let types = (n.s(0).type_(), n.s(1).type_(), n.t());
    match types {
        (F32, F32, F32) | (F16, F16 | F32, F16) | (BF16, BF16 | F32, BF16) | (F16 | BF16, F32, F32) => true,
        (a, b, d) => !n.target.cpu && is_float(a) && is_float(b) && is_float(d),
    }
}

/// A sum of blocks and floats; what has no way back to blocks is written as if it were floats.
fn block_sum(n: &Node<'_>) -> bool {
    let (a, b, d) = (n.s(0), n.s(1), n.d);
    is_writable_block(a.type_())
        && b.type_() == F32
        && (is_float(d.type_()) || is_writable_block(d.type_()))
        && a.same_shape(b)
        && b.has_packed_rows()
        && d.has_rising_strides()
}

const BLOCK_WORK: Work = Work::each("a row of a as F32, if it is made of blocks", |n| {
    Some(if n.s(0).info().is_block() { 4 * n.s(0).ne()[0] as u64 } else { 0 })
});

const BINARY: OpRule = OpRule {
    name: "",
    sources: &[need("a"), need("b")],
    result: ResultPlace::InPlace,
    clauses: &[
        must("the types of a, b and the result go together", float_types),
        SHAPE_OF_A,
        REPEATS,
        PACKED,
    ],
    ..OpRule::BLANK
};

/// Where SET and ACC write: b's elements at p0, p1, p2 bytes for its higher dimensions, from byte p3 on.
const STRIDES: &[&str] = &["nb1", "nb2", "nb3", "offset", "in place"];
const WHOLE_STRIDES: Clause = must("strides are multiples of 4 from 4 on, the offset from 0 on", |n| {
    (0..3).all(|word| n.p(word) >= 4 && n.p(word) % 4 == 0) && n.p(3) >= 0 && n.p(3) % 4 == 0
});
const INSIDE: Clause = must("the last element of b ends inside the result", |n| {
    // The kernel looks at this also for a b without elements.
    let step = |dim: usize, stride: i64| i128::from((n.s(1).ne()[dim] - 1).max(0)) * i128::from(stride);
    let steps = step(0, 4) + step(1, n.p(0)) + step(2, n.p(1)) + step(3, n.p(2));
    n.d.is_empty() || i128::from(n.p(3)) + steps + 4 <= i128::from(n.d.extent())
});
const APART: Clause = must("b's elements share no bytes of the result", |n| {
    // Ahead of this, strides were found to be from 4 on, and their reach inside the result.
    let strides = [4, n.p(0) as u64, n.p(1) as u64, n.p(2) as u64];
    n.s(1).is_empty() || lie_apart(4, n.s(1).ne(), strides)
});
const NO_MORE: Clause = must("b has no more elements than a", |n| n.s(1).elements() <= n.s(0).elements());
const DENSE: Clause = must("a is dense, and so is the result", |n| n.s(0).is_dense() && n.d.is_dense());
const PACKED_B: Clause = must("the rows of b are packed", |n| n.s(1).has_packed_rows());

const PATCH: OpRule = OpRule {
    name: "",
    sources: &[need("a"), need("b").or_empty()],
    params: STRIDES,
    result: ResultPlace::OverIf(4),
    ..OpRule::BLANK
};

pub const RULES: &[OpRule] = &[
    OpRule {
        name: "ADD",
        sources: &[need("a").blocks(Blocks::ByStrides), need("b")],
        clauses: &[
            must("the types of a, b and the result go together, and blocks have b's shape", |n| {
                float_types(n) || block_sum(n)
            }),
            SHAPE_OF_A,
            REPEATS,
            PACKED,
        ],
        work: BLOCK_WORK,
        ..BINARY
    },
    OpRule { name: "SUB", tasks: Tasks::ONE, ..BINARY },
    OpRule { name: "MUL", ..BINARY },
    OpRule { name: "DIV", ..BINARY },
    OpRule {
        name: "ADD1",
        sources: &[need("a").blocks(Blocks::ByStrides), need("b")],
        clauses: &[
            must("the result has a's type, and b is F32 or, beside floats of 16 bits, of a's type", |n| {
                let (a, b) = (n.s(0).type_(), n.s(1).type_());
                (is_float(a) || is_writable_block(a)) && n.t() == a && (b == F32 || is_float(a) && b == a)
            }),
            SHAPE_OF_A,
            must("b is a scalar", |n| n.s(1).is_scalar()),
            must("the rows of a and of the result are packed and even", |n| {
                n.s(0).has_even_rows() && n.d.has_even_rows()
            }),
            // The kernel writes the fourth over the third.
            must("on a CPU blocks have three dimensions", |n| {
                n.on_cpu(!n.s(0).info().is_block() || n.s(0).is_3d())
            }),
        ],
        work: BLOCK_WORK,
        ..BINARY
    },
    OpRule {
        name: "ADD_ID",
        sources: &[need("a"), need("b"), need("ids")],
        reads: &[Read::Index { source: 2, below: "the rows of b", bound: |n| n.s(1).ne()[1] }],
        clauses: &[
            must("a, b and the result are F32, ids I32", |n| {
                [n.t(), n.s(0).type_(), n.s(1).type_(), n.s(2).type_()] == [F32, F32, F32, I32]
            }),
            SHAPE_OF_A,
            must("b has rows as long as a's", |n| n.s(1).ne()[0] == n.s(0).ne()[0]),
            must("ids has a's second and third dimension", |n| n.s(2).ne()[..2] == n.s(0).ne()[1..3]),
            must("b and ids are matrices, a has three dimensions", |n| {
                n.s(1).is_matrix() && n.s(2).is_matrix() && n.s(0).is_3d()
            }),
            must("the rows of a, b, ids and the result are packed", |n| {
                n.d.has_packed_rows() && n.sources().all(|source| source.has_packed_rows())
            }),
        ],
        ..BINARY
    },
    OpRule {
        name: "ACC",
        clauses: &[ALL_F32, SHAPE_OF_A, DENSE, PACKED_B, NO_MORE, WHOLE_STRIDES, INSIDE, APART],
        ..PATCH
    },
    OpRule {
        name: "SET",
        tasks: Tasks::ONE,
        clauses: &[
            must("all are F32, or all I32", |n| n.all_are(F32) || n.all_are(I32)),
            SHAPE_OF_A,
            DENSE,
            PACKED_B,
            NO_MORE,
            WHOLE_STRIDES,
            INSIDE,
            APART,
        ],
        ..PATCH
    },
];
