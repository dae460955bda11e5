//! ggml's CPU backend without the plugin.

use crate::generate::{Case, SIZES};
use apir_ggml::library::{Backend, Buffer};
use apir_ggml::{GgmlLibrary, GraphBuilder, Status, TensorSpec, TypeInfo, abi};
use std::path::Path;

/// The backend and buffers of [`SIZES`].
#[derive(Debug)]
pub struct Local {
    backend: Backend,
    buffers: [Buffer; SIZES.len()],
    builder: Option<GraphBuilder>,
}

impl Local {
    /// Opens a ggml library.
    ///
    /// # Panics
    /// When it does not work.
    #[must_use]
    pub fn open(library: &Path) -> Self {
        apir_guard::load();
        // SAFETY: the library is the one under test, and only graphs that obey ggml's rules are computed.
        let library = unsafe { GgmlLibrary::open(library, None) }.expect("a ggml library");
        let device = library.registry().device(0).expect("a device");
        let backend = device.init_backend().expect("a backend");
        backend.set_n_threads(1);
        let buffer_type = device.buffer_type().expect("a buffer type");
        let buffers = SIZES.map(|size| buffer_type.alloc_buffer(size).expect("a buffer"));
        Self { backend, buffers, builder: None }
    }

    /// The contents of the buffers after a graph.
    ///
    /// # Panics
    /// When ggml fails.
    pub fn compute(&mut self, case: &Case) -> [Vec<u8>; SIZES.len()] {
        for (buffer, bytes) in self.buffers.iter().zip(&case.contents) {
            buffer.set_tensor(&whole(buffer), bytes, 0).expect("a write of a whole buffer");
        }
        let mut builder = self.builder.take().unwrap_or_default();
        for tensor in &case.graph.tensors {
            let place =
                |id: u64| (id != 0).then(|| case.graph.tensors.iter().position(|other| other.id == id));
            let buffer = &self.buffers[tensor.buffer.0 as usize - 1];
            let spec = TensorSpec {
                type_: tensor.type_,
                ne: tensor.ne.map(i64::from),
                nb: tensor.nb.map(u64::from),
                op: tensor.op,
                op_params: tensor.op_params,
                flags: tensor.flags,
                buffer: Some(buffer),
                data: buffer.base() + tensor.data as usize,
                src: tensor.src.map(|id| place(id).flatten()),
                view_src: place(tensor.view_src).flatten(),
                view_offs: tensor.view_offs,
                // As in the plugin: the result of a node that is fused with the next is not written.
                use_count: Some(0),
                ..TensorSpec::default()
            };
            builder.add_tensor(&spec).expect("a tensor of an honest graph");
        }
        let nodes: Vec<_> = case.graph.nodes.iter().map(|id| *id as usize - 1).collect();
        let mut graph = builder.finish(&nodes, 0).expect("an honest graph");
        let status = self.backend.graph_compute(&mut graph);
        self.backend.synchronize();
        assert_eq!(status, Status::Success, "ggml fails");
        self.builder = Some(graph.into_builder());
        let read = |buffer: &Buffer| {
            let mut bytes = vec![0; buffer.size()];
            buffer.get_tensor(&whole(buffer), &mut bytes, 0).expect("a read of a whole buffer");
            bytes
        };
        self.buffers.each_ref().map(read)
    }
}

/// All bytes of a buffer as one tensor.
fn whole(buffer: &Buffer) -> abi::Tensor {
    let n = buffer.size() as i64;
    let info = TypeInfo::by_name("i8").expect("the type of bytes");
    let nb = info.dense_strides([n, 1, 1, 1]).expect("strides of bytes");
    abi::Tensor {
        type_: info.number,
        ne: [n, 1, 1, 1],
        nb,
        data: std::ptr::with_exposed_provenance_mut(buffer.base()),
        ..abi::Tensor::default()
    }
}
