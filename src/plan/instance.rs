//! The decision table: one instance by itself.
//!
//! Relaunch is not an action. It is a stop now, and a launch in a later pass, once the instance is observed gone.

mod ending;

mod stopping;

use std::borrow::Cow;
use std::time::Duration;

use jiff::Timestamp;

use super::action::{Action, RecordChange, Step, Wait, WaitReason};
use super::health::{self, Checkup, Verdict};
use super::{Inputs, selects_this_node};
use crate::desired::Folder;
use crate::engine;
use crate::event::{Event, Reason};
use crate::failure::LaunchFailure;
use crate::manifest::DeletionPolicy;
use crate::names::InstanceName;
use crate::observed::{Instance, Liveness, Outcome, Quarantined};
use crate::record::{
    Cause, Handle, History, Launch, Lease, RECORD_VERSION, Record, Stop, StopReason,
};
use crate::spec::Deployment;

use ending::cause_of_end;

/// What is decided for one instance by itself.
#[expect(
    clippy::large_enum_variant,
    reason = "moved once, and boxing would cost an allocation per waiting instance"
)]
pub(super) enum Decision<'a> {
    /// This.
    Step(Step),
    /// It is to be launched, if devices, port and the launch limit allow.
    Launch(Candidate<'a>),
}

impl From<Step> for Decision<'_> {
    fn from(step: Step) -> Self {
        Self::Step(step)
    }
}

/// An instance that is to be launched.
pub(super) struct Candidate<'a> {
    /// Its record as it will be, still without the launch; borrowed where it is as on disk.
    pub record: Cow<'a, Record>,
    /// What its last launch held and may go on holding, if that ended in this very pass.
    pub held: Option<Lease>,
    /// Since when it has been waiting.
    pub since: Timestamp,
    /// What happened to it in this pass.
    pub events: Vec<Event>,
}

/// What is wished of an instance that has a record.
pub(super) enum Wish<'a> {
    /// To run as this deployment says.
    As(&'a Deployment),
    /// To go on as its record says; where there is a wait, it is not launched again either.
    AsRecorded(Option<Wait>),
    /// To end.
    Gone(StopReason),
}

/// What could not be proven is looked at again this soon.
const UNKNOWN_INTERVAL: Duration = Duration::from_secs(5);

/// Decides for a wanted instance that has no record.
pub(super) fn decide_absent<'a>(
    inputs: Inputs<'_>,
    name: &InstanceName,
    deployment: &Deployment,
) -> Decision<'a> {
    if let Folder::Unavailable { why } = &inputs.desired.folder {
        return waiting(WaitReason::DesiredUnavailable { why: why.clone() }, None).into();
    }
    if !selects_this_node(deployment, inputs.settings) {
        return waiting(WaitReason::OtherNode, None).into();
    }
    if deployment.spec.paused {
        return waiting(WaitReason::Paused, None).into();
    }
    let is_its = |record: &&Quarantined| record.instance().as_ref() == Some(name);
    if let Some(record) = inputs.observed.quarantined.iter().find(is_its) {
        let file = record.file.clone();
        return waiting(WaitReason::Quarantined { file }, None).into();
    }
    if let Err(failure) = engine::support(&deployment.spec, inputs.inventory) {
        return waiting(WaitReason::Refused(failure), None).into();
    }
    Decision::Launch(Candidate {
        record: Cow::Owned(Record {
            version: RECORD_VERSION,
            name: name.clone(),
            node: inputs.settings.node.clone(),
            metadata: deployment.labels.clone(),
            source: deployment.source.clone(),
            spec: deployment.spec.clone(),
            restart_key: deployment.restart_key,
            launch: None,
            history: History::default(),
        }),
        held: None,
        since: waiting_since(inputs, name),
        events: Vec::new(),
    })
}

