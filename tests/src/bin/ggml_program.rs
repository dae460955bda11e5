//! A ggml program for the tests: loads ggml's libraries and our backend, and computes with what it finds.
//!
//! What it does is told on stdout in lines of JSON; after `ready` and `done` it waits for a line on stdin,
//! so that its memory can be looked at from outside.
#![forbid(unsafe_code)]

use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use apir_tests::Error;
use apir_tests::error::check;
use apir_tests::fork::{Forked, Side};
use apir_tests::ggml::{Calculation, Device, Ggml, Operation, Visibility};
use clap::{Parser, Subcommand};
use serde_json::{Value, json};

/// Side of the matrices that are computed with.
const SIDE: usize = 16;

#[derive(Parser)]
struct Arguments {
    /// Folder of ggml's libraries
    #[arg(long)]
    ggml: PathBuf,
    /// Open them with RTLD_GLOBAL instead of RTLD_LOCAL
    #[arg(long)]
    global: bool,
    /// The backend library under test
    #[arg(long)]
    guest: PathBuf,
    /// A local backend to fall back to
    #[arg(long)]
    cpu: Option<PathBuf>,
    #[command(subcommand)]
    work: Work,
}

#[derive(Subcommand)]
enum Work {
    /// Computes once on the backend's device, or else on the local one
    Compute,
    /// Computes the operations whose numbers differ between releases of ggml
    Operations,
    /// Computes one graph again and again
    Repeat {
        #[arg(long, default_value_t = 1000)]
        warm_up: usize,
        #[arg(long)]
        count: usize,
    },
    /// Makes and frees buffers
    Buffers {
        #[arg(long, default_value_t = 100)]
        warm_up: usize,
        #[arg(long)]
        count: usize,
    },
    /// Computes one graph for a time and tells how long a computation takes
    Latency {
        #[arg(long, default_value_t = SIDE)]
        side: usize,
        #[arg(long)]
        seconds: u64,
    },
    /// Tries to make buffers, and computes afterwards
    Allocate {
        #[arg(long)]
        count: usize,
        #[arg(long, default_value_t = 4096)]
        size: usize,
        /// Leave the computation out
        #[arg(long)]
        only: bool,
    },
    /// Calls from several threads at once
    Threads {
        #[arg(long)]
        threads: usize,
        #[arg(long)]
        rounds: usize,
    },
    /// Forks children that use what they inherit, and computes meanwhile
    Forks,
    /// Waits, then tries to compute, and stores what it reads
    Store,
    /// Loads another copy of the backend
    Twice {
        #[arg(long)]
        second: PathBuf,
        /// Unload the first before
        #[arg(long)]
        unload: bool,
    },
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ggml-program: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Error> {
    let visibility = if arguments.global { Visibility::Global } else { Visibility::Local };
    let ggml = Ggml::open(&arguments.ggml, visibility)?;
    let loaded = ggml.load_backend(&arguments.guest)?;
    let registered = loaded.is_some();
    let mut devices = loaded.unwrap_or_default();
    tell(&json!({
        "event": "loaded",
        "version": ggml.version(),
        "registered": registered,
        "devices": devices.iter().map(describe).collect::<Vec<_>>(),
    }));
    if let Some(cpu) = &arguments.cpu {
        devices.extend(ggml.load_backend(cpu)?.unwrap_or_default());
    }
    let device = devices.first().ok_or_else(|| Error::Unexpected("there is no device at all".to_owned()))?;
    match arguments.work {
        Work::Compute => compute(device),
        Work::Operations => operations(device),
        Work::Repeat { warm_up, count } => repeat(device, warm_up, count),
        Work::Buffers { warm_up, count } => buffers(device, warm_up, count),
        Work::Latency { side, seconds } => latency(device, side, Duration::from_secs(seconds)),
        Work::Allocate { count, size, only } => {
            allocate(device, count, size)?;
            if only { Ok(()) } else { compute(device) }
        }
        Work::Threads { threads, rounds } => all_threads(device, threads, rounds),
        Work::Forks => forks(&ggml, &arguments.guest, device),
        Work::Store => store(device),
        Work::Twice { ref second, unload } => twice(&ggml, *device, second, unload),
    }
}

fn describe(device: &Device<'_>) -> Value {
    let (free, total) = device.memory();
    json!({
        "name": device.name(),
        "description": device.description(),
        "kind": device.kind(),
        "free": free,
        "total": total,
    })
}

fn compute(device: &Device<'_>) -> Result<(), Error> {
    let calculation = device.calculation(SIDE)?;
    let supported = calculation.is_supported_by(device);
    calculation.set_inputs(1)?;
    calculation.check_inputs(1)?;
    calculation.compute()?;
    calculation.check_result(1)?;
    tell(&json!({
        "event": "computed",
        "device": device.name(),
        "buffer": calculation.buffer_name(),
        "supported": supported,
    }));
    Ok(())
}

fn operations(device: &Device<'_>) -> Result<(), Error> {
    let mut unsupported = Vec::new();
    for operation in Operation::ALL {
        let Some(found) = device.compute_one(operation)? else {
            unsupported.push(format!("{operation:?}"));
            continue;
        };
        let wanted = operation.wanted();
        check(found == wanted, || format!("{operation:?} gave {found:?}, must be {wanted:?}"))?;
    }
    tell(&json!({ "event": "operations", "unsupported": unsupported, "device": device.name() }));
    Ok(())
}

fn repeat(device: &Device<'_>, warm_up: usize, count: usize) -> Result<(), Error> {
    let calculation = device.calculation(SIDE)?;
    let rounds = |count: usize| {
        for round in 0..count {
            // A new input now and then shows that each compute is real.
            if round % 100 == 0 {
                calculation.set_inputs(round)?;
            }
            calculation.compute()?;
            if round % 100 == 0 {
                calculation.check_result(round)?;
            }
        }
        Ok(())
    };
    rounds(warm_up)?;
    pause("ready");
    rounds(count)?;
    pause("done");
    Ok(())
}

fn buffers(device: &Device<'_>, warm_up: usize, count: usize) -> Result<(), Error> {
    let rounds = |count: usize| {
        for round in 0..count {
            let buffer = device.buffer(1 + (round % 7) * 10_000)?;
            buffer.clear(round as u8);
            check(buffer.base() != 0, || "a buffer without a base".to_owned())?;
        }
        Ok(())
    };
    rounds(warm_up)?;
    pause("ready");
    rounds(count)?;
    pause("done");
    Ok(())
}

fn latency(device: &Device<'_>, side: usize, time: Duration) -> Result<(), Error> {
    let calculation = device.calculation(side)?;
    calculation.set_inputs(1)?;
    pause("ready");
    let start = Instant::now();
    let mut taken = Vec::new();
    while taken.is_empty() || start.elapsed() < time {
        let begun = Instant::now();
        calculation.compute()?;
        taken.push(begun.elapsed());
    }
    calculation.check_inputs(1)?;
    calculation.check_result(1)?;
    taken.sort_unstable();
    let percentile = |part: usize| taken[(taken.len() - 1) * part / 100].as_micros();
    tell(&json!({
        "event": "latency",
        "computations": taken.len(),
        "p50_us": percentile(50),
        "p99_us": percentile(99),
        "most_us": percentile(100),
    }));
    Ok(())
}

fn allocate(device: &Device<'_>, count: usize, size: usize) -> Result<(), Error> {
    pause("ready");
    let buffers: Vec<_> = (0..count).map(|_| device.buffer(size).ok()).collect();
    let made: Vec<_> = buffers.iter().map(Option::is_some).collect();
    tell(&json!({ "event": "allocated", "made": made }));
    Ok(())
}

/// Children of every kind, each while this process computes with changing inputs and looks at every result.
fn forks(ggml: &Ggml, guest: &Path, device: &Device<'_>) -> Result<(), Error> {
    let calculation = device.calculation(SIDE)?;
    let buffer = device.buffer(4096)?;
    let mut rounds = 0;
    let mut go_on = |calculation: &Calculation<'_>, child: Option<&Forked>| {
        let mut ended = child.is_none();
        for least in 0.. {
            calculation.set_inputs(rounds)?;
            ended = ended || child.is_none_or(Forked::has_ended);
            calculation.compute()?;
            calculation.check_inputs(rounds)?;
            calculation.check_result(rounds)?;
            rounds += 1;
            if ended && least >= 20 {
                break;
            }
        }
        Ok::<(), Error>(())
    };
    go_on(&calculation, None)?;
    for child in ["uses", "frees", "asks", "computes", "uses and computes", "loads", "nothing"] {
        let forked = match Side::fork()? {
            Side::Parent(forked) => forked,
            Side::Child(end) => end.with(match child {
                "uses" => inherited(&calculation),
                "frees" => {
                    drop(calculation);
                    drop(buffer);
                    Ok(())
                }
                "asks" => check(device.memory().1 > 0, || "no memory".to_owned()),
                "computes" => compute(device),
                "uses and computes" => inherited(&calculation).and_then(|()| compute(device)),
                "loads" => ggml.load_backend(guest).and_then(|loaded| {
                    let devices = loaded.unwrap_or_default();
                    compute(devices.first().ok_or_else(|| Error::Unexpected("no device".to_owned()))?)
                }),
                _ => Ok(()),
            }),
        };
        go_on(&calculation, Some(&forked))?;
        forked.check()?;
        tell(&json!({ "event": "forked", "child": child }));
    }
    tell(&json!({ "event": "forks", "rounds": rounds }));
    pause("done");
    Ok(())
}

