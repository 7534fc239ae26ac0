//! Engines that end, hang or never come up.

use evenkeel::failure::LaunchFailure;
use evenkeel::record::{Cause, Record, StopReason};
use jiff::Timestamp;
use nix::sys::signal::{Signal, kill};

use crate::support::daemon::{Daemon, echo, instances, pid_of};
use crate::support::http::get;
use crate::support::process::{free_port, is_alive};

fn crash(launch: &evenkeel::record::Launch) {
    kill(pid_of(launch), Signal::SIGKILL).expect("it runs");
}

fn failures(count: u32) -> impl Fn(&Record) -> bool {
    move |record| record.launch.is_none() && record.history.failures == count
}

#[test]
fn a_killed_engine_is_launched_again_at_once_and_then_later_and_later() {
    // No relist within the test: the end is noticed by itself.
    let daemon = Daemon::start(&["--resync", "600"]);
    let port = free_port();
    let waits = |seconds: u32| {
        echo(
            "a",
            port,
            &format!("backoff: {{initialSeconds: {seconds}}}"),
        )
    };
    daemon.put("a.yaml", &waits(600));
    let first = daemon.ready_launch("a");

    crash(&first);
    let second = daemon.relaunched("a-0", &first);
    daemon.ready("a");
    let record = daemon.record("a-0").expect("it runs");
    assert_eq!(record.history.restarts, 1);
    let last = record.history.last.expect("it ended");
    assert_eq!(
        second.reserved_at, last.at,
        "it is launched in the moment in which the end is noticed"
    );
    assert!(matches!(&last.cause, Cause::Exited { status, .. } if status.signal == Some(9)));
    assert_ne!(pid_of(&second), pid_of(&first));
    assert_eq!(second.lease, first.lease);
    assert_eq!(get(port, "/health").expect("an answer").status, 200);

    // The crash's log is kept.
    let crashed = format!("starting as pid {},", pid_of(&first));
    let previous = daemon.verb(&["logs", "a", "--previous"]).done();
    assert!(previous.contains(&crashed), "{previous}");
    let present = daemon.verb(&["logs", "a-0"]).done();
    assert!(!present.contains(&crashed), "{present}");
    assert!(present.contains(&format!("starting as pid {},", pid_of(&second))));

    crash(&second);
    let record = daemon.wait_for_record("a-0", "it waits", failures(2));
    let last = record.history.last.expect("it ended");
    let a = &instances(&daemon.get(), "a")[0];
    assert_eq!(
        (&a["state"], &a["reason"]),
        (&"exited".into(), &"CrashLoopBackOff".into())
    );
    let next: Timestamp = a["nextTryAt"]
        .as_str()
        .and_then(|text| text.parse().ok())
        .unwrap_or_else(|| panic!("no next try in {a:#}"));
    let wait = next.duration_since(last.at).as_secs();
    assert!((540..=660).contains(&wait), "{wait} s");
    let shown = daemon.verb(&["describe", "a"]).done();
    assert!(
        shown.contains("CrashLoopBackOff: 2 failures in a row"),
        "{shown}"
    );
    let next = Timestamp::from_second(next.as_second()).expect("a time");
    assert!(shown.contains(&format!("Next try:  {next}")), "{shown}");
    let table = daemon.verb(&["get", "a"]).done();
    assert!(table.contains("CrashLoopBackOff"), "{table}");
    assert!(table.contains(&next.to_string()), "{table}");
    assert_eq!(daemon.told("a-0", "BackOff").len(), 1);
    daemon.settle();
    assert!(daemon.processes().is_empty());

    // The back-off is applied without touching anything: now its time has come.
    daemon.put("a.yaml", &waits(0));
    let third = daemon.ready_launch("a");
    let record = daemon.record("a-0").expect("it runs");
    assert_eq!((record.history.restarts, record.history.failures), (2, 2));

    // A change of what is launched begins anew.
    daemon.put("a.yaml", &echo("a", port, "options: {maxContextLength: 9}"));
    daemon.relaunched("a-0", &third);
    let record = daemon.record("a-0").expect("it runs");
    assert_eq!((record.history.restarts, record.history.failures), (0, 0));
}

