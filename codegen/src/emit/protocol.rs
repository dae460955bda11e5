//! `protocol/src/generated.rs`: numbers, and requests and replies with their codecs.

use super::{doc, reply, request, variant};
use crate::spec::{Command, Constant, ConstantType, Enumeration, Field, FieldType, Spec};
use proc_macro2::TokenStream;
use quote::{format_ident, quote};

/// The whole file.
#[must_use]
pub fn emit(spec: &Spec) -> TokenStream {
    let constants = spec.constants.iter().map(constant);
    let enumerations = spec.enumerations.iter().map(enumeration);
    let command = command_enum(&spec.commands);
    let messages = spec.commands.iter().map(messages);
    quote! {
        pub mod constants {
            #(#constants)*
        }

        #(#enumerations)*

        #command

        pub mod messages {
            use super::Command;
            use crate::codec::{DecodeError, Decoder, EncodeError, Encoder};
            use crate::handle::{BufferHandle, BufferTypeHandle};
            use crate::tensor::{InlineTensor, TensorRecord};
            use crate::{Request, Wire};
            use alloc::string::String;
            use alloc::vec::Vec;

            #(#messages)*
        }
    }
}

fn constant(constant: &Constant) -> TokenStream {
    let (name, text) = (format_ident!("{}", constant.name), doc(&constant.doc));
    match constant.type_ {
        ConstantType::U32 => {
            // The specification's check has seen that it fits.
            let value = proc_macro2::Literal::u64_unsuffixed(constant.value);
            quote! { #[doc = #text] pub const #name: u32 = #value; }
        }
        ConstantType::U64 => {
            let value = proc_macro2::Literal::u64_unsuffixed(constant.value);
            quote! { #[doc = #text] pub const #name: u64 = #value; }
        }
    }
}

fn enumeration(enumeration: &Enumeration) -> TokenStream {
    let (name, text) = (format_ident!("{}", enumeration.name), doc(&enumeration.doc));
    let names: Vec<_> = enumeration.variants.iter().map(|v| format_ident!("{}", v.name)).collect();
    let docs: Vec<_> = enumeration.variants.iter().map(|v| doc(&v.doc)).collect();
    let plain: Vec<_> = enumeration.variants.iter().map(|v| v.doc.trim_end_matches('.')).collect();
    let values: Vec<_> =
        enumeration.variants.iter().map(|v| proc_macro2::Literal::u32_unsuffixed(v.value)).collect();
    quote! {
        #[doc = #text]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum #name {
            #(#[doc = #docs] #names = #values,)*
        }

        impl #name {
            /// The member with this number, if there is one.
            #[must_use]
            pub const fn from_number(number: u32) -> Option<Self> {
                match number {
                    #(#values => Some(Self::#names),)*
                    _ => None,
                }
            }

            /// The number on the wire.
            #[must_use]
            pub const fn number(self) -> u32 {
                self as u32
            }

            /// What the number says, for people.
            #[must_use]
            pub const fn description(self) -> &'static str {
                match self {
                    #(Self::#names => #plain,)*
                }
            }
        }
    }
}

fn command_enum(commands: &[Command]) -> TokenStream {
    let variants: Vec<_> = commands.iter().map(variant).collect();
    let docs: Vec<_> = commands.iter().map(|c| doc(&c.doc)).collect();
    let names: Vec<_> = commands.iter().map(|c| &c.name).collect();
    let numbers: Vec<_> = commands.iter().map(|c| proc_macro2::Literal::u32_unsuffixed(c.number)).collect();
    quote! {
        /// A command that FORWARD carries.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum Command {
            #(#[doc = #docs] #variants = #numbers,)*
        }

        impl Command {
            /// Every command in order of the numbers.
            pub const ALL: &'static [Self] = &[#(Self::#variants),*];

            /// The command with this number, if there is one.
            #[must_use]
            pub const fn from_number(number: u32) -> Option<Self> {
                match number {
                    #(#numbers => Some(Self::#variants),)*
                    _ => None,
                }
            }

            /// The number on the wire.
            #[must_use]
            pub const fn number(self) -> u32 {
                self as u32
            }

            /// The command's name.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    #(Self::#variants => #names,)*
                }
            }
        }
    }
}

