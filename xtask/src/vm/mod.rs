//! `cargo xtask vm`: a command in a real virtual machine, and all that such a machine is made of.

mod initramfs;
mod kernel;
mod root;

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use apir_tests::peers::{Dist, LlamaDir};
use apir_tests::program::Program;
use apir_tests::vm::{Accelerator, Boot, Renderer, VmDir};

use crate::cache::Cache;
use crate::dist::Workspace;
use crate::error::{Error, IoContext};
use crate::peers::{Llama, Stage};
use crate::ui::Ui;

pub use root::llama as ensure_debian;

/// How long a machine may take on the processor before it counts as not working.
const PROBE_LIMIT: Duration = Duration::from_secs(20);

/// Options of `cargo xtask vm`.
#[derive(clap::Args)]
pub struct Options {
    /// Give a shell on this terminal
    #[arg(long, conflicts_with = "command")]
    shell: bool,
    /// Share this folder, writable, under the same path (the host's files are there, read-only, in any case)
    #[arg(long, value_name = "DIR")]
    share: Vec<PathBuf>,
    /// Set a variable of the command
    #[arg(long, value_name = "K=V", value_parser = pair)]
    env: Vec<(String, String)>,
    /// Set a variable of QEMU and of the workers
    #[arg(long, value_name = "K=V", value_parser = pair)]
    host_env: Vec<(String, String)>,
    /// Leave every context but ours to the real virglrenderer
    #[arg(long)]
    chain: bool,
    /// Use Debian's own llama.cpp and its root as the guest's file system
    #[arg(long)]
    debian: bool,
    /// The host plugin to use instead of ours
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
    /// The ggml library of the host to use instead of the CPU's
    #[arg(long, value_name = "FILE")]
    ggml_library: Option<PathBuf>,
    /// What to run; llama.cpp's programs are in PATH and find our backend
    #[arg(last = true, required_unless_present = "shell")]
    command: Vec<String>,
}

/// Where machines are kept.
pub fn folder(cache: &Cache) -> VmDir {
    VmDir::at(&cache.path("vm"))
}

/// Makes what a machine is made of, or takes what is there.
pub fn ensure(cache: &Cache, ui: &Ui) -> Result<VmDir, Error> {
    let dir = folder(cache);
    fs::create_dir_all(dir.path()).at("create", dir.path())?;
    root::hypervisor(cache, ui, &dir)?;
    initramfs::ensure(cache, &dir)?;
    probe(cache, ui, &dir)?;
    Ok(dir)
}

/// Runs a command in a machine; gives back its exit status.
pub fn run(workspace: &Workspace, ui: &Ui, options: &Options) -> Result<u8, Error> {
    let (dir, llama) = {
        let cache = Cache::open()?;
        let _lock = cache.lock(ui)?;
        let dir = ensure(&cache, ui)?;
        if options.debian {
            ensure_debian(&cache, ui, &dir)?;
        }
        let llama = Llama::find(&cache)?;
        llama.build(&cache, ui, Stage::Libraries)?;
        (dir, LlamaDir::at(&llama.bin))
    };
    let dist = Dist::at(&workspace.build_dist(ui)?);
    let boot = options.boot(&dir, &dist, &llama)?;
    if options.shell {
        ui.line("booting");
        return boot.shell().map(|()| 0).map_err(Error::from);
    }
    let guest = boot.start()?;
    let job = guest.start(&options.command(&dist, &llama))?;
    let status = job.follow(&mut std::io::stdout(), &mut std::io::stderr())?;
    guest.stop()?;
    // As a shell tells it.
    Ok(status
        .code()
        .or(status.signal().map(|signal| 128 + signal))
        .and_then(|code| code.try_into().ok())
        .unwrap_or(1))
}

impl Options {
    fn boot(&self, dir: &VmDir, dist: &Dist, llama: &LlamaDir) -> Result<Boot, Error> {
        let library = self.ggml_library.clone().unwrap_or_else(|| llama.cpu_library());
        let mut renderer = Renderer::new(dist, &library);
        if let Some(plugin) = &self.plugin {
            renderer = renderer.plugin(plugin);
        }
        if self.chain {
            renderer = renderer.chained();
        }
        renderer = self.host_env.iter().fold(renderer, |renderer, (key, value)| renderer.env(key, value));
        let mut boot = Boot::new(dir, dir.accelerator()?).renderer(renderer);
        for folder in &self.share {
            let folder = fs::canonicalize(folder).at("find", folder)?;
            boot = boot.share(&folder);
        }
        Ok(match self.debian {
            true => boot.root(&dir.debian_root()).share(dist.path()),
            false => boot,
        })
    }

    fn command(&self, dist: &Dist, llama: &LlamaDir) -> Program {
        let path = format!("{}:/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin", llama.path().display());
        // By env, which looks for the program in the guest's PATH.
        let program = Program::new(Path::new("/usr/bin/env"))
            .args(&self.command)
            .env("GGML_BACKEND_PATH", dist.guest())
            .env("PATH", path);
        self.env.iter().fold(program, |program, (key, value)| program.env(key, value))
    }
}

/// Finds out whether the processor can run the guest, by a boot that may not take long; on some machines /dev/kvm is
/// there and ordinary kernels do not start.
fn probe(cache: &Cache, ui: &Ui, dir: &VmDir) -> Result<(), Error> {
    let (_, version) = kernel::modules(&dir.kernel_tree())?;
    let release = Path::new("/proc/sys/kernel/osrelease");
    let host = fs::read_to_string(release).at("read", release)?;
    let device = Path::new("/dev/kvm").exists();
    let file = dir.accelerator_file();
    if !file.is_file() {
        cache.forget("vm-accelerator")?;
    }
    let key = format!("{version} on {}, /dev/kvm: {device}", host.trim());
    cache.step("vm-accelerator", &key, || {
        let works = device && Boot::new(dir, Accelerator::Kvm).ready_limit(PROBE_LIMIT).start().is_ok();
        let accelerator = if works { Accelerator::Kvm } else { Accelerator::Tcg };
        ui.line(&format!("virtual machines run by {}", accelerator.name()));
        fs::write(&file, accelerator.name()).at("write", &file)
    })
}

fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("wanted KEY=VALUE".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables() {
        assert_eq!(pair("A=b=c").unwrap(), ("A".to_owned(), "b=c".to_owned()));
        assert!(pair("A").is_err() && pair("=b").is_err());
    }
}
