//! One tensor: type, dimensions, strides, and its place in a buffer.
#![forbid(unsafe_code)]

use super::rules::RuleBook;
use super::{Buffers, VerifyError};
use apir_ggml::abi::{FLAG_COMPUTE, FLAG_INPUT, FLAG_LOSS, FLAG_OUTPUT, FLAG_PARAM};
use apir_ggml::{OpKind, TypeInfo};
use apir_protocol::tensor::{MAX_DIMS, NAME_SIZE, PARAM_WORDS, RawTensor, TensorRecord};

/// The flags that ggml knows; others do not reach a backend.
const KNOWN_FLAGS: i32 = FLAG_INPUT | FLAG_OUTPUT | FLAG_PARAM | FLAG_LOSS | FLAG_COMPUTE;

/// Most elements of a dimension: kernels count in C ints.
pub const MAX_DIM: i64 = i32::MAX as i64;
/// Most rows: kernels round the count up to whole shares of their threads in C ints.
pub const MAX_ROWS: i64 = i32::MAX as i64 - 4096;
/// Most bytes between elements of a row, and between rows, on a CPU: some kernels take these strides for C ints. No model comes near;
/// the strides of planes of a large one do, and what counts them in ints has a clause.
pub const MAX_CPU_STRIDE: u64 = i32::MAX as u64;
/// Most bytes that a tensor spans.
pub const MAX_EXTENT: u64 = 1 << 46;

/// Where a tensor's data lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Token of the buffer.
    pub buffer: u64,
    /// Number of the memory that it lies in, which another buffer may share.
    pub memory: u64,
    /// Bytes from the buffer's base.
    pub offset: u64,
    /// Bytes from there to the buffer's end.
    pub room: u64,
}

/// A tensor of a known type whose elements all lie inside its buffer.
#[derive(Debug, Clone)]
pub struct CheckedTensor {
    info: &'static TypeInfo,
    ne: [i64; MAX_DIMS],
    nb: [u64; MAX_DIMS],
    extent: u64,
    op: u32,
    op_params: [i32; PARAM_WORDS],
    variant: i64,
    flags: i32,
    name: [u8; NAME_SIZE],
    view_offs: u64,
    place: Option<Place>,
}

impl CheckedTensor {
    /// Checks a record; without a buffer it must be without an address too.
    ///
    /// # Errors
    /// [`VerifyError`]
    pub fn from_record(
        record: &TensorRecord,
        rules: &RuleBook,
        buffers: &impl Buffers,
    ) -> Result<Self, VerifyError> {
        let raw = RawTensor {
            type_: record.type_,
            ne: record.ne.map(i64::from),
            nb: record.nb.map(u64::from),
            op: record.op,
            op_params: record.op_params,
            flags: record.flags,
            view_offs: record.view_offs,
            name: record.name,
            ..RawTensor::default()
        };
        let mut tensor = Self::from_raw(&raw, rules)?;
        let token = record.buffer.0;
        if token == 0 {
            if record.data != 0 {
                return Err(VerifyError::NoBuffer { name: tensor.name_text() });
            }
            return Ok(tensor);
        }
        let size = buffers
            .find(token)
            .ok_or_else(|| VerifyError::UnknownBuffer { name: tensor.name_text(), token })?
            .size;
        if record.data.checked_add(tensor.extent).is_none_or(|end| end > size) {
            return Err(VerifyError::OutsideBuffer {
                name: tensor.name_text(),
                offset: record.data,
                extent: tensor.extent,
                size,
            });
        }
        let room = size - record.data;
        let memory = buffers.memory(token);
        tensor.place = Some(Place { buffer: token, memory, offset: record.data, room });
        Ok(tensor)
    }

    /// Checks a tensor that lies in no buffer.
    ///
    /// # Errors
    /// [`VerifyError`]
    pub fn from_raw(raw: &RawTensor, rules: &RuleBook) -> Result<Self, VerifyError> {
        let name = || name_text(&raw.name);
        let info = rules.type_info(raw.type_).ok_or_else(|| VerifyError::Extent {
            name: name(),
            cause: apir_ggml::ExtentError::UnknownType(raw.type_),
        })?;
        let extent = apir_ggml::extent(raw.type_, raw.ne, raw.nb)
            .map_err(|cause| VerifyError::Extent { name: name(), cause })?;
        check_size(raw, extent)?;
        if rules.target().cpu {
            check_strides(raw)?;
        }
        let nb = canonical_strides(info, raw.ne, raw.nb).map_err(|dim| VerifyError::Stride {
            name: name(),
            dim,
            stride: raw.nb[dim],
            size: info.size,
        })?;
        // What is computed has these strides, and a row of one block then spans that block, whatever the guest said.
        let extent = apir_ggml::extent(raw.type_, raw.ne, nb)
            .map_err(|cause| VerifyError::Extent { name: name(), cause })?;
        match rules.kind(raw.op) {
            None => {
                return Err(VerifyError::UnknownOp { name: name(), op: raw.op, count: rules.op_count() });
            }
            Some(OpKind::Callback) => {
                return Err(VerifyError::Callback { name: name(), op: rules.op_name(raw.op).to_owned() });
            }
            Some(OpKind::None | OpKind::View | OpKind::Compute) => {}
        }
        let mut tensor = Self {
            info,
            ne: raw.ne,
            nb,
            extent,
            op: raw.op,
            op_params: raw.op_params,
            variant: rules.variant(raw.op, raw.op_params[0]),
            flags: raw.flags & KNOWN_FLAGS,
            name: raw.name,
            view_offs: raw.view_offs,
            place: None,
        };
        tensor.name[NAME_SIZE - 1] = 0;
        Ok(tensor)
    }

