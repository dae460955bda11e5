//! Changes to graphs: a number on the edge, a dimension with the strides that belong to it, another source, another order.
#![forbid(unsafe_code)]

use crate::graph::Graph;
use crate::ops::OPS;
use apir_ggml::TypeInfo;
use apir_protocol::handle::BufferHandle;
use apir_protocol::tensor::{MAX_DIMS, MAX_SOURCES, PARAM_WORDS, TensorRecord};
use arbitrary::{Arbitrary, Unstructured};
use std::cell::RefCell;

/// Numbers where arithmetic goes over an edge.
const EDGES: [u64; 24] = [
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    31,
    32,
    33,
    63,
    64,
    65,
    255,
    256,
    257,
    4096,
    65_535,
    65_536,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_fffe,
    0xffff_ffff,
    0x1_0000_0000,
];
/// Changes made to one graph, at most.
const MOST: usize = 6;

/// Changes a graph a few times, as the numbers in `u` say; without numbers not at all.
pub fn graph(graph: &mut Graph, u: &mut Unstructured<'_>) {
    for _ in 0..MOST {
        // Each change takes numbers, so that it ends with them.
        if u.is_empty() || u.ratio(1, 4).unwrap_or(true) {
            break;
        }
        change(graph, u);
    }
}

/// Changes words of what buffers hold, which may be indices; without numbers none.
pub fn contents<const N: usize>(contents: &mut [Vec<u8>; N], u: &mut Unstructured<'_>) {
    for _ in 0..MOST {
        if u.is_empty() || u.ratio(1, 2).unwrap_or(true) {
            break;
        }
        let buffer = below(u, N);
        let words = contents[buffer].len() / 4;
        // What there is lies at the front.
        let at = 4 * below(u, words).min(below(u, words)).min(below(u, words));
        let Some(word) = contents[buffer].get_mut(at..at + 4) else { continue };
        let new = number(u, u64::from(word[0])) as u32;
        word.copy_from_slice(&new.to_le_bytes());
    }
}

fn below(u: &mut Unstructured<'_>, count: usize) -> usize {
    u.int_in_range(0..=count.max(1) - 1).unwrap_or_default()
}

/// A number near `old`, near an edge, or any.
fn number(u: &mut Unstructured<'_>, old: u64) -> u64 {
    match below(u, 8) {
        0 => old.wrapping_add(1),
        1 => old.wrapping_sub(1),
        2 => old.wrapping_mul(2),
        3 => old / 2,
        4 => old.wrapping_neg(),
        5 => u64::arbitrary(u).unwrap_or_default(),
        6 => old.wrapping_add(EDGES[below(u, EDGES.len())]),
        _ => EDGES[below(u, EDGES.len())],
    }
}

fn change(graph: &mut Graph, u: &mut Unstructured<'_>) {
    let (nodes, count) = (graph.nodes.len(), graph.tensors.len());
    let any_id = |u: &mut Unstructured<'_>| match count {
        0 => 1,
        _ => graph.tensors[below(u, count)].id,
    };
    match below(u, 16) {
        0 if nodes > 0 => {
            let (a, b) = (below(u, nodes), below(u, nodes));
            graph.nodes.swap(a, b);
        }
        1 if nodes > 0 => {
            graph.nodes.remove(below(u, nodes));
        }
        2 => {
            let id = any_id(u);
            graph.nodes.insert(below(u, nodes + 1), id);
        }
        3 if count > 0 => {
            let (a, b) = (below(u, count), below(u, count));
            graph.tensors.swap(a, b);
        }
        4 if count > 0 => {
            graph.tensors.remove(below(u, count));
        }
        5 if count > 0 => {
            let (from, to) = (below(u, count), below(u, count));
            graph.tensors[to] = TensorRecord { id: graph.tensors[to].id, ..graph.tensors[from] };
        }
        _ if count > 0 => {
            let other = any_id(u);
            tensor(&mut graph.tensors[below(u, count)], other, u);
        }
        _ => {}
    }
}

