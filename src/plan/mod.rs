//! The plan: from what is wished and what is known to what is done now. Pure, synchronous, total.
//!
//! A pass decides in two rounds. First each instance by itself (`instance.rs`): from its record, its liveness and what is
//! wished to an action, a wait, or the wish to be launched. Then all that wish to be launched together ([`lease`]):
//! devices, ports and the launch limit need one view of everything.
//!
//! Invariants, each a property test in `check.rs`: the same inputs give the same plan in any order; planning again on
//! what a plan's commits produce yields only waits; no device and no port is in two leases; what is unreadable or
//! unknown is neither removed nor freed; at most one action per instance.

pub mod action;

pub mod backoff;

pub mod health;

pub mod state;

mod instance;

pub mod lease;

#[cfg(test)]
pub(crate) mod check;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use jiff::Timestamp;
use uuid::Uuid;

use crate::desired::{Absence, Desired, Folder};
use crate::names::InstanceName;
use crate::observed::{Instance, Inventory, Observed};
use crate::record::{Record, StopReason};
use crate::spec::Deployment;

pub use lease::STRANGER_MEMORY;

pub use action::{Action, Plan, RecordChange, Step, Wait, WaitReason};
use instance::{Candidate, Decision, Wish};

/// Everything a plan is made from.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// What the folder wishes.
    pub desired: &'a Desired,
    /// What is known.
    pub observed: &'a Observed,
    /// The devices of the host.
    pub inventory: &'a Inventory,
    /// How the operator set evenkeel up.
    pub settings: &'a Settings,
    /// The present.
    pub now: Timestamp,
    /// Random, used for one pass: launch ids are derived from it.
    pub nonce: Uuid,
}

/// How the operator set evenkeel up.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// How long a document must be absent before its instances are stopped.
    pub removal_grace: Duration,
    /// How many instances may be between launch and ready; 0: any number.
    pub max_launches: u32,
    /// Instead of every engine's own start-up deadline.
    pub startup_deadline: Option<Duration>,
    /// What this host is called.
    pub node: String,
    /// The labels that `nodeSelector` looks at.
    pub node_labels: BTreeMap<String, String>,
    /// Keep what is wished, or stop everything.
    pub intent: Intent,
}

/// Keep what is wished, or stop everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intent {
    /// Launch, watch, relaunch, stop as the folder wishes.
    Reconcile,
    /// Stop every instance, whatever the folder wishes.
    StopAll,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            // Editors and `git checkout` unlink a file and create it again, within this.
            removal_grace: Duration::from_secs(2),
            // Cold starts fight for disk and memory.
            max_launches: 8,
            startup_deadline: None,
            node: "localhost".to_owned(),
            node_labels: BTreeMap::new(),
            intent: Intent::Reconcile,
        }
    }
}

/// Decides what to do now.
pub fn plan(inputs: Inputs<'_>) -> Plan {
    let mut decisions = Decisions {
        inputs,
        steps: Vec::with_capacity(inputs.observed.instances.len()),
        candidates: Vec::new(),
    };
    // Both are in the order of names, so one walk over both finds what belongs together and what is missing.
    let mut instances = inputs.observed.instances.iter().peekable();
    for deployment in inputs.desired.deployments.values() {
        while let Some((name, instance)) =
            instances.next_if(|(name, _)| name.deployment < deployment.name)
        {
            decisions.recorded(name, instance, None);
        }
        let mut next_ordinal = 0;
        while let Some((name, instance)) =
            instances.next_if(|(name, _)| name.deployment == deployment.name)
        {
            decisions.absent(deployment, next_ordinal..name.ordinal);
            decisions.recorded(name, instance, Some(deployment));
            next_ordinal = name.ordinal.saturating_add(1);
        }
        decisions.absent(deployment, next_ordinal..u32::MAX);
    }
    for (name, instance) in instances {
        decisions.recorded(name, instance, None);
    }
    let mut steps = decisions.steps.into_iter().collect();
    lease::grant(inputs, &mut steps, decisions.candidates);
    let deadline = steps
        .values()
        .filter_map(|step| step.wait.as_ref()?.until)
        .min();
    Plan { steps, deadline }
}

