//! Rules of operations: what they say, and how a node is held against them.
//!
//! ggml checks most of this when a program builds a node and next to nothing when a backend executes it. Here every node is checked, whoever
//! built it.
#![forbid(unsafe_code)]

use super::VerifyError;
use super::node::{Node, Target};
use super::ops;
use super::tensor::CheckedTensor;
use super::work::{Tasks, Work};
use apir_ggml::{Names, OpKind, OpTable, TypeInfo, Version};
use apir_protocol::tensor::{MAX_SOURCES, PARAM_WORDS};

/// What C ints of CPU kernels hold is below this.
pub const INTS: i64 = 1 << 31;

/// Most bytes of work memory that one node may make a CPU backend take.
pub const MAX_WORK: u64 = 4 << 30;

/// The rules of one operation.
#[derive(Debug, Clone, Copy)]
pub struct OpRule {
    /// ggml's name of the operation.
    pub name: &'static str,
    /// The sources by slot; other slots are empty.
    pub sources: &'static [Source],
    /// What the parameter words hold by place; an empty name, or none, is a word that must be 0.
    pub params: &'static [&'static str],
    /// Parameters that older guests leave 0, and what they mean by it.
    pub absent_params: &'static [(usize, i32)],
    /// Parameters that are taken as no more than a number.
    pub capped_params: &'static [Cap],
    /// Where the result may lie.
    pub result: ResultPlace,
    /// Sources whose contents decide which memory the kernel touches.
    pub reads: &'static [Read],
    /// Sources that the kernel writes too.
    pub writes: &'static [usize],
    /// Whether the kernel takes elements of its own unfinished result for indices.
    pub reads_result: bool,
    /// What else must hold, looked at in this order.
    pub clauses: &'static [Clause],
    /// Forms that the clauses admit and that came with a release.
    pub since: &'static [Since],
    /// Sources that the kernel reads past the end of.
    pub reaches: &'static [Reach],
    /// How many threads ggml plans the CPU kernel for.
    pub tasks: Tasks,
    /// Work memory of the CPU kernel.
    pub work: Work,
}

impl OpRule {
    /// An operation that has no sources and no rules.
    pub const BLANK: Self = Self {
        name: "",
        sources: &[],
        params: &[],
        absent_params: &[],
        capped_params: &[],
        result: ResultPlace::Fresh,
        reads: &[],
        writes: &[],
        reads_result: false,
        clauses: &[],
        since: &[],
        reaches: &[],
        tasks: Tasks::ALL,
        work: Work::NONE,
    };
}

/// A source of an operation.
#[derive(Debug, Clone, Copy)]
pub struct Source {
    /// What the rules call it.
    pub name: &'static str,
    /// Whether the operation can do without.
    pub optional: bool,
    /// Whether a CPU kernel bears it without elements though the result has some.
    pub or_empty: bool,
    /// How it may be made of blocks on a CPU.
    pub blocks: Blocks,
}

/// What CPU kernels do with a source that is made of blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blocks {
    /// They take none.
    None,
    /// They find them by its strides, or do not look at them.
    ByStrides,
    /// One of their ways, or one of some release, counts them: they lie dense.
    Counted,
}

impl Source {
    /// A source that may be without elements.
    #[must_use]
    pub const fn or_empty(self) -> Self {
        Self { or_empty: true, ..self }
    }

    /// A source that may be made of blocks.
    #[must_use]
    pub const fn blocks(self, blocks: Blocks) -> Self {
        Self { blocks, ..self }
    }
}

/// A source that must be there.
#[must_use]
pub const fn need(name: &'static str) -> Source {
    Source { name, optional: false, or_empty: false, blocks: Blocks::None }
}

/// A source that may be absent.
#[must_use]
pub const fn may(name: &'static str) -> Source {
    Source { name, optional: true, or_empty: false, blocks: Blocks::None }
}

/// Something that must hold.
#[derive(Debug, Clone, Copy)]
pub struct Clause {
    /// In words.
    pub what: &'static str,
    /// Whether it does.
    pub holds: fn(&Node<'_>) -> bool,
    /// It keeps what a CPU kernel counts in C ints within them.
    pub ints: bool,
}

/// A clause of a rule.
#[must_use]
pub const fn must(what: &'static str, holds: fn(&Node<'_>) -> bool) -> Clause {
    Clause { what, holds, ints: false }
}

/// A clause that keeps what a CPU kernel counts in C ints within them; it holds elsewhere.
#[must_use]
pub const fn counts(what: &'static str, holds: fn(&Node<'_>) -> bool) -> Clause {
    Clause { what, holds, ints: true }
}

