//! One function an operation, or a family of them.
#![forbid(unsafe_code)]

use super::types::*;
use super::{Fill, Generator, Made};
use apir_protocol::tensor::TensorRecord;

type G<'u, 'a> = Generator<'u, 'a>;
/// Adds an operation to a graph; nothing when there is no room for it.
pub(crate) type Maker = fn(&mut G<'_, '_>) -> Made;

/// The operations that random graphs are made of.
#[rustfmt::skip]
pub(crate) const MAKERS: &[(&str, Maker)] = &[
    ("SQR", square), ("SQRT, LOG, SIN, COS", maps), ("UNARY", unary), ("ADD, SUB, MUL, DIV", binary),
    ("ADD1", add1), ("ADD_ID", add_id), ("ACC, SET", acc), ("SCALE, CLAMP, LEAKY_RELU", scalars),
    ("NORM, RMS_NORM, L2_NORM", norms), ("RMS_NORM, MUL", norm_and_weight), ("GROUP_NORM", group_norm),
    ("SUM, SUM_ROWS, MEAN, CUMSUM", sums), ("ARGMAX", argmax), ("REPEAT", repeat), ("CONCAT", concat),
    ("MUL_MAT", mul_mat), ("MUL_MAT_ID", mul_mat_id), ("OUT_PROD", out_prod), ("GET_ROWS", get_rows),
    ("SET_ROWS", set_rows), ("CPY", cpy), ("CONT", cont), ("DUP", dup), ("VIEW", view), ("RESHAPE", reshape),
    ("PERMUTE", permute), ("TRANSPOSE", transpose), ("SOFT_MAX", soft_max), ("ROPE", rope), ("GLU", glu),
    ("ARGSORT", argsort), ("TOP_K", top_k), ("FLASH_ATTN_EXT", flash_attn), ("PAD", pad), ("ROLL", roll),
    ("PAD_REFLECT_1D", pad_reflect), ("TRI", tri), ("DIAG", diag), ("DIAG_MASK_INF", diag_mask), ("FILL", fill),
    ("ARANGE", arange), ("TIMESTEP_EMBEDDING", timestep), ("UPSCALE", upscale), ("IM2COL", im2col),
    ("POOL_1D", pool_1d), ("POOL_2D", pool_2d), ("CONV_2D", conv_2d), ("CONV_TRANSPOSE_1D", conv_transpose_1d),
    ("SSM_CONV", ssm_conv), ("SSM_SCAN", ssm_scan), ("RWKV_WKV6", wkv6), ("GATED_LINEAR_ATTN", linear_attn),
    ("GATED_DELTA_NET", delta_net), ("SOLVE_TRI", solve_tri), ("SILU_BACK", silu_back), ("ROUTING", routing),
];

fn bits(value: f32) -> i32 {
    value.to_bits() as i32
}

/// `next.src[0]` of the same shape and type, on itself.
fn like(g: &mut G<'_, '_>, name: &str, source: &TensorRecord, params: &[i32]) -> Made {
    g.node(name, source.type_, source.ne, &[source.id], params)
}

pub(crate) fn square(g: &mut G<'_, '_>) -> Made {
    let source = g.float_rows()?;
    like(g, "SQR", &source, &[])
}

fn maps(g: &mut G<'_, '_>) -> Made {
    let type_ = g.one_of(&[F32, F16, BF16]);
    let source = g.some(type_, false)?;
    let name = g.one_of(&["SQRT", "LOG", "SIN", "COS"]);
    like(g, name, &source, &[])
}

fn unary(g: &mut G<'_, '_>) -> Made {
    let map = g.below(22) as i32;
    let source = if map == 17 { g.floats()? } else { g.float_rows()? };
    let params =
        if map == 17 { [map, bits(0.8), bits(0.8), bits(0.5), bits(-1e-6)] } else { [map, 0, 0, 0, 0] };
    like(g, "UNARY", &source, &params)
}

fn binary(g: &mut G<'_, '_>) -> Made {
    let name = g.one_of(&["ADD", "SUB", "MUL", "DIV"]);
    let a = g.float_rows()?;
    let mut ne = a.ne;
    for dim in &mut ne {
        if g.flip() {
            *dim = 1;
        }
    }
    let b = g.input(F32, ne)?;
    g.node(name, F32, a.ne, &[a.id, b], &[])
}

