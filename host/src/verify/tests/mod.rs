//! The verifier against honest nodes, hostile ones, and everything in between.

pub(crate) mod clauses;
mod docs;
mod faults;
mod graphs;
pub(crate) mod honest;
mod ints;
mod plans;
mod releases;
pub(crate) mod work;

use super::node::{Node, Slot};
use super::rules::RuleBook;
use super::tensor::CheckedTensor;
use apir_ggml::{OpTable, TypeInfo, Version};
use apir_protocol::tensor::RawTensor;

/// The operations of ggml 0.26 by number.
pub(crate) const OPS: [&str; 101] = [
    "NONE",
    "DUP",
    "ADD",
    "ADD_ID",
    "ADD1",
    "ACC",
    "SUB",
    "MUL",
    "DIV",
    "SQR",
    "SQRT",
    "LOG",
    "SIN",
    "COS",
    "SUM",
    "SUM_ROWS",
    "CUMSUM",
    "MEAN",
    "ARGMAX",
    "COUNT_EQUAL",
    "REPEAT",
    "REPEAT_BACK",
    "CONCAT",
    "SILU_BACK",
    "NORM",
    "RMS_NORM",
    "RMS_NORM_BACK",
    "GROUP_NORM",
    "L2_NORM",
    "MUL_MAT",
    "MUL_MAT_ID",
    "OUT_PROD",
    "SCALE",
    "SET",
    "CPY",
    "CONT",
    "RESHAPE",
    "VIEW",
    "PERMUTE",
    "TRANSPOSE",
    "GET_ROWS",
    "GET_ROWS_BACK",
    "SET_ROWS",
    "DIAG",
    "DIAG_MASK_INF",
    "DIAG_MASK_ZERO",
    "SOFT_MAX",
    "SOFT_MAX_BACK",
    "ROPE",
    "ROPE_BACK",
    "CLAMP",
    "CONV_TRANSPOSE_1D",
    "IM2COL",
    "IM2COL_BACK",
    "IM2COL_3D",
    "COL2IM_1D",
    "CONV_2D",
    "CONV_3D",
    "CONV_2D_DW",
    "CONV_TRANSPOSE_2D",
    "POOL_1D",
    "POOL_2D",
    "POOL_2D_BACK",
    "UPSCALE",
    "PAD",
    "PAD_REFLECT_1D",
    "ROLL",
    "ARANGE",
    "TIMESTEP_EMBEDDING",
    "ARGSORT",
    "TOP_K",
    "LEAKY_RELU",
    "TRI",
    "FILL",
    "FLASH_ATTN_EXT",
    "FLASH_ATTN_BACK",
    "SSM_CONV",
    "SSM_SCAN",
    "WIN_PART",
    "WIN_UNPART",
    "GET_REL_POS",
    "ADD_REL_POS",
    "RWKV_WKV6",
    "GATED_LINEAR_ATTN",
    "RWKV_WKV7",
    "SOLVE_TRI",
    "GATED_DELTA_NET",
    "LIGHTNING_INDEXER",
    "DSV4_HC_COMB",
    "DSV4_HC_PRE",
    "DSV4_HC_POST",
    "UNARY",
    "MAP_CUSTOM1",
    "MAP_CUSTOM2",
    "MAP_CUSTOM3",
    "CUSTOM",
    "CROSS_ENTROPY_LOSS",
    "CROSS_ENTROPY_LOSS_BACK",
    "OPT_STEP_ADAMW",
    "OPT_STEP_SGD",
    "GLU",
];

/// The number of an operation.
pub(crate) fn op(name: &str) -> u32 {
    OPS.iter().position(|known| *known == name).unwrap() as u32
}

/// Rules for a CPU of ggml 0.26 with four threads.
pub(crate) fn rules() -> RuleBook {
    rules_for(true, 4)
}

/// Rules for a CPU, or another device, of ggml 0.26.
pub(crate) fn rules_for(cpu: bool, threads: usize) -> RuleBook {
    RuleBook::new(&OpTable::from_names(OPS), Version::new(0, 26, 0), cpu, threads)
}

