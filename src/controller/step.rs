//! One pass, without waiting for anything: what is known and the present go in, committed records, effects to start and
//! events come out. The simulator drives this very code.
//!
//! Invariant: the record is on disk before the effect that it announces is handed out, and what belongs to another launch
//! than the record's changes nothing.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use uuid::Uuid;

use crate::desired::Desired;
use crate::event::{Event, Reason};
use crate::names::{InstanceName, LaunchId};
use crate::observed::{
    EffectKind, Instance, Inventory, Liveness, Observed, Outcome, ProbeResult, Quarantined,
};
use crate::order::ProbePurpose;
use crate::plan::{self, Action, Inputs, Plan, RecordChange, Settings, Step, Wait, WaitReason};
use crate::record::Record;
use crate::store::Records;

/// A record that could not be written is tried again this soon: a full disk is not emptied in milliseconds.
const RETRY_WRITE: Duration = Duration::from_secs(5);

/// Every effect ends by itself: the slowest after half a minute, and a probe that waits behind a thousand hanging ones
/// after a minute and a half. One whose end was not heard of for longer was lost (its task broke off), and what it did is
/// looked for anew.
const EFFECT_LIMIT: Duration = Duration::from_mins(2);

/// What is known of every instance, and how it changes.
#[derive(Debug, Default)]
pub struct Core {
    observed: Observed,
    /// When the last lifecycle effect and the last probe of each instance must have ended.
    overdue: BTreeMap<InstanceName, Overdue>,
    /// What each instance waited for in the last pass: a person is told of a wait once.
    waits: BTreeMap<InstanceName, Wait>,
    /// Whose record could not be written, so that a person is told once.
    unwritten: BTreeMap<InstanceName, String>,
}

#[derive(Debug, Default)]
struct Overdue {
    effect: Option<Timestamp>,
    probe: Option<Timestamp>,
}

/// What a pass came to.
#[derive(Debug, Default)]
pub struct Pass {
    /// What was decided.
    pub plan: Plan,
    /// The effects to start now. Each of them ends in [`Core::outcome`] or [`Core::probed`].
    pub actions: Vec<(InstanceName, Action)>,
    /// Instances whose handle has just become known: they are to be inspected and watched.
    pub watches: Vec<InstanceName>,
    /// Instances of which nothing is left.
    pub forgotten: Vec<InstanceName>,
    /// What a person should know.
    pub events: Vec<Event>,
    /// When to look again without a wake.
    pub deadline: Option<Timestamp>,
    /// Whether anything was committed or started, probes aside: then the next pass may find more to do.
    pub is_busy: bool,
}

impl Pass {
    fn look_again(&mut self, at: Option<Timestamp>) {
        self.deadline = self.deadline.into_iter().chain(at).min();
    }
}

impl Core {
    /// What the records tell.
    pub fn recover(records: BTreeMap<InstanceName, Record>, quarantined: Vec<Quarantined>) -> Self {
        let instances = records
            .into_iter()
            .map(|(name, record)| (name, Instance::of_record(record)))
            .collect();
        Self {
            observed: Observed {
                instances,
                quarantined,
                ..Observed::default()
            },
            ..Self::default()
        }
    }

    /// Everything that is known.
    pub fn observed(&self) -> &Observed {
        &self.observed
    }

    /// What the quarantine holds now.
    pub fn set_quarantined(&mut self, quarantined: Vec<Quarantined>) {
        self.observed.quarantined = quarantined;
    }

    /// The instance, if its record holds this launch: what is of another attempt changes nothing.
    fn of_launch(&mut self, name: &InstanceName, id: LaunchId) -> Option<&mut Instance> {
        let instance = self.observed.instances.get_mut(name);
        instance.filter(|instance| instance.launch_id() == Some(id))
    }

    /// Whether the launch runs.
    pub fn saw(&mut self, name: &InstanceName, id: LaunchId, liveness: Liveness) {
        if let Some(instance) = self.of_launch(name, id) {
            instance.liveness = liveness;
        }
    }

    /// A lifecycle effect ended. Returns whether it was of the launch that the record holds.
    pub fn outcome(&mut self, name: &InstanceName, id: LaunchId, outcome: Outcome) -> bool {
        if let Outcome::PortTaken { port, stranger } = &outcome {
            self.observed.strangers.insert(*port, stranger.clone());
        }
        let Some(instance) = self.of_launch(name, id) else {
            return false;
        };
        instance.effect = None;
        instance.outcome = match outcome {
            // This says that nothing is left to be written.
            Outcome::Signalled { .. } => None,
            news => Some(news),
        };
        true
    }

