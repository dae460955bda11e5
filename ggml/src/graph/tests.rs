use super::*;

const RMS_NORM: u32 = 25;
const MUL: u32 = 7;

fn vector(op: u32, src: &[usize]) -> TensorSpec<'static> {
    let mut spec = TensorSpec {
        ne: [8, 1, 1, 1],
        nb: [4, 32, 32, 32],
        op,
        flags: if op == abi::OP_NONE { 0 } else { abi::FLAG_COMPUTE },
        ..TensorSpec::default()
    };
    for (slot, &source) in spec.src.iter_mut().zip(src) {
        *slot = Some(source);
    }
    spec
}

/// The index of a pointer of the graph.
fn index(graph: &Graph, tensor: *mut abi::Tensor) -> usize {
    (0..graph.len()).find(|&index| graph.tensor(index).unwrap().as_ptr() == tensor.cast_const()).unwrap()
}

/// The use count, found as a backend finds it.
fn use_count(graph: &Graph, tensor: usize) -> i32 {
    let set = &graph.cgraph.visited_hash_set;
    let pointer = graph.tensor(tensor).unwrap().as_ptr();
    let mut slot = (pointer.addr() >> 4) % set.size;
    // SAFETY: the graph lives and its set has `size` slots.
    unsafe {
        while *set.keys.add(slot) != pointer.cast_mut() {
            assert_ne!(*set.used.add(slot / 32) & (1 << (slot % 32)), 0, "tensor {tensor} is in the set");
            slot = (slot + 1) % set.size;
        }
        *graph.cgraph.use_counts.add(slot)
    }
}

fn entries(graph: &Graph, list: *mut *mut abi::Tensor, count: c_int) -> Vec<usize> {
    // SAFETY: the graph lives and the list has `count` entries.
    (0..count as usize).map(|at| index(graph, unsafe { *list.add(at) })).collect()
}

#[test]
fn nodes_leafs_and_use_counts_are_as_ggml_leaves_them() {
    let mut builder = GraphBuilder::new();
    let x = builder.add_tensor(&vector(abi::OP_NONE, &[])).unwrap();
    let weight = builder.add_tensor(&vector(abi::OP_NONE, &[])).unwrap();
    let norm = builder.add_tensor(&vector(RMS_NORM, &[x])).unwrap();
    let product = builder.add_tensor(&vector(MUL, &[norm, weight])).unwrap();
    let square = builder.add_tensor(&vector(MUL, &[product, product])).unwrap();
    let graph = builder.finish(&[norm, product, square], 7).unwrap();
    let cgraph = &graph.cgraph;
    assert_eq!(entries(&graph, cgraph.nodes, cgraph.n_nodes), [norm, product, square]);
    assert_eq!(entries(&graph, cgraph.leafs, cgraph.n_leafs), [x, weight]);
    assert_eq!([x, weight, norm, product, square].map(|tensor| use_count(&graph, tensor)), [1, 1, 1, 2, 0]);
    assert_eq!((cgraph.uid, cgraph.order, cgraph.size), (7, 0, 3));
    assert_eq!(cgraph.visited_hash_set.size, 11);
    assert!(cgraph.grads.is_null() && cgraph.grad_accs.is_null());
}

#[test]
fn a_graph_may_be_moved() {
    let mut builder = GraphBuilder::new();
    let x = builder.add_tensor(&vector(abi::OP_NONE, &[])).unwrap();
    let y = builder.add_tensor(&vector(MUL, &[x, x])).unwrap();
    let graph = Box::new(builder.finish(&[y], 0).unwrap());
    let graph = std::thread::spawn(move || *graph).join().unwrap();
    let sources = graph.tensor(y).unwrap().sources();
    assert_eq!(sources[0], graph.tensor(x));
    assert_eq!(sources[1], graph.tensor(x));
    assert_eq!(sources[2], None);
}

#[test]
fn given_use_counts_hold_and_parameters_are_no_leafs() {
    let mut builder = GraphBuilder::new();
    let x = builder.add_tensor(&TensorSpec { use_count: Some(5), ..vector(abi::OP_NONE, &[]) }).unwrap();
    let parameter =
        builder.add_tensor(&TensorSpec { flags: abi::FLAG_PARAM, ..vector(abi::OP_NONE, &[]) }).unwrap();
    let earlier = builder.add_tensor(&vector(MUL, &[x, x])).unwrap();
    let sum = builder.add_tensor(&vector(MUL, &[earlier, parameter])).unwrap();
    let graph = builder.finish(&[sum], 0).unwrap();
    assert_eq!(use_count(&graph, x), 5);
    assert_eq!(use_count(&graph, parameter), 1);
    assert_eq!(entries(&graph, graph.cgraph.leafs, graph.cgraph.n_leafs), [x]);
}

