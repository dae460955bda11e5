//! Just enough HTTP for llama-server.
#![forbid(unsafe_code)]

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use serde_json::Value;

use crate::error::{Error, IoContext};

/// A TCP port on this machine that nobody listens on.
pub fn free_port() -> Result<u16, Error> {
    let address = (Ipv4Addr::LOCALHOST, 0);
    let listener = TcpListener::bind(address).at("listen on", "127.0.0.1:0".as_ref())?;
    Ok(listener.local_addr().at("ask for", "127.0.0.1:0".as_ref())?.port())
}

/// Sends one request and gives back the status and the JSON body.
pub fn request(port: u16, method: &str, path: &str, body: &Value) -> Result<(u16, Value), Error> {
    let body = if body.is_null() { String::new() } else { body.to_string() };
    let text =
        exchange(port, method, path, &body).at("talk HTTP to", format!("127.0.0.1:{port}{path}").as_ref())?;
    parse(&text).ok_or_else(|| Error::Unexpected(format!("not an HTTP answer with JSON: {text}")))
}

fn exchange(port: u16, method: &str, path: &str, body: &str) -> std::io::Result<String> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(Duration::from_secs(120)))?;
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    Ok(text)
}

fn parse(text: &str) -> Option<(u16, Value)> {
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.split_whitespace().nth(1)?.parse().ok()?;
    Some((status, serde_json::from_str(body).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers() {
        let text = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{\"status\":\"ok\"}";
        assert_eq!(parse(text), Some((200, serde_json::json!({"status": "ok"}))));
        assert_eq!(parse("rubbish"), None);
    }
}
