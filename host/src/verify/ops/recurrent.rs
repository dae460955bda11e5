//! State spaces, linear attention, and what belongs to them.
#![forbid(unsafe_code)]

use crate::verify::layout::divides;
use crate::verify::node::Node;
use crate::verify::rules::{Clause, INTS, OpRule, Read, counts, may, must, need, since};
use crate::verify::types::{F32, I32};
use crate::verify::work::{Tasks, Work};
use apir_ggml::Version;

const ALL_F32: Clause = must("all are F32", |n| n.all_are(F32));
const DENSE: Clause = must("the sources are dense", |n| n.sources().all(|source| source.is_dense()));

/// Heads of a size that SIMD kernels take whole.
const SIMD_FLOATS: i64 = 64;
/// Floats of the longest vectors of 64-bit ARM processors that are built.
const VECTOR_FLOATS: i64 = 16;
/// Most rounds of a balancing; models use about 20.
const MAX_ROUNDS: i64 = 1000;
/// Bits of 1.0.
const ONE: i32 = 0x3f80_0000;

/// [size of a head, heads, tokens, 1] of the sources 0 to `last`.
fn same_heads(n: &Node<'_>, last: usize) -> bool {
    n.s(0).is_3d() && (1..=last).all(|slot| n.s(slot).same_shape(n.s(0)))
}

/// Sequences that the state in a slot is for, one in each of its rows; 0 when it is not made of such rows.
fn sequences(n: &Node<'_>, state: usize) -> i64 {
    let [size, heads, ..] = n.s(0).ne();
    let count = n.s(state).ne()[1];
    let elements = size.checked_mul(size).and_then(|square| square.checked_mul(heads)?.checked_mul(count));
    if elements == Some(n.s(state).elements()) { count } else { 0 }
}

fn splits_tokens(n: &Node<'_>, state: usize) -> bool {
    let (count, tokens) = (sequences(n, state), n.s(0).ne()[2]);
    n.d.is_empty() || count >= 1 && tokens % count == 0 && tokens >= count
}

/// Outputs of all tokens, then the states.
fn outputs_and_states(n: &Node<'_>, state: usize) -> bool {
    let [size, heads, tokens, _] = n.s(0).ne();
    n.d.ne() == [size * heads, tokens + size * sequences(n, state), 1, 1]
}

/// Whether GATED_DELTA_NET is told its number of snapshots; earlier kernels take it from the state.
fn counts_snapshots(n: &Node<'_>) -> bool {
    n.target.version >= Version::new(0, 15, 1)
}

/// Snapshots of a GATED_DELTA_NET.
fn snapshots(n: &Node<'_>) -> i64 {
    if counts_snapshots(n) { n.p(0) } else { n.s(5).ne()[1] }
}

const WKV: OpRule = OpRule {
    name: "",
    tasks: Tasks::HEADS,
    sources: &[need("k"), need("v"), need("r"), need("first"), need("decay"), need("state")],
    clauses: &[
        ALL_F32,
        DENSE,
        must("k, v, r and decay have the same shape, in three dimensions", |n| {
            n.s(0).is_3d() && [1, 2, 4].iter().all(|slot| n.s(*slot).same_shape(n.s(0)))
        }),
        must("first has an element for each of a head", |n| {
            // llama.cpp asks about it with heads of another size and number.
            n.probe || n.s(3).elements() >= n.s(0).ne()[0] * n.s(0).ne()[1]
        }),
        must("state has a matrix for each head of each sequence, and sequences divide the tokens", |n| {
            splits_tokens(n, 5)
        }),
        must("the result has the outputs and the states", |n| outputs_and_states(n, 5)),
    ],
    ..OpRule::BLANK
};

