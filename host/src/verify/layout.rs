//! What kernels ask of a tensor's shape and strides.
//!
//! A dimension of one element has the stride that ggml itself would give it wherever the rows are even by it, whatever the guest said
//! ([`super::tensor`]). Kernels that step over rows or planes linearly then never meet a stride that no element needs and no check has looked at, and
//! ggml's own looser predicates (which skip such dimensions) mean the same as the strict ones here.
#![forbid(unsafe_code)]

use super::tensor::CheckedTensor;
use apir_protocol::tensor::MAX_DIMS;

impl CheckedTensor {
    /// Elements in all.
    #[must_use]
    pub fn elements(&self) -> i64 {
        // The dimensions of a tensor that is not empty have a product below 2^62.
        if self.is_empty() { 0 } else { self.ne().iter().product() }
    }

    /// Bytes of the elements without gaps.
    #[must_use]
    pub fn dense_bytes(&self) -> u64 {
        let blocks = self.elements() as u64 / u64::from(self.info().block);
        blocks.saturating_mul(u64::from(self.info().size))
    }

    /// Rows in all.
    #[must_use]
    pub fn rows(&self) -> i64 {
        self.ne()[1..].iter().product()
    }

    /// Whether a dimension is 0: nothing is computed, nothing read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ne().contains(&0)
    }

    /// Elements of a row lie side by side.
    #[must_use]
    pub fn has_packed_rows(&self) -> bool {
        self.is_empty() || self.nb()[0] == u64::from(self.info().size)
    }

    /// Packed rows at even distances: row `i` of all rows lies `i * nb[1]` bytes in, and ggml calls the tensor contiguous from dimension 1 on.
    #[must_use]
    pub fn has_even_rows(&self) -> bool {
        let ([ne0, ne1, ne2, _], [_, nb1, nb2, nb3]) = (self.ne(), self.nb());
        // The distance of rows is what one dimension of rows says; without one, ggml wants no gaps.
        let near = ne1 > 1 || self.info().row_size(ne0 as u64) == Some(nb1);
        self.is_empty()
            || near && self.has_packed_rows() && nb2 == nb1 * ne1 as u64 && nb3 == nb2 * ne2 as u64
    }

    /// No gaps and no other order than ggml's own.
    #[must_use]
    pub fn is_dense(&self) -> bool {
        self.is_empty() || self.info().dense_strides(self.ne()) == Some(self.nb())
    }

    /// No two elements, or blocks, share bytes: each may be written by another thread.
    #[must_use]
    pub fn lies_apart(&self) -> bool {
        let [ne0, ne1, ne2, ne3] = self.ne();
        let counts = [ne0 / i64::from(self.info().block), ne1, ne2, ne3];
        self.is_empty() || lie_apart(u64::from(self.info().size), counts, self.nb())
    }

    /// No dimension's stride is smaller than that of the one before.
    #[must_use]
    pub fn has_rising_strides(&self) -> bool {
        self.is_empty() || self.nb().is_sorted()
    }

    /// The channels of a pixel lie side by side, then the pixels of a row, the rows, the images.
    #[must_use]
    pub fn is_channel_fast(&self) -> bool {
        let ([width, height, channels, _], size) = (self.ne(), u64::from(self.info().size));
        // Of strides that overlap, the dimensions may have a product beyond 64 bits.
        let pixel = size.saturating_mul(channels as u64);
        let row = pixel.saturating_mul(width as u64);
        let expected = [pixel, row, size, row.saturating_mul(height as u64)];
        // Dimensions of one element have canonical strides, which differ from these.
        self.is_empty() || (0..MAX_DIMS).all(|dim| self.ne()[dim] == 1 || self.nb()[dim] == expected[dim])
    }

    /// The same number of elements in each dimension.
    #[must_use]
    pub fn same_shape(&self, other: &Self) -> bool {
        self.ne() == other.ne()
    }

    /// The same type, dimensions and strides.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        self.type_() == other.type_()
            && self.ne() == other.ne()
            && (self.nb() == other.nb() || self.is_empty())
    }

    /// One element.
    #[must_use]
    pub fn is_scalar(&self) -> bool {
        self.ne() == [1; MAX_DIMS]
    }

    /// Only the first dimension may have more than one element.
    #[must_use]
    pub fn is_vector(&self) -> bool {
        self.ne()[1..] == [1; 3]
    }

    /// Only the first two dimensions may have more than one element.
    #[must_use]
    pub fn is_matrix(&self) -> bool {
        self.ne()[2..] == [1; 2]
    }

    /// The last dimension has one element.
    #[must_use]
    pub fn is_3d(&self) -> bool {
        self.ne()[3] == 1
    }

    /// Whole copies of this tensor side by side make one of `other`'s shape.
    #[must_use]
    pub fn repeats_into(&self, other: &Self) -> bool {
        if self.is_empty() {
            return other.is_empty();
        }
        self.ne().iter().zip(other.ne()).all(|(own, others)| divides(*own, others))
    }
}

