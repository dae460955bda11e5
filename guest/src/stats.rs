//! The counters that `APIR_STATS` asks for: a line of JSON at the end of each backend and of the process.
#![forbid(unsafe_code)]

use crate::session::Session;
use serde::Serialize;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

/// Environment variable with the file that lines are appended to.
pub(crate) const STATS_VARIABLE: &str = "APIR_STATS";

#[derive(Serialize)]
struct Line<'a> {
    device: &'a str,
    transport: &'a str,
    calls: u64,
    bytes: u64,
    graph_computes: u64,
}

/// Appends what the session has done so far, as one write, so that lines of several processes do not mix.
pub(crate) fn append(path: &Path, device: &str, session: &Session) -> io::Result<()> {
    let statistics = session.statistics();
    let mut line = serde_json::to_vec(&Line {
        device,
        transport: session.transport(),
        calls: statistics.calls,
        bytes: statistics.bytes,
        graph_computes: statistics.graph_computes,
    })?;
    line.push(b'\n');
    OpenOptions::new().append(true).create(true).open(path)?.write_all(&line)
}