/// A form of a node that came with a release of ggml: earlier ones ignore what is new about it, misread it, or end the process.
#[derive(Debug, Clone, Copy)]
pub struct Since {
    /// The first release that is known to have it.
    pub version: Version,
    /// The form in words.
    pub what: &'static str,
    /// Only the CPU's kernels are concerned; other devices are asked.
    pub cpu: bool,
    /// Whether a node that satisfies the clauses has the form.
    pub used: fn(&Node<'_>) -> bool,
}

impl Since {
    /// Whether the node has the form and its device's ggml does not.
    #[must_use]
    pub fn lacks(&self, node: &Node<'_>) -> bool {
        node.target.version < self.version && (node.target.cpu || !self.cpu) && (self.used)(node)
    }
}

/// A form that every device got with a release.
#[must_use]
pub const fn since(version: Version, what: &'static str, used: fn(&Node<'_>) -> bool) -> Since {
    Since { version, what, cpu: false, used }
}

/// A form that the CPU's kernels got with a release.
#[must_use]
pub const fn cpu_since(version: Version, what: &'static str, used: fn(&Node<'_>) -> bool) -> Since {
    Since { version, what, cpu: true, used }
}

/// A number that a parameter is taken as no more than: a larger one says the same, and some kernels take memory by it.
#[derive(Debug, Clone, Copy)]
pub struct Cap {
    /// The parameter's word.
    pub word: usize,
    /// The number in words.
    pub what: &'static str,
    /// The number.
    pub most: fn(&Node<'_>) -> i64,
}

/// Where a result may lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResultPlace {
    /// Memory that no source lies in, packed densely.
    Fresh,
    /// Memory that no source lies in; a clause says how it is packed.
    Own,
    /// As fresh, or exactly over a source of the same type, dimensions and strides.
    InPlace,
    /// Exactly over the source in this slot, of which it is a view.
    Over(usize),
    /// Over the first source when this parameter is 1, fresh when it is 0.
    OverIf(usize),
    /// Exactly over the second source, which says where to copy to; for a cast, which is its own second source, fresh.
    Target,
    /// Another look at the first source's memory.
    View,
}

/// A source that a kernel may read past the end of, though what lies there makes no difference.
#[derive(Debug, Clone, Copy)]
pub struct Reach {
    /// The slot.
    pub source: usize,
    /// How far in words.
    pub what: &'static str,
    /// Bytes that are read from the source's start.
    pub bytes: fn(&Node<'_>) -> u64,
}

/// How a source's contents decide which memory is touched.
#[derive(Debug, Clone, Copy)]
pub enum Read {
    /// Every element is an index from 0 to below a bound.
    Index {
        /// The slot.
        source: usize,
        /// The bound in words.
        below: &'static str,
        /// The bound.
        bound: fn(&Node<'_>) -> i64,
    },
    /// A sort goes astray when the values change under it.
    Steady {
        /// The slot.
        source: usize,
    },
}

impl Read {
    /// The slot.
    #[must_use]
    pub fn source(&self) -> usize {
        match self {
            Self::Index { source, .. } | Self::Steady { source } => *source,
        }
    }
}

/// What [`OpRule::check`] asks of every result, and of sources that are written too.
pub const WRITTEN_APART: &str = "no two elements of what is written share bytes";

/// What [`OpRule::check`] asks of sources that a CPU kernel takes without blocks only.
pub const NO_BLOCKS: &str = "a CPU kernel takes blocks only where the rule says so";

/// What [`OpRule::check`] asks of sources whose blocks a CPU kernel counts.
pub const DENSE_BLOCKS: &str = "blocks that a CPU kernel takes as they are lie dense";

/// Whether something holds; if not, what should.
pub type Checked = Result<(), &'static str>;

impl OpRule {
    /// Holds a node against this rule. Placement is checked as far as the tensors are placed.
    ///
    /// # Errors
    /// What does not hold.
    pub fn check(&self, node: &Node<'_>) -> Checked {
        self.check_sources(node)?;
        self.check_params(node.d)?;
        self.check_result(node)?;
        self.check_written(node)?;
        for clause in self.clauses {
            let elsewhere = clause.ints && !node.target.cpu;
            if !elsewhere && !(clause.holds)(node) {
                return Err(clause.what);
            }
        }
        self.check_blocks(node)?;
        // Some release may plan any kernel for all threads.
        match self.work.planned(node, Tasks::ALL, node.target.threads) {
            Some(bytes) if bytes <= MAX_WORK => Ok(()),
            _ => Err("the work buffer of a CPU backend takes at most 4 GiB"),
        }
    }

