//! A node outside any graph.
#![forbid(unsafe_code)]

use crate::context::Context;
use crate::error::CommandError;
use crate::verify::VerifyError;
use crate::verify::graph::check_part;
use crate::verify::node::{Node, Slot};
use crate::verify::tensor::CheckedTensor;
use apir_ggml::{OpKind, TensorRef, TensorSpec};
use apir_protocol::handle::BufferTypeHandle;
use apir_protocol::tensor::{InlineTensor, MAX_SOURCES};

/// A node and what it is made of, as far as the wire carries it, none of them in a buffer.
struct Inline {
    node: CheckedTensor,
    sources: Vec<CheckedTensor>,
    view_src: Option<CheckedTensor>,
    /// Sources behind the first absent one, which are not carried.
    unknown: [bool; MAX_SOURCES],
}

impl Context {
    /// Whether the device can compute the node: false for one that breaks a rule, an error for one that is none at all.
    pub(super) fn supports(&mut self, inline: &InlineTensor) -> Result<bool, CommandError> {
        let inline = self.read_inline(inline)?;
        let part = inline.view_src.as_ref().map_or(Ok(()), |viewed| check_part(&inline.node, viewed));
        match part.and_then(|()| self.rules.check(&inline.node_for_rules(self))) {
            Ok(()) => {}
            Err(
                error @ (VerifyError::Rule { .. }
                | VerifyError::NoRule { .. }
                | VerifyError::Release { .. }
                | VerifyError::View { .. }
                | VerifyError::Misaligned { .. }),
            ) => {
                tracing::debug!("context {}: not supported: {error}", self.id);
                return Ok(false);
            }
            Err(error) => return Err(error.into()),
        }
        self.with_inline(&inline, |context, node| Ok(context.support.ask(&context.device, node)))
    }

    /// Bytes to set aside for the tensor. One that breaks a rule is never computed: it takes what it spans.
    pub(super) fn alloc_size(
        &mut self,
        handle: BufferTypeHandle,
        inline: &InlineTensor,
    ) -> Result<u64, CommandError> {
        let buffer_type = self.objects.buffer_type(handle)?.clone();
        let inline = self.read_inline(inline)?;
        let computed = self.rules.kind(inline.node.op()) == Some(OpKind::Compute);
        if computed && self.rules.check(&inline.node_for_rules(self)).is_err() {
            return Ok(inline.node.extent());
        }
        self.with_inline(&inline, |_, tensor| Ok(buffer_type.alloc_size(tensor)?))
    }

    fn read_inline(&self, inline: &InlineTensor) -> Result<Inline, CommandError> {
        let check = |raw| CheckedTensor::from_raw(raw, &self.rules);
        let mut node = check(&inline.tensor)?;
        self.rules.complete(&mut node);
        let carried = inline.sources.len();
        let mut read = Inline {
            node,
            sources: inline.sources.iter().map(check).collect::<Result<_, _>>()?,
            view_src: inline.view_src.as_ref().map(check).transpose()?,
            unknown: std::array::from_fn(|slot| slot > carried && inline.tensor.has_source[slot]),
        };
        let params = self.rules.capped(&read.node_for_rules(self));
        read.node.set_params(params);
        Ok(read)
    }

    /// Calls `ask` with the node as ggml knows it.
    fn with_inline<T>(
        &mut self,
        inline: &Inline,
        ask: impl FnOnce(&mut Self, TensorRef<'_>) -> Result<T, CommandError>,
    ) -> Result<T, CommandError> {
        // The node comes first, the sources behind it, what it views last.
        let count = inline.sources.len();
        let src = std::array::from_fn(|slot| (slot < count).then_some(slot + 1));
        let view_src = inline.view_src.as_ref().map(|_| count + 1);
        let mut builder = self.builder.take().unwrap_or_default();
        builder.clear();
        builder.add_tensor(&TensorSpec { src, view_src, ..spec(&inline.node) })?;
        for other in inline.sources.iter().chain(&inline.view_src) {
            builder.add_tensor(&spec(other))?;
        }
        let graph = builder.finish(&[0], 0)?;
        let answer = graph.tensor(0).ok_or(CommandError::NoHandle).and_then(|node| ask(self, node));
        self.builder = Some(graph.into_builder());
        answer
    }
}

impl Inline {
    fn node_for_rules(&self, context: &Context) -> Node<'_> {
        Node {
            d: &self.node,
            slots: std::array::from_fn(|slot| match self.sources.get(slot) {
                Some(source) => Slot::Known(source),
                None if self.unknown[slot] => Slot::Unknown,
                None => Slot::Absent,
            }),
            view: self.view_src.as_ref(),
            // The wire does not tell a cast, which is its own second source, from a copy over a view.
            cast: self.view_src.is_none(),
            probe: true,
            target: context.rules.target(),
        }
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
