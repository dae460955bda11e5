//! Rotary position embeddings and their gradient.
#![forbid(unsafe_code)]

use crate::verify::node::Node;
use crate::verify::rules::{OpRule, Reach, ResultPlace, may, must, need, since};
use crate::verify::types::{F16, F32, I32};
use crate::verify::work::Work;
use apir_ggml::Version;

/// Four positions for each token, in sections of the row.
const SECTIONED: i64 = 8;
/// Sectioned, and each half of the row is rotated as a whole.
const VISION: i64 = 24;

fn mode(n: &Node<'_>) -> i64 {
    n.p(2)
}

fn is_sectioned(n: &Node<'_>) -> bool {
    mode(n) & SECTIONED != 0
}

const ROPE: OpRule = OpRule {
    name: "",
    sources: &[need("a"), need("positions"), may("factors")],
    params: &[
        "",
        "n_dims",
        "mode",
        "",
        "n_ctx_orig",
        "freq_base",
        "freq_scale",
        "ext_factor",
        "attn_factor",
        "beta_fast",
        "beta_slow",
        "section 0",
        "section 1",
        "section 2",
        "section 3",
        "n_offs",
    ],
    result: ResultPlace::InPlace,
    clauses: &[
        must("a is F32 or F16, and so is the result; positions is I32, factors F32", |n| {
            matches!(n.s(0).type_(), F32 | F16)
                && n.t() == n.s(0).type_()
                && n.s(1).type_() == I32
                && n.fits(2, |factors| factors.type_() == F32)
        }),
        must("the result has a's shape", |n| n.d.same_shape(n.s(0))),
        must("the rows of a and of the result are packed", |n| {
            n.s(0).has_packed_rows() && n.d.has_packed_rows()
        }),
        must("the mode is normal, NeoX, multi-section, vision or interleaved", |n| {
            matches!(mode(n), 0 | 2 | SECTIONED | VISION | 40)
        }),
        must("rows have an even number of elements", |n| n.s(0).ne()[0] % 2 == 0),
        must("n_dims is even, from 2 to a row", |n| {
            // llama.cpp asks about its factors with all parameters 0.
            n.probe && n.p(1) == 0 || n.p(1) >= 2 && n.p(1) % 2 == 0 && n.p(1) <= n.s(0).ne()[0]
        }),
        must("n_offs is even, and n_offs and n_dims fit into a row", |n| {
            n.p(15) >= 0 && n.p(15) % 2 == 0 && n.p(15) + n.p(1) <= n.s(0).ne()[0]
        }),
        must("vision rotates half a row, from its start", |n| {
            mode(n) != VISION || n.p(1) == n.s(0).ne()[0] / 2 && n.p(15) == 0
        }),
        must("sections are not negative, one of the first three is more, and all fit into a row", |n| {
            let sections = &n.params()[11..15];
            !is_sectioned(n)
                || sections.iter().all(|section| *section >= 0)
                    && sections[..3].iter().any(|section| *section > 0)
                    && sections.iter().sum::<i64>() <= n.s(0).ne()[0]
        }),
        must("positions is a packed vector with one element for each token, four in sections", |n| {
            let each = if is_sectioned(n) { 4 } else { 1 };
            n.s(1).is_vector() && n.s(1).has_packed_rows() && n.s(1).ne()[0] == each * n.s(0).ne()[2]
        }),
        must("factors is a packed vector with an element for each pair that is rotated", |n| {
            n.fits(2, |factors| {
                factors.is_vector() && factors.has_packed_rows() && factors.ne()[0] >= n.p(1) / 2
            })
        }),
    ],
    reaches: &[Reach {
        source: 2,
        what: "a factor for each pair of a row, rotated or not",
        bytes: |n| 4 * (n.s(0).ne()[0] / 2) as u64,
    }],
    since: &[since(Version::new(0, 21, 0), "n_offs", |n| n.p(15) != 0)],
    work: Work::each("a sine and a cosine for each pair of a row", |n| Some(4 * n.d.ne()[0] as u64)),
    ..OpRule::BLANK
};

pub const RULES: &[OpRule] = &[OpRule { name: "ROPE", ..ROPE }, OpRule { name: "ROPE_BACK", ..ROPE }];
