//! The rows of hostile input against real worker processes, beside a context that must not notice.
//!
//! The rows are those of the plugin's own tests, which send them within one process; here each guest is a client of `apir serve`. What means another
//! thing there is in `workers`.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, reason = "a test's helpers fail the test")]

mod harness;
mod workers;

#[path = "../../../host/tests/plugin/graphs.rs"]
mod graphs;
#[path = "../../../host/tests/plugin/indices.rs"]
mod indices;
#[path = "../../../host/tests/plugin/kernels.rs"]
mod kernels;
#[path = "../../../host/tests/plugin/lifecycle.rs"]
mod lifecycle;
#[path = "../../../host/tests/plugin/scene.rs"]
mod scene;
#[path = "../../../host/tests/plugin/transfers.rs"]
mod transfers;
