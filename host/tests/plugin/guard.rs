//! The guard around work memory, in which every test here computes.

use crate::harness::*;

/// Operation number of ggml 0.26.
const OP_SOFT_MAX: u32 = 46;

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn the_work_memory_of_a_graph_has_a_guard() {
    for threads in ["1", "2", "4"] {
        let mut guest = Guest::start_with(&[("apir.host_threads", threads)]);
        let mut scene = Scene::new(guest.buffer(4096));
        let a = scene.leaf(TYPE_F32, &[32, 8]);
        scene.node(OP_SOFT_MAX, TYPE_F32, &[32, 8], &[a], &[1.0f32.to_bits() as i32]);
        let before = apir_guard::count();
        assert_eq!(scene.compute(&mut guest), Ok(0));
        assert!(apir_guard::count() > before, "ggml does not call the guard");
    }
}
