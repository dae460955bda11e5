//! Measures a call that does nothing: a typed call of the guest's session to a host and back.
//!
//! Prints one line of JSON, `{"call_us":{"median":…,"p99":…}}`.
#![forbid(unsafe_code)]

use std::error::Error;
use std::time::Instant;

use apir_protocol::messages::DeviceGetDeviceCountRequest;
use ggml_virtgpu::session::Session;
use serde_json::json;

/// Calls before the clock counts.
const WARM_UP: usize = 2_000;

/// Calls that are timed one by one.
const CALLS: usize = 20_000;

fn main() -> Result<(), Box<dyn Error>> {
    let session = Session::connect()?;
    for _ in 0..WARM_UP {
        session.device_get_device_count(&DeviceGetDeviceCountRequest {})?;
    }
    let mut times = Vec::with_capacity(CALLS);
    for _ in 0..CALLS {
        let started = Instant::now();
        session.device_get_device_count(&DeviceGetDeviceCountRequest {})?;
        times.push(started.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_unstable_by(f64::total_cmp);
    let quantile = |of_hundred: usize| (times[(CALLS - 1) * of_hundred / 100] * 100.0).round() / 100.0;
    println!("{}", json!({"call_us": {"median": quantile(50), "p99": quantile(99)}}));
    Ok(())
}
