//! The rows of the table, each with its three columns.

use super::*;

#[test]
fn without_a_record_what_is_wanted_is_launched_and_nothing_else_is_done() {
    wanting([echo("a")]).plans(["+ a-0  launch   port 8900"]);
    wanting([]).plans([]);
}

#[test]
fn a_launch_is_recorded_before_it_is_prepared() {
    let world = wanting([greedy("a", 1)]).gpus(1);
    world.tells(["a-0 Launching: echo on port 8900, devices GPU-0"]);
    let launch = world.writes("a-0").unwrap().launch.unwrap();
    assert_eq!(launch.reserved_at, NOW);
    assert_eq!((launch.handle, launch.started_at), (None, None));
}

#[test]
fn a_reserved_launch_is_resolved_first_whatever_is_wished() {
    let resolve = "? a-0  resolve  an earlier launch";
    row(&reserved(&echo("a")), &echo("a"), [resolve; 3]);
}

#[test]
fn a_gate_that_is_ready_is_opened_unless_the_wish_has_changed() {
    let a = echo("a");
    let prepared = but(reserved(&a), |a| {
        a.outcome = Some(Outcome::Prepared(handle()));
    });
    row(
        &prepared,
        &a,
        [
            "+ a-0  release  the gate",
            "~ a-0  restart  spec.args changed",
            "- a-0  stop     no longer wanted",
        ],
    );
    let world = wanting([a]).with([prepared]);
    world.tells([]);
    let launch = world.writes("a-0").unwrap().launch.unwrap();
    assert_eq!((launch.handle, launch.started_at), (Some(handle()), None));
}

#[test]
fn an_engine_has_started_when_its_gate_is_known_to_have_opened() {
    let a = echo("a");
    let released = but(starting(&a), |a| {
        with_launch(a, |launch| launch.started_at = None);
        a.outcome = Some(Outcome::Released);
    });
    let world = wanting([a]).with([released]);
    world.tells(["a-0 Started: pid 4242, port 8900"]);
    let launch = world.writes("a-0").unwrap().launch.unwrap();
    assert_eq!(launch.started_at, Some(NOW));
}

#[test]
fn a_launch_that_failed_before_its_gate_is_over_and_tried_again_at_once_the_first_time() {
    let a = echo("a");
    let failed = but(reserved(&a), |a| {
        a.outcome = Some(Outcome::Failed(LaunchFailure::SpawnFailed {
            detail: "/opt/x: not found".to_owned(),
        }));
    });
    row(
        &failed,
        &a,
        [
            "+ a-0  launch   port 8900",
            "+ a-0  launch   port 8900",
            "- a-0  forget   nothing of it is left",
        ],
    );
    wanting([a.clone()]).with([failed.clone()]).tells([
        "a-0 SpawnFailed: could not start: /opt/x: not found",
        "a-0 Launching: echo on port 8900",
    ]);
    let again = but(failed, |a| a.record.history.failures = 1);
    let world = wanting([a]).with([again]);
    world.plans([
        "~ a-0  update   CrashLoopBackOff: 2 failures in a row, next try at 2026-01-01T12:00:00Z",
    ]);
    world.tells(["a-0 SpawnFailed: could not start: /opt/x: not found"]);
}

#[test]
fn a_launch_that_failed_after_its_gate_is_stopped_because_something_may_be_left() {
    let a = echo("a");
    let failed = but(starting(&a), |a| {
        a.liveness = unknown();
        a.outcome = Some(Outcome::Failed(LaunchFailure::SpawnFailed {
            detail: "argument list too long".to_owned(),
        }));
    });
    row(
        &failed,
        &a,
        ["- a-0  stop     could not start: argument list too long"; 3],
    );
}

#[test]
fn what_is_found_by_its_launch_id_is_adopted() {
    let a = echo("a");
    let found = but(reserved(&a), |a| {
        a.outcome = Some(Outcome::Resolved(Some(handle())));
    });
    let adopted = "~ a-0  update   Unknown: it cannot be proven whether it runs: it was found by its launch id, and is looked at next";
    row(&found, &a, [adopted; 3]);
    let world = wanting([a]).with([found]);
    world.tells(["a-0 Adopted: found by its launch id"]);
    let launch = world.writes("a-0").unwrap().launch.unwrap();
    assert_eq!((launch.handle, launch.started_at), (Some(handle()), None));
}

