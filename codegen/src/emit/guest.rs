//! `guest/src/generated.rs`: a typed call for each command that guests should send.

use super::{doc, method, reply, request};
use crate::spec::Spec;
use proc_macro2::TokenStream;
use quote::quote;

/// The whole file.
#[must_use]
pub fn emit(spec: &Spec) -> TokenStream {
    let commands: Vec<_> = spec.commands.iter().filter(|command| !command.deprecated).collect();
    let methods = commands.iter().map(|command| method(command));
    let requests: Vec<_> = commands.iter().map(|command| request(command)).collect();
    let replies: Vec<_> = commands.iter().map(|command| reply(command)).collect();
    let docs = commands.iter().map(|command| doc(&command.doc));
    quote! {
        use crate::session::{Session, SessionError};
        use apir_protocol::messages::{#(#requests, #replies),*};

        impl Session {
            #(
                #[doc = #docs]
                ///
                /// # Errors
                /// [`SessionError`] when the host refuses the command or is gone.
                pub fn #methods(&self, request: &#requests) -> Result<#replies, SessionError> {
                    self.call(request)
                }
            )*
        }
    }
}
