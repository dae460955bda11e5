//! Random graphs that ggml's own constructors could have made, with contents for their leafs.
#![forbid(unsafe_code)]

mod makers;

use crate::graph::{FLAG_COMPUTE, Graph};
use crate::ops::op;
use apir_ggml::{TypeInfo, extent};
use apir_protocol::handle::BufferHandle;
use apir_protocol::tensor::TensorRecord;
use arbitrary::Unstructured;

use makers::MAKERS;

/// Bytes of the buffers that graphs lie in, by token from 1 on: two of the host's own, then one that the guest shares.
pub const SIZES: [usize; 3] = [1 << 16, 1 << 16, 1 << 14];
/// Where tensors start: at least the alignment of every backend that is run here.
const ALIGN: usize = 64;
/// The most operations of a graph.
const MAX_OPS: usize = 6;

/// ggml's element types by name, as far as graphs are made of them.
pub mod types {
    #![allow(missing_docs)]
    pub const F32: u32 = 0;
    pub const F16: u32 = 1;
    pub const Q4_0: u32 = 2;
    pub const Q4_1: u32 = 3;
    pub const Q5_0: u32 = 6;
    pub const Q8_0: u32 = 8;
    pub const Q8_1: u32 = 9;
    pub const Q4_K: u32 = 12;
    pub const Q6_K: u32 = 14;
    pub const Q8_K: u32 = 15;
    pub const I32: u32 = 26;
    pub const I64: u32 = 27;
    pub const BF16: u32 = 30;
}

/// A graph and what its buffers hold before it runs.
#[derive(Debug, Clone)]
pub struct Case {
    /// The graph; its buffers are the places of [`SIZES`], counted from 1.
    pub graph: Graph,
    /// The whole contents of each buffer.
    pub contents: [Vec<u8>; SIZES.len()],
}

impl Case {
    /// Makes a graph from whatever numbers `u` gives; of none at all it is still a graph.
    #[must_use]
    pub fn arbitrary(u: &mut Unstructured<'_>) -> Self {
        let mut generator = Generator::new(u);
        // There is always room for the first.
        let beside = generator.leaf(types::F32, [32, 1, 1, 1], Fill::Numbers).unwrap_or_default();
        let count = 1 + generator.below(MAX_OPS);
        for _ in 0..count {
            let at = generator.below(MAKERS.len());
            // Out of room: what there is, is a graph.
            if MAKERS[at].1(&mut generator).is_none() || !generator.add_threaded(beside) {
                break;
            }
        }
        if generator.case.graph.nodes.is_empty() {
            let _ = makers::square(&mut generator);
        }
        generator.case
    }
}

/// What fills a new leaf.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Fill {
    /// Numbers between -2 and 2, or blocks of small scale.
    Numbers,
    /// Indices from 0 to below this.
    Below(usize),
    /// Indices from 0 to below this, which is no multiple of 31, in each row different ones.
    Different(usize),
}

/// Puts a graph together, one operation after the other.
pub(crate) struct Generator<'u, 'a> {
    u: &'u mut Unstructured<'a>,
    pub(crate) case: Case,
    used: [usize; SIZES.len()],
    noise: u64,
}

type Made = Option<u64>;

impl<'u, 'a> Generator<'u, 'a> {
    fn new(u: &'u mut Unstructured<'a>) -> Self {
        let noise = u.arbitrary::<u16>().unwrap_or_default().into();
        let case = Case { graph: Graph::default(), contents: SIZES.map(|size| vec![0; size]) };
        Self { u, case, used: [0; SIZES.len()], noise }
    }

    /// After an operation one that ggml gives all threads, so that these enter the kernel of the other too. Not always, since operations
    /// side by side may be computed as one. False when there is no room for it.
    fn add_threaded(&mut self, beside: u64) -> bool {
        self.below(4) == 0 || self.node("ADD", types::F32, [32, 1, 1, 1], &[beside, beside], &[]).is_some()
    }