fn add1(g: &mut G<'_, '_>) -> Made {
    let a = g.floats()?;
    let b = g.input(F32, [1; 4])?;
    g.node("ADD1", F32, a.ne, &[a.id, b], &[])
}

fn add_id(g: &mut G<'_, '_>) -> Made {
    let (row, used, tokens, rows) =
        (1 + g.below(32) as u32, 1 + g.below(4) as u32, 1 + g.below(4) as u32, 1 + g.below(6) as u32);
    let a = g.input(F32, [row, used, tokens, 1])?;
    let b = g.input(F32, [row, rows, 1, 1])?;
    let ids = g.leaf(I32, [used, tokens, 1, 1], Fill::Below(rows as usize))?;
    g.node("ADD_ID", F32, [row, used, tokens, 1], &[a, b, ids], &[])
}

fn acc(g: &mut G<'_, '_>) -> Made {
    let name = g.one_of(&["ACC", "SET"]);
    let a = g.floats()?;
    let part = [1 + g.below(a.ne[0] as usize) as u32, 1 + g.below(a.ne[1] as usize) as u32, 1, 1];
    let b = g.input(F32, part)?;
    let [_, nb1, nb2, nb3] = a.nb.map(|stride| stride as i32);
    let offset = 4 * (a.ne[0] - part[0]) as i32;
    g.node(name, F32, a.ne, &[a.id, b], &[nb1, nb2, nb3, offset, 0])
}

fn scalars(g: &mut G<'_, '_>) -> Made {
    let name = g.one_of(&["SCALE", "CLAMP", "LEAKY_RELU"]);
    let source = g.floats()?;
    let params = match name {
        "SCALE" => [g.float(), if g.flip() { g.float() } else { 0 }],
        "CLAMP" => [bits(-0.5), bits(0.5)],
        _ => [bits(0.1), 0],
    };
    like(g, name, &source, &params)
}

fn norms(g: &mut G<'_, '_>) -> Made {
    let name = g.one_of(&["NORM", "RMS_NORM", "L2_NORM"]);
    let source = g.float_rows()?;
    like(g, name, &source, &[bits(1e-5)])
}

fn norm_and_weight(g: &mut G<'_, '_>) -> Made {
    let source = g.floats()?;
    let norm = like(g, "RMS_NORM", &source, &[bits(1e-5)])?;
    let weight = g.input(F32, [source.ne[0], 1, 1, 1])?;
    g.node("MUL", F32, source.ne, &[norm, weight], &[])
}

fn group_norm(g: &mut G<'_, '_>) -> Made {
    let source = g.floats()?;
    let groups = 1 + g.below(source.ne[2] as usize) as i32;
    like(g, "GROUP_NORM", &source, &[groups, bits(1e-5)])
}

fn sums(g: &mut G<'_, '_>) -> Made {
    let name = g.one_of(&["SUM", "SUM_ROWS", "MEAN", "CUMSUM"]);
    let source = g.floats()?;
    let [ne0, ne1, ne2, ne3] = source.ne;
    let ne = match name {
        "SUM" => [1; 4],
        "CUMSUM" => [ne0, ne1, ne2, ne3],
        _ => [1, ne1, ne2, ne3],
    };
    g.node(name, F32, ne, &[source.id], &[])
}

fn argmax(g: &mut G<'_, '_>) -> Made {
    let (row, rows) = (1 + g.below(40) as u32, 1 + g.below(6) as u32);
    let source = g.input(F32, [row, rows, 1, 1])?;
    g.node("ARGMAX", I32, [rows, 1, 1, 1], &[source], &[])
}

fn repeat(g: &mut G<'_, '_>) -> Made {
    let source = g.floats()?;
    let ne = source.ne.map(|elements| elements * (1 + g.below(2) as u32));
    g.node("REPEAT", F32, ne, &[source.id], &[])
}

fn concat(g: &mut G<'_, '_>) -> Made {
    let type_ = g.one_of(&[F32, F16, I32, Q8_0]);
    let a = g.some(type_, true)?;
    let dim = g.below(4);
    let mut ne = a.ne;
    ne[dim] = if type_ == Q8_0 && dim == 0 { 32 } else { 1 + g.below(3) as u32 };
    let b = g.input(type_, ne)?;
    let mut sum = a.ne;
    sum[dim] += ne[dim];
    g.node("CONCAT", type_, sum, &[a.id, b], &[dim as i32])
}

