//! What a pass decided on: values. Displaying them is the whole output of `evenkeel diff`.

use std::collections::BTreeMap;
use std::fmt;

use jiff::Timestamp;

use crate::event::Event;
use crate::failure::LaunchFailure;
use crate::names::{DeviceId, InstanceName, LaunchId, Port};
use crate::observed::{EffectKind, SignalKind, Stranger};
use crate::order::{LaunchOrder, ProbeRequest};
use crate::record::{Record, StopReason};

/// What a pass decided on.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Plan {
    /// For each instance that has a record or is wanted.
    pub steps: BTreeMap<InstanceName, Step>,
    /// The earliest point in time at which there may be something to do without any wake.
    pub deadline: Option<Timestamp>,
}

/// What is decided for one instance: at most one action, and a reason where nothing is done.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Step {
    /// What becomes of its record, before anything else.
    pub record: Option<RecordChange>,
    /// The effect to start.
    pub action: Option<Action>,
    /// Why nothing more is done, and until when.
    pub wait: Option<Wait>,
    /// What a person should know.
    pub events: Vec<Event>,
}

/// What becomes of a record.
#[derive(Debug, Clone, PartialEq)]
pub enum RecordChange {
    /// It is written.
    Write(Box<Record>),
    /// It is removed, and with it the lease.
    Forget,
}

/// An effect.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Start a launch, up to its gate.
    Prepare(Box<LaunchOrder>),
    /// Open the gate.
    Release {
        /// Of which launch.
        launch_id: LaunchId,
    },
    /// Look for what carries the launch id.
    Resolve {
        /// Of which launch.
        launch_id: LaunchId,
    },
    /// Ask the instance to end, or end it.
    Signal {
        /// Of which launch.
        launch_id: LaunchId,
        /// How.
        signal: SignalKind,
        /// Why.
        reason: StopReason,
    },
    /// Ask it how it is.
    Probe {
        /// Of which launch.
        launch_id: LaunchId,
        /// How.
        request: ProbeRequest,
    },
}

/// Why nothing (more) is done.
#[derive(Debug, Clone, PartialEq)]
pub struct Wait {
    /// Why.
    pub reason: WaitReason,
    /// When to look again without a wake.
    pub until: Option<Timestamp>,
}

/// Why nothing (more) is done.
#[derive(Debug, Clone, PartialEq)]
pub enum WaitReason {
    /// An effect is under way.
    Effect(EffectKind),
    /// The engine is starting.
    Starting {
        /// Until when it must be ready.
        deadline: Timestamp,
        /// What the last probe said.
        last_probe: String,
    },
    /// All is well.
    Ready,
    /// It was ready, and the last probe failed.
    NotReady {
        /// What it said.
        last_probe: String,
    },
    /// It was asked to end.
    Stopping {
        /// Why.
        reason: StopReason,
        /// When it is killed.
        kill_at: Timestamp,
    },
    /// It was killed, and is not proven gone.
    Proof {
        /// Since when.
        killed_at: Timestamp,
    },
    /// The relaunch waits.
    BackOff {
        /// How many failures in a row.
        failures: u32,
    },
    /// Too many others are starting.
    LaunchLimit {
        /// How many may.
        limit: u32,
    },
    /// Not enough devices.
    InsufficientDevices {
        /// How many it needs.
        need: u32,
        /// How many it could have.
        free: u32,
        /// Who holds the others.
        holders: Vec<(DeviceId, String)>,
    },
    /// A record that cannot be read may hold any device.
    Quarantine,
    /// Its own record cannot be read: it may run already.
    Quarantined {
        /// The file in the quarantine folder.
        file: std::path::PathBuf,
    },
    /// Another instance holds the exact port.
    PortHeld {
        /// Which.
        port: Port,
        /// Who.
        holder: String,
    },
    /// A stranger holds the exact port.
    PortTaken {
        /// Which.
        port: Port,
        /// Who.
        stranger: Stranger,
    },
    /// No port is free from the base port upward.
    NoPort {
        /// The first that was tried.
        base: u16,
    },
    /// It cannot run so, here.
    Refused(LaunchFailure),
    /// Its manifest is gone, perhaps for a moment.
    RemovalGrace,
    /// Its manifest is gone, and a git command is running.
    GitLock,
    /// Nothing is known of what is wished.
    DesiredUnavailable {
        /// Why.
        why: String,
    },
    /// The manifest says so.
    Paused,
    /// The labels of its `nodeSelector` are not this host's.
    OtherNode,
    /// It ended, and its restart policy leaves it so.
    Completed,
    /// It cannot be proven whether it runs.
    Unknown {
        /// Why.
        why: String,
    },
}

