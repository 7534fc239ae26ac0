//! Why a launch failed: one enum, from which its message, its event reason and its HTTP status all come.

use serde::{Deserialize, Serialize};

use crate::event::Reason;
use crate::manifest::EngineKind;
use crate::names::{DeviceId, InstanceName};

/// Why a launch failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(
    rename_all = "camelCase",
    rename_all_fields = "camelCase",
    tag = "kind"
)]
pub enum LaunchFailure {
    /// The engine cannot run so, here.
    #[error("{engine} cannot run here: {reason}; {instead}")]
    Unsupported {
        /// Which engine.
        engine: EngineKind,
        /// Why.
        reason: String,
        /// What would work.
        instead: String,
    },
    /// There is one already.
    #[error("{name} is running already")]
    AlreadyRunning {
        /// Which.
        name: InstanceName,
    },
    /// Not enough devices.
    #[error("needs {need} devices, {free} free{}", holders_text(.holders))]
    NoCapacity {
        /// How many it asks for.
        need: u32,
        /// How many it could have.
        free: u32,
        /// Who holds the others.
        holders: Vec<(DeviceId, String)>,
    },
    /// The engine could not be made ready to run (an image that cannot be pulled).
    #[error("{engine} could not be installed: {detail}")]
    InstallFailed {
        /// Which engine.
        engine: EngineKind,
        /// What happened.
        detail: String,
    },
    /// The process could not be started.
    #[error("could not start: {detail}")]
    SpawnFailed {
        /// What happened, with the path.
        detail: String,
    },
    /// It ended before it was ready.
    #[error("ended before it was ready: {status}")]
    ExitedEarly {
        /// How it ended.
        status: ExitStatus,
        /// The end of its log, redacted.
        log_tail: String,
    },
    /// It was not ready in time.
    #[error("was not ready after {waited_seconds} s{}", last_probe_text(.last_probe))]
    UnhealthyTimeout {
        /// How long it was given.
        waited_seconds: u64,
        /// What the last probe said.
        last_probe: String,
        /// The end of its log, redacted.
        log_tail: String,
    },
    /// The launch was called off.
    #[error("the launch was cancelled")]
    Cancelled,
}

fn holders_text(holders: &[(DeviceId, String)]) -> String {
    if holders.is_empty() {
        return String::new();
    }
    let list: Vec<_> = holders
        .iter()
        .map(|(device, who)| format!("{device} by {who}"))
        .collect();
    format!(" (held: {})", list.join(", "))
}

fn last_probe_text(last_probe: &str) -> String {
    if last_probe.is_empty() {
        String::new()
    } else {
        format!("; the last probe: {last_probe}")
    }
}

impl LaunchFailure {
    /// The reason of its event.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Unsupported { .. } => Reason::Unsupported,
            Self::AlreadyRunning { .. } => Reason::AlreadyRunning,
            Self::NoCapacity { .. } => Reason::InsufficientDevices,
            Self::InstallFailed { .. } => Reason::InstallFailed,
            Self::SpawnFailed { .. } => Reason::SpawnFailed,
            Self::ExitedEarly { .. } => Reason::ExitedEarly,
            Self::UnhealthyTimeout { .. } => Reason::StartupTimeout,
            Self::Cancelled => Reason::Cancelled,
        }
    }

    /// The status of an HTTP answer that reports it.
    pub fn http_status(&self) -> u16 {
        match self {
            Self::Unsupported { .. } => 422,
            Self::AlreadyRunning { .. } | Self::NoCapacity { .. } => 409,
            Self::InstallFailed { .. }
            | Self::SpawnFailed { .. }
            | Self::ExitedEarly { .. }
            | Self::UnhealthyTimeout { .. } => 503,
            Self::Cancelled => 400,
        }
    }

    /// The end of the log, where there is one.
    pub fn log_tail(&self) -> Option<&str> {
        match self {
            Self::ExitedEarly { log_tail, .. } | Self::UnhealthyTimeout { log_tail, .. } => {
                Some(log_tail)
            }
            Self::Unsupported { .. }
            | Self::AlreadyRunning { .. }
            | Self::NoCapacity { .. }
            | Self::InstallFailed { .. }
            | Self::SpawnFailed { .. }
            | Self::Cancelled => None,
        }
    }
}

/// How a process ended, as far as the kernel told.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ExitStatus {
    /// Its exit code.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Whether the kernel killed it for memory; `None` where that cannot be known.
    pub oom: Option<bool>,
}

impl ExitStatus {
    /// Nothing is known.
    pub const UNKNOWN: Self = Self {
        code: None,
        signal: None,
        oom: None,
    };
}

impl std::fmt::Display for ExitStatus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.code, self.signal) {
            (Some(code), _) => write!(f, "exit code {code}")?,
            (None, Some(signal)) => write!(f, "signal {signal}")?,
            (None, None) => f.write_str("exit status unknown")?,
        }
        if self.oom == Some(true) {
            f.write_str(", out of memory")?;
        }
        Ok(())
    }
}

/// The texts of the error's sources, without those that an earlier text says already: errors of other crates like to
/// repeat their source.
pub fn causes(error: &dyn std::error::Error) -> Vec<String> {
    let mut said = error.to_string();
    let mut causes = Vec::new();
    let mut source = error.source();
    while let Some(error) = source {
        let text = error.to_string();
        if !said.contains(&text) {
            said = format!("{said}\n{text}");
            causes.push(text);
        }
        source = error.source();
    }
    causes
}
