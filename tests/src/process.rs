//! What /proc says about a process.
#![forbid(unsafe_code)]

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::error::{Error, IoContext};

/// Private anonymous memory of a process that is resident, in KiB.
pub fn rss_anon_kib(pid: u32) -> Result<u64, Error> {
    status_kib(pid, "RssAnon:")
}

/// Bytes of a process's address space that are mapped.
pub fn address_space(pid: u32) -> Result<u64, Error> {
    Ok(status_kib(pid, "VmSize:")? << 10)
}

fn status_kib(pid: u32, field: &str) -> Result<u64, Error> {
    let path = proc(pid, "status");
    let text = fs::read_to_string(&path).at("read", &path)?;
    text.lines()
        .find_map(|line| line.strip_prefix(field)?.split_whitespace().next()?.parse().ok())
        .ok_or_else(|| Error::Unexpected(format!("{} has no {field}", path.display())))
}

/// How many mappings a process has.
pub fn mapping_count(pid: u32) -> Result<usize, Error> {
    let path = proc(pid, "maps");
    Ok(fs::read_to_string(&path).at("read", &path)?.lines().count())
}

/// How many descriptors a process has open.
pub fn descriptor_count(pid: u32) -> Result<usize, Error> {
    let path = proc(pid, "fd");
    Ok(fs::read_dir(&path).at("read", &path)?.count())
}

/// The live children of a process.
pub fn children(pid: u32) -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let mut found: Vec<u32> = entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|&child| parent_of_live(child) == Some(pid))
        .collect();
    found.sort_unstable();
    found
}

/// Whether the process runs and is no zombie.
pub fn is_alive(pid: u32) -> bool {
    parent_of_live(pid).is_some()
}

/// Sends a signal to a process.
pub fn signal(pid: u32, signal: Signal) -> Result<(), Error> {
    kill(Pid::from_raw(pid.cast_signed()), signal)
        .map_err(std::io::Error::from)
        .at("send a signal to", &proc(pid, ""))
}

/// Asks `done` every few milliseconds until it holds; says whether it did in time.
pub fn wait_until(limit: Duration, mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + limit;
    loop {
        if done() {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn parent_of_live(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(proc(pid, "stat")).ok()?;
    // The name in brackets may hold anything, so the fields are read from its end.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(parent)
}

fn proc(pid: u32, file: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}/{file}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process() {
        let pid = std::process::id();
        assert!(rss_anon_kib(pid).unwrap() > 0);
        assert!(mapping_count(pid).unwrap() > 3);
        assert!(is_alive(pid));
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        assert!(children(pid).contains(&child.id()));
        signal(child.id(), Signal::SIGKILL).unwrap();
        assert!(wait_until(Duration::from_secs(5), || !is_alive(child.id())), "a zombie counts as gone");
        child.wait().unwrap();
    }
}
