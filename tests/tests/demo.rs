//! The demo's promise: the tokens of the local CPU, with every layer on the remote device.

use std::path::Path;

use apir_tests::Error;
use apir_tests::completion::Request;
use apir_tests::error::check;
use apir_tests::peers::{Dist, LlamaDir, Models};
use apir_tests::server::Serve;

const TOKENS: u32 = 32;

fn same_tokens(model: &Path, plugin: &Path) -> Result<(), Error> {
    let (dist, llama) = (Dist::from_env()?, LlamaDir::from_env()?);
    let server = Serve::new(&dist, &llama.cpu_library()).plugin(plugin).start()?;
    let request = Request::new(&llama, model, TOKENS);
    let reference = request.run_local()?;
    let (remote, stats) = request.run_remote(&server)?;
    remote.check_all_remote()?;
    check(remote.text == reference.text, || {
        format!("the texts differ:\n--- remote\n{}\n--- local\n{}", remote.text, reference.text)
    })?;
    check(remote.steps == reference.steps, || "the texts have different lengths".to_owned())?;
    check(stats.graph_computes >= u64::from(remote.steps), || format!("too few graphs: {stats:?}"))?;
    check(stats.transport == "socket" && stats.device == "[virtgpu] CPU", || format!("{stats:?}"))
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn small_model_with_our_plugin() -> Result<(), Error> {
    same_tokens(&Models::from_env()?.tiny(), &Dist::from_env()?.plugin())
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn real_model_with_our_plugin() -> Result<(), Error> {
    same_tokens(&Models::from_env()?.smollm2(), &Dist::from_env()?.plugin())
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn small_model_with_upstreams_plugin() -> Result<(), Error> {
    same_tokens(&Models::from_env()?.tiny(), &LlamaDir::from_env()?.upstream_plugin()?)
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn real_model_with_upstreams_plugin() -> Result<(), Error> {
    same_tokens(&Models::from_env()?.smollm2(), &LlamaDir::from_env()?.upstream_plugin()?)
}
