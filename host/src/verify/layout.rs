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

/// Whether `whole` is a multiple of `part`; of 0 only 0 is one.
#[must_use]
pub fn divides(part: i64, whole: i64) -> bool {
    if part == 0 { whole == 0 } else { whole % part == 0 }
}
