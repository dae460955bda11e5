//! Every ggml release on every other, for `cargo xtask versions`: row T27 of the cases.

use apir_tests::{Error, releases};

/// A line of the table.
fn equal(what: &str, guest: &str, host: &str) -> Result<(), Error> {
    println!("note: guest {guest:<6}  host {host:<6}  {what:<10}  equal");
    Ok(())
}

/// A test of each kind for a guest's release on a host's.
macro_rules! cells {
    ($($name:ident: $guest:literal on $host:literal;)*) => {$(
        mod $name {
            use super::*;

            #[test]
            #[ignore = "cargo xtask versions runs it"]
            fn t27_operations() -> Result<(), Error> {
                releases::operations(env!("CARGO_BIN_EXE_ggml-program"), $guest, $host)?;
                equal("operations", $guest, $host)
            }

            #[test]
            #[ignore = "cargo xtask versions runs it"]
            fn t27_model() -> Result<(), Error> {
                releases::model(env!("CARGO_BIN_EXE_llama-program"), $guest, $host)?;
                equal("model", $guest, $host)
            }
        }
    )*};
}

cells! {
    guest_0_13_1_host_0_13_1: "0.13.1" on "0.13.1";
    guest_0_13_1_host_0_25_1: "0.13.1" on "0.25.1";
    guest_0_13_1_host_0_26_0: "0.13.1" on "0.26.0";
    guest_0_13_1_host_0_27_0: "0.13.1" on "0.27.0";
    guest_0_25_1_host_0_13_1: "0.25.1" on "0.13.1";
    guest_0_25_1_host_0_25_1: "0.25.1" on "0.25.1";
    guest_0_25_1_host_0_26_0: "0.25.1" on "0.26.0";
    guest_0_25_1_host_0_27_0: "0.25.1" on "0.27.0";
    guest_0_26_0_host_0_13_1: "0.26.0" on "0.13.1";
    guest_0_26_0_host_0_25_1: "0.26.0" on "0.25.1";
    guest_0_26_0_host_0_26_0: "0.26.0" on "0.26.0";
    guest_0_26_0_host_0_27_0: "0.26.0" on "0.27.0";
    guest_0_27_0_host_0_13_1: "0.27.0" on "0.13.1";
    guest_0_27_0_host_0_25_1: "0.27.0" on "0.25.1";
    guest_0_27_0_host_0_26_0: "0.27.0" on "0.26.0";
    guest_0_27_0_host_0_27_0: "0.27.0" on "0.27.0";
}
