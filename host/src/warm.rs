//! Graphs that a driver compiles shaders for before any guest comes.
//!
//! Drivers such as Mesa's compile a kernel when it is first used, and keep it in a cache on disk. A sandboxed worker may only read that cache, so a process
//! without a guest fills it: [`run`] computes a layer of a transformer for each type of weights, size of heads and number of tokens, over
//! memory that is all zeros. A kernel that none of them uses is compiled by each worker that needs it.
#![forbid(unsafe_code)]

use apir_ggml::abi::{FLAG_COMPUTE, MAX_DIMS, MAX_SRC};
use apir_ggml::library::{Backend, Buffer, Device};
use apir_ggml::{GgmlLibrary, OpTable};
use apir_ggml::{Graph, GraphBuilder, Status, TensorSpec, TypeInfo};
use std::fmt;

/// Cells of the key and value cache: what llama.cpp takes at least.
const CELLS: i64 = 256;
/// Heads of queries, and those of keys and values.
const HEADS: i64 = 4;
const KV_HEADS: i64 = 2;
/// Rows of the vocabulary and of the feed-forward network: more than the tile of any matrix kernel.
const ROWS: i64 = 512;

/// What there is a layer for: every combination.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layers {
    /// Types of weights.
    pub weights: Vec<&'static TypeInfo>,
    /// Sizes of a head, in elements.
    pub heads: Vec<u32>,
    /// Tokens of a batch.
    pub tokens: Vec<u32>,
}

/// Wrong words about layers.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LayersError {
    /// A type that ggml does not have, or that is for no weights.
    #[error("weights: unknown type \"{0}\"")]
    Type(String),
    /// A number that is none, or out of range.
    #[error("{what}: \"{value}\" is not a number from 1 to {most}")]
    Number {
        /// Of what.
        what: &'static str,
        /// The word.
        value: String,
        /// The limit.
        most: u32,
    },
}

/// What came of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    /// Layers computed.
    pub computed: usize,
    /// Layers with an operation that the device does not support.
    pub unsupported: usize,
    /// Layers whose computation failed.
    pub failed: usize,
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { computed, unsupported, failed } = self;
        write!(f, "{computed} layers computed, {unsupported} not supported, {failed} failed")
    }
}

impl Layers {
    /// Types that published models use most.
    pub const WEIGHTS: &str =
        "f16,q4_K,q6_K,q8_0,q4_0,q5_K,bf16,f32,q4_1,q5_0,q5_1,q2_K,q3_K,iq4_nl,iq4_xs,mxfp4";
    /// Sizes of heads of most models.
    pub const HEADS: &str = "64,128";
    /// One token, a few at once, and batches that take small, middle and large tiles.
    pub const TOKENS: &str = "1,2,4,8,32,64,512";

    /// Reads lists with commas between.
    ///
    /// # Errors
    /// [`LayersError`] for the first word that is wrong.
    pub fn parse(weights: &str, heads: &str, tokens: &str) -> Result<Self, LayersError> {
        let words = |list: &'static str, text: &str, most: u32| {
            let number = |word: &str| match word.trim().parse() {
                Ok(number) if (1..=most).contains(&number) => Ok(number),
                _ => Err(LayersError::Number { what: list, value: word.to_owned(), most }),
            };
            text.split(',').map(number).collect::<Result<Vec<u32>, _>>()
        };
        let type_ =
            |word: &str| TypeInfo::by_name(word.trim()).ok_or_else(|| LayersError::Type(word.to_owned()));
        Ok(Self {
            weights: weights.split(',').map(type_).collect::<Result<_, _>>()?,
            heads: words("heads", heads, 512)?,
            tokens: words("tokens", tokens, 4096)?,
        })
    }
}

/// Computes all layers on all devices of a library; `told` gets a line for each.
pub fn run(library: &GgmlLibrary, layers: &Layers, mut told: impl FnMut(&str)) -> Summary {
    let mut summary = Summary::default();
    let registry = library.registry();
    for index in 0..registry.device_count() {
        let opened = registry.device(index).and_then(|device| Ok((device.init_backend()?, device)));
        let (backend, device) = match opened {
            Ok(opened) => opened,
            Err(error) => {
                told(&format!("device {index}: {error}"));
                summary.failed += 1;
                continue;
            }
        };
        // Kept until the end: lavapipe of Mesa 22.3 looks at a buffer that it computed with after that is freed.
        let mut buffers = Vec::new();
        for &weights in &layers.weights {
            for &head in &layers.heads {
                for &tokens in &layers.tokens {
                    for attention in [Attention::Flash, Attention::FlashShort, Attention::Products] {
                        let sketch = layer(library.ops(), weights, head.into(), tokens.into(), attention);
                        let outcome = sketch.ok_or(Outcome::Unsupported).map_or_else(
                            |outcome| outcome,
                            |sketch| sketch.compute(&device, &backend, &mut buffers),
                        );
                        let name = weights.name;
                        told(&format!(
                            "{}: {name}, heads of {head}, {tokens} tokens, {attention}: {outcome}",
                            device.name()
                        ));
                        *match outcome {
                            Outcome::Computed => &mut summary.computed,
                            Outcome::Unsupported => &mut summary.unsupported,
                            Outcome::Failed(_) => &mut summary.failed,
                        } += 1;
                    }
                }
            }
        }
    }
    summary
}