/// The types that matrices of weights have here.
const WEIGHTS: &[u32] = &[F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q8_0, Q4_K, Q6_K];

fn inner(g: &mut G<'_, '_>, type_: u32) -> u32 {
    match type_ {
        Q4_K | Q6_K => 256,
        F32 | F16 | BF16 => 1 + g.below(64) as u32,
        _ => 32 * (1 + g.below(4) as u32),
    }
}

/// The type of a matrix beside one of weights: F32, or what kernels turn it into.
fn multiplied_with(g: &mut G<'_, '_>, weights: u32) -> u32 {
    match weights {
        _ if g.below(4) != 0 => F32,
        Q4_0 | Q5_0 | Q8_0 => Q8_0,
        Q4_1 => Q8_1,
        Q4_K | Q6_K => Q8_K,
        same => same,
    }
}

fn mul_mat(g: &mut G<'_, '_>) -> Made {
    let type_ = g.one_of(WEIGHTS);
    let (k, m, n) = (inner(g, type_), 1 + g.below(17) as u32, 1 + g.below(9) as u32);
    let (ne2, ne3, by2, by3) =
        (1 + g.below(2) as u32, 1 + g.below(2) as u32, 1 + g.below(3) as u32, 1 + g.below(2) as u32);
    let a = g.input(type_, [k, m, ne2, ne3])?;
    let other = multiplied_with(g, type_);
    let b = g.input(other, [k, n, ne2 * by2, ne3 * by3])?;
    g.node("MUL_MAT", F32, [m, n, ne2 * by2, ne3 * by3], &[a, b], &[])
}

fn mul_mat_id(g: &mut G<'_, '_>) -> Made {
    let type_ = g.one_of(WEIGHTS);
    let (k, m) = (inner(g, type_), 1 + g.below(9) as u32);
    let (experts, tokens) = (1 + g.below(5) as u32, 1 + g.below(4) as u32);
    let used = 1 + g.below(experts as usize) as u32;
    let a = g.input(type_, [k, m, experts, 1])?;
    let each = if g.flip() { used } else { 1 };
    let other = multiplied_with(g, type_);
    let b = g.input(other, [k, each, tokens, 1])?;
    let ids = g.leaf(I32, [used, tokens, 1, 1], Fill::Different(experts as usize))?;
    g.node("MUL_MAT_ID", F32, [m, used, tokens, 1], &[a, b, ids], &[])
}

fn out_prod(g: &mut G<'_, '_>) -> Made {
    let (m, n, k) = (1 + g.below(16) as u32, 1 + g.below(8) as u32, 1 + g.below(8) as u32);
    let a = g.input(F32, [m, k, 1, 1])?;
    let b = g.input(F32, [n, k, 1, 1])?;
    g.node("OUT_PROD", F32, [m, n, 1, 1], &[a, b], &[])
}

fn get_rows(g: &mut G<'_, '_>) -> Made {
    let type_ = g.one_of(&[F32, F16, BF16, I32, Q4_0, Q8_0, Q4_K, Q6_K]);
    let (row, rows, wanted) = (inner(g, type_), 1 + g.below(9) as u32, 1 + g.below(9) as u32);
    let ne2 = 1 + g.below(2) as u32;
    let row = if type_ == I32 { row.min(64) } else { row };
    let table = g.input(type_, [row, rows, ne2, 1])?;
    let ids = g.leaf(I32, [wanted, ne2, 1, 1], Fill::Below(rows as usize))?;
    let result = if type_ == I32 { I32 } else { F32 };
    g.node("GET_ROWS", result, [row, wanted, ne2, 1], &[table, ids], &[])
}

