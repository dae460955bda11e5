//! Nodes as ggml's own constructors make them, one or more for every operation that has rules.

use super::super::ops::FAMILIES;
use super::super::types::*;
use super::{Case, rules, t};
use apir_ggml::abi::FLAG_PARAM;
use apir_protocol::tensor::RawTensor;

const Q4_0: u32 = 2;

pub(crate) fn f(ne: &[i64]) -> RawTensor {
    t(F32, ne)
}

fn i(ne: &[i64]) -> RawTensor {
    t(I32, ne)
}

pub(crate) fn bits(value: f32) -> i32 {
    value.to_bits() as i32
}

fn c(op: &'static str, d: RawTensor, sources: &[RawTensor], params: &[i32]) -> Case {
    Case::new(op, d, sources, params)
}

/// With its first two dimensions swapped.
fn transposed(tensor: RawTensor) -> RawTensor {
    let (ne, nb) = (tensor.ne, tensor.nb);
    RawTensor { ne: [ne[1], ne[0], ne[2], ne[3]], nb: [nb[1], nb[0], nb[2], nb[3]], ..tensor }
}

fn trainable(ne: &[i64]) -> RawTensor {
    RawTensor { flags: FLAG_PARAM, ..f(ne) }
}

/// Channels side by side.
fn channel_fast(ne: [i64; 4]) -> RawTensor {
    let [width, height, channels, _] = ne.map(|elements| elements as u64);
    let pixel = 4 * channels;
    RawTensor { nb: [pixel, pixel * width, 4, pixel * width * height], ..f(&ne) }
}

fn views() -> Vec<Case> {
    let a = f(&[6, 4, 3]);
    let permuted = RawTensor { ne: [6, 3, 4, 1], nb: [4, 96, 24, 288], ..a };
    let part = RawTensor { ne: [3, 4, 3, 1], ..a };
    vec![
        c("RESHAPE", f(&[24, 3]), &[a], &[]).over(0),
        c("VIEW", part, &[a], &[12, 0]).over(0),
        c("PERMUTE", permuted, &[a], &[0, 2, 1, 3]).over(0),
        c("TRANSPOSE", transposed(a), &[a], &[]).over(0),
    ]
}

fn copies() -> Vec<Case> {
    let (a, blocks) = (f(&[64, 4]), t(Q8_0, &[64, 4]));
    let strided = RawTensor { nb: [4, 512, 2048, 2048], ..a };
    vec![
        c("DUP", a, &[a], &[]),
        c("DUP", strided, &[strided], &[]).over(0),
        c("CONT", f(&[4, 64]), &[transposed(a)], &[]),
        c("CONT", f(&[256]), &[strided], &[]),
        c("CONT", blocks, &[RawTensor { nb: [34, 136, 544, 544], ..blocks }], &[]),
        c("CPY", t(F16, &[64, 4]), &[a, t(F16, &[64, 4])], &[]).over(1),
        c("CPY", blocks, &[a, blocks], &[]).over(1),
        c("CPY", a, &[blocks, a], &[]).over(1),
        c("CPY", t(Q8_0, &[32, 8]), &[blocks, t(Q8_0, &[32, 8])], &[]).over(1),
        c("CPY", f(&[16, 16]), &[blocks, f(&[16, 16])], &[]).over(1),
        c("CPY", i(&[64, 4]), &[a, i(&[64, 4])], &[]).with(|cast| cast.cast = true),
        c("CPY", f(&[128, 2]), &[strided, f(&[128, 2])], &[]).over(1),
    ]
}

