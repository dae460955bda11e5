//! A whole graph: ids, order, views, and a buffer under everything that is computed.
#![forbid(unsafe_code)]

use super::tensor::CheckedTensor;
use super::{BufferSizes, VerifyError};
use apir_ggml::{OpKind, OpTable};
use apir_protocol::graph::GraphReader;
use apir_protocol::tensor::{MAX_SOURCES, TensorRecord};
use std::collections::HashMap;

/// A tensor of a [`VerifiedGraph`] and what it is made of, by place among the graph's tensors.
#[derive(Debug)]
pub struct GraphTensor {
    tensor: CheckedTensor,
    sources: [Option<u32>; MAX_SOURCES],
    view_src: Option<u32>,
    node: Option<u32>,
}

impl GraphTensor {
    /// The tensor.
    #[must_use]
    pub fn tensor(&self) -> &CheckedTensor {
        &self.tensor
    }

    /// Places of the sources.
    #[must_use]
    pub fn sources(&self) -> [Option<u32>; MAX_SOURCES] {
        self.sources
    }

    /// Place of the viewed tensor.
    #[must_use]
    pub fn view_src(&self) -> Option<u32> {
        self.view_src
    }
}

/// A graph that may be computed. Only [`Verifier::verify`] makes one.
#[derive(Debug)]
pub struct VerifiedGraph<'a> {
    tensors: &'a [GraphTensor],
    nodes: &'a [usize],
}

impl VerifiedGraph<'_> {
    /// The tensors, each behind what it is made of.
    #[must_use]
    pub fn tensors(&self) -> &[GraphTensor] {
        self.tensors
    }

    /// Places of the nodes among the tensors, in the order of execution.
    #[must_use]
    pub fn nodes(&self) -> &[usize] {
        self.nodes
    }
}

/// Checks graphs one after the other in memory that it uses again.
#[derive(Debug, Default)]
pub struct Verifier {
    tensors: Vec<GraphTensor>,
    nodes: Vec<usize>,
    places: HashMap<u64, u32>,
}

impl Verifier {
    /// Checks a graph blob that lies in private memory.
    ///
    /// # Errors
    /// [`VerifyError`] of the first fault found.
    pub fn verify(
        &mut self,
        blob: &[u8],
        ops: &OpTable,
        buffers: &impl BufferSizes,
    ) -> Result<VerifiedGraph<'_>, VerifyError> {
        let graph = GraphReader::parse(blob)?;
        if graph.node_count() == 0 {
            return Err(VerifyError::NoNodes);
        }
        self.tensors.clear();
        self.nodes.clear();
        self.places.clear();
        for (index, record) in graph.tensors().enumerate() {
            self.add_tensor(index, &record, ops, buffers)?;
        }
        for (node, id) in graph.node_ids().enumerate() {
            self.add_node(node, id, ops)?;
        }
        self.check_order()?;
        Ok(VerifiedGraph { tensors: &self.tensors, nodes: &self.nodes })
    }

    fn add_tensor(
        &mut self,
        index: usize,
        record: &TensorRecord,
        ops: &OpTable,
        buffers: &impl BufferSizes,
    ) -> Result<(), VerifyError> {
        if record.id == 0 {
            return Err(VerifyError::NullId { index });
        }
        // A blob of 304 bytes a tensor cannot hold 2^32 of them: the reader's count is 32 bits.
        let place = index as u32;
        if self.places.insert(record.id, place).is_some() {
            return Err(VerifyError::DuplicateId { index, id: record.id });
        }
        let tensor = CheckedTensor::from_record(record, ops, buffers)?;
        let mut sources = [None; MAX_SOURCES];
        for (slot, (source, id)) in sources.iter_mut().zip(record.src).enumerate() {
            *source = self.find(id, "a source")?;
            // A cast is its own second source; nothing else may be made of itself.
            let own = *source == Some(place) && !(slot == 1 && ops.is_copy(record.op));
            if own || source.is_some_and(|source| source > place) {
                return Err(VerifyError::Order { index, source_index: source.map_or(index, |s| s as usize) });
            }
        }
        let view_src = self.find(record.view_src, "a view's source")?;
        if let Some(viewed) = view_src {
            if viewed >= place {
                return Err(VerifyError::Order { index, source_index: viewed as usize });
            }
            check_view(&tensor, &self.tensors[viewed as usize].tensor)?;
        }
        self.tensors.push(GraphTensor { tensor, sources, view_src, node: None });
        Ok(())
    }

    /// Place of the tensor with this id; none for id 0.
    fn find(&self, id: u64, what: &'static str) -> Result<Option<u32>, VerifyError> {
        if id == 0 {
            return Ok(None);
        }
        self.places.get(&id).copied().map(Some).ok_or(VerifyError::UnknownId { what, id })
    }

    fn add_node(&mut self, node: usize, id: u64, ops: &OpTable) -> Result<(), VerifyError> {
        let place = self.find(id, "a node")?.ok_or(VerifyError::UnknownId { what: "a node", id })?;
        let entry = &mut self.tensors[place as usize];
        if entry.node.replace(node as u32).is_some() {
            return Err(VerifyError::NodeOrder { node });
        }
        let entry = &self.tensors[place as usize];
        let computed = ops.kind(entry.tensor.op()) == Some(OpKind::Compute) && entry.tensor.extent() > 0;
        if computed {
            check_placed(&entry.tensor)?;
            for source in entry.sources.iter().flatten() {
                check_placed(&self.tensors[*source as usize].tensor)?;
            }
        }
        self.nodes.push(place as usize);
        Ok(())
    }

    /// What a node is made of is computed before it, or not in this graph.
    fn check_order(&self) -> Result<(), VerifyError> {
        for (node, place) in self.nodes.iter().enumerate() {
            for source in self.tensors[*place].sources.iter().flatten() {
                let late = self.tensors[*source as usize].node.is_some_and(|other| other as usize >= node);
                if late && *source as usize != *place {
                    return Err(VerifyError::NodeOrder { node });
                }
            }
        }
        Ok(())
    }
}

