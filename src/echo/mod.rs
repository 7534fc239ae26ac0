//! The echo engine: a small model server with an OpenAI-style API and no model.
//!
//! It has two purposes and no third. It is the engine of the quick start, so that a first deployment needs neither a
//! GPU nor a download: it answers a prompt with the prompt's own words. And it is the stand-in of the tests: each bad
//! habit that was measured on a real model server is one switch here, so that every test run meets all of them.
//!
//! | habit | seen at | switch |
//! |---|---|---|
//! | the port accepts while the model loads, health says 503 | llama-server | `--load-seconds` |
//! | the port refuses until the model is loaded | vLLM, SGLang | `--bind-after-load` |
//! | never becomes ready | a model that does not fit | `--never-ready` |
//! | health says 200 though nothing is loaded | `mlx_lm.server` | `--lie-healthy` |
//! | health fails, or hangs, after a while | all of them | `--fail-health-after`, `--hang-health-after` |
//! | health is fine, requests fail or hang | vLLM, `mlx_lm.server` | `--fail-requests`, `--hang-requests` |
//! | exits on its own, also with code 0 | vLLM, SGLang | `--crash-after`, `--exit-code` |
//! | stays alive when its port is taken | SGLang, `mlx_lm.server` | `--hang-on-taken-port` |
//! | ignores SIGTERM | vLLM while it loads | `--ignore-sigterm` |
//! | drains after SIGTERM, ends at a second one with code 1 | llama-server | `--term-delay` |
//! | worker processes, in its group | vLLM, SGLang | `--workers` |
//! | workers that live on without their leader | vLLM, SGLang | `--workers-outlive` |
//! | workers that ignore SIGTERM | SGLang | `--workers-ignore-sigterm` |
//! | workers in a session of their own | daemonising wrappers | `--workers-setsid` |
//! | a flood of log lines | all of them | `--log-bytes` |
//!
//! Without a switch it is a good citizen: a missing model or a taken port ends it with exit code 1 and a message, and
//! SIGTERM ends it at once with exit code 0, cutting what requests are open (vLLM does the same).
//!
//! # How it runs
//!
//! ```text
//! serve ─► worker::run                                   with --worker: one of the leader's workers
//!       └► leader::run ─► greet, workers, then whichever comes first of
//!             ├ service   bind, load, answer HTTP
//!             ├ crash     --crash-after
//!             └ stop      SIGTERM, then the drain, in which the listener is gone and open connections go on
//! ```
//!
//! One thread drives it all. Only `leader` and `worker` touch processes and signals; `openai` is a pure function from
//! a request's bytes to a reply.
#![expect(
    clippy::disallowed_methods,
    reason = "the stand-in pretends to take time"
)]

mod engine;
mod http;
mod leader;
mod openai;
mod worker;

use std::fmt;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// What the echo engine's command line says.
#[derive(Debug, Clone, clap::Args)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "one field per switch, and any combination of them is a case that a test may want"
)]
pub struct EchoArgs {
    /// Address to listen on
    #[arg(long, default_value = "127.0.0.1")]
    host: String,

    /// Port to listen on; 0 takes a free one and logs it
    #[arg(long, default_value_t = 9000)]
    port: u16,

    /// Name that requests must use [default: the model's path, or "echo"]
    #[arg(long, visible_alias = "alias", value_name = "NAME")]
    served_model_name: Option<String>,

    /// Path that must exist, as a model's would; it is not read
    #[arg(long, value_name = "PATH")]
    model: Option<PathBuf>,

    /// Seconds until the model counts as loaded
    #[arg(long, value_name = "SECONDS", value_parser = seconds, default_value = "0")]
    load_seconds: Duration,

    /// Listen only once the model is loaded
    #[arg(long)]
    bind_after_load: bool,

    /// Never finish loading
    #[arg(long, help_heading = "Faults")]
    never_ready: bool,

    /// Say 200 on the health path even though nothing is loaded
    #[arg(long, help_heading = "Faults")]
    lie_healthy: bool,

