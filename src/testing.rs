//! Arbitrary words, for the properties of whoever works with them.
//!
//! Invariant: what is generated could have been accepted from a manifest or been written by evenkeel: a record that one of
//! these makes may lie on a disk.

use jiff::Timestamp;
use proptest::collection::{btree_map, vec};
use proptest::option;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::path::PathBuf;
use uuid::Uuid;

use crate::event::{Event, Reason};
use crate::failure::{ExitStatus, LaunchFailure};
use crate::manifest::{
    DeletionPolicy, Docker, EngineKind, ManifestHttpGet, ManifestProbe, ManifestTcpSocket, Options,
    Pull, RestartPolicy, Runtime, Strategy as RollOut, Volume,
};
use crate::names::{DeploymentName, DeviceId, InstanceName, LaunchId, Port, REPLICA_LIMIT};
use crate::record::{
    Cause, Ending, Handle, History, Launch, Lease, LeasedDevice, ProcessHandle, RECORD_VERSION,
    Record, Stop, StopReason,
};
use crate::spec::{
    Backoff, DeviceRequest, EnvValue, EnvVar, InstanceSpec, Labels, Model, ModelLocation,
    RestartKey, Source,
};

/// A name, short ones more often, so that two of them meet.
pub fn deployment_name() -> impl Strategy<Value = DeploymentName> {
    prop_oneof![3 => "[abc]", 1 => "[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?"]
        .prop_map(|text| text.parse().unwrap())
}

/// An instance of an arbitrary deployment.
pub fn instance_name() -> impl Strategy<Value = InstanceName> {
    (deployment_name(), prop_oneof![0..3_u32, 0..REPLICA_LIMIT])
        .prop_map(|(deployment, ordinal)| deployment.instance(ordinal))
}

/// A launch id.
pub fn launch_id() -> impl Strategy<Value = LaunchId> {
    (any::<u128>(), instance_name())
        .prop_map(|(nonce, name)| LaunchId::derive(Uuid::from_u128(nonce), &name))
}

/// A port; few, so that two of them meet.
pub fn port() -> impl Strategy<Value = Port> {
    prop_oneof![8000..8004_u16, 1..=u16::MAX].prop_map(|number| number.try_into().unwrap())
}

/// A device id; few, so that two of them meet.
pub fn device_id() -> impl Strategy<Value = DeviceId> {
    (0..8_u8).prop_map(|number| format!("GPU-{number}").parse().unwrap())
}

/// A time in the decades around this one, to the nanosecond.
pub fn timestamp() -> impl Strategy<Value = Timestamp> {
    (0..4_000_000_000_i64, 0..1_000_000_000_i32)
        .prop_map(|(second, nanosecond)| Timestamp::new(second, nanosecond).unwrap())
}

/// What people and engines write: letters, line ends, quotes, and everything else now and then.
pub fn text() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z \\n\"\\\\]{0,12}", any::<String>()]
}

/// A text that can be an argument or a variable: no NUL.
pub fn argument() -> impl Strategy<Value = String> {
    text().prop_map(|text| text.replace('\0', ""))
}

/// An absolute path.
pub fn path() -> impl Strategy<Value = PathBuf> {
    argument().prop_map(|text| PathBuf::from(format!("/{text}")))
}

fn labels() -> impl Strategy<Value = BTreeMap<String, String>> {
    btree_map(text(), text(), 0..3)
}

/// Labels and annotations.
pub fn metadata() -> impl Strategy<Value = Labels> {
    (labels(), labels()).prop_map(|(labels, annotations)| Labels {
        labels,
        annotations,
    })
}

/// Where a manifest was read.
pub fn source() -> impl Strategy<Value = Source> {
    ("[a-z]{1,5}\\.yaml", 0..4_usize, option::of("[0-9a-f]{40}")).prop_map(
        |(file, document, revision)| Source {
            file: file.into(),
            document,
            revision,
        },
    )
}

