// effect: reads /proc, through procfs.rs.
//! Who belongs to an instance.
//!
//! The leader is known by pid, start ticks and boot id. It leads a session and a group that are numbered like it, and
//! its members are the processes in that session or group, and those that carry its launch id wherever they are.
//!
//! A session's number alone proves nothing, because the kernel hands out a pid again once no process, session or group
//! has that number. So long as one process is left in the session its number stays taken: the session is ours as a
//! whole if one thing in it is proven ours. That is
//!
//! * the leader itself, alive or a zombie; or
//! * a member that carries our launch id; or
//! * a member that was seen in it when it was proven before ([`Scan::proven`], which the launcher remembers: programs
//!   that set their title write over the environment that held the id).
//!
//! It is proven *not* ours if its number belongs to another process now, or if a member carries another launch's id.
//! Anything else is [`Unproven`]: not signalled, and not called gone.
//!
//! Invariant: a process is a member only by proof, and "nobody is left" is said only when nobody can be.

use std::collections::BTreeSet;
use std::io;

use super::Unproven;
use crate::names::LaunchId;
use crate::procfs::{Procfs, Stat, Tag};
use crate::record::ProcessHandle;

/// A process of this boot: the kernel gives no two the same pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Identity {
    /// Its id.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start_ticks: u64,
}

impl Identity {
    fn of(stat: &Stat) -> Self {
        Self {
            pid: stat.pid,
            start_ticks: stat.start_ticks,
        }
    }
}

/// What became of a leader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Leader {
    /// It runs.
    Alive,
    /// It ended and was not reaped yet.
    Zombie,
    /// It is gone without a trace, or another process has its id.
    Gone,
    /// It was of another boot, so everything of it is gone.
    OtherBoot,
}

/// Looks for the leader that a handle names.
pub fn leader(proc: &Procfs, handle: &ProcessHandle) -> Result<Leader, Unproven> {
    let boot_id = proc
        .boot_id()
        .map_err(|error| unproven("the boot id cannot be read", &error))?;
    if boot_id != handle.boot_id {
        return Ok(Leader::OtherBoot);
    }
    let stat = proc.stat(handle.pid).map_err(|error| {
        unproven(
            &format!("the state of pid {} cannot be read", handle.pid),
            &error,
        )
    })?;
    Ok(match stat {
        Some(stat) if stat.start_ticks == handle.start_ticks => {
            if stat.is_gone() {
                Leader::Zombie
            } else {
                Leader::Alive
            }
        }
        Some(_) | None => Leader::Gone,
    })
}

/// What one look at all processes found of a launch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scan {
    /// The live members, the leader first, the others in the order in which they started.
    pub proven: Vec<Identity>,
    /// Live processes that may be members, and why that cannot be told.
    pub doubtful: Vec<(Identity, Doubt)>,
}

/// Why it cannot be told whether a process is a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doubt {
    /// It is in a session that nothing proves to be ours, and nothing proves to be another's.
    Session,
    /// Its environment cannot be read.
    Environment,
}

impl Scan {
    /// The members, if it is certain that there are no others.
    pub fn certain(self) -> Result<Vec<Identity>, Unproven> {
        if self.doubtful.is_empty() {
            return Ok(self.proven);
        }
        let listed = |wanted: Doubt| {
            let pids: Vec<String> = self
                .doubtful
                .iter()
                .filter(|(_, doubt)| *doubt == wanted)
                .map(|(identity, _)| identity.pid.to_string())
                .collect();
            (!pids.is_empty()).then(|| pids.join(", "))
        };
        let in_session = listed(Doubt::Session).map(|pids| {
            format!(
                "nothing proves whose session they are in, now that its leader is gone: pid {pids}"
            )
        });
        let unreadable = listed(Doubt::Environment)
            .map(|pids| format!("their environment cannot be read: pid {pids}"));
        let reasons: Vec<String> = in_session.into_iter().chain(unreadable).collect();
        Err(Unproven {
            why: format!(
                "it cannot be told whether these belong to it: {}",
                reasons.join("; ")
            ),
        })
    }
}