fn arithmetic() -> Vec<Case> {
    let (a, row, blocks) = (f(&[64, 4, 2]), f(&[64]), t(Q4_0, &[64, 4, 2]));
    let mut cases: Vec<_> = ["ADD", "SUB", "MUL", "DIV"].iter().map(|op| c(op, a, &[a, row], &[])).collect();
    cases.extend([
        c("ADD", a, &[a, a], &[]).over(0),
        c("ADD", t(F16, &[64, 4]), &[t(F16, &[64, 4]), row], &[]),
        c("ADD", blocks, &[blocks, a], &[]),
        c("ADD1", a, &[a, f(&[1])], &[]),
        c("ADD1", blocks, &[blocks, f(&[1])], &[]),
        c("ADD_ID", f(&[8, 2, 3]), &[f(&[8, 2, 3]), f(&[8, 5]), i(&[2, 3])], &[]),
        c("ACC", f(&[8, 4]), &[f(&[8, 4]), f(&[2, 2])], &[32, 128, 128, 8, 0]),
        c("ACC", f(&[8, 4]), &[f(&[8, 4]), f(&[2, 2])], &[32, 128, 128, 88, 1]).over(0),
        c("SET", f(&[8, 4]), &[f(&[8, 4]), f(&[8])], &[32, 128, 128, 96, 0]),
        c("SET", i(&[8, 4]), &[i(&[8, 4]), i(&[2, 2])], &[32, 128, 128, 88, 1]).over(0),
    ]);
    cases
}

fn maps() -> Vec<Case> {
    let a = f(&[16, 3, 2]);
    let mut cases: Vec<_> =
        ["SQR", "SQRT", "LOG", "SIN", "COS"].iter().map(|op| c(op, a, &[a], &[])).collect();
    cases.extend((0..22).map(|map| c("UNARY", a, &[a], &[map])));
    cases.extend([
        c("SQR", f(&[16]), &[t(BF16, &[16])], &[]),
        c("UNARY", a, &[a], &[17, bits(0.8), bits(0.8), bits(0.5), bits(-1e-6)]),
        c("UNARY", a, &[RawTensor { nb: [4, 256, 768, 1536], ..a }], &[10]),
        c("LEAKY_RELU", a, &[a], &[bits(0.1)]),
        c("CLAMP", a, &[a], &[bits(-1.0), bits(1.0)]).over(0),
        c("CLAMP", a, &[a], &[bits(-1.0), bits(1.0)]),
        c("SCALE", a, &[a], &[bits(2.0), bits(1.0)]),
        c("FILL", a, &[a], &[bits(3.0)]),
        c("FILL", t(F16, &[16, 3]), &[t(F16, &[16, 3])], &[bits(3.0)]),
        c("TRI", f(&[4, 4, 2]), &[f(&[4, 4, 2])], &[2]),
        c("DIAG", f(&[4, 4, 2]), &[f(&[4, 1, 2])], &[]),
        c("DIAG_MASK_INF", a, &[a], &[3]),
        c("DIAG_MASK_ZERO", a, &[a], &[0]),
        c("DIAG_MASK_ZERO", a, &[a], &[0]).over(0),
        c("CUMSUM", a, &[a], &[]),
        c("GLU", f(&[8, 3, 2]), &[a], &[2, 1]),
        c("GLU", a, &[a, a], &[1, 0]),
        c("GLU", a, &[a, a], &[3, 0, bits(1.7), bits(7.0)]),
        c("GLU", a, &[a, a], &[6, 0, 0, bits(7.0)]),
        c("SUM", f(&[1]), &[a], &[]),
        c("SUM_ROWS", f(&[1, 3, 2]), &[a], &[]),
        c("MEAN", f(&[1, 3, 2]), &[a], &[]),
        c("ARGMAX", i(&[3]), &[f(&[16, 3])], &[]),
        c("COUNT_EQUAL", t(I64, &[1]), &[i(&[16, 3]), i(&[16, 3])], &[]),
        c("UNARY", t(BF16, &[16, 3]), &[t(BF16, &[16, 3])], &[8]),
        c("GLU", t(BF16, &[8, 3]), &[t(BF16, &[16, 3])], &[2]),
        c("SCALE", t(BF16, &[16, 3]), &[t(BF16, &[16, 3])], &[bits(2.0), 0]),
    ]);
    cases
}