impl WaitReason {
    /// The word for a column and for events; those that Kubernetes has are its own.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Effect(_) => "InProgress",
            Self::Starting { .. } => "Starting",
            Self::Ready => "",
            Self::NotReady { .. } => "ProbeFailed",
            Self::Stopping { .. } => "Terminating",
            Self::Proof { .. } => "Stuck",
            Self::BackOff { .. } => "CrashLoopBackOff",
            Self::LaunchLimit { .. } => "LaunchLimit",
            Self::InsufficientDevices { .. } => "InsufficientDevices",
            Self::Quarantine | Self::Quarantined { .. } => "RecordQuarantined",
            Self::PortHeld { .. } => "PortHeld",
            Self::PortTaken { .. } => "PortTakenByStranger",
            Self::NoPort { .. } => "NoPort",
            Self::Refused(_) => "Unsupported",
            Self::RemovalGrace => "RemovalGrace",
            Self::GitLock => "GitLock",
            Self::DesiredUnavailable { .. } => "DesiredUnavailable",
            Self::Paused => "Paused",
            Self::OtherNode => "OtherNode",
            Self::Completed => "Completed",
            Self::Unknown { .. } => "Unknown",
        }
    }
}

impl fmt::Display for WaitReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Effect(EffectKind::Prepare) => f.write_str("the launch is being prepared"),
            Self::Effect(EffectKind::Release) => f.write_str("the engine is being started"),
            Self::Effect(EffectKind::Resolve) => f.write_str("looking for a process of an earlier launch"),
            Self::Effect(EffectKind::Signal) => f.write_str("being signalled"),
            Self::Starting { last_probe, .. } if last_probe.is_empty() => f.write_str("not probed yet"),
            Self::Starting { last_probe, .. } => write!(f, "the last probe: {last_probe}"),
            Self::Ready => f.write_str("ready"),
            Self::NotReady { last_probe } => write!(f, "the last probe failed: {last_probe}"),
            Self::Stopping { reason, .. } => reason.fmt(f),
            Self::Proof { .. } => f.write_str("killed, and not proven gone: its devices and port stay held"),
            Self::BackOff { failures } => write!(f, "{failures} failures in a row"),
            Self::LaunchLimit { limit } => write!(f, "waits for its turn: {limit} may start at a time (--max-launches)"),
            Self::InsufficientDevices { need, free, holders } => {
                write!(f, "needs {need}, {free} free")?;
                if !holders.is_empty() {
                    let list: Vec<_> = holders.iter().map(|(device, who)| format!("{device} by {who}")).collect();
                    write!(f, " (held: {})", list.join(", "))?;
                }
                Ok(())
            }
            Self::Quarantine => f.write_str(
                "a record in the quarantine folder cannot be read and may hold any device: see `evenkeel events`",
            ),
            Self::Quarantined { file } => write!(
                f,
                "its record cannot be read, so it may run already; make sure that it does not, then delete {}",
                file.display()
            ),
            Self::PortHeld { port, holder } => write!(f, "port {port} is held by {holder}"),
            Self::PortTaken { port, stranger } => write!(f, "port {port} is taken by {stranger}"),
            Self::NoPort { base } => write!(f, "no port is free from {base} upward"),
            Self::Refused(failure) => failure.fmt(f),
            Self::RemovalGrace => f.write_str("its manifest is gone; stopping unless it comes back"),
            Self::GitLock => f.write_str("its manifest is gone; waiting for git to finish (.git/index.lock)"),
            Self::DesiredUnavailable { why } => write!(f, "the folder cannot be read: {why}"),
            Self::Paused => f.write_str("`spec.paused` is set"),
            Self::OtherNode => f.write_str("its nodeSelector does not match this host"),
            Self::Completed => f.write_str("ended, and its restartPolicy leaves it so"),
            Self::Unknown { why } => write!(f, "it cannot be proven whether it runs: {why}"),
        }
    }
}

