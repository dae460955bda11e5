//! The drop-in for libvirglrenderer.so.1, loaded by a VMM of the tests' own.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use support::vmm::{
    BlobArgs, EINVAL, FENCES, FREED, Guest, HOST3D, LINES, Memory, Vmm, children, compile, dropin, vmm,
};
use support::{eventually, fake_plugin};

const GUEST_MEMORY: u32 = 1;
const OURS: [u32; 6] = [1, 1, 0, 0, 0, 0];
const ASYNC_FENCES: i32 = 1 << 8;

/// Where the fake plugin writes to at its end.
const ENDED: &str = "APIR_LLAMA_CPP_LOG_TO_FILE";

/// Whether it has, asked in the VMM's process.
fn plugin_was_told() -> bool {
    fs::metadata(std::env::var_os(ENDED).unwrap()).is_ok_and(|file| file.len() > 0)
}

fn only_child() -> Pid {
    let children = children();
    assert_eq!(children.len(), 1, "{children:?}");
    children[0]
}

#[test]
fn a_context_of_capset_10_is_served_without_another_library() {
    let folder = tempfile::tempdir().unwrap();
    let ended = folder.path().join("ended");
    let variables = [(ENDED, ended.as_path())];
    let lines = vmm("a_context_of_capset_10_is_served_without_another_library", &variables, |vmm| {
        // QEMU asks for the capsets before it starts the library.
        for _ in 0..2 {
            assert_eq!(
                [10, 4, 1, 2, 6].map(|set| vmm.capset(set)),
                [(0, 24), (0, 24), (0, 0), (0, 0), (0, 0)]
            );
            assert_eq!((vmm.caps(10), vmm.caps(4)), (OURS, OURS));
            assert_eq!(vmm.init(0), 0);
        }
        let guest = Guest::ready(vmm, 1, 10);
        guest.check();
        assert_eq!(vmm.info(guest.res).unwrap(), [guest.res, 0, 0, 0, 0, 0, 0, 0, 0, u32::MAX]);
        assert_eq!(vmm.map_info(guest.res), Ok(1));
        assert_eq!(vmm.map(guest.res), Err(-EINVAL), "mapped once");

        // A second blob: every way to its memory is the same memory.
        assert_eq!(vmm.create_blob(1, 7, HOST3D, 0, 5000), 0);
        let (kind, memory) = vmm.export(7).unwrap();
        let file = File::from(memory);
        assert_eq!((kind, file.metadata().unwrap().len()), (3, 8192));
        let seals = SealFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GET_SEALS).unwrap());
        assert!(seals.contains(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL));
        file.write_all_at(&77u32.to_le_bytes(), 0).unwrap();
        let window = Memory::anonymous(3 * 4096);
        assert_eq!(vmm.map_fixed(7, window), 0);
        assert_eq!(vmm.map2(7, Memory { address: window.address + 8192, size: 4096 }, 4096), 0);
        assert_eq!(vmm.map2(7, window, 8193), -EINVAL);
        assert_eq!((window.load(0), window.load(8192)), (77, 77));
        let address = vmm.map_ptr(7).unwrap();
        assert_eq!(Memory { address, size: 8192 }.load(0), 77);
        assert_eq!(vmm.map(7), Err(-EINVAL));
        assert_eq!((vmm.unmap(7), vmm.unmap(7)), (0, -EINVAL));
        assert_eq!(guest.forward(7, &[7]), 5);
        assert_eq!(guest.reply.load(4), 77);

        vmm.detach(1, 7);
        vmm.unref(7);
        assert_eq!(vmm.map(7), Err(-EINVAL));
        // The kernel gives an id again.
        assert_eq!(vmm.create_blob(1, 7, HOST3D, 0, 4096), 0);
        vmm.map(7).unwrap().store(0, 78);
        assert_eq!(guest.forward(7, &[7]), 5);
        assert_eq!(guest.reply.load(4), 78);

        vmm.destroy_context(1);
        eventually("the worker is gone", || children().is_empty());
        assert!(plugin_was_told());
        assert_eq!(guest.submit(2, 1, &[1]), EINVAL);
    });
    let apir = env!("CARGO_BIN_EXE_apir");
    let wanted = format!(
        "virglrenderer with APIR: capsets 10 and 4, no other libvirglrenderer; workers: {apir}, sandboxed"
    );
    assert!(lines.contains(&wanted), "{lines}");
    assert!(!lines.contains("lost"), "{lines}");
}

#[test]
fn a_context_of_capset_4_begins_with_a_handshake() {
    vmm("a_context_of_capset_4_begins_with_a_handshake", &[], |vmm| {
        assert_eq!(vmm.init(0), 0);
        let guest = Guest::new(vmm, 1, 4);
        assert_eq!(vmm.submit(1, &[]), 0);
        assert!(children().is_empty(), "no worker before it is needed");
        // A Venus driver's first command.
        assert_eq!(vmm.submit(1, &[178, 0, 0]), EINVAL);
        assert!(children().is_empty());
        assert_eq!(guest.call(0, 0, &[0, 2]), 0xab1f);
        assert_eq!(guest.call(1, 0, &[]), 1);
        guest.check();
        only_child();
        assert_eq!(vmm.submit2(1, &[331 + 2, 1, guest.res, 5]), 0);
    });
}

