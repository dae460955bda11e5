//! A whole graph: ids, order, views, the rules of every node, and a buffer under everything that is computed.
#![forbid(unsafe_code)]

use super::indices::{self, IndexCheck, MAX_SNAPSHOT_BYTES, Plan, Staged};
use super::node::{Node, Slot};
use super::parts;
use super::rules::{OpRule, ResultPlace, RuleBook};
use super::tensor::CheckedTensor;
use super::work::Tasks;
use super::{Buffers, VerifyError};
use apir_ggml::OpKind;
use apir_ggml::abi::FLAG_COMPUTE;
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
    /// It is in the guest's list of nodes.
    listed: bool,
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

    /// Place among the nodes. What is none is data here, whatever made it elsewhere.
    #[must_use]
    pub fn node(&self) -> Option<u32> {
        self.node
    }

    /// Whether a backend computes it in this graph.
    #[must_use]
    pub fn is_computed(&self, rules: &RuleBook) -> bool {
        self.node.is_some()
            && rules.kind(self.tensor.op()) == Some(OpKind::Compute)
            && self.tensor.extent() > 0
    }
}

/// A graph that may be computed. Only [`Verifier::verify`] makes one.
#[derive(Debug)]
pub struct VerifiedGraph<'a> {
    tensors: &'a [GraphTensor],
    nodes: &'a [usize],
    plan: Plan,
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

    /// Bytes of the work memory that a CPU backend takes for it at most; it takes them for a node without elements too.
    #[must_use]
    pub fn work(&self, rules: &RuleBook) -> u64 {
        let work = |place: &usize| {
            let rule = rules.rule(self.tensors[*place].tensor.op())?;
            rule.work.planned(
                &node_of(self.tensors, *place as u32, rules),
                Tasks::ALL,
                rules.target().threads,
            )
        };
        self.nodes.iter().filter_map(work).max().unwrap_or(0)
    }

    /// Where the execution stops, between parts and to look at contents that address memory.
    #[must_use]
    pub fn plan(&self) -> &Plan {
        &self.plan
    }
}

/// What graphs are checked against.
#[derive(Debug)]
pub struct Terms<'a, B> {
    /// The rules of the library's operations.
    pub rules: &'a RuleBook,
    /// The context's buffers.
    pub buffers: &'a B,
    /// Which indices are looked at.
    pub index_check: IndexCheck,
    /// Most nodes, and most tensors.
    pub max_nodes: u64,
}

/// Checks graphs one after the other in memory that it uses again.
#[derive(Debug, Default)]
pub struct Verifier {
    tensors: Vec<GraphTensor>,
    nodes: Vec<usize>,
    staged: Vec<Staged>,
    places: HashMap<u64, u32>,
}

