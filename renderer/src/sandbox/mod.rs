//! The walls around a worker's process: what code that a guest has taken over can still do.
//!
//! A worker enters them before it loads the plugin and the ggml library, while it has a single thread. What it may read depends
//! on the kind of backend; sockets, other programs and other processes are out of reach with each. docs/threat-model.md
//! lists it all.
#![forbid(unsafe_code)]

use crate::error::Error;
use crate::log::TARGET;
use crate::worker::Libraries;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

mod profile;
mod shaders;
pub use profile::Profile;
pub use shaders::ShaderCaches;
pub(crate) use shaders::{compiles, variables};

#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
mod linux;
#[cfg(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64")))]
use linux as system;
#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod other;
#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
use other as system;

pub(crate) use system::Walls;

/// Environment variable: `strict` (also when unset) or `off`.
const MODE: &str = "APIR_SANDBOX";
/// Environment variable with a profile's name, where the library's name tells too little.
const PROFILE: &str = "APIR_SANDBOX_PROFILE";
/// Environment variable with more that may be read: paths with colons between.
const READ: &str = "APIR_SANDBOX_READ";
/// Environment variable: `1` lets workers open the GPUs' card nodes beside their render nodes.
const CARD_NODES: &str = "APIR_SANDBOX_CARD_NODES";

/// Whether workers are sandboxed, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sandbox {
    /// A worker can do all that its user can.
    Off,
    /// A worker can do what its backend needs.
    Strict {
        /// The kind of backend; guessed from the library's name without one.
        profile: Option<Profile>,
        /// Files, and folders with all that is below them, that it may read beside those of its profile.
        read: Vec<PathBuf>,
        /// Whether it may open the GPUs' card nodes, which set modes too, beside their render nodes.
        card_nodes: bool,
    },
}

impl Default for Sandbox {
    fn default() -> Self {
        Self::Strict { profile: None, read: Vec::new(), card_nodes: false }
    }
}

impl Sandbox {
    /// Reads `APIR_SANDBOX`, `APIR_SANDBOX_PROFILE`, `APIR_SANDBOX_READ` and `APIR_SANDBOX_CARD_NODES`.
    ///
    /// # Errors
    /// [`Error::Variable`] for a value that none of them knows.
    pub fn from_environment() -> Result<Self, Error> {
        Self::read(|name| std::env::var_os(name))
    }

    fn read(variable: impl Fn(&str) -> Option<OsString>) -> Result<Self, Error> {
        let set = |name| variable(name).filter(|value| !value.is_empty());
        let wrong = |name, value: &OsStr, fix: String| Error::Variable { name, value: value.to_owned(), fix };
        let profile = match set(PROFILE) {
            None => None,
            Some(name) => Some(
                name.to_str()
                    .and_then(Profile::named)
                    .ok_or_else(|| wrong(PROFILE, &name, format!("must be {}", Profile::NAMES)))?,
            ),
        };
        let read = set(READ).unwrap_or_default();
        let read: Vec<_> = std::env::split_paths(&read).filter(|path| !path.as_os_str().is_empty()).collect();
        if let Some(path) = read.iter().find(|path| !path.is_absolute() || !path.exists()) {
            let fix = "must be full paths of what exists, with colons between".to_owned();
            return Err(wrong(READ, path.as_os_str(), fix));
        }
        let card_nodes = match set(CARD_NODES) {
            None => false,
            Some(value) if value == "0" || value == "1" => value == "1",
            Some(value) => return Err(wrong(CARD_NODES, &value, "must be 1 or 0".to_owned())),
        };
        match set(MODE) {
            None => Ok(Self::Strict { profile, read, card_nodes }),
            Some(mode) if mode == "strict" => Ok(Self::Strict { profile, read, card_nodes }),
            Some(mode) if mode == "off" => Ok(Self::Off),
            Some(mode) => Err(wrong(MODE, &mode, "must be strict or off".to_owned())),
        }
    }