#[test]
fn a_killed_worker_loses_its_context_only() {
    let lines = vmm("a_killed_worker_loses_its_context_only", &[], |vmm| {
        assert_eq!(vmm.init(0), 0);
        let guest = Guest::ready(vmm, 1, 10);
        let worker = only_child();
        let other = Guest::ready(vmm, 2, 10);
        assert_eq!(guest.submit(2, 6, &[60_000]), 0);
        kill(worker, Signal::SIGKILL).unwrap();
        let killed = Instant::now();
        assert_eq!(guest.answer(), 2, "the guest that waits is told");
        println!("told after {:?}", killed.elapsed());
        guest.check_lost();
        // What the guest's kernel still sends must not disturb.
        assert_eq!(vmm.create_blob(1, 9, HOST3D, 0, 4096), 0);
        vmm.detach(1, 9);
        vmm.unref(9);
        assert_eq!(vmm.create_context_fence(1, 0, 5), 0);
        other.check();
        vmm.destroy_context(1);
        vmm.detach(1, guest.res);
        vmm.unref(guest.res);
        // The same ids again.
        Guest::ready(vmm, 1, 10).check();
        // A plugin that aborts.
        assert_eq!(other.forward(5, &[]), 2);
        other.check_lost();
        // A command that no context survives.
        let third = Guest::ready(vmm, 3, 10);
        assert_eq!(third.call(9, 0, &[]), 2);
        third.check_lost();
    });
    assert_eq!(lines.matches("context 1 lost: worker ").count(), 1, "{lines}");
    assert!(lines.contains("signal: 9 (SIGKILL)") && lines.contains("signal: 6 (SIGABRT)"), "{lines}");
}

#[test]
fn a_worker_that_is_stuck_does_not_stop_the_vmm() {
    let lines = vmm("a_worker_that_is_stuck_does_not_stop_the_vmm", &[], |vmm| {
        assert_eq!(vmm.init(0), 0);
        let stuck = Guest::ready(vmm, 1, 10);
        let worker = only_child();
        let other = Guest::ready(vmm, 2, 10);
        assert_eq!(stuck.submit(2, 6, &[120_000]), 0);
        let start = Instant::now();
        other.check();
        let command: Vec<u8> =
            [2, 1, stuck.res].into_iter().chain([0; 25_000]).flat_map(u32::to_le_bytes).collect();
        let taken = (0..1000).take_while(|_| vmm.submit_bytes(1, &mut command.clone()) == 0).count();
        println!("{taken} commands of 100 kB taken");
        assert!((1..1000).contains(&taken));
        stuck.check_lost();
        other.check();
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
        // Losing it ends the worker, if need be by force.
        eventually("the worker is killed", || !children().contains(&worker));

        let stopped = Guest::ready(vmm, 3, 10);
        let worker = *children().last().unwrap();
        kill(worker, Signal::SIGSTOP).unwrap();
        let start = Instant::now();
        assert_eq!(stopped.submit(2, 1, &[1]), 0);
        vmm.destroy_context(3);
        assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
        eventually("the stopped worker is killed", || !children().contains(&worker));
        other.check();
    });
    assert_eq!(lines.matches("has left its socket full").count(), 1, "{lines}");
}

#[test]
fn contexts_share_what_is_attached_to_both() {
    vmm("contexts_share_what_is_attached_to_both", &[], |vmm| {
        assert_eq!(vmm.init(0), 0);
        let (one, two) = (Guest::ready(vmm, 1, 10), Guest::ready(vmm, 2, 4));
        assert_eq!(vmm.create_blob(1, 5, HOST3D, 0, 4096), 0);
        vmm.map(5).unwrap().store(0, 99);
        vmm.attach(2, 5);
        vmm.attach(2, 5);
        for guest in [&one, &two] {
            assert_eq!(guest.forward(7, &[5]), 5);
            assert_eq!(guest.reply.load(4), 99);
        }
        vmm.detach(2, 5);
        assert_eq!(one.forward(7, &[5]), 5);
        // A blob that does not exist ends the context, as in virglrenderer.
        assert_eq!(two.forward(7, &[5]), 5);
        eventually("the context is lost", || two.submit(2, 1, &[1]) == EINVAL);
        one.check();
    });
}

#[test]
fn what_does_not_exist_is_refused() {
    let lines = vmm("what_does_not_exist_is_refused", &[], |vmm| {
        assert_eq!(vmm.submit(1, &[0, 0, 0]), EINVAL, "before init");
        assert_eq!(vmm.create_context(1, 10), EINVAL, "before init");
        vmm.poll();
        assert_eq!(vmm.init(0), 0);
        assert_eq!(vmm.create_context(0, 10), EINVAL);
        for capset in [0, 1, 2, 3, 5, 6, 11] {
            assert_eq!(vmm.create_context(1, capset), EINVAL);
        }
        assert_eq!(vmm.create_old_context(1), EINVAL);
        assert_eq!(vmm.submit(9, &[331, 0, 0, 0, 2]), EINVAL);
        vmm.destroy_context(9);
        vmm.attach(9, 9);
        vmm.detach(9, 9);
        vmm.unref(9);
        assert_eq!(vmm.create_context_fence(9, 0, 1), -EINVAL);
        assert_eq!(vmm.map(9), Err(-EINVAL));
        assert_eq!(vmm.map_fixed(9, Memory::anonymous(4096)), -EINVAL);
        assert_eq!(vmm.map_ptr(9), Err(-EINVAL));
        assert_eq!(vmm.unmap(9), -EINVAL);
        assert_eq!(vmm.map_info(9), Err(-EINVAL));
        assert_eq!(vmm.export(9).unwrap_err(), -EINVAL);
        assert_eq!(vmm.info(9), Err(EINVAL));
        assert_eq!(vmm.info_ext(9), EINVAL);
        assert_eq!(vmm.attach_iov(9, 1, 1), EINVAL);
        assert_eq!(vmm.detach_iov(9), (0, 0));
        assert_eq!(vmm.transfer_write(9, 9), EINVAL);
        assert_eq!(vmm.create_blob(9, 9, HOST3D, 0, 4096), -EINVAL);

        let guest = Guest::ready(vmm, 1, 10);
        assert_eq!(vmm.create_context(1, 10), 0, "the same again");
        assert_eq!(vmm.create_context(1, 4), EINVAL);
        for (res, memory, id, size) in [
            (0, HOST3D, 0, 1),
            (100, HOST3D, 0, 1),
            (9, HOST3D, 5, 1),
            (9, 3, 0, 1),
            (9, 4, 0, 1),
            (9, 0, 0, 1),
            (9, HOST3D, 0, 0),
        ] {
            assert_eq!(vmm.create_blob(1, res, memory, id, size), -EINVAL, "{res} {memory} {id} {size}");
        }
        assert_eq!(vmm.create_blob(1, 9, HOST3D, 0, 1 << 62), -EINVAL);
        // Too long for a frame: refused and answered, and the context lives on.
        let mut command = vec![0; 300_000];
        command[..12].copy_from_slice(&[2u32, 1, guest.res].map(u32::to_le_bytes).concat());
        guest.reply.store(0, 0);
        assert_eq!(vmm.submit_bytes(1, &mut command), EINVAL);
        assert_eq!(guest.answer(), 2);
        guest.check();
        // Too short for a command: ends the context.
        assert_eq!(vmm.submit(1, &[2]), 0);
        eventually("the context is lost", || guest.submit(2, 1, &[1]) == EINVAL);
    });
    assert!(lines.contains("context 9 does not exist"), "{lines}");
}

