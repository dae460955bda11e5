//! Computing a graph.
#![forbid(unsafe_code)]

use crate::context::Context;
use crate::error::CommandError;
use apir_ggml::{Status, TensorSpec};
use apir_protocol::handle::BufferHandle;
use apir_protocol::messages::BackendGraphComputeRequest;

impl Context {
    pub(super) fn graph_compute(
        &mut self,
        request: &BackendGraphComputeRequest,
    ) -> Result<Status, CommandError> {
        self.blobs.view(request.res_id, request.size)?.copy_to(&mut self.private)?;
        let verified = self.verifier.verify(&self.private, self.library.ops(), &self.objects)?;
        let mut builder = self.builder.take().unwrap_or_default();
        builder.clear();
        for entry in verified.tensors() {
            let tensor = entry.tensor();
            let buffer = match tensor.place() {
                Some(place) => Some((self.objects.buffer(BufferHandle(place.buffer))?, place.offset)),
                None => None,
            };
            let name = tensor.name();
            builder.add_tensor(&TensorSpec {
                type_: tensor.type_(),
                ne: tensor.ne(),
                nb: tensor.nb(),
                op: tensor.op(),
                op_params: tensor.op_params(),
                flags: tensor.flags(),
                name: &name,
                buffer: buffer.map(|(buffer, _)| buffer.memory.ggml()),
                data: buffer.map_or(0, |(buffer, offset)| buffer.memory.ggml().base() + offset as usize),
                src: entry.sources().map(|source| source.map(|source| source as usize)),
                view_src: entry.view_src().map(|viewed| viewed as usize),
                view_offs: tensor.view_offs(),
                // A node's users in other graphs of the guest are not on this wire: a backend must not fuse it away.
                use_count: Some(0),
            })?;
        }
        let mut graph = builder.finish(verified.nodes(), 0)?;
        let status = self.backend.graph_compute(&mut graph);
        self.backend.synchronize();
        let mut builder = graph.into_builder();
        // A buffer that is freed next must not live on in a graph.
        builder.clear();
        self.builder = Some(builder);
        Ok(status)
    }
}
