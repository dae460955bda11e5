//! The device's answers on operations, kept by content.
#![forbid(unsafe_code)]

use apir_ggml::TensorRef;
use apir_ggml::library::Device;
use std::collections::HashMap;

/// Most answers kept; a model needs about a hundred.
const MAX_ANSWERS: usize = 4096;

/// What the device said about a node depends on its operation, parameters, types, dimensions and strides, and those of its sources.
#[derive(Debug, Default)]
pub(crate) struct SupportCache {
    answers: HashMap<Vec<u8>, bool>,
    key: Vec<u8>,
}

impl SupportCache {
    /// Whether the device can compute a node that has passed the rules.
    pub(crate) fn ask(&mut self, device: &Device, node: TensorRef<'_>) -> bool {
        self.key.clear();
        self.key.extend(node.op().to_le_bytes());
        self.key.extend(node.op_params().iter().flat_map(|word| word.to_le_bytes()));
        let sources = node.sources();
        for (slot, tensor) in std::iter::once(Some(node)).chain(sources).enumerate() {
            let Some(tensor) = tensor else { continue };
            self.key.push(slot as u8);
            self.key.push(u8::from(tensor.view_src().is_some()));
            self.key.extend(tensor.type_number().to_le_bytes());
            self.key.extend(tensor.shape().iter().flat_map(|elements| elements.to_le_bytes()));
            self.key.extend(tensor.strides().iter().flat_map(|stride| stride.to_le_bytes()));
        }
        if let Some(answer) = self.answers.get(&self.key) {
            return *answer;
        }
        let answer = device.supports_op(node);
        if self.answers.len() == MAX_ANSWERS {
            self.answers.clear();
        }
        self.answers.insert(self.key.clone(), answer);
        answer
    }
}