/// An engine.
pub fn engine() -> impl Strategy<Value = EngineKind> {
    prop::sample::select(vec![
        EngineKind::Vllm,
        EngineKind::Sglang,
        EngineKind::Llamacpp,
        EngineKind::Mlx,
        EngineKind::Exllamav3,
        EngineKind::Echo,
        EngineKind::Command,
    ])
}

prop_compose! {
    /// The common knobs.
    pub fn options()(
        (tensor_parallel, pipeline_parallel, max_concurrent_requests) in
            (option::of(2..=8_u32), option::of(2..=8_u32), option::of(1..=u32::MAX)),
        max_context_length in option::of(1..=u64::MAX),
        memory_fraction in option::of(f64::MIN_POSITIVE..=1.0),
        trust_remote_code in option::of(Just(true)),
        words in prop::array::uniform5(option::of("[a-z0-9_]{1,8}")),
    ) -> Options {
        let [kv_cache_dtype, dtype, quantization, tool_call_parser, reasoning_parser] = words;
        Options {
            tensor_parallel,
            pipeline_parallel,
            max_context_length,
            memory_fraction,
            max_concurrent_requests,
            kv_cache_dtype,
            dtype,
            quantization,
            trust_remote_code,
            tool_call_parser,
            reasoning_parser,
        }
    }
}

prop_compose! {
    /// A probe.
    pub fn probe()(
        get in option::of(option::of("/[a-z]{0,6}")),
        connect in any::<bool>(),
        initial_delay_seconds in option::of(any::<u32>()),
        positive in prop::array::uniform4(option::of(1..=u32::MAX)),
    ) -> ManifestProbe {
        let [period_seconds, timeout_seconds, failure_threshold, success_threshold] = positive;
        ManifestProbe {
            tcp_socket: (connect && get.is_none()).then_some(ManifestTcpSocket {}),
            http_get: get.map(|path| ManifestHttpGet { path }),
            initial_delay_seconds,
            period_seconds,
            timeout_seconds,
            failure_threshold,
            success_threshold,
        }
    }
}

prop_compose! {
    /// Settings of a container.
    pub fn docker()(
        (image, ipc, network) in (option::of(text()), option::of(text()), option::of(text())),
        pull in option::of(prop::sample::select(vec![Pull::IfNotPresent, Pull::Always, Pull::Never])),
        shm_size_bytes in option::of(any::<u64>()),
        volumes in vec(
            (path(), path(), any::<bool>())
                .prop_map(|(host, container, read_only)| Volume { host, container, read_only }),
            0..3,
        ),
    ) -> Docker {
        Docker { image, pull, shm_size_bytes, ipc, volumes, network }
    }
}

/// Which devices are asked for.
pub fn device_request() -> impl Strategy<Value = DeviceRequest> {
    prop_oneof![
        Just(DeviceRequest::Parallelism),
        (0..=8_u32).prop_map(DeviceRequest::Count),
        vec(device_id().prop_map(String::from), 0..4).prop_map(DeviceRequest::Ids),
    ]
}

fn env() -> impl Strategy<Value = Vec<EnvVar>> {
    let value = prop_oneof![
        argument().prop_map(EnvValue::Literal),
        path().prop_map(EnvValue::File)
    ];
    vec(
        ("[A-Z]{1,6}", value).prop_map(|(name, value)| EnvVar { name, value }),
        0..3,
    )
}

fn model() -> impl Strategy<Value = Model> {
    let location = prop_oneof![
        path().prop_map(ModelLocation::Path),
        "[a-z]{1,4}/[a-z]{1,4}".prop_map(ModelLocation::Id)
    ];
    (option::of(location), argument()).prop_map(|(location, served_name)| Model {
        location,
        served_name,
    })
}

fn backoff() -> impl Strategy<Value = Backoff> {
    (0..100_u32, 0..1000_u32, any::<u32>()).prop_map(|(initial_seconds, more, reset_seconds)| {
        Backoff {
            initial_seconds,
            max_seconds: initial_seconds + more,
            reset_seconds,
        }
    })
}

