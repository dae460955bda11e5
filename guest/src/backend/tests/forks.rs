//! Row T25: a fork of the process that opened the session.

use super::*;
use crate::backend::log::captured;
use crate::link::in_fork;
use apir_protocol::command::Command;
use std::sync::atomic::{AtomicBool, Ordering};

/// A buffer with a tensor over all of it, filled with ones.
fn filled(device: &Device) -> (Held, abi::Tensor) {
    let buffer = Held::new(device, 64).unwrap();
    let mut whole = tensor(F32, [16, 1, 1, 1]);
    buffer.place(&mut whole, 0);
    buffer.set(&mut whole, 0, &[1; 64]);
    (buffer, whole)
}

fn seen(host: &Host) -> (Vec<Command>, Vec<u32>) {
    let script = host.0.lock().unwrap();
    (script.seen.clone(), script.unreferenced.clone())
}

/// All that a program may do with what it inherits.
fn use_inherited(device: &'static Device, backend: &HeldBackend, buffer: Held, whole: &mut abi::Tensor) {
    buffer.set(whole, 0, &[9; 64]);
    assert_eq!(buffer.get(whole, 0, 3), [0; 3]);
    // SAFETY: the buffer has these functions; buffer and tensor are valid during the calls.
    unsafe {
        (buffer.iface().memset_tensor.unwrap())(buffer.0, whole, 7, 0, 8);
        (buffer.iface().clear.unwrap())(buffer.0, 5);
        let source = whole.clone();
        assert!(!(buffer.iface().cpy_tensor.unwrap())(buffer.0, &raw const source, whole));
    }
    assert_eq!(backend.compute(&mut [whole], 0), -1);
    assert!(device.last_attached().session.create_blob(1).is_err());
    drop(buffer);
}

#[test]
fn t25_a_fork_sends_nothing_and_changes_nothing_of_its_parents() {
    for from_ptr in [false, true] {
        let (device, host) = device(|script| script.from_ptr = from_ptr);
        let backend = HeldBackend::new(device);
        let (buffer, mut whole) = filled(device);
        let before = seen(&host);
        captured::take();
        let status = in_fork(|| {
            // The parent's buffer lives on; the child frees its copy.
            use_inherited(device, &backend, Held(buffer.0), &mut whole);
            drop(backend);
            assert_eq!(seen(&host), before);
            let lines = captured::take();
            // A line for each kind of loss.
            assert!(lines.iter().all(|line| line.contains("this process is a fork")), "{lines:?}");
            lines.len() as u8
        });
        assert_eq!(status, 5, "a write, a read, a fill, a clear and a graph");
        assert!(captured::take().is_empty());
        assert_eq!(seen(&host), before);
        assert_eq!(buffer.get(&whole, 0, 64), [1; 64]);
        buffer.set(&mut whole, 0, &[2; 64]);
        assert_eq!(buffer.get(&whole, 0, 64), [2; 64]);
        assert_eq!(compute(device, &mut [&raw mut whole]), 0);
    }
}

#[test]
fn t25_a_fork_that_asks_the_device_has_a_session_of_its_own() {
    let (device, host) = device(|script| script.from_ptr = true);
    let (old, mut old_tensor) = filled(device);
    let before = seen(&host);
    let status = in_fork(|| {
        let inherited = device.last_attached();
        assert!(supports(device, &abi::Tensor { op: ADD, ..tensor(F32, [4, 1, 1, 1]) }));
        assert!(device.attached().session.is_ours() && !inherited.session.is_ours());
        // Other hosts of these tests do not map.
        let (buffer, mut whole) = filled(device);
        assert_eq!(buffer.get(&whole, 0, 64), [1; 64]);
        assert_eq!(compute(device, &mut [&raw mut whole]), 0);
        // What was made before is lost for the new session too.
        old_tensor.op = ADD;
        assert_eq!(compute(device, &mut [&raw mut old_tensor]), -1);
        // SAFETY: buffer and tensors are valid during the call.
        assert!(!unsafe {
            (buffer.iface().cpy_tensor.unwrap())(buffer.0, &raw const old_tensor, &raw mut whole)
        });
        assert_eq!(seen(&host), before);
        // A fork of the fork gets one, too.
        let grandchild = in_fork(|| {
            let (buffer, whole) = filled(device);
            u8::from(buffer.get(&whole, 0, 64) == [1; 64] && device.attached().session.is_ours())
        });
        assert_eq!(buffer.get(&whole, 0, 64), [1; 64]);
        grandchild as u8
    });
    assert_eq!(status, 1);
    assert_eq!(seen(&host), before);
    assert_eq!(old.get(&old_tensor, 0, 64), [1; 64]);
}

#[test]
fn t25_a_fork_without_a_host_is_told_once() {
    let (link, _) = FakeLink::new();
    let opened = AtomicBool::new(false);
    let link = Mutex::new(Some(link));
    let opener = Opener::new(move || match opened.swap(true, Ordering::Relaxed) {
        false => Session::open(link.lock().unwrap().take().unwrap()),
        true => Err(SessionError::NoDevice { count: 0 }),
    });
    let device = device_over(3, opener, OnLost::Fail);
    captured::take();
    let status = in_fork(|| {
        assert!(supports(device, &abi::Tensor { op: ADD, ..tensor(F32, [4, 1, 1, 1]) }));
        assert!(Held::new(device, 64).is_none());
        let mut node = tensor(F32, [4, 1, 1, 1]);
        assert_eq!(compute(device, &mut [&raw mut node]), -1);
        let lines = captured::take();
        assert!(lines[0].contains("no session for this fork"), "{lines:?}");
        lines.len() as u8
    });
    assert_eq!(status, 2);
    assert!(Held::new(device, 64).is_some());
}

#[test]
fn t25_locks_that_another_thread_holds_while_a_process_forks_do_not_stop_the_fork() {
    let (device, host) = device(|_| {});
    let backend = HeldBackend::new(device);
    let (buffer, mut whole) = filled(device);
    host.0.lock().unwrap().silent = true;
    std::thread::scope(|scope| {
        // It holds the session's lock until the host answers.
        let waiting = scope.spawn(|| device.attached().memory());
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!waiting.is_finished());
        let status = in_fork(|| {
            use_inherited(device, &backend, Held(buffer.0), &mut whole);
            1
        });
        // Before anything can panic: the scope waits for the thread.
        host.0.lock().unwrap().gone = true;
        waiting.join().unwrap();
        assert_eq!(status, 1);
    });
}
