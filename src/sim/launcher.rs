//! The launcher and the prober of the fake world: what the effects do to it, and what can be seen of it.
//!
//! Invariant: as for the real ones, nothing is signalled that is not proven ours at that moment.

use std::time::Duration;

use super::Mutant;
use super::judge::revision_of;
use super::world::{Gate, Owner, Part, World, exited, killed};
use crate::failure::{ExitStatus, LaunchFailure};
use crate::names::{DeviceId, LaunchId};
use crate::observed::{Inventory, Liveness, Outcome, ProbeResult, SignalKind, Stranger};
use crate::order::{LaunchOrder, ProbeRequest};
use crate::record::{Handle, Launch};
use crate::spec::EnvValue;

/// How an effect goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mishap {
    /// It fails, and says so.
    Fails,
    /// It takes place, and nobody is told.
    OutcomeLost,
    /// It does not even take place, and nobody is told.
    Lost,
    /// It is given up after its timeout.
    TimesOut,
}

impl World {
    /// Starts a gate. Returns the pid beside the outcome.
    pub fn prepare(
        &mut self,
        order: &LaunchOrder,
        inventory: &Inventory,
        mishap: Option<Mishap>,
    ) -> (Outcome, Option<Gate>) {
        let failed = |detail: &str| {
            let detail = detail.to_owned();
            Outcome::Failed(LaunchFailure::SpawnFailed { detail })
        };
        if let Some(port) = order.port
            && let Some(pid) = self.port_holder(port)
        {
            let stranger = Stranger {
                pid: Some(pid),
                command: None,
                seen_at: self.now,
            };
            return (Outcome::PortTaken { port, stranger }, None);
        }
        if mishap == Some(Mishap::Fails) {
            return (failed("no such file"), None);
        }
        let owner = Owner {
            instance: order.instance.clone(),
            launch: order.launch_id,
            leader: 0,
            revision: revision_of(&order.arguments),
            devices: visible_devices(order, inventory),
            port: order.port,
        };
        let manner = self.manner();
        let pid = self.spawn(Part::Gate { opens_at: None }, Some(owner), manner);
        self.note(&format_args!("pid {pid} is the gate of {}", order.instance));
        if self.is(Mutant::GateStandsOpen) {
            self.become_engine(pid);
        }
        let ticks = self.processes[&pid].ticks;
        let gate = Gate { pid, ticks };
        if mishap == Some(Mishap::TimesOut) {
            self.call_off(gate);
            return (failed("the launch was not prepared within 10 s"), None);
        }
        match self.handle(pid) {
            Some(handle) => (Outcome::Prepared(handle), Some(gate)),
            None => (failed("it ended"), None),
        }
    }

    /// Opens a gate.
    pub fn release(&mut self, gate: Option<Gate>, mishap: Option<Mishap>) -> Outcome {
        let failed = |detail: &str| {
            let detail = detail.to_owned();
            Outcome::Failed(LaunchFailure::SpawnFailed { detail })
        };
        let Some(gate) = gate else {
            return failed("its gate is gone");
        };
        let now = self.now;
        let slow = self.random.millis(100, 40_000);
        let Some(process) = self.behind(gate) else {
            return failed("the gate ended before it answered");
        };
        match mishap {
            Some(Mishap::Fails) => {
                self.end(gate.pid, Duration::from_millis(1), exited(125));
                failed("exec: no such file")
            }
            Some(Mishap::TimesOut) => {
                // A program on a network file system: it runs in the end, when nobody waits for it any more.
                process.part = Part::Gate {
                    opens_at: Some(now + slow),
                };
                failed("the program was not executed within 30 s")
            }
            Some(Mishap::OutcomeLost | Mishap::Lost) | None => {
                self.become_engine(gate.pid);
                Outcome::Released
            }
        }
    }

    /// Looks for what carries a launch id.
    pub fn find(&self, launch: LaunchId, mishap: Option<Mishap>) -> Outcome {
        if self.now < self.doubt_until || mishap.is_some() {
            let why = "the list of processes cannot be read".to_owned();
            return Outcome::Unresolved { why };
        }
        let members = self.members(launch);
        let leader = members
            .iter()
            .copied()
            .find(|pid| self.processes[pid].part != Part::Worker);
        let found = leader.or(members.first().copied());
        Outcome::Resolved(found.and_then(|pid| self.handle(pid)))
    }