/// How attention is computed: each has kernels of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attention {
    /// In one operation, with sums of 32 bits, as llama.cpp asks for.
    Flash,
    /// In one operation, with sums as short as the device likes, as whisper.cpp leaves it.
    FlashShort,
    /// By products of matrices.
    Products,
}

impl fmt::Display for Attention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Flash => "flash attention",
            Self::FlashShort => "flash attention of low precision",
            Self::Products => "attention",
        })
    }
}

/// What came of a layer.
#[derive(Debug)]
enum Outcome {
    Computed,
    Unsupported,
    Failed(String),
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Computed => f.write_str("computed"),
            Self::Unsupported => f.write_str("not supported"),
            Self::Failed(why) => write!(f, "failed: {why}"),
        }
    }
}

/// A graph before its tensors have a place.
#[derive(Debug)]
struct Sketch<'a> {
    ops: &'a OpTable,
    tensors: Vec<Tensor>,
    /// False once it named an operation that this ggml does not have, or a row that does not fill blocks.
    whole: bool,
}

#[derive(Debug, Clone, Copy)]
struct Tensor {
    type_: &'static TypeInfo,
    ne: [i64; MAX_DIMS],
    nb: [u64; MAX_DIMS],
    op: u32,
    params: [i32; 16],
    src: [Option<usize>; MAX_SRC],
    view: Option<usize>,
}

const F32: &str = "f32";
const F16: &str = "f16";
const I32: &str = "i32";
const I64: &str = "i64";

