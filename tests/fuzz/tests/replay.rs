//! Every seed, and every input that fuzzing has found here, through its target: on stable, without libFuzzer.
#![forbid(unsafe_code)]

use std::path::Path;

/// Runs the inputs of a target; how many there were.
fn replay(target: &str, run: impl Fn(&[u8])) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut count = 0;
    for folder in ["seeds", "corpus"] {
        let Ok(files) = std::fs::read_dir(root.join(folder).join(target)) else { continue };
        for file in files {
            let path = file.unwrap().path();
            // Seen with --nocapture, when an input ends the process.
            eprintln!("{}", path.display());
            run(&std::fs::read(&path).unwrap());
            count += 1;
        }
    }
    assert!(count > 0, "{target} has no seeds");
}

#[test]
fn decoder() {
    replay("decoder", apir_fuzz::decoder::run);
}

#[test]
fn graph() {
    replay("graph", |input| {
        let _ = apir_fuzz::graph::verify(input);
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn session() {
    replay("session", apir_fuzz::session::run);
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn compute() {
    replay("compute", apir_fuzz::compute::run);
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn mutants() {
    replay("mutants", apir_fuzz::recorded::run);
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn socket() {
    replay("socket", apir_fuzz::socket::run);
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn race() {
    replay("race", apir_fuzz::race::run);
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn differential() {
    replay("differential", apir_fuzz::differential::run);
}
