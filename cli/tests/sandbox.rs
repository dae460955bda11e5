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
        let log = folder.join("plugin.log");
        fs::write(&log, "a guest's traces").unwrap();
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
        // What it needs.
        for path in ["/proc/self/maps", "/proc/cpuinfo", "/sys/devices/system/cpu/online", "/dev/urandom"] {
            assert_eq!(open(&guest, READ, Path::new(path)), 0, "{mode} {path}");
        }
        // No log: the server writes it.
        assert_eq!(open(&guest, WRITE, &log), walled, "{mode}");
        assert_eq!(open(&guest, READ, &folder.join("ggml.so")), 0, "{mode}");
        // What /proc/self also has: the network's interfaces and sockets, what is mounted, other threads' views of it.
        for path in
            ["/proc/self/net/dev", "/proc/self/net/unix", "/proc/self/mountinfo", "/proc/self/environ"]
        {
            assert_eq!(open(&guest, READ, Path::new(path)), walled, "{mode} {path}");
        }
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
    (libc::SYS_inotify_init1, &[0]),
    (libc::SYS_fanotify_init, &[0, 99]),
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

/// Every profile, with landlock and without.
const WALLS: [(&str, bool); 10] = [
    ("cpu", true),
    ("vulkan", true),
    ("cuda", true),
    ("rocm", true),
    ("any", true),
    ("cpu", false),
    ("vulkan", false),
    ("cuda", false),
    ("rocm", false),
    ("any", false),
];

fn server_behind(profile: &str, landlock: bool) -> Server {
    Server::start_with(|command| {
        command.env("APIR_SANDBOX_PROFILE", profile);
        if !landlock {
            without_landlock(command);
        }
    })
}

/// The number of the worker's socket: the only descriptor with these flags.
fn socket_of_worker(guest: &Guest) -> u32 {
    let flags = |fd: &u32| call(guest, libc::SYS_fcntl, &[*fd, libc::F_GETFL as u32]);
    (3..64).find(|fd| flags(fd) == (libc::O_RDWR, 0)).unwrap()
}

/// Requests of ioctl that reach beyond the worker, with what no driver of a GPU asks.
const FOREIGN_REQUESTS: &[u32] = &[
    0x8901,      // FIOSETOWN
    0x8902,      // SIOCSPGRP
    0x8903,      // FIOGETOWN
    0x8904,      // SIOCGPGRP
    0x8912,      // SIOCGIFCONF
    0x8910,      // SIOCGIFNAME
    0x8913,      // SIOCGIFFLAGS
    0x8915,      // SIOCGIFADDR
    0x8927,      // SIOCGIFHWADDR
    0x8946,      // SIOCETHTOOL
    0x89f0,      // SIOCDEVPRIVATE
    0x5452,      // FIOASYNC
    0x5411,      // TIOCOUTQ
    0x5410,      // TIOCSPGRP
    0x540e,      // TIOCSCTTY
    0x5412,      // TIOCSTI
    0x541c,      // TIOCLINUX
    0x541d,      // TIOCCONS
    0x5423,      // TIOCSETD
    0x5402,      // TCSETS
    0x5422,      // TIOCNOTTY
    0x5441,      // TIOCGPTPEER
    0x8004_5430, // TIOCGPTN
    0x4004_5431, // TIOCSPTLCK
    0x8004_5432, // TIOCGDEV
    0x402c_542b, // TCSETS2
    0x4004_5436, // TIOCSIG
    0x4b3a,      // KDSETMODE
    0x4b46,      // KDGKBENT
    0x4b72,      // KDFONTOP
    0x5606,      // VT_ACTIVATE
    0x4600,      // FBIOGET_VSCREENINFO
    0x4601,      // FBIOPUT_VSCREENINFO
    1,           // FIBMAP
    2,           // FIGETBSZ
    0xc004_5877, // FIFREEZE
    0xc004_5878, // FITHAW
    0xc018_5879, // FITRIM
    0x4004_9409, // FICLONE
    0x4020_940d, // FICLONERANGE
    0xc018_9436, // FIDEDUPERANGE
    0x8008_6601, // FS_IOC_GETFLAGS
    0x4008_6602, // FS_IOC_SETFLAGS
    0x8008_7601, // FS_IOC_GETVERSION
    0x4008_7602, // FS_IOC_SETVERSION
    0xc020_660b, // FS_IOC_FIEMAP
    0x6611,      // EXT4_IOC_SWAP_BOOT, which is PROCMAP_QUERY's type and number
    0x4008_6610, // EXT4_IOC_RESIZE_FS
    0x800c_6613, // FS_IOC_SET_ENCRYPTION_POLICY
    0xc050_6617, // FS_IOC_ADD_ENCRYPTION_KEY
    0x4080_6685, // FS_IOC_ENABLE_VERITY
    0xc004_6686, // FS_IOC_MEASURE_VERITY
    0x801c_581f, // FS_IOC_FSGETXATTR
    0x401c_5820, // FS_IOC_FSSETXATTR
    0x4030_5828, // XFS_IOC_ALLOCSP64
    0x8008_1272, // BLKGETSIZE64
    0x1261,      // BLKFLSBUF
    0x125d,      // BLKROSET
    0x1277,      // BLKDISCARD
    0x2285,      // SG_IO
    0x5331,      // CDROM_LOCKDOOR
    0x4004_5a09, // NVME and others of storage have a letter of their own
    0x4e41,      // NVME_IOCTL_ID
    0xae00,      // KVM_GET_API_VERSION
    0xae01,      // KVM_CREATE_VM
    0xaf01,      // VHOST_SET_OWNER
    0x4004_54ca, // TUNSETIFF
    0x2400,      // PERF_EVENT_IOC_ENABLE
    0x4004_2406, // PERF_EVENT_IOC_SET_FILTER
    0xc018_aa3f, // UFFDIO_API
    0x8008_b700, // NS_GET_USERNS
    0xb701,      // NS_GET_PARENT
    0xff04,      // PIDFD_GET_USER_NAMESPACE and its kin
    0x4004_5501, // USBDEVFS
    0x4038_564a, // video devices
    0x4004_4590, // EVIOCGRAB
    0x641e,      // DRM_IOCTL_SET_MASTER
    0x641f,      // DRM_IOCTL_DROP_MASTER
    0xc008_640a, // DRM_IOCTL_GEM_FLINK
    0xc010_640b, // DRM_IOCTL_GEM_OPEN
    0x4004_6411, // DRM_IOCTL_AUTH_MAGIC
    0xc068_64a2, // DRM_IOCTL_MODE_SETCRTC
    0xc020_64b2, // DRM_IOCTL_MODE_CREATE_DUMB
    0xc018_64c6, // DRM_IOCTL_MODE_CREATE_LEASE
    0xc020_4b26, // AMDKFD_IOC_DBG_TRAP
    0x4008_6201, // DMA_BUF_SET_NAME
];

