//! Where contents that address memory are looked at.

use super::super::indices::{IndexCheck, Plan, Snapshot, Stop};
use super::super::rules::RuleBook;
use super::super::tensor::MAX_ROWS;
use super::super::types::*;
use super::graphs::{DEVICE, LARGE, PRIVATE, SHARED, Sketch};
use super::{rules, rules_for, t};

fn plan(graph: &Sketch, check: IndexCheck) -> Plan {
    plan_for(graph, &rules(), check)
}

fn plan_for(graph: &Sketch, rules: &RuleBook, check: IndexCheck) -> Plan {
    graph.verify_for(rules, check, |verified| {
        let verified = verified.unwrap();
        let plan = verified.plan();
        let stops = plan
            .stops
            .iter()
            .map(|stop| Stop {
                before: stop.before,
                snapshots: stop.snapshots.iter().map(|s| Snapshot { users: s.users.clone(), ..*s }).collect(),
            })
            .collect();
        Plan { stops, apart: plan.apart.clone(), staged: plan.staged.clone() }
    })
}

fn stop(before: usize, snapshots: Vec<Snapshot>) -> Stop {
    Stop { before, snapshots }
}

fn index(source: u32, below: i64, users: &[(u32, usize)]) -> Snapshot {
    Snapshot { source, below: Some(below), rebind: true, users: users.to_vec() }
}

/// Rows of a table of 9 by two leaf indices, by two nodes.
fn rows(buffer: u64) -> Sketch {
    let mut graph = Sketch::default();
    let table = graph.leaf(t(F32, &[4, 9]), buffer, 0);
    let ids = graph.leaf(t(I32, &[3]), buffer, 256);
    graph.node("GET_ROWS", t(F32, &[4, 3]), buffer, 320, &[table, ids]);
    graph.node("GET_ROWS", t(F32, &[4, 3]), buffer, 384, &[table, ids]);
    graph
}

/// Rows of a table of `count` by indices that are sorted in the graph.
fn sorted(buffer: u64, count: i64) -> Sketch {
    let mut graph = Sketch::default();
    let table = graph.leaf(t(F32, &[4, count]), buffer, 0);
    let scores = graph.leaf(t(F32, &[8]), buffer, 1024);
    let order = graph.node("ARGSORT", t(I32, &[8]), buffer, 1088, &[scores]);
    let first = graph.view("VIEW", t(I32, &[3]), order, 0, &[order]);
    graph.node("GET_ROWS", t(F32, &[4, 3]), buffer, 1152, &[table, first]);
    graph
}

#[test]
fn a_leaf_is_looked_at_once_before_the_graph() {
    for buffer in [PRIVATE, SHARED] {
        let expected = vec![stop(0, vec![index(1, 9, &[(2, 1), (3, 1)])])];
        assert_eq!(plan(&rows(buffer), IndexCheck::All).stops, expected);
        assert_eq!(plan(&rows(buffer), IndexCheck::Leaf).stops, expected);
        assert_eq!(plan(&rows(buffer), IndexCheck::Off), Plan::default());
    }
    // A device's memory is out of the guest's reach: the contents are read, and stay where they are.
    let read = Snapshot { rebind: false, ..index(1, 9, &[(2, 1), (3, 1)]) };
    assert_eq!(plan(&rows(DEVICE), IndexCheck::Leaf).stops, vec![stop(0, vec![read])]);
}

#[test]
fn the_smallest_bound_of_all_users_counts() {
    let mut graph = rows(PRIVATE);
    let small = graph.leaf(t(F32, &[4, 5]), PRIVATE, 512);
    graph.node("GET_ROWS", t(F32, &[4, 3]), PRIVATE, 640, &[small, 2]);
    assert_eq!(
        plan(&graph, IndexCheck::All).stops,
        vec![stop(0, vec![index(1, 5, &[(2, 1), (3, 1), (5, 1)])])]
    );
}

#[test]
fn what_a_sort_makes_is_bounded_where_nobody_else_writes() {
    assert_eq!(plan(&sorted(PRIVATE, 8), IndexCheck::All), Plan::default());
    assert_eq!(plan(&sorted(DEVICE, 9), IndexCheck::All), Plan::default());
    // Indices of 8 scores reach beyond 7 rows.
    let stops = plan(&sorted(PRIVATE, 7), IndexCheck::All).stops;
    assert_eq!(stops, vec![stop(2, vec![index(3, 7, &[(4, 1)])])]);
    assert_eq!(plan(&sorted(PRIVATE, 7), IndexCheck::Leaf), Plan::default());
    // The guest may write them after they were made, and the scores while they are sorted.
    let steady = Snapshot { source: 1, below: None, rebind: true, users: vec![(2, 0)] };
    let stops = plan(&sorted(SHARED, 8), IndexCheck::All).stops;
    assert_eq!(stops, vec![stop(0, vec![steady]), stop(2, vec![index(3, 8, &[(4, 1)])])]);
}

