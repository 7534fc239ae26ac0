//! Golden command lines and environments: what an engine is started with, as a person would type it.
//!
//! A changed line here is a change of what runs on people's machines: their restart keys stay the same, so what runs goes
//! on with the old line until its next launch.

use std::fmt::Write as _;

use insta::assert_snapshot;
use serde_json::{Value, json};
use uuid::Uuid;

use super::*;
use crate::observed::Device;
use crate::record::LeasedDevice;
use crate::spec::{Deployment, Source};

/// The engines that this version starts by itself, each with the least it needs.
fn engines() -> [(&'static str, Value); 4] {
    [
        (
            "vllm",
            json!({"engine": "vllm", "model": {"path": "/models/Qwen3-8B"}}),
        ),
        (
            "llamacpp",
            json!({"engine": "llamacpp", "model": {"path": "/models/qwen3-8b.gguf"}}),
        ),
        ("echo", json!({"engine": "echo"})),
        (
            "command",
            json!({"engine": "command", "command": ["my-server", "--port", "$(PORT)"]}),
        ),
    ]
}

fn spec(fields: &Value) -> InstanceSpec {
    let manifest = json!({
        "apiVersion": "evenkeel.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": "qwen"},
        "spec": fields,
    });
    let source = Source {
        file: "qwen.yaml".into(),
        document: 0,
        revision: None,
    };
    let manifest = serde_json::from_value(manifest).unwrap();
    Deployment::from_manifest(manifest, source).unwrap().spec
}

/// The same fields, and these.
fn and(fields: &Value, more: Value) -> Value {
    let (Value::Object(mut fields), Value::Object(more)) = (fields.clone(), more) else {
        panic!("both are mappings");
    };
    fields.extend(more);
    Value::Object(fields)
}

/// A host with so many devices of a kind.
fn host(kind: DeviceKind, count: usize) -> Inventory {
    let device = |number| Device {
        id: format!("{kind}-{number}").parse().unwrap(),
        kind,
        name: String::new(),
        memory_bytes: None,
        unified: false,
    };
    Inventory {
        devices: (0..count).map(device).collect(),
    }
}

fn port() -> Port {
    1234.try_into().unwrap()
}

fn lease(devices: &[&str]) -> Lease {
    Lease {
        port: Some(port()),
        devices: devices
            .iter()
            .map(|id| LeasedDevice {
                id: id.parse().unwrap(),
                bytes: None,
            })
            .collect(),
    }
}

/// The program with its arguments, or why it is refused.
fn line(spec: &InstanceSpec, inventory: &Inventory) -> String {
    if let Err(failure) = support(spec, inventory) {
        return format!("refused: {failure}");
    }
    let (program, arguments) = command_line(spec, Some(port()));
    let program = match program {
        Program::Named(name) => name,
        Program::Own => "evenkeel".to_owned(),
    };
    let words: Vec<_> = std::iter::once(program).chain(arguments).collect();
    words.join(" ")
}

/// The variables that are set for it, in their order, before the program and its arguments.
fn launch(spec: &InstanceSpec, inventory: &Inventory, lease: &Lease) -> String {
    if support(spec, inventory).is_err() {
        return line(spec, inventory);
    }
    let instance = "qwen-0".parse().unwrap();
    let order = launch_order(LaunchFacts {
        instance: &instance,
        launch_id: LaunchId::derive(Uuid::from_u128(1), &instance),
        spec,
        lease,
        inventory,
    });
    let variables: Vec<_> = order
        .environment
        .iter()
        .map(|EnvVar { name, value }| match value {
            EnvValue::Literal(value) => format!("{name}={value}"),
            EnvValue::File(file) => format!("{name}=<{}", file.display()),
        })
        .collect();
    let line = line(spec, inventory);
    if variables.is_empty() {
        return line;
    }
    format!("{} {line}", variables.join(" "))
}

