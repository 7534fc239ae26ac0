//! What an instance shall be: validated, with the manifest's own defaults filled in.
//!
//! Defaults that belong to an engine (port, binary, health path, deadline) are not filled in here: they may
//! improve from version to version, and what is written here is hashed into the [`RestartKey`].
//!
//! Invariant: a new version of evenkeel computes the same [`RestartKey`] for the same manifest.

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::manifest::{
    DeletionPolicy, Docker, EngineKind, Manifest, ManifestBackoff, ManifestDevices, ManifestEnv,
    ManifestModel, ManifestProbe, ManifestSpec, Options, RestartPolicy, Runtime, Strategy,
};
use crate::names::{DeploymentName, InstanceName, Port, REPLICA_LIMIT};

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
        // As many as the parallelism needs is the default, also where it is written down.
        let is_default = match devices {
            DeviceRequest::Parallelism => true,
            DeviceRequest::Count(count) => *count == self.parallelism(),
            DeviceRequest::Ids(_) => false,
        };
        written("spec.devices", is_default, json!(devices));
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

    #[expect(
        clippy::too_many_lines,
        reason = "one line per field, in the manifest's order"
    )]
    fn from_manifest(name: &DeploymentName, spec: ManifestSpec) -> Result<Self, Vec<SpecProblem>> {
        let mut problems = Vec::new();
        let ManifestSpec {
            replicas,
            paused,
            priority,
            node_selector,
            engine,
            runtime,
            binary,
            model,
            options,
            args,
            command,
            env,
            working_dir,
            devices,
            port,
            startup_probe,
            readiness_probe,
            liveness_probe,
            startup_deadline_seconds,
            restart_policy,
            backoff,
            termination_grace_period_seconds,
            docker,
            strategy,
            deletion_policy,
        } = spec;
        let replicas = replicas.unwrap_or(1);
        if replicas > REPLICA_LIMIT {
            problems.push(SpecProblem::new(
                "spec.replicas",
                format!("{replicas} is more than {REPLICA_LIMIT}"),
            ));
        }
        if port.is_some() && replicas > 1 {
            problems.push(
                SpecProblem::new("spec.port", "several replicas cannot share one port")
                    .hint("leave `port` out, and each takes the next free one"),
            );
        }
        check_command(engine, command.as_deref(), &args, &mut problems);
        for (path, text) in [("spec.binary", binary.as_deref())] {
            if let Some(text) = text
                && (text.is_empty() || text.contains('\0'))
            {
                problems.push(SpecProblem::new(path, "is empty or holds a NUL character"));
            }
        }
        if let Some(folder) = &working_dir {
            check_absolute("spec.workingDir", folder, &mut problems);
        }
        let options = normal_options(options, &mut problems);
        let parallelism = options
            .tensor_parallel
            .unwrap_or(1)
            .saturating_mul(options.pipeline_parallel.unwrap_or(1));
        let devices = device_request(devices, parallelism, replicas, &mut problems);
        for (path, probe) in [
            ("spec.startupProbe", &startup_probe),
            ("spec.readinessProbe", &readiness_probe),
            ("spec.livenessProbe", &liveness_probe),
        ] {
            if let Some(probe) = probe {
                check_probe(path, probe, &mut problems);
            }
        }
        if startup_deadline_seconds == Some(0) {
            problems.push(SpecProblem::new(
                "spec.startupDeadlineSeconds",
                "must be at least 1",
            ));
        }
        let spec = Self {
            replicas,
            paused: paused.unwrap_or(false),
            priority: priority.unwrap_or(0),
            node_selector: node_selector.unwrap_or_default(),
            engine,
            runtime: runtime.unwrap_or_default(),
            binary,
            model: accept_model(
                name,
                engine,
                command.is_some(),
                model.unwrap_or_default(),
                &mut problems,
            ),
            options,
            args,
            command,
            env: environment(env, &mut problems),
            working_dir,
            devices,
            port,
            startup_probe,
            readiness_probe,
            liveness_probe,
            startup_deadline_seconds,
            restart_policy: restart_policy.unwrap_or_default(),
            backoff: accept_backoff(&backoff, &mut problems),
            // Kubernetes gives 30 s; engines that have not ended after 20 s were never seen to end by themselves.
            termination_grace_period_seconds: termination_grace_period_seconds.unwrap_or(20),
            docker,
            strategy,
            deletion_policy: deletion_policy.unwrap_or_default(),
        };
        if spec.docker.is_some() && spec.runtime != Runtime::Docker {
            problems.push(
                SpecProblem::new("spec.docker", "has no effect without `runtime: docker`")
                    .hint("add `runtime: docker`, or take `docker` out"),
            );
        }
        if problems.is_empty() {
            Ok(Self {
                docker: spec.docker.filter(says_something),
                ..spec
            })
        } else {
            Err(problems)
        }
    }
}