#[test]
fn a_launch_that_nothing_carries_never_started_and_is_no_failure() {
    let a = echo("a");
    let lost = but(reserved(&a), |a| {
        a.outcome = Some(Outcome::Resolved(None));
        a.record.history.failures = 5;
    });
    row(
        &lost,
        &a,
        [
            "+ a-0  launch   port 8900",
            "+ a-0  launch   port 8900",
            "- a-0  forget   nothing of it is left",
        ],
    );
    let record = wanting([a]).with([lost]).writes("a-0").unwrap();
    assert_eq!(record.history.failures, 5);
    assert_eq!(record.history.restarts, 0);
    assert_eq!(record.history.last.unwrap().cause, Cause::NeverStarted);
}

#[test]
fn what_cannot_be_resolved_keeps_its_lease_and_is_looked_at_again() {
    let a = echo("a");
    let hidden = but(reserved(&a), |a| {
        a.outcome = Some(Outcome::Unresolved {
            why: "/proc hides processes".to_owned(),
        });
    });
    let wait =
        "  a-0  wait     Unknown: it cannot be proven whether it runs: /proc hides processes";
    row(&hidden, &a, [wait; 3]);
    wanting([a]).with([hidden]).looks_again_in(5.0);
}

#[test]
fn what_is_starting_is_waited_for_restarted_or_stopped() {
    row(
        &starting(&echo("a")),
        &echo("a"),
        [
            "  a-0  wait     Starting: the last probe: connection refused, until 2026-01-01T12:00:50Z",
            "~ a-0  restart  spec.args changed",
            "- a-0  stop     no longer wanted",
        ],
    );
}

#[test]
fn what_is_not_ready_in_time_is_stopped() {
    let a = echo("a");
    let late = but(starting(&a), |a| {
        with_launch(a, |launch| launch.started_at = Some(ago(60)));
    });
    row(
        &late,
        &a,
        [
            "- a-0  stop     not ready after 60 s",
            "~ a-0  restart  spec.args changed",
            "- a-0  stop     no longer wanted",
        ],
    );
    wanting([a])
        .with([late])
        .tells(["a-0 StartupTimeout: not ready after 60 s"]);
}

#[test]
fn what_is_ready_is_left_alone_restarted_or_stopped() {
    row(
        &ready(&echo("a")),
        &echo("a"),
        [
            "  a-0  wait     ready",
            "~ a-0  restart  spec.args changed",
            "- a-0  stop     no longer wanted",
        ],
    );
}

#[test]
fn what_fails_its_liveness_probe_three_times_is_stopped() {
    let a = echo("a");
    let mut sick = ready(&a);
    let refused = || ProbeResult::Failure {
        detail: "connection refused".to_owned(),
    };
    sick.health.liveness.count(ago(2), refused());
    sick.health.liveness.count(ago(1), refused());
    row(
        &sick,
        &a,
        [
            "  a-0  wait     ProbeFailed: the last probe failed: connection refused",
            "~ a-0  restart  spec.args changed",
            "- a-0  stop     no longer wanted",
        ],
    );
    sick.health.liveness.count(NOW, refused());
    row(
        &sick,
        &a,
        [
            "- a-0  stop     3 failed probes in a row, the last: connection refused",
            "~ a-0  restart  spec.args changed",
            "- a-0  stop     no longer wanted",
        ],
    );
    let world = wanting([a]).with([sick]);
    world.tells(["a-0 Unhealthy: 3 failed probes in a row, the last: connection refused"]);
    let stop = world.writes("a-0").unwrap().launch.unwrap().stop.unwrap();
    assert_eq!((stop.asked_at, stop.killed_at), (NOW, None));
}

#[test]
fn what_was_asked_to_end_is_waited_for_until_its_grace_is_over_whatever_is_wished() {
    let wait = "  a-0  wait     Terminating: no longer wanted, killed at 2026-01-01T12:00:17Z";
    row(&stopping(&echo("a")), &echo("a"), [wait; 3]);
    let stubborn = but(stopping(&echo("a")), |a| {
        with_launch(a, |launch| launch.stop.as_mut().unwrap().asked_at = ago(20));
    });
    let kill = "- a-0  kill     no longer wanted";
    row(&stubborn, &echo("a"), [kill; 3]);
    wanting([])
        .with([stubborn])
        .tells(["a-0 Killing: still there 20 s after SIGTERM"]);
}

