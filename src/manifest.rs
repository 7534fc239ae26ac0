//! The YAML document as a person wrote it: strict, nothing defaulted.
//!
//! The doc comments of the fields are the descriptions of the JSON schema, so they speak to the person who
//! writes a manifest. `x-evenkeel-change` says what a change of the field causes: `live`, `restart` or `re-lease`.
//!
//! Invariant: a field that is not listed here is an error, never ignored.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use schemars::{JsonSchema, Schema};
use serde::de::{self, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::names::{DeploymentName, Port};

/// The group of `apiVersion`; documents of other groups are somebody else's.
pub const API_GROUP: &str = "evenkeel.dev";

/// A model server, as its owner wishes it to run.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(rename = "ModelDeployment", deny_unknown_fields, transform = allow_extensions)]
pub struct Manifest {
    /// The version of this format.
    pub api_version: ApiVersion,
    /// The kind of document.
    pub kind: Kind,
    /// Name, labels and annotations.
    pub metadata: Metadata,
    /// What to run, and how.
    pub spec: ManifestSpec,
}

/// Keys beginning `x-` are allowed at the top level: a place for YAML anchors.
fn allow_extensions(schema: &mut Schema) {
    schema.insert(
        "patternProperties".to_owned(),
        serde_json::json!({ "^x-": true }),
    );
}

impl<'de> Deserialize<'de> for Manifest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;

        impl<'de> Visitor<'de> for Fields {
            type Value = Manifest;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a mapping with apiVersion, kind, metadata and spec")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Manifest, A::Error> {
                let (mut api_version, mut kind, mut metadata, mut spec) = (None, None, None, None);
                while let Some(key) = map.next_key::<TopLevelKey>()? {
                    match key {
                        TopLevelKey::ApiVersion => set(&mut api_version, "apiVersion", &mut map)?,
                        TopLevelKey::Kind => set(&mut kind, "kind", &mut map)?,
                        TopLevelKey::Metadata => set(&mut metadata, "metadata", &mut map)?,
                        TopLevelKey::Spec => set(&mut spec, "spec", &mut map)?,
                        TopLevelKey::Extension => {
                            map.next_value::<IgnoredAny>()?;
                        }
                    }
                }
                let missing = de::Error::missing_field;
                Ok(Manifest {
                    api_version: api_version.ok_or_else(|| missing("apiVersion"))?,
                    kind: kind.ok_or_else(|| missing("kind"))?,
                    metadata: metadata.ok_or_else(|| missing("metadata"))?,
                    spec: spec.ok_or_else(|| missing("spec"))?,
                })
            }
        }

        fn set<'de, A: MapAccess<'de>, T: Deserialize<'de>>(
            slot: &mut Option<T>,
            name: &'static str,
            map: &mut A,
        ) -> Result<(), A::Error> {
            if slot.is_some() {
                return Err(de::Error::duplicate_field(name));
            }
            *slot = Some(map.next_value()?);
            Ok(())
        }

        deserializer.deserialize_map(Fields)
    }
}

/// A key of the document's top level. Its own type, so that an unknown one is refused where it stands.
enum TopLevelKey {
    ApiVersion,
    Kind,
    Metadata,
    Spec,
    Extension,
}

impl<'de> Deserialize<'de> for TopLevelKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Key;

        impl Visitor<'_> for Key {
            type Value = TopLevelKey;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a field name")
            }

            fn visit_str<E: de::Error>(self, key: &str) -> Result<TopLevelKey, E> {
                match key {
                    "apiVersion" => Ok(TopLevelKey::ApiVersion),
                    "kind" => Ok(TopLevelKey::Kind),
                    "metadata" => Ok(TopLevelKey::Metadata),
                    "spec" => Ok(TopLevelKey::Spec),
                    extension if extension.starts_with("x-") => Ok(TopLevelKey::Extension),
                    unknown => Err(de::Error::unknown_field(
                        unknown,
                        &["apiVersion", "kind", "metadata", "spec"],
                    )),
                }
            }
        }

        deserializer.deserialize_identifier(Key)
    }
}

