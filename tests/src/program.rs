//! Running a program with its output captured and its time limited.
#![forbid(unsafe_code)]

use std::ffi::{OsStr, OsString};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Error, check};

/// How much of a program's output an error shows, in bytes.
const SHOWN: usize = 4000;

/// A program to be run.
#[derive(Debug)]
pub struct Program {
    name: String,
    command: Command,
}

/// A program that runs; killed when dropped.
#[derive(Debug)]
pub struct Running {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: Captured,
    stderr: Captured,
    readers: Vec<thread::JoinHandle<()>>,
    started: Instant,
}

/// What a program printed by the time it ended.
#[derive(Debug, Clone)]
pub struct Output {
    /// Its name, for messages.
    pub name: String,
    /// How it ended.
    pub status: ExitStatus,
    /// What it wrote to stdout.
    pub stdout: String,
    /// What it wrote to stderr.
    pub stderr: String,
    /// How long it ran.
    pub elapsed: Duration,
}

/// Text that a reader thread collects while the program runs.
#[derive(Debug, Clone, Default)]
pub struct Captured(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    // Bytes, since a read may end in the middle of a character.
    bytes: Vec<u8>,
    ended: bool,
}

impl Program {
    /// The program at `path`, cut off from the variables that choose a host and how it is used.
    pub fn new(path: &Path) -> Self {
        let mut command = Command::new(path);
        for name in [
            "APIR_SOCKET",
            "APIR_RENDER_NODE",
            "GGML_REMOTING_USE_APIR_CAPSET",
            "APIR_TIMEOUT_MS",
            "APIR_ON_LOST",
            "APIR_STATS",
            "GGML_BACKEND_PATH",
        ] {
            command.env_remove(name);
        }
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Self { name, command }
    }

    /// Gives it another name in messages than that of its file.
    #[must_use]
    pub fn called(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }

    /// Its name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What would be run.
    pub fn command(&self) -> &Command {
        &self.command
    }

    /// Adds one argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.command.arg(arg);
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.command.args(args);
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, key: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(key, value);
        self
    }

    /// Sets several environment variables.
    #[must_use]
    pub fn envs(mut self, pairs: impl IntoIterator<Item = (OsString, OsString)>) -> Self {
        self.command.envs(pairs);
        self
    }

    /// Starts it.
    pub fn start(mut self) -> Result<Running, Error> {
        let mut child = self
            .command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|source| Error::Start {
                program: self.command.get_program().to_string_lossy().into_owned(),
                source,
            })?;
        let (stdout, stderr) = (Captured::default(), Captured::default());
        let mut readers = Vec::new();
        if let Some(pipe) = child.stdout.take() {
            readers.push(stdout.follow(pipe));
        }
        if let Some(pipe) = child.stderr.take() {
            readers.push(stderr.follow(pipe));
        }
        let stdin = child.stdin.take();
        Ok(Running { name: self.name, child, stdin, stdout, stderr, readers, started: Instant::now() })
    }

    /// Runs it to the end; fails when it takes longer than `limit`.
    pub fn run(self, limit: Duration) -> Result<Output, Error> {
        let mut running = self.start()?;
        running.stdin = None;
        running.wait(limit)
    }
}

impl From<Program> for Command {
    fn from(program: Program) -> Self {
        program.command
    }
}

impl Running {
    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has written to stdout.
    pub fn stdout(&self) -> &Captured {
        &self.stdout
    }

    /// What it has written to stderr.
    pub fn stderr(&self) -> &Captured {
        &self.stderr
    }

    /// Sends it one line.
    pub fn send_line(&mut self, line: &str) -> Result<(), Error> {
        let Some(stdin) = &mut self.stdin else {
            return Err(Error::Unexpected(format!("{} has no stdin any more", self.name)));
        };
        writeln!(stdin, "{line}").and_then(|()| stdin.flush()).map_err(|source| Error::Io {
            action: "write to the stdin of",
            path: self.name.clone().into(),
            source,
        })
    }

    /// Waits until `found` finds something in its stdout.
    pub fn wait_for<T>(
        &self,
        what: &str,
        limit: Duration,
        found: impl FnMut(&str) -> Option<T>,
    ) -> Result<T, Error> {
        self.stdout.wait_for(limit, found).ok_or_else(|| self.timeout(what, limit))
    }