/// Whether elements of `size` bytes at these strides, so many in each dimension, share no bytes, as far as every stride steps over all that the smaller
/// ones span: no layout that ggml makes interleaves dimensions. What is spanned in all must fit in 64 bits.
#[must_use]
pub fn lie_apart(size: u64, counts: [i64; MAX_DIMS], strides: [u64; MAX_DIMS]) -> bool {
    let mut steps: [_; MAX_DIMS] = std::array::from_fn(|dim| (strides[dim], counts[dim]));
    steps.sort_unstable();
    let mut spanned = size;
    steps.into_iter().filter(|(_, count)| *count > 1).all(|(stride, count)| {
        let beyond = stride >= spanned;
        spanned += stride * (count as u64 - 1);
        beyond
    })
}

/// Whether `whole` is a multiple of `part`; of 0 only 0 is one.
#[must_use]
pub fn divides(part: i64, whole: i64) -> bool {
    if part == 0 { whole == 0 } else { whole % part == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verify::tests::clauses::Numbers;
    use std::collections::BTreeSet;

    #[test]
    fn strides_that_step_over_what_they_hold_set_elements_apart() {
        assert!(lie_apart(4, [64, 8, 2, 1], [4, 256, 2048, 0]), "dense");
        assert!(lie_apart(4, [64, 8, 2, 1], [4, 512, 8192, 0]), "gaps");
        assert!(lie_apart(4, [8, 64, 2, 3], [256, 4, 6144, 2048]), "permuted");
        assert!(lie_apart(18, [2, 4, 1, 1], [18, 36, 0, 0]), "blocks");
        assert!(lie_apart(4, [1, 1, 1, 1], [0; 4]), "one element");
        assert!(!lie_apart(4, [64, 8, 1, 1], [4, 64, 0, 0]), "rows of 256 bytes every 64");
        assert!(!lie_apart(4, [64, 8, 2, 1], [4, 256, 1024, 0]), "planes in one another");
        assert!(!lie_apart(4, [64, 8, 1, 1], [4, 4, 0, 0]), "the same stride twice");
        assert!(!lie_apart(4, [4, 2, 1, 1], [4, 0, 0, 0]), "a row repeated");
        assert!(!lie_apart(18, [2, 4, 1, 1], [18, 18, 0, 0]), "blocks over one another");
    }

    #[test]
    fn elements_apart_share_no_bytes() {
        let mut numbers = Numbers::new(7);
        let mut seen = [0; 2];
        for _ in 0..20_000 {
            let size = [1, 2, 4, 18][numbers.below(4)];
            let counts = std::array::from_fn(|_| 1 + numbers.below(4) as i64);
            let strides = std::array::from_fn(|_| size * numbers.below(40) as u64);
            let mut bytes = BTreeSet::new();
            let total: i64 = counts.iter().product();
            for element in 0..total {
                let (mut rest, mut at) = (element, 0);
                for dim in 0..MAX_DIMS {
                    at += (rest % counts[dim]) as u64 * strides[dim];
                    rest /= counts[dim];
                }
                bytes.extend(at..at + size);
            }
            let apart = lie_apart(size, counts, strides);
            seen[usize::from(apart)] += 1;
            assert!(!apart || bytes.len() as u64 == total as u64 * size, "{size} {counts:?} {strides:?}");
        }
        assert!(seen.iter().all(|count| *count > 1000), "{seen:?}");
    }
}
