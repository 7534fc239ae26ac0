//! What is known of each instance, of strangers, and of the devices: values rebuilt for each pass.
//!
//! Invariant: *unknown* is a value of its own. It is never folded into *gone* or *alive*.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::failure::{ExitStatus, LaunchFailure};
use crate::names::{DeviceId, InstanceName, LaunchId, Port};
use crate::record::{Handle, Lease, Record};

/// Everything that is known.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Observed {
    /// The instances that have a record.
    pub instances: BTreeMap<InstanceName, Instance>,
    /// Records that could not be decoded: what they hold stays held.
    pub quarantined: Vec<Quarantined>,
    /// Ports that somebody else was seen to hold.
    pub strangers: BTreeMap<Port, Stranger>,
    /// Since when wanted instances without a launch have been waiting.
    pub waiting_since: BTreeMap<InstanceName, Timestamp>,
}

/// What is known of one instance.
#[derive(Debug, Clone, PartialEq)]
pub struct Instance {
    /// Its record, as on disk.
    pub record: Record,
    /// Whether it runs. Meaningless while the record holds no launch.
    pub liveness: Liveness,
    /// The lifecycle effect that is under way.
    pub effect: Option<EffectKind>,
    /// What the last effect came to, while the record does not know it yet.
    pub outcome: Option<Outcome>,
    /// When this controller last signalled the launch, and how.
    pub signalled: Option<(Timestamp, SignalKind)>,
    /// What the probes said.
    pub health: Health,
}

impl Instance {
    /// What is known when nothing but the record is.
    pub fn of_record(record: Record) -> Self {
        Self {
            record,
            liveness: Liveness::Unknown {
                why: "not looked at yet".to_owned(),
            },
            effect: None,
            outcome: None,
            signalled: None,
            health: Health::default(),
        }
    }

    /// The launch id the record holds.
    pub fn launch_id(&self) -> Option<LaunchId> {
        self.record.launch.as_ref().map(|launch| launch.id)
    }
}

/// Whether what a handle names runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Liveness {
    /// The leader is alive and proven ours.
    Alive,
    /// The leader is gone, and others of the instance live on.
    LeaderGone {
        /// How many.
        members: usize,
        /// How the leader ended.
        status: ExitStatus,
    },
    /// Nothing of it is left.
    Gone {
        /// How the leader ended.
        status: ExitStatus,
        /// The end of its log, redacted.
        log_tail: String,
    },
    /// It cannot be proven either way.
    Unknown {
        /// Why.
        why: String,
    },
}

/// A lifecycle effect: at most one per instance is under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EffectKind {
    /// The gate is being started.
    Prepare,
    /// The gate is being opened.
    Release,
    /// The launch id is being looked for.
    Resolve,
    /// A signal is being sent.
    Signal,
}

/// How a process is asked to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum SignalKind {
    /// SIGTERM.
    Term,
    /// SIGKILL.
    Kill,
}

/// What a lifecycle effect came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The gate is ready: this is who will become the engine.
    Prepared(Handle),
    /// The engine was exec'ed.
    Released,
    /// The launch failed. Whatever was started has been left to end by itself, under the handle in the record.
    Failed(LaunchFailure),
    /// A stranger holds the port; nothing was started.
    PortTaken {
        /// Which port.
        port: Port,
        /// Who.
        stranger: Stranger,
    },
    /// What carries the launch id; nothing does: the engine never ran.
    Resolved(Option<Handle>),
    /// It cannot be told what carries the launch id.
    Unresolved {
        /// Why.
        why: String,
    },
    /// Signals were sent to as many members.
    Signalled {
        /// Which.
        signal: SignalKind,
        /// To how many.
        members: usize,
    },
    /// Nothing was signalled, because it could not be proven ours.
    Unproven {
        /// Why.
        why: String,
    },
}

/// What the probes of one launch said. Kept in memory: after a restart of the controller it begins anew.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Health {
    /// Since when this controller has been counting; none before the first probe.
    pub since: Option<Timestamp>,
    /// The startup probe, until it succeeds.
    pub startup: ProbeCount,
    /// The readiness probe.
    pub readiness: ProbeCount,
    /// The liveness probe.
    pub liveness: ProbeCount,
    /// Whether a probe is under way.
    pub in_flight: bool,
}

