//! The decision table, case by case: a world goes in, the plan's own words come out.
//!
//! Each case is also held against the rules of `check.rs`, and planned a second time on what it commits.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};
use uuid::Uuid;

use super::check::{World, committed, violations};
use super::{Intent, Settings, plan};
use crate::desired::{Desired, Folder, Unreadable};
use crate::engine;
use crate::failure::{ExitStatus, LaunchFailure};
use crate::names::LaunchId;
use crate::observed::{
    Device, DeviceKind, EffectKind, Health, Holds, Instance, Inventory, Liveness, Observed,
    Outcome, ProbeResult, Quarantined, SignalKind, Stranger,
};
use crate::record::{
    Cause, Ending, Handle, History, Launch, Lease, LeasedDevice, ProcessHandle, RECORD_VERSION,
    Record, Stop, StopReason,
};
use crate::spec::{Deployment, RestartKey, Source};

mod leases;

mod table;

mod timing;

mod wishes;

/// Noon.
const NOW: Timestamp = Timestamp::constant(1_767_268_800, 0);

fn ago(seconds: u64) -> Timestamp {
    NOW - Duration::from_secs(seconds)
}

/// A manifest, from its name and its `spec`.
fn deployment(name: &str, spec: Value) -> Deployment {
    let mut manifest = json!({
        "apiVersion": "evenkeel.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": name},
    });
    manifest["spec"] = spec;
    let source = Source {
        file: format!("{name}.yaml").into(),
        document: 0,
        revision: None,
    };
    Deployment::from_manifest(serde_json::from_value(manifest).unwrap(), source).unwrap()
}

fn echo(name: &str) -> Deployment {
    deployment(name, json!({"engine": "echo"}))
}

/// Wants so many devices, whichever.
fn greedy(name: &str, devices: u32) -> Deployment {
    prior(name, devices, 0)
}

/// Wants so many devices, with a priority.
fn prior(name: &str, devices: u32, priority: i32) -> Deployment {
    deployment(
        name,
        json!({"engine": "echo", "devices": {"count": devices}, "priority": priority}),
    )
}

/// Wants exactly these devices.
fn pinned(name: &str, ids: &[&str]) -> Deployment {
    deployment(name, json!({"engine": "echo", "devices": {"ids": ids}}))
}

/// Wants exactly this port.
fn exact(name: &str, port: u16) -> Deployment {
    deployment(name, json!({"engine": "echo", "port": port}))
}

/// The same deployment after an edit that needs a relaunch.
fn edited(deployment: &Deployment) -> Deployment {
    let mut edited = deployment.clone();
    edited.spec.args.push("--edited".to_owned());
    edited.restart_key = RestartKey::of(&edited.spec, edited.labels.restarted_at());
    edited
}

/// The same deployment after an edit of fields that need none.
fn tuned(deployment: &Deployment, change: impl FnOnce(&mut Deployment)) -> Deployment {
    let mut tuned = deployment.clone();
    change(&mut tuned);
    assert_eq!(
        tuned.restart_key,
        RestartKey::of(&tuned.spec, tuned.labels.restarted_at())
    );
    tuned
}

fn paused(deployment: &Deployment) -> Deployment {
    tuned(deployment, |deployment| deployment.spec.paused = true)
}

/// The instance 0 of a deployment with a record and without a launch.
fn idle(deployment: &Deployment) -> Instance {
    numbered(deployment, 0)
}

fn numbered(deployment: &Deployment, ordinal: u32) -> Instance {
    Instance::of_record(Record {
        version: RECORD_VERSION,
        name: deployment.name.instance(ordinal),
        node: "localhost".to_owned(),
        metadata: deployment.labels.clone(),
        source: deployment.source.clone(),
        spec: deployment.spec.clone(),
        restart_key: deployment.restart_key,
        launch: None,
        history: History::default(),
    })
}

/// Its launch was recorded 10 s ago, on the engine's base port or its own, and nothing more is known of it.
fn reserved(deployment: &Deployment) -> Instance {
    let mut instance = idle(deployment);
    let spec = &deployment.spec;
    let base = engine::engine(spec.engine).facts().base_port;
    instance.record.launch = Some(Launch {
        id: LaunchId::derive(Uuid::from_u128(7), &instance.record.name),
        handle: None,
        lease: Lease {
            port: spec.port.or_else(|| base.try_into().ok()),
            devices: Vec::new(),
        },
        reserved_at: ago(10),
        started_at: None,
        ready_at: None,
        stop: None,
    });
    instance
}

