//! Hostile graphs: rows S6, S8 to S12 and S16 of the cases.

use crate::harness::*;
use apir_protocol::graph::{encode_graph, graph_size};
use apir_protocol::handle::BufferHandle;
use apir_protocol::messages::*;
use apir_protocol::tensor::TensorRecord;

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s06_graphs_that_are_none_are_refused() {
    let mut guest = Guest::start();
    let buffer = guest.buffer(4096);
    let a = row(1, buffer, 0, 4);
    let b = node(2, buffer, 64, 4, OP_SQR, &[1]);
    let c = node(3, buffer, 128, 4, OP_ADD, &[1, 2]);
    assert_eq!(guest.compute(&[2, 3], &[a, b, c]), Ok(0));
    let edit = |record: TensorRecord, change: fn(&mut TensorRecord)| {
        let mut record = record;
        change(&mut record);
        record
    };
    let cases: &[(&str, &[u64], &[TensorRecord])] = &[
        ("no nodes", &[], &[a]),
        ("id 0 as a node", &[0], &[a, b]),
        ("unknown node", &[9], &[a, b]),
        ("unknown source", &[2], &[b]),
        ("id 0 as a tensor", &[2], &[edit(a, |t| t.id = 0), a, b]),
        ("duplicate ids", &[2], &[a, a, b]),
        ("a node twice", &[2, 2], &[a, b]),
        ("nodes in the wrong order", &[3, 2], &[a, b, c]),
        ("tensors in the wrong order", &[2, 3], &[a, c, b]),
        ("its own source", &[2], &[a, edit(b, |t| t.src[0] = 2)]),
        ("its own view", &[2], &[a, edit(b, |t| t.view_src = 2)]),
        ("a cycle", &[2, 3], &[a, edit(b, |t| t.src[0] = 3), c]),
        ("a source without buffer", &[2], &[edit(a, |t| t.buffer = BufferHandle(0)), b]),
        ("an absolute address", &[2], &[edit(a, |t| (t.buffer, t.data) = (BufferHandle(0), 1 << 46)), b]),
        ("a node without buffer", &[2], &[a, edit(b, |t| (t.buffer, t.data) = (BufferHandle(0), 0))]),
        ("a node outside its buffer", &[2], &[a, edit(b, |t| t.data = 4092)]),
        ("a view elsewhere", &[3], &[a, b, edit(c, |t| (t.view_src, t.view_offs) = (1, 32))]),
        (
            "a view offset that wraps",
            &[3],
            &[a, edit(b, |t| t.data = 64), edit(c, |t| (t.view_src, t.view_offs) = (2, u64::MAX))],
        ),
        ("an unknown operation", &[2], &[a, edit(b, |t| t.op = 101)]),
        ("the largest operation", &[2], &[a, edit(b, |t| t.op = u32::MAX)]),
        ("a callback", &[2], &[a, edit(b, |t| t.op = OP_MAP_CUSTOM1)]),
        ("a callback without sources", &[2], &[a, edit(b, |t| t.op = OP_CUSTOM)]),
        ("a removed type", &[2], &[edit(a, |t| t.type_ = 33), b]),
    ];
    for (what, nodes, tensors) in cases {
        assert_eq!(guest.compute(nodes, tensors), Err(1), "{what}");
    }
    // A cast is its own second source, and that is no cycle.
    let cast = node(4, buffer, 192, 4, OP_CPY, &[1, 4]);
    assert_eq!(guest.compute(&[4], &[a, cast]), Ok(0));
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s08_every_truncation_and_every_count_of_a_graph_is_refused() {
    let mut guest = Guest::start();
    let buffer = guest.buffer(4096);
    let tensors = [row(1, buffer, 0, 4), node(2, buffer, 64, 4, OP_SQR, &[1])];
    let mut graph = vec![0; graph_size(1, 2) as usize];
    encode_graph(&[2], &tensors, &mut graph).unwrap();
    for len in 0..graph.len() {
        assert_eq!(guest.compute_bytes(&graph[..len]), Err(1), "{len} bytes");
    }
    for at in [0, 12] {
        for count in [0x1000_0000u32, 0x2000_0000, 0x8000_0000, u32::MAX] {
            let mut forged = graph.clone();
            forged[at..at + 4].copy_from_slice(&count.to_le_bytes());
            assert_eq!(guest.compute_bytes(&forged), Err(1), "count {count:#x} at {at}");
        }
    }
    let res_id = guest.blob(&graph);
    for size in [4097, 1 << 40, u64::MAX] {
        assert_eq!(guest.try_call(&BackendGraphComputeRequest { res_id, size }), Err(1));
    }
    graph.extend([0xff; 64]);
    assert_eq!(guest.compute_bytes(&graph), Ok(0), "bytes behind the graph are not looked at");
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s16_a_chain_of_100_000_tensors_is_walked_without_recursion() {
    let mut guest = Guest::start();
    let buffer = guest.buffer(4096);
    let mut tensors = vec![row(1, buffer, 0, 1)];
    // Each is made of the one before, and all look at the first, as ggml flattens views.
    for id in 2..=100_000 {
        tensors.push(TensorRecord { view_src: 1, ..node(id, buffer, 0, 1, OP_VIEW, &[id - 1]) });
    }
    tensors.push(node(100_001, buffer, 64, 1, OP_SQR, &[100_000]));
    assert_eq!(guest.compute(&[100_001], &tensors), Ok(0));
    // A view of a view of a view: none of ggml's.
    for tensor in &mut tensors[1..100_000] {
        tensor.view_src = tensor.id - 1;
    }
    assert_eq!(guest.compute(&[100_001], &tensors), Err(1));
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s09_shapes_that_no_tensor_has_are_refused() {
    let mut guest = Guest::start();
    let buffer = guest.buffer(4096);
    type Change = fn(&mut TensorRecord);
    let cases: &[(&str, Change)] = &[
        ("a product that overflows", |t| t.ne = [u32::MAX; 4]),
        ("a product that wraps to few", |t| t.ne = [1 << 16, 1 << 16, 1 << 16, 1 << 16]),
        ("a dimension that a C int holds as negative", |t| t.ne[1] = 1 << 31),
        ("part of a block", |t| (t.type_, t.ne[0], t.nb) = (TYPE_Q8_0, 31, [34, 34, 34, 34])),
        ("blocks spread out", |t| (t.type_, t.ne[0], t.nb) = (TYPE_Q8_0, 64, [68, 136, 136, 136])),
        ("strides beyond the buffer", |t| (t.ne, t.nb) = ([4, 2, 1, 1], [4, 1 << 30, 1 << 31, 1 << 31])),
        ("rows on top of each other", |t| (t.ne, t.nb) = ([4, 4, 1, 1], [4, 0, 0, 0])),
        ("elements on top of each other", |t| t.nb[0] = 0),
        ("elements that overlap", |t| t.nb[0] = 2),
        ("elements that are split", |t| t.nb[0] = 6),
    ];
    for (what, change) in cases {
        let mut a = row(1, buffer, 0, 4);
        change(&mut a);
        let b = TensorRecord { ne: a.ne, ..node(2, buffer, 2048, 4, OP_SQR, &[1]) };
        assert_eq!(guest.compute(&[2], &[a, b]), Err(1), "{what}");
        let copy = BufferCpyTensorRequest { buffer, source: a, destination: a };
        assert_eq!(guest.try_call(&copy), Err(1), "copy of {what}");
    }
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s10_operations_that_hold_functions_are_refused() {
    in_child("graphs::s10_operations_that_hold_functions_are_refused", || {
        let mut guest = Guest::start();
        let buffer = guest.buffer(4096);
        let a = row(1, buffer, 0, 4);
        for op in OP_MAP_CUSTOM1..=OP_CUSTOM {
            let mut custom = node(2, buffer, 64, 4, op, &[1, 1, 1]);
            // The address, the number of tasks, the user's data.
            custom.op_params[..4].copy_from_slice(&[0x41414141, 0x4141, 1, 0]);
            assert_eq!(guest.compute(&[2], &[a, custom]), Err(1), "operation {op}");
            // Nor as a tensor that is no node.
            assert_eq!(guest.compute(&[3], &[a, custom, node(3, buffer, 128, 4, OP_SQR, &[2])]), Err(1));
        }
        guest.assert_alive();
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s11_a_graph_sent_again_after_a_free_is_refused() {
    in_child("graphs::s11_a_graph_sent_again_after_a_free_is_refused", || {
        let mut guest = Guest::start();
        let (weights, results) = (guest.buffer(1 << 20), guest.buffer(1 << 20));
        let a = row(1, weights, 0, 1024);
        let graph = [a, node(2, results, 64, 1024, OP_SQR, &[1])];
        for _ in 0..3 {
            assert_eq!(guest.compute(&[2], &graph), Ok(0), "the same bytes, again and again");
        }
        guest.call(&BufferFreeBufferRequest { buffer: weights });
        assert_eq!(guest.compute(&[2], &graph), Err(1), "the source's buffer is gone");
        // Another buffer in its place, in memory and in the table, is not taken for it.
        let next = guest.buffer(1 << 20);
        assert_eq!(next.0 as u32, weights.0 as u32, "the table's slot is used again");
        assert_eq!(guest.compute(&[2], &graph), Err(1));
        let moved = [TensorRecord { buffer: next, ..a }, graph[1]];
        assert_eq!(guest.compute(&[2], &moved), Ok(0));
        guest.call(&BufferFreeBufferRequest { buffer: results });
        assert_eq!(guest.compute(&[2], &moved), Err(1), "the result's buffer is gone");
        guest.assert_alive();
    });
}

const OP_ACC: u32 = 5;
const OP_SET: u32 = 33;

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s12_patches_outside_their_tensor_are_refused() {
    in_child("graphs::s12_patches_outside_their_tensor_are_refused", || {
        let mut guest = Guest::start();
        let buffer = guest.buffer(64 << 10);
        for op in [OP_ACC, OP_SET] {
            let patch = |params: [i32; 5]| {
                let mut scene = Scene::new(buffer);
                let (a, b) = (scene.leaf(TYPE_F32, &[16, 4]), scene.leaf(TYPE_F32, &[4, 2]));
                scene.node(op, TYPE_F32, &[16, 4], &[a, b], &params);
                scene
            };
            assert_eq!(patch([64, 256, 256, 176, 0]).compute(&mut guest), Ok(0), "the last place that fits");
            for params in [
                [64, 256, 256, 180, 0],
                [64, 256, 256, 178, 0],
                [-64, 256, 256, 64, 0],
                [64, -256, 256, 0, 0],
                [64, 256, -256, 0, 0],
                [64, 256, 256, -4, 0],
                [0, 256, 256, 0, 0],
                [i32::MAX - 3, 256, 256, 0, 0],
                [i32::MIN, 256, 256, 0, 0],
                [64, 256, 256, i32::MAX - 3, 0],
                [64, 256, 256, 0, 1],
                [64, 256, 256, 0, 2],
            ] {
                assert_eq!(patch(params).compute(&mut guest), Err(1), "operation {op}, {params:?}");
            }
        }
        guest.assert_alive();
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn nodes_that_are_not_marked_are_not_computed() {
    let mut guest = Guest::start();
    let buffer = guest.buffer(4096);
    let a = row(1, buffer, 0, 4);
    guest.set(a, &bytes(&[2.0; 4]));
    let unmarked = TensorRecord { flags: 0, ..node(2, buffer, 64, 4, OP_SQR, &[1]) };
    assert_eq!(guest.compute(&[2], &[a, unmarked]), Ok(0), "nothing to do");
    assert_eq!(guest.get(row(2, buffer, 64, 4), 16), [0; 16]);
    // What a way that is not taken is made of may lie anywhere.
    let nowhere = TensorRecord { buffer: BufferHandle(0), data: 0, ..row(4, buffer, 0, 4) };
    let other = TensorRecord { flags: 0, ..node(5, buffer, 192, 4, OP_SQR, &[4]) };
    let taken = node(3, buffer, 128, 4, OP_SQR, &[1]);
    assert_eq!(guest.compute(&[2, 5, 3], &[a, unmarked, nowhere, other, taken]), Ok(0));
    assert_eq!(floats(&guest.get(taken, 16)), [4.0; 4]);
}