impl Sketch<'_> {
    fn push(&mut self, type_: &'static TypeInfo, ne: [i64; MAX_DIMS]) -> usize {
        let dense = type_.dense_strides(ne);
        self.whole &= dense.is_some();
        let nb = dense.unwrap_or_default();
        self.tensors.push(Tensor { type_, ne, nb, op: 0, params: [0; 16], src: [None; MAX_SRC], view: None });
        self.tensors.len() - 1
    }

    fn leaf(&mut self, type_: &str, ne: &[i64]) -> usize {
        let found = TypeInfo::by_name(type_).or_else(|| TypeInfo::all().first());
        let mut all = [1; MAX_DIMS];
        all[..ne.len()].copy_from_slice(ne);
        match found {
            Some(type_) => self.push(type_, all),
            None => 0,
        }
    }

    fn node(&mut self, op: &str, type_: &str, ne: &[i64], src: &[usize], params: &[i32]) -> usize {
        let id = self.leaf(type_, ne);
        self.operation(id, op, src, params);
        id
    }

    fn operation(&mut self, id: usize, op: &str, src: &[usize], params: &[i32]) {
        let number = self.ops.number(op);
        self.whole &= number.is_some();
        let tensor = &mut self.tensors[id];
        tensor.op = number.unwrap_or_default();
        tensor.params[..params.len()].copy_from_slice(params);
        for (slot, &source) in tensor.src.iter_mut().zip(src) {
            *slot = Some(source);
        }
    }

    /// Another shape of a dense tensor.
    fn reshape(&mut self, of: usize, ne: &[i64]) -> usize {
        let id = self.leaf(self.tensors[of].type_.name, ne);
        self.operation(id, "RESHAPE", &[of], &[]);
        self.tensors[id].view = Some(of);
        id
    }

    /// Dimensions 1 and 2 exchanged.
    fn swapped(&mut self, of: usize) -> usize {
        let Tensor { type_, ne, nb, .. } = self.tensors[of];
        let id = self.push(type_, [ne[0], ne[2], ne[1], ne[3]]);
        self.operation(id, "PERMUTE", &[of], &[0, 2, 1, 3]);
        let tensor = &mut self.tensors[id];
        tensor.nb = [nb[0], nb[2], nb[1], nb[3]];
        tensor.view = Some(of);
        id
    }

    /// Rows of `of` written into `into`.
    fn set_rows(&mut self, into: usize, of: usize, rows: usize) -> usize {
        let Tensor { type_, ne, .. } = self.tensors[into];
        let id = self.push(type_, ne);
        self.operation(id, "SET_ROWS", &[of, rows, into], &[]);
        self.tensors[id].view = Some(into);
        id
    }

    fn compute(&self, device: &Device, backend: &Backend, buffers: &mut Vec<Buffer>) -> Outcome {
        let failed = |error: &dyn fmt::Display| Outcome::Failed(error.to_string());
        // Where nothing has a place yet, to ask what is supported and how much memory it takes.
        let sketch = match self.graph(None) {
            Ok(sketch) => sketch,
            Err(error) => return failed(&error),
        };
        let buffer_type = match device.buffer_type() {
            Ok(buffer_type) => buffer_type,
            Err(error) => return failed(&error),
        };
        let align = buffer_type.alignment();
        let mut places = Vec::new();
        let mut end = 0usize;
        for (index, tensor) in self.tensors.iter().enumerate() {
            let Some(asked) = sketch.tensor(index) else { return failed(&"a tensor is missing") };
            if !self.is_leaf(index) && tensor.view.is_none() && !device.supports_op(asked) {
                return Outcome::Unsupported;
            }
            match tensor.view {
                Some(of) => places.push(places[of]),
                None => {
                    places.push(end);
                    let size = match buffer_type.alloc_size(asked).map(usize::try_from) {
                        Ok(Ok(size)) => size,
                        Ok(Err(error)) => return failed(&error),
                        Err(error) => return failed(&error),
                    };
                    end = end.saturating_add(size).next_multiple_of(align);
                }
            }
        }
        if !buffers.iter().any(|buffer| buffer.size() >= end) {
            buffers.extend(buffer_type.alloc_buffer(end));
        }
        let Some(buffer) = buffers.iter().find(|buffer| buffer.size() >= end) else {
            return failed(&format!("no memory for {end} bytes"));
        };
        if let Err(error) = buffer.clear(0) {
            return failed(&error);
        }
        let mut graph = match self.graph(Some((buffer, &places))) {
            Ok(graph) => graph,
            Err(error) => return failed(&error),
        };
        let status = backend.graph_compute(&mut graph);
        backend.synchronize();
        match status {
            Status::Success => Outcome::Computed,
            status => failed(&format!("{status:?}")),
        }
    }

    fn is_leaf(&self, index: usize) -> bool {
        self.tensors[index].src[0].is_none()
    }

    fn graph(&self, placed: Option<(&Buffer, &[usize])>) -> Result<Graph, apir_ggml::Error> {
        let mut builder = GraphBuilder::new();
        let mut nodes = Vec::new();
        for (index, tensor) in self.tensors.iter().enumerate() {
            if !self.is_leaf(index) {
                nodes.push(index);
            }
            builder.add_tensor(&TensorSpec {
                type_: tensor.type_.number,
                ne: tensor.ne,
                nb: tensor.nb,
                op: tensor.op,
                op_params: tensor.params,
                flags: if self.is_leaf(index) { 0 } else { FLAG_COMPUTE },
                buffer: placed.map(|(buffer, _)| buffer),
                data: placed.map_or(0, |(buffer, places)| buffer.base() + places[index]),
                src: tensor.src,
                view_src: tensor.view,
                ..TensorSpec::default()
            })?;
        }
        builder.finish(&nodes, 0)
    }
}

