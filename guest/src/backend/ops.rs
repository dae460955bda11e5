//! Numbers of the operations that this backend treats apart; they differ between ggml versions, their names do not.
#![forbid(unsafe_code)]

use apir_ggml::{OpKind, OpTable};

/// The operations whose results ggml lets a backend pad or give scratch space.
const PADDED: &[&str] = &["FLASH_ATTN_EXT", "MUL_MAT", "MUL_MAT_ID", "CUMSUM", "ARGSORT", "TOP_K"];

/// What an operation is to this backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OpClass {
    /// Moves no data: every device can.
    NoOp,
    /// Runs the program's own code: no other machine can.
    Custom,
    /// The result may need more room than its elements.
    Padded,
    /// Any other.
    Plain,
}

/// The classes by number.
#[derive(Debug, Clone)]
pub(super) struct Ops {
    classes: Vec<OpClass>,
}

impl Ops {
    /// The classes of a ggml's operations.
    pub(super) fn new(table: &OpTable) -> Self {
        let class = |op| match table.kind(op) {
            Some(OpKind::None | OpKind::View) => OpClass::NoOp,
            Some(OpKind::Callback) => OpClass::Custom,
            Some(OpKind::Compute) if table.name(op).is_some_and(|name| PADDED.contains(&name)) => {
                OpClass::Padded
            }
            Some(OpKind::Compute) | None => OpClass::Plain,
        };
        Self { classes: (0..table.count()).map(class).collect() }
    }

    /// The class of an operation's number.
    pub(super) fn class(&self, op: u32) -> OpClass {
        self.classes.get(op as usize).copied().unwrap_or(OpClass::Plain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_follow_the_names() {
        let ops = Ops::new(&OpTable::from_names(["NONE", "ADD", "MUL_MAT", "VIEW", "CUSTOM", "GLU"]));
        let classes: Vec<_> = (0..7).map(|op| ops.class(op)).collect();
        use OpClass::{Custom, NoOp, Padded, Plain};
        assert_eq!(classes, [NoOp, Plain, Padded, NoOp, Custom, Plain, Plain]);
    }
}
