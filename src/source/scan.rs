//! The folder to [`Desired`]: which files changed since the last scan, and what they now wish.
//!
//! A scan of an unchanged folder costs one listing and one `stat` per file. Everything that a scan concludes is
//! concluded from what it saw itself; what the watch says only spares the wait for files to settle.
//!
//! Invariant: a second scan of an unchanged folder changes nothing and tells nothing.
// effect: reads the manifest folder

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use jiff::{SignedDuration, Timestamp};
use sha2::{Digest, Sha256};

use super::diagnose::{self, Finding};
use super::folder::{self, Bytes, Depth, FILE_LIMIT, Listing, Stamp};
use super::ledger::{Content, FileState, Ledger, Unread, Verdict};
use super::read::{read_manifests, words_of};
use crate::desired::{Desired, Folder, Problem, ProblemKind};
use crate::event::{Event, Reason};
use crate::names::DeploymentName;

/// How long a file must have been left alone before it is read, unless the watch says that it was closed or moved into
/// place: several writes of one save follow each other within milliseconds.
const SETTLE: SignedDuration = SignedDuration::from_millis(50);

/// When a name went missing, it is looked for once more before any grace is over: a file that is renamed while the
/// folder is listed can be missed under both names.
const CONFIRM: SignedDuration = SignedDuration::from_secs(1);

/// How long removals wait for git at most (W5): a git command that was killed leaves its lock for ever.
const GIT_WAIT: SignedDuration = SignedDuration::from_secs(60);

/// How a folder is scanned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ScanOptions {
    /// Whether folders within the folder are looked into.
    pub depth: Depth,
}

/// What a scan found.
#[derive(Debug, Clone, PartialEq)]
pub struct Scan {
    /// What the folder wishes.
    pub desired: Desired,
    /// What a person should know, once each.
    pub events: Vec<Event>,
    /// When another scan will know more, if nothing else wakes it before.
    pub look_again_at: Option<Timestamp>,
}

/// Scans a folder again and again.
#[derive(Debug)]
pub struct Scanner {
    folder: PathBuf,
    options: ScanOptions,
    files: BTreeMap<PathBuf, FileState>,
    ledger: Ledger,
    /// The device that the folder was last on.
    device: Option<u64>,
    availability: Availability,
    git: Git,
}

/// What a person was told of the folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Availability {
    NotLookedAt,
    Listed,
    Unavailable,
}

/// What is remembered of git's lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Git {
    Idle,
    LockedSince(Timestamp),
    /// The wait is over, and a person was told.
    GivenUp(Timestamp),
}

impl Scanner {
    /// A scanner that has not looked yet. `owners` says which file owned which name, as the records remember it.
    pub fn new(
        folder: PathBuf,
        options: ScanOptions,
        owners: BTreeMap<DeploymentName, PathBuf>,
    ) -> Self {
        Self {
            folder,
            options,
            files: BTreeMap::new(),
            ledger: Ledger::new(owners),
            device: None,
            availability: Availability::NotLookedAt,
            git: Git::Idle,
        }
    }

    /// With the device that the folder was known to be on before this scanner was there.
    pub fn remembering(self, device: Option<u64>) -> Self {
        Self { device, ..self }
    }

    /// Looks at the folder. `settled` are the files, by their path in the folder, that the watch saw closed or moved
    /// into place since the last scan.
    ///
    /// Blocks as long as the file system does, which for a network's can be long.
    pub fn scan(&mut self, now: Timestamp, settled: &BTreeSet<PathBuf>) -> Scan {
        let listing = folder::list(&self.folder, self.options.depth);
        match listing.and_then(|listing| self.believe(listing)) {
            Ok(listing) => self.take_in(now, settled, &listing),
            Err(why) => self.lose(now, why),
        }
    }

    /// Decides whether a listing is of the same folder. The folder of an unmounted volume is another one, on another
    /// device and without its files; a volume that was mounted again may have another device and has the files.
    fn believe(&self, listing: Listing) -> Result<Listing, String> {
        let moved = self.device.is_some_and(|device| device != listing.device);
        let known: Vec<&PathBuf> = if self.files.is_empty() {
            self.ledger.owning_files().collect()
        } else {
            self.files.keys().collect()
        };
        let is_strange =
            !known.is_empty() && !known.iter().any(|path| listing.files.contains_key(*path));
        if moved && is_strange {
            return Err(
                "it is on another device and has none of its files: its volume is not mounted"
                    .to_owned(),
            );
        }
        Ok(listing)
    }