fn shapes() -> Vec<Case> {
    let a = f(&[8, 3]);
    vec![
        c("REPEAT", f(&[16, 3, 2]), &[a], &[]),
        c("REPEAT_BACK", f(&[4, 3]), &[a], &[]),
        c("CONCAT", f(&[8, 5]), &[a, f(&[8, 2])], &[1]),
        c("CONCAT", t(Q8_0, &[96, 2]), &[t(Q8_0, &[64, 2]), t(Q8_0, &[32, 2])], &[0]),
        c("CONCAT", f(&[8, 3]), &[f(&[8, 0]), f(&[8, 3])], &[1]),
        c("CONCAT", t(I64, &[8, 5]), &[t(I64, &[8, 3]), t(I64, &[8, 2])], &[1]),
        c("PAD", f(&[11, 4]), &[a], &[1, 2, 0, 1]),
        c("PAD", f(&[11, 4]), &[a], &[1, 2, 0, 1, 0, 0, 0, 0, 1]),
        c("PAD_REFLECT_1D", f(&[11, 3]), &[a], &[1, 2]),
        c("ROLL", a, &[a], &[7, -2]),
        c("UPSCALE", f(&[16, 6]), &[a], &[1]),
        c("UPSCALE", f(&[4, 2]), &[a], &[0x201]),
        c("ARANGE", f(&[10]), &[], &[bits(0.0), bits(5.0), bits(0.5)]),
        c("TIMESTEP_EMBEDDING", f(&[32, 3]), &[f(&[3])], &[32, 10_000]),
    ]
}

fn norms() -> Vec<Case> {
    let (a, eps) = (f(&[16, 3, 2]), bits(1e-5));
    let mut cases: Vec<_> = ["NORM", "RMS_NORM", "L2_NORM"].iter().map(|op| c(op, a, &[a], &[eps])).collect();
    let rope = |mode: i32, n_dims: i32, sections: [i32; 4]| {
        let mut params = [
            0,
            n_dims,
            mode,
            0,
            512,
            bits(1e4),
            bits(1.0),
            0,
            bits(1.0),
            bits(32.0),
            bits(1.0),
            0,
            0,
            0,
            0,
            0,
        ];
        params[11..15].copy_from_slice(&sections);
        let positions = if mode & 8 == 0 { i(&[5]) } else { i(&[20]) };
        c("ROPE", f(&[16, 2, 5]), &[f(&[16, 2, 5]), positions], &params)
    };
    // Whatever lies between the elements of a row, a norm may be taken over it in place; not so its packed result.
    cases.extend(["NORM", "L2_NORM"].map(|op| c(op, a, &[a], &[eps]).over(0)));
    cases.extend([
        c("NORM", f(&[3, 16, 2]), &[transposed(a)], &[eps]),
        c("L2_NORM", f(&[3, 16, 2]), &[transposed(a)], &[eps]),
        c("RMS_NORM_BACK", a, &[a, a], &[eps]),
        c("GROUP_NORM", a, &[a], &[2, eps]),
        c("SILU_BACK", a, &[a, a], &[]),
        c("SOFT_MAX", a, &[a], &[bits(1.0)]),
        c("SOFT_MAX", a, &[a, t(F16, &[16, 32])], &[bits(1.0), bits(8.0)]).over(0),
        c("SOFT_MAX", a, &[a, f(&[16, 3]), f(&[2])], &[bits(1.0)]),
        c("SOFT_MAX_BACK", a, &[a, a], &[bits(1.0)]),
        rope(0, 16, [0; 4]),
        rope(2, 8, [0; 4]),
        rope(8, 16, [2, 3, 3, 0]),
        rope(24, 8, [4, 4, 0, 0]),
        rope(40, 16, [2, 3, 3, 0]),
        rope(0, 16, [0; 4]).with(|case| case.sources.push(Some(f(&[8])))),
        rope(0, 8, [0; 4]).with(|case| case.d.op_params[15] = 4),
    ]);
    let back: Vec<_> = cases.iter().filter(|case| case.op == "ROPE").cloned().collect();
    cases.extend(back.into_iter().map(|case| case.with(|case| case.op = "ROPE_BACK")));
    cases
}

