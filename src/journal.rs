//! Events for people, as JSON lines in `STATE/events.jsonl`.
//!
//! The same thing happening again (same deployment, instance, reason and message) is one entry whose count goes up. Each
//! time the whole entry is appended, so a line is true by itself and the last one of an entry wins; nothing is rewritten
//! but now and then, when the file is long.
//!
//! A line that is not understood (torn by a crash, of another version) is skipped and counted; a rewrite drops it. The
//! journal is for reading: nothing is ever decided from it, and losing it loses nothing else.
//!
//! Invariant: file, memory and message are bounded, whatever happens and however often.
#![expect(
    clippy::disallowed_methods,
    reason = "appends to STATE/events.jsonl and rewrites it"
)]

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use nix::fcntl::OFlag;
use serde::{Deserialize, Serialize};

use crate::event::{Event, Reason};
use crate::files;
use crate::names::{DeploymentName, InstanceName};

/// When the file is longer, it is rewritten. Some thousand lines: reading them takes no time that a person would notice.
const FILE_LIMIT: u64 = 1024 * 1024;

/// What a rewrite keeps at most: half, so that the next one is as many appends away.
const KEPT_BYTES: usize = 512 * 1024;

/// Entries in memory and after a rewrite. More than anybody reads, and days of a quiet host.
const ENTRY_LIMIT: usize = 1000;

/// How much of a file is read, from its end: what evenkeel writes is shorter, so this only meets a file that somebody
/// else made.
const READ_LIMIT: u64 = 4 * FILE_LIMIT;

/// The longest message. The end of a log (4 KiB) fits.
const MESSAGE_LIMIT: usize = 16 * 1024;

/// Why events cannot be kept, or not be read.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The file cannot be read.
    #[error("cannot read {}", .path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file cannot be written. The event is counted all the same, and told with the next that can be.
    #[error("cannot write {}", .path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// An event cannot be expressed as JSON.
    #[error("cannot write {}: an event cannot be expressed as JSON", .path.display())]
    Encode {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
}

impl JournalError {
    /// What a person can do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Read { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Some("ask as the user whom evenkeel runs as")
            }
            Self::Read { .. } => {
                Some("should it be no regular file, remove it: only past events are in it")
            }
            Self::Write { .. } => {
                Some("make room there and make it writable; everything else goes on")
            }
            Self::Encode { .. } => None,
        }
    }
}

/// An event and how often it happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    /// The last one: its time and its launch id.
    pub event: Event,
    /// When it first happened.
    pub first_seen: Timestamp,
    /// When it last happened.
    pub last_seen: Timestamp,
    /// How often.
    pub count: u64,
}

/// What makes two events the same.
type Key = (Option<DeploymentName>, Option<InstanceName>, Reason, String);

fn key(event: &Event) -> Key {
    // Without `..`: a new field makes the compiler ask whether it tells two events apart.
    let Event {
        at: _,
        reason,
        deployment,
        instance,
        launch_id: _,
        message,
    } = event;
    (
        deployment.clone(),
        instance.clone(),
        *reason,
        message.clone(),
    )
}

/// The entries, the last ones to have happened: order is that of the lines, because clocks step.
#[derive(Debug, Default)]
struct Fold {
    entries: BTreeMap<Key, (u64, Entry)>,
    order: BTreeMap<u64, Key>,
    next: u64,
}

impl Fold {
    fn put(&mut self, entry: Entry) {
        let key = key(&entry.event);
        self.next += 1;
        if let Some((earlier, _)) = self.entries.insert(key.clone(), (self.next, entry)) {
            self.order.remove(&earlier);
        }
        self.order.insert(self.next, key);
        if self.order.len() > ENTRY_LIMIT
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.entries.remove(&oldest);
        }
    }

    /// The entry of this event, with the event counted.
    fn counted(&self, event: Event) -> Entry {
        let at = event.at;
        let (first_seen, count) = match self.entries.get(&key(&event)) {
            Some((_, earlier)) => (earlier.first_seen, earlier.count.saturating_add(1)),
            None => (at, 1),
        };
        Entry {
            event,
            first_seen,
            last_seen: at,
            count,
        }
    }

    /// From the oldest.
    fn entries(&self) -> impl DoubleEndedIterator<Item = &Entry> {
        self.order
            .values()
            .filter_map(|key| self.entries.get(key))
            .map(|(_, entry)| entry)
    }
}

