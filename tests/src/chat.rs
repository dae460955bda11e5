//! A question to llama-server.
#![forbid(unsafe_code)]

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::error::{Error, check};
use crate::http;
use crate::process::wait_until;
use crate::program::Program;

/// How long the server may take to load the model.
const READY_LIMIT: Duration = Duration::from_secs(60);

/// Starts the server, asks it for the capital of France, and gives its answer and its log.
///
/// # Errors
/// It does not get ready in time, or gives no answer.
pub fn ask(server: Program, model: &Path) -> Result<(String, String), Error> {
    let port = http::free_port()?;
    let running = server
        .arg("-m")
        .arg(model)
        .args(["--port", &port.to_string(), "-t", "1", "-c", "1024", "-np", "1", "--no-warmup"])
        .args(["--fit", "off", "--log-verbosity", "4", "--log-colors", "off"])
        .start()?;
    let healthy = || matches!(http::request(port, "GET", "/health", &Value::Null), Ok((200, _)));
    if !wait_until(READY_LIMIT, healthy) {
        return Err(running.timeout("be healthy", READY_LIMIT));
    }
    let question = json!({
        "messages": [{"role": "user", "content": "Name the capital of France."}],
        "max_tokens": 16,
        "temperature": 0,
    });
    let (status, answer) = http::request(port, "POST", "/v1/chat/completions", &question)?;
    check(status == 200, || format!("{status}: {answer}"))?;
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap_or("").to_owned();
    check(!text.trim().is_empty(), || format!("no text in {answer}"))?;
    Ok((text, running.stderr().text()))
}
