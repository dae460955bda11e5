//! A builder that has built a graph once builds the same graph again without asking for memory.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use apir_ggml::{GraphBuilder, TensorSpec};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: all calls go to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller follows the rules of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the memory came from `alloc` above.
        unsafe { System.dealloc(memory, layout) };
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the memory came from `alloc` above; the caller follows the rules of `realloc`.
        unsafe { System.realloc(memory, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn the_same_graph_again_takes_no_memory() {
    const TENSORS: usize = 500;
    let nodes: Vec<usize> = (1..TENSORS).collect();
    let mut builder = GraphBuilder::new();
    let mut after_first = 0;
    for round in 0..1_000 {
        for index in 0..TENSORS {
            let mut spec =
                TensorSpec { ne: [1; 4], nb: [4; 4], op: u32::from(index > 0), ..TensorSpec::default() };
            spec.src[0] = index.checked_sub(1);
            builder.add_tensor(&spec).unwrap();
        }
        let graph = std::mem::take(&mut builder).finish(&nodes, 0).unwrap();
        assert_eq!(graph.node_count(), TENSORS - 1);
        builder = graph.into_builder();
        if round == 0 {
            after_first = ALLOCATIONS.get();
        }
    }
    assert_eq!(ALLOCATIONS.get(), after_first);
}