#[test]
fn every_option_of_every_engine() {
    let options = [
        ("nothing", json!({})),
        ("tensorParallel", json!(2)),
        ("pipelineParallel", json!(2)),
        ("maxContextLength", json!(32_768)),
        ("memoryFraction", json!(0.85)),
        ("maxConcurrentRequests", json!(4)),
        ("kvCacheDtype", json!("fp8")),
        ("dtype", json!("bfloat16")),
        ("quantization", json!("awq")),
        ("trustRemoteCode", json!(true)),
        ("toolCallParser", json!("hermes")),
        ("reasoningParser", json!("qwen3")),
    ];
    assert_eq!(options.len(), Knob::ALL.len() + 1);
    let mut text = String::new();
    for (engine, fields) in engines() {
        for (option, value) in &options {
            let fields = match *option {
                "nothing" => fields.clone(),
                option => and(&fields, json!({"options": {option: value}})),
            };
            let line = line(&spec(&fields), &host(DeviceKind::Cuda, 2));
            writeln!(text, "{engine} {option}\n  {line}").unwrap();
        }
    }
    assert_snapshot!(text);
}

#[test]
fn every_engine_on_every_accelerator() {
    let mut text = String::new();
    for (engine, fields) in engines() {
        let nothing = launch(&spec(&fields), &Inventory::default(), &lease(&[]));
        writeln!(text, "{engine} on no accelerator\n  {nothing}").unwrap();
        for kind in [
            DeviceKind::Cuda,
            DeviceKind::Rocm,
            DeviceKind::Xpu,
            DeviceKind::Metal,
        ] {
            let host = host(kind, 3);
            let ids = [format!("{kind}-1"), format!("{kind}-2")];
            let lease = lease(&[&ids[0], &ids[1]]);
            let line = launch(&spec(&fields), &host, &lease);
            writeln!(text, "{engine} on {kind}\n  {line}").unwrap();
        }
    }
    assert_snapshot!(text);
}

#[test]
fn an_instance_without_devices_sees_none() {
    let echo = spec(&json!({"engine": "echo", "devices": {"count": 0}}));
    let shown = |kind| launch(&echo, &host(kind, 2), &lease(&[]));
    assert_eq!(
        shown(DeviceKind::Cuda),
        "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=-1 evenkeel echo --served-model-name qwen --host 127.0.0.1 --port 1234"
    );
    assert_eq!(
        shown(DeviceKind::Rocm),
        "ROCR_VISIBLE_DEVICES=-1 evenkeel echo --served-model-name qwen --host 127.0.0.1 --port 1234"
    );
}

#[test]
fn indices_count_devices_of_their_kind_in_the_hosts_order() {
    let mut mixed = host(DeviceKind::Rocm, 2);
    mixed.devices.extend(host(DeviceKind::Cuda, 2).devices);
    let echo = spec(&json!({"engine": "echo", "devices": {"ids": ["cuda-1"]}}));
    assert_eq!(
        launch(&echo, &mixed, &lease(&["cuda-1"])),
        "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1 ROCR_VISIBLE_DEVICES=-1 evenkeel echo --served-model-name qwen --host 127.0.0.1 --port 1234"
    );
}

#[test]
fn the_device_variables_come_last_and_win() {
    let fields = json!({
        "engine": "echo",
        "env": [
            {"name": "CUDA_VISIBLE_DEVICES", "value": "7"},
            {"name": "HF_TOKEN", "valueFrom": {"file": "/secrets/token"}},
        ],
    });
    assert_eq!(
        launch(
            &spec(&fields),
            &host(DeviceKind::Cuda, 1),
            &lease(&["cuda-0"])
        ),
        "CUDA_VISIBLE_DEVICES=7 HF_TOKEN=</secrets/token CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0 \
         evenkeel echo --served-model-name qwen --host 127.0.0.1 --port 1234"
    );
}

