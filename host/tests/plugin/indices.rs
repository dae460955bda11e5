//! Contents that address memory: row S14 of the cases.

use crate::harness::*;
use apir_protocol::handle::BufferHandle;
use apir_protocol::messages::*;

/// Operation numbers of ggml 0.26.
const OP_ADD_ID: u32 = 3;
const OP_MUL_MAT_ID: u32 = 30;
const OP_SCALE: u32 = 32;
const OP_CONT: u32 = 35;
const OP_GET_ROWS: u32 = 40;
const OP_GET_ROWS_BACK: u32 = 41;
const OP_SET_ROWS: u32 = 42;
const OP_ARGSORT: u32 = 69;
const OP_TOP_K: u32 = 70;
const OP_SSM_SCAN: u32 = 77;

/// A buffer that the guest shares, and one that it does not.
fn buffers(guest: &mut Guest) -> [BufferHandle; 2] {
    let res_id = guest.blob(&vec![0; 1 << 20]);
    let request = DeviceBufferFromPtrRequest { res_id, size: 1 << 20, max_tensor_size: 1 << 20 };
    [guest.call(&request).buffer, guest.buffer(1 << 20)]
}

/// A scene with one source of indices, whose id is given, and the first index that is too large.
type Indexed = fn(BufferHandle) -> (Scene, u64, i32);

