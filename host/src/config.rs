//! What the renderer and the environment say.
#![forbid(unsafe_code)]

use crate::error::InitializeError;
use crate::limits::Limits;
use apir_ggml::DeviceType;
use std::ffi::OsString;
use std::path::PathBuf;

/// The kind of device that guests are told of. Never a CPU: llama.cpp would take it for its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PresentAs {
    /// What the device says, a GPU when that is something else.
    Real,
    /// Always this.
    Fixed(DeviceType),
}

impl PresentAs {
    /// The type told to guests for a device of type `real`.
    #[must_use]
    pub fn of(self, real: DeviceType) -> DeviceType {
        match (self, real) {
            (Self::Fixed(type_), _) => type_,
            (Self::Real, DeviceType::Gpu | DeviceType::Igpu | DeviceType::Accel) => real,
            (Self::Real, _) => DeviceType::Gpu,
        }
    }
}

/// How a context drives its backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// File of the ggml backend library.
    pub library: PathBuf,
    /// Its registration function.
    pub registration: String,
    /// The kind of device that guests are told of.
    pub present_as: PresentAs,
    /// Threads of a CPU backend.
    pub threads: usize,
    /// The host's user says that every guest has the same ggml.
    pub same_ggml: bool,
    /// The guest's library comes from before ggml 0.19, whatever it says later.
    pub old_guest: bool,
    /// Nobody else has a context in this process.
    pub alone: bool,
    /// How much the context may take.
    pub limits: Limits,
}

/// The renderer's key that is 1 in a process of one context. Without it a process is taken to have several, or to be a VMM.
const ALONE: &str = "apir.own_process";

/// The renderer's key with the protocol of the guest's handshake, `MAJOR.MINOR`; absent where the renderer does not tell.
const GUEST_PROTOCOL: &str = "apir.guest_protocol";

/// The protocol of upstream's guests from before ggml 0.19, which brought 0.2.
const OLD_PROTOCOL: &str = "0.1";

/// The registration function of a library built for dynamic loading.
const DEFAULT_REGISTRATION: &str = "ggml_backend_init";