    /// Answer 500 on the health path this long after being ready
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = "Faults")]
    fail_health_after: Option<Duration>,

    /// Never answer on the health path from this long after being ready
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = "Faults")]
    hang_health_after: Option<Duration>,

    /// Answer completions with 500
    #[arg(long, conflicts_with = "hang_requests", help_heading = "Faults")]
    fail_requests: bool,

    /// Never answer completions
    #[arg(long, help_heading = "Faults")]
    hang_requests: bool,

    /// Exit this long after the start; 0 exits before the port is bound
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = "Faults")]
    crash_after: Option<Duration>,

    /// Exit code of --crash-after
    #[arg(
        long,
        value_name = "CODE",
        default_value_t = 1,
        help_heading = "Faults"
    )]
    exit_code: u8,

    /// Stay alive, without a port, when the port is taken
    #[arg(long, help_heading = "Faults")]
    hang_on_taken_port: bool,

    /// Do nothing on SIGTERM
    #[arg(long, help_heading = "Faults")]
    ignore_sigterm: bool,

    /// Go on this long after SIGTERM with the port closed; a second SIGTERM ends it with exit code 1
    #[arg(long, value_name = "SECONDS", value_parser = seconds, help_heading = "Faults")]
    term_delay: Option<Duration>,

    /// Worker processes to start
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Workers")]
    workers: u16,

    /// Workers live on when their leader is gone
    #[arg(long, help_heading = "Workers")]
    workers_outlive: bool,

    /// Workers leave the leader's session and process group
    #[arg(long, help_heading = "Workers")]
    workers_setsid: bool,

    /// Workers do nothing on SIGTERM
    #[arg(long, help_heading = "Workers")]
    workers_ignore_sigterm: bool,

    /// Log this many bytes at the start
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Log")]
    log_bytes: u64,

    /// Log NAME=value of this environment variable at the start; can be repeated
    #[arg(long, value_name = "NAME", help_heading = "Log")]
    print_env: Vec<String>,

    /// Be a worker of the process that started this one
    #[arg(long, hide = true)]
    worker: bool,
}

/// Why the echo engine could not start or go on. Each ends the process with exit code 1.
#[derive(Debug, thiserror::Error)]
pub enum EchoError {
    /// Another process listens on the port.
    #[error("port {port} on {host} is already taken by another process")]
    PortTaken {
        /// The address that was asked for.
        host: String,
        /// The port that was asked for.
        port: u16,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {host}:{port}")]
    Listen {
        /// The address that was asked for.
        host: String,
        /// The port that was asked for.
        port: u16,
        /// What the system said.
        source: io::Error,
    },
    /// The path given as the model is not there.
    #[error("cannot load model {}", path.display())]
    Model {
        /// The path as given.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A worker process could not be started.
    #[error("cannot start worker {index}")]
    Worker {
        /// Which of them, from 0.
        index: u16,
        /// What the system said.
        source: io::Error,
    },
    /// The runtime, a signal or the standard input could not be set up.
    #[error("cannot set up the echo engine")]
    Setup {
        /// What the system said.
        #[from]
        source: io::Error,
    },
}

/// Runs the echo engine until it ends, and says with which exit code.
///
/// Logs plain lines to standard error. It builds its own runtime, so it must not be called from within one.
pub fn serve(args: EchoArgs) -> Result<ExitCode, EchoError> {
    let started = Instant::now();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    if args.worker {
        runtime.block_on(worker::run(args))
    } else {
        runtime.block_on(leader::run(args, started))
    }
}

/// Writes one line to the log.
///
/// In one write, because the workers share the file. A failure is dropped: nobody reads the log then, and the engine's
/// behaviour must not depend on that.
fn log(line: fmt::Arguments<'_>) {
    log_raw(format!("echo: {line}\n").as_bytes());
}

/// Writes to the log as it is.
fn log_raw(bytes: &[u8]) {
    let _nobody_reads = io::stderr().write_all(bytes);
}

/// Parses a number of seconds, with a fraction if need be.
fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text
        .parse()
        .map_err(|_| "expected a number of seconds, such as 2 or 0.5".to_owned())?;
    Duration::try_from_secs_f64(number).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(clap::Parser)]
    pub(super) struct Line {
        #[command(flatten)]
        args: EchoArgs,
    }

    /// Arguments as a command line gives them.
    pub(super) fn args(words: &[&str]) -> EchoArgs {
        Line::parse_from(std::iter::once(&"echo").chain(words)).args
    }

    #[test]
    fn seconds_may_have_a_fraction_and_must_be_a_duration() {
        assert_eq!(seconds("0"), Ok(Duration::ZERO));
        assert_eq!(seconds("0.25"), Ok(Duration::from_millis(250)));
        for bad in ["", "x", "-1", "nan", "inf", "1e300"] {
            assert!(seconds(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn alias_is_another_word_for_the_served_name() {
        let args = args(&["--alias", "tiny"]);
        assert_eq!(args.served_model_name.as_deref(), Some("tiny"));
    }
}
