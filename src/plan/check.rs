//! What must hold of every plan: rules that the simulator checks too, and the invariants over arbitrary worlds.
//!
//! Invariant: no rule asks `instance.rs` or `lease.rs`, so a mistake there is not repeated here.

mod whole;

mod worlds;

mod lives;

mod properties;

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use uuid::Uuid;

use whole::Whole;

use super::{Action, Inputs, Intent, Plan, RecordChange, STRANGER_MEMORY, Settings, Step};
use crate::desired::{Absence, Desired, Folder};
use crate::engine;
use crate::manifest::DeletionPolicy;
use crate::names::{DeviceId, InstanceName, LaunchId};
use crate::observed::{EffectKind, Instance, Inventory, Liveness, Observed, Outcome, SignalKind};
use crate::record::{Launch, Record, StopReason};
use crate::spec::{Deployment, DeviceRequest};

/// Everything a plan is made from, but the nonce: as one value that can be built and changed.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct World {
    pub desired: Desired,
    pub observed: Observed,
    pub inventory: Inventory,
    pub settings: Settings,
    pub now: Timestamp,
}

impl World {
    pub(crate) fn inputs(&self, nonce: u128) -> Inputs<'_> {
        Inputs {
            desired: &self.desired,
            observed: &self.observed,
            inventory: &self.inventory,
            settings: &self.settings,
            now: self.now,
            nonce: Uuid::from_u128(nonce),
        }
    }
}

/// The rules that a plan breaks, as sentences; none of a correct plan.
pub(crate) fn violations(inputs: Inputs<'_>, plan: &Plan) -> Vec<String> {
    let mut broken = Vec::new();
    for (name, step) in &plan.steps {
        let case = Case {
            inputs,
            name,
            before: inputs.observed.instances.get(name),
            step,
        };
        for (rule, holds) in RULES {
            if !holds(&case) {
                broken.push(format!("{name}: {rule}: {step:?}"));
            }
        }
    }
    broken.extend(Whole::of(inputs, plan).violations());
    broken
}

/// What is known once a plan's commits are done and its effects have begun: what the controller makes of it.
pub(crate) fn committed(inputs: Inputs<'_>, plan: &Plan) -> Observed {
    let mut observed = inputs.observed.clone();
    let mut waiting_since = BTreeMap::new();
    for (name, step) in &plan.steps {
        match &step.record {
            Some(RecordChange::Forget) => {
                observed.instances.remove(name);
            }
            Some(RecordChange::Write(record)) => commit(&mut observed, name, record, inputs.now),
            None => {}
        }
        let instance = observed.instances.get_mut(name);
        let has_launch = instance
            .as_ref()
            .is_some_and(|instance| instance.record.launch.is_some());
        if step.wait.is_some() && !has_launch {
            let since = inputs.observed.waiting_since.get(name);
            waiting_since.insert(name.clone(), since.copied().unwrap_or(inputs.now));
        }
        if let (Some(instance), Some(action)) = (instance, &step.action) {
            begin(instance, action, inputs.now);
        }
    }
    observed.waiting_since = waiting_since;
    observed
}

fn commit(observed: &mut Observed, name: &InstanceName, record: &Record, now: Timestamp) {
    let instance = observed
        .instances
        .entry(name.clone())
        .or_insert_with(|| Instance::of_record(record.clone()));
    if instance.launch_id() != record.launch.as_ref().map(|launch| launch.id) {
        *instance = Instance::of_record(record.clone());
        return;
    }
    let has_handle = |record: &Record| {
        let launch = record.launch.as_ref();
        launch.is_some_and(|launch| launch.handle.is_some())
    };
    if !has_handle(&instance.record) && has_handle(record) {
        instance.health.since = Some(now);
    }
    instance.record = record.clone();
    instance.outcome = None;
}

fn begin(instance: &mut Instance, action: &Action, now: Timestamp) {
    match action {
        Action::Prepare(_) => instance.effect = Some(EffectKind::Prepare),
        Action::Release { .. } => instance.effect = Some(EffectKind::Release),
        Action::Resolve { .. } => instance.effect = Some(EffectKind::Resolve),
        Action::Signal { signal, .. } => {
            instance.effect = Some(EffectKind::Signal);
            instance.signalled = Some((now, *signal));
        }
        Action::Probe { .. } => {
            instance.health.in_flight = true;
            instance.health.since.get_or_insert(now);
        }
    }
}

type Rule = (&'static str, fn(&Case<'_>) -> bool);