/// Looks at all processes for members of a launch. `remembered`: those that an earlier scan proved.
pub fn scan(
    proc: &Procfs,
    launch_id: LaunchId,
    handle: Option<&ProcessHandle>,
    remembered: &BTreeSet<Identity>,
) -> Result<Scan, Unproven> {
    let Some(handle) = handle else {
        return Ok(sort(
            proc,
            launch_id,
            None,
            &Session::Foreign,
            processes(proc)?,
        ));
    };
    if leader(proc, handle)? == Leader::OtherBoot {
        return Ok(Scan::default());
    }
    let processes = processes(proc)?;
    let session = session(proc, launch_id, handle, remembered, &processes);
    Ok(sort(proc, launch_id, Some(handle), &session, processes))
}

/// The process that leads the launch of this id: the first session leader that carries it, else the oldest process that
/// does.
pub fn find(proc: &Procfs, launch_id: LaunchId) -> Result<Option<ProcessHandle>, Unproven> {
    let boot_id = proc
        .boot_id()
        .map_err(|error| unproven("the boot id cannot be read", &error))?;
    let found = scan(proc, launch_id, None, &BTreeSet::new())?.certain()?;
    Ok(found.first().map(|leader| ProcessHandle {
        pid: leader.pid,
        start_ticks: leader.start_ticks,
        boot_id,
    }))
}

/// Whether this process is a member at this moment, after a scan has proven that it was: it is the same process, and it
/// has not ended.
pub fn is_still(proc: &Procfs, identity: Identity) -> bool {
    matches!(
        proc.stat(identity.pid),
        Ok(Some(stat)) if Identity::of(&stat) == identity && !stat.is_gone()
    )
}

/// All processes, zombies included.
fn processes(proc: &Procfs) -> Result<Vec<Stat>, Unproven> {
    let pids = proc
        .pids()
        .map_err(|error| unproven("the list of processes cannot be read", &error))?;
    let mut processes = Vec::with_capacity(pids.len());
    for pid in pids {
        // The reader itself is nobody's member: it would have to signal itself.
        if pid == proc.own_pid() {
            continue;
        }
        match proc.stat(pid) {
            Ok(Some(stat)) => processes.push(stat),
            Ok(None) => {}
            // Of another user, on a /proc that hides them.
            Err(error)
                if error.kind() == io::ErrorKind::PermissionDenied && !proc.has_own_uid(pid) => {}
            Err(error) => {
                return Err(unproven(
                    &format!("the state of pid {pid} cannot be read"),
                    &error,
                ));
            }
        }
    }
    Ok(processes)
}

/// Whose the session is that is numbered like a leader.
enum Session {
    Ours,
    Foreign,
    Doubtful,
}

fn is_in(stat: &Stat, handle: &ProcessHandle) -> bool {
    stat.session == handle.pid || stat.group == handle.pid
}

fn session(
    proc: &Procfs,
    launch_id: LaunchId,
    handle: &ProcessHandle,
    remembered: &BTreeSet<Identity>,
    processes: &[Stat],
) -> Session {
    let of_that_pid = processes.iter().find(|stat| stat.pid == handle.pid);
    if let Some(stat) = of_that_pid {
        // A number is handed out again only after the last of its session has ended.
        return if stat.start_ticks == handle.start_ticks {
            Session::Ours
        } else {
            Session::Foreign
        };
    }
    let inside = || processes.iter().filter(|stat| is_in(stat, handle));
    if inside().any(|stat| remembered.contains(&Identity::of(stat))) {
        return Session::Ours;
    }
    let mut answer = Session::Doubtful;
    for stat in inside() {
        match proc.tag(stat.pid) {
            Tag::Of(id) if id == launch_id => return Session::Ours,
            Tag::Of(_) => answer = Session::Foreign,
            Tag::Untagged | Tag::Unreadable | Tag::Gone => {}
        }
    }
    answer
}

