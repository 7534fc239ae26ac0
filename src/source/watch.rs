//! A watch on the folder that says when to look again (W1). It spares waiting; whatever it loses, the next scan finds.
//!
//! A watch by inotify is on an inode and not on a name. So beside the folder itself every place is watched where its
//! name could come to mean another one: the parents of the folder and of each link on the way to it, and the folders
//! that links in it lead to. When one of them changes, [`Watch::rearm`] has to be called to follow.
//!
//! Invariant: reading the folder wakes nobody; the watch reports no opening, reading or plain modification.
#![expect(clippy::disallowed_methods, reason = "watches the manifest folder")]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use notify::event::{AccessKind, AccessMode, ModifyKind, RenameMode};
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};

use super::folder::{self, Depth};

/// The most settled files that are remembered between two scans. Of more the scan finds out itself, 50 ms later.
const SETTLED_LIMIT: usize = 1024;

/// The most folders watched beside the manifest folder. A user has 8192 inotify watches on small machines; what is not
/// watched is found by the next rescan.
const WATCH_LIMIT: usize = 1024;

/// How many links are followed on the way to the folder: as many as Linux follows.
const LINK_LIMIT: usize = 40;

/// Something happened to the folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FolderChange {
    /// A file, by its path in the folder, was closed after writing or moved into place: it may be read at once.
    Settled(PathBuf),
    /// Something else: look at everything.
    Rescan,
}

/// The changes since the last scan: a set that stays small, whatever happens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FolderChanges {
    settled: BTreeSet<PathBuf>,
}

impl FolderChanges {
    /// Notes a change.
    pub fn note(&mut self, change: FolderChange) {
        match change {
            FolderChange::Settled(path) if self.settled.len() < SETTLED_LIMIT => {
                self.settled.insert(path);
            }
            FolderChange::Settled(_) | FolderChange::Rescan => {}
        }
    }

    /// The settled files since the last call, for the next scan.
    pub fn take_settled(&mut self) -> BTreeSet<PathBuf> {
        std::mem::take(&mut self.settled)
    }
}

/// Why a folder is not watched, or not wholly. Scans by the clock go on.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// There is no watcher.
    #[error("the watch on {folder} cannot be set up")]
    Unavailable {
        /// The manifest folder.
        folder: PathBuf,
        /// Why.
        #[source]
        source: notify::Error,
    },
    /// A folder cannot be watched.
    #[error("{path} cannot be watched")]
    Refused {
        /// Which folder.
        path: PathBuf,
        /// Why.
        #[source]
        source: notify::Error,
    },
}

/// A watch on a folder; ends when dropped.
pub struct Watch {
    watcher: RecommendedWatcher,
    folder: PathBuf,
    depth: Depth,
    /// The folders that are watched, with the inode each had: another one under the same name needs another watch.
    watched: BTreeMap<PathBuf, (u64, u64)>,
    shared: Arc<Mutex<Interest>>,
}

/// What the watcher's thread must know to tell what an event is about. [`Watch::rearm`] writes it and the watcher's
/// thread reads it; neither holds it while it does anything else.
#[derive(Debug, Default)]
struct Interest {
    /// Where the folder really is.
    root: PathBuf,
    /// Names that matter in folders that do not: a link on the way to the manifest folder, or the folder itself.
    names: BTreeSet<(PathBuf, OsString)>,
    /// Folders beside it in which links end, or that are looked into with `--recursive`.
    targets: BTreeSet<PathBuf>,
    /// All folders that are watched.
    watched: BTreeSet<PathBuf>,
    depth: Depth,
    /// Whether a watched folder itself went away, so that its watch is dead.
    lost: bool,
}

/// Watches a folder. `wake` is called on the watcher's thread, and has to be quick: it only marks. After
/// [`FolderChange::Rescan`] call [`Watch::rearm`] before the next scan, so that nothing falls between the two.
///
/// A folder that does not exist yet is watched for.
pub fn watch(
    folder: &Path,
    depth: Depth,
    wake: impl Fn(FolderChange) + Send + 'static,
) -> Result<Watch, WatchError> {
    let unavailable = |source| WatchError::Unavailable {
        folder: folder.to_owned(),
        source,
    };
    let shared = Arc::new(Mutex::new(Interest::default()));
    let seen = Arc::clone(&shared);
    let watcher = notify::recommended_watcher(move |event: notify::Result<Event>| {
        // Not in one expression: the lock would be held while waking.
        let changes = changes(event, &mut lock(&seen));
        changes.into_iter().for_each(&wake);
    })
    .map_err(unavailable)?;
    let folder =
        std::path::absolute(folder).map_err(|error| unavailable(notify::Error::io(error)))?;
    let mut watch = Watch {
        watcher,
        folder,
        depth,
        watched: BTreeMap::new(),
        shared,
    };
    watch.rearm()?;
    Ok(watch)
}

