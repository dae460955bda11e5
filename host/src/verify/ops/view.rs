//! Other looks at the same memory: placed, never computed.
#![forbid(unsafe_code)]

use crate::verify::node::Node;
use crate::verify::rules::{Blocks, Clause, OpRule, ResultPlace, must, need};
use crate::verify::work::Tasks;

const SAME_TYPE: Clause = must("the result has a's type", |n| n.t() == n.s(0).type_());
const SAME_START: Clause =
    must("the result starts where a does", |n| offset(n).is_none_or(|offset| offset == 0));

/// Bytes from the source's start to the result's, if both lie in a buffer; wraps where the result lies before.
fn offset(n: &Node<'_>) -> Option<u64> {
    Some(n.d.place()?.offset.wrapping_sub(n.s(0).place()?.offset))
}

/// Whether result dimension `to(i)` is source dimension `i`, with its stride.
fn moves(n: &Node<'_>, to: impl Fn(usize) -> usize) -> bool {
    let (d, a) = (n.d, n.s(0));
    (0..4).all(|dim| {
        let there = to(dim);
        d.ne()[there] == a.ne()[dim] && (a.ne()[dim] == 1 || d.is_empty() || d.nb()[there] == a.nb()[dim])
    })
}

const VIEW: OpRule = OpRule {
    name: "",
    sources: &[need("a").blocks(Blocks::ByStrides)],
    tasks: Tasks::ONE,
    result: ResultPlace::View,
    ..OpRule::BLANK
};

pub const RULES: &[OpRule] = &[
    OpRule {
        name: "RESHAPE",
        clauses: &[
            SAME_TYPE,
            SAME_START,
            must("a is dense", |n| n.s(0).is_dense()),
            must("the result has as many elements as a", |n| n.d.elements() == n.s(0).elements()),
            must("the result is dense", |n| n.d.is_dense()),
        ],
        ..VIEW
    },
    OpRule {
        name: "VIEW",
        params: &["offset, low word", "offset, high word"],
        clauses: &[
            SAME_TYPE,
            must("the rows of the result are packed", |n| n.d.has_packed_rows()),
            must("the result starts offset bytes into a", |n| {
                let param = u64::from(n.p(0) as u32) | u64::from(n.p(1) as u32) << 32;
                offset(n).is_none_or(|offset| offset == param)
            }),
        ],
        ..VIEW
    },
    OpRule {
        name: "PERMUTE",
        params: &["axis of dim 0", "axis of dim 1", "axis of dim 2", "axis of dim 3"],
        clauses: &[
            SAME_TYPE,
            SAME_START,
            must("the axes are 0 to 3 in some order", |n| {
                (0..4).all(|axis| (0..4).filter(|word| n.p(*word) == axis).count() == 1)
            }),
            must("the result has a's dimensions and strides in that order", |n| {
                moves(n, |dim| n.p(dim) as usize)
            }),
        ],
        ..VIEW
    },
    OpRule {
        name: "TRANSPOSE",
        clauses: &[
            SAME_TYPE,
            SAME_START,
            must("the result has a's dimensions and strides, the first two swapped", |n| {
                moves(n, |dim| [1, 0, 2, 3][dim])
            }),
        ],
        ..VIEW
    },
];
