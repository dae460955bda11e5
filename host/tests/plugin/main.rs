//! The plugin under a renderer of the test's own, driving the real libggml-cpu.
//!
//! Tests whose names start with `s` and a number are the rows of hostile input that they stand for; what a missing check would end runs in a
//! process of its own. `APIR_LLAMA_DIR` names the folder that has libggml-cpu.so; `cargo xtask test` sets it.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test's helpers fail the test")]

mod basics;
mod graphs;
mod harness;
mod indices;
mod kernels;
mod lifecycle;
mod limits;
mod transfers;
