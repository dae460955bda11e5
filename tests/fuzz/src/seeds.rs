//! The inputs that fuzzing starts from: every row of hostile input that is a part of the project's cases, an honest input of every kind, and random
//! graphs of every operation.
//!
//! The files in the folder `seeds` are these; `APIR_UPDATE_SEEDS=1 cargo test seeds` writes them anew.
#![forbid(unsafe_code)]

mod graphs;
mod sessions;
mod sockets;

use crate::compute::{self, RECIPE};
use crate::generate::Case;
use crate::generate::types::{I32, I64};
use crate::input::Input;
use crate::mutate::spread;
use crate::race::{Race, Value, Write};
use crate::recorded::{ARCHIVES, unpack};
use crate::threads::Threads;
use apir_protocol::command::Command;
use arbitrary::Unstructured;
use std::collections::BTreeMap;

/// An input of a target, by the name of its file.
pub type Seeds = BTreeMap<String, Vec<u8>>;

/// The seeds of each target.
#[must_use]
pub fn all() -> BTreeMap<&'static str, Seeds> {
    BTreeMap::from([
        ("decoder", decoder()),
        ("graph", graphs::hostile()),
        ("compute", compute()),
        ("session", sessions::all()),
        ("socket", sockets::all()),
        ("mutants", mutants()),
        ("race", races()),
        ("differential", recipes()),
    ])
}

/// The commands of sessions, and cut ones: as long as each is, bytes that count up.
fn decoder() -> Seeds {
    let mut seeds = Seeds::new();
    for (at, command) in Command::ALL.iter().enumerate() {
        let bytes =
            |len: usize| [&[at as u8], &(0..len).map(|byte| byte as u8).collect::<Vec<_>>()[..]].concat();
        seeds.insert(format!("{:02}_{}", command.number(), command.name()), bytes(660));
        seeds.insert(format!("s19_{:02}_cut", command.number()), bytes(at * 5 % 23));
    }
    // Nodes outside a graph that have what may be there: a buffer, a view, two sources.
    for command in [Command::DeviceSupportsOp, Command::BufferTypeGetAllocSize] {
        let mut bytes = vec![command.number() as u8];
        bytes.extend(vec![0; if command == Command::DeviceSupportsOp { 0 } else { 8 }]);
        bytes.extend(sessions::inline_bytes());
        seeds.insert(format!("{:02}_inline", command.number()), bytes);
    }
    for (name, text) in [("empty", &b"\0\0\0\0\0\0\0\0"[..]), ("long", b"\xff\xff\xff\xff\xff\xff\xff\xff")] {
        seeds.insert(format!("s19_text_{name}"), [&[Command::DeviceGetName.number() as u8], text].concat());
    }
    seeds
}

fn compute() -> Seeds {
    let mut seeds: Seeds =
        graphs::hostile().into_iter().map(|(name, blob)| (name, compute::Input::blob(&blob))).collect();
    // What threads do to each other takes several: bytes behind a graph say how many.
    for (name, graph) in graphs::beside() {
        for threads in Threads::ALL {
            let mut input = compute::Input::blob(&graph.to_blob());
            input.extend((0..3).find(|byte| Threads::by_bytes(&[&input[..], &[*byte]].concat()) == threads));
            seeds.insert(format!("{name}_{}", threads.text().to_string_lossy()), input);
        }
    }
    for (name, recipe) in recipes() {
        // As many zeros behind it are no change at all.
        let unchanged = vec![0; recipe.len()];
        seeds.insert(format!("recipe_{name}"), [&[RECIPE], &recipe[..], &unchanged].concat());
    }
    seeds
}

/// For each operation that random graphs are made of, the first numbers that make one with it.
fn recipes() -> Seeds {
    const LEN: usize = 96;
    let (mut seeds, mut numbers) = (Seeds::new(), Vec::new());
    for seed in 0..4000 {
        spread(seed, &mut numbers);
        let recipe = &numbers[..LEN];
        let case = Case::arbitrary(&mut Unstructured::new(recipe));
        for op in case.graph.nodes.iter().filter_map(|id| case.graph.find(*id)).map(|tensor| tensor.op) {
            let name = crate::ops::OPS[op as usize].to_lowercase();
            seeds.entry(name).or_insert_with(|| recipe.to_vec());
        }
    }
    seeds.insert("nothing".to_owned(), Vec::new());
    seeds
}

