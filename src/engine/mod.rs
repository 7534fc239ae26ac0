//! What is known of the inference servers: data and pure functions, one file per engine.
//!
//! An engine tells its facts (program, port, health path, deadline), what it refuses, and its arguments. Everything
//! else (merging the user's arguments, filling in variables, devices) is the same for all and stands here.

pub mod args;

mod command;
mod echo;
mod later;
mod llamacpp;
mod vllm;

use std::time::Duration;

use crate::failure::LaunchFailure;
use crate::manifest::{EngineKind, ManifestProbe, Options, Runtime};
use crate::names::{DeviceId, InstanceName, LaunchId, Port};
use crate::observed::{DeviceKind, Inventory};
use crate::order::{LaunchOrder, ProbeMethod, Program};
use crate::record::Lease;
use crate::spec::{DeviceRequest, EnvValue, EnvVar, InstanceSpec, ModelLocation};

use args::{Aliases, Argument};

/// What is known of one inference server.
pub trait Engine: Sync {
    /// What does not depend on the manifest.
    fn facts(&self) -> Facts;

    /// Why it cannot run so on this host, and what would work instead.
    fn refusal(&self, spec: &InstanceSpec, inventory: &Inventory) -> Option<Refusal>;

    /// Its arguments for a process, without the options that [`Facts::options`] names, which follow them.
    fn arguments(&self, spec: &InstanceSpec, port: Option<Port>) -> Vec<Argument>;

    /// Arguments that follow the options.
    fn closing_arguments(&self) -> Vec<Argument> {
        Vec::new()
    }

    /// The value of an option, where it is not simply the user's.
    fn option_value(&self, knob: Knob, spec: &InstanceSpec) -> Option<String> {
        knob.value(&spec.options)
    }

    /// What an option needs beside it.
    fn companion(&self, _knob: Knob) -> Option<Argument> {
        None
    }

    /// Variables it needs.
    fn environment(&self, _spec: &InstanceSpec) -> Vec<EnvVar> {
        Vec::new()
    }
}

/// What does not depend on the manifest.
#[derive(Debug, Clone, Copy)]
pub struct Facts {
    /// What to execute when the manifest names no binary; none: evenkeel itself.
    pub program: Option<&'static str>,
    /// The first port to try.
    pub base_port: u16,
    /// Where it tells its health; none for an engine without such a place.
    pub health_path: Option<&'static str>,
    /// How long it may take until it is ready, from engines.md's measurements.
    pub startup_deadline: Duration,
    /// The flags of the options it has, in the order in which they are passed.
    pub options: &'static [(Knob, &'static str)],
    /// Other spellings of its flags.
    pub aliases: Aliases,
}

/// Why an engine cannot run so, and what would work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// Why.
    pub reason: String,
    /// What would work.
    pub instead: String,
}

impl Refusal {
    fn new(reason: impl Into<String>, instead: impl Into<String>) -> Self {
        Self {
            reason: reason.into(),
            instead: instead.into(),
        }
    }
}

/// One of the options that engines have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(
    missing_docs,
    reason = "they are documented where people write them, in manifest.rs"
)]
pub enum Knob {
    TensorParallel,
    PipelineParallel,
    MaxContextLength,
    MemoryFraction,
    MaxConcurrentRequests,
    KvCacheDtype,
    Dtype,
    Quantization,
    TrustRemoteCode,
    ToolCallParser,
    ReasoningParser,
}

impl Knob {
    /// All of them, in the manifest's order.
    pub const ALL: [Self; 11] = [
        Self::TensorParallel,
        Self::PipelineParallel,
        Self::MaxContextLength,
        Self::MemoryFraction,
        Self::MaxConcurrentRequests,
        Self::KvCacheDtype,
        Self::Dtype,
        Self::Quantization,
        Self::TrustRemoteCode,
        Self::ToolCallParser,
        Self::ReasoningParser,
    ];

