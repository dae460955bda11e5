//! Hostile transfers and handles: rows S1 to S5, S7, S17, S18 and S22 of the cases.

use crate::harness::*;
use apir_protocol::handle::{BufferHandle, BufferTypeHandle};
use apir_protocol::messages::*;
use apir_protocol::tensor::{InlineTensor, RawTensor, TensorRecord};

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s07_handles_of_nothing_of_another_kind_and_of_another_context_are_refused() {
    let (guest, other) = (Guest::start(), Guest::start());
    let (buffer, buffer_type) = (guest.buffer(64), guest.buffer_type());
    let theirs = other.buffer(64);
    for wrong in [0, 1, u64::MAX, buffer_type.0, theirs.0, buffer.0 ^ 1 << 32] {
        let wrong = BufferHandle(wrong);
        assert_eq!(guest.try_call(&BufferGetBaseRequest { buffer: wrong }), Err(1));
        assert_eq!(guest.try_call(&BufferClearRequest { buffer: wrong, value: 1 }), Err(1));
        assert_eq!(guest.try_call(&BufferFreeBufferRequest { buffer: wrong }), Err(1));
    }
    guest.assert_alive();
    assert!(other.call(&BufferGetBaseRequest { buffer: theirs }).base != 0);
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s17_buffer_types_that_the_guest_made_up_are_refused() {
    let (guest, other) = (Guest::start(), Guest::start());
    let buffer = guest.buffer(64);
    for wrong in [0, 1, 0x7fff_dead_beef, buffer.0, other.buffer_type().0] {
        let wrong = BufferTypeHandle(wrong);
        assert_eq!(guest.try_call(&BufferTypeGetNameRequest { buffer_type: wrong }), Err(1));
        assert_eq!(guest.try_call(&BufferTypeGetAlignmentRequest { buffer_type: wrong }), Err(1));
        assert_eq!(guest.try_call(&BufferTypeGetMaxSizeRequest { buffer_type: wrong }), Err(1));
        assert_eq!(guest.try_call(&BufferTypeAllocBufferRequest { buffer_type: wrong, size: 64 }), Err(1));
        let tensor = InlineTensor {
            tensor: RawTensor { ne: [4, 1, 1, 1], nb: [4, 16, 16, 16], ..RawTensor::default() },
            ..InlineTensor::default()
        };
        assert_eq!(guest.try_call(&BufferTypeGetAllocSizeRequest { buffer_type: wrong, tensor }), Err(1));
    }
    guest.assert_alive();
}

type Change = fn(&mut TensorRecord);

/// What makes a tensor lie in no buffer of the guest's.
const FORGED: &[(&str, Change)] = &[
    ("no buffer, absolute address", |t| (t.buffer, t.data) = (BufferHandle(0), 1 << 46)),
    ("no buffer, small address", |t| (t.buffer, t.data) = (BufferHandle(0), 64)),
    ("unknown buffer", |t| t.buffer = BufferHandle(77)),
    ("unknown buffer, absolute address", |t| (t.buffer, t.data) = (BufferHandle(77), 0x7f00_0000_0000)),
    ("absolute address in a buffer", |t| t.data = 0x7f00_0000_0000),
];

fn changed(record: TensorRecord, change: Change) -> TensorRecord {
    let mut record = record;
    change(&mut record);
    record
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s02_reads_by_forged_addresses_are_refused() {
    let mut guest = Guest::start();
    let buffer = guest.buffer(4096);
    let res_id = guest.blob(&[7; 4096]);
    let there = row(3, buffer, 256, 16);
    for (what, change) in FORGED {
        let tensor = changed(row(1, buffer, 0, 16), *change);
        let get = BufferGetTensorRequest { buffer, tensor, res_id, offset: 0, size: 4 };
        assert_eq!(guest.try_call(&get), Err(1), "get {what}");
        let copy = BufferCpyTensorRequest { buffer, source: tensor, destination: there };
        assert_eq!(guest.try_call(&copy), Err(1), "copy from {what}");
        let reader = node(2, buffer, 64, 16, OP_SQR, &[1]);
        assert_eq!(guest.compute(&[2], &[tensor, reader]), Err(1), "compute from {what}");
    }
    assert_eq!(guest.blob_bytes(res_id, 4096), [7; 4096], "nothing was read");
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s03_writes_by_forged_addresses_are_refused() {
    let mut guest = Guest::start();
    let buffer = guest.buffer(4096);
    let res_id = guest.blob(&[7; 4096]);
    let source = row(3, buffer, 256, 16);
    for (what, change) in FORGED {
        let tensor = changed(row(1, buffer, 0, 16), *change);
        let set = BufferSetTensorRequest { buffer, tensor, res_id, offset: 0, size: 4 };
        assert_eq!(guest.try_call(&set), Err(1), "set {what}");
        let copy = BufferCpyTensorRequest { buffer, source, destination: tensor };
        assert_eq!(guest.try_call(&copy), Err(1), "copy to {what}");
        let writer = changed(node(1, buffer, 0, 16, OP_SQR, &[3]), *change);
        assert_eq!(guest.compute(&[1], &[source, writer]), Err(1), "compute into {what}");
    }
    assert_eq!(guest.get(row(1, buffer, 0, 1024), 4096), [0; 4096], "nothing was written");
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s04_transfers_outside_tensor_buffer_or_blob_are_refused() {
    let mut guest = Guest::start();
    let buffer = guest.buffer(4096);
    let res_id = guest.blob(&[7; 4096]);
    let inside = row(1, buffer, 0, 16);
    let with = |change| changed(inside, change);
    let cases: &[(&str, TensorRecord, u64, u64)] = &[
        ("past the tensor", inside, 60, 8),
        ("wrapping", inside, u64::MAX, 2),
        ("wrapping to the start", inside, u64::MAX - 3, 8),
        ("size of everything", inside, 0, u64::MAX),
        ("past the buffer", with(|t| t.data = 4092), 0, 4),
        ("far outside", with(|t| t.data = 1 << 40), 0, 4),
        ("wrapping data", with(|t| t.data = u64::MAX - 15), 0, 4),
        ("stride outside", with(|t| (t.ne[1], t.nb[1]) = (2, 1 << 31)), 0, 4),
        ("overflowing strides", with(|t| (t.ne, t.nb) = ([u32::MAX; 4], [u32::MAX; 4])), 0, 4),
        ("removed type", with(|t| t.type_ = 4), 0, 4),
        ("type past the table", with(|t| t.type_ = 4_000_000), 0, 4),
        ("part of a block", with(|t| (t.type_, t.ne[0], t.nb[0]) = (2, 31, 18)), 0, 4),
    ];
    for (what, tensor, offset, size) in cases.iter().copied() {
        let set = BufferSetTensorRequest { buffer, tensor, res_id, offset, size };
        assert_eq!(guest.try_call(&set), Err(1), "set {what}");
        let get = BufferGetTensorRequest { buffer, tensor, res_id, offset, size };
        assert_eq!(guest.try_call(&get), Err(1), "get {what}");
        let copy = BufferCpyTensorRequest { buffer, source: tensor, destination: tensor };
        if offset == 0 && size == 4 {
            assert_eq!(guest.try_call(&copy), Err(1), "copy {what}");
        }
    }
    // A blob of one page behind a tensor of two.
    let large = guest.buffer(16384);
    let tensor = row(1, large, 0, 2048);
    let set = BufferSetTensorRequest { buffer: large, tensor, res_id, offset: 0, size: 8192 };
    assert_eq!(guest.try_call(&set), Err(1));
    // Nothing to move is not an error, whatever the blob.
    for offset in [0, 64] {
        let none = BufferSetTensorRequest { buffer, tensor: inside, res_id: 999, offset, size: 0 };
        guest.call(&none);
    }
    assert_eq!(guest.get(row(1, buffer, 0, 1024), 4096), [0; 4096], "nothing was written");
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s01_types_that_are_none_are_refused_in_every_command_with_a_tensor() {
    let mut guest = Guest::start();
    let (buffer, buffer_type) = (guest.buffer(4096), guest.buffer_type());
    let res_id = guest.blob(&[0; 4096]);
    for type_ in [4, 5, 31, 32, 33, 36, 37, 38, 43, 44, 1 << 16, u32::MAX] {
        let tensor = TensorRecord { type_, ..row(1, buffer, 0, 4) };
        let set = BufferSetTensorRequest { buffer, tensor, res_id, offset: 0, size: 4 };
        assert_eq!(guest.try_call(&set), Err(1), "set {type_}");
        let get = BufferGetTensorRequest { buffer, tensor, res_id, offset: 0, size: 4 };
        assert_eq!(guest.try_call(&get), Err(1), "get {type_}");
        let copy = BufferCpyTensorRequest { buffer, source: tensor, destination: tensor };
        assert_eq!(guest.try_call(&copy), Err(1), "copy {type_}");
        assert_eq!(
            guest.compute(&[2], &[tensor, node(2, buffer, 64, 4, OP_SQR, &[1])]),
            Err(1),
            "compute {type_}"
        );
        let raw = RawTensor { type_, ne: [4, 1, 1, 1], nb: [4, 16, 16, 16], ..RawTensor::default() };
        let inline = InlineTensor { tensor: raw, ..InlineTensor::default() };
        let sized = BufferTypeGetAllocSizeRequest { buffer_type, tensor: inline.clone() };
        assert_eq!(guest.try_call(&sized), Err(1), "size {type_}");
        assert_eq!(guest.try_call(&DeviceSupportsOpRequest { node: inline }), Err(1), "supports {type_}");
    }
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s05_copies_between_unlike_tensors_or_missing_buffers_are_refused() {
    let mut guest = Guest::start();
    let (buffer, other) = (guest.buffer(4096), guest.buffer(4096));
    let source = row(1, buffer, 0, 16);
    guest.set(source, &bytes(&[1.5; 16]));
    let try_copy = |guest: &Guest, source: TensorRecord, destination: TensorRecord| {
        guest.try_call(&BufferCpyTensorRequest { buffer: destination.buffer, source, destination })
    };
    let there = row(2, other, 64, 16);
    for unlike in [
        row(2, other, 64, 8),
        row(2, other, 64, 32),
        TensorRecord { type_: TYPE_I32, ..there },
        TensorRecord { ne: [4, 4, 1, 1], nb: [4, 16, 64, 64], ..there },
        TensorRecord { ne: [4, 4, 1, 1], nb: [4, 64, 256, 256], ..there },
        TensorRecord { buffer: BufferHandle(0), ..there },
        TensorRecord { data: 4064, ..there },
    ] {
        assert_eq!(try_copy(&guest, source, unlike), Err(1), "to {unlike:?}");
        assert_eq!(try_copy(&guest, unlike, source), Err(1), "from {unlike:?}");
    }
    // Parts of one another are not copied either.
    assert_eq!(try_copy(&guest, source, row(3, buffer, 32, 16)), Err(1));
    assert!(try_copy(&guest, source, there).unwrap().copied);
    assert_eq!(floats(&guest.get(there, 64)), [1.5; 16]);
    guest.call(&BufferFreeBufferRequest { buffer });
    assert_eq!(try_copy(&guest, source, there), Err(1), "the source's buffer is gone");
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s18_blobs_that_are_too_small_are_refused() {
    let mut guest = Guest::start();
    let buffer = guest.buffer(64 << 10);
    let small = guest.blob(&[0; 4096]);
    for size in [4097, 16384, u64::MAX] {
        assert_eq!(every_use(&guest, buffer, small, size), [Err(1); 4], "{size} bytes");
    }
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s18_a_blob_that_is_freed_under_a_buffer_takes_no_memory_from_it() {
    let mut guest = Guest::start();
    let small = guest.blob(&[0; 4096]);
    let made = guest.call(&DeviceBufferFromPtrRequest { res_id: small, size: 4096, max_tensor_size: 4096 });
    guest.drop_blob(small);
    let inside = row(1, made.buffer, 0, 4);
    guest.set(inside, &bytes(&[3.0; 4]));
    assert_eq!(guest.compute(&[2], &[inside, node(2, made.buffer, 64, 4, OP_SQR, &[1])]), Ok(0));
    assert_eq!(floats(&guest.get(row(2, made.buffer, 64, 4), 16)), [9.0; 4]);
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s22_a_fresh_buffer_holds_zeros_whatever_lay_there_before() {
    let mut guest = Guest::start();
    for size in [64, 4096, 1 << 20] {
        for _ in 0..3 {
            let buffer = guest.buffer(size as u64);
            let tensor = row(1, buffer, 0, size / 4);
            assert!(guest.get(tensor, size as usize).iter().all(|byte| *byte == 0), "{size} bytes");
            guest.call(&BufferClearRequest { buffer, value: 0xa5 });
            guest.call(&BufferFreeBufferRequest { buffer });
        }
    }
}
