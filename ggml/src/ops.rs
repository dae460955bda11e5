//! ggml's operations by name: their numbers move from release to release.

use std::ffi::{CStr, c_char, c_int};

use crate::error::Error;

/// `ggml_op_name`: the name of an operation.
pub type OpName = unsafe extern "C" fn(c_int) -> *const c_char;

/// The operation that ends ggml's list in every release so far.
const LAST_OP: &str = "GLU";

/// More operations than any release has; the search for the last one ends here.
const MAX_OPS: u32 = 256;

/// What executing an operation does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpKind {
    /// Nothing: a leaf.
    None,
    /// Nothing: another look at the source's data.
    View,
    /// Computes its result.
    Compute,
    /// Calls a function whose address its parameters hold.
    Callback,
}

/// The operations of one ggml release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpTable {
    names: Vec<String>,
}

impl OpTable {
    /// Asks a ggml library for its operations.
    ///
    /// # Errors
    /// [`Error::Operations`] when the list does not end as every known one does.
    ///
    /// # Safety
    /// `op_name` must be `ggml_op_name` of a loaded ggml library.
    pub unsafe fn read(op_name: OpName) -> Result<Self, Error> {
        let mut names = Vec::new();
        for op in 0..MAX_OPS {
            // SAFETY: ggml keeps the names in an array; every number up to the last operation's is inside it.
            let name = unsafe { op_name(op as c_int) };
            if name.is_null() {
                break;
            }
            // SAFETY: the names are C strings that stay.
            names.push(unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned());
            if names.last().is_some_and(|name| name == LAST_OP) {
                return Ok(Self { names });
            }
        }
        Err(Error::Operations { found: names.len() })
    }

    /// A table of these names, numbered from 0.
    pub fn from_names<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        Self { names: names.into_iter().map(str::to_owned).collect() }
    }

    /// How many operations there are.
    pub fn count(&self) -> u32 {
        self.names.len() as u32
    }

    /// The names by number.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// The name of a number.
    pub fn name(&self, op: u32) -> Option<&str> {
        self.names.get(op as usize).map(String::as_str)
    }

    /// The number of a name.
    pub fn number(&self, name: &str) -> Option<u32> {
        self.names.iter().position(|known| known == name).map(|op| op as u32)
    }

    /// What executing a number does, nothing for a number that this release does not have.
    pub fn kind(&self, op: u32) -> Option<OpKind> {
        Some(match self.name(op)? {
            "NONE" => OpKind::None,
            "VIEW" | "RESHAPE" | "PERMUTE" | "TRANSPOSE" => OpKind::View,
            "MAP_CUSTOM1" | "MAP_CUSTOM2" | "MAP_CUSTOM3" | "CUSTOM" => OpKind::Callback,
            _ => OpKind::Compute,
        })
    }

    /// Whether the operation copies its first source to where its second one says: a cast is its own second source.
    pub fn is_copy(&self, op: u32) -> bool {
        self.name(op) == Some("CPY")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn known(op: c_int) -> *const c_char {
        let names = [c"NONE", c"CPY", c"VIEW", c"CUSTOM", c"GLU"];
        names.get(op as usize).map_or(std::ptr::null(), |name| name.as_ptr())
    }

    unsafe extern "C" fn endless(_op: c_int) -> *const c_char {
        c"ADD".as_ptr()
    }

    #[test]
    fn names_are_read_up_to_the_last_operation() {
        // SAFETY: the function answers as ggml's would.
        let table = unsafe { OpTable::read(known) }.unwrap();
        assert_eq!(table, OpTable::from_names(["NONE", "CPY", "VIEW", "CUSTOM", "GLU"]));
        assert_eq!((table.count(), table.number("VIEW"), table.number("ADD")), (5, Some(2), None));
        assert_eq!(table.kind(3), Some(OpKind::Callback));
        assert_eq!(table.kind(5), None);
        assert!(table.is_copy(1) && !table.is_copy(2));
    }

    #[test]
    fn a_list_without_the_known_end_is_refused() {
        // SAFETY: the function bears any number.
        assert!(matches!(unsafe { OpTable::read(endless) }, Err(Error::Operations { found: 256 })));
    }
}
