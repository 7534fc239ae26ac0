//! Arbitrary worlds: any mixture of what is wished, what is recorded and what is known, as far as it can be at all.
//!
//! Invariant: no device and no port is in two leases to begin with.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use proptest::collection::{btree_map, btree_set, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};

use super::World;
use super::lives::{Life, News, launch_id, lease, life, stranger};
use crate::desired::{Desired, Folder, Unreadable};
use crate::manifest::{
    DeletionPolicy, EngineKind, ManifestHttpGet, ManifestProbe, ManifestTcpSocket, RestartPolicy,
    Runtime,
};
use crate::names::{DeploymentName, InstanceName, Port};
use crate::observed::{Device, DeviceKind, Holds, Instance, Inventory, Observed, Quarantined};
use crate::plan::{Intent, Settings};
use crate::record::{Lease, RECORD_VERSION, Record};
use crate::spec::{Backoff, Deployment, DeviceRequest, InstanceSpec, Labels, RestartKey, Source};
use crate::testing;

/// The present of all worlds.
pub(super) fn now() -> Timestamp {
    Timestamp::new(1_800_000_000, 250_000_000).unwrap()
}

/// A time around the present; sometimes ahead of it, as when the clock was set back.
pub(super) fn moment() -> impl Strategy<Value = Timestamp> {
    let milliseconds = prop_oneof![
        4 => -30_000..=0_i64,
        2 => -4_000_000..=0_i64,
        1 => Just(0_i64),
        1 => -30_000..30_000_i64,
    ];
    let near = milliseconds.prop_map(|offset| now() + SignedDuration::from_millis(offset));
    // What nobody wrote can still be read: the plan is total.
    let far = select(vec![Timestamp::MIN, Timestamp::MAX]);
    prop_oneof![60 => near, 1 => far]
}

pub(super) fn past() -> impl Strategy<Value = Timestamp> {
    moment().prop_map(|at| at.min(now()))
}

// Lists rather than patterns: a pattern is parsed anew for each value, and most of the time would go there.
fn name() -> impl Strategy<Value = DeploymentName> {
    select(vec!["a", "b", "c", "d", "e"]).prop_map(|text| text.parse().unwrap())
}

fn file() -> impl Strategy<Value = &'static str> {
    select(vec!["a.yaml", "b.yaml", "c.yaml"])
}

/// A port; few, so that they meet.
pub(super) fn port() -> impl Strategy<Value = Port> {
    prop_oneof![8900..8904_u16, 8080..8083_u16, 8000..8002_u16]
        .prop_map(|number| number.try_into().unwrap())
}

fn node_selector() -> impl Strategy<Value = BTreeMap<String, String>> {
    let zone = select(vec!["x", "y"]);
    let selector = option::weighted(
        0.15,
        zone.prop_map(|zone| ("zone".to_owned(), zone.to_owned())),
    );
    selector.prop_map(|label| label.into_iter().collect())
}

fn probe() -> impl Strategy<Value = Option<ManifestProbe>> {
    let path = select(vec![None, Some("/health".to_owned())]);
    let small = (
        option::of(option::of(path)),
        option::of(0..20_u32),
        option::of(1..20_u32),
        option::of(1..4_u32),
    )
        .prop_map(
            |(method, initial_delay_seconds, period_seconds, threshold)| {
                let (http_get, tcp_socket) = match method {
                    None => (None, None),
                    Some(None) => (None, Some(ManifestTcpSocket {})),
                    Some(Some(path)) => (Some(ManifestHttpGet { path }), None),
                };
                ManifestProbe {
                    http_get,
                    tcp_socket,
                    initial_delay_seconds,
                    period_seconds,
                    timeout_seconds: None,
                    failure_threshold: threshold,
                    success_threshold: threshold,
                }
            },
        );
    let any = prop_oneof![15 => small.boxed(), 1 => testing::probe().boxed()];
    option::weighted(0.2, any)
}

fn device_request() -> impl Strategy<Value = DeviceRequest> {
    let id = select(vec![
        "GPU-0", "GPU-1", "GPU-2", "index:0", "index:1", "GPU-99",
    ]);
    prop_oneof![
        3 => Just(DeviceRequest::Parallelism),
        3 => (0..4_u32).prop_map(DeviceRequest::Count),
        2 => btree_set(id, 1..3)
            .prop_map(|ids| DeviceRequest::Ids(ids.into_iter().map(str::to_owned).collect())),
    ]
}

