//! A guest whose second thread changes what the host uses: the graph that the guest has sent, and buffers in shared memory.
//!
//! Whatever the host sees of it, it computes or refuses, and touches nothing but the guest's buffers.
#![forbid(unsafe_code)]

use crate::compute::Bench;
use crate::generate::types::{I32, I64};
use crate::generate::{Case, SIZES};
use crate::guest::Blob;
use crate::input::{Input, change_list};
use crate::mutate;
use crate::threads::{PerCount, Threads};
use arbitrary::{Arbitrary, Unstructured};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// The most changes of a race, and the most times that its graph is computed.
const MAX_WRITES: usize = 16;
const MAX_ROUNDS: u8 = 8;

/// What two threads of a guest do at once.
#[derive(Debug, Clone, PartialEq, Eq, Arbitrary, Serialize, Deserialize)]
pub struct Race {
    /// Numbers for the graph that is sent.
    pub recipe: Vec<u8>,
    /// Numbers for changes that make another graph of it.
    pub changes: Vec<u8>,
    /// Whether all buffers are in shared memory, and not the last alone.
    pub shared: bool,
    /// How often the graph is computed, less one.
    pub rounds: u8,
    /// What the second thread writes and takes back, over and over.
    pub writes: Vec<Write>,
}

/// A write of the second thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Arbitrary, Serialize, Deserialize)]
pub enum Write {
    /// All of the other graph, in place of the one that is sent.
    Graph,
    /// One of the words in which the graphs differ.
    GraphWord(u16),
    /// An element of a tensor of integers.
    Index {
        /// Which of these tensors.
        tensor: u8,
        /// Which element.
        element: u16,
        /// What is written.
        value: Value,
    },
    /// A word of a buffer.
    Word {
        /// Which buffer.
        buffer: u8,
        /// Which word.
        word: u16,
        /// What is written.
        value: Value,
    },
}

/// A number that an index must not be, of those that lead near and far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Arbitrary, Serialize, Deserialize)]
pub enum Value {
    /// Minus one, and less.
    Below(u8),
    /// Two to this power, modulo 31.
    Power(u8),
    /// Any.
    Any(i32),
}

impl Value {
    fn number(self) -> i32 {
        match self {
            Self::Below(less) => -1 - i32::from(less),
            Self::Power(power) => 1 << (power % 31),
            Self::Any(number) => number,
        }
    }
}

/// Bytes of shared memory, as an honest guest leaves them and as the second thread makes them.
#[derive(Debug)]
struct Change {
    blob: Arc<Blob>,
    offset: usize,
    honest: Vec<u8>,
    hostile: Vec<u8>,
}

impl Input for Race {
    fn change(&mut self, u: &mut Unstructured<'_>) {
        let fresh = |u: &mut Unstructured<'_>, most: usize| {
            let len = u.int_in_range(0..=most).unwrap_or_default();
            u.bytes(len.min(u.len())).map(<[u8]>::to_vec).unwrap_or_default()
        };
        match u.int_in_range(0..=9u8).unwrap_or_default() {
            0 => self.recipe = fresh(u, 96),
            1 => self.changes = fresh(u, 48),
            2 => self.shared = !self.shared,
            3 => self.rounds = self.rounds.wrapping_add(1),
            4 => {
                // Another number in the recipe: a graph that is like it.
                let at = u.int_in_range(0..=self.recipe.len().max(1) - 1).unwrap_or_default();
                if let (Some(byte), Ok(new)) = (self.recipe.get_mut(at), u.arbitrary()) {
                    *byte = new;
                }
            }
            _ => change_list(&mut self.writes, u, |write, u| {
                if let Ok(other) = Write::arbitrary(u) {
                    *write = other;
                }
            }),
        }
        self.writes.truncate(MAX_WRITES);
    }
}