/// Successes and failures in a row: one of the two is 0.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ProbeCount {
    /// Successes since the last failure.
    pub successes: u32,
    /// Failures since the last success.
    pub failures: u32,
    /// When the last probe ended, and what it said.
    pub last: Option<(Timestamp, ProbeResult)>,
}

impl ProbeCount {
    /// Counts one more result.
    pub fn count(&mut self, at: Timestamp, result: ProbeResult) {
        match result {
            ProbeResult::Success => {
                self.successes = self.successes.saturating_add(1);
                self.failures = 0;
            }
            ProbeResult::Loading { .. }
            | ProbeResult::Failure { .. }
            | ProbeResult::Stranger { .. } => {
                self.successes = 0;
                self.failures = self.failures.saturating_add(1);
            }
        }
        self.last = Some((at, result));
    }

    /// What the last probe said, in words; empty when there was none.
    pub fn last_text(&self) -> String {
        self.last
            .as_ref()
            .map(|(_, result)| result.to_string())
            .unwrap_or_default()
    }
}

/// What one probe said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProbeResult {
    /// Healthy, and the answer came from the instance itself.
    Success,
    /// It says that it is still loading (503), or refuses connections.
    Loading {
        /// In its own words.
        detail: String,
    },
    /// Anything else.
    Failure {
        /// What happened.
        detail: String,
    },
    /// Somebody else listens on the port.
    Stranger {
        /// Who.
        stranger: Stranger,
    },
}

impl std::fmt::Display for ProbeResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Success => f.write_str("success"),
            Self::Loading { detail } | Self::Failure { detail } => f.write_str(detail),
            Self::Stranger { stranger } => write!(f, "the port belongs to {stranger}"),
        }
    }
}

/// A process that is none of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stranger {
    /// Its pid, where it can be found.
    pub pid: Option<u32>,
    /// Its command name, where it can be read.
    pub command: Option<String>,
    /// When it was seen.
    pub seen_at: Timestamp,
}

impl std::fmt::Display for Stranger {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.pid, &self.command) {
            (Some(pid), Some(command)) => write!(f, "{command} (pid {pid})"),
            (Some(pid), None) => write!(f, "pid {pid}"),
            (None, _) => f.write_str("a process that cannot be found"),
        }
    }
}

/// A record that could not be decoded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Quarantined {
    /// The file in the quarantine folder.
    pub file: std::path::PathBuf,
    /// What could be made out of it.
    pub holds: Holds,
}

impl Quarantined {
    /// The instance whose record it was: the file's name tells, and a number that was added to it does not matter.
    pub fn instance(&self) -> Option<InstanceName> {
        let name = self.file.file_name()?.to_str()?;
        name.split_once(".json")?.0.parse().ok()
    }
}

/// What an undecodable record holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holds {
    /// This much could be read.
    Lease {
        /// Whose.
        launch_id: LaunchId,
        /// What.
        lease: Lease,
    },
    /// Nothing, so every device may be held.
    Unknown,
}

/// The devices of this host.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Inventory {
    /// In the order of their PCI addresses.
    pub devices: Vec<Device>,
}

impl Inventory {
    /// The index of a device among those of its kind: what its driver's environment variable wants.
    pub fn index(&self, id: &DeviceId) -> Option<(DeviceKind, usize)> {
        let device = self.devices.iter().find(|device| device.id == *id)?;
        let same_kind = self
            .devices
            .iter()
            .filter(|other| other.kind == device.kind);
        let index = same_kind.into_iter().position(|other| other.id == *id)?;
        Some((device.kind, index))
    }

    /// Whether the host has a device of this kind.
    pub fn has(&self, kind: DeviceKind) -> bool {
        self.devices.iter().any(|device| device.kind == kind)
    }
}

/// One device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    /// Its identity: UUID, else PCI bus id.
    pub id: DeviceId,
    /// Whose driver.
    pub kind: DeviceKind,
    /// What it is called.
    #[serde(default)]
    pub name: String,
    /// Its memory; none where it shares the host's or does not tell.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// Whether it shares the host's memory: leases on such devices stack.
    #[serde(default)]
    pub unified: bool,
}

/// Whose driver a device needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// NVIDIA.
    Cuda,
    /// AMD.
    Rocm,
    /// Intel.
    Xpu,
    /// Apple.
    Metal,
}

impl std::fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Self::Cuda => "cuda",
            Self::Rocm => "rocm",
            Self::Xpu => "xpu",
            Self::Metal => "metal",
        })
    }
}
