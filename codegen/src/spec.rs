//! The specification: what `commands.toml` may say, read and checked.

use serde::Deserialize;
use std::collections::BTreeSet;
use thiserror::Error;

/// What is wrong in a specification.
#[derive(Debug, Error)]
pub enum SpecError {
    /// Not the TOML that is expected.
    #[error("{0}")]
    Toml(#[from] toml::de::Error),
    /// Two commands share a number or a name.
    #[error("two commands with the {what} {value}")]
    Duplicate {
        /// "number" or "name".
        what: &'static str,
        /// What both have.
        value: String,
    },
    /// A name that is no Rust identifier.
    #[error("{0:?} is no identifier")]
    Name(String),
    /// A constant's value does not fit its type.
    #[error("constant {name}: {value} does not fit {type_}")]
    Value {
        /// The constant.
        name: String,
        /// Its value.
        value: u64,
        /// Its type.
        type_: String,
    },
    /// Inline tensors have no fixed size: nothing may follow them.
    #[error("{command}: a field behind the inline tensor")]
    InlineNotLast {
        /// The command.
        command: String,
    },
}

/// A whole specification.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// Named numbers.
    #[serde(rename = "constant")]
    pub constants: Vec<Constant>,
    /// Sets of named numbers.
    #[serde(rename = "enumeration")]
    pub enumerations: Vec<Enumeration>,
    /// Commands in order of their numbers.
    #[serde(rename = "command")]
    pub commands: Vec<Command>,
}

/// A named number.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Constant {
    /// Name in capitals.
    pub name: String,
    /// Type of the number.
    #[serde(rename = "type")]
    pub type_: ConstantType,
    /// The number.
    pub value: u64,
    /// One line for people.
    pub doc: String,
}

/// Type of a [`Constant`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ConstantType {
    /// 32 bits.
    U32,
    /// 64 bits.
    U64,
}

/// A set of named numbers of 32 bits.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Enumeration {
    /// Name of the type.
    pub name: String,
    /// One line for people.
    pub doc: String,
    /// The names and their numbers.
    pub variants: Vec<Variant>,
}

/// A member of an [`Enumeration`].
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variant {
    /// Name of the member.
    pub name: String,
    /// Its number.
    pub value: u32,
    /// One line for people.
    pub doc: String,
}

/// A command.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Command {
    /// Its number on the wire.
    pub number: u32,
    /// The kind of thing that it acts on.
    pub group: String,
    /// Its name.
    pub name: String,
    /// One line for people.
    pub doc: String,
    /// First protocol version that has it.
    pub since: String,
    /// Whether guests should no longer send it.
    #[serde(default)]
    pub deprecated: bool,
    /// What the guest sends behind the header.
    #[serde(default)]
    pub request: Vec<Field>,
    /// What the host answers behind the notification word.
    #[serde(default)]
    pub reply: Vec<Field>,
}

/// A field of a request or of a reply.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Field {
    /// Its name.
    pub name: String,
    /// Its type.
    #[serde(rename = "type")]
    pub type_: FieldType,
    /// One line for people; may be empty where the name says all.
    pub doc: String,
}

/// Type of a [`Field`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FieldType {
    /// A byte in 4 bytes.
    U8,
    /// A bool in 4 bytes.
    Bool,
    /// 4 bytes.
    I32,
    /// 4 bytes.
    U32,
    /// 8 bytes.
    U64,
    /// A text with its length in front.
    String,
    /// A list of texts with their number in front.
    Strings,
    /// ggml's status in 4 bytes.
    Status,
    /// A buffer's handle in 8 bytes.
    Buffer,
    /// A buffer type's handle in 8 bytes.
    BufferType,
    /// A tensor's record in 304 bytes.
    Tensor,
    /// A tensor with its sources behind it.
    InlineTensor,
}

