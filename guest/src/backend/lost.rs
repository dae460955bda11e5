//! What becomes of a program whose read fails. ggml's reads cannot fail, so a program takes what it gets for its data and may store it.

use super::log;
use std::ffi::OsString;

/// Environment variable that chooses.
pub(super) const ON_LOST_VARIABLE: &str = "APIR_ON_LOST";
/// BSD's "internal software error", which programs seldom end with otherwise.
const EXIT_STATUS: i32 = 70;

/// What the variable says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum OnLost {
    /// The program goes on with what it got; the log says that it is not valid.
    #[default]
    Fail,
    /// The program ends before it can store it.
    Exit,
}

/// The variable says something else.
#[derive(Debug, thiserror::Error)]
#[error("{ON_LOST_VARIABLE}={}: must be fail (the default) or exit", .0.display())]
pub(super) struct OnLostError(OsString);

impl OnLost {
    /// Reads `APIR_ON_LOST`.
    pub(super) fn from_environment() -> Result<Self, OnLostError> {
        Self::read(std::env::var_os(ON_LOST_VARIABLE))
    }

    fn read(setting: Option<OsString>) -> Result<Self, OnLostError> {
        match setting {
            None => Ok(Self::default()),
            Some(setting) => match setting.as_encoded_bytes() {
                b"" | b"fail" => Ok(Self::Fail),
                b"exit" => Ok(Self::Exit),
                _ => Err(OnLostError(setting)),
            },
        }
    }

    /// Ends the program where that is asked for. Its exit handlers do not run: one of them could store what was read.
    pub(super) fn act(self) {
        if self == Self::Exit {
            // ggml's log may hold lines back.
            log::to_stderr(&format!(
                "ggml-virtgpu: a read failed, ending with status {EXIT_STATUS} ({ON_LOST_VARIABLE}=exit)"
            ));
            // SAFETY: it never returns.
            unsafe { libc::_exit(EXIT_STATUS) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t29_the_setting_is_fail_or_exit() {
        let read = |text: &str| OnLost::read(Some(text.into())).map_err(|error| error.to_string());
        assert_eq!(OnLost::read(None).unwrap(), OnLost::Fail);
        assert_eq!(
            (read(""), read("fail"), read("exit")),
            (Ok(OnLost::Fail), Ok(OnLost::Fail), Ok(OnLost::Exit))
        );
        for wrong in ["EXIT", "abort", "1"] {
            assert_eq!(
                read(wrong).unwrap_err(),
                format!("APIR_ON_LOST={wrong}: must be fail (the default) or exit")
            );
        }
    }
}
