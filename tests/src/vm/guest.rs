//! A running machine and the programs in it.
//!
//! A program is a job: a numbered folder that both sides see, with the command to run. The guest's init is told its
//! number over the console, and leaves output and exit status in the folder.
#![forbid(unsafe_code)]

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::root::Root;
use crate::error::{Error, IoContext};
use crate::process;
use crate::program::{Output, Program, Running};
use crate::remote::Remote;

/// What the guest's init prints when it waits for jobs.
pub(super) const READY: &str = "apir: ready";

/// How long a machine may take to end.
const STOP_LIMIT: Duration = Duration::from_secs(20);

/// How often the files of a job are looked at.
const POLL: Duration = Duration::from_millis(5);

/// A machine that runs; ended when dropped.
#[derive(Debug)]
pub struct Guest {
    hypervisor: u32,
    state: Mutex<State>,
    jobs: TempDir,
    _root: Root,
}

#[derive(Debug)]
struct State {
    running: Running,
    started: u32,
}

/// A machine whose programs load a guest library.
#[derive(Debug, Clone, Copy)]
pub struct Loaded<'a> {
    guest: &'a Guest,
    library: &'a Path,
}

/// A program in the guest.
#[derive(Debug)]
pub struct Job<'a> {
    guest: &'a Guest,
    name: String,
    folder: PathBuf,
    started: Instant,
}

impl Guest {
    pub(super) fn new(running: Running, jobs: TempDir, root: Root) -> Self {
        Self {
            hypervisor: running.pid(),
            state: Mutex::new(State { running, started: 0 }),
            jobs,
            _root: root,
        }
    }

    /// A folder that host and guest see under the same path.
    pub fn folder(&self) -> &Path {
        self.jobs.path()
    }

    /// This machine, for programs that load `library` as a backend.
    pub fn loading<'a>(&'a self, library: &'a Path) -> Loaded<'a> {
        Loaded { guest: self, library }
    }

    /// Starts a program in the guest. Its environment is that of the program given, and nothing of the host's.
    pub fn start(&self, program: &Program) -> Result<Job<'_>, Error> {
        let mut state = self.lock();
        state.started += 1;
        let number = state.started.to_string();
        let folder = self.jobs.path().join(&number);
        fs::create_dir(&folder).at("create", &folder)?;
        let command = folder.join("command");
        fs::write(&command, script(program, &folder.join("pid"))).at("write", &command)?;
        state.running.send_line(&format!("run {number}"))?;
        Ok(Job { guest: self, name: program.name().to_owned(), folder, started: Instant::now() })
    }

    /// Runs a program in the guest to its end.
    pub fn run(&self, program: &Program, limit: Duration) -> Result<Output, Error> {
        self.start(program)?.wait(limit)
    }

    /// The process id of QEMU.
    pub fn hypervisor(&self) -> u32 {
        self.hypervisor
    }

    /// The workers that QEMU started, one for each of our contexts.
    pub fn workers(&self) -> Vec<u32> {
        process::children(self.hypervisor)
    }

    /// Whether QEMU runs.
    pub fn is_alive(&self) -> bool {
        process::is_alive(self.hypervisor)
    }

    /// What QEMU and its workers wrote to stderr.
    pub fn host_log(&self) -> String {
        self.lock().running.stderr().text()
    }

    /// What the guest wrote to its console.
    pub fn console(&self) -> String {
        self.lock().running.stdout().text()
    }

    /// Switches the machine off and waits for its end.
    pub fn stop(self) -> Result<Output, Error> {
        let mut state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        state.running.send_line("off")?;
        state.running.wait(STOP_LIMIT)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Remote for Loaded<'_> {
    fn guest_env(&self) -> Vec<(OsString, OsString)> {
        vec![("GGML_BACKEND_PATH".into(), self.library.into())]
    }

    fn folder(&self) -> &Path {
        self.guest.folder()
    }

    fn run(&self, program: Program, limit: Duration) -> Result<Output, Error> {
        self.guest.run(&program, limit)
    }
}

