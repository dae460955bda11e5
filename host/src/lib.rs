//! `libggml-virtgpu-backend.so`: the APIR plugin that virglrenderer, or our own renderer, loads.
//!
//! The guest is hostile. Commands and graphs are copied to private memory before a byte is looked at; handles are tokens
//! of one context; every length is checked in 64 bits against the thing that it lies in; what a guest says about tensors and graphs reaches a
//! backend only as [`verify`] lets it through.
//!
//! | module | what |
//! |---|---|
//! | `plugin` | the three C symbols |
//! | [`context`] | the state of one context |
//! | [`handlers`] | what each command does |
//! | [`verify`] | checked tensors and graphs |
//! | [`graphs`] | verified graphs, built for the backend |
//! | [`memory`] | the guest's shared memory |
//! | [`liveness`] | the word that tells the guest that the host lives |
//! | [`handle`] | tokens |
//! | [`config`], [`limits`], [`log`], [`error`] | settings, limits, log lines, refusals |

pub mod config;
pub mod context;
pub mod error;
pub mod graphs;
pub mod handle;
pub mod handlers;
pub mod limits;
pub mod liveness;
pub mod log;
pub mod memory;
pub mod plugin;
pub mod verify;

#[rustfmt::skip]
mod generated;

#[cfg(test)]
mod mutants;