impl Race {
    /// Runs it. Afterwards the guest and its neighbour are as before.
    ///
    /// # Panics
    /// When one is not.
    pub fn run(&self, bench: &mut Bench) {
        let case = Case::arbitrary(&mut Unstructured::new(&self.recipe));
        let mut other = case.graph.clone();
        mutate::graph(&mut other, &mut Unstructured::new(&self.changes));
        bench.fill(&case.contents);
        let (sent, other) = (bench.blob_of(&case.graph), bench.blob_of(&other));
        let (res_id, data) = bench.guest().blob(&sent);
        let changes: Vec<_> = self
            .writes
            .iter()
            .take(MAX_WRITES)
            .filter_map(|write| change(*write, &case, bench, (&data, &sent, &other)))
            .collect();
        let (begun, ended) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            let writer = scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    for change in &changes {
                        change.blob.write(change.offset, &change.hostile);
                        begun.store(true, Ordering::Relaxed);
                        change.blob.write(change.offset, &change.honest);
                    }
                    begun.store(true, Ordering::Relaxed);
                }
            });
            while !begun.load(Ordering::Relaxed) {
                thread::yield_now();
            }
            for _ in 0..=self.rounds % MAX_ROUNDS {
                let computed = bench.guest().compute_blob(res_id, sent.len());
                assert!(computed.is_err() || computed.is_ok_and(|status| (-2..=1).contains(&status)));
            }
            ended.store(true, Ordering::Relaxed);
            // The end of a scope does not wait for the thread's own memory, which a look for leaks would find.
            drop(writer.join());
        });
        bench.guest().drop_blob(res_id);
        // What was raced with has left nothing behind: the graph itself is honest.
        bench.fill(&case.contents);
        assert_eq!(bench.compute(&case.graph), Ok(0), "an honest graph after a race");
        bench.check();
    }
}

/// What a write does; none where there is nothing to write to.
fn change(
    write: Write,
    case: &Case,
    bench: &Bench,
    (data, sent, other): (&Arc<Blob>, &[u8], &[u8]),
) -> Option<Change> {
    let memory = |buffer: usize, offset: usize, hostile: &[u8]| {
        let honest = case.contents.get(buffer)?.get(offset..offset + hostile.len())?.to_vec();
        Some(Change { blob: bench.shared(buffer)?.clone(), offset, honest, hostile: hostile.to_vec() })
    };
    match write {
        Write::Graph => {
            let len = sent.len().min(other.len());
            let (honest, hostile) = (sent[..len].to_vec(), other[..len].to_vec());
            Some(Change { blob: data.clone(), offset: 0, honest, hostile })
        }
        Write::GraphWord(at) => {
            let words = sent.chunks(4).zip(other.chunks(4)).enumerate();
            let differing: Vec<_> = words.filter(|(_, (honest, hostile))| honest != hostile).collect();
            let (word, (honest, hostile)) = pick(&differing, at.into())?;
            let (honest, hostile) = (honest.to_vec(), hostile.to_vec());
            Some(Change { blob: data.clone(), offset: 4 * word, honest, hostile })
        }
        Write::Index { tensor, element, value } => {
            let all = case.graph.tensors.iter();
            let integers: Vec<_> = all.filter(|tensor| matches!(tensor.type_, I32 | I64)).collect();
            let found = pick(&integers, tensor.into())?;
            let size = if found.type_ == I64 { 8 } else { 4 };
            let elements = found.ne.iter().map(|ne| *ne as usize).product::<usize>();
            let offset = found.data as usize + size * (usize::from(element) % elements.max(1));
            let hostile = i64::from(value.number()).to_le_bytes();
            memory((found.buffer.0 as usize).checked_sub(1)?, offset, &hostile[..size])
        }
        Write::Word { buffer, word, value } => {
            let buffer = usize::from(buffer) % SIZES.len();
            let offset = 4 * (usize::from(word) % (SIZES[buffer] / 4));
            memory(buffer, offset, &value.number().to_le_bytes())
        }
    }
}

fn pick<T: Copy>(list: &[T], at: usize) -> Option<T> {
    list.get(at % list.len().max(1)).copied()
}

/// Runs an input in one of this process's benches.
pub fn run(input: &[u8]) {
    thread_local! { static BENCHES: RefCell<[PerCount<Bench>; 2]> = RefCell::default(); }
    let Some(race) = Race::of(input) else { return };
    BENCHES.with_borrow_mut(|benches| {
        let start = |threads| Bench::start_with(threads, [race.shared, race.shared, true]);
        race.run(benches[usize::from(race.shared)].get(Threads::of(input), start));
    });
}