#[test]
fn the_manifests_env_wins_over_the_engines_own() {
    let [(_, vllm), ..] = engines();
    let fields = and(
        &vllm,
        json!({"env": [{"name": "HF_HUB_OFFLINE", "value": "0"}]}),
    );
    let shown = launch(
        &spec(&fields),
        &host(DeviceKind::Cuda, 1),
        &lease(&["cuda-0"]),
    );
    assert!(
        shown.starts_with("HF_HUB_OFFLINE=1 HF_HUB_OFFLINE=0 "),
        "{shown}"
    );
}

#[test]
fn everything_at_once_stands_in_the_order_of_the_table() {
    let fields = json!({
        "engine": "vllm",
        "binary": "/opt/vllm/bin/vllm",
        "model": {"id": "Qwen/Qwen3-8B", "servedName": "qwen3"},
        "options": {
            "reasoningParser": "qwen3",
            "toolCallParser": "hermes",
            "trustRemoteCode": true,
            "quantization": "awq",
            "dtype": "bfloat16",
            "kvCacheDtype": "fp8",
            "maxConcurrentRequests": 4,
            "memoryFraction": 0.85,
            "maxContextLength": 32_768,
            "pipelineParallel": 2,
            "tensorParallel": 2,
        },
        "args": ["--enable-prefix-caching", "--seed", "-1"],
    });
    assert_eq!(
        line(&spec(&fields), &host(DeviceKind::Cuda, 4)),
        "/opt/vllm/bin/vllm serve Qwen/Qwen3-8B --served-model-name qwen3 --host 127.0.0.1 --port 1234 \
         --tensor-parallel-size 2 --pipeline-parallel-size 2 --max-model-len 32768 --gpu-memory-utilization 0.85 \
         --max-num-seqs 4 --kv-cache-dtype fp8 --dtype bfloat16 --quantization awq --trust-remote-code \
         --tool-call-parser hermes --enable-auto-tool-choice --reasoning-parser qwen3 \
         --enable-prefix-caching --seed -1"
    );
}

#[test]
fn options_at_their_default_are_not_passed() {
    let [(_, vllm), ..] = engines();
    let plain = line(&spec(&vllm), &host(DeviceKind::Cuda, 1));
    let options = json!({
        "tensorParallel": 1,
        "pipelineParallel": 1,
        "kvCacheDtype": "auto",
        "dtype": "auto",
        "quantization": "auto",
        "trustRemoteCode": false,
    });
    let written = spec(&and(&vllm, json!({"options": options})));
    assert_eq!(line(&written, &host(DeviceKind::Cuda, 1)), plain);
}

#[test]
fn an_argument_of_the_users_replaces_ours_under_any_of_its_names() {
    let [(_, vllm), (_, llamacpp), (_, echo), _] = engines();
    let merged = |fields: &Value, options: Value, args: &[&str]| {
        let fields = and(fields, json!({"options": options, "args": args}));
        line(&spec(&fields), &host(DeviceKind::Cuda, 2))
    };
    let base = "vllm serve /models/Qwen3-8B --served-model-name qwen --host 127.0.0.1 --port 1234";
    for again in [
        "-tp",
        "--tp",
        "--tensor-parallel-size",
        "--tensor_parallel_size",
    ] {
        assert_eq!(
            merged(&vllm, json!({"tensorParallel": 2}), &[again, "1"]),
            format!("{base} {again} 1")
        );
    }
    assert_eq!(
        merged(&vllm, json!({"quantization": "awq"}), &["-q=gptq"]),
        format!("{base} -q=gptq")
    );
    assert_eq!(
        merged(
            &vllm,
            json!({"trustRemoteCode": true}),
            &["--no-trust-remote-code"]
        ),
        format!("{base} --no-trust-remote-code")
    );
    assert_eq!(
        merged(
            &vllm,
            json!({"toolCallParser": "hermes"}),
            &["--tool-call-parser", "mistral"]
        ),
        format!("{base} --enable-auto-tool-choice --tool-call-parser mistral")
    );
    assert_eq!(
        merged(&vllm, json!({}), &["--served-model-name", "a", "b"]),
        "vllm serve /models/Qwen3-8B --host 127.0.0.1 --port 1234 --served-model-name a b"
    );
    assert_eq!(
        merged(
            &llamacpp,
            json!({"maxContextLength": 4096, "maxConcurrentRequests": 4}),
            &[
                "-c",
                "8192",
                "-np",
                "1",
                "-m",
                "/models/other.gguf",
                "-a",
                "x",
                "--no-jinja"
            ]
        ),
        "llama-server --host 127.0.0.1 --port 1234 --metrics -c 8192 -np 1 -m /models/other.gguf -a x --no-jinja"
    );
    assert_eq!(
        merged(&echo, json!({}), &["--alias", "x"]),
        "evenkeel echo --host 127.0.0.1 --port 1234 --alias x"
    );
}

