//! Pinned downloads through the package clients of their registries.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use tempfile::TempDir;

use crate::apt;
use crate::cache::{self, Cache};
use crate::error::{Error, IoContext};
use crate::python::Venv;
use crate::tools::Tool;
use crate::ui::{Bar, Ui, Unit};

/// How often a download is tried.
const TRIES: u32 = 3;

/// A file that one package client can bring, pinned by its content.
#[derive(Debug)]
pub struct Archive {
    /// Where it comes from.
    pub source: Source,
    /// Its file name.
    pub file: &'static str,
    /// Its size in bytes.
    pub bytes: u64,
    /// Its sha256, in hex.
    pub sha256: &'static str,
}

/// A package in a registry.
#[derive(Debug)]
pub enum Source {
    /// A Python source package; nothing of it is built or run.
    Sdist(&'static str),
    /// A Python wheel.
    Wheel(&'static str),
    /// An npm package.
    Npm(&'static str),
}

impl Archive {
    /// The file in the cache, downloaded when it is not there yet.
    pub fn fetch(&self, cache: &Cache, ui: &Ui) -> Result<PathBuf, Error> {
        let path = cache.path("dl").join(self.file);
        let step = format!("dl-{}", self.file);
        if !path.is_file() {
            cache.forget(&step)?;
        }
        cache.step(&step, self.sha256, || match path.is_file() && cache::sha256(&path)? == self.sha256 {
            true => Ok(()),
            false => self.download(cache, ui, &path),
        })?;
        Ok(path)
    }

    fn download(&self, cache: &Cache, ui: &Ui, path: &Path) -> Result<(), Error> {
        let scratch = cache.scratch()?;
        let tool = self.client(cache, ui, scratch.path())?;
        let bar = ui.bar(&format!("download {}", self.file), Unit::Bytes, self.bytes);
        let mut cause = String::new();
        for attempt in 1..=TRIES {
            if attempt > 1 {
                thread::sleep(Duration::from_secs(2 * u64::from(attempt)));
            }
            let finished = watched(scratch.path(), &bar, self.bytes, || tool.finish(|_| ()))?;
            let downloaded = scratch.path().join(self.file);
            if finished.success && downloaded.is_file() {
                bar.finish();
                self.check(&downloaded)?;
                return cache::put(&downloaded, path);
            }
            cause = finished
                .tail
                .iter()
                .rev()
                .find(|line| !line.trim().is_empty())
                .cloned()
                .unwrap_or(finished.status);
        }
        Err(Error::Download { what: self.source.package().to_owned(), tries: TRIES, cause })
    }

    fn check(&self, path: &Path) -> Result<(), Error> {
        let found = cache::sha256(path)?;
        match found == self.sha256 {
            true => Ok(()),
            false => Err(Error::Checksum { what: self.source.package(), found, wanted: self.sha256 }),
        }
    }

    fn client(&self, cache: &Cache, ui: &Ui, into: &Path) -> Result<Tool, Error> {
        let log = cache.log(&format!("dl-{}", self.file));
        Ok(match self.source {
            Source::Sdist(package) => {
                let unearth = Venv::ensure(cache, ui)?.program("unearth");
                Tool::new(unearth, &log).args(["--no-binary", "--download"]).arg(into).arg(package)
            }
            Source::Wheel(package) => {
                let unearth = Venv::ensure(cache, ui)?.program("unearth");
                Tool::new(unearth, &log).args(["--only-binary", "--download"]).arg(into).arg(package)
            }
            Source::Npm(package) => {
                apt::ensure(cache, ui, apt::NPM)?;
                Tool::new("npm", &log).args(["pack", "--silent", package]).dir(into)
            }
        })
    }
}

impl Source {
    fn package(&self) -> &'static str {
        match self {
            Source::Sdist(package) | Source::Wheel(package) | Source::Npm(package) => package,
        }
    }
}

/// Runs `work` while the bar shows how many bytes have arrived in `folder`.
fn watched<T>(folder: &Path, bar: &Bar, total: u64, work: impl FnOnce() -> T) -> T {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Acquire) {
                bar.set(bytes_in(folder).min(total), total);
                thread::sleep(Duration::from_millis(200));
            }
        });
        let result = work();
        done.store(true, Ordering::Release);
        result
    })
}

fn bytes_in(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    entries.flatten().filter_map(|entry| entry.metadata().ok()).map(|data| data.len()).sum()
}

/// Unpacks a folder of a tar archive to `to`, whole or not at all.
pub fn unpack_tar(cache: &Cache, archive: &Path, inside: &str, to: &Path) -> Result<(), Error> {
    let scratch = cache.scratch()?;
    let log = cache.log("unpack");
    Tool::new("tar", &log)
        .arg("-xzf")
        .arg(archive)
        .arg("-C")
        .arg(scratch.path())
        .arg("--no-same-owner")
        .arg(inside)
        .run()?;
    cache::put(&scratch.path().join(inside), to)
}

/// Takes one file out of a wheel, whole or not at all.
pub fn unpack_wheel(cache: &Cache, venv: &Venv, wheel: &Path, inside: &str, to: &Path) -> Result<(), Error> {
    let unpacked = open_wheel(cache, venv, wheel)?;
    let file = unpacked.path().join(inside);
    fs::metadata(&file).at("find", &file)?;
    cache::put(&file, to)
}

/// Unpacks a wheel into a folder of its own, to take from it.
pub fn open_wheel(cache: &Cache, venv: &Venv, wheel: &Path) -> Result<TempDir, Error> {
    let scratch = cache.scratch()?;
    let log = cache.log("unpack");
    Tool::new(venv.program("python"), &log)
        .args(["-m", "zipfile", "-e"])
        .arg(wheel)
        .arg(scratch.path())
        .run()?;
    Ok(scratch)
}
