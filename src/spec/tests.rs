//! The restart key: what counts as a change, and what does not.

use std::collections::BTreeSet;

use proptest::prelude::{Strategy as _, *};
use schemars::schema_for;

use super::*;
use crate::manifest::ManifestSpec;
use crate::testing;

fn deployment(metadata: &Value, spec: &Value) -> Deployment {
    let manifest = json!({
        "apiVersion": "evenkeel.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": metadata,
        "spec": spec,
    });
    of_text(&manifest.to_string())
}

fn of_text(text: &str) -> Deployment {
    let source = Source {
        file: "qwen.yaml".into(),
        document: 0,
        revision: None,
    };
    Deployment::from_manifest(serde_json::from_str(text).unwrap(), source).unwrap()
}

fn least() -> Value {
    json!({"engine": "vllm", "model": {"path": "/models/m"}})
}

fn with(field: &str, value: Value) -> Deployment {
    let mut spec = least();
    spec[field] = value;
    if field == "docker" {
        spec["runtime"] = json!("docker");
    }
    deployment(&json!({"name": "qwen"}), &spec)
}

/// Each field of the manifest whose change needs a relaunch, with another value than the default.
fn restart_fields() -> Vec<(&'static str, Value)> {
    vec![
        ("engine", json!("echo")),
        ("runtime", json!("docker")),
        ("binary", json!("/opt/vllm")),
        ("model", json!({"path": "/models/other"})),
        ("options", json!({"tensorParallel": 2})),
        ("args", json!(["--seed", "1"])),
        ("command", json!(["vllm"])),
        ("env", json!([{"name": "A", "value": "b"}])),
        ("workingDir", json!("/srv")),
        ("devices", json!({"count": 2})),
        ("port", json!(8000)),
        ("docker", json!({"image": "vllm/vllm-openai"})),
    ]
}

/// Each of the others, likewise.
fn live_fields() -> Vec<(&'static str, Value)> {
    vec![
        ("replicas", json!(2)),
        ("paused", json!(true)),
        ("priority", json!(1)),
        ("nodeSelector", json!({"zone": "x"})),
        ("startupProbe", json!({"periodSeconds": 2})),
        ("readinessProbe", json!({"httpGet": {"path": "/x"}})),
        ("livenessProbe", json!({"failureThreshold": 9})),
        ("startupDeadlineSeconds", json!(60)),
        ("restartPolicy", json!("Never")),
        ("backoff", json!({"initialSeconds": 5})),
        ("terminationGracePeriodSeconds", json!(5)),
        ("deletionPolicy", json!("Orphan")),
        // One value only yet: nothing to change.
        ("strategy", json!({"type": "Recreate"})),
    ]
}

#[test]
fn the_key_of_a_manifest_is_the_same_in_every_version() {
    // Where this fails, an upgrade would restart every instance of everybody.
    let plain = deployment(&json!({"name": "qwen"}), &json!({"engine": "echo"}));
    assert_eq!(
        plain.restart_key.to_string(),
        "dea71bb2adc230a90d623eeca37f2905"
    );
    let full = json!({
        "engine": "vllm",
        "binary": "/opt/vllm",
        "model": {"id": "Qwen/Qwen3-8B", "servedName": "qwen3"},
        "options": {"tensorParallel": 2, "memoryFraction": 0.85, "dtype": "bfloat16", "trustRemoteCode": true},
        "args": ["--seed", "1"],
        "command": ["vllm", "serve"],
        "env": [{"name": "A", "value": "b"}, {"name": "C", "valueFrom": {"file": "/d"}}],
        "workingDir": "/srv",
        "devices": {"ids": ["GPU-0", "index:1"]},
        "port": 8000,
        "runtime": "docker",
        "docker": {"image": "x", "pull": "Always", "shmSizeBytes": 1, "volumes": [{"host": "/a", "container": "/b"}]},
    });
    let annotations = json!({RESTARTED_AT: "2026-01-01T00:00:00Z"});
    let full = deployment(&json!({"name": "qwen", "annotations": annotations}), &full);
    assert_eq!(
        full.restart_key.to_string(),
        "18ba65a66f0ac21440f3a5059c489b71"
    );
}

