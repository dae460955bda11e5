//! Truncated commands, replies and races: rows S15, S19 and S22 of the cases.

use crate::harness::*;
use apir_protocol::command::Command;
use apir_protocol::constants::FEATURE_LIVENESS;
use apir_protocol::graph::{encode_graph, graph_size};
use apir_protocol::messages::*;
use apir_protocol::tensor::{InlineTensor, RawTensor};

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
            Command::Hello => Guest::encode(&HelloRequest { features: FEATURE_LIVENESS }),
            Command::Names => Guest::encode(&NamesRequest { version: "0.13.1".to_owned() }),
            Command::Liveness => Guest::encode(&LivenessRequest { res_id, offset: 4 }),
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
        for len in
            (0..request.len()).filter(|len| command != Command::BufferTypeIsHost && Guest::carries(*len))
        {
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
fn s15_a_guest_that_rewrites_what_the_host_reads_reaches_nothing() {
    in_child("lifecycle::s15_a_guest_that_rewrites_what_the_host_reads_reaches_nothing", || {
        let mut guest = Guest::start();
        let buffer = guest.buffer(4096);
        let tensors = [row(1, buffer, 0, 4), node(2, buffer, 64, 4, OP_SQR, &[1])];
        let mut graph = vec![0; graph_size(1, 2) as usize];
        encode_graph(&[2], &tensors, &mut graph).unwrap();
        let res_id = guest.blob(&graph);
        let base = guest.blob_address(res_id);
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
            assert!(done.iter().all(|count| *count > 0), "{done:?}: the guest wrote too early or too late");
        });
        assert_eq!(guest.compute(&[2], &tensors), Ok(0));
        guest.assert_alive();
    });
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