    fn check_sources(&self, node: &Node<'_>) -> Checked {
        for slot in 0..MAX_SOURCES {
            match self.sources.get(slot) {
                Some(source) if source.optional => {}
                Some(_) if node.opt(slot).is_some() => {}
                Some(_) => return Err("a required source is absent"),
                None if node.lacks(slot) => {}
                None => return Err("it has more sources than the operation takes"),
            }
        }
        // Kernels test only the result for emptiness, and divide by a source's dimensions.
        let bears =
            |slot: usize| node.target.cpu && self.sources.get(slot).is_some_and(|source| source.or_empty);
        let empty = |slot: usize| node.opt(slot).is_some_and(CheckedTensor::is_empty);
        if !node.d.is_empty() && (0..MAX_SOURCES).any(|slot| empty(slot) && !bears(slot)) {
            return Err("a result with elements has no source without");
        }
        Ok(())
    }

    fn check_blocks(&self, node: &Node<'_>) -> Checked {
        if !node.target.cpu {
            return Ok(());
        }
        for (slot, source) in self.sources.iter().enumerate() {
            match (source.blocks, node.opt(slot).filter(|tensor| tensor.info().is_block())) {
                (Blocks::None, Some(_)) => return Err(NO_BLOCKS),
                (Blocks::Counted, Some(tensor)) if !tensor.is_dense() => return Err(DENSE_BLOCKS),
                _ => {}
            }
        }
        Ok(())
    }

    fn check_params(&self, result: &CheckedTensor) -> Checked {
        let named = |word: usize| self.params.get(word).is_some_and(|name| !name.is_empty());
        let params = result.op_params();
        match (0..PARAM_WORDS).any(|word| params[word] != 0 && !named(word)) {
            true => Err("parameters that the operation does not have are 0"),
            false => Ok(()),
        }
    }

    fn check_result(&self, node: &Node<'_>) -> Checked {
        match self.result {
            ResultPlace::Fresh => fresh(node),
            ResultPlace::Own => own(node),
            ResultPlace::InPlace if node.view.is_some() => over(node, 0),
            ResultPlace::InPlace => fresh(node),
            ResultPlace::Over(slot) => over(node, slot),
            ResultPlace::OverIf(word) => match node.p(word) {
                0 => fresh(node),
                1 => over(node, 0),
                _ => Err("the in-place flag is 0 or 1"),
            },
            ResultPlace::Target if node.cast => fresh(node),
            ResultPlace::Target => over(node, 1),
            ResultPlace::View => match node.view {
                Some(_) => Ok(()),
                None => Err("the result is a view"),
            },
        }
    }

    /// Threads of a kernel share out the elements that it writes; sources may well repeat rows or slide a window over them.
    fn check_written(&self, node: &Node<'_>) -> Checked {
        let computed = (self.result != ResultPlace::View).then_some(node.d);
        let sources = self.writes.iter().filter_map(|slot| node.opt(*slot));
        match computed.into_iter().chain(sources).all(CheckedTensor::lies_apart) {
            true => Ok(()),
            false => Err(WRITTEN_APART),
        }
    }

    /// Whether the result may lie exactly over a source that has its layout.
    #[must_use]
    pub fn works_in_place(&self) -> bool {
        matches!(self.result, ResultPlace::InPlace)
    }
}

fn own(node: &Node<'_>) -> Checked {
    if node.view.is_some() { Err("the result has memory of its own") } else { Ok(()) }
}

fn fresh(node: &Node<'_>) -> Checked {
    own(node)?;
    if node.d.is_dense() { Ok(()) } else { Err("the result is dense") }
}

fn over(node: &Node<'_>, slot: usize) -> Checked {
    if node.view.is_none() {
        return Err("the result is a view of the source that it is written over");
    }
    let source = node.s(slot);
    if !node.d.is_like(source) {
        return Err("the result has the layout of the source that it is written over");
    }
    if let (Some(place), Some(expected)) = (node.d.place(), source.place())
        && place != expected
    {
        return Err("the result lies where the source that it is written over does");
    }
    Ok(())
}

/// The rules for one ggml library: its operations by number, its types.
#[derive(Debug)]
pub struct RuleBook {
    entries: Vec<Entry>,
    /// The operations that have variants, and the rules' number of each variant.
    variants: [(Option<u32>, Vec<i64>); 2],
    target: Target,
}

#[derive(Debug)]
struct Entry {
    name: String,
    kind: OpKind,
    rule: Option<&'static OpRule>,
}

impl RuleBook {
    /// Rules for a library of this version with these operations, on a device that is a CPU or not.
    #[must_use]
    pub fn new(table: &OpTable, version: Version, cpu: bool, threads: usize) -> Self {
        let entry = |op: u32| {
            let name = table.name(op).unwrap_or_default();
            let kind = table.kind(op).unwrap_or(OpKind::Callback);
            Entry { name: name.to_owned(), kind, rule: ops::find(name) }
        };
        let usual = |op, names: &[&str]| (table.number(op), (0..).take(names.len()).collect());
        Self {
            entries: (0..table.count()).map(entry).collect(),
            variants: [usual("UNARY", ops::unary::UNARY), usual("GLU", ops::glu::GLU)],
            target: Target { cpu, version, threads: threads.max(1) as u64 },
        }
    }

