//! Where there is no sandbox yet.
#![forbid(unsafe_code)]

use super::Plan;
use crate::error::Error;

/// No walls.
#[derive(Debug)]
pub(crate) struct Walls;

pub(super) fn enter(_: &Plan<'_>) -> Result<Walls, Error> {
    Ok(Walls)
}

pub(super) fn missing() -> Option<&'static str> {
    Some("there is no sandbox for this system; only the environment is reduced")
}
