//! Developer commands: cargo xtask demo | test | codegen | bench.
fn main() {}
