//! `host/src/generated.rs`: the handler trait and the dispatch table.

use super::{doc, method, reply, request, variant};
use crate::spec::Spec;
use proc_macro2::TokenStream;
use quote::quote;

/// The whole file.
#[must_use]
pub fn emit(spec: &Spec) -> TokenStream {
    let variants: Vec<_> = spec.commands.iter().map(variant).collect();
    let methods: Vec<_> = spec.commands.iter().map(method).collect();
    let requests: Vec<_> = spec.commands.iter().map(request).collect();
    let replies: Vec<_> = spec.commands.iter().map(reply).collect();
    let docs: Vec<_> = spec.commands.iter().map(|command| doc(&command.doc)).collect();
    quote! {
        use crate::error::CommandError;
        use apir_protocol::Wire;
        use apir_protocol::codec::{Decoder, Encoder};
        use apir_protocol::command::Command;
        use apir_protocol::messages::{#(#requests, #replies),*};

        /// Carries out the commands of one context.
        pub trait Handlers {
            #(
                #[doc = #docs]
                ///
                /// # Errors
                /// [`CommandError`] when the command is refused or fails.
                fn #methods(&mut self, request: #requests) -> Result<#replies, CommandError>;
            )*
        }

        /// Reads the request of a command, has it carried out, and writes the reply.
        ///
        /// # Errors
        /// [`CommandError`] of the handler, or of the codec.
        pub fn dispatch(
            handlers: &mut impl Handlers,
            command: Command,
            decoder: &mut Decoder<'_>,
            encoder: &mut Encoder<'_>,
        ) -> Result<(), CommandError> {
            match command {
                #(Command::#variants => handlers.#methods(#requests::decode(decoder)?)?.encode(encoder)?,)*
            }
            Ok(())
        }
    }
}
