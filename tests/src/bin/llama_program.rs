//! A llama.cpp program for the tests, of whatever release the folder holds: continues a fixed prompt and prints the tokens.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use apir_tests::Error;
use apir_tests::llama::Llama;
use apir_tests::peers;
use clap::Parser;
use serde_json::json;

/// The prompt.
const PROMPT: [i32; 6] = [1, 40, 17, 93, 200, 64];
/// How many tokens follow.
const COUNT: usize = 12;

#[derive(Parser)]
struct Arguments {
    /// Folder of the release's libraries
    #[arg(long)]
    release: PathBuf,
    /// The backend library under test; the processor alone without
    #[arg(long)]
    guest: Option<PathBuf>,
    /// The model
    #[arg(long)]
    model: PathBuf,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("llama-program: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Error> {
    let cpu = arguments.release.join("libggml-cpu.so");
    // Where the CPU backend is linked into ggml, it is there already.
    let loaded = peers::registration(&cpu)?.is_none().then_some(&*cpu);
    let backends: Vec<&Path> = arguments.guest.as_deref().into_iter().chain(loaded).collect();
    let llama = Llama::load(&arguments.release, &backends, &arguments.model)?;
    let mut logits = llama.decode(&mut PROMPT.clone())?;
    let (mut tokens, mut best) = (Vec::new(), Vec::new());
    for _ in 0..COUNT {
        let next = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
        let (token, logit) = next.ok_or_else(|| Error::Unexpected("no logits".to_owned()))?;
        tokens.push(i32::try_from(token).unwrap_or(i32::MAX));
        best.push(*logit);
        logits = llama.decode(&mut [tokens[tokens.len() - 1]])?;
    }
    println!("{}", json!({ "event": "tokens", "tokens": tokens, "logits": best }));
    Ok(())
}