    /// Takes the variants of operations by the names that this ggml gives them.
    #[must_use]
    pub fn with_variants(mut self, names: &Names) -> Self {
        let lists = [(&names.unary, ops::unary::UNARY), (&names.glu, ops::glu::GLU)];
        for ((_, numbers), (theirs, ours)) in self.variants.iter_mut().zip(lists) {
            let number =
                |name: &String| ours.iter().position(|known| known == name).map_or(-1, |at| at as i64);
            *numbers = theirs.iter().map(number).collect();
        }
        self
    }

    /// The rules' number of the variant that a first parameter names; -1 for one that they do not know, or without variants.
    #[must_use]
    pub fn variant(&self, op: u32, param: i32) -> i64 {
        let numbers = self.variants.iter().find(|(known, _)| *known == Some(op)).map(|(_, numbers)| numbers);
        let at = usize::try_from(param).ok();
        numbers.zip(at).and_then(|(numbers, at)| numbers.get(at).copied()).unwrap_or(-1)
    }

    /// The element type of a number, if this ggml has it.
    #[must_use]
    pub fn type_info(&self, number: u32) -> Option<&'static TypeInfo> {
        TypeInfo::get(number).filter(|info| info.since <= self.target.version)
    }

    /// How many operations this ggml has.
    #[must_use]
    pub fn op_count(&self) -> u32 {
        self.entries.len() as u32
    }

    /// An operation's name, empty for a number that this ggml does not have.
    #[must_use]
    pub fn op_name(&self, op: u32) -> &str {
        self.entries.get(op as usize).map_or("", |entry| &entry.name)
    }

    /// The number of the operation of this name, if this ggml has it.
    #[must_use]
    pub fn op_number(&self, name: &str) -> Option<u32> {
        self.entries.iter().position(|entry| entry.name == name).and_then(|op| u32::try_from(op).ok())
    }

    /// What executing an operation does.
    #[must_use]
    pub fn kind(&self, op: u32) -> Option<OpKind> {
        self.entries.get(op as usize).map(|entry| entry.kind)
    }

    /// The rules of an operation.
    #[must_use]
    pub fn rule(&self, op: u32) -> Option<&'static OpRule> {
        self.entries.get(op as usize)?.rule
    }

    /// What nodes are checked for.
    #[must_use]
    pub fn target(&self) -> Target {
        self.target
    }

    /// Fills in what older guests leave out.
    pub fn complete(&self, tensor: &mut CheckedTensor) {
        for (word, value) in self.rule(tensor.op()).map_or(&[][..], |rule| rule.absent_params) {
            if tensor.op_params().get(*word) == Some(&0) {
                tensor.set_param(*word, *value);
            }
        }
    }

    /// The parameter words of a node, none larger than it says anything.
    #[must_use]
    pub fn capped(&self, node: &Node<'_>) -> [i32; PARAM_WORDS] {
        let mut params = node.d.op_params();
        for cap in self.rule(node.d.op()).map_or(&[][..], |rule| rule.capped_params) {
            let most = i32::try_from((cap.most)(node)).unwrap_or(i32::MAX);
            params[cap.word] = params[cap.word].min(most);
        }
        params
    }

    /// Holds a node against its operation's rules; a leaf has none.
    ///
    /// # Errors
    /// [`VerifyError::NoRule`], [`VerifyError::Rule`], [`VerifyError::Release`]
    pub fn check(&self, node: &Node<'_>) -> Result<(), VerifyError> {
        let op = node.d.op();
        if self.kind(op) == Some(OpKind::None) {
            return Ok(());
        }
        let name = || node.d.name_text();
        let rule = self
            .rule(op)
            .ok_or_else(|| VerifyError::NoRule { name: name(), op: self.op_name(op).to_owned() })?;
        rule.check(node).map_err(|what| VerifyError::Rule { name: name(), op: rule.name, what })?;
        match rule.since.iter().find(|form| form.lacks(node)) {
            Some(form) => Err(VerifyError::Release {
                name: name(),
                op: rule.name,
                what: form.what,
                since: form.version,
                version: node.target.version,
            }),
            None => Ok(()),
        }
    }
}