    fn lose(&mut self, now: Timestamp, why: String) -> Scan {
        let mut events = Vec::new();
        if self.availability != Availability::Unavailable {
            let message = format!("{} cannot be listed: {why}", self.folder.display());
            events.push(Event::general(now, Reason::DesiredUnavailable, message));
        }
        self.availability = Availability::Unavailable;
        self.ledger.forget_listings();
        let wishes = self.ledger.wishes(&self.files);
        Scan {
            desired: Desired {
                folder: Folder::Unavailable { why },
                deployments: wishes.deployments,
                unreadable: wishes.unreadable,
                problems: wishes.problems,
                missing: BTreeMap::new(),
                first_listed_at: None,
                removals_wait_until: None,
            },
            events,
            look_again_at: None,
        }
    }

    fn take_in(&mut self, now: Timestamp, settled: &BTreeSet<PathBuf>, listing: &Listing) -> Scan {
        let mut events = Vec::new();
        if self.availability == Availability::Unavailable {
            let message = format!("{} can be listed again", self.folder.display());
            events.push(Event::general(now, Reason::DesiredAvailable, message));
        }
        self.availability = Availability::Listed;
        self.device = Some(listing.device);
        self.files
            .retain(|path, _| listing.files.contains_key(path));
        let mut deadlines = Vec::new();
        for (path, stamp) in &listing.files {
            deadlines.extend(self.look_at(now, listing, path, stamp, settled.contains(path)));
        }
        let (wishes, news) = self.ledger.take_in(now, &mut self.files);
        events.extend(news);
        let removals_wait_until = self.wait_for_git(now, listing, &mut events);
        let missing = self.ledger.missing().clone();
        if missing.values().any(|&since| since == now) {
            deadlines.push(now + CONFIRM);
        }
        if !missing.is_empty() && removals_wait_until.is_some_and(|until| until > now) {
            // Nothing tells when git is done: the watch does not see its folder.
            deadlines.push(now + CONFIRM);
        }
        Scan {
            desired: Desired {
                folder: Folder::Listed,
                deployments: wishes.deployments,
                unreadable: wishes.unreadable,
                problems: wishes.problems,
                missing,
                first_listed_at: self.ledger.first_listed_at(),
                removals_wait_until,
            },
            events,
            look_again_at: deadlines.into_iter().min(),
        }
    }

    /// Reads a file if it changed, and says when it must be looked at again.
    fn look_at(
        &mut self,
        now: Timestamp,
        listing: &Listing,
        path: &Path,
        stamp: &Result<Stamp, String>,
        is_settled: bool,
    ) -> Option<Timestamp> {
        let file = self.files.entry(path.to_owned()).or_default();
        let stamp = match stamp {
            Ok(stamp) => *stamp,
            Err(why) => {
                file.fail(path, None, why.clone());
                return None;
            }
        };
        let is_known = file
            .content
            .as_ref()
            .is_some_and(|content| content.stamp == Some(stamp));
        if is_known && !is_settled {
            file.unread = None;
            return None;
        }
        if stamp.is_too_large() {
            file.fail(path, Some(stamp), too_large(stamp));
            return None;
        }
        match folder::read(&listing.root.join(path)) {
            Bytes::Read(read, bytes) => {
                let settles_at = file.settles_at(read, now);
                if settles_at.is_some() && !is_settled && !file.is_of(&bytes) {
                    // Only what a removal could be held up by is taken from a file that is being written.
                    file.wait(now, Some(read), words_of(&bytes, &self.ledger.names()));
                } else {
                    // Two writes within the clock's tick leave the same stamp, so one this young proves nothing yet.
                    let proves = settles_at.is_none().then_some(read);
                    file.take_in(path, proves, &bytes, &self.ledger);
                }
                settles_at
            }
            Bytes::Changing => {
                file.wait(now, None, BTreeSet::new());
                Some(now + SETTLE)
            }
            Bytes::TooLarge => {
                file.fail(path, Some(stamp), too_large(stamp));
                None
            }
            Bytes::Failed(why) => {
                file.fail(path, Some(stamp), why);
                None
            }
        }
    }

