//! How much one context may take.

use crate::harness::*;
use apir_protocol::messages::*;

fn alloc(guest: &Guest, size: u64) -> bool {
    let buffer_type = guest.buffer_type();
    !guest.call(&BufferTypeAllocBufferRequest { buffer_type, size }).buffer.is_null()
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn reported_memory_and_buffers_stay_within_the_quota() {
    let mut guest =
        Guest::start_with(&[("apir.max_device_bytes", "1048576"), ("apir.max_mapped_bytes", "8192")]);
    let memory = guest.call(&DeviceGetMemoryRequest {});
    assert!(memory.total <= 1 << 20 && memory.free <= memory.total);
    let buffer = guest.buffer(1 << 19);
    assert_eq!(guest.call(&DeviceGetMemoryRequest {}).free, 1 << 19);
    assert!(!alloc(&guest, (1 << 19) + 4096), "beyond the quota");
    let res_id = guest.blob(&[0; 16384]);
    let mapped = |guest: &Guest, size| {
        guest
            .try_call(&DeviceBufferFromPtrRequest { res_id, size, max_tensor_size: size })
            .map(|made| made.buffer)
    };
    let first = mapped(&guest, 8192).unwrap();
    assert_eq!(mapped(&guest, 4096), Err(1), "beyond the mapped bytes");
    guest.call(&BufferFreeBufferRequest { buffer: first });
    guest.call(&BufferFreeBufferRequest { buffer });
    assert!(mapped(&guest, 4096).is_ok());
    assert!(alloc(&guest, 1 << 19), "freed bytes count no more");
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn buffers_graphs_and_commands_are_counted() {
    let keys = [("apir.max_buffers", "2"), ("apir.max_graph_nodes", "3"), ("apir.max_command_bytes", "256")];
    let mut guest = Guest::start_with(&keys);
    let buffer = guest.buffer(4096);
    assert!(alloc(&guest, 64));
    assert!(!alloc(&guest, 64), "a third buffer");
    let tensors = [
        row(1, buffer, 0, 4),
        node(2, buffer, 64, 4, OP_SQR, &[1]),
        node(3, buffer, 128, 4, OP_SQR, &[2]),
        node(4, buffer, 192, 4, OP_SQR, &[3]),
    ];
    assert_eq!(guest.compute(&[2, 3], &tensors[..3]), Ok(0));
    assert_eq!(guest.compute(&[2, 3, 4], &tensors), Err(1), "a fourth tensor");
    let tensor = tensors[0];
    let long = BufferGetTensorRequest { buffer, tensor, res_id: 1, offset: 0, size: 0 };
    assert_eq!(guest.try_call(&long), Err(1), "a command of 332 bytes");
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_context_without_a_cache_computes_the_same() {
    for cached in ["0", "1", "4"] {
        let mut guest = Guest::start_with(&[("apir.max_cached_graphs", cached)]);
        let buffer = guest.buffer(4096);
        let a = row(1, buffer, 0, 4);
        for round in 0..6 {
            let data = 64 * (1 + round % 3);
            let b = node(2, buffer, data, 4, OP_SQR, &[1]);
            guest.set(a, &bytes(&[round as f32; 4]));
            assert_eq!(guest.compute(&[2], &[a, b]), Ok(0));
            assert_eq!(floats(&guest.get(b, 16)), [(round * round) as f32; 4], "{cached} graphs kept");
        }
    }
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn without_a_quota_three_quarters_of_the_memory_are_the_limit() {
    const SIZE: u64 = 64 << 20;
    let mut guest = Guest::start();
    let total = guest.call(&DeviceGetMemoryRequest {}).total;
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let kib = meminfo.lines().next().unwrap().split_ascii_whitespace().nth(1).unwrap();
    let machine: u64 = kib.parse::<u64>().unwrap() * 1024;
    assert!(total.abs_diff(machine / 4 * 3) < 4, "{total} of {machine}");
    let res_id = guest.blob(&vec![0; SIZE as usize]);
    let request = DeviceBufferFromPtrRequest { res_id, size: SIZE, max_tensor_size: SIZE };
    let made = (0..=total / SIZE).take_while(|_| guest.try_call(&request).is_ok()).count() as u64;
    assert_eq!(made, total / SIZE, "buffers of {SIZE} bytes on a device of {total}");
    let memory = guest.call(&DeviceGetMemoryRequest {});
    assert!(memory.free < SIZE && memory.total == total, "{memory:?}");
}