const INDEXED: &[(&str, Indexed)] = &[
    ("GET_ROWS", |buffer| {
        let mut scene = Scene::new(buffer);
        let (table, ids) = (scene.leaf(TYPE_F32, &[32, 9]), scene.leaf(TYPE_I32, &[3]));
        scene.node(OP_GET_ROWS, TYPE_F32, &[32, 3], &[table, ids], &[]);
        (scene, ids, 9)
    }),
    ("GET_ROWS_BACK", |buffer| {
        let mut scene = Scene::new(buffer);
        let (rows, ids) = (scene.leaf(TYPE_F32, &[32, 3]), scene.leaf(TYPE_I32, &[3]));
        scene.node(OP_GET_ROWS_BACK, TYPE_F32, &[32, 9], &[rows, ids], &[]);
        (scene, ids, 9)
    }),
    ("SET_ROWS", |buffer| {
        let mut scene = Scene::new(buffer);
        let (rows, ids) = (scene.leaf(TYPE_F32, &[32, 3]), scene.leaf(TYPE_I32, &[3]));
        let target = scene.leaf(TYPE_F32, &[32, 9]);
        scene.over(OP_SET_ROWS, target, &[rows, ids, target], &[]);
        (scene, ids, 9)
    }),
    ("MUL_MAT_ID", |buffer| {
        let mut scene = Scene::new(buffer);
        let (experts, b) = (scene.leaf(TYPE_Q8_0, &[64, 8, 5]), scene.leaf(TYPE_F32, &[64, 1, 3]));
        let ids = scene.leaf(TYPE_I32, &[1, 3]);
        scene.node(OP_MUL_MAT_ID, TYPE_F32, &[8, 1, 3], &[experts, b, ids], &[]);
        (scene, ids, 5)
    }),
    ("ADD_ID", |buffer| {
        let mut scene = Scene::new(buffer);
        let (a, b) = (scene.leaf(TYPE_F32, &[32, 1, 3]), scene.leaf(TYPE_F32, &[32, 5]));
        let ids = scene.leaf(TYPE_I32, &[1, 3]);
        scene.node(OP_ADD_ID, TYPE_F32, &[32, 1, 3], &[a, b, ids], &[]);
        (scene, ids, 5)
    }),
    ("SSM_SCAN", |buffer| {
        let mut scene = Scene::new(buffer);
        let state = scene.leaf(TYPE_F32, &[16, 4, 2, 9]);
        let (x, dt) = (scene.leaf(TYPE_F32, &[4, 2, 5, 3]), scene.leaf(TYPE_F32, &[2, 5, 3]));
        let a = scene.leaf(TYPE_F32, &[1, 2]);
        let (b, c) = (scene.leaf(TYPE_F32, &[16, 1, 5, 3]), scene.leaf(TYPE_F32, &[16, 1, 5, 3]));
        let ids = scene.leaf(TYPE_I32, &[3]);
        scene.node(OP_SSM_SCAN, TYPE_F32, &[120 + 384], &[state, x, dt, a, b, c, ids], &[1]);
        (scene, ids, 9)
    }),
];

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s14_indices_out_of_range_are_refused_and_other_contexts_live() {
    in_child("indices::s14_indices_out_of_range_are_refused_and_other_contexts_live", || {
        let (mut guest, other) = (Guest::start(), Guest::start());
        for buffer in buffers(&mut guest) {
            for (op, scene) in INDEXED {
                let (mut scene, ids, limit) = scene(buffer);
                let record = *scene.get(ids);
                for (values, expected) in [
                    ([0, 1, limit - 1], Ok(0)),
                    ([0, limit, 1], Err(1)),
                    ([0, 1, -1], Err(1)),
                    ([i32::MAX, 0, 1], Err(1)),
                    ([0, i32::MIN, 1], Err(1)),
                    ([1, 0, 2], Ok(0)),
                ] {
                    guest.set(record, &ints(&values));
                    assert_eq!(scene.compute(&mut guest), expected, "{op} of {values:?}");
                }
            }
        }
        guest.assert_alive();
        other.assert_alive();
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s14_wide_indices_are_looked_at_whole() {
    in_child("indices::s14_wide_indices_are_looked_at_whole", || {
        let mut guest = Guest::start();
        for buffer in buffers(&mut guest) {
            let mut scene = Scene::new(buffer);
            let (rows, ids) = (scene.leaf(TYPE_F32, &[32, 2]), scene.leaf(TYPE_I64, &[2]));
            let target = scene.leaf(TYPE_F16, &[32, 9]);
            scene.over(OP_SET_ROWS, target, &[rows, ids, target], &[]);
            let record = *scene.get(ids);
            guest.set(*scene.get(rows), &bytes(&[2.0; 64]));
            for (values, expected) in
                [([8i64, 0], Ok(0)), ([1 << 32, 0], Err(1)), ([0, i64::MIN], Err(1)), ([0, 9], Err(1))]
            {
                let raw: Vec<_> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
                guest.set(record, &raw);
                assert_eq!(scene.compute(&mut guest), expected, "{values:?}");
            }
            // 2.0 in 16 bits, in rows 0 and 8 and nowhere else.
            let halves = guest.get(*scene.get(target), 9 * 64);
            for (row, bytes) in halves.chunks(64).enumerate() {
                let expected = if row == 0 || row == 8 { [0, 0x40] } else { [0, 0] };
                assert!(bytes.chunks(2).all(|half| half == expected), "row {row}");
            }
        }
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s14_indices_that_the_graph_computes_are_looked_at_between() {
    in_child("indices::s14_indices_that_the_graph_computes_are_looked_at_between", || {
        let mut guest = Guest::start();
        for buffer in buffers(&mut guest) {
            let mut scene = Scene::new(buffer);
            let (table, values) = (scene.leaf(TYPE_F32, &[4, 9]), scene.leaf(TYPE_F32, &[3]));
            let doubled = scene.node(OP_SCALE, TYPE_F32, &[3], &[values], &[2.0f32.to_bits() as i32]);
            let ids = scene.node(OP_CPY, TYPE_I32, &[3], &[doubled], &[]);
            scene.get(ids).src[1] = ids;
            let rows = scene.node(OP_GET_ROWS, TYPE_F32, &[4, 3], &[table, ids], &[]);
            let last = scene.node(OP_SQR, TYPE_F32, &[4, 3], &[rows], &[]);
            let all: Vec<f32> = (0..36).map(|element| (element / 4) as f32).collect();
            guest.set(*scene.get(table), &bytes(&all));
            for (picked, expected) in [
                ([4.0, 0.0, 1.0], Ok(0)),
                ([4.5, 0.0, 1.0], Err(1)),
                ([0.0, -1.0, 0.0], Err(1)),
                ([f32::NAN, 0.0, 0.0], Err(1)),
                ([1.0, 2.0, 3.0], Ok(0)),
            ] {
                guest.set(*scene.get(values), &bytes(&picked));
                // The same bytes are not looked at again, what lies in the buffers is.
                assert_eq!(scene.compute(&mut guest), expected, "{picked:?}");
                if expected.is_ok() {
                    let squares = floats(&guest.get(*scene.get(last), 48));
                    let expected: Vec<_> = picked.iter().flat_map(|row| [4.0 * row * row; 4]).collect();
                    assert_eq!(squares, expected);
                }
            }
        }
        guest.assert_alive();
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s14_sorted_indices_and_strided_ones_give_the_right_rows() {
    in_child("indices::s14_sorted_indices_and_strided_ones_give_the_right_rows", || {
        let mut guest = Guest::start();
        for buffer in buffers(&mut guest) {
            let mut scene = Scene::new(buffer);
            let (table, scores) = (scene.leaf(TYPE_F32, &[1, 8]), scene.leaf(TYPE_F32, &[8]));
            let order = scene.node(OP_ARGSORT, TYPE_I32, &[8], &[scores], &[1]);
            let best = scene.node(OP_GET_ROWS, TYPE_F32, &[1, 8], &[table, order], &[]);
            // Every second index of a leaf.
            let leaf = scene.leaf(TYPE_I32, &[2, 3]);
            let every = scene.node(OP_VIEW, TYPE_I32, &[1, 3], &[leaf], &[]);
            let at = scene.get(leaf).data;
            let record = scene.get(every);
            (record.view_src, record.data, record.nb) = (leaf, at, [4, 8, 24, 24]);
            let column = scene.node(OP_VIEW, TYPE_I32, &[3], &[leaf], &[]);
            let record = scene.get(column);
            (record.view_src, record.data) = (leaf, at);
            let rows = scene.leaf(TYPE_F32, &[1, 8, 3]);
            let picked = scene.node(OP_GET_ROWS, TYPE_F32, &[1, 1, 3], &[rows, every], &[]);
            guest.set(*scene.get(table), &bytes(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]));
            guest.set(*scene.get(rows), &bytes(&(0..24).map(|row| row as f32).collect::<Vec<_>>()));
            guest.set(*scene.get(scores), &bytes(&[3.0, 9.0, 1.0, 7.0, 0.0, 8.0, 2.0, 5.0]));
            guest.set(*scene.get(leaf), &ints(&[1, -1, 2, -1, 7, -1]));
            assert_eq!(scene.compute(&mut guest), Ok(0), "what lies between the indices is none");
            assert_eq!(floats(&guest.get(*scene.get(best), 32)), [1.0, 5.0, 3.0, 7.0, 0.0, 6.0, 2.0, 4.0]);
            assert_eq!(floats(&guest.get(*scene.get(picked), 12)), [1.0, 10.0, 23.0]);
        }
    });
}

/// Elements of what is rewritten.
const REWRITTEN: u32 = 4096;

/// Computes a scene again and again while another thread of the guest writes to what it shares. `value` makes an element of a
/// number that is never the same. Gives how many computations came to their end.
fn rewritten(guest: &mut Guest, scene: &Scene, at: usize, value: impl Fn(u32) -> u32 + Sync) -> usize {
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut noise = 1u32;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                for element in (0..REWRITTEN as usize).step_by(61) {
                    noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let word = (at + 4 * element) as *mut u32;
                    // SAFETY: the blob is mapped until the guest is dropped, and volatile writes make no reference.
                    unsafe { word.write_volatile(value(noise >> 8)) };
                }
            }
        });
        let outcomes: Vec<_> = (0..300).map(|_| scene.compute(guest)).collect();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        assert!(outcomes.iter().all(|outcome| matches!(outcome, Ok(0) | Err(1))), "{outcomes:?}");
        outcomes.iter().filter(|outcome| outcome.is_ok()).count()
    })
}

/// A guest with a buffer in a blob, its address, and a buffer of the backend's own.
fn sharing() -> (Guest, BufferHandle, usize, BufferHandle) {
    let mut guest = Guest::start();
    let res_id = guest.blob(&vec![0; 1 << 20]);
    let request = DeviceBufferFromPtrRequest { res_id, size: 1 << 20, max_tensor_size: 1 << 20 };
    let shared = guest.call(&request).buffer;
    let private = guest.buffer(1 << 20);
    let base = guest.blob_address(res_id);
    (guest, shared, base, private)
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s14_indices_that_change_while_they_are_used_reach_nothing() {
    in_child("indices::s14_indices_that_change_while_they_are_used_reach_nothing", || {
        let (mut guest, shared, base, _) = sharing();
        let mut scene = Scene::new(shared);
        let (table, ids) = (scene.leaf(TYPE_F32, &[4, 64]), scene.leaf(TYPE_I32, &[REWRITTEN]));
        scene.node(OP_GET_ROWS, TYPE_F32, &[4, REWRITTEN], &[table, ids], &[]);
        let at = base + scene.get(ids).data as usize;
        assert_eq!(rewritten(&mut guest, &scene, at, |noise| noise & 63), 300, "indices of rows");
        // Right for some microseconds, then wrong for as many: often right when they are looked at and wrong when they are used.
        let turns = std::sync::atomic::AtomicU32::new(0);
        let in_turns = |noise: u32| match turns.fetch_add(1, std::sync::atomic::Ordering::Relaxed) / 4_000 % 2
        {
            0 => noise & 63,
            _ => 0x7fff_0000,
        };
        assert!(rewritten(&mut guest, &scene, at, in_turns) > 0, "no graph was computed");
        guest.assert_alive();
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s14_what_is_sorted_may_change_meanwhile() {
    in_child("indices::s14_what_is_sorted_may_change_meanwhile", || {
        for op in [OP_ARGSORT, OP_TOP_K] {
            let (mut guest, shared, base, _) = sharing();
            let mut scene = Scene::new(shared);
            let scores = scene.leaf(TYPE_F32, &[REWRITTEN]);
            scene.node(op, TYPE_I32, &[REWRITTEN], &[scores], &[]);
            let at = base + scene.get(scores).data as usize;
            assert_eq!(rewritten(&mut guest, &scene, at, |noise| noise), 300);
            guest.assert_alive();
        }
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s14_the_result_of_a_sort_may_change_meanwhile() {
    in_child("indices::s14_the_result_of_a_sort_may_change_meanwhile", || {
        for op in [OP_ARGSORT, OP_TOP_K] {
            let (mut guest, shared, base, private) = sharing();
            let mut scene = Scene::new(private);
            let scores = scene.leaf(TYPE_F32, &[REWRITTEN]);
            let order = scene.node(op, TYPE_I32, &[REWRITTEN], &[scores], &[]);
            (scene.get(order).buffer, scene.get(order).data) = (shared, 0);
            assert_eq!(rewritten(&mut guest, &scene, base, |_| 0x7fff_0000), 300);
            guest.assert_alive();
        }
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s14_a_sort_may_change_before_it_is_copied() {
    in_child("indices::s14_a_sort_may_change_before_it_is_copied", || {
        for op in [OP_ARGSORT, OP_TOP_K] {
            let (mut guest, shared, base, private) = sharing();
            let mut scene = Scene::new(private);
            let table = scene.leaf(TYPE_F32, &[4, REWRITTEN]);
            let (scores, others) = (scene.leaf(TYPE_F32, &[REWRITTEN]), scene.leaf(TYPE_F32, &[REWRITTEN]));
            let order = scene.node(op, TYPE_I32, &[REWRITTEN], &[scores], &[]);
            (scene.get(order).buffer, scene.get(order).data) = (shared, 0);
            // Time to write, between the sort and its copy.
            scene.node(OP_ARGSORT, TYPE_I32, &[REWRITTEN], &[others], &[]);
            let copy = scene.node(OP_CONT, TYPE_I32, &[REWRITTEN], &[order], &[]);
            scene.node(OP_GET_ROWS, TYPE_F32, &[4, REWRITTEN], &[table, copy], &[]);
            rewritten(&mut guest, &scene, base, |_| 0x7fff_0000);
            assert_eq!(scene.compute(&mut guest), Ok(0), "a guest that is still is served");
            guest.assert_alive();
        }
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn a_sort_in_shared_memory_is_right() {
    let (mut guest, shared, _, private) = sharing();
    for buffer in [shared, private] {
        let mut scene = Scene::new(buffer);
        let scores = scene.leaf(TYPE_F32, &[4, 2]);
        let order = scene.node(OP_ARGSORT, TYPE_I32, &[4, 2], &[scores], &[0]);
        let falling = scene.node(OP_ARGSORT, TYPE_I32, &[4, 2], &[scores], &[1]);
        let table = scene.leaf(TYPE_F32, &[1, 4, 2]);
        let rows = scene.node(OP_GET_ROWS, TYPE_F32, &[1, 4, 2], &[table, order], &[]);
        guest.set(*scene.get(scores), &bytes(&[3.0, 1.0, 2.0, 0.0, 0.5, 0.25, 9.0, 7.0]));
        guest.set(*scene.get(table), &bytes(&[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]));
        // Twice, since the second time the graph is the one that was kept.
        for _ in 0..2 {
            assert_eq!(scene.compute(&mut guest), Ok(0));
            assert_eq!(guest.get(*scene.get(order), 32), ints(&[3, 1, 2, 0, 1, 0, 3, 2]));
            assert_eq!(guest.get(*scene.get(falling), 32), ints(&[0, 2, 1, 3, 2, 3, 0, 1]));
            assert_eq!(floats(&guest.get(*scene.get(rows), 32)), [3.0, 1.0, 2.0, 0.0, 5.0, 4.0, 7.0, 6.0]);
        }
    }
}
