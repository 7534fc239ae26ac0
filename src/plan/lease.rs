//! Leases: who gets which devices and which port. The only place that grants.
//!
//! The record is the lease: a device or port is held while some record names it whose launch is not proven gone. Holders
//! keep theirs; newcomers are served in order of priority, waiting time and name.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use super::action::{Action, RecordChange, Step, Wait, WaitReason};
use super::instance::Candidate;
use super::{Inputs, exact_ports, health};
use crate::engine::{self, LaunchFacts};
use crate::event::{Event, Reason};
use crate::names::{DeviceId, InstanceName, LaunchId, Port};
use crate::observed::{Device, Holds};
use crate::record::{Launch, Lease, LeasedDevice, Record};
use crate::spec::DeviceRequest;
use std::time::Duration;

/// A stranger that was seen on a port is asked about again after this: binding to it is cheap.
pub const STRANGER_MEMORY: Duration = Duration::from_secs(10);

/// Grants what can be granted, and says for each other candidate what it waits for.
pub(super) fn grant(
    inputs: Inputs<'_>,
    steps: &mut BTreeMap<InstanceName, Step>,
    mut candidates: Vec<Candidate>,
) {
    candidates.sort_by_cached_key(|candidate| {
        let newcomer = candidate.held.is_none();
        let priority = std::cmp::Reverse(candidate.record.spec.priority);
        (
            newcomer,
            priority,
            candidate.since,
            candidate.record.name.clone(),
        )
    });
    let mut ledger = Ledger::of(inputs, steps);
    for candidate in candidates {
        let name = candidate.record.name.clone();
        let step = match ledger.grant(inputs, &candidate) {
            Ok(lease) => launch(inputs, candidate, lease),
            Err(wait) => refuse(inputs, candidate, wait),
        };
        if let Some(RecordChange::Write(record)) = &step.record
            && let Some(launch) = &record.launch
        {
            ledger.hold(record, launch);
        }
        steps.insert(name, step);
    }
}

/// Who holds what, and how many are starting.
struct Ledger<'a> {
    devices: BTreeMap<DeviceId, Holder>,
    ports: BTreeMap<Port, String>,
    /// Free devices that somebody of this priority waits for: lower ones do not overtake.
    awaited: BTreeMap<DeviceId, i32>,
    exact_ports: BTreeSet<Port>,
    /// Whether a record that cannot be read may hold any device.
    is_doubtful: bool,
    starting: u32,
    inputs: Inputs<'a>,
}

struct Holder {
    who: String,
    is_pinned: bool,
}

impl<'a> Ledger<'a> {
    /// What is held once the steps decided so far are carried out.
    fn of(inputs: Inputs<'a>, steps: &BTreeMap<InstanceName, Step>) -> Self {
        let mut ledger = Self {
            devices: BTreeMap::new(),
            ports: BTreeMap::new(),
            awaited: BTreeMap::new(),
            exact_ports: exact_ports(inputs.desired),
            is_doubtful: inputs
                .observed
                .quarantined
                .iter()
                .any(|record| record.holds == Holds::Unknown),
            starting: 0,
            inputs,
        };
        for (name, instance) in &inputs.observed.instances {
            // An instance without a step is a candidate: its last launch, if any, is proven gone in this pass.
            let record = match steps.get(name).map(|step| &step.record) {
                Some(Some(RecordChange::Write(record))) => record,
                Some(Some(RecordChange::Forget)) | None => continue,
                Some(None) => &instance.record,
            };
            if let Some(launch) = &record.launch {
                ledger.hold(record, launch);
            }
        }
        for quarantined in &inputs.observed.quarantined {
            if let Holds::Lease { lease, .. } = &quarantined.holds {
                let who = format!("a record in quarantine ({})", quarantined.file.display());
                ledger.hold_lease(lease, &who, true);
            }
        }
        ledger
    }

    fn hold(&mut self, record: &Record, launch: &Launch) {
        let is_pinned = matches!(record.spec.devices, DeviceRequest::Ids(_));
        self.hold_lease(&launch.lease, &record.name.to_string(), is_pinned);
        let started_at = launch.started_at.unwrap_or(launch.reserved_at);
        // Who has used half of its time no longer counts, so that slow loaders block nobody.
        let half = health::startup_deadline(&record.spec, self.inputs.settings) / 2;
        if launch.ready_at.is_none() && launch.stop.is_none() && self.inputs.now < started_at + half
        {
            self.starting += 1;
        }
    }

    fn hold_lease(&mut self, lease: &Lease, who: &str, is_pinned: bool) {
        for device in &lease.devices {
            self.devices.insert(
                device.id.clone(),
                Holder {
                    who: who.to_owned(),
                    is_pinned,
                },
            );
        }
        if let Some(port) = lease.port {
            self.ports.insert(port, who.to_owned());
        }
    }

