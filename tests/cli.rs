//! The verbs, as a person or a script meets them: what they print, where, and how they end.
//!
//! Snapshots hold stdout, stderr and exit code together. What differs from run to run is replaced by a word.

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use regex_lite::Regex;
use serde_json::{Value, json};
use support::daemon::{Daemon, echo, instances, item, manifest, pid_of};
use support::http::post;
use support::process::{free_port, wait_for};
use support::verb::{Kept, Said};

/// What a verb said, without what differs from run to run.
fn redacted(daemon: &Daemon, said: &Said, names: &BTreeMap<u16, &str>) -> String {
    let mut text = said.to_string().replace(
        daemon
            .path("")
            .to_str()
            .expect("a text")
            .trim_end_matches('/'),
        "ROOT",
    );
    for (port, name) in names {
        text = text.replace(&port.to_string(), name);
    }
    // Columns are as wide as what was replaced. Indentation and carets stay where they are.
    let wide = Regex::new(r"(\S)    *").expect("a pattern");
    let lines = text.lines().map(|line| {
        if line.contains(" | ") {
            line.to_owned()
        } else {
            wide.replace_all(line, "$1   ").trim_end().to_owned()
        }
    });
    text = lines.collect::<Vec<_>>().join("\n");
    for (pattern, word) in [
        ("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID"),
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "TIME"),
        (r#"(?i)(pid"?:? +)\d+"#, "${1}PID"),
        (r"(?m)(echo   )\d+", "${1}PID"),
        (r"after \d+\.\d s", "after SOME s"),
        (r"\(\d+s ago", "(AGE ago"),
        (r" *\d+s ago", " AGE ago"),
        (r"(?m)(^|   )\d+s(   |$)", "${1}AGE${2}"),
    ] {
        let pattern = Regex::new(pattern).expect("a pattern");
        text = pattern.replace_all(&text, word).into_owned();
    }
    text
}

/// One of each: ready, stopped, paused, refused, broken.
fn mixed() -> (Daemon, BTreeMap<u16, &'static str>) {
    let mut daemon = Daemon::new();
    let port = free_port();
    let chat = echo("chat", port, "options: {maxContextLength: 512}").replace(
        "  name: chat\n",
        "  name: chat\n  labels: {task: chat}\n  annotations: {owner: me}\n",
    );
    daemon.put("chat.yaml", &chat);
    daemon.put("off.yaml", &manifest("off", "engine: echo\nreplicas: 0\n"));
    daemon.put(
        "later.yaml",
        &manifest("later", "engine: echo\npaused: true\n"),
    );
    daemon.put(
        "none.yaml",
        &manifest("none", "engine: sglang\nmodel: {id: tiny}\n"),
    );
    daemon.put("broken.yaml", &manifest("broken", "engine: ecko\n"));
    // All of them are found at once.
    daemon.run(&[]);
    daemon.ready("chat");
    daemon.wait_for_event("none-0", "Unsupported");
    daemon.wait_for_event("broken", "ManifestInvalid");
    (daemon, BTreeMap::from([(port, "PORT")]))
}

#[test]
fn what_is_shown_of_deployments() {
    let (daemon, names) = mixed();
    for (snapshot, words) in [
        ("get", &["get"][..]),
        ("get_wide", &["get", "-o", "wide"]),
        ("get_json", &["get", "-o", "json"]),
        ("get_yaml", &["get", "chat", "-o", "yaml"]),
        ("get_name", &["get", "-o", "name"]),
        ("describe", &["describe", "chat"]),
        ("describe_pending", &["describe", "none"]),
        ("events", &["events"]),
    ] {
        let said = daemon.verb(words);
        insta::assert_snapshot!(snapshot, redacted(&daemon, &said, &names));
    }
}

#[test]
fn what_is_shown_of_a_deployment_whose_file_is_broken_and_whose_engine_crashed() {
    let daemon = Daemon::start(&[]);
    let port = free_port();
    let spec = "args: [--crash-after, '0', --exit-code, '42']\nbackoff: {initialSeconds: 600}";
    daemon.put("a.yaml", &echo("a", port, spec));
    daemon.wait_for_record("a-0", "it waits", |record| {
        record.launch.is_none() && record.history.failures == 2
    });
    daemon.put(
        "a.yaml",
        &echo("a", port, &spec.replace("initialSeconds", "initial")),
    );
    daemon.wait_for_event("a", "ManifestInvalid");
    let names = BTreeMap::from([(port, "PORT")]);
    for (snapshot, words) in [
        ("get_crashed", &["get", "a"][..]),
        ("describe_crashed", &["describe", "a"]),
    ] {
        let said = daemon.verb(words);
        insta::assert_snapshot!(snapshot, redacted(&daemon, &said, &names));
    }
}

