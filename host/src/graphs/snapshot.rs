//! Contents that address memory, looked at right before they are used.
#![forbid(unsafe_code)]

use crate::context::Objects;
use crate::error::CommandError;
use crate::verify::indices;
use crate::verify::tensor::CheckedTensor;
use crate::verify::types::I64;
use apir_ggml::library::Buffer;
use apir_ggml::{TensorSpec, abi};
use apir_protocol::handle::BufferHandle;

/// A stop before a node.
#[derive(Debug)]
pub(super) struct Stop {
    /// The node's place among the nodes.
    pub(super) before: usize,
    pub(super) snapshots: Vec<Snapshot>,
}

/// A source to look at, and where its copy lies.
#[derive(Debug)]
pub(super) struct Snapshot {
    source: CheckedTensor,
    below: Option<i64>,
    pub(super) rebind: bool,
    pub(super) users: Vec<(u32, usize)>,
    /// Bytes from the base of the buffer of copies.
    at: u64,
}

impl Snapshot {
    pub(super) fn new(planned: &indices::Snapshot, source: &CheckedTensor, at: u64) -> Self {
        let (below, rebind, users) = (planned.below, planned.rebind, planned.users.clone());
        Self { source: source.clone(), below, rebind, users, at }
    }

    /// Bytes of the copy, which is dense.
    pub(super) fn bytes(&self) -> u64 {
        self.source.elements() as u64 * u64::from(self.source.info().size)
    }

    /// The copy as a tensor: the source's type and dimensions, without gaps.
    pub(super) fn spec<'a>(&self, private: Option<&'a Buffer>) -> TensorSpec<'a> {
        TensorSpec {
            type_: self.source.type_(),
            ne: self.source.ne(),
            nb: self.strides(),
            name: b"snapshot",
            buffer: private,
            data: private.map_or(0, |buffer| buffer.base() + self.at as usize),
            use_count: Some(0),
            ..TensorSpec::default()
        }
    }

    fn strides(&self) -> [u64; 4] {
        // Types of indices and of what is sorted are plain, and the verifier has limited their sizes.
        self.source.info().dense_strides(self.source.ne()).unwrap_or_default()
    }

    /// Reads the source, checks it, and writes the copy.
    pub(super) fn take(
        &self,
        objects: &Objects,
        private: Option<&Buffer>,
        scratch: &mut Vec<u8>,
    ) -> Result<(), CommandError> {
        let Some(place) = self.source.place() else { return Ok(()) };
        let buffer = objects.buffer(BufferHandle(place.buffer))?.memory.ggml();
        let extent = self.source.extent() as usize;
        scratch.clear();
        scratch.try_reserve(extent).map_err(|_| CommandError::NoIndexMemory(extent as u64))?;
        scratch.resize(extent, 0);
        let tensor = |nb, data: usize| abi::Tensor {
            type_: self.source.type_(),
            ne: self.source.ne(),
            nb,
            data: std::ptr::with_exposed_provenance_mut(data),
            ..abi::Tensor::default()
        };
        buffer.get_tensor(&tensor(self.source.nb(), buffer.base() + place.offset as usize), scratch, 0)?;
        let dense;
        let values = if self.source.is_dense() {
            &scratch[..]
        } else {
            dense = self.gather(scratch)?;
            &dense[..]
        };
        if let Some(limit) = self.below
            && let Some(value) = misfit(values, self.source.type_() == I64, limit)
        {
            return Err(CommandError::Index { name: self.source.name_text(), value, limit });
        }
        match private {
            Some(private) if self.rebind => Ok(private.set_tensor(
                &tensor(self.strides(), private.base() + self.at as usize),
                values,
                0,
            )?),
            _ => Ok(()),
        }
    }

    /// The elements side by side, from bytes with the source's strides.
    fn gather(&self, spread: &[u8]) -> Result<Vec<u8>, CommandError> {
        let bytes = self.bytes() as usize;
        let mut dense = Vec::new();
        dense.try_reserve_exact(bytes).map_err(|_| CommandError::NoIndexMemory(bytes as u64))?;
        let size = self.source.info().size as usize;
        let ([ne0, ne1, ne2, ne3], nb) = (self.source.ne(), self.source.nb().map(|nb| nb as usize));
        for i3 in 0..ne3 as usize {
            for i2 in 0..ne2 as usize {
                for i1 in 0..ne1 as usize {
                    let row = i1 * nb[1] + i2 * nb[2] + i3 * nb[3];
                    for i0 in 0..ne0 as usize {
                        let at = row + i0 * nb[0];
                        // The extent, which `spread` has, ends behind the last element.
                        dense.extend_from_slice(spread.get(at..at + size).unwrap_or_default());
                    }
                }
            }
        }
        Ok(dense)
    }
}

/// The first value that is not from 0 to below `limit`, of 64-bit ones, or 32-bit ones.
fn misfit(values: &[u8], wide: bool, limit: i64) -> Option<i64> {
    let fit = |value: &i64| (0..limit).contains(value);
    if wide {
        let (values, _) = values.as_chunks::<8>();
        values.iter().map(|bytes| i64::from_le_bytes(*bytes)).find(|value| !fit(value))
    } else {
        let (values, _) = values.as_chunks::<4>();
        values.iter().map(|bytes| i64::from(i32::from_le_bytes(*bytes))).find(|value| !fit(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_are_from_0_to_below_the_limit() {
        let narrow = |values: &[i32], limit| {
            let bytes: Vec<_> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            misfit(&bytes, false, limit).is_none()
        };
        assert!(narrow(&[0, 3, 2], 4) && narrow(&[], 0));
        assert!(!narrow(&[0, 4], 4) && !narrow(&[-1], 4) && !narrow(&[i32::MIN, 0], 4) && !narrow(&[0], 0));
        let wide = |value: i64| misfit(&value.to_le_bytes(), true, 4).is_none();
        assert!(wide(0) && wide(3));
        assert!(!wide(4) && !wide(-1) && !wide(1 << 32) && !wide(i64::MIN));
    }
}