    /// Its name in the manifest.
    pub fn field(self) -> &'static str {
        match self {
            Self::TensorParallel => "tensorParallel",
            Self::PipelineParallel => "pipelineParallel",
            Self::MaxContextLength => "maxContextLength",
            Self::MemoryFraction => "memoryFraction",
            Self::MaxConcurrentRequests => "maxConcurrentRequests",
            Self::KvCacheDtype => "kvCacheDtype",
            Self::Dtype => "dtype",
            Self::Quantization => "quantization",
            Self::TrustRemoteCode => "trustRemoteCode",
            Self::ToolCallParser => "toolCallParser",
            Self::ReasoningParser => "reasoningParser",
        }
    }

    /// What the user set it to; nothing when it is at its default. A switch that is on has an empty value.
    pub fn value(self, options: &Options) -> Option<String> {
        match self {
            Self::TensorParallel => options.tensor_parallel.map(|degree| degree.to_string()),
            Self::PipelineParallel => options.pipeline_parallel.map(|degree| degree.to_string()),
            Self::MaxContextLength => options.max_context_length.map(|tokens| tokens.to_string()),
            Self::MemoryFraction => options.memory_fraction.map(|fraction| fraction.to_string()),
            Self::MaxConcurrentRequests => options
                .max_concurrent_requests
                .map(|count| count.to_string()),
            Self::KvCacheDtype => options.kv_cache_dtype.clone(),
            Self::Dtype => options.dtype.clone(),
            Self::Quantization => options.quantization.clone(),
            Self::TrustRemoteCode => options.trust_remote_code.map(|_on| String::new()),
            Self::ToolCallParser => options.tool_call_parser.clone(),
            Self::ReasoningParser => options.reasoning_parser.clone(),
        }
    }
}

/// What is known of an engine.
pub fn engine(kind: EngineKind) -> &'static dyn Engine {
    match kind {
        EngineKind::Vllm => &vllm::Vllm,
        EngineKind::Llamacpp => &llamacpp::LlamaCpp,
        EngineKind::Echo => &echo::Echo,
        EngineKind::Command => &command::Command,
        EngineKind::Sglang => &later::Later(EngineKind::Sglang),
        EngineKind::Mlx => &later::Later(EngineKind::Mlx),
        EngineKind::Exllamav3 => &later::Later(EngineKind::Exllamav3),
    }
}

/// How many devices a spec needs on this host.
pub fn devices_needed(spec: &InstanceSpec, inventory: &Inventory) -> u32 {
    match &spec.devices {
        DeviceRequest::Parallelism if inventory.devices.is_empty() => 0,
        DeviceRequest::Parallelism => spec.parallelism(),
        DeviceRequest::Count(count) => *count,
        DeviceRequest::Ids(ids) => u32::try_from(ids.len()).unwrap_or(u32::MAX),
    }
}

/// The pinned devices of a spec.
///
/// # Errors
/// The id that this host does not have.
pub fn pinned_devices(ids: &[String], inventory: &Inventory) -> Result<Vec<DeviceId>, String> {
    ids.iter()
        .map(|id| {
            let index = id
                .strip_prefix("index:")
                .and_then(|digits| digits.parse::<usize>().ok());
            let device = match index {
                Some(index) => inventory.devices.get(index),
                None => inventory
                    .devices
                    .iter()
                    .find(|device| device.id.as_str() == id),
            };
            device
                .map(|device| device.id.clone())
                .ok_or_else(|| id.clone())
        })
        .collect()
}

/// Whether a spec can run on this host at all, whatever else runs.
///
/// # Errors
/// [`LaunchFailure::Unsupported`] with the reason and what would work.
pub fn support(spec: &InstanceSpec, inventory: &Inventory) -> Result<(), LaunchFailure> {
    let refusal = runtime_refusal(spec)
        .or_else(|| device_refusal(spec, inventory))
        .or_else(|| variable_refusal(spec))
        .or_else(|| {
            spec.command
                .is_none()
                .then(|| option_refusal(spec))
                .flatten()
        })
        .or_else(|| engine(spec.engine).refusal(spec, inventory));
    match refusal {
        None => Ok(()),
        Some(Refusal { reason, instead }) => Err(LaunchFailure::Unsupported {
            engine: spec.engine,
            reason,
            instead,
        }),
    }
}

fn runtime_refusal(spec: &InstanceSpec) -> Option<Refusal> {
    match spec.runtime {
        Runtime::Process => None,
        Runtime::Docker => Some(Refusal::new(
            "this version does not run containers yet",
            "use `runtime: process`",
        )),
    }
}

fn device_refusal(spec: &InstanceSpec, inventory: &Inventory) -> Option<Refusal> {
    let known = || {
        let ids: Vec<_> = inventory
            .devices
            .iter()
            .map(|device| device.id.as_str())
            .collect();
        if ids.is_empty() {
            "this host has no accelerator".to_owned()
        } else {
            format!("this host has {}", ids.join(", "))
        }
    };
    if let DeviceRequest::Ids(ids) = &spec.devices {
        return match pinned_devices(ids, inventory) {
            Err(unknown) => Some(Refusal::new(
                format!("there is no device `{unknown}`"),
                known(),
            )),
            Ok(found) => {
                let distinct: std::collections::BTreeSet<_> = found.iter().collect();
                (distinct.len() != found.len())
                    .then(|| Refusal::new("`spec.devices.ids` names a device twice", known()))
            }
        };
    }
    let need = devices_needed(spec, inventory) as usize;
    let most = [
        DeviceKind::Cuda,
        DeviceKind::Rocm,
        DeviceKind::Xpu,
        DeviceKind::Metal,
    ]
    .into_iter()
    .map(|kind| {
        inventory
            .devices
            .iter()
            .filter(|device| device.kind == kind)
            .count()
    })
    .max()
    .unwrap_or(0);
    (need > most).then(|| {
        Refusal::new(
            format!(
                "it asks for {need} {}, and this host has {most} of a kind",
                if need == 1 { "device" } else { "devices" }
            ),
            "lower `spec.devices.count` or the parallelism",
        )
    })
}

