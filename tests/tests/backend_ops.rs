//! ggml's own test-backend-ops through the pair, in a part that takes about a minute; `cargo xtask ops` runs all.

use std::time::Duration;

use apir_tests::Error;
use apir_tests::backend_ops::Cases;
use apir_tests::error::check;
use apir_tests::peers::{Dist, LlamaDir};
use apir_tests::server::Serve;

const LIMIT: Duration = Duration::from_secs(300);

/// Runs the operation's cases whose parameters match a pattern; all that the local CPU supports must pass.
fn passes(operation: &str, parameters: &str) -> Result<(), Error> {
    let (dist, llama) = (Dist::from_env()?, LlamaDir::from_env()?);
    let server = Serve::new(&dist, &llama.cpu_library()).start()?;
    let cases = Cases::run(&llama, &server, operation, Some(parameters), LIMIT)?;
    check(cases.passed > 0, || format!("no case ran: {cases:?}"))?;
    cases.check()
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn softmax() -> Result<(), Error> {
    passes("SOFT_MAX", ".")
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn writing_rows() -> Result<(), Error> {
    passes("SET_ROWS", ".")
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn normalisation() -> Result<(), Error> {
    passes("RMS_NORM", ".")
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn copies_between_types() -> Result<(), Error> {
    passes("CPY", ".")
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn sums() -> Result<(), Error> {
    passes("ADD", r"ne=\[(1|10|16),")
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn matrix_products() -> Result<(), Error> {
    passes("MUL_MAT", "type_a=[fbq].*,m=16,n=[1-9],k=256")
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn positions() -> Result<(), Error> {
    passes("ROPE", r"ne_a=\[(64|80|128),")
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn reading_rows() -> Result<(), Error> {
    passes("GET_ROWS", "type=(f32|f16|bf16|i32|q4_0|q8_0|q4_K|q6_K),n=256,m=5,r=4,be1=(1|7),")
}
