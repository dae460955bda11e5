//! Graphs that must not pass, one or more for each row that is about graphs. Their buffers are those of both the verifier's target and the one
//! that computes: 1 and 2 are there in either.
#![forbid(unsafe_code)]

use super::Seeds;
use crate::generate::types::*;
use crate::graph::{FLAG_COMPUTE, Graph};
use crate::ops::op;
use apir_ggml::TypeInfo;
use apir_protocol::handle::BufferHandle;
use apir_protocol::tensor::TensorRecord;

/// A dense tensor in buffer 1, of at most four dimensions.
fn t(id: u64, type_: u32, ne: &[u32], data: u64) -> TensorRecord {
    let mut all = [1; 4];
    all[..ne.len()].copy_from_slice(ne);
    let dense = TypeInfo::get(type_).and_then(|info| info.dense_strides(all.map(i64::from)));
    let nb = dense.unwrap_or([4; 4]).map(|stride| stride as u32);
    TensorRecord { id, type_, ne: all, nb, buffer: BufferHandle(1), data, ..TensorRecord::default() }
}

/// A node made of `src`.
fn n(name: &str, result: TensorRecord, src: &[u64], params: &[i32]) -> TensorRecord {
    let mut node = TensorRecord { op: op(name), flags: FLAG_COMPUTE, ..result };
    node.src[..src.len()].copy_from_slice(src);
    node.op_params[..params.len()].copy_from_slice(params);
    node
}

/// A graph of those tensors that have an operation.
fn graph(tensors: &[TensorRecord]) -> Graph {
    let nodes = tensors.iter().filter(|tensor| tensor.op != 0).map(|tensor| tensor.id).collect();
    Graph { nodes, tensors: tensors.to_vec() }
}

/// b = a * a, with a change to a or to b.
fn square(change: impl FnOnce(&mut TensorRecord, &mut TensorRecord)) -> Graph {
    let mut a = t(1, F32, &[16], 0);
    let mut b = n("SQR", t(2, F32, &[16], 64), &[1], &[]);
    change(&mut a, &mut b);
    graph(&[a, b])
}

/// The blobs by name.
pub(super) fn hostile() -> Seeds {
    let mut seeds = Seeds::new();
    let mut add = |name: &str, graph: &Graph| {
        seeds.insert(name.to_owned(), graph.to_blob());
    };
    add("honest_square", &square(|_, _| {}));
    structure(&mut add);
    tensors(&mut add);
    operations(&mut add);
    contents(&mut add);

    let whole = square(|_, _| {}).to_blob();
    let mut cut = |name: &str, bytes: &[u8]| {
        seeds.insert(name.to_owned(), bytes.to_vec());
    };
    cut("s08_empty", &[]);
    cut("s08_cut", &whole[..whole.len() - 1]);
    cut("s08_cut_count", &whole[..13]);
    for (name, at, count) in [
        ("s08_nodes_wrap", 0, 0x2000_0000u32),
        ("s08_nodes_most", 0, u32::MAX),
        ("s08_tensors_wrap", 12, 0x00d7_9436),
        ("s08_tensors_most", 12, u32::MAX),
    ] {
        let mut forged = whole.clone();
        forged[at..at + 4].copy_from_slice(&count.to_le_bytes());
        cut(name, &forged);
    }
    seeds
}

/// Graphs that ggml's kernels do wrong when it computes them in one part, or at all, by name. They may be computed otherwise, or refused.
pub(super) fn beside() -> Vec<(&'static str, Graph)> {
    let table = t(3, F32, &[512, 23], 8192);
    let set_rows = graph(&[
        t(1, F16, &[512, 4], 0),
        t(2, I32, &[4], 4096),
        table,
        n("SET_ROWS", TensorRecord { id: 4, view_src: 3, ..table }, &[1, 2, 3], &[]),
        t(5, F32, &[16], 55_360),
        n("ADD", t(6, F32, &[16], 55_424), &[5, 5], &[]),
    ]);
    let gaps = |nb: [u32; 4]| {
        let b = TensorRecord { nb, buffer: BufferHandle(2), ..t(2, Q8_K, &[256, 8, 2], 0) };
        graph(&[
            t(1, Q4_K, &[256, 16], 0),
            b,
            n("MUL_MAT", t(3, F32, &[16, 8, 2], 4096), &[1, 2], &[]),
            t(4, F32, &[16], 8192),
            n("ADD", t(5, F32, &[16], 8256), &[4, 4], &[]),
        ])
    };
    vec![
        ("s23_set_rows", set_rows),
        ("s24_gaps_between_rows", gaps([292, 20 * 292, 292, 292])),
        ("s24_gaps_between_planes", gaps([292, 292, 100 * 292, 200 * 292])),
    ]
}

