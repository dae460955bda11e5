//! Work memory of ggml's CPU kernels.
//!
//! ggml plans work memory for each node's own number of tasks, and runs a graph with the largest number of tasks of any of its nodes. Every
//! thread enters every kernel, and most kernels give each thread that enters a share: a kernel that is planned for one task writes
//! behind the work memory when another node of the graph brings more threads. So a rule says both, and
//! [`super::parts`] computes a node apart from nodes that bring more threads than it bears.
#![forbid(unsafe_code)]

use super::node::Node;

/// Bytes that ggml adds to the work memory for each thread, and kernels leave free behind each share: a cache line of most processors.
const LINE: u64 = 64;

/// How many threads ggml plans a node for: all that there are, but no more than `most`.
#[derive(Debug, Clone, Copy)]
pub struct Tasks {
    /// In words.
    pub what: &'static str,
    /// The most.
    pub most: fn(&Node<'_>) -> u64,
}

impl Tasks {
    /// As many as there are threads.
    pub const ALL: Self = Self { what: "all threads", most: |_| u64::MAX };
    /// One.
    pub const ONE: Self = Self { what: "1", most: |_| 1 };
    /// No more than rows of the first source.
    pub const ROWS: Self = Self { what: "up to the rows", most: |n| n.s(0).rows().unsigned_abs() };
    /// No more than heads of the second source.
    pub const HEADS: Self = Self { what: "up to the heads", most: |n| n.s(1).ne()[1].unsigned_abs() };

    /// Tasks of a node where there are so many threads.
    #[must_use]
    pub fn of(&self, node: &Node<'_>, threads: u64) -> u64 {
        (self.most)(node).clamp(1, threads.max(1))
    }
}

/// Which threads have a share of the work memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shares {
    /// All that enter the kernel.
    Entered,
    /// Those that have a part of the work, no more than there are tasks.
    Busy,
}

/// Bytes of a node.
#[derive(Debug, Clone, Copy)]
pub struct Bytes {
    /// In words, empty where there never are any.
    pub what: &'static str,
    /// How many; none when 64 bits do not hold them.
    pub of: fn(&Node<'_>) -> Option<u64>,
}

impl Bytes {
    /// None ever.
    pub const NONE: Self = Self { what: "", of: |_| Some(0) };
}

/// Work memory of a CPU kernel.
#[derive(Debug, Clone, Copy)]
pub struct Work {
    /// What all threads have together.
    pub together: Bytes,
    /// What each has.
    pub share: Bytes,
    /// Who has a share.
    pub shares: Shares,
}

impl Work {
    /// No work memory.
    pub const NONE: Self = Self { together: Bytes::NONE, share: Bytes::NONE, shares: Shares::Entered };

    /// Whether there may be any.
    #[must_use]
    pub const fn is_any(&self) -> bool {
        !self.together.what.is_empty() || !self.share.what.is_empty()
    }

    /// A share for each thread.
    #[must_use]
    pub const fn each(what: &'static str, of: fn(&Node<'_>) -> Option<u64>) -> Self {
        Self { share: Bytes { what, of }, ..Self::NONE }
    }

    /// Memory that all threads have together.
    #[must_use]
    pub const fn together(what: &'static str, of: fn(&Node<'_>) -> Option<u64>) -> Self {
        Self { together: Bytes { what, of }, ..Self::NONE }
    }

    /// Bytes that ggml plans for a node alone, where there are so many threads.
    #[must_use]
    pub fn planned(&self, node: &Node<'_>, tasks: Tasks, threads: u64) -> Option<u64> {
        let shares = (self.share.of)(node)?.checked_mul(tasks.of(node, threads))?;
        match (self.together.of)(node)?.checked_add(shares)? {
            0 => Some(0),
            bytes => bytes.checked_add(LINE.checked_mul(threads)?),
        }
    }

    /// Bytes that the kernel uses when so many threads enter it.
    #[must_use]
    pub fn needed(&self, node: &Node<'_>, tasks: Tasks, entered: u64) -> Option<u64> {
        let holders = match self.shares {
            Shares::Entered => entered,
            Shares::Busy => tasks.of(node, entered),
        };
        let shares = match (self.share.of)(node)? {
            0 => 0,
            bytes => bytes.checked_add(LINE)?.checked_mul(holders)?,
        };
        (self.together.of)(node)?.checked_add(shares)
    }

    /// How many threads may enter the kernel: all, or as many as the node has tasks, for which it is always planned.
    #[must_use]
    pub fn bears(&self, node: &Node<'_>, tasks: Tasks, threads: u64) -> u64 {
        match (self.needed(node, tasks, threads), self.planned(node, tasks, threads)) {
            (Some(needed), Some(planned)) if needed <= planned => threads,
            _ => tasks.of(node, threads),
        }
    }
}
