//! Contents that address memory: where they are looked at, and how they are kept from changing afterwards.
//!
//! Kernels take elements of some sources for row numbers, and on most backends nothing keeps a wrong one from reading or writing elsewhere. A copy of
//! such a source in memory that neither the guest nor another node writes is checked and given to the kernel instead. The copy is made
//! when the contents are final: before the graph starts if no node writes them, else between the last node that does and the one that reads them,
//! where the execution is split.
#![forbid(unsafe_code)]

use super::graph::{GraphTensor, Terms, node_of};
use super::rules::{Read, RuleBook};
use super::tensor::{CheckedTensor, MAX_ROWS};
use super::types::I32;
use super::{BufferInfo, Buffers, VerifyError};
use std::collections::HashMap;

/// Which indices are looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexCheck {
    /// All.
    All,
    /// Those that the graph does not compute.
    Leaf,
    /// None: only the process that computes is in danger.
    Off,
}

impl IndexCheck {
    /// What is looked at when nothing says so: all on a device in `host` memory. Elsewhere a look costs a transfer, and what a node computes would need
    /// a stop for each, so that this is left out where a context is `alone` in its process and a kernel that goes astray finds no other's memory.
    #[must_use]
    pub fn usual(host: bool, alone: bool) -> Self {
        if host || !alone { Self::All } else { Self::Leaf }
    }
}

/// Most bytes of snapshots, and most bytes read for them, in one graph.
pub const MAX_SNAPSHOT_BYTES: u64 = 256 << 20;
/// Most comparisons of a node's result with a source: about a tenth of a second.
const MAX_STEPS: u64 = 1 << 26;

/// Most elements of a copy that is taken to hold what it is of: a CPU kernel counts the shares of its threads in C ints, and leaves a result
/// with more as it was.
const MAX_COPIED: i64 = MAX_ROWS;

/// Where an execution stops, and what is looked at there.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// By rising place among the nodes.
    pub stops: Vec<Stop>,
    /// Nodes, by rising place among the tensors, whose result is made in memory that the guest cannot write and copied from there.
    pub apart: Vec<u32>,
    /// Sources that are copied right before their node, in the order of the nodes.
    pub staged: Vec<Staged>,
}

/// A source that a node gets a dense copy of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Staged {
    /// The node's place among the tensors.
    pub node: u32,
    /// The source's slot.
    pub slot: usize,
    /// Bytes that the copy may be read for.
    pub bytes: u64,
}

/// A stop before a node.
#[derive(Debug, PartialEq, Eq)]
pub struct Stop {
    /// The node's place among the nodes.
    pub before: usize,
    /// What is looked at; nothing where only a part ends.
    pub snapshots: Vec<Snapshot>,
}

/// A source whose contents address memory.
#[derive(Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The source's place among the tensors.
    pub source: u32,
    /// What its elements are below, from 0 on; none when any value will do as long as it stays.
    pub below: Option<i64>,
    /// The kernel gets a copy; else the contents stay where they are, in memory that nobody else writes.
    pub rebind: bool,
    /// Who reads it: place among the tensors, slot.
    pub users: Vec<(u32, usize)>,
}

