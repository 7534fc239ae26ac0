//! vLLM: `vllm serve MODEL`.

use super::args::Argument;
use super::{Engine, Facts, Knob, Refusal};
use crate::names::Port;
use crate::observed::{DeviceKind, Inventory};
use crate::spec::{EnvValue, EnvVar, InstanceSpec, ModelLocation};
use std::time::Duration;

/// vLLM.
pub struct Vllm;

impl Engine for Vllm {
    fn facts(&self) -> Facts {
        Facts {
            program: Some("vllm"),
            base_port: 8000,
            health_path: Some("/health"),
            // Large models load and compile for a quarter of an hour.
            startup_deadline: Duration::from_mins(30),
            options: &[
                (Knob::TensorParallel, "--tensor-parallel-size"),
                (Knob::PipelineParallel, "--pipeline-parallel-size"),
                (Knob::MaxContextLength, "--max-model-len"),
                (Knob::MemoryFraction, "--gpu-memory-utilization"),
                (Knob::MaxConcurrentRequests, "--max-num-seqs"),
                (Knob::KvCacheDtype, "--kv-cache-dtype"),
                (Knob::Dtype, "--dtype"),
                (Knob::Quantization, "--quantization"),
                (Knob::TrustRemoteCode, "--trust-remote-code"),
                (Knob::ToolCallParser, "--tool-call-parser"),
                (Knob::ReasoningParser, "--reasoning-parser"),
            ],
            aliases: &[
                ("--tensor-parallel-size", &["-tp", "--tp"]),
                ("--pipeline-parallel-size", &["-pp", "--pp"]),
                ("--quantization", &["-q"]),
            ],
        }
    }

    fn refusal(&self, spec: &InstanceSpec, inventory: &Inventory) -> Option<Refusal> {
        // Whoever names a program knows what it was built for; CPU builds exist.
        if spec.binary.is_some() || spec.command.is_some() || inventory.has(DeviceKind::Cuda) {
            return None;
        }
        if inventory.has(DeviceKind::Rocm) {
            return Some(Refusal::new(
                "on ROCm it runs only in its container",
                "name your own build with `spec.binary`, or use `engine: llamacpp`",
            ));
        }
        Some(Refusal::new(
            "this host has no CUDA device",
            "name a CPU build with `spec.binary`, or use `engine: llamacpp`",
        ))
    }

    fn arguments(&self, spec: &InstanceSpec, port: Option<Port>) -> Vec<Argument> {
        let mut arguments = vec![Argument::Positional("serve".to_owned())];
        arguments.extend(
            spec.model
                .location
                .as_ref()
                .map(|model| Argument::Positional(model.argument())),
        );
        arguments.push(Argument::value(
            "--served-model-name",
            spec.model.served_name.clone(),
        ));
        arguments.push(Argument::value("--host", "127.0.0.1"));
        arguments.extend(port.map(|port| Argument::value("--port", port.to_string())));
        arguments
    }

    fn companion(&self, knob: Knob) -> Option<Argument> {
        (knob == Knob::ToolCallParser).then(|| Argument::switch("--enable-auto-tool-choice"))
    }

    fn environment(&self, spec: &InstanceSpec) -> Vec<EnvVar> {
        match spec.model.location {
            // With a local model it still asks the network for a missing file, for ten seconds.
            Some(ModelLocation::Path(_)) => vec![EnvVar {
                name: "HF_HUB_OFFLINE".to_owned(),
                value: EnvValue::Literal("1".to_owned()),
            }],
            Some(ModelLocation::Id(_)) | None => Vec::new(),
        }
    }
}