    /// Until when removals wait for git, if it is at work.
    fn wait_for_git(
        &mut self,
        now: Timestamp,
        listing: &Listing,
        events: &mut Vec<Event>,
    ) -> Option<Timestamp> {
        let Some(lock) = folder::git_lock(&listing.root) else {
            self.git = Git::Idle;
            return None;
        };
        let since = match self.git {
            Git::Idle => now,
            Git::LockedSince(since) | Git::GivenUp(since) => since,
        };
        let until = since + GIT_WAIT;
        if until > now || self.ledger.missing().is_empty() {
            self.git = Git::LockedSince(since);
        } else if self.git != Git::GivenUp(since) {
            let seconds = GIT_WAIT.as_secs();
            let message = format!(
                "{} is there for {seconds} s: removals no longer wait for git",
                lock.display()
            );
            events.push(Event::general(now, Reason::Stuck, message));
            self.git = Git::GivenUp(since);
        }
        Some(until)
    }
}

fn too_large(stamp: Stamp) -> String {
    format!("has {} bytes, and {FILE_LIMIT} are the most", stamp.size())
}

impl FileState {
    /// When a file that was written just now may be read; none if it may be at once.
    fn settles_at(&self, stamp: Stamp, now: Timestamp) -> Option<Timestamp> {
        let modified = stamp.modified()?;
        let left_alone_since = if modified <= now {
            modified
        } else {
            // Written since this scan began, or by a clock that is ahead: only our own looking tells which.
            match &self.unread {
                Some(Unread::Pending {
                    seen: Some((seen, since)),
                    ..
                }) if *seen == stamp => *since,
                _ => now,
            }
        };
        let settles_at = left_alone_since.checked_add(SETTLE).ok()?;
        (settles_at > now).then_some(settles_at)
    }

    /// Whether these bytes were taken in already.
    fn is_of(&self, bytes: &[u8]) -> bool {
        let hash: [u8; 32] = Sha256::digest(bytes).into();
        self.content
            .as_ref()
            .is_some_and(|content| content.hash == hash)
    }

    /// Notes that it is being written.
    fn wait(&mut self, now: Timestamp, stamp: Option<Stamp>, words: BTreeSet<String>) {
        let seen = match (&self.unread, stamp) {
            (
                Some(Unread::Pending {
                    seen: Some((seen, since)),
                    ..
                }),
                Some(stamp),
            ) if *seen == stamp => Some((stamp, *since)),
            (_, stamp) => stamp.map(|stamp| (stamp, now)),
        };
        self.unread = Some(Unread::Pending { words, seen });
    }

    /// Takes in its bytes: new ones, or the same with a new stamp.
    pub(super) fn take_in(
        &mut self,
        path: &Path,
        stamp: Option<Stamp>,
        bytes: &[u8],
        ledger: &Ledger,
    ) {
        self.unread = None;
        let hash = Sha256::digest(bytes).into();
        if let Some(content) = &mut self.content
            && content.hash == hash
        {
            content.stamp = stamp;
            return;
        }
        let verdict = match read_manifests(path, bytes) {
            Ok(manifests) => {
                for ignored in &manifests.ignored {
                    tracing::info!(
                        file = %path.display(),
                        document = ignored.document,
                        api_version = ignored.api_version,
                        kind = ignored.kind,
                        "ignored a document of another program"
                    );
                }
                self.last_good = manifests
                    .deployments
                    .into_iter()
                    .zip(manifests.places)
                    .collect();
                Verdict::Accepted {
                    duplicates: manifests.duplicates,
                    ignored: manifests.ignored,
                }
            }
            Err(problems) => Verdict::Refused {
                problems,
                words: words_of(bytes, &ledger.names()),
            },
        };
        self.content = Some(Content {
            stamp,
            hash,
            verdict,
        });
    }

    /// Notes that it cannot be read.
    pub(super) fn fail(&mut self, path: &Path, stamp: Option<Stamp>, why: String) {
        if let Some(Unread::Failed {
            stamp: before,
            problem,
            ..
        }) = &self.unread
            && *before == stamp
            && problem.message == diagnose::clean(&why)
        {
            return;
        }
        self.unread = Some(Unread::Failed {
            problem: unreadable(path, why),
            stamp,
            may_hold: None,
        });
    }
}

pub(super) fn unreadable(path: &Path, message: String) -> Problem {
    let finding = Finding {
        place: None,
        path: None,
        message,
        hint: None,
    };
    diagnose::problem(path, finding, ProblemKind::Unreadable, None)
}

#[cfg(test)]
mod tests;