/// Ids, order, cycles, depth.
fn structure(add: &mut impl FnMut(&str, &Graph)) {
    let chain = graph(&[
        t(1, F32, &[16], 0),
        n("SQR", t(2, F32, &[16], 64), &[1], &[]),
        n("ADD", t(3, F32, &[16], 128), &[1, 2], &[]),
    ]);
    let with = |nodes: &[u64]| Graph { nodes: nodes.to_vec(), ..chain.clone() };
    add("s06_unknown_node", &with(&[9]));
    add("s06_null_node", &with(&[0]));
    add("s06_node_twice", &with(&[2, 2]));
    add("s06_order", &with(&[3, 2]));
    add("s08_no_nodes", &with(&[]));
    add("s06_unknown_source", &square(|_, b| b.src[0] = 9));
    add("s06_duplicate_id", &square(|a, _| a.id = 2));
    add("s06_null_id", &square(|a, _| a.id = 0));
    add("s06_own_source", &square(|_, b| b.src[0] = 2));
    add("s06_own_view", &square(|_, b| b.view_src = 2));
    let mut cycle = chain;
    cycle.tensors[1].src[0] = 3;
    add("s06_cycle", &cycle);
    let mut views = vec![t(1, F32, &[1], 0)];
    views.extend((2..=200).map(|id| {
        let view = n("VIEW", t(id, F32, &[1], 0), &[id - 1], &[]);
        TensorRecord { view_src: id - 1, ..view }
    }));
    add("s16_views_of_views", &graph(&views));
    let mut deep = vec![t(1, F32, &[1], 0)];
    deep.extend((2..=200).map(|id| n("SQR", t(id, F32, &[1], 64 * id), &[id - 1], &[])));
    // Two in a row of one op may be honest; the last lies nowhere.
    deep.push(n("SQR", TensorRecord { buffer: BufferHandle(0), ..t(201, F32, &[1], 0) }, &[200], &[]));
    add("s16_deep", &graph(&deep));
}

/// Types, places, shapes.
fn tensors(add: &mut impl FnMut(&str, &Graph)) {
    for (name, type_) in [("removed", 4), ("removed_late", 37), ("past_the_table", 99), ("most", u32::MAX)] {
        add(&format!("s01_{name}"), &square(|a, _| a.type_ = type_));
    }
    add("s02_absolute_read", &square(|a, _| (a.buffer.0, a.data) = (0, 0x7fff_0000_1000)));
    add("s03_absolute_write", &square(|_, b| (b.buffer.0, b.data) = (0, 0x7fff_0000_1000)));
    add("s07_unknown_buffer", &square(|a, _| a.buffer.0 = 0x7fff_0000_1000));
    add("s07_no_buffer", &square(|_, b| (b.buffer.0, b.data) = (0, 0)));
    add("s09_product_wraps", &square(|a, _| a.ne = [1 << 31; 4]));
    add("s09_extent_wraps", &square(|a, _| (a.ne, a.nb) = ([u32::MAX; 4], [u32::MAX; 4])));
    add("s09_part_of_a_block", &square(|a, _| (a.type_, a.ne[0], a.nb[0]) = (Q4_0, 31, 18)));
    add("s09_stride_outside", &square(|a, _| (a.ne[1], a.nb[1]) = (2, 1 << 31)));
    add("s09_stride_0", &square(|_, b| (b.ne[1], b.nb[1]) = (16, 0)));
    add("s09_past_the_buffer", &square(|a, _| a.data = 65_536 - 60));
    add("s09_offset_wraps", &square(|a, _| a.data = u64::MAX - 63));
    add("s09_view_offset_wraps", &square(|_, b| (b.view_src, b.view_offs, b.data) = (1, u64::MAX - 63, 0)));
    add("s09_view_outside", &square(|_, b| (b.view_src, b.view_offs, b.data) = (1, 32, 32)));
}