/// Decides for an instance that has a record.
pub(super) fn decide<'a>(
    inputs: Inputs<'a>,
    instance: &'a Instance,
    wish: Wish<'a>,
) -> Decision<'a> {
    let Some(launch) = &instance.record.launch else {
        let cx = Context { inputs, instance };
        return cx.decide_idle(Cow::Borrowed(&instance.record), None, Vec::new(), wish);
    };
    if let Some(kind) = instance.effect {
        return waiting(WaitReason::Effect(kind), None).into();
    }
    let Some(known) = brought_up_to_date(instance, launch, inputs.now) else {
        return Context { inputs, instance }.decide_launch(launch, wish);
    };
    let mut instance = instance.clone();
    instance.record.launch = Some(known.clone());
    let cx = Context {
        inputs,
        instance: &instance,
    };
    // Only now does the record say that the engine runs: one that is found gone before this never did, for all that is
    // known, and is no failure of the engine's.
    let is_news = known.started_at.is_some() && launch.started_at.is_none();
    let started = is_news.then(|| cx.event(&known, Reason::Started, started_message(&known)));
    match cx.decide_launch(&known, wish) {
        Decision::Step(mut step) => {
            let reason = step.wait.as_ref().map(|wait| &wait.reason);
            // What cannot be proven to run is left as it is until it can be.
            if is_news || !matches!(reason, Some(WaitReason::Unknown { .. })) {
                step.record
                    .get_or_insert_with(|| RecordChange::Write(Box::new(instance.record)));
            }
            step.events.splice(0..0, started);
            step.into()
        }
        Decision::Launch(mut candidate) => {
            candidate.events.splice(0..0, started);
            Decision::Launch(Candidate {
                record: Cow::Owned(candidate.record.into_owned()),
                ..candidate
            })
        }
    }
}

/// The launch as it is known to be, where its record says otherwise.
fn brought_up_to_date(instance: &Instance, launch: &Launch, now: Timestamp) -> Option<Launch> {
    let put_back = put_back(launch, now);
    let is_opened = instance.outcome == Some(Outcome::Released) && launch.started_at.is_none();
    if !is_opened {
        return put_back;
    }
    Some(Launch {
        started_at: Some(now),
        ..put_back.unwrap_or_else(|| launch.clone())
    })
}

/// A launch some of whose times lie ahead, with now in their place: the clock was set back while no controller ran, and
/// who waited for these times would ask, kill and give up late, if ever.
fn put_back(launch: &Launch, now: Timestamp) -> Option<Launch> {
    let Launch {
        id: _,
        handle: _,
        lease: _,
        reserved_at,
        started_at,
        ready_at,
        stop,
    } = launch;
    let asked_at = stop.as_ref().map(|stop| stop.asked_at);
    let killed_at = stop.as_ref().and_then(|stop| stop.killed_at);
    let latest = [
        Some(*reserved_at),
        *started_at,
        *ready_at,
        asked_at,
        killed_at,
    ]
    .into_iter()
    .max()
    .flatten();
    latest.is_some_and(|latest| latest > now).then(|| Launch {
        reserved_at: (*reserved_at).min(now),
        started_at: started_at.map(|at| at.min(now)),
        ready_at: ready_at.map(|at| at.min(now)),
        stop: stop.clone().map(|stop| Stop {
            asked_at: stop.asked_at.min(now),
            killed_at: stop.killed_at.map(|at| at.min(now)),
            ..stop
        }),
        ..launch.clone()
    })
}

#[derive(Clone, Copy)]
struct Context<'a> {
    inputs: Inputs<'a>,
    instance: &'a Instance,
}

impl<'a> Context<'a> {
    fn now(&self) -> Timestamp {
        self.inputs.now
    }

    fn event(&self, launch: &Launch, reason: Reason, message: impl Into<String>) -> Event {
        Event::of_instance(self.now(), &self.instance.record.name, reason, message)
            .launch(launch.id)
    }

    /// The record with another launch.
    fn with_launch(&self, launch: Launch) -> RecordChange {
        RecordChange::Write(Box::new(Record {
            launch: Some(launch),
            ..self.instance.record.clone()
        }))
    }