#[test]
fn s29_requests_that_reach_beyond_a_driver_are_refused() {
    // The control: whatever the descriptor says to them, it is not what the filter says.
    let open = server("off", "");
    let guest = Guest::ready(&open);
    let socket = socket_of_worker(&guest);
    for &request in FOREIGN_REQUESTS {
        for fd in [2, socket] {
            let (result, errno) = call(&guest, libc::SYS_ioctl, &[fd, request, 0]);
            // Only root may ask to freeze a file system.
            if nix::unistd::geteuid().is_root() || !matches!(request, 0xc004_5877 | 0xc004_5878) {
                assert_ne!((result, errno), (-1, libc::EPERM), "{fd} {request:#x}");
            }
        }
    }
    for (profile, landlock) in WALLS {
        let server = server_behind(profile, landlock);
        let guest = Guest::ready(&server);
        let socket = socket_of_worker(&guest);
        for &request in FOREIGN_REQUESTS {
            for fd in [2, socket] {
                let answer = call(&guest, libc::SYS_ioctl, &[fd, request, 0]);
                assert_eq!(answer, (-1, libc::EPERM), "{profile} {landlock} {fd} {request:#x}");
            }
        }
        guest.check();
    }
}

#[test]
fn s29_no_descriptor_sends_signals() {
    const F_SETSIG: u32 = 10;
    const F_GETSIG: u32 = 11;
    const F_SETOWN_EX: u32 = 15;
    const F_SETDELEG: u32 = 1040;
    let asynchronous = libc::O_ASYNC as u32;
    let flags = [asynchronous, asynchronous | libc::O_NONBLOCK as u32, 0x7fff_ffff];
    let commands = |socket: u32| {
        let set = flags.map(|flags| [socket, libc::F_SETFL as u32, flags]);
        let others = [
            [socket, libc::F_SETOWN as u32, 1],
            [socket, libc::F_GETOWN as u32, 0],
            [socket, F_SETOWN_EX, 0],
            [socket, F_SETSIG, 10],
            [socket, F_GETSIG, 0],
            [socket, libc::F_NOTIFY as u32, 0],
            [socket, libc::F_SETLEASE as u32, 2],
            [socket, F_SETDELEG, 0],
            [socket, libc::F_SETPIPE_SZ as u32, 4096],
        ];
        [&set[..], &others].concat()
    };
    for (profile, landlock) in WALLS {
        let server = server_behind(profile, landlock);
        let guest = Guest::ready(&server);
        let socket = socket_of_worker(&guest);
        for arguments in commands(socket) {
            let answer = call(&guest, libc::SYS_fcntl, &arguments);
            assert_eq!(answer, (-1, libc::EPERM), "{profile} {landlock} {arguments:?}");
        }
        // Other flags of an open file, here the standard error's, as libraries set them.
        for flags in [libc::O_NONBLOCK, libc::O_APPEND, 0] {
            let answer = call(&guest, libc::SYS_fcntl, &[2, libc::F_SETFL as u32, flags as u32]);
            assert_eq!(answer, (0, 0), "{profile} {flags:#x}");
        }
        for call_number in [libc::SYS_inotify_init1, libc::SYS_fanotify_init, libc::SYS_inotify_add_watch] {
            assert_eq!(call(&guest, call_number, &[0, 99, 0]), (-1, libc::EPERM), "{profile} {call_number}");
        }
        guest.check();
    }
    // The control: without walls it may be asked for.
    let open = server("off", "");
    let guest = Guest::ready(&open);
    let socket = socket_of_worker(&guest);
    let flags = [socket, libc::F_SETFL as u32, (libc::O_RDWR | libc::O_ASYNC) as u32];
    assert_eq!(call(&guest, libc::SYS_fcntl, &flags), (0, 0));
}

