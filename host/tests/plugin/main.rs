//! The plugin under a renderer of the test's own, driving the real libggml-cpu.
//!
//! Tests whose names start with `s` and a number are the rows of hostile input that they stand for; what a missing check would end runs in a
//! process of its own. The rows but those in `in_process`, `resources` and `blocks` run again in worker processes, by tests/tests/rows. `APIR_LLAMA_DIR` names the folder that has libggml-cpu.so; `cargo xtask test` sets it.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test's helpers fail the test")]

mod basics;
mod blocks;
mod graphs;
mod guard;
mod harness;
mod in_process;
mod indices;
mod kernels;
mod lifecycle;
mod limits;
mod liveness;
mod overlaps;
mod refusals;
mod resources;
mod scene;
mod transfers;
