//! What the folder wishes: a value made by `source/`, with what could not be read as explicit as what could.
//!
//! Invariant: a deployment that is not in [`Desired::deployments`] is *wanted no longer* only if
//! [`Desired::absence`] says since when. Unreadable never means removed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use jiff::Timestamp;

use crate::names::DeploymentName;
use crate::record::Record;
use crate::spec::Deployment;

/// What the folder wishes.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Desired {
    /// Whether the folder could be listed completely.
    pub folder: Folder,
    /// The accepted deployments; those of a file that turned bad are as last accepted.
    pub deployments: BTreeMap<DeploymentName, Deployment>,
    /// Files whose present content is not accepted. What they hold is unknown.
    pub unreadable: BTreeMap<PathBuf, Unreadable>,
    /// What a person should mend.
    pub problems: Vec<Problem>,
    /// Since when deployments that were once accepted are absent from complete listings.
    pub missing: BTreeMap<DeploymentName, Timestamp>,
    /// When the folder was first listed completely: since then, what was never seen is absent.
    pub first_listed_at: Option<Timestamp>,
    /// Until when removals wait for a git command to finish, at most.
    pub removals_wait_until: Option<Timestamp>,
}

/// Whether the folder could be listed completely.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Folder {
    /// It could.
    Listed,
    /// It could not, so nothing is known of what is wished.
    Unavailable {
        /// Why.
        why: String,
    },
}

impl Default for Folder {
    fn default() -> Self {
        Self::Unavailable {
            why: "not looked at yet".to_owned(),
        }
    }
}

/// A file whose present content is not accepted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Unreadable {
    /// The words of it that could be names, where its bytes could be read: a deployment that such a file mentions
    /// is not proven absent.
    pub words: BTreeSet<String>,
}

/// Something in the folder that a person should mend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The file, relative to the folder.
    pub file: PathBuf,
    /// The line, from 1.
    pub line: Option<usize>,
    /// The column, from 1, in characters.
    pub column: Option<usize>,
    /// The field's path, such as `spec.engine`.
    pub path: Option<String>,
    /// What is wrong.
    pub message: String,
    /// What would be right.
    pub hint: Option<String>,
    /// The deployment it is about, where one could be made out.
    pub deployment: Option<DeploymentName>,
    /// What kind of problem.
    pub kind: ProblemKind,
    /// The whole report with the line and a caret, without colour.
    pub report: String,
}

/// What kind of problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProblemKind {
    /// The file could not be read.
    Unreadable,
    /// It could be read, and is wrong.
    Invalid,
    /// Another document has the name.
    Duplicate,
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.file.display())?;
        if let (Some(line), Some(column)) = (self.line, self.column) {
            write!(f, ":{line}:{column}")?;
        }
        write!(f, ": ")?;
        if let Some(path) = &self.path {
            write!(f, "{path}: ")?;
        }
        f.write_str(&self.message)
    }
}

/// What is known of a deployment that is not among the accepted ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Absence {
    /// Absent from complete listings since then.
    Since(Timestamp),
    /// The folder, or the file that held it, cannot be read: nothing is known.
    Unproven,
}

impl Desired {
    /// Whether a deployment that is not among the accepted ones is absent. `record` is what is remembered of it.
    pub fn absence(&self, record: &Record) -> Absence {
        let name = &record.name.deployment;
        match (&self.folder, self.first_listed_at) {
            (Folder::Listed, Some(first)) if !self.may_hold(name, &record.source.file) => {
                Absence::Since(self.missing.get(name).copied().unwrap_or(first))
            }
            _ => Absence::Unproven,
        }
    }

    /// Whether a file that cannot be read may hold the deployment: it did, or it mentions the name.
    fn may_hold(&self, name: &DeploymentName, file: &Path) -> bool {
        self.unreadable
            .iter()
            .any(|(path, unreadable)| path == file || unreadable.words.contains(name.as_str()))
    }
}
