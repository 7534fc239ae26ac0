//! The process that a user sees: it greets, starts its workers, binds, loads, answers, and ends as it is told to.
#![expect(
    clippy::disallowed_methods,
    reason = "the stand-in pretends to take time, and checks that its model is there"
)]

use std::convert::Infallible;
use std::future::pending;
use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::sleep;

use super::engine::Engine;
use super::worker::Workers;
use super::{EchoArgs, EchoError, http, log, log_raw};

/// Runs until something ends it. `started` is what `--crash-after` counts from.
pub(super) async fn run(args: EchoArgs, started: Instant) -> Result<ExitCode, EchoError> {
    // Before anything else, so that --ignore-sigterm holds from the start.
    let mut terminate = signal(SignalKind::terminate())?;
    let engine = Arc::new(Engine::new(args));
    let args = &engine.args;
    greet(&engine);
    if args.crash_after == Some(Duration::ZERO) {
        return Ok(crashed(args));
    }
    check_model(args)?;
    let mut workers = Workers::start(args)?;

    let stop = async {
        tokio::select! {
            () = asked_to_stop(&mut terminate, args) => Ok::<(), EchoError>(()),
            never = service(&engine) => match never? {},
            never = workers.watch() => match never {},
        }
    };
    tokio::select! {
        code = crash(args, started) => return Ok(code),
        result = stop => result?,
    }
    // The service is dropped, so the port is closed. Connections that are open have tasks of their own, which end
    // with the runtime.
    tokio::select! {
        code = crash(args, started) => Ok(code),
        code = drain(&mut terminate, args) => Ok(code),
    }
}

/// The first lines of the log.
fn greet(engine: &Engine) {
    let pid = std::process::id();
    log(format_args!(
        "starting as pid {pid}, serving {:?}",
        engine.name
    ));
    for name in &engine.args.print_env {
        let line = match std::env::var_os(name) {
            Some(value) => format!("{name}={}\n", value.display()),
            None => format!("{name} is not set\n"),
        };
        log_raw(line.as_bytes());
    }
    flood(engine.args.log_bytes);
}

/// Logs exactly this many bytes, in lines. Blocks when nobody reads them, as real engines do.
fn flood(mut bytes: u64) {
    const LINE: &str = "echo: filler, so that the log grows as fast as a real engine's does\n";
    let chunk = LINE.repeat(64);
    while bytes > 0 {
        // The cut keeps the end of the text, which is a line's end.
        let length = usize::try_from(bytes).map_or(chunk.len(), |bytes| bytes.min(chunk.len()));
        log_raw(&chunk.as_bytes()[chunk.len() - length..]);
        bytes -= length as u64;
    }
}

fn check_model(args: &EchoArgs) -> Result<(), EchoError> {
    match &args.model {
        None => Ok::<(), EchoError>(()),
        Some(path) => match std::fs::metadata(path) {
            Ok(_) => Ok::<(), EchoError>(()),
            Err(source) => Err(EchoError::Model {
                path: path.clone(),
                source,
            }),
        },
    }
}

/// Binds, loads and answers. Never ends but by failing.
async fn service(engine: &Arc<Engine>) -> Result<Infallible, EchoError> {
    let args = &engine.args;
    let load = async {
        if args.never_ready {
            pending::<()>().await;
        }
        sleep(args.load_seconds).await;
        engine.loaded();
    };
    if args.bind_after_load {
        load.await;
        let listener = bind(args).await?;
        log(format_args!("ready"));
        return answer(listener, engine).await;
    }
    let serving = answer(bind(args).await?, engine);
    tokio::pin!(serving);
    tokio::select! {
        never = &mut serving => match never? {},
        () = load => log(format_args!("ready")),
    }
    serving.await
}

async fn bind(args: &EchoArgs) -> Result<TcpListener, EchoError> {
    let (host, port) = (args.host.clone(), args.port);
    match TcpListener::bind((host.as_str(), port)).await {
        Ok(listener) => {
            // With --port 0 this is the only way to learn the port.
            let address = listener.local_addr()?;
            log(format_args!("listening on http://{address}"));
            Ok(listener)
        }
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            let taken = EchoError::PortTaken { host, port };
            if args.hang_on_taken_port {
                log(format_args!("{taken}; staying all the same"));
                pending::<()>().await;
            }
            Err(taken)
        }
        Err(source) => Err(EchoError::Listen { host, port, source }),
    }
}

async fn answer(listener: TcpListener, engine: &Arc<Engine>) -> Result<Infallible, EchoError> {
    axum::serve(listener, http::router(Arc::clone(engine))).await?;
    // The server has no shutdown signal: it ends when its future is dropped.
    pending().await
}

/// Comes back when SIGTERM came and is not to be ignored.
async fn asked_to_stop(terminate: &mut Signal, args: &EchoArgs) {
    loop {
        received(terminate).await;
        if !args.ignore_sigterm {
            log(format_args!("SIGTERM: stopping"));
            return;
        }
        log(format_args!("SIGTERM: ignored"));
    }
}

/// The time between SIGTERM and the end.
async fn drain(terminate: &mut Signal, args: &EchoArgs) -> ExitCode {
    let Some(delay) = args.term_delay else {
        return ExitCode::SUCCESS;
    };
    log(format_args!("port closed, draining for {delay:?}"));
    tokio::select! {
        () = sleep(delay) => {
            log(format_args!("drained"));
            ExitCode::SUCCESS
        }
        () = received(terminate) => {
            log(format_args!("second SIGTERM: ending at once"));
            ExitCode::FAILURE
        }
    }
}

async fn received(terminate: &mut Signal) {
    // `None` means that no signal can come any more. Then none does.
    if terminate.recv().await.is_none() {
        pending::<()>().await;
    }
}

async fn crash(args: &EchoArgs, started: Instant) -> ExitCode {
    match args.crash_after {
        None => pending().await,
        Some(after) => {
            sleep(after.saturating_sub(started.elapsed())).await;
            crashed(args)
        }
    }
}

fn crashed(args: &EchoArgs) -> ExitCode {
    log(format_args!(
        "crashing as told, exit code {}",
        args.exit_code
    ));
    ExitCode::from(args.exit_code)
}
