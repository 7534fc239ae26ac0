//! The judge: what must hold at every moment, told from the world.
//!
//! Invariant: a rule never asks the controller whether it was right.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use jiff::Timestamp;

use super::folder::Truth;
use super::world::{Owner, Part, Process, World};
use crate::manifest::DeletionPolicy;
use crate::names::{DeviceId, InstanceName, LaunchId};
use crate::order::ProbePurpose;
use crate::plan::{self, Action, Inputs};
use crate::record::{Launch, Record, StopReason};

/// The start-up deadline of every manifest here.
const STARTUP_DEADLINE: Duration = Duration::from_secs(15);

/// Passes within one virtual second that cannot all have had a reason. Five deployments of three replicas that start
/// together are probed at most some twenty times each in their first second.
const PASSES_PER_SECOND: usize = 400;

#[derive(Debug, Default)]
pub(super) struct Judge {
    /// What was done wrong.
    pub violations: Vec<String>,
    /// What the controller could know of the folder when it last looked.
    pub truth: Rc<Truth>,
    pub is_everything_to_stop: bool,
    /// Engines executed so far.
    pub execs: usize,
    /// The revisions of which an engine ran, or failed to.
    pub attempts: BTreeMap<InstanceName, BTreeSet<u32>>,
    /// When each launch was begun.
    reserved_at: BTreeMap<LaunchId, Timestamp>,
    /// Launches that were asked to end.
    pub stopped: BTreeSet<LaunchId>,
    /// Liveness probes in a row that this controller saw fail.
    failed_probes: BTreeMap<LaunchId, u32>,
    /// Launches of which the controller was told that they failed.
    failed_launches: BTreeSet<LaunchId>,
    recent_passes: VecDeque<Timestamp>,
    pub passes: usize,
}

/// The number that a manifest's every revision carries in its command line.
pub(super) fn revision_of(arguments: &[String]) -> u32 {
    let at = arguments
        .iter()
        .position(|argument| argument == "--revision");
    at.and_then(|at| arguments.get(at + 1)?.parse().ok())
        .unwrap_or(0)
}

impl World {
    pub fn accuse(&mut self, what: String) {
        self.note(&format_args!("VIOLATION: {what}"));
        self.judge.violations.push(what);
    }

    /// No engine runs past its gate that no record names, none beside an earlier one of the same instance, and none on
    /// what another holds.
    pub fn judge_exec(&mut self, pid: u32) {
        let process = self
            .processes
            .get(&pid)
            .filter(|process| !process.is_orphan);
        let Some(owner) = process.and_then(|process| process.owner.clone()) else {
            return;
        };
        let Owner {
            instance,
            launch,
            revision,
            ..
        } = &owner;
        let named = self.disk.records.get(instance);
        let named = named.and_then(|record| record.launch.as_ref());
        if named.is_none_or(|named| named.id != *launch || named.handle != self.handle(pid)) {
            self.accuse(format!(
                "the engine of {instance}, pid {pid}, runs, and no record names it"
            ));
        }
        let others: Vec<(u32, Owner, bool)> = self
            .processes
            .iter()
            .filter(|(_, other)| other.runs() && !other.is_of(*launch))
            .filter_map(|(pid, other)| Some((*pid, other.owner.clone()?, other.is_orphan)))
            .collect();
        for (other_pid, other, is_orphan) in others {
            if is_orphan {
                continue;
            }
            if other.instance == *instance {
                self.accuse(format!(
                    "{instance} runs twice: pid {other_pid} and now pid {pid}"
                ));
            }
            if owner.port.is_some() && other.port == owner.port {
                self.accuse(format!(
                    "{} and {instance} both use port {:?}",
                    other.instance, owner.port
                ));
            }
            if let Some(device) = self.contested(&owner, &other) {
                self.accuse(format!(
                    "{} and {instance} both use {device}",
                    other.instance
                ));
            }
        }
        self.judge.execs += 1;
        let attempts = self.judge.attempts.entry(instance.clone()).or_default();
        attempts.insert(*revision);
    }

    /// Unified memory is shared.
    fn contested(&self, one: &Owner, other: &Owner) -> Option<DeviceId> {
        one.devices
            .iter()
            .find(|device| other.devices.contains(device) && !self.unified.contains(device))
            .cloned()
    }

    /// A record lets go of a launch only when nothing of it is left, and of a handle never before.
    pub fn judge_write(&mut self, before: Option<&Record>, after: &Record) {
        if let Some(launch) = &after.launch
            && let Some(stop) = &launch.stop
            && self.judge.stopped.insert(launch.id)
        {
            self.judge_stop(&after.name, launch.id, &stop.reason);
        }
        let Some(launch) = before.and_then(|record| record.launch.as_ref()) else {
            return;
        };
        match &after.launch {
            Some(kept) if kept.id == launch.id => {
                if launch.handle.is_some() && kept.handle != launch.handle {
                    self.accuse(format!("the record of {} changes its handle", after.name));
                }
            }
            Some(_) | None => {
                if let Some(pid) = self.survivor(launch.id) {
                    self.accuse(format!(
                        "the record of {} lets go of a launch of which pid {pid} lives",
                        after.name
                    ));
                }
            }
        }
    }

