use super::*;
use crate::backend::log::captured;
use apir_protocol::graph::{GraphReader, encode_graph};
use apir_protocol::handle::BufferHandle;
use apir_protocol::tensor::TensorRecord;

fn id(tensor: *const abi::Tensor) -> u64 {
    tensor.addr() as u64
}

#[test]
fn a_graph_with_views_is_written_as_by_hand() {
    let (device, host) = device(|_| {});
    let buffer = Held::new(device, 1024).unwrap();
    let mut leaf = abi::Tensor { flags: 1, ..tensor(F32, [8, 2, 1, 1]) };
    leaf.name[..4].copy_from_slice(b"leaf");
    buffer.place(&mut leaf, 64);
    let leaf_at = &raw mut leaf;
    let mut view = abi::Tensor { op: VIEW, view_src: leaf_at, view_offs: 32, ..tensor(F32, [8, 1, 1, 1]) };
    view.src[0] = leaf_at;
    buffer.place(&mut view, 96);
    let view_at = &raw mut view;
    let mut sum = abi::Tensor { op: ADD, flags: 16, ..tensor(F32, [8, 1, 1, 1]) };
    sum.src[..3].copy_from_slice(&[view_at, ptr::null_mut(), leaf_at]);
    sum.op_params[0] = -5;
    buffer.place(&mut sum, 256);
    let sum_at = &raw mut sum;
    // Reached only by its view.
    let mut hidden = abi::Tensor { buffer: buffer.0, ..tensor(F32, [8, 1, 1, 1]) };
    buffer.place(&mut hidden, 512);
    let mut last = abi::Tensor { op: VIEW, view_src: &raw mut hidden, ..tensor(F32, [8, 1, 1, 1]) };
    buffer.place(&mut last, 512);
    let last_at = &raw mut last;
    assert_eq!(compute(device, &mut [view_at, sum_at, last_at]), 0);

    let dense = TensorRecord {
        type_: F32,
        buffer: BufferHandle(1),
        ne: [8, 1, 1, 1],
        nb: [4, 32, 32, 32],
        ..TensorRecord::default()
    };
    let mut name = [0; 64];
    name[..4].copy_from_slice(b"leaf");
    let with = |sources: &[(usize, *mut abi::Tensor)]| {
        let mut src = [0; 10];
        sources.iter().for_each(|(at, tensor)| src[*at] = id(*tensor));
        src
    };
    let mut params = [0; 16];
    params[0] = -5;
    let records = [
        TensorRecord {
            id: id(leaf_at),
            ne: [8, 2, 1, 1],
            nb: [4, 32, 64, 64],
            flags: 1,
            data: 64,
            name,
            ..dense
        },
        TensorRecord {
            id: id(view_at),
            op: VIEW,
            src: with(&[(0, leaf_at)]),
            view_src: id(leaf_at),
            view_offs: 32,
            data: 96,
            ..dense
        },
        TensorRecord {
            id: id(sum_at),
            op: ADD,
            op_params: params,
            flags: 16,
            src: with(&[(0, view_at), (2, leaf_at)]),
            data: 256,
            ..dense
        },
        TensorRecord { id: id(&raw const hidden), data: 512, ..dense },
        TensorRecord { id: id(last_at), op: VIEW, view_src: id(&raw const hidden), data: 512, ..dense },
    ];
    let mut by_hand = vec![0; 8 + 3 * 8 + 5 * 304];
    encode_graph(&[id(view_at), id(sum_at), id(last_at)], &records, &mut by_hand).unwrap();
    assert!(host.0.lock().unwrap().graph == by_hand);
}

#[test]
fn what_is_no_node_is_data() {
    let (device, host) = device(|_| {});
    let buffer = Held::new(device, 256).unwrap();
    let mut elsewhere = abi::Tensor { data: ptr::without_provenance_mut(64), ..tensor(F32, [8, 1, 1, 1]) };
    // What another part of the program's graph made, out of another device's memory.
    let mut made = abi::Tensor { op: ADD, flags: 16, ..tensor(F32, [8, 1, 1, 1]) };
    made.src[0] = &raw mut elsewhere;
    made.op_params[3] = 7;
    buffer.place(&mut made, 0);
    let mut sum = abi::Tensor { op: ADD, flags: 16, ..tensor(F32, [8, 1, 1, 1]) };
    sum.src[0] = &raw mut made;
    buffer.place(&mut sum, 64);
    assert_eq!(compute(device, &mut [&raw mut sum]), 0);
    let script = host.0.lock().unwrap();
    let records: Vec<_> = GraphReader::parse(&script.graph).unwrap().tensors().collect();
    let [data, node] = &records[..] else { panic!("{records:?}") };
    assert_eq!((data.op, data.src, data.op_params, data.data), (NONE, [0; 10], [0; 16], 0));
    assert_eq!((node.op, node.src[0]), (ADD, data.id));
}

