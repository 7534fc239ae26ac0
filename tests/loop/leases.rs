//! Devices and ports: who gets them, who waits, and that nobody shares one.

use std::collections::{BTreeMap, BTreeSet};
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use evenkeel::record::Record;
use nix::sys::signal::{Signal, kill};

use crate::support::daemon::{Daemon, echo, instances, manifest, pid, pid_of};
use crate::support::http::get;
use crate::support::process::{Running, evenkeel, free_port, wait_for};

fn devices(record: &Record) -> BTreeSet<String> {
    let launch = record.launch.iter();
    launch
        .flat_map(|launch| &launch.lease.devices)
        .map(|device| device.id.to_string())
        .collect()
}

/// What the engine was given, as a set of indices.
fn visible(daemon: &Daemon, instance: &str) -> BTreeSet<String> {
    let log = daemon.engine_log(instance);
    let line = log
        .lines()
        .find_map(|line| line.strip_prefix("CUDA_VISIBLE_DEVICES="));
    let indices = line.unwrap_or_else(|| panic!("{log}")).split(',');
    indices.map(str::to_owned).collect()
}

fn needs(name: &str, count: u32) -> String {
    let spec = format!("devices: {{count: {count}}}\nargs: [--print-env, CUDA_VISIBLE_DEVICES]");
    echo(name, free_port(), &spec)
}

#[test]
fn eight_devices_serve_two_of_three_and_the_third_as_soon_as_one_is_removed() {
    let mut daemon = Daemon::new();
    daemon.declare_devices(8);
    daemon.run(&["--removal-grace", "0", "--resync", "600"]);
    daemon.put("a.yaml", &needs("a", 4));
    daemon.ready("a");
    daemon.put("b.yaml", &needs("b", 2));
    daemon.ready("b");
    daemon.put("c.yaml", &needs("c", 4));
    let why = daemon.wait_for_event("c-0", "InsufficientDevices");
    assert!(why.contains("needs 4, 2 free"), "{why}");
    let seen = daemon.get();
    let c = &instances(&seen, "c")[0];
    assert_eq!(
        (&c["state"], &c["reason"]),
        (&"pending".into(), &"InsufficientDevices".into())
    );
    let message = c["message"].as_str().expect("a text");
    assert!(message.contains("needs 4, 2 free"), "{message}");
    assert!(
        message.contains("by a-0") && message.contains("by b-0"),
        "{message}"
    );
    assert_eq!(daemon.record("c-0"), None);

    let (a, b) = (daemon.launch("a-0"), daemon.launch("b-0"));
    let (of_a, of_b) = (visible(&daemon, "a-0"), visible(&daemon, "b-0"));
    assert_eq!((of_a.len(), of_b.len()), (4, 2));
    assert!(of_a.is_disjoint(&of_b));

    daemon.remove("a.yaml");
    daemon.ready("c");
    let c = daemon.launch("c-0");
    assert_eq!(daemon.record("a-0"), None);
    assert_eq!(daemon.members(&a), []);
    let of_c = visible(&daemon, "c-0");
    assert_eq!(of_c.len(), 4);
    assert!(of_c.is_disjoint(&of_b));
    daemon.assert_untouched("b-0", &b);
    // At once: nothing but the end of the other was waited for.
    let events = daemon.events();
    let time = |instance: &str, reason: &str| {
        let found = events
            .iter()
            .find(|event| event["instance"] == instance && event["reason"] == reason);
        let text = found.and_then(|event| event["firstSeen"].as_str());
        let time: jiff::Timestamp = text.expect("it is told").parse().expect("a time");
        time
    };
    assert_eq!(time("a-0", "Stopped"), time("c-0", "Launching"));
    assert_eq!(c.reserved_at, time("c-0", "Launching"));
}

/// Whether two live leases have a device in common, now. A record that is still the same after the others were read was
/// there all the time. A lease is live until nothing of its launch runs, be its record there or not.
fn overlap(daemon: &Daemon) -> Option<String> {
    let first = daemon.records();
    let second = daemon.records();
    let running: BTreeSet<String> = daemon
        .processes()
        .iter()
        .filter_map(|process| process.variable("EVENKEEL_LAUNCH_ID").map(str::to_owned))
        .collect();
    let lasting = first.iter().filter(|(name, record)| {
        let Some(launch) = &record.launch else {
            return false;
        };
        let again = second.get(*name).and_then(|again| again.launch.as_ref());
        let is_live = launch.handle.is_none() || running.contains(&launch.id.to_string());
        is_live && again.is_some_and(|again| again.id == launch.id)
    });
    let mut holders: BTreeMap<String, &str> = BTreeMap::new();
    for (name, record) in lasting {
        for device in devices(record) {
            if let Some(other) = holders.insert(device.clone(), name) {
                return Some(format!("{device} is held by {other} and by {name}"));
            }
        }
    }
    None
}