#[test]
fn the_guest_cannot_fill_the_log() {
    let lines = vmm("the_guest_cannot_fill_the_log", &[], |vmm| {
        assert_eq!(vmm.init(0), 0);
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(1500) {
            vmm.submit(9, &[1, 2, 3]);
            vmm.unref(9);
        }
    });
    assert!(lines.lines().count() < 50, "{} lines", lines.lines().count());
    assert!(lines.contains("earlier lines left out"), "{lines}");
}

#[test]
fn t21_s28_contexts_one_after_another_share_one_budget_of_lines() {
    const NO_CURSOR: u32 = 3;
    let start = Instant::now();
    let lines = vmm("t21_s28_contexts_one_after_another_share_one_budget_of_lines", &[], |vmm| {
        assert_eq!(vmm.init(0), 0);
        let start = Instant::now();
        let mut contexts = 0;
        while start.elapsed() < Duration::from_secs(3) || contexts < 10 {
            let guest = Guest::ready(vmm, 1, 10);
            for _ in 0..20 {
                assert_eq!(guest.forward(NO_CURSOR, &[]), 2);
            }
            vmm.destroy_context(1);
            vmm.unref(guest.res);
            contexts += 1;
        }
        println!("{contexts} contexts");
    });
    let most = 10 * (start.elapsed().as_secs() as usize + 2);
    let count = lines.lines().filter(|line| line.contains("apir: context 1: ")).count();
    assert!((10..=most).contains(&count), "{count} lines, {most} may be:\n{lines}");
    assert!(lines.contains("earlier lines left out"), "{lines}");
}

#[test]
fn s28_a_destroyed_context_ends_its_computation() {
    vmm("s28_a_destroyed_context_ends_its_computation", &[], |vmm| {
        assert_eq!(vmm.init(0), 0);
        let other = Guest::ready(vmm, 2, 10);
        let guest = Guest::ready(vmm, 1, 10);
        assert_eq!(guest.submit(2, 6, &[600_000]), 0);
        vmm.destroy_context(1);
        eventually("only the other's worker is left", || children().len() == 1);
        other.check();
    });
}

#[test]
fn t31_the_first_line_tells_that_no_guest_can_be_served() {
    let test = "t31_the_first_line_tells_that_no_guest_can_be_served";
    let lines = vmm(test, &[("APIR_LLAMA_CPP_GGML_LIBRARY_REG", Path::new("code=3"))], |vmm| {
        assert_eq!(vmm.init(0), 0);
        assert!(children().is_empty());
    });
    let first = lines.lines().find(|line| line.contains("virglrenderer with APIR")).unwrap_or_default();
    assert!(first.ends_with("; no guest can be served: the plugin did not start: code 3"), "{lines}");
    let folder = tempfile::tempdir().unwrap();
    let pattern = folder.path().join("libggml-*.so");
    let lines = vmm(test, &[("APIR_LLAMA_CPP_GGML_LIBRARY_PATH", &pattern)], |_| {});
    let wanted =
        format!("no guest can be served: APIR_LLAMA_CPP_GGML_LIBRARY_PATH={}: no file", pattern.display());
    assert!(lines.contains(&wanted), "{lines}");
}

#[test]
fn blobs_leave_the_vmm_some_descriptors() {
    vmm("blobs_leave_the_vmm_some_descriptors", &[], |vmm| {
        nix::sys::resource::setrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE, 200, 200).unwrap();
        assert_eq!(vmm.init(0), 0);
        assert_eq!(vmm.create_context(1, 4), 0);
        let made = (1..=200).take_while(|&res| vmm.create_blob(1, res, HOST3D, 0, 4096) == 0).count();
        assert_eq!(made, 100);
        assert_eq!(vmm.create_blob(1, 500, HOST3D, 0, 4096), -nix::libc::ENOMEM);
        vmm.unref(1);
        assert_eq!(vmm.create_blob(1, 500, HOST3D, 0, 4096), 0);
    });
}

