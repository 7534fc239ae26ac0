//! What a change of a manifest does, and what it leaves alone.

use std::net::TcpListener;

use evenkeel::record::StopReason;

use crate::support::daemon::{Daemon, echo, instances, item, manifest, pid, pid_of};
use crate::support::http::{get, post};
use crate::support::process::{free_port, is_alive, wait_until};

/// Whether this process can listen on it.
fn is_free(port: u16) -> bool {
    TcpListener::bind(("127.0.0.1", port)).is_ok()
}

#[test]
fn a_manifest_renamed_into_the_folder_is_ready_and_answers() {
    let daemon = Daemon::start(&[]);
    let port = free_port();
    daemon.put("chat.yaml", &echo("chat", port, ""));
    let chat = daemon.ready("chat");
    assert_eq!(chat.len(), 1);
    assert_eq!(chat[0]["port"], port);
    let body = r#"{"model": "chat", "prompt": "fair winds"}"#;
    let answer = post(port, "/v1/completions", body).expect("an answer");
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json()["choices"][0]["text"], "fair winds");
    assert_eq!(daemon.told("chat-0", "Ready").len(), 1);
}

#[test]
fn an_edit_that_needs_a_relaunch_relaunches_its_deployment_and_nothing_else() {
    let daemon = Daemon::start(&[]);
    let (port, other_port) = (free_port(), free_port());
    daemon.put(
        "a.yaml",
        &echo("a", port, "options: {maxContextLength: 512}"),
    );
    daemon.put("b.yaml", &echo("b", other_port, ""));
    let (before, other) = (daemon.ready_launch("a"), daemon.ready_launch("b"));

    daemon.put(
        "a.yaml",
        &echo("a", port, "options: {maxContextLength: 1024}"),
    );
    let after = daemon.relaunched("a-0", &before);
    assert_eq!(
        after.lease, before.lease,
        "what it held and may keep it keeps"
    );
    assert!(!is_alive(pid_of(&before)));
    daemon.ready("a");
    let record = daemon.record("a-0").expect("it runs");
    assert_eq!(record.history.restarts, 0, "nothing was wrong with it");
    let why = daemon.told("a-0", "Stopping");
    assert!(why[0].contains("spec.options changed"), "{why:?}");
    daemon.settle();
    daemon.assert_untouched("b-0", &other);
    assert_eq!(daemon.told("b-0", "Launching").len(), 1);
}

#[test]
fn an_edit_of_a_comment_of_key_order_or_of_a_probe_relaunches_nothing() {
    let daemon = Daemon::start(&[]);
    let port = free_port();
    daemon.put(
        "a.yaml",
        &echo("a", port, "options: {maxContextLength: 512, dtype: half}"),
    );
    let before = daemon.ready_launch("a");

    let commented = echo("a", port, "options: {maxContextLength: 512, dtype: half}");
    daemon.put("a.yaml", &format!("# What it is for.\n{commented}"));
    daemon.settle();
    daemon.assert_untouched("a-0", &before);

    daemon.put(
        "a.yaml",
        &format!(
            "kind: ModelDeployment\nspec:\n  options:\n    dtype: half\n    maxContextLength: 512\n  \
             port: {port}\n  engine: echo\n  replicas: 1\nmetadata: {{name: a}}\n\
             apiVersion: evenkeel.dev/v1alpha1\n"
        ),
    );
    daemon.settle();
    daemon.assert_untouched("a-0", &before);

    let probed = "options: {maxContextLength: 512, dtype: half}\nlivenessProbe: {periodSeconds: 7}";
    daemon.put("a.yaml", &echo("a", port, probed));
    let record = daemon.wait_for_record("a-0", "its record has the new probe", |record| {
        record.spec.liveness_probe.is_some()
    });
    let probe = record.spec.liveness_probe.expect("just seen");
    assert_eq!(probe.period_seconds, Some(7));
    daemon.settle();
    daemon.assert_untouched("a-0", &before);
    assert_eq!(daemon.told("a-0", "Launching").len(), 1);
    assert_eq!(
        daemon.told("a", "Accepted").last().map(String::as_str),
        Some("changed in a.yaml: live")
    );
}