fn sort(
    proc: &Procfs,
    launch_id: LaunchId,
    handle: Option<&ProcessHandle>,
    session: &Session,
    mut processes: Vec<Stat>,
) -> Scan {
    let ancestors = ancestors(proc);
    processes.retain(|stat| !stat.is_gone());
    let is_leader = |stat: &Stat| match handle {
        Some(handle) => stat.pid == handle.pid && stat.start_ticks == handle.start_ticks,
        None => stat.pid == stat.session,
    };
    processes.sort_by_key(|stat| (!is_leader(stat), stat.start_ticks, stat.pid));
    let mut scan = Scan::default();
    for stat in processes {
        let identity = Identity::of(&stat);
        if let Some(handle) = handle {
            // Nothing that descends from the leader is older than it.
            if stat.start_ticks < handle.start_ticks {
                continue;
            }
            if is_leader(&stat) {
                scan.proven.push(identity);
                continue;
            }
            if is_in(&stat, handle) {
                match session {
                    Session::Ours => {
                        scan.proven.push(identity);
                        continue;
                    }
                    Session::Doubtful => {
                        scan.doubtful.push((identity, Doubt::Session));
                        continue;
                    }
                    // It may still be ours by launch id: a descendant that the kernel gave the leader's old number.
                    Session::Foreign => {}
                }
            }
        }
        match proc.tag(stat.pid) {
            Tag::Of(id) if id == launch_id => scan.proven.push(identity),
            // What started the reader itself, the first process above all, was not started by it or by the one before it.
            Tag::Unreadable if ancestors.contains(&stat.pid) => {}
            // Ours run under our own uid. A program that changes it (sudo) and leaves the session and hides its
            // environment from us is the case that is given up here: to honour it, every hidden process of every user
            // would have to hold up every launch.
            Tag::Unreadable if proc.has_own_uid(stat.pid) => {
                scan.doubtful.push((identity, Doubt::Environment));
            }
            Tag::Of(_) | Tag::Untagged | Tag::Unreadable | Tag::Gone => {}
        }
    }
    scan
}

/// The reader's parent, the parent's, and so on.
fn ancestors(proc: &Procfs) -> BTreeSet<u32> {
    let mut ancestors = BTreeSet::new();
    let mut pid = proc.own_pid();
    while let Ok(Some(stat)) = proc.stat(pid) {
        pid = stat.parent;
        // 0: the parent is outside of this pid namespace. Seen before: pids were recycled in between.
        if pid == 0 || !ancestors.insert(pid) {
            break;
        }
    }
    ancestors
}

