//! Where there is no sandbox yet.
#![forbid(unsafe_code)]

use super::Plan;
use super::shaders::Variables;
use crate::error::Error;

/// No walls.
#[derive(Debug)]
pub(crate) struct Walls;

impl Walls {
    /// What the process has to put into its environment for its drivers.
    pub(crate) fn variables(&self) -> &Variables {
        const { &Variables::new() }
    }
}

pub(super) fn enter(_: &Plan<'_>) -> Result<Walls, Error> {
    Ok(Walls)
}

pub(super) fn missing() -> Option<&'static str> {
    Some("there is no sandbox for this system; only the environment is reduced")
}
