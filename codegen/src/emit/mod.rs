//! Source text from a specification, one module a file.

pub mod docs;
pub mod guest;
pub mod host;
pub mod protocol;

use crate::spec::Command;
use proc_macro2::Ident;
use quote::format_ident;

/// `device_get_name` as a type's name: `DeviceGetName`.
fn camel(name: &str) -> String {
    name.split('_')
        .flat_map(|word| {
            let (first, rest) = word.split_at(word.len().min(1));
            [first.to_uppercase(), rest.to_owned()]
        })
        .collect()
}

/// Name of a command's variant.
fn variant(command: &Command) -> Ident {
    format_ident!("{}", camel(&command.name))
}

/// Name of a command's request.
fn request(command: &Command) -> Ident {
    format_ident!("{}Request", camel(&command.name))
}

/// Name of a command's reply.
fn reply(command: &Command) -> Ident {
    format_ident!("{}Reply", camel(&command.name))
}

/// Name of a command's handler and call.
fn method(command: &Command) -> Ident {
    format_ident!("{}", command.name)
}

/// Spelled as a doc comment: a space behind the slashes.
fn doc(text: &str) -> String {
    format!(" {text}")
}
