//! The sign of life that the guest watches: a word of a blob, counted up for as long as the host lives.
//!
//! A process that is stopped or dead counts no more; nor does one whose backend hangs in a command that takes no time. A
//! computation may take as long as it likes.
#![forbid(unsafe_code)]

use crate::memory::SharedWord;
use std::io;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Time from one change of the word to the next.
pub const INTERVAL: Duration = Duration::from_millis(250);

/// What a context does at the moment.
#[derive(Debug, Default)]
pub struct Activity {
    /// When the command began that should be over soon.
    brief_since: Mutex<Option<Instant>>,
}

impl Activity {
    /// A command begins; one that is not `brief` may take as long as it likes.
    pub fn begin(&self, brief: bool) {
        self.set(brief.then(Instant::now));
    }

    /// The command is over.
    pub fn end(&self) {
        self.set(None);
    }

    fn set(&self, since: Option<Instant>) {
        *self.brief_since.lock().unwrap_or_else(PoisonError::into_inner) = since;
    }

    fn is_stuck(&self, patience: Duration) -> bool {
        let since = *self.brief_since.lock().unwrap_or_else(PoisonError::into_inner);
        since.is_some_and(|since| since.elapsed() > patience)
    }
}

/// A thread that counts a word up until this is dropped.
#[derive(Debug)]
pub struct Heart {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Heart {
    /// Starts to count; it rests while a brief command of `activity` takes longer than `patience`.
    ///
    /// # Errors
    /// When the system starts no thread.
    pub fn start(word: SharedWord, activity: Arc<Activity>, patience: Duration) -> io::Result<Self> {
        let (stop, stopped) = channel();
        let beat = move || {
            let mut count = 0u32;
            while stopped.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
                if !activity.is_stuck(patience) {
                    count = count.wrapping_add(1);
                    word.store(count);
                }
            }
        };
        let thread = thread::Builder::new().name("apir-liveness".to_owned()).spawn(beat)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Heart {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            // It ends at once, and a panic in it is told by the word that stands still.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_brief_command_can_be_stuck() {
        let activity = Activity::default();
        assert!(!activity.is_stuck(Duration::ZERO));
        activity.begin(false);
        assert!(!activity.is_stuck(Duration::ZERO));
        activity.begin(true);
        assert!(!activity.is_stuck(Duration::from_secs(3600)));
        thread::sleep(Duration::from_millis(2));
        assert!(activity.is_stuck(Duration::from_millis(1)));
        activity.end();
        assert!(!activity.is_stuck(Duration::ZERO));
    }
}
