//! ggml's element types, and how many bytes a tensor spans.
#![forbid(unsafe_code)]

use thiserror::Error;

use crate::abi::MAX_DIMS;
use crate::layout::{OLDEST_VERSION, Version};

/// An element type: how many elements make a block, and how many bytes a block takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TypeInfo {
    /// ggml's number (`ggml_type`).
    pub number: u32,
    /// ggml's name, such as `f32` or `q4_K`.
    pub name: &'static str,
    /// Elements in a block; 1 for a plain type.
    pub block: u32,
    /// Bytes of a block.
    pub size: u32,
    /// The first release that is known to have it.
    pub since: Version,
}

impl TypeInfo {
    /// The type of a number; none for a number ggml removed or has not given yet (as of 0.27).
    pub fn get(number: u32) -> Option<&'static Self> {
        let at = TYPES.binary_search_by_key(&number, |info| info.number).ok()?;
        TYPES.get(at)
    }

    /// The type of a name.
    pub fn by_name(name: &str) -> Option<&'static Self> {
        TYPES.iter().find(|info| info.name == name)
    }

    /// All types, by rising number.
    pub fn all() -> &'static [Self] {
        TYPES
    }

    /// Whether elements are packed in blocks of more than one.
    pub fn is_block(&self) -> bool {
        self.block > 1
    }

    /// Bytes of a dense row of `elements`, none when they do not fill whole blocks or the sum leaves 64 bits.
    pub fn row_size(&self, elements: u64) -> Option<u64> {
        let block = u64::from(self.block);
        if !elements.is_multiple_of(block) {
            return None;
        }
        (elements / block).checked_mul(u64::from(self.size))
    }

    /// Byte strides of a dense tensor of this shape, as ggml lays out a new one; none when they leave 64 bits or an `ne` is negative.
    pub fn dense_strides(&self, ne: [i64; MAX_DIMS]) -> Option<[u64; MAX_DIMS]> {
        let mut nb = [u64::from(self.size); MAX_DIMS];
        nb[1] = self.row_size(u64::try_from(ne[0]).ok()?)?;
        nb[2] = nb[1].checked_mul(u64::try_from(ne[1]).ok()?)?;
        nb[3] = nb[2].checked_mul(u64::try_from(ne[2]).ok()?)?;
        Some(nb)
    }
}

/// Why a tensor's extent cannot be told.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum ExtentError {
    /// The type's number is removed or unknown.
    #[error("tensor type {0} is not one of ggml's")]
    UnknownType(u32),
    /// A dimension is below zero.
    #[error("dimension {dim} of the tensor has {elements} elements")]
    NegativeDimension {
        /// The dimension.
        dim: usize,
        /// Its elements.
        elements: i64,
    },
    /// The first dimension does not fill whole blocks.
    #[error("a row of {elements} elements does not fill blocks of {block} ({name})")]
    PartialBlock {
        /// Name of the type.
        name: &'static str,
        /// Elements in the row.
        elements: i64,
        /// Elements in a block.
        block: u32,
    },
    /// The extent is 2^63 bytes or more.
    #[error("the tensor spans 2^63 bytes or more")]
    Overflow,
}

/// Bytes from a tensor's first byte to the end of its last, as `ggml_nbytes` tells for a valid tensor; 0 when a dimension is empty.
///
/// Shapes are elements, strides bytes. ggml sums with wrap-around; this never does.
///
/// # Errors
///
/// [`ExtentError`] names what is wrong with the shape.
pub fn extent(type_: u32, ne: [i64; MAX_DIMS], nb: [u64; MAX_DIMS]) -> Result<u64, ExtentError> {
    let info = TypeInfo::get(type_).ok_or(ExtentError::UnknownType(type_))?;
    let mut elements = [0u64; MAX_DIMS];
    for (dim, (count, &given)) in elements.iter_mut().zip(&ne).enumerate() {
        *count = u64::try_from(given).map_err(|_| ExtentError::NegativeDimension { dim, elements: given })?;
    }
    if elements.contains(&0) {
        return Ok(0);
    }
    if !elements[0].is_multiple_of(u64::from(info.block)) {
        return Err(ExtentError::PartialBlock { name: info.name, elements: ne[0], block: info.block });
    }
    checked_extent(info, elements, nb)
        .filter(|&bytes| i64::try_from(bytes).is_ok())
        .ok_or(ExtentError::Overflow)
}

/// The sum of [`extent`] for counts above zero, none when it leaves 64 bits.
fn checked_extent(info: &TypeInfo, ne: [u64; MAX_DIMS], nb: [u64; MAX_DIMS]) -> Option<u64> {
    let row = if info.is_block() {
        ne[0].checked_mul(nb[0])? / u64::from(info.block)
    } else {
        (ne[0] - 1).checked_mul(nb[0])?.checked_add(u64::from(info.size))?
    };
    let mut bytes = row;
    for dim in 1..MAX_DIMS {
        bytes = bytes.checked_add((ne[dim] - 1).checked_mul(nb[dim])?)?;
    }
    Some(bytes)
}

/// A row of the table.
const fn t(number: u32, name: &'static str, block: u32, size: u32) -> TypeInfo {
    TypeInfo { number, name, block, size, since: OLDEST_VERSION }
}

