//! Building graphs for a backend, in memory that is used again for the next one.
//!
//! A [`GraphBuilder`] takes tensors that name each other by index, and [`GraphBuilder::finish`] makes a [`Graph`]: a `ggml_cgraph` with its leafs,
//! use counts and set of visited tensors, as ggml's own builder leaves them. Backends decide by the use counts which operations they may fuse.

use std::ffi::c_int;
use std::ops::Range;
use std::ptr;

use crate::abi::{self, MAX_DIMS, MAX_NAME, MAX_SRC, OP_PARAM_WORDS};
use crate::error::Error;
use crate::library::{Buffer, BufferHold};
use crate::tensor::TensorRef;
use crate::types::extent;

/// Most tensors, and most nodes, of a graph: twice as many still fit the largest hash set.
pub const MAX_TENSORS: usize = 1 << 28;

/// A tensor of a graph to be.
#[derive(Clone, Copy, Debug, Default)]
pub struct TensorSpec<'a> {
    /// Number of the element type.
    pub type_: u32,
    /// Elements in each dimension.
    pub ne: [i64; MAX_DIMS],
    /// Bytes between elements in each dimension.
    pub nb: [u64; MAX_DIMS],
    /// Number of the operation.
    pub op: u32,
    /// Parameters of the operation.
    pub op_params: [i32; OP_PARAM_WORDS],
    /// `FLAG_*` bits of [`crate::abi`].
    pub flags: i32,
    /// Its name; up to 63 bytes before any NUL are kept.
    pub name: &'a [u8],
    /// The buffer its data lies in; none while it is not placed.
    pub buffer: Option<&'a Buffer>,
    /// Address of its first byte; 0 without a buffer.
    pub data: usize,
    /// Its operands, by their index in the graph; they may be added later than it.
    pub src: [Option<usize>; MAX_SRC],
    /// The tensor it is a view of, by its index.
    pub view_src: Option<usize>,
    /// Bytes from the data of its view source to its own.
    pub view_offs: u64,
    /// How often it is an operand, when the graph is a part of a greater one; counted in this graph when absent.
    pub use_count: Option<u32>,
}

/// A graph being built. Memory it has once taken stays for later graphs.
#[derive(Debug, Default)]
pub struct GraphBuilder {
    tensors: Vec<abi::Tensor>,
    links: Vec<Links>,
    buffers: Vec<BufferHold>,
    tables: Tables,
}

/// What a tensor names by index until the tensors have their final addresses.
#[derive(Clone, Copy, Debug)]
struct Links {
    src: [u32; MAX_SRC],
    view_src: u32,
    /// -1: to be counted.
    use_count: i32,
}

/// No tensor.
const NONE: u32 = u32::MAX;

/// Arrays a `ggml_cgraph` points to.
#[derive(Debug, Default)]
struct Tables {
    nodes: Vec<*mut abi::Tensor>,
    leafs: Vec<*mut abi::Tensor>,
    use_counts: Vec<i32>,
    used: Vec<u32>,
    keys: Vec<*mut abi::Tensor>,
    /// For each tensor: whether it is a node.
    is_node: Vec<bool>,
    /// For each tensor: its slot in the hash set.
    slots: Vec<usize>,
}

// SAFETY: its pointers lead to memory of its own, and to buffers it holds, which may be used by one thread at a time.
unsafe impl Send for GraphBuilder {}

impl GraphBuilder {
    /// A builder without memory.
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of tensors added.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether no tensor was added.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// Takes all tensors out and lets go of their buffers; memory stays.
    pub fn clear(&mut self) {
        self.tensors.clear();
        self.links.clear();
        self.buffers.clear();
    }

    /// Adds a tensor and gives its index: 0 for the first.
    ///
    /// # Errors
    ///
    /// [`Error::Extent`] for an unknown type or a shape without extent, [`Error::OutsideBuffer`] or [`Error::NoBuffer`] for data that is not in the
    /// tensor's buffer, [`Error::GraphTooLarge`].
    pub fn add_tensor(&mut self, spec: &TensorSpec<'_>) -> Result<usize, Error> {
        let index = self.tensors.len();
        if index >= MAX_TENSORS {
            return Err(Error::GraphTooLarge { limit: MAX_TENSORS });
        }
        let extent = extent(spec.type_, spec.ne, spec.nb)?;
        match spec.buffer {
            Some(buffer) => {
                buffer.check_inside(spec.data, extent)?;
                self.hold(buffer);
            }
            None if spec.data != 0 => return Err(Error::NoBuffer { index, data: spec.data }),
            None => {}
        }
        // An index past the limit names no tensor, whatever its low bits say.
        let link = |index: Option<usize>| {
            index.map_or(NONE, |index| u32::try_from(index).unwrap_or(NONE - 1).min(NONE - 1))
        };
        self.links.push(Links {
            src: spec.src.map(link),
            view_src: link(spec.view_src),
            use_count: spec.use_count.map_or(-1, |count| i32::try_from(count).unwrap_or(i32::MAX)),
        });
        self.tensors.push(abi::Tensor {
            type_: spec.type_,
            buffer: spec.buffer.map_or(ptr::null_mut(), Buffer::as_ptr),
            ne: spec.ne,
            nb: spec.nb,
            op: spec.op,
            op_params: spec.op_params,
            flags: spec.flags,
            view_offs: spec.view_offs,
            data: ptr::with_exposed_provenance_mut(spec.data),
            name: c_name(spec.name),
            ..abi::Tensor::default()
        });
        Ok(index)
    }