impl Job<'_> {
    /// Its process id in the guest.
    pub fn pid(&self, limit: Duration) -> Result<u32, Error> {
        let path = self.folder.join("pid");
        let read = || fs::read_to_string(&path).ok()?.trim().parse().ok();
        self.until("start", limit, read)
    }

    /// Waits until `found` finds something in its stdout.
    pub fn wait_for<T>(
        &self,
        what: &str,
        limit: Duration,
        mut found: impl FnMut(&str) -> Option<T>,
    ) -> Result<T, Error> {
        self.until(what, limit, || found(&self.read("stdout")))
    }

    /// Waits for its end.
    pub fn wait(self, limit: Duration) -> Result<Output, Error> {
        let status = self.until("end", limit, || self.status())?;
        Ok(Output {
            name: self.name.clone(),
            status,
            stdout: self.read("stdout"),
            stderr: self.read("stderr"),
            elapsed: self.started.elapsed(),
        })
    }

    /// How it ended; `None` while it runs.
    pub fn status(&self) -> Option<ExitStatus> {
        let code: i32 = fs::read_to_string(self.folder.join("status")).ok()?.trim().parse().ok()?;
        // A shell tells a signal as 128 and its number; a wait status has it in its lowest bits.
        Some(ExitStatus::from_raw(if code > 128 { code - 128 } else { code << 8 }))
    }

    /// Passes on what it prints until it ends, however long that takes.
    pub fn follow(&self, out: &mut impl Write, err: &mut impl Write) -> Result<ExitStatus, Error> {
        let (mut out_done, mut err_done) = (0, 0);
        loop {
            // Asked before reading, so that what comes before the end is read.
            let status = self.status();
            out_done = self.pass_on("stdout", out_done, out)?;
            err_done = self.pass_on("stderr", err_done, err)?;
            match status {
                Some(status) => return Ok(status),
                None if !self.guest.is_alive() => {
                    return Err(self.timeout("end before its machine", Duration::ZERO));
                }
                None => std::thread::sleep(POLL),
            }
        }
    }

    /// Copies what a file has after `done` bytes; gives back how many it has.
    fn pass_on(&self, file: &str, done: usize, to: &mut impl Write) -> Result<usize, Error> {
        let path = self.folder.join(file);
        let mut new = Vec::new();
        if let Ok(mut file) = File::open(&path) {
            file.seek(SeekFrom::Start(done as u64))
                .and_then(|_| file.read_to_end(&mut new))
                .at("read", &path)?;
        }
        to.write_all(&new).and_then(|()| to.flush()).at("pass on", &path)?;
        Ok(done + new.len())
    }

    fn until<T>(
        &self,
        what: &str,
        limit: Duration,
        mut found: impl FnMut() -> Option<T>,
    ) -> Result<T, Error> {
        let end = Instant::now() + limit;
        loop {
            if let Some(value) = found() {
                return Ok(value);
            }
            if Instant::now() >= end || !self.guest.is_alive() {
                return Err(self.timeout(what, limit));
            }
            std::thread::sleep(POLL);
        }
    }

    fn timeout(&self, what: &str, limit: Duration) -> Error {
        Error::Timeout {
            program: format!("{} in the guest", self.name),
            what: what.to_owned(),
            seconds: limit.as_secs(),
            printed: format!(
                "{}\n--- stderr ---\n{}\n--- console ---\n{}\n--- host ---\n{}",
                self.read("stdout"),
                self.read("stderr"),
                self.guest.console(),
                self.guest.host_log()
            ),
        }
    }

    fn read(&self, file: &str) -> String {
        // Not there until the job has started.
        fs::read(self.folder.join(file))
            .map_or_else(|_| String::new(), |text| String::from_utf8_lossy(&text).into_owned())
    }
}

/// A shell script that becomes the program.
fn script(program: &Program, pid: &Path) -> String {
    let command = program.command();
    let mut text = format!("echo $$ > {}\n", quoted(pid.as_os_str()));
    for (key, value) in command.get_envs() {
        if let Some(value) = value {
            // Writing to a String does not fail.
            let _ = writeln!(text, "export {}={}", key.to_string_lossy(), quoted(value));
        }
    }
    text.push_str("exec");
    for word in std::iter::once(command.get_program()).chain(command.get_args()) {
        text.push(' ');
        text.push_str(&quoted(word));
    }
    text.push('\n');
    text
}

/// One word for a shell.
pub(super) fn quoted(word: &OsStr) -> String {
    format!("'{}'", word.to_string_lossy().replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_is_the_program_that_was_given() {
        let program = Program::new(Path::new("/bin/echo")).args(["it's", "$HOME"]).env("KEY", "a b");
        let dir = tempfile::tempdir().unwrap();
        let text = script(&program, &dir.path().join("pid"));
        let output = std::process::Command::new("sh").args(["-c", &text]).output().unwrap();
        assert_eq!(String::from_utf8(output.stdout).unwrap(), "it's $HOME\n");
        assert!(text.contains("export KEY='a b'\n"), "{text}");
        assert!(fs::read_to_string(dir.path().join("pid")).unwrap().trim().parse::<u32>().is_ok());
    }
}
