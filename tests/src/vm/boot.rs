//! Starting a machine.
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use super::guest::{Guest, READY, quoted};
use super::root::Root;
use super::{Accelerator, VmDir};
use crate::error::{Error, IoContext};
use crate::peers::Dist;
use crate::program::Program;

/// How long a machine may take until it runs commands.
const READY_LIMIT: Duration = Duration::from_secs(120);

/// Where QEMU finds the guest's file system.
const GUEST_ROOT: &str = "/guest";

/// A machine to be started.
#[derive(Debug, Clone)]
pub struct Boot {
    dir: VmDir,
    accelerator: Accelerator,
    renderer: Option<Renderer>,
    root: PathBuf,
    shares: Vec<PathBuf>,
    shell: bool,
    ready_limit: Duration,
}

/// What stands behind the machine's graphics device.
#[derive(Debug, Clone)]
pub struct Renderer {
    dist: Dist,
    files: Vec<PathBuf>,
    env: Vec<(OsString, OsString)>,
}

impl Renderer {
    /// Our renderer in the place of virglrenderer, and our plugin in front of the ggml library `library`.
    pub fn new(dist: &Dist, library: &Path) -> Self {
        Self { dist: dist.clone(), files: Vec::new(), env: Vec::new() }
            .env("APIR_CHAIN", "none")
            .env("APIR_WORKER", dist.apir())
            .env("APIR_HOST_THREADS", "1")
            .env("OMP_THREAD_LIMIT", "1")
            .plugin(&dist.plugin())
            .library(library)
    }

    /// Uses another plugin.
    #[must_use]
    pub fn plugin(self, plugin: &Path) -> Self {
        self.file("VIRGL_APIR_BACKEND_LIBRARY", plugin)
    }

    /// Uses another ggml library.
    #[must_use]
    pub fn library(self, library: &Path) -> Self {
        self.file("APIR_LLAMA_CPP_GGML_LIBRARY_PATH", library)
    }

    /// Uses another registration symbol than the plugin's default.
    #[must_use]
    pub fn registration(self, symbol: &str) -> Self {
        self.env("APIR_LLAMA_CPP_GGML_LIBRARY_REG", symbol)
    }

    /// Starts workers by another program.
    #[must_use]
    pub fn worker(self, program: &Path) -> Self {
        self.file("APIR_WORKER", program)
    }

    /// Lets workers see one more file, and what lies beside it.
    #[must_use]
    pub fn with(mut self, file: &Path) -> Self {
        self.files.push(file.parent().unwrap_or(file).to_owned());
        self
    }

    /// Leaves what is not ours to the real virglrenderer.
    #[must_use]
    pub fn chained(mut self) -> Self {
        self.env.retain(|(key, _)| key != "APIR_CHAIN");
        self
    }

    /// Sets a variable of QEMU and its workers.
    #[must_use]
    pub fn env(mut self, key: &str, value: impl Into<OsString>) -> Self {
        self.env.retain(|(known, _)| known != key);
        self.env.push((key.into(), value.into()));
        self
    }

    /// A variable that names a file, which may lie beside others that it needs.
    fn file(self, key: &str, path: &Path) -> Self {
        self.with(path).env(key, path)
    }
}

impl Boot {
    /// A machine whose file system is the host's.
    pub fn new(dir: &VmDir, accelerator: Accelerator) -> Self {
        Self {
            dir: dir.clone(),
            accelerator,
            renderer: None,
            root: PathBuf::from("/"),
            shares: Vec::new(),
            shell: false,
            ready_limit: READY_LIMIT,
        }
    }

    /// Gives it another time in which it must run commands.
    #[must_use]
    pub fn ready_limit(mut self, limit: Duration) -> Self {
        self.ready_limit = limit;
        self
    }

    /// Gives it our renderer; without, the device is QEMU's own.
    #[must_use]
    pub fn renderer(mut self, renderer: Renderer) -> Self {
        self.renderer = Some(renderer);
        self
    }

    /// Takes its file system from another folder.
    #[must_use]
    pub fn root(mut self, root: &Path) -> Self {
        self.root = root.to_owned();
        self
    }

    /// Shares a folder of the host, writable, under the same path.
    #[must_use]
    pub fn share(mut self, folder: &Path) -> Self {
        self.shares.push(folder.to_owned());
        self
    }

