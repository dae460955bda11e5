//! Nodes that write over what they read, kernels that read behind a source, and sources without elements: row T28 of the cases.

use crate::harness::*;
use apir_protocol::handle::BufferHandle;
use apir_protocol::tensor::TensorRecord;

/// Operation numbers of ggml 0.26.
mod op {
    pub(super) const ACC: u32 = 5;
    pub(super) const SUM: u32 = 14;
    pub(super) const SUM_ROWS: u32 = 15;
    pub(super) const SET: u32 = 33;
    pub(super) const SET_ROWS: u32 = 42;
    pub(super) const ROPE: u32 = 48;
    pub(super) const PAD: u32 = 64;
}

/// Runs the body in processes of 1, 2 and 4 host threads. `test` is the path of the calling test.
fn with_threads(test: &str, body: impl FnOnce()) {
    const CHILD: &str = "APIR_TEST_CHILD";
    if std::env::var_os(CHILD).is_some_and(|name| name == test) {
        return body();
    }
    for threads in ["1", "2", "4"] {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args([test, "--exact", "--include-ignored"]).env(CHILD, test).env("APIR_HOST_THREADS", threads);
        let output = child.output().unwrap();
        let out = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && out.contains("1 passed"), "{threads} threads: {out}");
    }
}

fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|at| at as f32).collect()
}

/// A row of `n` floats of tensor 1, from float `at` on.
fn part(id: u64, buffer: BufferHandle, at: u32, n: u32) -> TensorRecord {
    let offset = u64::from(4 * at);
    let view = TensorRecord { op: OP_VIEW, view_src: 1, view_offs: offset, ..row(id, buffer, offset, n) };
    let mut op_params = [0; 16];
    op_params[0] = offset as i32;
    TensorRecord { op_params, src: [1, 0, 0, 0, 0, 0, 0, 0, 0, 0], ..view }
}