#[test]
fn a_diff_prints_the_plan_and_its_exit_code_says_whether_anything_would_be_done() {
    let mut daemon = Daemon::new();
    daemon.declare_devices(2);
    let devices = daemon.path("devices.yaml");
    let diff = |daemon: &Daemon| {
        let folder = daemon.folder();
        daemon.verb(&[
            "diff",
            folder.to_str().expect("a text"),
            "--devices",
            devices.to_str().expect("a text"),
        ])
    };
    let (a, b, c) = (free_port(), free_port(), free_port());
    let names = BTreeMap::from([(a, "PORT-A"), (b, "PORT-B"), (c, "PORT-C")]);
    daemon.put("a.yaml", &echo("a", a, "devices: {count: 2}"));
    daemon.put("b.yaml", &echo("b", b, "devices: {count: 0}"));
    daemon.put("c.yaml", &echo("c", c, "devices: {count: 1}"));
    let said = diff(&daemon);
    assert_eq!(said.code, Some(1), "{said}");
    insta::assert_snapshot!("diff_fresh", redacted(&daemon, &said, &names));
    assert!(
        !daemon.state().join("instances").exists(),
        "it changed something"
    );

    daemon.remove("c.yaml");
    daemon.run(&["--removal-grace", "0"]);
    daemon.ready("a");
    daemon.ready("b");
    let said = diff(&daemon);
    assert_eq!((said.code, said.stdout.as_str()), (Some(0), ""), "{said}");

    // Without the controller, which would act on it at once.
    daemon.stop();
    daemon.put("a.yaml", &echo("a", a, "devices: {count: 1}"));
    daemon.remove("b.yaml");
    daemon.put("c.yaml", &echo("c", c, "devices: {count: 1}"));
    let said = diff(&daemon);
    assert_eq!(said.code, Some(1), "{said}");
    insta::assert_snapshot!("diff_changed", redacted(&daemon, &said, &names));

    daemon.put("broken.yaml", &manifest("broken", "engine: ecko\n"));
    let said = diff(&daemon);
    assert_eq!(said.code, Some(2), "{said}");
    insta::assert_snapshot!("diff_broken", redacted(&daemon, &said, &names));

    let said = daemon.verb(&["diff", "/nowhere/at/all"]);
    assert_eq!(said.code, Some(2), "{said}");
}

#[test]
fn validate_says_what_is_wrong_and_where() {
    let daemon = Daemon::new();
    daemon.put("good.yaml", &manifest("good", "engine: echo\n"));
    let validate = |name: &str| {
        let path = daemon.folder().join(name);
        daemon.verb(&["validate", path.to_str().expect("a text")])
    };
    let said = validate("good.yaml");
    assert_eq!(said.code, Some(0), "{said}");
    daemon.put(
        "broken.yaml",
        &manifest("broken", "engine: echo\noptions: {maxContextLenght: 1}\n"),
    );
    let said = validate("");
    assert_eq!(said.code, Some(1), "{said}");
    insta::assert_snapshot!("validate", redacted(&daemon, &said, &BTreeMap::new()));
    let said = validate("nothing.yaml");
    assert_eq!(said.code, Some(2), "{said}");
    insta::assert_snapshot!(
        "validate_unreadable",
        redacted(&daemon, &said, &BTreeMap::new())
    );
}

