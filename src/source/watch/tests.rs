//! What the watch reports of real folders.

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
