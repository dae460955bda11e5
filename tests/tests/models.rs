//! Models of many kinds through the pair: nothing that they ask for is refused, and all comes out as on the local CPU.

use std::time::Duration;

use apir_tests::Error;
use apir_tests::architectures::Architectures;
use apir_tests::embedding::Embedding;
use apir_tests::error::check;
use apir_tests::peers::{Dist, LlamaDir, Models};
use apir_tests::server::Serve;

/// Architectures of every kind that llama.cpp has: attention with and without windows, experts, recurrent and mixed ones, encoders, hyper-connections,
/// an indexer, a graph whose parts view another device's memory. `cargo xtask archs` runs all.
const PATTERN: &str =
    "^(llama|gemma3|qwen2moe|deepseek2|deepseek4|mamba2|qwen3next|jamba|lfm2|t5|dream|qwen4exp)$";
const COUNT: usize = 12;

const LIMIT: Duration = Duration::from_secs(300);

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn architectures_of_every_kind() -> Result<(), Error> {
    let (dist, llama) = (Dist::from_env()?, LlamaDir::from_env()?);
    let server = Serve::new(&dist, &llama.cpu_library()).start()?;
    let found = Architectures::run(&llama, &server, PATTERN, LIMIT)?;
    found.check()?;
    check(found.equal.len() >= COUNT && found.skipped.is_empty(), || format!("not all were run: {found:?}"))
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn sentence_embeddings() -> Result<(), Error> {
    let (dist, llama) = (Dist::from_env()?, LlamaDir::from_env()?);
    let server = Serve::new(&dist, &llama.cpu_library()).start()?;
    let request = Embedding::new(&llama, &Models::from_env()?.minilm());
    let (local, remote) = (request.run_local()?, request.run_remote(&server)?);
    check(local.starts_with("[[") && local.len() > 1000, || format!("no vectors: {local}"))?;
    check(remote == local, || format!("the vectors differ:\n--- remote\n{remote}\n--- local\n{local}"))
}