/// The kinds of spec that make instances meet, now and then with any fields at all.
fn spec() -> BoxedStrategy<InstanceSpec> {
    let engine = select(vec![
        EngineKind::Echo,
        EngineKind::Echo,
        EngineKind::Vllm,
        EngineKind::Llamacpp,
        EngineKind::Command,
        EngineKind::Mlx,
    ]);
    let wishes = (
        (
            0..4_u32,
            prop::bool::weighted(0.15),
            -1..2_i32,
            node_selector(),
        ),
        (engine, prop::bool::weighted(0.05), any::<bool>()),
        (
            option::of(1..4_u32),
            device_request(),
            option::weighted(0.3, port()),
        ),
        (probe().boxed(), probe().boxed(), probe().boxed()),
        (
            option::of(1..60_u32),
            select(vec![
                RestartPolicy::Always,
                RestartPolicy::OnFailure,
                RestartPolicy::Never,
            ]),
            (0..5_u32, 0..60_u32, 0..60_u32),
            0..30_u32,
            select(vec![
                DeletionPolicy::Stop,
                DeletionPolicy::Stop,
                DeletionPolicy::Orphan,
            ]),
        ),
    );
    let arbitrary = prop_oneof![
        15 => Just(None),
        1 => testing::spec().prop_map(Some),
    ];
    (wishes, arbitrary.boxed())
        .prop_map(|(wishes, arbitrary)| {
            let (
                (replicas, paused, priority, node_selector),
                (engine, is_docker, has_port),
                (tensor_parallel, devices, port),
                (startup_probe, readiness_probe, liveness_probe),
                (startup_deadline_seconds, restart_policy, backoff, grace, deletion_policy),
            ) = wishes;
            let (initial_seconds, more, reset_seconds) = backoff;
            let spec = match arbitrary {
                Some(spec) => InstanceSpec {
                    replicas: spec.replicas % 4,
                    node_selector,
                    ..spec
                },
                None => InstanceSpec {
                    replicas,
                    paused,
                    priority,
                    node_selector,
                    runtime: if is_docker {
                        Runtime::Docker
                    } else {
                        Runtime::Process
                    },
                    options: crate::manifest::Options {
                        tensor_parallel: tensor_parallel.filter(|degree| *degree > 1),
                        ..Default::default()
                    },
                    command: (engine == EngineKind::Command).then(|| {
                        let argument = if has_port { "$(PORT)" } else { "--quiet" };
                        vec!["serve".to_owned(), argument.to_owned()]
                    }),
                    devices,
                    port,
                    startup_probe,
                    readiness_probe,
                    liveness_probe,
                    startup_deadline_seconds,
                    restart_policy,
                    backoff: Backoff {
                        initial_seconds,
                        max_seconds: initial_seconds + more,
                        reset_seconds,
                    },
                    termination_grace_period_seconds: grace,
                    deletion_policy,
                    ..plain_spec(engine)
                },
            };
            acceptable(spec)
        })
        .boxed()
}

fn plain_spec(engine: EngineKind) -> InstanceSpec {
    let manifest = serde_json::json!({
        "apiVersion": "evenkeel.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": "a"},
        "spec": {"engine": engine, "command": ["serve"], "model": {"path": "/models/m"}},
    });
    let manifest = serde_json::from_value(manifest).unwrap();
    let source = Source {
        file: "a.yaml".into(),
        document: 0,
        revision: None,
    };
    let mut spec = Deployment::from_manifest(manifest, source).unwrap().spec;
    spec.command = None;
    spec
}

/// What the checks of a manifest make sure of.
fn acceptable(mut spec: InstanceSpec) -> InstanceSpec {
    if spec.engine == EngineKind::Command && spec.command.is_none() {
        spec.command = Some(vec!["serve".to_owned()]);
    }
    let is_single =
        spec.port.is_some() || matches!(&spec.devices, DeviceRequest::Ids(ids) if !ids.is_empty());
    if is_single {
        spec.replicas = spec.replicas.min(1);
    }
    spec
}

fn source() -> impl Strategy<Value = Source> {
    (file(), 0..2_usize).prop_map(|(file, document)| Source {
        file: file.into(),
        document,
        revision: None,
    })
}

fn labels() -> impl Strategy<Value = Labels> {
    let restarted_at = option::weighted(0.2, select(vec!["1", "2"]));
    restarted_at.prop_map(|at| Labels {
        labels: BTreeMap::new(),
        annotations: at
            .map(|at| (crate::spec::RESTARTED_AT.to_owned(), at.to_owned()))
            .into_iter()
            .collect(),
    })
}

fn deployment(
    name: DeploymentName,
    spec: InstanceSpec,
    labels: Labels,
    source: Source,
) -> Deployment {
    Deployment {
        name,
        restart_key: RestartKey::of(&spec, labels.restarted_at()),
        labels,
        source,
        spec,
    }
}

