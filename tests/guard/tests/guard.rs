//! The guard around the work memory of a backend that stands in for ggml's.
#![allow(clippy::unwrap_used, reason = "a test's helpers fail the test")]

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::ffi::c_long;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

const BACKEND: &str = concat!(env!("OUT_DIR"), "/libbackend.so");

/// A kernel that writes `from..to` of so much work memory.
fn compute(work: usize, from: i64, to: i64) -> i32 {
    apir_guard::load();
    // SAFETY: the library has no code that runs when it is opened, and its function has this type.
    unsafe {
        let backend = Library::open(Some(BACKEND), RTLD_NOW | RTLD_LOCAL).unwrap();
        let compute =
            backend.get::<unsafe extern "C" fn(usize, c_long, c_long) -> i32>(b"compute\0").unwrap();
        compute(work, from, to)
    }
}

/// As [`compute`], in a process of its own.
fn in_child(work: usize, from: i64, to: i64) -> Output {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["the_child_that_writes", "--exact", "--ignored", "--nocapture"]);
    child.env("APIR_GUARD_CHILD", format!("{work} {from} {to}")).output().unwrap()
}

#[test]
#[ignore = "the others start it"]
fn the_child_that_writes() {
    let Ok(text) = std::env::var("APIR_GUARD_CHILD") else { return };
    let numbers: Vec<i64> = text.split(' ').map(|number| number.parse().unwrap()).collect();
    assert_eq!(compute(numbers[0] as usize, numbers[1], numbers[2]), 7);
}

#[test]
fn work_memory_as_planned_is_used_without_a_word() {
    let before = apir_guard::count();
    for work in [1, 15, 16, 4095, 4096, 4097, 100_000] {
        assert_eq!(compute(work, 0, work as i64), 7, "{work} bytes");
        assert_eq!(apir_guard::planned(), apir_guard::Planned { work: work as u64, threads: 3 });
    }
    assert_eq!(compute(0, 0, 0), 7, "a graph without work memory");
    assert_eq!(apir_guard::count() - before, 7);
}

#[test]
fn a_byte_too_far_ends_the_process() {
    for work in [16, 4096, 65_552] {
        for (from, to) in [(work, work + 1), (0, work + 64), (-8192, -8191), (work + 4000, work + 4001)] {
            let output = in_child(work as usize, from, to);
            assert_eq!(output.status.signal(), Some(11), "{from}..{to} of {work}: {output:?}");
        }
    }
}

#[test]
fn a_byte_beside_work_memory_is_told_of() {
    // Sizes that leave room to a guard page.
    for (work, from, side) in [(17, 17, "behind"), (17, -1, "in front of"), (4100, -16, "in front of")] {
        let output = in_child(work as usize, from, from + 1);
        assert_eq!(output.status.signal(), Some(6), "{from} of {work}: {output:?}");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(told.contains(&format!("guard: a kernel wrote {side} its work memory")), "{told}");
    }
}
