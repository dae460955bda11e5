//! What a program in this guest finds: the ways to a host, blobs of awkward sizes on each, and the session's calls.
//!
//! With an argument N, a null call is timed N times. Exits with 1 when nothing answers.
#![forbid(unsafe_code)]

use apir_protocol::messages::{DeviceGetDescriptionRequest, DeviceGetDeviceCountRequest};
use ggml_virtgpu::link;
use ggml_virtgpu::session::Session;
use std::error::Error;
use std::process::ExitCode;
use std::time::Instant;

/// Around the sizes of pages, and the reply of a large graph.
const SIZES: [u64; 8] = [1, 4095, 4096, 4097, 16383, 16384, 16385, 131_268];

fn main() -> ExitCode {
    match probe() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn probe() -> Result<(), Box<dyn Error>> {
    for route in link::routes()? {
        println!("route: {}", route.name().unwrap_or("socket"));
        let link = route.open()?;
        for size in SIZES {
            let blob = link.create_blob(size)?;
            let end = blob.len() - 4;
            let fresh = blob.load_word(end);
            blob.store_word(end, 0x5a5a_0000 + size as u32);
            let same = blob.load_word(end) == 0x5a5a_0000 + size as u32;
            println!(
                "blob of {size}: id {}, {} bytes, fresh word {fresh}, same {same}",
                blob.res_id(),
                blob.len()
            );
            if fresh != 0 || !same {
                return Err("a blob is not memory of our own".into());
            }
        }
        match link.create_blob(1 << 40) {
            Ok(_) => println!("blob of 1 TiB: made"),
            Err(error) => println!("blob of 1 TiB: {error}"),
        }
    }
    let started = Instant::now();
    let session = Session::connect()?;
    println!("connected by {} in {:?}", session.transport(), started.elapsed());
    let description = session.device_get_description(&DeviceGetDescriptionRequest {})?.description;
    println!("device: {description}");
    let calls: usize = std::env::args().nth(1).map_or(Ok(0), |calls| calls.parse())?;
    let mut times = Vec::with_capacity(calls);
    for _ in 0..calls {
        let started = Instant::now();
        session.device_get_device_count(&DeviceGetDeviceCountRequest {})?;
        times.push(started.elapsed());
    }
    times.sort_unstable();
    if let (Some(median), Some(p99)) = (times.get(calls / 2), times.get(calls * 99 / 100)) {
        println!("null call: median {median:?}, p99 {p99:?}");
    }
    Ok(())
}
