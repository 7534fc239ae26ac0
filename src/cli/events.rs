//! `evenkeel events`: what happened, the latest last.
//!
//! Invariant: an entry is printed again only when it happened again.

use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;
use tokio::time::MissedTickBehavior;

use crate::cli::table::{Table, age};
use crate::clock::Clock;
use crate::event::{Event, Reason};
use crate::journal::{self, Entry, JournalError};
use crate::manifest::API_GROUP;
use crate::names::{DeploymentName, InstanceName, LaunchId};

/// How often a watch looks: so that a person sees no delay, and the look is one `stat`.
const PERIOD: Duration = Duration::from_millis(250);

/// Shows what happened.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct EventsArgs {
    /// Go on printing what happens, until interrupted
    #[arg(short, long)]
    pub watch: bool,
    /// Another form than the table; with --watch one document per line
    #[arg(short, long, value_name = "FORM")]
    pub output: Option<EventsOutput>,
}

/// In what form events are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum EventsOutput {
    /// JSON.
    Json,
}

/// Why events could not be printed.
#[derive(Debug, thiserror::Error)]
pub enum EventsError {
    /// There are none to be had.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The output cannot be written.
    #[error("cannot write the output")]
    Output(#[source] io::Error),
}

/// Prints the events of a state folder; with `--watch` it ends when the reader does, or never.
pub async fn events(
    args: &EventsArgs,
    state: &Path,
    clock: &Clock,
    out: &mut dyn Write,
) -> Result<(), EventsError> {
    let mut printer = Printer::new(args);
    if printer.look(state, clock.now(), out)? == Reader::Gone || !args.watch {
        return Ok(());
    }
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        ticks.tick().await;
        if printer.look(state, clock.now(), out)? == Reader::Gone {
            return Ok(());
        }
    }
}

/// Whether anybody reads the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reader {
    There,
    Gone,
}

/// What has been printed.
struct Printer {
    form: Form,
    stamp: Option<journal::Stamp>,
    looked: bool,
    printed: Vec<Entry>,
}

enum Form {
    Table(Table<6>),
    Document,
    Lines,
}

impl Printer {
    fn new(args: &EventsArgs) -> Self {
        let headings = ["LAST SEEN", "TYPE", "REASON", "OBJECT", "COUNT", "MESSAGE"];
        Self {
            form: match (args.output, args.watch) {
                (None, _) => Form::Table(Table::new(headings)),
                (Some(EventsOutput::Json), false) => Form::Document,
                (Some(EventsOutput::Json), true) => Form::Lines,
            },
            stamp: None,
            looked: false,
            printed: Vec::new(),
        }
    }

    /// Prints what is new since the last look.
    fn look(
        &mut self,
        state: &Path,
        now: Timestamp,
        out: &mut dyn Write,
    ) -> Result<Reader, EventsError> {
        // Before reading: what is added in between is seen at the next look.
        let stamp = journal::stamp(state);
        if self.looked && stamp == self.stamp {
            return Ok(Reader::There);
        }
        let history = journal::read(state)?;
        if history.skipped > 0 && !self.looked {
            tracing::warn!(
                skipped = history.skipped,
                "lines of the journal are not understood"
            );
        }
        self.looked = true;
        self.stamp = stamp;
        let new: Vec<&Entry> = history
            .entries
            .iter()
            .filter(|entry| !self.printed.contains(entry))
            .collect();
        let result = print(&mut self.form, &new, now, out);
        self.printed = history.entries;
        match result {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(Reader::Gone),
            Err(error) => Err(EventsError::Output(error)),
            Ok(()) => Ok(Reader::There),
        }
    }
}

fn print(form: &mut Form, new: &[&Entry], now: Timestamp, out: &mut dyn Write) -> io::Result<()> {
    match form {
        Form::Table(table) => {
            for entry in new {
                table.row(row(entry, now));
            }
            return table.print(out);
        }
        Form::Document => {
            let list = List {
                api_version: format!("{API_GROUP}/v1alpha1"),
                kind: "EventList",
                items: new.iter().map(|entry| Item::of(entry)).collect(),
            };
            serde_json::to_writer_pretty(&mut *out, &list)?;
            writeln!(out)?;
        }
        Form::Lines => {
            for entry in new {
                serde_json::to_writer(&mut *out, &Item::of(entry))?;
                writeln!(out)?;
            }
        }
    }
    out.flush()
}

fn kind(reason: Reason) -> &'static str {
    if reason.is_warning() {
        "Warning"
    } else {
        "Normal"
    }
}

