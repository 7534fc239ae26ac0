//! The built-in stand-in: this very binary, as a model server without a model.

use super::args::Argument;
use super::{Engine, Facts, Refusal};
use crate::names::Port;
use crate::observed::Inventory;
use crate::spec::{InstanceSpec, ModelLocation};
use std::time::Duration;

/// The echo engine. It takes every option and heeds none, so that any manifest can be tried with it.
pub struct Echo;

impl Engine for Echo {
    fn facts(&self) -> Facts {
        Facts {
            program: None,
            base_port: 8900,
            health_path: Some("/health"),
            startup_deadline: Duration::from_mins(1),
            options: &[],
            aliases: &[("--served-model-name", &["--alias"])],
        }
    }

    fn refusal(&self, _spec: &InstanceSpec, _inventory: &Inventory) -> Option<Refusal> {
        None
    }

    fn arguments(&self, spec: &InstanceSpec, port: Option<Port>) -> Vec<Argument> {
        let mut arguments = vec![Argument::Positional("echo".to_owned())];
        if let Some(location @ ModelLocation::Path(_)) = &spec.model.location {
            arguments.push(Argument::value("--model", location.argument()));
        }
        arguments.push(Argument::value(
            "--served-model-name",
            spec.model.served_name.clone(),
        ));
        arguments.push(Argument::value("--host", "127.0.0.1"));
        arguments.extend(port.map(|port| Argument::value("--port", port.to_string())));
        arguments
    }
}