fn messages(command: &Command) -> TokenStream {
    let (request_name, reply_name, variant) = (request(command), reply(command), variant(command));
    let request = message(
        &request_name,
        &format!("Request of `{}`: {}", command.name, lower_first(&command.doc)),
        &command.request,
    );
    let reply = message(&reply_name, &format!("Reply to `{}`.", command.name), &command.reply);
    quote! {
        #request

        impl Request for #request_name {
            const COMMAND: Command = Command::#variant;
            type Reply = #reply_name;
        }

        #reply
    }
}

fn lower_first(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_lowercase().chain(chars).collect())
}

fn message(name: &proc_macro2::Ident, text: &str, fields: &[Field]) -> TokenStream {
    let text = doc(text);
    if fields.is_empty() {
        return quote! {
            #[doc = #text]
            #[derive(Debug, Clone, PartialEq, Eq, Default)]
            pub struct #name {}

            impl Wire for #name {
                fn encode(&self, _encoder: &mut Encoder<'_>) -> Result<(), EncodeError> {
                    Ok(())
                }

                fn decode(_decoder: &mut Decoder<'_>) -> Result<Self, DecodeError> {
                    Ok(Self {})
                }
            }
        };
    }
    let names: Vec<_> = fields.iter().map(|f| format_ident!("{}", f.name)).collect();
    let docs = fields.iter().map(|field| {
        let plain = field.name.trim_end_matches('_').replace('_', " ");
        doc(&if field.doc.is_empty() {
            format!("The {plain}.")
        } else {
            format!("{}.", upper_first(&field.doc))
        })
    });
    let types = fields.iter().map(|field| rust_type(field.type_));
    let encoders = fields.iter().map(encode_field);
    let decoders = fields.iter().map(|field| decode_field(field.type_));
    quote! {
        #[doc = #text]
        #[derive(Debug, Clone, PartialEq, Eq, Default)]
        pub struct #name {
            #(#[doc = #docs] pub #names: #types,)*
        }

        impl Wire for #name {
            fn encode(&self, encoder: &mut Encoder<'_>) -> Result<(), EncodeError> {
                #(#encoders?;)*
                Ok(())
            }

            fn decode(decoder: &mut Decoder<'_>) -> Result<Self, DecodeError> {
                Ok(Self { #(#names: #decoders?,)* })
            }
        }
    }
}

fn upper_first(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_uppercase().chain(chars).collect())
}

fn rust_type(type_: FieldType) -> TokenStream {
    match type_ {
        FieldType::U8 => quote!(u8),
        FieldType::Bool => quote!(bool),
        FieldType::I32 | FieldType::Status => quote!(i32),
        FieldType::U32 => quote!(u32),
        FieldType::U64 => quote!(u64),
        FieldType::String => quote!(String),
        FieldType::Strings => quote!(Vec<String>),
        FieldType::Buffer => quote!(BufferHandle),
        FieldType::BufferType => quote!(BufferTypeHandle),
        FieldType::Tensor => quote!(TensorRecord),
        FieldType::InlineTensor => quote!(InlineTensor),
    }
}

/// The codec's method for the types that it knows by itself.
fn codec_method(type_: FieldType) -> Option<proc_macro2::Ident> {
    let name = match type_ {
        FieldType::Status => "i32",
        FieldType::Buffer | FieldType::BufferType | FieldType::Tensor | FieldType::InlineTensor => {
            return None;
        }
        plain => plain.name(),
    };
    Some(format_ident!("{name}"))
}

fn encode_field(field: &Field) -> TokenStream {
    let name = format_ident!("{}", field.name);
    match (codec_method(field.type_), field.type_) {
        (Some(method), FieldType::String | FieldType::Strings) => quote!(encoder.#method(&self.#name)),
        (Some(method), _) => quote!(encoder.#method(self.#name)),
        (None, _) => quote!(self.#name.encode(encoder)),
    }
}

fn decode_field(type_: FieldType) -> TokenStream {
    if let Some(method) = codec_method(type_) {
        quote!(decoder.#method())
    } else {
        let type_ = rust_type(type_);
        quote!(#type_::decode(decoder))
    }
}