#[test]
fn errors_have_a_hint_and_an_exit_code() {
    use std::os::unix::fs::PermissionsExt as _;

    let (daemon, names) = mixed();
    for (snapshot, code, words) in [
        ("error_get", 1, &["get", "chta"][..]),
        ("error_describe", 1, &["describe", "chta"]),
        ("error_logs", 1, &["logs", "chta"]),
        ("error_logs_previous", 1, &["logs", "chat", "--previous"]),
        ("error_wait_stopped", 1, &["wait", "off"]),
        ("error_wait_refused", 1, &["wait", "none"]),
        (
            "error_wait_gone",
            1,
            &["wait", "chat", "--for", "gone", "--timeout", "0.1"],
        ),
        ("error_usage", 2, &["gte"]),
    ] {
        let said = daemon.verb(words);
        assert_eq!(said.code, Some(code), "{said}");
        insta::assert_snapshot!(snapshot, redacted(&daemon, &said, &names));
    }

    // What `run` does not begin with. Each with a state of its own: the folder is looked at first.
    let other = Daemon::new();
    let run = |folder: &Path, more: &[&str]| {
        let log = other.path("log");
        let _none = fs::remove_file(&log);
        let mut child = other.spawn(folder, more, &log);
        let status = wait_for(
            || child.try_wait().expect("our own child"),
            || "it does not end".to_owned(),
        );
        Said {
            code: status.code(),
            stdout: String::new(),
            stderr: fs::read_to_string(log).expect("a log"),
        }
    };
    fs::create_dir(other.path("open")).expect("a folder");
    let everybody = fs::Permissions::from_mode(0o777);
    fs::set_permissions(other.path("open"), everybody).expect("our own folder");
    fs::write(
        other.path("gpus.yaml"),
        "devices:\n- {id: GPU-0, kind: tpu}\n",
    )
    .expect("a file");
    let gpus = other.path("gpus.yaml");
    for (snapshot, folder, more) in [
        ("run_missing_folder", other.path("missing"), &[][..]),
        ("run_world_writable", other.path("open"), &[]),
        (
            "run_bad_devices",
            other.folder(),
            &["--devices", gpus.to_str().expect("a text")],
        ),
    ] {
        let said = run(&folder, more);
        assert_eq!(said.code, Some(78), "{said}");
        let text = redacted(&other, &said, &BTreeMap::new());
        let without_log: Vec<&str> = text
            .lines()
            .filter(|line| !line.contains(" INFO "))
            .collect();
        insta::assert_snapshot!(snapshot, without_log.join("\n"));
    }
}

#[test]
fn get_works_without_a_controller_and_says_so() {
    let (mut daemon, names) = mixed();
    daemon.kill();
    let said = daemon.verb(&["get"]);
    insta::assert_snapshot!("get_without_controller", redacted(&daemon, &said, &names));
    let seen = daemon.get();
    assert_eq!(seen["reconciled"], false);
    let chat = &instances(&seen, "chat")[0];
    assert_eq!(chat["state"], "ready");

    let launch = daemon.launch("chat-0");
    kill(pid_of(&launch), Signal::SIGKILL).expect("it runs");
    daemon.in_state("chat", "exited");
    let said = daemon.verb(&["describe", "chat"]);
    assert_eq!(said.code, Some(0), "{said}");

    // A state folder that nothing was ever run with.
    let nothing = Daemon::new();
    let said = nothing.verb(&["get"]);
    insta::assert_snapshot!("get_nothing", redacted(&nothing, &said, &names));
}

#[test]
fn the_machine_readable_output_keeps_its_fields() {
    let (daemon, _) = mixed();
    let seen = daemon.get();
    let yaml = daemon.verb(&["get", "-o", "yaml"]).done();
    let yaml: Value = serde_yaml::from_str(&yaml).expect("YAML");
    assert_eq!(seen, yaml);
    assert_eq!(seen["apiVersion"], "evenkeel.dev/v1alpha1");
    assert_eq!(seen["kind"], "ModelDeploymentList");
    let chat = item(&seen, "chat").expect("it runs");
    let fields = |value: &Value| {
        let fields = value.as_object().expect("a mapping");
        fields.keys().cloned().collect::<Vec<_>>()
    };
    assert_eq!(fields(chat), ["metadata", "spec", "status"]);
    assert_eq!(chat["metadata"]["labels"], json!({"task": "chat"}));
    let status: Vec<String> = fields(&chat["status"]);
    for field in [
        "state",
        "reason",
        "message",
        "replicas",
        "readyReplicas",
        "source",
        "problems",
        "instances",
    ] {
        assert!(status.iter().any(|name| name == field), "no {field}");
    }
    let of_instance = fields(&chat["status"]["instances"][0]);
    for field in [
        "name",
        "state",
        "runtime",
        "pid",
        "containerId",
        "port",
        "devices",
        "restarts",
        "launchId",
        "startedAt",
        "readyAt",
        "nextTryAt",
    ] {
        assert!(of_instance.iter().any(|name| name == field), "no {field}");
    }
}

#[test]
fn the_help_names_every_verb_and_option() {
    let daemon = Daemon::new();
    let none = BTreeMap::new();
    insta::assert_snapshot!("help", redacted(&daemon, &daemon.verb(&["--help"]), &none));
    for verb in ["run", "get", "logs", "wait", "diff", "down"] {
        let said = daemon.verb(&[verb, "--help"]);
        insta::assert_snapshot!(format!("help_{verb}"), redacted(&daemon, &said, &none));
    }
}