    /// What a worker's program gets of this process's environment.
    pub(crate) fn environment(&self) -> Vec<(OsString, OsString)> {
        let all = std::env::vars_os();
        match self {
            Self::Off => all.collect(),
            Self::Strict { .. } => {
                let mut passed: Vec<_> = all.filter(|(name, _)| is_passed_on(name)).collect();
                // What the folder is found by is not passed on. A wrong value is told by whoever reads it.
                if let Ok(Some(caches)) = ShaderCaches::from_environment() {
                    passed.retain(|(name, _)| name != shaders::VARIABLE);
                    passed.push((shaders::VARIABLE.into(), caches.folder().into()));
                }
                passed
            }
        }
    }

    /// The profile of workers that drive this library; none without a sandbox.
    pub(crate) fn profile(&self, ggml_library: Option<&Path>) -> Option<Profile> {
        match self {
            Self::Off => None,
            Self::Strict { profile, .. } => Some(profile.unwrap_or_else(|| Profile::of(ggml_library))),
        }
    }

    /// What workers that drive this library get, for a line of log.
    pub(crate) fn describe(&self, ggml_library: Option<&Path>) -> String {
        let Self::Strict { profile, .. } = self else {
            return format!("not sandboxed ({MODE}=off)");
        };
        let profile = profile.unwrap_or_else(|| Profile::of(ggml_library));
        match system::missing() {
            None => format!("sandboxed, profile {profile}"),
            Some(missing) => format!("sandboxed in part, profile {profile}: {missing}"),
        }
    }

    /// Walls this process in for good; what it returns is kept as long as it shall work. Its drivers read the cache of shaders that
    /// is there for these libraries.
    ///
    /// # Errors
    /// [`Error::Sandbox`] when the system refuses, but for landlock, which old kernels do not have.
    pub(crate) fn enter(&self, libraries: &Libraries) -> Result<Option<Walls>, Error> {
        let caches = ShaderCaches::from_environment().unwrap_or_default();
        let cache = caches.and_then(|caches| {
            let cache = Some(caches.cache_of(libraries)).filter(|cache| cache.is_dir())?;
            match caches.check(Some(&cache)) {
                Ok(()) => Some(cache),
                Err(fault) => {
                    tracing::warn!(target: TARGET, "the cache of shaders is not used: {fault}");
                    None
                }
            }
        });
        self.enter_with(libraries, cache.map_or(Shaders::None, Shaders::Read))
    }

    /// The same for a process without a guest, whose drivers fill the cache of shaders in `folder`.
    pub(crate) fn enter_to_fill(&self, libraries: &Libraries, folder: &Path) -> Result<Option<Walls>, Error> {
        self.enter_with(libraries, Shaders::Write(folder.to_owned()))
    }

    fn enter_with(&self, libraries: &Libraries, shaders: Shaders) -> Result<Option<Walls>, Error> {
        let Self::Strict { profile, read, card_nodes } = self else {
            return Ok(None);
        };
        let library = libraries.ggml_library.as_deref();
        let profile = profile.unwrap_or_else(|| Profile::of(library));
        system::enter(&Plan {
            profile,
            shaders: if profile.has_gpu() { shaders } else { Shaders::None },
            libraries: [libraries.plugin.as_deref(), library].into_iter().flatten().collect(),
            read,
            card_nodes: *card_nodes,
        })
        .map(Some)
    }
}

/// What a worker is left with.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
struct Plan<'a> {
    profile: Profile,
    /// The plugin and the ggml library.
    libraries: Vec<&'a Path>,
    read: &'a [PathBuf],
    card_nodes: bool,
    shaders: Shaders,
}

/// A cache of shaders, and what a process may do with it.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
enum Shaders {
    None,
    Read(PathBuf),
    Write(PathBuf),
}

