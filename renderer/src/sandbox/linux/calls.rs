//! Which system calls a worker may make, by seccomp. All others fail with EPERM; a few end the process.

use super::super::Profile;
use super::requests;
use nix::libc;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};
use std::collections::BTreeMap;

/// What ggml, its backends, the loader, the C library and we use on any kind of device.
const COMMON: &[libc::c_long] = &[
    // Memory.
    libc::SYS_brk,
    libc::SYS_ftruncate,
    libc::SYS_madvise,
    libc::SYS_memfd_create,
    libc::SYS_mincore,
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_msync,
    libc::SYS_munmap,
    // Files, of which landlock says which.
    libc::SYS_close,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_fadvise64,
    libc::SYS_fstat,
    libc::SYS_fstatfs,
    libc::SYS_getcwd,
    libc::SYS_getdents64,
    libc::SYS_lseek,
    libc::SYS_newfstatat,
    libc::SYS_openat,
    libc::SYS_pread64,
    libc::SYS_preadv,
    libc::SYS_pwrite64,
    libc::SYS_read,
    libc::SYS_readlinkat,
    libc::SYS_readv,
    libc::SYS_statfs,
    libc::SYS_statx,
    libc::SYS_write,
    libc::SYS_writev,
    // The client's socket, which is there already; no call makes, names or connects one.
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    // Waiting.
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_futex,
    libc::SYS_pipe2,
    libc::SYS_ppoll,
    libc::SYS_pselect6,
    // Time.
    libc::SYS_clock_getres,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_nanosleep,
    // Threads.
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_get_robust_list,
    libc::SYS_getcpu,
    libc::SYS_gettid,
    libc::SYS_membarrier,
    libc::SYS_restart_syscall,
    libc::SYS_rseq,
    libc::SYS_sched_get_priority_max,
    libc::SYS_sched_get_priority_min,
    libc::SYS_sched_getaffinity,
    libc::SYS_sched_getparam,
    libc::SYS_sched_getscheduler,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_yield,
    libc::SYS_set_robust_list,
    libc::SYS_set_tid_address,
    // Signals.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigpending,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_rt_sigsuspend,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_sigaltstack,
    // What it is, and where.
    libc::SYS_capget,
    libc::SYS_getegid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getpid,
    libc::SYS_getppid,
    libc::SYS_getrandom,
    libc::SYS_getrusage,
    libc::SYS_getuid,
    libc::SYS_sysinfo,
    libc::SYS_times,
    libc::SYS_uname,
];

/// Older forms of the same, which x86-64 alone still has.
#[cfg(target_arch = "x86_64")]
const OLD: &[libc::c_long] = &[
    libc::SYS_access,
    // Thread-local storage, shadow stacks, and the permission to use AMX.
    libc::SYS_arch_prctl,
    libc::SYS_dup2,
    libc::SYS_epoll_create,
    libc::SYS_epoll_wait,
    libc::SYS_eventfd,
    libc::SYS_getdents,
    libc::SYS_getrlimit,
    libc::SYS_lstat,
    libc::SYS_open,
    libc::SYS_pipe,
    libc::SYS_poll,
    libc::SYS_readlink,
    libc::SYS_select,
    libc::SYS_stat,
    libc::SYS_time,
];
#[cfg(not(target_arch = "x86_64"))]
const OLD: &[libc::c_long] = &[];

/// What drivers of GPUs use beside it: locked memory, placement, timers, events.
const GPU: &[libc::c_long] = &[
    libc::SYS_fallocate,
    libc::SYS_flock,
    libc::SYS_get_mempolicy,
    libc::SYS_getgroups,
    libc::SYS_getpriority,
    libc::SYS_getresgid,
    libc::SYS_getresuid,
    libc::SYS_mbind,
    libc::SYS_mlock,
    libc::SYS_mlock2,
    libc::SYS_munlock,
    libc::SYS_pkey_alloc,
    libc::SYS_pkey_free,
    libc::SYS_pkey_mprotect,
    libc::SYS_sched_getattr,
    libc::SYS_set_mempolicy,
    libc::SYS_signalfd4,
    libc::SYS_timer_create,
    libc::SYS_timer_delete,
    libc::SYS_timer_getoverrun,
    libc::SYS_timer_gettime,
    libc::SYS_timer_settime,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_gettime,
    libc::SYS_timerfd_settime,
];

/// What a driver that fills its cache of shaders uses beside it, in a process without a guest. Landlock says where.
const CACHE: &[libc::c_long] = &[
    libc::SYS_fdatasync,
    libc::SYS_fsync,
    libc::SYS_mkdirat,
    libc::SYS_renameat2,
    libc::SYS_unlinkat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_mkdir,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_rename,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_renameat,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_unlink,
];

/// What no library does by accident: the process ends with SIGSYS.
const FATAL: &[libc::c_long] = &[
    libc::SYS_delete_module,
    libc::SYS_finit_module,
    libc::SYS_init_module,
    libc::SYS_kexec_load,
    libc::SYS_mount,
    libc::SYS_move_mount,
    libc::SYS_open_by_handle_at,
    libc::SYS_pivot_root,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_reboot,
    libc::SYS_setns,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_umount2,
    libc::SYS_unshare,
];

/// Commands of fcntl that concern the descriptor, its locks or its seals. The others send signals, to whomever, or change
/// what others see of the file.
const FCNTL: &[i32] = &[
    libc::F_ADD_SEALS,
    libc::F_DUPFD,
    libc::F_DUPFD_CLOEXEC,
    F_DUPFD_QUERY,
    libc::F_GETFD,
    libc::F_GETFL,
    libc::F_GETLK,
    libc::F_GET_SEALS,
    libc::F_OFD_GETLK,
    libc::F_OFD_SETLK,
    libc::F_OFD_SETLKW,
    libc::F_SETFD,
    libc::F_SETLK,
    libc::F_SETLKW,
];
const F_DUPFD_QUERY: i32 = 1027;

