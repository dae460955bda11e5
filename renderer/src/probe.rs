//! Trying out what a server or a VMM is to serve, before a guest does: a worker for a client that is trusted.
//!
//! The worker loads the plugin and the ggml library behind the walls that others get, and the plugin checks its settings. What it says
//! is passed on in its own words.
#![forbid(unsafe_code)]

use crate::blob::{self, BlobBytes};
use crate::launch::{Launch, connection};
use crate::log::VARIABLE as LOG;
use apir_protocol::command::{CommandType, LoadLibraryCode};
use apir_protocol::constants::{PROTOCOL_MAJOR, PROTOCOL_MINOR};
use apir_protocol::header::CommandHeader;
use apir_protocol::settings::MAX_LOG_LINES;
use apir_protocol::socket::{ClientFrame, SUBMIT_PREFIX};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use std::fs::File;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};
use tracing::Level;

/// The context's number: clients have others.
const CONTEXT: u32 = 0;
/// How long the worker may take to end, once it has answered.
const END_LIMIT: Duration = Duration::from_secs(5);
const STEP: u16 = 2;
/// Lines a second that it may write: drivers of several GPUs write some for each.
const LINES: u64 = 1000;
/// The reply blob's resource id, and its size in bytes.
const REPLY: u32 = 1;
const REPLY_SIZE: u64 = 4096;

/// Why nothing can be served.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// The worker could not be started or talked to.
    #[error("cannot {what} for a trial: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The program cannot be run.
    #[error("worker program {}: {source}; set APIR_WORKER to the apir program", .program.display())]
    Start {
        /// Its path.
        program: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The plugin did not start, for this reason.
    #[error("{0}")]
    Refused(String),
    /// The worker ended before it answered.
    #[error("a trial worker ended with {status} before it had loaded the ggml library{last}")]
    Ended {
        /// How it ended.
        status: String,
        /// Its last line, after a colon.
        last: String,
    },
    /// It did not answer in time.
    #[error("a trial worker has not loaded the ggml library within {} s{last}", limit.as_secs())]
    TimeOut {
        /// How long it had.
        limit: Duration,
        /// Its last line, after a colon.
        last: String,
    },
}

/// Starts a worker, lets it load everything, and ends it: what it serves, in the plugin's words.
pub(crate) fn probe(launch: &Launch, limit: Duration) -> Result<String, ProbeError> {
    let failed = |what| move |source| ProbeError::Io { what, source };
    let (socket, far) = connection().map_err(failed("make a socket"))?;
    let launch = Launch { attach: true, ..launch.clone() };
    // Its words are wanted whatever the level of the log is, and however few lines may be written. A wrong number is left to be found.
    let mut variables = vec![(LOG, "info".into())];
    if std::env::var(MAX_LOG_LINES).is_ok_and(|lines| lines.is_empty() || lines.parse::<u64>().is_ok())
        || std::env::var_os(MAX_LOG_LINES).is_none()
    {
        variables.push((MAX_LOG_LINES, LINES.to_string().into()));
    }
    let (process, mut output) = launch
        .spawn_with(far, CONTEXT, &variables)
        .map_err(|source| ProbeError::Start { program: launch.program.clone(), source })?;
    let mut lines = Lines::default();
    let mut trial = Trial { socket, process };
    let answer = trial.load(limit, || output.read(|line| lines.add(line.level, &line.text)));
    let ended = trial.end().map_err(failed("end a worker"));
    output.drain(|line| lines.add(line.level, &line.text));
    match answer.map_err(failed("talk to a worker"))? {
        Answer::Word(word) if word == LoadLibraryCode::Success.number() + 1 => {
            ended?;
            Ok(lines.found.unwrap_or_default())
        }
        Answer::Word(word) => Err(ProbeError::Refused(
            lines
                .fault
                .unwrap_or_else(|| format!("the plugin did not start (code {})", word.wrapping_sub(1))),
        )),
        Answer::Ended => Err(ProbeError::Ended { status: ended?, last: lines.last() }),
        Answer::None => Err(ProbeError::TimeOut { limit, last: lines.last() }),
    }
}

/// What the worker has said.
#[derive(Debug, Default)]
struct Lines {
    found: Option<String>,
    fault: Option<String>,
    fault_level: Option<Level>,
    last: Option<String>,
}

