//! Truncated commands, wrong times, floods, races: rows S15, S19, S20 and S22 of the cases.

use crate::harness::*;
use apir_protocol::command::Command;
use apir_protocol::graph::{encode_graph, graph_size};
use apir_protocol::messages::*;
use apir_protocol::tensor::{InlineTensor, RawTensor};
use ggml_virtgpu_backend::plugin::{apir_backend_deinit, apir_backend_dispatcher, apir_backend_initialize};

/// A valid request of every command, as bytes.
fn every_request(guest: &mut Guest) -> Vec<(Command, Vec<u8>)> {
    let (buffer, buffer_type) = (guest.buffer(4096), guest.buffer_type());
    let res_id = guest.blob(&[0; 4096]);
    let tensor = row(1, buffer, 0, 4);
    let raw = RawTensor { ne: [4, 1, 1, 1], nb: [4, 16, 16, 16], ..RawTensor::default() };
    let node = InlineTensor {
        tensor: RawTensor { op: OP_SQR, ..raw },
        buffer,
        view_src: Some(raw),
        sources: vec![raw],
    };
    let mut requests = Vec::new();
    for command in Command::ALL {
        let bytes = match command {
            Command::DeviceGetDeviceCount => Guest::encode(&DeviceGetDeviceCountRequest {}),
            Command::DeviceGetCount => Guest::encode(&DeviceGetCountRequest {}),
            Command::DeviceGetName => Guest::encode(&DeviceGetNameRequest {}),
            Command::DeviceGetDescription => Guest::encode(&DeviceGetDescriptionRequest {}),
            Command::DeviceGetType => Guest::encode(&DeviceGetTypeRequest {}),
            Command::DeviceGetMemory => Guest::encode(&DeviceGetMemoryRequest {}),
            Command::DeviceSupportsOp => Guest::encode(&DeviceSupportsOpRequest { node: node.clone() }),
            Command::DeviceGetBufferType => Guest::encode(&DeviceGetBufferTypeRequest {}),
            Command::DeviceGetProps => Guest::encode(&DeviceGetPropsRequest {}),
            Command::DeviceBufferFromPtr => {
                Guest::encode(&DeviceBufferFromPtrRequest { res_id, size: 4096, max_tensor_size: 64 })
            }
            Command::BufferTypeGetName => Guest::encode(&BufferTypeGetNameRequest { buffer_type }),
            Command::BufferTypeGetAlignment => Guest::encode(&BufferTypeGetAlignmentRequest { buffer_type }),
            Command::BufferTypeGetMaxSize => Guest::encode(&BufferTypeGetMaxSizeRequest { buffer_type }),
            Command::BufferTypeIsHost => Guest::encode(&BufferTypeIsHostRequest { buffer_type }),
            Command::BufferTypeAllocBuffer => {
                Guest::encode(&BufferTypeAllocBufferRequest { buffer_type, size: 64 })
            }
            Command::BufferTypeGetAllocSize => {
                Guest::encode(&BufferTypeGetAllocSizeRequest { buffer_type, tensor: node.clone() })
            }
            Command::BufferGetBase => Guest::encode(&BufferGetBaseRequest { buffer }),
            Command::BufferSetTensor => {
                Guest::encode(&BufferSetTensorRequest { buffer, tensor, res_id, offset: 0, size: 16 })
            }
            Command::BufferGetTensor => {
                Guest::encode(&BufferGetTensorRequest { buffer, tensor, res_id, offset: 0, size: 16 })
            }
            Command::BufferCpyTensor => {
                let destination = row(2, buffer, 64, 4);
                Guest::encode(&BufferCpyTensorRequest { buffer, source: tensor, destination })
            }
            Command::BufferClear => Guest::encode(&BufferClearRequest { buffer, value: 1 }),
            Command::BufferFreeBuffer => Guest::encode(&BufferFreeBufferRequest { buffer: guest.buffer(64) }),
            Command::BackendGraphCompute => {
                let tensors = [tensor, self::node(2, buffer, 64, 4, OP_SQR, &[1])];
                let mut graph = vec![0; graph_size(1, 2) as usize];
                encode_graph(&[2], &tensors, &mut graph).unwrap();
                let size = graph.len() as u64;
                Guest::encode(&BackendGraphComputeRequest { res_id: guest.blob(&graph), size })
            }
        };
        requests.push((*command, bytes));
    }
    requests
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s19_every_command_is_refused_at_every_truncation_and_bears_trailing_bytes() {
    let mut guest = Guest::start();
    for (command, mut request) in every_request(&mut guest) {
        for len in (0..request.len()).filter(|_| command != Command::BufferTypeIsHost) {
            let (code, reply) = guest.raw(command.number(), &request[..len]);
            assert_eq!((code, reply.len()), (1, 0), "{} of {len} bytes", command.name());
        }
        request.extend([0xff; 32]);
        assert_eq!(guest.raw(command.number(), &request).0, 0, "{} with trailing bytes", command.name());
    }
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s22_a_reply_page_that_is_too_small_is_a_refusal() {
    let guest = Guest::start();
    let mut page = [0xaau8; 8];
    let mut after = std::ptr::null_mut();
    let start = page.as_mut_ptr();
    // SAFETY: the ranges are those of the page, and of no request.
    let code = unsafe {
        let (none, end) = (std::ptr::null(), start.add(page.len()));
        let name = Command::DeviceGetName.number();
        apir_backend_dispatcher(guest.ctx_id, &CALLBACKS, name, none, none, start, end, &mut after)
    };
    assert_eq!((code, after, page), (1, start, [0xaa; 8]));
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s20_contexts_that_have_not_started_refuse_everything() {
    let cpu = format!("{}/libggml-cpu.so", llama_dir());
    let guest = Guest::configured(&cpu, None);
    let count = Command::DeviceGetCount.number();
    assert_eq!(guest.raw(count, &[]), (1, vec![]), "before initialize");
    assert_eq!(guest.initialize(), 6);
    assert_eq!(guest.raw(count, &[]).0, 0);
    assert_eq!(guest.initialize(), 13, "twice");
    assert_eq!(guest.raw(count, &[]).0, 0, "the first start stands");
    for number in [23, 1024, u32::MAX] {
        assert_eq!(guest.raw(number, &[]), (6, vec![]));
    }
    apir_backend_deinit(guest.ctx_id);
    assert_eq!(guest.raw(count, &[]), (1, vec![]), "after deinit");
    assert_eq!(guest.initialize(), 6, "a context may start again");
    guest.assert_alive();

    for (library, registration, code) in [
        ("/nowhere/libggml-cpu.so", None, 4),
        ("/proc/self/maps", None, 4),
        ("/proc/self", None, 4),
        (cpu.as_str(), Some("ggml_backend_none_reg"), 5),
    ] {
        let failed = Guest::configured(library, registration);
        assert_eq!(failed.initialize(), code, "{library} {registration:?}");
        assert_eq!(failed.raw(count, &[]), (1, vec![]), "after a failed initialize");
    }
    // SAFETY: a null table is allowed.
    assert_eq!(unsafe { apir_backend_initialize(u32::MAX, std::ptr::null()) }, 11);
    apir_backend_deinit(u32::MAX);
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s15_a_guest_that_rewrites_what_the_host_reads_reaches_nothing() {
    in_child("lifecycle::s15_a_guest_that_rewrites_what_the_host_reads_reaches_nothing", || {
        let mut guest = Guest::start();
        let buffer = guest.buffer(4096);
        let tensors = [row(1, buffer, 0, 4), node(2, buffer, 64, 4, OP_SQR, &[1])];
        let mut graph = vec![0; graph_size(1, 2) as usize];
        encode_graph(&[2], &tensors, &mut graph).unwrap();
        let res_id = guest.blob(&graph);
        let base = world().blobs.get_mut(&(guest.ctx_id, res_id)).unwrap().as_mut_ptr() as usize;
        let stop = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut value = 1u32;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    value = value.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let at = value as usize / 4 % graph.len();
                    let byte = (base + at) as *mut u8;
                    // SAFETY: the blob is mapped until the guest is dropped, and volatile writes make no reference.
                    unsafe {
                        byte.write_volatile(value as u8);
                        std::thread::yield_now();
                        byte.write_volatile(graph[at]);
                    }
                }
            });
            let size = graph.len() as u64;
            let mut done = [0, 0];
            for _ in 0..20_000 {
                match guest.try_call(&BackendGraphComputeRequest { res_id, size }) {
                    Ok(reply) => done[0] += usize::from(reply.status == 0),
                    Err(code) => done[1] += usize::from(code == 1),
                }
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            assert_eq!(done[0] + done[1], 20_000, "computed or refused");
        });
        assert_eq!(guest.compute(&[2], &tensors), Ok(0));
        guest.assert_alive();
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s20_a_flood_of_bad_commands_ends_the_context_and_no_other() {
    let (guest, other) = (Guest::start_with(&[("apir.max_bad_commands", "100000")]), Guest::start());
    let started = std::time::Instant::now();
    for _ in 0..99_999 {
        assert_eq!(guest.raw_code(4711), 6);
    }
    guest.assert_alive();
    assert_eq!(guest.raw_code(4711), 6, "one too many");
    assert_eq!(guest.raw_code(1), 1, "the context is gone");
    assert!(started.elapsed().as_secs() < 60, "{:?}", started.elapsed());
    other.assert_alive();
    assert_eq!(guest.initialize(), 6, "and may start again");
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s20_a_flood_of_bad_commands_leaves_few_lines() {
    let log = std::env::temp_dir().join(format!("apir-flood-{}", std::process::id()));
    const TEST: &str = "lifecycle::s20_a_flood_of_bad_commands_leaves_few_lines";
    if std::env::var_os("APIR_LLAMA_CPP_LOG_TO_FILE").is_some() {
        let guest = Guest::start();
        for _ in 0..1_000_000 {
            assert_eq!(guest.raw_code(4711), 6);
        }
        return;
    }
    let started = std::time::Instant::now();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args([TEST, "--exact", "--include-ignored"]).env("APIR_LLAMA_CPP_LOG_TO_FILE", &log);
    assert!(child.status().unwrap().success());
    let lines = std::fs::read_to_string(&log).unwrap().lines().count() as u64;
    std::fs::remove_file(&log).unwrap();
    // Ten a second and a count for each, and what is said at the start.
    assert!(lines <= 20 * (started.elapsed().as_secs() + 2) + 10, "{lines} lines");
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s22_a_reply_is_written_and_nothing_behind_it() {
    let mut guest = Guest::start();
    // `raw` asserts for each that the rest of the page is as it was.
    for (command, request) in every_request(&mut guest) {
        assert_eq!(guest.raw(command.number(), &request).0, 0, "{}", command.name());
    }
}