/// What must hold of each instance's step.
const RULES: &[Rule] = &[
    ("a step says something", |case| {
        case.step.action.is_some() || case.step.record.is_some() || case.step.wait.is_some()
    }),
    ("an effect under way is left alone", |case| {
        let busy = case.before.is_some_and(|before| before.effect.is_some());
        !busy || (case.step.action.is_none() && case.step.record.is_none())
    }),
    (
        "what is not proven gone keeps its launch and its lease",
        |case| case.keeps_what_may_live(),
    ),
    (
        "a record goes last, after its instance is proven gone",
        |case| match (&case.step.record, case.before) {
            (Some(RecordChange::Forget), Some(before)) => is_gone(before) || case.is_orphaned(),
            (Some(RecordChange::Forget), None) => false,
            (Some(RecordChange::Write(_)) | None, _) => true,
        },
    ),
    (
        "nothing is taken away unless its wish is proven gone",
        |case| case.takes_away_only_what_is_unwanted(),
    ),
    (
        "a launch that goes on is not given another reason to end",
        |case| match (case.launch_before(), case.launch_after()) {
            (Some(before), Some(after)) if before.id == after.id => {
                let reason = |launch: &Launch| launch.stop.as_ref().map(|stop| stop.reason.clone());
                before.stop.is_none() || reason(before) == reason(after)
            }
            (_, _) => true,
        },
    ),
    (
        "while the folder cannot be read, nothing is launched anew",
        |case| {
            case.before.is_some()
                || case.order().is_none()
                || case.inputs.desired.folder == Folder::Listed
        },
    ),
    (
        "what is paused is neither launched nor asked to end",
        |case| case.heeds_the_pause(),
    ),
    ("a launch is in the record before it is prepared", |case| {
        case.reserves_before_it_prepares()
    }),
    (
        "a gate is opened when its handle is in the record",
        |case| match &case.step.action {
            Some(Action::Release { launch_id }) => case.launch_after().is_some_and(|launch| {
                let prepared = case.before.and_then(|before| match &before.outcome {
                    Some(Outcome::Prepared(handle)) => Some(handle),
                    _ => None,
                });
                launch.id == *launch_id
                    && launch.stop.is_none()
                    && launch.started_at.is_none()
                    && launch.handle.is_some()
                    && launch.handle.as_ref() == prepared
            }),
            _ => true,
        },
    ),
    ("no signal goes to what is not known to be ours", |case| {
        case.signals_only_ours()
    }),
    (
        "only what nobody knows anything about is looked for",
        |case| match (&case.step.action, case.before) {
            (Some(Action::Resolve { launch_id }), Some(before)) => {
                before.launch_id() == Some(*launch_id)
                    && case
                        .launch_before()
                        .is_some_and(|launch| launch.handle.is_none())
            }
            (Some(Action::Resolve { .. }), None) => false,
            _ => true,
        },
    ),
    (
        "one probe at a time asks what is alive, on its own port",
        |case| match (&case.step.action, case.before, case.launch_after()) {
            (Some(Action::Probe { launch_id, request }), Some(before), Some(launch)) => {
                before.liveness == Liveness::Alive
                    && !before.health.in_flight
                    && launch.stop.is_none()
                    && launch.id == *launch_id
                    && launch.lease.port == Some(request.port)
                    && !request.timeout.is_zero()
            }
            (Some(Action::Probe { .. }), _, _) => false,
            _ => true,
        },
    ),
    ("what is granted is what is needed, of this host", |case| {
        case.is_granted_its_need()
    }),
    (
        "the port is the exact one, or one that nobody else wants",
        |case| case.is_granted_a_fit_port(),
    ),
    // A write without an effect is followed by another look at once; everything else would be a hot loop.
    ("a wait ends in the future", |case| {
        let until = case.step.wait.as_ref().and_then(|wait| wait.until);
        until.is_none_or(|until| {
            until > case.inputs.now || (until == case.inputs.now && case.step.record.is_some())
        })
    }),
    (
        "a record that is written says something new",
        |case| match (&case.step.record, case.before) {
            (Some(RecordChange::Write(record)), Some(before)) => {
                **record != before.record && record.name == *case.name
            }
            (Some(RecordChange::Write(record)), None) => record.name == *case.name,
            (Some(RecordChange::Forget) | None, _) => true,
        },
    ),
    ("no time in a launch lies ahead", |case| {
        let ahead = |at: Option<Timestamp>| at.is_some_and(|at| at > case.inputs.now);
        match (&case.step.record, case.launch_after()) {
            (Some(RecordChange::Write(_)), Some(launch)) => {
                !ahead(launch.started_at)
                    && !ahead(launch.ready_at)
                    && !ahead(launch.stop.as_ref().map(|stop| stop.asked_at))
            }
            (_, _) => true,
        }
    }),
];

/// One instance, before and after its step.
struct Case<'a> {
    inputs: Inputs<'a>,
    name: &'a InstanceName,
    before: Option<&'a Instance>,
    step: &'a Step,
}