#[test]
fn operands_may_come_later() {
    let mut builder = GraphBuilder::new();
    let sum = builder.add_tensor(&vector(MUL, &[1, 2])).unwrap();
    builder.add_tensor(&vector(abi::OP_NONE, &[])).unwrap();
    builder.add_tensor(&vector(abi::OP_NONE, &[])).unwrap();
    let graph = builder.finish(&[sum], 0).unwrap();
    assert_eq!(graph.tensor(sum).unwrap().sources()[1], graph.tensor(2));
}

#[test]
fn indices_of_no_tensor_are_refused() {
    let one = || {
        let mut builder = GraphBuilder::new();
        builder.add_tensor(&vector(abi::OP_NONE, &[])).unwrap();
        builder
    };
    let refused = |error: Error| matches!(error, Error::NoTensor { count, .. } if count < 3);
    assert!(refused(one().finish(&[1], 0).unwrap_err()));
    for missing in [2, u32::MAX as usize, 1 << 32, usize::MAX] {
        let mut builder = one();
        builder.add_tensor(&vector(MUL, &[0, missing])).unwrap();
        assert!(refused(builder.finish(&[], 0).unwrap_err()), "operand {missing}");
        let mut builder = one();
        builder.add_tensor(&TensorSpec { view_src: Some(missing), ..vector(0, &[]) }).unwrap();
        assert!(refused(builder.finish(&[], 0).unwrap_err()), "view of {missing}");
    }
}

#[test]
fn bad_tensors_are_refused() {
    let mut builder = GraphBuilder::new();
    let unknown = TensorSpec { type_: 4, ..vector(0, &[]) };
    assert!(matches!(builder.add_tensor(&unknown), Err(Error::Extent(_))));
    let homeless = TensorSpec { data: 64, ..vector(0, &[]) };
    assert!(matches!(builder.add_tensor(&homeless), Err(Error::NoBuffer { index: 0, data: 64 })));
    assert!(builder.is_empty());
}

#[test]
fn names_are_cut_and_closed() {
    let mut builder = GraphBuilder::new();
    let long = [b'x'; 100];
    for (given, kept) in [(&b"abc"[..], 3), (&b"ab\0c"[..], 2), (&long[..], 63), (&b""[..], 0)] {
        let index = builder.add_tensor(&TensorSpec { name: given, ..vector(0, &[]) }).unwrap();
        assert_eq!(builder.tensors[index].name[kept], 0);
        assert_eq!(&builder.tensors[index].name[..kept], &given[..kept]);
    }
}

#[test]
fn an_empty_graph_is_a_graph() {
    let graph = GraphBuilder::new().finish(&[], 0).unwrap();
    assert!(graph.is_empty());
    assert_eq!((graph.cgraph.n_nodes, graph.cgraph.n_leafs, graph.node_count()), (0, 0, 0));
    assert!(graph.into_builder().is_empty());
}

#[test]
fn hash_sizes_are_ggmls_primes() {
    assert_eq!([0, 2, 3, 4, 6, 4096, 4100].map(hash_size), [2, 2, 3, 5, 11, 4099, 8209]);
    assert!(hash_size(2 * MAX_TENSORS) >= 2 * MAX_TENSORS);
}

#[test]
fn a_part_has_some_nodes_and_the_use_counts_of_the_whole() {
    let mut builder = GraphBuilder::new();
    let x = builder.add_tensor(&vector(abi::OP_NONE, &[])).unwrap();
    let norm = builder.add_tensor(&vector(RMS_NORM, &[x])).unwrap();
    let product = builder.add_tensor(&vector(MUL, &[norm, x])).unwrap();
    let square = builder.add_tensor(&vector(MUL, &[product, product])).unwrap();
    let mut graph = builder.finish(&[norm, product, square], 7).unwrap();
    for (range, nodes) in
        [(0..3, vec![norm, product, square]), (1..2, vec![product]), (2..9, vec![square]), (5..9, vec![])]
    {
        let part = graph.part(range);
        assert_eq!(entries(&graph, part.nodes, part.n_nodes), nodes);
        assert_eq!((part.n_leafs, part.uid, part.size), (0, 0, nodes.len() as c_int));
        assert_eq!(part.use_counts, graph.cgraph.use_counts);
        assert_eq!(part.visited_hash_set.size, graph.cgraph.visited_hash_set.size);
    }
}
