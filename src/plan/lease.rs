//! Leases: who gets which devices and which port. The only place that grants.
//!
//! The record is the lease: a device or port is held while some record names it whose launch is not proven gone. Holders
//! keep theirs; newcomers are served in order of priority, waiting time and name.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;

use super::action::{Action, RecordChange, Step, Wait, WaitReason};
use super::instance::{Candidate, changed};
use super::{Inputs, exact_ports, health};
use crate::engine::{self, LaunchFacts};
use crate::event::{Event, Reason};
use crate::names::{DeviceId, InstanceName, LaunchId, Port};
use crate::observed::{Device, Holds};
use crate::record::{Launch, Lease, LeasedDevice, Record};
use crate::spec::{DeviceRequest, InstanceSpec};

/// A stranger that was seen on a port is asked about again after this: binding to it is cheap.
pub const STRANGER_MEMORY: Duration = Duration::from_secs(10);

/// Grants what can be granted, and says for each other candidate what it waits for.
///
/// First the holders, whose launch ended in this very pass: what they held is theirs until their turn. Who needs other
/// devices gives them up and queues with the newcomers.
pub(super) fn grant<'a>(
    inputs: Inputs<'a>,
    steps: &mut BTreeMap<InstanceName, Step>,
    candidates: Vec<Candidate<'a>>,
) {
    if candidates.is_empty() {
        return;
    }
    let mut ledger = Ledger::of(inputs, steps);
    let (mut holders, mut newcomers): (Vec<_>, Vec<_>) = candidates
        .into_iter()
        .partition(|candidate| candidate.held.is_some());
    holders.sort_by_cached_key(turn);
    for candidate in holders {
        let name = candidate.record.name.clone();
        let released = ledger.release(&name);
        match ledger.lease_for(&candidate) {
            Ok(lease) if is_within_held(&lease, &candidate) => {
                let step = launch(inputs, candidate, lease);
                ledger.hold_step(&step);
                steps.insert(name, step);
            }
            // The end is written down when its turn comes; until then the record, and with it the lease, stays.
            Err(wait) if matches!(wait.reason, WaitReason::LaunchLimit { .. }) => {
                ledger.hold_again(released);
                steps.insert(
                    name,
                    Step {
                        wait: Some(wait),
                        ..Step::default()
                    },
                );
            }
            Ok(_) | Err(_) => newcomers.push(candidate),
        }
    }
    newcomers.sort_by_cached_key(turn);
    for candidate in newcomers {
        let name = candidate.record.name.clone();
        let step = match ledger.lease_for(&candidate) {
            Ok(lease) => launch(inputs, candidate, lease),
            Err(wait) => {
                if matches!(wait.reason, WaitReason::InsufficientDevices { .. }) {
                    ledger.keep_free_for(&candidate);
                }
                refuse(inputs, candidate, wait)
            }
        };
        ledger.hold_step(&step);
        steps.insert(name, step);
    }
}

/// Whether a holder needs no other devices than it held. A free port is no more than one of many.
fn is_within_held(lease: &Lease, candidate: &Candidate<'_>) -> bool {
    let held = candidate.held.iter().flat_map(|held| &held.devices);
    let held: BTreeSet<_> = held.map(|device| &device.id).collect();
    lease.devices.iter().all(|device| held.contains(&device.id))
}

/// Who is served first: higher priority, then longer waiting, then the name.
fn turn(candidate: &Candidate<'_>) -> (Reverse<i32>, Timestamp, InstanceName) {
    let record = &candidate.record;
    (
        Reverse(record.spec.priority),
        candidate.since,
        record.name.clone(),
    )
}

/// Who holds what, and how many are starting.
struct Ledger<'a> {
    devices: BTreeMap<DeviceId, Vec<Holder>>,
    /// More than one holder: the record of an ended launch could not be written in the pass that gave its port away.
    ports: BTreeMap<Port, Vec<Holder>>,
    /// Free devices that somebody of this priority waits for: lower ones do not overtake.
    awaited: BTreeMap<DeviceId, i32>,
    exact_ports: BTreeSet<Port>,
    /// For each base port, from where on a free one is looked for: those before it are held.
    scanned: BTreeMap<u16, Port>,
    /// Whether a record that cannot be read may hold any device.
    is_doubtful: bool,
    starting: u32,
    inputs: Inputs<'a>,
}

#[derive(Debug, Clone)]
struct Holder {
    who: String,
    is_pinned: bool,
}

impl Holder {
    fn of(record: &Record) -> Self {
        Self {
            who: record.name.to_string(),
            is_pinned: matches!(record.spec.devices, DeviceRequest::Ids(_)),
        }
    }
}

