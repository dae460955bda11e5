//! Caches of compiled shaders: a process without a guest fills one, sandboxed workers read it, and no guest writes what another one runs.
//!
//! A folder of caches has one for each ggml library and set of drivers, named by a number of them, whole or not at all.
#![forbid(unsafe_code)]

use super::Profile;
use crate::error::Error;
use crate::worker::Libraries;
use nix::errno::Errno;
use nix::sys::signal::kill;
use nix::unistd::Pid;
use nix::unistd::geteuid;
use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

/// Environment variable with the folder, or `off`.
pub(super) const VARIABLE: &str = "APIR_SHADER_CACHE";
const OFF: &str = "off";
/// Below the user's folder of caches.
const FOLDER: &str = "apir/shaders";

/// What caches' folders begin with, and those that are being filled.
const WHOLE: &str = "shaders-";
const PART: &str = "part-";

/// Folders inside a cache: Mesa's, of NVIDIA's graphics driver, of CUDA.
const MESA: &str = "mesa";
const NVIDIA: &str = "nvidia";
const CUDA: &str = "cuda";

/// Mesa's databases below its folder: those that it writes, and those that it only reads.
const MESA_SINGLE_FILE: &str = "mesa_shader_cache_sf";
const MESA_WRITTEN: [&str; 2] = ["foz_cache.foz", "foz_cache_idx.foz"];
const MESA_READ: [&str; 2] = ["warm.foz", "warm_idx.foz"];
/// Old releases map a file of this name beside them, too.
const MESA_INDEX: &str = "index";
/// What [`MESA_READ`] is called in a variable.
const MESA_READ_NAME: &str = "warm";

/// The descriptors of memory that a worker has in the place of the databases that Mesa insists on writing: links lead there.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
pub(super) const PRIVATE: [i32; 3] = [300, 301, 302];

/// Bits of a mode by which a group or everybody may write.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Where Vulkan's manifests of drivers are, which change with them.
const MANIFESTS: &[&str] = &["/etc/vulkan/icd.d", "/usr/share/vulkan/icd.d", "/usr/local/share/vulkan/icd.d"];

/// A folder of caches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShaderCaches(PathBuf);

/// Environment variables.
pub(crate) type Variables = Vec<(OsString, OsString)>;

impl ShaderCaches {
    /// This folder.
    #[must_use]
    pub fn at(folder: PathBuf) -> Self {
        Self(folder)
    }

    /// The folder that `APIR_SHADER_CACHE` names, else `apir/shaders` in the user's folder of caches; none when it is `off`, and for a
    /// user without a folder.
    ///
    /// # Errors
    /// [`Error::Variable`] for a path that is not full.
    pub fn from_environment() -> Result<Option<Self>, Error> {
        Self::read(|name| std::env::var_os(name))
    }

    pub(super) fn read(variable: impl Fn(&str) -> Option<OsString>) -> Result<Option<Self>, Error> {
        let set = |name| variable(name).filter(|value| !value.is_empty());
        match set(VARIABLE) {
            Some(value) if value == OFF => Ok(None),
            Some(value) if Path::new(&value).is_absolute() => Ok(Some(Self(value.into()))),
            Some(value) => {
                let fix = "must be the full path of a folder, or off".to_owned();
                Err(Error::Variable { name: VARIABLE, value, fix })
            }
            None => {
                let caches = set("XDG_CACHE_HOME").map(PathBuf::from).filter(|path| path.is_absolute());
                let home = || set("HOME").map(|home| PathBuf::from(home).join(".cache"));
                Ok(caches.or_else(home).filter(|path| path.is_absolute()).map(|path| Self(path.join(FOLDER))))
            }
        }
    }

