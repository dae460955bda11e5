//! `cargo xtask demo`: real inference on one machine, and proof that it is the remote device that computes.
//!
//! The program runs beside the server, or with `--vm` in a virtual machine whose graphics device leads to our renderer.

use std::path::PathBuf;

use apir_tests::completion::{Completion, Request, Stats};
use apir_tests::peers::{Dist, LlamaDir, registration};
use apir_tests::remote::Remote;
use apir_tests::server::Serve;
use apir_tests::vm::{Boot, Renderer, VmDir};
use serde::Serialize;

use crate::cache::Cache;
use crate::dist::Workspace;
use crate::error::Error;
use crate::models;
use crate::peers::{Llama, Stage};
use crate::ui::Ui;
use crate::vm;

/// Tokens of the short run; the long run minus it is what a token costs in the steady state.
const SHORT: u32 = 8;

/// Tokens of the long run.
const TOKENS: u32 = 32;

/// Tokens of the long run in a machine that may be emulated.
const VM_TOKENS: u32 = 16;

/// Options of the demo.
#[derive(clap::Args)]
pub struct Options {
    /// Run llama.cpp in a virtual machine: stock QEMU and Debian's kernel, with our renderer behind its graphics device
    #[arg(long)]
    vm: bool,
    /// Print the result as one line of JSON at the end
    #[arg(long)]
    json: bool,
    /// How many tokens to generate [default: 32, in a virtual machine 16]
    #[arg(long, value_parser = clap::value_parser!(u32).range(i64::from(SHORT) + 1..))]
    tokens: Option<u32>,
    /// The host plugin to use instead of ours
    #[arg(long)]
    plugin: Option<PathBuf>,
    /// The model to use instead of SmolLM2-135M-Instruct
    #[arg(long)]
    model: Option<PathBuf>,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    text: String,
    reference_text: String,
    identical: bool,
    tokens_per_s: f64,
    reference_tokens_per_s: f64,
    device: String,
    transport: String,
    calls_per_token: f64,
    bytes_per_token: f64,
    #[serde(skip)]
    placement: String,
}

/// Runs it; `false` when the two texts differ.
pub fn run(workspace: &Workspace, ui: &Ui, options: &Options) -> Result<bool, Error> {
    if let Some(path) = [&options.plugin, &options.model].into_iter().flatten().find(|path| !path.is_file()) {
        return Err(Error::Missing { path: path.clone(), hint: "name a file that is there".to_owned() });
    }
    let peers = peers(ui, options)?;
    let dist = Dist::at(&workspace.build_dist(ui)?);
    let report = compare(ui, &peers, &dist, options)?;
    print(ui, &report);
    if options.json {
        ui.result(&serde_json::to_string(&report).map_err(|error| Error::Check(error.to_string()))?);
    }
    Ok(report.identical)
}

/// What the demo needs of others.
struct Peers {
    llama: LlamaDir,
    model: PathBuf,
    vm: Option<VmDir>,
}

fn peers(ui: &Ui, options: &Options) -> Result<Peers, Error> {
    let cache = Cache::open()?;
    let _lock = cache.lock(ui)?;
    let llama = Llama::find(&cache)?;
    let model = match &options.model {
        Some(model) => model.clone(),
        None => models::smollm2(&cache, ui)?,
    };
    llama.build(&cache, ui, Stage::Libraries)?;
    llama.build(&cache, ui, Stage::Programs)?;
    let vm = if options.vm { Some(vm::ensure(&cache, ui)?) } else { None };
    Ok(Peers { llama: LlamaDir::at(&llama.bin), model, vm })
}

fn compare(ui: &Ui, peers: &Peers, dist: &Dist, options: &Options) -> Result<Report, Error> {
    let tokens = options.tokens.unwrap_or(if options.vm { VM_TOKENS } else { TOKENS });
    let request = Request::new(&peers.llama, &peers.model, tokens);
    let short = Request::new(&peers.llama, &peers.model, SHORT);
    ui.line(&format!("generating {tokens} tokens on the local CPU"));
    let reference = request.run_local()?;
    // The library that llama.cpp itself chose, so that both sides compute with the same code.
    let library = reference.cpu_library.clone().unwrap_or_else(|| peers.llama.cpu_library());
    if !library.is_file() {
        let hint = "this llama.cpp must be built with shared libraries (BUILD_SHARED_LIBS=ON)".to_owned();
        return Err(Error::Missing { path: library, hint });
    }
    match &peers.vm {
        Some(dir) => {
            let mut renderer = Renderer::new(dist, &library);
            if let Some(plugin) = &options.plugin {
                renderer = renderer.plugin(plugin);
            }
            if let Some(symbol) = registration(&library)? {
                renderer = renderer.registration(symbol);
            }
            let accelerator = dir.accelerator()?;
            ui.line(&format!("booting a virtual machine, run by {}", accelerator.name()));
            let guest = Boot::new(dir, accelerator).renderer(renderer).start()?;
            let report = generate(ui, &request, &short, &reference, &guest.loading(&dist.guest()))?;
            guest.stop()?;
            Ok(report)
        }
        None => {
            let mut serve = Serve::new(dist, &library);
            if let Some(plugin) = &options.plugin {
                serve = serve.plugin(plugin);
            }
            if let Some(symbol) = registration(&library)? {
                serve = serve.registration(symbol);
            }
            generate(ui, &request, &short, &reference, &serve.start()?)
        }
    }
}