/// Plans the snapshots of a graph.
///
/// # Errors
/// [`VerifyError::GraphTooLarge`]
pub(super) fn plan<B: Buffers>(
    tensors: &[GraphTensor],
    nodes: &[usize],
    terms: &Terms<'_, B>,
) -> Result<Plan, VerifyError> {
    let mut planner = Planner {
        tensors,
        nodes,
        rules: terms.rules,
        known: HashMap::new(),
        steps: 0,
        bytes: 0,
        plan: Plan::default(),
    };
    if terms.index_check == IndexCheck::Off {
        return Ok(planner.plan);
    }
    for (at, place) in nodes.iter().enumerate() {
        let entry = &tensors[*place];
        let Some(rule) = terms.rules.rule(entry.tensor().op()) else { continue };
        if !entry.is_computed(terms.rules) {
            continue;
        }
        // Only the guest changes values under a sort, and only host kernels go astray.
        let changes = |buffer: BufferInfo| buffer.shared && buffer.host;
        if rule.reads_result && buffer_of(entry.tensor(), terms.buffers).is_some_and(changes) {
            planner.set_apart(*place as u32)?;
        }
        for read in rule.reads {
            let Some(source) = entry.sources()[read.source()] else { continue };
            let contents = tensors[source as usize].tensor();
            if contents.is_empty() {
                continue;
            }
            let Some(buffer) = buffer_of(contents, terms.buffers) else { continue };
            let below = match read {
                Read::Index { bound, .. } => Some(bound(&node_of(tensors, *place as u32, terms.rules))),
                Read::Steady { .. } if changes(buffer) => None,
                Read::Steady { .. } => continue,
            };
            let writer = planner.last_writer(source, at)?;
            if writer.is_some() && terms.index_check == IndexCheck::Leaf {
                continue;
            }
            if let (Some(writer), Some(below)) = (writer, below)
                && planner.is_bounded(source, writer, below, terms.buffers)?
            {
                continue;
            }
            let rebind = buffer.host || buffer.shared;
            let snapshot = Snapshot { source, below, rebind, users: vec![(*place as u32, read.source())] };
            planner.add(snapshot, writer.map_or(0, |writer| writer + 1), at)?;
        }
    }
    Ok(planner.plan)
}

struct Planner<'a> {
    tensors: &'a [GraphTensor],
    nodes: &'a [usize],
    rules: &'a RuleBook,
    /// By source: how many nodes have been looked at, and the last of them that writes any of its bytes.
    known: HashMap<u32, (usize, Option<usize>)>,
    steps: u64,
    bytes: u64,
    plan: Plan,
}