impl Verifier {
    /// Checks a graph blob that lies in private memory.
    ///
    /// # Errors
    /// [`VerifyError`] of the first fault found.
    pub fn verify<B: Buffers>(
        &mut self,
        blob: &[u8],
        terms: &Terms<'_, B>,
    ) -> Result<VerifiedGraph<'_>, VerifyError> {
        let graph = GraphReader::parse(blob)?;
        if graph.node_count() == 0 {
            return Err(VerifyError::NoNodes);
        }
        for (what, value) in [("nodes", graph.node_count()), ("tensors", graph.tensor_count())] {
            if value as u64 > terms.max_nodes {
                return Err(VerifyError::GraphTooLarge { what, value: value as u64, limit: terms.max_nodes });
            }
        }
        self.tensors.clear();
        self.nodes.clear();
        self.staged.clear();
        self.places.clear();
        for (index, record) in graph.tensors().enumerate() {
            self.add_tensor(index, &record, terms)?;
        }
        for (node, id) in graph.node_ids().enumerate() {
            self.add_node(node, id, terms.rules)?;
        }
        self.check_order()?;
        let mut plan = indices::plan(&self.tensors, &self.nodes, terms)?;
        plan.staged.clone_from(&self.staged);
        parts::split(&mut plan, &self.tensors, &self.nodes, terms.rules);
        Ok(VerifiedGraph { tensors: &self.tensors, nodes: &self.nodes, plan })
    }

    fn add_tensor<B: Buffers>(
        &mut self,
        index: usize,
        record: &TensorRecord,
        terms: &Terms<'_, B>,
    ) -> Result<(), VerifyError> {
        if record.id == 0 {
            return Err(VerifyError::NullId { index });
        }
        // A blob of 304 bytes a tensor cannot hold 2^32 of them: the reader's count is 32 bits.
        let place = index as u32;
        if self.places.insert(record.id, place).is_some() {
            return Err(VerifyError::DuplicateId { index, id: record.id });
        }
        let mut tensor = CheckedTensor::from_record(record, terms.rules, terms.buffers)?;
        terms.rules.complete(&mut tensor);
        let mut sources = [None; MAX_SOURCES];
        for (slot, (source, id)) in sources.iter_mut().zip(record.src).enumerate() {
            *source = self.find(id, "a source")?;
            // A cast is its own second source; nothing else may be made of itself.
            let cast = slot == 1 && terms.rules.op_name(record.op) == "CPY";
            let own = *source == Some(place) && !cast;
            if own || source.is_some_and(|source| source > place) {
                return Err(VerifyError::Order { index, source_index: source.map_or(index, |s| s as usize) });
            }
        }
        let view_src = self.find(record.view_src, "a view's source")?;
        match view_src {
            Some(viewed) if viewed >= place => {
                return Err(VerifyError::Order { index, source_index: viewed as usize });
            }
            Some(viewed) => check_view(&tensor, &self.tensors[viewed as usize])?,
            None => check_alignment(&tensor, terms.buffers)?,
        }
        self.tensors.push(GraphTensor { tensor, sources, view_src, node: None, listed: false });
        Ok(())
    }

    /// Place of the tensor with this id; none for id 0.
    fn find(&self, id: u64, what: &'static str) -> Result<Option<u32>, VerifyError> {
        if id == 0 {
            return Ok(None);
        }
        self.places.get(&id).copied().map(Some).ok_or(VerifyError::UnknownId { what, id })
    }

    fn add_node(&mut self, node: usize, id: u64, rules: &RuleBook) -> Result<(), VerifyError> {
        let place = self.find(id, "a node")?.ok_or(VerifyError::UnknownId { what: "a node", id })?;
        let next = self.nodes.len() as u32;
        let entry = &mut self.tensors[place as usize];
        if std::mem::replace(&mut entry.listed, true) {
            return Err(VerifyError::NodeOrder { node });
        }
        let flagged = entry.tensor.flags() & FLAG_COMPUTE != 0;
        if rules.kind(entry.tensor.op()) == Some(OpKind::Compute) && !flagged {
            // Programs build more than one way through a graph, and mark the nodes of the one that they take; the others are data.
            return Ok(());
        }
        entry.node = Some(next);
        let entry = &self.tensors[place as usize];
        let checked = node_of(&self.tensors, place, rules);
        rules.check(&checked)?;
        if entry.is_computed(rules) {
            check_placed(&entry.tensor)?;
            checked.sources().try_for_each(check_placed)?;
            if let Some(rule) = rules.rule(entry.tensor.op()) {
                stage(rule, &checked, place, &mut self.staged)?;
            }
        }
        let params = rules.capped(&checked);
        self.tensors[place as usize].tensor.set_params(params);
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

/// A tensor as rules see it.
pub(super) fn node_of<'a>(tensors: &'a [GraphTensor], place: u32, rules: &RuleBook) -> Node<'a> {
    let entry = &tensors[place as usize];
    let tensor = |place: u32| &tensors[place as usize].tensor;
    Node {
        d: &entry.tensor,
        slots: entry.sources.map(|source| source.map_or(Slot::Absent, |source| Slot::Known(tensor(source)))),
        view: entry.view_src.map(tensor),
        cast: entry.sources[1] == Some(place),
        probe: false,
        target: rules.target(),
    }
}

/// A view is a part of a tensor of its type, wherever that lies.
///
/// # Errors
/// [`VerifyError::View`], [`VerifyError::Misaligned`]
pub fn check_part(view: &CheckedTensor, source: &CheckedTensor) -> Result<(), VerifyError> {
    let refuse = |what| Err(VerifyError::View { name: view.name_text(), what });
    if view.type_() != source.type_() {
        return refuse("a tensor of another type");
    }
    let end = view.view_offs().checked_add(view.extent());
    if end.is_none_or(|end| end > source.extent()) && view.extent() > 0 {
        return refuse("more than there is");
    }
    let size = u64::from(view.info().size);
    if !view.view_offs().is_multiple_of(size) {
        let (name, offset) = (view.name_text(), view.view_offs());
        return Err(VerifyError::Misaligned { name, offset, alignment: size });
    }
    Ok(())
}