/// Whether two engines that run see the same device, now.
fn sharing(daemon: &Daemon) -> Option<String> {
    let first = daemon.processes();
    let second: BTreeSet<_> = daemon
        .processes()
        .iter()
        .map(|process| process.pid)
        .collect();
    let mut seen: BTreeMap<String, String> = BTreeMap::new();
    for process in first.iter().filter(|process| second.contains(&process.pid)) {
        let launch = process.variable("EVENKEEL_LAUNCH_ID").unwrap_or_default();
        let indices = process.variable("CUDA_VISIBLE_DEVICES").unwrap_or("-1");
        for index in indices.split(',').filter(|index| *index != "-1") {
            let other = seen.insert(index.to_owned(), launch.to_owned());
            if other.is_some_and(|other| other != launch) {
                return Some(format!("device {index} is seen by two of {first:?}"));
            }
        }
    }
    None
}

#[test]
fn no_device_is_ever_in_two_live_leases() {
    let mut daemon = Daemon::new();
    daemon.declare_devices(8);
    daemon.run(&["--removal-grace", "0"]);
    let daemon = daemon;
    let is_over = AtomicBool::new(false);
    let ports: Vec<u16> = (0..5).map(|_| free_port()).collect();
    let found = std::thread::scope(|scope| {
        let watching = scope.spawn(|| {
            let mut looks = 0_u32;
            while !is_over.load(Relaxed) {
                if let Some(found) = overlap(&daemon).or_else(|| sharing(&daemon)) {
                    return Err(found);
                }
                looks += 1;
            }
            Ok(looks)
        });
        // Whatever happens in here, the other thread ends.
        let churned = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for round in 0..10_usize {
                for (number, port) in ports.iter().enumerate() {
                    let name = format!("d{number}");
                    let file = format!("{name}.yaml");
                    match (round + number * 3) % 5 {
                        0 if daemon.folder().join(&file).exists() => daemon.remove(&file),
                        1 => {
                            for process in daemon.processes() {
                                if process.variable("EVENKEEL_INSTANCE")
                                    == Some(&format!("{name}-0"))
                                {
                                    let _gone = kill(process.pid, Signal::SIGKILL);
                                }
                            }
                        }
                        more => {
                            let count = more.max(1);
                            let spec = format!(
                                "devices: {{count: {count}}}\nbackoff: {{initialSeconds: 0}}\n\
                                 args: [--workers, '1', --workers-outlive]\npriority: {round}"
                            );
                            daemon.put(&file, &echo(&name, *port, &spec));
                        }
                    }
                }
                daemon.settle();
            }
        }));
        is_over.store(true, Relaxed);
        let found = watching.join().expect("it only looks");
        if let Err(panic) = churned {
            std::panic::resume_unwind(panic);
        }
        found
    });
    let looks = found.unwrap_or_else(|found| panic!("{found}\n{}", daemon.story()));
    assert!(looks > 10, "{looks} looks");
}

#[test]
fn pinned_devices_are_exactly_those() {
    let mut daemon = Daemon::new();
    daemon.declare_devices(4);
    daemon.run(&["--removal-grace", "0"]);
    let pinned = |name: &str, ids: &str| {
        let spec = format!("devices: {{ids: [{ids}]}}\nargs: [--print-env, CUDA_VISIBLE_DEVICES]");
        echo(name, free_port(), &spec)
    };
    daemon.put("a.yaml", &pinned("a", "GPU-3, 'index:1'"));
    daemon.ready("a");
    assert_eq!(
        visible(&daemon, "a-0"),
        ["1", "3"].map(str::to_owned).into()
    );
    daemon.put("b.yaml", &pinned("b", "GPU-1"));
    let why = daemon.wait_for_event("b-0", "InsufficientDevices");
    assert!(why.contains("GPU-1 by a-0"), "{why}");
    // What needs no device sees none.
    daemon.put("c.yaml", &needs("c", 0));
    daemon.ready("c");
    assert_eq!(visible(&daemon, "c-0"), ["-1".to_owned()].into());
    daemon.remove("a.yaml");
    daemon.ready("b");
    assert_eq!(visible(&daemon, "b-0"), ["1".to_owned()].into());
}

