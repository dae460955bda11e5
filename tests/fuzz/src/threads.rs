//! How many threads the host's CPU backend has: what a count hides, another shows.
#![forbid(unsafe_code)]

use std::ffi::CStr;
use std::sync::LazyLock;

/// A number of threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Threads {
    /// None beside the one that computes.
    One,
    /// As many as most machines of tests have processors.
    Two,
    /// More than most nodes here have rows.
    Four,
}

impl Threads {
    /// All counts.
    pub const ALL: [Self; 3] = [Self::One, Self::Two, Self::Four];

    /// The count for an input: that of `APIR_FUZZ_THREADS`, else one that its bytes choose.
    ///
    /// # Panics
    /// When the variable is set to another count.
    #[must_use]
    pub fn of(input: &[u8]) -> Self {
        static FIXED: LazyLock<Option<Threads>> = LazyLock::new(|| {
            let text = std::env::var("APIR_FUZZ_THREADS").ok()?;
            let known = Threads::ALL.into_iter().find(|threads| threads.text().to_str() == Ok(&text));
            Some(known.unwrap_or_else(|| panic!("APIR_FUZZ_THREADS={text}: must be 1, 2 or 4")))
        });
        FIXED.unwrap_or_else(|| Self::by_bytes(input))
    }

    /// The count that the bytes of an input choose.
    #[must_use]
    pub fn by_bytes(input: &[u8]) -> Self {
        let sum = input.iter().fold(input.len(), |sum, byte| sum.wrapping_add(usize::from(*byte)));
        Self::ALL[sum % Self::ALL.len()]
    }

    /// It as the value of a key.
    #[must_use]
    pub fn text(self) -> &'static CStr {
        match self {
            Self::One => c"1",
            Self::Two => c"2",
            Self::Four => c"4",
        }
    }
}

/// Something for each count, made when it is first asked for.
#[derive(Debug)]
pub struct PerCount<T>([Option<T>; 3]);

impl<T> Default for PerCount<T> {
    fn default() -> Self {
        Self([const { None }; 3])
    }
}

impl<T> PerCount<T> {
    /// What there is for this count.
    pub fn get(&mut self, threads: Threads, make: impl FnOnce(Threads) -> T) -> &mut T {
        self.0[threads as usize].get_or_insert_with(|| make(threads))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_choose_every_count() {
        let mut seen: Vec<_> = (0..6u8).map(|byte| Threads::by_bytes(&[byte]).text()).collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, [c"1", c"2", c"4"]);
    }

    #[test]
    fn each_count_has_its_own() {
        let mut all = PerCount::default();
        for threads in Threads::ALL {
            assert_eq!(*all.get(threads, |threads| threads.text()), threads.text());
        }
        assert_eq!(*all.get(Threads::Two, |_| c"9"), c"2", "made once");
    }
}