    /// The folder itself.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.0
    }

    /// Where the cache of these libraries is, once it is filled: another release of a library or a driver has another.
    pub(crate) fn cache_of(&self, libraries: &Libraries) -> PathBuf {
        let mut hasher = DefaultHasher::new();
        env!("CARGO_PKG_VERSION").hash(&mut hasher);
        let mut add = |path: &Path| {
            let found = fs::metadata(path).map(|file| (file.len(), file.mtime(), file.mtime_nsec()));
            (path, found.ok()).hash(&mut hasher);
        };
        if let Some(library) = &libraries.ggml_library {
            add(&library.canonicalize().unwrap_or_else(|_| library.clone()));
        }
        let mut manifests: Vec<PathBuf> =
            MANIFESTS.iter().flat_map(|folder| entries(Path::new(folder))).collect();
        manifests.sort();
        manifests.iter().for_each(|path| add(path));
        self.0.join(format!("{WHOLE}{:016x}", hasher.finish()))
    }

    /// That nobody but this user and root can write the folder, nor this cache in it: workers run what is there.
    ///
    /// # Errors
    /// Which of them others can write, or what the system says.
    pub(crate) fn check(&self, cache: Option<&Path>) -> io::Result<()> {
        for path in [Some(self.folder()), cache].into_iter().flatten() {
            let found = fs::metadata(path)?;
            if found.uid() != 0 && found.uid() != geteuid().as_raw() {
                return Err(io::Error::other(format!(
                    "{}: it belongs to user {}",
                    path.display(),
                    found.uid()
                )));
            }
            if found.mode() & WRITABLE_BY_OTHERS != 0 {
                let mode = found.mode() & 0o7777;
                return Err(io::Error::other(format!(
                    "{}: others can write it (mode {mode:o})",
                    path.display()
                )));
            }
        }
        Ok(())
    }

    /// A new empty cache beside the whole ones, for [`ShaderCaches::publish`].
    pub(crate) fn begin(&self) -> io::Result<PathBuf> {
        let private = |path: &Path| DirBuilder::new().mode(0o700).create(path);
        DirBuilder::new().recursive(true).mode(0o700).create(&self.0)?;
        self.check(None)?;
        let part = self.0.join(format!("{PART}{}", std::process::id()));
        for left in entries(&self.0).into_iter().filter(|path| *path == part || is_left(path)) {
            fs::remove_dir_all(left)?;
        }
        private(&part)?;
        [MESA, NVIDIA, CUDA].iter().try_for_each(|folder| private(&part.join(folder)))?;
        Ok(part)
    }

    /// Puts a filled cache to its place, ready to be read, and removes those that no worker reads any more. True when it has
    /// anything.
    pub(crate) fn publish(&self, part: &Path, whole: &Path) -> io::Result<bool> {
        let mut filled = [NVIDIA, CUDA].iter().any(|folder| !entries(&part.join(folder)).is_empty());
        for driver in entries(&part.join(MESA).join(MESA_SINGLE_FILE)) {
            for device in entries(&driver) {
                filled |= close_database(&device)?;
            }
        }
        if filled {
            match fs::rename(part, whole) {
                // Another one was faster.
                Err(_) if whole.is_dir() => fs::remove_dir_all(part)?,
                renamed => renamed?,
            }
        } else {
            fs::remove_dir_all(part)?;
        }
        let is_old = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            filled && name.starts_with(WHOLE) && path != whole
        };
        for old in entries(&self.0).into_iter().filter(is_old) {
            // One that a worker reads stays open for it.
            let _ = fs::remove_dir_all(old);
        }
        Ok(filled)
    }
}

/// Makes Mesa's database of a device one that is only read; true when it has entries. Links lead to private memory where Mesa wants to write.
fn close_database(device: &Path) -> io::Result<bool> {
    let header = 16;
    for (written, read) in MESA_WRITTEN.iter().zip(MESA_READ) {
        fs::rename(device.join(written), device.join(read))?;
    }
    let _ = fs::remove_file(device.join(MESA_INDEX));
    for (name, fd) in MESA_WRITTEN.into_iter().chain([MESA_INDEX]).zip(PRIVATE) {
        symlink(format!("/proc/self/fd/{fd}"), device.join(name))?;
    }
    Ok(fs::metadata(device.join(MESA_READ[0]))?.len() > header)
}

/// What makes drivers use the cache in `folder`.
pub(crate) fn variables(folder: &Path) -> Variables {
    let path = |name: &str| folder.join(name).into_os_string();
    [
        ("MESA_SHADER_CACHE_DIR", path(MESA)),
        ("MESA_DISK_CACHE_SINGLE_FILE", "1".into()),
        ("MESA_DISK_CACHE_READ_ONLY_FOZ_DBS", MESA_READ_NAME.into()),
        ("__GL_SHADER_DISK_CACHE", "1".into()),
        ("__GL_SHADER_DISK_CACHE_PATH", path(NVIDIA)),
        ("__GL_SHADER_DISK_CACHE_SKIP_CLEANUP", "1".into()),
        ("CUDA_CACHE_PATH", path(CUDA)),
    ]
    .map(|(name, value)| (name.into(), value))
    .to_vec()
}

/// Whether drivers of a profile compile shaders for every program: a server fills the cache of these at its start.
pub(crate) fn compiles(profile: Profile) -> bool {
    profile == Profile::Vulkan
}

