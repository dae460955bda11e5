//! What a worker can still do behind its walls, tried by a plugin that does what it is told.
#![allow(missing_docs, clippy::unwrap_used)]
#![cfg(target_os = "linux")]

mod support;

use ggml_virtgpu::link::{Link, LinkError};
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{Guest, Server, fake_plugin, without_landlock};

const READ: u32 = 1;
const WRITE: u32 = 2;
const MAKE: u32 = 4;
const MODES: [&str; 2] = ["strict", "off"];

fn server(mode: &str, profile: &str) -> Server {
    Server::start_with(|command| {
        command.env("APIR_SANDBOX", mode).env("APIR_SANDBOX_PROFILE", profile);
    })
}

/// The error's number of opening a file.
fn open(guest: &Guest, how: u32, path: &Path) -> i32 {
    guest.ask(11, Some(how), path.to_str().unwrap())
}

/// Result and error's number of a system call.
fn call(guest: &Guest, number: libc::c_long, arguments: &[u32]) -> (i32, i32) {
    let words: Vec<u32> =
        std::iter::once(u32::try_from(number).unwrap()).chain(arguments.iter().copied()).collect();
    assert_eq!(guest.forward(10, &words).unwrap(), 5, "{number} {arguments:?}");
    (guest.reply.load_word(4).cast_signed(), guest.reply.load_word(8).cast_signed())
}