fn lock(shared: &Mutex<Interest>) -> MutexGuard<'_, Interest> {
    // Whatever a panic left in it is overwritten by the next `rearm`.
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watch {
    /// Follows the folder to where its name leads now. Cheap where nothing changed, so it may be called before every scan.
    ///
    /// # Errors
    /// The first folder that could not be watched; all others are.
    pub fn rearm(&mut self) -> Result<(), WatchError> {
        let was_lost = std::mem::take(&mut lock(&self.shared).lost);
        let targets = targets(&self.folder, self.depth);
        // The new interest first: an event of a new watch must find it.
        {
            let mut interest = lock(&self.shared);
            interest.root.clone_from(&targets.root);
            interest.names = targets.names;
            interest.targets = targets.links;
            interest.watched = targets.folders.keys().cloned().collect();
            interest.depth = self.depth;
        }
        let wanted = targets.folders;
        let stale: Vec<_> = self
            .watched
            .iter()
            .filter(|(path, inode)| was_lost || wanted.get(*path) != Some(*inode))
            .map(|(path, _)| path.clone())
            .collect();
        for path in stale {
            self.watched.remove(&path);
            // The watch of a folder that is gone has gone with it.
            let _ = self.watcher.unwatch(&path);
        }
        let mut refused = None;
        for (path, inode) in wanted {
            if self.watched.contains_key(&path) {
                continue;
            }
            match self.watcher.watch(&path, RecursiveMode::NonRecursive) {
                Ok(()) => {
                    self.watched.insert(path, inode);
                }
                // Gone since it was looked up: the watch on its parent tells.
                Err(error) if matches!(error.kind, notify::ErrorKind::PathNotFound) => {}
                Err(source) => refused = refused.or(Some(WatchError::Refused { path, source })),
            }
        }
        refused.map_or(Ok(()), Err)
    }
}

/// What there is to watch.
#[derive(Debug, Default)]
struct Targets {
    root: PathBuf,
    folders: BTreeMap<PathBuf, (u64, u64)>,
    names: BTreeSet<(PathBuf, OsString)>,
    links: BTreeSet<PathBuf>,
}

impl Targets {
    fn folder(&mut self, path: &Path) {
        if self.folders.len() < WATCH_LIMIT
            && let Ok(metadata) = fs::metadata(path)
            && metadata.is_dir()
        {
            self.folders
                .insert(path.to_owned(), (metadata.dev(), metadata.ino()));
        }
    }
}

fn targets(folder: &Path, depth: Depth) -> Targets {
    let mut targets = Targets {
        root: folder.to_owned(),
        ..Targets::default()
    };
    let (names, root) = way_to(folder);
    for (parent, _) in &names {
        targets.folder(parent);
    }
    targets.names = names;
    if let Some(root) = root {
        targets.folder(&root);
        targets_below(&root, depth, &mut targets);
        targets.root = root;
    }
    targets
}

/// The folders and link ends in a folder.
fn targets_below(root: &Path, depth: Depth, targets: &mut Targets) {
    let mut left = vec![root.to_owned()];
    let mut seen = BTreeSet::new();
    while let Some(folder) = left.pop() {
        // What cannot be listed is not watched; the scan reports it.
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            let Ok(kind) = entry.file_type() else {
                continue;
            };
            if kind.is_file()
                || folder::is_ignored(&entry.file_name())
                || targets.folders.len() >= WATCH_LIMIT
            {
                continue;
            }
            let path = entry.path();
            if kind.is_symlink() {
                let (mut names, end) = way_to(&path);
                // The link itself is an entry like others; what it leads through is not.
                names.remove(&(folder.clone(), entry.file_name()));
                for (parent, _) in &names {
                    targets.folder(parent);
                }
                targets.names.extend(names);
                if let Some(parent) = end.as_deref().and_then(Path::parent)
                    && parent != folder
                    && folder::is_manifest(&entry.file_name())
                {
                    targets.folder(parent);
                    targets.links.insert(parent.to_owned());
                }
            }
            if depth == Depth::Recursive
                && let Ok(real) = fs::canonicalize(&path)
                && real.is_dir()
                && seen.insert(real.clone())
            {
                targets.folder(&real);
                targets.links.insert(real.clone());
                left.push(real);
            }
        }
    }
}

