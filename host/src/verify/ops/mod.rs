//! The rules of every operation, a module for each family.
//!
//! `n.d` is the result, `n.s(0)` the first source, `n.p(0)` the first parameter word, `n.f(0)` the same as a float. A clause that divides stands
//! behind one that rules out 0.
#![forbid(unsafe_code)]

mod arith;
mod attention;
mod conv;
mod copy;
mod fill;
pub(super) mod glu;
mod image;
mod matmul;
mod norm;
mod pool;
mod recurrent;
mod reduce;
mod resize;
mod rope;
mod rows;
mod sort;
mod train;
pub(super) mod unary;
mod view;

use super::rules::OpRule;

/// Families of operations: a title, and the rules.
pub const FAMILIES: &[(&str, &[OpRule])] = &[
    ("Views", view::RULES),
    ("Copies", copy::RULES),
    ("Arithmetic", arith::RULES),
    ("Maps", unary::RULES),
    ("Masks and fills", fill::RULES),
    ("Gated units", glu::RULES),
    ("Sums and counts", reduce::RULES),
    ("Repeating, joining, padding, resizing", resize::RULES),
    ("Norms and soft max", norm::RULES),
    ("Rotary positions", rope::RULES),
    ("Matrix products", matmul::RULES),
    ("Rows by index", rows::RULES),
    ("Convolution", conv::RULES),
    ("Pooling", pool::RULES),
    ("Windows and relative positions", image::RULES),
    ("Sorting", sort::RULES),
    ("Attention", attention::RULES),
    ("Recurrent", recurrent::RULES),
    ("Losses and optimizer steps", train::RULES),
];

/// The rules of an operation by ggml's name for it.
#[must_use]
pub fn find(name: &str) -> Option<&'static OpRule> {
    FAMILIES.iter().flat_map(|(_, rules)| *rules).find(|rule| rule.name == name)
}