/// The version of the manifest format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub enum ApiVersion {
    /// The first.
    #[serde(rename = "evenkeel.dev/v1alpha1")]
    V1Alpha1,
}

/// The kind of document.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub enum Kind {
    /// The only one yet.
    ModelDeployment,
}

/// Name, labels and annotations, as in Kubernetes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Metadata {
    /// The deployment's identity: an RFC 1123 label. Renaming it is a removal and an addition; the file may be
    /// renamed freely.
    pub name: DeploymentName,
    /// Copied to status, metrics and container labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("x-evenkeel-change" = "live"))]
    pub labels: BTreeMap<String, String>,
    /// Free text. A change of `evenkeel.dev/restartedAt` restarts the instances; of any other nothing.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("x-evenkeel-change" = "live"))]
    pub annotations: BTreeMap<String, String>,
}

/// What to run, and how.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ManifestSpec {
    /// How many instances. 0 stops the deployment and keeps its file.
    #[schemars(range(min = 0, max = 64), extend("x-evenkeel-change" = "live", "default" = 1))]
    pub replicas: Option<u32>,
    /// Change nothing of this deployment and do not relaunch it; its health is still shown.
    #[schemars(extend("x-evenkeel-change" = "live", "default" = false))]
    pub paused: Option<bool>,
    /// Who is served first when devices are short: higher first.
    #[schemars(extend("x-evenkeel-change" = "live", "default" = 0))]
    pub priority: Option<i32>,
    /// Labels that the host must carry, such as `kubernetes.io/hostname`; elsewhere the document is not for this node.
    #[schemars(extend("x-evenkeel-change" = "live"))]
    pub node_selector: Option<BTreeMap<String, String>>,
    /// Which inference server.
    #[schemars(extend("x-evenkeel-change" = "restart"))]
    pub engine: EngineKind,
    /// How it runs.
    #[schemars(extend("x-evenkeel-change" = "restart", "default" = "process"))]
    pub runtime: Option<Runtime>,
    /// The program, as a path or a name looked up in PATH; by default the engine's own.
    #[schemars(extend("x-evenkeel-change" = "restart"))]
    pub binary: Option<String>,
    /// The model to serve.
    #[schemars(extend("x-evenkeel-change" = "restart"))]
    pub model: Option<ManifestModel>,
    /// The knobs that engines have in common.
    #[serde(default, skip_serializing_if = "Options::is_empty")]
    #[schemars(extend("x-evenkeel-change" = "restart"))]
    pub options: Options,
    /// Arguments appended last; a flag that evenkeel sets itself and that is repeated here is dropped in favour of this one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-evenkeel-change" = "restart"))]
    pub args: Vec<String>,
    /// Replaces the engine's whole command line. `$(PORT)`, `$(MODEL)`, `$(SERVED_NAME)` and names of `env` are filled in.
    #[schemars(extend("x-evenkeel-change" = "restart"))]
    pub command: Option<Vec<String>>,
    /// Environment variables.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(extend("x-evenkeel-change" = "restart"))]
    pub env: Vec<ManifestEnv>,
    /// The folder it runs in: an absolute path.
    #[schemars(extend("x-evenkeel-change" = "restart"))]
    pub working_dir: Option<PathBuf>,
    /// Which devices, or how many.
    #[schemars(extend("x-evenkeel-change" = "re-lease"))]
    pub devices: Option<ManifestDevices>,
    /// Exactly this port. Absent: the first free one from the engine's base port.
    #[schemars(extend("x-evenkeel-change" = "re-lease"))]
    pub port: Option<Port>,
    /// Asked until it succeeds once, while the model loads.
    #[schemars(extend("x-evenkeel-change" = "live"))]
    pub startup_probe: Option<ManifestProbe>,
    /// Its failure is shown and never restarts.
    #[schemars(extend("x-evenkeel-change" = "live"))]
    pub readiness_probe: Option<ManifestProbe>,
    /// Its failure, `failureThreshold` times in a row, restarts the instance.
    #[schemars(extend("x-evenkeel-change" = "live"))]
    pub liveness_probe: Option<ManifestProbe>,
    /// How long after its launch an instance must be ready; by default the engine's.
    #[schemars(range(min = 1), extend("x-evenkeel-change" = "live"))]
    pub startup_deadline_seconds: Option<u32>,
    /// When an instance that ended is launched again.
    #[schemars(extend("x-evenkeel-change" = "live", "default" = "Always"))]
    pub restart_policy: Option<RestartPolicy>,
    /// How long relaunches wait: the first is immediate, the following ones wait longer and longer.
    #[serde(default, skip_serializing_if = "ManifestBackoff::is_empty")]
    #[schemars(extend("x-evenkeel-change" = "live"))]
    pub backoff: ManifestBackoff,
    /// How long an instance may take to end before it is killed.
    #[schemars(extend("x-evenkeel-change" = "live", "default" = 20))]
    pub termination_grace_period_seconds: Option<u32>,
    /// For `runtime: docker`.
    #[schemars(extend("x-evenkeel-change" = "restart"))]
    pub docker: Option<Docker>,
    /// How a change is rolled out.
    #[serde(default, skip_serializing_if = "Strategy::is_default")]
    #[schemars(extend("x-evenkeel-change" = "live"))]
    pub strategy: Strategy,
    /// What becomes of the instances when the manifest is removed.
    #[schemars(extend("x-evenkeel-change" = "live", "default" = "Stop"))]
    pub deletion_policy: Option<DeletionPolicy>,
}