/// An empty block is the default, written down.
fn says_something(docker: &Docker) -> bool {
    let Docker {
        image,
        pull,
        shm_size_bytes,
        ipc,
        volumes,
        network,
    } = docker;
    image.is_some()
        || pull.is_some()
        || shm_size_bytes.is_some()
        || ipc.is_some()
        || !volumes.is_empty()
        || network.is_some()
}

fn check_absolute(path: &str, value: &Path, problems: &mut Vec<SpecProblem>) {
    if !value.is_absolute() {
        problems.push(
            SpecProblem::new(
                path,
                format!("`{}` is not an absolute path", value.display()),
            )
            .hint("begin it with `/`: the daemon's own folder is not yours"),
        );
    }
    if value.as_os_str().as_encoded_bytes().contains(&0) {
        problems.push(SpecProblem::new(path, "holds a NUL character"));
    }
}

fn check_command(
    engine: EngineKind,
    command: Option<&[String]>,
    args: &[String],
    problems: &mut Vec<SpecProblem>,
) {
    match (engine, command) {
        (_, Some([])) => problems.push(SpecProblem::new("spec.command", "is empty")),
        (EngineKind::Command, None) => problems.push(
            SpecProblem::new("spec.command", "is required by `engine: command`")
                .hint("for example `command: [my-server, --port, $(PORT)]`"),
        ),
        _ => {}
    }
    for (path, texts) in [
        ("spec.command", command.unwrap_or_default()),
        ("spec.args", args),
    ] {
        for (n, text) in texts.iter().enumerate() {
            if text.contains('\0') {
                problems.push(SpecProblem::new(
                    format!("{path}[{n}]"),
                    "holds a NUL character",
                ));
            }
        }
    }
    for (n, arg) in args.iter().enumerate() {
        let flag = arg.split('=').next().unwrap_or(arg);
        if engine != EngineKind::Command && matches!(flag, "--host" | "--port") {
            problems.push(
                SpecProblem::new(
                    format!("spec.args[{n}]"),
                    format!("`{flag}` is evenkeel's to set"),
                )
                .hint("set `spec.port` for a port of your own; engines listen on 127.0.0.1"),
            );
        }
    }
}

fn accept_model(
    name: &DeploymentName,
    engine: EngineKind,
    has_command: bool,
    model: ManifestModel,
    problems: &mut Vec<SpecProblem>,
) -> Model {
    let ManifestModel {
        path,
        id,
        served_name,
    } = model;
    let location = match (path, id) {
        (Some(path), None) => {
            check_absolute("spec.model.path", &path, problems);
            Some(ModelLocation::Path(path))
        }
        (None, Some(id)) => {
            if id.is_empty() || id.starts_with('-') || id.contains('\0') {
                problems.push(SpecProblem::new(
                    "spec.model.id",
                    format!("`{id}` is not a hub id"),
                ));
            }
            Some(ModelLocation::Id(id))
        }
        (Some(_), Some(_)) => {
            problems
                .push(SpecProblem::new("spec.model", "has both `path` and `id`").hint("keep one"));
            None
        }
        (None, None) => {
            let needs_none =
                matches!(engine, EngineKind::Echo | EngineKind::Command) || has_command;
            if !needs_none {
                problems.push(
                    SpecProblem::new(
                        "spec.model.path",
                        format!("is required by `engine: {engine}`"),
                    )
                    .hint("give the absolute path of the model"),
                );
            }
            None
        }
    };
    let served_name = served_name.unwrap_or_else(|| name.to_string());
    if served_name.is_empty() || served_name.contains('\0') {
        problems.push(SpecProblem::new(
            "spec.model.servedName",
            "is empty or holds a NUL character",
        ));
    }
    Model {
        location,
        served_name,
    }
}

