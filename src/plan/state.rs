//! The state that people are shown: derived, never stored.

use std::fmt;

use super::action::{Action, Step, WaitReason};
use crate::observed::{Instance, Liveness};

/// The state that people are shown, worst last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum State {
    /// No instance is wanted.
    Stopped,
    /// It answers.
    Ready,
    /// It was asked to end.
    Stopping,
    /// It runs, and is not ready yet.
    Starting,
    /// It holds its lease, and nothing runs yet.
    Reserving,
    /// It is wanted, and has not been launched.
    Pending,
    /// It ended.
    Exited,
    /// It was ready, and does not answer.
    Unhealthy,
    /// It cannot be proven whether it runs.
    Unknown,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Stopped => "stopped",
            Self::Ready => "ready",
            Self::Stopping => "stopping",
            Self::Starting => "starting",
            Self::Reserving => "reserving",
            Self::Pending => "pending",
            Self::Exited => "exited",
            Self::Unhealthy => "unhealthy",
            Self::Unknown => "unknown",
        })
    }
}

/// The state of an instance, from what is known of it and what is decided for it.
pub fn state(instance: Option<&Instance>, step: &Step) -> State {
    let Some(instance) = instance else {
        return State::Pending;
    };
    let Some(launch) = &instance.record.launch else {
        return if instance.record.history.failures > 0 {
            State::Exited
        } else {
            State::Pending
        };
    };
    match (&launch.handle, &instance.liveness) {
        (None, _) => State::Reserving,
        (Some(_), Liveness::Unknown { .. }) => State::Unknown,
        (Some(_), Liveness::Gone { .. }) => State::Exited,
        (Some(_), Liveness::LeaderGone { .. }) => State::Stopping,
        (Some(_), Liveness::Alive) => {
            let is_failing =
                instance.health.readiness.failures > 0 || instance.health.liveness.failures > 0;
            match (&step.action, step.wait.as_ref().map(|wait| &wait.reason)) {
                _ if launch.stop.is_some() => State::Stopping,
                (Some(Action::Signal { .. }), _) => State::Stopping,
                (_, Some(WaitReason::NotReady { .. })) => State::Unhealthy,
                (_, Some(WaitReason::Unknown { .. })) => State::Unknown,
                (_, Some(WaitReason::Starting { .. })) => State::Starting,
                (_, Some(WaitReason::Ready)) => State::Ready,
                // What is decided says nothing of its health: an edit that waits, a manifest that is gone for a moment.
                (_, _) if launch.ready_at.is_some() && is_failing => State::Unhealthy,
                (_, _) if launch.ready_at.is_some() => State::Ready,
                (_, _) => State::Starting,
            }
        }
    }
}