/// Rules for another release that has the operations of 0.26, on a CPU with four threads or not.
pub(crate) fn rules_of(version: Version, cpu: bool) -> RuleBook {
    RuleBook::new(&OpTable::from_names(OPS), version, cpu, 4)
}

/// A dense tensor.
pub(crate) fn t(type_: u32, ne: &[i64]) -> RawTensor {
    let mut all = [1; 4];
    all[..ne.len()].copy_from_slice(ne);
    let nb = TypeInfo::get(type_).unwrap().dense_strides(all).unwrap();
    RawTensor { type_, ne: all, nb, ..RawTensor::default() }
}

/// A node to be.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) op: &'static str,
    pub(crate) d: RawTensor,
    pub(crate) sources: Vec<Option<RawTensor>>,
    /// The source that the result is a view of.
    pub(crate) over: Option<usize>,
    pub(crate) cast: bool,
    pub(crate) probe: bool,
}

impl Case {
    pub(crate) fn new(op: &'static str, d: RawTensor, sources: &[RawTensor], params: &[i32]) -> Self {
        let mut d = d;
        d.op_params[..params.len()].copy_from_slice(params);
        Self {
            op,
            d,
            sources: sources.iter().copied().map(Some).collect(),
            over: None,
            cast: false,
            probe: false,
        }
    }

    /// As a view of its source `slot`.
    pub(crate) fn over(mut self, slot: usize) -> Self {
        self.over = Some(slot);
        self
    }

    /// With something changed.
    pub(crate) fn with(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut other = self.clone();
        change(&mut other);
        other
    }

    /// What is wrong with it.
    pub(crate) fn check(&self, rules: &RuleBook) -> Result<(), String> {
        self.check_for(rules, op(self.op))
    }

    /// As [`Self::check`], where the operation has this number.
    pub(crate) fn check_for(&self, rules: &RuleBook, op: u32) -> Result<(), String> {
        self.look_as(op, rules, |node| rules.check(node).map_err(|error| error.to_string()))?
    }

    /// As a node for these rules.
    pub(crate) fn look<T>(&self, rules: &RuleBook, look: impl FnOnce(&Node<'_>) -> T) -> Result<T, String> {
        self.look_as(op(self.op), rules, look)
    }

    /// As [`Self::look`], where the operation has this number.
    pub(crate) fn look_as<T>(
        &self,
        op: u32,
        rules: &RuleBook,
        look: impl FnOnce(&Node<'_>) -> T,
    ) -> Result<T, String> {
        let checked =
            |raw: &RawTensor| CheckedTensor::from_raw(raw, rules).map_err(|error| error.to_string());
        let mut d = checked(&RawTensor { op, ..self.d })?;
        rules.complete(&mut d);
        let sources = self
            .sources
            .iter()
            .map(|source| source.as_ref().map(checked).transpose())
            .collect::<Result<Vec<_>, _>>()?;
        let slot = |slot: usize| match sources.get(slot) {
            Some(Some(source)) => Slot::Known(source),
            _ => Slot::Absent,
        };
        let view = self.over.and_then(|slot| sources.get(slot)?.as_ref());
        let (cast, probe) = (self.cast, self.probe);
        let node =
            Node { d: &d, slots: std::array::from_fn(slot), view, cast, probe, target: rules.target() };
        Ok(look(&node))
    }
}

#[test]
fn t27_variants_are_known_by_the_names_that_a_ggml_gives_them() {
    let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let names = apir_ggml::Names {
        version: Version::new(0, 28, 0),
        ops: OpTable::from_names(OPS),
        unary: list(&["INSERTED", "ABS", "GELU"]),
        glu: list(&["REGLU", "INSERTED", "SWIGLU"]),
        types: list(&["f32"]),
    };
    let (usual, shifted) = (rules(), rules().with_variants(&names));
    let found = |rules: &RuleBook, name: &str| [0, 1, 2, 3, -1].map(|param| rules.variant(op(name), param));
    assert_eq!(found(&usual, "UNARY"), [0, 1, 2, 3, -1]);
    assert_eq!(found(&shifted, "UNARY"), [-1, 0, 8, -1, -1]);
    assert_eq!(found(&shifted, "GLU"), [0, -1, 2, -1, -1]);
    assert_eq!(found(&shifted, "ADD"), [-1; 5]);
}
