//! What an instance shall be: validated, with the manifest's own defaults filled in.
//!
//! Defaults that belong to an engine (port, binary, health path, deadline) are not filled in here: they may
//! improve from version to version, and what is written here is hashed into the [`RestartKey`].
//!
//! Invariant: a new version of evenkeel computes the same [`RestartKey`] for the same manifest.

mod accept;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::manifest::{
    DeletionPolicy, Docker, EngineKind, Manifest, ManifestProbe, Options, RestartPolicy, Runtime,
    Strategy,
};
use crate::names::{DeploymentName, InstanceName, Port};

/// The annotation whose change restarts the instances.
pub const RESTARTED_AT: &str = "evenkeel.dev/restartedAt";

/// What a manifest wishes, accepted.
#[derive(Debug, Clone, PartialEq)]
pub struct Deployment {
    /// Its identity.
    pub name: DeploymentName,
    /// Its labels and annotations.
    pub labels: Labels,
    /// Where it was read.
    pub source: Source,
    /// What its instances shall be.
    pub spec: InstanceSpec,
    /// The hash of what forces a relaunch.
    pub restart_key: RestartKey,
}

impl Deployment {
    /// The instances it wishes.
    pub fn instances(&self) -> impl Iterator<Item = InstanceName> + '_ {
        (0..self.spec.replicas).map(|ordinal| self.name.instance(ordinal))
    }

    /// Validates a manifest.
    ///
    /// # Errors
    /// Everything that is wrong with it, not just the first.
    pub fn from_manifest(manifest: Manifest, source: Source) -> Result<Self, Vec<SpecProblem>> {
        let labels = Labels {
            labels: manifest.metadata.labels,
            annotations: manifest.metadata.annotations,
        };
        let spec = InstanceSpec::from_manifest(&manifest.metadata.name, manifest.spec)?;
        let restart_key = RestartKey::of(&spec, labels.restarted_at());
        Ok(Self {
            name: manifest.metadata.name,
            labels,
            source,
            spec,
            restart_key,
        })
    }
}

/// Labels and annotations, as in Kubernetes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Labels {
    /// For selecting.
    pub labels: BTreeMap<String, String>,
    /// Free text.
    pub annotations: BTreeMap<String, String>,
}

impl Labels {
    /// The value whose change restarts the instances.
    pub fn restarted_at(&self) -> Option<&str> {
        self.annotations.get(RESTARTED_AT).map(String::as_str)
    }
}

/// Where a deployment was read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Source {
    /// The file, relative to the watched folder.
    pub file: PathBuf,
    /// Which document of the file, from 0.
    pub document: usize,
    /// The commit it was read from, where the folder lies in a work tree.
    pub revision: Option<String>,
}

/// Something wrong with a field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecProblem {
    /// The field's path, such as `spec.env[0].name`.
    pub path: String,
    /// What is wrong.
    pub message: String,
    /// What would be right.
    pub hint: Option<String>,
}

impl SpecProblem {
    /// A problem at a field.
    pub fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            path: path.into(),
            message: message.into(),
            hint: None,
        }
    }

    /// With what would be right.
    pub fn hint(self, hint: impl Into<String>) -> Self {
        Self {
            hint: Some(hint.into()),
            ..self
        }
    }
}

impl fmt::Display for SpecProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.message)
    }
}

/// What an instance shall be. The fields are those of the manifest.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[allow(
    missing_docs,
    reason = "the fields are documented where people write them, in manifest.rs"
)]
pub struct InstanceSpec {
    pub replicas: u32,
    pub paused: bool,
    pub priority: i32,
    pub node_selector: BTreeMap<String, String>,
    pub engine: EngineKind,
    pub runtime: Runtime,
    pub binary: Option<String>,
    pub model: Model,
    pub options: Options,
    pub args: Vec<String>,
    pub command: Option<Vec<String>>,
    pub env: Vec<EnvVar>,
    pub working_dir: Option<PathBuf>,
    pub devices: DeviceRequest,
    pub port: Option<Port>,
    pub startup_probe: Option<ManifestProbe>,
    pub readiness_probe: Option<ManifestProbe>,
    pub liveness_probe: Option<ManifestProbe>,
    pub startup_deadline_seconds: Option<u32>,
    pub restart_policy: RestartPolicy,
    pub backoff: Backoff,
    pub termination_grace_period_seconds: u32,
    pub docker: Option<Docker>,
    pub strategy: Strategy,
    pub deletion_policy: DeletionPolicy,
}

