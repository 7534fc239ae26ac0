//! Who owns which name, what is missing and since when, and what a person was told: decisions over the files as last
//! seen. Pure.
//!
//! Invariant: a name is missing only if a complete listing lacks it and no file that cannot be read may hold it (W4).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use jiff::{SignedDuration, Timestamp};

use super::diagnose::Place;
use super::folder::Stamp;
use super::read::{self, Ignored};
use crate::desired::{Problem, ProblemKind, Unreadable};
use crate::event::{Event, Reason};
use crate::names::DeploymentName;
use crate::spec::Deployment;

/// How long a name that left is remembered: longer than any grace, so that what forgets it has long acted. Afterwards
/// [`Desired::absence`](crate::desired::Desired::absence) counts from the first listing, which is longer still.
const MEMORY: SignedDuration = SignedDuration::from_hours(1);

/// A deployment that returns within this time with the same content was never away: an editor or git rewrote its file.
const RETURN: SignedDuration = SignedDuration::from_mins(1);

/// A file as last seen.
#[derive(Debug, Default)]
pub(super) struct FileState {
    /// What was last read of it.
    pub(super) content: Option<Content>,
    /// Its deployments as last accepted, and where their names stand.
    pub(super) last_good: Vec<(Deployment, Place)>,
    /// Why its present content was not read, if it was not.
    pub(super) unread: Option<Unread>,
}

/// What was read of a file.
#[derive(Debug)]
pub(super) struct Content {
    /// What tells that it has not changed since; none if it was read so soon after a change that it may have.
    pub(super) stamp: Option<Stamp>,
    /// The hash of its bytes.
    pub(super) hash: [u8; 32],
    /// What came of it.
    pub(super) verdict: Verdict,
}

/// What came of a file's bytes.
#[derive(Debug)]
pub(super) enum Verdict {
    /// They are accepted, but for documents whose name an earlier one has.
    Accepted {
        duplicates: Vec<Problem>,
        ignored: Vec<Ignored>,
    },
    /// They are not.
    Refused {
        problems: Vec<Problem>,
        words: BTreeSet<String>,
    },
}

/// Why a file was not read.
#[derive(Debug)]
pub(super) enum Unread {
    /// It is being written.
    Pending {
        /// Its words that could be names.
        words: BTreeSet<String>,
        /// What it looked like, and since when.
        seen: Option<(Stamp, Timestamp)>,
    },
    /// It cannot be.
    Failed {
        problem: Problem,
        stamp: Option<Stamp>,
        /// The names that disappeared elsewhere when this file appeared or changed; none until the ledger has looked.
        may_hold: Option<BTreeSet<String>>,
    },
}

impl FileState {
    /// What its present content could hold, if that is not accepted.
    fn unreadable(&self) -> Option<Unreadable> {
        let words = self.words()?.cloned().unwrap_or_default();
        Some(Unreadable { words })
    }

    fn is_unreadable(&self) -> bool {
        self.words().is_some()
    }

    fn may_hold(&self, name: &str) -> bool {
        self.words()
            .flatten()
            .is_some_and(|words| words.contains(name))
    }

    /// The words of its present content, if that is not accepted; none of them if there was no looking into it.
    #[expect(
        clippy::option_option,
        reason = "accepted and not looked into are not the same"
    )]
    fn words(&self) -> Option<Option<&BTreeSet<String>>> {
        match (&self.unread, &self.content) {
            (Some(Unread::Failed { may_hold, .. }), _) => Some(may_hold.as_ref()),
            (Some(Unread::Pending { words, .. }), _)
            | (
                None,
                Some(Content {
                    verdict: Verdict::Refused { words, .. },
                    ..
                }),
            ) => Some(Some(words)),
            (
                None,
                Some(Content {
                    verdict: Verdict::Accepted { .. },
                    ..
                })
                | None,
            ) => None,
        }
    }

    /// What a person should mend in it.
    fn problems(&self) -> &[Problem] {
        match (
            &self.unread,
            self.content.as_ref().map(|content| &content.verdict),
        ) {
            (Some(Unread::Failed { problem, .. }), _) => std::slice::from_ref(problem),
            (Some(Unread::Pending { .. }), _) | (None, None) => &[],
            (None, Some(Verdict::Refused { problems, .. })) => problems,
            (None, Some(Verdict::Accepted { duplicates, .. })) => duplicates,
        }
    }
}

/// What is remembered from scan to scan, beside the files.
#[derive(Debug)]
pub(super) struct Ledger {
    owners: BTreeMap<DeploymentName, PathBuf>,
    missing: BTreeMap<DeploymentName, Timestamp>,
    published: BTreeMap<DeploymentName, Deployment>,
    reported: BTreeSet<(PathBuf, Option<String>, String)>,
    first_listed_at: Option<Timestamp>,
    /// Files of which some content was accepted: what they held is known, and what they owned before a restart
    /// no longer counts.
    accepted_once: BTreeSet<PathBuf>,
}