#[test]
fn wait_ends_when_it_is_so() {
    let daemon = Daemon::start(&["--removal-grace", "0"]);
    let spec = "args: [--load-seconds, '1']";
    daemon.put("a.yaml", &echo("a", free_port(), spec));
    let said = daemon.verb(&["wait", "a", "--timeout", "30"]);
    assert_eq!(
        said,
        Said {
            code: Some(0),
            stdout: String::new(),
            stderr: String::new()
        }
    );
    assert_eq!(daemon.get()["items"][0]["status"]["state"], "ready");
    daemon.remove("a.yaml");
    daemon
        .verb(&["wait", "a", "--for", "gone", "--timeout", "30"])
        .done();
    assert_eq!(daemon.record("a-0"), None);
    assert!(daemon.processes().is_empty());
    // What never was is gone.
    daemon
        .verb(&["wait", "b", "--for", "gone", "--timeout", "0"])
        .done();
}

#[test]
fn a_reader_that_goes_away_is_a_clean_end() {
    let (mut daemon, _) = mixed();
    let folder = daemon.folder();
    let folder = folder.to_str().expect("a text");
    daemon.stop();
    daemon.put("new.yaml", &manifest("new", "engine: echo\n"));
    for words in [
        &["get"][..],
        &["get", "-o", "json"],
        &["describe", "chat"],
        &["events"],
        &["events", "-o", "json"],
        &["logs", "chat"],
        &["diff", folder],
        &["validate", folder],
        &["schema"],
        &["version"],
        &["--help"],
    ] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let err = daemon.path("err");
        let mut command = daemon.command(words);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(writer)
            .stderr(fs::File::create(&err).expect("a file"))
            .spawn()
            .expect("evenkeel is there");
        drop(command);
        let status = wait_for(
            || child.try_wait().expect("our own child"),
            || format!("{words:?} does not end"),
        );
        let said = fs::read_to_string(&err).expect("a file");
        assert!(
            !said.contains("panicked") && !said.contains("ipe"),
            "{words:?}: {said}"
        );
        // `diff` and `validate` have told by their exit code what there is to tell.
        let expected = match words[0] {
            "diff" => 2,
            "validate" => 1,
            _ => 0,
        };
        assert_eq!(status.code(), Some(expected), "{words:?}: {said}");
    }
}

#[test]
fn the_quick_start_is_ready_and_answers() {
    let mut daemon = Daemon::new();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/quickstart");
    daemon.run_on(&folder, &[]);
    let (chat, embed) = (daemon.ready("chat"), daemon.ready("embed"));
    assert_eq!((chat.len(), embed.len()), (2, 1));
    for (instance, model) in [
        (&chat[0], "chat"),
        (&chat[1], "chat"),
        (&embed[0], "embed-small"),
    ] {
        let port = instance["port"]
            .as_u64()
            .and_then(|port| port.try_into().ok());
        let body = json!({"model": model, "prompt": "fair winds"}).to_string();
        let answer = post(port.expect("a port"), "/v1/completions", body).expect("an answer");
        assert_eq!(answer.status, 200, "{answer:?}");
    }
    let said = daemon.verb(&["diff", folder.to_str().expect("a text")]);
    assert_eq!(said.code, Some(0), "{said}");
    daemon.signal(Signal::SIGINT);
    assert_eq!(daemon.wait_for_exit(), Some(0));
    assert!(daemon.processes().is_empty());
}

#[test]
fn logs_are_followed_across_a_relaunch() {
    let daemon = Daemon::start(&["--resync", "600"]);
    daemon.put("a.yaml", &echo("a", free_port(), ""));
    let first = daemon.ready_launch("a");
    let out = daemon.path("followed");
    let _follower = Kept(
        daemon
            .command(&["logs", "a", "-f"])
            .stdin(Stdio::null())
            .stdout(fs::File::create(&out).expect("a file"))
            .stderr(Stdio::null())
            .spawn()
            .expect("evenkeel is there"),
    );
    let followed = |pid: nix::unistd::Pid| {
        let text = format!("starting as pid {pid},");
        daemon.eventually(&format!("{text} is printed"), || {
            fs::read_to_string(&out)
                .is_ok_and(|log| log.contains(&text))
                .then_some(())
        });
    };
    followed(pid_of(&first));
    kill(pid_of(&first), Signal::SIGKILL).expect("it runs");
    let second = daemon.relaunched("a-0", &first);
    followed(pid_of(&second));
}
