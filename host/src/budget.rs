//! What the contexts of one process share: mappings, threads and memory.
//!
//! A process has a limit for each, and meets it without a word to who asked: a library ends the process, or another part of it gets nothing. Every context
//! takes what it needs from a budget of the process and is refused before the process is.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use thiserror::Error;

/// Mappings of memory that blobs and buffers keep.
pub static MAPPINGS: Budget = Budget::new();
/// Threads that compute beside those that call.
pub static HELPERS: Budget = Budget::new();
/// Bytes of work memory, of graphs that are kept, and of copies of indices.
pub static WORK: Budget = Budget::new();
/// Bytes of buffers in host memory.
pub static BUFFERS: Budget = Budget::new();

/// What is taken of one thing in this process.
#[derive(Debug)]
pub struct Budget {
    used: AtomicU64,
}

impl Budget {
    /// A budget of which nothing is taken.
    #[must_use]
    pub const fn new() -> Self {
        Self { used: AtomicU64::new(0) }
    }
}

impl Default for Budget {
    fn default() -> Self {
        Self::new()
    }
}

/// Who gets how much.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// First come, first served.
    Open,
    /// Nobody has more than is left to all others, so that a newcomer finds something.
    Fair,
}

/// One holder's part of a budget.
#[derive(Debug, Clone)]
pub struct Account {
    what: &'static str,
    budget: &'static Budget,
    limit: u64,
    sharing: Sharing,
    held: Arc<AtomicU64>,
}

/// More than a holder may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("{what}: too many for this process ({value}, limit {limit})")]
pub struct Exceeded {
    what: &'static str,
    value: u64,
    limit: u64,
}

impl Exceeded {
    /// What there is not enough of.
    #[must_use]
    pub fn what(&self) -> &'static str {
        self.what
    }
}

impl Account {
    /// A holder that has taken nothing, of a budget of `limit`; `what` is the name of the thing in refusals.
    #[must_use]
    pub fn new(what: &'static str, budget: &'static Budget, limit: u64, sharing: Sharing) -> Self {
        Self { what, budget, limit, sharing, held: Arc::default() }
    }

    /// Takes `amount` more.
    ///
    /// # Errors
    /// [`Exceeded`]; nothing is taken then.
    pub fn take(&self, amount: u64) -> Result<Taken, Exceeded> {
        let held = self.held();
        let value = held.saturating_add(amount);
        let mut limit = 0;
        let taken = self.budget.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |used| {
            limit = self.allowed(used, held);
            (value <= limit).then(|| used.saturating_add(amount))
        });
        if taken.is_err() {
            return Err(Exceeded { what: self.what, value, limit });
        }
        self.held.fetch_add(amount, Ordering::Relaxed);
        Ok(Taken { budget: self.budget, held: self.held.clone(), amount })
    }

    /// What it has taken.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }

    /// What it may take now beside what it has.
    #[must_use]
    pub fn left(&self) -> u64 {
        let held = self.held();
        self.allowed(self.budget.used.load(Ordering::Relaxed), held).saturating_sub(held)
    }

    fn allowed(&self, used: u64, held: u64) -> u64 {
        let free_of_others = self.limit.saturating_sub(used.saturating_sub(held));
        match self.sharing {
            Sharing::Open => free_of_others,
            Sharing::Fair => free_of_others / 2,
        }
    }
}

/// A part of a budget, given back when dropped.
#[derive(Debug)]
pub struct Taken {
    budget: &'static Budget,
    held: Arc<AtomicU64>,
    amount: u64,
}

impl Drop for Taken {
    fn drop(&mut self) {
        self.held.fetch_sub(self.amount, Ordering::Relaxed);
        self.budget.used.fetch_sub(self.amount, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_has_more_than_is_left() {
        static BUDGET: Budget = Budget::new();
        let account = || Account::new("things", &BUDGET, 64, Sharing::Fair);
        let holders: Vec<_> = std::iter::repeat_with(account).take(7).collect();
        let mut all = Vec::new();
        for (holder, most) in holders.iter().zip([32, 16, 8, 4, 2, 1, 0]) {
            let taken: Vec<_> = std::iter::from_fn(|| holder.take(1).ok()).take(100).collect();
            assert_eq!((taken.len() as u64, holder.held(), holder.left()), (most, most, 0));
            all.push(taken);
        }
        let error = holders[0].take(1).unwrap_err().to_string();
        assert_eq!(error, "things: too many for this process (33, limit 16)");
        all.clear();
        assert_eq!(account().left(), 32, "all is given back");
    }

    #[test]
    fn whole_amounts_are_taken_or_none() {
        static BUDGET: Budget = Budget::new();
        let [one, other] = [(); 2].map(|()| Account::new("bytes", &BUDGET, 100, Sharing::Open));
        let taken = one.take(70).unwrap();
        assert!(other.take(31).is_err() && other.take(u64::MAX).is_err());
        assert_eq!((one.left(), other.left(), other.held()), (30, 30, 0));
        drop(taken);
        assert!(other.take(100).is_ok());
    }
}
