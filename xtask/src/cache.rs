//! The cache folder: downloads, peers and models, shared by all checkouts of one user.
//!
//! A step is finished when its marker holds the step's key; an interrupted step has no marker and is done again.

use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use sha2::{Digest, Sha256};

use crate::error::{Error, IoContext};
use crate::ui::Ui;

/// The cache folder, `$APIR_CACHE` or `$HOME/.cache/apir`.
#[derive(Debug, Clone)]
pub struct Cache {
    root: PathBuf,
}

/// Folders of unfinished pieces begin so.
const PART: &str = "part-";

/// Holds the cache for one process; given up when dropped.
#[derive(Debug)]
pub struct CacheLock {
    _file: Flock<File>,
}

impl Cache {
    /// Finds and makes the folder.
    pub fn open() -> Result<Self, Error> {
        let root = match std::env::var_os("APIR_CACHE").filter(|value| !value.is_empty()) {
            Some(folder) => std::path::absolute(&folder).at("resolve", Path::new(&folder))?,
            None => {
                let home = std::env::var_os("HOME").ok_or_else(|| Error::Missing {
                    path: PathBuf::from("$HOME"),
                    hint: "set HOME or APIR_CACHE".to_owned(),
                })?;
                PathBuf::from(home).join(".cache/apir")
            }
        };
        Self::at(root)
    }

    /// Makes this folder the cache.
    pub fn at(root: PathBuf) -> Result<Self, Error> {
        fs::create_dir_all(&root).at("create", &root)?;
        Ok(Self { root })
    }

    /// Waits until no other xtask uses the cache.
    pub fn lock(&self, ui: &Ui) -> Result<CacheLock, Error> {
        let path = self.path("lock");
        let open = || {
            File::options().create(true).truncate(false).read(true).write(true).open(&path).at("open", &path)
        };
        let mut file = match Flock::lock(open()?, FlockArg::LockExclusiveNonblock) {
            Ok(file) => file,
            Err((mut file, _)) => {
                let mut owner = String::new();
                file.read_to_string(&mut owner).at("read", &path)?;
                ui.line(&format!(
                    "waiting for another xtask (process {}) that uses {}",
                    owner.trim(),
                    self.root.display()
                ));
                Flock::lock(open()?, FlockArg::LockExclusive)
                    .map_err(|(_, errno)| errno.into())
                    .at("lock", &path)?
            }
        };
        file.rewind().at("write", &path)?;
        file.set_len(0).at("write", &path)?;
        write!(file, "{}", std::process::id()).at("write", &path)?;
        self.sweep()?;
        Ok(CacheLock { _file: file })
    }

    /// Removes what an interrupted xtask has left unfinished; only for who holds the lock.
    fn sweep(&self) -> Result<(), Error> {
        for entry in fs::read_dir(&self.root).at("list", &self.root)?.flatten() {
            if entry.file_name().to_string_lossy().starts_with(PART) {
                fs::remove_dir_all(entry.path()).at("remove", &entry.path())?;
            }
        }
        Ok(())
    }

    /// A path inside the cache.
    pub fn path(&self, inside: impl AsRef<Path>) -> PathBuf {
        self.root.join(inside)
    }

    /// The log file of a step.
    pub fn log(&self, step: &str) -> PathBuf {
        self.root.join("logs").join(format!("{step}.log"))
    }

    /// Runs `work` unless the step's marker already holds `key`.
    pub fn step(&self, name: &str, key: &str, work: impl FnOnce() -> Result<(), Error>) -> Result<(), Error> {
        let marker = self.root.join("done").join(name);
        if fs::read_to_string(&marker).is_ok_and(|found| found == key) {
            return Ok(());
        }
        self.forget(name)?;
        work()?;
        self.write_whole(&marker, key.as_bytes())
    }

    /// Forgets that a step was finished, since what it made is gone.
    pub fn forget(&self, name: &str) -> Result<(), Error> {
        let marker = self.root.join("done").join(name);
        match fs::remove_file(&marker) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error).at("remove", &marker),
            _ => Ok(()),
        }
    }

    /// Writes a file so that a reader sees all of it or nothing.
    fn write_whole(&self, path: &Path, bytes: &[u8]) -> Result<(), Error> {
        let folder = path.parent().unwrap_or(&self.root);
        fs::create_dir_all(folder).at("create", folder)?;
        let mut file = tempfile::NamedTempFile::new_in(folder).at("create a file in", folder)?;
        file.write_all(bytes).at("write", path)?;
        file.persist(path).map_err(|error| error.error).at("write", path)?;
        Ok(())
    }

    /// A fresh folder in the cache, so that a finished piece can be renamed to its place.
    pub fn scratch(&self) -> Result<tempfile::TempDir, Error> {
        tempfile::Builder::new().prefix(PART).tempdir_in(&self.root).at("create a folder in", &self.root)
    }
}

/// Moves a finished file or folder to its place, in the place of what was there.
pub fn put(from: &Path, to: &Path) -> Result<(), Error> {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder).at("create", folder)?;
    }
    if to.is_dir() {
        fs::remove_dir_all(to).at("remove", to)?;
    }
    fs::rename(from, to).at("move into place", to)
}

/// The sha256 of a file, in hex.
pub fn sha256(path: &Path) -> Result<String, Error> {
    let mut file = File::open(path).at("open", path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        let count = file.read(&mut buffer).at("read", path)?;
        if count == 0 {
            break;
        }
        hash.update(&buffer[..count]);
    }
    Ok(hex(&hash.finalize()))
}

/// The sha256 of bytes, in hex.
pub fn sha256_of(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn a_step_runs_once_per_key_and_again_after_an_interruption() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path().join("c")).unwrap();
        let runs = Cell::new(0);
        let good = || {
            runs.set(runs.get() + 1);
            Ok(())
        };
        cache.step("s", "1", good).unwrap();
        cache.step("s", "1", good).unwrap();
        assert_eq!(runs.get(), 1);
        let failing = || Err(Error::Check("stopped".to_owned()));
        cache.step("s", "2", failing).unwrap_err();
        cache.step("s", "1", good).unwrap();
        assert_eq!(runs.get(), 2, "the old marker must not survive a failed step");
    }

    #[test]
    fn the_lock_excludes_and_names_its_owner() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path().to_owned()).unwrap();
        let ui = Ui::new();
        let held = cache.lock(&ui).unwrap();
        let file = File::open(cache.path("lock")).unwrap();
        assert!(Flock::lock(file, FlockArg::LockExclusiveNonblock).is_err());
        assert_eq!(fs::read_to_string(cache.path("lock")).unwrap(), std::process::id().to_string());
        drop(held);
        cache.lock(&ui).unwrap();
    }

    #[test]
    fn what_was_left_unfinished_is_removed_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::at(dir.path().to_owned()).unwrap();
        let left = cache.scratch().unwrap().keep();
        fs::write(left.join("half"), "half").unwrap();
        fs::create_dir(cache.path("models")).unwrap();
        let held = cache.lock(&Ui::new()).unwrap();
        assert!(!left.exists() && cache.path("models").exists());
        assert!(cache.scratch().unwrap().path().exists());
        drop(held);
    }

    #[test]
    fn sha256_of_a_known_text() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("f");
        fs::write(&file, "abc").unwrap();
        assert_eq!(
            sha256(&file).unwrap(),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
    }
}