    /// What a candidate is granted.
    fn grant(&mut self, inputs: Inputs<'_>, candidate: &Candidate) -> Result<Lease, Wait> {
        let devices = self.devices_for(candidate)?;
        let port = self.port_for(candidate)?;
        let limit = inputs.settings.max_launches;
        if limit > 0 && self.starting >= limit {
            // Its devices stay free for it: nobody behind it is launched in this pass either.
            return Err(Wait {
                reason: WaitReason::LaunchLimit { limit },
                until: self.next_to_stop_counting(),
            });
        }
        Ok(Lease { port, devices })
    }

    /// When the first of those that start has used half of its time.
    fn next_to_stop_counting(&self) -> Option<Timestamp> {
        let halves = self
            .inputs
            .observed
            .instances
            .values()
            .filter_map(|instance| {
                let launch = instance
                    .record
                    .launch
                    .as_ref()
                    .filter(|launch| launch.ready_at.is_none())?;
                let half =
                    health::startup_deadline(&instance.record.spec, self.inputs.settings) / 2;
                Some(launch.started_at.unwrap_or(launch.reserved_at) + half)
            });
        halves.filter(|at| *at > self.inputs.now).min()
    }

    fn devices_for(&mut self, candidate: &Candidate) -> Result<Vec<LeasedDevice>, Wait> {
        let spec = &candidate.record.spec;
        let inventory = self.inputs.inventory;
        let need = engine::devices_needed(spec, inventory);
        if need == 0 {
            return Ok(Vec::new());
        }
        let held: BTreeSet<&DeviceId> = candidate
            .held
            .iter()
            .flat_map(|lease| &lease.devices)
            .map(|device| &device.id)
            .collect();
        // What it held itself a moment ago is not in doubt.
        if self.is_doubtful && held.len() < need as usize {
            return Err(forever(WaitReason::Quarantine));
        }
        let pinned = match &spec.devices {
            DeviceRequest::Ids(ids) => {
                Some(engine::pinned_devices(ids, inventory).unwrap_or_default())
            }
            DeviceRequest::Count(_) | DeviceRequest::Parallelism => None,
        };
        let usable: Vec<&Device> = inventory
            .devices
            .iter()
            .filter(|device| {
                pinned
                    .as_ref()
                    .is_none_or(|pinned| pinned.contains(&device.id))
            })
            .collect();
        let free: Vec<&Device> = usable
            .iter()
            .copied()
            .filter(|device| self.is_free(device, pinned.is_some()))
            .collect();
        let allowed: Vec<&Device> = free
            .iter()
            .copied()
            .filter(|device| {
                self.awaited
                    .get(&device.id)
                    .is_none_or(|&priority| priority <= spec.priority)
            })
            .collect();
        if let Some(mut chosen) = choose(&allowed, &held, need as usize, pinned.is_some()) {
            chosen.sort();
            return Ok(chosen
                .into_iter()
                .map(|id| LeasedDevice { id, bytes: None })
                .collect());
        }
        for device in &free {
            let awaited = self
                .awaited
                .entry(device.id.clone())
                .or_insert(spec.priority);
            *awaited = (*awaited).max(spec.priority);
        }
        let holders = usable
            .iter()
            .filter_map(|device| {
                Some((device.id.clone(), self.devices.get(&device.id)?.who.clone()))
            })
            .collect();
        Err(forever(WaitReason::InsufficientDevices {
            need,
            free: u32::try_from(allowed.len()).unwrap_or(u32::MAX),
            holders,
        }))
    }

    /// Unified memory is shared unless one side pinned the device.
    fn is_free(&self, device: &Device, pins: bool) -> bool {
        match self.devices.get(&device.id) {
            None => true,
            Some(holder) => device.unified && !holder.is_pinned && !pins,
        }
    }

