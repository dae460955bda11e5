//! Faults that were seen in ggml's own release build: each of these nodes read or wrote outside its tensors, divided by zero, never ended, or
//! ended the process.

use super::super::rules::DENSE_BLOCKS;
use super::super::types::*;
use super::honest::{bits, case, f};
use super::{Case, op, rules, t};
use apir_protocol::tensor::RawTensor;

type Change = fn(&mut Case);

fn source(case: &mut Case, slot: usize) -> &mut RawTensor {
    case.sources[slot].as_mut().unwrap()
}

/// Another type, dense.
fn retype(tensor: &mut RawTensor, type_: u32) {
    *tensor = RawTensor { op_params: tensor.op_params, flags: tensor.flags, ..t(type_, &tensor.ne) };
}

/// Other dimensions, dense.
fn reshape(tensor: &mut RawTensor, ne: &[i64]) {
    *tensor = RawTensor { op_params: tensor.op_params, flags: tensor.flags, ..t(tensor.type_, ne) };
}

const IQ2_XXS: u32 = 16;

/// Makes a MUL_MAT one of two planes of nine rows, b of what a type is multiplied with.
fn multiply_blocks(case: &mut Case, type_: u32) {
    *source(case, 0) = t(type_, &[256, 8]);
    *source(case, 1) = t(dot_type(type_).unwrap(), &[256, 9, 2]);
    case.d = t(F32, &[8, 9, 2]);
}

