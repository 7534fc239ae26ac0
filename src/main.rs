//! Parses arguments, calls the library, maps its report to an exit code.

use std::error::Error;
use std::process::ExitCode;

use clap::Parser;
use evenkeel::echo::{self, EchoArgs};

/// Keeps the model servers of a GPU box running as their owner declared
#[derive(Parser)]
#[command(version)]
enum Cli {
    /// Run the echo engine: a stand-in for a model server
    Echo(EchoArgs),
}

fn main() -> ExitCode {
    let Cli::Echo(args) = Cli::parse();
    match echo::serve(args) {
        Ok(code) => code,
        Err(error) => {
            eprint!("error: {error}");
            let mut cause = error.source();
            while let Some(error) = cause {
                eprint!(": {error}");
                cause = error.source();
            }
            eprintln!();
            ExitCode::FAILURE
        }
    }
}