/// What a fork can do with what its parent made: nothing, without harm to either.
fn inherited(calculation: &Calculation<'_>) -> Result<(), Error> {
    calculation.set_inputs(1_000_000)?;
    calculation.check_inputs_are_lost()?;
    check(calculation.compute().is_err(), || "a fork computed with its parent's backend".to_owned())
}

/// What a program does that saves its state: it cannot know whether what it reads is what was there.
fn store(device: &Device<'_>) -> Result<(), Error> {
    let calculation = device.calculation(SIDE)?;
    calculation.set_inputs(1)?;
    calculation.compute()?;
    pause("ready");
    let failed = calculation.compute().is_err();
    let lost = calculation.check_inputs_are_lost().is_ok();
    let kept = calculation.check_inputs(1).is_ok();
    tell(&json!({ "event": "stored", "failed": failed, "zeros": lost, "as_written": kept }));
    Ok(())
}

fn twice(ggml: &Ggml, first: Device<'_>, second: &Path, unload: bool) -> Result<(), Error> {
    if unload {
        ggml.unload(first);
    }
    let loaded = ggml.load_backend(second)?.unwrap_or_default();
    let all = ggml.devices()?;
    tell(&json!({
        "event": "twice",
        "second": loaded.iter().map(describe).collect::<Vec<_>>(),
        "all": all.iter().map(describe).collect::<Vec<_>>(),
    }));
    compute(all.first().ok_or_else(|| Error::Unexpected("there is no device at all".to_owned()))?)
}

