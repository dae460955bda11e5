//! What a worker writes, on its way to the log: through a pipe, so that the server or the VMM decides how much of it is written.
//!
//! The worker's end of the pipe does not block: a worker whose lines nobody takes loses them and goes on.
#![forbid(unsafe_code)]

use nix::fcntl::OFlag;
use nix::unistd::pipe2;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::Stdio;
use std::time::{Duration, Instant};
use tracing::Level;

/// The byte by which a worker says that it has started; no text has it.
pub(crate) const STARTED: u8 = 0;
/// The longest line; the rest of a longer one is dropped.
const MAX_LINE: usize = 1024;
/// Bytes read at a time, and at most between two rests.
const CHUNK: usize = 16 << 10;
/// How long a pipe that was full is left alone: a worker that writes without end does not keep its reader busy.
const REST: Duration = Duration::from_millis(50);

/// A line of a worker's.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct WorkerLine<'a> {
    /// The time that it begins with, when it is a line of log.
    pub(crate) stamp: Option<&'a str>,
    /// Its level; that of information when it has none.
    pub(crate) level: Level,
    /// The rest, without control characters.
    pub(crate) text: String,
}

impl<'a> WorkerLine<'a> {
    /// Takes a line apart: a line of log begins with a time and a level.
    pub(crate) fn parse(line: &'a str) -> Self {
        // A terminal must not obey what a guest has made a worker write.
        let clean = |text: &str| text.chars().map(|c| if is_plain(c) { c } else { ' ' }).collect::<String>();
        let mut words = line.splitn(2, char::is_whitespace);
        let parsed = (|| {
            let stamp = words.next().filter(|word| is_time(word))?;
            let rest = words.next()?.trim_start();
            let (level, text) = rest.split_once(' ')?;
            Some((stamp, level.parse::<Level>().ok()?, text))
        })();
        match parsed {
            Some((stamp, level, text)) => Self { stamp: Some(stamp), level, text: clean(text) },
            None => Self { stamp: None, level: Level::INFO, text: clean(line) },
        }
    }
}