/// Options of prctl that name threads and mappings, or only ask.
const PRCTL: &[i32] = &[
    libc::PR_CAPBSET_READ,
    libc::PR_GET_DUMPABLE,
    libc::PR_GET_NAME,
    libc::PR_GET_NO_NEW_PRIVS,
    libc::PR_GET_SECCOMP,
    libc::PR_GET_THP_DISABLE,
    libc::PR_GET_TIMERSLACK,
    libc::PR_SET_NAME,
    libc::PR_SET_TIMERSLACK,
    libc::PR_SET_VMA,
    PR_SVE_GET_VL,
];
const PR_SVE_GET_VL: i32 = 51;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Leaves the calling thread, and those that it starts, the calls of a profile, and those that fill a cache.
pub(super) fn restrict(profile: Profile, fills_cache: bool) -> Result<(), seccompiler::Error> {
    let filters = [
        (allowed(profile, fills_cache)?, SeccompAction::Errno(libc::EPERM as u32), SeccompAction::Allow),
        // Its flags lie in memory, where no filter sees them. The C library then takes the older call.
        (plain(&[libc::SYS_clone3]), SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32)),
        (plain(FATAL), SeccompAction::Allow, SeccompAction::KillProcess),
    ];
    let target = TargetArch::try_from(std::env::consts::ARCH)?;
    let mut programs = Vec::new();
    for (rules, otherwise, then) in filters {
        programs.push(BpfProgram::try_from(SeccompFilter::new(rules, otherwise, then, target)?)?);
    }
    // The strictest verdict counts. The first one here forbids to add others, so it comes last.
    programs.iter().rev().try_for_each(|program| apply_filter(program))
}

/// Calls that may be made, some with certain arguments only.
fn allowed(profile: Profile, fills_cache: bool) -> Result<Rules, BackendError> {
    let own = u64::from(std::process::id());
    let mut rules = plain(COMMON);
    rules.extend(plain(OLD));
    rules.extend(plain(if fills_cache { CACHE } else { &[] }));
    // Another filter answers it.
    rules.extend(plain(&[libc::SYS_clone3]));
    let namespaces = libc::CLONE_NEWCGROUP
        | libc::CLONE_NEWIPC
        | libc::CLONE_NEWNET
        | libc::CLONE_NEWNS
        | libc::CLONE_NEWPID
        | libc::CLONE_NEWUSER
        | libc::CLONE_NEWUTS;
    let thread = libc::CLONE_THREAD as u64;
    let mask = thread | u64::from(namespaces.cast_unsigned());
    rules.insert(libc::SYS_clone, vec![when(0, SeccompCmpOp::MaskedEq(mask), thread)?]);
    rules.insert(libc::SYS_tgkill, vec![when(0, SeccompCmpOp::Eq, own)?]);
    rules.insert(libc::SYS_kill, vec![when(0, SeccompCmpOp::Eq, own)?]);
    rules.insert(libc::SYS_prlimit64, vec![when(0, SeccompCmpOp::Eq, 0)?, when(0, SeccompCmpOp::Eq, own)?]);
    let options = PRCTL.iter().map(|&option| when(0, SeccompCmpOp::Eq, u64::from(option.cast_unsigned())));
    rules.insert(libc::SYS_prctl, options.collect::<Result<_, _>>()?);
    if profile.has_gpu() {
        rules.extend(plain(GPU));
        // Whether two descriptors are one, which Mesa asks about its own.
        let both = [condition(0, SeccompCmpOp::Eq, own)?, condition(1, SeccompCmpOp::Eq, own)?];
        rules.insert(libc::SYS_kcmp, vec![SeccompRule::new(both.to_vec())?]);
    }
    let requests = requests::allowed(profile).into_iter().map(|conditions| {
        let of_request = |(operator, value)| condition(1, operator, value);
        SeccompRule::new(conditions.into_iter().map(of_request).collect::<Result<_, _>>()?)
    });
    rules.insert(libc::SYS_ioctl, requests.collect::<Result<_, _>>()?);
    let commands = FCNTL.iter().map(|&command| when(1, SeccompCmpOp::Eq, u64::from(command.cast_unsigned())));
    let mut commands: Vec<_> = commands.collect::<Result<_, _>>()?;
    // Flags of the open file, but not the one that lets it send signals.
    let flags = SeccompCmpOp::MaskedEq(u64::from(libc::O_ASYNC.cast_unsigned()));
    let set =
        [condition(1, SeccompCmpOp::Eq, u64::from(libc::F_SETFL.cast_unsigned()))?, condition(2, flags, 0)?];
    commands.push(SeccompRule::new(set.to_vec())?);
    rules.insert(libc::SYS_fcntl, commands);
    Ok(rules)
}

/// Calls with any arguments.
fn plain(calls: &[libc::c_long]) -> Rules {
    calls.iter().map(|&call| (call, Vec::new())).collect()
}

/// A rule of one condition.
fn when(argument: u8, operator: SeccompCmpOp, value: u64) -> Result<SeccompRule, BackendError> {
    SeccompRule::new(vec![condition(argument, operator, value)?])
}

/// Of an argument's lower half: the kernel takes these arguments as 32 bits.
fn condition(argument: u8, operator: SeccompCmpOp, value: u64) -> Result<SeccompCondition, BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)
}
