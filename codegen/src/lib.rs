//! Generates the command tables, codecs and dispatch from protocol/commands.toml.