/// Operation, fault, part of the refusal, change to the honest node.
const FAULTS: &[(&str, &str, &str, Change)] = &[
    ("MUL_MAT", "removed type", "type 4", |c| source(c, 0).type_ = 4),
    ("GET_ROWS", "type without floats", "blocks that become floats", |c| retype(source(c, 0), Q8_1)),
    ("MUL_MAT", "integers", "dot product", |c| retype(source(c, 0), I32)),
    ("MUL_MAT", "type without product", "dot product", |c| retype(source(c, 0), Q8_1)),
    ("MUL_MAT", "type without product, wide", "dot product", |c| {
        reshape(source(c, 0), &[256, 8]);
        reshape(source(c, 1), &[256, 3]);
        retype(source(c, 0), Q8_K);
    }),
    ("ADD1", "blocks of four dimensions", "three dimensions", |c| {
        *source(c, 0) = t(Q8_0, &[64, 4, 2, 2]);
        c.d = t(Q8_0, &[64, 4, 2, 2]);
    }),
    ("MUL_MAT", "blocks of b apart by rows", DENSE_BLOCKS, |c| {
        multiply_blocks(c, 12);
        source(c, 1).nb = [292, 584, 5256, 10512];
    }),
    ("MUL_MAT", "blocks of b apart by planes", DENSE_BLOCKS, |c| {
        multiply_blocks(c, 18);
        source(c, 1).nb[2] *= 2;
    }),
    ("MUL_MAT", "blocks of b out of order", DENSE_BLOCKS, |c| {
        multiply_blocks(c, 23);
        source(c, 1).nb = [292, 584, 292, 5256];
    }),
    ("MUL_MAT", "blocks of b of the usual type apart", DENSE_BLOCKS, |c| {
        multiply_blocks(c, 2);
        source(c, 1).nb = [34, 544, 4896, 9792];
    }),
    ("SET_ROWS", "type that nothing is made into", "blocks made of floats", |c| {
        reshape(source(c, 0), &[256, 3]);
        reshape(source(c, 2), &[256, 9]);
        retype(source(c, 2), IQ2_XXS);
        c.d = *source(c, 2);
    }),
    ("ADD1", "type that nothing is made into", "a's type", |c| {
        reshape(source(c, 0), &[256, 4]);
        retype(source(c, 0), IQ2_XXS);
        c.d = *source(c, 0);
    }),
    ("MUL_MAT", "empty source", "no source without", |c| reshape(source(c, 0), &[64, 8, 0])),
    ("SSM_SCAN", "empty source", "no source without", |c| reshape(source(c, 4), &[16, 0, 5, 3])),
    ("CPY", "no target", "required source is absent", |c| {
        (c.sources[1], c.over) = (None, None);
    }),
    ("CPY", "target with other strides", "layout of the source", |c| source(c, 1).nb[1] *= 2),
    ("CONT", "other type", "a's type", |c| retype(&mut c.d, F16)),
    ("CONT", "blocks out of floats", "a's type", |c| c.d = t(Q8_0, &[256])),
    ("DUP", "other type", "a's type", |c| retype(&mut c.d, F16)),
    ("CONT", "strided blocks in another shape", "blocks that become dense", |c| {
        *source(c, 0) = RawTensor { nb: [34, 136, 544, 544], ..t(Q8_0, &[64, 4]) };
        c.d = t(Q8_0, &[32, 8]);
    }),
    ("CPY", "blocks out of longer rows", "blocks made of floats have a's shape", |c| {
        *source(c, 0) = f(&[65536]);
        *source(c, 1) = t(Q8_0, &[32, 2048]);
        c.d = t(Q8_0, &[32, 2048]);
    }),
    ("CPY", "target whose rows lie over one another", "share bytes", |c| {
        (c.d.nb[1], source(c, 1).nb[1]) = (64, 64);
    }),
    ("CPY", "target of blocks that lie over one another", "share bytes", |c| {
        let target = RawTensor { nb: [34, 34, 136, 136], ..t(Q8_0, &[64, 4]) };
        (*source(c, 0), *source(c, 1), c.d) = (t(Q8_0, &[64, 4]), target, target);
    }),
    ("DUP", "in place of rows over one another", "share bytes", |c| {
        let window = RawTensor { nb: [4, 64, 256, 256], ..f(&[64, 4]) };
        *c = Case::new(c.op, window, &[window], &[]).over(0);
    }),
    ("ADD", "blocks that nothing is made into", "go together", |c| {
        *source(c, 0) = t(IQ2_XXS, &[256, 4]);
        *source(c, 1) = f(&[256, 4]);
        c.d = t(IQ2_XXS, &[256, 4]);
    }),
    ("ADD1", "short scalar", "b is F32", |c| retype(source(c, 1), F16)),
    ("ACC", "unaligned offset", "multiples of 4", |c| c.d.op_params[3] = 10),
    ("ACC", "negative stride", "multiples of 4", |c| c.d.op_params[0] = -32),
    ("ACC", "stride of 0", "multiples of 4", |c| c.d.op_params[1] = 0),
    ("ACC", "negative offset", "multiples of 4", |c| c.d.op_params[3] = -4),
    ("ACC", "past the end", "ends inside", |c| c.d.op_params[3] = 92),
    ("ACC", "strides whose products leave 64 bits", "ends inside", |c| {
        *source(c, 0) = f(&[1 << 20, 1 << 11]);
        c.d = RawTensor { op_params: c.d.op_params, ..f(&[1 << 20, 1 << 11]) };
        *source(c, 1) = f(&[1, 1 << 10, 1 << 10, 1 << 10]);
        c.d.op_params[..3].copy_from_slice(&[i32::MAX - 3; 3]);
    }),
    ("ACC", "rows of b over one another", "b's elements share no bytes", |c| c.d.op_params[0] = 4),
    ("SET", "one element past the end", "ends inside", |c| c.d.op_params[3] = 100),
    ("SQR", "integers", "float type", |c| {
        retype(source(c, 0), I32);
        retype(&mut c.d, I32);
    }),
    ("UNARY", "GELU into F32", "keep a's type", |c| {
        c.d.op_params[0] = 8;
        retype(source(c, 0), BF16);
    }),
    ("UNARY", "GELU into F16", "float type", |c| {
        c.d.op_params[0] = 8;
        retype(&mut c.d, F16);
    }),
    ("UNARY", "map past the last", "0 to 21", |c| c.d.op_params[0] = 22),
    ("LEAKY_RELU", "half the result", "F32 or F16", |c| retype(&mut c.d, F16)),
    ("CLAMP", "smaller result", "layout of the source", |c| reshape(&mut c.d, &[16, 3, 1])),
    ("SCALE", "strided", "dense", |c| source(c, 0).nb[1] = 128),
    ("FILL", "half the result", "F32 or F16", |c| retype(&mut c.d, F16)),
    ("TRI", "triangle past the last", "0 to 3", |c| c.d.op_params[0] = 4),
    ("DIAG_MASK_INF", "negative past", "not negative", |c| c.d.op_params[0] = -1),
    ("PAD_REFLECT_1D", "pad beyond a row", "below a row", |c| {
        c.d.op_params[..2].copy_from_slice(&[8, 2]);
        reshape(&mut c.d, &[18, 3]);
    }),
    ("ROLL", "shift beyond a row", "smaller than its dimension", |c| c.d.op_params[0] = 9),
    ("ROLL", "smallest shift", "smaller than its dimension", |c| c.d.op_params[0] = i32::MIN),
    ("PAD", "circular pad beyond a row", "circular pads", |c| {
        c.d.op_params[..9].copy_from_slice(&[9, 0, 0, 0, 0, 0, 0, 0, 1]);
        reshape(&mut c.d, &[17, 3]);
    }),
    ("PAD", "cropped circularly", "circular pads", |c| {
        c.d.op_params[..9].copy_from_slice(&[-1, 0, 0, 0, 0, 0, 0, 0, 1]);
        reshape(&mut c.d, &[7, 3]);
    }),
    ("UPSCALE", "unknown mode", "the mode is", |c| c.d.op_params[0] = 3),
    ("UPSCALE", "antialiased nearest", "the mode is", |c| c.d.op_params[0] = 0x200),
    ("ARANGE", "more elements than steps", "an element for each step", |c| reshape(&mut c.d, &[11])),
    ("ARANGE", "step of 0", "step not 0", |c| c.d.op_params[2] = 0),
    ("ARANGE", "no number", "finite", |c| c.d.op_params[1] = bits(f32::NAN)),
    ("TIMESTEP_EMBEDDING", "wider than the result", "dim elements", |c| c.d.op_params[0] = 34),
    ("TIMESTEP_EMBEDDING", "negative and odd", "dim elements", |c| c.d.op_params[0] = -33),
    ("MEAN", "more rows than sums", "one element for each row", |c| reshape(&mut c.d, &[1, 2, 2])),
    ("ARGMAX", "more rows than results", "one element for each row", |c| reshape(&mut c.d, &[2])),
    ("COUNT_EQUAL", "third dimension", "a is a matrix", |c| {
        reshape(source(c, 0), &[4, 3, 2]);
        reshape(source(c, 1), &[4, 3, 2]);
    }),
    ("COUNT_EQUAL", "too many elements", "fewer than 2^30", |c| {
        reshape(source(c, 0), &[1 << 15, 1 << 15]);
        reshape(source(c, 1), &[1 << 15, 1 << 15]);
    }),
    ("CONCAT", "fifth dimension", "dim is 0 to 3", |c| c.d.op_params[0] = 4),
    ("CONCAT", "more than both", "a and b together", |c| reshape(&mut c.d, &[8, 6])),
    ("NORM", "negative eps", "eps", |c| c.d.op_params[0] = bits(-1.0)),
    ("NORM", "no number", "eps", |c| c.d.op_params[0] = bits(f32::NAN)),
    ("NORM", "half the result", "all are F32", |c| retype(&mut c.d, F16)),
    ("RMS_NORM", "half the result", "all are F32", |c| retype(&mut c.d, F16)),
    ("GROUP_NORM", "no groups", "a group or more", |c| c.d.op_params[0] = 0),
    ("GROUP_NORM", "more groups than channels", "no more than channels", |c| c.d.op_params[0] = i32::MAX),
    ("SOFT_MAX", "fewer mask rows", "no fewer", |c| c.sources.push(Some(t(F16, &[16, 2])))),
    ("SOFT_MAX", "mask of no matrices", "no source without", |c| c.sources.push(Some(t(F16, &[16, 3, 0])))),
    ("SOFT_MAX", "mask that does not divide", "divide a's", |c| c.sources.push(Some(t(F16, &[16, 3, 3])))),
    ("SOFT_MAX", "short sinks", "sinks is a vector", |c| c.sources.extend([None, Some(f(&[1]))])),
    ("SOFT_MAX", "shorter result", "a's shape", |c| reshape(&mut c.d, &[8, 6, 2])),
    ("SOFT_MAX", "bias without mask", "needs a mask", |c| c.d.op_params[1] = bits(8.0)),
    ("SOFT_MAX_BACK", "bias", "no bias", |c| c.d.op_params[1] = bits(8.0)),
    ("CROSS_ENTROPY_LOSS", "permuted", "dense", |c| {
        *source(c, 0) = RawTensor { ne: [8, 3, 2, 1], nb: [4, 64, 32, 192], ..f(&[8, 3, 2]) };
        *source(c, 1) = f(&[8, 3, 2]);
    }),
    ("CROSS_ENTROPY_LOSS_BACK", "half the logits", "all are F32", |c| retype(source(c, 1), F16)),
    ("CROSS_ENTROPY_LOSS_BACK", "half the result", "all are F32", |c| retype(&mut c.d, F16)),
    ("SILU_BACK", "smaller gradient", "a's shape", |c| reshape(source(c, 0), &[16, 3, 1])),
    ("ROPE", "too few positions", "one element for each token", |c| reshape(source(c, 1), &[4])),
    ("ROPE", "positions for one section", "four in sections", |c| {
        c.d.op_params[2] = 8;
        c.d.op_params[11] = 4;
    }),
    ("ROPE", "positions with gaps", "packed vector", |c| source(c, 1).nb[0] = 8),
    ("ROPE", "unknown mode", "the mode is", |c| c.d.op_params[2] = 4),
    ("ROPE", "odd mode", "the mode is", |c| c.d.op_params[2] = 1),
    ("ROPE", "nothing rotated", "n_dims is even", |c| c.d.op_params[1] = 0),
    ("ROPE", "less than nothing rotated", "n_dims is even", |c| c.d.op_params[1] = -2),
    ("ROPE", "odd rows", "even number", |c| {
        reshape(&mut c.d, &[17, 2, 5]);
        reshape(source(c, 0), &[17, 2, 5]);
    }),
    ("ROPE", "negative section", "sections are not negative", |c| {
        c.d.op_params[2] = 8;
        c.d.op_params[11..15].copy_from_slice(&[4, -4, 0, 0]);
        reshape(source(c, 1), &[20]);
    }),
    ("ROPE", "sections that wrap to 0", "sections are not negative", |c| {
        c.d.op_params[2] = 8;
        c.d.op_params[11..15].copy_from_slice(&[1 << 30; 4]);
        reshape(source(c, 1), &[20]);
    }),
    ("ROPE", "sections beyond a row", "fit into a row", |c| {
        c.d.op_params[2] = 8;
        c.d.op_params[11..15].copy_from_slice(&[8, 8, 8, 0]);
        reshape(source(c, 1), &[20]);
    }),
    ("ROPE", "too few factors", "factors is a packed vector", |c| c.sources.push(Some(f(&[7])))),
    ("MUL_MAT", "longer rows", "same length", |c| reshape(source(c, 0), &[128, 8])),
    ("MUL_MAT", "matrices that do not divide", "divide b's", |c| {
        reshape(source(c, 0), &[64, 8, 2]);
        reshape(source(c, 1), &[64, 3, 3]);
        reshape(&mut c.d, &[8, 3, 3]);
    }),
    ("MUL_MAT", "smaller result", "a row for each of b's", |c| reshape(&mut c.d, &[8, 2])),
    ("MUL_MAT", "half the result", "result is F32", |c| retype(&mut c.d, F16)),
    ("MUL_MAT", "a as a Hadamard matrix", "Hadamard", |c| c.d.op_params[1] = 1),
    ("MUL_MAT", "a Hadamard matrix with fewer rows", "Hadamard", |c| {
        *source(c, 0) = f(&[64, 8]);
        c.d.op_params[1] = 1;
    }),
    ("MUL_MAT_ID", "b that only MUL_MAT widens", "result is F32", |c| {
        retype(source(c, 0), F32);
        retype(source(c, 1), F16);
    }),
    ("MUL_MAT_ID", "smaller result", "a row for each id", |c| reshape(&mut c.d, &[8, 1, 3])),
    ("MUL_MAT_ID", "fewer matrices of b", "for each of b's matrices", |c| reshape(source(c, 1), &[64, 1, 2])),
    ("MUL_MAT_ID", "no rows of b", "no source without", |c| reshape(source(c, 1), &[64, 0, 3])),
    ("OUT_PROD", "fewer rows", "as many rows", |c| reshape(source(c, 1), &[4, 2])),
    ("GET_ROWS", "smaller result", "a row of a for each id", |c| reshape(&mut c.d, &[64, 2])),
    ("GET_ROWS", "shorter rows", "a row of a for each id", |c| reshape(&mut c.d, &[32, 3])),
    ("SET_ROWS", "longer rows", "as long as the target's", |c| reshape(source(c, 0), &[32, 3, 2])),
    ("SET_ROWS", "target whose rows lie over one another", "share bytes", |c| {
        (c.d.nb[1], source(c, 2).nb[1]) = (16, 16);
    }),
    ("SET_ROWS", "no target", "required source is absent", |c| {
        (c.sources[2], c.over) = (None, None);
    }),
    ("IM2COL", "smaller result", "patches of the image", |c| reshape(&mut c.d, &[27, 8, 5, 2])),
    ("IM2COL", "a flag that is neither", "the flag", |c| c.d.op_params[6] = 2),
    ("IM2COL_BACK", "stride of 0", "strides", |c| c.d.op_params[0] = 0),
    ("IM2COL_BACK", "smaller gradient", "patches of the result", |c| reshape(source(c, 0), &[27, 8, 5, 2])),
    ("IM2COL_3D", "half an image", "image is F32", |c| {
        retype(source(c, 1), F16);
        retype(&mut c.d, F16);
    }),
    ("IM2COL_3D", "no channels", "channels divide", |c| c.d.op_params[9] = 0),
    ("IM2COL_3D", "more channels than there are", "channels divide", |c| c.d.op_params[9] = 8),
    ("COL2IM_1D", "stride of 0", "the stride", |c| c.d.op_params[0] = 0),
    ("COL2IM_1D", "no outputs", "output channels", |c| c.d.op_params[1] = 0),
    ("COL2IM_1D", "more outputs than rows", "a row for each output", |c| c.d.op_params[1] = 6),
    ("CONV_2D", "half an image", "image and result F32", |c| retype(source(c, 1), F16)),
    ("CONV_2D", "more outputs than the kernel has", "its outputs", |c| reshape(&mut c.d, &[8, 6, 5, 2])),
    ("CONV_2D", "patch beyond the work memory", "16 MiB", |c| {
        *source(c, 0) = f(&[3, 3, 1 << 20, 4]);
        *source(c, 1) = f(&[10, 8, 1 << 20, 2]);
    }),
    ("CONV_3D", "more images than there are", "those of the shapes", |c| c.d.op_params[10] = 4),
    ("CONV_3D", "no channels", "those of the shapes", |c| c.d.op_params[9] = 0),
    ("CONV_3D", "patch beyond the work memory", "16 MiB", |c| {
        *source(c, 0) = f(&[3, 3, 3, 3 << 18]);
        *source(c, 1) = f(&[10, 8, 6, 2 << 18]);
        c.d.op_params[9] = 1 << 18;
    }),
    ("CONV_2D_DW", "larger result", "kernel's places", |c| reshape(&mut c.d, &[9, 6, 3, 2])),
    ("CONV_TRANSPOSE_1D", "third dimension", "image two", |c| reshape(source(c, 1), &[5, 2, 2])),
    ("CONV_TRANSPOSE_1D", "other floats", "kernel is F32 or F16", |c| retype(source(c, 0), BF16)),
    ("CONV_TRANSPOSE_1D", "negative stride", "the stride", |c| c.d.op_params[0] = -2),
    ("CONV_TRANSPOSE_1D", "wrong stride", "as long as the kernel reaches", |c| c.d.op_params[0] = 3),
    ("CONV_TRANSPOSE_2D", "wrong stride", "as far as the kernel reaches", |c| c.d.op_params[0] = 3),
    ("POOL_1D", "fewer rows", "in each row of a", |c| reshape(&mut c.d, &[5, 2])),
    ("POOL_2D", "pool past the last", "largest or the mean", |c| c.d.op_params[0] = 2),
    ("POOL_2D", "endless pool", "no larger than a", |c| c.d.op_params[1] = i32::MAX),
    ("POOL_2D", "planes without distance", "stride 0 of dimension 2", |c| source(c, 0).nb[2] = 0),
    ("WIN_PART", "more windows", "cover a", |c| c.d.op_params[0] = 9),
    ("WIN_PART", "negative width", "one wide or more", |c| c.d.op_params[2] = -4),
    ("WIN_UNPART", "no width", "one wide or more", |c| c.d.op_params[0] = 0),
    ("GET_REL_POS", "larger square", "each distance", |c| reshape(&mut c.d, &[8, 5, 5])),
    ("ADD_REL_POS", "other squares", "rows are squares", |c| {
        reshape(source(c, 1), &[5, 2, 3, 2]);
        reshape(source(c, 2), &[5, 2, 3, 2]);
    }),
    ("ARGSORT", "order past the last", "rising or falling", |c| c.d.op_params[0] = 2),
    ("TOP_K", "more than all", "one to all", |c| reshape(&mut c.d, &[17, 3])),
    ("FLASH_ATTN_EXT", "fewer values than keys", "as many rows as k", |c| {
        reshape(source(c, 2), &[48, 6, 2, 2]);
    }),
    ("FLASH_ATTN_EXT", "more heads of k than of q", "heads of k and v", |c| {
        reshape(source(c, 1), &[64, 7, 8, 2])
    }),
    ("FLASH_ATTN_EXT", "heads of v that do not divide", "heads of k and v", |c| {
        reshape(source(c, 2), &[48, 7, 3, 2])
    }),
    ("FLASH_ATTN_EXT", "narrow mask", "covers the keys", |c| reshape(source(c, 3), &[6, 64])),
    ("FLASH_ATTN_EXT", "short mask", "a row for each query", |c| reshape(source(c, 3), &[7, 4])),
    ("FLASH_ATTN_EXT", "short sinks", "an element for each head", |c| reshape(source(c, 4), &[3])),
    ("FLASH_ATTN_EXT", "integer keys", "k has a dot product", |c| retype(source(c, 1), I32)),
    ("FLASH_ATTN_EXT", "half a query", "q, sinks", |c| retype(source(c, 0), F16)),
    ("FLASH_ATTN_EXT", "result with gaps", "the result is dense", |c| c.d.nb[1] = 256),
    ("FLASH_ATTN_EXT", "precision that no CPU has", "the precision", |c| c.d.op_params[3] = 15),
    ("LIGHTNING_INDEXER", "short mask", "each key and query", |c| reshape(source(c, 3), &[7, 4, 1, 1])),
    ("LIGHTNING_INDEXER", "few weights", "each head and query", |c| reshape(source(c, 2), &[3, 5, 1, 2])),
    ("SSM_CONV", "more tokens than places", "places in x", |c| reshape(&mut c.d, &[8, 6, 2])),
    ("SSM_CONV", "kernel with gaps", "kernel is dense", |c| source(c, 1).nb[1] = 32),
    ("SSM_SCAN", "no snapshots", "a snapshot or more", |c| c.d.op_params[0] = -1),
    ("SSM_SCAN", "result without the states", "outputs and the snapshots", |c| c.d.op_params[0] = 2),
    ("RWKV_WKV6", "sequences that do not divide the tokens", "divide the tokens", |c| {
        for slot in [0, 1, 2, 4] {
            reshape(source(c, slot), &[64, 2, 5]);
        }
        reshape(&mut c.d, &[128, 5 + 64 * 3]);
    }),
    ("RWKV_WKV6", "more sequences than tokens", "divide the tokens", |c| {
        reshape(source(c, 5), &[64 * 64 * 2, 7]);
        reshape(&mut c.d, &[128, 6 + 64 * 7]);
    }),
    ("RWKV_WKV6", "no sequences", "divide the tokens", |c| {
        reshape(source(c, 5), &[64 * 64 * 6]);
        reshape(&mut c.d, &[128, 6]);
    }),
    ("RWKV_WKV6", "short first", "first has an element", |c| reshape(source(c, 3), &[64])),
    ("GATED_LINEAR_ATTN", "sequences that do not divide", "divide the tokens", |c| {
        reshape(source(c, 4), &[64 * 64 * 2, 4]);
    }),
    ("RWKV_WKV7", "other shape of r", "have the same shape", |c| reshape(source(c, 0), &[64, 2, 5])),
    ("RWKV_WKV7", "heads of 20", "multiple of 64", |c| {
        for slot in 0..6 {
            reshape(source(c, slot), &[20, 2, 6]);
        }
        reshape(source(c, 6), &[20 * 20 * 2, 3]);
        reshape(&mut c.d, &[40, 6 + 60]);
    }),
    ("GATED_DELTA_NET", "longer rows of q", "q and k have v's rows", |c| {
        reshape(source(c, 0), &[32, 2, 5, 3])
    }),
    ("GATED_DELTA_NET", "fewer tokens of q", "q and k have v's rows", |c| {
        reshape(source(c, 0), &[16, 2, 4, 3])
    }),
    ("GATED_DELTA_NET", "more batches of k", "q and k have v's rows", |c| {
        reshape(source(c, 1), &[16, 2, 5, 6])
    }),
    ("GATED_DELTA_NET", "batches that do not divide", "q and k have v's rows", |c| {
        reshape(source(c, 1), &[16, 2, 5, 2]);
    }),
    ("GATED_DELTA_NET", "short gate", "gate and beta", |c| reshape(source(c, 3), &[1, 4, 4, 3])),
    ("GATED_DELTA_NET", "short beta", "gate and beta", |c| reshape(source(c, 4), &[1, 4, 5, 2])),
    ("GATED_DELTA_NET", "more snapshots than room", "outputs and the snapshots", |c| c.d.op_params[0] = 3),
    ("DSV4_HC_COMB", "endless rounds", "1 to 1000 rounds", |c| c.d.op_params[1] = i32::MAX),
    ("GLU", "one row in each matrix, and gaps between them", "packed and even", |c| {
        *source(c, 0) = RawTensor { nb: [4, 128, 128, 1024], ..f(&[16, 1, 8]) };
        reshape(&mut c.d, &[8, 1, 8]);
    }),
    ("GLU", "half the result", "gate and result", |c| retype(&mut c.d, F16)),
    ("GLU", "unit past the last", "the unit is", |c| c.d.op_params[0] = 7),
    ("OPT_STEP_ADAMW", "half the state", "all are F32", |c| retype(source(c, 2), F16)),
    ("OPT_STEP_ADAMW", "half the settings", "all are F32", |c| retype(source(c, 4), F16)),
    ("OPT_STEP_ADAMW", "state with gaps", "dense", |c| source(c, 2).nb[1] = 64),
    ("OPT_STEP_SGD", "smaller gradient", "gradient has", |c| reshape(source(c, 1), &[8, 2])),
    ("ADD", "an unknown parameter", "parameters that the operation does not have", |c| c.d.op_params[15] = 1),
    ("ADD", "a third source", "more sources", |c| c.sources.push(Some(f(&[1])))),
    ("FLASH_ATTN_EXT", "work memory beyond the limit", "work buffer", |c| {
        let wide = 1 << 22;
        *c = Case::new(c.op, f(&[wide, 4]), &[f(&[wide, 1, 4]), f(&[wide, 1, 4]), f(&[wide, 1, 4])], &[]);
    }),
    ("MUL_MAT_ID", "work memory beyond the limit", "work buffer", |c| {
        let (experts, tokens) = (1 << 16, 1 << 13);
        let ids = t(I32, &[2, tokens]);
        *c = Case::new(c.op, f(&[1, 2, tokens]), &[f(&[1, 1, experts]), f(&[1, 2, tokens]), ids], &[]);
    }),
];