/// A layer of a transformer with its embedding and its output; none where this ggml lacks an operation, or rows do not fill blocks.
fn layer<'a>(
    ops: &'a OpTable,
    weights: &'static TypeInfo,
    head: i64,
    tokens: i64,
    attention: Attention,
) -> Option<Sketch<'a>> {
    let mut sketch = Sketch { ops, tensors: Vec::new(), whole: true };
    let s = &mut sketch;
    let (wide, kv) = (head * HEADS, head * KV_HEADS);
    let type_ = weights.name;
    let float = |value: f32| value.to_bits().cast_signed();
    let scale = float(1.0 / (head as f32).sqrt());

    // Everything that is computed from comes first.
    let ids = s.leaf(I32, &[tokens]);
    let positions = s.leaf(I32, &[tokens]);
    let rows = s.leaf(I64, &[tokens]);
    let embedding = s.leaf(type_, &[wide, ROWS]);
    let scales = s.leaf(F32, &[wide]);
    let mask = s.leaf(F16, &[CELLS, ((tokens + 63) / 64) * 64]);
    let [key_cache, value_cache] = [(); 2].map(|()| s.leaf(F16, &[kv, CELLS]));
    let query_weights = s.leaf(type_, &[wide, wide]);
    let [key_weights, value_weights] = [(); 2].map(|()| s.leaf(type_, &[wide, kv]));
    let output_weights = s.leaf(type_, &[wide, wide]);
    let [gate_weights, up_weights] = [(); 2].map(|()| s.leaf(type_, &[wide, ROWS]));
    let down_weights = s.leaf(type_, &[ROWS, wide]);

    let norm = |s: &mut Sketch<'_>, of: usize| {
        let normed = s.node("RMS_NORM", F32, &[wide, tokens], &[of], &[float(1e-5)]);
        s.node("MUL", F32, &[wide, tokens], &[normed, scales], &[])
    };
    let embedded = s.node("GET_ROWS", F32, &[wide, tokens], &[embedding, ids], &[]);
    let normed = norm(s, embedded);
    // Dimensions turned, mode, context length, base and scale of frequencies, and no extension.
    let [none, one] = [float(0.0), float(1.0)];
    let rope = [0, head as i32, 0, 0, 4096, float(10_000.0), one, none, one, float(32.0), one];
    let turned = |s: &mut Sketch<'_>, weights: usize, heads: i64| {
        let product = s.node("MUL_MAT", F32, &[head * heads, tokens], &[weights, normed], &[]);
        let split = s.reshape(product, &[head, heads, tokens]);
        s.node("ROPE", F32, &[head, heads, tokens], &[split, positions], &rope)
    };
    let query = turned(s, query_weights, HEADS);
    let key = turned(s, key_weights, KV_HEADS);
    let value = s.node("MUL_MAT", F32, &[kv, tokens], &[value_weights, normed], &[]);
    let key = s.reshape(key, &[kv, tokens]);
    let keys = s.set_rows(key_cache, key, rows);
    let values = s.set_rows(value_cache, value, rows);
    let split = |s: &mut Sketch<'_>, cache: usize| {
        let split = s.reshape(cache, &[head, KV_HEADS, CELLS]);
        s.swapped(split)
    };
    let (query, keys) = (s.swapped(query), split(s, keys));
    let attended = if attention != Attention::Products {
        let values = split(s, values);
        // Scale, no bias, no cap, and the precision of sums.
        let params = [scale, 0, 0, if attention == Attention::Flash { 10 } else { 0 }];
        s.node("FLASH_ATTN_EXT", F32, &[head, HEADS, tokens], &[query, keys, values, mask], &params)
    } else {
        let products = s.node("MUL_MAT", F32, &[CELLS, tokens, HEADS], &[keys, query], &[10]);
        let shares = s.node("SOFT_MAX", F32, &[CELLS, tokens, HEADS], &[products, mask], &[scale, 0]);
        let values = s.leaf(F16, &[CELLS, head, KV_HEADS]);
        let sums = s.node("MUL_MAT", F32, &[head, tokens, HEADS], &[values, shares], &[]);
        let sums = s.swapped(sums);
        s.node("CONT", F32, &[head, HEADS, tokens], &[sums], &[])
    };
    let attended = s.reshape(attended, &[wide, tokens]);
    let output = s.node("MUL_MAT", F32, &[wide, tokens], &[output_weights, attended], &[]);
    let sum = s.node("ADD", F32, &[wide, tokens], &[output, embedded], &[]);
    let normed = norm(s, sum);
    let gate = s.node("MUL_MAT", F32, &[ROWS, tokens], &[gate_weights, normed], &[]);
    let up = s.node("MUL_MAT", F32, &[ROWS, tokens], &[up_weights, normed], &[]);
    // SwiGLU, in the given order.
    let gated = s.node("GLU", F32, &[ROWS, tokens], &[gate, up], &[2, 0]);
    let down = s.node("MUL_MAT", F32, &[wide, tokens], &[down_weights, gated], &[]);
    let sum = s.node("ADD", F32, &[wide, tokens], &[down, sum], &[]);
    let normed = norm(s, sum);
    s.node("MUL_MAT", F32, &[ROWS, tokens], &[embedding, normed], &[]);
    sketch.whole.then_some(sketch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_wrong_words_named() {
        let layers = Layers::parse(Layers::WEIGHTS, Layers::HEADS, Layers::TOKENS).unwrap();
        assert_eq!((layers.weights.len(), layers.heads, layers.tokens[0]), (16, vec![64, 128], 1));
        let told = |weights, heads| Layers::parse(weights, heads, "1").unwrap_err().to_string();
        assert_eq!(told("q4_9", "64"), "weights: unknown type \"q4_9\"");
        assert_eq!(told("f16", "64,0"), "heads: \"0\" is not a number from 1 to 512");
    }

    #[test]
    fn an_operation_that_a_ggml_lacks_leaves_the_layer_out() {
        let type_ = TypeInfo::by_name("q4_0").unwrap();
        let names = ["NONE", "MUL_MAT", "RESHAPE"];
        assert!(layer(&OpTable::from_names(names), type_, 64, 1, Attention::Flash).is_none());
    }
}
