//! Convolutions, and what they are made of.
//!
//! The geometry stands twice in such a node, in its parameters and in its shapes, and kernels believe the parameters.
#![forbid(unsafe_code)]

use crate::verify::node::Node;
use crate::verify::rules::{Blocks, Clause, OpRule, ResultPlace, cpu_since, must, need};
use crate::verify::types::{BF16, F16, F32};
use crate::verify::work::Work;
use apir_ggml::Version;

/// Strides, pads and dilations stay far from the ends of a C int.
const MAX_STEP: i64 = 1 << 20;
/// Bytes of a CPU kernel's patches.
const PATCHES: u64 = 16 << 20;
/// Largest stride that a C int holds.
const INT_STRIDE: u64 = i32::MAX as u64;

/// Places of a kernel along one dimension: `input` elements, `size` of the kernel; 0 or less when it does not fit.
fn places(input: i64, size: i64, stride: i64, pad: i64, dilation: i64) -> i64 {
    // Rounded towards 0, so that a kernel may hang over the end by a part of a stride.
    (input + 2 * pad - dilation * (size - 1) - 1) / stride.max(1) + 1
}

/// Whether the words are `count` strides, then as many pads and dilations.
fn fit_steps(n: &Node<'_>, count: usize) -> bool {
    (0..count).all(|dim| {
        (1..=MAX_STEP).contains(&n.p(dim))
            && (0..=MAX_STEP).contains(&n.p(count + dim))
            && (1..=MAX_STEP).contains(&n.p(2 * count + dim))
    })
}

/// Places along a dimension, for parameters of `count` dimensions.
fn along(n: &Node<'_>, dim: usize, count: usize, input: i64, size: i64) -> i64 {
    places(input, size, n.p(dim), n.p(count + dim), n.p(2 * count + dim))
}

const STEPS_2D: Clause = must("strides and dilations are 1 to 2^20, pads 0 to 2^20", |n| fit_steps(n, 2));
const STEPS_3D: Clause = must("strides and dilations are 1 to 2^20, pads 0 to 2^20", |n| fit_steps(n, 3));
const PARAMS_2D: &[&str] = &["stride 0", "stride 1", "pad 0", "pad 1", "dilation 0", "dilation 1"];
const WEIGHTS: Clause = must("kernel is F32 or F16, image and result F32", |n| {
    matches!(n.s(0).type_(), F32 | F16) && n.s(1).type_() == F32 && n.t() == F32
});

/// Whether the size of a patch leaves room for at least one in a CPU kernel's work memory.
fn fits_patches(n: &Node<'_>, elements: i64, outputs: i64) -> bool {
    let size = u64::from(n.s(0).info().size);
    let bytes = (elements as u64).checked_mul(size).and_then(|patch| patch.checked_add(4 * outputs as u64));
    bytes.is_some_and(|bytes| bytes <= PATCHES)
}

const TRANSPOSED: Work = Work::together("kernel and image as the kernel's type", |n| {
    let elements = n.s(0).elements().checked_add(n.s(1).elements())? as u64;
    elements.checked_mul(u64::from(n.s(0).info().size))
});

/// What IM2COL makes of an image: [elements of a patch, places, places, images].
fn columns(n: &Node<'_>, kernel: [i64; 4], image: [i64; 4]) -> Option<[i64; 4]> {
    let wide = along(n, 0, 2, image[0], kernel[0]);
    let columns = if n.p(6) == 1 {
        // Three dimensions of an empty kernel may have a product beyond 64 bits.
        let patch = (kernel[0] * kernel[1]).saturating_mul(kernel[2]);
        [patch, wide, along(n, 1, 2, image[1], kernel[1]), image[3]]
    } else {
        [kernel[0] * kernel[1], wide, image[2], 1]
    };
    let channels = if n.p(6) == 1 { kernel[2] == image[2] } else { kernel[1] == image[1] && image[3] == 1 };
    (channels && columns[1] > 0 && columns[2] > 0).then_some(columns)
}

/// Images whose rows are dense and whose other strides a C int holds.
const IMAGE_ROWS: Clause = must("the image's rows are dense, and its other strides below 2^31", |n| {
    let image = n.s(1);
    image.is_empty()
        || image.has_packed_rows()
            && image.nb()[1] == image.ne()[0] as u64 * u64::from(image.info().size)
            && image.nb()[2] <= INT_STRIDE
            && image.nb()[3] <= INT_STRIDE
});
const IMAGE_PACKED: Clause = must("the image's rows are packed, and its strides below 2^31", |n| {
    n.s(1).has_packed_rows() && n.s(1).nb().iter().all(|stride| *stride <= INT_STRIDE)
});
const IMAGE_DENSE: Clause =
    must("elsewhere than on a CPU the image is dense", |n| n.target.cpu || n.s(1).is_dense());