/// Drops what equals the default, so that an explicit default does not count.
fn normal_options(options: Options, problems: &mut Vec<SpecProblem>) -> Options {
    let Options {
        tensor_parallel,
        pipeline_parallel,
        max_context_length,
        memory_fraction,
        max_concurrent_requests,
        kv_cache_dtype,
        dtype,
        quantization,
        trust_remote_code,
        tool_call_parser,
        reasoning_parser,
    } = options;
    for (path, is_zero) in [
        ("tensorParallel", tensor_parallel == Some(0)),
        ("pipelineParallel", pipeline_parallel == Some(0)),
        ("maxContextLength", max_context_length == Some(0)),
        ("maxConcurrentRequests", max_concurrent_requests == Some(0)),
    ] {
        if is_zero {
            problems.push(SpecProblem::new(
                format!("spec.options.{path}"),
                "must be at least 1",
            ));
        }
    }
    if let Some(fraction) = memory_fraction
        && !(fraction > 0.0 && fraction <= 1.0)
    {
        problems.push(SpecProblem::new(
            "spec.options.memoryFraction",
            format!("{fraction} is not above 0 and at most 1"),
        ));
    }
    let mut word = |path: &str, text: Option<String>| {
        if let Some(text) = &text
            && (text.is_empty() || text.starts_with('-') || text.contains('\0'))
        {
            problems.push(SpecProblem::new(
                format!("spec.options.{path}"),
                format!("`{text}` is no value"),
            ));
        }
        text
    };
    let auto = |text: Option<String>| text.filter(|text| text != "auto");
    Options {
        tensor_parallel: tensor_parallel.filter(|&degree| degree != 1),
        pipeline_parallel: pipeline_parallel.filter(|&degree| degree != 1),
        max_context_length,
        memory_fraction,
        max_concurrent_requests,
        kv_cache_dtype: auto(word("kvCacheDtype", kv_cache_dtype)),
        dtype: auto(word("dtype", dtype)),
        quantization: auto(word("quantization", quantization)),
        trust_remote_code: trust_remote_code.filter(|&trusted| trusted),
        tool_call_parser: word("toolCallParser", tool_call_parser),
        reasoning_parser: word("reasoningParser", reasoning_parser),
    }
}

fn environment(env: Vec<ManifestEnv>, problems: &mut Vec<SpecProblem>) -> Vec<EnvVar> {
    let mut seen = std::collections::BTreeSet::new();
    let mut accepted = Vec::with_capacity(env.len());
    for (
        n,
        ManifestEnv {
            name,
            value,
            value_from,
        },
    ) in env.into_iter().enumerate()
    {
        let at = |field: &str| format!("spec.env[{n}].{field}");
        if name.is_empty() || name.contains(['=', '\0']) {
            problems.push(SpecProblem::new(
                at("name"),
                format!("`{name}` is not the name of a variable"),
            ));
        } else if name.starts_with("EVENKEEL_") {
            problems.push(SpecProblem::new(
                at("name"),
                format!("`{name}` is evenkeel's to set"),
            ));
        } else if !seen.insert(name.clone()) {
            problems.push(SpecProblem::new(
                at("name"),
                format!("`{name}` is there twice"),
            ));
        }
        let value = match (value, value_from) {
            (Some(value), None) => {
                if value.contains('\0') {
                    problems.push(SpecProblem::new(at("value"), "holds a NUL character"));
                }
                EnvValue::Literal(value)
            }
            (None, Some(from)) => {
                check_absolute(&at("valueFrom.file"), &from.file, problems);
                EnvValue::File(from.file)
            }
            (None, None) => EnvValue::Literal(String::new()),
            (Some(_), Some(_)) => {
                problems.push(
                    SpecProblem::new(at("value"), "has both `value` and `valueFrom`")
                        .hint("keep one"),
                );
                continue;
            }
        };
        accepted.push(EnvVar { name, value });
    }
    accepted
}