/// The way to a path: each (folder, name) on it that is a link, or the last step, or the first that does not exist; and
/// where it ends, if it does.
fn way_to(path: &Path) -> (BTreeSet<(PathBuf, OsString)>, Option<PathBuf>) {
    let mut names = BTreeSet::new();
    let mut at = PathBuf::from("/");
    // What is still to be walked, the next step last.
    let mut left: Vec<OsString> = steps(path);
    let mut links = 0;
    while let Some(step) = left.pop() {
        if step == ".." {
            at.pop();
            continue;
        }
        let next = at.join(&step);
        match fs::symlink_metadata(&next) {
            Err(_) => {
                names.insert((at, step));
                return (names, None);
            }
            Ok(metadata) if metadata.is_symlink() => {
                names.insert((at.clone(), step));
                links += 1;
                let Ok(target) = fs::read_link(&next) else {
                    return (names, None);
                };
                if links > LINK_LIMIT {
                    return (names, None);
                }
                if target.is_absolute() {
                    at = PathBuf::from("/");
                }
                left.extend(steps(&target));
            }
            Ok(_) => {
                if left.is_empty() {
                    names.insert((at.clone(), step));
                }
                at = next;
            }
        }
    }
    (names, Some(at))
}

/// The steps of a path, the first one last.
fn steps(path: &Path) -> Vec<OsString> {
    let named = |component: Component<'_>| match component {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some(OsStr::new("..").to_owned()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    };
    path.components().rev().filter_map(named).collect()
}

/// What an event of the watcher means.
fn changes(event: notify::Result<Event>, interest: &mut Interest) -> Vec<FolderChange> {
    // An error, or a queue that ran over: anything may have happened, also to the watches.
    let event = match event {
        Ok(event) if !event.need_rescan() => event,
        Ok(_) | Err(_) => {
            interest.lost = true;
            return vec![FolderChange::Rescan];
        }
    };
    let happening = happening(event.kind);
    if happening == Happening::Nothing {
        return Vec::new();
    }
    event
        .paths
        .iter()
        .filter_map(|path| change(happening, path, interest))
        .collect()
}

/// What happened to a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Happening {
    /// It has its final content.
    Finished,
    /// A name appeared: a file that is still open, a link, or a folder.
    Appeared,
    /// It went away.
    Gone,
    /// Its rights or times changed.
    Touched,
    /// Nothing to look for.
    Nothing,
}

fn happening(kind: EventKind) -> Happening {
    match kind {
        EventKind::Access(AccessKind::Close(AccessMode::Write))
        | EventKind::Modify(ModifyKind::Name(RenameMode::To)) => Happening::Finished,
        EventKind::Create(_) => Happening::Appeared,
        EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(RenameMode::From)) => {
            Happening::Gone
        }
        // A file may have become readable.
        EventKind::Modify(ModifyKind::Metadata(_)) => Happening::Touched,
        // Both sides of a renaming are told one by one as well.
        EventKind::Modify(_) | EventKind::Access(_) | EventKind::Any | EventKind::Other => {
            Happening::Nothing
        }
    }
}

fn change(happening: Happening, path: &Path, interest: &mut Interest) -> Option<FolderChange> {
    let (parent, name) = (path.parent()?, path.file_name()?);
    let leads_elsewhere = interest
        .names
        .contains(&(parent.to_owned(), name.to_owned()));
    let watch_died = happening == Happening::Gone && interest.watched.contains(path);
    if leads_elsewhere || watch_died {
        interest.lost |= happening != Happening::Touched;
        return Some(FolderChange::Rescan);
    }
    if *path == interest.root {
        return Some(FolderChange::Rescan);
    }
    let relative = path.strip_prefix(&interest.root).ok();
    if relative.is_none() && !interest.targets.contains(parent) {
        return None;
    }
    if folder::is_manifest(name) {
        return match (happening, relative) {
            (Happening::Finished, Some(relative)) => {
                Some(FolderChange::Settled(relative.to_owned()))
            }
            // A file that was created is told of again when it is closed; a link never is.
            (Happening::Appeared, Some(relative)) => {
                is_whole(path).then(|| FolderChange::Settled(relative.to_owned()))
            }
            (Happening::Appeared, None) => is_whole(path).then_some(FolderChange::Rescan),
            (Happening::Finished | Happening::Gone | Happening::Touched, _) => {
                Some(FolderChange::Rescan)
            }
            (Happening::Nothing, _) => None,
        };
    }
    let may_be_folder = || happening == Happening::Gone || path.is_dir();
    let matters =
        interest.depth == Depth::Recursive && !folder::is_ignored(name) && may_be_folder();
    matters.then_some(FolderChange::Rescan)
}

/// Whether what appeared is complete as it is: a link, symbolic or hard, or something that nobody closes.
fn is_whole(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| !metadata.is_file() || metadata.nlink() > 1)
}

#[cfg(test)]
mod tests;