#[test]
fn llamacpp_is_passed_the_context_of_all_its_slots() {
    let [_, (_, llamacpp), ..] = engines();
    let context = |options: Value| {
        let fields = and(&llamacpp, json!({"options": options}));
        let (_, arguments) = command_line(&spec(&fields), None);
        let at = arguments.iter().position(|text| text == "--ctx-size");
        at.map(|at| arguments[at + 1].clone())
    };
    assert_eq!(context(json!({})), None);
    assert_eq!(context(json!({"maxConcurrentRequests": 4})), None);
    assert_eq!(
        context(json!({"maxContextLength": 4096})).as_deref(),
        Some("4096")
    );
    assert_eq!(
        context(json!({"maxContextLength": 4096, "maxConcurrentRequests": 4})).as_deref(),
        Some("16384")
    );
    assert_eq!(
        context(json!({"maxContextLength": u64::MAX, "maxConcurrentRequests": 4})),
        Some(u64::MAX.to_string())
    );
}

#[test]
fn a_model_of_the_hub_is_named_as_the_engine_wants_it() {
    let named = |engine: &str| {
        let fields = json!({"engine": engine, "model": {"id": "Qwen/Qwen3-8B"}});
        launch(
            &spec(&fields),
            &host(DeviceKind::Cuda, 1),
            &lease(&["cuda-0"]),
        )
    };
    // Without a local path the hub may be asked.
    assert_eq!(
        named("vllm"),
        "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0 \
         vllm serve Qwen/Qwen3-8B --served-model-name qwen --host 127.0.0.1 --port 1234"
    );
    assert_eq!(
        named("llamacpp"),
        "CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=0 \
         llama-server --hf-repo Qwen/Qwen3-8B --alias qwen --host 127.0.0.1 --port 1234 --metrics --jinja"
    );
}

#[test]
fn a_command_of_ones_own_replaces_the_whole_line_of_any_engine() {
    let fields = json!({
        "engine": "sglang",
        "model": {"path": "/models/m"},
        "command": ["python", "-m", "sglang.launch_server", "--model-path", "$(MODEL)", "--port", "$(PORT)"],
        "args": ["--served-model-name", "$(SERVED_NAME)"],
    });
    assert_eq!(
        line(&spec(&fields), &Inventory::default()),
        "python -m sglang.launch_server --model-path /models/m --port 1234 --served-model-name qwen"
    );
}