impl Planner<'_> {
    /// The last node before `at` that writes any byte of a source.
    fn last_writer(&mut self, source: u32, at: usize) -> Result<Option<usize>, VerifyError> {
        let (seen, mut writer) = match self.known.get(&source) {
            Some((seen, writer)) if *seen <= at => (*seen, *writer),
            _ => (0, None),
        };
        self.steps += (at - seen) as u64;
        if self.steps > MAX_STEPS {
            return Err(VerifyError::GraphTooLarge {
                what: "comparisons for its indices",
                value: self.steps,
                limit: MAX_STEPS,
            });
        }
        let target = self.tensors[source as usize].tensor();
        for node in seen..at {
            if self.writes(node, target) {
                writer = Some(node);
            }
        }
        self.known.insert(source, (at, writer));
        Ok(writer)
    }

    /// Whether a node may write any byte of a tensor.
    fn writes(&self, node: usize, target: &CheckedTensor) -> bool {
        let entry = &self.tensors[self.nodes[node]];
        if !entry.is_computed(self.rules) {
            return false;
        }
        let also = self.rules.rule(entry.tensor().op()).map_or(&[][..], |rule| rule.writes);
        entry.tensor().overlaps(target)
            || also
                .iter()
                .filter_map(|slot| entry.sources()[*slot])
                .any(|source| self.tensors[source as usize].tensor().overlaps(target))
    }

    /// Whether node `writer`, the last to write any byte of a source, leaves only indices below a bound there, and nobody outside the graph
    /// can change them, nor what they are copied from.
    fn is_bounded<B: Buffers>(
        &mut self,
        source: u32,
        writer: usize,
        below: i64,
        buffers: &B,
    ) -> Result<bool, VerifyError> {
        let (mut source, mut writer) = (source, writer);
        loop {
            let target = self.tensors[source as usize].tensor();
            let entry = &self.tensors[self.nodes[writer]];
            let made = entry.tensor();
            if buffer_of(made, buffers).is_none_or(|buffer| buffer.shared) {
                return Ok(false);
            }
            if !made.is_dense() || !covers(made, target) {
                return Ok(false);
            }
            let Some(from) = entry.sources()[0] else { return Ok(false) };
            match self.rules.op_name(made.op()) {
                "ARGSORT" | "TOP_K" | "ARGMAX" => {
                    return Ok(self.tensors[from as usize].tensor().ne()[0] <= below);
                }
                "CONT" | "DUP" | "CPY"
                    if self.tensors[from as usize].tensor().type_() == I32
                        && made.elements() <= MAX_COPIED => {}
                _ => return Ok(false),
            }
            // Writers only get earlier, so that this ends.
            match self.last_writer_of(from, writer)? {
                Some(earlier) => (source, writer) = (from, earlier),
                None => return Ok(false),
            }
        }
    }

    /// As [`Self::last_writer`], for a node that may lie before the ones already looked at.
    fn last_writer_of(&mut self, source: u32, at: usize) -> Result<Option<usize>, VerifyError> {
        let kept = self.known.remove(&source);
        let writer = self.last_writer(source, at);
        if let Some(kept) = kept {
            self.known.insert(source, kept);
        }
        writer
    }

    /// Adds a snapshot that is to be taken after node `ready - 1` and before node `at`.
    fn add(&mut self, snapshot: Snapshot, ready: usize, at: usize) -> Result<(), VerifyError> {
        let tensor = self.tensors[snapshot.source as usize].tensor();
        let stop = match self.plan.stops.last_mut() {
            Some(stop) if stop.before >= ready => stop,
            _ => {
                // As late as can be, so that it may serve those who come later.
                let before = if ready == 0 { 0 } else { at };
                self.plan.stops.push(Stop { before, snapshots: Vec::new() });
                let last = self.plan.stops.len() - 1;
                &mut self.plan.stops[last]
            }
        };
        if let Some(same) = stop.snapshots.iter_mut().find(|other| {
            other.source == snapshot.source && other.below.is_some() == snapshot.below.is_some()
        }) {
            same.below = same.below.min(snapshot.below);
            same.users.extend(snapshot.users);
            return Ok(());
        }
        let dense = (tensor.elements() as u64).saturating_mul(u64::from(tensor.info().size));
        self.bytes = self.bytes.saturating_add(dense).saturating_add(tensor.extent());
        if self.bytes > MAX_SNAPSHOT_BYTES {
            return Err(VerifyError::GraphTooLarge {
                what: "bytes of indices",
                value: self.bytes,
                limit: MAX_SNAPSHOT_BYTES,
            });
        }
        stop.snapshots.push(snapshot);
        Ok(())
    }

    /// Has a node's result made in private memory.
    fn set_apart(&mut self, place: u32) -> Result<(), VerifyError> {
        let bytes = self.tensors[place as usize].tensor().extent();
        if bytes > MAX_SNAPSHOT_BYTES {
            return Err(VerifyError::GraphTooLarge {
                what: "bytes of a sorted result in shared memory",
                value: bytes,
                limit: MAX_SNAPSHOT_BYTES,
            });
        }
        self.plan.apart.push(place);
        Ok(())
    }
}

/// What is known of the buffer that a tensor lies in.
fn buffer_of(tensor: &CheckedTensor, buffers: &impl Buffers) -> Option<BufferInfo> {
    tensor.place().and_then(|lies| buffers.find(lies.buffer))
}

/// Whether every element of one I32 tensor is an element of another, whose bytes leave no gaps.
fn covers(whole: &CheckedTensor, part: &CheckedTensor) -> bool {
    let (Some(outer), Some(inner)) = (whole.place(), part.place()) else { return false };
    whole.type_() == I32
        && part.type_() == I32
        && outer.buffer == inner.buffer
        && outer.offset <= inner.offset
        && inner.offset + part.extent() <= outer.offset + whole.extent()
        && (inner.offset - outer.offset).is_multiple_of(u64::from(whole.info().size))
}