#[test]
fn a_guest_gets_so_many_workers_and_no_more() {
    let variables = [("APIR_WORKER", Path::new("inprocess"))];
    let lines = vmm("a_guest_gets_so_many_workers_and_no_more", &variables, |vmm| {
        assert_eq!(vmm.init(0), 0);
        assert!((1..=256).all(|ctx| vmm.create_context(ctx, 10) == 0));
        assert_eq!(vmm.create_context(257, 10), EINVAL);
        vmm.destroy_context(1);
        eventually("there is room again", || vmm.create_context(257, 10) == 0);
    });
    assert!(lines.contains("context 257: 256 workers are running, which is the limit"), "{lines}");
}

#[test]
fn reset_and_cleanup_leave_nothing_and_init_starts_again() {
    vmm("reset_and_cleanup_leave_nothing_and_init_starts_again", &[], |vmm| {
        assert_eq!(vmm.init(0), 0);
        for round in 0..6 {
            let guest = Guest::ready(vmm, 1, 10);
            guest.check();
            Guest::ready(vmm, 2, 4).check();
            match round % 3 {
                0 => vmm.reset(),
                1 => vmm.cleanup(),
                // As QEMU does when its guest starts again.
                _ => {
                    vmm.reset();
                    assert_eq!(vmm.init(0), 0);
                }
            }
            assert_eq!(vmm.info(guest.res), Err(EINVAL));
            assert_eq!(vmm.submit(1, &[2, 1, guest.res]), EINVAL);
            eventually("the workers are gone", || children().is_empty());
            if round % 3 == 1 {
                assert_eq!(vmm.init(0), 0);
            }
        }
        // A second init without either keeps what there is.
        let guest = Guest::ready(vmm, 1, 10);
        assert_eq!(vmm.init(0), 0);
        guest.check();
    });
}

#[test]
fn fences_retire_at_the_next_poll() {
    vmm("fences_retire_at_the_next_poll", &[], |vmm| {
        assert_eq!(vmm.init(0), 0);
        let _guest = Guest::ready(vmm, 1, 10);
        let due = || vmm.poll_is_due();
        assert!(!due());
        assert_eq!(vmm.create_fence(7), 0);
        assert_eq!(vmm.create_context_fence(1, 3, 1 << 40), 0);
        assert!(due());
        assert!(FENCES.lock().unwrap().is_empty(), "a VMM notes a fence only after the call");
        vmm.poll();
        assert!(!due());
        assert_eq!(*FENCES.lock().unwrap(), [(None, 7), (Some((1, 3)), 1 << 40)]);
        vmm.create_fence(8);
        vmm.reset();
        vmm.poll();
        assert_eq!(FENCES.lock().unwrap().len(), 2);
    });
}

#[test]
fn fences_retire_from_a_thread_where_the_vmm_wants_that() {
    vmm("fences_retire_from_a_thread_where_the_vmm_wants_that", &[], |vmm| {
        assert_eq!(vmm.init(ASYNC_FENCES), 0);
        let _guest = Guest::ready(vmm, 1, 10);
        assert_eq!(vmm.poll_fd(), -1);
        for id in 0..100 {
            assert_eq!(vmm.create_context_fence(1, 0, id), 0);
        }
        eventually("the fences retire", || FENCES.lock().unwrap().len() == 100);
        vmm.create_fence(8);
        vmm.cleanup();
        let told = FENCES.lock().unwrap().len();
        assert_eq!(told, 101, "nothing is told after cleanup");
    });
}

#[test]
fn pictures_and_guest_memory_without_another_library_are_kept_and_not_drawn() {
    vmm("pictures_and_guest_memory_without_another_library_are_kept_and_not_drawn", &[], |vmm| {
        assert_eq!(vmm.init(0), 0);
        let guest = Guest::ready(vmm, 1, 10);
        assert_eq!(vmm.create_resource(3), 0);
        assert_eq!(vmm.create_resource(3), EINVAL);
        assert_eq!(vmm.info(3).unwrap(), [3, 1, 64, 32, 1, 0, 0, 0, 0, u32::MAX]);
        assert_eq!(vmm.info_ext(3), EINVAL, "nothing to show");
        assert_eq!(vmm.cursor(3), 0);
        assert_eq!(vmm.attach_iov(3, 0x5000, 2), 0);
        assert_eq!(vmm.attach_iov(3, 0x6000, 2), EINVAL);
        assert_eq!(vmm.transfer_write(3, 0), 0);
        assert_eq!(vmm.detach_iov(3), (0x5000, 2));
        assert_eq!(vmm.detach_iov(3), (0, 0));
        let list = [0u64; 4];
        let args = BlobArgs {
            res: 4,
            ctx: 1,
            mem: GUEST_MEMORY,
            flags: 1,
            id: 0,
            size: 4096,
            iov: list.as_ptr().cast(),
            count: 2,
        };
        assert_eq!(vmm.create_blob_with(&args), 0);
        vmm.attach(1, 4);
        assert_eq!(vmm.info(4).unwrap()[0], 4);
        assert_eq!(vmm.map(4), Err(-EINVAL));
        assert_eq!(vmm.export(4).unwrap_err(), -EINVAL);
        assert_eq!(vmm.detach_iov(4), (list.as_ptr() as usize, 2));
        vmm.unref(3);
        vmm.unref(4);
        assert_eq!(vmm.info(3), Err(EINVAL));
        guest.check();
    });
}

