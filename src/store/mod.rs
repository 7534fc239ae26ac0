//! Records on disk, one file per instance, and the lock of the state folder.
//!
//! A record is replaced whole: prepared beside its place, then renamed. There is no fsync. A record has to outlive the
//! controller, not the machine: when the machine goes, the processes it describes go too, and a write costs microseconds
//! instead of a disk's latency. (A runtime whose instances survive a reboot will need it, for its records.) What a power
//! cut leaves is a file that cannot be decoded, and is treated as such.
//!
//! A file that is not exactly a record is never ignored and never deleted: it may be the lease of something that runs.
//! It goes to `STATE/quarantine` and keeps holding what can be read from it. A file that cannot be *read* stays where
//! it is, because whatever keeps it from being read may pass.
//!
//! Invariant: what was written is what is read; no file but our own temporary ones is ever lost; what cannot be
//! understood holds.
#![expect(
    clippy::disallowed_methods,
    reason = "reads and writes STATE/instances"
)]

mod folder;

mod quarantine;

mod lock;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

pub use lock::{Controller, ControllerState, LockError, StateLock, controller};

use crate::event::Reason;
use crate::files::{self, ReadError};
use crate::names::InstanceName;
use crate::observed::{Holds, Quarantined};
use crate::record::{RECORD_VERSION, Record};
use quarantine::Claim;

/// The longest record, in bytes. A manifest file has at most 1 MiB, of which a character can take six bytes in JSON at
/// worst; real records have a few KiB. What is longer is not written, so that nothing is written that is not read.
pub const FILE_LIMIT: u64 = 4 * 1024 * 1024;

/// Who keeps records: the store, or what the simulator puts in its place.
pub trait Records {
    /// Keeps a record, in place of the instance's earlier one. When it fails, the earlier one is as it was.
    fn write(&mut self, record: &Record) -> Result<(), StoreError>;

    /// Drops the instance's record, if there is one.
    fn remove(&mut self, name: &InstanceName) -> Result<(), StoreError>;
}