prop_compose! {
    /// What an instance shall be. Each field is legal; whether they go together was for the manifest to say.
    pub fn spec()(
        (replicas, paused, priority, node_selector) in
            (0..=REPLICA_LIMIT, any::<bool>(), any::<i32>(), labels()),
        (engine, runtime, binary, model) in (
            engine(),
            prop::sample::select(vec![Runtime::Process, Runtime::Docker]),
            option::of(argument()),
            model(),
        ),
        (options, args, command, env, working_dir) in (
            options().boxed(),
            vec(argument(), 0..3),
            option::of(vec(argument(), 1..3)),
            env().boxed(),
            option::of(path()),
        ),
        (devices, port) in (device_request(), option::of(port())),
        [startup_probe, readiness_probe, liveness_probe] in
            prop::array::uniform3(option::of(probe().boxed())),
        startup_deadline_seconds in option::of(1..=u32::MAX),
        restart_policy in prop::sample::select(vec![
            RestartPolicy::Always,
            RestartPolicy::OnFailure,
            RestartPolicy::Never,
        ]),
        backoff in backoff(),
        termination_grace_period_seconds in any::<u32>(),
        docker in option::of(docker().boxed()),
        deletion_policy in
            prop::sample::select(vec![DeletionPolicy::Stop, DeletionPolicy::Orphan]),
    ) -> InstanceSpec {
        InstanceSpec {
            replicas,
            paused,
            priority,
            node_selector,
            engine,
            runtime,
            binary,
            model,
            options,
            args,
            command,
            env,
            working_dir,
            devices,
            port,
            startup_probe,
            readiness_probe,
            liveness_probe,
            startup_deadline_seconds,
            restart_policy,
            backoff,
            termination_grace_period_seconds,
            docker,
            strategy: RollOut::default(),
            deletion_policy,
        }
    }
}

/// Devices and a port.
pub fn lease() -> impl Strategy<Value = Lease> {
    let devices = btree_map(device_id(), option::of(any::<u64>()), 0..4);
    (option::of(port()), devices).prop_map(|(port, devices)| Lease {
        port,
        devices: devices
            .into_iter()
            .map(|(id, bytes)| LeasedDevice { id, bytes })
            .collect(),
    })
}

/// A handle.
pub fn handle() -> impl Strategy<Value = Handle> {
    (1..=4_194_304_u32, any::<u64>(), any::<u128>()).prop_map(|(pid, start_ticks, boot)| {
        Handle::Process(ProcessHandle {
            pid,
            start_ticks,
            boot_id: Uuid::from_u128(boot).to_string(),
        })
    })
}

/// Why a launch shall end.
pub fn stop_reason() -> impl Strategy<Value = StopReason> {
    prop_oneof![
        vec("spec\\.[a-z]{1,8}", 0..3).prop_map(|fields| StopReason::SpecChanged { fields }),
        Just(StopReason::Removed),
        (any::<u64>(), text()).prop_map(|(waited_seconds, last_probe)| {
            StopReason::StartupTimeout {
                waited_seconds,
                last_probe,
            }
        }),
        (any::<u32>(), text()).prop_map(|(failures, last_probe)| StopReason::Unhealthy {
            failures,
            last_probe
        }),
        failure().boxed().prop_map(StopReason::LaunchFailed),
        Just(StopReason::LeaderGone),
        Just(StopReason::Shutdown),
    ]
}

/// That a launch shall end.
pub fn stop() -> impl Strategy<Value = Stop> {
    (timestamp(), stop_reason(), option::of(timestamp())).prop_map(
        |(asked_at, reason, killed_at)| Stop {
            asked_at,
            reason,
            killed_at,
        },
    )
}

prop_compose! {
    /// A launch attempt at any point of its life.
    pub fn launch()(
        id in launch_id(),
        handle in option::of(handle()),
        lease in lease(),
        reserved_at in timestamp(),
        started_at in option::of(timestamp()),
        ready_at in option::of(timestamp()),
        stop in option::of(stop()),
    ) -> Launch {
        Launch { id, handle, lease, reserved_at, started_at, ready_at, stop }
    }
}