#[test]
fn a_key_has_one_spelling() {
    let read = |text: &str| serde_json::from_value::<RestartKey>(json!(text));
    let key = "00000000000000000000000000000abc";
    assert_eq!(
        serde_json::to_value(read(key).unwrap()).unwrap(),
        json!(key)
    );
    for other in [
        "abc",
        "00000000000000000000000000000ABC",
        "+0000000000000000000000000000abc",
        "",
    ] {
        let error = read(other).unwrap_err().to_string();
        assert!(error.contains("is not a restart key"), "{error}");
    }
}

#[test]
fn explicit_defaults_do_not_count() {
    let explicit = json!({
        "engine": "vllm",
        "runtime": "process",
        "model": {"path": "/models/m", "servedName": "qwen"},
        "options": {
            "tensorParallel": 1,
            "pipelineParallel": 1,
            "kvCacheDtype": "auto",
            "dtype": "auto",
            "quantization": "auto",
            "trustRemoteCode": false,
        },
        "args": [],
        "env": [],
        "devices": {"count": 1},
        "replicas": 1,
        "strategy": {"type": "Recreate"},
    });
    let metadata = json!({"name": "qwen", "labels": {}, "annotations": {}});
    let explicit = deployment(&metadata, &explicit);
    let plain = deployment(&json!({"name": "qwen"}), &least());
    assert_eq!(explicit.restart_key, plain.restart_key);
    assert_eq!(
        explicit.spec.changed_fields(&plain.spec),
        Vec::<String>::new()
    );
    for devices in [json!({}), json!({"count": 4})] {
        let options = json!({"tensorParallel": 2, "pipelineParallel": 2});
        let spec = |devices: Option<Value>| {
            let mut spec = least();
            spec["options"] = options.clone();
            if let Some(devices) = devices {
                spec["devices"] = devices;
            }
            deployment(&json!({"name": "qwen"}), &spec).restart_key
        };
        assert_eq!(spec(Some(devices)), spec(None));
    }
    let docker = |fields| with("docker", fields).restart_key;
    assert_eq!(
        docker(json!({})),
        with("runtime", json!("docker")).restart_key
    );
    assert_eq!(docker(json!({"volumes": []})), docker(json!({})));
}

#[test]
fn an_explicit_count_is_kept_although_it_changes_no_key() {
    // More than the host has is refused, never reduced: what was asked for must be known.
    assert_eq!(
        with("devices", json!({"count": 1})).spec.devices,
        DeviceRequest::Count(1)
    );
}

#[test]
fn the_order_of_keys_does_not_count() {
    let one = r#"{"apiVersion": "evenkeel.dev/v1alpha1", "kind": "ModelDeployment", "metadata": {"name": "qwen"}, "spec":
        {"engine": "vllm", "model": {"path": "/m", "servedName": "x"}, "options": {"dtype": "half", "maxContextLength": 9}, "port": 1}}"#;
    let other = r#"{"spec": {"port": 1, "options": {"maxContextLength": 9, "dtype": "half"},
        "model": {"servedName": "x", "path": "/m"}, "engine": "vllm"}, "metadata": {"name": "qwen"},
        "kind": "ModelDeployment", "apiVersion": "evenkeel.dev/v1alpha1"}"#;
    assert_eq!(of_text(one).restart_key, of_text(other).restart_key);
}

#[test]
fn each_restart_field_changes_the_key_and_is_named() {
    let plain = deployment(&json!({"name": "qwen"}), &least());
    let mut keys = BTreeSet::from([plain.restart_key]);
    for (field, value) in restart_fields() {
        let changed = with(field, value);
        assert!(keys.insert(changed.restart_key), "{field}");
        let named = plain.spec.changed_fields(&changed.spec);
        assert!(
            named.contains(&format!("spec.{field}")),
            "{field}: {named:?}"
        );
    }
    let renamed = with("model", json!({"path": "/models/m", "servedName": "x"}));
    assert_eq!(
        plain.spec.changed_fields(&renamed.spec),
        ["spec.model.servedName"]
    );
}

