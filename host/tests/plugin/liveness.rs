//! The word that tells a guest that its host lives: row T20 of the cases, and S18 for its blob.

use crate::harness::*;
use apir_protocol::constants::{FEATURE_LIVENESS, FEATURE_NAMES, FEATURE_REASONS};
use apir_protocol::messages::*;
use std::time::{Duration, Instant};

const DEADLINE: Duration = Duration::from_secs(20);

/// The word once it is another than `last`; nothing when it stands still for `limit`.
fn next_beat(guest: &Guest, res_id: u32, offset: usize, last: u32, limit: Duration) -> Option<u32> {
    let end = Instant::now() + limit;
    while Instant::now() < end {
        let bytes = guest.blob_bytes(res_id, offset + 4);
        let word = u32::from_le_bytes(bytes[offset..].try_into().unwrap());
        if word != last {
            return Some(word);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    None
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn hello_answers_what_both_sides_have() {
    let guest = Guest::start();
    let all = FEATURE_LIVENESS | FEATURE_NAMES | FEATURE_REASONS;
    for (offered, shared) in [(u64::MAX, all), (FEATURE_LIVENESS, FEATURE_LIVENESS), (1 << 40, 0)] {
        assert_eq!(guest.call(&HelloRequest { features: offered }).features, shared);
    }
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t20_a_living_host_counts_and_a_context_that_is_gone_does_not() {
    let mut guest = Guest::start();
    let (first, second) = (guest.blob(&[0; 16]), guest.blob(&[0; 16]));
    let reply = guest.call(&LivenessRequest { res_id: first, offset: 0 });
    assert_eq!(reply.interval_ms, 250);
    let beat = next_beat(&guest, first, 0, 0, DEADLINE).unwrap();
    next_beat(&guest, first, 0, beat, DEADLINE).unwrap();
    // The second word replaces the first, and is where it was asked to be.
    guest.call(&LivenessRequest { res_id: second, offset: 12 });
    next_beat(&guest, second, 12, 0, DEADLINE).unwrap();
    assert_eq!(guest.blob_bytes(second, 12), [0; 12]);
    let last = u32::from_le_bytes(guest.blob_bytes(first, 4).try_into().unwrap());
    assert_eq!(next_beat(&guest, first, 0, last, Duration::from_secs(1)), None);
    ggml_virtgpu_backend::plugin::apir_backend_deinit(guest.ctx_id);
    let last = u32::from_le_bytes(guest.blob_bytes(second, 16)[12..].try_into().unwrap());
    assert_eq!(next_beat(&guest, second, 12, last, Duration::from_secs(1)), None);
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s18_a_word_outside_its_blob_is_refused_and_a_blob_may_go() {
    let mut guest = Guest::start();
    let res_id = guest.blob(&[0; 4096]);
    for (res_id, offset) in [
        (res_id, 4096),
        (res_id, 4094),
        (res_id, 1),
        (res_id, 4093),
        (res_id, u64::MAX),
        (res_id, u64::MAX - 3),
        (99, 0),
    ] {
        assert_eq!(guest.try_call(&LivenessRequest { res_id, offset }).err(), Some(1), "{res_id}: {offset}");
    }
    guest.call(&LivenessRequest { res_id, offset: 4092 });
    world().blobs.remove(&(guest.ctx_id, res_id));
    std::thread::sleep(Duration::from_millis(600));
    guest.assert_alive();
}
