//! Graphs as they travel: the nodes' ids, and a record for each tensor that they reach.
#![forbid(unsafe_code)]

use crate::numbers::Numbers;
use crate::record::{Place, RecordError, data_record, node_record};
use apir_ggml::{GraphRef, TensorRef};
use apir_protocol::graph::{encode_graph, graph_size};
use apir_protocol::tensor::{MAX_SOURCES, TensorRecord};
use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hasher};

/// Writes graphs; keeps its memory from one graph to the next.
///
/// What is no node of a graph is data there, whatever made it: a scheduler splits a program's graph between devices, and what other parts are made of
/// may lie in other devices' memory.
#[derive(Debug, Default)]
pub(crate) struct GraphWriter {
    nodes: Addresses,
    seen: Addresses,
    ids: Vec<u64>,
    records: Vec<TensorRecord>,
    bytes: Vec<u8>,
    /// Identity of the graph that `bytes` holds, 0 for none.
    uid: u64,
}

impl GraphWriter {
    /// The blob of a graph: sources and viewed tensors come before their users. `locate` says where a tensor's data lies, `is_view` whether a node is
    /// only another look at data. None when there is nothing to compute.
    ///
    /// A graph with the identity of the last one is not looked at again: ggml promises that nothing in it has changed.
    pub(crate) fn write(
        &mut self,
        graph: GraphRef<'_>,
        numbers: &Numbers,
        is_view: impl Fn(TensorRef<'_>) -> bool,
        mut locate: impl FnMut(TensorRef<'_>) -> Result<Place, RecordError>,
    ) -> Result<Option<&[u8]>, RecordError> {
        if graph.uid() != 0 && graph.uid() == self.uid {
            return Ok(self.written());
        }
        self.uid = 0;
        self.nodes.clear();
        self.nodes.extend(graph.nodes().map(TensorRef::address));
        self.seen.clear();
        self.ids.clear();
        self.records.clear();
        let mut path = Vec::new();
        for node in graph.nodes() {
            // A scheduler leaves views of other devices' memory in the part behind them; what uses them there is given a copy of the data.
            if is_view(node) && matches!(locate(node), Err(RecordError::Foreign { .. })) {
                continue;
            }
            self.ids.push(node.address() as u64);
            self.reach(node, numbers, &mut path, &mut locate)?;
        }
        let size = self.size()?;
        // Every byte is overwritten.
        self.bytes.resize(size, 0);
        encode_graph(&self.ids, &self.records, &mut self.bytes)
            .map_err(|_| RecordError::Graph { nodes: self.ids.len(), tensors: self.records.len() })?;
        self.uid = graph.uid();
        Ok(self.written())
    }

    fn written(&self) -> Option<&[u8]> {
        (!self.ids.is_empty()).then_some(&self.bytes[..])
    }

    fn size(&self) -> Result<usize, RecordError> {
        let (nodes, tensors) = (self.ids.len(), self.records.len());
        match (u32::try_from(nodes), u32::try_from(tensors)) {
            (Ok(nodes), Ok(tensors)) => usize::try_from(graph_size(nodes, tensors)).ok(),
            _ => None,
        }
        .ok_or(RecordError::Graph { nodes, tensors })
    }

    /// Adds the records of what `node` reaches, then its own. Iterates: a chain of sources may be of any length.
    /// `path` is empty before and after.
    fn reach<'a>(
        &mut self,
        node: TensorRef<'a>,
        numbers: &Numbers,
        path: &mut Vec<(TensorRef<'a>, usize)>,
        locate: &mut impl FnMut(TensorRef<'_>) -> Result<Place, RecordError>,
    ) -> Result<(), RecordError> {
        if self.seen.insert(node.address()) {
            path.push((node, 0));
        }
        while let Some((tensor, next)) = path.last_mut() {
            if let Some(below) = self.next_below(*tensor, next) {
                path.push((below, 0));
            } else {
                let make = if self.is_node(*tensor) { node_record } else { data_record };
                self.records.push(make(*tensor, locate(*tensor)?, numbers)?);
                path.pop();
            }
        }
        Ok(())
    }

    /// The next tensor below `tensor` that is met for the first time, from its source `next` on; after the sources comes the viewed tensor.
    fn next_below<'a>(&mut self, tensor: TensorRef<'a>, next: &mut usize) -> Option<TensorRef<'a>> {
        let sources = if self.is_node(tensor) { tensor.sources() } else { [None; MAX_SOURCES] };
        while *next <= MAX_SOURCES {
            let below = sources.get(*next).copied().unwrap_or_else(|| tensor.view_src());
            *next += 1;
            if let Some(below) = below.filter(|below| self.seen.insert(below.address())) {
                return Some(below);
            }
        }
        None
    }

    fn is_node(&self, tensor: TensorRef<'_>) -> bool {
        self.nodes.contains(&tensor.address())
    }
}

type Addresses = HashSet<usize, BuildHasherDefault<AddressHasher>>;

/// Addresses are multiples of 16 and otherwise well spread: one multiplication mixes them enough.
#[derive(Debug, Default)]
struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_usize(usize::from(*byte));
        }
    }

    fn write_usize(&mut self, address: usize) {
        self.0 = (self.0 ^ (address as u64 >> 4)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
}
