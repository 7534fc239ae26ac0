//! The command line: one verb per file.
//!
//! Data goes to stdout, everything else to stderr; a reader that goes away is a clean end ([`report::clean_end`]). Verbs
//! that look read the state folder themselves, so they work whether or not a controller runs.

pub mod run;

pub mod validate;

pub mod diff;

pub mod get;

pub mod describe;

pub mod logs;

pub mod events;

pub mod wait;

pub mod down;

pub mod schema;

pub mod version;

pub mod survey;

pub mod progress;

pub mod report;

pub mod table;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tokio::task::LocalSet;

use crate::clock::Clock;
use crate::echo;
use report::{Colour, Exit, Report, clean_end};

/// Keeps the model servers of a GPU box running as their owner declared.
#[derive(Debug, Parser)]
#[command(name = "evenkeel", version, arg_required_else_help = true)]
struct Cli {
    /// The state folder [default: /var/lib/evenkeel for root, else `$XDG_STATE_HOME/evenkeel`]
    #[arg(long, global = true, value_name = "DIR", env = "EVENKEEL_STATE_DIR")]
    state_dir: Option<PathBuf>,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Keep what a folder's manifests declare running
    Run(run::RunArgs),
    /// Check manifests, without a host
    Validate(ValidateArgs),
    /// Show what would be done with a folder
    Diff(diff::DiffArgs),
    /// Show deployments and their instances
    Get(get::GetArgs),
    /// Show everything of one deployment
    Describe(describe::DescribeArgs),
    /// Show what an instance printed
    Logs(logs::LogsArgs),
    /// Show what happened
    Events(events::EventsArgs),
    /// Wait until a deployment is ready or gone
    Wait(wait::WaitArgs),
    /// Stop everything, and wait until it is gone
    Down(down::DownArgs),
    /// Print the JSON schema of manifests
    Schema,
    /// Print the version
    Version,
    /// Be a stand-in for a model server: what `engine: echo` runs
    Echo(echo::EchoArgs),
}

/// Checks manifests.
#[derive(Debug, Clone, clap::Args)]
struct ValidateArgs {
    /// Files and folders
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// How
    #[arg(short, long, value_enum, default_value = "text")]
    output: ValidateOutput,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ValidateOutput {
    /// For people
    Text,
    /// A JSON list of problems
    Json,
}

/// Seconds, not negative.
fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds.is_finite() && seconds >= 0.0 => Ok(seconds),
        Ok(_) | Err(_) => Err("a number of seconds, not negative".to_owned()),
    }
}

/// Seconds between two looks: at least a tenth, so that looking is not all that is done.
fn parse_period(text: &str) -> Result<f64, String> {
    match parse_seconds(text) {
        Ok(seconds) if seconds >= 0.1 => Ok(seconds),
        Ok(_) | Err(_) => Err("a number of seconds, at least 0.1".to_owned()),
    }
}

/// Runs the command line of this process.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let result = match cli.verb {
        Verb::Echo(args) => return echo(args),
        Verb::Schema => {
            print(|out| write!(out, "{}", schema::schema())).map(|()| Exit::Done.into())
        }
        Verb::Version => print(|out| version::version(out)).map(|()| Exit::Done.into()),
        Verb::Validate(args) => validate(&args),
        verb => block_on(dispatch(verb, cli.state_dir)),
    };
    result.unwrap_or_else(|report: Report| {
        // Nobody is left to be told if this fails.
        let _ = report.print(&mut io::stderr().lock(), Colour::of(&io::stderr()));
        report.exit.into()
    })
}

/// One thread drives everything. What blocks (a hung file system) is not waited for at the end.
fn block_on(verb: impl Future<Output = Result<ExitCode, Report>>) -> Result<ExitCode, Report> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Report::new(Exit::Failed, error))?;
    let result = LocalSet::new().block_on(&runtime, verb);
    runtime.shutdown_background();
    result
}

async fn dispatch(verb: Verb, state_dir: Option<PathBuf>) -> Result<ExitCode, Report> {
    let state = state_dir.map_or_else(default_state_dir, Ok)?;
    let out = &mut io::stdout();
    let done = |()| Exit::Done.into();
    match verb {
        Verb::Run(args) => run::run(&args, &state).await.map(done),
        Verb::Diff(args) => match diff::diff(&args, &state, out, &mut io::stderr()).await {
            Ok(code) => Ok(code.into()),
            Err(report) => {
                let _ = report.print(&mut io::stderr(), Colour::of(&io::stderr()));
                Ok(diff::ERROR.into())
            }
        },
        Verb::Get(args) => piped(get::get(&args, &state, out).await).map(done),
        Verb::Describe(args) => piped(describe::describe(&args, &state, out).await).map(done),
        Verb::Logs(args) => {
            let result = logs::logs(&args, &state, out).await;
            result.map(done).map_err(|error| {
                let hints = error.hint().into_iter().collect();
                Report {
                    hints,
                    ..Report::new(Exit::Failed, error)
                }
            })
        }
        Verb::Events(args) => {
            let result = events::events(&args, &state, &Clock::new(), out).await;
            result
                .map(done)
                .map_err(|error| Report::new(Exit::Failed, error))
        }
        Verb::Wait(args) => wait::wait(&args, &state).await.map(done),
        Verb::Down(args) => down::down(&args, &state).await.map(done),
        Verb::Schema | Verb::Version | Verb::Validate(_) | Verb::Echo(_) => Ok(Exit::Usage.into()),
    }
}

/// A reader of our output that went away is a clean end.
fn piped(result: Result<(), Report>) -> Result<(), Report> {
    match result {
        Err(report) => {
            let is_broken_pipe = report
                .error
                .downcast_ref::<io::Error>()
                .is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe);
            if is_broken_pipe { Ok(()) } else { Err(report) }
        }
        Ok(()) => Ok(()),
    }
}

fn print(write: impl FnOnce(&mut io::StdoutLock<'_>) -> io::Result<()>) -> Result<(), Report> {
    let mut out = io::stdout().lock();
    clean_end(write(&mut out).and_then(|()| out.flush()))
        .map_err(|error| Report::new(Exit::Failed, error))
}

fn validate(args: &ValidateArgs) -> Result<ExitCode, Report> {
    let format = match args.output {
        ValidateOutput::Text => validate::Format::Text,
        ValidateOutput::Json => validate::Format::Json,
    };
    let result = validate::validate(
        &args.paths,
        &mut io::stdout().lock(),
        &mut io::stderr().lock(),
        format,
    );
    match result {
        Ok(code) => Ok(code.into()),
        Err(error) => clean_end(Err(error))
            .map(|()| Exit::Done.into())
            .map_err(|error| Report::new(Exit::Failed, error)),
    }
}

fn echo(args: echo::EchoArgs) -> ExitCode {
    echo::serve(args).unwrap_or_else(|error| {
        let report = Report::new(Exit::Failed, error);
        let _ = report.print(&mut io::stderr().lock(), Colour::Plain);
        report.exit.into()
    })
}

fn default_state_dir() -> Result<PathBuf, Report> {
    if nix::unistd::Uid::effective().is_root() {
        return Ok(PathBuf::from("/var/lib/evenkeel"));
    }
    let absolute = |name: &str| {
        std::env::var_os(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    absolute("XDG_STATE_HOME")
        .or_else(|| absolute("HOME").map(|home| home.join(".local/state")))
        .map(|base| base.join("evenkeel"))
        .ok_or_else(|| {
            Report::new(
                Exit::Usage,
                "no state folder is known: neither XDG_STATE_HOME nor HOME is set",
            )
            .hint("give one with `--state-dir DIR`")
        })
}
