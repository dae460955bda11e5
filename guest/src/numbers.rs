//! Numbers of operations, of their variants and of types: the host's ggml may be another release than the guest's, and gives
//! them other numbers. Names stay, so the guest writes the host's number of each name.
#![forbid(unsafe_code)]

use crate::session::SessionError;
use apir_ggml::Names;
use apir_protocol::messages::NamesReply;
use apir_protocol::tensor::PARAM_WORDS;

/// Environment variable that says, with `1`, that guest and host have the same ggml, for a host that does not tell.
pub(crate) const SAME_GGML_VARIABLE: &str = "APIR_SAME_GGML";
/// More names than any list has.
const MAX_NAMES: usize = 1024;
/// The operations that have variants by name: their first parameter is the number of one.
const UNARY: &str = "UNARY";
const GLU: &str = "GLU";

/// What this program's ggml means by its numbers.
#[derive(Debug)]
pub(crate) struct OwnNumbers {
    pub(crate) names: Names,
    /// The user says that the host has the same ggml.
    pub(crate) same_ggml: bool,
}

/// What the host knows of its numbers beside the reply of `names`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HostHints {
    /// The host is of this project, so nothing follows from what its plugin answers.
    pub(crate) ours: bool,
    /// It answers `mmap_support`, as ggml does since 0.19.
    pub(crate) tells_mmap_support: bool,
}

/// The host's number for each of the guest's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Numbers {
    /// They are the same.
    Same,
    /// Each is looked up.
    Mapped(Mapped),
}

/// Host numbers by guest number, none where the host has nothing of that name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mapped {
    ops: Vec<Option<u32>>,
    types: Vec<Option<u32>>,
    /// The guest's number of an operation, and the host's numbers of its variants.
    variants: [(Option<u32>, Vec<Option<u32>>); 2],
}

/// What the host's ggml lacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotOnHost {
    #[error("operation {0}")]
    Op(u32),
    #[error("variant {1} of operation {0}")]
    Variant(u32, i32),
    #[error("type {0}")]
    Type(u32),
}

impl OwnNumbers {
    /// With what the environment says.
    pub(crate) fn from_environment(names: Names) -> Self {
        Self { names, same_ggml: std::env::var_os(SAME_GGML_VARIABLE).is_some_and(|value| value == "1") }
    }

    /// Compares the guest's names with the host's, if it tells them.
    ///
    /// # Errors
    /// [`SessionError::OtherGgml`] when it does not, and the numbers are not known to be the same; [`SessionError::Names`].
    pub(crate) fn agree(&self, told: Option<&NamesReply>, hints: HostHints) -> Result<Numbers, SessionError> {
        let names = &self.names;
        let Some(told) = told else {
            let settled = names.is_settled() && hints.tells_mmap_support && !hints.ours;
            return match settled || self.same_ggml {
                true => Ok(Numbers::Same),
                false => {
                    Err(SessionError::OtherGgml { host: hints.version(), guest: names.version.to_string() })
                }
            };
        };
        let lists =
            [("operations", &told.ops), ("maps", &told.unary), ("units", &told.glu), ("types", &told.types)];
        if let Some((what, _)) = lists.iter().find(|(_, list)| list.is_empty() || list.len() > MAX_NAMES) {
            return Err(SessionError::Names(what));
        }
        // A tensor that nothing made has operation 0 on either side.
        if told.ops.first().map(String::as_str) != names.ops.name(0) {
            return Err(SessionError::Names("operations"));
        }
        let same = names.ops.names() == told.ops
            && names.unary == told.unary
            && names.glu == told.glu
            && names.types == told.types;
        if same {
            return Ok(Numbers::Same);
        }
        Ok(Numbers::Mapped(Mapped {
            ops: map(names.ops.names(), &told.ops),
            types: map(&names.types, &told.types),
            variants: [
                (names.ops.number(UNARY), map(&names.unary, &told.unary)),
                (names.ops.number(GLU), map(&names.glu, &told.glu)),
            ],
        }))
    }
}

impl Numbers {
    /// The host's number of a type.
    pub(crate) fn type_(&self, number: u32) -> Result<u32, NotOnHost> {
        match self {
            Self::Same => Ok(number),
            Self::Mapped(mapped) => find(&mapped.types, number).ok_or(NotOnHost::Type(number)),
        }
    }

    /// The host's number of an operation, and its parameters with the host's number of its variant.
    pub(crate) fn operation(
        &self,
        op: u32,
        mut params: [i32; PARAM_WORDS],
    ) -> Result<(u32, [i32; PARAM_WORDS]), NotOnHost> {
        let Self::Mapped(mapped) = self else { return Ok((op, params)) };
        let number = find(&mapped.ops, op).ok_or(NotOnHost::Op(op))?;
        if let Some((_, variants)) = mapped.variants.iter().find(|(known, _)| *known == Some(op)) {
            let variant = u32::try_from(params[0]).ok().and_then(|variant| find(variants, variant));
            let variant = variant.and_then(|variant| i32::try_from(variant).ok());
            params[0] = variant.ok_or(NotOnHost::Variant(op, params[0]))?;
        }
        Ok((number, params))
    }
}