/// Where events are kept. One at a time, held by who holds the state's lock.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    fold: Fold,
    /// Whether the file may end in the middle of a line, which must not swallow the next.
    torn: bool,
}

impl Journal {
    /// Takes the journal of a state folder, and goes on counting where the last controller ended.
    pub fn open(state: &Path) -> Result<Self, JournalError> {
        let path = path(state);
        let text = read_end(&path)?;
        let (fold, skipped) = fold(&text);
        if skipped > 0 {
            tracing::warn!(file = %path.display(), skipped, "lines that are no events");
        }
        Ok(Self {
            path,
            fold,
            torn: text.last().is_some_and(|&byte| byte != b'\n'),
        })
    }

    /// Keeps an event. When it cannot be written, it is counted in memory, and the file has it when the same happens
    /// again or the file is rewritten.
    pub fn append(&mut self, event: &Event) -> Result<(), JournalError> {
        let entry = self.fold.counted(bounded(event));
        let line = line(&self.path, &entry)?;
        self.fold.put(entry);
        let length = self.write(&line).map_err(|source| JournalError::Write {
            path: self.path.clone(),
            source,
        })?;
        if length > FILE_LIMIT {
            self.compact()?;
        }
        Ok(())
    }

    /// Appends a line; gives the file's length after it.
    fn write(&mut self, line: &[u8]) -> io::Result<u64> {
        // Opened each time: the file may have been removed, and events are rare.
        let mut file = OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits())
            .open(&self.path)?;
        let mut text = Vec::with_capacity(line.len() + 1);
        if self.torn {
            text.push(b'\n');
        }
        text.extend_from_slice(line);
        // Until it is known to be whole.
        self.torn = true;
        file.write_all(&text)?;
        self.torn = false;
        Ok(file.metadata()?.len())
    }

    fn compact(&mut self) -> Result<(), JournalError> {
        let mut lines = Vec::new();
        let mut bytes = 0;
        for entry in self.fold.entries().rev() {
            let line = line(&self.path, entry)?;
            bytes += line.len();
            if bytes > KEPT_BYTES {
                break;
            }
            lines.push(line);
        }
        lines.reverse();
        files::replace(&self.path, &lines.concat()).map_err(|source| JournalError::Write {
            path: self.path.clone(),
            source,
        })
    }
}

fn path(state: &Path) -> PathBuf {
    state.join("events.jsonl")
}

fn bounded(event: &Event) -> Event {
    let mut event = event.clone();
    if event.message.len() > MESSAGE_LIMIT {
        let end = event.message.floor_char_boundary(MESSAGE_LIMIT);
        event.message.truncate(end);
        event.message.push('…');
    }
    event
}

fn line(path: &Path, entry: &Entry) -> Result<Vec<u8>, JournalError> {
    let mut line = serde_json::to_vec(entry).map_err(|source| JournalError::Encode {
        path: path.to_owned(),
        source,
    })?;
    line.push(b'\n');
    Ok(line)
}

/// What the journal holds.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct History {
    /// One per different event, sorted by when it last happened.
    pub entries: Vec<Entry>,
    /// How many lines were not understood.
    pub skipped: usize,
}

/// Reads the journal of a state folder, whether or not a controller writes it. A missing one is empty.
pub fn read(state: &Path) -> Result<History, JournalError> {
    let (fold, skipped) = fold(&read_end(&path(state))?);
    let mut entries: Vec<Entry> = fold.entries().cloned().collect();
    entries.sort_by_key(|entry| entry.last_seen);
    Ok(History { entries, skipped })
}