#[test]
fn the_vmms_log_callback_gets_the_lines() {
    let lines = vmm("the_vmms_log_callback_gets_the_lines", &[], |vmm| {
        vmm.log_to_lines(true);
        assert_eq!(vmm.init(0), 0);
        vmm.submit(9, &[1]);
        let got = std::mem::take(&mut *LINES.lock().unwrap());
        assert_eq!(got.len(), 2, "{got:?}");
        assert_eq!(got[1], (2, "apir: context 9 does not exist".to_owned()));
        vmm.log_to_lines(false);
        assert_eq!(FREED.load(Ordering::Relaxed), 1);
        vmm.submit(10, &[1]);
        assert!(LINES.lock().unwrap().is_empty());
    });
    assert!(lines.contains("apir: context 10 does not exist"), "{lines}");
}

#[test]
fn a_worker_program_that_cannot_run_is_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("apir");
    let plain = folder.path().join("plain");
    fs::write(&plain, "no program").unwrap();
    fs::set_permissions(&plain, fs::Permissions::from_mode(0o644)).unwrap();
    let test = "a_worker_program_that_cannot_run_is_one_line";
    for program in [&missing, &plain, &PathBuf::from("")] {
        let lines = vmm(test, &[("APIR_WORKER", program), ("PATH", Path::new("/nonexistent"))], |vmm| {
            assert_eq!(vmm.init(0), 0);
            assert_eq!(vmm.create_context(1, 10), EINVAL);
            // On capset 4 the worker is missed later, and the guest is told.
            let guest = Guest::new(vmm, 2, 4);
            assert_eq!(guest.submit(0, 0, &[0, 2]), EINVAL);
            assert_eq!(guest.reply.load(0), 2);
            guest.check_lost();
        });
        let about: Vec<_> = lines.lines().filter(|line| line.contains("context 1: ")).collect();
        assert_eq!(about.len(), 1, "{lines}");
        assert!(about[0].contains("APIR_WORKER"), "{lines}");
    }
}

#[test]
fn a_wrong_variable_is_told_and_starts_no_worker() {
    let test = "a_wrong_variable_is_told_and_starts_no_worker";
    let lines = vmm(test, &[("APIR_SANDBOX", Path::new("on")), ("APIR_LOG", Path::new("loud"))], |vmm| {
        assert_eq!(vmm.init(0), 0);
        assert_eq!(vmm.create_context(1, 10), EINVAL);
    });
    for wanted in
        ["apir: APIR_LOG=loud: must be error, ", "context 1: APIR_SANDBOX=on: must be strict or off"]
    {
        assert!(lines.contains(wanted), "{lines}");
    }
}

#[test]
fn the_plugin_can_run_inside_the_vmm() {
    let folder = tempfile::tempdir().unwrap();
    let ended = folder.path().join("ended");
    let variables = [("APIR_WORKER", Path::new("inprocess")), (ENDED, ended.as_path())];
    let lines = vmm("the_plugin_can_run_inside_the_vmm", &variables, |vmm| {
        assert_eq!(vmm.init(0), 0);
        let (one, two) = (Guest::ready(vmm, 1, 10), Guest::ready(vmm, 2, 4));
        one.check();
        two.check();
        assert!(children().is_empty());
        // A lookup of nothing ends the context, and not the VMM.
        assert_eq!(one.forward(7, &[999]), 5);
        eventually("the context is lost", || one.submit(2, 1, &[1]) == EINVAL);
        two.check();
        vmm.destroy_context(1);
        vmm.unref(one.res);
        Guest::ready(vmm, 1, 10).check();
        vmm.destroy_context(2);
        eventually("the plugin was told", plugin_was_told);
    });
    assert!(
        lines.contains("context 1 lost: context lost: a command named a blob that does not exist"),
        "{lines}"
    );
}

#[test]
fn s28_a_computation_inside_the_vmm_is_stopped_when_its_guest_has_left() {
    let folder = tempfile::tempdir().unwrap();
    let ended = folder.path().join("ended");
    let variables = [("APIR_WORKER", Path::new("inprocess")), (ENDED, ended.as_path())];
    vmm("s28_a_computation_inside_the_vmm_is_stopped_when_its_guest_has_left", &variables, |vmm| {
        assert_eq!(vmm.init(0), 0);
        let (guest, other) = (Guest::ready(vmm, 1, 10), Guest::ready(vmm, 2, 10));
        assert_eq!(vmm.submit(1, &[2, 6, guest.res, 3_600_000]), 0);
        other.check();
        let left = std::time::Instant::now();
        vmm.destroy_context(1);
        eventually("the plugin was told", plugin_was_told);
        assert!(left.elapsed().as_secs() >= 2, "what ends soon is not stopped");
        other.check();
        Guest::ready(vmm, 3, 10).check();
    });
}

/// The first bytes of what the fake plugin is told for a key.
fn told(guest: &Guest<'_>, key: &str) -> [u8; 4] {
    let mut bytes = [key.as_bytes(), &[0]].concat();
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    let words: Vec<_> =
        bytes.chunks_exact(4).map(|four| u32::from_le_bytes(four.try_into().unwrap())).collect();
    assert_eq!(guest.forward(8, &words), 5);
    guest.reply.load(4).to_le_bytes()
}

#[test]
fn a_plugin_is_told_its_guest_s_protocol_and_whether_it_is_alone_in_its_process() {
    for worker in [env!("CARGO_BIN_EXE_apir"), "inprocess"] {
        let variables = [("APIR_WORKER", Path::new(worker))];
        vmm(
            "a_plugin_is_told_its_guest_s_protocol_and_whether_it_is_alone_in_its_process",
            &variables,
            |vmm| {
                let inside = std::env::var_os("APIR_WORKER").unwrap() == "inprocess";
                assert_eq!(vmm.init(0), 0);
                let guest = Guest::ready(vmm, 1, 10);
                // What nobody has set is `(none)`.
                assert_eq!(told(&guest, "apir.own_process")[0], if inside { b'(' } else { b'1' });
                // The protocol of this guest's handshake.
                assert_eq!(told(&guest, "apir.guest_protocol")[..3], *b"0.2");
            },
        );
    }
}

