//! A watch on the folder that says when to look again (W1). It spares waiting; whatever it loses, the next scan finds.
//!
//! A watch by inotify is on an inode and not on a name. So beside the folder itself every place is watched where its
//! name could come to mean another one: the parents of the folder and of each link on the way to it, and the folders
//! that links in it lead to. When one of them changes, [`Watch::rearm`] has to be called to follow.
//!
//! Invariant: reading the folder wakes nobody; the watch reports no opening, reading or plain modification.
// effect: watches the manifest folder

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
    // An error, or a queue that ran over: anything may have happened.
    let Ok(event) = event else {
        interest.lost = true;
        return vec![FolderChange::Rescan];
    };
    if event.need_rescan() {
        return vec![FolderChange::Rescan];
    }
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
    let in_folder = path.strip_prefix(&interest.root).ok();
    if in_folder.is_none() && !interest.targets.contains(parent) {
        return None;
    }
    if folder::is_manifest(name) {
        return match (happening, in_folder) {
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
    let is_folder = || happening == Happening::Gone || path.is_dir();
    let matters = interest.depth == Depth::Recursive && !folder::is_ignored(name) && is_folder();
    matters.then_some(FolderChange::Rescan)
}

/// Whether what appeared is complete as it is: a link, symbolic or hard, or something that nobody closes.
fn is_whole(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| !metadata.is_file() || metadata.nlink() > 1)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::sync::mpsc::{Receiver, channel};
    use std::time::{Duration, Instant};

    use tempfile::TempDir;

    use super::*;

    struct World {
        dir: TempDir,
        watch: Watch,
        changes: Receiver<FolderChange>,
    }

    impl World {
        fn new(prepare: impl FnOnce(&Path)) -> Self {
            Self::of("manifests", Depth::Flat, prepare)
        }

        fn of(folder: &str, depth: Depth, prepare: impl FnOnce(&Path)) -> Self {
            let dir = tempfile::tempdir().unwrap();
            prepare(dir.path());
            let (sender, changes) = channel();
            let wake = move |change| drop(sender.send(change));
            let watch = watch(&dir.path().join(folder), depth, wake).unwrap();
            Self {
                dir,
                watch,
                changes,
            }
        }

        fn path(&self, file: &str) -> PathBuf {
            self.dir.path().join(file)
        }

        /// Waits for a change, for five seconds at most.
        fn expect(&self, wanted: &FolderChange) {
            let deadline = Instant::now() + Duration::from_secs(5);
            loop {
                let left = deadline.saturating_duration_since(Instant::now());
                let change = self
                    .changes
                    .recv_timeout(left)
                    .unwrap_or_else(|_| panic!("no {wanted:?}"));
                if change == *wanted {
                    return;
                }
            }
        }

        fn expect_settled(&self, file: &str) {
            self.expect(&FolderChange::Settled(file.into()));
        }

        fn expect_rescan(&mut self) {
            self.expect(&FolderChange::Rescan);
            self.watch.rearm().unwrap();
        }

        /// Does something, and tells what was reported of it: everything before a file that is written afterwards.
        fn reported(&self, mark: &str, action: impl FnOnce()) -> Vec<FolderChange> {
            while self.changes.try_recv().is_ok() {}
            action();
            fs::write(self.path(mark), "").unwrap();
            let mut reported = Vec::new();
            loop {
                let change = self
                    .changes
                    .recv_timeout(Duration::from_secs(5))
                    .expect("the mark is reported");
                match change {
                    FolderChange::Settled(path) if path.ends_with("mark.yaml") => return reported,
                    change => reported.push(change),
                }
            }
        }
    }

    fn with_folder(dir: &Path) {
        fs::create_dir(dir.join("manifests")).unwrap();
    }

    #[test]
    fn a_finished_write_a_renaming_a_link_and_a_removal_are_reported() {
        let mut world = World::new(with_folder);
        fs::write(world.path("manifests/a.yaml"), "a").unwrap();
        world.expect_settled("a.yaml");
        fs::write(world.path("manifests/b.tmp"), "b").unwrap();
        fs::rename(
            world.path("manifests/b.tmp"),
            world.path("manifests/b.yaml"),
        )
        .unwrap();
        world.expect_settled("b.yaml");
        symlink("b.yaml", world.path("manifests/c.yaml")).unwrap();
        world.expect_settled("c.yaml");
        fs::hard_link(
            world.path("manifests/b.yaml"),
            world.path("manifests/d.yaml"),
        )
        .unwrap();
        world.expect_settled("d.yaml");
        fs::remove_file(world.path("manifests/a.yaml")).unwrap();
        world.expect_rescan();
    }

    #[test]
    fn an_open_file_reading_and_what_editors_leave_behind_wake_nobody() {
        use std::io::Write;
        let world = World::new(with_folder);
        fs::write(world.path("manifests/a.yaml"), "a").unwrap();
        world.expect_settled("a.yaml");
        let mut open = fs::File::options()
            .append(true)
            .open(world.path("manifests/a.yaml"))
            .unwrap();
        let reported = world.reported("manifests/mark.yaml", || {
            open.write_all(b"b").unwrap();
            open.flush().unwrap();
            fs::read(world.path("manifests/a.yaml")).unwrap();
            fs::read_dir(world.path("manifests"))
                .unwrap()
                .for_each(drop);
            fs::write(world.path("manifests/.a.yaml.swp"), "").unwrap();
            fs::write(world.path("manifests/notes.txt"), "").unwrap();
            fs::write(world.path("beside.yaml"), "").unwrap();
            fs::create_dir(world.path("manifests/folder")).unwrap();
        });
        // A new folder changes the link count of its parent on some file systems, which is reported as a touch.
        assert!(
            !reported
                .iter()
                .any(|change| matches!(change, FolderChange::Settled(_))),
            "{reported:?}"
        );
        drop(open);
        world.expect_settled("a.yaml");
    }

    #[test]
    fn a_folder_that_is_removed_and_made_anew_is_watched_again() {
        let mut world = World::new(with_folder);
        for round in 0..3 {
            fs::remove_dir_all(world.path("manifests")).unwrap();
            world.expect_rescan();
            fs::create_dir(world.path("manifests")).unwrap();
            world.expect_rescan();
            // Until all that was reported is followed, a new watch may still be on its way.
            while world.changes.try_recv().is_ok() {}
            world.watch.rearm().unwrap();
            let file = format!("{round}.yaml");
            fs::write(world.path("manifests").join(&file), "a").unwrap();
            world.expect_settled(&file);
        }
    }

    #[test]
    fn a_folder_that_does_not_exist_yet_is_watched_for() {
        let mut world = World::of("not/yet/there", Depth::Flat, |_| {});
        for folder in ["not", "not/yet", "not/yet/there"] {
            fs::create_dir(world.path(folder)).unwrap();
            world.expect_rescan();
        }
        fs::write(world.path("not/yet/there/a.yaml"), "a").unwrap();
        world.expect_settled("a.yaml");
    }

    #[test]
    fn a_link_on_the_way_that_is_swapped_is_followed() {
        for folder in ["current", "current/manifests"] {
            let mut world = World::of(folder, Depth::Flat, |dir| {
                fs::create_dir_all(dir.join("v1/manifests")).unwrap();
                fs::create_dir_all(dir.join("v2/manifests")).unwrap();
                symlink("v1", dir.join("current")).unwrap();
            });
            symlink("v2", world.path("next")).unwrap();
            fs::rename(world.path("next"), world.path("current")).unwrap();
            world.expect_rescan();
            fs::write(world.path(folder).join("a.yaml"), "a").unwrap();
            world.expect_settled("a.yaml");
        }
    }

    #[test]
    fn a_config_map_mount_that_is_swapped_and_files_behind_links_are_reported() {
        let mut world = World::new(|dir| {
            with_folder(dir);
            let at = |path: &str| dir.join("manifests").join(path);
            for version in ["..v1", "..v2"] {
                fs::create_dir(at(version)).unwrap();
                fs::write(at(version).join("a.yaml"), "a").unwrap();
            }
            symlink("..v1", at("..data")).unwrap();
            symlink("..data/a.yaml", at("a.yaml")).unwrap();
            fs::create_dir(dir.join("elsewhere")).unwrap();
            fs::write(dir.join("elsewhere/b.yaml"), "b").unwrap();
            symlink("../elsewhere/b.yaml", at("b.yaml")).unwrap();
        });
        symlink("..v2", world.path("manifests/..data_tmp")).unwrap();
        fs::rename(
            world.path("manifests/..data_tmp"),
            world.path("manifests/..data"),
        )
        .unwrap();
        world.expect_rescan();
        fs::write(world.path("elsewhere/b.yaml"), "bb").unwrap();
        world.expect_rescan();
    }

    #[test]
    fn folders_in_the_folder_are_watched_when_asked() {
        let mut world = World::of("manifests", Depth::Recursive, |dir| {
            fs::create_dir_all(dir.join("manifests/team")).unwrap();
        });
        fs::write(world.path("manifests/team/a.yaml"), "a").unwrap();
        world.expect_settled("team/a.yaml");
        fs::create_dir(world.path("manifests/other")).unwrap();
        world.expect_rescan();
        fs::write(world.path("manifests/other/b.yaml"), "b").unwrap();
        world.expect_settled("other/b.yaml");
    }

    #[test]
    fn an_error_and_a_queue_that_ran_over_ask_for_a_rescan() {
        let mut interest = Interest::default();
        let error = notify::Error::generic("no more");
        assert_eq!(changes(Err(error), &mut interest), [FolderChange::Rescan]);
        assert!(interest.lost);
        let overflow = Event::new(EventKind::Other).set_flag(notify::event::Flag::Rescan);
        assert_eq!(
            changes(Ok(overflow), &mut Interest::default()),
            [FolderChange::Rescan]
        );
    }

    #[test]
    fn changes_stay_few_whatever_happens() {
        let mut changes = FolderChanges::default();
        changes.note(FolderChange::Rescan);
        for n in 0..10_000 {
            changes.note(FolderChange::Settled(format!("{n}.yaml").into()));
        }
        assert_eq!(changes.take_settled().len(), SETTLED_LIMIT);
        assert!(changes.take_settled().is_empty());
    }
}