fn products() -> Vec<Case> {
    let weights = t(Q4_0, &[64, 8]);
    vec![
        c("MUL_MAT", f(&[8, 3]), &[weights, f(&[64, 3])], &[]),
        c("MUL_MAT", f(&[8, 3, 4]), &[t(F16, &[64, 8, 2]), t(F16, &[64, 3, 4])], &[10]),
        c("MUL_MAT", f(&[8, 3]), &[f(&[64, 8]), t(F16, &[64, 3])], &[]),
        c("MUL_MAT", f(&[8, 3]), &[f(&[64, 8]), t(BF16, &[64, 3])], &[]),
        c("MUL_MAT", f(&[8, 3]), &[f(&[8, 8]), f(&[8, 3])], &[0, 1]),
        c("MUL_MAT", f(&[8, 3]), &[f(&[8, 8]), t(F16, &[8, 3])], &[0, 1]),
        c("MUL_MAT_ID", f(&[8, 2, 3]), &[t(Q4_0, &[64, 8, 5]), f(&[64, 1, 3]), i(&[2, 3])], &[]),
        c("OUT_PROD", f(&[16, 4]), &[f(&[16, 3]), f(&[4, 3])], &[]),
        c("OUT_PROD", f(&[16, 4]), &[t(F16, &[16, 3]), f(&[4, 3])], &[]),
        c("GET_ROWS", f(&[64, 3]), &[weights, i(&[3])], &[]),
        c("GET_ROWS", i(&[2, 3, 2]), &[i(&[2, 9, 2]), i(&[3, 2])], &[]),
        c("GET_ROWS_BACK", f(&[16, 9]), &[f(&[16, 3]), i(&[3])], &[]),
        c("SET_ROWS", t(F16, &[16, 9, 2]), &[f(&[16, 3, 2]), t(I64, &[3]), t(F16, &[16, 9, 2])], &[]).over(2),
        c("SET_ROWS", f(&[32, 9]), &[t(F16, &[32, 3]), t(I64, &[3]), f(&[32, 9])], &[]).over(2),
        c("SET_ROWS", t(Q8_0, &[64, 9]), &[f(&[64, 3]), i(&[3]), t(Q8_0, &[64, 9])], &[]).over(2),
        c("SET_ROWS", f(&[64, 9]), &[t(F16, &[64, 3]), i(&[3]), f(&[64, 9])], &[]).over(2),
        c("ARGSORT", i(&[16, 3]), &[f(&[16, 3])], &[1]),
        c("TOP_K", i(&[4, 3]), &[f(&[16, 3])], &[]),
    ]
}