    /// Starts it and waits until it runs commands.
    ///
    /// # Errors
    /// Not run as root, something is missing, or the machine does not come up.
    pub fn start(&self) -> Result<Guest, Error> {
        let (root, jobs) = self.prepare()?;
        let running = self.qemu(&root, jobs.path()).start()?;
        let ready = running.stdout().wait_for(self.ready_limit, |text| text.contains(READY).then_some(()));
        match ready {
            Some(()) => Ok(Guest::new(running, jobs, root)),
            None => Err(running.timeout("boot", self.ready_limit)),
        }
    }

    /// Starts it with a shell on this terminal and waits for its end.
    ///
    /// # Errors
    /// As [`Boot::start`].
    pub fn shell(mut self) -> Result<(), Error> {
        self.shell = true;
        let (root, jobs) = self.prepare()?;
        let start = |source| Error::Start { program: "qemu-system-x86_64".to_owned(), source };
        let mut command = Command::from(self.qemu(&root, jobs.path()));
        command.stdin(Stdio::inherit()).status().map(drop).map_err(start)
    }

    fn prepare(&self) -> Result<(Root, TempDir), Error> {
        let jobs = TempDir::with_prefix("apir-vm-").at("create a folder in", &std::env::temp_dir())?;
        let config = jobs.path().join("config");
        fs::write(&config, self.config(jobs.path())).at("write", &config)?;
        let mut root = Root::new(&self.dir.hypervisor_root())?
            .with(self.dir.path())
            .with(jobs.path())
            .with_at(&self.root, Path::new(GUEST_ROOT));
        for path in &self.shares {
            root = root.with(path);
        }
        if let Some(renderer) = &self.renderer {
            root = renderer.files.iter().fold(root.with(renderer.dist.path()), |root, path| root.with(path));
        }
        Ok((root, jobs))
    }

    /// What the guest's init reads: calls of its functions.
    fn config(&self, jobs: &Path) -> String {
        let mut text = format!("jobs_at {}\n", quoted(jobs.as_os_str()));
        for (number, path) in self.shares.iter().enumerate() {
            // Writing to a String does not fail.
            let _ = writeln!(text, "share share{number} {}", quoted(path.as_os_str()));
        }
        if self.shell {
            text.push_str("shell\n");
        }
        text
    }

    fn qemu(&self, root: &Root, jobs: &Path) -> Program {
        let cpu = match self.accelerator {
            Accelerator::Kvm => "host",
            Accelerator::Tcg => "max",
        };
        let mut qemu = root
            .program("qemu-system-x86_64")
            .args(["-nodefaults", "-no-user-config", "-no-reboot", "-M", "q35", "-m", "2048", "-smp", "1"])
            .args(["-accel", self.accelerator.name(), "-cpu", cpu])
            // SDL's offscreen driver and a software renderer need neither a screen nor a render node.
            .args(["-display", "sdl,gl=on"])
            .args(["-device", "virtio-gpu-gl-pci,blob=on,hostmem=1G,venus=on"])
            .envs(
                [
                    ("SDL_VIDEODRIVER", "offscreen"),
                    ("LIBGL_ALWAYS_SOFTWARE", "1"),
                    ("XDG_RUNTIME_DIR", "/tmp"),
                ]
                .map(|(key, value)| (key.into(), value.into())),
            )
            .args(["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"])
            .arg("-kernel")
            .arg(self.dir.kernel())
            .arg("-initrd")
            .arg(self.dir.initramfs())
            .args([
                "-append",
                "console=ttyS0 quiet panic=-1 mitigations=off nokaslr no_timer_check cryptomgr.notests",
            ]);
        qemu = export(qemu, "root", Path::new(GUEST_ROOT), true);
        qemu = export(qemu, "jobs", jobs, false);
        for (number, path) in self.shares.iter().enumerate() {
            qemu = export(qemu, &format!("share{number}"), path, false);
        }
        // What cargo sets for its own libraries must not reach QEMU's.
        qemu = qemu.env("LD_LIBRARY_PATH", "");
        match &self.renderer {
            Some(renderer) => {
                // In the place of the root's libvirglrenderer.so.1.
                qemu.env("LD_LIBRARY_PATH", renderer.dist.path()).envs(renderer.env.iter().cloned())
            }
            None => qemu,
        }
    }
}

/// Offers a folder to the guest under a tag.
fn export(qemu: Program, tag: &str, path: &Path, read_only: bool) -> Program {
    let mut fsdev = OsString::from(format!("local,id={tag},security_model=none,multidevs=remap,path="));
    // A comma would end the value.
    fsdev.push(path.to_string_lossy().replace(',', ",,"));
    if read_only {
        fsdev.push(",readonly=on");
    }
    qemu.arg("-fsdev").arg(fsdev).args(["-device", &format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}")])
}