fn row(entry: &Entry, now: Timestamp) -> [String; 6] {
    let Entry {
        event,
        first_seen: _,
        last_seen,
        count,
    } = entry;
    [
        age(now, *last_seen),
        kind(event.reason).to_owned(),
        event.reason.to_string(),
        event.subject(),
        count.to_string(),
        event.message.clone(),
    ]
}

/// `-o json`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct List<'a> {
    api_version: String,
    kind: &'static str,
    items: Vec<Item<'a>>,
}

/// One event, flat.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Item<'a> {
    r#type: &'static str,
    reason: Reason,
    deployment: Option<&'a DeploymentName>,
    instance: Option<&'a InstanceName>,
    launch_id: Option<LaunchId>,
    message: &'a str,
    first_seen: Timestamp,
    last_seen: Timestamp,
    count: u64,
}

impl<'a> Item<'a> {
    fn of(entry: &'a Entry) -> Self {
        // Without `..`: what an event has is shown.
        let Entry {
            event:
                Event {
                    at: _,
                    reason,
                    deployment,
                    instance,
                    launch_id,
                    message,
                },
            first_seen,
            last_seen,
            count,
        } = entry;
        Self {
            r#type: kind(*reason),
            reason: *reason,
            deployment: deployment.as_ref(),
            instance: instance.as_ref(),
            launch_id: *launch_id,
            message,
            first_seen: *first_seen,
            last_seen: *last_seen,
            count: *count,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::Journal;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn add(state: &Path, second: i64, instance: &str, reason: Reason, message: &str) {
        let event = Event::of_instance(at(second), &instance.parse().unwrap(), reason, message);
        Journal::open(state).unwrap().append(&event).unwrap();
    }

    fn look(printer: &mut Printer, state: &Path) -> String {
        let mut out = Vec::new();
        let reader = printer.look(state, at(100), &mut out).unwrap();
        assert_eq!(reader, Reader::There);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn a_watch_prints_what_is_new_and_what_happened_again() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path();
        add(state, 40, "qwen3-8b-0", Reason::Ready, "after 39 s");
        add(state, 55, "a-0", Reason::BackOff, "next try in 4 s");
        let mut printer = Printer::new(&EventsArgs {
            watch: true,
            output: None,
        });
        assert_eq!(
            look(&mut printer, state),
            "LAST SEEN   TYPE      REASON    OBJECT       COUNT   MESSAGE\n\
             60s         Normal    Ready     qwen3-8b-0   1       after 39 s\n\
             45s         Warning   BackOff   a-0          1       next try in 4 s\n"
        );
        assert_eq!(look(&mut printer, state), "");
        add(state, 99, "a-0", Reason::BackOff, "next try in 4 s");
        assert_eq!(
            look(&mut printer, state),
            "1s          Warning   BackOff   a-0          2       next try in 4 s\n"
        );
    }

    #[test]
    fn json_is_one_document() {
        let folder = tempfile::tempdir().unwrap();
        add(folder.path(), 40, "a-0", Reason::Exited, "exit code 1");
        let mut printer = Printer::new(&EventsArgs {
            watch: false,
            output: Some(EventsOutput::Json),
        });
        let text = look(&mut printer, folder.path());
        let document: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(
            document,
            serde_json::json!({
                "apiVersion": "evenkeel.dev/v1alpha1",
                "kind": "EventList",
                "items": [{
                    "type": "Warning",
                    "reason": "Exited",
                    "deployment": "a",
                    "instance": "a-0",
                    "launchId": null,
                    "message": "exit code 1",
                    "firstSeen": "1970-01-01T00:00:40Z",
                    "lastSeen": "1970-01-01T00:00:40Z",
                    "count": 1,
                }],
            })
        );
    }

    #[test]
    fn a_state_folder_without_events_has_an_empty_list() {
        let folder = tempfile::tempdir().unwrap();
        let mut printer = Printer::new(&EventsArgs::default());
        let text = look(&mut printer, &folder.path().join("none"));
        assert_eq!(text.lines().count(), 1);
    }

    #[tokio::test]
    async fn a_watch_ends_with_its_reader() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let folder = tempfile::tempdir().unwrap();
        for output in [None, Some(EventsOutput::Json)] {
            add(folder.path(), 1, "a-0", Reason::Ready, "x");
            let args = EventsArgs {
                watch: true,
                output,
            };
            events(&args, folder.path(), &Clock::new(), &mut Closed)
                .await
                .unwrap();
        }
    }
}