    /// A number from 0 to below `count`, which is not 0.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        self.u.int_in_range(0..=count.max(1) - 1).unwrap_or_default()
    }

    pub(crate) fn flip(&mut self) -> bool {
        self.u.arbitrary().unwrap_or_default()
    }

    pub(crate) fn one_of<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// A float of a harmless size, as a parameter's bits.
    pub(crate) fn float(&mut self) -> i32 {
        let value = self.below(65) as f32 / 16.0 - 2.0;
        value.to_bits() as i32
    }

    /// Dimensions whose product stays small.
    pub(crate) fn shape(&mut self) -> [u32; 4] {
        let rows = self.one_of(&[1, 4, 7, 8, 16, 32, 33, 64]);
        let mut ne = [rows, 1, 1, 1];
        for (dim, most) in [(1, 7), (2, 3), (3, 2)] {
            if self.flip() {
                break;
            }
            ne[dim] = 1 + self.below(most) as u32;
        }
        ne
    }

    /// Room for `bytes` in some buffer: its token and the offset.
    fn place(&mut self, bytes: usize) -> Option<(u64, usize)> {
        let first = self.below(SIZES.len());
        for at in (0..SIZES.len()).map(|step| (first + step) % SIZES.len()) {
            let offset = self.used[at].next_multiple_of(ALIGN);
            if offset + bytes <= SIZES[at] {
                self.used[at] = offset + bytes;
                return Some((at as u64 + 1, offset));
            }
        }
        None
    }

    fn add(&mut self, type_: u32, ne: [u32; 4]) -> Option<&mut TensorRecord> {
        let info = TypeInfo::get(type_)?;
        let nb = info.dense_strides(ne.map(i64::from))?;
        let bytes = extent(type_, ne.map(i64::from), nb).ok()?;
        let (buffer, data) = self.place(bytes as usize)?;
        let id = self.case.graph.tensors.len() as u64 + 1;
        self.case.graph.tensors.push(TensorRecord {
            id,
            type_,
            ne,
            nb: nb.map(|stride| stride as u32),
            buffer: BufferHandle(buffer),
            data: data as u64,
            ..TensorRecord::default()
        });
        self.case.graph.tensors.last_mut()
    }

    /// A new leaf.
    pub(crate) fn leaf(&mut self, type_: u32, ne: [u32; 4], fill: Fill) -> Made {
        let record = *self.add(type_, ne)?;
        let bytes = extent(type_, ne.map(i64::from), record.nb.map(u64::from)).ok()? as usize;
        let (buffer, at) = (record.buffer.0 as usize - 1, record.data as usize);
        let mut written = Vec::with_capacity(bytes);
        let mut count = 0;
        while written.len() < bytes {
            let noise = self.noise();
            let index = match fill {
                Fill::Numbers => None,
                Fill::Below(limit) => Some(noise as usize % limit.max(1)),
                // Multiplied by a number without common divisors, places stay different.
                Fill::Different(limit) => Some((count % ne[0] as usize * 31) % limit.max(1)),
            };
            count += 1;
            match (type_, index) {
                (types::I32, index) => {
                    written.extend((index.unwrap_or(noise as usize % 8) as i32).to_le_bytes())
                }
                (types::I64, index) => {
                    written.extend((index.unwrap_or(noise as usize % 8) as i64).to_le_bytes())
                }
                (types::F32, _) => written.extend(((noise % 1025) as f32 / 256.0 - 2.0).to_le_bytes()),
                // Below 2 in half precision, and small scales of blocks.
                _ => written.push(noise as u8 & 0x3f),
            }
        }
        written.truncate(bytes);
        self.case.contents[buffer][at..at + bytes].copy_from_slice(&written);
        Some(record.id)
    }

    fn noise(&mut self) -> u64 {
        // A step of splitmix64.
        self.noise = self.noise.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.noise;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A tensor of this type and shape: one that there is, or a new leaf.
    pub(crate) fn input(&mut self, type_: u32, ne: [u32; 4]) -> Made {
        let fitting: Vec<u64> =
            self.tensors(|tensor| tensor.type_ == type_ && tensor.ne == ne && is_dense(tensor));
        match fitting.is_empty() || self.flip() {
            true => self.leaf(type_, ne, Fill::Numbers),
            false => Some(self.one_of(&fitting)),
        }
    }

    /// Any dense tensor of floats: one that there is, or a new leaf.
    pub(crate) fn floats(&mut self) -> Option<TensorRecord> {
        self.some(types::F32, true)
    }

    /// Any tensor of floats whose rows are packed, views too.
    pub(crate) fn float_rows(&mut self) -> Option<TensorRecord> {
        self.some(types::F32, false)
    }

    pub(crate) fn some(&mut self, type_: u32, dense: bool) -> Option<TensorRecord> {
        let known: Vec<u64> = self.tensors(|tensor| {
            tensor.type_ == type_ && if dense { is_dense(tensor) } else { has_packed_rows(tensor) }
        });
        let id = if known.is_empty() || self.below(3) == 0 {
            let mut ne = self.shape();
            let block = TypeInfo::get(type_)?.block;
            ne[0] = ne[0].next_multiple_of(block);
            self.leaf(type_, ne, Fill::Numbers)?
        } else {
            self.one_of(&known)
        };
        self.get(id)
    }

    fn tensors(&self, mut wanted: impl FnMut(&TensorRecord) -> bool) -> Vec<u64> {
        let all = self.case.graph.tensors.iter();
        all.filter(|tensor| wanted(tensor)).map(|tensor| tensor.id).collect()
    }

    pub(crate) fn get(&self, id: u64) -> Option<TensorRecord> {
        self.case.graph.find(id).copied()
    }

    /// A node with a result of its own.
    pub(crate) fn node(&mut self, name: &str, type_: u32, ne: [u32; 4], src: &[u64], params: &[i32]) -> Made {
        let record = self.add(type_, ne)?;
        Self::fill_in(record, name, src, params);
        let id = record.id;
        self.case.graph.nodes.push(id);
        Some(id)
    }

    /// A node whose result is a part of a tensor, `offset` bytes into it.
    pub(crate) fn view(
        &mut self,
        name: &str,
        of: u64,
        (ne, nb, offset): ([u32; 4], [u32; 4], u64),
        src: &[u64],
        params: &[i32],
    ) -> Made {
        let of = self.get(of)?;
        let id = self.case.graph.tensors.len() as u64 + 1;
        // Views of views are views of what is viewed.
        let (root, view_offs) = match of.view_src {
            0 => (of.id, offset),
            root => (root, of.view_offs + offset),
        };
        let mut record = TensorRecord {
            id,
            ne,
            nb,
            view_src: root,
            view_offs,
            data: of.data + offset,
            type_: of.type_,
            buffer: of.buffer,
            ..TensorRecord::default()
        };
        Self::fill_in(&mut record, name, src, params);
        self.case.graph.tensors.push(record);
        self.case.graph.nodes.push(id);
        Some(id)
    }

    fn fill_in(record: &mut TensorRecord, name: &str, src: &[u64], params: &[i32]) {
        record.op = op(name);
        record.flags = FLAG_COMPUTE;
        record.src[..src.len()].copy_from_slice(src);
        record.op_params[..params.len()].copy_from_slice(params);
    }
}