fn convolutions() -> Vec<Case> {
    let steps = [1, 1, 0, 0, 1, 1];
    let image = f(&[10, 8, 3, 2]);
    vec![
        c("IM2COL", t(F16, &[27, 8, 6, 2]), &[t(F16, &[3, 3, 3, 4]), image], &[1, 1, 0, 0, 1, 1, 1]),
        c("IM2COL", f(&[9, 8, 2]), &[f(&[3, 3, 4]), f(&[10, 3, 2])], &[1, 0, 0, 0, 1, 0, 0]),
        c("IM2COL", t(F16, &[27, 8, 6, 2]), &[f(&[3, 3, 3, 4]), image], &[1, 1, 0, 0, 1, 1, 1]),
        c("IM2COL_BACK", image, &[f(&[27, 8, 6, 2]), f(&[3, 3, 3, 4])], &[1, 1, 0, 0, 1, 1, 1]),
        c("IM2COL_BACK", image, &[f(&[27, 8, 6, 2]), t(F16, &[3, 3, 3, 4])], &[1, 1, 0, 0, 1, 1, 1]),
        c(
            "IM2COL_3D",
            t(F16, &[54, 8, 6, 8]),
            &[f(&[3, 3, 3, 8]), f(&[10, 8, 6, 4])],
            &[1, 1, 1, 0, 0, 0, 1, 1, 1, 2],
        ),
        c(
            "IM2COL_3D",
            f(&[54, 8, 6, 8]),
            &[f(&[3, 3, 3, 8]), f(&[10, 8, 6, 4])],
            &[1, 1, 1, 0, 0, 0, 1, 1, 1, 2],
        ),
        c("COL2IM_1D", f(&[11, 4]), &[f(&[12, 5])], &[2, 4, 0]),
        c("CONV_2D", f(&[8, 6, 4, 2]), &[t(F16, &[3, 3, 3, 4]), image], &steps),
        c(
            "CONV_3D",
            f(&[8, 6, 4, 6]),
            &[f(&[3, 3, 3, 6]), f(&[10, 8, 6, 4])],
            &[1, 1, 1, 0, 0, 0, 1, 1, 1, 2, 2, 3],
        ),
        c("CONV_2D_DW", f(&[8, 6, 3, 2]), &[f(&[3, 3, 1, 3]), image], &steps),
        c("CONV_2D_DW", f(&[8, 6, 3, 2]), &[t(F16, &[3, 3, 1, 3]), image], &steps),
        c(
            "CONV_2D_DW",
            channel_fast([8, 6, 3, 2]),
            &[RawTensor { nb: [12, 36, 4, 4], ..f(&[3, 3, 1, 3]) }, channel_fast([10, 8, 3, 2])],
            &steps,
        ),
        c("CONV_TRANSPOSE_1D", f(&[11, 4]), &[f(&[3, 4, 2]), f(&[5, 2])], &[2, 0, 1]),
        c("CONV_TRANSPOSE_2D", f(&[11, 9, 4, 2]), &[t(F16, &[3, 3, 4, 2]), f(&[5, 4, 2, 2])], &[2]),
        c("POOL_1D", f(&[5, 3]), &[f(&[10, 3])], &[0, 2, 2, 0]),
        c("POOL_2D", f(&[5, 4, 3]), &[f(&[10, 8, 3])], &[1, 2, 2, 2, 2, 0, 0]),
        c("POOL_2D_BACK", f(&[10, 8, 3]), &[f(&[5, 4, 3]), f(&[10, 8, 3])], &[1, 2, 2, 2, 2, 0, 0]),
        c("WIN_PART", f(&[8, 4, 4, 6]), &[f(&[8, 10, 7])], &[3, 2, 4]),
        c("WIN_UNPART", f(&[8, 10, 7]), &[f(&[8, 4, 4, 6])], &[4]),
        c("GET_REL_POS", t(F16, &[8, 4, 4]), &[t(F16, &[8, 7])], &[]),
        c("ADD_REL_POS", f(&[16, 6, 2]), &[f(&[16, 6, 2]), f(&[4, 2, 3, 2]), f(&[4, 2, 3, 2])], &[0]),
    ]
}