impl Lines {
    fn add(&mut self, level: Level, text: &str) {
        let prefix = format!("context {CONTEXT}: ");
        let words = text.strip_prefix(&prefix).unwrap_or(text);
        let own = words.len() < text.len();
        // The first error is the cause; what follows from it has a code alone.
        if level <= Level::WARN && self.fault_level.is_none_or(|known| level < known) {
            (self.fault, self.fault_level) = (Some(words.to_owned()), Some(level));
        } else if level == Level::INFO && own {
            self.found = Some(words.to_owned());
        }
        self.last = Some(words.to_owned());
    }

    /// The cause as far as it is known, to be put behind what happened.
    fn last(self) -> String {
        self.fault.or(self.last).map_or_else(String::new, |line| format!(": {line}"))
    }
}

#[derive(Debug)]
enum Answer {
    Word(u32),
    Ended,
    None,
}

struct Trial {
    socket: OwnedFd,
    process: Child,
}

impl Trial {
    /// Asks the worker to load the plugin, and waits for the answer.
    fn load(&mut self, limit: Duration, mut read: impl FnMut()) -> io::Result<Answer> {
        let end = Instant::now() + limit;
        let (reply, size, _taken) = blob::create_memory(REPLY_SIZE, &BlobBytes::new(u64::MAX))
            .map_err(|refused| io::Error::other(refused.to_string()))?;
        let handshake = [PROTOCOL_MAJOR, PROTOCOL_MINOR].map(u32::to_le_bytes).concat();
        let steps = [(CommandType::Handshake, handshake.as_slice()), (CommandType::LoadLibrary, &[])];
        let sent = self
            .send(&[ClientFrame::hello().as_bytes()], None)
            .and_then(|()| self.send(&[ClientFrame::attach(REPLY, size).as_bytes()], Some(&reply)));
        let mut word = 0;
        for (command, arguments) in steps {
            reply.write_all_at(&[0; 4], 0)?;
            let header = CommandHeader { type_: command.number(), flags: 0, reply_res_id: REPLY };
            let header = header.to_bytes();
            let sent = sent
                .as_ref()
                .is_ok_and(|()| self.send(&[&SUBMIT_PREFIX, header.as_slice(), arguments], None).is_ok());
            word = loop {
                read();
                let mut bytes = [0; 4];
                reply.read_exact_at(&mut bytes, 0)?;
                match u32::from_le_bytes(bytes) {
                    0 if Instant::now() >= end => return Ok(Answer::None),
                    0 if !sent || self.has_ended() => return Ok(Answer::Ended),
                    0 => {}
                    word => break word,
                }
                let mut fds = [PollFd::new(self.socket.as_fd(), PollFlags::empty())];
                let _ = poll(&mut fds, PollTimeout::from(STEP));
            };
        }
        Ok(Answer::Word(word))
    }

    fn send(&self, parts: &[&[u8]], memory: Option<&File>) -> io::Result<()> {
        let parts: Vec<_> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let fds: Vec<_> = memory.iter().map(|file| file.as_raw_fd()).collect();
        let control = ControlMessage::ScmRights(&fds);
        let control = if fds.is_empty() { &[][..] } else { std::slice::from_ref(&control) };
        sendmsg::<UnixAddr>(self.socket.as_raw_fd(), &parts, control, MsgFlags::MSG_NOSIGNAL, None)?;
        Ok(())
    }

    fn has_ended(&mut self) -> bool {
        self.process.try_wait().is_ok_and(|status| status.is_some())
    }

    /// Closes the connection and waits for the worker's end: how it ended.
    fn end(mut self) -> io::Result<String> {
        drop(self.socket);
        let end = Instant::now() + END_LIMIT;
        while Instant::now() < end {
            if let Some(status) = self.process.try_wait()? {
                return Ok(status.to_string());
            }
            thread::sleep(Duration::from_millis(STEP.into()));
        }
        self.process.kill()?;
        self.process.wait().map(|status| status.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cause_comes_before_what_follows_from_it() {
        let mut lines = Lines::default();
        lines.add(Level::INFO, "ggml: 1 device");
        lines.add(Level::WARN, "context 0: a doubt");
        lines.add(Level::ERROR, "context 0: APIR_HOST_THREADS=0: must be a number from 1 to 1024");
        lines.add(Level::WARN, "context 0: the plugin did not start: code 38");
        assert_eq!(lines.found, None);
        assert_eq!(lines.last(), ": APIR_HOST_THREADS=0: must be a number from 1 to 1024");
        let mut lines = Lines::default();
        lines.add(Level::INFO, "context 0: /a.so: ggml 0.26.0");
        lines.add(Level::INFO, "plain words");
        assert_eq!(lines.found.as_deref(), Some("/a.so: ggml 0.26.0"));
    }
}