    /// Waits for its end.
    pub fn wait(mut self, limit: Duration) -> Result<Output, Error> {
        self.stdin = None;
        let end = Instant::now() + limit;
        let status = loop {
            match self.child.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) if Instant::now() < end => thread::sleep(Duration::from_millis(2)),
                Ok(None) => return Err(self.timeout("end", limit)),
                Err(source) => return Err(Error::Start { program: self.name.clone(), source }),
            }
        };
        let elapsed = self.started.elapsed();
        for reader in self.readers.drain(..) {
            if reader.join().is_err() {
                return Err(Error::Unexpected(format!("the reader of {} failed", self.name)));
            }
        }
        Ok(Output {
            name: self.name.clone(),
            status,
            stdout: self.stdout.text(),
            stderr: self.stderr.text(),
            elapsed,
        })
    }

    /// Why it did not do what was waited for: it ended, or it took too long.
    pub fn failure(mut self, what: &str, limit: Duration) -> Error {
        match self.child.try_wait() {
            Ok(Some(status)) => Error::Failed {
                program: self.name.clone(),
                status: status.to_string(),
                printed: shown(&self.stdout.text(), &self.stderr.text()),
            },
            _ => self.timeout(what, limit),
        }
    }

    /// An error that says what this program did not do in time.
    pub fn timeout(&self, what: &str, limit: Duration) -> Error {
        Error::Timeout {
            program: self.name.clone(),
            what: what.to_owned(),
            seconds: limit.as_secs(),
            printed: shown(&self.stdout.text(), &self.stderr.text()),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Already ended programs answer with an error that says nothing new.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Output {
    /// Fails unless the exit status is 0.
    pub fn success(self) -> Result<Self, Error> {
        match self.status.success() {
            true => Ok(self),
            false => Err(Error::Failed {
                program: self.name.clone(),
                status: self.status.to_string(),
                printed: shown(&self.stdout, &self.stderr),
            }),
        }
    }

    /// Fails unless the program ended by itself, not by a signal, and with an error.
    pub fn failed_by_itself(self) -> Result<Self, Error> {
        check(self.status.signal().is_none() && !self.status.success(), || {
            format!("it ended with {}:\n{}", self.status, self.stderr)
        })?;
        Ok(self)
    }
}

impl Captured {
    /// All that has come so far.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.lock().bytes).into_owned()
    }

    /// Waits until `found` finds something in the text, the program's end or the limit.
    pub fn wait_for<T>(&self, limit: Duration, mut found: impl FnMut(&str) -> Option<T>) -> Option<T> {
        let end = Instant::now() + limit;
        let mut state = self.lock();
        loop {
            if let Some(value) = found(&String::from_utf8_lossy(&state.bytes)) {
                return Some(value);
            }
            let left = end.saturating_duration_since(Instant::now());
            if state.ended || left.is_zero() {
                return None;
            }
            state = self.0.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn follow(&self, pipe: impl Read + Send + 'static) -> thread::JoinHandle<()> {
        let shared = self.clone();
        thread::spawn(move || {
            let mut reader = BufReader::new(pipe);
            loop {
                // What is there is taken at once: a model's text has no line ends to wait for.
                let count = match reader.fill_buf() {
                    Ok(bytes) if !bytes.is_empty() => {
                        shared.lock().bytes.extend_from_slice(bytes);
                        bytes.len()
                    }
                    _ => break,
                };
                reader.consume(count);
                shared.0.changed.notify_all();
            }
            shared.lock().ended = true;
            shared.0.changed.notify_all();
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The end of both streams, for an error.
fn shown(stdout: &str, stderr: &str) -> String {
    format!("{}\n--- stderr ---\n{}", last(stdout), last(stderr))
}

fn last(text: &str) -> &str {
    let mut start = text.len().saturating_sub(SHOWN);
    while !text.is_char_boundary(start) {
        start += 1;
    }
    &text[start..]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Program {
        Program::new(Path::new("/bin/sh")).args(["-c", script])
    }

    #[test]
    fn output_and_status_are_captured() {
        let output = sh("echo out; echo err >&2; exit 4").run(Duration::from_secs(10)).unwrap();
        assert_eq!((output.stdout.as_str(), output.stderr.as_str()), ("out\n", "err\n"));
        assert_eq!(output.status.code(), Some(4));
        let error = output.success().unwrap_err().to_string();
        assert!(error.contains("exit status: 4") && error.contains("err"), "{error}");
    }

    #[test]
    fn a_program_that_hangs_is_ended() {
        let error = sh("echo here; exec sleep 60").run(Duration::from_millis(200)).unwrap_err().to_string();
        assert!(error.contains("did not end") && error.contains("here"), "{error}");
    }

    #[test]
    fn lines_go_both_ways() {
        let mut running = sh("read x; echo got $x; read y").start().unwrap();
        running.send_line("this").unwrap();
        running
            .wait_for("answer", Duration::from_secs(10), |text| text.contains("got this").then_some(()))
            .unwrap();
        assert!(running.wait(Duration::from_secs(10)).unwrap().status.code().is_some());
    }
}
