//! What the numbers in tensors mean, by name: numbers move from release to release.

use std::ffi::{CStr, c_char, c_int};

use crate::layout::Version;
use crate::ops::OpTable;

/// `ggml_unary_op_name`, `ggml_glu_op_name`, `ggml_type_name`: the name of a number.
pub type NameOf = unsafe extern "C" fn(c_int) -> *const c_char;

/// The names of one ggml release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    /// The release.
    pub version: Version,
    /// Operations.
    pub ops: OpTable,
    /// Maps of the operation `UNARY`, its first parameter.
    pub unary: Vec<String>,
    /// Units of the operation `GLU`, its first parameter.
    pub glu: Vec<String>,
    /// Element types. Those that ggml removed have names that say so.
    pub types: Vec<String>,
}

/// The functions of a ggml library that name numbers.
#[derive(Clone, Copy, Debug)]
pub struct NameFunctions {
    /// `ggml_unary_op_name`
    pub unary: NameOf,
    /// `ggml_glu_op_name`
    pub glu: NameOf,
    /// `ggml_type_name`
    pub types: NameOf,
}

/// How many maps every supported release has.
const UNARY: c_int = 22;
/// Units of GLU, and the first release that is known to have one more.
const GLU: c_int = 6;
const ONE_MORE_GLU: Version = Version { major: 0, minor: 25, patch: 1 };
/// Element types, and the first release that is known to have one more.
const TYPES: c_int = 42;
const ONE_MORE_TYPE: Version = Version { major: 0, minor: 16, patch: 0 };

/// The releases from the first to before the second are known to have the same operations, this many.
const SETTLED: (Version, Version) =
    (Version { major: 0, minor: 19, patch: 0 }, Version { major: 0, minor: 28, patch: 0 });
const SETTLED_OPS: u32 = 101;

impl Names {
    /// Asks a library of this version for the names. ggml's functions check nothing, so they are asked for no more numbers than the version is
    /// known to have; a newer one's further numbers are unknown here.
    ///
    /// # Safety
    ///
    /// The functions must be those of a loaded ggml library of this version.
    pub unsafe fn read(version: Version, ops: OpTable, functions: NameFunctions) -> Self {
        let list = |name_of: NameOf, count: c_int| {
            let name = |number| {
                // SAFETY: the caller says that the function is ggml's, whose list has this number; the names are C strings that stay.
                unsafe {
                    let name = name_of(number);
                    if name.is_null() { c"" } else { CStr::from_ptr(name) }
                }
            };
            (0..count).map(|number| name(number).to_string_lossy().into_owned()).collect()
        };
        Self {
            ops,
            unary: list(functions.unary, UNARY),
            glu: list(functions.glu, GLU + c_int::from(version >= ONE_MORE_GLU)),
            types: list(functions.types, TYPES + c_int::from(version >= ONE_MORE_TYPE)),
            version,
        }
    }

    /// Whether this is one of a row of releases whose operations have the same numbers, from 0.19 on.
    pub fn is_settled(&self) -> bool {
        (SETTLED.0..SETTLED.1).contains(&self.version) && self.ops.count() == SETTLED_OPS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn number_as_name(number: c_int) -> *const c_char {
        let names = [c"a", c"b", c"c"];
        names.get(number as usize).map_or(std::ptr::null(), |name| name.as_ptr())
    }

    fn names(minor: u32, ops: usize) -> Names {
        let version = Version { major: 0, minor, patch: 1 };
        let functions = NameFunctions { unary: number_as_name, glu: number_as_name, types: number_as_name };
        let table = OpTable::from_names(std::iter::repeat_n("ADD", ops));
        // SAFETY: the function bears any number.
        unsafe { Names::read(version, table, functions) }
    }

    #[test]
    fn no_more_is_asked_for_than_a_release_has() {
        let lengths = |minor| {
            let names = names(minor, 101);
            (names.unary.len(), names.glu.len(), names.types.len())
        };
        assert_eq!(lengths(13), (22, 6, 42));
        assert_eq!(lengths(16), (22, 6, 43));
        assert_eq!(lengths(25), (22, 7, 43));
        assert_eq!(lengths(99), (22, 7, 43));
        assert_eq!(names(13, 101).unary[..4], ["a", "b", "c", ""]);
    }

    #[test]
    fn settled_are_known_releases_with_the_known_operations() {
        for (minor, ops, settled) in [
            (13, 96, false),
            (18, 101, false),
            (19, 101, true),
            (27, 101, true),
            (27, 102, false),
            (28, 101, false),
        ] {
            assert_eq!(names(minor, ops).is_settled(), settled, "0.{minor} with {ops}");
        }
    }
}