    /// ggml's number of the element type.
    #[must_use]
    pub fn type_(&self) -> u32 {
        self.info.number
    }

    /// The element type.
    #[must_use]
    pub fn info(&self) -> &'static TypeInfo {
        self.info
    }

    /// Elements in each dimension.
    #[must_use]
    pub fn ne(&self) -> [i64; MAX_DIMS] {
        self.ne
    }

    /// Bytes from one element to the next in each dimension, canonical where there is one element.
    #[must_use]
    pub fn nb(&self) -> [u64; MAX_DIMS] {
        self.nb
    }

    /// Bytes from the first element's start to the last one's end.
    #[must_use]
    pub fn extent(&self) -> u64 {
        self.extent
    }

    /// ggml's number of the operation.
    #[must_use]
    pub fn op(&self) -> u32 {
        self.op
    }

    /// The operation's parameters.
    #[must_use]
    pub fn op_params(&self) -> [i32; PARAM_WORDS] {
        self.op_params
    }

    /// Which of the rules' maps or units the node is, whatever number this ggml gives it; -1 for one that no rule knows, and
    /// for other operations.
    #[must_use]
    pub fn variant(&self) -> i64 {
        self.variant
    }

    /// Replaces the parameters.
    pub(crate) fn set_params(&mut self, params: [i32; PARAM_WORDS]) {
        self.op_params = params;
    }

    /// Puts a value in a parameter that an older guest leaves out.
    pub(super) fn set_param(&mut self, word: usize, value: i32) {
        if let Some(param) = self.op_params.get_mut(word) {
            *param = value;
        }
    }

    /// ggml's flags, none but those that it knows.
    #[must_use]
    pub fn flags(&self) -> i32 {
        self.flags
    }

    /// The name with its NUL.
    #[must_use]
    pub fn name(&self) -> [u8; NAME_SIZE] {
        self.name
    }

    /// The name for a message.
    #[must_use]
    pub fn name_text(&self) -> String {
        name_text(&self.name)
    }

    /// Bytes into the viewed tensor.
    #[must_use]
    pub fn view_offs(&self) -> u64 {
        self.view_offs
    }

    /// Where the data lies, if anywhere.
    #[must_use]
    pub fn place(&self) -> Option<Place> {
        self.place
    }

    /// Whether both have bytes in common, as far as the stretches they span tell.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let (Some(own), Some(others)) = (self.place, other.place) else { return false };
        // Both ends lie inside a buffer: the sums are small.
        own.memory == others.memory
            && self.extent > 0
            && other.extent > 0
            && own.offset < others.offset + other.extent
            && others.offset < own.offset + self.extent
    }
}

/// Refuses what a kernel's C ints cannot count.
fn check_size(raw: &RawTensor, extent: u64) -> Result<(), VerifyError> {
    let too_large = |what, value: i64, limit: i64| VerifyError::TooLarge {
        name: name_text(&raw.name),
        what,
        value: value as u64,
        limit: limit as u64,
    };
    for elements in raw.ne {
        if elements > MAX_DIM {
            return Err(too_large("elements of a dimension", elements, MAX_DIM));
        }
    }
    // Three factors below 2^31 may leave 64 bits.
    let rows = raw.ne[1..].iter().try_fold(1i64, |rows, elements| rows.checked_mul(*elements));
    match rows {
        Some(rows) if rows <= MAX_ROWS => {}
        rows => return Err(too_large("rows", rows.unwrap_or(i64::MAX), MAX_ROWS)),
    }
    if extent > MAX_EXTENT {
        return Err(too_large("bytes", extent as i64, MAX_EXTENT as i64));
    }
    Ok(())
}

/// Refuses strides that some CPU kernel cuts to a C int.
fn check_strides(raw: &RawTensor) -> Result<(), VerifyError> {
    let stepped = (0..2).filter(|dim| raw.ne[*dim] > 1 && !raw.ne.contains(&0));
    match stepped.map(|dim| raw.nb[dim]).find(|stride| *stride > MAX_CPU_STRIDE) {
        Some(value) => Err(VerifyError::TooLarge {
            name: name_text(&raw.name),
            what: "bytes from row to row on a CPU",
            value,
            limit: MAX_CPU_STRIDE,
        }),
        None => Ok(()),
    }
}