#[test]
fn s27_blobs_that_take_too_many_addresses_are_refused() {
    let test = "s27_blobs_that_take_too_many_addresses_are_refused";
    let lines = vmm(test, &[("APIR_MAX_BLOB_BYTES", Path::new("1M"))], |vmm| {
        assert_eq!(vmm.init(0), 0);
        let (one, two) = (Guest::ready(vmm, 1, 10), Guest::ready(vmm, 2, 10));
        for size in [1 << 46, 1 << 40, 1 << 20] {
            assert_eq!(vmm.create_blob(1, 50, HOST3D, 0, size), -nix::libc::ENOMEM, "{size}");
        }
        assert_eq!(vmm.create_blob(1, 50, HOST3D, 0, 900 << 10), 0);
        assert_eq!(vmm.create_blob(1, 51, HOST3D, 0, 900 << 10), -nix::libc::ENOMEM);
        assert_eq!(vmm.create_blob(2, 51, HOST3D, 0, 900 << 10), 0);
        vmm.unref(50);
        assert_eq!(vmm.create_blob(1, 50, HOST3D, 0, 900 << 10), 0);
        one.check();
        two.check();
    });
    assert!(lines.contains("bytes of blobs of this context: too many ("), "{lines}");
}

#[test]
fn t31_a_wrong_limit_of_blobs_is_told() {
    let test = "t31_a_wrong_limit_of_blobs_is_told";
    let lines = vmm(test, &[("APIR_MAX_BLOB_BYTES", Path::new("0"))], |vmm| {
        assert_eq!(vmm.init(0), 0);
        assert_eq!(vmm.create_context(1, 10), EINVAL);
    });
    assert!(lines.contains("APIR_MAX_BLOB_BYTES=0: must be a number of bytes such as"), "{lines}");
}

/// A compiled fake of the real library, and the file of its calls.
struct Fake {
    folder: tempfile::TempDir,
}

impl Fake {
    fn new() -> Self {
        let fake = Self { folder: tempfile::tempdir().unwrap() };
        // Only the parent needs it compiled.
        if std::env::var_os("FAKE_VIRGL_LOG").is_none() {
            compile(
                "fake_virgl.c",
                &fake.library(),
                &["-shared", "-fPIC", "-Wl,-soname,libvirglrenderer.so.1"],
            );
        }
        fake
    }

    fn library(&self) -> PathBuf {
        self.folder.path().join("libvirglrenderer.so.1")
    }

    fn log(&self) -> PathBuf {
        self.folder.path().join("calls")
    }

    fn run(&self, test: &str, variables: &[(&str, &Path)], body: impl FnOnce(&Vmm)) -> String {
        let (library, log) = (self.library(), self.log());
        let mut all = vec![("APIR_CHAIN", library.as_path()), ("FAKE_VIRGL_LOG", log.as_path())];
        all.extend(variables);
        vmm(test, &all, body)
    }

    fn calls(&self) -> Vec<String> {
        fs::read_to_string(self.log()).unwrap_or_default().lines().map(str::to_owned).collect()
    }
}

/// The calls of the fake library so far, in the VMM's process.
fn calls() -> Vec<String> {
    let log = std::env::var_os("FAKE_VIRGL_LOG").unwrap();
    fs::read_to_string(log).unwrap_or_default().lines().map(str::to_owned).collect()
}

#[test]
fn everything_else_goes_to_the_real_library() {
    let fake = Fake::new();
    let lines = fake.run("everything_else_goes_to_the_real_library", &[], |vmm| {
        assert_eq!(
            [10, 4, 2, 1, 6].map(|set| vmm.capset(set)),
            [(0, 24), (0, 160), (1, 308), (0, 308), (0, 0)]
        );
        assert_eq!(vmm.init(0x2c0), 0);
        assert_eq!((vmm.caps(10), vmm.caps(4)[0], vmm.caps(2)[0]), (OURS, 1004, 1002));
        let guest = Guest::ready(vmm, 1, 10);
        assert_eq!(vmm.create_context(2, 4), 0);
        assert_eq!(vmm.create_context(3, 2), 0);
        assert_eq!(vmm.create_old_context(4), 0);
        // Venus in context 2: its first command decides.
        assert_eq!(vmm.create_blob(2, 20, HOST3D, 9, 4096), 0);
        vmm.attach(2, 20);
        assert_eq!(vmm.submit(2, &[178, 0]), 0);
        assert_eq!(vmm.submit(2, &[331, 0, 20, 0, 2]), 0);
        assert_eq!(vmm.submit(3, &[5]), 0);
        vmm.map(20).unwrap();
        assert_eq!(vmm.map_info(20), Ok(2));
        assert_eq!(vmm.info(20).unwrap()[0], 1020);
        assert_eq!(
            vmm.map_fixed(20, Memory::anonymous(4096)),
            -nix::libc::EOPNOTSUPP,
            "it has no such function"
        );
        assert_eq!(vmm.unmap(20), 0);
        assert_eq!(vmm.create_resource(30), 0);
        assert_eq!(vmm.transfer_write(30, 3), 0);
        // Ours of the same time are none of its business, nor is its blob usable by context 3's neighbour.
        vmm.attach(3, guest.res);
        vmm.detach(3, guest.res);
        guest.check();
        assert_eq!(
            (vmm.create_fence(11), vmm.create_context_fence(2, 1, 12), vmm.create_context_fence(1, 1, 13)),
            (0, 0, 0)
        );
        vmm.poll();
        let mut fences = std::mem::take(&mut *FENCES.lock().unwrap());
        fences.sort();
        assert_eq!(fences, [(None, 11), (Some((1, 1)), 13), (Some((2, 1)), 12)]);
        vmm.detach(2, 20);
        vmm.unref(20);
        vmm.destroy_context(2);
        vmm.destroy_context(1);
        vmm.reset();
        vmm.cleanup();
    });
    assert!(lines.contains(&format!("capset 10, all else by {}", fake.library().display())), "{lines}");
    assert_eq!(
        fake.calls(),
        [
            "init 0x2c0 version 3",
            "context 2 capset 4 name test",
            "context 3 capset 2 name test",
            "context 4 capset 2 name old",
            "blob 20 context 2 memory 2",
            "attach 2 20",
            "submit 2: 178, 2 words",
            "submit 2: 331, 5 words",
            "submit 3: 5, 1 words",
            "map 20",
            "info 20",
            "unmap 20",
            "resource 30",
            "transfer 30",
            "fence 11",
            "fence 2 1 12",
            "detach 2 20",
            "unref 20",
            "destroy 2",
            "reset",
            "cleanup",
        ]
    );
}

