//! What a person should know: events, in the words of Kubernetes. Logs are for operators, events for users.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::names::{DeploymentName, InstanceName, LaunchId};

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    /// When.
    pub at: Timestamp,
    /// What kind of thing.
    pub reason: Reason,
    /// The deployment it is about, where one is known.
    pub deployment: Option<DeploymentName>,
    /// The instance it is about.
    pub instance: Option<InstanceName>,
    /// The launch attempt it is about.
    pub launch_id: Option<LaunchId>,
    /// What happened, in a sentence without names that are in other fields.
    pub message: String,
}

impl Event {
    /// An event about an instance.
    pub fn of_instance(
        at: Timestamp,
        instance: &InstanceName,
        reason: Reason,
        message: impl Into<String>,
    ) -> Self {
        Self {
            at,
            reason,
            deployment: Some(instance.deployment.clone()),
            instance: Some(instance.clone()),
            launch_id: None,
            message: message.into(),
        }
    }

    /// An event about a deployment.
    pub fn of_deployment(
        at: Timestamp,
        deployment: &DeploymentName,
        reason: Reason,
        message: impl Into<String>,
    ) -> Self {
        Self {
            at,
            reason,
            deployment: Some(deployment.clone()),
            instance: None,
            launch_id: None,
            message: message.into(),
        }
    }

    /// An event about the host, the folder or the state.
    pub fn general(at: Timestamp, reason: Reason, message: impl Into<String>) -> Self {
        Self {
            at,
            reason,
            deployment: None,
            instance: None,
            launch_id: None,
            message: message.into(),
        }
    }

    /// Of a launch attempt.
    pub fn launch(self, id: LaunchId) -> Self {
        Self {
            launch_id: Some(id),
            ..self
        }
    }

    /// What it is about, for a column.
    pub fn subject(&self) -> String {
        match (&self.instance, &self.deployment) {
            (Some(instance), _) => instance.to_string(),
            (None, Some(deployment)) => deployment.to_string(),
            (None, None) => "-".to_owned(),
        }
    }
}

/// What kind of thing happened. The words are stable: people alert on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[allow(
    missing_docs,
    reason = "the words are the explanation, and behaviour is told where they are used"
)]
pub enum Reason {
    Unsupported,
    AlreadyRunning,
    InsufficientDevices,
    InstallFailed,
    SpawnFailed,
    ExitedEarly,
    StartupTimeout,
    Cancelled,
    Accepted,
    ManifestInvalid,
    DuplicateName,
    Launching,
    Started,
    Ready,
    Unhealthy,
    Stopping,
    Killing,
    Stopped,
    Exited,
    BackOff,
    Adopted,
    OrphanFound,
    RecordQuarantined,
    PortTaken,
    PortTakenByStranger,
    DesiredUnavailable,
    DesiredAvailable,
    StateUnwritable,
    Forgotten,
    Stuck,
}

impl Reason {
    /// Whether a person may have to act.
    pub fn is_warning(self) -> bool {
        match self {
            Self::Accepted
            | Self::Launching
            | Self::Started
            | Self::Ready
            | Self::Stopping
            | Self::Stopped
            | Self::Adopted
            | Self::DesiredAvailable
            | Self::Forgotten
            | Self::Cancelled => false,
            Self::Unsupported
            | Self::AlreadyRunning
            | Self::InsufficientDevices
            | Self::InstallFailed
            | Self::SpawnFailed
            | Self::ExitedEarly
            | Self::StartupTimeout
            | Self::ManifestInvalid
            | Self::DuplicateName
            | Self::Unhealthy
            | Self::Killing
            | Self::Exited
            | Self::BackOff
            | Self::OrphanFound
            | Self::RecordQuarantined
            | Self::PortTaken
            | Self::PortTakenByStranger
            | Self::DesiredUnavailable
            | Self::StateUnwritable
            | Self::Stuck => true,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{self:?}"))
    }
}
