//! The invariants, over arbitrary worlds.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::{committed, violations, worlds};
use crate::observed::SignalKind;
use crate::plan::{Action, Plan, RecordChange, plan};
use crate::spec::RestartKey;

/// A plan as text, with its launch ids replaced: they alone come from the nonce.
fn anonymous(plan: &Plan, nonce: u128) -> Vec<String> {
    let nonce = uuid::Uuid::from_u128(nonce);
    plan.steps
        .iter()
        .map(|(name, step)| {
            let id = crate::names::LaunchId::derive(nonce, name).to_string();
            format!("{name}: {step:?}").replace(&id, "ID")
        })
        .collect()
}

/// Properties of worlds that never come to something say nothing of it.
#[test]
fn arbitrary_worlds_come_to_every_action_and_every_wait() {
    let mut runner = TestRunner::deterministic();
    let worlds = worlds::world();
    let mut seen = BTreeSet::new();
    for _ in 0..800 {
        let world = worlds.new_tree(&mut runner).unwrap().current();
        for step in plan(world.inputs(1)).steps.values() {
            seen.extend(step.wait.as_ref().map(|wait| wait.reason.word()));
            seen.extend(step.action.as_ref().map(|action| match action {
                Action::Prepare(_) => "prepare",
                Action::Release { .. } => "release",
                Action::Resolve { .. } => "resolve",
                Action::Signal {
                    signal: SignalKind::Term,
                    ..
                } => "term",
                Action::Signal {
                    signal: SignalKind::Kill,
                    ..
                } => "kill",
                Action::Probe { .. } => "probe",
            }));
            seen.extend((step.record == Some(RecordChange::Forget)).then_some("forget"));
        }
    }
    let expected = [
        "",
        "prepare",
        "release",
        "resolve",
        "term",
        "kill",
        "probe",
        "forget",
        "InProgress",
        "Starting",
        "ProbeFailed",
        "Terminating",
        "Stuck",
        "CrashLoopBackOff",
        "LaunchLimit",
        "InsufficientDevices",
        "RecordQuarantined",
        "PortHeld",
        "PortTakenByStranger",
        "Unsupported",
        "RemovalGrace",
        "GitLock",
        "DesiredUnavailable",
        "Paused",
        "OtherNode",
        "Completed",
        "Unknown",
    ];
    let missing: Vec<_> = expected
        .iter()
        .filter(|word| !seen.contains(*word))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn every_plan_keeps_the_rules(world in worlds::world()) {
        let inputs = world.inputs(1);
        let broken = violations(inputs, &plan(inputs));
        prop_assert!(broken.is_empty(), "{}", broken.join("\n"));
    }

    #[test]
    fn planning_again_on_what_was_committed_yields_only_waits(world in worlds::world()) {
        let inputs = world.inputs(1);
        let first = plan(inputs);
        let mut after = world.clone();
        after.observed = committed(inputs, &first);
        let second = plan(after.inputs(2));
        prop_assert!(!second.is_change(), "first:\n{first}\nthen:\n{second}");
    }

    #[test]
    fn the_same_inputs_give_the_same_plan_in_any_order(world in worlds::world(), nonces in any::<[u128; 2]>()) {
        let mut reversed = world.clone();
        reversed.observed.quarantined.reverse();
        reversed.observed.instances = BTreeMap::new();
        for (name, instance) in world.observed.instances.iter().rev() {
            reversed.observed.instances.insert(name.clone(), instance.clone());
        }
        reversed.desired.deployments = BTreeMap::new();
        for (name, deployment) in world.desired.deployments.iter().rev() {
            reversed.desired.deployments.insert(name.clone(), deployment.clone());
        }
        let [one, other] = nonces;
        let first = plan(world.inputs(one));
        let second = plan(reversed.inputs(other));
        prop_assert_eq!(first.deadline, second.deadline);
        prop_assert_eq!(anonymous(&first, one), anonymous(&second, other));
    }

    #[test]
    fn changing_one_deployment_causes_no_action_on_another(
        world in worlds::world_without_contention(),
        chosen in any::<Index>(),
    ) {
        if world.desired.deployments.is_empty() {
            return Ok(());
        }
        let mut changed = world.clone();
        let at = chosen.index(world.desired.deployments.len());
        let deployment = changed.desired.deployments.values_mut().nth(at).unwrap();
        deployment.spec.args.push("--changed".to_owned());
        deployment.restart_key = RestartKey::of(&deployment.spec, deployment.labels.restarted_at());
        let name = deployment.name.clone();
        let others = |plan: Plan| -> Vec<_> {
            plan.steps.into_iter().filter(|(other, _)| other.deployment != name).collect()
        };
        prop_assert_eq!(others(plan(world.inputs(1))), others(plan(changed.inputs(1))));
    }

    #[test]
    fn a_plan_is_displayed_line_by_line(world in worlds::world()) {
        let plan = plan(world.inputs(1));
        let shown = plan.to_string();
        for name in plan.steps.keys() {
            let name = name.to_string();
            prop_assert!(shown.lines().any(|line| line.split_whitespace().take(2).any(|word| word == name)));
        }
    }
}