impl<'a> Ledger<'a> {
    /// What is held once the steps decided so far are carried out.
    fn of(inputs: Inputs<'a>, steps: &BTreeMap<InstanceName, Step>) -> Self {
        let mut ledger = Self {
            devices: BTreeMap::new(),
            ports: BTreeMap::new(),
            awaited: BTreeMap::new(),
            exact_ports: exact_ports(inputs.desired),
            scanned: BTreeMap::new(),
            is_doubtful: inputs
                .observed
                .quarantined
                .iter()
                .any(|record| record.holds == Holds::Unknown),
            starting: 0,
            inputs,
        };
        for (name, instance) in &inputs.observed.instances {
            match steps.get(name) {
                Some(step) if step.record.is_some() => ledger.hold_step(step),
                Some(_) => ledger.hold(&instance.record),
                // A candidate: its last launch, if any, is proven gone, and holds until the candidate's turn.
                None => {
                    if let Some(launch) = &instance.record.launch {
                        ledger.hold_lease(&launch.lease, &Holder::of(&instance.record));
                    }
                }
            }
        }
        // In the order of their names, whatever the order they were found in.
        let mut quarantined: Vec<_> = inputs.observed.quarantined.iter().collect();
        quarantined.sort_by_key(|record| &record.file);
        for quarantined in quarantined {
            if let Holds::Lease { lease, .. } = &quarantined.holds {
                let file = quarantined.file.display();
                let holder = Holder {
                    who: format!("a record in quarantine ({file})"),
                    is_pinned: true,
                };
                ledger.hold_lease(lease, &holder);
            }
        }
        ledger
    }

    /// What a step writes down is held.
    fn hold_step(&mut self, step: &Step) {
        match &step.record {
            Some(RecordChange::Write(record)) => self.hold(record),
            Some(RecordChange::Forget) | None => {}
        }
    }

    fn hold(&mut self, record: &Record) {
        let Some(launch) = &record.launch else {
            return;
        };
        self.hold_lease(&launch.lease, &Holder::of(record));
        let half_way = health::half_way(&record.spec, launch, self.inputs.settings);
        if launch.ready_at.is_none() && launch.stop.is_none() && self.inputs.now < half_way {
            self.starting += 1;
        }
    }

    fn hold_lease(&mut self, lease: &Lease, holder: &Holder) {
        for device in &lease.devices {
            let holders = self.devices.entry(device.id.clone()).or_default();
            holders.push(holder.clone());
        }
        if let Some(port) = lease.port {
            self.ports.entry(port).or_default().push(holder.clone());
        }
    }