fn inventory() -> impl Strategy<Value = Inventory> {
    let kind = prop_oneof![
        8 => Just(DeviceKind::Cuda),
        2 => Just(DeviceKind::Rocm),
        1 => Just(DeviceKind::Xpu),
        1 => Just(DeviceKind::Metal),
    ];
    let device = (kind, prop::bool::weighted(0.2));
    let order = subsequence(vec![0, 1, 2, 3, 4, 5], 0..=6).prop_shuffle();
    (vec(device, 6), order).prop_map(|(devices, order)| Inventory {
        devices: order
            .into_iter()
            .map(|number| {
                let (kind, unified) = devices[number];
                Device {
                    id: format!("GPU-{number}").parse().unwrap(),
                    kind,
                    name: String::new(),
                    memory_bytes: None,
                    unified,
                }
            })
            .collect(),
    })
}

fn settings() -> impl Strategy<Value = Settings> {
    (
        0..4_u64,
        0..4_u32,
        option::weighted(0.2, 1..60_u64),
        node_selector(),
        prop::bool::weighted(0.07),
    )
        .prop_map(
            |(grace, max_launches, deadline, node_labels, stops_all)| Settings {
                removal_grace: Duration::from_secs(grace),
                max_launches,
                startup_deadline: deadline.map(Duration::from_secs),
                node: "here".to_owned(),
                node_labels,
                intent: if stops_all {
                    Intent::StopAll
                } else {
                    Intent::Reconcile
                },
            },
        )
}

fn desired() -> impl Strategy<Value = Desired> {
    let deployments = btree_map(name(), (spec(), labels(), source()), 0..5);
    let unreadable = btree_map(
        file(),
        btree_set(select(vec!["a", "b", "c", "none"]), 0..2),
        0..3,
    );
    let unreadable = prop_oneof![2 => Just(BTreeMap::new()), 1 => unreadable];
    let first_listed_at = option::weighted(0.9, past());
    let removals_wait_until = option::weighted(0.15, moment());
    let missing = btree_map(name(), past(), 0..3);
    (
        prop::bool::weighted(0.8),
        deployments.boxed(),
        unreadable,
        missing,
        first_listed_at,
        removals_wait_until,
    )
        .prop_map(
            |(
                is_listed,
                deployments,
                unreadable,
                missing,
                first_listed_at,
                removals_wait_until,
            )| {
                let folder = if is_listed {
                    Folder::Listed
                } else {
                    Folder::Unavailable {
                        why: "unmounted".to_owned(),
                    }
                };
                Desired {
                    folder,
                    deployments: deployments
                        .into_iter()
                        .map(|(name, (spec, labels, source))| {
                            (name.clone(), deployment(name, spec, labels, source))
                        })
                        .collect(),
                    unreadable: unreadable
                        .into_iter()
                        .map(|(file, words)| {
                            let words = words.into_iter().map(str::to_owned).collect();
                            (file.into(), Unreadable { words })
                        })
                        .collect(),
                    problems: Vec::new(),
                    missing,
                    first_listed_at,
                    removals_wait_until,
                }
            },
        )
}

/// What an instance was launched from.
#[derive(Debug, Clone)]
enum Origin {
    /// What its deployment says now, where there is one.
    Present,
    /// Something else.
    Other(Box<InstanceSpec>, Labels, Source),
}

/// An instance by itself.
fn instance() -> BoxedStrategy<(Origin, Life)> {
    let other = (spec(), labels(), source())
        .prop_map(|(spec, labels, source)| Origin::Other(Box::new(spec), labels, source));
    let origin = prop_oneof![3 => Just(Origin::Present), 2 => other.boxed()];
    (origin.boxed(), life()).boxed()
}

fn quarantined() -> impl Strategy<Value = Vec<Quarantined>> {
    let holds = prop_oneof![
        1 => Just(Holds::Unknown),
        2 => (launch_id(), lease()).prop_map(|(launch_id, lease)| Holds::Lease { launch_id, lease }),
    ];
    let records = btree_map(select(vec!["a.json", "b.json"]), holds, 1..3);
    let records = records.prop_map(|records| {
        let record = |(file, holds)| Quarantined {
            file: PathBuf::from(file),
            holds,
        };
        records.into_iter().map(record).collect()
    });
    prop_oneof![4 => Just(Vec::new()), 1 => records]
}

