//! Probes, back-off, grace: what comes when.

use super::*;

fn request(world: &World) -> String {
    let step = &world.planned().steps[&"a-0".parse().unwrap()];
    match &step.action {
        Some(super::super::Action::Probe { request, .. }) => format!("{request:?}"),
        other => format!("{other:?}"),
    }
}

#[test]
fn the_first_probe_is_sent_at_once_and_the_following_ones_back_off_to_a_second() {
    let a = echo("a");
    let at = |milliseconds: i64, last: Option<i64>| {
        let ago = |milliseconds| NOW - SignedDuration::from_millis(milliseconds);
        let instance = but(starting(&a), |a| {
            with_launch(a, |launch| launch.started_at = Some(ago(milliseconds)));
            a.health = Health::default();
            if let Some(last) = last {
                let detail = "refused".to_owned();
                let refused = ProbeResult::Loading { detail };
                a.health.startup.count(ago(last), refused);
            }
        });
        wanting([a.clone()]).with([instance])
    };
    let probe = "ProbeRequest { purpose: Startup, method: HttpGet { path: \"/health\" }, port: Port(8900), timeout: 5s }";
    assert_eq!(request(&at(0, None)), probe);
    at(0, Some(0)).looks_again_in(0.05);
    at(2_000, Some(0)).looks_again_in(0.5);
    assert_eq!(request(&at(2_000, Some(500))), probe);
    at(60_000 - 1, Some(0)).looks_again_in(0.001);
    at(30_000, Some(0)).looks_again_in(1.0);
}

#[test]
fn one_success_makes_it_ready() {
    let a = echo("a");
    let up = but(starting(&a), |a| {
        a.health.startup.count(NOW, ProbeResult::Success);
    });
    let world = wanting([a]).with([up]);
    world.plans(["~ a-0  update   ready"]);
    world.tells(["a-0 Ready: ready after 10.0 s"]);
    let launch = world.writes("a-0").unwrap().launch.unwrap();
    assert_eq!(launch.ready_at, Some(NOW));
    // The next pass knows when it is probed again.
    world.looks_again_in(0.0);
}

#[test]
fn a_success_that_comes_with_the_deadline_counts() {
    let a = echo("a");
    let last_moment = but(starting(&a), |a| {
        with_launch(a, |launch| launch.started_at = Some(ago(60)));
        a.health.startup.count(NOW, ProbeResult::Success);
    });
    wanting([a])
        .with([last_moment])
        .plans(["~ a-0  update   ready"]);
}

#[test]
fn the_operators_startup_deadline_replaces_the_engines_and_the_manifests_wins() {
    let a = echo("a");
    let world = |deployment: &Deployment| {
        wanting([deployment.clone()])
            .with([starting(deployment)])
            .but(|world| world.settings.startup_deadline = Some(Duration::from_secs(10)))
    };
    world(&a).plans(["- a-0  stop     not ready after 10 s"]);
    let patient = deployment("a", json!({"engine": "echo", "startupDeadlineSeconds": 15}));
    world(&patient).plans([
        "  a-0  wait     Starting: the last probe: connection refused, until 2026-01-01T12:00:05Z",
    ]);
}

#[test]
fn a_startup_probe_of_its_own_is_over_after_its_tries() {
    let a = deployment(
        "a",
        json!({"engine": "echo", "startupProbe": {"httpGet": {"path": "/up"}, "periodSeconds": 3, "failureThreshold": 2, "initialDelaySeconds": 12}}),
    );
    let unasked = but(starting(&a), |a| a.health = Health::default());
    wanting([a.clone()]).with([unasked]).looks_again_in(2.0);
    let world = wanting([a.clone()]).with([starting(&a)]);
    world.looks_again_in(3.0);
    let refused = ProbeResult::Failure {
        detail: "404".to_owned(),
    };
    let twice = but(starting(&a), |a| a.health.startup.count(NOW, refused));
    wanting([a])
        .with([twice])
        .plans(["- a-0  stop     not ready after 10 s"]);
}

