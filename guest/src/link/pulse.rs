//! Telling a long computation from a dead host: the word that a living host counts up.
#![forbid(unsafe_code)]

use super::{Blob, LinkError};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

/// The longest silence that one look may find: a VM that was paused has not listened meanwhile.
const LONGEST_STEP: Duration = Duration::from_secs(1);

/// A link's host, as far as it gives signs of life.
#[derive(Debug, Default)]
pub struct Pulse {
    watched: OnceLock<Watched>,
}

#[derive(Debug)]
struct Watched {
    // A blob may hold the link that this belongs to.
    word: Weak<Blob>,
    limit: Duration,
}

impl Pulse {
    /// From now on waits end when the first word of `blob` stands still for `limit`, and not before. The first call counts.
    pub fn watch(&self, blob: &Arc<Blob>, limit: Duration) {
        let _ = self.watched.set(Watched { word: Arc::downgrade(blob), limit });
    }

    /// Begins a wait. It ends when the host is silent, or at `deadline` where the host gives no sign of life.
    pub fn wait(&self, deadline: Option<Duration>) -> Patience<'_> {
        let now = Instant::now();
        Patience { pulse: self, deadline, start: now, looked: now, heard: None, silence: Duration::ZERO }
    }
}

/// How long one wait may go on.
#[derive(Debug)]
pub struct Patience<'a> {
    pulse: &'a Pulse,
    deadline: Option<Duration>,
    start: Instant,
    looked: Instant,
    heard: Option<u32>,
    silence: Duration,
}

impl Patience<'_> {
    /// Says whether to wait on; to be asked at least once a second.
    ///
    /// # Errors
    /// [`LinkError::Silent`] or [`LinkError::Timeout`] when the wait is over.
    pub fn check(&mut self) -> Result<(), LinkError> {
        let now = Instant::now();
        let watched = self.pulse.watched.get();
        let Some((watched, blob)) = watched.and_then(|watched| Some((watched, watched.word.upgrade()?)))
        else {
            return match self.deadline {
                Some(limit) if now - self.start >= limit => Err(LinkError::Timeout(limit)),
                _ => Ok(()),
            };
        };
        let word = Some(blob.load_word(0));
        if self.heard == word {
            self.silence += (now - self.looked).min(LONGEST_STEP);
        } else {
            (self.heard, self.silence) = (word, Duration::ZERO);
        }
        self.looked = now;
        if self.silence >= watched.limit { Err(LinkError::Silent(watched.limit)) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::Unref;
    use memmap2::MmapOptions;

    #[derive(Debug)]
    struct Nobody;

    impl Unref for Nobody {
        fn unref(&self, _: u32) {}
    }

    fn blob() -> Arc<Blob> {
        Arc::new(Blob::new(1, MmapOptions::new().len(4096).map_anon().unwrap().into(), Arc::new(Nobody)))
    }

    #[test]
    fn without_a_word_the_deadline_counts() {
        let pulse = Pulse::default();
        pulse.wait(None).check().unwrap();
        let limit = Duration::from_millis(5);
        let mut patience = pulse.wait(Some(limit));
        std::thread::sleep(limit);
        assert!(matches!(patience.check(), Err(LinkError::Timeout(found)) if found == limit));
    }

    #[test]
    fn with_a_word_only_its_silence_counts() {
        let (pulse, blob) = (Pulse::default(), blob());
        let limit = Duration::from_millis(200);
        pulse.watch(&blob, limit);
        let mut patience = pulse.wait(Some(Duration::ZERO));
        let start = Instant::now();
        for beat in 1.. {
            blob.store_word(0, beat);
            patience.check().unwrap();
            if start.elapsed() > 2 * limit {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let silent = Instant::now();
        while patience.check().is_ok() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(silent.elapsed() >= limit);
        assert!(matches!(patience.check(), Err(LinkError::Silent(found)) if found == limit));
    }

    #[test]
    fn a_pause_of_the_guest_is_no_silence() {
        let (pulse, blob) = (Pulse::default(), blob());
        pulse.watch(&blob, 2 * LONGEST_STEP);
        let mut patience = pulse.wait(None);
        patience.check().unwrap();
        patience.looked -= Duration::from_secs(3600);
        patience.check().unwrap();
        patience.looked -= Duration::from_secs(3600);
        assert!(matches!(patience.check(), Err(LinkError::Silent(_))));
    }

    #[test]
    fn a_word_that_is_gone_leaves_the_deadline() {
        let pulse = Pulse::default();
        pulse.watch(&blob(), Duration::ZERO);
        pulse.wait(None).check().unwrap();
    }
}