fn sequences() -> Vec<Case> {
    let heads = f(&[64, 2, 6]);
    let state = f(&[64 * 64 * 2, 3]);
    let outputs = f(&[128, 6 + 64 * 3]);
    vec![
        c(
            "FLASH_ATTN_EXT",
            f(&[48, 4, 5, 2]),
            &[f(&[64, 5, 4, 2]), t(Q8_0, &[64, 7, 2, 2]), t(F16, &[48, 7, 2, 2]), t(F16, &[7, 64]), f(&[4])],
            &[bits(0.1), bits(8.0), 0, 10, 7],
        ),
        c("FLASH_ATTN_EXT", f(&[64, 4, 5]), &[f(&[64, 5, 4]), f(&[64, 7, 4]), f(&[64, 7, 1])], &[bits(0.1)]),
        c(
            "LIGHTNING_INDEXER",
            f(&[7, 5, 1, 2]),
            &[f(&[64, 4, 5, 2]), t(Q8_0, &[64, 1, 7, 2]), f(&[4, 5, 1, 2]), t(F16, &[7, 5, 1, 1])],
            &[],
        ),
        c("SSM_CONV", f(&[8, 5, 2]), &[f(&[8, 8, 2]), f(&[4, 8])], &[]),
        c(
            "SSM_SCAN",
            f(&[4 * 2 * 5 * 3 + 16 * 4 * 2 * 3]),
            &[
                f(&[16, 4, 2, 9]),
                f(&[4, 2, 5, 3]),
                f(&[2, 5, 3]),
                f(&[1, 2]),
                f(&[16, 1, 5, 3]),
                f(&[16, 1, 5, 3]),
                i(&[3]),
            ],
            &[1],
        ),
        c(
            "SSM_SCAN",
            f(&[4 * 2 * 5 * 3 + 2 * 16 * 4 * 2 * 3]),
            &[
                f(&[16, 4, 2, 9]),
                f(&[4, 2, 5, 3]),
                f(&[2, 5, 3]),
                f(&[1, 2]),
                f(&[16, 1, 5, 3]),
                f(&[16, 1, 5, 3]),
                i(&[3]),
            ],
            &[2],
        ),
        c("RWKV_WKV6", outputs, &[heads, heads, heads, f(&[64, 2]), heads, state], &[]),
        c("GATED_LINEAR_ATTN", outputs, &[heads, heads, heads, heads, state], &[bits(1.0)]),
        c("RWKV_WKV7", outputs, &[heads, heads, heads, heads, heads, heads, state], &[]),
        c(
            "GATED_DELTA_NET",
            f(&[64, 5 * 3 + 2 * 16 * 3]),
            &[
                f(&[16, 2, 5, 3]),
                f(&[16, 2, 5, 3]),
                f(&[16, 4, 5, 3]),
                f(&[1, 4, 5, 3]),
                f(&[1, 4, 5, 3]),
                f(&[16, 16, 4, 3]),
            ],
            &[2],
        ),
        c("SOLVE_TRI", f(&[3, 8, 2]), &[f(&[8, 8, 2]), f(&[3, 8, 2])], &[]),
        c("DSV4_HC_COMB", f(&[4, 4, 5]), &[f(&[24, 5]), f(&[3]), f(&[24])], &[bits(1e-6), 20]),
        c("DSV4_HC_PRE", f(&[16, 5]), &[f(&[16, 4, 5]), f(&[4, 5])], &[bits(1.0), 0]),
        c("DSV4_HC_PRE", f(&[16, 5]), &[f(&[16, 4, 5]), f(&[4, 5])], &[bits(0.5), 0]),
        c("DSV4_HC_PRE", f(&[16, 5]), &[f(&[16, 4, 5]), f(&[16, 4, 5])], &[bits(1.0), 1]),
        c("DSV4_HC_POST", f(&[16, 4, 5]), &[f(&[16, 5]), f(&[16, 4, 5]), f(&[4, 5]), f(&[4, 4, 5])], &[]),
        c("DSV4_HC_POST", f(&[16, 4, 5]), &[f(&[16, 5]), f(&[16, 4, 5]), f(&[4, 5])], &[]),
    ]
}

fn training() -> Vec<Case> {
    let (a, w) = (f(&[8, 3]), trainable(&[8, 3]));
    vec![
        c("CROSS_ENTROPY_LOSS", f(&[1]), &[a, a], &[]),
        c("CROSS_ENTROPY_LOSS_BACK", a, &[f(&[1]), a, a], &[]),
        c("OPT_STEP_ADAMW", w, &[w, a, a, a, f(&[7])], &[]).over(0),
        c("OPT_STEP_SGD", w, &[w, a, f(&[2])], &[]).over(0),
    ]
}

/// Nodes that make something of a source without elements.
fn of_nothing() -> Vec<Case> {
    let (none, a) = (f(&[0, 3]), f(&[8, 4]));
    vec![
        c("SUM", f(&[1]), &[none], &[]),
        c("SUM", t(F16, &[1]), &[t(F16, &[4, 0, 2])], &[]),
        c("SUM_ROWS", f(&[1, 3]), &[none], &[]),
        c("MEAN", f(&[1, 3]), &[none], &[]),
        c("ARGMAX", i(&[3]), &[none], &[]),
        c("COUNT_EQUAL", t(I64, &[1]), &[i(&[0, 3]), i(&[0, 3])], &[]),
        c("PAD", f(&[3, 4]), &[none], &[1, 2, 0, 1]),
        c("ACC", a, &[a, f(&[0, 2])], &[32, 128, 128, 8, 0]),
        c("ACC", a, &[a, f(&[2, 0])], &[32, 128, 128, 8, 1]).over(0),
        c("SET", a, &[a, f(&[0, 2])], &[32, 128, 128, 8, 0]),
        c("SET", i(&[8, 4]), &[i(&[8, 4]), i(&[2, 0])], &[32, 128, 128, 8, 1]).over(0),
        c("REPEAT_BACK", f(&[4, 3]), &[f(&[4, 0])], &[]),
        c("OUT_PROD", f(&[16, 4]), &[f(&[16, 0]), f(&[4, 0])], &[]),
        c("GET_ROWS_BACK", f(&[16, 9]), &[f(&[16, 0]), i(&[0])], &[]),
        c("CROSS_ENTROPY_LOSS", f(&[1]), &[f(&[8, 0]), f(&[8, 0])], &[]),
    ]
}

