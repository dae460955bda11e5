//! From a verified graph to one that the backend can compute.
#![forbid(unsafe_code)]

use super::snapshot::{Snapshot, Stop};
use super::{BuiltGraph, SupportCache};
use crate::budget::{Account, Taken};
use crate::context::Objects;
use crate::error::CommandError;
use crate::memory::HostBuffer;
use crate::verify::graph::{GraphTensor, VerifiedGraph};
use crate::verify::indices::Staged;
use crate::verify::rules::RuleBook;
use apir_ggml::abi::{FLAG_COMPUTE, OP_NONE};
use apir_ggml::library::{Buffer, Device};
use apir_ggml::{Graph, GraphBuilder, TensorSpec};
use apir_protocol::handle::BufferHandle;
use apir_protocol::tensor::MAX_SOURCES;
use std::collections::HashMap;

/// Where the copies of indices start: every backend's alignment.
const COPY_ALIGN: u64 = 256;

/// ggml's operation that copies a tensor, and nothing else.
const COPY: &str = "CONT";

/// How a tensor of the guest's comes to its contents.
enum Made<'a> {
    /// As the guest says.
    Here,
    /// Copied from this tensor, which was made in the node's place.
    From(usize),
    /// As the guest says, but so many bytes into this buffer.
    In(&'a Buffer, u64),
}

/// A copy of a source, for one node.
struct PlacedCopy {
    /// Its place among the copies.
    index: usize,
    node: u32,
    slot: usize,
    /// Bytes from the base of the private buffer.
    at: u64,
    bytes: u64,
}

impl PlacedCopy {
    fn end(&self) -> u64 {
        self.at + self.bytes
    }
}

/// The copies of a node one behind the other; those of all nodes start at the same byte.
fn place_staged(staged: &[Staged], start: u64) -> Vec<PlacedCopy> {
    let mut placed: Vec<PlacedCopy> = Vec::with_capacity(staged.len());
    for (index, Staged { node, slot, bytes }) in staged.iter().copied().enumerate() {
        let at = match placed.last() {
            Some(last) if last.node == node => last.end().next_multiple_of(COPY_ALIGN),
            _ => start,
        };
        placed.push(PlacedCopy { index, node, slot, at, bytes });
    }
    placed
}

/// Place of the source that a copy is of.
fn copied(verified: &VerifiedGraph<'_>, copy: &PlacedCopy) -> Option<usize> {
    verified.tensors()[copy.node as usize].sources()[copy.slot].map(|source| source as usize)
}

fn twin_alone(twin: usize) -> [Option<usize>; MAX_SOURCES] {
    std::array::from_fn(|slot| (slot == 0).then_some(twin))
}

/// What a graph is built with.
pub(crate) struct Build<'a> {
    pub(crate) rules: &'a RuleBook,
    pub(crate) objects: &'a Objects,
    pub(crate) device: &'a Device,
    pub(crate) support: &'a mut SupportCache,
    /// Where bytes of copies are taken from.
    pub(crate) account: &'a Account,
    /// Where their mappings are taken from.
    pub(crate) mappings: &'a Account,
}

