//! Attention.
#![forbid(unsafe_code)]

use crate::verify::layout::divides;
use crate::verify::rules::{Blocks, Cap, OpRule, may, must, need};
use crate::verify::types::{F16, F32, dot_type, is_float, is_readable_block};
use crate::verify::work::Work;

/// Rows of a tile of queries and of a tile of keys in the CPU kernel.
const TILE: u64 = 64;

/// The larger of what the kernel takes for many queries and for one.
const WORK: Work = Work::each("tiles for many queries, or a sum for each head and a row for one", |n| {
    let (key, value) = (n.s(1).ne()[0] as u64, n.s(2).ne()[0] as u64);
    let heads = n.s(0).ne()[2] as u64;
    let many = TILE.checked_mul(2 * key + 2 * value + 2 * TILE)?;
    let one = heads.checked_mul(2 + value)?.checked_add(key + 2 * value)?;
    many.max(one).checked_mul(4)
});

pub const RULES: &[OpRule] = &[
    OpRule {
        name: "FLASH_ATTN_EXT",
        sources: &[
            need("q"),
            need("k").blocks(Blocks::ByStrides),
            need("v").blocks(Blocks::ByStrides),
            may("mask"),
            may("sinks"),
        ],
        params: &["scale", "max bias", "softcap", "precision", "n_kv_max"],
        capped_params: &[Cap { word: 4, what: "the number of keys", most: |n| n.s(1).ne()[1] }],
        clauses: &[
            must("q, sinks and the result are F32, mask is F16", |n| {
                n.s(0).type_() == F32
                    && n.t() == F32
                    && n.fits(3, |mask| mask.type_() == F16)
                    && n.fits(4, |sinks| sinks.type_() == F32)
            }),
            must("k has a dot product", |n| dot_type(n.s(1).type_()).is_some()),
            must("v is a float type, or blocks that become floats", |n| {
                let v = n.s(2).type_();
                is_float(v) || is_readable_block(v)
            }),
            must("the rows of q, k and v are packed", |n| (0..3).all(|slot| n.s(slot).has_packed_rows())),
            must("k's rows are as long as q's", |n| n.s(1).ne()[0] == n.s(0).ne()[0]),
            must("v has as many rows as k", |n| n.s(2).ne()[1] == n.s(1).ne()[1]),
            must("the heads of k and v divide those of q", |n| {
                divides(n.s(1).ne()[2], n.s(0).ne()[2]) && divides(n.s(2).ne()[2], n.s(0).ne()[2])
            }),
            must("k and v have q's fourth dimension", |n| {
                n.s(1).ne()[3] == n.s(0).ne()[3] && n.s(2).ne()[3] == n.s(0).ne()[3]
            }),
            must("the result has v's row for each head and query", |n| {
                let [_, queries, heads, batches] = n.s(0).ne();
                n.d.ne() == [n.s(2).ne()[0], heads, queries, batches]
            }),
            must("mask is dense, covers the keys and has a row for each query", |n| {
                n.fits(3, |mask| {
                    mask.is_dense() && mask.ne()[0] >= n.s(1).ne()[1] && mask.ne()[1] >= n.s(0).ne()[1]
                })
            }),
            must("mask's third and fourth dimension divide q's", |n| {
                n.fits(3, |mask| (2..4).all(|dim| divides(mask.ne()[dim], n.s(0).ne()[dim])))
            }),
            must("sinks is a packed vector with an element for each head", |n| {
                n.fits(4, |sinks| {
                    sinks.is_vector() && sinks.has_packed_rows() && sinks.ne()[0] == n.s(0).ne()[2]
                })
            }),
            must("scale and softcap are finite, a bias too, and it needs a mask", |n| {
                let bias = n.f(1);
                n.f(0).is_finite()
                    && n.f(2).is_finite()
                    && (bias == 0.0 || bias > 0.0 && bias.is_finite() && !n.lacks(3))
            }),
            must("the precision is one that ggml has, on a CPU the default or F32", |n| match n.p(3) {
                0 | 10 => true,
                15 | 20 | 30 | 40 => !n.target.cpu,
                _ => false,
            }),
            must("n_kv_max is not negative", |n| n.p(4) >= 0),
        ],
        work: WORK,
        ..OpRule::BLANK
    },
    OpRule {
        name: "LIGHTNING_INDEXER",
        sources: &[need("q"), need("k").blocks(Blocks::ByStrides), need("weights"), need("mask")],
        clauses: &[
            must(
                "q, weights and the result are F32, mask is F16, k a float type or blocks that become floats",
                |n| {
                    let k = n.s(1).type_();
                    [n.s(0).type_(), n.s(2).type_(), n.t()] == [F32; 3]
                        && n.s(3).type_() == F16
                        && (is_float(k) || is_readable_block(k))
                },
            ),
            must("the rows of all are packed", |n| n.sources().all(|source| source.has_packed_rows())),
            must("k has q's rows, one head, and q's fourth dimension", |n| {
                let (q, k) = (n.s(0).ne(), n.s(1).ne());
                k[0] == q[0] && k[1] == 1 && k[3] == q[3]
            }),
            must("weights has an element for each head and query", |n| {
                let [_, heads, queries, batches] = n.s(0).ne();
                n.s(2).ne() == [heads, queries, 1, batches]
            }),
            must("mask has an element for each key and query, and its fourth dimension divides q's", |n| {
                let mask = n.s(3).ne();
                mask[..3] == [n.s(1).ne()[2], n.s(0).ne()[2], 1] && divides(mask[3], n.s(0).ne()[3])
            }),
            must("the result has an element for each key and query", |n| {
                let q = n.s(0).ne();
                n.d.ne() == [n.s(1).ne()[2], q[2], 1, q[3]]
            }),
        ],
        work: Work::each("a row of k as F32", |n| Some(4 * n.s(1).ne()[0] as u64)),
        ..OpRule::BLANK
    },
];
