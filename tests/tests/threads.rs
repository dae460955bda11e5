//! Calls from many threads of one program.

use apir_tests::Error;
use apir_tests::ggml_program::{GgmlProgram, event};
use apir_tests::peers::{Dist, LlamaDir};
use apir_tests::server::Serve;

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn eight_threads_each_get_their_own_replies() -> Result<(), Error> {
    let (dist, llama) = (Dist::from_env()?, LlamaDir::from_env()?);
    let server = Serve::new(&dist, &llama.cpu_library()).start()?;
    let program = GgmlProgram::new(env!("CARGO_BIN_EXE_ggml-program"), llama.path(), &dist);
    // About ten calls a round.
    let output = program.envs(server.guest_env()).run(&["threads", "--threads", "8", "--rounds", "1000"])?;
    event(&output, "threads")?;
    Ok(())
}