/// The model to serve.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Model {
    /// Where it lies, or what the hub calls it; nothing for engines that need none.
    pub location: Option<ModelLocation>,
    /// What clients call it.
    pub served_name: String,
}

/// Where a model comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ModelLocation {
    /// An absolute path.
    Path(PathBuf),
    /// A hub id.
    Id(String),
}

impl ModelLocation {
    /// As it stands in a command line.
    pub fn argument(&self) -> String {
        match self {
            Self::Path(path) => path.display().to_string(),
            Self::Id(id) => id.clone(),
        }
    }
}

/// An environment variable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EnvVar {
    /// Its name.
    pub name: String,
    /// Its value, or where the value lies.
    pub value: EnvValue,
}

/// A value, or where it lies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum EnvValue {
    /// As written.
    Literal(String),
    /// Read at each launch and kept nowhere.
    File(PathBuf),
}

/// Which devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DeviceRequest {
    /// As many as the parallelism needs; none on a host without accelerators.
    Parallelism,
    /// Any, this many.
    Count(u32),
    /// Exactly these (an id, or `index:N`).
    Ids(Vec<String>),
}

/// How long relaunches wait, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Backoff {
    /// The second relaunch in a row; doubles from there. 0: no back-off.
    pub initial_seconds: u32,
    /// The longest wait.
    pub max_seconds: u32,
    /// Ready this long: from the beginning.
    pub reset_seconds: u32,
}

/// Kubernetes waits up to five minutes between restarts and forgets them after ten minutes of health.
impl Default for Backoff {
    fn default() -> Self {
        Self {
            initial_seconds: 1,
            max_seconds: 300,
            reset_seconds: 600,
        }
    }
}

impl InstanceSpec {
    /// Devices that the parallelism needs.
    pub fn parallelism(&self) -> u32 {
        let of = |degree: Option<u32>| degree.unwrap_or(1).max(1);
        of(self.options.tensor_parallel).saturating_mul(of(self.options.pipeline_parallel))
    }