    /// The graph that computes `nodes`, indices of tensors, in this order. `uid` is 0, or a number that only this very graph has: a backend may then
    /// take it for the one of that number it saw before.
    ///
    /// Leafs are the tensors that are no nodes, compute nothing and are no parameters. All tensors are in the set of visited ones, and a tensor's
    /// use count is how often it is an operand of any of them, unless its spec gives one.
    ///
    /// # Errors
    ///
    /// [`Error::NoTensor`] for an index of a tensor that was not added, [`Error::ViewElsewhere`] for a placed view that is not at its offset in the
    /// buffer of its view source, [`Error::GraphTooLarge`]. The builder's memory is then lost.
    pub fn finish(mut self, nodes: &[usize], uid: u64) -> Result<Graph, Error> {
        if nodes.len() > MAX_TENSORS {
            return Err(Error::GraphTooLarge { limit: MAX_TENSORS });
        }
        self.check(nodes)?;
        let tensors = self.tensors.as_mut_ptr();
        let count = self.tensors.len();
        // SAFETY: `check` found every index below the count; the tensors do not move from here on, since the graph adds none.
        let at = |index: usize| unsafe { tensors.add(index) };
        for (index, links) in self.links.iter().enumerate() {
            let resolve = |link: u32| if link == NONE { ptr::null_mut() } else { at(link as usize) };
            // SAFETY: `index` is below the count, and no reference to the tensors is alive.
            unsafe {
                (*at(index)).src = links.src.map(resolve);
                (*at(index)).view_src = resolve(links.view_src);
            }
        }
        self.tables.fill(&self.links, tensors, count, nodes);
        let cgraph = self.tables.cgraph(uid);
        Ok(Graph { builder: self, cgraph })
    }

    /// Refuses indices that name no tensor, and views that are not where they say.
    fn check(&self, nodes: &[usize]) -> Result<(), Error> {
        let count = self.tensors.len();
        let known = |user: &'static str, index: usize| match index < count {
            true => Ok(()),
            false => Err(Error::NoTensor { user, index, count }),
        };
        for &node in nodes {
            known("a node", node)?;
        }
        for (index, (tensor, links)) in self.tensors.iter().zip(&self.links).enumerate() {
            for &source in links.src.iter().filter(|&&source| source != NONE) {
                known("an operand", source as usize)?;
            }
            if links.view_src == NONE {
                continue;
            }
            let view_src = links.view_src as usize;
            known("a view", view_src)?;
            let source = &self.tensors[view_src];
            let start = (source.data.addr() as u64).checked_add(tensor.view_offs);
            if !tensor.buffer.is_null()
                && (tensor.buffer != source.buffer || start != Some(tensor.data.addr() as u64))
            {
                return Err(Error::ViewElsewhere { index, view_src, offset: tensor.view_offs });
            }
        }
        Ok(())
    }

    /// Keeps a buffer until the tensors are taken out. Graphs use few buffers, most tensors the same one as the tensor before.
    fn hold(&mut self, buffer: &Buffer) {
        if !self.buffers.iter().rev().any(|held| held.is(buffer)) {
            self.buffers.push(buffer.hold());
        }
    }
}

impl Tables {
    /// Fills all arrays for `count` tensors at `tensors`.
    fn fill(&mut self, links: &[Links], tensors: *mut abi::Tensor, count: usize, nodes: &[usize]) {
        self.is_node.clear();
        self.is_node.resize(count, false);
        self.nodes.clear();
        for &node in nodes {
            self.is_node[node] = true;
            self.nodes.push(tensors.wrapping_add(node));
        }
        let size = hash_size(2 * count.max(nodes.len()));
        self.used.clear();
        self.used.resize(size.div_ceil(32), 0);
        self.keys.clear();
        self.keys.resize(size, ptr::null_mut());
        self.use_counts.clear();
        self.use_counts.resize(size, 0);
        self.slots.clear();
        self.leafs.clear();
        for index in 0..count {
            let tensor = tensors.wrapping_add(index);
            let slot = self.insert(tensor);
            self.slots.push(slot);
            // SAFETY: the tensor is below the count, and no reference to it is alive.
            let (op, flags) = unsafe { ((*tensor).op, (*tensor).flags) };
            if !self.is_node[index] && op == abi::OP_NONE && flags & abi::FLAG_PARAM == 0 {
                self.leafs.push(tensor);
            }
        }
        for link in links {
            for &source in link.src.iter().filter(|&&source| source != NONE) {
                let count = &mut self.use_counts[self.slots[source as usize]];
                *count = count.saturating_add(1);
            }
        }
        for (&slot, link) in self.slots.iter().zip(links).filter(|(_, link)| link.use_count >= 0) {
            self.use_counts[slot] = link.use_count;
        }
    }

