//! Copies, with and without a change of type.
#![forbid(unsafe_code)]

use crate::verify::rules::{Blocks, Clause, OpRule, ResultPlace, must, need};
use crate::verify::types::{BF16, F16, F32, I32, is_float, is_readable_block, is_writable_block};
use crate::verify::work::Work;

const SAME_TYPE: Clause = must("the result has a's type", |n| n.t() == n.s(0).type_());
const SAME_COUNT: Clause =
    must("the result has as many elements as a", |n| n.d.elements() == n.s(0).elements());
/// The kernel's copy into dense rows takes a block for an element.
const WHOLE_BLOCKS: Clause = must("blocks that become dense in another shape are dense", |n| {
    let (d, a) = (n.d, n.s(0));
    !a.info().is_block() || n.t() != a.type_() || d.same_shape(a) || a.is_dense() || !d.is_dense()
});

/// Whether CPU kernels turn one type into the other.
fn converts(from: u32, to: u32) -> bool {
    from == to
        || is_float(from) && (is_float(to) || is_writable_block(to))
        || matches!((from, to), (F32, I32) | (I32, F32))
        || is_readable_block(from) && to == F32
}

const WORK: Work =
    Work::each("a row as F32, to blocks and between types that have only F32 in common", |n| {
        let pair = (n.s(0).type_(), n.t());
        let through_floats =
            n.d.info().is_block() || matches!(pair, (F16, BF16) | (BF16, F16) | (F32, I32) | (I32, F32));
        Some(if through_floats { 4 * n.d.ne()[0] as u64 } else { 0 })
    });

pub const RULES: &[OpRule] = &[
    OpRule {
        name: "DUP",
        sources: &[need("a").blocks(Blocks::ByStrides)],
        result: ResultPlace::InPlace,
        clauses: &[SAME_TYPE, must("the result has a's shape", |n| n.d.same_shape(n.s(0)))],
        work: WORK,
        ..OpRule::BLANK
    },
    OpRule {
        name: "CONT",
        sources: &[need("a").blocks(Blocks::ByStrides)],
        clauses: &[SAME_TYPE, SAME_COUNT, WHOLE_BLOCKS],
        ..OpRule::BLANK
    },
    OpRule {
        name: "CPY",
        sources: &[need("a").blocks(Blocks::ByStrides), need("target").blocks(Blocks::ByStrides)],
        result: ResultPlace::Target,
        clauses: &[
            must("a CPU kernel turns a's type into the target's", |n| {
                n.on_cpu(converts(n.s(0).type_(), n.t()))
            }),
            must("the target is laid out as the result", |n| n.d.is_like(n.s(1))),
            SAME_COUNT,
            WHOLE_BLOCKS,
            // The scratch row is as long as the result's and filled with one of a's.
            must("blocks made of floats have a's shape, packed rows and a dense result", |n| {
                let (d, a) = (n.d, n.s(0));
                !d.info().is_block()
                    || a.info().is_block()
                    || d.same_shape(a) && a.has_packed_rows() && d.is_dense()
            }),
            must("floats made of blocks fill packed rows of whole blocks, or are dense", |n| {
                let (d, a) = (n.d, n.s(0));
                !a.info().is_block()
                    || d.info().is_block()
                    || d.has_packed_rows()
                        && (d.ne()[0] % i64::from(a.info().block) == 0 || d.is_dense())
                        && d.elements() < 1 << 32
            }),
        ],
        work: WORK,
        ..OpRule::BLANK
    },
];