#[test]
fn no_live_field_changes_the_key() {
    let plain = deployment(&json!({"name": "qwen"}), &least());
    for (field, value) in live_fields() {
        let changed = with(field, value);
        assert_eq!(changed.restart_key, plain.restart_key, "{field}");
        assert_eq!(
            plain.spec.changed_fields(&changed.spec),
            Vec::<String>::new()
        );
        let is_same = plain.spec.has_same_live_fields(&changed.spec);
        assert_eq!(is_same, field == "strategy", "{field}");
    }
}

#[test]
fn of_the_metadata_only_the_restarted_at_annotation_counts() {
    let key = |metadata: Value| deployment(&metadata, &least()).restart_key;
    let plain = key(json!({"name": "qwen"}));
    let labels = json!({"name": "qwen", "labels": {"a": "b"}, "annotations": {"c": "d"}});
    assert_eq!(key(labels), plain);
    let restarted = |at: &str| key(json!({"name": "qwen", "annotations": {RESTARTED_AT: at}}));
    assert_ne!(restarted("1"), plain);
    assert_ne!(restarted("1"), restarted("2"));
}

#[test]
fn the_schema_tells_of_each_field_what_its_change_causes() {
    let schema = schema_for!(ManifestSpec);
    let properties = schema.as_value()["properties"].as_object().unwrap();
    let of_class = |classes: &[&str]| -> BTreeSet<&str> {
        let is_of = |value: &Value| classes.contains(&value["x-evenkeel-change"].as_str().unwrap());
        let fields = properties.iter().filter(|(_, value)| is_of(value));
        fields.map(|(name, _)| name.as_str()).collect()
    };
    let names = |fields: Vec<(&'static str, Value)>| -> BTreeSet<&str> {
        fields.into_iter().map(|(name, _)| name).collect()
    };
    assert_eq!(of_class(&["restart", "re-lease"]), names(restart_fields()));
    assert_eq!(of_class(&["live"]), names(live_fields()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn two_specs_have_one_key_when_no_field_changed(one in testing::spec().boxed(), other in testing::spec().boxed()) {
        for (one, other) in [(&one, &one), (&one, &other)] {
            let is_same = one.changed_fields(other).is_empty();
            prop_assert_eq!(is_same, RestartKey::of(one, None) == RestartKey::of(other, None));
        }
    }

    #[test]
    fn a_spec_read_back_from_its_record_has_the_same_key(spec in testing::spec().boxed()) {
        let text = serde_json::to_string(&spec).unwrap();
        let read: InstanceSpec = serde_json::from_str(&text).unwrap();
        prop_assert_eq!(RestartKey::of(&read, None), RestartKey::of(&spec, None));
    }

    #[test]
    fn live_fields_never_count(one in testing::spec().boxed(), other in testing::spec().boxed()) {
        let InstanceSpec {
            replicas, paused, priority, node_selector, startup_probe, readiness_probe, liveness_probe,
            startup_deadline_seconds, restart_policy, backoff, termination_grace_period_seconds, strategy,
            deletion_policy, ..
        } = other.clone();
        let tuned = InstanceSpec {
            replicas, paused, priority, node_selector, startup_probe, readiness_probe, liveness_probe,
            startup_deadline_seconds, restart_policy, backoff, termination_grace_period_seconds, strategy,
            deletion_policy, ..one.clone()
        };
        prop_assert_eq!(RestartKey::of(&tuned, None), RestartKey::of(&one, None));
        prop_assert!(tuned.has_same_live_fields(&other));
        prop_assert_eq!(tuned.has_same_live_fields(&one), tuned == one);
    }
}
