//! What a session has with a host of this project beyond upstream's commands.
#![forbid(unsafe_code)]

use super::{Session, SessionError};
use apir_protocol::constants::FEATURE_LIVENESS;
use apir_protocol::messages::{HelloRequest, LivenessRequest};
use std::sync::Arc;
use std::time::Duration;

/// What this guest can use.
const FEATURES: u64 = FEATURE_LIVENESS;
/// The silence after which a host is given up.
const SILENCE: Duration = Duration::from_secs(10);
/// Changes of the word that may be missed before that, however short a silence is asked for.
const MISSED_BEATS: u32 = 4;

impl Session {
    /// Finds out what the host has, and uses it.
    ///
    /// # Errors
    /// The link's failure; a host without any of it is none.
    pub(super) fn extend(&mut self) -> Result<(), SessionError> {
        let hello = self.channel().and_then(|mut channel| {
            let request = HelloRequest { features: FEATURES };
            self.try_call_on(&mut channel, &request)
        });
        match hello {
            Ok(reply) if reply.features & FEATURE_LIVENESS != 0 => self.watch_host(),
            // Upstream's hosts know no such command.
            Ok(_) | Err(SessionError::Refused { .. } | SessionError::Transport { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Has the host count up a word, and ends waits once it stands still.
    fn watch_host(&mut self) -> Result<(), SessionError> {
        let blob = match self.create_blob(size_of::<u32>() as u64) {
            Ok(blob) => Arc::new(blob),
            // Where there is no room for it, there is none for buffers either: those failures say more.
            Err(SessionError::Link(_)) => return Ok(()),
            Err(error) => return Err(error),
        };
        let reply = self.call(&LivenessRequest { res_id: blob.res_id(), offset: 0 })?;
        let beats = Duration::from_millis(reply.interval_ms.into()).saturating_mul(MISSED_BEATS);
        self.link.pulse().watch(&blob, self.deadline.unwrap_or(SILENCE).max(beats));
        self.liveness = Some(blob);
        Ok(())
    }
}