/// Any world that can be.
pub(super) fn world() -> BoxedStrategy<World> {
    let instances = btree_map((name(), 0..4_u32), instance(), 0..7);
    let fallback = (spec(), labels(), source());
    (
        desired().boxed(),
        (instances.boxed(), fallback.boxed()),
        inventory(),
        settings(),
        (
            quarantined().boxed(),
            btree_map(port(), stranger(), 0..5),
            btree_map((name(), 0..4_u32), past(), 0..3),
        ),
    )
        .prop_map(
            |(desired, (instances, fallback), inventory, settings, others)| {
                let (quarantined, strangers, waiting_since) = others;
                let mut observed = Observed {
                    instances: BTreeMap::new(),
                    quarantined,
                    strangers,
                    waiting_since: waiting_since
                        .into_iter()
                        .map(|((deployment, ordinal), since)| (deployment.instance(ordinal), since))
                        .collect(),
                };
                for ((name, ordinal), (origin, life)) in instances {
                    let (spec, labels, source) = match origin {
                        Origin::Other(spec, labels, source) => (*spec, labels, source),
                        Origin::Present => match desired.deployments.get(&name) {
                            Some(deployment) => (
                                deployment.spec.clone(),
                                deployment.labels.clone(),
                                deployment.source.clone(),
                            ),
                            None => fallback.clone(),
                        },
                    };
                    let instance = recorded(name.instance(ordinal), spec, labels, source, life);
                    observed.instances.insert(name.instance(ordinal), instance);
                }
                share_nothing(&mut observed, &inventory);
                World {
                    desired,
                    observed,
                    inventory,
                    settings,
                    now: now(),
                }
            },
        )
        .boxed()
}

fn recorded(
    name: InstanceName,
    spec: InstanceSpec,
    metadata: Labels,
    source: Source,
    life: Life,
) -> Instance {
    let Life {
        launch,
        history,
        health,
    } = life;
    let (launch, news) = launch.unzip();
    let record = Record {
        version: RECORD_VERSION,
        name,
        node: "here".to_owned(),
        restart_key: RestartKey::of(&spec, metadata.restarted_at()),
        metadata,
        source,
        spec,
        launch,
        history,
    };
    let Some(News {
        liveness,
        effect,
        outcome,
        signalled,
    }) = news
    else {
        return Instance::of_record(record);
    };
    Instance {
        liveness,
        effect,
        outcome,
        signalled,
        health,
        ..Instance::of_record(record)
    }
}

/// Takes from leases what an earlier one has already.
fn share_nothing(observed: &mut Observed, inventory: &Inventory) {
    let mut ports = BTreeSet::new();
    let mut devices = BTreeMap::new();
    for instance in observed.instances.values_mut() {
        let is_pinned = matches!(instance.record.spec.devices, DeviceRequest::Ids(_));
        let Some(launch) = &mut instance.record.launch else {
            continue;
        };
        launch.lease.port = launch.lease.port.filter(|port| ports.insert(*port));
        launch.lease.devices.retain(|device| {
            let is_unified = inventory
                .devices
                .iter()
                .any(|known| known.id == device.id && known.unified);
            match devices.get(&device.id) {
                None => {
                    devices.insert(device.id.clone(), is_pinned);
                    true
                }
                Some(is_other_pinned) => is_unified && !is_pinned && !is_other_pinned,
            }
        });
    }
}

/// A world in which nobody competes with anybody: ports of their own, no devices, no launch limit.
pub(super) fn world_without_contention() -> BoxedStrategy<World> {
    world()
        .prop_map(|mut world| {
            world.settings.max_launches = 0;
            world.observed.quarantined.clear();
            world.observed.strangers.clear();
            let apart = |name: &DeploymentName, ordinal: u32, spec: &mut InstanceSpec| {
                spec.devices = DeviceRequest::Count(0);
                spec.replicas = spec.replicas.min(1);
                let letter = u16::from(name.as_str().as_bytes()[0]);
                let number = 10_000 + letter * 10 + u16::try_from(ordinal).unwrap();
                spec.port = Some(number.try_into().unwrap());
                spec.port
            };
            for (name, deployment) in &mut world.desired.deployments {
                apart(name, 0, &mut deployment.spec);
                deployment.restart_key =
                    RestartKey::of(&deployment.spec, deployment.labels.restarted_at());
            }
            for (name, instance) in &mut world.observed.instances {
                let record = &mut instance.record;
                let port = apart(&name.deployment, name.ordinal, &mut record.spec);
                record.restart_key = RestartKey::of(&record.spec, record.metadata.restarted_at());
                if let Some(launch) = &mut record.launch {
                    launch.lease = Lease {
                        port,
                        devices: Vec::new(),
                    };
                }
            }
            world
        })
        .boxed()
}
