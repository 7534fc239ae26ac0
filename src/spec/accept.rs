//! Accepting a manifest: every check that needs no host, and the manifest's own defaults.
//!
//! Invariant: everything that is wrong is said, each thing at its field's path; nothing is corrected silently.

use std::collections::BTreeSet;
use std::path::Path;

use super::{
    Backoff, DeviceRequest, EnvValue, EnvVar, InstanceSpec, Model, ModelLocation, SpecProblem,
};
use crate::manifest::{
    Docker, EngineKind, ManifestBackoff, ManifestDevices, ManifestEnv, ManifestModel,
    ManifestProbe, ManifestSpec, Options, Runtime,
};
use crate::names::{DeploymentName, REPLICA_LIMIT};

impl InstanceSpec {
    /// Validates a spec and fills the manifest's defaults in.
    ///
    /// # Errors
    /// Everything that is wrong with it, not just the first.
    #[expect(
        clippy::too_many_lines,
        reason = "one line per field, in the manifest's order"
    )]
    pub(super) fn from_manifest(
        name: &DeploymentName,
        spec: ManifestSpec,
    ) -> Result<Self, Vec<SpecProblem>> {
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
    let mut seen = BTreeSet::new();
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
            let distinct: BTreeSet<_> = ids.iter().collect();
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