/// A value from a file is secret, and command lines can be read by everybody on the host.
fn variable_refusal(spec: &InstanceSpec) -> Option<Refusal> {
    let texts = || spec.command.iter().flatten().chain(&spec.args);
    spec.env
        .iter()
        .filter(|variable| matches!(variable.value, EnvValue::File(_)))
        .find(|variable| texts().any(|text| text.contains(&format!("$({})", variable.name))))
        .map(|variable| {
            Refusal::new(
                format!(
                    "`$({})` would put a value from a file into the command line",
                    variable.name
                ),
                "let the program read it from its environment",
            )
        })
}

fn option_refusal(spec: &InstanceSpec) -> Option<Refusal> {
    // The stand-in takes every option and heeds none, so that any manifest can be tried with it.
    if spec.engine == EngineKind::Echo {
        return None;
    }
    let known = engine(spec.engine).facts().options;
    Knob::ALL
        .into_iter()
        .filter(|knob| !known.iter().any(|(other, _)| other == knob))
        .find(|knob| knob.value(&spec.options).is_some())
        .map(|knob| {
            Refusal::new(
                format!("it has no option `{}`", knob.field()),
                format!("take `spec.options.{}` out", knob.field()),
            )
        })
}

/// Whether an instance listens on a port that evenkeel gives it.
pub fn needs_port(spec: &InstanceSpec) -> bool {
    let is_network = |probe: &Option<ManifestProbe>| {
        probe
            .as_ref()
            .is_some_and(|probe| probe.http_get.is_some() || probe.tcp_socket.is_some())
    };
    spec.engine != EngineKind::Command
        || spec.port.is_some()
        || mentions_port(spec)
        || is_network(&spec.startup_probe)
        || is_network(&spec.readiness_probe)
        || is_network(&spec.liveness_probe)
}

fn mentions_port(spec: &InstanceSpec) -> bool {
    spec.command
        .iter()
        .flatten()
        .chain(&spec.args)
        .any(|text| text.contains("$(PORT)"))
}

/// A [`ProbeMethod`] that is only looked at: every pass thinks of every instance's probes, and few are due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Question<'a> {
    /// GET this path.
    HttpGet(&'a str),
    /// Connect.
    TcpConnect,
}

impl Question<'_> {
    /// As an effect takes it.
    pub fn method(self) -> ProbeMethod {
        match self {
            Self::HttpGet(path) => ProbeMethod::HttpGet {
                path: path.to_owned(),
            },
            Self::TcpConnect => ProbeMethod::TcpConnect,
        }
    }
}

/// How an instance is asked how it is, when the manifest does not say: its health path, else a connection where it uses
/// `$(PORT)`, else not at all.
pub fn default_probe(spec: &InstanceSpec) -> Option<Question<'static>> {
    match engine(spec.engine).facts().health_path {
        Some(path) => Some(Question::HttpGet(path)),
        None if mentions_port(spec) || spec.port.is_some() => Some(Question::TcpConnect),
        None => None,
    }
}

/// What a launch needs to know.
#[derive(Debug, Clone, Copy)]
pub struct LaunchFacts<'a> {
    /// For whom.
    pub instance: &'a InstanceName,
    /// The attempt.
    pub launch_id: LaunchId,
    /// What it shall be.
    pub spec: &'a InstanceSpec,
    /// What it holds.
    pub lease: &'a Lease,
    /// The devices of the host.
    pub inventory: &'a Inventory,
}

/// Preparing starts one small process and reads a few files; five times what a loaded disk was ever seen to take.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(10);

/// The order that launches an instance as a process.
pub fn launch_order(facts: LaunchFacts<'_>) -> LaunchOrder {
    let LaunchFacts {
        instance,
        launch_id,
        spec,
        lease,
        inventory,
    } = facts;
    let (program, arguments) = command_line(spec, lease.port);
    let mut environment = engine(spec.engine).environment(spec);
    environment.extend(spec.env.iter().cloned());
    environment.extend(device_environment(lease, inventory));
    LaunchOrder {
        instance: instance.clone(),
        launch_id,
        program,
        arguments,
        environment,
        working_dir: spec.working_dir.clone(),
        port: lease.port,
        timeout: PREPARE_TIMEOUT,
    }
}