    /// A probe ended.
    pub fn probed(
        &mut self,
        name: &InstanceName,
        id: LaunchId,
        purpose: ProbePurpose,
        result: ProbeResult,
        now: Timestamp,
    ) -> Option<Event> {
        let instance = self.of_launch(name, id)?;
        instance.health.in_flight = false;
        let count = match purpose {
            ProbePurpose::Startup => &mut instance.health.startup,
            ProbePurpose::Readiness => &mut instance.health.readiness,
            ProbePurpose::Liveness => &mut instance.health.liveness,
        };
        let was_stranger = matches!(count.last, Some((_, ProbeResult::Stranger { .. })));
        let event = match &result {
            ProbeResult::Stranger { .. } if !was_stranger => Some(
                Event::of_instance(now, name, Reason::PortTakenByStranger, result.to_string())
                    .launch(id),
            ),
            ProbeResult::Stranger { .. }
            | ProbeResult::Success
            | ProbeResult::Loading { .. }
            | ProbeResult::Failure { .. } => None,
        };
        count.count(now, result);
        event
    }

    /// What could not be proven is looked into again: called at each resync.
    pub fn doubt_again(&mut self) {
        for instance in self.observed.instances.values_mut() {
            if matches!(
                instance.outcome,
                Some(Outcome::Unresolved { .. } | Outcome::Unproven { .. })
            ) {
                instance.outcome = None;
            }
        }
    }

    /// What time alone changes, at the beginning of each pass. An effect whose end was never heard of counts as ended; a
    /// resync notices, because nothing waits for what does not happen.
    pub fn catch_up(&mut self, now: Timestamp) {
        for instance in self.observed.instances.values_mut() {
            instance.health.since.get_or_insert(now);
        }
        let is_over = |at: &mut Timestamp| *at <= now;
        for (name, overdue) in &mut self.overdue {
            let Some(instance) = self.observed.instances.get_mut(name) else {
                continue;
            };
            if overdue.effect.take_if(is_over).is_some() {
                instance.effect = None;
            }
            if overdue.probe.take_if(is_over).is_some() {
                instance.health.in_flight = false;
            }
        }
    }

    /// Decides, commits the records, and hands out the effects.
    pub fn pass(
        &mut self,
        desired: &Desired,
        inventory: &Inventory,
        settings: &Settings,
        now: Timestamp,
        nonce: Uuid,
        records: &mut dyn Records,
    ) -> Pass {
        self.catch_up(now);
        let plan = plan::plan(Inputs {
            desired,
            observed: &self.observed,
            inventory,
            settings,
            now,
            nonce,
        });
        let mut pass = Pass::default();
        // What frees a lease is written before what is granted from it: nobody who reads the records sees it twice.
        let is_grant = |step: &Step| matches!(step.action, Some(Action::Prepare(_)));
        let (grants, others): (Vec<_>, Vec<_>) =
            plan.steps.iter().partition(|(_, step)| is_grant(step));
        for (name, step) in others.into_iter().chain(grants) {
            self.carry_out(name, step, now, records, &mut pass);
        }
        self.note_waits(&plan, now, &mut pass);
        self.observed
            .strangers
            .retain(|_, stranger| now < stranger.seen_at + plan::STRANGER_MEMORY);
        pass.plan = plan;
        pass
    }

    fn carry_out(
        &mut self,
        name: &InstanceName,
        step: &Step,
        now: Timestamp,
        records: &mut dyn Records,
        pass: &mut Pass,
    ) {
        if let Some(change) = &step.record {
            let written = match change {
                RecordChange::Write(record) => records.write(record),
                RecordChange::Forget => records.remove(name),
            };
            match written {
                Ok(()) => self.committed(name, change, now, pass),
                Err(error) => {
                    let message = format!("{error}; {}", error.hint());
                    if self
                        .unwritten
                        .insert(name.clone(), message.clone())
                        .as_ref()
                        != Some(&message)
                    {
                        pass.events.push(Event::of_instance(
                            now,
                            name,
                            Reason::StateUnwritable,
                            message,
                        ));
                    }
                    // What the step waits for does not count: nothing of it has happened.
                    pass.look_again(Some(now + RETRY_WRITE));
                    return;
                }
            }
        }
        pass.look_again(step.wait.as_ref().and_then(|wait| wait.until));
        pass.is_busy |= step.is_change();
        pass.events.extend(step.events.iter().cloned());
        if let Some(action) = &step.action
            && let Some(instance) = self.observed.instances.get_mut(name)
        {
            begin(instance, action, now);
            let overdue = self.overdue.entry(name.clone()).or_default();
            match action {
                // A manifest may give its probes any time.
                Action::Probe { request, .. } => {
                    overdue.probe = Some(now + EFFECT_LIMIT + request.timeout);
                }
                Action::Prepare(_)
                | Action::Release { .. }
                | Action::Resolve { .. }
                | Action::Signal { .. } => overdue.effect = Some(now + EFFECT_LIMIT),
            }
            pass.actions.push((name.clone(), action.clone()));
        }
    }