#[test]
fn a_new_restarted_at_relaunches_and_another_annotation_does_not() {
    let daemon = Daemon::start(&[]);
    let port = free_port();
    let annotated = |annotation: &str| {
        let annotated = format!("  name: a\n  annotations: {{{annotation}}}\n");
        echo("a", port, "").replace("  name: a\n", &annotated)
    };
    daemon.put("a.yaml", &echo("a", port, ""));
    let first = daemon.ready_launch("a");
    daemon.put("a.yaml", &annotated("owner: me"));
    daemon.wait_for_record("a-0", "its record has the annotation", |record| {
        record.metadata.annotations.contains_key("owner")
    });
    daemon.settle();
    daemon.assert_untouched("a-0", &first);
    daemon.put("a.yaml", &annotated("evenkeel.dev/restartedAt: now"));
    daemon.relaunched("a-0", &first);
    daemon.ready("a");
}

#[test]
fn renaming_the_file_relaunches_nothing() {
    let daemon = Daemon::start(&["--removal-grace", "0"]);
    let port = free_port();
    daemon.put("a.yaml", &echo("a", port, ""));
    let before = daemon.ready_launch("a");
    daemon.rename("a.yaml", "z.yml");
    let record = daemon.wait_for_record("a-0", "its record names the new file", |record| {
        record.source.file.as_os_str() == "z.yml"
    });
    assert_eq!(record.launch.map(|launch| launch.id), Some(before.id));
    daemon.settle();
    daemon.assert_untouched("a-0", &before);
}

#[test]
fn deleting_the_file_stops_the_process_frees_port_and_devices_and_removes_the_record() {
    let mut daemon = Daemon::new();
    daemon.declare_devices(2);
    daemon.run(&["--removal-grace", "0.2"]);
    let port = free_port();
    daemon.put("a.yaml", &echo("a", port, "devices: {count: 2}"));
    let launch = daemon.ready_launch("a");
    assert_eq!(launch.lease.devices.len(), 2);
    assert!(!is_free(port));

    daemon.remove("a.yaml");
    daemon.wait_until_forgotten("a-0");
    assert!(!is_alive(pid_of(&launch)));
    assert!(daemon.processes().is_empty());
    wait_until(|| is_free(port), "the port is not free");
    assert!(item(&daemon.get(), "a").is_none());

    // Nobody holds the devices: somebody else gets both.
    daemon.put("b.yaml", &echo("b", port, "devices: {count: 2}"));
    assert_eq!(daemon.ready_launch("b").lease, launch.lease);
}

#[test]
fn a_file_that_is_deleted_and_created_again_within_the_grace_relaunches_nothing() {
    let daemon = Daemon::start(&["--removal-grace", "600"]);
    let port = free_port();
    daemon.put("a.yaml", &echo("a", port, ""));
    let before = daemon.ready_launch("a");
    daemon.remove("a.yaml");
    // The controller has seen that it is gone.
    daemon.settle();
    let a = &instances(&daemon.get(), "a")[0];
    assert_eq!(
        (&a["state"], &a["reason"]),
        (&"ready".into(), &"RemovalGrace".into())
    );
    daemon.put("a.yaml", &echo("a", port, ""));
    daemon.settle();
    daemon.assert_untouched("a-0", &before);
    let a = &instances(&daemon.get(), "a")[0];
    assert_eq!((&a["state"], &a["reason"]), (&"ready".into(), &"".into()));
}

#[test]
fn a_refused_edit_leaves_the_old_instance_serving_and_says_why() {
    let mut daemon = Daemon::new();
    daemon.declare_devices(2);
    daemon.run(&[]);
    let port = free_port();
    let good = echo("a", port, "devices: {count: 1}");
    daemon.put("a.yaml", &good);
    let before = daemon.ready_launch("a");
    for (edit, why) in [
        (
            manifest(
                "a",
                &format!("engine: sglang\nport: {port}\nmodel: {{id: tiny}}"),
            ),
            "spec.command",
        ),
        (echo("a", port, "devices: {count: 3}"), "this host has 2"),
        (
            echo("a", port, "devices: {ids: [GPU-7]}"),
            "there is no device `GPU-7`",
        ),
    ] {
        daemon.put("a.yaml", &edit);
        daemon.eventually(&format!("it is told why: {why}"), || {
            let told = daemon.told("a-0", "Unsupported");
            told.iter().any(|told| told.contains(why)).then_some(())
        });
        let a = &instances(&daemon.get(), "a")[0];
        assert_eq!(
            (&a["state"], &a["reason"]),
            (&"ready".into(), &"Unsupported".into()),
            "{a:#}"
        );
        assert!(
            a["message"].as_str().expect("a text").contains(why),
            "{a:#}"
        );
        daemon.settle();
        daemon.assert_untouched("a-0", &before);
        assert_eq!(get(port, "/health").expect("an answer").status, 200);
    }
    daemon.put("a.yaml", &good);
    daemon.settle();
    daemon.assert_untouched("a-0", &before);
    let a = &instances(&daemon.get(), "a")[0];
    assert_eq!(a["reason"], "");
}

