//! The ggml backend: vtables of C functions over the safe parts of this crate.
//!
//! ggml calls in here from any thread. No function unwinds: a panic becomes the function's error value and a line in
//! ggml's log, see [`guard`].

mod attachment;
mod buffer;
mod buffer_type;
mod compute;
mod device;
mod log;
mod lost;
mod once;
mod ops;
mod registry;
#[cfg(test)]
mod tests;
mod throttle;

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs the body of a function that ggml calls; a panic gives `failed`.
fn guard<T>(function: &str, failed: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| {
        log::error(format_args!("{function} failed: {}; this is a bug in apir", reason(&*panic)));
        failed
    })
}

fn reason(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("unknown panic")
}