impl Config {
    /// Reads the renderer's keys and, where it has none, the environment.
    ///
    /// # Errors
    /// [`InitializeError::NoLibrary`], [`InitializeError::Variable`]
    pub fn read(
        key: impl Fn(&str) -> Option<OsString>,
        variable: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Self, InitializeError> {
        const REGISTRATION: &str = "APIR_LLAMA_CPP_GGML_LIBRARY_REG";
        let set = |value: Option<OsString>| value.filter(|value| !value.is_empty());
        let either = |name: &str, env: &str| set(key(name)).or_else(|| set(variable(env)));
        // Every setting is looked at, also when no library is named: a wrong one is found by the first start.
        let registration = match either("ggml.library.reg", REGISTRATION) {
            None => DEFAULT_REGISTRATION.to_owned(),
            Some(value) => {
                parse(REGISTRATION, value, "the name of a function of the ggml library", |text| {
                    Some(text.to_owned())
                })?
            }
        };
        let present_as = match set(variable("APIR_PRESENT_AS")) {
            None => PresentAs::Real,
            Some(value) => {
                let type_ = parse("APIR_PRESENT_AS", value, "gpu, igpu or accel", |text| {
                    match text.to_ascii_lowercase().as_str() {
                        "gpu" => Some(DeviceType::Gpu),
                        "igpu" => Some(DeviceType::Igpu),
                        "accel" => Some(DeviceType::Accel),
                        _ => None,
                    }
                })?;
                PresentAs::Fixed(type_)
            }
        };
        let threads = match either("apir.host_threads", "APIR_HOST_THREADS") {
            None => std::thread::available_parallelism().map_or(1, usize::from),
            Some(value) => parse("APIR_HOST_THREADS", value, "a number from 1 to 1024", |text| {
                text.parse().ok().filter(|threads| (1..=1024).contains(threads))
            })?,
        };
        let limits = Limits::read(&key, &variable)?;
        let same_ggml = match set(variable("APIR_SAME_GGML")) {
            None => false,
            Some(value) => parse("APIR_SAME_GGML", value, "0 or 1", |text| match text {
                "0" => Some(false),
                "1" => Some(true),
                _ => None,
            })?,
        };
        let library = either("ggml.library.path", "APIR_LLAMA_CPP_GGML_LIBRARY_PATH")
            .ok_or(InitializeError::NoLibrary)?
            .into();
        let alone = key(ALONE).is_some_and(|value| value == "1");
        let old_guest = key(GUEST_PROTOCOL).is_some_and(|value| value == OLD_PROTOCOL);
        Ok(Self { library, registration, present_as, threads, same_ggml, old_guest, alone, limits })
    }
}

/// A setting's value, or an error that names the setting and what it `must be`. A value that is not text has no right form.
pub(crate) fn parse<T>(
    name: &'static str,
    value: OsString,
    must_be: &str,
    read: impl FnOnce(&str) -> Option<T>,
) -> Result<T, InitializeError> {
    match value.to_str().and_then(read) {
        Some(found) => Ok(found),
        None => Err(InitializeError::Variable { name, value, fix: format!("must be {must_be}") }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(keys: &[(&str, &str)], variables: &[(&str, &str)]) -> Result<Config, String> {
        let find = |list: &[(&str, &str)], name: &str| {
            list.iter().find(|(key, _)| *key == name).map(|(_, value)| OsString::from(value))
        };
        Config::read(|name| find(keys, name), |name| find(variables, name)).map_err(|error| error.to_string())
    }

    #[test]
    fn the_renderer_s_keys_come_before_the_environment() {
        let variables = [
            ("APIR_LLAMA_CPP_GGML_LIBRARY_PATH", "/env.so"),
            ("APIR_LLAMA_CPP_GGML_LIBRARY_REG", "env_reg"),
            ("APIR_HOST_THREADS", "3"),
        ];
        let config = read(&[("ggml.library.path", "/key.so")], &variables).unwrap();
        assert_eq!((config.library.to_str(), config.registration.as_str()), (Some("/key.so"), "env_reg"));
        assert_eq!((config.threads, config.present_as), (3, PresentAs::Real));
        assert_eq!(read(&[], &variables).unwrap().library, PathBuf::from("/env.so"));
        let keys = [("ggml.library.path", "/key.so"), ("apir.host_threads", "2")];
        assert_eq!(read(&keys, &variables).unwrap().threads, 2);
        let config = read(&[("ggml.library.path", "/key.so"), ("ggml.library.reg", "")], &[]).unwrap();
        assert_eq!(config.registration, "ggml_backend_init");
        assert!(config.threads >= 1);
        let path = ("ggml.library.path", "/key.so");
        for (value, alone) in [("", false), ("0", false), ("1", true)] {
            assert_eq!(read(&[path, (ALONE, value)], &[]).unwrap().alone, alone, "{value}");
        }
        assert!(!read(&[path], &[(ALONE, "1")]).unwrap().alone, "only the renderer knows");
    }

    #[test]
    fn t31_a_path_may_be_any_bytes_and_other_settings_are_text() {
        use std::os::unix::ffi::OsStringExt;
        let bytes = OsString::from_vec(b"/\xff.so".to_vec());
        let read = |name: &str| {
            Config::read(|_| None, |asked| (asked == name).then(|| bytes.clone()))
                .map_err(|error| error.to_string())
        };
        assert_eq!(read("APIR_LLAMA_CPP_GGML_LIBRARY_PATH").unwrap().library, PathBuf::from(&bytes));
        for name in [
            "APIR_LLAMA_CPP_GGML_LIBRARY_REG",
            "APIR_PRESENT_AS",
            "APIR_HOST_THREADS",
            "APIR_MAX_DEVICE_BYTES",
            "APIR_INDEX_CHECK",
        ] {
            let error = read(name).unwrap_err();
            assert!(error.starts_with(&format!("{name}=/\u{fffd}.so: must be ")), "{error}");
        }
    }

    #[test]
    fn t31_faults_name_the_variable_and_the_fix() {
        assert!(read(&[], &[]).unwrap_err().starts_with("no ggml library: set the key ggml.library.path"));
        let key = [("ggml.library.path", "/a.so")];
        for (name, value, words) in [
            ("APIR_PRESENT_AS", "cpu", "APIR_PRESENT_AS=cpu: must be gpu, igpu or accel"),
            ("APIR_SAME_GGML", "yes", "APIR_SAME_GGML=yes: must be 0 or 1"),
            ("APIR_HOST_THREADS", "0", "APIR_HOST_THREADS=0: must be a number from 1 to 1024"),
            ("APIR_HOST_THREADS", "many", "APIR_HOST_THREADS=many: must be a number from 1 to 1024"),
        ] {
            assert_eq!(read(&key, &[(name, value)]).unwrap_err(), words);
        }
    }

    #[test]
    fn guests_never_hear_of_a_cpu() {
        for real in [DeviceType::Cpu, DeviceType::Meta, DeviceType::Unknown(9), DeviceType::Gpu] {
            assert_eq!(PresentAs::Real.of(real), DeviceType::Gpu);
        }
        assert_eq!(PresentAs::Real.of(DeviceType::Igpu), DeviceType::Igpu);
        assert_eq!(PresentAs::Real.of(DeviceType::Accel), DeviceType::Accel);
        assert_eq!(PresentAs::Fixed(DeviceType::Accel).of(DeviceType::Cpu), DeviceType::Accel);
    }
}