impl FieldType {
    /// How many bytes it takes, in words.
    #[must_use]
    pub fn size(self) -> &'static str {
        match self {
            Self::U8 | Self::Bool | Self::I32 | Self::U32 | Self::Status => "4",
            Self::U64 | Self::Buffer | Self::BufferType => "8",
            Self::String => "8 + n, padded to 4",
            Self::Strings => "4 and each string",
            Self::Tensor => "304",
            Self::InlineTensor => "336 and more",
        }
    }

    /// Its name in the specification.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::Bool => "bool",
            Self::I32 => "i32",
            Self::U32 => "u32",
            Self::U64 => "u64",
            Self::String => "string",
            Self::Strings => "strings",
            Self::Status => "status",
            Self::Buffer => "buffer",
            Self::BufferType => "buffer_type",
            Self::Tensor => "tensor",
            Self::InlineTensor => "inline_tensor",
        }
    }
}

impl Spec {
    /// Reads and checks a specification.
    ///
    /// # Errors
    /// [`SpecError`]
    pub fn parse(text: &str) -> Result<Self, SpecError> {
        let mut spec: Self = toml::from_str(text)?;
        spec.check()?;
        spec.commands.sort_by_key(|command| command.number);
        Ok(spec)
    }

    fn check(&self) -> Result<(), SpecError> {
        for constant in &self.constants {
            identifier(&constant.name)?;
            if constant.type_ == ConstantType::U32 && u32::try_from(constant.value).is_err() {
                let (name, value) = (constant.name.clone(), constant.value);
                return Err(SpecError::Value { name, value, type_: "u32".into() });
            }
        }
        for enumeration in &self.enumerations {
            identifier(&enumeration.name)?;
            enumeration.variants.iter().try_for_each(|variant| identifier(&variant.name))?;
        }
        let (mut numbers, mut names) = (BTreeSet::new(), BTreeSet::new());
        for command in &self.commands {
            identifier(&command.name)?;
            if !numbers.insert(command.number) {
                return Err(SpecError::Duplicate { what: "number", value: command.number.to_string() });
            }
            if !names.insert(&command.name) {
                return Err(SpecError::Duplicate { what: "name", value: command.name.clone() });
            }
            for fields in [&command.request, &command.reply] {
                fields.iter().try_for_each(|field| identifier(&field.name))?;
                let inline = fields.iter().position(|field| field.type_ == FieldType::InlineTensor);
                if inline.is_some_and(|at| at + 1 != fields.len()) {
                    return Err(SpecError::InlineNotLast { command: command.name.clone() });
                }
            }
        }
        Ok(())
    }
}

fn identifier(name: &str) -> Result<(), SpecError> {
    syn::parse_str::<syn::Ident>(name).map(drop).map_err(|_| SpecError::Name(name.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "constant = []\nenumeration = []\n";

    fn command(number: u32, name: &str, fields: &str) -> String {
        format!(
            "[[command]]\nnumber = {number}\ngroup = \"g\"\nname = \"{name}\"\ndoc = \"d\"\nsince = \"0.1\"\nrequest = [{fields}]\n"
        )
    }

    #[test]
    fn commands_are_sorted_by_their_explicit_numbers() {
        let text = format!("{HEAD}{}{}", command(7, "b", ""), command(3, "a", ""));
        let spec = Spec::parse(&text).unwrap();
        assert_eq!(spec.commands.iter().map(|c| c.number).collect::<Vec<_>>(), [3, 7]);
    }

    #[test]
    fn faults_are_named() {
        let inline =
            r#"{ name = "t", type = "inline_tensor", doc = "" }, { name = "u", type = "u8", doc = "" }"#;
        for (commands, words) in [
            (command(1, "a", "") + &command(1, "b", ""), "two commands with the number 1"),
            (command(1, "a", "") + &command(2, "a", ""), "two commands with the name a"),
            (command(1, "a b", ""), "\"a b\" is no identifier"),
            (command(1, "a", inline), "a: a field behind the inline tensor"),
            (command(1, "a", r#"{ name = "t", type = "u9", doc = "" }"#), "unknown variant `u9`"),
            (command(1, "a", "") + "colour = 1\n", "unknown field `colour`"),
        ] {
            let error = Spec::parse(&format!("{HEAD}{commands}")).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let large = "command = []\nenumeration = []\n[[constant]]\nname = \"A\"\ntype = \"u32\"\nvalue = 4294967296\ndoc = \"\"\n";
        assert_eq!(Spec::parse(large).unwrap_err().to_string(), "constant A: 4294967296 does not fit u32");
    }
}
