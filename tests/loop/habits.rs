//! Bad habits of engines, each measured on a real one (see the echo engine's table).

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::daemon::{Daemon, echo, pid_of};
use crate::support::http::get;
use crate::support::process::{free_port, is_alive};

/// The workers of a launch, once there are so many.
fn workers(daemon: &Daemon, launch: &evenkeel::record::Launch, count: usize) -> Vec<Pid> {
    let leader = pid_of(launch);
    daemon.eventually("its workers are up", || {
        let members = daemon.members(launch);
        let workers: Vec<Pid> = members.into_iter().filter(|pid| *pid != leader).collect();
        (workers.len() == count).then_some(workers)
    })
}

#[test]
fn an_engine_that_ignores_sigterm_is_killed_after_its_grace() {
    let daemon = Daemon::start(&["--removal-grace", "0"]);
    let spec = "args: [--ignore-sigterm]\nterminationGracePeriodSeconds: 1";
    daemon.put("a.yaml", &echo("a", free_port(), spec));
    let launch = daemon.ready_launch("a");
    daemon.remove("a.yaml");
    daemon.wait_until_forgotten("a-0");
    assert!(!is_alive(pid_of(&launch)));
    let told = daemon.told("a-0", "Killing");
    assert_eq!(told, ["still there 1 s after SIGTERM"]);
    assert!(daemon.engine_log("a-0").contains("SIGTERM: ignored"));
}

#[test]
fn an_engine_that_drains_is_asked_twice_and_not_killed() {
    let daemon = Daemon::start(&["--removal-grace", "0"]);
    let spec = "args: [--term-delay, '600']\nterminationGracePeriodSeconds: 3";
    daemon.put("a.yaml", &echo("a", free_port(), spec));
    daemon.ready("a");
    daemon.remove("a.yaml");
    daemon.wait_until_forgotten("a-0");
    let log = daemon.engine_log("a-0");
    assert!(log.contains("second SIGTERM: ending at once"), "{log}");
    assert!(daemon.told("a-0", "Killing").is_empty());
}

#[test]
fn workers_that_outlive_their_killed_leader_keep_the_lease_until_they_are_gone() {
    let mut daemon = Daemon::new();
    daemon.declare_devices(1);
    daemon.run(&["--resync", "600"]);
    let spec = "devices: {count: 1}\nterminationGracePeriodSeconds: 1\n\
                args: [--workers, '2', --workers-outlive, --workers-ignore-sigterm]";
    daemon.put("a.yaml", &echo("a", free_port(), spec));
    let first = daemon.ready_launch("a");
    let workers = workers(&daemon, &first, 2);
    kill(pid_of(&first), Signal::SIGKILL).expect("it runs");

    // While they live, the record holds what it held, and nothing else is launched.
    let record = daemon.wait_for_record("a-0", "its workers are told to end", |record| {
        record
            .launch
            .as_ref()
            .is_none_or(|launch| launch.stop.is_some() || launch.id != first.id)
    });
    let launch = record.launch.expect("its workers live");
    assert_eq!((launch.id, &launch.lease), (first.id, &first.lease));
    assert!(workers.iter().all(|pid| is_alive(*pid)));

    let record = daemon.wait_for_record("a-0", "it is launched again", |record| {
        record
            .launch
            .as_ref()
            .is_none_or(|launch| launch.id != first.id)
    });
    assert!(
        workers.iter().all(|pid| !is_alive(*pid)),
        "the lease was given up too early"
    );
    assert!(daemon.members(&first).is_empty());
    daemon.ready("a");
    let second = daemon.launch("a-0");
    assert_eq!(second.lease, first.lease);
    assert_eq!(record.history.failures, 1);
    assert_eq!(daemon.told("a-0", "Killing").len(), 1);
}

