//! The apir command line.
#![forbid(unsafe_code)]

use apir_renderer::worker::{self, Blobs, Libraries, WorkerOptions};
use apir_renderer::{
    Error, QueuedStderr, Sandbox, Server, ServerOptions, ShaderCaches, WarmOptions, Warmed, log_filter,
    log_filter_or_default, score,
};
use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// GPU remoting for virtual machines: ggml in the guest, the GPU on the host.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve a ggml backend to guests on a unix socket, one worker process for each.
    Serve(Serve),
    /// Fill the cache of compiled shaders that sandboxed workers read, so that guests do not wait for a compiler.
    Warm(Warm),
    /// Serve one client; started by `apir serve`, and by the virglrenderer drop-in in a VMM.
    #[command(hide = true)]
    Worker(Worker),
    /// Load a library and print how well it fits this processor; started for a choice among several.
    #[command(hide = true)]
    Score {
        /// The library.
        library: PathBuf,
    },
}

#[derive(Debug, Args)]
struct Serve {
    /// Where to listen; guests find it by the same path in APIR_SOCKET.
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,
    /// The APIR plugin, libggml-virtgpu-backend.so.
    #[arg(long, value_name = "FILE")]
    plugin: PathBuf,
    /// The ggml backend library to serve, such as libggml-cuda.so or libggml-cpu.so; of a folder or of a pattern such as
    /// 'DIR/libggml-cpu-*.so' the variant that fits the processor best.
    #[arg(long, value_name = "FILE")]
    ggml_library: PathBuf,
    /// The library's registration symbol, where it is not the plugin's default.
    #[arg(long, value_name = "SYMBOL", value_parser = symbol())]
    ggml_reg: Option<OsString>,
    /// Do not fill the cache of compiled shaders beside serving, where drivers need one and it is not filled.
    #[arg(long)]
    no_warm: bool,
}

