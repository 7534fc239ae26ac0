//! Anything that serves HTTP: the manifest's own command.

use super::args::Argument;
use super::{Engine, Facts, Refusal};
use crate::names::Port;
use crate::observed::Inventory;
use crate::spec::InstanceSpec;
use std::time::Duration;

/// A command of the user's. The spec has one, or it was not accepted.
pub struct Command;

impl Engine for Command {
    fn facts(&self) -> Facts {
        Facts {
            program: Some(""),
            base_port: 9000,
            health_path: None,
            // Nothing is known of it, so it is given what the slowest known engine needs.
            startup_deadline: Duration::from_mins(30),
            options: &[],
            aliases: &[],
        }
    }

    fn refusal(&self, spec: &InstanceSpec, _inventory: &Inventory) -> Option<Refusal> {
        spec.options
            .ne(&crate::manifest::Options {
                tensor_parallel: spec.options.tensor_parallel,
                pipeline_parallel: spec.options.pipeline_parallel,
                ..Default::default()
            })
            .then(|| {
                Refusal::new(
                    "a command of your own takes no `spec.options`",
                    "put its flags into `spec.command`",
                )
            })
    }

    fn arguments(&self, _spec: &InstanceSpec, _port: Option<Port>) -> Vec<Argument> {
        Vec::new()
    }
}
