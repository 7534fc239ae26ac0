//! Engines that the manifest knows and this version cannot start yet.

use super::args::Argument;
use super::{Engine, Facts, Refusal};
use crate::manifest::EngineKind;
use crate::names::Port;
use crate::observed::Inventory;
use crate::spec::InstanceSpec;
use std::time::Duration;

/// An engine to come: refused with the way out, never half started.
pub struct Later(pub EngineKind);

impl Engine for Later {
    fn facts(&self) -> Facts {
        Facts {
            program: Some(self.0.as_str()),
            base_port: 8000,
            health_path: Some("/health"),
            startup_deadline: Duration::from_mins(15),
            options: &[],
            aliases: &[],
        }
    }

    fn refusal(&self, spec: &InstanceSpec, _inventory: &Inventory) -> Option<Refusal> {
        spec.command.is_none().then(|| {
            Refusal::new(
                "this version cannot start it by itself yet",
                "give its command line as `spec.command`",
            )
        })
    }

    fn arguments(&self, _spec: &InstanceSpec, _port: Option<Port>) -> Vec<Argument> {
        Vec::new()
    }
}
