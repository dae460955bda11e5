//! What an honest guest sees.

use crate::harness::*;
use apir_protocol::handle::BufferHandle;
use apir_protocol::messages::*;
use apir_protocol::tensor::{InlineTensor, RawTensor, TensorRecord};

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_guest_lists_fills_computes_and_reads() {
    let mut guest = Guest::start();
    assert_eq!(guest.call(&DeviceGetDeviceCountRequest {}).count, 1);
    assert_eq!(guest.call(&DeviceGetNameRequest {}).name, "CPU");
    assert!(!guest.call(&DeviceGetDescriptionRequest {}).description.is_empty());
    assert_eq!(guest.call(&DeviceGetTypeRequest {}).type_, 1, "a CPU is presented as a GPU");
    let memory = guest.call(&DeviceGetMemoryRequest {});
    assert!(memory.total > 0 && memory.free <= memory.total);
    let props = guest.call(&DeviceGetPropsRequest {});
    assert!(props.buffer_from_host_ptr && props.mmap_support && !props.async_ && !props.events);
    let buffer_type = guest.buffer_type();
    assert_eq!(guest.buffer_type(), buffer_type, "one handle for one buffer type");
    assert_eq!(guest.call(&BufferTypeGetNameRequest { buffer_type }).name, "CPU");
    assert_eq!(guest.call(&BufferTypeGetAlignmentRequest { buffer_type }).alignment, 32);
    assert_eq!(guest.call(&BufferTypeGetMaxSizeRequest { buffer_type }).max_size, u64::MAX);
    assert!(!guest.call(&BufferTypeIsHostRequest { buffer_type }).is_host);

    let buffer = guest.buffer(4096);
    let base = guest.call(&BufferGetBaseRequest { buffer }).base;
    assert!(base != 0 && base.is_multiple_of(64));
    assert_eq!(guest.get(row(1, buffer, 0, 1024), 4096), [0; 4096], "a fresh buffer holds zeros");
    let a = row(1, buffer, 0, 4);
    guest.set(a, &bytes(&[1.0, 2.0, 3.0, 4.0]));
    // b = a * a; v = the last two of b; c = v * v
    let b = node(2, buffer, 64, 4, OP_SQR, &[1]);
    let mut v = TensorRecord { view_src: 2, view_offs: 8, ..node(3, buffer, 72, 2, OP_VIEW, &[2]) };
    v.op_params[0] = 8;
    let c = node(4, buffer, 128, 2, OP_SQR, &[3]);
    assert_eq!(guest.compute(&[2, 3, 4], &[a, b, v, c]), Ok(0));
    assert_eq!(floats(&guest.get(b, 16)), [1.0, 4.0, 9.0, 16.0]);
    assert_eq!(floats(&guest.get(c, 8)), [81.0, 256.0]);

    let copy = row(5, buffer, 256, 4);
    let request = BufferCpyTensorRequest { buffer, source: b, destination: copy };
    assert!(guest.call(&request).copied);
    assert_eq!(floats(&guest.get(copy, 16)), [1.0, 4.0, 9.0, 16.0]);
    guest.call(&BufferClearRequest { buffer, value: 0x3f });
    assert_eq!(guest.get(copy, 16), [0x3f; 16]);
    guest.call(&BufferFreeBufferRequest { buffer });
    assert_eq!(guest.try_call(&BufferFreeBufferRequest { buffer }), Err(1));
    assert_eq!(guest.compute(&[2], &[a, b]), Err(1), "a graph sent again after its buffer was freed");
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_shared_buffer_is_the_blob_and_outlives_it() {
    let mut guest = Guest::start();
    let res_id = guest.blob(&bytes(&[1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0]));
    let request = DeviceBufferFromPtrRequest { res_id, size: 4096, max_tensor_size: 4096 };
    let made = guest.call(&request);
    let (buffer, buffer_type) = (made.buffer, made.buffer_type);
    assert!(!guest.call(&BufferTypeGetNameRequest { buffer_type }).name.is_empty());
    let a = row(1, buffer, 0, 4);
    let b = node(2, buffer, 32, 4, OP_SQR, &[1]);
    assert_eq!(guest.compute(&[2], &[a, b]), Ok(0));
    assert_eq!(floats(&guest.blob_bytes(res_id, 48)[32..]), [1.0, 4.0, 9.0, 16.0]);
    // Transfers by way of the buffer's own blob overlap nothing.
    let request = BufferGetTensorRequest { buffer, tensor: b, res_id, offset: 0, size: 16 };
    guest.call(&request);
    assert_eq!(floats(&guest.blob_bytes(res_id, 16)), [1.0, 4.0, 9.0, 16.0]);

    guest.drop_blob(res_id);
    assert_eq!(guest.compute(&[2], &[a, b]), Ok(0), "the blob is gone, its memory is not");
    assert_eq!(floats(&guest.get(b, 16)), [1.0, 16.0, 81.0, 256.0]);
    guest.call(&BufferFreeBufferRequest { buffer });

    let small = guest.blob(&[0; 100]);
    for (res_id, size) in [(small, 4097), (small, u64::MAX), (small, 0), (999, 1)] {
        let request = DeviceBufferFromPtrRequest { res_id, size, max_tensor_size: size };
        assert_eq!(guest.try_call(&request), Err(1), "resource {res_id}, {size} bytes");
    }
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn allocations_that_cannot_be_are_null_and_the_next_one_works() {
    let guest = Guest::start();
    let buffer_type = guest.buffer_type();
    for size in [0, 1 << 50, u64::MAX] {
        let request = BufferTypeAllocBufferRequest { buffer_type, size };
        assert!(guest.call(&request).buffer.is_null(), "{size} bytes");
    }
    let buffer = guest.buffer(1 << 20);
    guest.call(&BufferFreeBufferRequest { buffer });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn nodes_outside_a_graph_are_asked_about_and_hostile_ones_are_refused() {
    let guest = Guest::start();
    let raw = RawTensor { ne: [4, 1, 1, 1], nb: [4, 16, 16, 16], ..RawTensor::default() };
    let ask = |tensor: RawTensor, source: RawTensor| {
        let node = InlineTensor {
            tensor,
            // Upstream's guests send a stack address here.
            buffer: BufferHandle(0x7fff_1234_5678),
            view_src: None,
            sources: vec![source],
        };
        guest.try_call(&DeviceSupportsOpRequest { node }).map(|reply| reply.supported)
    };
    let sqr = RawTensor { op: OP_SQR, ..raw };
    assert_eq!(ask(sqr, raw), Ok(true));
    for (what, tensor, source) in [
        ("removed type", sqr, RawTensor { type_: 5, ..raw }),
        ("type past the table", RawTensor { type_: 99, ..sqr }, raw),
        ("unknown operation", RawTensor { op: 1000, ..raw }, raw),
        ("callback", RawTensor { op: OP_CUSTOM, ..raw }, raw),
        ("negative dimension", sqr, RawTensor { ne: [4, -1, 1, 1], ..raw }),
        ("overflowing extent", sqr, RawTensor { ne: [4, i64::MAX, 3, 1], nb: [4, 1 << 62, 8, 8], ..raw }),
    ] {
        assert_eq!(ask(tensor, source), Err(1), "{what}");
    }
    let buffer_type = guest.buffer_type();
    let tensor = InlineTensor { tensor: sqr, sources: vec![raw], ..InlineTensor::default() };
    assert_eq!(guest.call(&BufferTypeGetAllocSizeRequest { buffer_type, tensor }).size, 16);
    guest.assert_alive();
}
