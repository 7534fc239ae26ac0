//! What must hold of all instances together: leases, order, limits, completeness.
//!
//! Invariant: what was wrong before a plan is not blamed on it.

use std::collections::{BTreeMap, BTreeSet};

use super::is_gone;
use crate::names::{DeviceId, InstanceName, Port};
use crate::observed::Holds;
use crate::plan::{Action, Inputs, Intent, Plan, RecordChange, WaitReason, health};
use crate::record::{Lease, Record};
use crate::spec::{Deployment, DeviceRequest};

/// All instances together, after the plan.
pub(super) struct Whole<'a> {
    inputs: Inputs<'a>,
    plan: &'a Plan,
    /// The records as they will be.
    records: BTreeMap<&'a InstanceName, &'a Record>,
}

impl<'a> Whole<'a> {
    pub(super) fn of(inputs: Inputs<'a>, plan: &'a Plan) -> Self {
        let mut records: BTreeMap<_, _> = inputs
            .observed
            .instances
            .iter()
            .map(|(name, instance)| (name, &instance.record))
            .collect();
        for (name, step) in &plan.steps {
            match &step.record {
                Some(RecordChange::Write(record)) => {
                    records.insert(name, record);
                }
                Some(RecordChange::Forget) => {
                    records.remove(name);
                }
                None => {}
            }
        }
        Self {
            inputs,
            plan,
            records,
        }
    }

    /// The rules that it breaks.
    pub(super) fn violations(&self) -> Vec<String> {
        let broken = [
            self.shared_devices(),
            self.shared_ports(),
            self.doubtful_grants(),
            self.overtakers(),
            self.missing_steps(),
        ];
        let broken = broken.into_iter().flatten();
        broken.chain(self.launches_over_the_limit()).collect()
    }

    /// Everybody who holds something: who, what, whether exactly that was asked for, and whether this plan granted it.
    fn holders(&self) -> Vec<(String, &'a Lease, bool, bool)> {
        let of_records = self.records.iter().filter_map(|(name, record)| {
            let launch = record.launch.as_ref()?;
            let is_pinned = matches!(record.spec.devices, DeviceRequest::Ids(_));
            let is_new = matches!(
                self.plan
                    .steps
                    .get(*name)
                    .and_then(|step| step.action.as_ref()),
                Some(Action::Prepare(_))
            );
            Some((name.to_string(), &launch.lease, is_pinned, is_new))
        });
        let of_quarantine = self
            .inputs
            .observed
            .quarantined
            .iter()
            .filter_map(|record| match &record.holds {
                Holds::Lease { lease, .. } => {
                    Some((record.file.display().to_string(), lease, true, false))
                }
                Holds::Unknown => None,
            });
        of_records.chain(of_quarantine).collect()
    }

    fn is_unified(&self, id: &DeviceId) -> bool {
        let devices = &self.inputs.inventory.devices;
        devices
            .iter()
            .any(|device| device.id == *id && device.unified)
    }

    /// What was in two leases before is not this plan's doing.
    fn shared_devices(&self) -> Vec<String> {
        let mut held: BTreeMap<&DeviceId, Vec<(String, bool, bool)>> = BTreeMap::new();
        for (who, lease, is_pinned, is_new) in self.holders() {
            for device in &lease.devices {
                let holder = (who.clone(), is_pinned, is_new);
                held.entry(&device.id).or_default().push(holder);
            }
        }
        held.into_iter()
            .filter(|(id, holders)| {
                let may_share =
                    self.is_unified(id) && holders.iter().all(|(_, is_pinned, _)| !is_pinned);
                holders.len() > 1 && holders.iter().any(|(_, _, is_new)| *is_new) && !may_share
            })
            .map(|(id, holders)| format!("{id} is granted and in two leases: {holders:?}"))
            .collect()
    }

    fn shared_ports(&self) -> Vec<String> {
        let mut held: BTreeMap<Port, Vec<(String, bool)>> = BTreeMap::new();
        for (who, lease, _, is_new) in self.holders() {
            if let Some(port) = lease.port {
                held.entry(port).or_default().push((who, is_new));
            }
        }
        held.into_iter()
            .filter(|(_, holders)| holders.len() > 1 && holders.iter().any(|(_, is_new)| *is_new))
            .map(|(port, holders)| format!("port {port} is granted and in two leases: {holders:?}"))
            .collect()
    }

