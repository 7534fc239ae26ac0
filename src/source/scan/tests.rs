//! What scans of real folders conclude, with a clock of their own.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt, symlink};
use std::time::Duration;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::desired::Absence;
use crate::names::InstanceName;
use crate::record::{History, Record};
use crate::source::known_device;

/// A folder, its scanner, and the time, which begins when no file is young any more.
struct World {
    dir: TempDir,
    scanner: Scanner,
    now: Timestamp,
}

impl World {
    fn new() -> Self {
        Self::with_owners(&[])
    }

    fn with_owners(owners: &[(&str, &str)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self::of(dir, "", owners)
    }

    fn of(dir: TempDir, within: &str, owners: &[(&str, &str)]) -> Self {
        let owners = owners
            .iter()
            .map(|(name, file)| (name.parse().unwrap(), PathBuf::from(file)))
            .collect();
        let scanner = Scanner::new(dir.path().join(within), ScanOptions::default(), owners);
        let now = Timestamp::now() + SignedDuration::from_hours(1);
        Self { dir, scanner, now }
    }

    fn path(&self, file: &str) -> PathBuf {
        self.dir.path().join(file)
    }

    fn write(&self, file: &str, text: &str) {
        fs::write(self.path(file), text).unwrap();
    }

    fn remove(&self, file: &str) {
        fs::remove_file(self.path(file)).unwrap();
    }

    /// A scan, some time after the last one.
    fn scan(&mut self) -> Scan {
        self.later(SignedDuration::from_millis(10));
        self.scanner.scan(self.now, &BTreeSet::new())
    }

    fn later(&mut self, time: SignedDuration) {
        self.now += time;
    }
}

fn manifest(name: &str, spec: &str) -> String {
    format!(
        "apiVersion: evenkeel.dev/v1alpha1\nkind: ModelDeployment\nmetadata:\n  name: {name}\nspec:\n  engine: echo\n{spec}---\n"
    )
}

fn names(scan: &Scan) -> Vec<&str> {
    scan.desired
        .deployments
        .keys()
        .map(DeploymentName::as_str)
        .collect()
}

fn missing(scan: &Scan) -> Vec<&str> {
    scan.desired
        .missing
        .keys()
        .map(DeploymentName::as_str)
        .collect()
}

fn reasons(scan: &Scan) -> Vec<Reason> {
    scan.events.iter().map(|event| event.reason).collect()
}

fn name(text: &str) -> DeploymentName {
    text.parse().unwrap()
}

fn record(instance: &str, file: &str) -> Record {
    let instance: InstanceName = instance.parse().unwrap();
    let text = manifest(instance.deployment.as_str(), "");
    let deployment = read_manifests(Path::new(file), text.as_bytes())
        .unwrap()
        .deployments
        .remove(0);
    Record {
        version: crate::record::RECORD_VERSION,
        name: instance,
        node: "here".to_owned(),
        metadata: deployment.labels,
        source: deployment.source,
        spec: deployment.spec,
        restart_key: deployment.restart_key,
        launch: None,
        history: History::default(),
    }
}

#[test]
fn files_become_deployments_and_a_second_scan_tells_nothing() {
    let mut world = World::new();
    world.write("b.yaml", &manifest("b", ""));
    world.write("a.yml", &(manifest("a", "") + &manifest("a2", "")));
    world.write("c.json", r#"{"apiVersion": "evenkeel.dev/v1alpha1", "kind": "ModelDeployment", "metadata": {"name": "c"}, "spec": {"engine": "echo"}}"#);
    world.write("notes.txt", "a: b: c");
    world.write("foreign.yaml", "apiVersion: apps/v1\nkind: Deployment\n");
    let first = world.scan();
    assert_eq!(first.desired.folder, Folder::Listed);
    assert_eq!(first.desired.first_listed_at, Some(world.now));
    assert_eq!(names(&first), ["a", "a2", "b", "c"]);
    assert_eq!(first.desired.deployments[&name("a2")].source.document, 1);
    assert_eq!(reasons(&first), [Reason::Accepted; 4]);
    assert_eq!(first.events[0].message, "accepted from a.yml");
    assert_eq!(first.look_again_at, None);

    let second = world.scan();
    assert_eq!(second.desired, first.desired);
    assert_eq!(second.events, []);
}

#[test]
fn an_unchanged_file_is_not_read_again() {
    let mut world = World::new();
    world.write("a.yaml", &manifest("a", ""));
    world.scan();
    // Reading sets the access time of a file whose access time is older than its last change.
    let accessed = |world: &World| {
        fs::metadata(world.path("a.yaml"))
            .unwrap()
            .accessed()
            .unwrap()
    };
    let long_ago = std::time::SystemTime::UNIX_EPOCH + Duration::from_secs(1);
    let file = fs::File::options()
        .write(true)
        .open(world.path("a.yaml"))
        .unwrap();
    file.set_times(fs::FileTimes::new().set_accessed(long_ago))
        .unwrap();
    world.scan();
    let before = accessed(&world);
    file.set_times(fs::FileTimes::new().set_accessed(long_ago))
        .unwrap();
    world.scan();
    // On a file system that keeps no access times both are the same, and this proves nothing.
    let after_a_read = accessed(&world);
    world.scan();
    assert_eq!(names(&world.scan()), ["a"]);
    assert_eq!(accessed(&world), after_a_read, "{before:?}");
}

#[test]
fn a_file_with_a_new_stamp_and_the_same_bytes_causes_nothing() {
    let mut world = World::new();
    world.write("a.yaml", &manifest("a", ""));
    let first = world.scan();
    world.remove("a.yaml");
    world.write("a.yaml", &manifest("a", ""));
    let second = world.scan();
    assert_eq!(second.desired, first.desired);
    assert_eq!(second.events, []);
}

#[test]
fn a_change_says_what_it_causes() {
    let mut world = World::new();
    world.write("a.yaml", &manifest("a", ""));
    world.scan();
    for (spec, message) in [
        ("  priority: 3\n", "changed in a.yaml: live"),
        (
            "  priority: 3\n  args: [--x]\n",
            "changed in a.yaml: restart (spec.args)",
        ),
        (
            "  args: [--y]\n  port: 9000\n",
            "changed in a.yaml: re-lease (spec.args, spec.port)",
        ),
        ("  # a comment\n  port: 9000\n  args: [\"--y\"]\n", ""),
    ] {
        world.write("a.yaml", &manifest("a", spec));
        let messages: Vec<_> = world
            .scan()
            .events
            .into_iter()
            .map(|event| event.message)
            .collect();
        assert_eq!(messages.concat(), message);
    }
    let annotated = manifest("a", "  port: 9000\n  args: [--y]\n").replace(
        "spec:",
        "  annotations: {evenkeel.dev/restartedAt: now}\nspec:",
    );
    world.write("a.yaml", &annotated);
    assert_eq!(
        world.scan().events[0].message,
        "changed in a.yaml: restart (metadata.annotations)"
    );
}

#[test]
fn a_file_just_written_is_read_when_it_has_settled_or_the_watch_says_so() {
    let mut world = World::new();
    world.now = Timestamp::now();
    world.write("a.yaml", &manifest("a", ""));
    let young = world.scanner.scan(world.now, &BTreeSet::new());
    assert_eq!(names(&young), [""; 0]);
    let again = young.look_again_at.unwrap();
    assert!(
        again > world.now && again <= world.now + SignedDuration::from_millis(60),
        "{again} {}",
        world.now
    );
    assert!(
        young.desired.unreadable[Path::new("a.yaml")]
            .words
            .contains("a")
    );
    assert_eq!(
        young.desired.absence(&record("a-0", "other.yaml")),
        Absence::Unproven
    );
    assert_eq!(young.events, []);

    let settled = world
        .scanner
        .scan(again + SignedDuration::from_millis(1), &BTreeSet::new());
    assert_eq!(names(&settled), ["a"]);
    assert_eq!(settled.look_again_at, None);

    world.now = Timestamp::now();
    world.write("b.yaml", &manifest("b", ""));
    let told = world
        .scanner
        .scan(world.now, &BTreeSet::from([PathBuf::from("b.yaml")]));
    assert_eq!(names(&told), ["a", "b"]);
    assert!(
        told.look_again_at.is_some(),
        "a stamp this young proves nothing"
    );
}

#[test]
fn a_file_being_rewritten_keeps_its_deployments_in_force() {
    let mut world = World::new();
    world.write("a.yaml", &manifest("a", ""));
    world.scan();
    world.now = Timestamp::now();
    world.write("a.yaml", "apiVer");
    let young = world.scanner.scan(world.now, &BTreeSet::new());
    assert_eq!(names(&young), ["a"]);
    assert_eq!(missing(&young), [""; 0]);
    assert!(young.desired.problems.is_empty());
}

#[test]
fn a_file_from_the_future_is_read_once_it_stays_the_same() {
    let mut world = World::new();
    world.write("a.yaml", &manifest("a", ""));
    let file = fs::File::options()
        .write(true)
        .open(world.path("a.yaml"))
        .unwrap();
    file.set_modified(std::time::SystemTime::now() + Duration::from_secs(1_000_000))
        .unwrap();
    let young = world.scan();
    assert_eq!(names(&young), [""; 0]);
    world.now = young.look_again_at.unwrap();
    assert_eq!(names(&world.scan()), ["a"]);
    assert_eq!(world.scan().look_again_at, None);
}

#[test]
fn a_file_that_turns_bad_keeps_its_deployments_and_is_reported_once() {
    let mut world = World::new();
    world.write("a.yaml", &(manifest("a", "") + &manifest("b", "")));
    world.write("c.yaml", &manifest("c", ""));
    let good = world.scan();
    world.write(
        "a.yaml",
        &(manifest("a", "  replica: 2\n") + &manifest("b", "  priority: 1\n")),
    );
    let bad = world.scan();
    assert_eq!(bad.desired.deployments, good.desired.deployments);
    assert_eq!(reasons(&bad), [Reason::ManifestInvalid]);
    assert_eq!(bad.events[0].deployment, Some(name("a")));
    assert_eq!(
        bad.events[0].message,
        "a.yaml:7:3: spec.replica: unknown field `replica`"
    );
    assert_eq!(bad.desired.problems.len(), 1);
    assert_eq!(
        bad.desired.problems[0].hint.as_deref(),
        Some("did you mean `replicas`?")
    );
    assert!(
        bad.desired.unreadable[Path::new("a.yaml")]
            .words
            .contains("b")
    );
    assert_eq!(missing(&bad), [""; 0]);
    assert_eq!(world.scan().events, []);

    world.write(
        "a.yaml",
        &("# moved down\n".to_owned() + &manifest("a", "  replica: 2\n")),
    );
    assert_eq!(
        world.scan().events,
        [],
        "the same problem on another line is not new"
    );

    world.write("a.yaml", &manifest("a", "  replicas: 2\n"));
    let mended = world.scan();
    assert_eq!(names(&mended), ["a", "c"]);
    assert_eq!(missing(&mended), ["b"]);
    assert!(mended.desired.problems.is_empty() && mended.desired.unreadable.is_empty());
    assert_eq!(reasons(&mended), [Reason::Accepted]);

    world.write("a.yaml", &manifest("a", "  replica: 2\n"));
    assert_eq!(
        reasons(&world.scan()),
        [Reason::ManifestInvalid],
        "a problem that returns is new"
    );
}

#[test]
fn a_name_that_disappears_is_missing_since_then_and_returns_as_if_never_away() {
    let mut world = World::new();
    world.write("a.yaml", &manifest("a", ""));
    world.write("b.yaml", &manifest("b", ""));
    world.scan();
    world.remove("a.yaml");
    let gone = world.scan();
    let since = world.now;
    assert_eq!(names(&gone), ["b"]);
    assert_eq!(gone.desired.missing, BTreeMap::from([(name("a"), since)]));
    assert_eq!(
        gone.desired.absence(&record("a-0", "a.yaml")),
        Absence::Since(since)
    );
    assert_eq!(gone.look_again_at, Some(since + CONFIRM));
    let still = world.scan();
    assert_eq!(still.desired.missing, gone.desired.missing);
    assert_eq!(still.look_again_at, None);

    world.write("new.yaml", &manifest("a", ""));
    let back = world.scan();
    assert_eq!(names(&back), ["a", "b"]);
    assert_eq!(missing(&back), [""; 0]);
    assert_eq!(back.events, []);
}

#[test]
fn a_name_that_returns_much_later_is_accepted_anew() {
    let mut world = World::new();
    world.write("a.yaml", &manifest("a", ""));
    world.scan();
    world.remove("a.yaml");
    world.scan();
    world.later(SignedDuration::from_mins(5));
    assert_eq!(missing(&world.scan()), ["a"]);
    world.write("a.yaml", &manifest("a", ""));
    assert_eq!(reasons(&world.scan()), [Reason::Accepted]);
    world.remove("a.yaml");
    let first = world.scan().desired.first_listed_at.unwrap();
    world.later(SignedDuration::from_hours(2));
    let forgotten = world.scan();
    assert_eq!(missing(&forgotten), [""; 0]);
    assert_eq!(
        forgotten.desired.absence(&record("a-0", "a.yaml")),
        Absence::Since(first)
    );
}

#[test]
fn a_deployment_that_moves_into_a_bad_file_is_not_absent() {
    let mut world = World::new();
    world.write("a.yaml", &manifest("a", ""));
    world.write("b.yaml", &manifest("b", ""));
    world.scan();
    world.remove("a.yaml");
    world.write(
        "b.yaml",
        &(manifest("b", "") + &manifest("a", "  nonsense: 1\n")),
    );
    let scan = world.scan();
    assert_eq!(names(&scan), ["b"]);
    assert_eq!(missing(&scan), [""; 0]);
    assert_eq!(
        scan.desired.absence(&record("a-0", "a.yaml")),
        Absence::Unproven
    );
    world.later(SignedDuration::from_mins(10));
    world.write("b.yaml", &manifest("b", ""));
    let scan = world.scan();
    assert_eq!(
        scan.desired.absence(&record("a-0", "a.yaml")),
        Absence::Since(world.now),
        "not since long ago"
    );
}

#[test]
fn after_a_restart_a_bad_file_proves_nothing_of_what_it_held() {
    let mut world = World::with_owners(&[("a", "a.yaml"), ("gone", "gone.yaml")]);
    world.write("a.yaml", "{ not yaml");
    let scan = world.scan();
    assert_eq!(
        scan.desired.absence(&record("a-0", "a.yaml")),
        Absence::Unproven
    );
    assert_eq!(
        scan.desired.absence(&record("gone-0", "gone.yaml")),
        Absence::Since(world.now)
    );
    assert_eq!(
        scan.desired.absence(&record("unheard-of-0", "x.yaml")),
        Absence::Since(world.now)
    );
    assert_eq!(missing(&scan), ["gone"]);
    assert_eq!(reasons(&scan), [Reason::ManifestInvalid]);
}

#[test]
fn after_a_restart_the_owner_keeps_its_name_even_while_its_file_is_bad() {
    let mut world = World::with_owners(&[("a", "z.yaml")]);
    world.write("b.yaml", &manifest("a", "  priority: 1\n"));
    world.write("z.yaml", "{ not yaml");
    let bad = world.scan();
    assert_eq!(names(&bad), [""; 0]);
    let kinds: Vec<_> = bad
        .desired
        .problems
        .iter()
        .map(|problem| problem.kind)
        .collect();
    assert_eq!(kinds, [ProblemKind::Duplicate, ProblemKind::Invalid]);
    assert!(
        bad.desired.problems[0]
            .message
            .ends_with("z.yaml, which cannot be read")
    );
    world.write("z.yaml", &manifest("a", ""));
    assert_eq!(
        world.scan().desired.deployments[&name("a")].source.file,
        Path::new("z.yaml")
    );
}

#[test]
fn a_file_without_rights_keeps_its_deployments() {
    let mut world = World::new();
    world.write("a.yaml", &manifest("a", ""));
    world.scan();
    // Root may read anything, but nobody follows a link to nothing.
    world.remove("a.yaml");
    symlink("nowhere", world.path("a.yaml")).unwrap();
    let scan = world.scan();
    assert_eq!(names(&scan), ["a"]);
    assert_eq!(scan.desired.problems[0].kind, ProblemKind::Unreadable);
    assert_eq!(reasons(&scan), [Reason::ManifestInvalid]);
    if !nix::unistd::geteuid().is_root() {
        world.remove("a.yaml");
        world.write("a.yaml", &manifest("a", "  priority: 1\n"));
        fs::set_permissions(world.path("a.yaml"), fs::Permissions::from_mode(0o000)).unwrap();
        assert_eq!(
            world.scan().desired.deployments[&name("a")].spec.priority,
            0
        );
    }
}

#[test]
fn a_file_that_cannot_be_looked_into_holds_up_only_what_left_when_it_came() {
    let mut world = World::new();
    world.write("a.yaml", &manifest("a", ""));
    world.write("b.yaml", &manifest("b", ""));
    world.scan();
    world.remove("a.yaml");
    world.write("big.yaml", &"# filler\n".repeat(200_000));
    let scan = world.scan();
    assert!(
        scan.desired.problems[0]
            .message
            .contains("1048576 are the most"),
        "{}",
        scan.desired.problems[0]
    );
    assert_eq!(
        scan.desired.absence(&record("a-0", "a.yaml")),
        Absence::Unproven
    );
    world.remove("b.yaml");
    let scan = world.scan();
    assert_eq!(
        scan.desired.absence(&record("b-0", "b.yaml")),
        Absence::Since(world.now)
    );
    assert_eq!(
        scan.desired.absence(&record("a-0", "a.yaml")),
        Absence::Unproven
    );
    world.remove("big.yaml");
    assert_eq!(
        world.scan().desired.absence(&record("a-0", "a.yaml")),
        Absence::Since(world.now)
    );
}

#[test]
fn a_folder_that_is_gone_makes_everything_unavailable_until_it_is_back() {
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::of(dir, "manifests", &[]);
    let scan = world.scan();
    assert!(matches!(scan.desired.folder, Folder::Unavailable { .. }));
    assert_eq!(reasons(&scan), [Reason::DesiredUnavailable]);
    assert_eq!(world.scan().events, []);

    fs::create_dir(world.path("manifests")).unwrap();
    world.write("manifests/a.yaml", &manifest("a", ""));
    world.write("manifests/b.yaml", &manifest("b", ""));
    assert_eq!(
        reasons(&world.scan()),
        [Reason::DesiredAvailable, Reason::Accepted, Reason::Accepted]
    );
    world.remove("manifests/b.yaml");
    assert_eq!(missing(&world.scan()), ["b"]);

    fs::rename(world.path("manifests"), world.path("elsewhere")).unwrap();
    let lost = world.scan();
    assert_eq!(names(&lost), ["a"]);
    assert_eq!(missing(&lost), [""; 0]);
    for (instance, file) in [("a-0", "a.yaml"), ("b-0", "b.yaml")] {
        assert_eq!(
            lost.desired.absence(&record(instance, file)),
            Absence::Unproven
        );
    }

    world.later(SignedDuration::from_mins(10));
    fs::create_dir(world.path("manifests")).unwrap();
    let recreated = world.scan();
    assert_eq!(recreated.desired.folder, Folder::Listed);
    assert_eq!(
        recreated.desired.absence(&record("a-0", "a.yaml")),
        Absence::Since(world.now)
    );
    assert_eq!(
        recreated.desired.absence(&record("b-0", "b.yaml")),
        Absence::Since(world.now)
    );
}

#[test]
fn a_folder_on_another_device_without_the_files_is_an_unmounted_one() {
    let shared_memory = Path::new("/dev/shm");
    let (Ok(here), Ok(there)) = (tempfile::tempdir(), tempfile::tempdir_in(shared_memory)) else {
        eprintln!("NOT TESTED: there is no second file system in /dev/shm");
        return;
    };
    let device = |path: &Path| std::os::unix::fs::MetadataExt::dev(&fs::metadata(path).unwrap());
    if device(here.path()) == device(there.path()) {
        eprintln!("NOT TESTED: /dev/shm is not another file system");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::of(dir, "link", &[]);
    let point = |world: &World, target: &Path| {
        let _ = fs::remove_file(world.path("link"));
        symlink(target, world.path("link")).unwrap();
    };
    fs::write(here.path().join("a.yaml"), manifest("a", "")).unwrap();
    point(&world, here.path());
    world.scan();
    point(&world, there.path());
    let unmounted = world.scan();
    assert!(matches!(
        unmounted.desired.folder,
        Folder::Unavailable { .. }
    ));
    assert_eq!(names(&unmounted), ["a"]);
    fs::write(
        there.path().join("a.yaml"),
        manifest("a", "  priority: 1\n"),
    )
    .unwrap();
    let mounted = world.scan();
    assert_eq!(mounted.desired.folder, Folder::Listed);
    assert_eq!(mounted.desired.deployments[&name("a")].spec.priority, 1);
}

#[test]
fn a_folder_that_is_a_swapped_link_is_followed() {
    let dir = tempfile::tempdir().unwrap();
    let mut world = World::of(dir, "current", &[]);
    for (version, priority) in [("v1", 1), ("v2", 2)] {
        fs::create_dir(world.path(version)).unwrap();
        world.write(
            &format!("{version}/a.yaml"),
            &manifest("a", &format!("  priority: {priority}\n")),
        );
    }
    symlink("v1", world.path("current")).unwrap();
    assert_eq!(
        world.scan().desired.deployments[&name("a")].spec.priority,
        1
    );
    symlink("v2", world.path("next")).unwrap();
    fs::rename(world.path("next"), world.path("current")).unwrap();
    let swapped = world.scan();
    assert_eq!(swapped.desired.deployments[&name("a")].spec.priority, 2);
    assert_eq!(reasons(&swapped), [Reason::Accepted]);
}

#[test]
fn a_config_map_mount_is_followed_when_it_is_swapped() {
    let mut world = World::new();
    for (version, priority) in [("..v1", 1), ("..v2", 2)] {
        fs::create_dir(world.path(version)).unwrap();
        world.write(
            &format!("{version}/a.yaml"),
            &manifest("a", &format!("  priority: {priority}\n")),
        );
    }
    symlink("..v1", world.path("..data")).unwrap();
    symlink("..data/a.yaml", world.path("a.yaml")).unwrap();
    assert_eq!(
        world.scan().desired.deployments[&name("a")].spec.priority,
        1
    );
    symlink("..v2", world.path("..data_tmp")).unwrap();
    fs::rename(world.path("..data_tmp"), world.path("..data")).unwrap();
    assert_eq!(
        world.scan().desired.deployments[&name("a")].spec.priority,
        2
    );
}

#[test]
fn removals_wait_for_git_but_not_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join(".git")).unwrap();
    let mut world = World::of(dir, "", &[]);
    world.write("a.yaml", &manifest("a", ""));
    assert_eq!(world.scan().desired.removals_wait_until, None);
    world.write(".git/index.lock", "");
    world.remove("a.yaml");
    let locked = world.scan();
    let since = world.now;
    assert_eq!(locked.desired.removals_wait_until, Some(since + GIT_WAIT));
    assert_eq!(missing(&locked), ["a"]);
    assert!(world.scan().look_again_at.is_some());

    world.later(GIT_WAIT);
    let over = world.scan();
    assert_eq!(over.desired.removals_wait_until, Some(since + GIT_WAIT));
    assert_eq!(reasons(&over), [Reason::Stuck]);
    assert_eq!(world.scan().events, []);
    world.remove(".git/index.lock");
    assert_eq!(world.scan().desired.removals_wait_until, None);
}

#[test]
fn of_two_files_with_one_name_the_owner_keeps_it() {
    let mut world = World::new();
    world.write("b.yaml", &manifest("x", "  priority: 2\n"));
    world.scan();
    world.write("a.yaml", &manifest("x", "  priority: 1\n"));
    let doubled = world.scan();
    assert_eq!(doubled.desired.deployments[&name("x")].spec.priority, 2);
    assert_eq!(reasons(&doubled), [Reason::DuplicateName]);
    let [problem] = doubled.desired.problems.as_slice() else {
        panic!("{:?}", doubled.desired.problems);
    };
    assert_eq!(
        (problem.file.as_path(), problem.line, problem.kind),
        (Path::new("a.yaml"), Some(4), ProblemKind::Duplicate)
    );
    assert!(problem.message.ends_with("b.yaml"), "{}", problem.message);
    assert_eq!(world.scan().events, []);

    world.remove("b.yaml");
    let moved = world.scan();
    assert_eq!(moved.desired.deployments[&name("x")].spec.priority, 1);
    assert_eq!(missing(&moved), [""; 0]);
    assert!(moved.desired.problems.is_empty());
}

#[test]
fn without_an_owner_the_first_file_gets_the_name() {
    let mut world = World::new();
    world.write("b.yaml", &manifest("x", "  priority: 2\n"));
    world.write("a.yaml", &manifest("x", "  priority: 1\n"));
    assert_eq!(
        world.scan().desired.deployments[&name("x")].spec.priority,
        1
    );

    let mut world = World::with_owners(&[("x", "b.yaml")]);
    world.write("b.yaml", &manifest("x", "  priority: 2\n"));
    world.write("a.yaml", &manifest("x", "  priority: 1\n"));
    assert_eq!(
        world.scan().desired.deployments[&name("x")].spec.priority,
        2
    );
}

#[test]
fn renaming_a_file_causes_nothing() {
    let mut world = World::new();
    world.write("a.yaml", &manifest("x", ""));
    let before = world.scan();
    fs::rename(world.path("a.yaml"), world.path("b.yaml")).unwrap();
    let after = world.scan();
    assert_eq!(after.events, []);
    assert_eq!(missing(&after), [""; 0]);
    let key = |scan: &Scan| scan.desired.deployments[&name("x")].restart_key;
    assert_eq!(key(&after), key(&before));
}

#[test]
fn folders_in_the_folder_are_looked_into_when_asked() {
    let mut world = World::new();
    fs::create_dir_all(world.path("team/one")).unwrap();
    fs::create_dir_all(world.path(".git")).unwrap();
    world.write("team/one/a.yaml", &manifest("a", ""));
    world.write(".git/b.yaml", &manifest("b", ""));
    assert_eq!(names(&world.scan()), [""; 0]);
    world.scanner.options.depth = Depth::Recursive;
    let scan = world.scan();
    assert_eq!(names(&scan), ["a"]);
    assert_eq!(
        scan.desired.deployments[&name("a")].source.file,
        Path::new("team/one/a.yaml")
    );
}

/// What a file may hold, good and bad.
fn contents() -> impl Strategy<Value = Vec<u8>> {
    let names = prop_oneof![Just("a"), Just("b"), Just("c")];
    prop_oneof![
        names.prop_map(|name| manifest(name, "").into_bytes()),
        Just(manifest("a", "  replica: 1\n").into_bytes()),
        Just((manifest("b", "") + &manifest("c", "")).into_bytes()),
        prop::collection::vec(any::<u8>(), 0..64),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn whatever_the_files_hold_a_scan_ends_and_unreadable_is_never_missing(
        steps in prop::collection::vec((0..4_usize, prop::option::of(contents())), 1..12)
    ) {
        let mut world = World::new();
        let mut accepted = BTreeMap::new();
        for (file, content) in steps {
            let file = ["a.yaml", "b.yml", "c.json", "d.yaml"][file];
            match content {
                Some(content) => fs::write(world.path(file), content).unwrap(),
                None => drop(fs::remove_file(world.path(file))),
            }
            let scan = world.scan();
            prop_assert_eq!(&scan.desired.folder, &Folder::Listed);
            for (name, deployment) in &scan.desired.deployments {
                prop_assert!(!scan.desired.missing.contains_key(name));
                accepted.insert(name.clone(), deployment.source.file.clone());
            }
            // What was accepted from a file that cannot be read now is in force or at least not proven absent.
            for (name, file) in &accepted {
                if scan.desired.unreadable.contains_key(file) && !scan.desired.deployments.contains_key(name) {
                    let record = record(&format!("{name}-0"), file.to_str().unwrap());
                    prop_assert_eq!(scan.desired.absence(&record), Absence::Unproven);
                }
            }
            let again = world.scan();
            prop_assert_eq!(&again.desired, &scan.desired);
            prop_assert_eq!(again.events, vec![]);
        }
        // A scanner that comes new to the folder and knows the owners accepts a subset of it and nothing else.
        let owners = accepted.into_iter().collect();
        let mut fresh = Scanner::new(world.dir.path().to_owned(), ScanOptions::default(), owners);
        let mut other = Scanner::new(world.dir.path().to_owned(), ScanOptions::default(), BTreeMap::new());
        let (fresh, other) = (fresh.scan(world.now, &BTreeSet::new()), other.scan(world.now, &BTreeSet::new()));
        prop_assert_eq!(fresh.desired.unreadable.keys().collect::<Vec<_>>(), other.desired.unreadable.keys().collect::<Vec<_>>());
        let last = world.scan();
        for name in fresh.desired.deployments.keys() {
            prop_assert!(last.desired.deployments.contains_key(name));
        }
    }
}

#[test]
fn what_was_read_as_it_was_renamed_into_place_is_not_taken_for_unfinished_at_the_next_scan() {
    let mut world = World::new();
    world.now = Timestamp::now();
    world.write("a.yaml", &manifest("a", "  replicas: x\n"));
    let settled = BTreeSet::from([PathBuf::from("a.yaml")]);
    let first = world.scanner.scan(world.now, &settled);
    assert_eq!(reasons(&first), [Reason::ManifestInvalid]);
    // Something else woke the scanner, and the file is still young.
    let second = world.scanner.scan(world.now, &BTreeSet::new());
    assert_eq!(second.desired.problems, first.desired.problems);
    let third = world.scan();
    assert!(reasons(&third).is_empty() && reasons(&second).is_empty());
}

#[test]
fn a_volume_that_was_unmounted_while_nobody_looked_is_not_an_emptied_folder() {
    let mut world = World::with_owners(&[("a", "a.yaml")]);
    let device = fs::metadata(world.dir.path()).unwrap().dev();
    let another = Scanner::new(
        world.dir.path().to_owned(),
        ScanOptions::default(),
        BTreeMap::from([("a".parse().unwrap(), PathBuf::from("a.yaml"))]),
    );
    world.scanner = another.remembering(Some(device + 1));
    assert_ne!(world.scan().desired.folder, Folder::Listed);
    let known = |before| known_device(world.dir.path(), [Path::new("a.yaml")], before);
    assert_eq!(
        known(Some(device + 1)),
        Some(device + 1),
        "none of its files is there"
    );
    assert_eq!(known(None), Some(device));

    world.write("a.yaml", "");
    let known = known_device(world.dir.path(), [Path::new("a.yaml")], Some(device + 1));
    assert_eq!(known, Some(device), "mounted again, as another device");
}

#[test]
fn an_emptied_file_and_one_whose_name_is_no_text_are_problems_and_remove_nothing() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt as _;

    let mut world = World::with_owners(&[("a", "a.yaml")]);
    world.write("a.yaml", " \n");
    let odd = world.dir.path().join(OsStr::from_bytes(b"bad\xff.yaml"));
    fs::write(odd, "apiVersion: v1\n").unwrap();
    let scan = world.scan();
    let messages: Vec<_> = scan
        .desired
        .problems
        .iter()
        .map(|problem| problem.message.as_str())
        .collect();
    assert_eq!(messages, ["it is empty", "its name is not UTF-8"]);
    assert!(scan.desired.unreadable.contains_key(Path::new("a.yaml")));
}
