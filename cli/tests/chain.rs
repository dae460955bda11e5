//! The drop-in in front of a distribution's own virglrenderer, with its Venus in a render server of its own.
//!
//! The VMM runs under the loader and with the libraries of the root that virtual machines are made of; no Vulkan driver, no GPU.
#![allow(missing_docs, clippy::unwrap_used)]

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use support::eventually;
use support::vmm::{BlobArgs, FENCES, Guest, HOST3D, Memory, Vmm, vmm_by};

/// Venus without OpenGL, by a render server.
const FLAGS: i32 = 1 << 6 | 1 << 7 | 1 << 9;
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
/// A Venus command without effect: which version of Vulkan is there?
const ENUMERATE_INSTANCE_VERSION: [u32; 4] = [137, 0, 1, 0];

#[test]
#[ignore = "needs the root of virtual machines: cargo xtask test runs it"]
fn debians_library_serves_venus_beside_our_contexts() {
    let test = "debians_library_serves_venus_beside_our_contexts";
    let root = std::env::var_os("APIR_VM").expect("APIR_VM is not set: cargo xtask test sets it");
    let root = PathBuf::from(root).join("qemu");
    let libraries = root.join(LIBRARIES);
    let loader = root.join("lib64/ld-linux-x86-64.so.2");
    let folder = tempfile::tempdir().unwrap();
    let server = folder.path().join("server");
    let script = format!(
        "#!/bin/sh\nexec {} --library-path {} {}/usr/libexec/virgl_render_server \"$@\"\n",
        loader.display(),
        libraries.display(),
        root.display()
    );
    fs::write(&server, script).unwrap();
    fs::set_permissions(&server, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(&loader);
    command.arg("--library-path").arg(&libraries).arg(std::env::current_exe().unwrap());
    let chain = libraries.join("libvirglrenderer.so.1");
    let variables = [("APIR_CHAIN", chain.as_path()), ("RENDER_SERVER_EXEC_PATH", server.as_path())];
    let lines = vmm_by(command, test, &variables, venus_and_apir);
    assert!(lines.contains(&format!("all else by {}", chain.display())), "{lines}");
}

fn venus_and_apir(vmm: &Vmm) {
    assert_eq!(vmm.init(FLAGS), 0);
    assert_eq!(vmm.capset(10), (0, 24));
    let (_, size) = vmm.capset(4);
    assert!(size > 24, "Venus's own capset: {size} bytes");

    let ours = Guest::ready(vmm, 1, 10);
    let venus = |ctx, res| {
        assert_eq!(vmm.create_context(ctx, 4), 0);
        assert_eq!(vmm.create_blob(ctx, res, HOST3D, 0, 8192), 0);
        vmm.attach(ctx, res);
        let memory = vmm.map(res).unwrap();
        memory.store(0, res);
        assert_eq!(vmm.submit(ctx, &ENUMERATE_INSTANCE_VERSION), 0);
        memory
    };
    let memory = venus(2, 20);
    // Made by Debian's library, taken over with its blobs.
    let taken = Guest::new(vmm, 3, 4);
    assert_eq!(vmm.create_blob(3, 30, HOST3D, 0, 5000), 0);
    vmm.map(30).unwrap().store(0, 33);
    assert_eq!(taken.call(0, 0, &[0, 2]), 0xab1f);
    assert_eq!(taken.call(1, 0, &[]), 1);
    assert_eq!(taken.forward(7, &[30]), 5);
    assert_eq!(taken.reply.load(4), 33);
    assert_eq!(vmm.create_blob(3, 31, HOST3D, 0, 4096), 0);
    vmm.map(31).unwrap().store(0, 34);
    assert_eq!(taken.forward(7, &[31]), 5);
    assert_eq!(taken.reply.load(4), 34);

    // The guest's own memory goes to Debian's library whose ever the context is.
    let pages = Memory::anonymous(4096);
    let list = [pages.address, 4096];
    let args = BlobArgs {
        res: 40,
        ctx: 1,
        mem: 1,
        flags: 1,
        id: 0,
        size: 4096,
        iov: list.as_ptr().cast(),
        count: 1,
    };
    assert_eq!(vmm.create_blob_with(&args), 0);
    assert!(vmm.info(40).is_ok());
    vmm.attach(1, 40);
    vmm.detach(1, 40);
    assert_eq!(vmm.detach_iov(40), (list.as_ptr() as usize, 1));
    vmm.unref(40);

    // All three go on side by side; the Venus context's server still answers.
    for _ in 0..3 {
        ours.check();
        taken.check();
        assert_eq!(vmm.submit(2, &ENUMERATE_INSTANCE_VERSION), 0);
    }
    assert_eq!(memory.load(0), 20);
    assert_eq!(vmm.create_blob(2, 21, HOST3D, 0, 4096), 0);
    vmm.map(21).unwrap().store(0, 21);
    for (ctx, id) in [(1, 51), (2, 52), (3, 53)] {
        assert_eq!(vmm.create_context_fence(ctx, 0, id), 0, "context {ctx}");
    }
    eventually("every context's fence retires", || {
        vmm.poll();
        FENCES.lock().unwrap().len() == 3
    });
    for res in [20, 21, 30, 31, taken.res, ours.res] {
        assert_eq!(vmm.unmap(res), 0, "{res}");
        vmm.unref(res);
    }
    for ctx in 1..=3 {
        vmm.destroy_context(ctx);
    }
    // And again after a reset and from the start.
    vmm.reset();
    Guest::ready(vmm, 1, 10).check();
    let _ = venus(2, 20);
    vmm.cleanup();
    eventually("the workers are gone", || support::vmm::children().is_empty());
    assert_eq!(vmm.init(FLAGS), 0);
    Guest::ready(vmm, 1, 10).check();
    let _ = venus(2, 20);
}
