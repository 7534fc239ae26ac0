//! The world: processes that are born, behave as they please, and end.
//!
//! Invariant: what a process is and whose is decided at its birth and by its exec alone, never by what a record says.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::time::Duration;

use jiff::Timestamp;

use super::disk::Disk;
use super::folder::Folder;
use super::judge::Judge;
use super::{Mutant, Random};
use crate::failure::ExitStatus;
use crate::names::{DeviceId, InstanceName, LaunchId, Port};
use crate::record::{Handle, ProcessHandle};

/// Everything outside of the controller.
pub(super) struct World {
    pub now: Timestamp,
    pub random: Random,
    pub processes: BTreeMap<u32, Process>,
    pub disk: Disk,
    pub folder: Folder,
    pub judge: Judge,
    /// How engines that start now behave.
    pub climate: Climate,
    /// Until then nothing can be told of any process.
    pub doubt_until: Timestamp,
    pub mutant: Option<Mutant>,
    /// Points at which the controller may die, passed so far.
    pub boundaries: u64,
    /// The point at which it dies.
    pub dies_at_boundary: Option<u64>,
    /// How many boundaries later the next controller dies.
    pub dies_again_after: Option<u64>,
    pub controller_died: bool,
    /// What happened, in words; none while nobody will read it.
    pub trace: Option<Vec<String>>,
    /// Devices whose memory is shared.
    pub unified: Vec<DeviceId>,
    boots: u32,
    last_ticks: u64,
    last_pid: u32,
    freed_pids: Vec<u32>,
}

/// How engines that start now behave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Climate {
    /// As in production: soon healthy, ending when asked.
    Fair,
    /// In every bad way.
    Foul,
}

pub(super) struct Process {
    /// With the pid: no two processes of a boot have the same.
    pub ticks: u64,
    pub part: Part,
    /// None: a stranger.
    pub owner: Option<Owner>,
    pub manner: Manner,
    pub end: Option<(Timestamp, ExitStatus)>,
    /// Its record was dropped on purpose, and nobody looks after it.
    pub is_orphan: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Part {
    Stranger {
        port: Port,
    },
    /// Waits to become an engine.
    Gate {
        opens_at: Option<Timestamp>,
    },
    Leader {
        healthy_from: Option<Timestamp>,
        sick_from: Option<Timestamp>,
    },
    Worker,
}

/// Whose a process is.
#[derive(Debug, Clone)]
pub(super) struct Owner {
    pub instance: InstanceName,
    pub launch: LaunchId,
    pub leader: u32,
    /// Of the manifest that its command line was made from.
    pub revision: u32,
    pub devices: Vec<DeviceId>,
    pub port: Option<Port>,
}

/// How a process behaves.
#[derive(Debug, Clone)]
pub(super) struct Manner {
    healthy_after: Option<Duration>,
    sick_after: Option<Duration>,
    ends_after: Option<Duration>,
    exit_code: i32,
    workers: u64,
    pub workers_outlive_it: bool,
    /// None: it ignores SIGTERM.
    pub term_takes: Option<Duration>,
    pub kill_takes: Duration,
}

impl Process {
    /// Whether it is an engine, or a part of one.
    pub fn runs(&self) -> bool {
        matches!(self.part, Part::Leader { .. } | Part::Worker)
    }

    pub fn port(&self) -> Option<Port> {
        match self.part {
            Part::Stranger { port } => Some(port),
            Part::Gate { .. } => None,
            Part::Leader { .. } | Part::Worker => self.owner.as_ref()?.port,
        }
    }

    pub fn devices(&self) -> &[DeviceId] {
        match (&self.part, &self.owner) {
            (Part::Leader { .. } | Part::Worker, Some(owner)) => &owner.devices,
            (Part::Stranger { .. } | Part::Gate { .. }, _) | (_, None) => &[],
        }
    }

    pub fn is_of(&self, launch: LaunchId) -> bool {
        self.owner
            .as_ref()
            .is_some_and(|owner| owner.launch == launch)
    }

    fn next_at(&self) -> Option<Timestamp> {
        let opens_at = match self.part {
            Part::Gate { opens_at } => opens_at,
            Part::Stranger { .. } | Part::Leader { .. } | Part::Worker => None,
        };
        self.end.map(|(at, _)| at).into_iter().chain(opens_at).min()
    }
}

/// The controller's end of the pipe to a gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Gate {
    pub pid: u32,
    pub ticks: u64,
}

/// Something of a launch ended; the status is the leader's.
pub(super) struct Ended {
    pub launch: LaunchId,
    pub status: Option<ExitStatus>,
    /// Whether its leader lives.
    pub has_leader: bool,
}

impl World {
    pub fn new(random: Random) -> Self {
        let now = Timestamp::from_second(1_767_225_600).expect("it is the year 2026");
        Self {
            now,
            random,
            processes: BTreeMap::new(),
            disk: Disk::new(now),
            folder: Folder::default(),
            judge: Judge::default(),
            climate: Climate::Fair,
            doubt_until: now,
            mutant: None,
            boundaries: 0,
            dies_at_boundary: None,
            dies_again_after: None,
            controller_died: false,
            trace: None,
            unified: Vec::new(),
            boots: 1,
            last_ticks: 100,
            last_pid: 1000,
            freed_pids: Vec::new(),
        }
    }