#[test]
fn a_context_of_the_real_library_is_taken_over_at_its_handshake() {
    let fake = Fake::new();
    fake.run("a_context_of_the_real_library_is_taken_over_at_its_handshake", &[], |vmm| {
        assert_eq!(vmm.init(0), 0);
        // Its reply blob and another one are made before anybody knows whose the context is.
        let guest = Guest::new(vmm, 1, 4);
        assert_eq!(vmm.create_blob(1, 5, HOST3D, 0, 8192), 0);
        let early = vmm.map(5).unwrap();
        early.store(0, 55);
        assert!(children().is_empty());
        assert_eq!(guest.call(0, 0, &[0, 2]), 0xab1f);
        assert_eq!(guest.call(1, 0, &[]), 1);
        guest.check();
        assert_eq!(guest.forward(7, &[5]), 5);
        assert_eq!(guest.reply.load(4), 55);
        // From now on blobs are ours.
        let before = calls().len();
        assert_eq!(vmm.create_blob(1, 6, HOST3D, 0, 4096), 0);
        vmm.attach(1, 6);
        vmm.map(6).unwrap().store(0, 66);
        assert_eq!(guest.forward(7, &[6]), 5);
        assert_eq!(guest.reply.load(4), 66);
        assert_eq!(vmm.create_context_fence(1, 0, 1), 0);
        vmm.unref(6);
        assert_eq!(calls().len(), before, "{:?}", calls());
        vmm.poll();
        assert_eq!(*FENCES.lock().unwrap(), [(Some((1, 0)), 1)]);
        // A blob of another context of the real library can be shared.
        assert_eq!(vmm.create_context(2, 4), 0);
        assert_eq!(vmm.create_blob(2, 7, HOST3D, 0, 4096), 0);
        vmm.map(7).unwrap().store(0, 77);
        vmm.attach(1, 7);
        assert_eq!(guest.forward(7, &[7]), 5);
        assert_eq!(guest.reply.load(4), 77);
        // The early one goes back to its owner, and the worker forgets it.
        vmm.detach(1, 5);
        vmm.unref(5);
        assert_eq!(guest.forward(7, &[5]), 5);
        eventually("the context is lost", || guest.submit(2, 1, &[1]) == EINVAL);
        assert_eq!(guest.answer(), 2, "also in a blob of the real library's");
        vmm.destroy_context(1);
        let calls = calls();
        for wanted in
            ["context 1 capset 4 name test", "export 100", "export 5", "export 7", "unref 5", "destroy 1"]
        {
            assert!(calls.iter().any(|call| call == wanted), "{wanted} in {calls:?}");
        }
        assert!(!calls.iter().any(|call| call.starts_with("submit")), "{calls:?}");
    });
}

#[test]
fn blobs_that_are_no_shared_memory_stay_with_the_real_library() {
    let fake = Fake::new();
    let test = "blobs_that_are_no_shared_memory_stay_with_the_real_library";
    fake.run(test, &[("FAKE_VIRGL_KIND", Path::new("1"))], |vmm| {
        vmm.log_to_lines(true);
        let logged = |part: &str| LINES.lock().unwrap().iter().any(|(_, line)| line.contains(part));
        assert_eq!(vmm.init(0), 0);
        let guest = Guest::new(vmm, 1, 4);
        // Its reply blob cannot be shared, so the worker cannot answer and ends.
        assert_eq!(guest.submit(0, 0, &[0, 2]), 0);
        assert!(logged("resource 100 cannot be shared with a worker: its memory is of kind 1"));
        eventually("the context is lost", || guest.submit(0, 0, &[0, 2]) == EINVAL);
        eventually("the worker has ended", || logged("context 1 lost: worker "));
        // What the worker says reaches the VMM's callback too.
        assert!(logged("apir: context 1: context ") && logged("reply blob 100 does not exist"));
    });
}

#[test]
fn a_real_library_without_venus_leaves_capset_4_to_us() {
    let fake = Fake::new();
    let variables =
        [("FAKE_VIRGL_NO_VENUS", Path::new("1")), ("FAKE_VIRGL_NO_DEVICE_FENCES", Path::new("1"))];
    fake.run("a_real_library_without_venus_leaves_capset_4_to_us", &variables, |vmm| {
        assert_eq!(vmm.init(0), 0);
        assert_eq!((vmm.capset(4), vmm.caps(4), vmm.capset(2)), ((0, 24), OURS, (1, 308)));
        Guest::ready(vmm, 1, 4).check();
        assert_eq!(vmm.create_fence(5), 0);
        vmm.poll();
        assert_eq!(*FENCES.lock().unwrap(), [(None, 5)]);
        assert!(!calls().iter().any(|call| call.starts_with("blob")));
    });
}