impl<'a> Case<'a> {
    fn launch_before(&self) -> Option<&'a Launch> {
        self.before.and_then(|before| before.record.launch.as_ref())
    }

    fn record_after(&self) -> Option<&'a Record> {
        match &self.step.record {
            Some(RecordChange::Write(record)) => Some(record),
            Some(RecordChange::Forget) => None,
            None => self.before.map(|before| &before.record),
        }
    }

    fn launch_after(&self) -> Option<&'a Launch> {
        self.record_after()
            .and_then(|record| record.launch.as_ref())
    }

    fn order(&self) -> Option<&'a crate::order::LaunchOrder> {
        match &self.step.action {
            Some(Action::Prepare(order)) => Some(order),
            _ => None,
        }
    }

    fn deployment(&self) -> Option<&'a Deployment> {
        self.inputs.desired.deployments.get(&self.name.deployment)
    }

    fn reconciles(&self) -> bool {
        self.inputs.settings.intent == Intent::Reconcile
    }

    /// The reason of a stop that this step decides on.
    fn new_reason(&self) -> Option<&'a StopReason> {
        let stop = |launch: &'a Launch| launch.stop.as_ref().map(|stop| &stop.reason);
        let was_asked = self.launch_before().and_then(stop).is_some();
        self.launch_after().and_then(stop).filter(|_| !was_asked)
    }

    fn keeps_what_may_live(&self) -> bool {
        match (self.before, self.launch_before()) {
            (Some(before), Some(launch)) if !is_gone(before) && !self.is_orphaned() => self
                .launch_after()
                .is_some_and(|after| after.id == launch.id && after.lease == launch.lease),
            (_, _) => true,
        }
    }

    /// Whether it is to be left running without a record.
    fn is_orphaned(&self) -> bool {
        self.reconciles()
            && self.deployment().is_none()
            && self.is_unwanted()
            && self
                .before
                .is_some_and(|before| before.record.spec.deletion_policy == DeletionPolicy::Orphan)
    }

    /// Whether it is proven that nobody wishes it.
    fn is_unwanted(&self) -> bool {
        if !self.reconciles() {
            return true;
        }
        let Inputs {
            desired,
            settings,
            now,
            ..
        } = self.inputs;
        if desired.folder != Folder::Listed {
            return false;
        }
        if let Some(deployment) = self.deployment() {
            let is_elsewhere = deployment
                .spec
                .node_selector
                .iter()
                .any(|(label, value)| settings.node_labels.get(label) != Some(value));
            return !deployment.spec.paused
                && (is_elsewhere || self.name.ordinal >= deployment.spec.replicas);
        }
        let Some(record) = self.before.map(|before| &before.record) else {
            return true;
        };
        let is_mentioned = desired.unreadable.iter().any(|(file, unreadable)| {
            *file == record.source.file || unreadable.words.contains(self.name.deployment.as_str())
        });
        match desired.absence(record) {
            Absence::Since(since) => {
                !is_mentioned
                    && now.duration_since(since).unsigned_abs() >= settings.removal_grace
                    && since <= now
                    && desired.removals_wait_until.is_none_or(|until| until <= now)
            }
            Absence::Unproven => false,
        }
    }

    fn takes_away_only_what_is_unwanted(&self) -> bool {
        let forgets = self.step.record == Some(RecordChange::Forget);
        let is_fit = match self.new_reason() {
            Some(StopReason::Removed) => self.is_unwanted(),
            Some(StopReason::Shutdown) => !self.reconciles(),
            Some(StopReason::SpecChanged { .. }) => {
                self.inputs.desired.folder == Folder::Listed
                    && self.deployment().is_some_and(|deployment| {
                        let before = self.before.map(|before| &before.record.restart_key);
                        before != Some(&deployment.restart_key)
                            && engine::support(&deployment.spec, self.inputs.inventory).is_ok()
                    })
            }
            Some(
                StopReason::StartupTimeout { .. }
                | StopReason::Unhealthy { .. }
                | StopReason::LeaderGone
                | StopReason::LaunchFailed(_),
            )
            | None => true,
        };
        is_fit && (!forgets || self.is_unwanted())
    }

    fn heeds_the_pause(&self) -> bool {
        let is_paused = self
            .deployment()
            .is_some_and(|deployment| deployment.spec.paused);
        if !is_paused || !self.reconciles() {
            return true;
        }
        // What is half gone, or failed to start, is cleaned up all the same.
        let cleans_up = matches!(
            self.new_reason(),
            None | Some(StopReason::LeaderGone | StopReason::LaunchFailed(_))
        );
        let runs_on_old_key = self.launch_after().is_none()
            || self.record_after().map(|record| &record.restart_key)
                == self.before.map(|before| &before.record.restart_key);
        self.order().is_none() && cleans_up && runs_on_old_key
    }

    fn reserves_before_it_prepares(&self) -> bool {
        let Some(order) = self.order() else {
            return true;
        };
        let is_free = self.before.is_none_or(is_gone);
        let Some(RecordChange::Write(record)) = &self.step.record else {
            return false;
        };
        is_free
            && order.instance == *self.name
            && !order.timeout.is_zero()
            && record.launch.as_ref().is_some_and(|launch| {
                let Launch {
                    id,
                    handle,
                    lease,
                    reserved_at,
                    started_at,
                    ready_at,
                    stop,
                } = launch;
                *id == order.launch_id
                    && *id == LaunchId::derive(self.inputs.nonce, self.name)
                    && handle.is_none()
                    && lease.port == order.port
                    && *reserved_at == self.inputs.now
                    && started_at.is_none()
                    && ready_at.is_none()
                    && stop.is_none()
            })
    }

    fn signals_only_ours(&self) -> bool {
        let Some(Action::Signal {
            launch_id,
            signal,
            reason,
        }) = &self.step.action
        else {
            return true;
        };
        let (Some(before), Some(launch)) = (self.before, self.launch_after()) else {
            return false;
        };
        // What has just been reported by an effect is known as well as what was looked at; both are proven once more
        // when the signal is sent.
        let is_ours = matches!(
            before.liveness,
            Liveness::Alive | Liveness::LeaderGone { .. }
        ) || matches!(
            before.outcome,
            Some(Outcome::Prepared(_) | Outcome::Failed(_))
        );
        is_ours
            && launch.id == *launch_id
            && launch.handle.is_some()
            && launch.stop.as_ref().is_some_and(|stop| {
                stop.reason == *reason && (*signal == SignalKind::Kill) == stop.killed_at.is_some()
            })
    }

    fn is_granted_its_need(&self) -> bool {
        let (Some(_), Some(record), Some(launch)) =
            (self.order(), self.record_after(), self.launch_after())
        else {
            return true;
        };
        let inventory = self.inputs.inventory;
        let granted: BTreeSet<&DeviceId> = launch
            .lease
            .devices
            .iter()
            .map(|device| &device.id)
            .collect();
        let known: Vec<_> = inventory
            .devices
            .iter()
            .filter(|device| granted.contains(&device.id))
            .collect();
        let kinds: BTreeSet<_> = known.iter().map(|device| device.kind).collect();
        let is_as_asked = match &record.spec.devices {
            DeviceRequest::Ids(ids) => ids.iter().all(|text| {
                let by_id = || {
                    inventory
                        .devices
                        .iter()
                        .find(|device| device.id.as_str() == text)
                };
                let by_index = text
                    .strip_prefix("index:")
                    .and_then(|digits| inventory.devices.get(digits.parse::<usize>().ok()?));
                by_index
                    .or_else(by_id)
                    .is_some_and(|device| granted.contains(&device.id))
            }),
            DeviceRequest::Parallelism | DeviceRequest::Count(_) => kinds.len() <= 1,
        };
        is_as_asked
            && granted.len() == engine::devices_needed(&record.spec, inventory) as usize
            && granted.len() == launch.lease.devices.len()
            && granted.len() == known.len()
            && engine::support(&record.spec, inventory).is_ok()
    }

    fn is_granted_a_fit_port(&self) -> bool {
        let (Some(_), Some(record), Some(launch)) =
            (self.order(), self.record_after(), self.launch_after())
        else {
            return true;
        };
        let Some(port) = launch.lease.port else {
            return !engine::needs_port(&record.spec);
        };
        let is_taken = self
            .inputs
            .observed
            .strangers
            .get(&port)
            .is_some_and(|stranger| self.inputs.now < stranger.seen_at + STRANGER_MEMORY);
        let is_fit = match record.spec.port {
            Some(exact) => port == exact,
            None => !self
                .inputs
                .desired
                .deployments
                .values()
                .any(|deployment| deployment.spec.port == Some(port)),
        };
        is_fit && !is_taken && engine::needs_port(&record.spec)
    }
}

/// Whether nothing of an instance's launch is left, or it has none.
fn is_gone(instance: &Instance) -> bool {
    match &instance.record.launch {
        None => true,
        Some(_) if instance.effect.is_some() => false,
        Some(launch) if launch.handle.is_some() => {
            matches!(instance.liveness, Liveness::Gone { .. })
        }
        Some(_) => matches!(
            instance.outcome,
            Some(Outcome::Failed(_) | Outcome::PortTaken { .. } | Outcome::Resolved(None))
        ),
    }
}