#[test]
fn nodes_that_are_not_marked_neither_write_nor_read() {
    let mut graph = sorted(PRIVATE, 8);
    graph.tensors[2].flags = 0;
    // What lies there is whatever lay there before.
    assert_eq!(plan(&graph, IndexCheck::All).stops, vec![stop(0, vec![index(3, 8, &[(4, 1)])])]);
    graph.tensors[4].flags = 0;
    assert_eq!(plan(&graph, IndexCheck::All), Plan::default());
}

#[test]
fn a_node_between_the_sort_and_its_reader_undoes_the_bound() {
    let mut graph = Sketch::default();
    let table = graph.leaf(t(F32, &[4, 9]), PRIVATE, 0);
    let scores = graph.leaf(t(F32, &[8]), PRIVATE, 1024);
    let order = graph.node("ARGSORT", t(I32, &[8]), PRIVATE, 1088, &[scores]);
    // Its result lies over the end of the order.
    graph.node("SQR", t(F32, &[8]), PRIVATE, 1088, &[scores]);
    graph.node("GET_ROWS", t(F32, &[4, 8]), PRIVATE, 1152, &[table, order]);
    assert_eq!(plan(&graph, IndexCheck::All).stops, vec![stop(2, vec![index(2, 9, &[(4, 1)])])]);
}

#[test]
fn a_leaf_that_a_node_writes_is_looked_at_after_it() {
    let mut graph = Sketch::default();
    let table = graph.leaf(t(F32, &[4, 9]), PRIVATE, 0);
    let ids = graph.leaf(t(I32, &[4]), PRIVATE, 256);
    let values = graph.leaf(t(F32, &[4]), PRIVATE, 320);
    graph.node("GET_ROWS", t(F32, &[4, 4]), PRIVATE, 384, &[table, ids]);
    graph.node("SQR", t(F32, &[4]), PRIVATE, 256, &[values]);
    graph.node("GET_ROWS", t(F32, &[4, 4]), PRIVATE, 512, &[table, ids]);
    graph.node("GET_ROWS", t(F32, &[4, 4]), PRIVATE, 640, &[table, ids]);
    let expected = vec![stop(0, vec![index(1, 9, &[(3, 1)])]), stop(2, vec![index(1, 9, &[(5, 1), (6, 1)])])];
    assert_eq!(plan(&graph, IndexCheck::All).stops, expected);
    // Only those that no node writes are looked at.
    assert_eq!(plan(&graph, IndexCheck::Leaf).stops, vec![stop(0, vec![index(1, 9, &[(3, 1)])])]);
}

#[test]
fn floats_cast_to_indices_split_the_graph() {
    let mut graph = Sketch::default();
    let table = graph.leaf(t(F32, &[4, 9]), PRIVATE, 0);
    let values = graph.leaf(t(F32, &[3]), PRIVATE, 256);
    let cast = graph.node("CPY", t(I32, &[3]), PRIVATE, 288, &[values]);
    graph.last().src[1] = cast;
    graph.node("SQR", t(F32, &[3]), PRIVATE, 320, &[values]);
    graph.node("GET_ROWS", t(F32, &[4, 3]), PRIVATE, 384, &[table, cast]);
    graph.node("GET_ROWS", t(F32, &[4, 3]), PRIVATE, 448, &[table, cast]);
    let expected = vec![stop(2, vec![index(2, 9, &[(4, 1), (5, 1)])])];
    assert_eq!(plan(&graph, IndexCheck::All).stops, expected);
}

#[test]
fn copies_of_sorted_indices_are_bounded_too() {
    let mut graph = sorted(PRIVATE, 8);
    let order = graph.node("CONT", t(I32, &[3]), PRIVATE, 1280, &[4]);
    graph.node("GET_ROWS", t(F32, &[4, 3]), PRIVATE, 1344, &[1, order]);
    assert_eq!(plan(&graph, IndexCheck::All), Plan::default());
}

#[test]
fn s14_what_a_copy_beyond_a_c_int_leaves_is_looked_at() {
    let copied = |rows: i64| {
        let (mut graph, shape) = (Sketch::default(), t(I32, &[2, rows]));
        let table = graph.leaf(t(F32, &[4, 9]), LARGE, 0);
        let scores = graph.leaf(t(F32, &[2, rows]), LARGE, 1 << 20);
        let order = graph.node("ARGSORT", shape, LARGE, 1 << 36, &[scores]);
        let copy = graph.node("CONT", shape, LARGE, 1 << 37, &[order]);
        let first = graph.view("VIEW", t(I32, &[3]), copy, 0, &[copy]);
        graph.node("GET_ROWS", t(F32, &[4, 3]), LARGE, 1 << 38, &[table, first]);
        plan(&graph, IndexCheck::All)
    };
    assert_eq!(copied(MAX_ROWS / 2), Plan::default());
    // A CPU kernel copies nothing there, and what the guest left in its place stays: with many threads already of somewhat fewer.
    for rows in [MAX_ROWS / 2 + 1, 1 << 30] {
        assert_eq!(copied(rows).stops, vec![stop(3, vec![index(4, 9, &[(5, 1)])])], "{rows}");
    }
}