#[test]
fn one_descriptor_tells_of_both_libraries_fences() {
    let fake = Fake::new();
    let test = "one_descriptor_tells_of_both_libraries_fences";
    fake.run(test, &[("FAKE_VIRGL_POLL_FD", Path::new("1"))], |vmm| {
        // The descriptors come again under their old numbers.
        for _ in 0..3 {
            assert_eq!(vmm.init(0), 0);
            assert_eq!(vmm.create_context(1, 10), 0);
            assert!(!vmm.poll_is_due());
            assert_eq!(vmm.create_fence(1), 0);
            assert!(vmm.poll_is_due(), "of the real library");
            vmm.poll();
            assert!(!vmm.poll_is_due());
            assert_eq!(vmm.create_context_fence(1, 0, 2), 0);
            assert!(vmm.poll_is_due(), "of ours");
            vmm.poll();
            assert!(!vmm.poll_is_due());
            vmm.cleanup();
        }
        assert_eq!(FENCES.lock().unwrap().len(), 6);
        // A VMM that takes fences from a thread polls for the real library's alone.
        assert_eq!(vmm.init(ASYNC_FENCES), 0);
        assert!(!vmm.poll_is_due());
        assert_eq!(vmm.create_fence(1), 0);
        assert!(vmm.poll_is_due());
    });
}

#[test]
fn a_named_library_has_to_work() {
    let fake = Fake::new();
    let test = "a_named_library_has_to_work";
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("libvirglrenderer.so.1");
    fs::copy(dropin(), &copy).unwrap();
    let missing = folder.path().join("missing.so");
    for (path, wanted) in [
        (dropin(), "this is apir's own library"),
        (copy, "this is apir's own library"),
        (missing, "missing.so: No such file"),
        ("libvirglrenderer.so.1".into(), "not an absolute path"),
        (fake_plugin(), "is no libvirglrenderer"),
    ] {
        let lines =
            vmm(test, &[("APIR_CHAIN", &path), ("APIR_TEST_CASE", Path::new("named"))], named_or_failing);
        assert!(lines.contains(wanted), "{wanted:?} in {lines}");
    }
    let lines = fake.run(test, &[("FAKE_VIRGL_FAILS", Path::new("1"))], named_or_failing);
    assert!(lines.contains("did not start: code -5"), "{lines}");
}

fn named_or_failing(vmm: &Vmm) {
    let code = vmm.init(0);
    if std::env::var_os("APIR_TEST_CASE").is_some() {
        assert_eq!(code, -1);
    } else {
        assert_eq!(code, -5);
    }
    assert_eq!(vmm.create_context(1, 10), EINVAL);
}

#[test]
fn a_program_linked_to_the_drop_in_does_not_call_in_circles() {
    let fake = Fake::new();
    let beside = fake.folder.path().join("dropin");
    fs::create_dir(&beside).unwrap();
    fs::copy(dropin(), beside.join("libvirglrenderer.so.1")).unwrap();
    let program = fake.folder.path().join("vmm");
    let folder = format!("-L{}", beside.display());
    compile("linked_vmm.c", &program, &[&folder, "-l:libvirglrenderer.so.1"]);
    let output = Command::new(&program)
        .env("LD_LIBRARY_PATH", &beside)
        .env("APIR_CHAIN", fake.library())
        .env("APIR_WORKER", env!("CARGO_BIN_EXE_apir"))
        .env("FAKE_VIRGL_LOG", fake.log())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    // The fake library's own call of a public function has reached itself.
    assert_eq!(fake.calls(), ["init 0 version 3", "context 1 capset 2 name virg", "destroy 1", "cleanup"]);
}

/// A file that has to exist, from a folder that the environment names.
fn peer(folder: &str, file: &str) -> PathBuf {
    let folder =
        std::env::var_os(folder).unwrap_or_else(|| panic!("{folder} is not set: cargo xtask test sets it"));
    let path = PathBuf::from(folder).join(file);
    assert!(path.is_file(), "{}", path.display());
    path
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn real_plugins_count_a_real_device() {
    let library = peer("APIR_LLAMA_DIR", "libggml-cpu.so");
    for folder in ["APIR_LLAMA_DIR", "APIR_DIST"] {
        let plugin = peer(folder, "libggml-virtgpu-backend.so");
        for worker in [env!("CARGO_BIN_EXE_apir"), "inprocess"] {
            let variables = [
                ("VIRGL_APIR_BACKEND_LIBRARY", plugin.as_path()),
                ("APIR_LLAMA_CPP_GGML_LIBRARY_PATH", library.as_path()),
                ("APIR_LLAMA_CPP_GGML_LIBRARY_REG", Path::new("ggml_backend_cpu_reg")),
                ("APIR_WORKER", Path::new(worker)),
            ];
            vmm("real_plugins_count_a_real_device", &variables, |vmm| {
                assert_eq!(vmm.init(0), 0);
                // Upstream's plugin has room for one context in a process.
                let both = std::env::var_os("APIR_WORKER").unwrap() != "inprocess";
                for (ctx, capset) in [(1, 10), (2, 4)].into_iter().take(if both { 2 } else { 1 }) {
                    let guest = Guest::ready(vmm, ctx, capset);
                    assert_eq!(guest.forward(0, &[]), 5);
                    assert_eq!(guest.reply.load(4), 1);
                }
                vmm.cleanup();
                eventually("the workers are gone", || children().is_empty());
            });
        }
    }
}
