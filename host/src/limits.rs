//! How much a context may take, from the renderer's keys and the environment.
#![forbid(unsafe_code)]

use crate::config::parse;
use crate::error::InitializeError;
use crate::verify::indices::IndexCheck;
use apir_protocol::settings::{DEFAULT_LOG_LINES, MAX_LOG_LINES, SIZE_FORM, parse_size};
use std::ffi::OsString;
use std::time::Duration;

/// Limits of one context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of all buffers, and the most that is reported as the device's memory; without one the device's own size is the limit.
    pub device_bytes: Option<u64>,
    /// Bytes of the buffers that lie in shared memory.
    pub mapped_bytes: Option<u64>,
    /// Buffers alive at once.
    pub buffers: u64,
    /// Graphs kept to be computed again without a check.
    pub cached_graphs: u64,
    /// Nodes of a graph, and tensors of a graph.
    pub graph_nodes: u64,
    /// Bytes of a command, without what it points to.
    pub command_bytes: u64,
    /// Refused commands before the context is dropped.
    pub bad_commands: u64,
    /// Time after which a command that computes nothing is taken to hang, and the host no longer to live.
    pub command_time: Duration,
    /// Log lines that all guests of this process together may cause in a second.
    pub log_lines: u64,
    /// Which indices are looked at; without a choice what [`IndexCheck::usual`] says.
    pub index_check: Option<IndexCheck>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            device_bytes: None,
            mapped_bytes: None,
            buffers: 65_536,
            cached_graphs: 4,
            graph_nodes: 1 << 18,
            command_bytes: 64 << 10,
            bad_commands: 1_000_000,
            command_time: Duration::from_secs(60),
            log_lines: DEFAULT_LOG_LINES,
            index_check: None,
        }
    }
}

impl Limits {
    /// Reads `APIR_MAX_DEVICE_BYTES` and its like; a key of the renderer, `apir.max_device_bytes`, comes before its variable.
    ///
    /// # Errors
    /// [`InitializeError::Variable`]
    pub fn read(
        key: impl Fn(&str) -> Option<OsString>,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, InitializeError> {
        let value = |name: &'static str| {
            let rest = name.strip_prefix("APIR_").unwrap_or(name);
            let set = |value: Option<OsString>| value.filter(|value| !value.is_empty());
            set(key(&format!("apir.{}", rest.to_ascii_lowercase()))).or_else(|| set(variable(name)))
        };
        let number = |name: &'static str, least: u64| {
            let form = if least == 0 { "a number" } else { "a number from 1 on" };
            let read = |text: &str| text.parse().ok().filter(|number| *number >= least);
            value(name).map(|value| parse(name, value, form, read)).transpose()
        };
        let size = |name: &'static str, least: u64| {
            let read = |text: &str| parse_size(text).filter(|bytes| *bytes >= least);
            value(name).map(|value| parse(name, value, SIZE_FORM, read)).transpose()
        };
        let index_check = |text: &str| match text {
            "all" => Some(IndexCheck::All),
            "leaf" => Some(IndexCheck::Leaf),
            "off" => Some(IndexCheck::Off),
            _ => None,
        };
        let default = Self::default();
        Ok(Self {
            device_bytes: size("APIR_MAX_DEVICE_BYTES", 1)?,
            mapped_bytes: size("APIR_MAX_MAPPED_BYTES", 0)?,
            buffers: number("APIR_MAX_BUFFERS", 1)?.unwrap_or(default.buffers),
            cached_graphs: number("APIR_MAX_CACHED_GRAPHS", 0)?.unwrap_or(default.cached_graphs),
            graph_nodes: number("APIR_MAX_GRAPH_NODES", 1)?.unwrap_or(default.graph_nodes),
            command_bytes: size("APIR_MAX_COMMAND_BYTES", 1)?.unwrap_or(default.command_bytes),
            bad_commands: number("APIR_MAX_BAD_COMMANDS", 1)?.unwrap_or(default.bad_commands),
            command_time: number("APIR_MAX_COMMAND_MS", 1)?
                .map_or(default.command_time, Duration::from_millis),
            log_lines: number(MAX_LOG_LINES, 0)?.unwrap_or(default.log_lines),
            index_check: value("APIR_INDEX_CHECK")
                .map(|value| parse("APIR_INDEX_CHECK", value, "all, leaf or off", index_check))
                .transpose()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(keys: &[(&str, &str)], variables: &[(&str, &str)]) -> Result<Limits, String> {
        let find = |list: &[(&str, &str)], name: &str| {
            list.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
        };
        Limits::read(|name| find(keys, name), |name| find(variables, name)).map_err(|error| error.to_string())
    }

    #[test]
    fn keys_come_before_variables_and_defaults_last() {
        assert_eq!(read(&[], &[("APIR_MAX_BUFFERS", "")]).unwrap(), Limits::default());
        let variables =
            [("APIR_MAX_DEVICE_BYTES", "1G"), ("APIR_MAX_BUFFERS", "7"), ("APIR_INDEX_CHECK", "leaf")];
        let limits = read(&[("apir.max_buffers", "9")], &variables).unwrap();
        assert_eq!((limits.device_bytes, limits.buffers), (Some(1 << 30), 9));
        assert_eq!(limits.index_check, Some(IndexCheck::Leaf));
        assert_eq!(read(&[("apir.max_cached_graphs", "0")], &[]).unwrap().cached_graphs, 0);
    }

    #[test]
    fn t31_faults_name_the_variable_and_the_fix() {
        for (name, value, words) in [
            (
                "APIR_MAX_DEVICE_BYTES",
                "20GB",
                "APIR_MAX_DEVICE_BYTES=20GB: must be a number of bytes such as 21474836480 or 20G (K, M, G and T are powers of 1024)",
            ),
            ("APIR_MAX_BUFFERS", "0", "APIR_MAX_BUFFERS=0: must be a number from 1 on"),
            ("APIR_MAX_LOG_LINES", "-1", "APIR_MAX_LOG_LINES=-1: must be a number"),
            ("APIR_INDEX_CHECK", "some", "APIR_INDEX_CHECK=some: must be all, leaf or off"),
        ] {
            assert_eq!(read(&[], &[(name, value)]).unwrap_err(), words);
        }
    }
}