#[test]
fn the_members_of_a_dead_leader_are_stopped_and_its_lease_stays() {
    let a = echo("a");
    let orphaned = but(ready(&a), |a| a.liveness = leader_gone());
    let stop = "- a-0  stop     its main process ended and others of it live on";
    row(&orphaned, &a, [stop; 3]);
    wanting([a.clone(), exact("b", 8900)])
        .with([orphaned])
        .plans([stop, "  b-0  wait     PortHeld: port 8900 is held by a-0"]);
}

#[test]
fn what_ended_is_launched_again_or_forgotten() {
    let a = echo("a");
    let ended = but(exited(&a), |a| a.record.history.failures = 1);
    row(
        &ended,
        &a,
        [
            "~ a-0  update   CrashLoopBackOff: 2 failures in a row, next try at 2026-01-01T12:00:00Z",
            // A changed manifest begins a new history.
            "+ a-0  launch   port 8900",
            "- a-0  forget   nothing of it is left",
        ],
    );
    wanting([])
        .with([ended])
        .tells(["a-0 Exited: ended by itself: exit code 1"]);
}

#[test]
fn what_cannot_be_proven_to_run_keeps_its_lease_and_gets_no_signal() {
    let a = echo("a");
    let doubtful = but(ready(&a), |a| a.liveness = unknown());
    let wait = "  a-0  wait     Unknown: it cannot be proven whether it runs: its environment cannot be read";
    row(&doubtful, &a, [wait; 3]);
    let asked = but(stopping(&a), |a| a.liveness = unknown());
    row(&asked, &a, [wait; 3]);
    let unsignalled = but(stopping(&a), |a| {
        a.outcome = Some(Outcome::Unproven {
            why: "its environment cannot be read".to_owned(),
        });
    });
    row(&unsignalled, &a, [wait; 3]);
}

#[test]
fn an_effect_under_way_is_waited_for() {
    let a = echo("a");
    for (effect, words) in [
        (EffectKind::Prepare, "the launch is being prepared"),
        (EffectKind::Release, "the engine is being started"),
        (
            EffectKind::Resolve,
            "looking for a process of an earlier launch",
        ),
        (EffectKind::Signal, "being signalled"),
    ] {
        let wait = format!("  a-0  wait     InProgress: {words}");
        for instance in [reserved(&a), ready(&a), stopping(&a), exited(&a)] {
            let busy = but(instance, |a| a.effect = Some(effect));
            row(&busy, &a, [&wait; 3]);
        }
    }
}

#[test]
fn while_the_folder_cannot_be_read_nothing_is_launched_stopped_or_forgotten() {
    let a = echo("a");
    wanting([a.clone()])
        .unavailable()
        .plans(["  a-0  wait     DesiredUnavailable: the folder cannot be read: not mounted"]);
    // As accepted before, edited before it went away, scaled down, moved to another host, and never heard of.
    let scaled = tuned(&a, |a| a.spec.replicas = 0);
    let moved = tuned(&a, |a| {
        a.spec.node_selector = BTreeMap::from([("zone".to_owned(), "x".to_owned())]);
    });
    let wishes = [
        wanting([a.clone()]),
        wanting([edited(&a)]),
        wanting([scaled]),
        wanting([moved]),
        wanting([]),
    ];
    for wish in wishes {
        let wish = wish.unavailable();
        let plans = |instance: Instance, line| wish.clone().with([instance]).plans([line]);
        plans(ready(&a), "  a-0  wait     ready");
        plans(exited(&a), "+ a-0  launch   port 8900");
        plans(idle(&a), "+ a-0  launch   port 8900");
        let line = "  a-0  wait     Starting: the last probe: connection refused, until 2026-01-01T12:00:50Z";
        plans(starting(&a), line);
        let prepared = but(reserved(&a), |a| {
            a.outcome = Some(Outcome::Prepared(handle()));
        });
        plans(prepared, "+ a-0  release  the gate");
        let late = but(starting(&a), |a| {
            with_launch(a, |launch| launch.started_at = Some(ago(60)));
        });
        plans(late, "- a-0  stop     not ready after 60 s");
    }
}

#[test]
fn what_is_launched_from_the_record_while_the_folder_cannot_be_read_is_what_ran() {
    let a = echo("a");
    let world = wanting([edited(&a)]).unavailable().with([exited(&a)]);
    assert_eq!(world.writes("a-0").unwrap().restart_key, a.restart_key);
}