/// What a driver asks: the profiles that may, and the request.
const DRIVERS_REQUESTS: &[(&[&str], u32)] = &[
    (&["cpu", "vulkan", "cuda", "rocm", "any"], 0x5401), // TCGETS
    (&["cpu", "vulkan", "cuda", "rocm", "any"], 0x541b), // FIONREAD
    (&["cpu", "vulkan", "cuda", "rocm", "any"], 0x5421), // FIONBIO
    (&["cpu", "vulkan", "cuda", "rocm", "any"], 0x5450), // FIONCLEX
    (&["cpu", "vulkan", "cuda", "rocm", "any"], 0x5451), // FIOCLEX
    (&["cpu", "vulkan", "cuda", "rocm", "any"], 0xc068_6611), // PROCMAP_QUERY
    (&["vulkan", "rocm", "any"], 0xc040_6400),           // DRM_IOCTL_VERSION
    (&["vulkan", "rocm", "any"], 0x4008_6409),           // DRM_IOCTL_GEM_CLOSE
    (&["vulkan", "rocm", "any"], 0xc010_640c),           // DRM_IOCTL_GET_CAP
    (&["vulkan", "rocm", "any"], 0xc00c_642d),           // DRM_IOCTL_PRIME_HANDLE_TO_FD
    (&["vulkan", "rocm", "any"], 0xc00c_642e),           // DRM_IOCTL_PRIME_FD_TO_HANDLE
    (&["vulkan", "rocm", "any"], 0xc008_64bf),           // DRM_IOCTL_SYNCOBJ_CREATE
    (&["vulkan", "rocm", "any"], 0xc020_64c3),           // DRM_IOCTL_SYNCOBJ_WAIT
    (&["vulkan", "rocm", "any"], 0xc028_64ca),           // DRM_IOCTL_SYNCOBJ_TIMELINE_WAIT
    (&["vulkan", "rocm", "any"], 0xc018_64cd),           // DRM_IOCTL_SYNCOBJ_TIMELINE_SIGNAL
    (&["vulkan", "rocm", "any"], 0xc020_6440),           // DRM_IOCTL_AMDGPU_GEM_CREATE
    (&["vulkan", "rocm", "any"], 0xc018_6444),           // DRM_IOCTL_AMDGPU_CS
    (&["vulkan", "rocm", "any"], 0x4020_6445),           // DRM_IOCTL_AMDGPU_INFO
    (&["vulkan", "rocm", "any"], 0x4028_6448),           // DRM_IOCTL_AMDGPU_GEM_VA
    (&["vulkan", "rocm", "any"], 0x4040_6469),           // DRM_IOCTL_I915_GEM_EXECBUFFER2
    (&["vulkan", "rocm", "any"], 0x6458),                // DRM_IOCTL_I915_GEM_THROTTLE
    (&["vulkan", "rocm", "any"], 0xc028_6440),           // DRM_IOCTL_XE_DEVICE_QUERY
    (&["vulkan", "rocm", "any"], 0x4038_6449),           // DRM_IOCTL_XE_EXEC
    (&["vulkan", "rocm", "any"], 0xc008_6452),           // DRM_IOCTL_NOUVEAU_EXEC and others near it
    (&["vulkan", "rocm", "any"], 0xc040_6442),           // DRM_IOCTL_VIRTGPU_EXECBUFFER
    (&["vulkan", "rocm", "any"], 0xc010_644b),           // DRM_IOCTL_VIRTGPU_CONTEXT_INIT
    (&["vulkan", "cuda", "rocm", "any"], 0x4008_6200),   // DMA_BUF_IOCTL_SYNC
    (&["vulkan", "cuda", "rocm", "any"], 0xc008_6202),   // DMA_BUF_IOCTL_EXPORT_SYNC_FILE
    (&["vulkan", "cuda", "rocm", "any"], 0xc030_3e03),   // SYNC_IOC_MERGE
    (&["vulkan", "cuda", "rocm", "any"], 0xc038_3e04),   // SYNC_IOC_FILE_INFO
    (&["vulkan", "cuda", "any"], 0xc900_46c8),           // NV_ESC_CARD_INFO
    (&["vulkan", "cuda", "any"], 0xc004_46c9),           // NV_ESC_REGISTER_FD
    (&["vulkan", "cuda", "any"], 0xc048_46d2),           // NV_ESC_CHECK_VERSION_STR
    (&["vulkan", "cuda", "any"], 0xc010_46d3),           // NV_ESC_IOCTL_XFER_CMD
    (&["vulkan", "cuda", "any"], 0xc020_462a),           // NV_ESC_RM_CONTROL
    (&["vulkan", "cuda", "any"], 0xc030_462b),           // NV_ESC_RM_ALLOC
    (&["vulkan", "cuda", "any"], 0xc038_464e),           // NV_ESC_RM_MAP_MEMORY
    (&["vulkan", "cuda", "any"], 0xc010_6d00),           // NVKMS_IOCTL_CMD
    (&["vulkan", "cuda", "any"], 0x3000_0001),           // UVM_INITIALIZE
    (&["vulkan", "cuda", "any"], 0x3000_0002),           // UVM_DEINITIALIZE
    (&["vulkan", "cuda", "any"], 23),                    // UVM_CREATE_RANGE_GROUP
    (&["vulkan", "cuda", "any"], 33),                    // UVM_MAP_EXTERNAL_ALLOCATION
    (&["vulkan", "cuda", "any"], 37),                    // UVM_REGISTER_GPU
    (&["vulkan", "cuda", "any"], 75),                    // UVM_MM_INITIALIZE
    (&["vulkan", "cuda", "any"], 0xc010_4701),           // LX_DXOPENADAPTERFROMLUID
    (&["rocm", "any"], 0x8008_4b01),                     // AMDKFD_IOC_GET_VERSION
    (&["rocm", "any"], 0xc058_4b02),                     // AMDKFD_IOC_CREATE_QUEUE
    (&["rocm", "any"], 0xc018_4b0c),                     // AMDKFD_IOC_WAIT_EVENTS
    (&["rocm", "any"], 0xc028_4b16),                     // AMDKFD_IOC_ALLOC_MEMORY_OF_GPU
    (&["rocm", "any"], 0xc018_4b20),                     // AMDKFD_IOC_SVM
];