fn set_rows(g: &mut G<'_, '_>) -> Made {
    let type_ = g.one_of(&[F32, F16, BF16, Q8_0, Q4_0]);
    let row = if matches!(type_, Q8_0 | Q4_0) { 64 } else { 1 + g.below(40) as u32 };
    let rows = 1 + g.below(16) as u32;
    // Each row once: which of two threads writes last is not said.
    let written = 1 + g.below(rows as usize) as u32;
    // The table is new, and so is no source of itself.
    let from = g.one_of(&[F32, F16]);
    let source = g.input(from, [row, written, 1, 1])?;
    let table = g.leaf(type_, [row, rows, 1, 1], Fill::Numbers)?;
    let index = g.one_of(&[I64, I32]);
    let ids = g.leaf(index, [written, 1, 1, 1], Fill::Different(rows as usize))?;
    let table = g.get(table)?;
    g.view("SET_ROWS", table.id, (table.ne, table.nb, 0), &[source, ids, table.id], &[])
}

fn cpy(g: &mut G<'_, '_>) -> Made {
    let from = g.one_of(&[F32, F32, F16, BF16, I32, Q8_0, Q4_0]);
    let to = match from {
        F32 => g.one_of(&[F32, F16, BF16, I32, Q8_0, Q4_0, Q4_1, Q5_0]),
        F16 | BF16 => g.one_of(&[F32, F16, BF16]),
        Q8_0 | Q4_0 => g.one_of(&[F32, from]),
        _ => g.one_of(&[F32, I32]),
    };
    let source = if matches!(to, Q8_0 | Q4_0 | Q4_1 | Q5_0) && from == F32 {
        let rows = 1 + g.below(5) as u32;
        let id = g.input(F32, [64, rows, 1, 1])?;
        g.get(id)?
    } else {
        g.some(from, true)?
    };
    if g.flip() {
        let cast = g.node("CPY", to, source.ne, &[source.id], &[])?;
        // A cast says that it is its own destination.
        g.case.graph.tensors.last_mut()?.src[1] = cast;
        return Some(cast);
    }
    let id = g.leaf(to, source.ne, Fill::Numbers)?;
    let target = g.get(id)?;
    g.view("CPY", target.id, (target.ne, target.nb, 0), &[source.id, target.id], &[])
}

fn cont(g: &mut G<'_, '_>) -> Made {
    // What is not dense, where there is any, is what CONT is for.
    let views = g.tensors(|tensor| tensor.type_ == F32 && tensor.view_src != 0);
    let source = if views.is_empty() {
        g.floats()?
    } else {
        let id = g.one_of(&views);
        g.get(id)?
    };
    like(g, "CONT", &source, &[])
}

fn dup(g: &mut G<'_, '_>) -> Made {
    let type_ = g.one_of(&[F32, F16, Q8_0]);
    let source = g.some(type_, true)?;
    like(g, "DUP", &source, &[])
}

fn view(g: &mut G<'_, '_>) -> Made {
    let of = g.floats()?;
    let ne = of.ne.map(|elements| 1 + g.below(elements as usize) as u32);
    let offset: u32 =
        (0..4).map(|dim| of.nb[dim] * g.below((of.ne[dim] - ne[dim] + 1) as usize) as u32).sum();
    g.view("VIEW", of.id, (ne, of.nb, offset.into()), &[of.id], &[offset as i32, 0])
}

fn reshape(g: &mut G<'_, '_>) -> Made {
    let of = g.floats()?;
    let [ne0, ne1, ne2, ne3] = of.ne;
    let ne = g.one_of(&[[ne0 * ne1, ne2, ne3, 1], [ne0, ne1 * ne2 * ne3, 1, 1], [ne1, ne0, ne3, ne2]]);
    let nb = [4, 4 * ne[0], 4 * ne[0] * ne[1], 4 * ne[0] * ne[1] * ne[2]];
    g.view("RESHAPE", of.id, (ne, nb, 0), &[of.id], &[])
}

fn permute(g: &mut G<'_, '_>) -> Made {
    let of = g.floats()?;
    let axes = g.one_of(&[[0, 2, 1, 3], [1, 0, 2, 3], [2, 0, 1, 3], [0, 1, 3, 2], [3, 2, 1, 0]]);
    let (mut ne, mut nb) = ([0; 4], [0; 4]);
    for (from, to) in axes.into_iter().enumerate() {
        (ne[to], nb[to]) = (of.ne[from], of.nb[from]);
    }
    g.view("PERMUTE", of.id, (ne, nb, 0), &[of.id], &axes.map(|axis| axis as i32))
}

