//! Measures the guest's session.
fn main() {}