    /// The instances that this plan launches, with what they are granted and what their ended launch held.
    fn granted(
        &self,
    ) -> impl Iterator<Item = (&'a InstanceName, &'a Record, &'a Lease, Option<&'a Lease>)> {
        self.plan.steps.iter().filter_map(|(name, step)| {
            let (Some(Action::Prepare(_)), Some(RecordChange::Write(record))) =
                (&step.action, &step.record)
            else {
                return None;
            };
            let before = self.inputs.observed.instances.get(name);
            let held = before.and_then(|before| before.record.launch.as_ref());
            let lease = &record.launch.as_ref()?.lease;
            Some((name, &**record, lease, held.map(|launch| &launch.lease)))
        })
    }

    /// While a record cannot be read, only what an instance held itself is granted.
    fn doubtful_grants(&self) -> Vec<String> {
        let quarantined = &self.inputs.observed.quarantined;
        if !quarantined
            .iter()
            .any(|record| record.holds == Holds::Unknown)
        {
            return Vec::new();
        }
        self.granted()
            .filter(|(_, _, lease, held)| {
                let held: BTreeSet<_> = held
                    .iter()
                    .flat_map(|lease| &lease.devices)
                    .map(|device| &device.id)
                    .collect();
                lease
                    .devices
                    .iter()
                    .any(|device| !held.contains(&device.id))
            })
            .map(|(name, ..)| {
                format!("{name} is granted a device that an unreadable record may hold")
            })
            .collect()
    }

    /// Newcomers that are granted a device which somebody of higher priority waits for and could use.
    fn overtakers(&self) -> Vec<String> {
        let waiting: Vec<_> = self
            .plan
            .steps
            .iter()
            .filter(|(_, step)| {
                let reason = step.wait.as_ref().map(|wait| &wait.reason);
                matches!(reason, Some(WaitReason::InsufficientDevices { .. }))
            })
            .filter_map(|(name, _)| {
                let deployment = self.inputs.desired.deployments.get(&name.deployment);
                let recorded = self.inputs.observed.instances.get(name);
                let spec = deployment
                    .map(|deployment| &deployment.spec)
                    .or_else(|| recorded.map(|instance| &instance.record.spec))?;
                Some((name, spec))
            })
            .collect();
        let mut found = Vec::new();
        let newcomers = self.granted().filter(|(.., held)| held.is_none());
        for (name, record, lease, _) in newcomers {
            for (other, spec) in &waiting {
                let could_use = |id: &DeviceId| match &spec.devices {
                    DeviceRequest::Ids(ids) => ids.iter().any(|text| text == id.as_str()),
                    DeviceRequest::Count(_) | DeviceRequest::Parallelism => true,
                };
                let is_taken = lease
                    .devices
                    .iter()
                    .any(|device| could_use(&device.id) && !self.is_unified(&device.id));
                if spec.priority > record.spec.priority && is_taken {
                    found.push(format!(
                        "{name} overtakes {other}, which has a higher priority"
                    ));
                }
            }
        }
        found
    }

    fn launches_over_the_limit(&self) -> Option<String> {
        let limit = self.inputs.settings.max_launches as usize;
        let starting = self
            .records
            .values()
            .filter(|record| {
                let half = health::startup_deadline(&record.spec, self.inputs.settings) / 2;
                record.launch.as_ref().is_some_and(|launch| {
                    let since = launch.started_at.unwrap_or(launch.reserved_at);
                    let is_early =
                        self.inputs.now.duration_since(since).as_secs_f64() < half.as_secs_f64();
                    let before = self.inputs.observed.instances.get(&record.name);
                    let is_over = before.is_some_and(|before| {
                        before.launch_id() == Some(launch.id) && is_gone(before)
                    });
                    launch.ready_at.is_none() && launch.stop.is_none() && is_early && !is_over
                })
            })
            .count();
        let grants = self.granted().count();
        (limit > 0 && grants > 0 && starting > limit)
            .then(|| format!("{starting} are starting, and {limit} may"))
    }

    /// Everything that has a record or is wished has a step, and nothing else; the deadline is the earliest wait.
    fn missing_steps(&self) -> Vec<String> {
        let wished = self
            .inputs
            .desired
            .deployments
            .values()
            .filter(|_| self.inputs.settings.intent == Intent::Reconcile)
            .flat_map(Deployment::instances);
        let recorded = self.inputs.observed.instances.keys().cloned();
        let expected: BTreeSet<_> = wished.chain(recorded).collect();
        let planned: BTreeSet<_> = self.plan.steps.keys().cloned().collect();
        let mut found: Vec<_> = expected
            .symmetric_difference(&planned)
            .map(|name| format!("{name}: it has a step, or should have"))
            .collect();
        let earliest = self
            .plan
            .steps
            .values()
            .filter_map(|step| step.wait.as_ref()?.until)
            .min();
        if earliest != self.plan.deadline {
            found.push(format!(
                "{earliest:?} is the earliest wait, {:?} the deadline",
                self.plan.deadline
            ));
        }
        found
    }
}