#[test]
fn without_a_startup_probe_the_readiness_probe_says_when_it_is_ready() {
    let a = deployment(
        "a",
        json!({"engine": "echo", "readinessProbe": {"httpGet": {"path": "/v1/models"}, "successThreshold": 2}}),
    );
    let unasked = but(starting(&a), |a| a.health = Health::default());
    assert_eq!(
        request(&wanting([a.clone()]).with([unasked.clone()])),
        "ProbeRequest { purpose: Readiness, method: HttpGet { path: \"/v1/models\" }, port: Port(8900), timeout: 5s }"
    );
    let mut once = unasked;
    once.health.readiness.count(NOW, ProbeResult::Success);
    wanting([a.clone()])
        .with([once.clone()])
        .plans(["  a-0  wait     Starting: the last probe: success, until 2026-01-01T12:00:50Z"]);
    once.health.readiness.count(NOW, ProbeResult::Success);
    wanting([a]).with([once]).plans(["~ a-0  update   ready"]);
}

#[test]
fn a_command_that_cannot_be_asked_is_ready_as_soon_as_it_runs() {
    let a = deployment("a", json!({"engine": "command", "command": ["serve"]}));
    let running = but(starting(&a), |a| {
        with_launch(a, |launch| launch.lease.port = None);
        a.health = Health::default();
    });
    wanting([a])
        .with([running])
        .plans(["~ a-0  update   ready"]);
    let a = deployment(
        "a",
        json!({"engine": "command", "command": ["serve", "$(PORT)"]}),
    );
    let running = but(starting(&a), |a| a.health = Health::default());
    assert_eq!(
        request(&wanting([a]).with([running])),
        "ProbeRequest { purpose: Startup, method: TcpConnect, port: Port(9000), timeout: 5s }"
    );
}

#[test]
fn liveness_is_asked_every_ten_seconds_and_not_while_a_probe_is_under_way() {
    let a = echo("a");
    wanting([a.clone()]).with([ready(&a)]).looks_again_in(9.0);
    let due = but(ready(&a), |a| {
        a.health.liveness.last = Some((ago(10), ProbeResult::Success));
    });
    let world = wanting([a.clone()]).with([due.clone()]);
    world.plans(["  a-0  wait     ready"]);
    assert_eq!(
        request(&world),
        "ProbeRequest { purpose: Liveness, method: HttpGet { path: \"/health\" }, port: Port(8900), timeout: 5s }"
    );
    let asked = but(due, |a| a.health.in_flight = true);
    let world = wanting([a]).with([asked]);
    assert_eq!(request(&world), "None");
    assert_eq!(world.planned().deadline, None);
}

#[test]
fn the_first_probes_of_what_was_adopted_are_spread_over_the_period() {
    let adopted: Vec<_> = (0..100)
        .map(|number| {
            let a = echo(&format!("a{number}"));
            let instance = but(ready(&a), |a| {
                a.health = Health {
                    since: Some(NOW),
                    ..Health::default()
                };
            });
            let deadline = wanting([a]).with([instance]).planned().deadline;
            deadline.unwrap().duration_since(NOW).as_secs_f64()
        })
        .collect();
    let early = adopted.iter().filter(|wait| **wait < 5.0).count();
    assert!(
        (30..70).contains(&early),
        "{early} of 100 in the first half"
    );
    assert!(
        adopted.iter().all(|wait| (0.0..=10.0).contains(wait)),
        "{adopted:?}"
    );
}

#[test]
fn a_stranger_on_its_port_does_not_make_it_ready() {
    let a = echo("a");
    let mut fooled = starting(&a);
    let stranger = Stranger {
        pid: Some(99),
        command: None,
        seen_at: NOW,
    };
    fooled
        .health
        .startup
        .count(NOW, ProbeResult::Stranger { stranger });
    wanting([a]).with([fooled]).plans([
        "  a-0  wait     Starting: the last probe: the port belongs to pid 99, until 2026-01-01T12:00:50Z",
    ]);
}