/// The file's last [`READ_LIMIT`] bytes, from a line's beginning.
fn read_end(path: &Path) -> Result<Vec<u8>, JournalError> {
    let read = || -> io::Result<Vec<u8>> {
        let mut file: File = OpenOptions::new()
            .read(true)
            .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits())
            .open(path)?;
        let start = file.metadata()?.len().saturating_sub(READ_LIMIT);
        file.seek(SeekFrom::Start(start))?;
        let mut text = Vec::new();
        file.take(READ_LIMIT).read_to_end(&mut text)?;
        if start > 0 {
            let line = text.iter().position(|&byte| byte == b'\n');
            text.drain(..line.map_or(text.len(), |end| end + 1));
        }
        Ok(text)
    };
    match read() {
        Ok(text) => Ok(text),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(source) => Err(JournalError::Read {
            path: path.to_owned(),
            source,
        }),
    }
}

/// The entries of some lines, and how many lines are none.
fn fold(text: &[u8]) -> (Fold, usize) {
    let mut fold = Fold::default();
    let mut skipped = 0;
    for line in text.split(|&byte| byte == b'\n') {
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        match serde_json::from_slice(line) {
            Ok(entry) => fold.put(entry),
            Err(_) => skipped += 1,
        }
    }
    (fold, skipped)
}

/// What changes whenever the journal is written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    inode: u64,
    length: u64,
}