fn device_request(
    devices: Option<ManifestDevices>,
    parallelism: u32,
    replicas: u32,
    problems: &mut Vec<SpecProblem>,
) -> DeviceRequest {
    let ManifestDevices { count, ids } = devices.unwrap_or_default();
    match (count, ids) {
        (None, None) => DeviceRequest::Parallelism,
        (Some(count), None) => {
            if parallelism > 1 && count < parallelism {
                problems.push(
                    SpecProblem::new(
                        "spec.devices.count",
                        format!(
                            "{count} is less than tensorParallel × pipelineParallel = {parallelism}"
                        ),
                    )
                    .hint("leave `count` out, or raise it"),
                );
            }
            DeviceRequest::Count(count)
        }
        (None, Some(ids)) => {
            let distinct: std::collections::BTreeSet<_> = ids.iter().collect();
            if distinct.len() != ids.len() {
                problems.push(SpecProblem::new("spec.devices.ids", "names a device twice"));
            }
            if replicas > 1 && !ids.is_empty() {
                problems.push(
                    SpecProblem::new(
                        "spec.devices.ids",
                        "several replicas cannot share pinned devices",
                    )
                    .hint("use `count`, or one deployment per replica"),
                );
            }
            DeviceRequest::Ids(ids)
        }
        (Some(_), Some(_)) => {
            problems.push(
                SpecProblem::new("spec.devices", "has both `count` and `ids`").hint("keep one"),
            );
            DeviceRequest::Parallelism
        }
    }
}

fn check_probe(path: &str, probe: &ManifestProbe, problems: &mut Vec<SpecProblem>) {
    if probe.http_get.is_some() && probe.tcp_socket.is_some() {
        problems
            .push(SpecProblem::new(path, "has both `httpGet` and `tcpSocket`").hint("keep one"));
    }
    if let Some(get) = probe.http_get.as_ref().and_then(|get| get.path.as_ref())
        && (!get.starts_with('/') || get.contains(|c: char| c.is_whitespace() || c.is_control()))
    {
        problems.push(
            SpecProblem::new(
                format!("{path}.httpGet.path"),
                format!("`{get}` is not a path"),
            )
            .hint("begin it with `/`"),
        );
    }
    for (field, value) in [
        ("periodSeconds", probe.period_seconds),
        ("timeoutSeconds", probe.timeout_seconds),
        ("failureThreshold", probe.failure_threshold),
        ("successThreshold", probe.success_threshold),
    ] {
        if value == Some(0) {
            problems.push(SpecProblem::new(
                format!("{path}.{field}"),
                "must be at least 1",
            ));
        }
    }
}

fn accept_backoff(backoff: &ManifestBackoff, problems: &mut Vec<SpecProblem>) -> Backoff {
    let ManifestBackoff {
        initial_seconds,
        max_seconds,
        reset_seconds,
    } = *backoff;
    let standard = Backoff::default();
    let accepted = Backoff {
        initial_seconds: initial_seconds.unwrap_or(standard.initial_seconds),
        max_seconds: max_seconds.unwrap_or(standard.max_seconds.max(initial_seconds.unwrap_or(0))),
        reset_seconds: reset_seconds.unwrap_or(standard.reset_seconds),
    };
    if accepted.max_seconds < accepted.initial_seconds {
        problems.push(SpecProblem::new(
            "spec.backoff.maxSeconds",
            "is below `initialSeconds`",
        ));
    }
    accepted
}

/// What forces a relaunch: a hash over the restart and re-lease fields as the user wrote them, normalised. Comments,
/// key order, formatting and explicit defaults do not count, and neither does how evenkeel turns them into a
/// command line.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RestartKey(String);

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
        // 128 bits: collisions are out of reach, and people can still compare two by eye.
        let mut hex = String::with_capacity(32);
        for byte in digest.iter().take(16) {
            // Writing to a String cannot fail.
            let _ = write!(hex, "{byte:02x}");
        }
        Self(hex)
    }

    /// The key as hexadecimal text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RestartKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

#[cfg(test)]
mod tests;
