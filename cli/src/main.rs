//! The apir command line.
#![forbid(unsafe_code)]

use apir_renderer::worker::{self, Blobs, Libraries, WorkerOptions};
use apir_renderer::{
    Error, QueuedStderr, Sandbox, Server, ServerOptions, log_filter, log_filter_or_default, score,
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
    let server = Server::bind(ServerOptions {
        socket: options.socket,
        plugin: options.plugin,
        ggml_library: options.ggml_library,
        ggml_reg: options.ggml_reg,
        sandbox: Sandbox::from_environment()?,
    })?;
    say(&server.to_string());
    let ended = server.run();
    QueuedStderr::flush();
    ended
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
