//! A server to test against, and a guest that speaks to it.
#![allow(dead_code, missing_docs, clippy::unwrap_used, clippy::expect_used)]

pub mod vmm;

use apir_protocol::header::CommandHeader;
use ggml_virtgpu::link::{Blob, Link, LinkError, SocketLink, wait};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Longer than anything here takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub fn fake_plugin() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.parent().unwrap().parent().unwrap().join("examples/libapir_fake_plugin.so")
}

/// Waits for something that has to come true.
pub fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let start = Instant::now();
    while !check() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Takes landlock away from a program, as a kernel that is too old does.
#[cfg(target_os = "linux")]
pub fn without_landlock(command: &mut Command) {
    use nix::libc;
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};
    let calls =
        [libc::SYS_landlock_create_ruleset, libc::SYS_landlock_add_rule, libc::SYS_landlock_restrict_self];
    let rules = calls.map(|call| (call, Vec::new())).into();
    let missing = SeccompAction::Errno(libc::ENOSYS.cast_unsigned());
    let target = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, missing, target).unwrap();
    let filter = BpfProgram::try_from(filter).unwrap();
    let apply = move || apply_filter(&filter).map_err(std::io::Error::other);
    // SAFETY: two system calls on memory that is there already, which is safe between fork and exec.
    unsafe { std::os::unix::process::CommandExt::pre_exec(command, apply) };
}

/// A running `apir serve`, its standard error kept.
pub struct Server {
    pub folder: TempDir,
    pub process: Child,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Server {
    /// Serves the fake plugin.
    pub fn start() -> Self {
        Self::start_with(|_| {})
    }

    /// The same with a changed command line or environment.
    pub fn start_with(change: impl FnOnce(&mut Command)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let ggml = folder.path().join("ggml.so");
        std::fs::write(&ggml, "").unwrap();
        Self::serve(folder, &fake_plugin(), &ggml, change)
    }

    pub fn serve(folder: TempDir, plugin: &Path, ggml: &Path, change: impl FnOnce(&mut Command)) -> Self {
        Self::serve_by(Command::new(env!("CARGO_BIN_EXE_apir")), folder, plugin, ggml, change)
    }

    /// The same by a command that runs `apir`.
    pub fn serve_by(
        mut command: Command,
        folder: TempDir,
        plugin: &Path,
        ggml: &Path,
        change: impl FnOnce(&mut Command),
    ) -> Self {
        command.arg("serve").arg("--socket").arg(folder.path().join("socket"));
        command.arg("--plugin").arg(plugin).arg("--ggml-library").arg(ggml);
        command.env_remove("APIR_LOG").env_remove("APIR_WORKER").env("NO_COLOR", "1");
        command.env("APIR_SHADER_CACHE", "off");
        command.env_remove("APIR_SANDBOX").env_remove("APIR_SANDBOX_PROFILE");
        command.env_remove("APIR_LLAMA_CPP_LOG_TO_FILE").env_remove("APIR_MAX_LOG_LINES");
        command.stdin(Stdio::null()).stderr(Stdio::piped());
        change(&mut command);
        let mut process = command.spawn().unwrap();
        let lines = Arc::<Mutex<Vec<String>>>::default();
        let (kept, stderr) = (lines.clone(), process.stderr.take().unwrap());
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines() {
                kept.lock().unwrap().push(line.unwrap());
            }
        });
        let server = Self { folder, process, lines };
        eventually("the server listens", || server.has_line("listening on "));
        server
    }

    /// Whether the fake plugin was told that a context ended.
    pub fn plugin_was_told(&self) -> bool {
        // The first is the trial's, at the server's start.
        let file = std::fs::read_to_string(self.folder.path().join("ggml.so.ended")).unwrap_or_default();
        self.has_line("the fake plugin ended context")
            || file.contains("context") && !file.contains("context 0")
    }

    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    pub fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }

    pub fn has_line(&self, part: &str) -> bool {
        self.lines().iter().any(|line| line.contains(part))
    }

    pub fn wait_for_line(&self, part: &str) {
        eventually(part, || self.has_line(part));
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.process.id().cast_signed())
    }

    pub fn stop(&mut self, signal: Signal) -> ExitStatus {
        kill(self.pid(), signal).unwrap();
        self.process.wait().unwrap()
    }

    /// The process ids of the workers that live.
    pub fn workers(&self) -> Vec<Pid> {
        let id = self.process.id();
        let path = format!("/proc/{id}/task/{id}/children");
        let children = std::fs::read_to_string(path).unwrap_or_default();
        children.split_whitespace().map(|pid| Pid::from_raw(pid.parse().unwrap())).collect()
    }

    pub fn connect(&self) -> Guest {
        Guest::connect(&self.socket())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = kill(self.pid(), Signal::SIGTERM);
        let _ = self.process.wait();
        if std::thread::panicking() {
            println!("{}", self.lines().join("\n"));
        }
    }
}

/// The least of a session: one reply blob, one command at a time.
pub struct Guest {
    pub link: SocketLink,
    pub reply: Blob,
}

impl Guest {
    pub fn connect(socket: &Path) -> Self {
        let link = SocketLink::connect(socket).unwrap();
        let reply = link.create_blob(0x4000).unwrap();
        Self { link, reply }
    }

    /// Connected, with the library loaded.
    pub fn ready(server: &Server) -> Self {
        let guest = server.connect();
        assert_eq!(guest.call(0, 0, &[0, 2]).unwrap(), 0xab1f);
        assert_eq!(guest.call(1, 0, &[]).unwrap(), 1);
        guest
    }

    pub fn submit(&self, type_: u32, flags: u32, words: &[u32]) -> Result<(), LinkError> {
        let header = CommandHeader { type_, flags, reply_res_id: self.reply.res_id() };
        let mut command = header.to_bytes().to_vec();
        command.extend(words.iter().flat_map(|word| word.to_le_bytes()));
        self.reply.store_word(0, 0);
        self.link.submit(&command)
    }

    pub fn call(&self, type_: u32, flags: u32, words: &[u32]) -> Result<u32, LinkError> {
        self.submit(type_, flags, words)?;
        wait::until(&self.link, Some(PATIENCE), || self.reply.load_word(0) != 0)?;
        Ok(self.reply.load_word(0))
    }

    pub fn forward(&self, command: u32, words: &[u32]) -> Result<u32, LinkError> {
        self.call(2, command, words)
    }

    /// A command of the fake plugin's with a word and a text; the reply's first word.
    pub fn ask(&self, command: u32, word: Option<u32>, text: &str) -> i32 {
        let mut bytes = text.as_bytes().to_vec();
        bytes.resize((text.len() + 1).next_multiple_of(4), 0);
        let text = bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
        let words: Vec<u32> = word.into_iter().chain(text).collect();
        assert_eq!(self.forward(command, &words).unwrap(), 5);
        self.reply.load_word(4).cast_signed()
    }

    /// That its worker is alive and does what it should.
    pub fn check(&self) {
        assert_eq!(self.forward(1, &[41, 42]).unwrap(), 5);
        assert_eq!((self.reply.load_word(4), self.reply.load_word(8)), (41, 42));
    }
}
