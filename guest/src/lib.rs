//! libggml-virtgpu.so: a ggml backend whose device is the GPU of the host.
//!
//! | module | what |
//! |---|---|
//! | [`link`] | how commands and shared memory reach the host |
//! | [`session`] | one context on the host: typed commands, transfers, its loss |
//! | `record`, `graph` | ggml's tensors and graphs as they travel |
//! | `numbers` | the host's numbers of operations and types |
//! | `host_device` | what the host says about its device |
//! | `backend` | ggml's vtables, and the symbols that ggml looks for |
//! | `stats` | the counters that `APIR_STATS` asks for |
//! | `text` | what the host writes, as the program's log has it |

mod backend;
mod cache;
mod graph;
mod host_device;
pub mod link;
mod numbers;
mod record;
pub mod session;
mod stats;
mod text;

#[rustfmt::skip]
mod generated;
