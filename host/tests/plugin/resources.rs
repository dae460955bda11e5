//! What a process has only once, and several contexts in it: rows S22, S27 and S28 of the cases.

use crate::harness::*;
use apir_protocol::codec::{Decoder, Encoder};
use apir_protocol::handle::BufferHandle;
use apir_protocol::messages::*;
use apir_protocol::tensor::TensorRecord;
use apir_protocol::{Request, Wire};
use ggml_virtgpu_backend::plugin::{apir_backend_deinit, apir_backend_dispatcher};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

const OP_MUL_MAT: u32 = 29;

fn mappings() -> u64 {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count() as u64
}

/// A number of /proc/self/status.
fn status(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).unwrap();
    line.split_ascii_whitespace().next().unwrap().parse().unwrap()
}

/// How many mappings the contexts of a process may have in all.
fn shared_mappings() -> u64 {
    std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap().trim().parse::<u64>().unwrap() / 4
}

/// A call with a reply page of a few bytes, for those that are made by the thousand.
fn quick<R: Request>(guest: &Guest, request: &R) -> Result<R::Reply, u32> {
    let (mut bytes, mut page) = ([0u8; 64], [0u8; 64]);
    let mut encoder = Encoder::new(&mut bytes);
    request.encode(&mut encoder).unwrap();
    let len = encoder.len();
    let (request, start) = (bytes[..len].as_ptr_range(), page.as_mut_ptr());
    let mut after = std::ptr::null_mut();
    // SAFETY: the ranges are those of the two arrays.
    let code = unsafe {
        let (number, end) = (R::COMMAND.number(), start.add(64));
        apir_backend_dispatcher(
            guest.ctx_id,
            &CALLBACKS,
            number,
            request.start,
            request.end,
            start,
            end,
            &mut after,
        )
    };
    if code == 0 { Ok(R::Reply::decode(&mut Decoder::new(&page)).unwrap()) } else { Err(code) }
}

fn map(guest: &Guest, res_id: u32) -> Result<BufferHandle, u32> {
    let request = DeviceBufferFromPtrRequest { res_id, size: 4096, max_tensor_size: 4096 };
    quick(guest, &request).map(|made| made.buffer)
}

fn alloc(guest: &Guest, size: u64) -> Option<BufferHandle> {
    let buffer_type = quick(guest, &DeviceGetBufferTypeRequest {}).unwrap().buffer_type;
    let buffer = quick(guest, &BufferTypeAllocBufferRequest { buffer_type, size }).unwrap().buffer;
    (!buffer.is_null()).then_some(buffer)
}

fn free(guest: &Guest, buffer: BufferHandle) {
    quick(guest, &BufferFreeBufferRequest { buffer }).unwrap();
}

