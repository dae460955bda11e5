//! `libggml-virtgpu-backend.so`: the APIR plugin that virglrenderer, or our own renderer, loads.
//!
//! The guest is hostile. Commands and graphs are copied to private memory before a byte is looked at; handles are tokens
//! of one context; every length is checked in 64 bits against the thing that it lies in; what a guest says about tensors and graphs reaches a
//! backend only as [`verify`] lets it through.
//!
//! | module | what |
//! |---|---|
//! | `plugin` | the C symbols |
//! | [`context`] | the state of one context |
//! | [`handlers`] | what each command does |
//! | [`verify`] | checked tensors and graphs |
//! | [`graphs`] | verified graphs, built for the backend |
//! | [`memory`] | the guest's shared memory |
//! | [`budget`], [`threads`] | what the contexts of a process share |
//! | [`liveness`] | the word that tells the guest that the host lives |
//! | [`handle`] | tokens |
//! | [`warm`] | graphs that fill a driver's cache of shaders before any guest |
//! | [`config`], [`limits`], [`log`], [`error`] | settings, limits, log lines, refusals |

pub mod budget;
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
pub mod threads;
pub mod verify;
pub mod warm;

#[rustfmt::skip]
mod generated;

#[cfg(test)]
mod mutants;