/// A view is a part of a tensor that is no view itself, in the same buffer, `view_offs` bytes into it.
fn check_view(view: &CheckedTensor, viewed: &GraphTensor) -> Result<(), VerifyError> {
    let refuse = |what| Err(VerifyError::View { name: view.name_text(), what });
    if viewed.view_src.is_some() {
        return refuse("a view");
    }
    let source = &viewed.tensor;
    check_part(view, source)?;
    let expected =
        source.place().and_then(|place| Some((place.buffer, place.offset.checked_add(view.view_offs())?)));
    let found = view.place().map(|place| (place.buffer, place.offset));
    if found.is_some() && found != expected {
        return Err(VerifyError::ViewElsewhere { name: view.name_text(), view_offs: view.view_offs() });
    }
    Ok(())
}

fn check_alignment(tensor: &CheckedTensor, buffers: &impl Buffers) -> Result<(), VerifyError> {
    let Some(place) = tensor.place() else { return Ok(()) };
    let alignment = buffers.find(place.buffer).map_or(1, |buffer| buffer.alignment);
    if place.offset.is_multiple_of(alignment) {
        return Ok(());
    }
    Err(VerifyError::Misaligned { name: tensor.name_text(), offset: place.offset, alignment })
}

/// What a computation touches must lie in a buffer.
fn check_placed(tensor: &CheckedTensor) -> Result<(), VerifyError> {
    if tensor.place().is_none() && tensor.extent() > 0 {
        return Err(VerifyError::NoBuffer { name: tensor.name_text() });
    }
    Ok(())
}

/// Finds the sources that a node needs copies of, and refuses a node that no copies help.
///
/// What a node writes is not what it reads, but where its rule wants or allows it to be exactly that. A program may well write over a part of a tensor
/// what it takes from another part of it, such as a copy between overlapping views: no question tells where tensors lie, so that a graph
/// with such a node is computed, as if all were read before anything is written.
fn stage(rule: &OpRule, node: &Node<'_>, place: u32, staged: &mut Vec<Staged>) -> Result<(), VerifyError> {
    let demanded = match rule.result {
        ResultPlace::Over(slot) => Some(slot),
        ResultPlace::OverIf(_) if node.view.is_some() => Some(0),
        ResultPlace::Target => Some(1),
        _ => None,
    };
    // A copy of a tensor onto itself changes nothing.
    let in_place = |slot: usize| rule.works_in_place() || rule.result == ResultPlace::Target && slot == 0;
    let mut bytes = 0;
    for slot in 0..MAX_SOURCES {
        let Some(source) = node.opt(slot) else { continue };
        let over = demanded != Some(slot)
            && node.d.overlaps(source)
            && !(in_place(slot) && node.d.is_like(source) && node.d.place() == source.place());
        // A source that is written too is a result of its own.
        let written = rule.writes.contains(&slot)
            && (over
                || (0..MAX_SOURCES)
                    .any(|other| other != slot && node.opt(other).is_some_and(|o| o.overlaps(source))));
        let reach = rule.reaches.iter().find(|reach| reach.source == slot);
        let reach = reach.map_or(0, |reach| (reach.bytes)(node));
        let short = source.place().is_some_and(|place| place.room < reach);
        if !over && !written && !short {
            continue;
        }
        let own = reach.max(source.dense_bytes());
        bytes = own.saturating_add(bytes);
        if written || over && !may_stage(rule, node, slot) || bytes > MAX_SNAPSHOT_BYTES {
            return Err(VerifyError::Overlap { name: node.d.name_text(), op: rule.name.to_owned() });
        }
        staged.push(Staged { node: place, slot, bytes: own });
    }
    Ok(())
}

/// Whether an honest program may give a node a source that its result lies over: only if the result is a view, and the source no index, which is
/// copied elsewhere. Elsewhere than on a CPU, kernels may want room behind blocks.
fn may_stage(rule: &OpRule, node: &Node<'_>, slot: usize) -> bool {
    node.view.is_some()
        && rule.reads.iter().all(|read| read.source() != slot)
        && (node.target.cpu || node.opt(slot).is_some_and(|source| !source.info().is_block()))
}