/// A view lies in its source's buffer, `view_offs` bytes into it.
fn check_view(view: &CheckedTensor, source: &CheckedTensor) -> Result<(), VerifyError> {
    let expected =
        source.place().and_then(|place| Some((place.buffer, place.offset.checked_add(view.view_offs())?)));
    let found = view.place().map(|place| (place.buffer, place.offset));
    if found.is_some() && found != expected {
        return Err(VerifyError::ViewElsewhere { name: view.name_text(), view_offs: view.view_offs() });
    }
    Ok(())
}

/// What a computation touches must lie in a buffer.
fn check_placed(tensor: &CheckedTensor) -> Result<(), VerifyError> {
    if tensor.place().is_none() && tensor.extent() > 0 {
        return Err(VerifyError::NoBuffer { name: tensor.name_text() });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use apir_protocol::graph::{encode_graph, graph_size};
    use apir_protocol::handle::BufferHandle;
    use proptest::prelude::*;

    struct OneBuffer;

    impl BufferSizes for OneBuffer {
        fn buffer_size(&self, token: u64) -> Option<u64> {
            (token == 7).then_some(1024)
        }
    }

    fn ops() -> OpTable {
        OpTable::from_names(["NONE", "ADD", "CPY", "VIEW", "CUSTOM"])
    }

    fn encode(nodes: &[u64], tensors: &[TensorRecord]) -> Vec<u8> {
        let mut bytes = vec![0; graph_size(nodes.len() as u32, tensors.len() as u32) as usize];
        encode_graph(nodes, tensors, &mut bytes).unwrap();
        bytes
    }

    /// a + a view of a.
    fn sample() -> Vec<u8> {
        let a = TensorRecord {
            id: 10,
            buffer: BufferHandle(7),
            ne: [4, 1, 1, 1],
            nb: [4, 16, 16, 16],
            ..TensorRecord::default()
        };
        let mut view = TensorRecord { id: 11, op: 3, view_src: 10, view_offs: 16, data: 16, ..a };
        let mut sum = TensorRecord { id: 12, op: 1, data: 64, ..a };
        view.src[0] = 10;
        (sum.src[0], sum.src[1]) = (10, 11);
        encode(&[11, 12], &[a, view, sum])
    }

    #[test]
    fn a_graph_keeps_its_shape() {
        let mut verifier = Verifier::default();
        let graph = verifier.verify(&sample(), &ops(), &OneBuffer).unwrap();
        assert_eq!(graph.nodes(), [1, 2]);
        assert_eq!(graph.tensors()[2].sources()[..3], [Some(0), Some(1), None]);
        assert_eq!(graph.tensors()[1].view_src(), Some(0));
        assert_eq!(graph.tensors()[2].tensor().place().map(|place| place.offset), Some(64));
    }

    proptest! {
        /// Whatever bytes change, a graph that passes has every tensor in its buffer and sources before users.
        #[test]
        fn mutants_are_refused_or_sound(edits in prop::collection::vec((0usize..960, any::<u8>()), 1..6)) {
            let mut bytes = sample();
            for (at, value) in edits {
                let at = at % bytes.len();
                bytes[at] = value;
            }
            let mut verifier = Verifier::default();
            if let Ok(graph) = verifier.verify(&bytes, &ops(), &OneBuffer) {
                for (index, entry) in graph.tensors().iter().enumerate() {
                    if let Some(place) = entry.tensor().place() {
                        prop_assert!(place.buffer == 7 && place.offset + entry.tensor().extent() <= 1024);
                    }
                    let copy = entry.tensor().op() == 2;
                    let mut earlier = entry.sources().into_iter().flatten().chain(entry.view_src());
                    prop_assert!(earlier.all(|at| (at as usize) < index || copy && at as usize == index));
                }
                prop_assert!(graph.nodes().iter().all(|node| *node < graph.tensors().len()));
            }
        }
    }
}
