use super::*;
use crate::backend::log::captured;
use apir_protocol::command::Command;

fn copy(to: &Held, source: &abi::Tensor, target: &mut abi::Tensor) -> bool {
    // SAFETY: buffer and tensors are valid during the call.
    unsafe { (to.iface().cpy_tensor.unwrap())(to.0, source, target) }
}

fn memset(buffer: &Held, tensor: &mut abi::Tensor, value: u8, offset: usize, size: usize) {
    // SAFETY: buffer and tensor are valid during the call.
    unsafe { (buffer.iface().memset_tensor.unwrap())(buffer.0, tensor, value, offset, size) }
}

fn clear(buffer: &Held, value: u8) {
    // SAFETY: the buffer is valid during the call.
    unsafe { (buffer.iface().clear.unwrap())(buffer.0, value) }
}

/// What every kind of buffer does with its bytes.
fn exercise(device: &'static Device) {
    let len = 3 << 20;
    let buffer = Held::new(device, len).unwrap();
    assert!(buffer.base() != 0 && buffer.base().is_multiple_of(64));
    let mut whole = tensor(F32, [len as i64 / 4, 1, 1, 1]);
    buffer.place(&mut whole, 0);
    let mut part = tensor(F32, [16, 1, 1, 1]);
    buffer.place(&mut part, 128);
    clear(&buffer, 9);
    assert!(buffer.get(&whole, 0, len) == vec![9; len]);
    buffer.set(&mut part, 4, &[1, 2, 3]);
    assert_eq!(buffer.get(&whole, 130, 6), [9, 9, 1, 2, 3, 9]);
    assert_eq!(buffer.get(&part, 5, 2), [2, 3]);
    memset(&buffer, &mut whole, 7, 3, len - 5);
    let bytes = buffer.get(&whole, 0, len);
    assert_eq!((bytes[2], bytes[3], bytes[len - 3], bytes[len - 2]), (9, 7, 7, 9));
    buffer.set(&mut part, 0, &[]);
    assert!(buffer.get(&part, 0, 0).is_empty());

    let other = Held::new(device, 64).unwrap();
    let mut target = tensor(F32, [16, 1, 1, 1]);
    other.place(&mut target, 0);
    buffer.set(&mut part, 0, &[5; 64]);
    assert!(copy(&other, &part, &mut target));
    assert_eq!(other.get(&target, 0, 64), [5; 64]);
    // A view without a buffer of its own is in that of the tensor it views.
    let view = abi::Tensor { buffer: ptr::null_mut(), view_src: &raw mut whole, ..part.clone() };
    buffer.set(&mut part, 0, &[6; 64]);
    assert!(copy(&other, &view, &mut target));
    assert_eq!(other.get(&target, 0, 64), [6; 64]);
    assert!(captured::take().is_empty());
}

#[test]
fn device_buffers_move_their_bytes_through_the_session() {
    let (device, host) = device(|_| {});
    exercise(device);
    let script = host.0.lock().unwrap();
    assert!(script.buffers.is_empty() && script.mapped.is_empty());
    assert!(
        script.seen.contains(&Command::BufferSetTensor) && script.seen.contains(&Command::BufferCpyTensor)
    );
}

#[test]
fn mapped_buffers_are_seen_by_both_sides_and_given_back() {
    let (device, host) = device(|script| script.from_ptr = true);
    exercise(device);
    let moved =
        [Command::BufferSetTensor, Command::BufferGetTensor, Command::BufferCpyTensor, Command::BufferClear];
    assert!(!host.0.lock().unwrap().seen.iter().any(|seen| moved.contains(seen)));

    let buffer = Held::new(device, 5000).unwrap();
    let mut whole = tensor(F32, [4, 1, 1, 1]);
    buffer.place(&mut whole, 64);
    buffer.set(&mut whole, 1, b"seen");
    let res_id = {
        let script = host.0.lock().unwrap();
        let res_id = *script.mapped.values().next().unwrap();
        let mut bytes = [0; 4];
        script.blobs[&res_id].read(65, &mut bytes).unwrap();
        assert_eq!(&bytes, b"seen");
        res_id
    };
    drop(buffer);
    let script = host.0.lock().unwrap();
    assert_eq!(script.unreferenced.last(), Some(&res_id));
    assert!(script.mapped.is_empty());
    assert_eq!(script.seen.last(), Some(&Command::BufferFreeBuffer));
}

#[test]
fn a_strided_tensor_is_not_copied_over_the_gaps() {
    let (device, _) = device(|script| script.from_ptr = true);
    let buffer = Held::new(device, 256).unwrap();
    let mut source = abi::Tensor { ne: [2, 2, 1, 1], nb: [4, 16, 32, 32], ..tensor(F32, [2, 2, 1, 1]) };
    buffer.place(&mut source, 0);
    let mut target = source.clone();
    buffer.place(&mut target, 128);
    assert!(!copy(&buffer, &source, &mut target));
}

