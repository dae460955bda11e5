//! Running other programs: output to a log file, and a failure that says all one needs.

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use apir_tests::program::Program;

use crate::error::{Error, IoContext};

/// How many last lines of a failed program are shown.
const TAIL_LINES: usize = 30;

/// A command line whose output goes to a log file.
#[derive(Debug)]
pub struct Tool {
    program: OsString,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    dir: Option<PathBuf>,
    log: PathBuf,
}

/// How a program ended and what it printed.
#[derive(Debug)]
pub struct Finished {
    /// Whether its exit status was 0.
    pub success: bool,
    /// The exit status in words.
    pub status: String,
    /// Its last lines, stdout and stderr together.
    pub tail: Vec<String>,
}

impl Tool {
    /// A program that will log to `log`.
    pub fn new(program: impl AsRef<OsStr>, log: &Path) -> Self {
        Self {
            program: program.as_ref().to_owned(),
            args: Vec::new(),
            env: Vec::new(),
            dir: None,
            log: log.to_owned(),
        }
    }

    /// A program of the harness.
    pub fn from_program(program: Program, log: &Path) -> Self {
        let command = Command::from(program);
        let set = |(key, value): (&OsStr, Option<&OsStr>)| Some((key.to_owned(), value?.to_owned()));
        Self {
            program: command.get_program().to_owned(),
            args: command.get_args().map(OsStr::to_owned).collect(),
            env: command.get_envs().filter_map(set).collect(),
            dir: None,
            log: log.to_owned(),
        }
    }

    /// Adds one argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<S: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, key: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env.push((key.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Runs in this folder.
    #[must_use]
    pub fn dir(mut self, dir: &Path) -> Self {
        self.dir = Some(dir.to_owned());
        self
    }

    /// Runs to the end and fails unless the exit status is 0.
    pub fn run(self) -> Result<(), Error> {
        self.run_lines(|_| ()).map(|_| ())
    }

    /// As [`Tool::run`], showing each line of output to `each`; gives back the last lines.
    pub fn run_lines(self, each: impl FnMut(&str)) -> Result<Vec<String>, Error> {
        let finished = self.finish(each)?;
        if finished.success {
            return Ok(finished.tail);
        }
        Err(Error::Command {
            command: self.command_line(),
            status: finished.status,
            tail: finished.tail.iter().map(|line| format!("    {line}")).collect::<Vec<_>>().join("\n"),
            log: self.log,
        })
    }

    /// Runs to the end, whatever the exit status.
    pub fn finish(&self, mut each: impl FnMut(&str)) -> Result<Finished, Error> {
        if let Some(folder) = self.log.parent() {
            fs::create_dir_all(folder).at("create", folder)?;
        }
        let mut log = File::create(&self.log).at("create", &self.log)?;
        writeln!(log, "$ {}", self.command_line()).at("write", &self.log)?;
        let start = |source| Error::Start { program: self.program.to_string_lossy().into_owned(), source };
        // One pipe for both streams keeps their lines in order.
        let (reader, writer) = std::io::pipe().map_err(start)?;
        let mut child = {
            let mut command = Command::new(&self.program);
            command.args(&self.args).envs(self.env.iter().map(|(key, value)| (key, value)));
            command.stdin(Stdio::null()).stdout(writer.try_clone().map_err(start)?).stderr(writer);
            if let Some(dir) = &self.dir {
                command.current_dir(dir);
            }
            command.spawn().map_err(start)?
        };
        let mut tail = VecDeque::with_capacity(TAIL_LINES + 1);
        let mut reader = BufReader::new(reader);
        let mut bytes = Vec::new();
        while reader.read_until(b'\n', &mut bytes).at("read the output into", &self.log)? > 0 {
            log.write_all(&bytes).at("write", &self.log)?;
            let line = String::from_utf8_lossy(&bytes).trim_end().to_owned();
            bytes.clear();
            each(&line);
            tail.push_back(line);
            if tail.len() > TAIL_LINES {
                tail.pop_front();
            }
        }
        let status = child.wait().map_err(start)?;
        Ok(Finished { success: status.success(), status: status.to_string(), tail: tail.into() })
    }

    /// The command line as a person would type it.
    pub fn command_line(&self) -> String {
        std::iter::once(&self.program)
            .chain(&self.args)
            .map(|word| {
                let word = word.to_string_lossy();
                if word.contains(|c: char| c.is_whitespace() || c == '\'') {
                    format!("{word:?}")
                } else {
                    word.into_owned()
                }
            })
            .collect::<Vec<_>>()
            .join(" ")
    }
}

/// The full path of a program in PATH.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_names_command_status_tail_and_log() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("a/step.log");
        let error = Tool::new("sh", &log)
            .args(["-c", "seq 40; echo oops >&2; exit 3"])
            .run()
            .unwrap_err()
            .to_string();
        for part in ["sh -c", "exit status: 3", "    oops", "    12", &log.display().to_string()] {
            assert!(error.contains(part), "{part} is not in: {error}");
        }
        assert!(!error.contains("    11\n"), "more than {TAIL_LINES} lines: {error}");
        assert!(fs::read_to_string(&log).unwrap().contains("\n11\n"));
    }

    #[test]
    fn a_program_that_is_not_there_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = Tool::new("no-such-program", &dir.path().join("l")).run().unwrap_err().to_string();
        assert!(error.starts_with("cannot start no-such-program"), "{error}");
    }
}
