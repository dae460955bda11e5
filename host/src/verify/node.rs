//! A node as rules see it.
#![forbid(unsafe_code)]

use super::tensor::CheckedTensor;
use apir_ggml::Version;
use apir_protocol::tensor::{MAX_SOURCES, PARAM_WORDS};

/// What lies in a source slot.
#[derive(Debug, Clone, Copy, Default)]
pub enum Slot<'a> {
    /// Nothing.
    #[default]
    Absent,
    /// Something that the wire does not carry: commands 6 and 15 stop at the first absent source.
    Unknown,
    /// A tensor.
    Known(&'a CheckedTensor),
}

/// What rules depend on besides the node.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// The device runs ggml's CPU kernels: its capability query refuses next to nothing, and what a kernel does not have ends the process.
    pub cpu: bool,
    /// Which ggml it is.
    pub version: Version,
    /// Threads of the CPU kernels, which share a work buffer.
    pub threads: u64,
}

/// An operation, its result and what it is made of.
#[derive(Debug, Clone, Copy)]
pub struct Node<'a> {
    /// The result.
    pub d: &'a CheckedTensor,
    /// The sources.
    pub slots: [Slot<'a>; MAX_SOURCES],
    /// What the result is a view of.
    pub view: Option<&'a CheckedTensor>,
    /// The second source is the result itself, as in a cast.
    pub cast: bool,
    /// It is only asked about. Programs ask whether a device can use a weight with a node that they make up for that, and that nobody could compute.
    pub probe: bool,
    /// What it is checked for.
    pub target: Target,
}

impl<'a> Node<'a> {
    /// The required source in a slot.
    #[must_use]
    pub fn s(&self, slot: usize) -> &'a CheckedTensor {
        // No clause is looked at before the required sources are there.
        self.opt(slot).unwrap_or(self.d)
    }

    /// The source in a slot, if it is there and known.
    #[must_use]
    pub fn opt(&self, slot: usize) -> Option<&'a CheckedTensor> {
        match self.slots.get(slot) {
            Some(Slot::Known(tensor)) => Some(tensor),
            _ => None,
        }
    }

    /// Whether a slot certainly holds nothing.
    #[must_use]
    pub fn lacks(&self, slot: usize) -> bool {
        matches!(self.slots.get(slot), Some(Slot::Absent) | None)
    }

    /// Whether an optional source is absent, unknown, or fit.
    #[must_use]
    pub fn fits(&self, slot: usize, fit: impl FnOnce(&CheckedTensor) -> bool) -> bool {
        self.opt(slot).is_none_or(fit)
    }

    /// The known sources.
    pub fn sources(&self) -> impl Iterator<Item = &'a CheckedTensor> {
        self.slots.into_iter().filter_map(|slot| match slot {
            Slot::Known(tensor) => Some(tensor),
            Slot::Absent | Slot::Unknown => None,
        })
    }

    /// A parameter as a whole number.
    #[must_use]
    pub fn p(&self, word: usize) -> i64 {
        i64::from(self.d.op_params().get(word).copied().unwrap_or(0))
    }

    /// Which map of UNARY or unit of GLU it is, as the rules number them; -1 for one that they do not know.
    #[must_use]
    pub fn variant(&self) -> i64 {
        self.d.variant()
    }

    /// A parameter as a float.
    #[must_use]
    pub fn f(&self, word: usize) -> f32 {
        f32::from_bits(self.p(word) as u32)
    }

    /// All parameters as whole numbers.
    #[must_use]
    pub fn params(&self) -> [i64; PARAM_WORDS] {
        self.d.op_params().map(i64::from)
    }

    /// The number of the result's element type.
    #[must_use]
    pub fn t(&self) -> u32 {
        self.d.type_()
    }

    /// Whether the result and the known sources all have one of these types and the same one.
    #[must_use]
    pub fn all_are(&self, type_: u32) -> bool {
        self.t() == type_ && self.sources().all(|source| source.type_() == type_)
    }

    /// Holds for anything but ggml's CPU kernels.
    #[must_use]
    pub fn on_cpu(&self, holds: bool) -> bool {
        !self.target.cpu || holds
    }
}
