//! The walls on Linux: limits and rights of the process, landlock for files, seccomp for everything else.
#![forbid(unsafe_code)]

mod calls;
mod files;
mod private;
mod requests;

use super::shaders::{self, Variables};
use super::{Plan, Shaders};
use crate::error::Error;
use caps::{CapSet, Capability, CapsHashSet};
use nix::sys::prctl;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use std::fs;

pub(super) use files::missing;

/// The most descriptors a worker may have: many times what drivers of GPUs keep open.
const DESCRIPTORS: u64 = 4096;

/// What has to live as long as the walls stand.
#[derive(Debug)]
pub(crate) struct Walls {
    _pinned: files::Pinned,
    variables: Variables,
}

impl Walls {
    /// What the process has to put into its environment for its drivers.
    pub(crate) fn variables(&self) -> &Variables {
        &self.variables
    }
}

/// Puts up all walls, each for good. Files come before calls: landlock's own calls are not allowed behind them.
pub(super) fn enter(plan: &Plan<'_>) -> Result<Walls, Error> {
    let failed = |what| move |cause: String| Error::Sandbox { what, cause };
    is_alone().map_err(failed("wall in all threads"))?;
    limit().map_err(|errno| failed("set limits")(errno.to_string()))?;
    // No core dump, and no other process of this user reads or traces this one.
    prctl::set_dumpable(false).map_err(|errno| failed("close the process to others")(errno.to_string()))?;
    drop_capabilities().map_err(|error| failed("drop capabilities")(error.to_string()))?;
    prctl::set_no_new_privs().map_err(|errno| failed("forbid new rights")(errno.to_string()))?;
    let variables = match &plan.shaders {
        Shaders::Read(folder) if private::make() => shaders::variables(folder),
        // Whoever starts a process that fills one has given it its variables.
        Shaders::Read(_) | Shaders::Write(_) | Shaders::None => Vec::new(),
    };
    let pinned = files::restrict(plan).map_err(failed("wall off files"))?;
    let fills = matches!(plan.shaders, Shaders::Write(_));
    calls::restrict(plan.profile, fills)
        .map_err(|error| failed("wall off system calls")(error.to_string()))?;
    Ok(Walls { _pinned: pinned, variables })
}

/// Landlock and seccomp hold for the calling thread and those that it starts.
fn is_alone() -> Result<(), String> {
    match fs::read_dir("/proc/self/task").map(Iterator::count) {
        Ok(1) => Ok(()),
        Ok(threads) => Err(format!("{threads} threads run already, perhaps a preloaded library's")),
        Err(cause) => Err(format!("/proc/self/task: {cause}")),
    }
}

/// No core dumps, few descriptors, no real-time scheduling. Threads and memory are the backend's business.
fn limit() -> nix::Result<()> {
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let descriptors = most.min(DESCRIPTORS);
    setrlimit(Resource::RLIMIT_NOFILE, descriptors, descriptors)?;
    for resource in [Resource::RLIMIT_CORE, Resource::RLIMIT_RTPRIO] {
        setrlimit(resource, 0, 0)?;
    }
    Ok(())
}

/// Root's powers, where it is root, but for reading: libraries may lie in another user's folder, and landlock bounds it.
fn drop_capabilities() -> Result<(), caps::errors::CapsError> {
    let permitted = caps::read(None, CapSet::Permitted)?;
    let kept: CapsHashSet =
        permitted.into_iter().filter(|power| *power == Capability::CAP_DAC_READ_SEARCH).collect();
    caps::clear(None, CapSet::Inheritable)?;
    caps::set(None, CapSet::Effective, &kept)?;
    caps::set(None, CapSet::Permitted, &kept)
}