#[test]
fn a_host_that_will_not_map_gets_device_buffers() {
    let prepare: [fn(&mut Script); 3] = [
        |script| script.refuse_blobs = true,
        |script| script.refused = [(Command::DeviceBufferFromPtr, 1)].into(),
        // Upstream's plugin on a processor: freeing a mapped buffer would end it.
        |script| script.kind = 0,
    ];
    for prepare in prepare {
        let (device, host) = device(|script| {
            script.from_ptr = true;
            prepare(script);
        });
        let buffer = Held::new(device, 64).unwrap();
        let mut whole = tensor(F32, [4, 1, 1, 1]);
        buffer.place(&mut whole, 0);
        buffer.set(&mut whole, 0, &[3; 16]);
        assert_eq!(host.0.lock().unwrap().buffers.len(), 1);
        assert_eq!(buffer.get(&whole, 0, 16), [3; 16]);
    }
}

#[test]
fn a_failed_allocation_is_null_and_a_line_and_the_next_one_works() {
    let (device, host) = device(|_| {});
    captured::take();
    host.0.lock().unwrap().refused.insert(Command::BufferTypeAllocBuffer, 1);
    assert!(Held::new(device, 64).is_none());
    let lines = captured::take();
    assert!(lines.len() == 1 && lines[0].contains("cannot allocate a buffer"), "{lines:?}");
    host.0.lock().unwrap().refused.clear();
    assert!(Held::new(device, 64).is_some());
}

#[test]
fn a_failed_transfer_is_a_line_zeros_and_a_failed_computation_once() {
    let (device, host) = device(|_| {});
    let buffer = Held::new(device, 64).unwrap();
    let mut whole = tensor(F32, [16, 1, 1, 1]);
    buffer.place(&mut whole, 0);
    buffer.set(&mut whole, 0, &[1; 64]);
    type Transfer = fn(&Held, &mut abi::Tensor);
    let transfers: [(Command, Transfer); 4] = [
        (Command::BufferSetTensor, |buffer, tensor| buffer.set(tensor, 0, &[2])),
        (Command::BufferGetTensor, |buffer, tensor| assert_eq!(buffer.get(tensor, 0, 3), [0; 3])),
        (Command::BufferClear, |buffer, _| clear(buffer, 0)),
        (Command::BufferSetTensor, |buffer, tensor| memset(buffer, tensor, 1, 0, 8)),
    ];
    for (command, transfer) in transfers {
        captured::take();
        host.0.lock().unwrap().refused.insert(command, 1);
        transfer(&buffer, &mut whole);
        let lines = captured::take();
        assert!(lines.len() == 1 && lines[0].contains(command.name()), "{lines:?}");
        host.0.lock().unwrap().refused.clear();
        assert_eq!(compute(device, &mut [&raw mut whole]), -1);
        assert_eq!(compute(device, &mut [&raw mut whole]), 0);
    }
}

#[test]
fn accesses_outside_the_buffer_are_refused_here() {
    for from_ptr in [false, true] {
        let (device, host) = device(|script| script.from_ptr = from_ptr);
        let buffer = Held::new(device, 64).unwrap();
        let mut past = tensor(F32, [16, 1, 1, 1]);
        buffer.place(&mut past, 32);
        let sent = host.0.lock().unwrap().seen.len();
        buffer.set(&mut past, 0, &[1; 64]);
        assert_eq!(buffer.get(&past, 32, 1), [0]);
        assert_eq!(buffer.get(&past, usize::MAX, 2), [0, 0]);
        memset(&buffer, &mut past, 1, 0, 33);
        past.data = ptr::without_provenance_mut(buffer.base() - 4);
        buffer.set(&mut past, 0, &[1]);
        assert_eq!(host.0.lock().unwrap().seen.len(), sent);
        let lines = captured::take();
        // Two reads within a second share a line.
        assert_eq!(lines.iter().filter(|line| line.contains("outside its buffer")).count(), 4, "{lines:?}");
    }
}

