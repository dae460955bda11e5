//! libggml-virtgpu.so: a ggml backend whose device is the GPU of the host.
//!
//! | module | what |
//! |---|---|
//! | [`link`] | how commands and shared memory reach the host |
//! | [`session`] | one context on the host: typed commands, transfers, its loss |

pub mod link;
pub mod session;

#[rustfmt::skip]
mod generated;
