//! Stopping: ask, ask again, kill, kill again, and never call it done before it is proven.

use std::time::Duration;

use super::{Context, waiting};
use crate::event::Reason;
use crate::observed::SignalKind;
use crate::plan::action::{Action, Step, WaitReason};
use crate::record::{Launch, Stop, StopReason};

/// After a kill the kernel needs milliseconds; this long without proof is worth a person's attention, and another kill.
const PROOF_INTERVAL: Duration = Duration::from_secs(10);

impl Context<'_> {
    /// Asks it to end: the intent is written first, so that a controller that dies now resumes here.
    pub(super) fn stop(self, launch: &Launch, reason: StopReason) -> Step {
        let what = match &reason {
            StopReason::Unhealthy { .. } => Reason::Unhealthy,
            StopReason::StartupTimeout { .. } => Reason::StartupTimeout,
            StopReason::SpecChanged { .. }
            | StopReason::Removed
            | StopReason::LeaderGone
            | StopReason::LaunchFailed(_)
            | StopReason::Shutdown => Reason::Stopping,
        };
        Step {
            record: Some(self.with_launch(Launch {
                stop: Some(Stop {
                    asked_at: self.now(),
                    reason: reason.clone(),
                    killed_at: None,
                }),
                ..launch.clone()
            })),
            events: vec![self.event(launch, what, reason.to_string())],
            action: Some(Action::Signal {
                launch_id: launch.id,
                signal: SignalKind::Term,
                reason,
            }),
            ..Step::default()
        }
    }

    /// It was asked to end and has not yet: ask again, kill, kill again.
    pub(super) fn go_on_stopping(self, launch: &Launch, stop: &Stop) -> Step {
        let now = self.now();
        let signal = |signal| {
            Some(Action::Signal {
                launch_id: launch.id,
                signal,
                reason: stop.reason.clone(),
            })
        };
        if let Some(killed_at) = stop.killed_at {
            let last_kill = match self.instance.signalled {
                Some((at, SignalKind::Kill)) => Some(at),
                Some((_, SignalKind::Term)) | None => None,
            };
            return match last_kill {
                Some(at) if now < at + PROOF_INTERVAL => {
                    waiting(WaitReason::Proof { killed_at }, Some(at + PROOF_INTERVAL))
                }
                Some(_) | None => Step {
                    action: signal(SignalKind::Kill),
                    events: last_kill
                        .map(|_| {
                            self.event(
                                launch,
                                Reason::Stuck,
                                WaitReason::Proof { killed_at }.to_string(),
                            )
                        })
                        .into_iter()
                        .collect(),
                    ..Step::default()
                },
            };
        }
        let grace = Duration::from_secs(
            self.instance
                .record
                .spec
                .termination_grace_period_seconds
                .into(),
        );
        let kill_at = stop.asked_at + grace;
        if now >= kill_at {
            return Step {
                record: Some(self.with_launch(Launch {
                    stop: Some(Stop {
                        killed_at: Some(now),
                        ..stop.clone()
                    }),
                    ..launch.clone()
                })),
                action: signal(SignalKind::Kill),
                events: vec![self.event(
                    launch,
                    Reason::Killing,
                    format!("still there {} s after SIGTERM", grace.as_secs()),
                )],
                ..Step::default()
            };
        }
        // Half-way a second SIGTERM: llama.cpp waits for open requests, and ends at the second.
        let half_way = stop.asked_at + grace / 2;
        let waits = |until| {
            let reason = WaitReason::Stopping {
                reason: stop.reason.clone(),
                kill_at,
            };
            waiting(reason, Some(until))
        };
        match self.instance.signalled {
            Some((at, _)) if at >= half_way => waits(kill_at),
            Some(_) if now < half_way => waits(half_way),
            // Half-way, or an earlier controller's stop: SIGTERM is idempotent.
            Some(_) | None => Step {
                action: signal(SignalKind::Term),
                ..Step::default()
            },
        }
    }
}