/// Whether a character shows itself and nothing else: neither a control character, nor one that hides, turns around or breaks the line.
fn is_plain(c: char) -> bool {
    !c.is_control()
        && !matches!(c,
            '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

impl WorkerLine<'_> {
    /// The time and the level that it began with, to be put in front of it again.
    pub(crate) fn head(&self) -> String {
        self.stamp.map_or_else(String::new, |stamp| format!("{stamp} {:>5} ", self.level))
    }
}

fn is_time(word: &str) -> bool {
    let bytes = word.as_bytes();
    word.len() >= 20
        && word.ends_with('Z')
        && bytes[0].is_ascii_digit()
        && bytes.iter().all(|byte| byte.is_ascii_digit() || b"-:.TZ".contains(byte))
}

/// The reader's end of a worker's pipe.
#[derive(Debug)]
pub(crate) struct WorkerOutput {
    pipe: OwnedFd,
    line: Vec<u8>,
    rest_until: Option<Instant>,
    started: bool,
    ended: bool,
}

impl WorkerOutput {
    /// A pipe, and the standard output and error of a worker that write to it.
    pub(crate) fn new() -> io::Result<(Self, [Stdio; 2])> {
        let (pipe, far) = pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
        let other = far.try_clone()?;
        let output = Self { pipe, line: Vec::new(), rest_until: None, started: false, ended: false };
        Ok((output, [Stdio::from(far), Stdio::from(other)]))
    }

    /// Whether the worker has said that it has started.
    pub(crate) fn has_started(&self) -> bool {
        self.started
    }

    /// What to wait for; `None` when nothing more comes.
    pub(crate) fn wait_for(&mut self, now: Instant) -> Option<Wait> {
        if self.ended {
            return None;
        }
        match self.rest_until {
            Some(until) if until > now => Some(Wait::Until(until)),
            _ => {
                self.rest_until = None;
                Some(Wait::Readable)
            }
        }
    }

    /// Hands the lines that are there to `take`.
    pub(crate) fn read(&mut self, mut take: impl FnMut(&WorkerLine<'_>)) {
        let mut bytes = [0; CHUNK];
        match nix::unistd::read(&self.pipe, &mut bytes) {
            Ok(0) => {
                self.ended = true;
                self.finish(&mut take);
            }
            Ok(len) => {
                if len == CHUNK {
                    self.rest_until = Some(Instant::now() + REST);
                }
                self.push(&bytes[..len], &mut take);
            }
            Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR) => {}
            Err(_) => self.ended = true,
        }
    }

    /// Hands what is left to `take`, after the worker's end. Not to its end where others still have the pipe.
    pub(crate) fn drain(mut self, mut take: impl FnMut(&WorkerLine<'_>)) {
        // A pipe holds 64 KiB; what a process that the worker left behind still writes is nobody's.
        for _ in 0..(64 << 10) / CHUNK {
            if !self.ended {
                self.read(&mut take);
            }
        }
        self.finish(&mut take);
    }

    fn push(&mut self, bytes: &[u8], take: &mut impl FnMut(&WorkerLine<'_>)) {
        for &byte in bytes {
            match byte {
                b'\n' => self.finish(take),
                STARTED => self.started = true,
                _ if self.line.len() < MAX_LINE => self.line.push(byte),
                _ => {}
            }
        }
    }

    fn finish(&mut self, take: &mut impl FnMut(&WorkerLine<'_>)) {
        let line = std::mem::take(&mut self.line);
        let text = String::from_utf8_lossy(&line);
        let text = text.trim_end();
        if !text.is_empty() {
            take(&WorkerLine::parse(text));
        }
    }
}

impl AsFd for WorkerOutput {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pipe.as_fd()
    }
}

/// What the reader of a pipe waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Bytes, or the end.
    Readable,
    /// A time.
    Until(Instant),
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::process::Command;

    fn lines(output: &mut WorkerOutput) -> Vec<String> {
        let mut found = Vec::new();
        output.read(|line| found.push(line.text.clone()));
        found
    }

    #[test]
    fn lines_of_log_are_told_from_others() {
        let line = WorkerLine::parse("2026-11-30T19:11:12.123456Z  WARN context 3: refused");
        assert_eq!(
            line,
            WorkerLine {
                stamp: Some("2026-11-30T19:11:12.123456Z"),
                level: Level::WARN,
                text: "context 3: refused".into()
            }
        );
        for other in ["", "Z", "2026 WARN x", "ggml: \u{1b}[2J done", "2026-11-30T19:11:12.123456Z LOUD x"] {
            let line = WorkerLine::parse(other);
            assert_eq!((line.stamp, line.level), (None, Level::INFO), "{other}");
            assert!(!line.text.contains('\u{1b}'));
        }
    }

    #[test]
    fn s28_no_line_hides_or_turns_what_stands_around_it() {
        let text =
            "client 7: \u{202e}kcatta na\u{2069}\u{2028}client 8: \u{200b}\u{feff}\u{e0041}\r\u{9b}2J\u{85}ü";
        let line = WorkerLine::parse(text);
        assert_eq!(line.text, "client 7:  kcatta na  client 8:      2J ü");
    }

    #[test]
    fn t21_a_pipe_that_nobody_reads_blocks_no_worker() {
        let (mut output, [out, _err]) = WorkerOutput::new().unwrap();
        // More than any pipe holds.
        let status = Command::new("sh")
            .args(["-c", "for i in $(seq 20000); do echo line $i of a flood; done 2>/dev/null; exit 7"])
            .stdout(out)
            .status()
            .unwrap();
        assert_eq!(status.code(), Some(7));
        assert_eq!(lines(&mut output)[0], "line 1 of a flood");
        assert!(matches!(output.wait_for(Instant::now()), Some(Wait::Until(_))), "a full pipe rests");
    }

    #[test]
    fn a_long_line_is_cut_and_a_last_one_without_an_end_is_kept() {
        let (mut output, [_out, err]) = WorkerOutput::new().unwrap();
        let mut child = Command::new("sh")
            .args(["-c", "printf '\\0'; printf '%05000d\\nlast' 7 >&2"])
            .stdout(_out)
            .stderr(err)
            .spawn()
            .unwrap();
        child.wait().unwrap();
        let first = lines(&mut output);
        assert_eq!(first.len(), 1);
        assert_eq!(first[0].len(), MAX_LINE);
        assert!(output.has_started());
        let mut rest = Vec::new();
        output.drain(|line| rest.push(line.text.clone()));
        assert_eq!(rest, ["last"]);
    }
}
