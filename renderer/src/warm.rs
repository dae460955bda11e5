//! Filling the cache of shaders that sandboxed workers read, before any guest comes.
//!
//! A process of its own, behind the same walls as a worker but for the right to write an empty cache, has the plugin compute graphs of
//! ours; the cache is put in its place once that process has ended. No byte of a guest reaches it.
#![forbid(unsafe_code)]

use crate::context::Context;
use crate::error::Error;
use crate::log::TARGET;
use crate::sandbox::{Sandbox, ShaderCaches, compiles, variables};
use crate::worker::Libraries;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// How long a cache must not grow to be complete: drivers write it on threads of their own.
const QUIET: Duration = Duration::from_secs(1);
/// How long is waited for that.
const PATIENCE: Duration = Duration::from_secs(60);

/// What is to be warmed.
#[derive(Debug, Clone)]
pub struct WarmOptions {
    /// The plugin and the ggml library.
    pub libraries: Libraries,
    /// What walls the process in that computes.
    pub sandbox: Sandbox,
    /// Where caches are.
    pub caches: ShaderCaches,
    /// Keys of the plugin's that choose what it computes, and their values.
    pub layers: Vec<(&'static str, String)>,
    /// Whether a cache that is there is filled anew.
    pub again: bool,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Warmed {
    /// It was filled before.
    Before(PathBuf),
    /// It is filled now.
    Now(PathBuf),
    /// The drivers of this library wrote nothing.
    Nothing,
}

/// Fills the cache of these libraries by a process `PROGRAM warm --into FOLDER …`, unless that has been done.
///
/// # Errors
/// [`Error::Io`], and [`Error::Warm`] when that process could not do it; no cache is there then.
pub fn warm(options: &WarmOptions) -> Result<Warmed, Error> {
    let whole = options.caches.cache_of(&options.libraries);
    if whole.is_dir() {
        if !options.again {
            options.caches.check(Some(&whole)).map_err(Error::io("use the cache of shaders"))?;
            return Ok(Warmed::Before(whole));
        }
        fs::remove_dir_all(&whole).map_err(Error::io("remove the cache of shaders"))?;
    }
    let part = options.caches.begin().map_err(Error::io("make a cache of shaders"))?;
    let program = std::env::current_exe().map_err(Error::io("find this program's own file"))?;
    let mut command = Command::new(program);
    command.arg("warm").arg("--into").arg(&part);
    let Libraries { plugin, ggml_library, ggml_reg } = &options.libraries;
    let named = [("--plugin", plugin), ("--ggml-library", ggml_library)];
    for (option, path) in named.into_iter().filter_map(|(option, path)| Some((option, path.as_ref()?))) {
        command.arg(option).arg(path);
    }
    if let Some(symbol) = ggml_reg {
        command.arg("--ggml-reg").arg(symbol);
    }
    for (key, list) in &options.layers {
        command.arg(format!("--{}", key.rsplit('.').next().unwrap_or(key))).arg(list);
    }
    let environment: Vec<(OsString, OsString)> = options.sandbox.environment();
    command.env_clear().envs(environment).envs(variables(&part));
    let status = command.stdin(Stdio::null()).status();
    let status = status.map_err(Error::io("start the process that fills the cache of shaders"))?;
    let filled = options.caches.publish(&part, &whole).map_err(Error::io("close the cache of shaders"))?;
    match (status.success(), filled) {
        (true, true) => Ok(Warmed::Now(whole)),
        (true, false) => Ok(Warmed::Nothing),
        (false, _) => {
            // A driver that ended the process has written what came before; workers shall not meet the rest cold for that.
            Err(Error::Warm { status, kept: filled.then_some(whole) })
        }
    }
}

/// Does the same beside a server whose workers compile shaders, without keeping it from serving.
pub fn warm_beside_server(options: WarmOptions) {
    let library = options.libraries.ggml_library.clone();
    let profile = options.sandbox.profile(library.as_deref());
    if !profile.is_some_and(compiles) || options.caches.cache_of(&options.libraries).is_dir() {
        return;
    }
    tracing::info!(
        target: TARGET,
        "filling the cache of shaders in {}; until that is done each guest's worker compiles its own",
        options.caches.folder().display()
    );
    let fill = move || match warm(&options) {
        Ok(Warmed::Now(cache) | Warmed::Before(cache)) => {
            tracing::info!(target: TARGET, "the cache of shaders is filled: {}", cache.display());
        }
        Ok(Warmed::Nothing) => {
            tracing::warn!(target: TARGET, "the drivers have written no cache of shaders");
        }
        Err(error) => tracing::warn!(target: TARGET, "cache of shaders: {error}"),
    };
    if let Err(error) = thread::Builder::new().name("warm".into()).spawn(fill) {
        tracing::warn!(target: TARGET, "cache of shaders: cannot start a thread: {error}");
    }
}

/// The process that computes: fills the empty cache `part`.
///
/// # Errors
/// [`Error::Sandbox`]; [`Error::NotWarmed`] when the plugin cannot, or computed nothing.
pub fn fill(options: &WarmOptions, part: &Path) -> Result<(), Error> {
    set_pdeathsig(Some(Signal::SIGKILL))
        .map_err(Error::io("tie the process to the one that asked for it"))?;
    let _walls = options.sandbox.enter_to_fill(&options.libraries, part)?;
    let mut config = options.libraries.config()?;
    for (key, list) in &options.layers {
        config = config.set(key, list)?;
    }
    Context::new(1, config)?.warm()?;
    // What is written last is lost otherwise.
    let start = Instant::now();
    let mut size = bytes(part);
    while start.elapsed() < PATIENCE {
        thread::sleep(QUIET);
        let now = bytes(part);
        if now == size {
            break;
        }
        size = now;
    }
    Ok(())
}

/// Bytes of the files below a folder.
fn bytes(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(found) if found.is_dir() => bytes(&entry.path()),
        Ok(found) => found.len(),
        Err(_) => 0,
    };
    entries.map(size).sum()
}