fn transpose(g: &mut G<'_, '_>) -> Made {
    let of = g.floats()?;
    let ([a, b, c, d], [e, f, h, i]) = (of.ne, of.nb);
    g.view("TRANSPOSE", of.id, ([b, a, c, d], [f, e, h, i], 0), &[of.id], &[])
}

fn soft_max(g: &mut G<'_, '_>) -> Made {
    let source = g.floats()?;
    let mut src = vec![source.id];
    if g.flip() {
        let type_ = g.one_of(&[F32, F16]);
        src.push(g.input(type_, [source.ne[0], source.ne[1], 1, 1])?);
    }
    let bias = if src.len() > 1 && g.flip() { bits(8.0) } else { 0 };
    g.node("SOFT_MAX", F32, source.ne, &src, &[bits(0.5), bias])
}

fn rope(g: &mut G<'_, '_>) -> Made {
    let type_ = g.one_of(&[F32, F16]);
    let (pairs, heads, tokens) = (1 + g.below(32) as u32, 1 + g.below(4) as u32, 1 + g.below(5) as u32);
    let ne = [2 * pairs, heads, tokens, 1];
    let source = g.input(type_, ne)?;
    let mode = g.one_of(&[0, 2, 8, 40]);
    let positions = if mode & 8 == 0 { tokens } else { 4 * tokens };
    let positions = g.leaf(I32, [positions, 1, 1, 1], Fill::Below(100))?;
    let mut src = vec![source, positions];
    if g.flip() {
        src.push(g.input(F32, [pairs, 1, 1, 1])?);
    }
    let rotated = 2 * (1 + g.below(pairs as usize) as i32);
    let mut params = [0; 16];
    params[1..3].copy_from_slice(&[rotated, mode]);
    params[4] = 512;
    params[5..11].copy_from_slice(&[1e4, 1.0, 0.0, 1.0, 32.0, 1.0].map(bits));
    if mode & 8 != 0 {
        params[11..15].copy_from_slice(&[1, pairs as i32 / 2, 0, 0]);
    }
    let name = if mode & 8 == 0 && g.below(4) == 0 { "ROPE_BACK" } else { "ROPE" };
    g.node(name, type_, ne, &src, &params)
}

fn glu(g: &mut G<'_, '_>) -> Made {
    let kind = g.below(7) as i32;
    let (half, rows, ne2) = (1 + g.below(33) as u32, 1 + g.below(5) as u32, 1 + g.below(2) as u32);
    let ne = [half, rows, ne2, 1];
    let src = if g.flip() {
        vec![g.input(F32, ne)?, g.input(F32, ne)?]
    } else {
        vec![g.input(F32, [2 * half, rows, ne2, 1])?]
    };
    let swapped = i32::from(src.len() == 1 && g.flip());
    let limits = if kind == 3 || kind == 6 { [bits(1.7), bits(7.0)] } else { [0, 0] };
    let limits = if kind == 6 { [0, limits[1]] } else { limits };
    g.node("GLU", F32, ne, &src, &[kind, swapped, limits[0], limits[1]])
}

fn argsort(g: &mut G<'_, '_>) -> Made {
    let source = g.floats()?;
    let order = g.below(2) as i32;
    g.node("ARGSORT", I32, source.ne, &[source.id], &[order])
}

fn top_k(g: &mut G<'_, '_>) -> Made {
    let source = g.floats()?;
    let mut ne = source.ne;
    ne[0] = 1 + g.below(ne[0] as usize) as u32;
    g.node("TOP_K", I32, ne, &[source.id], &[])
}

fn flash_attn(g: &mut G<'_, '_>) -> Made {
    let type_ = g.one_of(&[F32, F16, BF16, Q8_0, Q4_0]);
    let (head, queries, keys) =
        (32 * (1 + g.below(3) as u32), 1 + g.below(5) as u32, 4 * (1 + g.below(6) as u32));
    let (key_heads, group) = (1 + g.below(2) as u32, 1 + g.below(3) as u32);
    let q = g.input(F32, [head, queries, key_heads * group, 1])?;
    let k = g.input(type_, [head, keys, key_heads, 1])?;
    let v = g.input(type_, [head, keys, key_heads, 1])?;
    let mut src = vec![q, k, v];
    if g.flip() {
        src.push(g.input(F16, [keys, queries, 1, 1])?);
    }
    let cap = if g.flip() { bits(30.0) } else { 0 };
    let precision = if g.flip() { 10 } else { 0 };
    let ne = [head, key_heads * group, queries, 1];
    g.node("FLASH_ATTN_EXT", F32, ne, &src, &[bits(0.125), 0, cap, precision])
}