/// Why records cannot be kept, or not be read.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A folder could not be made, or not be made private.
    #[error("cannot use {} as a folder of the state", .path.display())]
    Folder {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A symlink lies where a folder of the state belongs.
    #[error("{} is a symlink, and must be a folder", .path.display())]
    Symlink {
        /// Where.
        path: PathBuf,
    },
    /// Everybody may write to a folder of the state.
    #[error("{} is writable by everybody, who could so have any process signalled", .path.display())]
    Exposed {
        /// Which.
        path: PathBuf,
    },
    /// A folder could not be listed completely, so nothing is known of what is in it.
    #[error("cannot list {}", .path.display())]
    List {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file could not be moved into quarantine.
    #[error("cannot move {} into quarantine", .path.display())]
    Quarantine {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A record could not be written; the earlier one is as it was.
    #[error("cannot write {}", .path.display())]
    Write {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A record cannot be expressed as JSON.
    #[error("cannot write {}: it cannot be expressed as JSON", .path.display())]
    Encode {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// A record is longer than [`FILE_LIMIT`].
    #[error("cannot write {}: it has {bytes} bytes, and {FILE_LIMIT} are the most", .path.display())]
    TooLong {
        /// Which file.
        path: PathBuf,
        /// How long.
        bytes: usize,
    },
    /// In the record's place lies a file that is not understood, and may hold a lease.
    #[error("cannot replace {}: what lies there could not be understood and may hold devices", .path.display())]
    Held {
        /// Which file.
        path: PathBuf,
    },
    /// A record could not be removed.
    #[error("cannot remove {}", .path.display())]
    Remove {
        /// Which file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl StoreError {
    fn create(path: &Path, source: io::Error) -> Self {
        Self::Folder {
            path: path.to_owned(),
            source,
        }
    }

    /// What a person can do about it.
    pub fn hint(&self) -> String {
        match self {
            Self::Folder { .. } => {
                "give `--state-dir` a folder that this user may create and write to".to_owned()
            }
            Self::Symlink { .. } => {
                "remove the symlink; the state folder itself may be one, or be chosen with `--state-dir`".to_owned()
            }
            Self::Exposed { path } => format!(
                "`chmod go-w {}`, or choose another folder with `--state-dir`",
                path.display()
            ),
            Self::List { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                "ask as the user whom evenkeel runs as".to_owned()
            }
            Self::List { .. } => "see whether the disk is well".to_owned(),
            Self::Quarantine { .. } | Self::Write { .. } | Self::Remove { .. } => {
                "make room there and make it writable; it is tried again, and until then nothing new is launched"
                    .to_owned()
            }
            Self::Encode { .. } => "use paths that are UTF-8".to_owned(),
            Self::TooLong { .. } => "make the manifest shorter".to_owned(),
            Self::Held { path } => format!(
                "make {} readable and restart evenkeel, or delete it when nothing of its instance runs any more",
                path.display()
            ),
        }
    }
}

/// What was found.
#[derive(Debug, Default, PartialEq)]
pub struct Loaded {
    /// The records.
    pub records: BTreeMap<InstanceName, Record>,
    /// The files that are no records and hold something, those in quarantine from earlier first.
    pub quarantined: Vec<Quarantined>,
    /// What a person should know: one for each quarantined file, and for each that was moved and holds nothing.
    pub events: Vec<(Reason, String)>,
}

/// The records of a state folder. One at a time, held by who holds the [`StateLock`].
#[derive(Debug)]
pub struct Store {
    instances: PathBuf,
    quarantine: PathBuf,
    /// Instances in whose place a file lies that is not understood and could not be moved: to write there would lose it.
    held: BTreeSet<InstanceName>,
}

impl Store {
    /// Takes the state folder, creating what is missing of it.
    pub fn open(state: &Path) -> Result<Self, StoreError> {
        folder::prepare_state(state)?;
        let store = Self {
            instances: state.join("instances"),
            quarantine: state.join("quarantine"),
            held: BTreeSet::new(),
        };
        folder::prepare_private(&store.instances)?;
        Ok(store)
    }

    /// Reads everything, and moves aside what is not a record.
    pub fn load(&mut self) -> Result<Loaded, StoreError> {
        let mut loaded = of_quarantine(&self.quarantine)?;
        self.held.clear();
        for name in entries(&self.instances)? {
            let file = self.instances.join(&name);
            if is_temporary(&name) {
                // A write that did not get to its rename, so nothing was done that relies on it. Should it stay, the
                // next write of this record replaces it.
                if let Err(error) = fs::remove_file(&file) {
                    tracing::warn!(file = %file.display(), %error, "cannot remove a leftover");
                }
                continue;
            }
            match classify(&name, &file) {
                Found::Record(record) => {
                    loaded.records.insert(record.name.clone(), *record);
                }
                Found::Nothing => {}
                Found::Unreadable(why) => {
                    self.held.extend(instance_of(&name));
                    loaded.add(&why.during(&file), file, Some(Holds::Unknown));
                }
                Found::Broken { why, claim } => {
                    let place = match quarantine::take_in(&self.quarantine, &file) {
                        Ok(place) => place,
                        Err(error) => {
                            tracing::warn!(
                                error = &error as &dyn std::error::Error,
                                "stays where it is"
                            );
                            self.held.extend(instance_of(&name));
                            file.clone()
                        }
                    };
                    loaded.add(&why.during(&file), place, claim.holds());
                }
            }
        }
        Ok(loaded)
    }

    fn path(&self, name: &InstanceName) -> PathBuf {
        self.instances.join(format!("{name}.json"))
    }

    /// The path of an instance's record, unless a file lies there that must not be lost.
    fn free_path(&self, name: &InstanceName) -> Result<PathBuf, StoreError> {
        let path = self.path(name);
        if self.held.contains(name) {
            return Err(StoreError::Held { path });
        }
        Ok(path)
    }
}

impl Records for Store {
    fn write(&mut self, record: &Record) -> Result<(), StoreError> {
        let path = self.free_path(&record.name)?;
        let content = match encode(record) {
            Ok(content) => content,
            Err(source) => return Err(StoreError::Encode { path, source }),
        };
        if content.len() as u64 > FILE_LIMIT {
            let bytes = content.len();
            return Err(StoreError::TooLong { path, bytes });
        }
        files::replace(&path, &content).map_err(|source| StoreError::Write { path, source })
    }

    fn remove(&mut self, name: &InstanceName) -> Result<(), StoreError> {
        let path = self.free_path(name)?;
        match fs::remove_file(&path) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(source) => Err(StoreError::Remove { path, source }),
        }
    }
}

/// Reads everything and changes nothing, whether or not a controller runs. A missing state folder holds nothing.
pub fn read_only(state: &Path) -> Result<Loaded, StoreError> {
    let instances = state.join("instances");
    let mut loaded = of_quarantine(&state.join("quarantine"))?;
    for name in entries(&instances)? {
        if is_temporary(&name) {
            continue;
        }
        let file = instances.join(&name);
        match classify(&name, &file) {
            Found::Record(record) => {
                loaded.records.insert(record.name.clone(), *record);
            }
            Found::Nothing => {}
            Found::Unreadable(why) => loaded.add(&why.during(&file), file, Some(Holds::Unknown)),
            Found::Broken { why, claim } => loaded.add(&why.during(&file), file, claim.holds()),
        }
    }
    Ok(loaded)
}

fn of_quarantine(quarantine: &Path) -> Result<Loaded, StoreError> {
    let mut loaded = Loaded::default();
    for Quarantined { file, holds } in quarantine::inmates(quarantine)? {
        let what = format!("{} is in quarantine", file.display());
        loaded.add(&what, file, Some(holds));
    }
    Ok(loaded)
}

impl Loaded {
    fn add(&mut self, what: &str, file: PathBuf, holds: Option<Holds>) {
        let message = match holds {
            Some(holds) => {
                let quarantined = Quarantined { file, holds };
                let message = format!("{what}: {}", quarantine::advice(&quarantined));
                self.quarantined.push(quarantined);
                message
            }
            None => format!(
                "{what}: it holds nothing; {} may be deleted",
                file.display()
            ),
        };
        self.events.push((Reason::RecordQuarantined, message));
    }
}

/// What an entry of the folder is.
enum Found {
    /// A record, exactly.
    Record(Box<Record>),
    /// No claim to be one, or gone meanwhile.
    Nothing,
    /// A file whose content is unknown.
    Unreadable(Fault),
    /// Not a record.
    Broken {
        /// What is wrong.
        why: Fault,
        /// What can be made out.
        claim: Claim,
    },
}

/// What is wrong with a file.
struct Fault(String);

impl Fault {
    fn during(&self, file: &Path) -> String {
        format!("{} {}", file.display(), self.0)
    }
}

/// Names that end in `.json` claim to be records. Others (an editor's backup, a note) are somebody's, and stay.
fn classify(name: &OsStr, file: &Path) -> Found {
    let bytes = name.as_encoded_bytes();
    if !bytes.ends_with(b".json") || bytes.starts_with(b".") {
        return Found::Nothing;
    }
    let content = match files::read(file, FILE_LIMIT) {
        Ok(content) => content,
        Err(ReadError::Gone) => return Found::Nothing,
        Err(ReadError::Refused(error)) => {
            return Found::Unreadable(Fault(format!("cannot be read ({error})")));
        }
        Err(error @ (ReadError::NotAFile(_) | ReadError::TooLong(_))) => {
            return Found::Broken {
                why: Fault(error.to_string()),
                claim: Claim::Unreadable,
            };
        }
    };
    let claim = quarantine::claim(&content);
    match decode(name, &content, &claim) {
        Ok(record) => Found::Record(Box::new(record)),
        Err(why) => Found::Broken { why, claim },
    }
}

fn decode(name: &OsStr, content: &[u8], claim: &Claim) -> Result<Record, Fault> {
    /// The one field that every version has.
    #[derive(serde::Deserialize)]
    struct Version {
        version: u32,
    }

    if let Ok(Version { version }) = serde_json::from_slice(content)
        && version != RECORD_VERSION
    {
        return Err(Fault(format!(
            "is of version {version}, and this evenkeel knows version {RECORD_VERSION}"
        )));
    }
    let record: Record = serde_json::from_slice(content)
        .map_err(|error| Fault(format!("is not a record ({error})")))?;
    if instance_of(name).as_ref() != Some(&record.name) {
        return Err(Fault(format!("is the record of {}", record.name)));
    }
    // An absent `launch` or `port` would read as none, and free what is held.
    match (claim, &record.launch) {
        (Claim::Nothing, None) | (Claim::Launch(..), Some(_)) => Ok(record),
        (Claim::Nothing, Some(_)) | (Claim::Launch(..), None) | (Claim::Unreadable, _) => {
            Err(Fault("does not say what it holds".to_owned()))
        }
    }
}

fn encode(record: &Record) -> Result<Vec<u8>, serde_json::Error> {
    let mut content = serde_json::to_vec_pretty(record)?;
    content.push(b'\n');
    Ok(content)
}

/// The instance whose record has this file name.
fn instance_of(name: &OsStr) -> Option<InstanceName> {
    name.to_str()?.strip_suffix(".json")?.parse().ok()
}

/// Whether [`files::replace`] makes such names, for records.
fn is_temporary(name: &OsStr) -> bool {
    name.to_str()
        .and_then(|name| name.strip_prefix('.')?.strip_suffix(".tmp"))
        .is_some_and(|name| instance_of(OsStr::new(name)).is_some())
}

/// The names in a folder, sorted, or an error if not all of them are known. A missing folder has none.
fn entries(folder: &Path) -> Result<Vec<OsString>, StoreError> {
    let list = || -> io::Result<Vec<OsString>> {
        fs::read_dir(folder)?
            .map(|entry| Ok(entry?.file_name()))
            .collect()
    };
    match list() {
        Ok(mut names) => {
            names.sort();
            Ok(names)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(source) => Err(StoreError::List {
            path: folder.to_owned(),
            source,
        }),
    }
}

#[cfg(test)]
mod tests;
