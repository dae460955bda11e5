//! Parts that a graph is computed in, so that no thread enters a kernel that has no work memory for it.
//!
//! The CPU backend runs a part with the largest number of tasks of any of its nodes. A node that bears fewer is computed in a part with nodes that
//! bring no more than it bears.
#![forbid(unsafe_code)]

use super::graph::{GraphTensor, node_of};
use super::indices::{Plan, Stop};
use super::rules::RuleBook;

/// What a part has so far.
struct Part {
    /// Most tasks of a node.
    tasks: u64,
    /// Fewest threads that a node bears.
    bears: u64,
}

impl Part {
    const EMPTY: Self = Self { tasks: 1, bears: u64::MAX };

    fn with(&self, node: &Self) -> Self {
        Self { tasks: self.tasks.max(node.tasks), bears: self.bears.min(node.bears) }
    }

    fn is_fit(&self) -> bool {
        self.tasks <= self.bears
    }
}

/// Adds stops to a plan where a part has to end. Nothing else runs kernels that share work memory.
pub(super) fn split(plan: &mut Plan, tensors: &[GraphTensor], nodes: &[usize], rules: &RuleBook) {
    if !rules.target().cpu {
        return;
    }
    let threads = rules.target().threads;
    let mut planned = std::mem::take(&mut plan.stops).into_iter().peekable();
    let mut part = Part::EMPTY;
    for (at, place) in nodes.iter().enumerate() {
        if let Some(stop) = planned.next_if(|stop| stop.before == at) {
            plan.stops.push(stop);
            part = Part::EMPTY;
        }
        let entry = &tensors[*place];
        let Some(rule) = rules.rule(entry.tensor().op()).filter(|_| entry.is_computed(rules)) else {
            continue;
        };
        let node = node_of(tensors, *place as u32, rules);
        let (tasks, bears) = (rule.tasks.of(&node, threads), rule.work.bears(&node, rule.tasks, threads));
        let own = Part { tasks, bears };
        part = match part.with(&own) {
            both if both.is_fit() => both,
            _ => {
                plan.stops.push(Stop { before: at, snapshots: Vec::new() });
                own
            }
        };
    }
}