/// All of them.
pub(crate) fn cases() -> Vec<Case> {
    let families = [
        views(),
        copies(),
        arithmetic(),
        maps(),
        shapes(),
        norms(),
        products(),
        convolutions(),
        sequences(),
        training(),
        of_nothing(),
    ];
    families.into_iter().flatten().collect()
}

/// The first honest case of an operation.
pub(crate) fn case(op: &str) -> Case {
    cases().into_iter().find(|case| case.op == op).unwrap()
}

#[test]
fn every_operation_with_rules_has_a_node_that_passes() {
    let (rules, cases) = (rules(), cases());
    for case in &cases {
        assert_eq!(case.check(&rules), Ok(()), "{case:?}");
    }
    for rule in FAMILIES.iter().flat_map(|(_, rules)| *rules) {
        assert!(cases.iter().any(|case| case.op == rule.name), "{}", rule.name);
    }
}

#[test]
fn nodes_for_no_tokens_pass() {
    let rules = rules();
    let none = f(&[64, 0]);
    for case in [
        c("MUL_MAT", f(&[8, 0]), &[t(Q4_0, &[64, 8]), none], &[]),
        c("ADD", none, &[none, f(&[64])], &[]),
        c("RMS_NORM", none, &[none], &[bits(1e-5)]),
        c("MUL", none, &[none, f(&[64])], &[]),
        c("GLU", none, &[none, none], &[2]),
        c("GET_ROWS", none, &[f(&[64, 9]), i(&[0])], &[]),
        c("SET_ROWS", f(&[64, 9]), &[none, t(I64, &[0]), f(&[64, 9])], &[]).over(2).with(|case| {
            // Nothing to set: the result is the whole target, which is not empty.
            (case.d, case.sources[2]) = (f(&[64, 0]), Some(f(&[64, 0])));
        }),
        c("ROPE", f(&[64, 2, 0]), &[f(&[64, 2, 0]), i(&[0])], &[0, 64, 0, 0, 0, bits(1e4), bits(1.0)]),
        c("SOFT_MAX", none, &[none, f(&[64, 0])], &[bits(1.0)]),
        c("FLASH_ATTN_EXT", f(&[64, 2, 0]), &[f(&[64, 0, 2]), f(&[64, 7, 2]), f(&[64, 7, 2])], &[bits(1.0)]),
        c("CPY", none, &[none, none], &[]).over(1),
        c("CONT", none, &[none], &[]),
        c("ARGSORT", i(&[64, 0]), &[none], &[0]),
    ] {
        assert_eq!(case.check(&rules), Ok(()), "{case:?}");
    }
}

#[test]
fn made_up_nodes_that_ask_about_a_weight_pass_as_questions_only() {
    let rules = rules();
    let heads = f(&[123, 123, 123]);
    let state = f(&[123, 123, 123, 123]);
    for case in [
        c("ROPE", f(&[64, 8, 512]), &[f(&[64, 8, 512]), i(&[512]), f(&[32])], &[]),
        c(
            "RWKV_WKV6",
            f(&[123 * 123, 123 + 123 * 123]),
            &[heads, heads, heads, f(&[64, 32]), heads, state],
            &[],
        ),
    ] {
        assert!(case.check(&rules).is_err(), "{case:?}");
        assert_eq!(case.with(|case| case.probe = true).check(&rules), Ok(()), "{case:?}");
    }
}
