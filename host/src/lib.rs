//! libggml-virtgpu-backend.so: the APIR plugin that virglrenderer loads.
