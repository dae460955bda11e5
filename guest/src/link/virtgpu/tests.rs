use super::fake::{Device, FakeDrm, Log};
use super::*;
use crate::link::wait;
use crate::session::{Session, SessionError};
use drm::Param;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

fn machine(devices: impl IntoIterator<Item = Device>) -> (Arc<dyn Drm>, Arc<Mutex<Log>>) {
    let drm = FakeDrm::new(devices);
    let log = drm.log.clone();
    (Arc::new(drm), log)
}

fn seen(log: &Mutex<Log>) -> MutexGuard<'_, Log> {
    log.lock().unwrap()
}

/// The ways as (last digits of the node, capset).
fn ways(drm: &Arc<dyn Drm>, choice: &Choice) -> Vec<(String, u32)> {
    let ways = nodes::ways(&**drm, choice).unwrap();
    ways.into_iter()
        .map(|way| (way.path.display().to_string().replace("/dev/dri/renderD", ""), way.capset))
        .collect()
}

fn link(device: Device) -> (Box<dyn Link>, Arc<Mutex<Log>>) {
    let (drm, log) = machine([device]);
    let route = routes_over(&drm, &Choice::default()).unwrap().remove(0);
    (route.open().unwrap(), log)
}

fn zeros(capsets: &[u32], zeros: &[u32]) -> Device {
    let mut device = Device::with(capsets);
    for capset in zeros {
        device.capsets.insert(*capset, 0);
    }
    device
}

fn closed(errno: Errno) -> Device {
    Device { closed: Some(errno), ..Device::with(&[4, 10]) }
}

#[test]
fn every_unusual_machine_ends_in_one_line_with_the_thing_and_the_fix() {
    let node = "/dev/dri/renderD128";
    let rows: Vec<(&str, Vec<Device>, Vec<&str>)> = vec![
        ("no node", vec![], vec!["no render node in /dev/dri", "virtio-gpu", "APIR_SOCKET is not set"]),
        ("another driver", vec![Device::of("amdgpu")], vec![node, "driver is amdgpu, not virtio_gpu"]),
        ("not a node", vec![Device::of("")], vec![node, "no render node", "os error 25"]),
        ("no permission", vec![closed(Errno::EACCES)], vec![node, "permission denied", "`render`"]),
        ("not permitted", vec![closed(Errno::EPERM)], vec![node, "permission denied"]),
        ("a dead device", vec![closed(Errno::ENODEV)], vec![node, "cannot be opened", "os error 19"]),
        (
            "2D only",
            vec![Device::with(&[]).without(Param::Features3d)],
            vec!["no 3D contexts", "virtio-gpu-gl-pci"],
        ),
        (
            "no blobs",
            vec![Device::with(&[4]).without(Param::ResourceBlob)],
            vec!["no blob resources", "blob=on"],
        ),
        ("no window", vec![Device::with(&[4]).without(Param::HostVisible)], vec!["no window", "hostmem=4G"]),
        (
            "no choice",
            vec![Device::with(&[4]).without(Param::ContextInit)],
            vec!["chosen capset", "QEMU 9.2"],
        ),
        (
            "virgl only",
            vec![Device::with(&[1, 2])],
            vec!["capset 10 is not offered, capset 4 is not offered", "libvirglrenderer.so.1", "venus=on"],
        ),
        (
            "virgl only, old kernel",
            vec![Device::with(&[1, 2]).without(Param::SupportedCapsetIds)],
            vec!["capset 10 is not offered, capset 4 is not offered"],
        ),
        ("zeros", vec![zeros(&[4], &[4])], vec!["capset 10 is not offered, capset 4 is all zeros"]),
        (
            "both zeros",
            vec![zeros(&[4, 10], &[4, 10])],
            vec!["capset 10 is all zeros, capset 4 is all zeros"],
        ),
        (
            "several that will not do",
            vec![Device::of("i915"), closed(Errno::EACCES), Device::with(&[2])],
            vec![
                "renderD128: its driver is i915",
                "renderD129: permission denied",
                "renderD130: its host offers no APIR",
            ],
        ),
    ];
    for (name, devices, parts) in rows {
        let (drm, log) = machine(devices);
        let error = routes_over(&drm, &Choice::default()).unwrap_err();
        let line = error.to_string();
        println!("{name}: {line}");
        for part in parts {
            assert!(line.contains(part), "{name}: {part:?} in {line}");
        }
        assert!(line.contains("no apir host") && line.contains("apir serve --socket"), "{name}: {line}");
        assert_eq!(line.lines().count(), 1, "{name}");
        assert!(seen(&log).contexts.is_empty());
    }
}

