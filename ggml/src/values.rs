//! Numbers that ggml gives a meaning.
#![forbid(unsafe_code)]

use std::ffi::c_int;

/// Kind of a device (`ggml_backend_dev_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceType {
    /// The processor, using system memory.
    Cpu,
    /// A GPU with memory of its own.
    Gpu,
    /// A GPU that uses system memory.
    Igpu,
    /// A helper of the processor, such as a BLAS library.
    Accel,
    /// Several devices as one.
    Meta,
    /// A kind newer than this crate.
    Unknown(c_int),
}

impl DeviceType {
    /// The kind of a number.
    pub fn from_number(number: c_int) -> Self {
        match number {
            0 => Self::Cpu,
            1 => Self::Gpu,
            2 => Self::Igpu,
            3 => Self::Accel,
            4 => Self::Meta,
            other => Self::Unknown(other),
        }
    }

    /// ggml's number.
    pub fn number(self) -> c_int {
        match self {
            Self::Cpu => 0,
            Self::Gpu => 1,
            Self::Igpu => 2,
            Self::Accel => 3,
            Self::Meta => 4,
            Self::Unknown(other) => other,
        }
    }
}

/// Outcome of a computation (`ggml_status`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Out of memory.
    AllocFailed,
    /// Failed.
    Failed,
    /// Done, or under way on an asynchronous backend.
    Success,
    /// Stopped by the caller.
    Aborted,
}

impl Status {
    /// The outcome of a number; one that ggml does not have counts as failed.
    pub fn from_number(number: c_int) -> Self {
        match number {
            -2 => Self::AllocFailed,
            0 => Self::Success,
            1 => Self::Aborted,
            _ => Self::Failed,
        }
    }

    /// ggml's number.
    pub fn number(self) -> c_int {
        match self {
            Self::AllocFailed => -2,
            Self::Failed => -1,
            Self::Success => 0,
            Self::Aborted => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_values_agree() {
        for number in -3..8 {
            assert_eq!(DeviceType::from_number(number).number(), number);
        }
        for number in -2..=1 {
            assert_eq!(Status::from_number(number).number(), number);
        }
        assert_eq!(Status::from_number(7), Status::Failed);
    }
}
