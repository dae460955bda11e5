//! Answers of the host, remembered by the content of the question.
#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Answers kept; a model asks some hundred different questions.
const CAPACITY: usize = 4096;

/// Answers of one kind.
#[derive(Debug)]
pub(crate) struct Cache<T> {
    answers: Mutex<HashMap<Vec<u8>, T>>,
}

impl<T: Copy> Cache<T> {
    pub(crate) fn new() -> Self {
        Self { answers: Mutex::new(HashMap::new()) }
    }

    /// The answer for `key`; asks when it is not known. Errors are not remembered.
    pub(crate) fn get_or_ask<E>(&self, key: Vec<u8>, ask: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let lock = || self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(answer) = lock().get(&key) {
            return Ok(*answer);
        }
        // Asked without the lock: other threads find their answers meanwhile.
        let answer = ask()?;
        let mut answers = lock();
        if answers.len() >= CAPACITY {
            answers.clear();
        }
        answers.insert(key, answer);
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    #[test]
    fn an_answer_is_asked_for_once_and_an_error_again() {
        let cache = Cache::new();
        assert_eq!(cache.get_or_ask(vec![1], || Err("no")), Err("no"));
        assert_eq!(cache.get_or_ask::<Infallible>(vec![1], || Ok(5)), Ok(5));
        assert_eq!(cache.get_or_ask(vec![1], || Err("not asked")), Ok(5));
    }

    #[test]
    fn the_number_of_answers_is_bounded() {
        let cache = Cache::new();
        for key in 0..3 * CAPACITY as u32 {
            cache.get_or_ask::<Infallible>(key.to_le_bytes().to_vec(), || Ok(key)).unwrap();
            assert!(cache.answers.lock().unwrap().len() <= CAPACITY);
        }
    }
}