impl HostHints {
    fn version(self) -> &'static str {
        match self {
            Self { ours: true, .. } => "of an unknown release",
            Self { tells_mmap_support: true, .. } => "0.19 or newer",
            Self { tells_mmap_support: false, .. } => "older than 0.19",
        }
    }
}

fn map(ours: &[String], theirs: &[String]) -> Vec<Option<u32>> {
    let number = |name: &String| theirs.iter().position(|known| known == name && !name.is_empty());
    ours.iter().map(|name| number(name).and_then(|number| u32::try_from(number).ok())).collect()
}

fn find(numbers: &[Option<u32>], number: u32) -> Option<u32> {
    numbers.get(usize::try_from(number).ok()?).copied().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use apir_ggml::{OpTable, Version};

    const UPSTREAM: HostHints = HostHints { ours: false, tells_mmap_support: true };

    fn list(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn guest(minor: u32) -> Names {
        Names {
            version: Version { major: 0, minor, patch: 1 },
            ops: OpTable::from_names(["NONE", "ADD", "TRI", "UNARY", "GLU"]),
            unary: list(&["ABS", "NEG"]),
            glu: list(&["REGLU"]),
            types: list(&["f32", "f16"]),
        }
    }

    fn host(ops: &[&str], unary: &[&str], types: &[&str]) -> NamesReply {
        let version = "0.99.0".to_owned();
        NamesReply { version, ops: list(ops), unary: list(unary), glu: list(&["REGLU"]), types: list(types) }
    }

    fn agree(
        names: Names,
        told: Option<&NamesReply>,
        hints: HostHints,
        same_ggml: bool,
    ) -> Result<Numbers, SessionError> {
        OwnNumbers { names, same_ggml }.agree(told, hints)
    }

    fn params(first: i32) -> [i32; PARAM_WORDS] {
        let mut params = [7; PARAM_WORDS];
        params[0] = first;
        params
    }

    #[test]
    fn t27_equal_names_are_the_same_numbers() {
        let told = host(&["NONE", "ADD", "TRI", "UNARY", "GLU"], &["ABS", "NEG"], &["f32", "f16"]);
        assert_eq!(agree(guest(26), Some(&told), UPSTREAM, false).unwrap(), Numbers::Same);
    }

    #[test]
    fn t27_other_numbers_are_mapped_by_name_and_what_is_missing_is_told() {
        let told = host(&["NONE", "NEW", "ADD", "UNARY", "GLU"], &["NEW", "NEG"], &["f32", "new", "f16"]);
        let numbers = agree(guest(26), Some(&told), UPSTREAM, false).unwrap();
        assert_eq!(numbers.operation(0, params(1)), Ok((0, params(1))));
        assert_eq!(numbers.operation(1, params(1)), Ok((2, params(1))));
        assert_eq!(numbers.operation(2, params(1)), Err(NotOnHost::Op(2)));
        assert_eq!(numbers.operation(3, params(1)), Ok((3, params(1))));
        assert_eq!(numbers.operation(3, params(0)), Err(NotOnHost::Variant(3, 0)));
        assert_eq!(numbers.operation(3, params(-1)), Err(NotOnHost::Variant(3, -1)));
        assert_eq!(numbers.operation(5, params(0)), Err(NotOnHost::Op(5)));
        assert_eq!((numbers.type_(0), numbers.type_(1)), (Ok(0), Ok(2)));
        assert_eq!(numbers.type_(2), Err(NotOnHost::Type(2)));
    }

    #[test]
    fn t27_a_host_that_tells_no_names_is_refused_unless_the_numbers_are_known_to_be_the_same() {
        let settled = Names { ops: OpTable::from_names(std::iter::repeat_n("OP", 101)), ..guest(26) };
        let same = |names: &Names, hints, said| agree(names.clone(), None, hints, said).is_ok();
        assert!(same(&settled, UPSTREAM, false));
        let (older, ours) =
            (HostHints { tells_mmap_support: false, ..UPSTREAM }, HostHints { ours: true, ..UPSTREAM });
        assert!(!same(&settled, older, false) && !same(&settled, ours, false));
        assert!(!same(&guest(13), UPSTREAM, false) && same(&guest(13), UPSTREAM, true));
        let error = agree(guest(13), None, UPSTREAM, false).unwrap_err().to_string();
        assert!(
            error.contains("0.19 or newer") && error.contains("0.13.1") && !error.contains('\n'),
            "{error}"
        );
    }

    #[test]
    fn t27_lists_that_are_none_are_refused() {
        for told in [
            host(&[], &["ABS"], &["f32"]),
            host(&["ADD", "NONE"], &["ABS"], &["f32"]),
            host(&["NONE"; MAX_NAMES + 1], &["ABS"], &["f32"]),
            host(&["NONE"], &[], &["f32"]),
        ] {
            let refused = agree(guest(26), Some(&told), UPSTREAM, true);
            assert!(matches!(refused, Err(SessionError::Names(_))), "{refused:?}");
        }
    }
}
