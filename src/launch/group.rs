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
