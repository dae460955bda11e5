//! What a guest is told: why a command is refused, and what numbers mean; row T27 of the cases.

use crate::harness::*;
use apir_protocol::constants::{FEATURE_NAMES, FEATURE_REASONS};
use apir_protocol::messages::*;

/// The code and the reason of a graph that names an operation which no ggml has.
fn refused(guest: &mut Guest) -> (u32, Vec<u8>) {
    let buffer = guest.buffer(256);
    let tensors = [row(1, buffer, 0, 4), node(2, buffer, 64, 4, 9999, &[1])];
    let mut graph = vec![0; apir_protocol::graph::graph_size(1, 2) as usize];
    apir_protocol::graph::encode_graph(&[2], &tensors, &mut graph).unwrap();
    let size = graph.len() as u64;
    let request = BackendGraphComputeRequest { res_id: guest.blob(&graph), size };
    guest.raw(22, &Guest::encode(&request))
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn e6_a_refusal_says_why_to_a_guest_that_reads_it_and_to_no_other() {
    let mut guest = Guest::start();
    assert_eq!(refused(&mut guest), (1, Vec::new()), "upstream's guests find no more than a code");
    guest.call(&HelloRequest { features: FEATURE_REASONS });
    let (code, reply) = refused(&mut guest);
    let reason = Guest::reason(&reply);
    assert!(code == 1 && reason.contains("operation 9999"), "{reason}");
    let (code, reply) = guest.raw(4711, &[]);
    assert_eq!((code, Guest::reason(&reply).as_str()), (6, "no command has the number 4711"));
    let (_, reply) = guest.raw(20, &[0; 4]);
    assert!(Guest::reason(&reply).starts_with("request: "), "a decoder's words");
    guest.call(&HelloRequest { features: 0 });
    assert_eq!(refused(&mut guest), (1, Vec::new()));
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t27_a_host_tells_what_its_numbers_mean() {
    let guest = Guest::start();
    let told = guest.call(&NamesRequest { version: "0.13.1".to_owned() });
    assert_eq!(told.ops.get(OP_CPY as usize).map(String::as_str), Some("CPY"));
    assert_eq!((told.ops.len(), told.unary[10].as_str(), told.glu[2].as_str()), (101, "SILU", "SWIGLU"));
    assert_eq!((told.types[0].as_str(), told.types[8].as_str()), ("f32", "q8_0"));
    assert!(told.version.starts_with("0."), "{}", told.version);
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t27_a_guest_that_asks_for_no_names_gets_no_device_of_an_older_ggml() {
    const NAME: &str = "refusals::t27_a_guest_that_asks_for_no_names_gets_no_device_of_an_older_ggml";
    // In a process of its own: a process has one libggml-base.
    in_child(NAME, || {
        let releases =
            std::env::var("APIR_GGML_RELEASES").expect("APIR_GGML_RELEASES must name ggml's releases");
        let library = format!("{releases}/0.13.1/libggml-cpu.so");
        let guest = Guest::configured(&library, Some("ggml_backend_cpu_reg"));
        assert_eq!(guest.initialize(), 6);
        guest.call(&HelloRequest { features: FEATURE_REASONS });
        for number in [0, 1] {
            let (code, reply) = guest.raw(number, &[]);
            let reason = Guest::reason(&reply);
            assert!(code == 1 && reason.contains("ggml 0.13.1"), "{reason}");
        }
        guest.call(&HelloRequest { features: FEATURE_NAMES });
        assert_eq!(guest.call(&NamesRequest { version: "0.26.0".to_owned() }).ops.len(), 96);
        guest.assert_alive();
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t27_a_guest_of_protocol_0_1_that_asks_for_no_names_gets_no_device() {
    for (protocol, refused) in [("0.1", true), ("0.2", false)] {
        let guest = Guest::start_with(&[("apir.guest_protocol", protocol)]);
        guest.call(&HelloRequest { features: FEATURE_REASONS });
        let (code, reply) = guest.raw(0, &[]);
        assert_eq!(code == 1, refused, "protocol {protocol}");
        if refused {
            let reason = Guest::reason(&reply);
            assert!(reason.contains("may number operations differently"), "{reason}");
            guest.call(&HelloRequest { features: FEATURE_NAMES });
            guest.call(&NamesRequest { version: "0.26.0".to_owned() });
            assert_eq!(guest.raw(0, &[]).0, 0, "a guest that asks is served");
        }
    }
}
