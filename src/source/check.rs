//! One look at a file or folder, as a scan would take it: for `evenkeel validate`.
//!
//! Invariant: what has no problem here, a daemon that starts on the same folder accepts.
// effect: reads the manifest folder

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use jiff::Timestamp;

use super::folder::{self, Bytes, Depth, FILE_LIMIT};
use super::ledger::{FileState, Ledger, Verdict};
use super::read::Ignored;
use super::scan::unreadable;
use crate::desired::Problem;

/// What a file holds.
#[derive(Debug, Clone, PartialEq)]
pub struct CheckedFile {
    /// The file, as a path that can be opened.
    pub file: PathBuf,
    /// How many deployments it gives.
    pub deployments: usize,
    /// Its documents of other programs.
    pub ignored: Vec<Ignored>,
    /// What a person should mend.
    pub problems: Vec<Problem>,
}

/// Checks a file, or all manifests of a folder.
///
/// # Errors
/// If there is nothing there, or the folder cannot be listed.
pub fn check(path: &Path, depth: Depth) -> Result<Vec<CheckedFile>, Box<Problem>> {
    let mut ledger = Ledger::new(BTreeMap::new());
    let mut files = BTreeMap::new();
    if path.is_dir() {
        let listing = folder::list(path, depth)
            .map_err(|why| Box::new(unreadable(path, format!("cannot be listed: {why}"))))?;
        for (relative, stamp) in listing.files {
            let file = path.join(relative);
            let state = match stamp {
                Ok(_) => read(&file, &ledger),
                Err(why) => failed(&file, why),
            };
            files.insert(file, state);
        }
    } else {
        files.insert(path.to_owned(), read(path, &ledger));
    }
    // The time only dates events, which nobody is told here.
    let (wishes, _) = ledger.take_in(Timestamp::UNIX_EPOCH, &mut files);
    let checked = files.into_iter().map(|(file, state)| CheckedFile {
        deployments: wishes
            .deployments
            .values()
            .filter(|deployment| deployment.source.file == file)
            .count(),
        ignored: match state.content.map(|content| content.verdict) {
            Some(Verdict::Accepted { ignored, .. }) => ignored,
            Some(Verdict::Refused { .. }) | None => Vec::new(),
        },
        problems: wishes
            .problems
            .iter()
            .filter(|problem| problem.file == file)
            .cloned()
            .collect(),
        file,
    });
    Ok(checked.collect())
}

fn read(file: &Path, ledger: &Ledger) -> FileState {
    match folder::read(file) {
        Bytes::Read(stamp, bytes) => {
            let mut state = FileState::default();
            state.take_in(file, Some(stamp), &bytes, ledger);
            state
        }
        Bytes::Changing => failed(file, "is being written".to_owned()),
        Bytes::TooLarge => failed(file, format!("has more than {FILE_LIMIT} bytes")),
        Bytes::Failed(why) => failed(file, why),
    }
}

fn failed(file: &Path, why: String) -> FileState {
    let mut state = FileState::default();
    state.fail(file, None, why);
    state
}
