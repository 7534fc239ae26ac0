//! What the options of `run` change.

use std::fs;
use std::os::unix::fs::symlink;

use crate::support::daemon::{Daemon, echo, instances, manifest};
use crate::support::process::{free_port, is_alive};

#[test]
fn without_a_watch_the_folder_is_looked_at_by_the_clock() {
    let daemon = Daemon::start(&["--poll", "0.2", "--removal-grace", "0.2"]);
    let port = free_port();
    daemon.put("a.yaml", &echo("a", port, ""));
    let before = daemon.ready_launch("a");
    daemon.put("a.yaml", &echo("a", port, "options: {maxContextLength: 9}"));
    daemon.relaunched("a-0", &before);
    daemon.remove("a.yaml");
    daemon.wait_until_forgotten("a-0");
}

#[test]
fn folders_within_the_folder_count_only_if_that_is_wished() {
    let mut daemon = Daemon::new();
    let within = daemon.folder().join("team/chat");
    fs::create_dir_all(&within).expect("a folder");
    fs::write(within.join("a.yaml"), echo("a", free_port(), "")).expect("a file");
    daemon.run(&["--removal-grace", "0"]);
    daemon.settle();
    assert!(daemon.told("a", "Accepted").is_empty());
    daemon.stop();

    daemon.run(&["--removal-grace", "0", "--recursive"]);
    daemon.ready("a");
    let record = daemon.record("a-0").expect("it runs");
    assert_eq!(record.source.file.as_os_str(), "team/chat/a.yaml");
    fs::remove_file(within.join("a.yaml")).expect("the file");
    daemon.wait_until_forgotten("a-0");
}

#[test]
fn a_folder_behind_a_link_that_is_swapped_is_taken_as_a_whole() {
    let mut daemon = Daemon::new();
    let (kept, edited) = (free_port(), free_port());
    let swap = |daemon: &Daemon, number: u32| {
        let folder = daemon.path(&format!("version-{number}"));
        fs::create_dir(&folder).expect("a folder");
        let options = format!("options: {{maxContextLength: {number}}}");
        fs::write(folder.join("kept.yaml"), echo("kept", kept, "")).expect("a file");
        fs::write(folder.join("edited.yaml"), echo("edited", edited, &options)).expect("a file");
        symlink(&folder, daemon.path("next")).expect("a link");
        fs::rename(daemon.path("next"), daemon.path("current")).expect("a rename");
    };
    swap(&daemon, 1);
    daemon.run_on(
        &daemon.path("current"),
        &["--removal-grace", "0", "--resync", "600"],
    );
    let before = (daemon.ready_launch("kept"), daemon.ready_launch("edited"));
    swap(&daemon, 2);
    daemon.relaunched("edited-0", &before.1);
    daemon.ready("edited");
    daemon.assert_untouched("kept-0", &before.0);
}

#[test]
fn a_manifest_for_other_hosts_waits_until_this_one_has_the_label() {
    let mut daemon = Daemon::start(&[]);
    let spec = "engine: echo\nnodeSelector: {rack: r7}";
    daemon.put("a.yaml", &manifest("a", spec));
    daemon.settle();
    let a = &instances(&daemon.get(), "a")[0];
    assert_eq!(a["reason"], "OtherNode");
    assert_eq!(daemon.record("a-0"), None);
    daemon.stop();
    daemon.run(&["--node-label", "rack=r7"]);
    let launch = daemon.ready_launch("a");
    daemon.stop();

    // Without the label it is not wanted here any more.
    daemon.run(&["--node-label", "rack=r8"]);
    daemon.wait_until_forgotten("a-0");
    assert!(!is_alive(crate::support::daemon::pid_of(&launch)));
}

#[test]
fn the_log_is_json_if_that_is_wished() {
    let mut daemon = Daemon::start(&["--log-format", "json"]);
    daemon.put("a.yaml", &echo("a", free_port(), ""));
    daemon.ready("a");
    daemon.stop();
    let log = daemon.log();
    let lines: Vec<serde_json::Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect();
    let ready = lines
        .iter()
        .find(|line| line["fields"]["reason"] == "Ready");
    assert_eq!(
        ready.unwrap_or_else(|| panic!("{log}"))["fields"]["subject"],
        "a-0"
    );
}

#[test]
fn a_start_up_deadline_of_the_operator_counts_where_the_manifest_has_none() {
    let daemon = Daemon::start(&["--startup-deadline", "1", "--resync", "600"]);
    let spec = "args: [--never-ready]\nbackoff: {initialSeconds: 600}";
    daemon.put("a.yaml", &echo("a", free_port(), spec));
    let own = format!("{spec}\nstartupDeadlineSeconds: 600");
    daemon.put("b.yaml", &echo("b", free_port(), &own));
    let told = daemon.wait_for_event("a-0", "StartupTimeout");
    assert!(told.contains("not ready after 1 s"), "{told}");
    assert_eq!(daemon.in_state("b", "starting")[0]["restarts"], 0);
}
