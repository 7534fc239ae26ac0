//! What ended: it becomes history, and then it is launched, waits, or is forgotten.

use std::borrow::Cow;
use std::time::Duration;

use super::{Candidate, Context, Decision, Wish, changed, taken_over, waiting_since};
use crate::engine;
use crate::event::Event;
use crate::failure::{ExitStatus, LaunchFailure};
use crate::manifest::RestartPolicy;
use crate::plan::action::{RecordChange, Step, Wait, WaitReason};
use crate::plan::backoff;
use crate::record::{Cause, Ending, History, Launch, Record, StopReason};
use crate::spec::Deployment;

impl<'a> Context<'a> {
    /// Nothing of the launch is left: it becomes history, its lease is free.
    pub(super) fn ended(self, launch: &Launch, cause: Cause, wish: Wish<'a>) -> Decision<'a> {
        let record = &self.instance.record;
        let event = self.event(launch, cause.reason(), cause.to_string());
        let failures = match (cause.is_failure(), launch.ready_at) {
            (false, _) => record.history.failures,
            (true, Some(ready_at))
                if self.now()
                    >= ready_at + Duration::from_secs(record.spec.backoff.reset_seconds.into()) =>
            {
                1
            }
            (true, _) => record.history.failures.saturating_add(1),
        };
        let ended = Record {
            launch: None,
            history: History {
                restarts: record.history.restarts,
                failures,
                last: Some(Ending {
                    at: self.now(),
                    launch_id: launch.id,
                    cause,
                }),
            },
            ..record.clone()
        };
        self.decide_idle(Cow::Owned(ended), Some(launch), vec![event], wish)
    }

    /// Nothing runs: launch, wait or forget. `ended` is the launch that ended in this pass.
    pub(super) fn decide_idle(
        self,
        record: Cow<'a, Record>,
        ended: Option<&Launch>,
        events: Vec<Event>,
        wish: Wish<'_>,
    ) -> Decision<'a> {
        let now = self.now();
        let mut held = ended.map(|launch| launch.lease.clone());
        let record = match wish {
            Wish::Gone(_) => {
                return Step {
                    record: Some(RecordChange::Forget),
                    events,
                    ..Step::default()
                }
                .into();
            }
            Wish::AsRecorded(Some(wait)) => return rest(record, events, wait).into(),
            Wish::AsRecorded(None) => record,
            Wish::As(deployment) => {
                // What changed in the manifest decides whether what was held may be kept.
                if let Some(held) = &mut held {
                    held.port = held
                        .port
                        .filter(|_| deployment.spec.port == record.spec.port);
                    if deployment.spec.devices != record.spec.devices {
                        held.devices.clear();
                    }
                }
                renewed(record, deployment)
            }
        };
        let spec = &record.spec;
        let wait = |reason, until| Wait { reason, until };
        if spec.paused {
            return rest(record, events, wait(WaitReason::Paused, None)).into();
        }
        if is_completed(&record.history, spec.restart_policy) {
            return rest(record, events, wait(WaitReason::Completed, None)).into();
        }
        if let Err(failure) = engine::support(spec, self.inputs.inventory) {
            return rest(record, events, wait(WaitReason::Refused(failure), None)).into();
        }
        let not_before = backoff::not_before(&record.history, &spec.backoff, now);
        if now < not_before {
            let failures = record.history.failures;
            let wait = wait(WaitReason::BackOff { failures }, Some(not_before));
            return rest(record, events, wait).into();
        }
        Decision::Launch(Candidate {
            since: waiting_since(self.inputs, &record.name),
            record,
            held,
            events,
        })
    }
}

/// Nothing runs and nothing is launched now.
fn rest(record: Cow<'_, Record>, events: Vec<Event>, wait: Wait) -> Step {
    Step {
        record: changed(record),
        action: None,
        wait: Some(wait),
        events,
    }
}

/// The record of an instance that does not run, as the manifest wishes it: a changed manifest begins a new history.
fn renewed<'a>(record: Cow<'a, Record>, deployment: &Deployment) -> Cow<'a, Record> {
    if record.restart_key != deployment.restart_key {
        return Cow::Owned(Record {
            history: History {
                restarts: 0,
                failures: 0,
                // How it ended stays to be seen; it counts for nothing any more.
                last: record.history.last.clone(),
            },
            ..taken_over(record, deployment)
        });
    }
    if record.spec == deployment.spec
        && record.source == deployment.source
        && record.metadata == deployment.labels
    {
        return record;
    }
    Cow::Owned(taken_over(record, deployment))
}

pub(super) fn cause_of_end(launch: &Launch, status: ExitStatus, log_tail: &str) -> Cause {
    let log_tail = log_tail.to_owned();
    match launch.stop.as_ref().map(|stop| &stop.reason) {
        Some(StopReason::StartupTimeout {
            waited_seconds,
            last_probe,
        }) => Cause::Failed(LaunchFailure::UnhealthyTimeout {
            waited_seconds: *waited_seconds,
            last_probe: last_probe.clone(),
            log_tail,
        }),
        Some(StopReason::Unhealthy { last_probe, .. }) => Cause::Unhealthy {
            last_probe: last_probe.clone(),
            log_tail,
        },
        Some(StopReason::LaunchFailed(failure)) => Cause::Failed(failure.clone()),
        Some(StopReason::SpecChanged { .. } | StopReason::Removed | StopReason::Shutdown) => {
            Cause::Stopped
        }
        Some(StopReason::LeaderGone) | None if launch.ready_at.is_some() => {
            Cause::Exited { status, log_tail }
        }
        Some(StopReason::LeaderGone) | None if launch.started_at.is_none() => Cause::NeverStarted,
        Some(StopReason::LeaderGone) | None => {
            Cause::Failed(LaunchFailure::ExitedEarly { status, log_tail })
        }
    }
}

/// Whether an instance that ended by itself stays so.
fn is_completed(history: &History, policy: RestartPolicy) -> bool {
    let Some(last) = &history.last else {
        return false;
    };
    let succeeded = last
        .cause
        .status()
        .is_some_and(|status| status.code == Some(0));
    history.failures > 0
        && last.cause.is_failure()
        && match policy {
            RestartPolicy::Always => false,
            RestartPolicy::OnFailure => succeeded,
            RestartPolicy::Never => true,
        }
}