/// Whether this is a cache that was begun by a process which has ended since.
fn is_left(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let process = name.strip_prefix(PART).and_then(|number| number.parse().ok());
    process.is_some_and(|number| kill(Pid::from_raw(number), None) == Err(Errno::ESRCH))
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_folder_is_the_variable_s_or_the_user_s() {
        let read = |variables: &[(&str, &str)]| {
            let find =
                |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into());
            ShaderCaches::read(find).map_err(|error| error.to_string())
        };
        let at = |path: &str| Ok(Some(ShaderCaches::at(path.into())));
        assert_eq!(read(&[("HOME", "/h")]), at("/h/.cache/apir/shaders"));
        assert_eq!(read(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]), at("/x/apir/shaders"));
        assert_eq!(read(&[("HOME", "/h"), (VARIABLE, "/c")]), at("/c"));
        assert_eq!((read(&[("HOME", "/h"), (VARIABLE, "off")]), read(&[])), (Ok(None), Ok(None)));
        let wrong = "APIR_SHADER_CACHE=c: must be the full path of a folder, or off";
        assert_eq!(read(&[(VARIABLE, "c")]), Err(wrong.to_owned()));
    }

    #[test]
    fn s29_a_cache_that_others_can_write_is_none() {
        let root = tempfile::tempdir().unwrap();
        let (folder, cache) = (root.path().join("c"), root.path().join("c/shaders-1"));
        let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        fs::create_dir_all(&cache).unwrap();
        let caches = ShaderCaches::at(folder.clone());
        for (of_folder, of_cache, good) in
            [(0o700, 0o755, true), (0o770, 0o700, false), (0o1777, 0o700, false), (0o755, 0o702, false)]
        {
            mode(&folder, of_folder);
            mode(&cache, of_cache);
            assert_eq!(caches.check(Some(&cache)).is_ok(), good, "{of_folder:o} {of_cache:o}");
        }
        mode(&folder, 0o777);
        let error = caches.begin().unwrap_err().to_string();
        assert!(error.ends_with("others can write it (mode 777)"), "{error}");
        if geteuid().is_root() {
            mode(&folder, 0o700);
            mode(&cache, 0o700);
            std::os::unix::fs::chown(&cache, Some(12345), None).unwrap();
            let error = caches.check(Some(&cache)).unwrap_err().to_string();
            assert!(error.ends_with("it belongs to user 12345"), "{error}");
        }
    }

    #[test]
    fn a_filled_cache_is_whole_read_only_and_replaces_older_ones() {
        let root = tempfile::tempdir().unwrap();
        let caches = ShaderCaches::at(root.path().join("c"));
        let library = root.path().join("ggml.so");
        fs::write(&library, "1").unwrap();
        let libraries = Libraries { ggml_library: Some(library.clone()), ..Libraries::default() };
        let whole = caches.cache_of(&libraries);

        // What a process that has ended has left goes, what one fills now stays.
        let [ended, filled] = [i32::MAX as u32, std::os::unix::process::parent_id()]
            .map(|process| caches.folder().join(format!("{PART}{process}")));
        [&ended, &filled].iter().for_each(|part| fs::create_dir_all(part).unwrap());
        let part = caches.begin().unwrap();
        assert_eq!((ended.exists(), filled.exists()), (false, true));
        assert!(!caches.publish(&part, &whole).unwrap() && !part.exists() && !whole.exists());

        let part = caches.begin().unwrap();
        let device = part.join(MESA).join(MESA_SINGLE_FILE).join("driver/llvmpipe");
        fs::create_dir_all(&device).unwrap();
        for name in MESA_WRITTEN.into_iter().chain([MESA_INDEX]) {
            fs::write(device.join(name), [0; 32]).unwrap();
        }
        assert!(caches.publish(&part, &whole).unwrap() && whole.is_dir());
        let device = whole.join(MESA).join(MESA_SINGLE_FILE).join("driver/llvmpipe");
        assert!(MESA_READ.iter().all(|name| device.join(name).is_file()));
        assert_eq!(fs::read_link(device.join(MESA_INDEX)).unwrap(), Path::new("/proc/self/fd/302"));

        // Another release of the library has a cache of its own.
        fs::write(&library, "22").unwrap();
        let other = caches.cache_of(&libraries);
        assert_ne!(other, whole);
        let part = caches.begin().unwrap();
        fs::write(part.join(CUDA).join("index"), "x").unwrap();
        assert!(caches.publish(&part, &other).unwrap() && other.is_dir() && !whole.exists());
    }
}
