//! Numbers of the operations that this backend treats apart; they differ between ggml versions, their names do not.

use apir_ggml::ops::{OpKind, OpName, OpTable};
use std::ffi::{CStr, c_int, c_void};
use std::mem;
use std::path::Path;

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
    /// Asks the ggml of this process; none when it does not tell.
    pub(super) fn of_process() -> Option<Self> {
        let op_name = find(c"ggml_op_name");
        if op_name.is_null() {
            return None;
        }
        // SAFETY: the function of this name has had this type in every supported version.
        let table = unsafe { OpTable::read(mem::transmute::<*mut c_void, OpName>(op_name)) };
        Some(Self::new(&table.ok()?))
    }

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

/// A symbol of the ggml of this process, also where the program keeps its symbols to itself; null when there is none.
fn find(symbol: &CStr) -> *mut c_void {
    // SAFETY: the arguments are a valid handle and a C string.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, symbol.as_ptr()) };
    if !found.is_null() {
        return found;
    }
    let mut search = Search { symbol, found: std::ptr::null_mut() };
    // SAFETY: `look` gets the search it expects, and the loader calls it only during this call.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut search).cast()) };
    search.found
}

struct Search<'a> {
    symbol: &'a CStr,
    found: *mut c_void,
}

/// Looks for the symbol in one loaded object; not 0 ends the search.
unsafe extern "C" fn look(info: *mut libc::dl_phdr_info, _size: usize, search: *mut c_void) -> c_int {
    // SAFETY: the loader gives a valid info, whose name is a C string or null; `search` is that of `find`.
    let (search, name) = unsafe { (&mut *search.cast::<Search<'_>>(), (*info).dlpi_name) };
    // SAFETY: as above.
    if name.is_null() || !is_base(unsafe { CStr::from_ptr(name) }) {
        return 0;
    }
    // SAFETY: RTLD_NOLOAD runs no code; the handle keeps the library loaded and is kept for good.
    unsafe {
        let library = libc::dlopen(name, libc::RTLD_NOLOAD | libc::RTLD_LAZY);
        if !library.is_null() {
            search.found = libc::dlsym(library, search.symbol.as_ptr());
        }
    }
    c_int::from(!search.found.is_null())
}

fn is_base(name: &CStr) -> bool {
    let file = name.to_str().ok().and_then(|name| Path::new(name).file_name()?.to_str());
    file.is_some_and(|file| file.starts_with("libggml-base"))
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