/// How a process ended.
pub fn exit_status() -> impl Strategy<Value = ExitStatus> {
    (
        option::of(any::<i32>()),
        option::of(any::<i32>()),
        option::of(any::<bool>()),
    )
        .prop_map(|(code, signal, oom)| ExitStatus { code, signal, oom })
}

/// Why a launch failed.
pub fn failure() -> impl Strategy<Value = LaunchFailure> {
    prop_oneof![
        (engine(), text(), text()).prop_map(|(engine, reason, instead)| {
            LaunchFailure::Unsupported {
                engine,
                reason,
                instead,
            }
        }),
        instance_name().prop_map(|name| LaunchFailure::AlreadyRunning { name }),
        (any::<u32>(), any::<u32>(), vec((device_id(), text()), 0..3)).prop_map(
            |(need, free, holders)| LaunchFailure::NoCapacity {
                need,
                free,
                holders
            }
        ),
        (engine(), text())
            .prop_map(|(engine, detail)| LaunchFailure::InstallFailed { engine, detail }),
        text().prop_map(|detail| LaunchFailure::SpawnFailed { detail }),
        (exit_status(), text())
            .prop_map(|(status, log_tail)| LaunchFailure::ExitedEarly { status, log_tail }),
        (any::<u64>(), text(), text()).prop_map(|(waited_seconds, last_probe, log_tail)| {
            LaunchFailure::UnhealthyTimeout {
                waited_seconds,
                last_probe,
                log_tail,
            }
        }),
        Just(LaunchFailure::Cancelled),
    ]
}

/// How a launch ended.
pub fn cause() -> impl Strategy<Value = Cause> {
    prop_oneof![
        failure().boxed().prop_map(Cause::Failed),
        (exit_status(), text()).prop_map(|(status, log_tail)| Cause::Exited { status, log_tail }),
        (text(), text()).prop_map(|(last_probe, log_tail)| Cause::Unhealthy {
            last_probe,
            log_tail
        }),
        Just(Cause::Stopped),
        Just(Cause::NeverStarted),
        (port(), text()).prop_map(|(port, holder)| Cause::PortTaken { port, holder }),
    ]
}

/// What happened before.
pub fn history() -> impl Strategy<Value = History> {
    let ending = (timestamp(), launch_id(), cause()).prop_map(|(at, launch_id, cause)| Ending {
        at,
        launch_id,
        cause,
    });
    (any::<u32>(), any::<u32>(), option::of(ending)).prop_map(|(restarts, failures, last)| {
        History {
            restarts,
            failures,
            last,
        }
    })
}

prop_compose! {
    /// A record, whose restart key is that of its spec.
    pub fn record()(
        name in instance_name(),
        node in text(),
        metadata in metadata(),
        source in source(),
        // Boxed: as one type, all of this together needs more stack than a test's thread has.
        spec in spec().boxed(),
        launch in option::of(launch()).boxed(),
        history in history().boxed(),
    ) -> Record {
        Record {
            version: RECORD_VERSION,
            name,
            node,
            restart_key: RestartKey::of(&spec, metadata.restarted_at()),
            metadata,
            source,
            spec,
            launch,
            history,
        }
    }
}

/// A reason.
pub fn reason() -> impl Strategy<Value = Reason> {
    prop::sample::select(vec![
        Reason::Started,
        Reason::Ready,
        Reason::Exited,
        Reason::ManifestInvalid,
        Reason::InsufficientDevices,
    ])
}

/// An event; few different ones, so that some are the same.
pub fn event() -> impl Strategy<Value = Event> {
    let subject = option::of((deployment_name(), option::of(0..2_u32)));
    (
        timestamp(),
        reason(),
        subject,
        option::of(launch_id()),
        text(),
    )
        .prop_map(|(at, reason, subject, launch_id, message)| {
            let (deployment, ordinal) = subject.unzip();
            let instance = deployment
                .as_ref()
                .zip(ordinal.flatten())
                .map(|(deployment, ordinal): (&DeploymentName, u32)| deployment.instance(ordinal));
            Event {
                at,
                reason,
                deployment,
                instance,
                launch_id,
                message,
            }
        })
}
