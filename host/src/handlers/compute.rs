//! Computing a graph.
#![forbid(unsafe_code)]

use crate::context::Context;
use crate::error::CommandError;
use crate::graphs::{Build, BuiltGraph};
use crate::verify::VerifyError;
use crate::verify::graph::Terms;
use apir_ggml::Status;
use apir_protocol::graph::graph_size;
use apir_protocol::messages::BackendGraphComputeRequest;

/// Bytes that verifying and keeping a graph takes for each of its own.
const GRAPH_FOOTPRINT: u64 = 5;

impl Context {
    pub(super) fn graph_compute(
        &mut self,
        request: &BackendGraphComputeRequest,
    ) -> Result<Status, CommandError> {
        let most = u32::try_from(self.limits.graph_nodes).unwrap_or(u32::MAX);
        let limit = graph_size(most, most);
        if request.size > limit {
            return Err(VerifyError::GraphTooLarge { what: "bytes", value: request.size, limit }.into());
        }
        self.blobs.view(request.res_id, request.size)?.copy_to(&mut self.private)?;
        let mut graph = match self.graphs.take(&self.private) {
            Some(graph) => graph,
            None => self.build_graph()?,
        };
        let computed = self
            .prepare(graph.work())
            .and_then(|()| graph.compute(&self.backend, &self.objects, &mut self.scratch, &self.stop));
        // What was wrong with the contents says nothing about the graph.
        if let Some(builder) = self.graphs.keep(graph) {
            self.builder = Some(builder);
        }
        computed
    }

    /// Verifies the private copy and builds it.
    fn build_graph(&mut self) -> Result<BuiltGraph, CommandError> {
        let bytes = (self.private.len() as u64).saturating_mul(GRAPH_FOOTPRINT);
        let taken = self.work.take(bytes)?;
        self.check_available(bytes)?;
        let terms = Terms {
            rules: &self.rules,
            buffers: &self.objects,
            index_check: self.index_check,
            max_nodes: self.limits.graph_nodes,
        };
        let verified = self.verifier.verify(&self.private, &terms)?;
        let mut build = Build {
            rules: &self.rules,
            objects: &self.objects,
            device: &self.device,
            support: &mut self.support,
            account: &self.work,
            mappings: self.blobs.mappings(),
        };
        build.build(&verified, &self.private, taken, self.builder.take().unwrap_or_default())
    }
}