/// The strides that kernels are given; else the dimension whose stride no tensor has.
///
/// The stride of a dimension of one element moves no element and may hold anything. Where the rows are even with the strides that ggml gives to new
/// tensors there, these are taken: kernels that step over rows or planes linearly step by them. Elsewhere kernels may find out from
/// such strides in which order the dimensions lie, and only those behind the last dimension of more are replaced.
fn canonical_strides(
    info: &TypeInfo,
    ne: [i64; MAX_DIMS],
    nb: [u64; MAX_DIMS],
) -> Result<[u64; MAX_DIMS], usize> {
    if ne.contains(&0) {
        // Nothing is stepped over, but kernels look at the strides.
        return info.dense_strides(ne).ok_or(MAX_DIMS - 1);
    }
    let (size, block) = (u64::from(info.size), i64::from(info.block));
    // What nb[0] steps over, and then what the other strides do.
    let mut counts = ne;
    counts[0] = ne[0] / block;
    for dim in (0..MAX_DIMS).filter(|dim| counts[*dim] > 1) {
        // A block is never split, nor are blocks of a row spread out.
        let whole = dim > 0 || !info.is_block() || nb[0] == size;
        if !whole || nb[dim] == 0 || !nb[dim].is_multiple_of(size) {
            return Err(dim);
        }
    }
    let mut usual = nb;
    if counts[0] == 1 {
        usual[0] = size;
    }
    let mut strides = if info.is_block() { usual } else { nb };
    let last = (0..MAX_DIMS).rev().find(|dim| counts[*dim] > 1).unwrap_or(0);
    for dim in 1..MAX_DIMS {
        if ne[dim] == 1 {
            let below = counts[dim - 1] as u64;
            usual[dim] = usual[dim - 1].checked_mul(below).ok_or(dim)?;
            if dim > last {
                strides[dim] = strides[dim - 1].checked_mul(below).ok_or(dim)?;
            }
        }
    }
    let even = usual[0] == size
        && usual[1].checked_mul(counts[1] as u64) == Some(usual[2])
        && usual[2].checked_mul(counts[2] as u64) == Some(usual[3]);
    Ok(if even { usual } else { strides })
}

fn name_text(name: &[u8; NAME_SIZE]) -> String {
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(NAME_SIZE);
    String::from_utf8_lossy(&name[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn canonical(type_: u32, ne: [i64; 4], nb: [u64; 4]) -> Result<[u64; 4], usize> {
        canonical_strides(TypeInfo::get(type_).unwrap(), ne, nb)
    }

    #[test]
    fn dimensions_of_one_element_get_ggml_s_strides() {
        assert_eq!(canonical(0, [4, 1, 1, 1], [4, 999, 0, u64::MAX]), Ok([4, 16, 16, 16]));
        assert_eq!(canonical(0, [4, 1, 8, 1], [4, 7, 16, 3]), Ok([4, 16, 16, 128]));
        assert_eq!(
            canonical(0, [4, 2, 1, 3], [4, 32, 7, 64]),
            Ok([4, 32, 64, 64]),
            "rows with gaps, but even"
        );
        assert_eq!(canonical(0, [1, 8, 1, 1], [32, 4, 4, 4]), Ok([4, 4, 32, 32]));
        // A block type's row is one unit of nb[0] for each block.
        assert_eq!(canonical(2, [64, 1, 2, 1], [18, 0, 36, 0]), Ok([18, 36, 36, 72]));
        assert_eq!(canonical(2, [32, 4, 1, 1], [999, 18, 0, 0]), Ok([18, 18, 72, 72]));
        assert_eq!(canonical(0, [3, 0, 2, 1], [4, 5, 7, 1]), Ok([4, 12, 0, 0]), "nothing is stepped over");
        assert_eq!(canonical(2, [31, 0, 1, 1], [18, 18, 0, 0]), Err(3), "part of a block");
    }

    #[test]
    fn strides_that_tell_the_order_of_dimensions_stay() {
        // Channels side by side; a CPU kernel compares the stride of the one element with the others.
        assert_eq!(canonical(0, [3, 3, 1, 9], [36, 108, 4, 4]), Ok([36, 108, 4, 4]));
        assert_eq!(canonical(0, [8, 6, 3, 1], [12, 96, 4, 999]), Ok([12, 96, 4, 12]));
        assert_eq!(canonical(0, [4, 1, 8, 1], [4, 64, 64, 0]), Ok([4, 64, 64, 512]), "rows with gaps");
    }

    #[test]
    fn strides_of_no_tensor_are_refused() {
        for (type_, ne, nb, dim) in [
            (0, [4, 2, 1, 1], [2, 16, 0, 0], 0),
            (0, [4, 2, 1, 1], [0, 16, 0, 0], 0),
            (0, [4, 2, 1, 1], [6, 16, 0, 0], 0),
            (0, [4, 2, 1, 1], [4, 0, 0, 0], 1),
            (0, [4, 2, 2, 1], [4, 16, 33, 0], 2),
            (0, [4, 2, 2, 2], [4, 16, 32, 0], 3),
            (2, [64, 2, 1, 1], [36, 18, 0, 0], 0),
            (2, [64, 2, 1, 1], [18, 35, 0, 0], 1),
        ] {
            assert_eq!(canonical(type_, ne, nb), Err(dim), "{type_} {ne:?} {nb:?}");
        }
    }
}
