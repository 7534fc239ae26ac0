//! How a controller ends, and what it leaves.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal::{SIGHUP, SIGINT, SIGTERM};

use crate::support::daemon::{Daemon, echo, pid_of};
use crate::support::http::get;
use crate::support::process::{free_port, is_alive, wait_for};

fn ready(arguments: &[&str]) -> (Daemon, evenkeel::record::Launch, u16) {
    let daemon = Daemon::start(arguments);
    let port = free_port();
    daemon.put("a.yaml", &echo("a", port, ""));
    let launch = daemon.ready_launch("a");
    (daemon, launch, port)
}

#[test]
fn sigterm_and_sighup_leave_the_instances_running() {
    let (mut daemon, launch, port) = ready(&[]);
    for signal in [SIGTERM, SIGHUP] {
        daemon.signal(signal);
        assert_eq!(daemon.wait_for_exit(), Some(0));
        assert_eq!(get(port, "/health").expect("an answer").status, 200);
        daemon.assert_untouched("a-0", &launch);
        daemon.run(&[]);
        daemon.settle();
    }
}

#[test]
fn sigint_stops_the_instances() {
    let (mut daemon, launch, _) = ready(&[]);
    daemon.signal(SIGINT);
    assert_eq!(daemon.wait_for_exit(), Some(0));
    assert!(!is_alive(pid_of(&launch)));
    assert!(daemon.records().is_empty());
    assert!(daemon.processes().is_empty());
}

#[test]
fn a_second_sigint_leaves_at_once() {
    let mut daemon = Daemon::start(&[]);
    let spec = "args: [--ignore-sigterm]\nterminationGracePeriodSeconds: 600";
    daemon.put("a.yaml", &echo("a", free_port(), spec));
    let launch = daemon.ready_launch("a");
    daemon.signal(SIGINT);
    daemon.wait_for_record("a-0", "it is asked to end", |record| {
        record
            .launch
            .as_ref()
            .is_some_and(|launch| launch.stop.is_some())
    });
    daemon.signal(SIGINT);
    assert_eq!(daemon.wait_for_exit(), Some(0));
    assert!(is_alive(pid_of(&launch)));
    nix::sys::signal::kill(pid_of(&launch), nix::sys::signal::SIGKILL).expect("it runs");
}

#[test]
fn on_exit_overrides_what_a_signal_means() {
    let (mut daemon, launch, _) = ready(&["--on-exit", "leave"]);
    daemon.signal(SIGINT);
    assert_eq!(daemon.wait_for_exit(), Some(0));
    daemon.assert_untouched("a-0", &launch);

    daemon.run(&["--on-exit", "stop"]);
    daemon.wait_for_event("a-0", "Adopted");
    daemon.settle();
    daemon.signal(SIGTERM);
    assert_eq!(daemon.wait_for_exit(), Some(0));
    assert!(daemon.records().is_empty());
    assert!(daemon.processes().is_empty());
}

#[test]
fn down_stops_everything_with_a_controller() {
    let (mut daemon, launch, _) = ready(&[]);
    daemon.put("b.yaml", &echo("b", free_port(), "args: [--never-ready]"));
    daemon.in_state("b", "starting");
    daemon.verb(&["down", "--timeout", "30"]).done();
    assert!(!is_alive(pid_of(&launch)));
    assert!(daemon.records().is_empty());
    assert_eq!(daemon.wait_for_exit(), Some(0), "the controller ends too");
    assert!(daemon.processes().is_empty());
    // Once more is fine.
    daemon.verb(&["down", "--timeout", "30"]).done();
}

#[test]
fn down_stops_everything_also_what_its_controller_would_leave() {
    let (mut daemon, ..) = ready(&["--on-exit", "leave"]);
    daemon.verb(&["down", "--timeout", "30"]).done();
    assert!(daemon.records().is_empty());
    assert_eq!(daemon.wait_for_exit(), Some(0));
    assert!(daemon.processes().is_empty());
}

#[test]
fn down_stops_everything_without_a_controller_and_without_the_folder() {
    let (mut daemon, launch, _) = ready(&[]);
    daemon.kill();
    std::fs::remove_dir_all(daemon.folder()).expect("the folder is there");
    daemon.verb(&["down", "--timeout", "30"]).done();
    assert!(!is_alive(pid_of(&launch)));
    assert!(daemon.records().is_empty());
    assert!(daemon.processes().is_empty());
}

#[test]
fn down_that_runs_out_of_time_names_what_is_left() {
    let mut daemon = Daemon::start(&[]);
    let spec = "args: [--ignore-sigterm]\nterminationGracePeriodSeconds: 600";
    daemon.put("a.yaml", &echo("a", free_port(), spec));
    let launch = daemon.ready_launch("a");
    daemon.kill();
    let said = daemon.verb(&["down", "--timeout", "1"]);
    assert_eq!(said.code, Some(1), "{said}");
    assert!(said.stderr.contains("a-0"), "{said}");
    nix::sys::signal::kill(pid_of(&launch), nix::sys::signal::SIGKILL).expect("it runs");
}

#[test]
fn a_second_run_on_the_same_state_exits_75_and_names_the_first() {
    let (daemon, launch, _) = ready(&[]);
    let log = daemon.path("second.log");
    let begun = Instant::now();
    let mut second = daemon.spawn(&daemon.folder(), &[], &log);
    let status = wait_for(
        || second.try_wait().expect("our own child"),
        || "the second does not end".to_owned(),
    );
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert_eq!(status.code(), Some(75));
    let said = std::fs::read_to_string(log).expect("a log");
    assert!(said.contains(&format!("pid {}", daemon.pid())), "{said}");
    assert!(said.contains("--state-dir"), "{said}");
    daemon.settle();
    daemon.assert_untouched("a-0", &launch);
}
