//! `engine: command`, and programs that cannot be started.

use crate::support::daemon::{Daemon, echo, instances, manifest, pid};
use crate::support::http::get;
use crate::support::process::{evenkeel, free_port};

#[test]
fn a_command_is_given_its_port_and_counts_as_ready_when_the_port_accepts() {
    let daemon = Daemon::start(&[]);
    let port = free_port();
    let spec = format!(
        "engine: command\nport: {port}\ncommand: [{}, echo, --port, $(PORT), --alias, $(NAME)]\n\
         env: [{{name: NAME, value: tiny}}]",
        evenkeel().display()
    );
    daemon.put("a.yaml", &manifest("a", &spec));
    daemon.ready("a");
    let models = get(port, "/v1/models").expect("an answer").json();
    assert_eq!(models["data"][0]["id"], "tiny");
}

#[test]
fn a_command_without_a_port_is_ready_as_soon_as_it_runs() {
    let daemon = Daemon::start(&["--removal-grace", "0"]);
    let spec = "engine: command\ncommand: [sh, -c, 'echo begun; exec sleep 600']";
    daemon.put("a.yaml", &manifest("a", spec));
    let a = daemon.ready("a");
    assert_eq!(a[0]["port"], serde_json::Value::Null);
    daemon.eventually("it runs", || {
        (daemon.engine_log("a-0") == "begun\n").then_some(())
    });
    let command = std::fs::read(format!("/proc/{}/cmdline", pid(&a[0]))).expect("it runs");
    assert!(command.starts_with(b"sh\0") || command.starts_with(b"sleep\0"));
}

#[test]
fn a_program_that_cannot_be_started_is_told_with_its_path_and_tried_again_later_and_later() {
    let daemon = Daemon::start(&["--resync", "600"]);
    let folder = daemon.path("bin");
    std::fs::create_dir(&folder).expect("a folder");
    let plain = folder.join("plain");
    std::fs::write(&plain, "no program").expect("a file");
    let missing = folder.join("missing");
    let port = free_port();
    for (name, path, why) in [
        ("missing", &missing, "not found"),
        ("plain", &plain, "not executable"),
    ] {
        let path = path.to_str().expect("a text");
        let spec = format!(
            "engine: llamacpp\nbinary: {path}\nmodel: {{id: tiny}}\nport: {port}\n\
             backoff: {{initialSeconds: 600}}"
        );
        daemon.put("a.yaml", &manifest("a", &spec));
        let message = daemon.eventually(&format!("it is told that {path} is {why}"), || {
            let told = daemon.told("a-0", "SpawnFailed");
            told.into_iter().find(|told| told.contains(path))
        });
        assert!(message.contains(why), "{name}: {message}");
        let seen = daemon.wait_for("it backs off", |seen| {
            instances(seen, "a")[0]["reason"] == "CrashLoopBackOff"
        });
        let a = &instances(&seen, "a")[0];
        assert_eq!(a["lastEnding"]["reason"], "SpawnFailed", "{a:#}");
        assert!(a["nextTryAt"].is_string(), "{a:#}");
        let shown = daemon.verb(&["describe", "a"]).done();
        assert!(
            shown.contains("SpawnFailed") && shown.contains(path),
            "{shown}"
        );
    }
    assert!(daemon.processes().is_empty());
}

#[test]
fn a_value_from_a_file_reaches_the_engine_and_nothing_else() {
    const SECRET: &str = "hf_thisIsAVerySecretValue0123456789";
    let daemon = Daemon::start(&[]);
    let file = daemon.path("token");
    std::fs::write(&file, format!("{SECRET}\n")).expect("a file");
    let spec = format!(
        "env: [{{name: TOKEN, valueFrom: {{file: {}}}}}]\n\
         args: [--print-env, TOKEN, --crash-after, '0.5']\nbackoff: {{initialSeconds: 600}}",
        file.display()
    );
    daemon.put("a.yaml", &echo("a", free_port(), &spec));
    daemon.wait_for_record("a-0", "it ended twice", |record| {
        record.history.failures == 2
    });
    // The engine had it, and it is in no place but its own log.
    assert!(daemon.engine_log("a-0").contains(SECRET));
    let shown = daemon.verb(&["describe", "a"]).done();
    assert!(shown.contains("The end of its log"), "{shown}");
    assert!(!shown.contains(SECRET), "{shown}");
    let record = std::fs::read_to_string(daemon.state().join("instances/a-0.json"));
    assert!(!record.expect("a record").contains(SECRET));
    for verb in [
        ["events", "-o", "json"],
        ["get", "-o", "json"],
        ["get", "-o", "yaml"],
    ] {
        assert!(!daemon.verb(&verb).done().contains(SECRET), "{verb:?}");
    }
    assert!(!daemon.log().contains(SECRET));
}
