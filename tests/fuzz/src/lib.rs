//! What the fuzz targets share: inputs, how they are changed, and what is run on them.
//!
//! | target | input | what runs |
//! |---|---|---|
//! | decoder | a command's number and bytes | decode, encode, decode again |
//! | graph | a graph blob | the host's reader and verifier, over buffers that are only sizes |
//! | session | a [`session::Session`] | two guests against the plugin in this process, with the real libggml-cpu |
//! | compute | [`compute::Input`]: a graph blob, or a recipe for a random graph and changes to it | verified and computed by the plugin |
//! | mutants | a [`recorded`] graph's number, a part of it and changes to it | the same |
//! | socket | a [`socket::Input`] | frames of both sides, and a renderer's context |
//! | race | a [`race::Race`] | a graph computed while a second thread of the guest changes shared memory |
//! | differential | a recipe for a random graph | computed by ggml alone and by the plugin: the same bytes |
//!
//! Session, compute, mutants, race and differential run with 1, 2 and 4 [`threads`] of the CPU backend, whose work memory lies before a guard.
//!
//! Any bytes are an input of every target. The targets that compute find libggml-cpu.so in the folder that `APIR_LLAMA_DIR` names;
//! `cargo xtask fuzz` and `cargo xtask test` set it.

pub mod compute;
pub mod decoder;
pub mod differential;
pub mod generate;
pub mod graph;
pub mod guest;
pub mod input;
pub mod local;
pub mod mutate;
pub mod ops;
pub mod race;
pub mod recorded;
pub mod seeds;

pub mod session;
pub mod socket;
pub mod threads;