fn pad(g: &mut G<'_, '_>) -> Made {
    let source = g.floats()?;
    let circular = g.below(2) as i32;
    let mut params = [0; 9];
    let mut ne = source.ne;
    for dim in 0..4 {
        let most = if circular == 1 { source.ne[dim].min(2) } else { 2 } as usize;
        let (left, right) = (g.below(most + 1) as u32, g.below(most + 1) as u32);
        (params[2 * dim], params[2 * dim + 1]) = (left as i32, right as i32);
        ne[dim] += left + right;
    }
    params[8] = circular;
    g.node("PAD", F32, ne, &[source.id], &params)
}

fn roll(g: &mut G<'_, '_>) -> Made {
    let source = g.floats()?;
    let shifts = source.ne.map(|elements| g.below(elements as usize) as i32 * if g.flip() { -1 } else { 1 });
    like(g, "ROLL", &source, &shifts)
}

fn pad_reflect(g: &mut G<'_, '_>) -> Made {
    let source = g.floats()?;
    let (left, right) = (g.below(source.ne[0] as usize) as u32, g.below(source.ne[0] as usize) as u32);
    let [ne0, ne1, ne2, ne3] = source.ne;
    let ne = [ne0 + left + right, ne1, ne2, ne3];
    g.node("PAD_REFLECT_1D", F32, ne, &[source.id], &[left as i32, right as i32])
}

fn tri(g: &mut G<'_, '_>) -> Made {
    let (side, kind) = (1 + g.below(12) as u32, g.below(4) as i32);
    let source = g.input(F32, [side, side, 2, 1])?;
    g.node("TRI", F32, [side, side, 2, 1], &[source], &[kind])
}

fn diag(g: &mut G<'_, '_>) -> Made {
    let side = 1 + g.below(12) as u32;
    let source = g.input(F32, [side, 1, 2, 1])?;
    g.node("DIAG", F32, [side, side, 2, 1], &[source], &[])
}

fn diag_mask(g: &mut G<'_, '_>) -> Made {
    let name = g.one_of(&["DIAG_MASK_INF", "DIAG_MASK_ZERO"]);
    let source = g.floats()?;
    let past = g.below(5) as i32;
    like(g, name, &source, &[past])
}

fn fill(g: &mut G<'_, '_>) -> Made {
    let source = g.floats()?;
    let value = g.float();
    like(g, "FILL", &source, &[value])
}

fn arange(g: &mut G<'_, '_>) -> Made {
    let steps = 1 + g.below(64) as u32;
    g.node("ARANGE", F32, [steps, 1, 1, 1], &[], &[bits(0.0), bits(steps as f32 * 0.5), bits(0.5)])
}

fn timestep(g: &mut G<'_, '_>) -> Made {
    let (count, dim) = (1 + g.below(6) as u32, 1 + g.below(40) as u32);
    let source = g.input(F32, [count, 1, 1, 1])?;
    g.node("TIMESTEP_EMBEDDING", F32, [dim, count, 1, 1], &[source], &[dim as i32, 10_000])
}

fn upscale(g: &mut G<'_, '_>) -> Made {
    let source = g.floats()?;
    let mode = g.one_of(&[0, 1, 2, 0x100, 0x101, 0x102, 0x201, 0x301]);
    let mut ne = source.ne;
    (ne[0], ne[1]) = (1 + g.below(40) as u32, 1 + g.below(8) as u32);
    g.node("UPSCALE", F32, ne, &[source.id], &[mode])
}

/// How many places a window of `kernel` elements has in steps of 1 over a padded row.
fn places(input: u32, kernel: u32, padding: u32) -> u32 {
    input + 2 * padding - kernel + 1
}