#[test]
fn a_port_that_a_stranger_has_is_skipped_when_scanning() {
    let daemon = Daemon::start(&[]);
    // The base port of `command`. Others who want it, want it for a moment.
    let stranger = wait_for(
        || TcpListener::bind(("127.0.0.1", 9000)).ok(),
        || "port 9000 does not become free".to_owned(),
    );
    let command = format!(
        "engine: command\ncommand: [{}, echo, --port, $(PORT)]\nreadinessProbe: {{httpGet: {{path: /health}}}}",
        evenkeel().display()
    );
    daemon.put("a.yaml", &manifest("a", &command));
    daemon.put("b.yaml", &manifest("b", &command));
    let ports: BTreeSet<u64> = ["a", "b"]
        .iter()
        .map(|name| daemon.ready(name)[0]["port"].as_u64().expect("a port"))
        .collect();
    assert_eq!(ports.len(), 2);
    assert!(
        ports.iter().all(|port| (9001..9100).contains(port)),
        "{ports:?}"
    );
    drop(stranger);
}

#[test]
fn an_exact_port_that_a_stranger_has_is_named_and_taken_once_he_leaves() {
    let daemon = Daemon::start(&["--resync", "600"]);
    let port = free_port();
    let stranger = TcpListener::bind(("127.0.0.1", port)).expect("it is free");
    daemon.put("a.yaml", &echo("a", port, ""));
    daemon.wait_for_event("a-0", "PortTakenByStranger");
    let a = daemon.in_state("a", "pending");
    assert_eq!(a[0]["reason"], "PortTakenByStranger");
    let message = a[0]["message"].as_str().expect("a text");
    let me = std::process::id().to_string();
    assert!(
        message.contains(&port.to_string()) && message.contains(&me),
        "{message}"
    );
    assert!(daemon.processes().is_empty());
    drop(stranger);
    let a = daemon.ready("a");
    assert_eq!(a[0]["port"], port);
    let record = daemon.record("a-0").expect("it runs");
    assert_eq!(record.history.failures, 0, "it is not to blame");
}

#[test]
fn an_exact_port_of_another_deployment_is_waited_for() {
    let daemon = Daemon::start(&["--removal-grace", "0", "--resync", "600"]);
    let port = free_port();
    daemon.put("a.yaml", &echo("a", port, ""));
    daemon.ready("a");
    daemon.put("b.yaml", &echo("b", port, ""));
    let why = daemon.wait_for_event("b-0", "PortTaken");
    assert!(why.contains("a-0"), "{why}");
    daemon.remove("a.yaml");
    assert_eq!(daemon.ready("b")[0]["port"], port);
}

#[test]
fn a_strangers_answer_on_our_port_is_not_ours() {
    let daemon = Daemon::start(&[]);
    let port = free_port();
    // It has a port and does not listen on it.
    let spec = format!(
        "engine: command\ncommand: [sleep, '600']\nport: {port}\n\
         readinessProbe: {{httpGet: {{path: /health}}, periodSeconds: 1}}"
    );
    daemon.put("a.yaml", &manifest("a", &spec));
    let a = daemon.in_state("a", "starting");
    let stranger = Running::start(std::process::Command::new(evenkeel()).args([
        "echo",
        "--port",
        &port.to_string(),
    ]));
    stranger.wait_for_log("echo: ready");
    assert_eq!(get(port, "/health").expect("an answer").status, 200);
    let told = daemon.wait_for_event("a-0", "PortTakenByStranger");
    assert!(told.contains(&stranger.pid().to_string()), "{told}");
    let again = daemon.in_state("a", "starting");
    assert_eq!(pid(&again[0]), pid(&a[0]));
    assert_eq!(pid_of(&daemon.launch("a-0")), pid(&a[0]));
}

#[test]
fn no_more_than_the_launch_limit_start_at_a_time() {
    let daemon = Daemon::start(&["--max-launches", "1", "--removal-grace", "0"]);
    let slow = "args: [--never-ready]\nstartupDeadlineSeconds: 600";
    daemon.put("a.yaml", &echo("a", free_port(), slow));
    daemon.in_state("a", "starting");
    daemon.put("b.yaml", &echo("b", free_port(), ""));
    daemon.wait_for("b waits for its turn", |seen| {
        instances_of(seen, "b").is_some_and(|b| b == "LaunchLimit")
    });
    daemon.settle();
    assert_eq!(daemon.record("b-0"), None);
    daemon.remove("a.yaml");
    daemon.ready("b");
}

fn instances_of(seen: &serde_json::Value, name: &str) -> Option<String> {
    let item = crate::support::daemon::item(seen, name)?;
    item["status"]["reason"].as_str().map(str::to_owned)
}