#[derive(Debug, Args)]
struct Warm {
    /// The ggml backend library, such as libggml-vulkan.so.
    #[arg(long, value_name = "FILE")]
    ggml_library: PathBuf,
    /// The APIR plugin; else from VIRGL_APIR_BACKEND_LIBRARY, else beside this program.
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
    /// The library's registration symbol, where it is not the plugin's default.
    #[arg(long, value_name = "SYMBOL", value_parser = symbol())]
    ggml_reg: Option<OsString>,
    /// The folder of caches; else from APIR_SHADER_CACHE, else apir/shaders in the user's folder of caches.
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    /// Types of weights, with commas between; those of most models when absent.
    #[arg(long, value_name = "LIST")]
    weights: Option<String>,
    /// Sizes of attention heads.
    #[arg(long, value_name = "LIST")]
    heads: Option<String>,
    /// Numbers of tokens in a batch.
    #[arg(long, value_name = "LIST")]
    tokens: Option<String>,
    /// Fill a cache that is there anew.
    #[arg(long)]
    again: bool,
    /// Write into this empty cache: the process that does the work.
    #[arg(long, value_name = "DIR", hide = true)]
    into: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct Worker {
    /// The client's socket.
    #[arg(long)]
    fd: i32,
    /// The client's number.
    #[arg(long)]
    context: u32,
    /// The server's process id.
    #[arg(long)]
    server: i32,
    /// The client makes the blobs and hands them over.
    #[arg(long)]
    attach: bool,
    /// The APIR plugin; with --attach else from VIRGL_APIR_BACKEND_LIBRARY, else beside this program.
    #[arg(long, value_name = "FILE")]
    plugin: Option<PathBuf>,
    /// The ggml backend library; with --attach else from APIR_LLAMA_CPP_GGML_LIBRARY_PATH.
    #[arg(long, value_name = "FILE")]
    ggml_library: Option<PathBuf>,
    /// Its registration symbol; with --attach else from APIR_LLAMA_CPP_GGML_LIBRARY_REG.
    #[arg(long, value_name = "SYMBOL")]
    ggml_reg: Option<OsString>,
}

/// A symbol's name: an empty one would be taken for none.
fn symbol() -> impl TypedValueParser<Value = OsString> {
    OsStringValueParser::new().try_map(|name| match name.is_empty() {
        false => Ok(name),
        true => Err("no symbol has an empty name; leave the option out for the plugin's default"),
    })
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Serve(options) => serve(options),
        Command::Warm(options) => warm(options),
        Command::Worker(options) => {
            // Its starter has told of a wrong filter.
            // Its lines are taken apart by whoever reads them.
            start_logging(log_filter_or_default().0, io::stderr, false, false);
            let context = options.context;
            if let Err(error) = work(options) {
                tracing::warn!("context {context}: {error}");
                return ExitCode::FAILURE;
            }
            Ok(())
        }
        Command::Score { library } => {
            let _ = writeln!(io::stdout(), "{}", score(&library));
            Ok(())
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("apir: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn serve(options: Serve) -> Result<(), Error> {
    start_logging(log_filter()?, || QueuedStderr, true, io::stderr().is_terminal());
    let (sandbox, caches) = (Sandbox::from_environment()?, ShaderCaches::from_environment()?);
    let server = Server::bind(ServerOptions {
        socket: options.socket,
        plugin: options.plugin,
        ggml_library: options.ggml_library,
        ggml_reg: options.ggml_reg,
        sandbox: sandbox.clone(),
    })?;
    say(&server.to_string());
    if let Some(caches) = caches.filter(|_| !options.no_warm) {
        apir_renderer::warm_beside_server(WarmOptions {
            libraries: server.libraries().clone(),
            sandbox,
            caches,
            layers: Vec::new(),
            again: false,
        });
    }
    let ended = server.run();
    QueuedStderr::flush();
    ended
}

fn warm(options: Warm) -> Result<(), Error> {
    start_logging(log_filter()?, io::stderr, true, io::stderr().is_terminal());
    let program = std::env::current_exe().ok();
    let given = Libraries {
        plugin: options.plugin.as_deref().map(full),
        ggml_library: Some(full(&options.ggml_library)),
        ggml_reg: options.ggml_reg,
    };
    let lists = [
        ("apir.warm.weights", options.weights),
        ("apir.warm.heads", options.heads),
        ("apir.warm.tokens", options.tokens),
    ];
    let caches = match options.cache.or_else(|| options.into.clone()) {
        Some(folder) => Some(ShaderCaches::at(full(&folder))),
        None => ShaderCaches::from_environment()?,
    };
    let caches = caches.ok_or(Error::NotWarmed("there is no folder for caches; give --cache DIR"))?;
    let options_of = WarmOptions {
        libraries: given.or_environment(program.as_deref().and_then(Path::parent)),
        sandbox: Sandbox::from_environment()?,
        caches,
        layers: lists.into_iter().filter_map(|(key, list)| Some((key, list?))).collect(),
        again: options.again,
    };
    if let Some(part) = &options.into {
        return apir_renderer::fill(&options_of, part);
    }
    match apir_renderer::warm(&options_of)? {
        Warmed::Before(cache) => say(&format!("the cache of shaders was filled before: {}", cache.display())),
        Warmed::Now(cache) => say(&format!("the cache of shaders is filled: {}", cache.display())),
        Warmed::Nothing => say("the drivers have written no cache of shaders; there is none to read"),
    }
    Ok(())
}

/// A path that also holds in another folder; as given where there is none.
fn full(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

fn work(options: Worker) -> Result<(), Error> {
    let given =
        Libraries { plugin: options.plugin, ggml_library: options.ggml_library, ggml_reg: options.ggml_reg };
    let (blobs, libraries) = if options.attach {
        let program = std::env::current_exe().ok();
        (Blobs::Client, given.or_environment(program.as_deref().and_then(Path::parent)))
    } else {
        (Blobs::Worker, given)
    };
    worker::run(&WorkerOptions {
        fd: options.fd,
        context: options.context,
        server: options.server,
        blobs,
        libraries,
        sandbox: Sandbox::from_environment()?,
    })
}

fn start_logging<W: Write + 'static>(
    filter: EnvFilter,
    writer: impl Fn() -> W + Send + Sync + 'static,
    target: bool,
    colours: bool,
) {
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(target)
        .with_ansi(colours && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()))
        .with_writer(writer)
        // A standard error that is gone must not end the server.
        .log_internal_errors(false)
        .init();
}

/// A line on standard error, which may be gone.
fn say(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}