#[test]
fn an_engine_that_never_turns_healthy_is_stopped_at_its_deadline_and_launched_again_with_back_off()
{
    let daemon = Daemon::start(&["--resync", "600"]);
    let spec = "args: [--never-ready]\nstartupDeadlineSeconds: 1\nbackoff: {initialSeconds: 600}";
    daemon.put("a.yaml", &echo("a", free_port(), spec));
    let record = daemon.wait_for_record("a-0", "it waits", failures(2));
    assert_eq!(record.history.restarts, 1);
    let last = record.history.last.expect("it ended");
    let Cause::Failed(LaunchFailure::UnhealthyTimeout {
        waited_seconds,
        last_probe,
        log_tail,
    }) = &last.cause
    else {
        panic!("{last:?}");
    };
    assert_eq!(*waited_seconds, 1);
    assert!(last_probe.contains("loading model"), "{last_probe}");
    assert!(log_tail.contains("GET /health 503"), "{log_tail}");
    assert!(daemon.processes().is_empty());

    let shown = daemon.verb(&["describe", "a"]).done();
    for expected in [
        "CrashLoopBackOff",
        "Next try:",
        "StartupTimeout: was not ready after 1 s",
        "The end of its log:\n",
        "    | echo: GET /health 503\n",
    ] {
        assert!(shown.contains(expected), "no {expected:?} in\n{shown}");
    }
    assert!(!daemon.told("a-0", "StartupTimeout").is_empty());
}

#[test]
fn an_engine_that_turns_unhealthy_is_launched_again_only_after_its_threshold() {
    let daemon = Daemon::start(&["--resync", "600"]);
    let spec = "args: [--fail-health-after, '0.5']\n\
                livenessProbe: {periodSeconds: 1, failureThreshold: 3}";
    daemon.put("a.yaml", &echo("a", free_port(), spec));
    // Nobody asks it how it is but the controller: no `get` until it ended.
    let record = daemon.wait_for_record("a-0", "it is stopped as unhealthy", |record| {
        matches!(&record.history.last, Some(last) if matches!(last.cause, Cause::Unhealthy { .. }))
    });
    assert_eq!(record.history.failures, 1);
    assert_eq!(record.history.restarts, 1);
    // The log is moved aside by the next launch, before that has a handle.
    daemon.wait_for_record("a-0", "it is launched again", |record| {
        let launch = record.launch.as_ref();
        launch.is_some_and(|launch| launch.handle.is_some())
    });
    let log = daemon.previous_log("a-0");
    let failed = log.matches("GET /health 500").count();
    assert_eq!(failed, 3, "{log}");
    let healthy = log.find("GET /health 200").expect("it was ready");
    assert!(healthy < log.find("GET /health 500").expect("counted"));
    let why = daemon.told("a-0", "Unhealthy");
    assert!(why[0].contains("3 failed probes in a row"), "{why:?}");
}

#[test]
fn an_engine_whose_health_hangs_is_launched_again() {
    let daemon = Daemon::start(&["--resync", "600"]);
    let spec = "args: [--hang-health-after, '0.5']\n\
                livenessProbe: {periodSeconds: 1, timeoutSeconds: 1, failureThreshold: 1}";
    daemon.put("a.yaml", &echo("a", free_port(), spec));
    let record = daemon.wait_for_record("a-0", "it is stopped as unhealthy", |record| {
        matches!(&record.history.last, Some(last) if matches!(last.cause, Cause::Unhealthy { .. }))
    });
    let last = record.history.last.expect("just seen");
    assert!(last.cause.to_string().contains("1 s"), "{}", last.cause);
}