    /// A record is removed last of all, and only of what was certainly not wanted.
    pub fn judge_remove(&mut self, record: &Record) {
        let name = &record.name;
        if !self.judge.is_everything_to_stop && !self.judge.truth.is_unwanted(name) {
            self.accuse(format!(
                "the record of {name} is removed, and nothing says that it is unwanted"
            ));
        }
        let Some(launch) = &record.launch else {
            return;
        };
        let is_kept = record.spec.deletion_policy == DeletionPolicy::Orphan
            && !self.judge.is_everything_to_stop;
        if is_kept {
            for pid in self.members(launch.id) {
                if let Some(process) = self.processes.get_mut(&pid) {
                    process.is_orphan = true;
                }
            }
        } else if let Some(pid) = self.survivor(launch.id) {
            self.accuse(format!(
                "the record of {name} is removed while pid {pid} lives"
            ));
        }
    }

    /// What lives of a launch. A gate whose pipe is closed never runs anything.
    fn survivor(&self, launch: LaunchId) -> Option<u32> {
        let is_left = |process: &Process| match process.part {
            Part::Gate { opens_at: None } => process.end.is_none(),
            Part::Gate { opens_at: Some(_) }
            | Part::Leader { .. }
            | Part::Worker
            | Part::Stranger { .. } => true,
        };
        self.members(launch)
            .into_iter()
            .find(|pid| is_left(&self.processes[pid]))
    }

    pub fn judge_signal(&mut self, pid: u32, launch: LaunchId) {
        if !self.processes[&pid].is_of(launch) {
            self.accuse(format!(
                "a signal reaches pid {pid}, which is not of the launch it was meant for"
            ));
        }
    }

    /// Nothing is signalled whose record does not say so.
    pub fn judge_action(&mut self, name: &InstanceName, launch: &Launch, action: &Action) {
        if matches!(action, Action::Prepare(_)) {
            self.judge.reserved_at.insert(launch.id, self.now);
        }
        let record = self.disk.records.get(name);
        let stop = record.and_then(|record| record.launch.as_ref()?.stop.as_ref());
        if matches!(action, Action::Signal { .. }) && stop.is_none() {
            self.accuse(format!(
                "{name} is signalled, and its record does not know it ({})",
                launch.id
            ));
        }
    }

    /// What runs is asked to end only for a reason that is true.
    fn judge_stop(&mut self, name: &InstanceName, launch: LaunchId, reason: &StopReason) {
        let members: Vec<&Process> = self
            .processes
            .values()
            .filter(|process| process.is_of(launch))
            .collect();
        let Some(owner) = members.first().and_then(|process| process.owner.as_ref()) else {
            return;
        };
        let revision = owner.revision;
        let is_true = match reason {
            StopReason::Removed => self.judge.truth.is_unwanted(name),
            StopReason::SpecChanged { .. } => {
                let files = self.judge.truth.files.as_ref();
                let file = files.and_then(|files| files.get(&name.deployment));
                file.is_some_and(|file| file.revision != revision)
            }
            StopReason::StartupTimeout { .. } => {
                let reserved_at = self.judge.reserved_at.get(&launch);
                reserved_at.is_some_and(|at| self.now >= *at + STARTUP_DEADLINE)
            }
            StopReason::Unhealthy { failures, .. } => {
                let failed = self.judge.failed_probes.get(&launch).copied().unwrap_or(0);
                *failures >= 3 && failed >= 3
            }
            StopReason::LeaderGone => !members
                .iter()
                .any(|process| matches!(process.part, Part::Leader { .. } | Part::Gate { .. })),
            StopReason::LaunchFailed(_) => self.judge.failed_launches.contains(&launch),
            StopReason::Shutdown => self.judge.is_everything_to_stop,
        };
        if !is_true {
            self.accuse(format!(
                "{name} is asked to end for a reason that is not true: {reason:?}"
            ));
        }
    }

    /// The controller is told how an attempt at a launch failed.
    pub fn judge_failure(&mut self, name: &InstanceName, launch: LaunchId) {
        self.judge.failed_launches.insert(launch);
        if let Some(record) = self.disk.records.get(name) {
            let revision = revision_of(&record.spec.args);
            self.judge
                .attempts
                .entry(name.clone())
                .or_default()
                .insert(revision);
        }
    }

    pub fn judge_probe(&mut self, launch: LaunchId, purpose: ProbePurpose, is_success: bool) {
        if purpose == ProbePurpose::Liveness {
            let failed = self.judge.failed_probes.entry(launch).or_default();
            *failed = if is_success { 0 } else { *failed + 1 };
        }
    }

    /// A new controller has seen nothing yet.
    pub fn judge_start(&mut self) {
        self.judge.truth = Rc::default();
        self.judge.failed_probes.clear();
    }

    /// The plan keeps its own rules. Most plans say only what is waited for, and of these some are enough.
    pub fn judge_plan(&mut self, inputs: Inputs<'_>) {
        let plan = plan::plan(inputs);
        if plan.is_change() || self.judge.passes.is_multiple_of(8) {
            for violation in plan::check::violations(inputs, &plan) {
                self.accuse(violation);
            }
        }
    }

    /// The loop is not hot.
    pub fn judge_pass(&mut self) {
        let now = self.now;
        let recent = &mut self.judge.recent_passes;
        recent.push_back(now);
        while recent
            .front()
            .is_some_and(|at| *at + Duration::from_secs(1) < now)
        {
            recent.pop_front();
        }
        self.judge.passes += 1;
        if recent.len() > PASSES_PER_SECOND {
            recent.clear();
            self.accuse(format!("{PASSES_PER_SECOND} passes within a second"));
        }
    }
}