#[test]
fn the_likeliest_way_comes_first() {
    let way = |node: &str, capset| (node.to_owned(), capset);
    let any = Choice::default();
    type Ways = Vec<(String, u32)>;
    let rows: Vec<(Vec<Device>, Ways)> = vec![
        (vec![Device::with(&[1, 2, 4])], vec![way("128", 4)]),
        (vec![Device::with(&[1, 2, 10])], vec![way("128", 10)]),
        (vec![Device::with(&[1, 2, 4, 10])], vec![way("128", 10), way("128", 4)]),
        // A capset without data is absent.
        (vec![zeros(&[4, 10], &[10])], vec![way("128", 4)]),
        (vec![zeros(&[4, 10], &[4])], vec![way("128", 10)]),
        // A kernel that cannot list its capsets is asked for each.
        (
            vec![Device::with(&[4, 10]).without(Param::SupportedCapsetIds)],
            vec![way("128", 10), way("128", 4)],
        ),
        (vec![Device::with(&[4]).without(Param::SupportedCapsetIds)], vec![way("128", 4)]),
        // Several GPUs: other drivers and closed nodes are passed by, APIR's own capset goes first.
        (vec![Device::of("amdgpu"), closed(Errno::EACCES), Device::with(&[4])], vec![way("130", 4)]),
        (vec![Device::with(&[2]), Device::with(&[10])], vec![way("129", 10)]),
        (
            vec![Device::with(&[4]), Device::with(&[4, 10]), Device::with(&[10])],
            vec![way("129", 10), way("130", 10), way("128", 4), way("129", 4)],
        ),
    ];
    for (devices, expected) in rows {
        let shown = format!("{devices:?}");
        let (drm, _) = machine(devices);
        assert_eq!(ways(&drm, &any), expected, "{shown}");
    }
}

#[test]
fn a_capset_listed_that_cannot_be_read_is_no_way() {
    let mut device = Device::with(&[4, 10]);
    device.capsets.remove(&10);
    let (drm, _) = machine([device.clone()]);
    assert_eq!(ways(&drm, &Choice::default()), [("128".to_owned(), 4)]);
    device.capsets.remove(&4);
    let (drm, _) = machine([device]);
    let line = routes_over(&drm, &Choice::default()).unwrap_err().to_string();
    assert!(line.contains("capset 10 cannot be read, capset 4 cannot be read"), "{line}");
}

#[test]
fn the_environment_can_forbid_venus() {
    let only = Choice { only_apir: true, node: None };
    let (drm, _) = machine([Device::with(&[4, 10])]);
    assert_eq!(ways(&drm, &only), [("128".to_owned(), 10)]);
    let (drm, _) = machine([Device::with(&[4])]);
    let line = routes_over(&drm, &only).unwrap_err().to_string();
    assert!(
        line.contains("capset 10 is not offered, and GGML_REMOTING_USE_APIR_CAPSET asks for 10 only"),
        "{line}"
    );
}

