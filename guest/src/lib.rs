//! libggml-virtgpu.so: a ggml backend whose device is the GPU of the host.

pub mod link;