#[test]
fn buffers_of_others_are_never_taken_for_ours() {
    let (first, _) = device(|_| {});
    let (second, _) = device(|_| {});
    let (ours, theirs) = (Held::new(first, 64).unwrap(), Held::new(second, 64).unwrap());
    let mut target = tensor(F32, [4, 1, 1, 1]);
    ours.place(&mut target, 0);
    let mut source = tensor(F32, [4, 1, 1, 1]);
    theirs.place(&mut source, 0);
    assert!(!copy(&ours, &source, &mut target));
    // Of our type, but with a context of ggml's own, as for a buffer of several buffers.
    let mut several = abi::Buffer {
        iface: abi::BufferIface { free_buffer: None, ..ours.iface() },
        buft: first.buffer_type(),
        context: ptr::without_provenance_mut(64),
        size: 64,
        usage: 0,
    };
    source.buffer = &raw mut several;
    assert!(!copy(&ours, &source, &mut target));
    source.op = ADD;
    assert_eq!(compute(first, &mut [&raw mut source]), -1);
    let lines = captured::take();
    assert!(lines.iter().any(|line| line.contains("not this device's")), "{lines:?}");
}

#[test]
fn t29_what_is_lost_without_an_error_of_ggmls_is_told_once_a_kind() {
    let (device, host) = device(|_| {});
    let buffer = Held::new(device, 64).unwrap();
    let mut whole = tensor(F32, [16, 1, 1, 1]);
    buffer.place(&mut whole, 0);
    buffer.set(&mut whole, 0, &[1; 64]);
    host.0.lock().unwrap().gone = true;
    assert_eq!(compute(device, &mut [&raw mut whole]), -1);
    captured::take();
    for _ in 0..3 {
        assert_eq!(buffer.get(&whole, 0, 64), [0; 64]);
        buffer.set(&mut whole, 0, &[2; 64]);
        memset(&buffer, &mut whole, 1, 0, 8);
        clear(&buffer, 0);
    }
    let lines = captured::take();
    let told =
        ["cannot read a tensor", "cannot write a tensor", "cannot fill a tensor", "cannot clear a buffer"];
    for what in told {
        let count = lines.iter().filter(|line| line.contains(what) && line.contains("host is gone")).count();
        assert_eq!(count, 1, "{what}: {lines:?}");
    }
    assert_eq!(lines.len(), told.len(), "{lines:?}");
    assert!(lines[0].contains("not valid and must not be stored"), "{lines:?}");
}

#[test]
fn t29_a_mapped_tensor_of_a_lost_host_is_read_as_it_is_and_told_as_lost() {
    let (device, host) = device(|script| script.from_ptr = true);
    let buffer = Held::new(device, 64).unwrap();
    let mut whole = tensor(F32, [16, 1, 1, 1]);
    buffer.place(&mut whole, 0);
    buffer.set(&mut whole, 0, &[3; 64]);
    host.0.lock().unwrap().gone = true;
    assert_eq!(compute(device, &mut [&raw mut whole]), -1);
    captured::take();
    assert_eq!(buffer.get(&whole, 0, 64), [3; 64]);
    let lines = captured::take();
    assert!(lines.len() == 1 && lines[0].contains("not valid and must not be stored"), "{lines:?}");
}

#[test]
fn t29_a_program_that_asks_for_it_ends_at_its_first_lost_read() {
    for from_ptr in [false, true] {
        // The child's own session: a status is a process's.
        let status = crate::link::in_fork(|| {
            let (link, host) = FakeLink::new();
            host.0.lock().unwrap().from_ptr = from_ptr;
            let device = device_over(3, Opener::new(forks_of(link)), OnLost::Exit);
            let buffer = Held::new(device, 64).unwrap();
            let mut whole = tensor(F32, [16, 1, 1, 1]);
            buffer.place(&mut whole, 0);
            buffer.set(&mut whole, 0, &[3; 64]);
            assert_eq!(buffer.get(&whole, 0, 64), [3; 64]);
            host.0.lock().unwrap().gone = true;
            assert_eq!(compute(device, &mut [&raw mut whole]), -1);
            buffer.set(&mut whole, 0, &[4; 64]);
            buffer.get(&whole, 0, 64);
            1
        });
        assert_eq!(status, 70);
    }
}

#[test]
fn t31_a_limit_on_mapped_buffers_is_told_once() {
    let (device, _host) = device(|script| {
        script.from_ptr = true;
        script.refuse_blobs = true;
    });
    captured::take();
    let buffers: Vec<_> = (0..50).map(|_| Held::new(device, 64).unwrap()).collect();
    let lines = captured::take();
    assert!(lines.len() == 1 && lines[0].contains("using a device buffer"), "{lines:?}");
    drop(buffers);
}

#[test]
fn t31_allocations_that_fail_by_the_thousand_are_counted_in_a_line_a_second() {
    let (device, host) = device(|_| {});
    host.0.lock().unwrap().refused.insert(Command::BufferTypeAllocBuffer, 1);
    captured::take();
    assert!((0..500).all(|_| Held::new(device, 64).is_none()));
    let lines = captured::take();
    assert!((1..50).contains(&lines.len()), "{} lines", lines.len());
}