/// Another context maps, computes on as many threads as it may, and gets the right result.
fn assert_works(guest: &mut Guest) {
    let res_id = guest.blob(&bytes(&[1.0, 2.0, 3.0, 4.0]));
    let mapped = map(guest, res_id).unwrap();
    let buffer = guest.buffer(128 << 10);
    let (a, sum) = (row(1, mapped, 0, 4), node(2, buffer, 0, 4, OP_ADD, &[1, 1]));
    assert_eq!(guest.compute(&[2], &[a, sum]), Ok(0));
    assert_eq!(floats(&guest.get(sum, 16)), [2.0, 4.0, 6.0, 8.0]);
    for buffer in [mapped, buffer] {
        free(guest, buffer);
    }
    guest.drop_blob(res_id);
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s27_sixty_five_thousand_buffers_over_one_page_take_one_mapping() {
    in_child("resources::s27_sixty_five_thousand_buffers_over_one_page_take_one_mapping", || {
        let (mut guest, mut other) = (Guest::start(), Guest::start());
        let res_id = guest.blob(&[7; 4096]);
        let before = mappings();
        let buffers: Vec<_> = (0..65_000).map(|_| map(&guest, res_id).unwrap()).collect();
        assert!(mappings() < before + 50, "{} mappings, {before} before", mappings());
        assert_works(&mut other);
        // They are the same bytes: what one is given the other has, and no node reads one and writes another.
        let [first, last] = [buffers[0], buffers[64_999]];
        guest.set(row(1, first, 64, 4), &bytes(&[3.0; 4]));
        assert_eq!(floats(&guest.get(row(1, last, 64, 4), 16)), [3.0; 4]);
        let half = node(2, last, 96, 32, OP_SQR, &[1]);
        assert_eq!(guest.compute(&[2], &[row(1, first, 64, 32), half]), Err(1), "it lies over its source");
        let apart = node(2, last, 256, 32, OP_SQR, &[1]);
        assert_eq!(guest.compute(&[2], &[row(1, first, 64, 32), apart]), Ok(0));
        guest.drop_blob(res_id);
        for buffer in buffers {
            free(&guest, buffer);
        }
        // The library's allocator may have grown meanwhile.
        assert!(mappings() < before + 20, "{} mappings, {before} before", mappings());
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s27_mappings_of_many_blobs_and_buffers_end_before_the_process_does() {
    in_child("resources::s27_mappings_of_many_blobs_and_buffers_end_before_the_process_does", || {
        let (mut guest, mut other) = (Guest::start(), Guest::start());
        let fair = shared_mappings() / 2;
        let blobs: Vec<_> = (0..fair + 10).map(|_| guest.blob(&[])).collect();
        let before = mappings();
        let mapped: Vec<_> = blobs.iter().map_while(|res_id| map(&guest, *res_id).ok()).collect();
        assert_eq!(mapped.len() as u64, fair, "no context has more than what is left");
        assert!(alloc(&guest, 128 << 10).is_none(), "a large buffer is a mapping too");
        assert!(alloc(&guest, 4096).is_some(), "a small one is none");
        assert_works(&mut other);
        for buffer in mapped {
            free(&guest, buffer);
        }
        // Every second one is freed, so that neighbours do not become one mapping.
        let made: Vec<_> = std::iter::from_fn(|| alloc(&guest, 64 << 10)).take(100_000).collect();
        assert_eq!(made.len() as u64, fair / 2, "two mappings each");
        for buffer in made.iter().step_by(2) {
            free(&guest, *buffer);
        }
        assert!(mappings() < before + fair + 50, "{} mappings, {before} before", mappings());
        assert_works(&mut other);
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s27_a_large_fresh_buffer_is_zeros_and_takes_no_memory() {
    in_child("resources::s27_a_large_fresh_buffer_is_zeros_and_takes_no_memory", || {
        let (mut guest, mut other) = (Guest::start(), Guest::start());
        let memory = guest.call(&DeviceGetMemoryRequest {});
        let size = memory.free / 3 * 2;
        let (rss, started) = (status("VmRSS"), Instant::now());
        let buffer = alloc(&guest, size).unwrap();
        let (grown, took) = (status("VmRSS").saturating_sub(rss), started.elapsed());
        assert!(grown < 16 << 10, "{grown} KiB of {size} bytes, in {took:?}");
        let end = size / 64 * 64 - 1024;
        for data in [0, size / 128 * 64, end] {
            assert_eq!(guest.get(row(1, buffer, data, 256), 1024), [0; 1024]);
            guest.set(row(1, buffer, data, 256), &[7; 1024]);
        }
        // The memory belongs to the process, whoever asks.
        let left = other.call(&DeviceGetMemoryRequest {});
        assert_eq!((left.total, left.free), (memory.total, memory.free - size));
        assert!(alloc(&other, size).is_none());
        assert_works(&mut other);
        free(&guest, buffer);
        let buffer = alloc(&other, size).unwrap();
        for data in [0, size / 128 * 64, end] {
            assert_eq!(other.get(row(1, buffer, data, 256), 1024), [0; 1024], "what another context wrote");
        }
    });
}

/// A product with so many rows that needs `bytes` of work memory, of a matrix whose rows are a window that slides over a few bytes.
fn product(guest: &mut Guest, rows: u32, bytes: u32) -> Result<i32, u32> {
    let columns = bytes / 2 / 2048;
    let mut scene = Scene::new(guest.buffer(16 << 20));
    let (a, b) = (scene.leaf(TYPE_F16, &[2048, rows]), scene.leaf(TYPE_F32, &[2048 + columns]));
    let window = scene.get(b);
    (window.ne, window.nb) = ([2048, columns, 1, 1], [4, 4, 4 * columns, 4 * columns]);
    scene.node(OP_MUL_MAT, TYPE_F32, &[rows, columns], &[a, b], &[]);
    let computed = scene.compute(guest);
    free(guest, scene.buffer);
    computed
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s27_work_memory_that_cannot_be_had_is_a_refusal() {
    in_child("resources::s27_work_memory_that_cannot_be_had_is_a_refusal", || {
        let (mut guest, mut other) = (Guest::start(), Guest::start());
        assert_eq!(product(&mut guest, 1, 32 << 20), Ok(0));
        let (_, hard) = getrlimit(Resource::RLIMIT_AS).unwrap();
        setrlimit(Resource::RLIMIT_AS, (status("VmSize") << 10) + (192 << 20), hard).unwrap();
        for _ in 0..3 {
            // ggml plans work memory also where there is nothing to compute.
            for rows in [1, 0] {
                assert_eq!(product(&mut guest, rows, 512 << 20), Err(1), "ggml's `new` would throw");
                assert_eq!(product(&mut guest, rows, 32 << 20), Ok(0), "what fits goes on");
            }
            assert_works(&mut other);
        }
        setrlimit(Resource::RLIMIT_AS, hard, hard).unwrap();
        assert_eq!(product(&mut guest, 1, 512 << 20), Ok(0));
    });
}

/// From here on this thread starts no other, and neither do those that it has started.
fn forbid_threads() {
    if nix::unistd::geteuid().is_root() {
        // The limit is not for root: be another user who may still read root's files.
        let nobody = nix::unistd::Uid::from_raw(54_321);
        nix::unistd::setresuid(nobody, nix::unistd::Uid::from_raw(0), nix::unistd::Uid::from_raw(0)).unwrap();
        for capability in [caps::Capability::CAP_SYS_RESOURCE, caps::Capability::CAP_SYS_ADMIN] {
            caps::drop(None, caps::CapSet::Effective, capability).unwrap();
        }
    }
    let (_, hard) = getrlimit(Resource::RLIMIT_NPROC).unwrap();
    setrlimit(Resource::RLIMIT_NPROC, 1, hard).unwrap();
    thread::Builder::new().spawn(|| ()).expect_err("no thread can be started");
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s27_threads_that_cannot_be_had_are_done_without() {
    const TEST: &str = "resources::s27_threads_that_cannot_be_had_are_done_without";
    in_child(TEST, || {
        let mut guests = [(); 3].map(|()| Guest::start_with(&[("apir.host_threads", "4")]));
        forbid_threads();
        for guest in &mut guests {
            // Without a look at what there is, libgomp ends the process here.
            assert_works(guest);
            let res_id = guest.blob(&[0; 16]);
            assert_eq!(guest.try_call(&LivenessRequest { res_id, offset: 0 }), Err(1), "it needs a thread");
        }
        guests.iter_mut().for_each(assert_works);
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s27_two_hundred_and_fifty_six_contexts_compute_on_few_threads() {
    const TEST: &str = "resources::s27_two_hundred_and_fifty_six_contexts_compute_on_few_threads";
    const CONTEXTS: usize = 256;
    /// What the contexts of a process have at least together.
    const HELPERS: u64 = 64;
    in_child(TEST, || {
        let (computed, counted) = (Barrier::new(CONTEXTS + 1), Barrier::new(CONTEXTS + 1));
        let before = status("Threads");
        thread::scope(|scope| {
            for _ in 0..CONTEXTS {
                thread::Builder::new()
                    .stack_size(1 << 20)
                    .spawn_scoped(scope, || {
                        let mut guest = Guest::start_with(&[("apir.host_threads", "4")]);
                        assert_works(&mut guest);
                        computed.wait();
                        counted.wait();
                    })
                    .unwrap();
            }
            computed.wait();
            let threads = status("Threads") - before - CONTEXTS as u64;
            counted.wait();
            assert!((4..=HELPERS).contains(&threads), "{threads} threads beside those of the contexts");
        });
    });
}

/// A graph that computes for about half a minute on one thread.
fn long(guest: &Guest) -> (Vec<u64>, Vec<TensorRecord>) {
    const SIDE: u32 = 512;
    const NODES: u64 = 3000;
    let bytes = u64::from(4 * SIDE * SIDE);
    let buffer = guest.buffer(3 * bytes);
    let matrix = |id: u64, data: u64| {
        let nb = [4, 4 * SIDE, 4 * SIDE * SIDE, 4 * SIDE * SIDE];
        TensorRecord { ne: [SIDE, SIDE, 1, 1], nb, ..row(id, buffer, data, SIDE) }
    };
    let mut tensors = vec![matrix(1, 0), matrix(2, bytes)];
    for id in 3..3 + NODES {
        let mut product = matrix(id, bytes * (1 + id % 2));
        (product.op, product.flags) = (OP_MUL_MAT, FLAG_COMPUTE);
        (product.src[0], product.src[1]) = (1, id - 1);
        tensors.push(product);
    }
    ((3..3 + NODES).collect(), tensors)
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s28_a_context_that_ends_stops_its_computation() {
    const ABORTED: i32 = 1;
    let (mut guest, mut other) = (Guest::start(), Guest::start());
    let (nodes, tensors) = long(&guest);
    let ctx_id = guest.ctx_id;
    let (status, late) = thread::scope(|scope| {
        let computing = scope.spawn(|| (guest.compute(&nodes, &tensors), Instant::now()));
        thread::sleep(Duration::from_millis(1500));
        assert!(!computing.is_finished(), "it takes long");
        let ended = Instant::now();
        apir_backend_deinit(ctx_id);
        assert!(ended.elapsed() < Duration::from_secs(1), "nobody waits for it");
        let (status, done) = computing.join().unwrap();
        (status, done.duration_since(ended))
    });
    assert_eq!(status, Ok(ABORTED));
    assert!(late < Duration::from_secs(2), "{late:?}");
    assert_eq!(guest.raw_code(1), 1, "the context is gone");
    assert_works(&mut other);
    assert_eq!(guest.initialize(), 6, "and may start again");
    assert_works(&mut guest);
}