#[test]
fn workers_in_sessions_of_their_own_are_found_and_ended() {
    let daemon = Daemon::start(&["--removal-grace", "0"]);
    let port = free_port();
    let spec = "terminationGracePeriodSeconds: 1\n\
                args: [--workers, '2', --workers-setsid, --workers-outlive, --workers-ignore-sigterm]";
    daemon.put("a.yaml", &echo("a", port, spec));
    let first = daemon.ready_launch("a");
    let of_first = workers(&daemon, &first, 2);
    kill(pid_of(&first), Signal::SIGKILL).expect("it runs");
    let second = daemon.relaunched("a-0", &first);
    assert!(of_first.iter().all(|pid| !is_alive(*pid)));

    daemon.ready("a");
    let of_second = workers(&daemon, &second, 2);
    daemon.remove("a.yaml");
    daemon.wait_until_forgotten("a-0");
    assert!(of_second.iter().all(|pid| !is_alive(*pid)));
    assert!(daemon.processes().is_empty());
}

#[test]
fn workers_that_outlive_leader_and_controller_are_ended_by_the_next_controller() {
    let mut daemon = Daemon::start(&[]);
    let spec = "terminationGracePeriodSeconds: 1\n\
                args: [--workers, '1', --workers-setsid, --workers-outlive]";
    daemon.put("a.yaml", &echo("a", free_port(), spec));
    let first = daemon.ready_launch("a");
    let workers = workers(&daemon, &first, 1);
    daemon.kill();
    kill(pid_of(&first), Signal::SIGKILL).expect("it runs");
    let leader = pid_of(&first);
    daemon.eventually("its leader is gone", || (!is_alive(leader)).then_some(()));
    assert!(is_alive(workers[0]));
    daemon.run(&[]);
    daemon.relaunched("a-0", &first);
    assert!(!is_alive(workers[0]));
    daemon.ready("a");
}

#[test]
fn a_port_that_accepts_while_the_model_loads_is_not_ready() {
    let daemon = Daemon::start(&[]);
    let port = free_port();
    let spec = "args: [--load-seconds, '1.5']";
    daemon.put("a.yaml", &echo("a", port, spec));
    let a = daemon.in_state("a", "starting");
    assert_eq!(a[0]["readyAt"], serde_json::Value::Null);
    daemon.ready("a");
    let launch = daemon.launch("a-0");
    let took = launch
        .ready_at
        .zip(launch.started_at)
        .map(|(ready, started)| ready.duration_since(started).as_millis());
    assert!(took.is_some_and(|took| took >= 1000), "{took:?}");
    assert!(daemon.engine_log("a-0").contains("GET /health 503"));
}

#[test]
fn a_port_that_refuses_until_the_model_is_loaded_is_waited_for() {
    let daemon = Daemon::start(&[]);
    let spec = "args: [--load-seconds, '1', --bind-after-load]";
    daemon.put("a.yaml", &echo("a", free_port(), spec));
    daemon.ready("a");
    let log = daemon.engine_log("a-0");
    assert!(!log.contains("503"), "{log}");
    let record = daemon.record("a-0").expect("it runs");
    assert_eq!(record.history.restarts, 0);
}

#[test]
fn an_engine_that_lies_about_its_health_is_seen_through_by_a_probe_of_another_path() {
    let daemon = Daemon::start(&[]);
    let lies = "args: [--never-ready, --lie-healthy]\nstartupDeadlineSeconds: 600";
    let port = free_port();
    daemon.put("trusted.yaml", &echo("trusted", free_port(), lies));
    let probed = format!("{lies}\nstartupProbe: {{httpGet: {{path: /nothing}}}}");
    daemon.put("probed.yaml", &echo("probed", port, &probed));
    daemon.ready("trusted");
    daemon.eventually("it is probed", || {
        let log = daemon.engine_log("probed-0");
        log.contains("GET /nothing 404").then_some(())
    });
    daemon.in_state("probed", "starting");
    assert_eq!(get(port, "/health").expect("an answer").status, 200);
}

#[test]
fn a_flood_of_log_lines_holds_nobody_up() {
    let daemon = Daemon::start(&[]);
    let spec = "args: [--log-bytes, '20000000']";
    daemon.put("a.yaml", &echo("a", free_port(), spec));
    daemon.ready("a");
    let said = daemon.verb(&["logs", "a", "--tail", "1"]);
    assert_eq!(said.code, Some(0), "{said}");
    assert_eq!(said.stdout.lines().count(), 1, "{said}");
}
