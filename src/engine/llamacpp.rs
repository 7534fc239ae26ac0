//! llama.cpp: `llama-server --model MODEL`.

use super::args::Argument;
use super::{Engine, Facts, Knob, Refusal};
use crate::names::Port;
use crate::observed::Inventory;
use crate::spec::{InstanceSpec, ModelLocation};
use std::time::Duration;

/// llama.cpp.
pub struct LlamaCpp;

impl Engine for LlamaCpp {
    fn facts(&self) -> Facts {
        Facts {
            program: Some("llama-server"),
            base_port: 8081,
            health_path: Some("/health"),
            startup_deadline: Duration::from_mins(10),
            options: &[
                (Knob::MaxContextLength, "--ctx-size"),
                (Knob::MaxConcurrentRequests, "--parallel"),
            ],
            aliases: &[
                ("--model", &["-m"]),
                ("--alias", &["-a"]),
                ("--ctx-size", &["-c"]),
                ("--parallel", &["-np"]),
                ("--hf-repo", &["-hf", "-hfr"]),
            ],
        }
    }

    fn refusal(&self, _spec: &InstanceSpec, _inventory: &Inventory) -> Option<Refusal> {
        None
    }

    fn arguments(&self, spec: &InstanceSpec, port: Option<Port>) -> Vec<Argument> {
        let model = spec.model.location.as_ref().map(|location| match location {
            ModelLocation::Path(_) => Argument::value("--model", location.argument()),
            ModelLocation::Id(_) => Argument::value("--hf-repo", location.argument()),
        });
        let mut arguments: Vec<_> = model.into_iter().collect();
        arguments.push(Argument::value("--alias", spec.model.served_name.clone()));
        arguments.push(Argument::value("--host", "127.0.0.1"));
        arguments.extend(port.map(|port| Argument::value("--port", port.to_string())));
        arguments
    }

    fn closing_arguments(&self) -> Vec<Argument> {
        vec![Argument::switch("--metrics"), Argument::switch("--jinja")]
    }

    fn option_value(&self, knob: Knob, spec: &InstanceSpec) -> Option<String> {
        match knob {
            // It divides the context among its slots, and a user's length is meant per request.
            Knob::MaxContextLength => {
                let slots = u64::from(spec.options.max_concurrent_requests.unwrap_or(1));
                spec.options
                    .max_context_length
                    .map(|tokens| tokens.saturating_mul(slots).to_string())
            }
            other => other.value(&spec.options),
        }
    }
}
