//! A node outside any graph.
#![forbid(unsafe_code)]

use crate::context::Context;
use crate::error::CommandError;
use crate::verify::tensor::CheckedTensor;
use apir_ggml::{TensorRef, TensorSpec};
use apir_protocol::tensor::{InlineTensor, MAX_SOURCES};

impl Context {
    /// Calls `ask` with the node, its sources and what it views, none of them in a buffer.
    pub(super) fn with_inline<T>(
        &mut self,
        inline: &InlineTensor,
        ask: impl FnOnce(&Self, TensorRef<'_>) -> Result<T, CommandError>,
    ) -> Result<T, CommandError> {
        let node = CheckedTensor::from_raw(&inline.tensor, self.ops())?;
        let mut others = Vec::with_capacity(inline.sources.len() + 1);
        for raw in inline.sources.iter().chain(&inline.view_src) {
            others.push(CheckedTensor::from_raw(raw, self.ops())?);
        }
        // The node comes first, the sources behind it, what it views last.
        let mut sources = [None; MAX_SOURCES];
        for (index, source) in sources.iter_mut().enumerate().take(inline.sources.len()) {
            *source = Some(index + 1);
        }
        let view_src = inline.view_src.map(|_| inline.sources.len() + 1);
        let mut builder = self.builder.take().unwrap_or_default();
        builder.clear();
        builder.add_tensor(&TensorSpec { src: sources, view_src, ..spec(&node) })?;
        for other in &others {
            builder.add_tensor(&spec(other))?;
        }
        let graph = builder.finish(&[0], 0)?;
        let answer = graph.tensor(0).ok_or(CommandError::NoHandle).and_then(|node| ask(self, node));
        self.builder = Some(graph.into_builder());
        answer
    }
}

fn spec(tensor: &CheckedTensor) -> TensorSpec<'_> {
    TensorSpec {
        type_: tensor.type_(),
        ne: tensor.ne(),
        nb: tensor.nb(),
        op: tensor.op(),
        op_params: tensor.op_params(),
        flags: tensor.flags(),
        view_offs: tensor.view_offs(),
        ..TensorSpec::default()
    }
}
