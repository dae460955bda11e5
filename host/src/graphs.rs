//! Verified graphs, built for the backend, and kept to be computed again.
//!
//! A program sends the same graph for every token. What was built for it stays until one of its buffers is freed, with the bytes that it was
//! built from: equal bytes over the same buffers make the same graph, so that comparing them stands for verifying them.
#![forbid(unsafe_code)]

mod build;
mod snapshot;
mod support;

pub(crate) use build::Build;
pub(crate) use support::SupportCache;

use crate::budget::Taken;
use crate::context::Objects;
use crate::error::CommandError;
use crate::memory::HostBuffer;
use apir_ggml::library::{Backend, Buffer};
use apir_ggml::{Graph, GraphBuilder, Status};
use snapshot::Stop;
use std::sync::atomic::{AtomicBool, Ordering};

/// A graph that has been verified and built.
#[derive(Debug)]
pub(crate) struct BuiltGraph {
    /// What it was built from.
    blob: Vec<u8>,
    graph: Graph,
    stops: Vec<Stop>,
    /// Where copies of indices lie.
    private: Option<HostBuffer>,
    /// Bytes of work memory that it takes.
    work: u64,
    _taken: [Taken; 2],
}

impl BuiltGraph {
    /// Bytes of the work memory that a CPU backend takes for it at most.
    pub(crate) fn work(&self) -> u64 {
        self.work
    }

    /// Computes the nodes in order, looking at indices where the plan says so, until `stop` is true.
    pub(crate) fn compute(
        &mut self,
        backend: &Backend,
        objects: &Objects,
        scratch: &mut Vec<u8>,
        stop: &AtomicBool,
    ) -> Result<Status, CommandError> {
        let count = self.graph.node_count();
        if count == 0 {
            return Ok(Status::Success);
        }
        let mut part = |from, to| {
            if stop.load(Ordering::Relaxed) {
                return Status::Aborted;
            }
            let status = backend.graph_compute_part(&mut self.graph, from..to);
            backend.synchronize();
            status
        };
        let mut from = 0;
        for stop in &self.stops {
            if stop.before > from {
                let status = part(from, stop.before);
                if status != Status::Success {
                    return Ok(status);
                }
                from = stop.before;
            }
            for snapshot in &stop.snapshots {
                let private = self.private.as_ref().map(HostBuffer::ggml);
                snapshot.take(objects, private, scratch)?;
            }
        }
        if from > 0 {
            return Ok(part(from, count));
        }
        let status = backend.graph_compute(&mut self.graph);
        backend.synchronize();
        Ok(status)
    }

    /// Its memory, for the next graph.
    fn into_builder(self) -> GraphBuilder {
        self.graph.into_builder()
    }
}

/// The graphs of a context, the last used first.
#[derive(Debug)]
pub(crate) struct GraphCache {
    graphs: Vec<BuiltGraph>,
    limit: usize,
}

impl GraphCache {
    pub(crate) fn new(limit: u64) -> Self {
        Self { graphs: Vec::new(), limit: usize::try_from(limit).unwrap_or(usize::MAX) }
    }

    /// Takes out the graph that was built from these bytes.
    pub(crate) fn take(&mut self, blob: &[u8]) -> Option<BuiltGraph> {
        let at = self.graphs.iter().position(|graph| graph.blob == blob)?;
        Some(self.graphs.remove(at))
    }

    /// Keeps a graph, and gives the memory of one that has to go for it.
    pub(crate) fn keep(&mut self, graph: BuiltGraph) -> Option<GraphBuilder> {
        self.graphs.insert(0, graph);
        if self.graphs.len() > self.limit { self.graphs.pop().map(BuiltGraph::into_builder) } else { None }
    }

    /// Lets go of every graph that lies in a buffer.
    pub(crate) fn forget(&mut self, buffer: &Buffer) {
        self.graphs.retain(|graph| !graph.graph.uses(buffer));
    }
}