fn generate(
    ui: &Ui,
    request: &Request,
    short: &Request,
    reference: &Completion,
    remote: &impl Remote,
) -> Result<Report, Error> {
    ui.line(&format!("generating {} tokens on the remote device", request.tokens));
    let (completion, stats) = request.run_remote(remote)?;
    completion.check_all_remote()?;
    let (short, short_stats) = short.run_remote(remote)?;
    report(reference, (&completion, &stats), (&short, &short_stats))
}

fn report(
    reference: &Completion,
    (remote, stats): (&Completion, &Stats),
    (short, short_stats): (&Completion, &Stats),
) -> Result<Report, Error> {
    let steps = remote.steps.checked_sub(short.steps).filter(|&steps| steps > 0).ok_or_else(|| {
        Error::Check(format!(
            "the model ended its text after {} tokens: too few to count the cost of one",
            remote.steps
        ))
    })?;
    let per_token = |long: u64, short: u64| long.saturating_sub(short) as f64 / f64::from(steps);
    Ok(Report {
        identical: remote.text == reference.text,
        text: remote.text.clone(),
        reference_text: reference.text.clone(),
        tokens_per_s: remote.tokens_per_s,
        reference_tokens_per_s: reference.tokens_per_s,
        device: stats.device.clone(),
        transport: stats.transport.clone(),
        calls_per_token: per_token(stats.calls, short_stats.calls),
        bytes_per_token: per_token(stats.bytes, short_stats.bytes),
        placement: placement(remote),
    })
}

/// Where the layers and the weights are, as llama.cpp says.
fn placement(remote: &Completion) -> String {
    let (on_device, all) = remote.offloaded.unwrap_or_default();
    let buffers =
        remote.model_buffers.iter().map(|buffer| format!("{:.1} MiB on {}", buffer.mib, buffer.name));
    format!(
        "{on_device} of {all} layers on the remote device; weights: {}",
        buffers.collect::<Vec<_>>().join(", ")
    )
}

fn print(ui: &Ui, report: &Report) {
    ui.result(&format!("--- local CPU ---\n{}\n", report.reference_text));
    ui.result(&format!("--- {} over {} ---\n{}\n", report.device, report.transport, report.text));
    ui.result(match report.identical {
        true => "identical: yes",
        false => "identical: NO",
    });
    ui.result(&format!("placement: {}", report.placement));
    ui.result(&format!(
        "tokens/s:  {:.1} remote, {:.1} local",
        report.tokens_per_s, report.reference_tokens_per_s
    ));
    ui.result(&format!(
        "per token: {:.1} calls, {:.0} bytes",
        report.calls_per_token, report.bytes_per_token
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn completion(steps: u32, text: &str) -> Completion {
        Completion {
            text: text.to_owned(),
            tokens_per_s: 1.0,
            steps,
            offloaded: None,
            device: None,
            model_buffers: Vec::new(),
            cpu_library: None,
        }
    }

    fn stats(calls: u64, bytes: u64) -> Stats {
        Stats { device: "d".to_owned(), transport: "socket".to_owned(), calls, bytes, graph_computes: 0 }
    }

    #[test]
    fn the_cost_of_a_token_leaves_the_start_out() {
        let (long, short) = (completion(31, "ab"), completion(7, "a"));
        let report =
            report(&completion(31, "ab"), (&long, &stats(124, 4_800)), (&short, &stats(100, 2_400))).unwrap();
        assert!(report.identical);
        assert_eq!((report.calls_per_token, report.bytes_per_token), (1.0, 100.0));
    }

    #[test]
    fn a_text_too_short_to_measure_is_an_error() {
        let run = completion(7, "a");
        assert!(report(&run, (&run, &stats(1, 1)), (&run, &stats(1, 1))).is_err());
    }
}