/// What the first round came to.
struct Decisions<'a> {
    inputs: Inputs<'a>,
    /// In the order of names.
    steps: Vec<(InstanceName, Step)>,
    candidates: Vec<Candidate<'a>>,
}

impl<'a> Decisions<'a> {
    /// An instance with a record; `deployment` is its own, if it is among the accepted ones.
    fn recorded(
        &mut self,
        name: &InstanceName,
        instance: &'a Instance,
        deployment: Option<&'a Deployment>,
    ) {
        let wish = wish(self.inputs, &instance.record, deployment);
        match instance::decide(self.inputs, instance, wish) {
            Decision::Step(step) => self.steps.push((name.clone(), step)),
            Decision::Launch(candidate) => self.candidates.push(candidate),
        }
    }

    /// Those of a deployment's wanted instances that have no record, among these ordinals.
    fn absent(&mut self, deployment: &Deployment, ordinals: Range<u32>) {
        if self.inputs.settings.intent == Intent::StopAll {
            return;
        }
        for ordinal in ordinals.start..ordinals.end.min(deployment.spec.replicas) {
            let name = deployment.name.instance(ordinal);
            match instance::decide_absent(self.inputs, &name, deployment) {
                Decision::Step(step) => self.steps.push((name, step)),
                Decision::Launch(candidate) => self.candidates.push(candidate),
            }
        }
    }
}

/// What is wished of an instance that has a record; `deployment` is its own, if it is among the accepted ones.
fn wish<'a>(inputs: Inputs<'a>, record: &Record, deployment: Option<&'a Deployment>) -> Wish<'a> {
    if inputs.settings.intent == Intent::StopAll {
        return Wish::Gone(StopReason::Shutdown);
    }
    if let Some(deployment) = deployment {
        // Paused means: change nothing, so nothing is scaled down either.
        if deployment.spec.paused {
            return Wish::As(deployment);
        }
        let is_wanted = selects_this_node(deployment, inputs.settings)
            && record.name.ordinal < deployment.spec.replicas;
        let is_changed = || deployment.restart_key != record.restart_key;
        return match inputs.desired.folder {
            Folder::Listed if is_wanted => Wish::As(deployment),
            Folder::Listed => Wish::Gone(StopReason::Removed),
            // Nothing is stopped while the folder cannot be read, not even for an edit that was seen before.
            Folder::Unavailable { .. } if is_wanted && !is_changed() => Wish::As(deployment),
            Folder::Unavailable { .. } => Wish::AsRecorded(None),
        };
    }
    match inputs.desired.absence(record) {
        Absence::Unproven => Wish::AsRecorded(None),
        Absence::Since(since) => {
            let grace_ends = since + inputs.settings.removal_grace;
            let git_ends = inputs.desired.removals_wait_until;
            if inputs.now < grace_ends {
                Wish::AsRecorded(Some(Wait {
                    reason: WaitReason::RemovalGrace,
                    until: Some(grace_ends),
                }))
            } else if git_ends.is_some_and(|until| inputs.now < until) {
                Wish::AsRecorded(Some(Wait {
                    reason: WaitReason::GitLock,
                    until: git_ends,
                }))
            } else {
                Wish::Gone(StopReason::Removed)
            }
        }
    }
}

fn selects_this_node(deployment: &Deployment, settings: &Settings) -> bool {
    deployment
        .spec
        .node_selector
        .iter()
        .all(|(label, value)| settings.node_labels.get(label) == Some(value))
}

/// The ports that manifests want exactly: nobody else is given them when scanning.
fn exact_ports(desired: &Desired) -> BTreeSet<crate::names::Port> {
    desired
        .deployments
        .values()
        .filter_map(|deployment| deployment.spec.port)
        .collect()
}