fn all_threads(device: &Device<'_>, threads: usize, rounds: usize) -> Result<(), Error> {
    let results: Vec<Result<(), Error>> = std::thread::scope(|scope| {
        let running: Vec<_> =
            (0..threads).map(|thread| scope.spawn(move || one_thread(device, thread, rounds))).collect();
        let crashed = || Err(Error::Unexpected("a thread panicked".to_owned()));
        running.into_iter().map(|thread| thread.join().unwrap_or_else(|_| crashed())).collect()
    });
    results.into_iter().collect::<Result<(), Error>>()?;
    tell(&json!({"event": "threads", "threads": threads, "rounds": rounds}));
    Ok(())
}

/// Calls of every kind; threads differ in sizes and values, so that a reply given to the wrong one is noticed.
fn one_thread(device: &Device<'_>, thread: usize, rounds: usize) -> Result<(), Error> {
    let name = device.name();
    let calculation = device.calculation(SIDE + thread)?;
    for round in 0..rounds {
        let seed = thread * 1000 + round;
        calculation.set_inputs(seed)?;
        let buffer = device.buffer(4096 * (thread + 1))?;
        buffer.clear(thread as u8);
        calculation.compute()?;
        let (free, total) = device.memory();
        check(free <= total, || format!("{free} bytes free of {total}"))?;
        check(calculation.is_supported_by(device), || "the device refuses its own graph".to_owned())?;
        calculation.check_inputs(seed)?;
        calculation.check_result(seed)?;
        check(device.name() == name, || "the device's name changed".to_owned())?;
    }
    Ok(())
}

fn tell(event: &Value) {
    println!("{event}");
    // A reader that is gone has nothing to be told.
    let _ = std::io::stdout().flush();
}

fn pause(event: &str) {
    tell(&json!({ "event": event }));
    // The end of stdin lets the program go on as well.
    let _ = std::io::stdin().lock().read_line(&mut String::new());
}