fn handle() -> Handle {
    Handle::Process(ProcessHandle {
        pid: 4242,
        start_ticks: 1,
        boot_id: "boot".to_owned(),
    })
}

/// It was started 10 s ago, is alive, and was probed a moment ago in vain.
fn starting(deployment: &Deployment) -> Instance {
    let mut instance = reserved(deployment);
    with_launch(&mut instance, |launch| {
        launch.handle = Some(handle());
        launch.started_at = Some(ago(10));
    });
    instance.liveness = Liveness::Alive;
    instance.health = Health {
        since: Some(ago(10)),
        ..Health::default()
    };
    let refused = ProbeResult::Loading {
        detail: "connection refused".to_owned(),
    };
    instance.health.startup.count(NOW, refused);
    instance
}

/// It has been ready for a minute and was probed a second ago.
fn ready(deployment: &Deployment) -> Instance {
    let mut instance = starting(deployment);
    with_launch(&mut instance, |launch| {
        launch.reserved_at = ago(70);
        launch.started_at = Some(ago(70));
        launch.ready_at = Some(ago(60));
    });
    instance.health = Health {
        since: Some(ago(70)),
        ..Health::default()
    };
    instance.health.startup.count(ago(60), ProbeResult::Success);
    instance.health.liveness.count(ago(1), ProbeResult::Success);
    instance
}

/// It was ready, and was asked 3 s ago to end.
fn stopping(deployment: &Deployment) -> Instance {
    let mut instance = ready(deployment);
    with_launch(&mut instance, |launch| {
        launch.stop = Some(Stop {
            asked_at: ago(3),
            reason: StopReason::Removed,
            killed_at: None,
        });
    });
    instance.signalled = Some((ago(3), SignalKind::Term));
    instance
}

/// It was ready, and nothing of it is left.
fn exited(deployment: &Deployment) -> Instance {
    but(ready(deployment), |instance| instance.liveness = gone())
}

fn gone() -> Liveness {
    Liveness::Gone {
        status: ExitStatus {
            code: Some(1),
            ..ExitStatus::UNKNOWN
        },
        log_tail: String::new(),
    }
}

fn unknown() -> Liveness {
    Liveness::Unknown {
        why: "its environment cannot be read".to_owned(),
    }
}

fn leader_gone() -> Liveness {
    Liveness::LeaderGone {
        members: 2,
        status: ExitStatus::UNKNOWN,
    }
}

fn but(mut instance: Instance, change: impl FnOnce(&mut Instance)) -> Instance {
    change(&mut instance);
    instance
}

fn with_launch(instance: &mut Instance, change: impl FnOnce(&mut Launch)) {
    change(instance.record.launch.as_mut().unwrap());
}

/// The instance on another port, holding devices.
fn holding(instance: Instance, port: u16, devices: &[&str]) -> Instance {
    but(instance, |instance| {
        with_launch(instance, |launch| {
            launch.lease = Lease {
                port: port.try_into().ok(),
                devices: devices
                    .iter()
                    .map(|id| LeasedDevice {
                        id: id.parse().unwrap(),
                        bytes: None,
                    })
                    .collect(),
            };
        });
    })
}

/// The last launch of an instance without one ended so long ago, for the so manieth time in a row.
fn failed(deployment: &Deployment, failures: u32, seconds_ago: u64) -> Instance {
    but(idle(deployment), |instance| {
        instance.record.history = History {
            restarts: failures.saturating_sub(1),
            failures,
            last: Some(Ending {
                at: ago(seconds_ago),
                launch_id: LaunchId::derive(Uuid::from_u128(7), &instance.record.name),
                cause: exit(1),
            }),
        };
    })
}

fn exit(code: i32) -> Cause {
    Cause::Exited {
        status: ExitStatus {
            code: Some(code),
            ..ExitStatus::UNKNOWN
        },
        log_tail: String::new(),
    }
}

/// The folder has been listed for an hour, and wishes this.
fn wanting<const N: usize>(deployments: [Deployment; N]) -> World {
    World {
        desired: Desired {
            folder: Folder::Listed,
            deployments: deployments
                .into_iter()
                .map(|deployment| (deployment.name.clone(), deployment))
                .collect(),
            first_listed_at: Some(ago(3600)),
            ..Desired::default()
        },
        observed: Observed::default(),
        inventory: Inventory::default(),
        settings: Settings::default(),
        now: NOW,
    }
}