#[test]
fn every_operation_with_indices_is_known() {
    let read: Vec<_> = super::super::ops::FAMILIES
        .iter()
        .flat_map(|(_, rules)| *rules)
        .flat_map(|rule| rule.reads.iter().map(|read| (rule.name, read.source())))
        .collect();
    let expected = [
        ("ADD_ID", 2),
        ("MUL_MAT_ID", 2),
        ("GET_ROWS", 1),
        ("GET_ROWS_BACK", 1),
        ("SET_ROWS", 1),
        ("ARGSORT", 0),
        ("TOP_K", 0),
        ("SSM_SCAN", 6),
    ];
    assert_eq!(read, expected);
}

#[test]
fn a_sort_in_the_guests_memory_is_made_elsewhere() {
    for (buffer, check, apart) in [
        (SHARED, IndexCheck::All, vec![1]),
        (SHARED, IndexCheck::Leaf, vec![1]),
        (SHARED, IndexCheck::Off, vec![]),
        (PRIVATE, IndexCheck::All, vec![]),
        (DEVICE, IndexCheck::All, vec![]),
    ] {
        let mut graph = Sketch::default();
        let scores = graph.leaf(t(F32, &[8]), buffer, 0);
        graph.node("ARGSORT", t(I32, &[8]), buffer, 64, &[scores]);
        assert_eq!(plan(&graph, check).apart, apart, "{buffer} {check:?}");
    }
}

#[test]
fn a_copy_of_a_sort_in_the_guests_memory_is_looked_at() {
    let mut graph = Sketch::default();
    let table = graph.leaf(t(F32, &[4, 8]), PRIVATE, 0);
    let scores = graph.leaf(t(F32, &[8]), PRIVATE, 1024);
    let order = graph.node("ARGSORT", t(I32, &[8]), SHARED, 0, &[scores]);
    let copy = graph.node("CONT", t(I32, &[8]), PRIVATE, 1088, &[order]);
    graph.node("GET_ROWS", t(F32, &[4, 8]), PRIVATE, 1152, &[table, copy]);
    assert_eq!(plan(&graph, IndexCheck::All).stops, [stop(2, vec![index(3, 8, &[(4, 1)])])]);
}

/// Rows of halves, or of floats, set in a table of floats, between two sums.
fn set_between_sums(halves: bool) -> Sketch {
    let mut graph = Sketch::default();
    let rows = graph.leaf(t(if halves { F16 } else { F32 }, &[4, 2]), PRIVATE, 0);
    let ids = graph.leaf(t(I64, &[2]), PRIVATE, 64);
    let table = graph.leaf(t(F32, &[4, 9]), PRIVATE, 128);
    graph.node("ADD", t(F32, &[4, 9]), PRIVATE, 512, &[table, table]);
    graph.view("SET_ROWS", t(F32, &[4, 9]), table, 0, &[rows, ids, table]);
    graph.view("SET_ROWS", t(F32, &[4, 9]), table, 0, &[rows, ids, table]);
    graph.node("SQR", t(F32, &[4, 9]), PRIVATE, 1024, &[table]);
    graph.node("ADD", t(F32, &[4, 9]), PRIVATE, 1536, &[table, table]);
    graph
}

#[test]
fn s23_a_node_that_bears_fewer_threads_is_computed_apart_from_those_that_bring_more() {
    let (halves, floats) = (set_between_sums(true), set_between_sums(false));
    let with = |threads| rules_for(true, threads);
    // SQR is planned for one thread, too.
    let apart = || vec![stop(0, vec![index(1, 9, &[(4, 1), (5, 1)])]), stop(1, vec![]), stop(4, vec![])];
    for threads in [2, 4] {
        assert_eq!(plan_for(&halves, &with(threads), IndexCheck::All).stops, apart(), "{threads}");
        let off = plan_for(&halves, &with(threads), IndexCheck::Off).stops;
        assert_eq!(off, vec![stop(1, vec![]), stop(4, vec![])], "{threads}");
        assert_eq!(plan_for(&floats, &with(threads), IndexCheck::Off), Plan::default());
    }
    assert_eq!(plan_for(&halves, &with(1), IndexCheck::Off), Plan::default(), "one thread");
    assert_eq!(plan_for(&halves, &rules_for(false, 4), IndexCheck::Off), Plan::default(), "no CPU");
}

#[test]
fn without_a_choice_only_a_lone_context_on_a_gpu_skips_computed_indices() {
    for (host, alone, check) in [
        (true, true, IndexCheck::All),
        (true, false, IndexCheck::All),
        (false, false, IndexCheck::All),
        (false, true, IndexCheck::Leaf),
    ] {
        assert_eq!(IndexCheck::usual(host, alone), check, "host {host}, alone {alone}");
    }
}
