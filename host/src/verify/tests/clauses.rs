//! Every clause refuses something: changes to honest nodes are tried until each has spoken.

use super::super::ops::{FAMILIES, find};
use super::super::rules::{ResultPlace, WRITTEN_APART};
use super::super::tensor::CheckedTensor;
use super::super::types::*;
use super::honest::{bits, cases};
use super::{Case, rules};
use apir_ggml::TypeInfo;
use apir_protocol::tensor::RawTensor;
use std::collections::BTreeSet;

const TYPES: [u32; 14] = [F32, F16, BF16, I32, I64, I16, I8, F64, 2, Q8_0, Q8_1, 12, 16, 39];
const WORDS: [i32; 22] = [
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    9,
    11,
    22,
    25,
    50,
    101,
    1001,
    -1,
    -8,
    1 << 21,
    1 << 30,
    i32::MAX,
    i32::MIN,
    0x7fc0_0000,
];

/// Changed nodes tried for each honest one.
const ROUNDS: usize = 8000;

/// A source of numbers that is the same in every run.
pub(crate) struct Numbers(u64);

impl Numbers {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ mixed >> 31) % limit as u64) as usize
    }
}

fn dense(tensor: RawTensor) -> RawTensor {
    let info = TypeInfo::get(tensor.type_).unwrap();
    RawTensor { nb: info.dense_strides(tensor.ne).unwrap_or(tensor.nb), ..tensor }
}

/// Changes one thing about one tensor.
fn change_tensor(tensor: &mut RawTensor, numbers: &mut Numbers) {
    let dim = numbers.below(4);
    match numbers.below(8) {
        0 => *tensor = dense(RawTensor { type_: TYPES[numbers.below(TYPES.len())], ..*tensor }),
        1 => tensor.ne[dim] = [0, 1, 2, 3, 32, 64, 1 << 23][numbers.below(7)],
        2 => tensor.ne[dim] += [1, -1, 2][numbers.below(3)],
        3 => tensor.ne[dim] *= 2,
        4 => {
            match numbers.below(2) {
                0 => tensor.nb[dim] *= 2,
                _ => tensor.nb[dim] /= 2,
            }
            return;
        }
        5 => {
            tensor.nb.swap(0, 1);
            if numbers.below(2) == 0 {
                tensor.ne.swap(0, 1);
                return;
            }
        }
        6 => tensor.ne.swap(dim, numbers.below(4)),
        _ => tensor.flags = 0,
    }
    if numbers.below(3) > 0 {
        *tensor = dense(*tensor);
    }
}

/// Changes one thing about a node.
pub(crate) fn change(case: &mut Case, numbers: &mut Numbers) {
    match numbers.below(10) {
        0..=2 => change_tensor(&mut case.d, numbers),
        3..=5 if !case.sources.is_empty() => {
            let at = numbers.below(case.sources.len());
            if let Some(source) = &mut case.sources[at] {
                change_tensor(source, numbers);
            }
        }
        6 => {
            // All tensors alike, as where one shape rules them all.
            let seed = numbers.0;
            for tensor in std::iter::once(&mut case.d).chain(case.sources.iter_mut().flatten()) {
                change_tensor(tensor, &mut Numbers(seed));
            }
        }
        7 if !case.sources.is_empty() => {
            let at = numbers.below(case.sources.len());
            case.sources[at] = None;
        }
        _ => {
            let word = numbers.below(16);
            case.d.op_params[word] = match numbers.below(4) {
                0 => bits(f32::NAN),
                1 => case.d.op_params[word].wrapping_add(1),
                _ => WORDS[numbers.below(WORDS.len())],
            };
        }
    }
}

#[test]
fn every_clause_refuses_something() {
    let rules = rules();
    let mut spoken = BTreeSet::new();
    for (at, case) in cases().into_iter().enumerate() {
        let mut numbers = Numbers::new(at as u64);
        for round in 0..ROUNDS {
            let mut mutant = case.clone();
            for _ in 0..1 + round % 3 {
                change(&mut mutant, &mut numbers);
            }
            if let Err(words) = mutant.check(&rules) {
                spoken.insert(words);
            }
        }
    }
    let mut silent = Vec::new();
    for rule in FAMILIES.iter().flat_map(|(_, rules)| *rules) {
        for clause in rule.clauses {
            let words = format!("\"\": {} breaks the rule: {}", rule.name, clause.what);
            // What no small change reaches has a test of its own.
            if !clause.ints && !spoken.contains(&words) && !ELSEWHERE.contains(&clause.what) {
                silent.push(format!("{}: {}", rule.name, clause.what));
            }
        }
    }
    assert!(silent.is_empty(), "{} clauses never refuse:\n{}", silent.len(), silent.join("\n"));
}

/// Most elements of a tensor whose bytes are counted one by one.
const COUNTED: i64 = 1 << 12;

/// Whether two elements of a tensor, or blocks, share a byte: found by looking at each.
fn shares_bytes(tensor: &CheckedTensor) -> bool {
    let [ne0, ne1, ne2, ne3] = tensor.ne();
    let counts = [ne0 / i64::from(tensor.info().block), ne1, ne2, ne3].map(|count| count as u64);
    let mut starts = vec![0];
    for (count, stride) in counts.into_iter().zip(tensor.nb()) {
        starts = (0..count).flat_map(|at| starts.iter().map(move |start| start + at * stride)).collect();
    }
    starts.sort_unstable();
    starts.windows(2).any(|pair| pair[1] - pair[0] < u64::from(tensor.info().size))
}

#[test]
fn no_changed_node_that_passes_writes_over_itself() {
    let rules = rules();
    let (mut passed, mut refused) = (0, 0);
    for (at, case) in cases().into_iter().enumerate() {
        let rule = find(case.op).unwrap();
        let mut numbers = Numbers::new(at as u64);
        for round in 0..ROUNDS / 8 {
            let mut mutant = case.clone();
            for _ in 0..1 + round % 3 {
                change(&mut mutant, &mut numbers);
            }
            let outcome = mutant.check(&rules);
            refused += usize::from(outcome.as_ref().is_err_and(|words| words.ends_with(WRITTEN_APART)));
            if rule.result == ResultPlace::View || outcome.is_err() {
                continue;
            }
            let also = rule.writes.iter().filter_map(|slot| mutant.sources[*slot].as_ref());
            for raw in std::iter::once(&mutant.d).chain(also) {
                let tensor = CheckedTensor::from_raw(raw, &rules).unwrap();
                if (1..=COUNTED).contains(&tensor.elements()) {
                    passed += 1;
                    assert!(!shares_bytes(&tensor), "{mutant:?}");
                }
            }
        }
    }
    assert!(passed > 10_000 && refused > 100, "{passed} passed, {refused} refused");
}

/// Clauses about places in buffers, old ggml, or sizes that no small change reaches: the tests of graphs and of faults break these.
const ELSEWHERE: &[&str] = &[
    "the result starts where a does",
    "the result starts offset bytes into a",
    "elsewhere than on a CPU the rows of a are packed",
    "elsewhere than on a CPU the image is dense",
    "circular pads are 0 to a's dimension",
    "a patch and its outputs take at most 16 MiB",
];
