//! The record: the durable facts of one instance, one JSON file. It *is* the lease of the instance's devices and port.
//!
//! What can be rebuilt (health, liveness, the state shown to people) is not in it.
//!
//! Invariant: while [`Record::launch`] is there, its lease is held; it goes when the instance is proven gone.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::event::Reason;
use crate::failure::{ExitStatus, LaunchFailure};
use crate::names::{DeviceId, InstanceName, LaunchId, Port};
use crate::spec::{Deployment, InstanceSpec, Labels, RestartKey, Source};

/// The version that this evenkeel writes. Others are quarantined, never deleted.
pub const RECORD_VERSION: u32 = 1;

/// The durable facts of one instance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Record {
    /// The record's format: [`RECORD_VERSION`].
    pub version: u32,
    /// Which instance; deployment and ordinal are in the name.
    pub name: InstanceName,
    /// The host that wrote it.
    pub node: String,
    /// The deployment's labels and annotations.
    pub metadata: Labels,
    /// Where the manifest was read.
    pub source: Source,
    /// The spec as accepted, engine and runtime among its fields; values from files are not in it.
    pub spec: InstanceSpec,
    /// What the launch was made from.
    pub restart_key: RestartKey,
    /// The launch that holds the lease; none while the instance waits for its next try.
    pub launch: Option<Launch>,
    /// What happened before.
    pub history: History,
}

impl Record {
    /// The deployment as this record remembers it: what is in force while its file cannot be read.
    pub fn deployment(&self) -> Deployment {
        Deployment {
            name: self.name.deployment.clone(),
            labels: self.metadata.clone(),
            source: self.source.clone(),
            spec: self.spec.clone(),
            restart_key: self.restart_key,
        }
    }
}

/// One launch attempt and what it holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Launch {
    /// The proof that a process is of this attempt.
    pub id: LaunchId,
    /// How the running thing is found again; none while only reserved.
    pub handle: Option<Handle>,
    /// What it holds.
    pub lease: Lease,
    /// When the lease was taken.
    pub reserved_at: Timestamp,
    /// When the engine was let run; none while it is not known to have been.
    pub started_at: Option<Timestamp>,
    /// When it was first ready.
    pub ready_at: Option<Timestamp>,
    /// That it shall end: an intent, not a status.
    pub stop: Option<Stop>,
}

/// Devices and port.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lease {
    /// The port; none for a command that uses none.
    pub port: Option<Port>,
    /// The devices.
    pub devices: Vec<LeasedDevice>,
}

/// A device, or a share of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LeasedDevice {
    /// Which.
    pub id: DeviceId,
    /// How many bytes of its memory; none: the whole device.
    pub bytes: Option<u64>,
}

/// How a launcher finds the running thing again. Only `launch/` acts on what is inside.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Handle {
    /// A process of this host.
    Process(ProcessHandle),
}

impl Handle {
    /// The process id, for showing.
    pub fn pid(&self) -> Option<u32> {
        match self {
            Self::Process(process) => Some(process.pid),
        }
    }
}

/// A process that leads a session and a group of its own, both numbered like it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ProcessHandle {
    /// Its id: reused by the kernel, so proof only together with the others.
    pub pid: u32,
    /// When it started, in clock ticks since boot (field 22 of `/proc/PID/stat`).
    pub start_ticks: u64,
    /// Which boot (`/proc/sys/kernel/random/boot_id`).
    pub boot_id: String,
}

/// That a launch shall end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Stop {
    /// When it was first asked to.
    pub asked_at: Timestamp,
    /// Why.
    pub reason: StopReason,
    /// When the grace was over and it was killed.
    pub killed_at: Option<Timestamp>,
}

/// Why a launch shall end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum StopReason {
    /// The manifest changed in fields that need a relaunch.
    SpecChanged {
        /// Their paths.
        fields: Vec<String>,
    },
    /// The manifest is gone, or wishes fewer replicas.
    Removed,
    /// It was not ready in time.
    StartupTimeout {
        /// How long it was given.
        waited_seconds: u64,
        /// What the last probe said.
        last_probe: String,
    },
    /// It was ready, and then its liveness probe failed too often.
    Unhealthy {
        /// How often in a row.
        failures: u32,
        /// What the last probe said.
        last_probe: String,
    },
    /// Its leader ended and others of it live on.
    LeaderGone,
    /// The launch failed half-way, and something of it may be left.
    LaunchFailed(LaunchFailure),
    /// Everything is being stopped.
    Shutdown,
}