/// Beginnings of the names of the variables that ggml's backends, the drivers below them, the loader and we read.
const PREFIXES: &[&str] = &[
    "AMD_",
    "ANV_",
    "APIR_",
    "ASCEND_",
    "CUDA_",
    "DNNL_",
    "GALLIUM_",
    "GALLIVM_",
    "GGML_",
    "GOMP_",
    "GPU_",
    "HIP_",
    "HSA_",
    "INTEL_",
    "KMP_",
    "LC_",
    "LD_",
    "LIBGL_",
    "LP_",
    "MESA_",
    "MKL_",
    "MUSA_",
    "NVIDIA_",
    "NVK_",
    "OCL_",
    "OMP_",
    "ONEAPI_",
    "OPENBLAS_",
    "RADV_",
    "ROCBLAS_",
    "ROCM_",
    "ROCR_",
    "RUST_BACKTRACE",
    "SYCL_",
    "UR_",
    "VIRGL_APIR_",
    "VK_",
    "ZES_",
    "ZE_",
];
/// Names that are passed on whole.
const NAMES: &[&str] = &["LANG", "NO_COLOR", "TZ"];
/// What makes a variable a secret, whatever it begins with.
const SECRETS: &[&str] = &["KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL"];

fn is_passed_on(name: &OsStr) -> bool {
    let bytes = name.as_bytes();
    let is_secret = |word: &&str| bytes.windows(word.len()).any(|part| part == word.as_bytes());
    (NAMES.iter().any(|known| name == OsStr::new(known))
        || PREFIXES.iter().any(|prefix| bytes.starts_with(prefix.as_bytes())))
        && !SECRETS.iter().any(is_secret)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Sandbox, String> {
        let find = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into());
        Sandbox::read(find).map_err(|error| error.to_string())
    }

    #[test]
    fn strict_unless_told_otherwise() {
        for none in [&[][..], &[("APIR_SANDBOX", "")], &[("APIR_SANDBOX", "strict")]] {
            assert_eq!(read(none), Ok(Sandbox::default()));
        }
        assert_eq!(read(&[("APIR_SANDBOX", "off")]), Ok(Sandbox::Off));
        let variables = [("APIR_SANDBOX_PROFILE", "cuda"), ("APIR_SANDBOX_READ", "/usr:/proc:")];
        let read_too = vec![PathBuf::from("/usr"), PathBuf::from("/proc")];
        let strict =
            |card_nodes| Sandbox::Strict { profile: Some(Profile::Cuda), read: read_too.clone(), card_nodes };
        assert_eq!(read(&variables), Ok(strict(false)));
        for (value, card_nodes) in [("0", false), ("1", true)] {
            let variables = [&variables[..], &[("APIR_SANDBOX_CARD_NODES", value)]].concat();
            assert_eq!(read(&variables), Ok(strict(card_nodes)));
        }
    }

    #[test]
    fn faults_name_the_variable_and_the_fix() {
        for (name, value, words) in [
            ("APIR_SANDBOX", "on", "APIR_SANDBOX=on: must be strict or off"),
            (
                "APIR_SANDBOX_PROFILE",
                "gpu",
                "APIR_SANDBOX_PROFILE=gpu: must be cpu, vulkan, cuda, rocm or any",
            ),
            ("APIR_SANDBOX_CARD_NODES", "yes", "APIR_SANDBOX_CARD_NODES=yes: must be 1 or 0"),
            (
                "APIR_SANDBOX_READ",
                "/usr:lib",
                "APIR_SANDBOX_READ=lib: must be full paths of what exists, with colons between",
            ),
            (
                "APIR_SANDBOX_READ",
                "/nonexistent",
                "APIR_SANDBOX_READ=/nonexistent: must be full paths of what exists, with colons between",
            ),
        ] {
            assert_eq!(read(&[(name, value)]).unwrap_err(), words);
        }
        // A profile that does not exist is a fault also where none is used.
        assert!(read(&[("APIR_SANDBOX", "off"), ("APIR_SANDBOX_PROFILE", "gpu")]).is_err());
    }

    #[test]
    fn secrets_stay_behind() {
        for name in ["APIR_LOG", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "VK_DRIVER_FILES", "LANG"] {
            assert!(is_passed_on(OsStr::new(name)), "{name}");
        }
        for name in ["HOME", "PATH", "HF_TOKEN", "NVIDIA_API_KEY", "APIR_TOKEN", "LANGUAGE", "SSH_AUTH_SOCK"]
        {
            assert!(!is_passed_on(OsStr::new(name)), "{name}");
        }
    }
}