/// An inference server that evenkeel knows.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum EngineKind {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// llama.cpp's `llama-server`.
    Llamacpp,
    /// mlx-lm, on Apple Silicon.
    Mlx,
    /// ExLlamaV3 behind TabbyAPI.
    Exllamav3,
    /// The built-in stand-in, for trying things without a model or a GPU.
    Echo,
    /// Anything that serves HTTP: give `command`.
    Command,
}

impl EngineKind {
    /// The word of the manifest.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::Llamacpp => "llamacpp",
            Self::Mlx => "mlx",
            Self::Exllamav3 => "exllamav3",
            Self::Echo => "echo",
            Self::Command => "command",
        }
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

/// How an instance runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum Runtime {
    /// As a process of this host.
    #[default]
    Process,
    /// As a container.
    Docker,
}

impl fmt::Display for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Process => "process",
            Self::Docker => "docker",
        })
    }
}

/// The model to serve.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(inline)]
pub struct ManifestModel {
    /// An absolute path on this host.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-evenkeel-change" = "restart"))]
    pub path: Option<PathBuf>,
    /// A hub id, for engines that take one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-evenkeel-change" = "restart"))]
    pub id: Option<String>,
    /// What clients call the model; by default the deployment's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-evenkeel-change" = "restart"))]
    pub served_name: Option<String>,
}

/// The same eleven knobs for every engine. An engine that lacks one refuses it by name, unless it equals the default.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(inline)]
pub struct Options {
    /// Over how many devices each layer is split.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub tensor_parallel: Option<u32>,
    /// Over how many devices the layers are spread.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub pipeline_parallel: Option<u32>,
    /// The most tokens of one request, prompt and answer together.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_context_length: Option<u64>,
    /// The share of device memory to use, above 0 and at most 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub memory_fraction: Option<f64>,
    /// How many requests are served at a time.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub max_concurrent_requests: Option<u32>,
    /// The number format of the KV cache.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache_dtype: Option<String>,
    /// The number format of weights and activations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dtype: Option<String>,
    /// How the weights are quantised.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quantization: Option<String>,
    /// Run code that comes with the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub trust_remote_code: Option<bool>,
    /// Which parser finds tool calls in the output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_parser: Option<String>,
    /// Which parser finds the reasoning in the output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_parser: Option<String>,
}