    /// Puts a tensor that is not in the hash set into it, and gives its slot.
    fn insert(&mut self, tensor: *mut abi::Tensor) -> usize {
        let size = self.keys.len();
        let mut slot = (tensor.addr() >> 4) % size;
        while self.used[slot / 32] & (1 << (slot % 32)) != 0 {
            slot = (slot + 1) % size;
        }
        self.used[slot / 32] |= 1 << (slot % 32);
        self.keys[slot] = tensor;
        slot
    }

    /// A graph over the arrays as they are.
    fn cgraph(&mut self, uid: u64) -> abi::CGraph {
        // `MAX_TENSORS` keeps all counts far below the limit of a C int.
        let int = |count: usize| c_int::try_from(count).unwrap_or(c_int::MAX);
        abi::CGraph {
            size: int(self.nodes.len().max(self.leafs.len())),
            n_nodes: int(self.nodes.len()),
            n_leafs: int(self.leafs.len()),
            nodes: self.nodes.as_mut_ptr(),
            grads: ptr::null_mut(),
            grad_accs: ptr::null_mut(),
            leafs: self.leafs.as_mut_ptr(),
            use_counts: self.use_counts.as_mut_ptr(),
            visited_hash_set: abi::HashSet {
                size: self.keys.len(),
                used: self.used.as_mut_ptr(),
                keys: self.keys.as_mut_ptr(),
            },
            order: 0,
            uid,
        }
    }
}

/// Slots of a hash set for at least `least` entries: ggml takes the first primes after the powers of two.
fn hash_size(least: usize) -> usize {
    const PRIMES: [usize; 30] = [
        2, 3, 5, 11, 17, 37, 67, 131, 257, 521, 1031, 2053, 4099, 8209, 16411, 32771, 65537, 131101, 262147,
        524309, 1048583, 2097169, 4194319, 8388617, 16777259, 33554467, 67108879, 134217757, 268435459,
        536870923,
    ];
    let at = PRIMES.partition_point(|&prime| prime < least);
    PRIMES.get(at).copied().unwrap_or(least | 1)
}

/// A name as ggml keeps it: cut at a NUL or after 63 bytes, and closed.
fn c_name(name: &[u8]) -> [u8; MAX_NAME] {
    let mut field = [0; MAX_NAME];
    let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len()).min(MAX_NAME - 1);
    field[..end].copy_from_slice(&name[..end]);
    field
}

/// A graph that can be computed, any number of times. It keeps the buffers its tensors lie in.
#[derive(Debug)]
pub struct Graph {
    builder: GraphBuilder,
    /// Points into the builder's vectors, whose contents stay where they are when the graph is moved.
    cgraph: abi::CGraph,
}

// SAFETY: as for the builder.
unsafe impl Send for Graph {}

impl Graph {
    /// Its memory, for the next graph; the tensors are taken out and their buffers let go.
    pub fn into_builder(mut self) -> GraphBuilder {
        self.builder.clear();
        self.builder
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.builder.len()
    }

    /// Whether it has no tensors.
    pub fn is_empty(&self) -> bool {
        self.builder.is_empty()
    }

    /// Number of nodes.
    pub fn node_count(&self) -> usize {
        self.builder.tables.nodes.len()
    }

    /// The tensor of an index.
    pub fn tensor(&self, index: usize) -> Option<TensorRef<'_>> {
        let tensor = self.builder.tensors.get(index)?;
        // SAFETY: the pointers of a graph's tensors lead to tensors of the same graph, which live as long as the graph.
        unsafe { TensorRef::from_ptr(tensor) }
    }

    /// Whether a tensor of it lies in this buffer.
    pub fn uses(&self, buffer: &Buffer) -> bool {
        self.builder.buffers.iter().any(|held| held.is(buffer))
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut abi::CGraph {
        &raw mut self.cgraph
    }

    /// The part of the graph that has only these nodes, none past the last. It shares tensors, use counts and hash set with the whole, and has
    /// no number of its own.
    pub(crate) fn part(&mut self, nodes: Range<usize>) -> abi::CGraph {
        let count = self.node_count();
        let (start, end) = (nodes.start.min(count), nodes.end.min(count));
        let whole = &self.cgraph;
        let int = |count: usize| c_int::try_from(count).unwrap_or(c_int::MAX);
        let part = int(end.saturating_sub(start));
        abi::CGraph {
            size: part,
            n_nodes: part,
            n_leafs: 0,
            nodes: whole.nodes.wrapping_add(start),
            grads: ptr::null_mut(),
            grad_accs: ptr::null_mut(),
            leafs: ptr::null_mut(),
            use_counts: whole.use_counts,
            visited_hash_set: abi::HashSet {
                size: whole.visited_hash_set.size,
                used: whole.visited_hash_set.used,
                keys: whole.visited_hash_set.keys,
            },
            order: whole.order,
            uid: 0,
        }
    }
}

#[cfg(test)]
mod tests;
