//! What only a renderer in the same process can do, or survive: rows S15, S18, S20 and S22 of the cases.

use crate::harness::*;
use apir_protocol::command::Command;
use apir_protocol::messages::BufferSetTensorRequest;
use ggml_virtgpu_backend::plugin::{apir_backend_deinit, apir_backend_dispatcher, apir_backend_initialize};

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s15_a_guest_that_rewrites_command_and_reply_reaches_nothing() {
    in_child("in_process::s15_a_guest_that_rewrites_command_and_reply_reaches_nothing", || {
        const PAGE: usize = 4096;
        let mut guest = Guest::start();
        let buffer = guest.buffer(4096);
        let res_id = guest.blob(&[7; 64]);
        let tensor = row(1, buffer, 0, 4);
        let request = BufferSetTensorRequest { buffer, tensor, res_id, offset: 0, size: 16 };
        let request = Guest::encode(&request);
        let (command, page) = (guest.blob(&request), guest.blob(&[0; PAGE]));
        let (command, page) = (guest.blob_address(command), guest.blob_address(page));
        let stop = std::sync::atomic::AtomicBool::new(false);
        let mut done = [0, 0];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut value = 1u32;
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    value = value.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    let at = value as usize / 4 % request.len();
                    // SAFETY: the blobs are mapped until the guest is dropped, and volatile writes make no reference.
                    unsafe {
                        ((page + at % PAGE) as *mut u8).write_volatile(value as u8);
                        let byte = (command + at) as *mut u8;
                        byte.write_volatile(value as u8);
                        std::thread::yield_now();
                        byte.write_volatile(request[at]);
                    }
                }
            });
            for _ in 0..20_000 {
                let (from, to) = (command as *const u8, page as *mut u8);
                let mut after = std::ptr::null_mut();
                let number = Command::BufferSetTensor.number();
                // SAFETY: the ranges lie in blobs that are mapped.
                let code = unsafe {
                    let (from_end, to_end) = (from.add(request.len()), to.add(PAGE));
                    apir_backend_dispatcher(
                        guest.ctx_id,
                        &CALLBACKS,
                        number,
                        from,
                        from_end,
                        to,
                        to_end,
                        &mut after,
                    )
                };
                assert_eq!(after, to, "the reply has no bytes");
                done[code.min(1) as usize] += 1;
            }
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        assert!(done.iter().all(|count| *count > 0), "{done:?}: the guest wrote too early or too late");
        guest.assert_alive();
    });
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s20_contexts_that_have_not_started_refuse_everything() {
    let cpu = format!("{}/libggml-cpu.so", llama_dir());
    let guest = Guest::configured(&cpu, None);
    let count = Command::DeviceGetCount.number();
    assert_eq!(guest.raw(count, &[]), (1, vec![]), "before initialize");
    assert_eq!(guest.initialize(), 6);
    assert_eq!(guest.raw(count, &[]).0, 0);
    assert_eq!(guest.initialize(), 13, "twice");
    assert_eq!(guest.raw(count, &[]).0, 0, "the first start stands");
    for number in [23, 1023, u32::MAX] {
        assert_eq!(guest.raw(number, &[]), (6, vec![]));
    }
    apir_backend_deinit(guest.ctx_id);
    assert_eq!(guest.raw(count, &[]), (1, vec![]), "after deinit");
    assert_eq!(guest.initialize(), 6, "a context may start again");
    guest.assert_alive();

    for (library, registration, code) in [
        ("/nowhere/libggml-cpu.so", None, 4),
        ("/proc/self/maps", None, 4),
        ("/proc/self", None, 4),
        (cpu.as_str(), Some("ggml_backend_none_reg"), 5),
    ] {
        let failed = Guest::configured(library, registration);
        assert_eq!(failed.initialize(), code, "{library} {registration:?}");
        assert_eq!(failed.raw(count, &[]), (1, vec![]), "after a failed initialize");
    }
    // SAFETY: a null table is allowed.
    assert_eq!(unsafe { apir_backend_initialize(u32::MAX, std::ptr::null()) }, 11);
    apir_backend_deinit(u32::MAX);
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s20_a_flood_of_bad_commands_ends_the_context_and_no_other() {
    let (guest, other) = (Guest::start_with(&[("apir.max_bad_commands", "100000")]), Guest::start());
    let started = std::time::Instant::now();
    for _ in 0..99_999 {
        assert_eq!(guest.raw_code(4711), 6);
    }
    guest.assert_alive();
    assert_eq!(guest.raw_code(4711), 6, "one too many");
    assert_eq!(guest.raw_code(1), 1, "the context is gone");
    assert!(started.elapsed().as_secs() < 60, "{:?}", started.elapsed());
    other.assert_alive();
    assert_eq!(guest.initialize(), 6, "and may start again");
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s20_a_flood_of_bad_commands_leaves_few_lines() {
    let log = std::env::temp_dir().join(format!("apir-flood-{}", std::process::id()));
    const TEST: &str = "in_process::s20_a_flood_of_bad_commands_leaves_few_lines";
    if std::env::var_os("APIR_LLAMA_CPP_LOG_TO_FILE").is_some() {
        let guest = Guest::start();
        for _ in 0..1_000_000 {
            assert_eq!(guest.raw_code(4711), 6);
        }
        return;
    }
    let started = std::time::Instant::now();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args([TEST, "--exact", "--include-ignored"]).env("APIR_LLAMA_CPP_LOG_TO_FILE", &log);
    assert!(child.status().unwrap().success());
    let lines = std::fs::read_to_string(&log).unwrap().lines().count() as u64;
    std::fs::remove_file(&log).unwrap();
    // Ten a second and a count for each, and what is said at the start.
    assert!(lines <= 20 * (started.elapsed().as_secs() + 2) + 10, "{lines} lines");
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s22_a_reply_page_that_is_too_small_is_a_refusal() {
    let guest = Guest::start();
    let mut page = [0xaau8; 8];
    let mut after = std::ptr::null_mut();
    let start = page.as_mut_ptr();
    // SAFETY: the ranges are those of the page, and of no request.
    let code = unsafe {
        let (none, end) = (std::ptr::null(), start.add(page.len()));
        let name = Command::DeviceGetName.number();
        apir_backend_dispatcher(guest.ctx_id, &CALLBACKS, name, none, none, start, end, &mut after)
    };
    assert_eq!((code, after, page), (1, start, [0xaa; 8]));
    guest.assert_alive();
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn s18_blobs_that_are_gone_or_not_there_are_refused() {
    let mut guest = Guest::start();
    let buffer = guest.buffer(64 << 10);
    let gone = guest.blob(&[0; 4096]);
    guest.drop_blob(gone);
    for res_id in [gone, 999, 0, u32::MAX] {
        assert_eq!(every_use(&guest, buffer, res_id, 16), [Err(1); 4], "resource {res_id}");
    }
    guest.assert_alive();
}
