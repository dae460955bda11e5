//! ggml C ABI in every supported version, and loading of ggml libraries.