#[test]
fn the_environment_can_choose_the_node() {
    let choose = |path: &str| Choice { node: Some(path.into()), only_apir: false };
    let (drm, log) = machine([Device::with(&[10]), Device::with(&[4]), Device::of("xe")]);
    assert_eq!(ways(&drm, &choose("/dev/dri/renderD129")), [("129".to_owned(), 4)]);
    assert_eq!(seen(&log).opened, [Path::new("/dev/dri/renderD129")]);
    let other = routes_over(&drm, &choose("/dev/dri/renderD130")).unwrap_err().to_string();
    assert_eq!(
        other,
        "no apir host by APIR_RENDER_NODE: /dev/dri/renderD130: its driver is xe, not virtio_gpu"
    );
    let absent = routes_over(&drm, &choose("/dev/dri/renderD7")).unwrap_err().to_string();
    assert!(
        absent.starts_with("no apir host by APIR_RENDER_NODE: /dev/dri/renderD7: it cannot be opened: "),
        "{absent}"
    );
}

#[test]
fn each_try_has_a_file_and_a_context_of_its_own() {
    let (drm, log) = machine([Device::with(&[4, 10])]);
    let links: Vec<_> = routes_over(&drm, &Choice::default())
        .unwrap()
        .into_iter()
        .map(|route| (route.name().unwrap().to_owned(), route.open().unwrap()))
        .collect();
    let told: Vec<_> = links
        .iter()
        .map(|(name, link)| (name.as_str(), link.command_type_offset(), link.transport()))
        .collect();
    assert_eq!(
        told,
        [
            ("/dev/dri/renderD128 with capset 10", 0, "virtgpu"),
            ("/dev/dri/renderD128 with capset 4", 331, "virtgpu")
        ]
    );
    assert_eq!(seen(&log).contexts, [10, 4]);
    assert_eq!(seen(&log).opened.len(), 3);
}

#[test]
fn a_context_that_cannot_be_made_is_told() {
    let (drm, _) = machine([Device::with(&[10])]);
    let way = Way { path: "/dev/dri/renderD128".into(), capset: 4 };
    let error = VirtgpuLink::open(&*drm, &way).unwrap_err();
    assert!(error.to_string().starts_with("cannot make a context: "), "{error}");
}

#[test]
fn blobs_of_every_size_map_on_every_host_page() {
    for page in [4096, 16384] {
        let (link, log) = link(Device { page, ..Device::with(&[10]) });
        let sizes = [1, 4095, 4096, 4097, 16383, 16384, 16385, 131_268];
        for (index, size) in sizes.into_iter().enumerate() {
            let blob = link.create_blob(size).unwrap();
            assert!(blob.len() as u64 >= size && blob.len().is_multiple_of(16384));
            assert_eq!(blob.res_id(), index as u32 + 101);
            let end = blob.len() - 5;
            blob.write(end, b"hello").unwrap();
            let mut out = [0; 5];
            blob.read(end, &mut out).unwrap();
            assert_eq!(&out, b"hello");
            assert_eq!(blob.load_word(0), 0);
        }
        let log = seen(&log);
        assert_eq!(log.sizes, [16384, 16384, 16384, 16384, 16384, 16384, 32768, 147_456]);
        assert_eq!(log.closed, [1, 2, 3, 4, 5, 6, 7, 8]);
    }
}

#[test]
fn a_refused_blob_is_a_clear_error_and_given_back() {
    let (refusing, log) = link(Device { makes_blobs: false, ..Device::with(&[10]) });
    let error = refusing.create_blob(20_000).unwrap_err();
    assert!(matches!(error, LinkError::Refused { size: 20_000, reason: BlobFailure::Unmappable }));
    assert!(
        error.to_string().starts_with("the host refused a blob of 20000 bytes: it cannot be mapped"),
        "{error}"
    );
    assert_eq!(seen(&log).closed, [1]);

    let (small, log) = link(Device { window: 40_000, ..Device::with(&[10]) });
    let first = small.create_blob(20_000).unwrap();
    let error = small.create_blob(20_000).unwrap_err();
    assert!(matches!(error, LinkError::Refused { reason: BlobFailure::Window, .. }));
    assert!(error.to_string().contains("hostmem=SIZE"), "{error}");
    assert!(seen(&log).closed.is_empty());
    drop(first);
    small.create_blob(20_000).unwrap();

    for size in [0, (1 << 46) + 1, u64::MAX] {
        let error = small.create_blob(size).unwrap_err();
        assert!(matches!(error, LinkError::Refused { reason: BlobFailure::Server(BlobRefusal::Size), .. }));
    }
}