/// Changes one tensor; `other` is the id of some tensor of the graph.
fn tensor(tensor: &mut TensorRecord, other: u64, u: &mut Unstructured<'_>) {
    match below(u, 16) {
        // Shapes that belong together pass further than strides that fit nothing.
        0..=2 => {
            let dim = below(u, MAX_DIMS);
            tensor.ne[dim] = number(u, tensor.ne[dim].into()) as u32;
            make_dense(tensor);
        }
        3 => {
            let dim = below(u, MAX_DIMS);
            tensor.ne[dim] = number(u, tensor.ne[dim].into()) as u32;
        }
        4 if bool::arbitrary(u).unwrap_or_default() => make_gaps(tensor, u),
        4 => {
            let dim = below(u, MAX_DIMS);
            tensor.nb[dim] = number(u, tensor.nb[dim].into()) as u32;
        }
        5 => {
            let (a, b) = (below(u, MAX_DIMS), below(u, MAX_DIMS));
            tensor.ne.swap(a, b);
            if bool::arbitrary(u).unwrap_or_default() {
                tensor.nb.swap(a, b);
            } else {
                make_dense(tensor);
            }
        }
        6 => {
            tensor.type_ = below(u, 44) as u32;
            make_dense(tensor);
        }
        7 => tensor.op = below(u, OPS.len() + 1) as u32,
        8 | 9 => {
            // Few operations use the words at the end.
            let word = below(u, PARAM_WORDS).min(below(u, PARAM_WORDS));
            tensor.op_params[word] = number(u, tensor.op_params[word] as u32 as u64) as i32;
        }
        10 => tensor.flags = number(u, tensor.flags as u32 as u64) as i32,
        11 => {
            let slot = below(u, MAX_SOURCES).min(below(u, MAX_SOURCES));
            tensor.src[slot] = match below(u, 4) {
                0 => 0,
                1 => tensor.id,
                _ => other,
            };
        }
        12 => {
            let (a, b) = (below(u, 4), below(u, 4));
            tensor.src.swap(a, b);
        }
        13 => tensor.view_src = if bool::arbitrary(u).unwrap_or_default() { 0 } else { other },
        14 => {
            let old = tensor.view_offs;
            tensor.view_offs = number(u, old);
            if bool::arbitrary(u).unwrap_or_default() {
                tensor.data = tensor.data.wrapping_add(tensor.view_offs.wrapping_sub(old));
            }
        }
        _ => match below(u, 4) {
            0 => tensor.buffer = BufferHandle(below(u, 6) as u64),
            1 => tensor.id = number(u, tensor.id),
            2 => tensor.data = number(u, tensor.data),
            _ => tensor.data = tensor.data.wrapping_add(32 * below(u, 64) as u64),
        },
    }
}

/// Gives a tensor the strides that ggml gives a new one.
fn make_dense(tensor: &mut TensorRecord) {
    let dense = TypeInfo::get(tensor.type_).and_then(|info| info.dense_strides(tensor.ne.map(i64::from)));
    if let Some(nb) = dense {
        tensor.nb = nb.map(|stride| stride as u32);
    }
}

/// Puts gaps of whole blocks between rows, planes or cubes, with the higher strides that belong to it or without.
fn make_gaps(tensor: &mut TensorRecord, u: &mut Unstructured<'_>) {
    let Some(info) = TypeInfo::get(tensor.type_) else { return };
    let (first, gap) = (1 + below(u, MAX_DIMS - 1), info.size.wrapping_mul(1 + below(u, 64) as u32));
    tensor.nb[first] = tensor.nb[first].wrapping_add(gap);
    if bool::arbitrary(u).unwrap_or_default() {
        for dim in first + 1..MAX_DIMS {
            tensor.nb[dim] = tensor.nb[dim].max(tensor.nb[dim - 1].wrapping_mul(tensor.ne[dim - 1]));
        }
    }
}

/// What libFuzzer does to bytes: `data` holds `size` bytes and has room for `max_size`; gives the new size.
pub type ToBytes = fn(data: &mut [u8], size: usize, max_size: usize) -> usize;

/// A step of libFuzzer over a graph blob: a change to the graph in it, or what libFuzzer does to bytes.
pub fn blob(data: &mut [u8], (size, max_size): (usize, usize), seed: u32, to_bytes: ToBytes) -> usize {
    thread_local! { static NUMBERS: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) }; }
    let whole = Graph::from_blob(&data[..size]).filter(|_| !seed.is_multiple_of(4));
    let Some(mut found) = whole else {
        return to_bytes(data, size, max_size);
    };
    NUMBERS.with_borrow_mut(|numbers| {
        spread(seed, numbers);
        graph(&mut found, &mut Unstructured::new(numbers));
    });
    let bytes = found.to_blob();
    if bytes.len() > max_size {
        return size;
    }
    data[..bytes.len()].copy_from_slice(&bytes);
    bytes.len()
}

/// 256 bytes made of a seed.
pub fn spread(seed: u32, numbers: &mut Vec<u8>) {
    let mut state = u64::from(seed) << 1 | 1;
    numbers.clear();
    while numbers.len() < 256 {
        // A step of xorshift64*.
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        numbers.extend(state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::Case;

    #[test]
    fn without_numbers_nothing_changes() {
        let case = Case::arbitrary(&mut Unstructured::new(&[7; 100]));
        let mut changed = case.graph.clone();
        graph(&mut changed, &mut Unstructured::new(&[]));
        assert_eq!(changed, case.graph);
    }

    #[test]
    fn seeds_give_different_changes() {
        let case = Case::arbitrary(&mut Unstructured::new(&[7; 100]));
        let mut numbers = Vec::new();
        let changed = (0..200u32).filter(|seed| {
            let mut other = case.graph.clone();
            spread(*seed, &mut numbers);
            graph(&mut other, &mut Unstructured::new(&numbers));
            other != case.graph
        });
        assert!(changed.count() > 120);
    }
}