pub(crate) fn is_dense(tensor: &TensorRecord) -> bool {
    let dense = TypeInfo::get(tensor.type_).and_then(|info| info.dense_strides(tensor.ne.map(i64::from)));
    dense == Some(tensor.nb.map(u64::from))
}

fn has_packed_rows(tensor: &TensorRecord) -> bool {
    TypeInfo::get(tensor.type_).is_some_and(|info| info.size == tensor.nb[0])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{Table, verify_in};
    use crate::mutate::spread;
    use ggml_virtgpu_backend::verify::BufferInfo;

    const OWN: BufferInfo = BufferInfo { size: SIZES[0] as u64, alignment: 32, host: true, shared: false };
    const TABLE: Table = Table(&[OWN, OWN, BufferInfo { size: SIZES[2] as u64, shared: true, ..OWN }]);

    fn passes(what: &str, case: &Case) {
        let verdict = verify_in(&case.graph.to_blob(), &TABLE);
        verdict.unwrap_or_else(|error| panic!("{what}: {error}: {}", case.graph));
    }

    #[test]
    fn every_operation_alone_passes_the_verifier() {
        let mut numbers = Vec::new();
        for (name, make) in MAKERS {
            let mut made = 0;
            for seed in 0..200 {
                spread(seed, &mut numbers);
                let mut u = Unstructured::new(&numbers);
                let mut generator = Generator::new(&mut u);
                if make(&mut generator).is_some() {
                    passes(name, &generator.case);
                    made += 1;
                }
            }
            assert!(made > 150, "{name} was made {made} times of 200");
        }
    }

    #[test]
    fn graphs_of_any_numbers_pass_the_verifier() {
        let mut numbers = Vec::new();
        for seed in 0..5000 {
            spread(seed, &mut numbers);
            let len = seed as usize % numbers.len();
            passes("a graph", &Case::arbitrary(&mut Unstructured::new(&numbers[..len])));
        }
    }
}