#[test]
fn what_cannot_run_here_waits_and_says_why() {
    let daemon = Daemon::start(&[]);
    daemon.put("a.yaml", &echo("a", free_port(), "devices: {count: 1}"));
    let why = daemon.wait_for_event("a-0", "Unsupported");
    assert!(why.contains("this host has 0"), "{why}");
    let a = daemon.in_state("a", "pending");
    assert_eq!(a[0]["reason"], "Unsupported");
    assert_eq!(daemon.record("a-0"), None);
}

#[test]
fn replicas_are_added_and_taken_away_and_those_that_stay_are_left_alone() {
    let daemon = Daemon::start(&[]);
    let replicas = |count: u32| manifest("a", &format!("engine: echo\nreplicas: {count}"));
    daemon.put("a.yaml", &replicas(1));
    let first = daemon.ready_launch("a");

    daemon.put("a.yaml", &replicas(2));
    daemon.wait_for("both are ready", |seen| {
        item(seen, "a").is_some_and(|item| item["status"]["readyReplicas"] == 2)
    });
    daemon.assert_untouched("a-0", &first);
    let second = daemon.launch("a-1");
    assert_ne!(first.lease.port, second.lease.port);

    daemon.put("a.yaml", &replicas(1));
    daemon.wait_until_forgotten("a-1");
    assert!(!is_alive(pid_of(&second)));
    daemon.assert_untouched("a-0", &first);

    daemon.put("a.yaml", &replicas(0));
    daemon.wait_until_forgotten("a-0");
    daemon.wait_until_nothing_runs();
    assert!(daemon.in_state("a", "stopped").is_empty());
}

#[test]
fn a_paused_deployment_is_neither_changed_nor_relaunched_until_it_goes_on() {
    let daemon = Daemon::start(&[]);
    let port = free_port();
    daemon.put("new.yaml", &echo("new", free_port(), "paused: true"));
    daemon.put("a.yaml", &echo("a", port, ""));
    let before = daemon.ready_launch("a");

    let edited = "options: {maxContextLength: 1024}";
    daemon.put(
        "a.yaml",
        &echo("a", port, &format!("paused: true\n{edited}")),
    );
    daemon.settle();
    daemon.assert_untouched("a-0", &before);

    let crashed = pid(&instances(&daemon.get(), "a")[0]);
    nix::sys::signal::kill(crashed, nix::sys::signal::Signal::SIGKILL).expect("it runs");
    let record = daemon.wait_for_record("a-0", "its end is written down", |record| {
        record.launch.is_none()
    });
    assert_eq!(record.history.restarts, 0);
    assert_eq!(daemon.told("a-0", "Exited").len(), 1);
    daemon.settle();
    assert!(daemon.processes().is_empty());
    let a = &instances(&daemon.get(), "a")[0];
    assert_eq!(a["reason"], "Paused");

    daemon.put("a.yaml", &echo("a", port, edited));
    let after = daemon.ready_launch("a");
    assert_ne!(after.id, before.id);
    let record = daemon.record("new-0");
    assert_eq!(record, None, "what is new and paused is not launched");
}

#[test]
fn an_orphan_is_left_running_when_its_manifest_is_removed() {
    let daemon = Daemon::start(&["--removal-grace", "0"]);
    let port = free_port();
    daemon.put("a.yaml", &echo("a", port, "deletionPolicy: Orphan"));
    let launch = daemon.ready_launch("a");
    daemon.remove("a.yaml");
    daemon.wait_until_forgotten("a-0");
    daemon.settle();
    assert!(is_alive(pid_of(&launch)));
    assert_eq!(daemon.told("a-0", "Forgotten").len(), 1);
    nix::sys::signal::kill(pid_of(&launch), nix::sys::signal::SIGKILL).expect("it runs");
    daemon.wait_until_nothing_runs();
}

#[test]
fn a_manifest_that_is_removed_while_its_engine_loads_ends_it() {
    let daemon = Daemon::start(&["--removal-grace", "0"]);
    daemon.put(
        "a.yaml",
        &echo("a", free_port(), "args: [--load-seconds, '600']"),
    );
    daemon.in_state("a", "starting");
    let launch = daemon.launch("a-0");
    daemon.remove("a.yaml");
    daemon.wait_until_forgotten("a-0");
    assert!(!is_alive(pid_of(&launch)));
    assert_eq!(
        daemon.told("a-0", "Stopping"),
        [StopReason::Removed.to_string()]
    );
}