/// For each operation a race over its graph, and for those with indices one over these.
fn races() -> Seeds {
    let (mut seeds, mut numbers) = (Seeds::new(), Vec::new());
    for (at, (name, recipe)) in (0..).zip(recipes()) {
        spread(at, &mut numbers);
        let case = Case::arbitrary(&mut Unstructured::new(&recipe));
        let integers = case.graph.tensors.iter().filter(|tensor| matches!(tensor.type_, I32 | I64)).count();
        let race = |shared: bool, writes: Vec<Write>| {
            let (recipe, changes) = (recipe.clone(), numbers[..32].to_vec());
            Race { recipe, changes, shared, rounds: 3, writes }.store()
        };
        // A third of the operations has a graph that changes.
        let graph = vec![Write::Graph, Write::GraphWord(at as u16), Write::GraphWord(7 * at as u16)];
        if at % 3 == 0 {
            seeds.insert(format!("s30_graph_{name}"), race(at % 2 == 0, graph));
        }
        if integers > 0 {
            let values = [Value::Below(0), Value::Power(30), Value::Power(16), Value::Any(i32::MIN)];
            let index = |(element, value)| {
                (0..integers.min(3) as u8).map(move |tensor| Write::Index { tensor, element, value })
            };
            seeds
                .insert(format!("s30_index_{name}"), race(true, (0..).zip(values).flat_map(index).collect()));
        }
    }
    seeds
}

/// For each recorded graph a part of it as it is, and one with changes.
fn mutants() -> Seeds {
    let (mut seeds, mut numbers, mut first) = (Seeds::new(), Vec::new(), 0u16);
    for (name, archive) in ARCHIVES {
        for (at, graph) in unpack(archive).iter().enumerate() {
            let start = (graph.nodes.len() / 2) as u16;
            let [a, b] = (first + at as u16).to_le_bytes();
            let [c, d] = start.to_le_bytes();
            seeds.insert(format!("{name}_{at}"), vec![a, b, c, d, 16]);
            spread(u32::from(first) + at as u32, &mut numbers);
            seeds.insert(format!("{name}_{at}_changed"), [&[a, b, c, d, 16], &numbers[..48]].concat());
        }
        seeds.insert(format!("{name}_whole"), [&first.to_le_bytes()[..], &[0, 0, u8::MAX]].concat());
        first += unpack(archive).len() as u16;
    }
    seeds
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Graph, verify};
    use std::collections::BTreeSet;
    use std::path::Path;

    fn folder() -> std::path::PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds")
    }

    #[test]
    fn the_files_are_those_of_the_builders() {
        let update = std::env::var_os("APIR_UPDATE_SEEDS").is_some();
        for (target, seeds) in all() {
            let folder = folder().join(target);
            if update {
                let _ = std::fs::remove_dir_all(&folder);
                std::fs::create_dir_all(&folder).unwrap();
                for (name, bytes) in &seeds {
                    std::fs::write(folder.join(name), bytes).unwrap();
                }
            }
            let files: BTreeSet<_> = std::fs::read_dir(&folder)
                .unwrap()
                .map(|file| file.unwrap().file_name().into_string().unwrap())
                .collect();
            let names: BTreeSet<_> = seeds.keys().cloned().collect();
            assert_eq!(files, names, "{target}: APIR_UPDATE_SEEDS=1 writes the seeds anew");
            for (name, bytes) in &seeds {
                let stored = std::fs::read(folder.join(name)).unwrap();
                assert!(stored == *bytes, "{target}/{name}: APIR_UPDATE_SEEDS=1 writes the seeds anew");
            }
        }
    }

    #[test]
    fn every_row_of_hostile_input_is_a_seed() {
        let names: Vec<String> = all().into_values().flat_map(|seeds| seeds.into_keys()).collect();
        for row in (1..=22).filter(|row| *row != 21).chain([23, 24, 30]) {
            let prefix = format!("s{row:02}_");
            assert!(names.iter().any(|name| name.starts_with(&prefix)), "no seed of row {prefix}");
        }
    }

    #[test]
    fn hostile_graphs_are_refused_and_honest_ones_pass() {
        for (name, blob) in graphs::hostile() {
            let verdict = verify(&blob);
            // Only the contents of indices are wrong there, and a change while the host reads.
            let passes = ["honest", "s14", "s15"].iter().any(|kind| name.starts_with(kind));
            assert_eq!(verdict.is_ok(), passes, "{name}: {verdict:?}");
        }
    }

    #[test]
    fn recipes_make_most_operations_of_inference() {
        let recipes = recipes();
        assert!(recipes.len() > 70, "only {:?}", recipes.keys());
    }

    #[test]
    fn stored_values_are_read_as_they_were_written() {
        for (name, bytes) in sessions::all() {
            assert_eq!(crate::session::Session::of(&bytes).unwrap().store(), bytes, "{name}");
        }
        for (name, bytes) in races() {
            assert_eq!(Race::of(&bytes).unwrap().store(), bytes, "{name}");
        }
        for (name, bytes) in sockets::all() {
            assert_eq!(crate::socket::Input::of(&bytes).unwrap().store(), bytes, "{name}");
        }
        for blob in graphs::hostile().values() {
            let Some(graph) = Graph::from_blob(blob) else { continue };
            assert_eq!(graph.to_blob(), blob[..graph.to_blob().len()]);
        }
    }
}