    /// No effect is under way: what the last one came to, else what runs is looked at.
    fn decide_launch(self, launch: &Launch, wish: Wish<'a>) -> Decision<'a> {
        match &self.instance.outcome {
            Some(Outcome::Prepared(handle)) => self.let_run(launch, handle, &wish).into(),
            Some(Outcome::Failed(failure)) if launch.handle.is_none() => {
                self.ended(launch, Cause::Failed(failure.clone()), wish)
            }
            Some(Outcome::Failed(failure)) if launch.stop.is_none() => self
                .stop(launch, StopReason::LaunchFailed(failure.clone()))
                .into(),
            Some(Outcome::PortTaken { port, stranger }) => {
                let cause = Cause::PortTaken {
                    port: *port,
                    holder: stranger.to_string(),
                };
                self.ended(launch, cause, wish)
            }
            Some(Outcome::Resolved(None)) => self.ended(launch, Cause::NeverStarted, wish),
            Some(Outcome::Resolved(Some(handle))) => self.adopt(launch, handle).into(),
            Some(Outcome::Unresolved { why } | Outcome::Unproven { why }) => {
                self.unknown(why).into()
            }
            Some(Outcome::Failed(_) | Outcome::Released | Outcome::Signalled { .. }) | None => {
                self.decide_launched(launch, wish)
            }
        }
    }

    /// No effect has brought news: what runs is looked at.
    fn decide_launched(self, launch: &Launch, wish: Wish<'a>) -> Decision<'a> {
        if launch.handle.is_none() {
            return Step {
                action: Some(Action::Resolve {
                    launch_id: launch.id,
                }),
                ..Step::default()
            }
            .into();
        }
        match (&self.instance.liveness, &launch.stop) {
            (Liveness::Unknown { why }, _) => self.unknown(why).into(),
            (Liveness::Gone { status, log_tail }, _) => {
                let cause = cause_of_end(launch, *status, log_tail);
                self.ended(launch, cause, wish)
            }
            (Liveness::Alive | Liveness::LeaderGone { .. }, Some(stop)) => {
                self.go_on_stopping(launch, stop).into()
            }
            (Liveness::LeaderGone { .. }, None) => self.stop(launch, StopReason::LeaderGone).into(),
            (Liveness::Alive, None) => self.decide_running(launch, wish).into(),
        }
    }

    /// Alive, and nobody asked it to end.
    fn decide_running(self, launch: &Launch, wish: Wish<'_>) -> Step {
        let record = &self.instance.record;
        let orphans = record.spec.deletion_policy == DeletionPolicy::Orphan;
        match wish {
            Wish::Gone(StopReason::Removed) if orphans && self.has_no_manifest() => Step {
                record: Some(RecordChange::Forget),
                events: vec![self.event(
                    launch,
                    Reason::Forgotten,
                    "its manifest is gone and its deletionPolicy is Orphan: it is left running, and nobody looks after it",
                )],
                ..Step::default()
            },
            Wish::Gone(reason) => self.stop(launch, reason),
            // Where nothing else is to be said, the reason is that its manifest is gone or unreadable.
            Wish::AsRecorded(Some(wait)) => self.check_up(launch, Cow::Borrowed(record)).unless_changed(wait),
            Wish::AsRecorded(None) => self.check_up(launch, Cow::Borrowed(record)),
            Wish::As(deployment) => match self.change(deployment) {
                Some(Ok(reason)) => self.stop(launch, reason),
                // A refused edit leaves the old instance serving.
                Some(Err(failure)) => {
                    let wait = Wait { reason: WaitReason::Refused(failure), until: None };
                    self.check_up(launch, Cow::Borrowed(record)).unless_changed(wait)
                }
                None if deployment.spec.paused => self.check_up_paused(launch, deployment),
                None => self.check_up(launch, refreshed(Cow::Borrowed(record), deployment)),
            },
        }
    }

    /// Not even a manifest that wishes fewer replicas, or another host.
    fn has_no_manifest(&self) -> bool {
        let deployment = &self.instance.record.name.deployment;
        !self.inputs.desired.deployments.contains_key(deployment)
    }

    /// What the manifest's change means for what runs: a reason to stop it, or a refusal. None where nothing changed
    /// that needs a relaunch, or while it is paused.
    fn change(self, deployment: &Deployment) -> Option<Result<StopReason, LaunchFailure>> {
        let record = &self.instance.record;
        if deployment.restart_key == record.restart_key || deployment.spec.paused {
            return None;
        }
        let supported = engine::support(&deployment.spec, self.inputs.inventory);
        Some(supported.map(|()| StopReason::SpecChanged {
            fields: record.spec.changed_fields(&deployment.spec),
        }))
    }

    fn judge(self, launch: &Launch, record: &Record) -> Checkup {
        health::judge(
            &record.spec,
            launch,
            &self.instance.health,
            self.inputs.settings,
            self.now(),
        )
    }

    /// Health, with the record as it should be.
    fn check_up(self, launch: &Launch, record: Cow<'_, Record>) -> Step {
        let checkup = self.judge(launch, &record);
        self.act_on(checkup, launch, record)
    }

    /// Health is still shown while it is paused, and nothing is stopped for it.
    fn check_up_paused(self, launch: &Launch, deployment: &Deployment) -> Step {
        let record = Cow::Borrowed(&self.instance.record);
        // The record says what the launch was made from, so it takes in no change that needs a relaunch.
        let record = if deployment.restart_key == record.restart_key {
            refreshed(record, deployment)
        } else {
            record
        };
        let checkup = self.judge(launch, &record);
        match checkup.verdict {
            Verdict::Stop(_) => Step {
                record: changed(record),
                action: checkup.probe.map(|request| Action::Probe {
                    launch_id: launch.id,
                    request,
                }),
                wait: Some(Wait {
                    reason: WaitReason::Paused,
                    until: checkup.until,
                }),
                ..Step::default()
            },
            Verdict::Starting { .. }
            | Verdict::FirstReady
            | Verdict::Ready
            | Verdict::NotReady { .. } => self.act_on(checkup, launch, record),
        }
    }

    fn act_on(self, checkup: Checkup, launch: &Launch, record: Cow<'_, Record>) -> Step {
        let Checkup {
            verdict,
            probe,
            until,
        } = checkup;
        let action = probe.map(|request| Action::Probe {
            launch_id: launch.id,
            request,
        });
        let waits = |reason| Step {
            wait: Some(Wait { reason, until }),
            ..Step::default()
        };
        match verdict {
            Verdict::Stop(reason) => self.stop(launch, reason),
            Verdict::FirstReady => {
                let started_at = launch.started_at.unwrap_or(launch.reserved_at);
                let took = self.now().duration_since(started_at).unsigned_abs();
                Step {
                    record: Some(RecordChange::Write(Box::new(Record {
                        launch: Some(Launch {
                            ready_at: Some(self.now()),
                            ..launch.clone()
                        }),
                        ..record.into_owned()
                    }))),
                    wait: Some(Wait {
                        reason: WaitReason::Ready,
                        // The next pass knows when it is probed again.
                        until: Some(self.now()),
                    }),
                    events: vec![self.event(
                        launch,
                        Reason::Ready,
                        format!("ready after {:.1} s", took.as_secs_f64()),
                    )],
                    ..Step::default()
                }
            }
            Verdict::Starting {
                deadline,
                last_probe,
            } => Step {
                record: changed(record),
                action,
                ..waits(WaitReason::Starting {
                    deadline,
                    last_probe,
                })
            },
            Verdict::Ready => Step {
                record: changed(record),
                action,
                ..waits(WaitReason::Ready)
            },
            Verdict::NotReady { last_probe } => Step {
                record: changed(record),
                action,
                ..waits(WaitReason::NotReady { last_probe })
            },
        }
    }

    /// The gate is ready: its handle goes into the record before it is opened. If the wish has changed meanwhile, it is
    /// not opened, and what waits at it is stopped like anything else.
    fn let_run(self, launch: &Launch, handle: &Handle, wish: &Wish<'_>) -> Step {
        let prepared = Launch {
            handle: Some(handle.clone()),
            ..launch.clone()
        };
        let changed = || match wish {
            Wish::Gone(reason) => Some(reason.clone()),
            Wish::As(deployment) => self.change(deployment)?.ok(),
            Wish::AsRecorded(_) => None,
        };
        let asked = launch.stop.as_ref().map(|stop| stop.reason.clone());
        let called_off = asked.or_else(changed);
        if let Some(reason) = called_off {
            return self.stop(&prepared, reason);
        }
        Step {
            record: Some(self.with_launch(prepared)),
            action: Some(Action::Release {
                launch_id: launch.id,
            }),
            ..Step::default()
        }
    }

    /// A process of an earlier controller's launch was found by its launch id. It can only be a gate that was not opened.
    fn adopt(self, launch: &Launch, handle: &Handle) -> Step {
        Step {
            record: Some(self.with_launch(Launch {
                handle: Some(handle.clone()),
                ..launch.clone()
            })),
            wait: Some(Wait {
                reason: WaitReason::Unknown {
                    why: "it was found by its launch id, and is looked at next".to_owned(),
                },
                until: Some(self.now()),
            }),
            events: vec![self.event(launch, Reason::Adopted, "found by its launch id")],
            ..Step::default()
        }
    }

    /// It cannot be proven whether it runs: the lease stays, nothing is signalled.
    fn unknown(self, why: &str) -> Step {
        waiting(
            WaitReason::Unknown {
                why: why.to_owned(),
            },
            Some(self.now() + UNKNOWN_INTERVAL),
        )
    }
}

fn waiting_since(inputs: Inputs<'_>, name: &InstanceName) -> Timestamp {
    let known = inputs.observed.waiting_since.get(name);
    known.copied().unwrap_or(inputs.now)
}

/// A record that is not as on disk is to be written.
pub(super) fn changed(record: Cow<'_, Record>) -> Option<RecordChange> {
    match record {
        Cow::Borrowed(_) => None,
        Cow::Owned(record) => Some(RecordChange::Write(Box::new(record))),
    }
}

/// The record of what runs, with everything a manifest may change without a relaunch. `deployment` has its restart key.
fn refreshed<'a>(record: Cow<'a, Record>, deployment: &Deployment) -> Cow<'a, Record> {
    if record.spec.has_same_live_fields(&deployment.spec)
        && record.source == deployment.source
        && record.metadata == deployment.labels
    {
        return record;
    }
    Cow::Owned(taken_over(record, deployment))
}