#[test]
fn s29_a_profile_s_drivers_may_ask_what_they_need() {
    for (profile, landlock) in WALLS {
        let server = server_behind(profile, landlock);
        let guest = Guest::ready(&server);
        for &(profiles, request) in DRIVERS_REQUESTS {
            // Standard error is a pipe, which knows few of them, and says so.
            let (result, errno) = call(&guest, libc::SYS_ioctl, &[2, request, 0]);
            let refused = (result, errno) == (-1, libc::EPERM);
            assert_eq!(refused, !profiles.contains(&profile), "{profile} {landlock} {request:#x}: {errno}");
        }
        guest.check();
    }
}

#[test]
fn s29_what_a_path_tells_without_opening_it_is_left() {
    let server = server_behind("cpu", true);
    let guest = Guest::ready(&server);
    let folder = server.folder.path();
    fs::write(folder.join("secret"), "secret").unwrap();
    std::os::unix::fs::symlink("secret", folder.join("link")).unwrap();
    let told = |name: &str| guest.ask(14, None, folder.join(name).to_str().unwrap());
    // The threat model says so: whether it exists and its length, and where a link leads; not what is in it.
    assert_eq!((told("secret"), told("link"), told("none")), (6, 6 | 1 << 16, -1));
    if !server.has_line("no landlock") {
        assert_eq!(open(&guest, READ, &folder.join("link")), libc::EACCES);
    }
}