/// By rising number; 4, 5, 31 to 33 and 36 to 38 were removed from ggml and would divide by a block of 0 there.
const TYPES: &[TypeInfo] = &[
    t(0, "f32", 1, 4),
    t(1, "f16", 1, 2),
    t(2, "q4_0", 32, 18),
    t(3, "q4_1", 32, 20),
    t(6, "q5_0", 32, 22),
    t(7, "q5_1", 32, 24),
    t(8, "q8_0", 32, 34),
    t(9, "q8_1", 32, 36),
    t(10, "q2_K", 256, 84),
    t(11, "q3_K", 256, 110),
    t(12, "q4_K", 256, 144),
    t(13, "q5_K", 256, 176),
    t(14, "q6_K", 256, 210),
    t(15, "q8_K", 256, 292),
    t(16, "iq2_xxs", 256, 66),
    t(17, "iq2_xs", 256, 74),
    t(18, "iq3_xxs", 256, 98),
    t(19, "iq1_s", 256, 50),
    t(20, "iq4_nl", 32, 18),
    t(21, "iq3_s", 256, 110),
    t(22, "iq2_s", 256, 82),
    t(23, "iq4_xs", 256, 136),
    t(24, "i8", 1, 1),
    t(25, "i16", 1, 2),
    t(26, "i32", 1, 4),
    t(27, "i64", 1, 8),
    t(28, "f64", 1, 8),
    t(29, "iq1_m", 256, 56),
    t(30, "bf16", 1, 2),
    t(34, "tq1_0", 256, 54),
    t(35, "tq2_0", 256, 66),
    t(39, "mxfp4", 32, 17),
    t(40, "nvfp4", 64, 36),
    t(41, "q1_0", 128, 18),
    TypeInfo { since: Version::new(0, 17, 0), ..t(42, "q2_0", 64, 18) },
];

#[cfg(test)]
mod tests {
    use super::*;

    const F32: u32 = 0;
    const Q4_0: u32 = 2;

    #[test]
    fn table_is_sorted_and_has_no_removed_type() {
        assert!(TYPES.windows(2).all(|pair| pair[0].number < pair[1].number));
        for number in [4, 5, 31, 32, 33, 36, 37, 38, 43, u32::MAX] {
            assert_eq!(TypeInfo::get(number), None);
        }
        for info in TYPES {
            assert_eq!(TypeInfo::get(info.number), Some(info));
            assert_eq!(TypeInfo::by_name(info.name), Some(info));
        }
    }

    #[test]
    fn dense_tensors_span_their_elements() {
        assert_eq!(extent(F32, [3, 4, 5, 2], [4, 12, 48, 240]), Ok(480));
        assert_eq!(extent(Q4_0, [64, 3, 1, 1], [18, 36, 108, 108]), Ok(108));
        for info in TYPES {
            let ne = [i64::from(info.block) * 2, 3, 2, 2];
            let nb = info.dense_strides(ne).unwrap();
            assert_eq!(extent(info.number, ne, nb), Ok(u64::from(info.size) * 24));
        }
    }

    #[test]
    fn strided_views_end_at_their_last_byte() {
        assert_eq!(extent(F32, [2, 3, 1, 1], [4, 100, 0, 0]), Ok(208));
        assert_eq!(extent(F32, [2, 3, 1, 1], [8, 4, 1 << 62, 7]), Ok(20));
    }

    #[test]
    fn an_empty_dimension_spans_nothing() {
        assert_eq!(extent(F32, [0, 3, 1, 1], [4, 0, 0, 0]), Ok(0));
        assert_eq!(extent(F32, [3, 3, 0, i64::MAX], [u64::MAX; 4]), Ok(0));
    }

    #[test]
    fn hostile_shapes_are_refused() {
        assert_eq!(extent(4, [32, 1, 1, 1], [1; 4]), Err(ExtentError::UnknownType(4)));
        assert_eq!(
            extent(F32, [1, -1, 1, 1], [4; 4]),
            Err(ExtentError::NegativeDimension { dim: 1, elements: -1 })
        );
        assert_eq!(
            extent(F32, [0, 1, 1, i64::MIN], [4; 4]),
            Err(ExtentError::NegativeDimension { dim: 3, elements: i64::MIN })
        );
        assert_eq!(
            extent(Q4_0, [33, 1, 1, 1], [18; 4]),
            Err(ExtentError::PartialBlock { name: "q4_0", elements: 33, block: 32 })
        );
        // ggml's own sum wraps around to a few bytes here.
        assert_eq!(extent(F32, [1, 1, 1, 3], [4, 4, 4, 1 << 63]), Err(ExtentError::Overflow));
        assert_eq!(extent(F32, [1, 1, 1, 2], [4, 4, 4, (1 << 63) - 4]), Err(ExtentError::Overflow));
        assert_eq!(extent(F32, [1, 1, 1, 2], [4, 4, 4, (1 << 63) - 5]), Ok(i64::MAX as u64));
        assert_eq!(extent(Q4_0, [i64::MAX - 31, 1, 1, 1], [18; 4]), Err(ExtentError::Overflow));
    }
}