/// What the files wish.
#[derive(Debug, Default)]
pub(super) struct Wishes {
    pub(super) deployments: BTreeMap<DeploymentName, Deployment>,
    pub(super) unreadable: BTreeMap<PathBuf, Unreadable>,
    pub(super) problems: Vec<Problem>,
}

impl Ledger {
    /// A ledger that knows from the records which file owned which name.
    /// The files that own names.
    pub(super) fn owning_files(&self) -> impl Iterator<Item = &PathBuf> {
        self.owners.values()
    }

    pub(super) fn new(owners: BTreeMap<DeploymentName, PathBuf>) -> Self {
        Self {
            owners,
            missing: BTreeMap::new(),
            published: BTreeMap::new(),
            reported: BTreeSet::new(),
            first_listed_at: None,
            accepted_once: BTreeSet::new(),
        }
    }

    /// The names that are known.
    pub(super) fn names(&self) -> BTreeSet<&str> {
        self.owners.keys().map(DeploymentName::as_str).collect()
    }

    /// Since when which names are missing.
    pub(super) fn missing(&self) -> &BTreeMap<DeploymentName, Timestamp> {
        &self.missing
    }

    /// When the folder was first listed completely.
    pub(super) fn first_listed_at(&self) -> Option<Timestamp> {
        self.first_listed_at
    }

    /// Notes that nothing is known any more: whatever is missing afterwards is missing from then on.
    pub(super) fn forget_listings(&mut self) {
        self.missing.clear();
        self.first_listed_at = None;
    }

    /// Takes in the files of a complete listing.
    pub(super) fn take_in(
        &mut self,
        now: Timestamp,
        files: &mut BTreeMap<PathBuf, FileState>,
    ) -> (Wishes, Vec<Event>) {
        self.first_listed_at.get_or_insert(now);
        for (path, file) in files.iter() {
            if matches!(&file.content, Some(content) if matches!(content.verdict, Verdict::Accepted { .. }))
            {
                self.accepted_once.insert(path.clone());
            }
        }
        self.accepted_once.retain(|path| files.contains_key(path));
        let (owned, _) = self.assign(files);
        let owned: Vec<_> = owned
            .into_iter()
            .map(|(name, deployment)| (name.clone(), deployment.source.file.clone()))
            .collect();
        let present: BTreeSet<&DeploymentName> = owned.iter().map(|(name, _)| name).collect();
        self.suspect(&present, files);
        self.note_missing(now, &present, files);
        self.owners.extend(owned);
        let wishes = self.wishes(files);
        let mut events = self.changes(now, &wishes);
        events.extend(self.new_problems(now, &wishes.problems));
        (wishes, events)
    }

    /// What the files wish.
    pub(super) fn wishes(&self, files: &BTreeMap<PathBuf, FileState>) -> Wishes {
        let (owned, duplicates) = self.assign(files);
        let deployments = owned
            .into_iter()
            .map(|(name, deployment)| (name.clone(), deployment.clone()))
            .collect();
        let unreadable = files
            .iter()
            .filter_map(|(path, file)| Some((path.clone(), file.unreadable()?)))
            .collect();
        let mut problems: Vec<_> = files
            .values()
            .flat_map(FileState::problems)
            .cloned()
            .collect();
        problems.extend(duplicates);
        problems.sort_by(|a, b| (&a.file, a.line, a.column).cmp(&(&b.file, b.line, b.column)));
        Wishes {
            deployments,
            unreadable,
            problems,
        }
    }