    fn port_for(&self, candidate: &Candidate) -> Result<Option<Port>, Wait> {
        let spec = &candidate.record.spec;
        if !engine::needs_port(spec) {
            return Ok(None);
        }
        let strangers = &self.inputs.observed.strangers;
        let remembered = |port: &Port| {
            strangers
                .get(port)
                .filter(|stranger| self.inputs.now < stranger.seen_at + STRANGER_MEMORY)
        };
        if let Some(port) = spec.port {
            if let Some(holder) = self.ports.get(&port) {
                return Err(forever(WaitReason::PortHeld {
                    port,
                    holder: holder.clone(),
                }));
            }
            return match remembered(&port) {
                None => Ok(Some(port)),
                Some(stranger) => Err(Wait {
                    until: Some(stranger.seen_at + STRANGER_MEMORY),
                    reason: WaitReason::PortTaken {
                        port,
                        stranger: stranger.clone(),
                    },
                }),
            };
        }
        let base = engine::engine(spec.engine).facts().base_port;
        let free = |port: &Port| {
            !self.ports.contains_key(port)
                && !self.exact_ports.contains(port)
                && remembered(port).is_none()
        };
        let kept = candidate
            .held
            .as_ref()
            .and_then(|lease| lease.port)
            .filter(free);
        let first = || {
            Port::try_from(base)
                .ok()
                .and_then(|base| base.upward().find(free))
        };
        match kept.or_else(first) {
            Some(port) => Ok(Some(port)),
            None => Err(Wait {
                reason: WaitReason::NoPort { base },
                until: Some(self.inputs.now + STRANGER_MEMORY),
            }),
        }
    }
}

/// `need` devices of one kind: those held before first, then in the host's order. Pinned ones are all or nothing.
fn choose(
    allowed: &[&Device],
    held: &BTreeSet<&DeviceId>,
    need: usize,
    is_pinned: bool,
) -> Option<Vec<DeviceId>> {
    if is_pinned {
        return (allowed.len() == need)
            .then(|| allowed.iter().map(|device| device.id.clone()).collect());
    }
    let mut kinds: Vec<_> = allowed.iter().map(|device| device.kind).collect();
    kinds.dedup();
    // The kind of what it held before comes first.
    kinds.sort_by_key(|kind| {
        !allowed
            .iter()
            .any(|device| device.kind == *kind && held.contains(&device.id))
    });
    kinds.into_iter().find_map(|kind| {
        let of_kind = || allowed.iter().filter(move |device| device.kind == kind);
        let before = of_kind().filter(|device| held.contains(&device.id));
        let others = of_kind().filter(|device| !held.contains(&device.id));
        let chosen: Vec<DeviceId> = before
            .chain(others)
            .take(need)
            .map(|device| device.id.clone())
            .collect();
        (chosen.len() == need).then_some(chosen)
    })
}

fn forever(reason: WaitReason) -> Wait {
    Wait {
        reason,
        until: None,
    }
}

/// Reserves: the record with the launch id and the lease is on disk before anything starts.
fn launch(inputs: Inputs<'_>, candidate: Candidate, lease: Lease) -> Step {
    let Candidate {
        record, mut events, ..
    } = candidate;
    let launch_id = LaunchId::derive(inputs.nonce, &record.name);
    let is_restart = record
        .history
        .last
        .as_ref()
        .is_some_and(|last| last.cause.is_failure());
    let order = engine::launch_order(LaunchFacts {
        instance: &record.name,
        launch_id,
        spec: &record.spec,
        lease: &lease,
        inventory: inputs.inventory,
    });
    events.push(
        Event::of_instance(
            inputs.now,
            &record.name,
            Reason::Launching,
            launching_message(&record, &lease),
        )
        .launch(launch_id),
    );
    let mut record = Record {
        launch: Some(Launch {
            id: launch_id,
            handle: None,
            lease,
            reserved_at: inputs.now,
            started_at: None,
            ready_at: None,
            stop: None,
        }),
        ..record
    };
    if is_restart {
        record.history.restarts = record.history.restarts.saturating_add(1);
    }
    Step {
        record: Some(RecordChange::Write(Box::new(record))),
        action: Some(Action::Prepare(Box::new(order))),
        wait: None,
        events,
    }
}

fn launching_message(record: &Record, lease: &Lease) -> String {
    let port = lease.port.map(|port| format!(" on port {port}"));
    let ids: Vec<_> = lease
        .devices
        .iter()
        .map(|device| device.id.as_str())
        .collect();
    let devices = if ids.is_empty() {
        String::new()
    } else {
        format!(", devices {}", ids.join(" "))
    };
    format!(
        "{}{}{devices}",
        record.spec.engine,
        port.unwrap_or_default()
    )
}

/// Not now. A wanted instance that never had a record gets none by waiting.
fn refuse(inputs: Inputs<'_>, candidate: Candidate, wait: Wait) -> Step {
    if candidate.held.is_some() && matches!(wait.reason, WaitReason::LaunchLimit { .. }) {
        // A holder whose launch ended keeps its lease until its turn comes: the end is written down then.
        return Step {
            wait: Some(wait),
            ..Step::default()
        };
    }
    let has_record = inputs
        .observed
        .instances
        .contains_key(&candidate.record.name);
    Step {
        record: (has_record && candidate.is_changed)
            .then(|| RecordChange::Write(Box::new(candidate.record))),
        action: None,
        wait: Some(wait),
        events: candidate.events,
    }
}
