//! What a session has with a host of this project beyond upstream's commands.
#![forbid(unsafe_code)]

use super::{Session, SessionError};
use apir_protocol::constants::{FEATURE_LIVENESS, FEATURE_NAMES, FEATURE_REASONS};
use apir_protocol::messages::{HelloRequest, LivenessRequest, NamesReply, NamesRequest};
use std::sync::Arc;
use std::time::Duration;

/// What this guest can use.
const FEATURES: u64 = FEATURE_LIVENESS | FEATURE_NAMES | FEATURE_REASONS;
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
            Ok(reply) => {
                self.features = Some(reply.features);
                if self.has(FEATURE_LIVENESS) { self.watch_host() } else { Ok(()) }
            }
            // Upstream's hosts know no such command.
            Err(SessionError::Refused { .. } | SessionError::Transport { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Whether both sides have a feature.
    pub(super) fn has(&self, feature: u64) -> bool {
        self.features.unwrap_or(0) & feature != 0
    }

    /// Whether the host is one of this project.
    pub(crate) fn host_is_ours(&self) -> bool {
        self.features.is_some()
    }

    /// Asks what numbers mean on the host, and says that the guest, whose ggml this is, writes the host's. None for a host that
    /// does not tell.
    ///
    /// # Errors
    /// As [`Session::call`].
    pub(crate) fn ask_names(&self, version: &str) -> Result<Option<NamesReply>, SessionError> {
        if !self.has(FEATURE_NAMES) {
            return Ok(None);
        }
        self.call(&NamesRequest { version: version.to_owned() }).map(Some)
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
        self.link.pulse().watch(&blob, silence(self.deadline, reply.interval_ms));
        self.liveness = Some(blob);
        Ok(())
    }
}

/// The silence after which a host is given up that changes its word once in `interval_ms`. What it says of that does not keep a program waiting: a longer
/// silence than [`SILENCE`] is the environment's to allow.
fn silence(asked: Option<Duration>, interval_ms: u32) -> Duration {
    let beats = Duration::from_millis(interval_ms.into()).saturating_mul(MISSED_BEATS);
    asked.unwrap_or(SILENCE).max(beats.min(SILENCE))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t20_a_host_does_not_choose_for_how_long_it_may_be_silent() {
        let millis =
            |asked: Option<u64>, interval| silence(asked.map(Duration::from_millis), interval).as_millis();
        assert_eq!((millis(None, 100), millis(None, u32::MAX)), (10_000, 10_000));
        assert_eq!((millis(Some(50), 100), millis(Some(50), u32::MAX)), (400, 10_000));
        assert_eq!((millis(Some(60_000), 0), millis(Some(60_000), u32::MAX)), (60_000, 60_000));
    }
}