impl World {
    fn with<const N: usize>(mut self, instances: [Instance; N]) -> Self {
        for instance in instances {
            let name = instance.record.name.clone();
            self.observed.instances.insert(name, instance);
        }
        self
    }

    fn but(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// The host has so many CUDA devices, `GPU-0` and so on.
    fn gpus(self, count: usize) -> Self {
        self.devices(&vec![(DeviceKind::Cuda, false); count])
    }

    fn devices(mut self, devices: &[(DeviceKind, bool)]) -> Self {
        self.inventory.devices = devices
            .iter()
            .enumerate()
            .map(|(number, (kind, unified))| Device {
                id: format!("GPU-{number}").parse().unwrap(),
                kind: *kind,
                name: String::new(),
                memory_bytes: None,
                unified: *unified,
            })
            .collect();
        self
    }

    /// The instance has been waiting since then.
    fn waiting(mut self, instance: &str, seconds: u64) -> Self {
        let name = instance.parse().unwrap();
        self.observed.waiting_since.insert(name, ago(seconds));
        self
    }

    /// Somebody was seen on a port.
    fn stranger(mut self, port: u16, seconds_ago: u64) -> Self {
        let stranger = Stranger {
            pid: Some(99),
            command: Some("nginx".to_owned()),
            seen_at: ago(seconds_ago),
        };
        let port = port.try_into().unwrap();
        self.observed.strangers.insert(port, stranger);
        self
    }

    fn unavailable(mut self) -> Self {
        self.desired.folder = Folder::Unavailable {
            why: "not mounted".to_owned(),
        };
        self.desired.first_listed_at = None;
        self
    }

    fn quarantined(mut self, holds: Holds) -> Self {
        self.observed.quarantined.push(Quarantined {
            file: "gone-0.json".into(),
            holds,
        });
        self
    }

    /// The plan, which must keep the rules and must be carried out by its commits.
    #[track_caller]
    fn planned(&self) -> super::Plan {
        let inputs = self.inputs(1);
        let planned = plan(inputs);
        let broken = violations(inputs, &planned);
        assert!(broken.is_empty(), "{planned}\n{}", broken.join("\n"));
        let again = plan(self.clone().then(&planned).inputs(2));
        assert!(!again.is_change(), "{planned}\nand then\n{again}");
        planned
    }

    /// The world after a plan's commits.
    fn then(mut self, planned: &super::Plan) -> Self {
        self.observed = committed(self.inputs(1), planned);
        self
    }

    /// The plan is this.
    #[track_caller]
    fn plans<const N: usize>(&self, lines: [&str; N]) {
        let shown = self.planned().to_string();
        let shown: Vec<_> = shown.lines().map(str::trim_end).collect();
        assert_eq!(shown, lines, "\n{}", shown.join("\n"));
    }

    /// What a person is told is this.
    #[track_caller]
    fn tells<const N: usize>(&self, lines: [&str; N]) {
        let told: Vec<_> = self
            .planned()
            .steps
            .into_values()
            .flat_map(|step| step.events)
            .map(|event| format!("{} {}: {}", event.subject(), event.reason, event.message))
            .collect();
        assert_eq!(told, lines);
    }

    /// When the loop looks again by itself: so long from now.
    #[track_caller]
    fn looks_again_in(&self, seconds: f64) {
        let deadline = self.planned().deadline.expect("there is a deadline");
        let wait = deadline.duration_since(self.now).as_secs_f64();
        assert!((wait - seconds).abs() < 1e-6, "{wait} s");
    }

    /// The record that the plan writes for an instance.
    #[track_caller]
    fn writes(&self, instance: &str) -> Option<Record> {
        let planned = self.planned();
        let step = planned.steps.get(&instance.parse().unwrap())?;
        match &step.record {
            Some(super::RecordChange::Write(record)) => Some((**record).clone()),
            Some(super::RecordChange::Forget) | None => None,
        }
    }
}

/// One row of the table: wanted with the same restart key, wanted and changed, not wanted.
#[track_caller]
fn row(instance: &Instance, of: &Deployment, [same, changed, removed]: [&str; 3]) {
    wanting([of.clone()]).with([instance.clone()]).plans([same]);
    wanting([edited(of)])
        .with([instance.clone()])
        .plans([changed]);
    wanting([]).with([instance.clone()]).plans([removed]);
}