#[test]
fn a_failed_readiness_is_shown_and_never_relaunches() {
    let daemon = Daemon::start(&["--resync", "600"]);
    let spec = "args: [--fail-health-after, '0.5']\n\
                readinessProbe: {httpGet: {path: /health}, periodSeconds: 1, failureThreshold: 1}\n\
                livenessProbe: {httpGet: {path: /v1/models}, periodSeconds: 1, failureThreshold: 1}";
    daemon.put("a.yaml", &echo("a", free_port(), spec));
    let record = daemon.wait_for_record("a-0", "it is ready", |record| {
        record
            .launch
            .as_ref()
            .is_some_and(|launch| launch.ready_at.is_some())
    });
    let launch = record.launch.expect("just seen");
    daemon.eventually("its readiness failed three times", || {
        let log = daemon.engine_log("a-0");
        (log.matches("GET /health 500").count() >= 3).then_some(())
    });
    let a = daemon.in_state("a", "unhealthy");
    assert_eq!(a[0]["reason"], "ProbeFailed");
    daemon.assert_untouched("a-0", &launch);
}

#[test]
fn an_engine_that_ends_before_it_is_ready_is_shown_with_its_exit_code_and_the_end_of_its_log() {
    let daemon = Daemon::start(&["--resync", "600"]);
    let spec = "args: [--crash-after, '0', --exit-code, '42']\nbackoff: {initialSeconds: 600}";
    daemon.put("a.yaml", &echo("a", free_port(), spec));
    daemon.wait_for_record("a-0", "it waits", failures(2));
    let shown = daemon.verb(&["describe", "a"]).done();
    for expected in [
        "ExitedEarly: ended before it was ready: exit code 42",
        "    | echo: crashing as told, exit code 42\n",
    ] {
        assert!(shown.contains(expected), "no {expected:?} in\n{shown}");
    }
}

#[test]
fn the_restart_policy_decides_whether_what_ended_is_launched_again() {
    let daemon = Daemon::start(&["--resync", "600"]);
    let ends = |name: &str, policy: &str, code: u8| {
        let spec = format!(
            "args: [--crash-after, '0.5', --exit-code, '{code}']\nrestartPolicy: {policy}\n\
             backoff: {{initialSeconds: 600}}"
        );
        daemon.put(&format!("{name}.yaml"), &echo(name, free_port(), &spec));
    };
    ends("always", "Always", 0);
    ends("failed", "OnFailure", 1);
    ends("succeeded", "OnFailure", 0);
    ends("never", "Never", 1);
    daemon.wait_for_record("always-0", "it ended twice", failures(2));
    daemon.wait_for_record("failed-0", "it ended twice", failures(2));
    for name in ["succeeded", "never"] {
        let record = daemon.wait_for_record(&format!("{name}-0"), "it ended", failures(1));
        assert_eq!(record.history.restarts, 0);
        let instance = &daemon.in_state(name, "exited")[0];
        assert_eq!(instance["reason"], "Completed");
        let said = daemon.verb(&["wait", name, "--timeout", "30"]);
        assert_eq!(said.code, Some(1), "{said}");
    }
    // The other way round: a change of the policy launches it.
    ends("never", "Always", 1);
    daemon.wait_for_record("never-0", "it ended once more", failures(2));
}

#[test]
fn a_stop_of_the_controller_in_the_middle_of_a_stop_is_gone_on_with() {
    let mut daemon = Daemon::start(&["--removal-grace", "0"]);
    let spec = "args: [--ignore-sigterm]\nterminationGracePeriodSeconds: 3";
    daemon.put("a.yaml", &echo("a", free_port(), spec));
    let launch = daemon.ready_launch("a");
    daemon.remove("a.yaml");
    let record = daemon.wait_for_record("a-0", "it is asked to end", |record| {
        record
            .launch
            .as_ref()
            .is_some_and(|launch| launch.stop.is_some())
    });
    daemon.kill();
    let stop = record
        .launch
        .and_then(|launch| launch.stop)
        .expect("just seen");
    assert_eq!(stop.reason, StopReason::Removed);
    assert!(is_alive(pid_of(&launch)));
    daemon.run(&["--removal-grace", "0"]);
    daemon.wait_until_forgotten("a-0");
    assert!(!is_alive(pid_of(&launch)));
}