/// Program and arguments.
pub fn command_line(spec: &InstanceSpec, port: Option<Port>) -> (Program, Vec<String>) {
    let filled = |texts: &[String]| -> Vec<String> {
        texts.iter().map(|text| fill_in(text, spec, port)).collect()
    };
    if let Some([program, rest @ ..]) = spec.command.as_deref() {
        let mut arguments = filled(rest);
        arguments.extend(filled(&spec.args));
        return (Program::Named(fill_in(program, spec, port)), arguments);
    }
    let engine = engine(spec.engine);
    let facts = engine.facts();
    let mut ours = engine.arguments(spec, port);
    for (knob, flag) in facts.options {
        match engine.option_value(*knob, spec) {
            None => {}
            Some(on) if on.is_empty() => ours.push(Argument::switch(flag)),
            Some(value) => {
                ours.push(Argument::value(flag, value));
                ours.extend(engine.companion(*knob));
            }
        }
    }
    ours.extend(engine.closing_arguments());
    let named = spec.binary.as_deref().or(facts.program);
    let program = named.map_or(Program::Own, |name| Program::Named(name.to_owned()));
    (
        program,
        args::merge(ours, &filled(&spec.args), facts.aliases),
    )
}

/// Fills `$(NAME)` in as Kubernetes does: unknown names stay, `$$(NAME)` becomes `$(NAME)`.
fn fill_in(text: &str, spec: &InstanceSpec, port: Option<Port>) -> String {
    let value = |name: &str| -> Option<String> {
        let literal = spec.env.iter().find_map(|variable| match &variable.value {
            EnvValue::Literal(value) if variable.name == name => Some(value.clone()),
            EnvValue::Literal(_) | EnvValue::File(_) => None,
        });
        literal.or_else(|| match name {
            "PORT" => port.map(|port| port.to_string()),
            "MODEL" => spec.model.location.as_ref().map(ModelLocation::argument),
            "SERVED_NAME" => Some(spec.model.served_name.clone()),
            _ => None,
        })
    };
    let mut filled = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        filled.push_str(&rest[..at]);
        let after = &rest[at + 1..];
        if let Some(escaped) = after.strip_prefix('$') {
            filled.push('$');
            // `$$(NAME)`: the reference is text. A `$$` before anything else stays as written, less one `$`.
            rest = escaped;
            if let Some(end) = escaped.strip_prefix('(').and_then(|inner| inner.find(')')) {
                filled.push_str(&escaped[..end + 2]);
                rest = &escaped[end + 2..];
            }
            continue;
        }
        let reference = after.strip_prefix('(').and_then(|inner| {
            inner
                .find(')')
                .map(|end| (&inner[..end], &inner[end + 1..]))
        });
        match reference.and_then(|(name, following)| value(name).map(|value| (value, following))) {
            Some((value, following)) => {
                filled.push_str(&value);
                rest = following;
            }
            None => {
                filled.push('$');
                rest = after;
            }
        }
    }
    filled.push_str(rest);
    filled
}

/// What shows an instance its devices and hides the others. Indices are resolved at each launch and never stored.
fn device_environment(lease: &Lease, inventory: &Inventory) -> Vec<EnvVar> {
    let set = |name: &str, value: String| EnvVar {
        name: name.to_owned(),
        value: EnvValue::Literal(value),
    };
    let indices = |kind: DeviceKind| -> Vec<String> {
        let of_kind = lease
            .devices
            .iter()
            .filter_map(|device| inventory.index(&device.id));
        of_kind
            .filter(|(other, _)| *other == kind)
            .map(|(_, index)| index.to_string())
            .collect()
    };
    // -1 is no device: an instance without a lease must not find one.
    let list_or_none = |kind| {
        let indices = indices(kind);
        if indices.is_empty() {
            "-1".to_owned()
        } else {
            indices.join(",")
        }
    };
    let mut environment = Vec::new();
    if inventory.has(DeviceKind::Cuda) {
        environment.push(set("CUDA_DEVICE_ORDER", "PCI_BUS_ID".to_owned()));
        environment.push(set("CUDA_VISIBLE_DEVICES", list_or_none(DeviceKind::Cuda)));
    }
    if inventory.has(DeviceKind::Rocm) {
        environment.push(set("ROCR_VISIBLE_DEVICES", list_or_none(DeviceKind::Rocm)));
    }
    let xpu = indices(DeviceKind::Xpu);
    if !xpu.is_empty() {
        environment.push(set(
            "ONEAPI_DEVICE_SELECTOR",
            format!("level_zero:{}", xpu.join(",")),
        ));
    }
    environment
}

#[cfg(test)]
mod tests;
