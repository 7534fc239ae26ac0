//! How a verb ends: its exit code, and an error with its causes and hints for a person.
//!
//! Invariant: each thing is said once, and the exit code comes from the kind of failure, never from its text.

use std::error::Error;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use crate::failure::causes;

/// How a verb ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// It did what was asked.
    Done,
    /// It could not, or the answer is no.
    Failed,
    /// It was asked wrongly.
    Usage,
    /// Another controller keeps the state folder (`EX_TEMPFAIL`).
    StateInUse,
    /// The configuration must be mended first (`EX_CONFIG`).
    BadConfiguration,
}

impl Exit {
    /// The process's exit code.
    pub const fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::StateInUse => 75,
            Self::BadConfiguration => 78,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

/// Whether to print in colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Colour {
    /// No.
    Plain,
    /// With ANSI escape sequences.
    Ansi,
}

impl Colour {
    /// In colour on a terminal, unless `NO_COLOR` is set to anything.
    pub fn of(stream: &impl IsTerminal) -> Self {
        let unwanted = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        if stream.is_terminal() && !unwanted {
            Self::Ansi
        } else {
            Self::Plain
        }
    }

    fn paint(self, code: &str, text: &str) -> String {
        match self {
            Self::Plain => text.to_owned(),
            Self::Ansi => format!("\u{1b}[{code}m{text}\u{1b}[0m"),
        }
    }
}

/// A failure, for a person.
#[derive(Debug)]
pub struct Report {
    /// How the process shall end.
    pub exit: Exit,
    /// What happened.
    pub error: Box<dyn Error>,
    /// What can be done about it.
    pub hints: Vec<String>,
}

impl Report {
    /// A failure without hints.
    pub fn new(exit: Exit, error: impl Into<Box<dyn Error>>) -> Self {
        Self {
            exit,
            error: error.into(),
            hints: Vec::new(),
        }
    }

    /// With one more hint.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hints.push(hint.into());
        self
    }

    /// Prints the error, its causes and the hints, each on lines of its own.
    pub fn print(&self, out: &mut dyn Write, colour: Colour) -> io::Result<()> {
        let mut print = || -> io::Result<()> {
            let label = colour.paint("1;31", "error:");
            writeln!(out, "{label} {}", shown(&self.error))?;
            for cause in causes(self.error.as_ref()) {
                writeln!(out, "  because: {}", shown(&cause))?;
            }
            let label = colour.paint("1;36", "hint:");
            for hint in &self.hints {
                writeln!(out, "{label} {}", shown(hint))?;
            }
            out.flush()
        };
        clean_end(print())
    }
}

/// File names and the words of engines are in error texts: only line ends and tabs of them reach the terminal.
fn shown(text: &impl ToString) -> String {
    text.to_string().replace(
        |c: char| c.is_control() && c != '\n' && c != '\t',
        "\u{fffd}",
    )
}

/// A reader that went away (`evenkeel logs | head`) is a clean end.
pub fn clean_end(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Told {
        #[error("cannot write instances/a-0.json")]
        Once(#[source] io::Error),
        #[error("cannot write instances/a-0.json: {0}")]
        Twice(#[source] io::Error),
    }

    fn full() -> io::Error {
        io::Error::other("the disk is full")
    }

    fn printed(report: &Report, colour: Colour) -> String {
        let mut out = Vec::new();
        report.print(&mut out, colour).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn causes_and_hints_have_lines_of_their_own() {
        let report = Report::new(Exit::Failed, Told::Once(full())).hint("make room");
        assert_eq!(
            printed(&report, Colour::Plain),
            "error: cannot write instances/a-0.json\n  because: the disk is full\nhint: make room\n"
        );
        assert!(printed(&report, Colour::Ansi).starts_with("\u{1b}[1;31merror:\u{1b}[0m "));
    }

    #[test]
    fn a_cause_that_the_error_repeats_is_said_once() {
        let report = Report::new(Exit::Failed, Told::Twice(full()));
        assert_eq!(
            printed(&report, Colour::Plain),
            "error: cannot write instances/a-0.json: the disk is full\n"
        );
    }

    #[test]
    fn an_error_text_cannot_move_the_cursor() {
        let report = Report::new(Exit::Failed, "cannot read \u{1b}[2Jevil\nline 2");
        let text = printed(&report, Colour::Plain);
        assert_eq!(text, "error: cannot read \u{fffd}[2Jevil\nline 2\n");
    }

    #[test]
    fn exit_codes_are_those_that_people_script_against() {
        let codes = [
            Exit::Done,
            Exit::Failed,
            Exit::Usage,
            Exit::StateInUse,
            Exit::BadConfiguration,
        ]
        .map(Exit::code);
        assert_eq!(codes, [0, 1, 2, 75, 78]);
    }

    #[test]
    fn what_is_no_terminal_gets_no_colour() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(Colour::of(&file), Colour::Plain);
    }

    #[test]
    fn a_reader_that_went_away_is_a_clean_end() {
        clean_end(Err(io::ErrorKind::BrokenPipe.into())).unwrap();
        clean_end(Err(io::ErrorKind::StorageFull.into())).unwrap_err();
    }
}
