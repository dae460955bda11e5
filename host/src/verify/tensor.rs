//! One tensor: type, dimensions, strides, and its place in a buffer.
#![forbid(unsafe_code)]

use super::{BufferSizes, VerifyError};
use apir_ggml::abi::{FLAG_COMPUTE, FLAG_INPUT, FLAG_LOSS, FLAG_OUTPUT, FLAG_PARAM};
use apir_ggml::{OpKind, OpTable};
use apir_protocol::tensor::{MAX_DIMS, NAME_SIZE, PARAM_WORDS, RawTensor, TensorRecord};

/// The flags that ggml knows; others do not reach a backend.
const KNOWN_FLAGS: i32 = FLAG_INPUT | FLAG_OUTPUT | FLAG_PARAM | FLAG_LOSS | FLAG_COMPUTE;

/// Where a tensor's data lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Token of the buffer.
    pub buffer: u64,
    /// Bytes from the buffer's base.
    pub offset: u64,
}

/// A tensor of a known type whose elements all lie inside its buffer.
#[derive(Debug, Clone)]
pub struct CheckedTensor {
    type_: u32,
    ne: [i64; MAX_DIMS],
    nb: [u64; MAX_DIMS],
    extent: u64,
    op: u32,
    op_params: [i32; PARAM_WORDS],
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
        ops: &OpTable,
        buffers: &impl BufferSizes,
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
        let mut tensor = Self::from_raw(&raw, ops)?;
        let token = record.buffer.0;
        if token == 0 {
            if record.data != 0 {
                return Err(VerifyError::NoBuffer { name: tensor.name_text() });
            }
            return Ok(tensor);
        }
        let size = buffers
            .buffer_size(token)
            .ok_or_else(|| VerifyError::UnknownBuffer { name: tensor.name_text(), token })?;
        if record.data.checked_add(tensor.extent).is_none_or(|end| end > size) {
            return Err(VerifyError::OutsideBuffer {
                name: tensor.name_text(),
                offset: record.data,
                extent: tensor.extent,
                size,
            });
        }
        tensor.place = Some(Place { buffer: token, offset: record.data });
        Ok(tensor)
    }

    /// Checks a tensor that lies in no buffer.
    ///
    /// # Errors
    /// [`VerifyError`]
    pub fn from_raw(raw: &RawTensor, ops: &OpTable) -> Result<Self, VerifyError> {
        let name = || name_text(&raw.name);
        let extent = apir_ggml::extent(raw.type_, raw.ne, raw.nb)
            .map_err(|cause| VerifyError::Extent { name: name(), cause })?;
        match ops.kind(raw.op) {
            None => {
                return Err(VerifyError::UnknownOp { name: name(), op: raw.op, count: ops.count() });
            }
            Some(OpKind::Callback) => {
                let op = ops.name(raw.op).unwrap_or_default().to_owned();
                return Err(VerifyError::Callback { name: name(), op });
            }
            Some(OpKind::None | OpKind::View | OpKind::Compute) => {}
        }
        let mut tensor = Self {
            type_: raw.type_,
            ne: raw.ne,
            nb: raw.nb,
            extent,
            op: raw.op,
            op_params: raw.op_params,
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
        self.type_
    }

    /// Elements in each dimension.
    #[must_use]
    pub fn ne(&self) -> [i64; MAX_DIMS] {
        self.ne
    }

    /// Bytes from one element to the next in each dimension.
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

    /// Whether both have the same type, dimensions and strides.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        (self.type_, self.ne, self.nb) == (other.type_, other.ne, other.nb)
    }
}

fn name_text(name: &[u8; NAME_SIZE]) -> String {
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(NAME_SIZE);
    String::from_utf8_lossy(&name[..end]).into_owned()
}
