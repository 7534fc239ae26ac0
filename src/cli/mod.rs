//! The verbs of the command line, one per file, and what they print with.
//!
//! A verb writes its data to the writer that it is given and nothing anywhere else; a reader that goes away is a clean
//! end ([`report::clean_end`]). Verbs read the state folder themselves, so they work whether or not a controller runs.

pub mod schema;

pub mod validate;

pub mod logs;

pub mod events;

pub mod version;

pub mod report;

pub mod table;

/// The command line.
pub fn main() -> std::process::ExitCode {
    std::process::ExitCode::SUCCESS
}
