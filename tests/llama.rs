//! The main job with a real llama.cpp server: launched, served, edited, crashed, adopted and removed by nothing but file
//! operations.

mod support;

use std::net::TcpListener;
use std::path::Path;

use evenkeel::record::{Cause, Launch};
use nix::sys::signal::{Signal, kill};
use serde_json::json;
use support::daemon::{Daemon, echo, manifest, pid_of};
use support::gguf::{Damage, TinyModel, damage, write_tiny};
use support::http::{get, post};
use support::llama::llama_server;
use support::process::{free_port, is_alive, wait_until};

/// A manifest for the tiny model in this folder, one thread and no more.
fn tiny(program: &Path, daemon: &Daemon, port: u16, context: u32, more: &str) -> String {
    let model = daemon.path("tiny.gguf");
    if !model.exists() {
        write_tiny(&model, &TinyModel::default()).expect("a model");
    }
    let spec = format!(
        "engine: llamacpp\nbinary: {}\nmodel: {{path: {}}}\nport: {port}\n\
         options: {{maxContextLength: {context}, maxConcurrentRequests: 2}}\n\
         args: [--threads, '1', --no-warmup]\n{more}",
        program.display(),
        model.display()
    );
    manifest("tiny", &spec)
}

fn assert_answers(port: u16) {
    let body = json!({"model": "tiny", "prompt": "the ship", "max_tokens": 8});
    let answer = post(port, "/v1/completions", body.to_string()).expect("an answer");
    assert_eq!(answer.status, 200, "{answer:?}");
    assert_eq!(answer.json()["usage"]["completion_tokens"], 8);
}

/// The command line of what runs.
fn arguments(launch: &Launch) -> Vec<String> {
    let bytes = std::fs::read(format!("/proc/{}/cmdline", pid_of(launch))).expect("it runs");
    let words = bytes.split(|byte| *byte == 0);
    words
        .map(|word| String::from_utf8_lossy(word).into_owned())
        .collect()
}

fn context(launch: &Launch) -> String {
    let words = arguments(launch);
    let flag = words.iter().position(|word| word == "--ctx-size");
    words[flag.expect("it is given") + 1].clone()
}

#[test]
fn a_manifest_in_the_folder_is_a_served_model_and_its_edits_relaunch_what_they_must_and_nothing_else()
 {
    let Some(program) = llama_server() else {
        return;
    };
    let mut daemon = Daemon::new();
    daemon.declare_devices(1);
    daemon.run(&["--removal-grace", "0.2", "--resync", "600"]);
    let (port, other_port) = (free_port(), free_port());
    daemon.put(
        "other.yaml",
        &echo("other", other_port, "devices: {count: 0}"),
    );
    let other = daemon.ready_launch("other");

    // Renamed into the folder: ready, and it answers.
    daemon.put("tiny.yaml", &tiny(&program, &daemon, port, 256, ""));
    let first = daemon.ready_launch("tiny");
    assert_answers(port);
    assert_eq!(context(&first), "512", "the length is meant per request");
    assert_eq!(first.lease.devices.len(), 1);

    // An edit of what it is launched with: a new process.
    daemon.put("tiny.yaml", &tiny(&program, &daemon, port, 512, ""));
    let second = daemon.relaunched("tiny-0", &first);
    daemon.ready("tiny");
    assert!(!is_alive(pid_of(&first)));
    assert_eq!(context(&second), "1024");
    assert_answers(port);

    // A comment, and another order of the keys.
    let text = tiny(&program, &daemon, port, 512, "");
    daemon.put("tiny.yaml", &format!("# The smallest one.\n{text}"));
    daemon.settle();
    daemon.assert_untouched("tiny-0", &second);
    let reversed = text.replace(
        "{maxContextLength: 512, maxConcurrentRequests: 2}",
        "{maxConcurrentRequests: 2, maxContextLength: 512}",
    );
    assert_ne!(reversed, text);
    daemon.put("tiny.yaml", &reversed);
    daemon.settle();
    daemon.assert_untouched("tiny-0", &second);

    // A probe: it is in force, and nothing is relaunched.
    let probed = tiny(
        &program,
        &daemon,
        port,
        512,
        "livenessProbe: {periodSeconds: 7}",
    );
    daemon.put("tiny.yaml", &probed);
    daemon.wait_for_record("tiny-0", "its record has the new probe", |record| {
        let probe = record.spec.liveness_probe.as_ref();
        probe.is_some_and(|probe| probe.period_seconds == Some(7))
    });
    daemon.settle();
    daemon.assert_untouched("tiny-0", &second);

    // Another file name.
    daemon.rename("tiny.yaml", "renamed.yaml");
    daemon.wait_for_record("tiny-0", "its record names the new file", |record| {
        record.source.file.as_os_str() == "renamed.yaml"
    });
    daemon.settle();
    daemon.assert_untouched("tiny-0", &second);
    assert_answers(port);

    // Gone.
    daemon.remove("renamed.yaml");
    daemon.wait_until_forgotten("tiny-0");
    assert_eq!(daemon.members(&second), []);
    wait_until(
        || TcpListener::bind(("127.0.0.1", port)).is_ok(),
        "its port is not free",
    );
    daemon.put(
        "next.yaml",
        &echo("next", free_port(), "devices: {count: 1}"),
    );
    let next = daemon.ready_launch("next");
    assert_eq!(next.lease.devices, second.lease.devices);

    // Through all of this nobody touched the other one.
    daemon.assert_untouched("other-0", &other);
    assert_eq!(daemon.told("other-0", "Launching").len(), 1);
}