pub const RULES: &[OpRule] = &[
    OpRule {
        name: "SSM_CONV",
        sources: &[need("x"), need("kernel")],
        clauses: &[
            ALL_F32,
            must("x has three dimensions, kernel two", |n| n.s(0).is_3d() && n.s(1).is_matrix()),
            must("the rows of x follow each other", |n| {
                n.s(0).is_empty() || n.s(0).has_packed_rows() && n.s(0).nb()[1] == 4 * n.s(0).ne()[0] as u64
            }),
            must("kernel is dense, with a row for each of x", |n| {
                n.s(1).is_dense() && n.s(1).ne()[1] == n.s(0).ne()[1]
            }),
            must("the result has the kernel's places in x", |n| {
                let ([length, inner, sequences, _], [size, ..]) = (n.s(0).ne(), n.s(1).ne());
                n.d.ne() == [inner, length - size + 1, sequences, 1]
            }),
            counts("a matrix of x and kernel have fewer than 2^31 elements", |n| {
                let ([length, inner, ..], [size, ..]) = (n.s(0).ne(), n.s(1).ne());
                length * inner < INTS && size * inner < INTS
            }),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "SSM_SCAN",
        sources: &[need("state"), need("x"), need("dt"), need("a"), need("b"), need("c"), need("ids")],
        params: &["snapshots"],
        absent_params: &[(0, 1)],
        reads: &[Read::Index {
            source: 6,
            below: "the fourth dimension of state",
            bound: |n| n.s(0).ne()[3],
        }],
        clauses: &[
            must("all are F32, ids I32", |n| {
                n.t() == F32 && (0..6).all(|slot| n.s(slot).type_() == F32) && n.s(6).type_() == I32
            }),
            must("state, dt and a are dense", |n| [0, 2, 3].iter().all(|slot| n.s(*slot).is_dense())),
            must("the rows of x, b and c follow each other", |n| {
                [1, 4, 5].iter().all(|slot| {
                    let source = n.s(*slot);
                    source.is_empty()
                        || source.has_packed_rows() && source.nb()[1] == 4 * source.ne()[0] as u64
                })
            }),
            must("x has state's second and third dimension", |n| n.s(1).ne()[..2] == n.s(0).ne()[1..3]),
            // With vectors of a length that is known when it runs, the kernel takes them whole.
            must("on a CPU the rows of state are multiples of 16", |n| {
                n.on_cpu(n.s(0).ne()[0] % VECTOR_FLOATS == 0)
            }),
            must("dt has x's heads, tokens and sequences", |n| {
                let [_, heads, tokens, sequences] = n.s(1).ne();
                n.s(2).ne() == [heads, tokens, sequences, 1]
            }),
            must("a has a row for each head, of one element or of state's row", |n| {
                let [own, heads, ne2, ne3] = n.s(3).ne();
                (own == 1 || own == n.s(0).ne()[0]) && [heads, ne2, ne3] == [n.s(1).ne()[1], 1, 1]
            }),
            must(
                "b and c have state's rows, x's tokens and sequences, and groups that divide the heads",
                |n| {
                    let (b, x) = (n.s(4).ne(), n.s(1).ne());
                    n.s(5).ne() == b && b[0] == n.s(0).ne()[0] && b[2..] == x[2..] && divides(b[1], x[1])
                },
            ),
            must("ids is a packed vector with one element for each sequence", |n| {
                n.s(6).is_vector() && n.s(6).has_packed_rows() && n.s(6).ne()[0] == n.s(1).ne()[3]
            }),
            must("there is a snapshot or more, more only where a has one element in a row", |n| {
                n.p(0) >= 1 && (n.p(0) == 1 || n.s(3).ne()[0] == 1)
            }),
            must("the result is a vector of the outputs and the snapshots", |n| {
                let [size, width, heads, _] = n.s(0).ne().map(i128::from);
                let states = i128::from(n.p(0)) * i128::from(n.s(1).ne()[3]);
                // Five factors below 2^31 may leave 128 bits.
                let elements = (size * width * heads).checked_mul(states);
                n.d.is_vector()
                    && elements
                        .is_some_and(|all| i128::from(n.d.ne()[0]) == i128::from(n.s(1).elements()) + all)
            }),
        ],
        since: &[since(Version::new(0, 21, 0), "more than one snapshot", |n| n.p(0) > 1)],
        ..OpRule::BLANK
    },
    OpRule { name: "RWKV_WKV6", ..WKV },
    OpRule {
        name: "GATED_LINEAR_ATTN",
        tasks: Tasks::HEADS,
        sources: &[need("k"), need("v"), need("q"), need("gate"), need("state")],
        params: &["scale"],
        clauses: &[
            ALL_F32,
            DENSE,
            must("k, v, q and gate have the same shape, in three dimensions", |n| same_heads(n, 3)),
            must("state has a matrix for each head of each sequence, and sequences divide the tokens", |n| {
                splits_tokens(n, 4)
            }),
            must("the result has the outputs and the states", |n| outputs_and_states(n, 4)),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "RWKV_WKV7",
        tasks: Tasks::HEADS,
        sources: &[need("r"), need("w"), need("k"), need("v"), need("a"), need("b"), need("state")],
        clauses: &[
            ALL_F32,
            DENSE,
            must("r, w, k, v, a and b have the same shape, in three dimensions", |n| same_heads(n, 5)),
            must("on a CPU the size of a head is a multiple of 64", |n| {
                n.on_cpu(n.s(0).ne()[0] % SIMD_FLOATS == 0)
            }),
            must("state has a matrix for each head of each sequence, and sequences divide the tokens", |n| {
                splits_tokens(n, 6)
            }),
            must("the result has the outputs and the states", |n| outputs_and_states(n, 6)),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "GATED_DELTA_NET",
        sources: &[need("q"), need("k"), need("v"), need("gate"), need("beta"), need("state")],
        params: &["snapshots"],
        absent_params: &[(0, 1)],
        clauses: &[
            ALL_F32,
            must("the rows of q, k and v are packed", |n| (0..3).all(|slot| n.s(slot).has_packed_rows())),
            must("gate, beta and state are dense", |n| (3..6).all(|slot| n.s(slot).is_dense())),
            must("q and k have v's rows and tokens, and heads and batches that divide v's", |n| {
                let v = n.s(2).ne();
                (0..2).all(|slot| {
                    let own = n.s(slot).ne();
                    own[0] == v[0] && own[2] == v[2] && divides(own[1], v[1]) && divides(own[3], v[3])
                })
            }),
            must("gate and beta have an element for each head, token and batch, gate or a row of v's", |n| {
                let (v, gate, beta) = (n.s(2).ne(), n.s(3).ne(), n.s(4).ne());
                (gate[0] == 1 || gate[0] == v[0])
                    && beta[0] == 1
                    && gate[1..] == v[1..]
                    && beta[1..] == v[1..]
            }),
            counts("a head has fewer than 2^31 elements of state", |n| {
                n.s(2).ne()[0] * n.s(2).ne()[0] < INTS
            }),
            must(
                "state has a square matrix for each head and batch, before ggml 0.15.1 for each snapshot too",
                |n| {
                    let [size, heads, _, batches] = n.s(2).ne();
                    if counts_snapshots(n) {
                        return n.s(5).ne() == [size, size, heads, batches];
                    }
                    let row = (size * size).checked_mul(heads);
                    row.is_some_and(|row| n.s(5).ne() == [row, n.s(5).ne()[1], batches, 1])
                },
            ),
            must("there is a snapshot or more, before ggml 0.15.1 as many as the state has rows", |n| {
                snapshots(n) >= 1 && n.p(0) >= 1 && (counts_snapshots(n) || n.p(0) == 1)
            }),
            must("the result has the outputs and the snapshots", |n| {
                let [size, heads, tokens, batches] = n.s(2).ne().map(i128::from);
                let rows = tokens * batches + i128::from(snapshots(n)) * size * batches;
                n.d.is_matrix() && i128::from(n.d.ne()[0]) == size * heads && i128::from(n.d.ne()[1]) == rows
            }),
        ],
        work: Work::each("a row of v, for several snapshots also a state", |n| {
            let size = n.s(2).ne()[0] as u64;
            let square = if snapshots(n) > 1 { size.checked_mul(size)? } else { 0 };
            size.checked_add(square)?.checked_mul(4)
        }),
        ..OpRule::BLANK
    },
    OpRule {
        name: "SOLVE_TRI",
        sources: &[need("a"), need("b")],
        clauses: &[
            ALL_F32,
            DENSE,
            must("a is square, with a row for each of b's, and has b's higher dimensions", |n| {
                let (a, b) = (n.s(0).ne(), n.s(1).ne());
                a[0] == a[1] && a[1..] == b[1..]
            }),
            must("the result has b's shape", |n| n.d.same_shape(n.s(1))),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "DSV4_HC_COMB",
        sources: &[need("mixes"), need("scale"), need("base")],
        params: &["eps", "rounds"],
        clauses: &[
            ALL_F32,
            must("mixes is a matrix of rows of 24", |n| n.s(0).is_matrix() && n.s(0).ne()[0] == 24),
            must("scale is a vector of 3 or more, base one of 24", |n| {
                n.s(1).is_vector() && n.s(1).ne()[0] >= 3 && n.s(2).ne() == [24, 1, 1, 1]
            }),
            must("the result has 4 by 4 elements for each token", |n| n.d.ne() == [4, 4, n.s(0).ne()[1], 1]),
            must("there are 1 to 1000 rounds", |n| (1..=MAX_ROUNDS).contains(&n.p(1))),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "DSV4_HC_PRE",
        sources: &[need("x"), need("weights")],
        params: &["scale", "gated"],
        absent_params: &[(0, ONE)],
        clauses: &[
            ALL_F32,
            must("gated is 0 or 1", |n| matches!(n.p(1), 0 | 1)),
            must("x has three dimensions and one stream or more", |n| {
                n.s(0).is_3d() && (n.d.is_empty() || n.s(0).ne()[1] >= 1)
            }),
            must("weights has an element for each stream and token, gated for each of x", |n| {
                let [width, streams, tokens, _] = n.s(0).ne();
                n.s(1).ne() == if n.p(1) == 1 { [width, streams, tokens, 1] } else { [streams, tokens, 1, 1] }
            }),
            must("the result has a row for each token", |n| {
                let [width, _, tokens, _] = n.s(0).ne();
                n.d.ne() == [width, tokens, 1, 1]
            }),
        ],
        since: &[
            since(Version::new(0, 24, 0), "gates", |n| n.p(1) == 1),
            // Earlier kernels do not look at it.
            since(Version::new(0, 24, 0), "a scale other than 1", |n| n.p(0) != i64::from(ONE)),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "DSV4_HC_POST",
        sources: &[need("x"), need("residual"), need("post"), may("comb")],
        clauses: &[
            ALL_F32,
            must("residual has three dimensions, x a row for each of its tokens", |n| {
                let [width, _, tokens, _] = n.s(1).ne();
                n.s(1).is_3d() && n.s(0).ne() == [width, tokens, 1, 1]
            }),
            must("post has an element for each stream and token, comb for each pair of streams", |n| {
                let [_, streams, tokens, _] = n.s(1).ne();
                n.s(2).ne() == [streams, tokens, 1, 1]
                    && n.fits(3, |comb| comb.ne() == [streams, streams, tokens, 1])
            }),
            must("the result has residual's shape", |n| n.d.same_shape(n.s(1))),
        ],
        since: &[since(Version::new(0, 24, 0), "no comb", |n| n.lacks(3))],
        ..OpRule::BLANK
    },
];