impl Build<'_> {
    /// Builds a graph and asks the device whether it has its operations and room for their results.
    pub(crate) fn build(
        &mut self,
        verified: &VerifiedGraph<'_>,
        blob: &[u8],
        taken: Taken,
        mut builder: GraphBuilder,
    ) -> Result<BuiltGraph, CommandError> {
        builder.clear();
        let (stops, end) = self.place_snapshots(verified);
        let apart = &verified.plan().apart;
        let staged = place_staged(&verified.plan().staged, end);
        let extent = |place: &u32| verified.tensors()[*place as usize].tensor().extent();
        // Each result that is made apart is copied at once, and each copy of a source is used at once, so that they share the room behind the snapshots.
        let ends = apart.iter().map(|place| end + extent(place)).chain(staged.iter().map(|copy| copy.end()));
        let bytes = ends.max().unwrap_or(end);
        let copies_taken = self.account.take(bytes)?;
        let room = if bytes == 0 { None } else { Some(self.private_buffer(bytes)?) };
        let private = room.as_ref().map(HostBuffer::ggml);
        // Whoever reads a snapshot finds its copy behind all other tensors.
        let mut rebound = HashMap::new();
        let copies = stops.iter().flat_map(|stop| &stop.snapshots).filter(|snapshot| snapshot.rebind);
        let mut count = verified.tensors().len();
        for snapshot in copies.clone() {
            for user in &snapshot.users {
                rebound.insert(*user, count);
            }
            count += 1;
        }
        let twins: HashMap<_, _> = apart.iter().map(|place| *place as usize).zip(count..).collect();
        count += apart.len();
        for copy in &staged {
            rebound.insert((copy.node, copy.slot), count + copy.index);
        }
        for (index, entry) in verified.tensors().iter().enumerate() {
            let made = twins.get(&index).map_or(Made::Here, |twin| Made::From(*twin));
            self.add_tensor(&mut builder, index, entry, &rebound, &made)?;
        }
        for snapshot in copies {
            builder.add_tensor(&snapshot.spec(private))?;
        }
        if let Some(private) = private {
            for place in apart {
                let (index, entry) = (*place as usize, &verified.tensors()[*place as usize]);
                self.add_tensor(&mut builder, index, entry, &rebound, &Made::In(private, end))?;
            }
            for copy in &staged {
                self.add_staged(&mut builder, verified, copy, private)?;
            }
        }
        let mut nodes = Vec::with_capacity(verified.nodes().len() + apart.len() + staged.len());
        let (mut later, mut copies) = (stops.into_iter().peekable(), staged.iter().peekable());
        let mut stops = Vec::new();
        let empty = |before: usize| Stop { before, snapshots: Vec::new() };
        for (at, place) in verified.nodes().iter().enumerate() {
            let stop = later.next_if(|stop| stop.before == at);
            let is_staged = copies.peek().is_some_and(|copy| copy.node as usize == *place);
            if let Some(stop) = stop.or_else(|| is_staged.then(|| empty(at))) {
                stops.push(Stop { before: nodes.len(), ..stop });
            }
            while let Some(copy) = copies.next_if(|copy| copy.node as usize == *place) {
                nodes.push(count + copy.index);
            }
            if is_staged {
                // The node may bear fewer threads than a copy runs with.
                stops.push(empty(nodes.len()));
            }
            nodes.extend(twins.get(place));
            nodes.push(*place);
        }
        let graph = builder.finish(&nodes, 0)?;
        self.check_support(verified, &twins, &graph)?;
        self.check_copies(verified, &staged, count, &graph)?;
        self.check_room(verified, &graph)?;
        let work = verified.work(self.rules);
        let _taken = [taken, copies_taken];
        Ok(BuiltGraph { blob: blob.to_vec(), graph, stops, private: room, work, _taken })
    }

    fn add_tensor(
        &self,
        builder: &mut GraphBuilder,
        index: usize,
        entry: &GraphTensor,
        rebound: &HashMap<(u32, usize), usize>,
        made: &Made<'_>,
    ) -> Result<(), CommandError> {
        let tensor = entry.tensor();
        let (buffer, data) = match (made, tensor.place()) {
            (Made::In(private, at), _) => (Some(*private), private.base() + *at as usize),
            (_, Some(place)) => {
                let buffer = self.objects.buffer(BufferHandle(place.buffer))?.memory.ggml();
                (Some(buffer), buffer.base() + place.offset as usize)
            }
            (_, None) => (None, 0),
        };
        // What another graph computed is data in this one, and its history is nobody's business.
        let is_node = entry.node().is_some();
        let source = |slot: usize| {
            let copy = rebound.get(&(index as u32, slot)).copied();
            copy.or(entry.sources()[slot].map(|source| source as usize)).filter(|_| is_node)
        };
        let (op, op_params, src) = match made {
            Made::From(twin) => (self.copying()?, Default::default(), twin_alone(*twin)),
            _ if is_node => (tensor.op(), tensor.op_params(), std::array::from_fn(source)),
            _ => (OP_NONE, Default::default(), Default::default()),
        };
        builder.add_tensor(&TensorSpec {
            type_: tensor.type_(),
            ne: tensor.ne(),
            nb: tensor.nb(),
            op,
            op_params,
            flags: tensor.flags(),
            name: &tensor.name(),
            buffer,
            data,
            src,
            view_src: entry.view_src().map(|viewed| viewed as usize),
            view_offs: tensor.view_offs(),
            // A node's users in other graphs of the guest are not on this wire: a backend must not fuse it away.
            use_count: Some(0),
        })?;
        Ok(())
    }

    /// Adds the node that copies a source.
    fn add_staged(
        &self,
        builder: &mut GraphBuilder,
        verified: &VerifiedGraph<'_>,
        copy: &PlacedCopy,
        private: &Buffer,
    ) -> Result<(), CommandError> {
        let Some(source) = copied(verified, copy) else { return Err(CommandError::NoHandle) };
        let tensor = verified.tensors()[source].tensor();
        builder.add_tensor(&TensorSpec {
            type_: tensor.type_(),
            ne: tensor.ne(),
            nb: tensor.info().dense_strides(tensor.ne()).unwrap_or_default(),
            op: self.copying()?,
            flags: FLAG_COMPUTE,
            name: b"copy",
            buffer: Some(private),
            data: private.base() + copy.at as usize,
            src: twin_alone(source),
            use_count: Some(0),
            ..TensorSpec::default()
        })?;
        Ok(())
    }

    /// The device's word on the copies of sources.
    fn check_copies(
        &mut self,
        verified: &VerifiedGraph<'_>,
        staged: &[PlacedCopy],
        first: usize,
        graph: &Graph,
    ) -> Result<(), CommandError> {
        for copy in staged {
            let Some(node) = graph.tensor(first + copy.index) else { continue };
            if !self.support.ask(self.device, node) {
                let name = verified.tensors()[copy.node as usize].tensor().name_text();
                return Err(CommandError::Unsupported { name, op: COPY.to_owned() });
            }
        }
        Ok(())
    }

    /// The operation that copies a result that was made elsewhere.
    fn copying(&self) -> Result<u32, CommandError> {
        let unsupported = || CommandError::Unsupported { name: COPY.to_owned(), op: COPY.to_owned() };
        self.rules.op_number(COPY).ok_or_else(unsupported)
    }

    /// The plan's snapshots with their place among the copies, and the bytes of all copies.
    fn place_snapshots(&self, verified: &VerifiedGraph<'_>) -> (Vec<Stop>, u64) {
        let mut end = 0u64;
        let mut place = |snapshot: &crate::verify::indices::Snapshot| {
            let source = verified.tensors()[snapshot.source as usize].tensor();
            let placed = Snapshot::new(snapshot, source, end);
            if placed.rebind {
                // The verifier has limited the sum of these sizes.
                end = (end + placed.bytes()).next_multiple_of(COPY_ALIGN);
            }
            placed
        };
        let stops = verified.plan().stops.iter();
        let stops = stops
            .map(|stop| Stop {
                before: stop.before,
                snapshots: stop.snapshots.iter().map(&mut place).collect(),
            })
            .collect();
        (stops, end)
    }

    fn private_buffer(&self, bytes: u64) -> Result<HostBuffer, CommandError> {
        let none = || CommandError::NoIndexMemory(bytes);
        let size = usize::try_from(bytes).map_err(|_| none())?;
        let buffer_type = self.device.buffer_type()?;
        HostBuffer::zeroed(self.device, &buffer_type, size, self.mappings)?.ok_or_else(none)
    }

    /// The device's own word on every operation; its query is no check and must come after ours.
    fn check_support(
        &mut self,
        verified: &VerifiedGraph<'_>,
        twins: &HashMap<usize, usize>,
        graph: &Graph,
    ) -> Result<(), CommandError> {
        for index in verified.nodes() {
            let entry = &verified.tensors()[*index];
            if !entry.is_computed(self.rules) {
                continue;
            }
            for node in twins.get(index).into_iter().chain([index]) {
                let Some(node) = graph.tensor(*node) else { continue };
                if !self.support.ask(self.device, node) {
                    let (name, op) =
                        (entry.tensor().name_text(), self.rules.op_name(entry.tensor().op()).to_owned());
                    return Err(CommandError::Unsupported { name, op });
                }
            }
        }
        Ok(())
    }

    /// What the device needs for a tensor, which may be more than it spans, lies inside its buffer.
    fn check_room(&self, verified: &VerifiedGraph<'_>, graph: &Graph) -> Result<(), CommandError> {
        for (index, entry) in verified.tensors().iter().enumerate() {
            let tensor = entry.tensor();
            let Some(place) = tensor.place() else { continue };
            // Kernels read blocks past a row's end, also of a view; everything else is measured where it was allocated.
            if entry.view_src().is_some() && !tensor.info().is_block() {
                continue;
            }
            let buffer = self.objects.buffer(BufferHandle(place.buffer))?;
            let Some(built) = graph.tensor(index) else { continue };
            let need = buffer.buffer_type.alloc_size(built)?;
            if need > place.room {
                return Err(CommandError::NoRoom { name: tensor.name_text(), need, room: place.room });
            }
        }
        Ok(())
    }
}