fn unproven(what: &str, error: &io::Error) -> Unproven {
    Unproven {
        why: format!("{what}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const LEADER: u32 = 500;
    const LEADER_STARTED: u64 = 1000;

    /// A /proc laid out by hand.
    struct Fake(tempfile::TempDir);

    impl Fake {
        fn new() -> Self {
            let fake = Self(tempfile::tempdir().unwrap());
            fake.write("sys/kernel/random/boot_id", "this-boot\n");
            // The reader and its parents.
            fake.process(std::process::id(), 'R', 400, 400, 10, "");
            fake.process(1, 'S', 1, 1, 0, "");
            fake
        }

        fn proc(&self) -> Procfs {
            Procfs::at(self.0.path())
        }

        fn path(&self) -> &Path {
            self.0.path()
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }

        fn process(
            &self,
            pid: u32,
            state: char,
            group: u32,
            session: u32,
            started: u64,
            environ: &str,
        ) {
            self.stat(pid, state, (group, session), started);
            self.write(&format!("{pid}/environ"), environ);
        }

        fn stat(&self, pid: u32, state: char, (group, session): (u32, u32), started: u64) {
            let parent = u32::from(pid != 1);
            let padding = "0 ".repeat(13);
            self.write(
                &format!("{pid}/stat"),
                &format!(
                    "{pid} (a) b) {state} {parent} {group} {session} {padding}1 0 {started} 0\n"
                ),
            );
        }

        /// One whose environment cannot be read, of the reader's user or of another.
        fn hidden(&self, pid: u32, session: u32, started: u64, uid: u32) {
            self.stat(pid, 'S', (session, session), started);
            let environ = self.path().join(format!("{pid}/environ"));
            let _ = std::fs::remove_file(&environ);
            // A folder where a file should be: the one read error that root gets too.
            std::fs::create_dir_all(environ).unwrap();
            self.write(
                &format!("{pid}/status"),
                &format!("Name:\tx\nUid:\t{uid}\t0\t0\t0\n"),
            );
        }

        fn scan(&self, remembered: &[(u32, u64)]) -> Scan {
            let remembered = remembered.iter().map(|&pair| identity(pair)).collect();
            scan(&self.proc(), id(1), Some(&handle()), &remembered).unwrap()
        }

        fn proven(&self, remembered: &[(u32, u64)]) -> Vec<u32> {
            let scan = self.scan(remembered);
            assert!(scan.doubtful.is_empty(), "{scan:?}");
            scan.proven.iter().map(|member| member.pid).collect()
        }

        fn doubtful(&self) -> Vec<(u32, Doubt)> {
            let doubtful = self.scan(&[]).doubtful;
            doubtful
                .iter()
                .map(|(member, doubt)| (member.pid, *doubt))
                .collect()
        }
    }

    fn id(n: u128) -> LaunchId {
        uuid::Uuid::from_u128(n).to_string().parse().unwrap()
    }

    fn tagged(n: u128) -> String {
        format!("A=b\0EVENKEEL_LAUNCH_ID={}\0", id(n))
    }

    fn identity((pid, start_ticks): (u32, u64)) -> Identity {
        Identity { pid, start_ticks }
    }

    fn handle() -> ProcessHandle {
        ProcessHandle {
            pid: LEADER,
            start_ticks: LEADER_STARTED,
            boot_id: "this-boot".to_owned(),
        }
    }

    fn own_uid() -> u32 {
        nix::unistd::Uid::current().as_raw()
    }

    #[test]
    fn members_are_in_the_session_or_carry_the_launch_id_and_the_leader_comes_first() {
        let fake = Fake::new();
        fake.process(LEADER, 'S', LEADER, LEADER, LEADER_STARTED, &tagged(1));
        fake.process(400, 'S', LEADER, LEADER, 1002, "");
        fake.process(501, 'S', 501, LEADER, 1001, "");
        fake.process(502, 'S', 502, 502, 1003, &tagged(1));
        fake.process(503, 'S', 503, 503, 1003, &tagged(2));
        fake.process(504, 'S', 504, 504, 1003, "");
        assert_eq!(fake.proven(&[]), [LEADER, 501, 400, 502]);
    }

    #[test]
    fn zombies_are_no_members_and_still_prove_the_session() {
        let fake = Fake::new();
        fake.process(LEADER, 'Z', LEADER, LEADER, LEADER_STARTED, "");
        assert!(fake.proven(&[]).is_empty());
        fake.process(501, 'S', LEADER, LEADER, 1001, "");
        fake.process(502, 'Z', LEADER, LEADER, 1001, "");
        assert_eq!(fake.proven(&[]), [501]);
        assert_eq!(leader(&fake.proc(), &handle()), Ok(Leader::Zombie));
    }

    #[test]
    fn a_recycled_leader_and_all_in_its_session_are_strangers() {
        let fake = Fake::new();
        fake.process(LEADER, 'S', LEADER, LEADER, 2000, "");
        fake.process(501, 'S', LEADER, LEADER, 2001, "");
        assert!(fake.proven(&[]).is_empty());
        assert_eq!(leader(&fake.proc(), &handle()), Ok(Leader::Gone));
        // What left the session in time is still ours.
        fake.process(502, 'S', 502, 502, 1003, &tagged(1));
        assert_eq!(fake.proven(&[]), [502]);
    }

    #[test]
    fn nothing_older_than_the_leader_is_a_member() {
        let fake = Fake::new();
        fake.process(LEADER, 'S', LEADER, LEADER, LEADER_STARTED, "");
        fake.process(501, 'S', 501, 501, 999, &tagged(1));
        fake.hidden(502, 502, 999, own_uid());
        assert_eq!(fake.proven(&[]), [LEADER]);
    }

    #[test]
    fn a_session_whose_leader_is_gone_is_ours_if_one_in_it_carries_the_launch_id() {
        let fake = Fake::new();
        fake.process(501, 'S', LEADER, LEADER, 1001, "");
        assert_eq!(fake.doubtful(), [(501, Doubt::Session)]);
        fake.process(502, 'S', LEADER, LEADER, 1002, &tagged(1));
        assert_eq!(fake.proven(&[]), [501, 502]);
    }

    #[test]
    fn a_session_whose_leader_is_gone_is_ours_if_one_in_it_was_proven_before() {
        let fake = Fake::new();
        fake.process(501, 'S', LEADER, LEADER, 1001, "");
        fake.process(502, 'S', LEADER, LEADER, 1002, "");
        assert_eq!(fake.proven(&[(502, 1002)]), [501, 502]);
        // The same pid with another start is another process.
        assert!(fake.scan(&[(502, 1001)]).proven.is_empty());
        // One that is remembered and has left the session proves nothing about it.
        fake.process(503, 'S', 503, 503, 1003, "");
        assert!(fake.scan(&[(503, 1003)]).proven.is_empty());
    }

    #[test]
    fn a_session_of_another_launch_is_foreign() {
        let fake = Fake::new();
        fake.process(501, 'S', LEADER, LEADER, 1001, "");
        fake.process(502, 'S', LEADER, LEADER, 1002, &tagged(2));
        assert!(fake.proven(&[]).is_empty());
    }

    #[test]
    fn what_cannot_be_read_is_neither_ours_nor_foreign() {
        let fake = Fake::new();
        fake.hidden(501, 501, 1001, own_uid());
        assert_eq!(fake.doubtful(), [(501, Doubt::Environment)]);
        let error = fake.scan(&[]).certain().unwrap_err().to_string();
        assert!(error.contains("501"), "{error}");
        assert!(find(&fake.proc(), id(1)).is_err());
        // In a session that is ours it is a member, whatever its environment.
        fake.process(LEADER, 'S', LEADER, LEADER, LEADER_STARTED, "");
        fake.hidden(501, LEADER, 1001, own_uid());
        assert_eq!(fake.proven(&[]), [LEADER, 501]);
    }

    #[test]
    fn hidden_processes_of_others_and_those_that_started_us_hold_nothing_up() {
        let fake = Fake::new();
        fake.hidden(501, 501, 1001, own_uid() + 1);
        fake.hidden(1, 1, 2000, own_uid());
        assert!(fake.proven(&[]).is_empty());
        assert_eq!(find(&fake.proc(), id(1)), Ok(None));
    }

    #[test]
    fn nothing_of_another_boot_is_left() {
        let fake = Fake::new();
        fake.process(LEADER, 'S', LEADER, LEADER, LEADER_STARTED, &tagged(1));
        fake.write("sys/kernel/random/boot_id", "next-boot\n");
        assert!(fake.proven(&[]).is_empty());
        assert_eq!(leader(&fake.proc(), &handle()), Ok(Leader::OtherBoot));
        std::fs::remove_file(fake.path().join("sys/kernel/random/boot_id")).unwrap();
        assert!(leader(&fake.proc(), &handle()).is_err());
    }

    #[test]
    fn a_state_that_cannot_be_understood_is_unknown() {
        let fake = Fake::new();
        fake.write(&format!("{LEADER}/stat"), "nonsense");
        assert!(leader(&fake.proc(), &handle()).is_err());
        assert!(scan(&fake.proc(), id(1), None, &BTreeSet::new()).is_err());
    }

    #[test]
    fn a_launch_is_found_by_the_session_leader_that_carries_its_id() {
        let fake = Fake::new();
        assert_eq!(find(&fake.proc(), id(1)), Ok(None));
        fake.process(450, 'S', 9, 9, 900, &tagged(1));
        assert_eq!(find(&fake.proc(), id(1)).unwrap().unwrap().pid, 450);
        fake.process(LEADER, 'S', LEADER, LEADER, LEADER_STARTED, &tagged(1));
        assert_eq!(find(&fake.proc(), id(1)), Ok(Some(handle())));
        fake.process(LEADER, 'Z', LEADER, LEADER, LEADER_STARTED, "");
        fake.process(450, 'Z', 9, 9, 900, "");
        assert_eq!(find(&fake.proc(), id(1)), Ok(None));
    }

    #[test]
    fn the_reader_is_nobodys_member() {
        let fake = Fake::new();
        let own = std::process::id();
        fake.process(LEADER, 'S', LEADER, LEADER, LEADER_STARTED, "");
        fake.process(own, 'S', LEADER, LEADER, 1001, &tagged(1));
        assert_eq!(fake.proven(&[]), [LEADER]);
    }
}
