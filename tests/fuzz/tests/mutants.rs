//! Changed graphs of real programs: each is computed or refused, and the guest and its neighbour live on.
//!
//! `APIR_MUTANTS` says how many are tried.
#![forbid(unsafe_code)]

use apir_fuzz::mutate::spread;
use apir_fuzz::recorded::{Bench, Outcome};
use apir_fuzz::threads::{PerCount, Threads};

/// How many are tried without `APIR_MUTANTS`.
const FEW: u32 = 2000;

#[test]
#[ignore = "needs peers: cargo xtask test runs it"]
fn mutants_of_recorded_graphs_are_computed_or_refused() {
    let wanted = std::env::var("APIR_MUTANTS").map_or(FEW, |count| count.parse().unwrap());
    let (mut benches, mut numbers) = (PerCount::default(), Vec::new());
    let (mut computed, mut refused, mut seed) = (0, 0, 0);
    let graphs = Bench::graphs().len();
    let mut of_graph = vec![0u32; graphs];
    while computed + refused < wanted {
        seed += 1;
        // The graphs take turns.
        let graph = seed as usize % graphs;
        spread(seed, &mut numbers);
        numbers[..2].copy_from_slice(&(graph as u16).to_le_bytes());
        let threads = Threads::of(&numbers);
        if std::env::var_os("APIR_SHOW_MUTANTS").is_some() {
            eprintln!("{seed}, {threads:?}");
        }
        match benches.get(threads, Bench::start).run(&numbers) {
            Some(Outcome::Computed) => computed += 1,
            Some(Outcome::Refused) => refused += 1,
            Some(Outcome::Honest) | None => continue,
        }
        of_graph[graph] += 1;
    }
    let fewest = of_graph.iter().min();
    println!("{computed} computed, {refused} refused, of {graphs} graphs at least {fewest:?} each");
    assert!(computed > wanted / 100 && refused > wanted / 100);
}