/// Operations that are none, and those whose shapes or parameters do not belong together.
fn operations(add: &mut impl FnMut(&str, &Graph)) {
    for (name, op) in [("custom", 95), ("map_1", 92), ("map_2", 93), ("map_3", 94)] {
        let params = [0x4141_4141; 16];
        add(&format!("s10_{name}"), &square(|_, b| (b.op, b.op_params) = (op, params)));
    }
    add("s10_unknown", &square(|_, b| b.op = 101));
    for name in ["ACC", "SET"] {
        for (what, params) in [
            ("negative_stride", [-64, 1024, 1024, 0, 0]),
            ("wrapping_stride", [i32::MIN, i32::MIN, 0, 0, 0]),
            ("offset_past_the_end", [64, 1024, 1024, 1024, 0]),
            ("unaligned_offset", [64, 1024, 1024, 894, 0]),
            ("negative_offset", [64, 1024, 1024, -4, 0]),
        ] {
            let tensors = [
                t(1, F32, &[16, 16], 0),
                t(2, F32, &[2, 2], 1024),
                n(name, t(3, F32, &[16, 16], 2048), &[1, 2], &params),
            ];
            add(&format!("s12_{}_{what}", name.to_lowercase()), &graph(&tensors));
        }
    }
    let two = |name: &str, a: TensorRecord, b: TensorRecord, d: TensorRecord, params: &[i32]| {
        graph(&[a, b, n(name, d, &[a.id, b.id], params)])
    };
    let (rows, ids) = (t(1, F32, &[16, 4], 0), t(2, I32, &[4], 512));
    add("s13_get_rows_short", &two("GET_ROWS", rows, ids, t(3, F32, &[16, 8], 1024), &[]));
    add(
        "s13_get_rows_float_ids",
        &two("GET_ROWS", rows, t(2, F32, &[4], 512), t(3, F32, &[16, 4], 1024), &[]),
    );
    add("s13_mul_mat_inner", &two("MUL_MAT", rows, t(2, F32, &[8, 4], 512), t(3, F32, &[4, 4], 1024), &[]));
    add("s13_mul_mat_result", &two("MUL_MAT", rows, t(2, F32, &[16, 4], 512), t(3, F32, &[4, 1], 1024), &[]));
    let experts = graph(&[
        t(1, F32, &[16, 4, 2], 0),
        t(2, F16, &[16, 1, 2], 1024),
        t(3, I32, &[1, 2], 2048),
        n("MUL_MAT_ID", t(4, F32, &[4, 1, 2], 3072), &[1, 2, 3], &[]),
    ]);
    add("s13_mul_mat_id_half", &experts);
    let hadamard =
        two("MUL_MAT", t(1, F32, &[16, 1], 0), t(2, F32, &[16, 4], 512), t(3, F32, &[1, 4], 1024), &[0, 1]);
    add("s13_mul_mat_hadamard", &hadamard);
    add(
        "s13_soft_max_mask",
        &two("SOFT_MAX", rows, t(2, F32, &[16, 1], 512), t(3, F32, &[16, 4], 1024), &[]),
    );
    add("s13_glu_halves", &two("GLU", rows, t(2, F32, &[16, 2], 512), t(3, F32, &[16, 4], 1024), &[2]));
    let copy = graph(&[t(1, F32, &[16], 0), n("CPY", t(2, F32, &[8], 64), &[1], &[])]);
    add("s13_copy_without_target", &copy);
    let one = |name: &str, a: TensorRecord, d: TensorRecord, params: &[i32]| {
        graph(&[a, n(name, d, &[a.id], params)])
    };
    add("s13_clamp_larger", &one("CLAMP", t(1, F32, &[4], 0), t(2, F32, &[64], 1024), &[0, 0]));
    add("s13_gelu_half", &one("UNARY", rows, t(2, F16, &[16, 4], 1024), &[8]));
    add("s13_sum_of_ints", &one("SUM", t(1, I32, &[16], 0), t(2, F32, &[1], 1024), &[]));
    add("s13_group_norm_none", &one("GROUP_NORM", rows, t(2, F32, &[16, 4], 1024), &[0, 0]));
    add(
        "s13_pool_endless",
        &one(
            "POOL_2D",
            TensorRecord { ne: [16, 4, 2, 1], nb: [4, 64, 0, 0], ..rows },
            t(2, F32, &[15, 3, 2], 1024),
            &[0, 2, 2, 1, 1, 0, 0],
        ),
    );
    add("s13_top_k_more", &one("TOP_K", rows, t(2, I32, &[17, 4], 1024), &[]));
    add("s13_dup_other_type", &one("DUP", rows, t(2, Q8_0, &[32, 2], 1024), &[]));
    add(
        "s13_rope_of_0",
        &two("ROPE", t(1, F32, &[16, 1, 4], 0), ids, t(3, F32, &[16, 1, 4], 1024), &[0, 0, 0]),
    );
    let attention = graph(&[
        t(1, F32, &[32, 2, 2], 0),
        t(2, F32, &[32, 8, 2], 1024),
        t(3, F32, &[32, 4, 2], 4096),
        n("FLASH_ATTN_EXT", t(4, F32, &[32, 2, 2], 8192), &[1, 2, 3], &[0x3f80_0000]),
    ]);
    add("s13_attention_short_values", &attention);
    let set = |row: u32, ids: u32| {
        let table = t(1, F32, &[16, 4], 0);
        let target = TensorRecord { view_src: 1, ..table };
        graph(&[
            table,
            t(2, F32, &[row, 2], 512),
            t(3, I64, &[ids], 1024),
            n("SET_ROWS", TensorRecord { id: 4, ..target }, &[2, 3, 1], &[]),
        ])
    };
    add("s13_set_rows_longer", &set(32, 2));
    add("s13_set_rows_short_ids", &set(16, 1));
    for name in ["MUL_MAT", "GET_ROWS", "CONCAT", "FLASH_ATTN_EXT", "SSM_SCAN", "ROPE", "CPY", "IM2COL"] {
        let alone = n(name, t(1, F32, &[16], 0), &[], &[]);
        add(&format!("s13_{}_without_sources", name.to_lowercase()), &graph(&[alone]));
    }
}

