//! Libraries that were linked against a newer glibc than this machine's, for the names alone.
//!
//! Compiled against glibc 2.38 or newer, `strtol` and its kin become `__isoc23_strtol`, which also reads `0b1`. Where that is all a
//! library wants of 2.38, it is given the older functions and runs on the older glibc.

use std::fs;
use std::path::Path;

use goblin::elf::Elf;
use goblin::elf::section_header::{SHT_DYNSYM, SHT_GNU_VERNEED};

use crate::error::{Error, IoContext};

/// What the newer names begin with.
const PREFIX: &str = "__isoc23_";
/// The version that they came with.
const NEWER: &str = "GLIBC_2.38";
/// The version that the older functions have on x86-64.
const OLDER: &str = "GLIBC_2.2.5";

/// Bytes of a symbol; its name's offset comes first.
const SYMBOL_SIZE: u64 = 24;
/// Bytes of what a library says about each other library, and of each version that it wants of it.
const VERNEED_SIZE: usize = 16;

/// Rewrites the library at `path` when it wants names of glibc 2.38.
pub fn use_older_names(path: &Path) -> Result<(), Error> {
    let mut bytes = fs::read(path).at("read", path)?;
    let refused = |what: &str| Error::Check(format!("{}: {what}", path.display()));
    let changes = changes(&bytes).ok_or_else(|| refused("not an ELF library with versioned symbols"))?;
    for (at, value) in changes {
        let place = bytes.get_mut(at..at + size_of::<u32>()).ok_or_else(|| refused("cut short"))?;
        place.copy_from_slice(&value.to_le_bytes());
    }
    fs::write(path, bytes).at("write", path)
}

/// The words to change: where they are, and their new values. None when the file is not as expected.
fn changes(bytes: &[u8]) -> Option<Vec<(usize, u32)>> {
    let elf = Elf::parse(bytes).ok()?;
    let section = |type_| elf.section_headers.iter().find(|section| section.sh_type == type_);
    let symbols = section(SHT_DYNSYM)?.sh_offset;
    let mut changes = Vec::new();
    for (index, symbol) in elf.dynsyms.iter().enumerate() {
        let name = elf.dynstrtab.get_at(symbol.st_name)?;
        if symbol.is_import() && name.starts_with(PREFIX) {
            let at = symbols + index as u64 * SYMBOL_SIZE;
            changes.push((at as usize, u32::try_from(symbol.st_name + PREFIX.len()).ok()?));
        }
    }
    let mut at = section(SHT_GNU_VERNEED)?.sh_offset as usize;
    for library in elf.verneed.as_ref()?.iter() {
        let older = library.iter().find(|wanted| elf.dynstrtab.get_at(wanted.vna_name) == Some(OLDER));
        let mut version = at + library.vn_aux as usize;
        for wanted in library.iter() {
            if elf.dynstrtab.get_at(wanted.vna_name) == Some(NEWER) {
                // The hash comes first, the name's offset after two more words.
                let older = older.as_ref()?;
                changes.push((version, older.vna_hash));
                changes.push((version + 8, u32::try_from(older.vna_name).ok()?));
            }
            version += if wanted.vna_next == 0 { VERNEED_SIZE } else { wanted.vna_next as usize };
        }
        at += library.vn_next as usize;
    }
    Some(changes)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// A library that wants a name of glibc 2.38, linked against a stand-in for that glibc.
    fn library(folder: &Path) -> std::path::PathBuf {
        let compile = |source: &str, output: &str, more: &[&str]| {
            fs::write(folder.join("source.c"), source).unwrap();
            let mut gcc = Command::new("gcc");
            gcc.current_dir(folder).args(["-shared", "-fPIC", "-nostdlib", "-O0", "source.c", "-o", output]);
            assert!(gcc.args(more).status().unwrap().success());
        };
        let versions =
            format!("{OLDER} {{ global: strtol; local: *; }}; {NEWER} {{ global: {PREFIX}strtol; }};");
        fs::write(folder.join("versions"), versions).unwrap();
        let glibc = format!("long strtol(void) {{ return 0; }} long {PREFIX}strtol(void) {{ return 0; }}");
        let marked = ["-Wl,--version-script=versions", "-Wl,-soname,libc.so.6"];
        compile(&glibc, "libc.so.6", &marked);
        let both = format!(
            "long {PREFIX}strtol(const char *); long strtol(const char *); long read(const char *t) {{ return {PREFIX}strtol(t) + strtol(t); }}"
        );
        compile(&both, "library.so", &["libc.so.6"]);
        folder.join("library.so")
    }

    /// What the loader says when `true` is run with the library.
    fn loaded(library: &Path) -> String {
        let output =
            Command::new("true").env("LD_PRELOAD", library).env("LD_BIND_NOW", "1").output().unwrap();
        assert!(output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    #[test]
    fn a_library_that_wants_newer_names_is_given_the_older_ones() {
        let folder = tempfile::tempdir().unwrap();
        let library = library(folder.path());
        let wants = |name: &str| {
            let bytes = fs::read(&library).unwrap();
            let elf = Elf::parse(&bytes).unwrap();
            let mut versions = elf.verneed.iter().flat_map(|need| need.iter()).flat_map(|lib| {
                lib.iter().filter_map(|wanted| elf.dynstrtab.get_at(wanted.vna_name)).collect::<Vec<_>>()
            });
            versions.any(|version| version == name)
                || elf.dynsyms.iter().any(|symbol| elf.dynstrtab.get_at(symbol.st_name) == Some(name))
        };
        assert!(wants(NEWER) && wants("__isoc23_strtol"));
        use_older_names(&library).unwrap();
        assert!(!wants(NEWER) && !wants("__isoc23_strtol") && wants(OLDER) && wants("strtol"));
        assert_eq!(loaded(&library), "");
        // Once is enough.
        let once = fs::read(&library).unwrap();
        use_older_names(&library).unwrap();
        assert_eq!(fs::read(&library).unwrap(), once);
    }

    #[test]
    fn what_is_no_library_is_refused_by_name() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "text").unwrap();
        let error = use_older_names(file.path()).unwrap_err().to_string();
        assert!(error.contains("not an ELF library"), "{error}");
    }
}