#[test]
fn a_failing_readiness_probe_is_shown_and_never_restarts() {
    let a = deployment(
        "a",
        json!({"engine": "echo", "readinessProbe": {"httpGet": {}, "failureThreshold": 1}}),
    );
    let mut unready = ready(&a);
    for _ in 0..99 {
        let failure = ProbeResult::Failure {
            detail: "503".to_owned(),
        };
        unready.health.readiness.count(NOW, failure);
    }
    wanting([a])
        .with([unready])
        .plans(["  a-0  wait     ProbeFailed: the last probe failed: 503"]);
}

#[test]
fn the_first_relaunch_is_immediate_and_the_second_waits() {
    let a = echo("a");
    let launched = "+ a-0  launch   port 8900";
    wanting([a.clone()]).with([exited(&a)]).plans([launched]);
    wanting([a.clone()]).with([exited(&a)]).tells([
        "a-0 Exited: ended by itself: exit code 1",
        "a-0 Launching: echo on port 8900",
    ]);
    let record = wanting([a.clone()])
        .with([exited(&a)])
        .writes("a-0")
        .unwrap();
    assert_eq!((record.history.failures, record.history.restarts), (1, 1));
    wanting([a.clone()]).with([failed(&a, 5, 3)]).plans([
        "  a-0  wait     CrashLoopBackOff: 5 failures in a row, next try at 2026-01-01T12:00:04Z",
    ]);
    wanting([a.clone()])
        .with([failed(&a, 5, 30)])
        .plans([launched]);
    // The clock was set back: waiting for that time could take for ever.
    let ahead = but(failed(&a, 5, 0), |a| {
        a.record.history.last.as_mut().unwrap().at = NOW + Duration::from_hours(1);
    });
    wanting([a]).with([ahead]).plans([launched]);
}

#[test]
fn the_back_off_begins_anew_after_a_long_time_of_health_and_after_an_edit() {
    let a = echo("a");
    let ended_after = |seconds: u64| {
        but(exited(&a), |a| {
            a.record.history.failures = 6;
            with_launch(a, |launch| launch.ready_at = Some(ago(seconds)));
        })
    };
    wanting([a.clone()]).with([ended_after(599)]).plans([
        "~ a-0  update   CrashLoopBackOff: 7 failures in a row, next try at 2026-01-01T12:00:30Z",
    ]);
    let world = wanting([a.clone()]).with([ended_after(600)]);
    world.plans(["+ a-0  launch   port 8900"]);
    assert_eq!(world.writes("a-0").unwrap().history.failures, 1);
    let world = wanting([edited(&a)]).with([failed(&a, 6, 1)]);
    world.plans(["+ a-0  launch   port 8900"]);
    let history = world.writes("a-0").unwrap().history;
    assert_eq!((history.restarts, history.failures), (0, 0));
    assert!(history.last.is_some(), "how it ended stays to be seen");
}

#[test]
fn half_way_through_the_grace_it_is_asked_once_more() {
    let a = echo("a");
    let asked = |seconds: u64, signalled: Option<u64>| {
        let instance = but(stopping(&a), |a| {
            with_launch(a, |launch| {
                launch.stop.as_mut().unwrap().asked_at = ago(seconds);
            });
            a.signalled = signalled.map(|seconds| (ago(seconds), SignalKind::Term));
        });
        wanting([]).with([instance])
    };
    let term = "- a-0  stop     no longer wanted";
    asked(3, Some(3)).looks_again_in(7.0);
    asked(10, Some(10)).plans([term]);
    asked(10, Some(10)).tells([]);
    asked(12, Some(2)).looks_again_in(8.0);
    // An earlier controller's stop: nobody knows whether it was signalled.
    asked(3, None).plans([term]);
}

#[test]
fn what_was_killed_and_is_not_gone_is_killed_again() {
    let a = echo("a");
    let killed = |signalled: Option<(u64, SignalKind)>| {
        let instance = but(stopping(&a), |a| {
            with_launch(a, |launch| {
                launch.stop = Some(Stop {
                    asked_at: ago(40),
                    reason: StopReason::Removed,
                    killed_at: Some(ago(20)),
                });
            });
            a.signalled = signalled.map(|(seconds, signal)| (ago(seconds), signal));
        });
        wanting([]).with([instance])
    };
    let kill = "- a-0  kill     no longer wanted";
    let recent = killed(Some((4, SignalKind::Kill)));
    recent.plans([
        "  a-0  wait     Stuck: killed, and not proven gone: its devices and port stay held",
    ]);
    recent.looks_again_in(6.0);
    let stuck = killed(Some((10, SignalKind::Kill)));
    stuck.plans([kill]);
    stuck.tells(["a-0 Stuck: killed, and not proven gone: its devices and port stay held"]);
    killed(None).plans([kill]);
    killed(None).tells([]);
}