    /// A record change is on disk.
    fn committed(
        &mut self,
        name: &InstanceName,
        change: &RecordChange,
        now: Timestamp,
        pass: &mut Pass,
    ) {
        self.unwritten.remove(name);
        let record = match change {
            RecordChange::Forget => {
                self.observed.instances.remove(name);
                self.overdue.remove(name);
                pass.forgotten.push(name.clone());
                return;
            }
            RecordChange::Write(record) => record,
        };
        let instance = self
            .observed
            .instances
            .entry(name.clone())
            .or_insert_with(|| Instance::of_record((**record).clone()));
        let launch_id = record.launch.as_ref().map(|launch| launch.id);
        if instance.launch_id() != launch_id {
            *instance = Instance::of_record((**record).clone());
            return;
        }
        let handle_of = |record: &Record| {
            record
                .launch
                .as_ref()
                .and_then(|launch| launch.handle.clone())
        };
        if handle_of(&instance.record).is_none() && handle_of(record).is_some() {
            instance.health.since = Some(now);
            pass.watches.push(name.clone());
        }
        instance.record = (**record).clone();
        // The record knows it now.
        instance.outcome = None;
    }

    /// Keeps since when instances wait, and tells a person once of each wait that may need one.
    fn note_waits(&mut self, plan: &Plan, now: Timestamp, pass: &mut Pass) {
        let waits: BTreeMap<_, _> = plan
            .steps
            .iter()
            .filter_map(|(name, step)| Some((name.clone(), step.wait.clone()?)))
            .collect();
        let mut waiting_since = BTreeMap::new();
        for (name, wait) in &waits {
            let before = self.waits.get(name);
            let is_new = before.is_none_or(|before| match (&before.reason, &wait.reason) {
                (WaitReason::Refused(before), WaitReason::Refused(now)) => before != now,
                (before, now) => before.word() != now.word(),
            });
            if let Some(reason) = event_of_wait(&wait.reason).filter(|_| is_new) {
                pass.events
                    .push(Event::of_instance(now, name, reason, wait.sentence()));
            }
            let has_launch = self
                .observed
                .instances
                .get(name)
                .is_some_and(|instance| instance.record.launch.is_some());
            if !has_launch {
                let since = self
                    .observed
                    .waiting_since
                    .get(name)
                    .copied()
                    .unwrap_or(now);
                waiting_since.insert(name.clone(), since);
            }
        }
        self.observed.waiting_since = waiting_since;
        self.waits = waits;
    }
}

/// Notes that an effect is under way.
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
        }
    }
}

/// The waits that may need a person.
fn event_of_wait(reason: &WaitReason) -> Option<Reason> {
    match reason {
        WaitReason::BackOff { .. } => Some(Reason::BackOff),
        WaitReason::InsufficientDevices { .. } => Some(Reason::InsufficientDevices),
        WaitReason::Quarantine | WaitReason::Quarantined { .. } => Some(Reason::RecordQuarantined),
        WaitReason::PortHeld { .. } | WaitReason::NoPort { .. } => Some(Reason::PortTaken),
        WaitReason::PortTaken { .. } => Some(Reason::PortTakenByStranger),
        WaitReason::Refused(failure) => Some(failure.reason()),
        WaitReason::Unknown { .. } => Some(Reason::Stuck),
        WaitReason::Effect(_)
        | WaitReason::Starting { .. }
        | WaitReason::Ready
        | WaitReason::NotReady { .. }
        | WaitReason::Stopping { .. }
        | WaitReason::Proof { .. }
        | WaitReason::LaunchLimit { .. }
        | WaitReason::RemovalGrace
        | WaitReason::GitLock
        | WaitReason::DesiredUnavailable { .. }
        | WaitReason::Paused
        | WaitReason::OtherNode
        | WaitReason::Completed => None,
    }
}