fn im2col(g: &mut G<'_, '_>) -> Made {
    let (width, height, channels) = (3 + g.below(6) as u32, 3 + g.below(6) as u32, 1 + g.below(3) as u32);
    let (kernel, padding) = (1 + g.below(3) as u32, g.below(2) as u32);
    let a = g.input(F16, [kernel, kernel, channels, 2])?;
    let b = g.input(F32, [width, height, channels, 1])?;
    let (out_w, out_h) = (places(width, kernel, padding), places(height, kernel, padding));
    let type_ = g.one_of(&[F16, F32]);
    let params = [1, 1, padding as i32, padding as i32, 1, 1, 1];
    g.node("IM2COL", type_, [channels * kernel * kernel, out_w, out_h, 1], &[a, b], &params)
}

fn pool_1d(g: &mut G<'_, '_>) -> Made {
    let source = g.floats()?;
    let (kernel, kind) = (1 + g.below(source.ne[0].min(4) as usize) as u32, g.below(2) as i32);
    let mut ne = source.ne;
    ne[0] = (ne[0] - kernel) / kernel + 1;
    g.node("POOL_1D", F32, ne, &[source.id], &[kind, kernel as i32, kernel as i32, 0])
}

fn pool_2d(g: &mut G<'_, '_>) -> Made {
    let source = g.floats()?;
    let kernel = 1 + g.below(source.ne[0].min(source.ne[1]).min(3) as usize) as u32;
    let kind = g.below(2) as i32;
    let mut ne = source.ne;
    (ne[0], ne[1]) = (places(ne[0], kernel, 0), places(ne[1], kernel, 0));
    let k = kernel as i32;
    g.node("POOL_2D", F32, ne, &[source.id], &[kind, k, k, 1, 1, 0, 0])
}

fn conv_2d(g: &mut G<'_, '_>) -> Made {
    let (width, height, channels, out) =
        (3 + g.below(6) as u32, 3 + g.below(6) as u32, 1 + g.below(3) as u32, 1 + g.below(3) as u32);
    let (kernel, padding) = (1 + g.below(3) as u32, g.below(2) as u32);
    let type_ = g.one_of(&[F16, F32]);
    let a = g.input(type_, [kernel, kernel, channels, out])?;
    let b = g.input(F32, [width, height, channels, 1])?;
    let ne = [places(width, kernel, padding), places(height, kernel, padding), out, 1];
    g.node("CONV_2D", F32, ne, &[a, b], &[1, 1, padding as i32, padding as i32, 1, 1])
}

fn conv_transpose_1d(g: &mut G<'_, '_>) -> Made {
    let (kernel, out, channels, len, stride) = (
        1 + g.below(4) as u32,
        1 + g.below(4) as u32,
        1 + g.below(3) as u32,
        1 + g.below(8) as u32,
        1 + g.below(3) as u32,
    );
    let a = g.input(F32, [kernel, out, channels, 1])?;
    let b = g.input(F32, [len, channels, 1, 1])?;
    let ne = [(len - 1) * stride + kernel, out, 1, 1];
    g.node("CONV_TRANSPOSE_1D", F32, ne, &[a, b], &[stride as i32, 0, 1])
}

fn ssm_conv(g: &mut G<'_, '_>) -> Made {
    let (kernel, inner, tokens, sequences) =
        (2 + g.below(3) as u32, 1 + g.below(16) as u32, 1 + g.below(4) as u32, 1 + g.below(2) as u32);
    let a = g.input(F32, [kernel - 1 + tokens, inner, sequences, 1])?;
    let b = g.input(F32, [kernel, inner, 1, 1])?;
    g.node("SSM_CONV", F32, [inner, tokens, sequences, 1], &[a, b], &[])
}

fn ssm_scan(g: &mut G<'_, '_>) -> Made {
    let (state, head, tokens, sequences) =
        (16 * (1 + g.below(2) as u32), 1 + g.below(4) as u32, 1 + g.below(4) as u32, 1 + g.below(2) as u32);
    let (groups, each) = (1 + g.below(2) as u32, 1 + g.below(2) as u32);
    let (heads, kept) = (groups * each, sequences + 1);
    let states = g.input(F32, [state, head, heads, kept])?;
    let x = g.input(F32, [head, heads, tokens, sequences])?;
    let dt = g.input(F32, [heads, tokens, sequences, 1])?;
    let a = g.input(F32, [1, heads, 1, 1])?;
    let b = g.input(F32, [state, groups, tokens, sequences])?;
    let c = g.input(F32, [state, groups, tokens, sequences])?;
    let ids = g.leaf(I32, [sequences, 1, 1, 1], Fill::Below(kept as usize))?;
    let len = head * heads * tokens * sequences + state * head * heads * sequences;
    g.node("SSM_SCAN", F32, [len, 1, 1, 1], &[states, x, dt, a, b, c, ids], &[1])
}