    /// Decides whose document each name means (W8): its owner's while that has it, else the first in the order of the
    /// file names.
    fn assign<'f>(
        &self,
        files: &'f BTreeMap<PathBuf, FileState>,
    ) -> (BTreeMap<&'f DeploymentName, &'f Deployment>, Vec<Problem>) {
        let mut claims: BTreeMap<&DeploymentName, Vec<(&Path, &Deployment, &Place)>> =
            BTreeMap::new();
        for (path, file) in files {
            for (deployment, place) in &file.last_good {
                claims
                    .entry(&deployment.name)
                    .or_default()
                    .push((path, deployment, place));
            }
        }
        let mut winners = BTreeMap::new();
        let mut duplicates = Vec::new();
        for (name, claims) in claims {
            let owner = self.owners.get(name).map(PathBuf::as_path);
            let mut winner = claims
                .iter()
                .position(|(path, ..)| Some(*path) == owner)
                .unwrap_or(0);
            let mut holder = claims[winner].0.display().to_string();
            if let Some(owner) = owner
                && claims[winner].0 != owner
                && let Some(file) = files.get(owner)
                && file.is_unreadable()
                && !self.accepted_once.contains(owner)
            {
                // After a restart the owner's record is in force until its file can be read again.
                if matches!(file.unread, Some(Unread::Pending { .. })) {
                    continue;
                }
                winner = claims.len();
                holder = format!("{}, which cannot be read", owner.display());
            }
            for (n, (path, deployment, place)) in claims.into_iter().enumerate() {
                if n == winner {
                    winners.insert(name, deployment);
                } else {
                    duplicates.push(read::duplicate(path, &deployment.name, place, &holder));
                }
            }
        }
        (winners, duplicates)
    }

    /// A file that cannot even be looked into may be where a name went that disappeared when the file came. Names that
    /// leave later did not go there, so a file that stays unreadable does not hold up removals for ever.
    fn suspect(
        &self,
        present: &BTreeSet<&DeploymentName>,
        files: &mut BTreeMap<PathBuf, FileState>,
    ) {
        for file in files.values_mut() {
            if let Some(Unread::Failed { may_hold, .. }) = &mut file.unread
                && may_hold.is_none()
            {
                let absent = self.owners.keys().filter(|name| !present.contains(name));
                *may_hold = Some(absent.map(ToString::to_string).collect());
            }
        }
    }

    fn note_missing(
        &mut self,
        now: Timestamp,
        present: &BTreeSet<&DeploymentName>,
        files: &BTreeMap<PathBuf, FileState>,
    ) {
        let unreadable: Vec<_> = files
            .iter()
            .filter(|(_, file)| file.is_unreadable())
            .collect();
        for (name, owner) in &self.owners {
            let may_be_held = || {
                let holds = |(path, file): &(&PathBuf, &FileState)| {
                    *path == owner || file.may_hold(name.as_str())
                };
                unreadable.iter().any(holds)
            };
            if present.contains(name) || may_be_held() {
                self.missing.remove(name);
            } else {
                self.missing.entry(name.clone()).or_insert(now);
            }
        }
        self.published.retain(|name, _| {
            let since = self.missing.get(name);
            since.is_none_or(|since| now.duration_since(*since) <= RETURN)
        });
        let long_gone: Vec<_> = self
            .missing
            .iter()
            .filter(|(_, since)| now.duration_since(**since) > MEMORY)
            .map(|(name, _)| name.clone())
            .collect();
        for name in long_gone {
            self.missing.remove(&name);
            self.owners.remove(&name);
        }
    }

    /// The events of what was accepted or changed.
    fn changes(&mut self, now: Timestamp, wishes: &Wishes) -> Vec<Event> {
        let mut events = Vec::new();
        for (name, deployment) in &wishes.deployments {
            let file = deployment.source.file.display();
            let message = match self.published.get(name) {
                None => format!("accepted from {file}"),
                Some(old) => match change(old, deployment) {
                    None => continue,
                    Some(change) => format!("changed in {file}: {change}"),
                },
            };
            events.push(Event::of_deployment(now, name, Reason::Accepted, message));
            self.published.insert(name.clone(), deployment.clone());
        }
        events
    }

    /// The events of problems that were not there before.
    fn new_problems(&mut self, now: Timestamp, problems: &[Problem]) -> Vec<Event> {
        let mut events = Vec::new();
        let mut reported = BTreeSet::new();
        for problem in problems {
            // Without the line: an edit above moves a problem and does not make a new one.
            let key = (
                problem.file.clone(),
                problem.path.clone(),
                problem.message.clone(),
            );
            if !self.reported.contains(&key) && !reported.contains(&key) {
                let reason = match problem.kind {
                    ProblemKind::Unreadable | ProblemKind::Invalid => Reason::ManifestInvalid,
                    ProblemKind::Duplicate => Reason::DuplicateName,
                };
                let message = problem.to_string();
                events.push(match &problem.deployment {
                    Some(name) => Event::of_deployment(now, name, reason, message),
                    None => Event::general(now, reason, message),
                });
            }
            reported.insert(key);
        }
        self.reported = reported;
        events
    }
}

/// What a change of a deployment causes and in which fields it is; where it was read does not count.
fn change(old: &Deployment, new: &Deployment) -> Option<String> {
    if (&old.spec, &old.labels) == (&new.spec, &new.labels) {
        return None;
    }
    let mut fields = old.spec.changed_fields(&new.spec);
    let class = if fields
        .iter()
        .any(|field| field == "spec.devices" || field == "spec.port")
    {
        "re-lease"
    } else if old.restart_key == new.restart_key {
        "live"
    } else {
        "restart"
    };
    if old.labels.restarted_at() != new.labels.restarted_at() {
        fields.push("metadata.annotations".to_owned());
    }
    if fields.is_empty() {
        return Some(class.to_owned());
    }
    Some(format!("{class} ({})", fields.join(", ")))
}