/// Honest graphs over contents that are no indices: the computing target's buffers hold numbers to 22.
fn contents(add: &mut impl FnMut(&str, &Graph)) {
    let get = graph(&[
        t(1, F32, &[16, 4], 0),
        t(2, I32, &[8], 512),
        n("GET_ROWS", t(3, F32, &[16, 8], 1024), &[1, 2], &[]),
    ]);
    add("s14_get_rows", &get);
    let table = t(1, F32, &[16, 4], 0);
    let set = graph(&[
        table,
        t(2, F32, &[16, 2], 512),
        t(3, I32, &[2], 1024),
        n("SET_ROWS", TensorRecord { id: 4, view_src: 1, ..table }, &[2, 3, 1], &[]),
    ]);
    add("s14_set_rows", &set);
    let mul = graph(&[
        t(1, F32, &[16, 4, 2], 0),
        t(2, F32, &[16, 1, 2], 1024),
        t(3, I32, &[2, 2], 2048),
        n("MUL_MAT_ID", t(4, F32, &[4, 2, 2], 3072), &[1, 2, 3], &[]),
    ]);
    add("s14_mul_mat_id", &mul);
    let scan = graph(&[
        t(1, F32, &[16, 2, 2, 2], 0),
        t(2, F32, &[2, 2, 3, 1], 1024),
        t(3, F32, &[2, 3, 1], 2048),
        t(4, F32, &[1, 2], 3072),
        t(5, F32, &[16, 1, 3, 1], 4096),
        t(6, F32, &[16, 1, 3, 1], 5120),
        t(7, I32, &[1], 6144),
        n("SSM_SCAN", t(8, F32, &[12 + 64], 7168), &[1, 2, 3, 4, 5, 6, 7], &[1]),
    ]);
    add("s14_ssm_scan", &scan);
    // Indices that the graph itself makes of floats.
    let made = graph(&[
        t(1, F32, &[16, 4], 0),
        t(2, F32, &[4], 512),
        n("CPY", t(3, I32, &[4], 640), &[2, 3], &[]),
        n("GET_ROWS", t(4, F32, &[16, 4], 1024), &[1, 3], &[]),
    ]);
    add("s14_computed", &made);
    // In the buffer that both targets share with the guest.
    let shared = |tensor: TensorRecord| TensorRecord { buffer: BufferHandle(2), ..tensor };
    let race = graph(&[
        t(1, F32, &[16, 4], 0),
        shared(t(2, I32, &[8], 512)),
        n("GET_ROWS", t(3, F32, &[16, 8], 1024), &[1, 2], &[]),
    ]);
    add("s15_shared_indices", &race);
}
