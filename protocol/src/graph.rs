//! The graph blob: node ids, then the records of every tensor that they reach.

use crate::Wire;
use crate::codec::{Decoder, EncodeError, Encoder};
use crate::tensor::{RECORD_SIZE, TensorRecord};
use thiserror::Error;

/// Why bytes are no graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum GraphError {
    /// The blob ends before what it announces does.
    #[error("a graph of {nodes} nodes and {tensors} tensors takes {need} bytes, the blob has {len}")]
    Truncated {
        /// Nodes announced.
        nodes: u32,
        /// Tensors announced, 0 where not even their number is there.
        tensors: u32,
        /// Bytes that they take.
        need: u64,
        /// Bytes given.
        len: usize,
    },
}

/// Bytes of a graph of `nodes` nodes and `tensors` tensors.
#[must_use]
pub const fn graph_size(nodes: u32, tensors: u32) -> u64 {
    8 + 8 * nodes as u64 + RECORD_SIZE as u64 * tensors as u64
}

/// A graph in private memory, its lengths checked and nothing else.
#[derive(Debug, Clone, Copy)]
pub struct GraphReader<'a> {
    nodes: &'a [u8],
    tensors: &'a [u8],
}

impl<'a> GraphReader<'a> {
    /// Finds the two arrays of a graph; bytes behind them are not looked at.
    ///
    /// # Errors
    /// [`GraphError::Truncated`]
    pub fn parse(bytes: &'a [u8]) -> Result<Self, GraphError> {
        let word = |at: u64| -> Option<u32> {
            let at = usize::try_from(at).ok()?;
            Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
        };
        let len = bytes.len();
        let nodes = word(0).ok_or(GraphError::Truncated { nodes: 0, tensors: 0, need: 8, len })?;
        let nodes_end = 4 + 8 * u64::from(nodes);
        let tensors = word(nodes_end).ok_or(GraphError::Truncated {
            nodes,
            tensors: 0,
            need: graph_size(nodes, 0),
            len,
        })?;
        let need = graph_size(nodes, tensors);
        if need > len as u64 {
            return Err(GraphError::Truncated { nodes, tensors, need, len });
        }
        // Both ends lie inside the slice, so the casts keep their values.
        let (nodes_end, need) = (nodes_end as usize, need as usize);
        Ok(Self { nodes: &bytes[4..nodes_end], tensors: &bytes[nodes_end + 4..need] })
    }

    /// How many nodes there are.
    #[must_use]
    pub fn node_count(&self) -> usize {
        self.nodes.len() / 8
    }

    /// How many tensors there are.
    #[must_use]
    pub fn tensor_count(&self) -> usize {
        self.tensors.len() / RECORD_SIZE
    }

    /// Ids of the nodes in the order of execution.
    pub fn node_ids(&self) -> impl ExactSizeIterator<Item = u64> + use<'a> {
        self.nodes.chunks_exact(8).map(|bytes| {
            let mut id = [0; 8];
            id.copy_from_slice(bytes);
            u64::from_le_bytes(id)
        })
    }

    /// The records, sources before their users when the guest is honest.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = TensorRecord> + use<'a> {
        self.tensors.chunks_exact(RECORD_SIZE).map(|bytes| {
            // A chunk has exactly the bytes of a record.
            TensorRecord::decode(&mut Decoder::new(bytes)).unwrap_or_default()
        })
    }
}

/// Writes a graph, giving the bytes written.
///
/// # Errors
/// [`EncodeError::Full`] when `out` is too small.
pub fn encode_graph(
    node_ids: &[u64],
    tensors: &[TensorRecord],
    out: &mut [u8],
) -> Result<usize, EncodeError> {
    let full = |need| EncodeError::Full { need, left: out.len() };
    let (nodes, records) = (u32::try_from(node_ids.len()), u32::try_from(tensors.len()));
    let (Ok(nodes), Ok(records)) = (nodes, records) else {
        return Err(full(usize::MAX));
    };
    let mut encoder = Encoder::new(out);
    encoder.u32(nodes)?;
    for id in node_ids {
        encoder.u64(*id)?;
    }
    encoder.u32(records)?;
    for tensor in tensors {
        tensor.encode(&mut encoder)?;
    }
    Ok(encoder.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    fn graph(ids: &[u64], tensors: usize) -> Vec<u8> {
        let records: Vec<_> =
            (0..tensors).map(|i| TensorRecord { id: i as u64 + 1, ..TensorRecord::default() }).collect();
        let mut bytes = vec![0xff; graph_size(ids.len() as u32, tensors as u32) as usize];
        assert_eq!(encode_graph(ids, &records, &mut bytes), Ok(bytes.len()));
        bytes
    }

    #[test]
    fn graph_of_three_nodes_and_four_tensors_takes_1248_bytes() {
        let bytes = graph(&[2, 3, 4], 4);
        assert_eq!(bytes.len(), 1248);
        assert_eq!(bytes[..12], [3, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[28..32], [4, 0, 0, 0]);
        let reader = GraphReader::parse(&bytes).unwrap();
        assert_eq!(reader.node_ids().collect::<Vec<_>>(), [2, 3, 4]);
        assert_eq!(reader.tensors().map(|t| t.id).collect::<Vec<_>>(), [1, 2, 3, 4]);
    }

    #[test]
    fn every_truncation_is_refused() {
        let bytes = graph(&[2, 3], 3);
        for len in 0..bytes.len() {
            assert!(GraphReader::parse(&bytes[..len]).is_err(), "{len} bytes");
        }
        assert!(encode_graph(&[1], &[TensorRecord::default()], &mut [0; 319]).is_err());
    }

    #[test]
    fn counts_that_overflow_32_bits_are_refused() {
        for (nodes, tensors) in [(u32::MAX, 0), (0x2000_0000, 0), (0, u32::MAX), (0, 0x00d7_9436)] {
            let mut bytes = vec![0; 4096];
            bytes[..4].copy_from_slice(&nodes.to_le_bytes());
            bytes[4..8].copy_from_slice(&tensors.to_le_bytes());
            let error = GraphReader::parse(&bytes).unwrap_err();
            let GraphError::Truncated { need, .. } = error;
            assert!(need > u64::from(u32::MAX), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_parse_or_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..2048), nodes in 0u32..8, tensors in 0u32..4) {
            let mut bytes = bytes;
            if bytes.len() >= 4 {
                bytes[..4].copy_from_slice(&nodes.to_le_bytes());
            }
            let at = 4 + 8 * nodes as usize;
            if bytes.len() >= at + 4 {
                bytes[at..at + 4].copy_from_slice(&tensors.to_le_bytes());
            }
            let fits = bytes.len() as u64 >= graph_size(nodes, tensors) && bytes.len() >= at + 4;
            match GraphReader::parse(&bytes) {
                Ok(reader) => {
                    prop_assert!(fits);
                    prop_assert_eq!(reader.node_ids().count(), nodes as usize);
                    prop_assert_eq!(reader.tensors().count(), tensors as usize);
                }
                Err(_) => prop_assert!(!fits),
            }
        }
    }
}