#[test]
fn a_killed_server_is_launched_again_and_outlives_its_controller() {
    let Some(program) = llama_server() else {
        return;
    };
    let mut daemon = Daemon::start(&["--resync", "600"]);
    let port = free_port();
    let text = tiny(
        &program,
        &daemon,
        port,
        256,
        "backoff: {initialSeconds: 600}",
    );
    daemon.put("tiny.yaml", &text);
    let first = daemon.ready_launch("tiny");
    let log = daemon.engine_log("tiny-0");

    kill(pid_of(&first), Signal::SIGKILL).expect("it runs");
    let second = daemon.relaunched("tiny-0", &first);
    daemon.ready("tiny");
    assert_ne!(pid_of(&first), pid_of(&second));
    assert_answers(port);
    let record = daemon.record("tiny-0").expect("it runs");
    assert_eq!(record.history.restarts, 1);
    let last = record.history.last.expect("it ended");
    assert_eq!(second.reserved_at, last.at);
    let previous = daemon.verb(&["logs", "tiny", "--previous"]).done();
    assert!(previous.starts_with(&log) && !log.is_empty(), "{previous}");

    daemon.kill();
    assert_answers(port);
    daemon.run(&["--resync", "600"]);
    daemon.wait_for_event("tiny-0", "Adopted");
    daemon.settle();
    daemon.assert_untouched("tiny-0", &second);
    assert_answers(port);

    kill(pid_of(&second), Signal::SIGKILL).expect("it runs");
    let record = daemon.wait_for_record("tiny-0", "it waits", |record| record.launch.is_none());
    assert_eq!(record.history.failures, 2);
    let shown = daemon.verb(&["describe", "tiny"]).done();
    assert!(shown.contains("CrashLoopBackOff"), "{shown}");
    assert!(shown.contains("Next try:"), "{shown}");
}

#[test]
fn a_model_that_is_damaged_is_told_with_the_end_of_the_log_and_served_once_it_is_mended() {
    let Some(program) = llama_server() else {
        return;
    };
    let daemon = Daemon::start(&["--resync", "600"]);
    let port = free_port();
    let with_backoff = |seconds: u32| {
        let backoff = format!("backoff: {{initialSeconds: {seconds}}}");
        tiny(&program, &daemon, port, 256, &backoff)
    };
    let text = with_backoff(600);
    damage(&daemon.path("tiny.gguf"), Damage::Magic).expect("a damaged model");
    daemon.put("tiny.yaml", &text);
    let record = daemon.wait_for_record("tiny-0", "it waits", |record| {
        record.launch.is_none() && record.history.failures == 2
    });
    let cause = record.history.last.map(|last| last.cause);
    assert!(matches!(cause, Some(Cause::Failed(_))), "{cause:?}");
    let shown = daemon.verb(&["describe", "tiny"]).done();
    assert!(shown.contains("ExitedEarly"), "{shown}");
    assert!(shown.contains("invalid magic"), "{shown}");
    assert!(get(port, "/health").is_err());

    write_tiny(&daemon.path("tiny.gguf"), &TinyModel::default()).expect("a model");
    daemon.put("tiny.yaml", &with_backoff(0));
    daemon.ready("tiny");
    assert_answers(port);
}