#[test]
fn commands_go_out_whole_or_not_at_all() {
    let (healthy, log) = link(Device::with(&[10]));
    healthy.submit(&[7; 12]).unwrap();
    for len in [0, 11, 13, MAX_COMMAND + 4] {
        assert!(matches!(healthy.submit(&vec![0; len]), Err(LinkError::Command { .. })));
    }
    assert_eq!(seen(&log).commands, [[7; 12]]);
    healthy.check_peer().unwrap();

    let (broken, _) = link(Device { broken: Some(Errno::EIO), ..Device::with(&[10]) });
    let line = broken.submit(&[7; 12]).unwrap_err().to_string();
    assert!(line.starts_with("cannot submit a command to the render node: "), "{line}");
}

#[test]
fn a_wait_on_a_silent_device_ends_at_its_deadline() {
    let (link, _) = link(Device::with(&[10]));
    let waited = wait::until(&*link, Some(Duration::from_millis(20)), || false);
    assert!(matches!(waited, Err(LinkError::Timeout(_))));
}

#[test]
fn nobody_who_shakes_hands_is_one_line_with_every_way() {
    let (drm, log) = machine([Device::with(&[4, 10])]);
    let started = Instant::now();
    let error = Session::first(routes_over(&drm, &Choice::default()).unwrap()).unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(6));
    let line = error.to_string();
    println!("{line}");
    assert!(matches!(error, SessionError::NoAnswer(_)));
    for part in [
        "renderD128 with capset 10: no answer",
        "renderD128 with capset 4: no answer",
        "libvirglrenderer.so.1",
    ] {
        assert!(line.contains(part), "{part:?} in {line}");
    }
    assert_eq!(line.lines().count(), 1);
    let log = seen(&log);
    assert_eq!(log.contexts, [10, 4]);
    let types: Vec<_> =
        log.commands.iter().map(|command| u32::from_le_bytes(command[..4].try_into().unwrap())).collect();
    assert_eq!(types, [0, 331]);
    // The blobs of each try are given back.
    assert_eq!(log.closed, [1, 2, 1, 2]);
}

#[test]
fn a_device_that_breaks_is_passed_by() {
    let broken = Device { broken: Some(Errno::EIO), ..Device::with(&[10]) };
    let refusing = Device { makes_blobs: false, ..Device::with(&[10]) };
    let (drm, _) = machine([broken, refusing]);
    let started = Instant::now();
    let line = Session::first(routes_over(&drm, &Choice::default()).unwrap()).unwrap_err().to_string();
    assert!(started.elapsed() < Duration::from_secs(1));
    println!("{line}");
    assert!(line.contains("renderD128 with capset 10: cannot submit"), "{line}");
    assert!(line.contains("renderD129 with capset 10: the host refused a blob of 16384 bytes"), "{line}");
}

#[test]
fn t25_a_fork_closes_no_object_of_its_parents_and_opens_a_context_of_its_own() {
    let (drm, log) = machine([Device::with(&[10])]);
    let open = || routes_over(&drm, &Choice::default()).unwrap().remove(0).open().unwrap();
    let link = open();
    let (freed, kept) = (link.create_blob(100).unwrap(), link.create_blob(100).unwrap());
    kept.store_word(0, 7);
    let status = crate::link::in_fork(|| {
        drop(freed);
        drop(link);
        let closed = seen(&log).closed.len();
        let own = open();
        let blob = own.create_blob(100).unwrap();
        blob.store_word(0, 9);
        let contexts = seen(&log).contexts.len();
        drop(blob);
        u8::from((closed, contexts) == (0, 2) && seen(&log).closed.len() == 1)
    });
    assert_eq!(status, 1);
    assert_eq!(kept.load_word(0), 7);
    assert_eq!(seen(&log).contexts.len(), 1);
}