/// A copy from one part of tensor 1 to another, as ggml builds it: a view of what the target views.
fn copy(id: u64, from: &TensorRecord, to: &TensorRecord) -> TensorRecord {
    let mut src = [0; 10];
    (src[0], src[1]) = (from.id, to.id);
    TensorRecord { id, op: OP_CPY, flags: FLAG_COMPUTE, op_params: [0; 16], src, view_src: 1, ..*to }
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t28_copies_between_overlapping_views_read_before_they_write() {
    with_threads("overlaps::t28_copies_between_overlapping_views_read_before_they_write", || {
        let mut guest = Guest::start();
        let buffer = guest.buffer(65536);
        let count = 4096;
        let all = row(1, buffer, 0, count);
        for (from, to, length) in [(0, 16, 2048), (16, 0, 2048), (0, 1, 4000), (1, 0, 4000), (8, 8, 3000)] {
            guest.set(all, &bytes(&numbers(count as usize)));
            let (source, target) = (part(2, buffer, from, length), part(3, buffer, to, length));
            let tensors = [all, source, target, copy(4, &source, &target)];
            assert_eq!(guest.compute(&[4], &tensors), Ok(0), "{from} to {to}");
            let mut expected = numbers(count as usize);
            let (from, to, length) = (from as usize, to as usize, length as usize);
            expected.copy_within(from..from + length, to);
            assert_eq!(floats(&guest.get(all, 4 * count as usize)), expected, "{from} to {to}");
        }
        // Onto itself.
        let own = TensorRecord { view_offs: 0, ..copy(2, &all, &all) };
        guest.set(all, &bytes(&numbers(count as usize)));
        assert_eq!(guest.compute(&[2], &[all, own]), Ok(0));
        assert_eq!(floats(&guest.get(all, 4 * count as usize)), numbers(count as usize));
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t28_rows_set_out_of_the_same_table_are_those_before() {
    let mut guest = Guest::start();
    let buffer = guest.buffer(65536);
    let table = TensorRecord { ne: [4, 8, 1, 1], nb: [4, 16, 128, 128], ..row(1, buffer, 0, 32) };
    let rows = TensorRecord { ne: [4, 3, 1, 1], nb: [4, 16, 48, 48], ..part(2, buffer, 0, 12) };
    let ids = TensorRecord { type_: TYPE_I32, ..row(3, buffer, 4096, 3) };
    guest.set(table, &bytes(&numbers(32)));
    guest.set(ids, &ints(&[1, 2, 3]));
    let mut set = TensorRecord { id: 4, op: op::SET_ROWS, flags: FLAG_COMPUTE, view_src: 1, ..table };
    set.src[..3].copy_from_slice(&[2, 3, 1]);
    assert_eq!(guest.compute(&[4], &[table, rows, ids, set]), Ok(0));
    let mut expected = numbers(32);
    expected.copy_within(0..12, 4);
    assert_eq!(floats(&guest.get(table, 128)), expected);
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t28_sums_in_place_with_a_part_of_themselves_read_it_before() {
    let mut guest = Guest::start();
    let buffer = guest.buffer(65536);
    let all = row(1, buffer, 0, 64);
    guest.set(all, &bytes(&numbers(64)));
    let part = part(2, buffer, 0, 32);
    let mut sum = TensorRecord { id: 3, op: op::ACC, flags: FLAG_COMPUTE, view_src: 1, ..all };
    sum.src[..2].copy_from_slice(&[1, 2]);
    sum.op_params[..5].copy_from_slice(&[256, 256, 256, 64, 1]);
    assert_eq!(guest.compute(&[3], &[all, part, sum]), Ok(0));
    let mut expected = numbers(64);
    (0..32).for_each(|at| expected[16 + at] += at as f32);
    assert_eq!(floats(&guest.get(all, 256)), expected);
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t28_factors_at_the_end_of_a_buffer_are_enough_for_what_is_rotated() {
    let mut guest = Guest::start();
    let (buffer, small) = (guest.buffer(65536), guest.buffer(64));
    let a = TensorRecord { ne: [64, 1, 2, 1], nb: [4, 256, 256, 512], ..row(1, buffer, 0, 128) };
    let positions = TensorRecord { type_: TYPE_I32, ..row(2, buffer, 1024, 2) };
    // Eight pairs of 32 are rotated, and the buffer ends with their factors.
    let factors = row(3, small, 32, 8);
    guest.set(a, &bytes(&numbers(128)));
    guest.set(positions, &ints(&[1, 2]));
    guest.set(factors, &bytes(&[1.0; 8]));
    let mut turned = TensorRecord { id: 4, op: op::ROPE, flags: FLAG_COMPUTE, data: 2048, ..a };
    turned.src[..3].copy_from_slice(&[1, 2, 3]);
    let bits = |value: f32| value.to_bits() as i32;
    turned.op_params[..11].copy_from_slice(&[
        0,
        16,
        0,
        0,
        512,
        bits(1e4),
        bits(1.0),
        0,
        bits(1.0),
        bits(32.0),
        bits(1.0),
    ]);
    assert_eq!(guest.compute(&[4], &[a, positions, factors, turned]), Ok(0));
    let short = floats(&guest.get(turned, 512));
    let mut plain = turned;
    plain.src[2] = 0;
    assert_eq!(guest.compute(&[4], &[a, positions, plain]), Ok(0));
    assert_eq!(floats(&guest.get(turned, 512)), short, "factors of 1 change nothing");
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t28_what_no_program_builds_over_its_sources_is_refused() {
    let mut guest = Guest::start();
    let buffer = guest.buffer(4096);
    let a = row(1, buffer, 0, 64);
    // Memory of its own that is not its own.
    let fresh = node(2, buffer, 64, 64, OP_SQR, &[1]);
    assert_eq!(guest.compute(&[2], &[a, fresh]), Err(1));
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn t28_what_comes_of_sources_without_elements_is_what_the_cpu_computes() {
    let mut guest = Guest::start();
    let buffer = guest.buffer(65536);
    let mut scene = Scene::new(buffer);
    let (none, a, nothing) =
        (scene.leaf(TYPE_F32, &[0, 3]), scene.leaf(TYPE_F32, &[8, 4]), scene.leaf(TYPE_F32, &[0, 2]));
    let strides = [32, 128, 128, 8, 0];
    let made = [
        (scene.node(op::SUM, TYPE_F32, &[1], &[none], &[]), vec![0.0]),
        (scene.node(op::SUM_ROWS, TYPE_F32, &[1, 3], &[none], &[]), vec![0.0; 3]),
        (scene.node(op::PAD, TYPE_F32, &[3, 4], &[none], &[1, 2, 0, 1]), vec![0.0; 12]),
        (scene.node(op::ACC, TYPE_F32, &[8, 4], &[a, nothing], &strides), numbers(32)),
        (scene.node(op::SET, TYPE_F32, &[8, 4], &[a, nothing], &strides), numbers(32)),
    ];
    let all = *scene.get(a);
    guest.set(all, &bytes(&numbers(32)));
    for (id, expected) in &made {
        let result = *scene.get(*id);
        guest.set(result, &bytes(&vec![7.0; expected.len()]));
    }
    assert_eq!(scene.compute(&mut guest), Ok(0));
    for (id, expected) in made {
        let result = *scene.get(id);
        assert_eq!(floats(&guest.get(result, 4 * expected.len())), expected, "operation {}", result.op);
    }
}