    /// Whether a launch runs.
    pub fn inspect(&self, launch: &Launch, seen: Option<ExitStatus>) -> Liveness {
        let Some(handle) = &launch.handle else {
            let why = "it is not known yet which process it is".to_owned();
            return Liveness::Unknown { why };
        };
        let gone = Liveness::Gone {
            status: seen.unwrap_or(ExitStatus::UNKNOWN),
            log_tail: String::new(),
        };
        if self.now < self.doubt_until {
            if self.is(Mutant::UnknownIsGone) {
                return gone;
            }
            let why = "its state cannot be read".to_owned();
            return Liveness::Unknown { why };
        }
        if self.leader(handle).is_some() {
            return Liveness::Alive;
        }
        let Handle::Process(process) = handle;
        let members = if process.boot_id == self.boot_id() {
            self.members(launch.id).len()
        } else {
            0
        };
        if members == 0 || self.is(Mutant::SaysGone) {
            return gone;
        }
        Liveness::LeaderGone {
            members,
            status: seen.unwrap_or(ExitStatus::UNKNOWN),
        }
    }

    /// Signals all members.
    pub fn signal(
        &mut self,
        launch: &Launch,
        signal: SignalKind,
        mishap: Option<Mishap>,
    ) -> Outcome {
        if self.now < self.doubt_until || mishap.is_some() {
            let why = "its processes cannot be looked at".to_owned();
            return Outcome::Unproven { why };
        }
        let members = match &launch.handle {
            Some(Handle::Process(process)) if self.is(Mutant::SignalsByPid) => {
                vec![process.pid]
            }
            Some(_) | None => self.members(launch.id),
        };
        let mut reached = 0;
        for pid in members {
            if self.processes.contains_key(&pid) {
                self.deliver(pid, launch.id, signal);
                reached += 1;
            }
        }
        let members = reached;
        Outcome::Signalled { signal, members }
    }

    fn deliver(&mut self, pid: u32, launch: LaunchId, signal: SignalKind) {
        self.judge_signal(pid, launch);
        self.note(&format_args!("pid {pid} gets {signal:?}"));
        let manner = &self.processes[&pid].manner;
        let (takes, status) = match (&self.processes[&pid].part, signal) {
            (_, SignalKind::Kill) => (Some(manner.kill_takes), killed(9)),
            (Part::Gate { .. }, SignalKind::Term) => (Some(Duration::from_millis(1)), killed(15)),
            (_, SignalKind::Term) => (manner.term_takes, killed(15)),
        };
        if let Some(takes) = takes {
            self.end(pid, takes, status);
        }
    }

    /// Asks a launch how it is.
    pub fn probe(
        &self,
        launch: &Launch,
        request: &ProbeRequest,
        mishap: Option<Mishap>,
    ) -> ProbeResult {
        let failure = |detail: &str| ProbeResult::Failure {
            detail: detail.to_owned(),
        };
        if mishap.is_some() {
            return failure("no answer");
        }
        let Some(pid) = self.port_holder(request.port) else {
            let detail = "connection refused".to_owned();
            return ProbeResult::Loading { detail };
        };
        if !self.processes[&pid].is_of(launch.id) {
            let stranger = Stranger {
                pid: Some(pid),
                command: None,
                seen_at: self.now,
            };
            return ProbeResult::Stranger { stranger };
        }
        let leader = launch
            .handle
            .as_ref()
            .and_then(|handle| self.leader(handle));
        match leader.map(|pid| &self.processes[&pid].part) {
            Some(Part::Leader {
                healthy_from,
                sick_from,
            }) => {
                if sick_from.is_some_and(|at| at <= self.now) {
                    failure("500")
                } else if healthy_from.is_some_and(|at| at <= self.now) {
                    ProbeResult::Success
                } else {
                    let detail = "503".to_owned();
                    ProbeResult::Loading { detail }
                }
            }
            Some(Part::Gate { .. } | Part::Worker | Part::Stranger { .. }) | None => {
                failure("its leader is gone")
            }
        }
    }
}

/// The devices that the engine sees: the indices in its environment, resolved as its driver does.
fn visible_devices(order: &LaunchOrder, inventory: &Inventory) -> Vec<DeviceId> {
    let variable = order
        .environment
        .iter()
        .rfind(|variable| variable.name == "CUDA_VISIBLE_DEVICES");
    let Some(EnvValue::Literal(list)) = variable.map(|variable| &variable.value) else {
        return Vec::new();
    };
    list.split(',')
        .filter_map(|index| inventory.devices.get(index.parse::<usize>().ok()?))
        .map(|device| device.id.clone())
        .collect()
}
