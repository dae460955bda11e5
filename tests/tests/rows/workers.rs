//! What a worker process makes of hostile input that means something else within one process: rows S14, S18, S20 and S22.

use crate::harness::*;
use apir_protocol::command::{ForwardCode, LoadLibraryCode};
use apir_protocol::messages::*;
use apir_tests::process;
use std::time::Duration;

/// How long a worker may take to end.
const END: Duration = Duration::from_secs(20);

const OP_GET_ROWS: u32 = 40;

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s14_indices_that_nobody_looks_at_end_their_worker_alone() {
    let beside = Beside::start(&[("APIR_INDEX_CHECK", "off")]);
    let mut guest = Guest::started(&beside);
    let mut scene = Scene::new(guest.buffer(1 << 20));
    let (table, ids) = (scene.leaf(TYPE_F32, &[32, 9]), scene.leaf(TYPE_I32, &[3]));
    scene.node(OP_GET_ROWS, TYPE_F32, &[32, 3], &[table, ids], &[]);
    guest.set(*scene.get(ids), &ints(&[0, 8, 1]));
    assert_eq!(scene.compute(&mut guest), Ok(0));
    guest.set(*scene.get(ids), &ints(&[0, 1 << 30, 1]));
    assert_eq!(scene.compute(&mut guest), Err(LOST), "ggml's kernel ends the process");
    assert!(process::wait_until(END, || beside.has_crashed_workers()), "the server says so");
    beside.check();
    Guest::started(&beside).assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s18_a_blob_that_is_not_there_ends_its_context_alone() {
    let beside = Beside::start(&[]);
    for use_ in 0..4 {
        for res_id in [999, 0, u32::MAX] {
            let guest = Guest::started(&beside);
            let (buffer, size) = (guest.buffer(64 << 10), 16);
            let tensor = row(1, buffer, 0, 4096);
            let code = match use_ {
                0 => guest
                    .try_call(&BufferSetTensorRequest { buffer, tensor, res_id, offset: 0, size })
                    .map(|_| ()),
                1 => guest
                    .try_call(&BufferGetTensorRequest { buffer, tensor, res_id, offset: 0, size })
                    .map(|_| ()),
                2 => guest.try_call(&BackendGraphComputeRequest { res_id, size }).map(|_| ()),
                _ => guest
                    .try_call(&DeviceBufferFromPtrRequest { res_id, size, max_tensor_size: size })
                    .map(|_| ()),
            };
            assert_eq!(code, Err(1), "resource {res_id}");
            assert!(
                process::wait_until(END, || !guest.is_connected()),
                "as in virglrenderer, the context ends"
            );
            beside.check();
        }
    }
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s20_a_worker_without_its_library_refuses_everything() {
    let beside = Beside::start(&[]);
    let guest = Guest::connected(&beside);
    for number in [0, 1, 17, 22, 23, 1024, u32::MAX] {
        assert_eq!(
            guest.submit(FORWARD, number, &[0; 64]),
            ForwardCode::NoDispatch.number() + 1,
            "command {number} before the library"
        );
    }
    assert_eq!(guest.submit(LOAD_LIBRARY, 0, &[]), 1);
    assert_eq!(guest.submit(LOAD_LIBRARY, 0, &[]), LoadLibraryCode::AlreadyLoaded.number() + 1, "twice");
    guest.assert_alive();
    for number in [23, 1023, u32::MAX] {
        assert_eq!(guest.raw(number, &[]), (6, vec![]), "command {number}");
    }
    guest.assert_alive();
    drop(guest);
    let guest = Guest::connected(&beside);
    assert_eq!(guest.submit(3, 0, &[]), LOST, "a type of command that is none ends the context");
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s20_a_flood_of_bad_commands_ends_its_context_alone_and_leaves_few_lines() {
    const BAD: usize = 20_000;
    let started = std::time::Instant::now();
    let beside = Beside::start(&[("APIR_MAX_BAD_COMMANDS", &BAD.to_string())]);
    let guest = Guest::started(&beside);
    for _ in 0..BAD {
        assert_eq!(guest.raw(4711, &[]), (6, vec![]));
    }
    assert_eq!(guest.raw(1, &[]).0, 1, "the context is gone");
    beside.check();
    let lines = beside.server.stderr().lines().count() as u64;
    // Ten a second and a count for each, and what is said at the start.
    assert!(lines <= 20 * (started.elapsed().as_secs() + 2) + 20, "{lines} lines");
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s22_a_reply_is_all_that_is_written_and_a_fresh_blob_is_empty() {
    let beside = Beside::start(&[]);
    let (mut guest, mut next) = (Guest::started(&beside), Guest::started(&beside));
    // `raw` asserts that nothing lies behind a reply.
    assert_eq!(guest.call(&DeviceGetNameRequest {}).name, "CPU");
    let res_id = guest.blob(&[]);
    guest.drop_blob(res_id);
    let res_id = next.blob(&[]);
    assert_eq!(next.blob_bytes(res_id, 4096), [0; 4096], "what another context held is not seen");
}
