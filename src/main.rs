//! Parses arguments, calls the library, maps its report to an exit code.

use std::process::ExitCode;

use evenkeel::launch::gate;

fn main() -> ExitCode {
    // Before anything else: a gate parses no options, logs nothing and holds nothing open.
    if std::env::args_os()
        .nth(1)
        .is_some_and(|argument| argument == gate::SUBCOMMAND)
    {
        gate::gate_main();
    }
    evenkeel::cli::main()
}