    /// The restart and re-lease fields as the user wrote them, normalised, each under its path in the manifest;
    /// what equals the default is absent, so a field that a later version adds changes no key.
    pub fn restart_fields(&self) -> BTreeMap<&'static str, Value> {
        // Without `..`: a new field makes the compiler ask for its class.
        let Self {
            replicas: _live,
            paused: _,
            priority: _,
            node_selector: _,
            engine,
            runtime,
            binary,
            model: Model {
                location,
                served_name,
            },
            options,
            args,
            command,
            env,
            working_dir,
            devices,
            port,
            startup_probe: _,
            readiness_probe: _,
            liveness_probe: _,
            startup_deadline_seconds: _,
            restart_policy: _,
            backoff: _,
            termination_grace_period_seconds: _,
            docker,
            strategy: _,
            deletion_policy: _,
        } = self;
        let mut fields = BTreeMap::from([
            ("spec.engine", json!(engine)),
            ("spec.model.servedName", json!(served_name)),
        ]);
        // A count that says what goes without saying changes no key; on a host without accelerators it is refused.
        let are_default = match devices {
            DeviceRequest::Parallelism => true,
            DeviceRequest::Count(count) => *count == self.parallelism(),
            DeviceRequest::Ids(_) => false,
        };
        let mut written = |path, is_default: bool, value: Value| {
            if !is_default {
                fields.insert(path, value);
            }
        };
        written(
            "spec.runtime",
            *runtime == Runtime::default(),
            json!(runtime),
        );
        written("spec.binary", binary.is_none(), json!(binary));
        written("spec.model", location.is_none(), json!(location));
        written("spec.options", options.is_empty(), json!(options));
        written("spec.args", args.is_empty(), json!(args));
        written("spec.command", command.is_none(), json!(command));
        written("spec.env", env.is_empty(), json!(env));
        written("spec.workingDir", working_dir.is_none(), json!(working_dir));
        written("spec.devices", are_default, json!(devices));
        written("spec.port", port.is_none(), json!(port));
        written("spec.docker", docker.is_none(), json!(docker));
        fields
    }

    /// Whether two specs that have the same [`RestartKey`] say the same. Half the price of comparing everything, and
    /// this is asked of every instance in every pass.
    pub fn has_same_live_fields(&self, other: &Self) -> bool {
        // Without `..`: a new field makes the compiler ask for its class.
        let Self {
            replicas,
            paused,
            priority,
            node_selector,
            engine: _restart,
            runtime: _,
            binary: _,
            model: _,
            options: _,
            args: _,
            command: _,
            env: _,
            working_dir: _,
            devices: _,
            port: _,
            startup_probe,
            readiness_probe,
            liveness_probe,
            startup_deadline_seconds,
            restart_policy,
            backoff,
            termination_grace_period_seconds,
            docker: _,
            strategy,
            deletion_policy,
        } = self;
        *replicas == other.replicas
            && *paused == other.paused
            && *priority == other.priority
            && *startup_deadline_seconds == other.startup_deadline_seconds
            && *restart_policy == other.restart_policy
            && *backoff == other.backoff
            && *termination_grace_period_seconds == other.termination_grace_period_seconds
            && *strategy == other.strategy
            && *deletion_policy == other.deletion_policy
            && *startup_probe == other.startup_probe
            && *readiness_probe == other.readiness_probe
            && *liveness_probe == other.liveness_probe
            && *node_selector == other.node_selector
    }

    /// The paths of the restart and re-lease fields in which two specs differ.
    pub fn changed_fields(&self, other: &Self) -> Vec<String> {
        let (old, new) = (self.restart_fields(), other.restart_fields());
        let paths: std::collections::BTreeSet<_> = old.keys().chain(new.keys()).collect();
        paths
            .into_iter()
            .filter(|path| old.get(*path) != new.get(*path))
            .map(|path| (*path).to_owned())
            .collect()
    }
}

/// What forces a relaunch: a hash over the restart and re-lease fields as the user wrote them, normalised. Comments,
/// key order, formatting and explicit defaults do not count, and neither does how evenkeel turns them into a
/// command line.
///
/// 128 bits: collisions are out of reach, and people can still compare two by eye. As one number, because every pass
/// compares two of each instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RestartKey(u128);

impl RestartKey {
    /// The key of a spec and the `evenkeel.dev/restartedAt` annotation.
    pub fn of(spec: &InstanceSpec, restarted_at: Option<&str>) -> Self {
        let mut fields = spec.restart_fields();
        if let Some(at) = restarted_at {
            fields.insert("metadata.annotations", json!(at));
        }
        // A map with sorted keys over values whose types have a fixed field order: one spelling per content.
        let canonical = json!(fields).to_string();
        let digest = Sha256::digest(canonical.as_bytes());
        let first = digest.iter().take(16);
        Self(first.fold(0, |key, byte| key << 8 | u128::from(*byte)))
    }
}

/// 32 hexadecimal digits.
impl fmt::Display for RestartKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{:032x}", self.0))
    }
}

impl From<RestartKey> for String {
    fn from(key: RestartKey) -> Self {
        key.to_string()
    }
}

impl TryFrom<String> for RestartKey {
    type Error = NotAKey;

    fn try_from(text: String) -> Result<Self, NotAKey> {
        match u128::from_str_radix(&text, 16) {
            // One spelling per key: no sign, no capitals, no fewer digits.
            Ok(key) if Self(key).to_string() == text => Ok(Self(key)),
            Ok(_) | Err(_) => Err(NotAKey(text)),
        }
    }
}

/// A text that is no restart key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a restart key: 32 hexadecimal digits")]
pub struct NotAKey(String);

#[cfg(test)]
mod tests;