fn taken_over(record: Cow<'_, Record>, deployment: &Deployment) -> Record {
    // Without `..`: a new field makes the compiler ask whether it is taken over.
    let Deployment {
        name: _,
        labels,
        source,
        spec,
        restart_key,
    } = deployment;
    Record {
        metadata: labels.clone(),
        source: source.clone(),
        spec: spec.clone(),
        restart_key: *restart_key,
        ..record.into_owned()
    }
}

impl Step {
    /// The same, its wait replaced by another one's reason, unless there is something to do.
    fn unless_changed(self, wait: Wait) -> Self {
        if self.is_change() {
            return self;
        }
        let until = self.wait.as_ref().and_then(|wait| wait.until);
        Self {
            wait: Some(Wait {
                until: until.into_iter().chain(wait.until).min(),
                ..wait
            }),
            ..self
        }
    }
}

fn started_message(launch: &Launch) -> String {
    let pid = launch.handle.as_ref().and_then(Handle::pid);
    let pid = pid.map(|pid| format!("pid {pid}"));
    let port = launch.lease.port.map(|port| format!("port {port}"));
    pid.into_iter().chain(port).collect::<Vec<_>>().join(", ")
}

fn waiting(reason: WaitReason, until: Option<Timestamp>) -> Step {
    Step {
        wait: Some(Wait { reason, until }),
        ..Step::default()
    }
}