    /// For whoever reads about a failure.
    pub fn note(&mut self, what: &impl Display) {
        let now = self.now;
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{now:.3}  {what}"));
        }
    }

    pub fn is(&self, mutant: Mutant) -> bool {
        self.mutant == Some(mutant)
    }

    /// A point at which the controller may die. Returns whether it is dead.
    pub fn boundary(&mut self, what: &impl Display) -> bool {
        if !self.controller_died {
            if self.dies_at_boundary == Some(self.boundaries) {
                let number = self.boundaries;
                self.note(&format_args!(
                    "THE CONTROLLER DIES at boundary {number}: {what}"
                ));
                self.controller_died = true;
            }
            self.boundaries += 1;
        }
        self.controller_died
    }

    pub fn boot_id(&self) -> String {
        format!("boot-{}", self.boots)
    }

    pub fn handle(&self, pid: u32) -> Option<Handle> {
        Some(Handle::Process(ProcessHandle {
            pid,
            start_ticks: self.processes.get(&pid)?.ticks,
            boot_id: self.boot_id(),
        }))
    }

    /// The pid that a handle names, if that very process lives.
    pub fn leader(&self, handle: &Handle) -> Option<u32> {
        let Handle::Process(process) = handle;
        let found = self.processes.get(&process.pid)?;
        (process.boot_id == self.boot_id() && process.start_ticks == found.ticks)
            .then_some(process.pid)
    }

    /// The living of a launch, its leader among them.
    pub fn members(&self, launch: LaunchId) -> Vec<u32> {
        let members = self
            .processes
            .iter()
            .filter(|(_, process)| process.is_of(launch));
        members.map(|(pid, _)| *pid).collect()
    }

    pub fn port_holder(&self, port: Port) -> Option<u32> {
        self.processes
            .iter()
            .find(|(_, process)| process.port() == Some(port))
            .map(|(pid, _)| *pid)
    }

    // -----------------------------------------------------------------------------------------------------------------
    // What happens by itself

    pub fn next_at(&self) -> Option<Timestamp> {
        self.processes.values().filter_map(Process::next_at).min()
    }

    /// Lets happen what is due.
    pub fn happen(&mut self) -> Vec<Ended> {
        let mut news = Vec::new();
        while let Some((pid, _)) = self
            .processes
            .iter()
            .map(|(pid, process)| (*pid, process.next_at()))
            .filter(|(_, at)| at.is_some_and(|at| at <= self.now))
            .min_by_key(|(_, at)| *at)
        {
            let process = &self.processes[&pid];
            match process.end {
                Some((at, status)) if at <= self.now => news.extend(self.finish(pid, status)),
                Some(_) | None => self.become_engine(pid),
            }
        }
        news
    }

    fn finish(&mut self, pid: u32, status: ExitStatus) -> Option<Ended> {
        let process = self.processes.remove(&pid)?;
        self.freed_pids.push(pid);
        self.note(&format_args!("pid {pid} ended: {status}"));
        let owner = process.owner?;
        if owner.leader != pid {
            return Some(Ended {
                launch: owner.launch,
                status: None,
                has_leader: self.processes.contains_key(&owner.leader),
            });
        }
        if !process.manner.workers_outlive_it {
            for member in self.members(owner.launch) {
                let delay = self.random.millis(1, 50);
                self.end(member, delay, ExitStatus::UNKNOWN);
            }
        }
        Some(Ended {
            launch: owner.launch,
            status: Some(status),
            has_leader: false,
        })
    }

    /// It will end after this time, if not sooner.
    pub fn end(&mut self, pid: u32, after: Duration, status: ExitStatus) {
        let at = self.now + after;
        if let Some(process) = self.processes.get_mut(&pid)
            && process.end.is_none_or(|(before, _)| at < before)
        {
            process.end = Some((at, status));
        }
    }

    /// The gate executes the engine.
    pub fn become_engine(&mut self, pid: u32) {
        self.judge_exec(pid);
        let now = self.now;
        let Some(process) = self.processes.get(&pid) else {
            return;
        };
        let (Some(mut owner), manner) = (process.owner.clone(), process.manner.clone()) else {
            return;
        };
        let is_port_taken = owner
            .port
            .is_some_and(|port| self.port_holder(port).is_some());
        let mut end = manner
            .ends_after
            .map(|after| (now + after, exited(manner.exit_code)));
        if is_port_taken {
            owner.port = None;
            end = Some((now + self.random.millis(20, 400), exited(1)));
        }
        self.note(&format_args!(
            "pid {pid} is now the engine of {} at revision {}, devices {:?}, port {:?}",
            owner.instance, owner.revision, owner.devices, owner.port
        ));
        if let Some(process) = self.processes.get_mut(&pid) {
            process.part = Part::Leader {
                healthy_from: manner.healthy_after.map(|after| now + after),
                sick_from: manner.sick_after.map(|after| now + after),
            };
            process.owner = Some(owner.clone());
            process.end = process.end.into_iter().chain(end).min_by_key(|(at, _)| *at);
        }
        for _ in 0..manner.workers {
            let worker = self.manner();
            self.spawn(Part::Worker, Some(owner.clone()), worker);
        }
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Births

    pub fn spawn(&mut self, part: Part, owner: Option<Owner>, manner: Manner) -> u32 {
        let pid = self.new_pid();
        self.last_ticks += 1;
        let owner = owner.map(|owner| Owner {
            leader: if part == Part::Worker {
                owner.leader
            } else {
                pid
            },
            ..owner
        });
        self.processes.insert(
            pid,
            Process {
                ticks: self.last_ticks,
                part,
                owner,
                manner,
                end: None,
                is_orphan: false,
            },
        );
        pid
    }

    /// Often one that was in use before. The number of a session that still has members is not given away.
    fn new_pid(&mut self) -> u32 {
        let is_session = |pid: &u32| {
            let mut owners = self
                .processes
                .values()
                .filter_map(|process| process.owner.as_ref());
            owners.any(|owner| owner.leader == *pid)
        };
        let free: Vec<u32> = self
            .freed_pids
            .iter()
            .copied()
            .filter(|pid| !is_session(pid))
            .collect();
        if self.random.chance(50)
            && let Some(pid) = self.random.pick(&free)
        {
            self.freed_pids.retain(|freed| *freed != pid);
            return pid;
        }
        self.last_pid += 1;
        self.last_pid
    }

    /// A process that is none of ours takes a port.
    pub fn stranger(&mut self, port: Port) {
        if self.port_holder(port).is_none() {
            let manner = self.manner();
            let pid = self.spawn(Part::Stranger { port }, None, manner);
            self.note(&format_args!("a stranger, pid {pid}, takes port {port}"));
        }
    }

    pub fn manner(&mut self) -> Manner {
        let random = &mut self.random;
        let fair = Manner {
            healthy_after: Some(random.millis(20, 3000)),
            sick_after: None,
            ends_after: None,
            exit_code: 1,
            workers: random.below(2),
            workers_outlive_it: false,
            term_takes: Some(random.millis(5, 800)),
            kill_takes: random.millis(1, 30),
        };
        if self.climate == Climate::Fair || random.chance(40) {
            return fair;
        }
        Manner {
            healthy_after: (!random.chance(12)).then(|| random.millis(20, 12_000)),
            sick_after: random.chance(12).then(|| random.millis(1000, 40_000)),
            ends_after: random.chance(25).then(|| random.millis(1, 30_000)),
            exit_code: if random.chance(20) { 0 } else { 3 },
            workers: random.below(3),
            workers_outlive_it: random.chance(40),
            term_takes: (!random.chance(25)).then(|| random.millis(5, 6000)),
            kill_takes: if random.chance(10) {
                random.millis(2000, 15_000)
            } else {
                random.millis(1, 50)
            },
        }
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Misfortunes

    /// The controller is gone: the pipes to the gates close, and those that wait leave.
    pub fn close_pipes(&mut self) {
        let waiting: Vec<Gate> = self
            .processes
            .iter()
            .map(|(&pid, process)| Gate {
                pid,
                ticks: process.ticks,
            })
            .collect();
        for gate in waiting {
            self.call_off(gate);
        }
    }

    /// What waits at the other end of a pipe.
    pub fn behind(&mut self, gate: Gate) -> Option<&mut Process> {
        let process = self.processes.get_mut(&gate.pid)?;
        let is_it = process.ticks == gate.ticks && process.part == Part::Gate { opens_at: None };
        is_it.then_some(process)
    }

    /// The pipe to this gate closes.
    pub fn call_off(&mut self, gate: Gate) {
        if self.behind(gate).is_some() {
            let delay = if self.random.chance(10) {
                self.random.millis(100, 3000)
            } else {
                self.random.millis(1, 20)
            };
            self.end(gate.pid, delay, exited(125));
        }
    }

    /// The machine goes down, and comes up again with the disk and the folder as they were.
    pub fn reboot(&mut self) {
        self.note(&"THE MACHINE REBOOTS");
        self.freed_pids.extend(self.processes.keys());
        self.processes.clear();
        self.boots += 1;
    }

    /// From now on engines behave, and those that run will not misbehave in the far future.
    pub fn clear_up(&mut self) {
        self.climate = Climate::Fair;
        self.doubt_until = self.now;
        self.disk.full_until = self.now;
        let soon = self.now + Duration::from_secs(30);
        for process in self.processes.values_mut() {
            process.end = process.end.filter(|(at, _)| *at <= soon);
            if let Part::Leader { sick_from, .. } = &mut process.part {
                *sick_from = sick_from.filter(|at| *at <= soon);
            }
        }
    }
}

pub(super) fn exited(code: i32) -> ExitStatus {
    ExitStatus {
        code: Some(code),
        ..ExitStatus::UNKNOWN
    }
}

pub(super) fn killed(signal: i32) -> ExitStatus {
    ExitStatus {
        signal: Some(signal),
        ..ExitStatus::UNKNOWN
    }
}