#[test]
fn a_grace_of_zero_kills_in_the_next_pass() {
    let a = deployment(
        "a",
        json!({"engine": "echo", "terminationGracePeriodSeconds": 0}),
    );
    let asked = but(stopping(&a), |a| {
        with_launch(a, |launch| launch.stop.as_mut().unwrap().asked_at = NOW);
    });
    wanting([])
        .with([asked])
        .plans(["- a-0  kill     no longer wanted"]);
}

#[test]
fn how_a_stop_ended_says_whether_it_was_a_failure() {
    let a = echo("a");
    let ended_by = |reason: StopReason| {
        let instance = but(exited(&a), |a| {
            with_launch(a, |launch| {
                launch.stop = Some(Stop {
                    asked_at: ago(3),
                    reason,
                    killed_at: None,
                });
            });
        });
        let record = wanting([a.clone()]).with([instance]).writes("a-0").unwrap();
        let last = record.history.last.unwrap();
        format!("{} {}", record.history.failures, last.cause)
    };
    let last_probe = "refused".to_owned();
    assert_eq!(ended_by(StopReason::Removed), "0 stopped");
    assert_eq!(ended_by(StopReason::Shutdown), "0 stopped");
    assert_eq!(
        ended_by(StopReason::SpecChanged { fields: Vec::new() }),
        "0 stopped"
    );
    assert_eq!(
        ended_by(StopReason::LeaderGone),
        "1 ended by itself: exit code 1"
    );
    assert_eq!(
        ended_by(StopReason::StartupTimeout {
            waited_seconds: 60,
            last_probe: last_probe.clone()
        }),
        "1 was not ready after 60 s; the last probe: refused"
    );
    assert_eq!(
        ended_by(StopReason::Unhealthy {
            failures: 3,
            last_probe
        }),
        "1 was stopped as unhealthy; the last probe: refused"
    );
    assert_eq!(
        ended_by(StopReason::LaunchFailed(LaunchFailure::Cancelled)),
        "1 the launch was cancelled"
    );
    let early = but(starting(&a), |a| a.liveness = gone());
    wanting([a]).with([early]).tells([
        "a-0 ExitedEarly: ended before it was ready: exit code 1",
        "a-0 Launching: echo on port 8900",
    ]);
}

#[test]
fn times_that_lie_ahead_count_from_now() {
    let a = echo("a");
    let ahead = |instance: Instance| {
        let moved = but(instance, |a| {
            let day = Duration::from_hours(24);
            with_launch(a, |launch| {
                for at in [&mut launch.started_at, &mut launch.ready_at]
                    .into_iter()
                    .flatten()
                {
                    *at += day;
                }
                if let Some(stop) = &mut launch.stop {
                    stop.asked_at += day;
                }
            });
            a.health = Health::default();
        });
        wanting([a.clone()]).with([moved])
    };
    ahead(starting(&a))
        .plans(["~ a-0  update   Starting: not probed yet, until 2026-01-01T12:01:00Z"]);
    assert_eq!(
        request(&ahead(starting(&a))),
        "ProbeRequest { purpose: Startup, method: HttpGet { path: \"/health\" }, port: Port(8900), timeout: 5s }"
    );
    // It is probed within a period, not in a day.
    let world = ahead(ready(&a));
    world.plans(["~ a-0  update   ready"]);
    assert!(world.planned().deadline.unwrap() <= NOW + Duration::from_secs(10));
    ahead(stopping(&a))
        .plans(["~ a-0  update   Terminating: no longer wanted, killed at 2026-01-01T12:00:20Z"]);
}
