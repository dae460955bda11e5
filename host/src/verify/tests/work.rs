//! Work memory: what ggml plans is enough for the threads that a node is run with.

use super::super::ops::find;
use super::super::types::*;
use super::honest::cases;
use super::{Case, rules_for, t};
use std::collections::BTreeSet;

/// An iq type, which CPU kernels multiply with Q8_K.
const IQ4_XS: u32 = 23;

fn all() -> Vec<Case> {
    let mut all = cases();
    let halves = |ne: &[i64]| t(F16, ne);
    all.extend([
        Case::new("OUT_PROD", t(F32, &[64, 5]), &[halves(&[64, 3]), t(F32, &[5, 3])], &[]),
        Case::new("MUL_MAT", t(F32, &[8, 9]), &[t(IQ4_XS, &[512, 8]), t(F32, &[512, 9])], &[]),
        Case::new("SOFT_MAX", t(F32, &[64]), &[t(F32, &[64])], &[1]),
    ]);
    all
}

#[test]
fn a_node_alone_has_what_it_needs_and_bears_what_it_is_planned_for() {
    for threads in 1..=9 {
        let rules = rules_for(true, threads);
        for case in all() {
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
    let narrow: BTreeSet<_> = all()
        .into_iter()
        .filter(|case| {
            let rule = find(case.op).unwrap();
            case.look(&rules, |node| rule.work.bears(node, rule.tasks, 4) < 4).unwrap()
        })
        .map(|case| (case.op, case.sources[0].unwrap().type_))
        .collect();
    assert_eq!(narrow.into_iter().collect::<Vec<_>>(), [("SET_ROWS", F16)]);
}