impl Wait {
    /// Why and until when, without the word.
    pub fn sentence(&self) -> String {
        let reason = &self.reason;
        match (reason, self.until) {
            (WaitReason::BackOff { .. }, Some(until)) => {
                format!("{reason}, next try at {}", whole_seconds(until))
            }
            (WaitReason::Starting { deadline, .. }, _) => {
                format!("{reason}, until {}", whole_seconds(*deadline))
            }
            (WaitReason::Stopping { kill_at, .. }, _) => {
                format!("{reason}, killed at {}", whole_seconds(*kill_at))
            }
            _ => reason.to_string(),
        }
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reason.word() {
            "" => f.write_str(&self.sentence()),
            word => write!(f, "{word}: {}", self.sentence()),
        }
    }
}

/// A point in time as people read it.
pub fn whole_seconds(at: Timestamp) -> Timestamp {
    Timestamp::from_second(at.as_second()).unwrap_or(at)
}

impl Plan {
    /// Whether anything but waiting is planned for what the manifests wish. Probes are no change.
    pub fn is_change(&self) -> bool {
        self.steps.values().any(Step::is_change)
    }
}

impl Step {
    /// Whether anything but waiting and probing is planned.
    pub fn is_change(&self) -> bool {
        match &self.action {
            Some(Action::Probe { .. }) | None => self.record.is_some(),
            Some(
                Action::Prepare(_)
                | Action::Release { .. }
                | Action::Resolve { .. }
                | Action::Signal { .. },
            ) => true,
        }
    }
}

/// One line per instance: a sign, the instance, the verb, and why.
impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self
            .steps
            .keys()
            .map(|name| name.to_string().len())
            .max()
            .unwrap_or(0);
        for (name, step) in &self.steps {
            writeln!(f, "{}", Line { name, step, width })?;
        }
        Ok(())
    }
}

struct Line<'a> {
    name: &'a InstanceName,
    step: &'a Step,
    width: usize,
}

impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, step, width } = self;
        let written = match &step.record {
            Some(RecordChange::Write(record)) => Some(record),
            Some(RecordChange::Forget) | None => None,
        };
        let mut line = |sign: char, verb: &str, text: &dyn fmt::Display| {
            write!(f, "{sign} {name:width$}  {verb:<8} {text}")
        };
        match (&step.action, &step.record, &step.wait) {
            (Some(Action::Prepare(order)), _, _) => {
                let mut text = order
                    .port
                    .map(|port| format!("port {port}"))
                    .unwrap_or_default();
                let launch = written.and_then(|record| record.launch.as_ref());
                let devices: Vec<_> = launch
                    .iter()
                    .flat_map(|launch| &launch.lease.devices)
                    .map(|device| device.id.as_str())
                    .collect();
                if !devices.is_empty() {
                    text.push_str(if text.is_empty() {
                        "devices "
                    } else {
                        ", devices "
                    });
                    text.push_str(&devices.join(" "));
                }
                line('+', "launch", &text)
            }
            (Some(Action::Release { .. }), _, _) => line('+', "release", &"the gate"),
            (Some(Action::Resolve { .. }), _, _) => line('?', "resolve", &"an earlier launch"),
            (
                Some(Action::Signal {
                    signal: SignalKind::Kill,
                    reason,
                    ..
                }),
                _,
                _,
            ) => line('-', "kill", reason),
            (
                Some(Action::Signal {
                    signal: SignalKind::Term,
                    reason: reason @ StopReason::SpecChanged { .. },
                    ..
                }),
                _,
                _,
            ) => line('~', "restart", reason),
            (
                Some(Action::Signal {
                    signal: SignalKind::Term,
                    reason,
                    ..
                }),
                _,
                _,
            ) => line('-', "stop", reason),
            (_, Some(RecordChange::Forget), _) => line('-', "forget", &"nothing of it is left"),
            (_, Some(RecordChange::Write(_)), Some(wait)) => line('~', "update", wait),
            (_, Some(RecordChange::Write(_)), None) => line('~', "update", &""),
            (_, None, Some(wait)) => line(' ', "wait", wait),
            (Some(Action::Probe { .. }), None, None) => line(' ', "probe", &""),
            (None, None, None) => line(' ', "rest", &""),
        }
    }
}