    /// Frees what the ended launch of a candidate held. Returns its record.
    fn release(&mut self, name: &InstanceName) -> Option<&'a Record> {
        let record = &self.inputs.observed.instances.get(name)?.record;
        let lease = &record.launch.as_ref()?.lease;
        let who = name.to_string();
        for device in &lease.devices {
            if let Some(holders) = self.devices.get_mut(&device.id) {
                holders.retain(|holder| holder.who != who);
            }
        }
        if let Some(port) = lease.port
            && let Some(holders) = self.ports.get_mut(&port)
        {
            holders.retain(|holder| holder.who != who);
            self.scanned.clear();
        }
        Some(record)
    }

    fn hold_again(&mut self, released: Option<&Record>) {
        if let Some(record) = released
            && let Some(launch) = &record.launch
        {
            self.hold_lease(&launch.lease, &Holder::of(record));
        }
    }

    /// What a candidate is granted.
    fn lease_for(&mut self, candidate: &Candidate<'_>) -> Result<Lease, Wait> {
        let devices = self.devices_for(candidate)?;
        let port = self.port_for(candidate)?;
        let limit = self.inputs.settings.max_launches;
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
                let record = &instance.record;
                let launch = record.launch.as_ref()?;
                let counts = launch.ready_at.is_none() && launch.stop.is_none();
                counts.then(|| health::half_way(&record.spec, launch, self.inputs.settings))
            });
        halves.filter(|at| *at > self.inputs.now).min()
    }

    fn devices_for(&self, candidate: &Candidate<'_>) -> Result<Vec<LeasedDevice>, Wait> {
        let spec = &candidate.record.spec;
        let need = engine::devices_needed(spec, self.inputs.inventory);
        if need == 0 {
            return Ok(Vec::new());
        }
        let held: BTreeSet<&DeviceId> = candidate
            .held
            .iter()
            .flat_map(|lease| &lease.devices)
            .map(|device| &device.id)
            .collect();
        let is_pinned = matches!(spec.devices, DeviceRequest::Ids(_));
        let allowed: Vec<&Device> = self
            .free(spec)
            // What it held itself a moment ago is not in doubt.
            .filter(|device| !self.is_doubtful || held.contains(&device.id))
            .filter(|device| {
                self.awaited
                    .get(&device.id)
                    .is_none_or(|&priority| priority <= spec.priority)
            })
            .collect();
        if let Some(mut chosen) = choose(&allowed, &held, need as usize, is_pinned) {
            chosen.sort();
            return Ok(chosen
                .into_iter()
                .map(|id| LeasedDevice { id, bytes: None })
                .collect());
        }
        if self.is_doubtful {
            return Err(forever(WaitReason::Quarantine));
        }
        let holders = self.usable(spec).filter_map(|device| {
            let holders = self.devices.get(&device.id)?;
            let names: Vec<_> = holders.iter().map(|holder| holder.who.as_str()).collect();
            (!names.is_empty()).then(|| (device.id.clone(), names.join(" and ")))
        });
        Err(forever(WaitReason::InsufficientDevices {
            need,
            free: u32::try_from(allowed.len()).unwrap_or(u32::MAX),
            holders: holders.collect(),
        }))
    }

    /// The devices that a spec could be granted if nobody held them.
    fn usable(&self, spec: &InstanceSpec) -> impl Iterator<Item = &'a Device> + use<'a> {
        let inventory = self.inputs.inventory;
        let pinned = match &spec.devices {
            DeviceRequest::Ids(ids) => {
                Some(engine::pinned_devices(ids, inventory).unwrap_or_default())
            }
            DeviceRequest::Count(_) | DeviceRequest::Parallelism => None,
        };
        inventory.devices.iter().filter(move |device| {
            pinned
                .as_ref()
                .is_none_or(|pinned| pinned.contains(&device.id))
        })
    }

    /// Those of them that nobody holds, or that are shared.
    fn free(&self, spec: &InstanceSpec) -> impl Iterator<Item = &'a Device> {
        let is_pinned = matches!(spec.devices, DeviceRequest::Ids(_));
        self.usable(spec)
            .filter(move |device| self.is_free(device, is_pinned))
    }

    /// Who has a lower priority does not overtake: the free devices that a waiting candidate could use are not theirs.
    fn keep_free_for(&mut self, candidate: &Candidate<'_>) {
        let spec = &candidate.record.spec;
        let free: Vec<_> = self.free(spec).map(|device| device.id.clone()).collect();
        for id in free {
            let awaited = self.awaited.entry(id).or_insert(spec.priority);
            *awaited = (*awaited).max(spec.priority);
        }
    }

    /// Unified memory is shared unless one side pinned the device.
    fn is_free(&self, device: &Device, pins: bool) -> bool {
        let holders = self.devices.get(&device.id).map_or(&[][..], Vec::as_slice);
        holders.is_empty()
            || (device.unified && !pins && holders.iter().all(|holder| !holder.is_pinned))
    }

    fn port_holder(&self, port: Port) -> Option<&Holder> {
        self.ports.get(&port)?.first()
    }

    fn port_for(&mut self, candidate: &Candidate<'_>) -> Result<Option<Port>, Wait> {
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
            if let Some(holder) = self.port_holder(port) {
                return Err(forever(WaitReason::PortHeld {
                    port,
                    holder: holder.who.clone(),
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
            self.port_holder(*port).is_none()
                && !self.exact_ports.contains(port)
                && remembered(port).is_none()
        };
        let kept = candidate
            .held
            .as_ref()
            .and_then(|lease| lease.port)
            .filter(free);
        let first = || {
            // Those before it were held when last looked at, and are still.
            let from = self.scanned.get(&base).copied();
            let from = from.or_else(|| Port::try_from(base).ok())?;
            from.upward().find(free)
        };
        if let Some(port) = kept {
            return Ok(Some(port));
        }
        match first() {
            Some(port) => {
                self.scanned.insert(base, port);
                Ok(Some(port))
            }
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
fn launch(inputs: Inputs<'_>, candidate: Candidate<'_>, lease: Lease) -> Step {
    let Candidate {
        record,
        held: _,
        since: _,
        mut events,
    } = candidate;
    let record = record.into_owned();
    let launch_id = LaunchId::derive(inputs.nonce, &record.name);
    // An edit forgives: what ended before it is no longer counted.
    let is_restart = record.history.failures > 0
        && record
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
fn refuse(inputs: Inputs<'_>, candidate: Candidate<'_>, wait: Wait) -> Step {
    let Candidate {
        record,
        held: _,
        since: _,
        events,
    } = candidate;
    let has_record = inputs.observed.instances.contains_key(&record.name);
    Step {
        record: changed(record).filter(|_| has_record),
        action: None,
        wait: Some(wait),
        events,
    }
}
