//! What one pass costs when there is nothing to do: every wake costs at least this.
//!
//! Aim: below a microsecond per instance, so that a full box is looked through in the time of one system call.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use jiff::Timestamp;
use serde_json::json;
use uuid::Uuid;

use evenkeel::desired::{Desired, Folder};
use evenkeel::names::LaunchId;
use evenkeel::observed::{
    Health, Instance, Inventory, Liveness, Observed, ProbeCount, ProbeResult,
};
use evenkeel::plan::{Inputs, Settings, plan};
use evenkeel::record::{Handle, History, Launch, Lease, ProcessHandle, RECORD_VERSION, Record};
use evenkeel::spec::{Deployment, Source};

const NOW: Timestamp = Timestamp::constant(1_800_000_000, 0);

fn deployment(number: u16) -> Deployment {
    let manifest = json!({
        "apiVersion": "evenkeel.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {
            "name": format!("model-server-{number:05}"),
            "labels": {"team": "search", "tier": "production"},
        },
        "spec": {
            "engine": "vllm",
            "model": {"path": format!("/models/Model-{number}")},
            "options": {"tensorParallel": 2, "maxContextLength": 32768, "dtype": "bfloat16"},
            "args": ["--enable-prefix-caching", "--seed", "7"],
            "env": [{"name": "HF_HOME", "value": "/models/hub"}],
        },
    });
    let source = Source {
        file: format!("teams/search/model-server-{number:05}.yaml").into(),
        document: 0,
        revision: Some("0123456789abcdef0123456789abcdef01234567".to_owned()),
    };
    let manifest = serde_json::from_value(manifest).expect("it is a manifest");
    Deployment::from_manifest(manifest, source).expect("it is valid")
}

/// Ready for a minute, probed a moment ago.
fn ready(deployment: &Deployment, number: u16) -> Instance {
    let name = deployment.name.instance(0);
    let since = NOW - Duration::from_mins(1);
    let record = Record {
        version: RECORD_VERSION,
        node: "host".to_owned(),
        metadata: deployment.labels.clone(),
        source: deployment.source.clone(),
        spec: deployment.spec.clone(),
        restart_key: deployment.restart_key,
        launch: Some(Launch {
            id: LaunchId::derive(Uuid::from_u128(number.into()), &name),
            handle: Some(Handle::Process(ProcessHandle {
                pid: number.into(),
                start_ticks: 1,
                boot_id: "boot".to_owned(),
            })),
            lease: Lease {
                port: (8000 + number).try_into().ok(),
                devices: Vec::new(),
            },
            reserved_at: since,
            started_at: Some(since),
            ready_at: Some(since),
            stop: None,
        }),
        history: History::default(),
        name,
    };
    let mut liveness = ProbeCount::default();
    liveness.count(NOW - Duration::from_secs(1), ProbeResult::Success);
    Instance {
        liveness: Liveness::Alive,
        health: Health {
            since: Some(since),
            liveness,
            ..Health::default()
        },
        ..Instance::of_record(record)
    }
}

fn world(instances: u16) -> (Desired, Observed) {
    let deployments: BTreeMap<_, _> = (0..instances)
        .map(deployment)
        .map(|deployment| (deployment.name.clone(), deployment))
        .collect();
    let observed = Observed {
        instances: deployments
            .values()
            .zip(0..)
            .map(|(deployment, number)| (deployment.name.instance(0), ready(deployment, number)))
            .collect(),
        ..Observed::default()
    };
    let desired = Desired {
        folder: Folder::Listed,
        deployments,
        first_listed_at: Some(NOW),
        ..Desired::default()
    };
    (desired, observed)
}

fn no_op_pass(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("a pass with nothing to do");
    let inventory = Inventory::default();
    let settings = Settings::default();
    for instances in [1, 100, 1_000, 10_000] {
        let (desired, observed) = world(instances);
        let inputs = Inputs {
            desired: &desired,
            observed: &observed,
            inventory: &inventory,
            settings: &settings,
            now: NOW,
            nonce: Uuid::from_u128(1),
        };
        let first = plan(inputs);
        assert!(!first.is_change(), "{first}");
        assert!(
            first.deadline.is_some_and(|deadline| deadline > NOW),
            "{first}"
        );
        group.throughput(Throughput::Elements(instances.into()));
        group.bench_function(BenchmarkId::from_parameter(instances), |bencher| {
            bencher.iter(|| plan(black_box(inputs)));
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    // The largest takes milliseconds: three seconds give hundreds of passes.
    config = Criterion::default().warm_up_time(Duration::from_secs(1)).measurement_time(Duration::from_secs(3)).without_plots();
    targets = no_op_pass
}
criterion_main!(benches);