#[test]
fn nodes_that_break_ggml_are_refused_and_their_honest_kin_pass() {
    let rules = rules();
    for (op, what, words, change) in FAULTS {
        let honest = case(op);
        assert_eq!(honest.check(&rules), Ok(()), "{op}");
        let error = honest.with(change).check(&rules).expect_err(&format!("{op} with {what}"));
        assert!(error.contains(words), "{op} with {what}: {error}");
    }
}

#[test]
fn strides_that_no_element_needs_do_no_harm() {
    let rules = rules();
    // ggml's own checks pass these, and its kernels then step by the wild stride.
    for stride in [0, 5, 1 << 40, u64::MAX] {
        let mut scale = case("SCALE");
        reshape(&mut scale.d, &[16]);
        reshape(source(&mut scale, 0), &[16]);
        source(&mut scale, 0).nb[1] = stride;
        assert_eq!(scale.check(&rules), Ok(()));
        let mut pool = case("POOL_2D");
        reshape(&mut pool.d, &[5, 4]);
        reshape(source(&mut pool, 0), &[10, 8]);
        source(&mut pool, 0).nb[2] = stride;
        assert_eq!(pool.check(&rules), Ok(()));
        let checked = super::CheckedTensor::from_raw(source(&mut pool, 0), &rules).unwrap();
        assert_eq!(checked.nb(), [4, 40, 320, 320]);
    }
}

