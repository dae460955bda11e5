//! The apir command line.
fn main() {}