#[test]
fn views_of_another_device_s_memory_are_left_out() {
    let (device, host) = device(|_| {});
    let buffer = Held::new(device, 256).unwrap();
    let (other, _) = self::device(|_| {});
    let theirs = Held::new(other, 256).unwrap();
    let mut leaf = tensor(F32, [8, 1, 1, 1]);
    theirs.place(&mut leaf, 0);
    let mut view = abi::Tensor { op: VIEW, view_src: &raw mut leaf, ..tensor(F32, [4, 2, 1, 1]) };
    view.src[0] = &raw mut leaf;
    theirs.place(&mut view, 0);
    let calls = host.0.lock().unwrap().types.len();
    assert_eq!(compute(device, &mut [&raw mut view]), 0, "nothing to compute");
    assert_eq!(host.0.lock().unwrap().types.len(), calls);
    let mut sum = abi::Tensor { op: ADD, flags: 16, ..tensor(F32, [8, 1, 1, 1]) };
    buffer.place(&mut sum, 64);
    assert_eq!(compute(device, &mut [&raw mut view, &raw mut sum]), 0);
    let graph = host.0.lock().unwrap().graph.clone();
    assert_eq!(GraphReader::parse(&graph).unwrap().node_ids().collect::<Vec<_>>(), [id(&raw const sum)]);
    // What is computed of such memory is not.
    sum.src[0] = &raw mut view;
    captured::take();
    assert_eq!(compute(device, &mut [&raw mut view, &raw mut sum]), -1);
    assert!(captured::take()[0].contains("not this device's"));
}

#[test]
fn statuses_pass_and_unknown_ones_are_failures() {
    let (device, host) = device(|_| {});
    let mut node = tensor(F32, [1, 1, 1, 1]);
    for (told, seen) in [(-2, -2), (-1, -1), (0, 0), (1, 1), (2, -1), (i32::MIN, -1)] {
        host.0.lock().unwrap().status = told;
        assert_eq!(compute(device, &mut [&raw mut node]), seen);
    }
}

#[test]
fn a_graph_without_nodes_needs_no_call() {
    let (device, host) = device(|_| {});
    let calls = host.0.lock().unwrap().types.len();
    assert_eq!(compute(device, &mut []), 0);
    assert_eq!(host.0.lock().unwrap().types.len(), calls);
}

#[test]
fn a_graph_of_the_same_identity_is_not_written_again() {
    let (device, host) = device(|_| {});
    let backend = HeldBackend::new(device);
    let mut node = tensor(F32, [1, 1, 1, 1]);
    let at = &raw mut node;
    let compute = |flags, uid| {
        // SAFETY: nobody else reads the node meanwhile.
        unsafe { (*at).flags = flags };
        assert_eq!(backend.compute(&mut [at], uid), 0);
        GraphReader::parse(&host.0.lock().unwrap().graph).unwrap().tensors().next().unwrap().flags
    };
    assert_eq!([compute(1, 5), compute(2, 5), compute(3, 6)], [1, 1, 3]);
    assert_eq!([compute(4, 0), compute(5, 0), compute(6, 6)], [4, 5, 6]);
}

#[test]
fn a_chain_of_a_hundred_thousand_sources_is_written() {
    let (device, host) = device(|_| {});
    let mut chain = vec![abi::Tensor { op: ADD, ..tensor(F32, [1, 1, 1, 1]) }; 100_000];
    let first = chain.as_mut_ptr();
    for (index, link) in chain.iter_mut().enumerate().skip(1) {
        link.src[index % 10] = first.wrapping_add(index - 1);
    }
    // The last comes first, and on a small stack: the depth must not matter.
    let addresses: Vec<usize> =
        (0..chain.len()).rev().map(|index| first.wrapping_add(index).expose_provenance()).collect();
    let worker = std::thread::Builder::new().stack_size(256 << 10).spawn(move || {
        let mut nodes: Vec<_> =
            addresses.into_iter().map(ptr::with_exposed_provenance_mut::<abi::Tensor>).collect();
        compute(device, &mut nodes)
    });
    assert_eq!(worker.unwrap().join().unwrap(), 0);
    let script = host.0.lock().unwrap();
    let graph = GraphReader::parse(&script.graph).unwrap();
    assert_eq!((graph.node_count(), graph.tensor_count()), (100_000, 100_000));
    assert!(graph.tensors().zip(&chain).all(|(record, tensor)| record.id == id(tensor)));
}

#[test]
fn what_cannot_travel_fails_with_a_line() {
    let (device, _) = device(|_| {});
    let wide = tensor(F32, [1 << 32, 1, 1, 1]);
    let homeless = abi::Tensor { data: ptr::without_provenance_mut(64), ..tensor(F32, [1, 1, 1, 1]) };
    for (mut node, says) in [(wide, "4294967296 elements"), (homeless, "in no buffer")] {
        captured::take();
        assert_eq!(compute(device, &mut [&raw mut node]), -1);
        let lines = captured::take();
        assert!(lines.len() == 1 && lines[0].contains(says), "{lines:?}");
    }
}

#[test]
fn an_empty_tensor_in_ggmls_buffer_of_no_bytes_travels_without_a_place() {
    let (device, host) = device(|_| {});
    let ours = Held::new(device, 64).unwrap();
    let mut none = abi::Buffer {
        iface: abi::BufferIface { free_buffer: None, ..ours.iface() },
        buft: device.buffer_type(),
        context: ptr::null_mut(),
        size: 0,
        usage: 0,
    };
    let mut empty = abi::Tensor { buffer: &raw mut none, ..tensor(F32, [0, 1, 1, 1]) };
    assert_eq!(compute(device, &mut [&raw mut empty]), 0);
    let script = host.0.lock().unwrap();
    let record = GraphReader::parse(&script.graph).unwrap().tensors().next().unwrap();
    assert_eq!((record.buffer, record.data), (BufferHandle(0), 0));
}