#[test]
fn operations_that_call_back_or_have_no_rule_are_refused() {
    let rules = rules();
    let a = f(&[4]);
    for name in ["CUSTOM", "MAP_CUSTOM1", "MAP_CUSTOM2", "MAP_CUSTOM3"] {
        let error = Case::new(name, a, &[a], &[1, 1]).check(&rules).unwrap_err();
        assert!(error.ends_with(&format!("{name} calls a function by its address")), "{error}");
    }
    let back = Case::new("FLASH_ATTN_BACK", a, &[a, a, a, a], &[]).check(&rules).unwrap_err();
    assert!(back.ends_with("there is no rule for FLASH_ATTN_BACK"), "{back}");
    let unknown = RawTensor { op: 101, ..a };
    let error = super::CheckedTensor::from_raw(&unknown, &rules).unwrap_err().to_string();
    assert_eq!(error, "\"\": operation 101, this ggml has 101");
    assert_eq!(op("GLU"), 100);
}

#[test]
fn what_kernels_cannot_count_is_refused() {
    let rules = rules();
    let refusal = |ne: [i64; 4], nb: [u64; 4]| {
        super::CheckedTensor::from_raw(&RawTensor { ne, nb, ..RawTensor::default() }, &rules)
            .unwrap_err()
            .to_string()
    };
    let (most, step) = (i64::from(i32::MAX), 4u64);
    assert!(refusal([most + 1, 1, 1, 1], [4; 4]).contains("elements of a dimension"));
    assert!(refusal([1, 1 << 16, 1 << 15, 1], [step; 4]).contains("rows"));
    assert!(refusal([1, most, most, most], [step; 4]).contains("rows"));
    assert!(refusal([4, 1 << 17, 1, 1], [4, 1 << 31, 4, 4]).contains("bytes"));
    assert!(refusal([4, -1, 1, 1], [4; 4]).contains("dimension 1"));
    assert!(refusal([4, 3, 1, 1], [4, 1 << 63, 4, 4]).contains("2^63"));
    // Nothing is counted of a tensor without elements, however large the other dimensions.
    let empty = RawTensor { ne: [most, most, 0, 1], nb: [4; 4], ..RawTensor::default() };
    let checked = super::CheckedTensor::from_raw(&empty, &rules).unwrap();
    assert_eq!((checked.elements(), checked.rows()), (0, 0));
    assert!(refusal([most, most, most, 0], [4; 4]).contains("stride"));
}

#[test]
fn older_guests_parameters_are_completed() {
    let rules = rules();
    for (op, word) in [("SSM_SCAN", 0), ("DSV4_HC_PRE", 0)] {
        let mut old = case(op);
        old.d.op_params[word] = 0;
        assert_eq!(old.check(&rules), Ok(()), "{op}");
    }
    let mut net = case("GATED_DELTA_NET");
    net.d.op_params[0] = 0;
    reshape(&mut net.d, &[64, 5 * 3 + 16 * 3]);
    assert_eq!(net.check(&rules), Ok(()));
}