/// A line of /proc/PID/`file` of the only worker, without its name.
fn told_of_worker(server: &Server, file: &str, name: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{}/{file}", server.workers()[0])).unwrap();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap();
    line[name.len()..].split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn files_outside_the_profile_cannot_be_opened() {
    for mode in MODES {
        let server = server(mode, "cpu");
        let folder = server.folder.path();
        let secret = folder.join("secret");
        fs::write(&secret, "secret").unwrap();
        let guest = Guest::ready(&server);
        let landlock = !server.has_line("no landlock");
        let walled = if mode == "strict" && landlock { libc::EACCES } else { 0 };
        for (how, path) in [
            (READ, secret.as_path()),
            (WRITE, &secret),
            (WRITE | MAKE, &folder.join("new")),
            (READ, Path::new("/etc/passwd")),
            (READ, Path::new("/")),
            (READ, folder),
        ] {
            assert_eq!(open(&guest, how, path), walled, "{mode} {how} {}", path.display());
        }
        assert_eq!(folder.join("new").exists(), walled == 0);
        // What it needs, and its log.
        for path in ["/proc/self/maps", "/proc/cpuinfo", "/sys/devices/system/cpu/online", "/dev/urandom"] {
            assert_eq!(open(&guest, READ, Path::new(path)), 0, "{mode} {path}");
        }
        assert_eq!(open(&guest, WRITE | MAKE, &folder.join("plugin.log")), 0, "{mode}");
        assert_eq!(open(&guest, READ, &folder.join("ggml.so")), 0, "{mode}");
        guest.check();
    }
}

#[test]
fn a_kernel_without_landlock_is_told_of_and_everything_else_stands() {
    let server = Server::start_with(|command| {
        without_landlock(command);
    });
    assert!(server.has_line("workers are sandboxed in part, profile any: this kernel has no landlock"));
    let guest = Guest::ready(&server);
    assert_eq!(open(&guest, READ, Path::new("/etc/passwd")), 0);
    assert_eq!(call(&guest, libc::SYS_socket, &[1, 1, 0]), (-1, libc::EPERM));
    assert_eq!(call(&guest, libc::SYS_execve, &[0, 0, 0]), (-1, libc::EPERM));
    guest.check();
}

#[test]
fn more_can_be_read_where_the_host_s_user_says_so() {
    let more = tempfile::tempdir().unwrap();
    fs::write(more.path().join("file"), "").unwrap();
    let server = Server::start_with(|command| {
        command.env("APIR_SANDBOX_READ", more.path());
    });
    let guest = Guest::ready(&server);
    assert_eq!(open(&guest, READ, &more.path().join("file")), 0);
    if !server.has_line("no landlock") {
        assert_eq!(open(&guest, WRITE, &more.path().join("file")), libc::EACCES);
    }
}

/// Calls with arguments that harm nobody where they are let through, which is what the mode `off` shows.
const REFUSED: &[(libc::c_long, &[u32])] = &[
    (libc::SYS_socket, &[libc::AF_UNIX as u32, libc::SOCK_STREAM as u32, 0]),
    (libc::SYS_socket, &[libc::AF_INET as u32, libc::SOCK_STREAM as u32, 0]),
    (libc::SYS_socket, &[libc::AF_NETLINK as u32, libc::SOCK_RAW as u32, 0]),
    (libc::SYS_socketpair, &[libc::AF_UNIX as u32, libc::SOCK_STREAM as u32, 0, 0]),
    (libc::SYS_connect, &[99, 0, 0]),
    (libc::SYS_bind, &[99, 0, 0]),
    (libc::SYS_listen, &[99, 0]),
    (libc::SYS_accept4, &[99, 0, 0, 0]),
    (libc::SYS_execve, &[0, 0, 0]),
    (libc::SYS_execveat, &[99, 0, 0, 0, 0]),
    (libc::SYS_bpf, &[0, 0, 0]),
    (libc::SYS_keyctl, &[99, 0, 0]),
    (libc::SYS_add_key, &[0, 0, 0, 0, 0]),
    (libc::SYS_perf_event_open, &[0, 0, 0, 0, 0]),
    (libc::SYS_userfaultfd, &[99, 0, 0]),
    (libc::SYS_io_uring_setup, &[0, 0]),
    (libc::SYS_pidfd_open, &[u32::MAX >> 1, 0]),
    (libc::SYS_kill, &[1, 0]),
    (libc::SYS_tgkill, &[1, 1, 0]),
    (libc::SYS_setuid, &[u32::MAX]),
    (libc::SYS_fchmodat, &[99, 0, 0]),
    (libc::SYS_fchownat, &[99, 0, 0, 0, 0]),
    (libc::SYS_unlinkat, &[99, 0, 0]),
    (libc::SYS_mkdirat, &[99, 0, 0]),
    (libc::SYS_renameat2, &[99, 0, 99, 0, 0]),
    (libc::SYS_linkat, &[99, 0, 99, 0, 0]),
    (libc::SYS_setxattr, &[0, 0, 0, 0, 0]),
    (libc::SYS_name_to_handle_at, &[99, 0, 0, 0, 0]),
    (libc::SYS_prlimit64, &[1, libc::RLIMIT_NOFILE, 0, 0]),
    (libc::SYS_prctl, &[libc::PR_SET_DUMPABLE as u32, 1]),
    (libc::SYS_prctl, &[libc::PR_SET_PDEATHSIG as u32, 99]),
    (libc::SYS_fcntl, &[2, libc::F_SETOWN as u32, 0]),
    (libc::SYS_seccomp, &[99, 0, 0]),
];

#[test]
fn calls_that_reach_beyond_the_process_are_refused() {
    for (mode, profile) in
        [("strict", "cpu"), ("strict", "vulkan"), ("strict", "cuda"), ("strict", "any"), ("off", "")]
    {
        let server = server(mode, profile);
        let guest = Guest::ready(&server);
        for &(number, arguments) in REFUSED {
            let (result, errno) = call(&guest, number, arguments);
            let refused = (result, errno) == (-1, libc::EPERM);
            assert_eq!(
                refused,
                mode == "strict",
                "{mode} {profile} {number} {arguments:?}: {result}, {errno}"
            );
        }
        // The control shows in the first place that these come through where they are not refused.
        if mode == "strict" {
            for (number, arguments) in [
                (libc::SYS_clone, vec![libc::SIGCHLD as u32]),
                (libc::SYS_clone, vec![(libc::CLONE_THREAD | libc::CLONE_NEWNET) as u32]),
                (libc::SYS_ioctl, vec![2, libc::TIOCSTI as u32, 0]),
                #[cfg(target_arch = "x86_64")]
                (libc::SYS_fork, vec![]),
                #[cfg(target_arch = "x86_64")]
                (libc::SYS_vfork, vec![]),
            ] {
                assert_eq!(call(&guest, number, &arguments), (-1, libc::EPERM), "{profile} {number}");
            }
            // The C library falls back to clone, whose flags can be looked at.
            assert_eq!(call(&guest, libc::SYS_clone3, &[0, 0]), (-1, libc::ENOSYS));
        }
        assert_eq!(guest.ask(12, None, ""), 1, "threads start");
        guest.check();
    }
}

#[test]
fn calls_that_no_library_makes_end_the_worker_and_no_other() {
    let server = server("strict", "cpu");
    let other = Guest::ready(&server);
    for number in [
        libc::SYS_ptrace,
        libc::SYS_mount,
        libc::SYS_open_by_handle_at,
        libc::SYS_unshare,
        libc::SYS_setns,
        libc::SYS_process_vm_writev,
        libc::SYS_init_module,
        libc::SYS_kexec_load,
    ] {
        let guest = Guest::ready(&server);
        let words = [u32::try_from(number).unwrap(), 0, 0, 0, 0, 0, 0];
        assert!(matches!(guest.forward(10, &words), Err(LinkError::Lost(_))), "{number}");
    }
    server.wait_for_line("ended with signal: 31 (SIGSYS)");
    other.check();
    Guest::ready(&server).check();
}

#[test]
fn the_process_is_closed_to_others_and_has_limits() {
    for mode in MODES {
        let server = server(mode, "cpu");
        let guest = Guest::ready(&server);
        let strict = mode == "strict";
        assert_eq!(told_of_worker(&server, "status", "NoNewPrivs:") == "1", strict);
        assert_eq!(told_of_worker(&server, "status", "Seccomp:") == "2", strict);
        let dumpable = call(&guest, libc::SYS_prctl, &[libc::PR_GET_DUMPABLE as u32]).0;
        assert_eq!(dumpable == 0, strict, "{dumpable}");
        if strict {
            // All powers but CAP_DAC_READ_SEARCH, which root alone has.
            let powers = u64::from_str_radix(&told_of_worker(&server, "status", "CapPrm:"), 16).unwrap();
            assert_eq!(powers & !(1 << 2), 0, "{powers:#x}");
            assert_eq!(told_of_worker(&server, "limits", "Max core file size"), "0 0 bytes");
            let files = told_of_worker(&server, "limits", "Max open files");
            let most: u64 = files.split(' ').nth(1).unwrap().parse().unwrap();
            assert!(most <= 4096, "{files}");
        }
    }
}

#[test]
fn descriptors_and_secrets_stay_with_the_server() {
    // A number that a worker's own descriptors do not reach; a child inherits it.
    let number = fcntl(File::open("/dev/null").unwrap(), FcntlArg::F_DUPFD(200)).unwrap().cast_unsigned();
    for mode in MODES {
        let server = Server::start_with(|command| {
            command.env("APIR_SANDBOX", mode).env("HF_TOKEN", "secret").env("GGML_TEST", "1");
        });
        let guest = Guest::ready(&server);
        let inherited = call(&guest, libc::SYS_fcntl, &[number, libc::F_GETFD as u32]);
        let has_token = guest.ask(13, None, "HF_TOKEN");
        if mode == "strict" {
            assert_eq!((inherited, has_token), ((-1, libc::EBADF), 0));
        } else {
            assert_eq!((inherited, has_token), ((0, 0), 1));
        }
        assert_eq!(guest.ask(13, None, "GGML_TEST"), 1);
        guest.check();
    }
}

/// A folder that every user can enter, with copies of the programs: a build folder may be root's alone.
fn for_everybody() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let copy = |from: &Path| {
        let to = folder.path().join(from.file_name().unwrap());
        fs::copy(from, &to).unwrap();
        fs::set_permissions(&to, fs::Permissions::from_mode(0o755)).unwrap();
        to
    };
    let (apir, plugin) = (copy(Path::new(env!("CARGO_BIN_EXE_apir"))), copy(&fake_plugin()));
    (folder, apir, plugin)
}