impl Options {
    /// Whether nothing is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// One environment variable: give `value` or `valueFrom`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(inline)]
pub struct ManifestEnv {
    /// The variable's name.
    pub name: String,
    /// Its value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Where its value is read from at each launch; such a value never reaches a record, a log or an event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value_from: Option<ManifestValueFrom>,
}

/// Where a value comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(inline)]
pub struct ManifestValueFrom {
    /// An absolute path; a trailing line end is dropped.
    pub file: PathBuf,
}

/// Which devices, or how many: `count` or `ids`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(inline)]
pub struct ManifestDevices {
    /// Any free ones, this many; by default as many as the parallelism needs, 0 on a host without accelerators.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
    /// Exactly these: UUIDs, or `index:N`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ids: Option<Vec<String>>,
}

/// A Kubernetes probe.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(inline)]
pub struct ManifestProbe {
    /// A GET request: any 2xx is success.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub http_get: Option<ManifestHttpGet>,
    /// Success is that the port accepts a connection.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tcp_socket: Option<ManifestTcpSocket>,
    /// How long after the launch the first probe waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initial_delay_seconds: Option<u32>,
    /// How often.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub period_seconds: Option<u32>,
    /// How long an answer may take.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub timeout_seconds: Option<u32>,
    /// How many failures in a row count.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub failure_threshold: Option<u32>,
    /// How many successes in a row count.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1))]
    pub success_threshold: Option<u32>,
}

/// A GET request to the instance's own port on 127.0.0.1.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(inline)]
pub struct ManifestHttpGet {
    /// The path, beginning with `/`; by default the engine's health path.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}

/// A connection to the instance's own port on 127.0.0.1.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(inline)]
pub struct ManifestTcpSocket {}

/// When an instance that ended is launched again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub enum RestartPolicy {
    /// However it ended.
    #[default]
    Always,
    /// Unless it ended with exit code 0.
    OnFailure,
    /// Never.
    Never,
}

/// How long relaunches wait.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(inline)]
pub struct ManifestBackoff {
    /// What the second relaunch in a row waits; doubles from there. 0 turns the back-off off.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = 1))]
    pub initial_seconds: Option<u32>,
    /// The longest wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = 300))]
    pub max_seconds: Option<u32>,
    /// An instance that was ready this long starts again from the beginning.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("default" = 600))]
    pub reset_seconds: Option<u32>,
}

impl ManifestBackoff {
    /// Whether nothing is set.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Settings of a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(inline)]
pub struct Docker {
    /// The image; by default the engine's for this accelerator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// When the image is pulled.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pull: Option<Pull>,
    /// The size of `/dev/shm` in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shm_size_bytes: Option<u64>,
    /// The IPC namespace, such as `host`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ipc: Option<String>,
    /// Further folders.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<Volume>,
    /// The network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
}

/// When an image is pulled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub enum Pull {
    /// When it is not there yet.
    IfNotPresent,
    /// Before each launch.
    Always,
    /// Never.
    Never,
}

/// A folder of the host in the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(inline)]
pub struct Volume {
    /// The path on the host.
    pub host: PathBuf,
    /// The path in the container.
    pub container: PathBuf,
    /// Whether the container may only read it.
    #[serde(default)]
    pub read_only: bool,
}

/// How a change is rolled out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(inline)]
pub struct Strategy {
    /// The kind of roll-out.
    #[serde(default, rename = "type")]
    pub kind: StrategyKind,
}

impl Strategy {
    /// Whether it is the default.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// The kind of roll-out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub enum StrategyKind {
    /// Stop the old instance, then launch the new one.
    #[default]
    Recreate,
}

/// What becomes of the instances when the manifest is removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub enum DeletionPolicy {
    /// They are stopped.
    #[default]
    Stop,
    /// They are forgotten and left running.
    Orphan,
}