const FLAG_2D: Clause = must("the flag for two dimensions is 0 or 1", |n| matches!(n.p(6), 0 | 1));
const PARAMS_IM2COL: &[&str] =
    &["stride 0", "stride 1", "pad 0", "pad 1", "dilation 0", "dilation 1", "two dimensions"];
/// One dimension has no second stride, pad or dilation.
const STEPS_IM2COL: Clause =
    must("strides and dilations are 1 to 2^20, pads 0 to 2^20; in one dimension the second are 0", |n| {
        let fit = |dim: usize| {
            (1..=MAX_STEP).contains(&n.p(dim))
                && (0..=MAX_STEP).contains(&n.p(2 + dim))
                && (1..=MAX_STEP).contains(&n.p(4 + dim))
        };
        fit(0) && if n.p(6) == 1 { fit(1) } else { [n.p(1), n.p(3), n.p(5)] == [0; 3] }
    });

pub const RULES: &[OpRule] = &[
    OpRule {
        name: "IM2COL",
        sources: &[need("kernel").blocks(Blocks::ByStrides), need("image")],
        params: PARAMS_IM2COL,
        clauses: &[
            must("image and result are F32 or F16, the image as the result or F32", |n| {
                let (image, d) = (n.s(1).type_(), n.t());
                matches!(image, F32 | F16) && (d == F16 || d == F32 && image == F32)
                    || !n.target.cpu && d == BF16
            }),
            FLAG_2D,
            STEPS_IM2COL,
            must("the result has the kernel's patches of the image", |n| {
                columns(n, n.s(0).ne(), n.s(1).ne()) == Some(n.d.ne())
            }),
            IMAGE_ROWS,
        ],
        since: &[cpu_since(
            Version::new(0, 17, 0),
            "F16 columns for a kernel of other than packed F16",
            |n| n.t() == F16 && (n.s(0).type_() != F16 || !n.s(0).has_packed_rows()),
        )],
        ..OpRule::BLANK
    },
    OpRule {
        name: "IM2COL_BACK",
        sources: &[need("gradient"), need("kernel")],
        params: PARAMS_IM2COL,
        clauses: &[
            must("gradient and result are F32, kernel F32 or F16", |n| {
                n.s(0).type_() == F32 && matches!(n.s(1).type_(), F32 | F16) && n.t() == F32
            }),
            FLAG_2D,
            STEPS_IM2COL,
            must("gradient has the kernel's patches of the result", |n| {
                columns(n, n.s(1).ne(), n.d.ne()) == Some(n.s(0).ne())
            }),
            must("gradient is dense, and the result's strides below 2^31", |n| {
                n.s(0).is_dense() && n.d.nb()[2] <= INT_STRIDE && n.d.nb()[3] <= INT_STRIDE
            }),
        ],
        since: &[cpu_since(Version::new(0, 17, 0), "a kernel of F16", |n| n.s(1).type_() == F16)],
        ..OpRule::BLANK
    },
    OpRule {
        name: "IM2COL_3D",
        sources: &[need("kernel").blocks(Blocks::ByStrides), need("image")],
        params: &[
            "stride 0",
            "stride 1",
            "stride 2",
            "pad 0",
            "pad 1",
            "pad 2",
            "dilation 0",
            "dilation 1",
            "dilation 2",
            "channels",
        ],
        clauses: &[
            must("image is F32, the result F32 or F16", |n| {
                n.s(1).type_() == F32 && matches!(n.t(), F32 | F16)
            }),
            STEPS_3D,
            must("channels divide the fourth dimension of image", |n| {
                n.p(9) >= 1 && (n.d.is_empty() || n.s(1).ne()[3] % n.p(9) == 0)
            }),
            must("the result has the kernel's patches of the image", |n| {
                let ([width, height, depth, _], image) = (n.s(0).ne(), n.s(1).ne());
                let out = |dim, size| along(n, dim, 3, image[dim], size);
                let (across, down, deep) = (out(0, width), out(1, height), out(2, depth));
                across > 0
                    && down > 0
                    && deep > 0
                    && [across, down] == n.d.ne()[1..3]
                    && i128::from(n.d.ne()[0]) == i128::from(width * height) * i128::from(depth * n.p(9))
                    && n.d.ne()[3] == deep * (image[3] / n.p(9))
            }),
            IMAGE_PACKED,
        ],
        since: &[cpu_since(Version::new(0, 17, 0), "F16 columns for a kernel of F32", |n| {
            n.t() == F16 && n.s(0).type_() != F16
        })],
        ..OpRule::BLANK
    },
    OpRule {
        name: "COL2IM_1D",
        sources: &[need("columns")],
        params: &["stride", "output channels", "pad"],
        clauses: &[
            must("columns is a float type, and so is the result", |n| {
                matches!(n.s(0).type_(), F32 | F16 | BF16) && n.t() == n.s(0).type_()
            }),
            must("columns is a dense matrix", |n| n.s(0).is_matrix() && n.s(0).is_dense()),
            must("the stride is 1 to 2^20, the pad 0 to 2^20", |n| {
                (1..=MAX_STEP).contains(&n.p(0)) && (0..=MAX_STEP).contains(&n.p(2))
            }),
            must("output channels divide a column", |n| n.p(1) >= 1 && n.s(0).ne()[0] % n.p(1) == 0),
            must("the result has a row for each output channel, as long as the columns reach", |n| {
                let [column, count, ..] = n.s(0).ne();
                let length = (count - 1) * n.p(0) + column / n.p(1) - 2 * n.p(2);
                length > 0 && n.d.ne() == [length, n.p(1), 1, 1]
            }),
        ],
        ..OpRule::BLANK
    },
    OpRule {
        name: "CONV_2D",
        sources: &[need("kernel"), need("image")],
        params: PARAMS_2D,
        clauses: &[
            WEIGHTS,
            must("kernel is dense", |n| n.s(0).is_dense()),
            IMAGE_DENSE,
            STEPS_2D,
            must("kernel and image have the same channels", |n| n.s(0).ne()[2] == n.s(1).ne()[2]),
            must("the result has the kernel's places, its outputs and the image's count", |n| {
                let (kernel, image) = (n.s(0).ne(), n.s(1).ne());
                let out = |dim: usize| along(n, dim, 2, image[dim], kernel[dim]);
                out(0) > 0 && out(1) > 0 && n.d.ne() == [out(0), out(1), kernel[3], image[3]]
            }),
            must("a patch and its outputs take at most 16 MiB", |n| {
                let [width, height, channels, outputs] = n.s(0).ne();
                fits_patches(n, (width * height).saturating_mul(channels), outputs)
            }),
        ],
        work: Work::together("16 MiB of patches", |_| Some(PATCHES)),
        ..OpRule::BLANK
    },
    OpRule {
        name: "CONV_3D",
        sources: &[need("kernel").or_empty(), need("image")],
        params: &[
            "stride 0",
            "stride 1",
            "stride 2",
            "pad 0",
            "pad 1",
            "pad 2",
            "dilation 0",
            "dilation 1",
            "dilation 2",
            "channels",
            "images",
            "outputs",
        ],
        clauses: &[
            WEIGHTS,
            must("kernel is dense", |n| n.s(0).is_dense()),
            IMAGE_DENSE,
            STEPS_3D,
            must("channels, images and outputs are those of the shapes", |n| {
                let (channels, images, outputs) = (n.p(9), n.p(10), n.p(11));
                channels >= 1
                    && images >= 1
                    && outputs >= 1
                    && n.s(0).ne()[3] == channels * outputs
                    && n.s(1).ne()[3] == channels * images
                    && n.d.ne()[3] == outputs * images
            }),
            must("the result has the kernel's places", |n| {
                (0..3).all(|dim| {
                    let out = along(n, dim, 3, n.s(1).ne()[dim], n.s(0).ne()[dim]);
                    out > 0 && out == n.d.ne()[dim]
                })
            }),
            must("a patch and its outputs take at most 16 MiB", |n| {
                let [width, height, depth, _] = n.s(0).ne();
                fits_patches(n, (width * height).saturating_mul(depth).saturating_mul(n.p(9)), n.p(11))
            }),
        ],
        work: Work::together("16 MiB of patches", |_| Some(PATCHES)),
        ..OpRule::BLANK
    },
    OpRule {
        name: "CONV_2D_DW",
        sources: &[need("kernel"), need("image")],
        params: PARAMS_2D,
        result: ResultPlace::Own,
        clauses: &[
            WEIGHTS,
            STEPS_2D,
            must("kernel has one input channel and an output for each channel of the image", |n| {
                n.s(0).ne()[2] == 1 && n.s(0).ne()[3] == n.s(1).ne()[2]
            }),
            must("the result has the kernel's places, the image's channels and count", |n| {
                let (kernel, image) = (n.s(0).ne(), n.s(1).ne());
                let out = |dim: usize| along(n, dim, 2, image[dim], kernel[dim]);
                out(0) > 0 && out(1) > 0 && n.d.ne() == [out(0), out(1), image[2], image[3]]
            }),
            must("kernel, image and result are dense, or have their channels side by side", |n| {
                let (kernel, image) = (n.s(0), n.s(1));
                let side_by_side = || {
                    let ([i0, i1, i2, _], [k0, k1, k2, _]) = (image.nb(), kernel.nb());
                    // As the CPU kernel finds out; from then on it counts elements only.
                    i0 > i2
                        && i1 > i0
                        && k0 >= k2
                        && k1 >= k0
                        && image.is_channel_fast()
                        && n.d.is_channel_fast()
                };
                kernel.extent() == (kernel.elements() as u64).saturating_mul(u64::from(kernel.info().size))
                    && (image.is_dense() && n.d.is_dense() && kernel.is_dense() || side_by_side())
            }),
        ],
        // Earlier kernels read floats all the same, past the end.
        since: &[cpu_since(Version::new(0, 17, 0), "a kernel of F16", |n| n.s(0).type_() == F16)],
        ..OpRule::BLANK
    },
    OpRule {
        name: "CONV_TRANSPOSE_1D",
        sources: &[need("kernel"), need("image")],
        params: &["stride", "pad", "dilation"],
        clauses: &[
            WEIGHTS,
            must("kernel has three dimensions, image two", |n| n.s(0).is_3d() && n.s(1).is_matrix()),
            must("kernel and image have the same channels", |n| n.s(0).ne()[2] == n.s(1).ne()[1]),
            must("the rows of kernel and image are packed", |n| {
                n.s(0).has_packed_rows() && n.s(1).has_packed_rows()
            }),
            must("the stride is 1 to 2^20, without pad and dilation", |n| {
                (1..=MAX_STEP).contains(&n.p(0)) && n.p(1) == 0 && n.p(2) == 1
            }),
            must("the result has a row for each output channel, as long as the kernel reaches", |n| {
                let ([size, outputs, ..], [length, ..]) = (n.s(0).ne(), n.s(1).ne());
                n.d.ne() == [(length - 1) * n.p(0) + size, outputs, 1, 1]
            }),
        ],
        work: TRANSPOSED,
        ..OpRule::BLANK
    },
    OpRule {
        name: "CONV_TRANSPOSE_2D",
        sources: &[need("kernel"), need("image")],
        params: &["stride"],
        clauses: &[
            WEIGHTS,
            must("kernel and image have the same channels", |n| n.s(0).ne()[3] == n.s(1).ne()[2]),
            must("kernel is dense, and the image's rows are packed", |n| {
                n.s(0).is_dense() && n.s(1).has_packed_rows()
            }),
            must("the stride is 1 to 2^20", |n| (1..=MAX_STEP).contains(&n.p(0))),
            must("the result has each image's size as far as the kernel reaches", |n| {
                let (kernel, image) = (n.s(0).ne(), n.s(1).ne());
                let out = |dim: usize| (image[dim] - 1) * n.p(0) + kernel[dim];
                n.d.ne() == [out(0), out(1), kernel[2], image[3]]
            }),
        ],
        // Earlier kernels leave out all but the first.
        since: &[cpu_since(Version::new(0, 24, 0), "more than one image", |n| n.s(1).ne()[3] > 1)],
        work: TRANSPOSED,
        ..OpRule::BLANK
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_s_places_are_counted_as_ggml_does() {
        assert_eq!(places(10, 3, 1, 0, 1), 8);
        assert_eq!(places(10, 3, 2, 1, 1), 5);
        assert_eq!(places(10, 3, 1, 2, 3), 8);
        assert_eq!(places(1, 3, 5, 2, 4), 1, "a kernel that hangs over");
        assert!(places(1, 3, 1, 0, 1) <= 0, "too small an image");
    }
}