#[test]
fn an_ordinary_user_s_worker_is_walled_in_and_works() {
    const NOBODY: u32 = 65_534;
    let (folder, apir, plugin) = for_everybody();
    let ggml = folder.path().join("libggml-cpu.so");
    fs::write(&ggml, "").unwrap();
    let secret = folder.path().join("secret");
    fs::write(&secret, "secret").unwrap();
    let mut program = Command::new(&apir);
    if nix::unistd::geteuid().is_root() {
        program.uid(NOBODY).gid(NOBODY);
    }
    let server = Server::serve_by(program, folder, &plugin, &ggml, |_| {});
    let guest = Guest::ready(&server);
    assert_eq!(told_of_worker(&server, "status", "Seccomp:"), "2");
    assert_ne!(told_of_worker(&server, "status", "Uid:").split(' ').next(), Some("0"));
    assert_eq!(open(&guest, READ, Path::new("/proc/self/maps")), 0);
    if !server.has_line("no landlock") {
        assert_eq!(open(&guest, READ, &secret), libc::EACCES);
    }
    assert_eq!(call(&guest, libc::SYS_socket, &[1, 1, 0]), (-1, libc::EPERM));
    assert_eq!(guest.ask(12, None, ""), 1);
    let blob = guest.link.create_blob(1 << 20).unwrap();
    blob.store_word(0, 77);
    assert_eq!(guest.forward(7, &[blob.res_id()]).unwrap(), 5);
    assert_eq!(guest.reply.load_word(4), 77);
    drop(blob);
    guest.check();
    drop(guest);
    server.wait_for_line("client 1 left");
    assert!(server.plugin_was_told());
}

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn ggml_s_cpu_backend_is_loaded_behind_the_walls() {
    let folder =
        |name: &str| PathBuf::from(std::env::var_os(name).unwrap_or_else(|| panic!("{name} is not set")));
    let ggml = folder("APIR_LLAMA_DIR").join("libggml-cpu.so");
    let plugin = folder("APIR_DIST").join("libggml-virtgpu-backend.so");
    let server = Server::serve(tempfile::tempdir().unwrap(), &plugin, &ggml, |_| {});
    assert!(server.has_line("workers are sandboxed, profile cpu"), "{:?}", server.lines());
    let guest = Guest::ready(&server);
    assert_eq!(told_of_worker(&server, "status", "Seccomp:"), "2");
    // The number of devices.
    assert_eq!(guest.forward(0, &[]).unwrap(), 5);
    assert_eq!(guest.reply.load_word(4), 1);
}