impl std::fmt::Display for StopReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::SpecChanged { fields } if fields.is_empty() => {
                f.write_str("the manifest changed")
            }
            Self::SpecChanged { fields } => write!(f, "{} changed", fields.join(", ")),
            Self::Removed => f.write_str("no longer wanted"),
            Self::StartupTimeout { waited_seconds, .. } => {
                write!(f, "not ready after {waited_seconds} s")
            }
            Self::Unhealthy {
                failures,
                last_probe,
            } => {
                write!(
                    f,
                    "{failures} failed probes in a row, the last: {last_probe}"
                )
            }
            Self::LeaderGone => f.write_str("its main process ended and others of it live on"),
            Self::LaunchFailed(failure) => failure.fmt(f),
            Self::Shutdown => f.write_str("everything is being stopped"),
        }
    }
}

/// What happened before.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct History {
    /// How often it was launched again since the manifest last changed.
    pub restarts: u32,
    /// How often in a row it ended without having been ready for long.
    pub failures: u32,
    /// How the last launch ended.
    pub last: Option<Ending>,
}

/// How a launch ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Ending {
    /// When that was noticed.
    pub at: Timestamp,
    /// Which launch.
    pub launch_id: LaunchId,
    /// How.
    pub cause: Cause,
}

/// How a launch ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Cause {
    /// Before it was ready.
    Failed(LaunchFailure),
    /// By itself, after it was ready.
    Exited {
        /// How.
        status: ExitStatus,
        /// The end of its log, redacted.
        log_tail: String,
    },
    /// Stopped because its liveness probe failed.
    Unhealthy {
        /// What the last probe said.
        last_probe: String,
        /// The end of its log, redacted.
        log_tail: String,
    },
    /// Stopped as asked.
    Stopped,
    /// The engine never ran: the controller ended in the middle of the launch.
    NeverStarted,
    /// A stranger had the port first.
    PortTaken {
        /// Which port.
        port: Port,
        /// Who holds it, where that can be found.
        holder: String,
    },
}

impl Cause {
    /// Whether the engine is to blame: such endings count for the back-off.
    pub fn is_failure(&self) -> bool {
        match self {
            Self::Failed(_) | Self::Exited { .. } | Self::Unhealthy { .. } => true,
            Self::Stopped | Self::NeverStarted | Self::PortTaken { .. } => false,
        }
    }

    /// The reason of its event.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Failed(failure) => failure.reason(),
            Self::Exited { .. } => Reason::Exited,
            Self::Unhealthy { .. } => Reason::Unhealthy,
            Self::Stopped => Reason::Stopped,
            Self::NeverStarted => Reason::Cancelled,
            Self::PortTaken { .. } => Reason::PortTaken,
        }
    }

    /// How the process ended, where it ran and that is known.
    pub fn status(&self) -> Option<ExitStatus> {
        match self {
            Self::Exited { status, .. }
            | Self::Failed(LaunchFailure::ExitedEarly { status, .. }) => Some(*status),
            Self::Failed(_)
            | Self::Unhealthy { .. }
            | Self::Stopped
            | Self::NeverStarted
            | Self::PortTaken { .. } => None,
        }
    }

    /// The end of the log, where there is one.
    pub fn log_tail(&self) -> Option<&str> {
        match self {
            Self::Failed(failure) => failure.log_tail(),
            Self::Exited { log_tail, .. } | Self::Unhealthy { log_tail, .. } => Some(log_tail),
            Self::Stopped | Self::NeverStarted | Self::PortTaken { .. } => None,
        }
    }
}

impl std::fmt::Display for Cause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Failed(failure) => failure.fmt(f),
            Self::Exited { status, .. } => write!(f, "ended by itself: {status}"),
            Self::Unhealthy { last_probe, .. } => {
                write!(f, "was stopped as unhealthy; the last probe: {last_probe}")
            }
            Self::Stopped => f.write_str("stopped"),
            Self::NeverStarted => {
                f.write_str("never started: the controller ended during the launch")
            }
            Self::PortTaken { port, holder } => write!(f, "port {port} is taken by {holder}"),
        }
    }
}