/// Head size, heads, tokens and sequences of a linear attention.
fn linear(g: &mut G<'_, '_>) -> [u32; 4] {
    let sequences = 1 + g.below(2) as u32;
    [8 * (1 + g.below(2) as u32), 1 + g.below(3) as u32, sequences * (1 + g.below(3) as u32), sequences]
}

fn wkv6(g: &mut G<'_, '_>) -> Made {
    let [size, heads, tokens, sequences] = linear(g);
    let ne = [size, heads, tokens, 1];
    let mut src = vec![g.input(F32, ne)?, g.input(F32, ne)?, g.input(F32, ne)?];
    src.push(g.input(F32, [size, heads, 1, 1])?);
    src.push(g.input(F32, ne)?);
    src.push(g.input(F32, [size * size * heads, sequences, 1, 1])?);
    g.node("RWKV_WKV6", F32, [size * heads, tokens + size * sequences, 1, 1], &src, &[])
}

fn linear_attn(g: &mut G<'_, '_>) -> Made {
    let [size, heads, tokens, sequences] = linear(g);
    let ne = [size, heads, tokens, 1];
    let mut src = vec![g.input(F32, ne)?, g.input(F32, ne)?, g.input(F32, ne)?, g.input(F32, ne)?];
    src.push(g.input(F32, [size * size * heads, sequences, 1, 1])?);
    let ne = [size * heads, tokens + size * sequences, 1, 1];
    g.node("GATED_LINEAR_ATTN", F32, ne, &src, &[bits(0.5)])
}

fn delta_net(g: &mut G<'_, '_>) -> Made {
    let [size, heads, tokens, sequences] = linear(g);
    let ne = [size, heads, tokens, sequences];
    let gate = if g.flip() { size } else { 1 };
    let src = [
        g.input(F32, ne)?,
        g.input(F32, ne)?,
        g.input(F32, ne)?,
        g.input(F32, [gate, heads, tokens, sequences])?,
        g.input(F32, [1, heads, tokens, sequences])?,
        g.input(F32, [size, size, heads, sequences])?,
    ];
    let ne = [size * heads, tokens * sequences + size * sequences, 1, 1];
    g.node("GATED_DELTA_NET", F32, ne, &src, &[1])
}

fn solve_tri(g: &mut G<'_, '_>) -> Made {
    let (side, columns) = (1 + g.below(10) as u32, 1 + g.below(6) as u32);
    let a = g.input(F32, [side, side, 2, 1])?;
    let b = g.input(F32, [columns, side, 2, 1])?;
    g.node("SOLVE_TRI", F32, [columns, side, 2, 1], &[a, b], &[])
}

fn silu_back(g: &mut G<'_, '_>) -> Made {
    let x = g.floats()?;
    let grad = g.input(F32, x.ne)?;
    g.node("SILU_BACK", F32, x.ne, &[grad, x.id], &[])
}

/// Experts chosen by what the graph computes: indices that are no leaf.
fn routing(g: &mut G<'_, '_>) -> Made {
    let (experts, tokens) = (1 + g.below(6) as u32, 1 + g.below(4) as u32);
    let used = 1 + g.below(experts as usize) as u32;
    let scores = g.input(F32, [experts, tokens, 1, 1])?;
    let sorted = g.node("ARGSORT", I32, [experts, tokens, 1, 1], &[scores], &[1])?;
    let sorted = g.get(sorted)?;
    let chosen = g.view("VIEW", sorted.id, ([used, tokens, 1, 1], sorted.nb, 0), &[sorted.id], &[0, 0])?;
    let a = g.input(F32, [16, 4, experts, 1])?;
    let b = g.input(F32, [16, 1, tokens, 1])?;
    g.node("MUL_MAT_ID", F32, [4, used, tokens, 1], &[a, b, chosen], &[])
}