#[test]
fn references_are_filled_in_as_in_kubernetes() {
    let filled = |text: &str| {
        let fields = json!({
            "engine": "command",
            "model": {"path": "/models/m"},
            "command": ["x", text],
            "env": [{"name": "LEVEL", "value": "debug"}, {"name": "NESTED", "value": "$(LEVEL)"}],
        });
        let (_, arguments) = command_line(&spec(&fields), Some(port()));
        arguments[0].clone()
    };
    for (text, expected) in [
        ("$(PORT)", "1234"),
        ("--listen=:$(PORT)/$(PORT)", "--listen=:1234/1234"),
        ("$(MODEL) $(SERVED_NAME) $(LEVEL)", "/models/m qwen debug"),
        // What is filled in is not looked at again.
        ("$(NESTED)", "$(LEVEL)"),
        ("$(UNKNOWN)", "$(UNKNOWN)"),
        ("$$(PORT)", "$(PORT)"),
        ("$$$(PORT)", "$1234"),
        ("$$$$(PORT)", "$$(PORT)"),
        ("$$", "$"),
        ("$", "$"),
        ("a$b", "a$b"),
        ("$(PORT", "$(PORT"),
        ("$()", "$()"),
        ("$((PORT))", "$((PORT))"),
        ("$(ä)€$(PORT)", "$(ä)€1234"),
        ("$(port)", "$(port)"),
    ] {
        assert_eq!(filled(text), expected, "{text}");
    }
}

#[test]
fn arguments_of_every_engine_are_filled_in_too() {
    let [(_, vllm), ..] = engines();
    let fields = and(&vllm, json!({"args": ["--root-path", "/$(SERVED_NAME)"]}));
    let line = line(&spec(&fields), &host(DeviceKind::Cuda, 1));
    assert!(line.ends_with(" --root-path /qwen"), "{line}");
}

#[test]
fn refusals_say_why_and_what_would_work() {
    let [(_, vllm), (_, llamacpp), (_, echo), (_, command)] = engines();
    let nothing = Inventory::default();
    let cuda = host(DeviceKind::Cuda, 2);
    let secret = json!({
        "args": ["--token", "$(TOKEN)"],
        "env": [{"name": "TOKEN", "valueFrom": {"file": "/secrets/token"}}],
    });
    let cases = [
        (&vllm, json!({}), &nothing),
        (&vllm, json!({}), &host(DeviceKind::Rocm, 1)),
        (&vllm, json!({}), &host(DeviceKind::Metal, 1)),
        (&vllm, json!({"binary": "vllm-cpu"}), &nothing),
        (
            &llamacpp,
            json!({"options": {"dtype": "bfloat16"}}),
            &nothing,
        ),
        (
            &command,
            json!({"options": {"maxContextLength": 4096}}),
            &nothing,
        ),
        (&command, json!({"options": {"tensorParallel": 2}}), &cuda),
        (&echo, json!({"options": {"tensorParallel": 4}}), &cuda),
        (&echo, json!({"options": {"tensorParallel": 4}}), &nothing),
        (&echo, json!({"devices": {"count": 3}}), &cuda),
        (&echo, json!({"devices": {"count": 1}}), &nothing),
        (&echo, json!({"devices": {"ids": ["index:2"]}}), &cuda),
        (
            &echo,
            json!({"devices": {"ids": ["cuda-0", "index:0"]}}),
            &cuda,
        ),
        (&echo, json!({"runtime": "docker"}), &cuda),
        (&echo, secret, &cuda),
        (
            &json!({"engine": "mlx", "model": {"path": "/models/m"}}),
            json!({}),
            &nothing,
        ),
    ];
    let lines: Vec<_> = cases
        .into_iter()
        .map(|(fields, more, inventory)| line(&spec(&and(fields, more)), inventory))
        .collect();
    assert_snapshot!(lines.join("\n"));
}

#[test]
fn only_what_listens_on_a_port_of_ours_gets_one() {
    let needs = |more: Value| {
        needs_port(&spec(&and(
            &json!({"engine": "command", "command": ["x"]}),
            more,
        )))
    };
    assert!(!needs(json!({})));
    assert!(needs(json!({"port": 80})));
    assert!(needs(json!({"args": ["$(PORT)"]})));
    assert!(needs(json!({"readinessProbe": {"tcpSocket": {}}})));
    assert!(!needs(json!({"readinessProbe": {"periodSeconds": 1}})));
    for (_, fields) in engines() {
        assert!(needs_port(&spec(&fields)));
    }
}
