//! What CPU kernels do: work memory that is enough for the threads that a node is run with, and blocks.

use super::super::ops::find;
use super::super::rules::{Blocks, DENSE_BLOCKS, NO_BLOCKS, OpRule, Source, need};
use super::super::types::*;
use super::honest::{bits, cases};
use super::{Case, rules_for, t};
use apir_ggml::TypeInfo;
use apir_protocol::tensor::RawTensor;
use std::collections::BTreeSet;

const Q4_K: u32 = 12;
const IQ4_XS: u32 = 23;

/// Honest nodes of every operation, and more of those whose kernels have several ways to use work memory.
pub(crate) fn every_kernel() -> Vec<Case> {
    let mut all = cases();
    let (f, h) = (|ne: &[i64]| t(F32, ne), |ne: &[i64]| t(F16, ne));
    let scale = [bits(0.125)];
    all.extend([
        Case::new("OUT_PROD", f(&[64, 5]), &[h(&[64, 3]), f(&[5, 3])], &[]),
        Case::new("OUT_PROD", f(&[256, 5]), &[t(Q4_K, &[256, 3]), f(&[5, 3])], &[]),
        Case::new("MUL_MAT", f(&[16, 40]), &[t(IQ4_XS, &[512, 16]), f(&[512, 40])], &[]),
        Case::new("MUL_MAT", f(&[16, 40]), &[t(Q4_K, &[512, 16]), t(Q8_K, &[512, 40])], &[]),
        Case::new("MUL_MAT", f(&[16, 9]), &[f(&[32, 16]), h(&[32, 9])], &[]),
        Case::new(
            "MUL_MAT_ID",
            f(&[16, 2, 9]),
            &[t(Q4_K, &[256, 16, 3]), f(&[256, 1, 9]), t(I32, &[2, 9])],
            &[],
        ),
        Case::new("DUP", t(Q8_0, &[64, 4]), &[t(Q8_0, &[64, 4])], &[]),
        Case::new("SOFT_MAX", f(&[64]), &[f(&[64])], &[bits(1.0)]),
        Case::new("SET_ROWS", t(Q8_0, &[64, 9]), &[h(&[64, 3]), t(I64, &[3]), t(Q8_0, &[64, 9])], &[])
            .over(2),
        Case::new("CPY", t(BF16, &[64, 4]), &[h(&[64, 4]), t(BF16, &[64, 4])], &[]).over(1),
        // One query over many keys, and many queries.
        Case::new(
            "FLASH_ATTN_EXT",
            f(&[32, 4]),
            &[f(&[32, 1, 4]), f(&[32, 512, 2]), f(&[32, 512, 2])],
            &scale,
        ),
        Case::new(
            "FLASH_ATTN_EXT",
            f(&[32, 4, 66]),
            &[f(&[32, 66, 4]), f(&[32, 7, 2]), f(&[32, 7, 2])],
            &scale,
        ),
    ]);
    all
}

#[test]
fn a_node_alone_has_what_it_needs_and_bears_what_it_is_planned_for() {
    for threads in 1..=9 {
        let rules = rules_for(true, threads);
        for case in every_kernel() {
            let rule = find(case.op).unwrap();
            let threads = threads as u64;
            case.look(&rules, |node| {
                let tasks = rule.tasks.of(node, threads);
                let bears = rule.work.bears(node, rule.tasks, threads);
                assert!((1..=threads).contains(&tasks) && (tasks..=threads).contains(&bears), "{case:?}");
                let planned = rule.work.planned(node, rule.tasks, threads).unwrap();
                for entered in [tasks, bears] {
                    let needed = rule.work.needed(node, rule.tasks, entered).unwrap();
                    assert!(needed <= planned, "{case:?} with {entered} of {threads} threads");
                }
            })
            .unwrap();
        }
    }
}

#[test]
fn s23_only_rows_made_of_halves_bear_fewer_threads_than_there_are() {
    let rules = rules_for(true, 4);
    let narrow: BTreeSet<_> = every_kernel()
        .into_iter()
        .filter(|case| {
            let rule = find(case.op).unwrap();
            case.look(&rules, |node| rule.work.bears(node, rule.tasks, 4) < 4).unwrap()
        })
        .map(|case| (case.op, case.sources[0].unwrap().type_))
        .collect();
    assert_eq!(narrow.into_iter().collect::<Vec<_>>(), [("SET_ROWS", F16)]);
}

#[test]
fn s24_blocks_are_taken_where_and_as_a_rule_says() {
    let gaps = |type_| {
        let dense = t(type_, &[256, 4, 2]);
        RawTensor { nb: [dense.nb[0], 2 * dense.nb[1], 2 * dense.nb[2], 2 * dense.nb[3]], ..dense }
    };
    static NONE: &[Source] = &[need("a")];
    static COUNTED: &[Source] = &[need("a").blocks(Blocks::Counted)];
    static BY_STRIDES: &[Source] = &[need("a").blocks(Blocks::ByStrides)];
    let check = |sources, source: RawTensor, cpu| {
        let rule = OpRule { sources, ..OpRule::BLANK };
        Case::new("CONT", t(F32, &[4]), &[source], &[])
            .look(&rules_for(cpu, 1), |node| rule.check(node))
            .unwrap()
    };
    for type_ in TypeInfo::all().iter().filter(|info| info.is_block()).map(|info| info.number) {
        for (sources, dense, apart) in [
            (NONE, Err(NO_BLOCKS), Err(NO_BLOCKS)),
            (COUNTED, Ok(()), Err(DENSE_BLOCKS)),
            (BY_STRIDES, Ok(()), Ok(())),
        ] {
            assert_eq!(check(sources, t(type_, &[256, 4, 2]), true), dense, "{type_}");
            assert_eq!(check(sources, gaps(type_), true), apart, "{type_}");
            assert_eq!(check(sources, gaps(type_), false), Ok(()), "{type_} elsewhere than on a CPU");
        }
    }
}
