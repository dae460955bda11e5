//! Times null calls (device_get_device_count) to the server at `APIR_SOCKET`: `null_call [CALLS]`.
#![forbid(unsafe_code)]

use apir_protocol::command::{Command, CommandType};
use apir_protocol::constants::{PROTOCOL_MAJOR, PROTOCOL_MINOR, REPLY_BLOB_SIZE};
use apir_protocol::header::CommandHeader;
use ggml_virtgpu::link::{self, Blob, Link, LinkError, wait};
use std::error::Error;
use std::time::{Duration, Instant};

fn call(
    link: &dyn Link,
    reply: &Blob,
    type_: CommandType,
    flags: u32,
    words: &[u32],
) -> Result<u32, LinkError> {
    let header = CommandHeader {
        type_: type_.number() + link.command_type_offset(),
        flags,
        reply_res_id: reply.res_id(),
    };
    let mut command = header.to_bytes().to_vec();
    command.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    reply.store_word(0, 0);
    link.submit(&command)?;
    wait::until(link, Some(Duration::from_secs(60)), || reply.load_word(0) != 0)?;
    Ok(reply.load_word(0) - 1)
}

fn main() -> Result<(), Box<dyn Error>> {
    let calls: usize = std::env::args().nth(1).map_or(Ok(20_000), |calls| calls.parse())?;
    let link = link::open()?;
    let link = link.as_ref();
    let reply = link.create_blob(REPLY_BLOB_SIZE)?;
    call(link, &reply, CommandType::Handshake, 0, &[PROTOCOL_MAJOR, PROTOCOL_MINOR])?;
    let loaded = call(link, &reply, CommandType::LoadLibrary, 0, &[])?;
    if loaded != 0 {
        return Err(format!("the library did not load: code {loaded}").into());
    }
    let mut times = Vec::with_capacity(calls);
    for _ in 0..calls + calls / 10 {
        let start = Instant::now();
        let code = call(link, &reply, CommandType::Forward, Command::DeviceGetDeviceCount.number(), &[])?;
        times.push(start.elapsed());
        if code != 4 {
            return Err(format!("the call failed: code {code}").into());
        }
    }
    // The first calls warm caches up.
    let times = &mut times[calls / 10..];
    times.sort_unstable();
    let at = |share: f64| times[((calls - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
    println!("{{\"call_us\":{{\"median\":{:.2},\"p99\":{:.2}}}}}", at(0.5), at(0.99));
    Ok(())
}