/// The journal's stamp; none while there is no journal. A rewrite makes another file, and an append a longer one.
pub fn stamp(state: &Path) -> Option<Stamp> {
    let metadata = fs::metadata(path(state)).ok()?;
    Some(Stamp {
        inode: metadata.ino(),
        length: metadata.len(),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use proptest::prelude::*;

    use super::*;
    use crate::testing;

    fn event(second: i64, instance: &str, message: &str) -> Event {
        Event::of_instance(
            Timestamp::from_second(second).unwrap(),
            &instance.parse().unwrap(),
            Reason::Ready,
            message,
        )
    }

    fn raw(state: &Path) -> Vec<u8> {
        fs::read(path(state)).unwrap_or_default()
    }

    #[test]
    fn the_same_event_again_is_one_entry_with_a_count() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(folder.path()).unwrap();
        for (second, instance, message) in [(1, "a-0", "x"), (2, "b-0", "x"), (3, "a-0", "x")] {
            journal.append(&event(second, instance, message)).unwrap();
        }
        // The count goes on after a restart.
        let mut journal = Journal::open(folder.path()).unwrap();
        journal.append(&event(4, "a-0", "x")).unwrap();
        let entries = read(folder.path()).unwrap().entries;
        let seen: Vec<_> = entries
            .iter()
            .map(|entry| {
                let Entry {
                    event,
                    first_seen,
                    last_seen,
                    count,
                } = entry;
                (
                    event.subject(),
                    first_seen.as_second(),
                    last_seen.as_second(),
                    *count,
                )
            })
            .collect();
        assert_eq!(
            seen,
            [("b-0".to_owned(), 2, 2, 1), ("a-0".to_owned(), 1, 4, 3)]
        );
        let mode = fs::metadata(path(folder.path()))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn the_launch_id_of_an_entry_is_the_latest() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(folder.path()).unwrap();
        let ids = [
            "67e55044-10b1-426f-9247-bb680e5fe0c8",
            "0e0f9d5a-9c1d-5a0e-8a52-9a2a1f2c3d4e",
        ];
        for id in ids {
            let event = event(1, "a-0", "x").launch(id.parse().unwrap());
            journal.append(&event).unwrap();
        }
        let entries = read(folder.path()).unwrap().entries;
        assert_eq!(entries.len(), 1);
        assert_eq!(entries[0].event.launch_id.unwrap().to_string(), ids[1]);
    }

    #[test]
    fn a_torn_last_line_is_skipped_and_swallows_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(folder.path()).unwrap();
        journal.append(&event(1, "a-0", "x")).unwrap();
        let whole = raw(folder.path());
        let torn = [&whole[..], &whole[..20]].concat();
        fs::write(path(folder.path()), torn).unwrap();

        let mut journal = Journal::open(folder.path()).unwrap();
        journal.append(&event(2, "b-0", "x")).unwrap();
        let history = read(folder.path()).unwrap();
        assert_eq!((history.entries.len(), history.skipped), (2, 1));
    }

    #[test]
    fn lines_of_another_version_are_counted_and_do_not_stand_in_the_way() {
        let folder = tempfile::tempdir().unwrap();
        let lines = b"{\"event\":{\"reason\":\"Teleported\"}}\nnonsense\n\xff\n\n";
        fs::write(path(folder.path()), lines).unwrap();
        let mut journal = Journal::open(folder.path()).unwrap();
        journal.append(&event(1, "a-0", "x")).unwrap();
        let history = read(folder.path()).unwrap();
        assert_eq!((history.entries.len(), history.skipped), (1, 3));
    }

    #[test]
    fn a_missing_journal_is_empty_and_a_folder_in_its_place_an_error() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read(folder.path()).unwrap(), History::default());
        fs::create_dir(path(folder.path())).unwrap();
        let error = read(folder.path()).unwrap_err();
        assert!(error.to_string().contains("events.jsonl"), "{error}");
    }

    #[test]
    fn the_file_stays_short_however_much_happens() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(folder.path()).unwrap();
        let mut most = 0;
        for n in 0..6000 {
            let message = format!("{n}: {}", "x".repeat(600));
            journal.append(&event(n, "a-0", &message)).unwrap();
            most = most.max(raw(folder.path()).len() as u64);
        }
        assert!(most <= FILE_LIMIT, "{most}");
        assert!(journal.fold.entries.len() <= ENTRY_LIMIT);
        assert_eq!(journal.fold.entries.len(), journal.fold.order.len());
        let entries = read(folder.path()).unwrap().entries;
        assert!(entries.len() <= ENTRY_LIMIT);
        assert!(entries.last().unwrap().event.message.starts_with("5999: "));
    }

    #[test]
    fn an_endless_message_is_cut() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(folder.path()).unwrap();
        for second in 1..3 {
            let event = event(second, "a-0", &"ä".repeat(5_000_000));
            journal.append(&event).unwrap();
        }
        let entries = read(folder.path()).unwrap().entries;
        assert_eq!((entries.len(), entries[0].count), (1, 2));
        assert!(entries[0].event.message.len() <= MESSAGE_LIMIT + '…'.len_utf8());
    }

    #[test]
    fn a_failed_write_counts_and_the_next_one_tells() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(folder.path()).unwrap();
        fs::create_dir(path(folder.path())).unwrap();
        journal.append(&event(1, "a-0", "x")).unwrap_err();
        fs::remove_dir(path(folder.path())).unwrap();
        journal.append(&event(2, "a-0", "x")).unwrap();
        let entries = read(folder.path()).unwrap().entries;
        assert_eq!(
            (entries[0].count, entries[0].first_seen.as_second()),
            (2, 1)
        );
    }

    #[test]
    fn a_huge_file_of_somebody_else_is_read_from_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(folder.path()).unwrap();
        journal.append(&event(1, "a-0", "x")).unwrap();
        let line = raw(folder.path());
        let filler = vec![b'x'; usize::try_from(READ_LIMIT).unwrap()];
        fs::write(path(folder.path()), [&filler[..], b"\n", &line].concat()).unwrap();
        let history = read(folder.path()).unwrap();
        assert_eq!((history.entries.len(), history.skipped), (1, 0));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn what_is_read_is_what_is_in_memory(events in proptest::collection::vec(testing::event(), 0..20)) {
            let folder = tempfile::tempdir().unwrap();
            let mut journal = Journal::open(folder.path()).unwrap();
            for event in &events {
                journal.append(event).unwrap();
            }
            let history = read(folder.path()).unwrap();
            prop_assert_eq!(history.skipped, 0);
            let total: u64 = history.entries.iter().map(|entry| entry.count).sum();
            prop_assert_eq!(total, events.len() as u64);
            let mut in_memory: Vec<_> = journal.fold.entries().cloned().collect();
            in_memory.sort_by_key(|entry| entry.last_seen);
            prop_assert_eq!(history.entries, in_memory);
        }

        #[test]
        fn no_content_makes_it_panic(content in any::<Vec<u8>>()) {
            let folder = tempfile::tempdir().unwrap();
            fs::write(path(folder.path()), content).unwrap();
            read(folder.path()).unwrap();
            let mut journal = Journal::open(folder.path()).unwrap();
            journal.append(&event(1, "a-0", "x")).unwrap();
            prop_assert_eq!(read(folder.path()).unwrap().entries.len(), 1);
        }
    }
}
