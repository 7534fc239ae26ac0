//! What is wished: removals, pauses, scaling, policies, live edits.

use super::*;

#[test]
fn a_disappearance_counts_when_the_grace_is_over() {
    let a = echo("a");
    let missing_for = |milliseconds: i64| {
        wanting([]).with([ready(&a)]).but(|world| {
            let since = NOW - SignedDuration::from_millis(milliseconds);
            world.desired.missing.insert(a.name.clone(), since);
        })
    };
    missing_for(1_500).plans([
        "  a-0  wait     RemovalGrace: its manifest is gone; stopping unless it comes back",
    ]);
    missing_for(1_500).looks_again_in(0.5);
    missing_for(2_000).plans(["- a-0  stop     no longer wanted"]);
    missing_for(2_000).tells(["a-0 Stopping: no longer wanted"]);
}

#[test]
fn after_a_restart_of_the_controller_what_is_absent_counts_from_the_first_listing() {
    let world = wanting([]).with([ready(&echo("a"))]);
    world
        .clone()
        .but(|world| world.desired.first_listed_at = Some(ago(1)))
        .plans([
            "  a-0  wait     RemovalGrace: its manifest is gone; stopping unless it comes back",
        ]);
    world
        .but(|world| world.desired.first_listed_at = None)
        .plans(["  a-0  wait     ready"]);
}

#[test]
fn removals_wait_for_git_and_not_for_ever() {
    let locked_until = |until| {
        wanting([])
            .with([ready(&echo("a"))])
            .but(|world| world.desired.removals_wait_until = Some(until))
    };
    let world = locked_until(NOW + Duration::from_secs(30));
    world.plans(["  a-0  wait     GitLock: its manifest is gone; waiting for git to finish (.git/index.lock)"]);
    // Its next probe comes before that.
    world.looks_again_in(9.0);
    locked_until(NOW).plans(["- a-0  stop     no longer wanted"]);
}

#[test]
fn during_the_removal_grace_nothing_is_launched_again() {
    let grace = |instance| {
        wanting([]).with([instance]).but(|world| {
            let name = echo("a").name;
            world.desired.missing.insert(name, ago(1));
        })
    };
    let a = echo("a");
    grace(exited(&a)).plans([
        "~ a-0  update   RemovalGrace: its manifest is gone; stopping unless it comes back",
    ]);
    grace(idle(&a)).plans([
        "  a-0  wait     RemovalGrace: its manifest is gone; stopping unless it comes back",
    ]);
    grace(starting(&a)).plans([
        "  a-0  wait     RemovalGrace: its manifest is gone; stopping unless it comes back",
    ]);
}

#[test]
fn what_an_unreadable_file_may_hold_goes_on_from_its_record() {
    let a = echo("a");
    let unreadable = |file: &str, words: &[&str]| {
        let words: BTreeSet<_> = words.iter().map(|&word| word.to_owned()).collect();
        wanting([]).but(|world| {
            let unreadable = Unreadable { words };
            world.desired.unreadable.insert(file.into(), unreadable);
        })
    };
    // The file it came from, and another that mentions it.
    for world in [
        unreadable("a.yaml", &[]),
        unreadable("other.yaml", &["spec", "a"]),
    ] {
        world
            .clone()
            .with([ready(&a)])
            .plans(["  a-0  wait     ready"]);
        world
            .clone()
            .with([exited(&a)])
            .plans(["+ a-0  launch   port 8900"]);
        world.with([idle(&a)]).plans(["+ a-0  launch   port 8900"]);
    }
    unreadable("other.yaml", &["b"])
        .with([ready(&a)])
        .plans(["- a-0  stop     no longer wanted"]);
}

#[test]
fn without_a_manifest_an_orphan_is_forgotten_and_left_running() {
    let a = deployment("a", json!({"engine": "echo", "deletionPolicy": "Orphan"}));
    let world = wanting([]).with([ready(&a)]);
    world.plans(["- a-0  forget   nothing of it is left"]);
    world.tells([
        "a-0 Forgotten: its manifest is gone and its deletionPolicy is Orphan: it is left running, and nobody looks after it",
    ]);
    let prepared = but(reserved(&a), |a| {
        a.outcome = Some(Outcome::Prepared(handle()));
    });
    wanting([])
        .with([prepared])
        .plans(["- a-0  stop     no longer wanted"]);
    let doubtful = but(ready(&a), |a| a.liveness = unknown());
    wanting([]).with([doubtful]).plans([
        "  a-0  wait     Unknown: it cannot be proven whether it runs: its environment cannot be read",
    ]);
}

#[test]
fn with_a_manifest_that_wishes_fewer_an_orphan_is_stopped() {
    let a = deployment("a", json!({"engine": "echo", "deletionPolicy": "Orphan"}));
    let scaled = tuned(&a, |a| a.spec.replicas = 0);
    wanting([scaled])
        .with([ready(&a)])
        .plans(["- a-0  stop     no longer wanted"]);
    let moved = tuned(&a, |a| {
        a.spec.node_selector = BTreeMap::from([("zone".to_owned(), "x".to_owned())]);
    });
    wanting([moved])
        .with([ready(&a)])
        .plans(["- a-0  stop     no longer wanted"]);
}

#[test]
fn everything_is_stopped_when_the_operator_says_so_orphans_too() {
    let orphan = deployment("b", json!({"engine": "echo", "deletionPolicy": "Orphan"}));
    let world = wanting([
        echo("a"),
        orphan.clone(),
        echo("c"),
        paused(&echo("d")),
        echo("e"),
    ])
    .with([
        ready(&echo("a")),
        ready(&orphan),
        idle(&echo("c")),
        ready(&paused(&echo("d"))),
    ])
    .but(|world| world.settings.intent = Intent::StopAll);
    let lines = [
        "- a-0  stop     everything is being stopped",
        "- b-0  stop     everything is being stopped",
        "- c-0  forget   nothing of it is left",
        "- d-0  stop     everything is being stopped",
    ];
    world.plans(lines);
    world.unavailable().plans(lines);
}

#[test]
fn scaling_up_launches_and_scaling_down_stops_the_highest() {
    let a = deployment("a", json!({"engine": "echo", "replicas": 3}));
    let one = tuned(&a, |a| a.spec.replicas = 1);
    let none = tuned(&a, |a| a.spec.replicas = 0);
    wanting([a.clone()]).with([ready(&a)]).plans([
        "  a-0  wait     ready",
        "+ a-1  launch   port 8901",
        "+ a-2  launch   port 8902",
    ]);
    let second = but(holding(ready(&a), 8901, &[]), |second| {
        second.record.name = a.name.instance(1);
    });
    let both = wanting([one]).with([ready(&a), second.clone()]);
    both.plans(["~ a-0  update   ready", "- a-1  stop     no longer wanted"]);
    wanting([none]).with([ready(&a), second]).plans([
        "- a-0  stop     no longer wanted",
        "- a-1  stop     no longer wanted",
    ]);
    wanting([tuned(&a, |a| a.spec.replicas = 0)]).plans([]);
}

#[test]
fn while_paused_nothing_is_launched_stopped_or_scaled_down() {
    let a = echo("a");
    let stopped = tuned(&paused(&a), |a| a.spec.replicas = 0);
    wanting([paused(&a)]).plans(["  a-0  wait     Paused: `spec.paused` is set"]);
    wanting([paused(&a)])
        .with([ready(&a)])
        .plans(["~ a-0  update   ready"]);
    wanting([paused(&a)])
        .with([ready(&paused(&a))])
        .plans(["  a-0  wait     ready"]);
    wanting([stopped.clone()])
        .with([ready(&stopped)])
        .plans(["  a-0  wait     ready"]);
    wanting([paused(&a)])
        .with([exited(&paused(&a))])
        .plans(["~ a-0  update   Paused: `spec.paused` is set"]);
    wanting([paused(&a)])
        .with([idle(&paused(&a))])
        .plans(["  a-0  wait     Paused: `spec.paused` is set"]);
    let edited = edited(&paused(&a));
    let prepared = but(reserved(&a), |a| {
        a.outcome = Some(Outcome::Prepared(handle()));
    });
    wanting([edited.clone()])
        .with([prepared])
        .plans(["+ a-0  release  the gate"]);
    wanting([edited])
        .with([ready(&a)])
        .plans(["  a-0  wait     ready"]);
}

#[test]
fn an_edit_made_while_paused_is_rolled_out_when_the_pause_ends() {
    let a = echo("a");
    let during = wanting([edited(&paused(&a))]).with([ready(&a)]);
    assert_eq!(during.writes("a-0"), None, "the record says what runs");
    let after = during.clone().then(&during.planned()).but(|world| {
        let edited = edited(&a);
        world.desired.deployments.insert(a.name.clone(), edited);
    });
    after.plans(["~ a-0  restart  spec.args changed"]);
}

#[test]
fn the_health_of_what_is_paused_is_still_asked_for() {
    let a = paused(&echo("a"));
    let late = but(starting(&a), |a| {
        with_launch(a, |launch| launch.started_at = Some(ago(90)));
    });
    let world = wanting([a.clone()]).with([late.clone()]);
    world.plans(["  a-0  wait     Paused: `spec.paused` is set"]);
    world.looks_again_in(1.0);
    let up = but(late, |a| a.health.startup.count(NOW, ProbeResult::Success));
    wanting([a.clone()])
        .with([up])
        .plans(["~ a-0  update   ready"]);
    let mut sick = ready(&a);
    for seconds in [21, 11, 1] {
        let result = ProbeResult::Failure {
            detail: "refused".to_owned(),
        };
        sick.health.liveness.count(ago(seconds), result);
    }
    let world = wanting([a]).with([sick]);
    world.plans(["  a-0  wait     Paused: `spec.paused` is set"]);
    world.looks_again_in(9.0);
}

#[test]
fn a_manifest_for_another_host_is_not_for_this_one() {
    let a = deployment(
        "a",
        json!({"engine": "echo", "nodeSelector": {"zone": "x"}}),
    );
    let world = wanting([a.clone()]);
    world.plans(["  a-0  wait     OtherNode: its nodeSelector does not match this host"]);
    world
        .clone()
        .with([ready(&a)])
        .plans(["- a-0  stop     no longer wanted"]);
    let labelled = |zone: &str| {
        let labels = BTreeMap::from([("zone".to_owned(), zone.to_owned())]);
        world
            .clone()
            .but(|world| world.settings.node_labels = labels)
    };
    labelled("x").plans(["+ a-0  launch   port 8900"]);
    labelled("y").plans(["  a-0  wait     OtherNode: its nodeSelector does not match this host"]);
}

#[test]
fn the_restart_policy_says_what_is_launched_again() {
    let with_policy =
        |policy: &str| deployment("a", json!({"engine": "echo", "restartPolicy": policy}));
    let launched = "+ a-0  launch   port 8900";
    let completed = "  a-0  wait     Completed: ended, and its restartPolicy leaves it so";
    for (policy, code, line) in [
        ("Always", 0, launched),
        ("Always", 1, launched),
        ("OnFailure", 0, completed),
        ("OnFailure", 1, launched),
        ("Never", 0, completed),
        ("Never", 1, completed),
    ] {
        let a = with_policy(policy);
        let ended = but(failed(&a, 1, 5), |a| {
            a.record.history.last.as_mut().unwrap().cause = exit(code);
        });
        wanting([a]).with([ended]).plans([line]);
    }
    // What was stopped, or never ran, has not ended by itself.
    for cause in [Cause::Stopped, Cause::NeverStarted] {
        let a = with_policy("Never");
        let stopped = but(failed(&a, 1, 5), |a| {
            a.record.history.last.as_mut().unwrap().cause = cause;
        });
        wanting([a]).with([stopped]).plans([launched]);
    }
}

#[test]
fn what_completed_is_launched_again_after_an_edit() {
    let a = deployment("a", json!({"engine": "echo", "restartPolicy": "Never"}));
    wanting([edited(&a)])
        .with([failed(&a, 1, 5)])
        .plans(["+ a-0  launch   port 8900"]);
}

#[test]
fn a_refused_edit_leaves_the_old_one_serving() {
    let a = echo("a");
    let refused = || {
        let mut refused = deployment("a", json!({"engine": "echo", "runtime": "docker"}));
        refused.source = a.source.clone();
        wanting([refused])
    };
    let wait = "  a-0  wait     Unsupported: echo cannot run here: this version does not run containers yet; use `runtime: process`";
    refused().with([ready(&a)]).plans([wait]);
    refused().with([ready(&a)]).looks_again_in(9.0);
    refused().with([starting(&a)]).plans([wait]);
    let prepared = but(reserved(&a), |a| {
        a.outcome = Some(Outcome::Prepared(handle()));
    });
    refused()
        .with([prepared])
        .plans(["+ a-0  release  the gate"]);
    refused().plans([wait]);
    let ended = "~ a-0  update   Unsupported: echo cannot run here: this version does not run containers yet; use `runtime: process`";
    refused().with([exited(&a)]).plans([ended]);
}

#[test]
fn a_renamed_file_refreshes_the_record_and_nothing_else() {
    let a = echo("a");
    let renamed = tuned(&a, |a| a.source.file = "renamed.yaml".into());
    for (instance, line) in [
        (ready(&a), "~ a-0  update   ready"),
        (
            starting(&a),
            "~ a-0  update   Starting: the last probe: connection refused, until 2026-01-01T12:00:50Z",
        ),
    ] {
        let world = wanting([renamed.clone()]).with([instance.clone()]);
        world.plans([line]);
        world.tells([]);
        let record = world.writes("a-0").unwrap();
        assert_eq!(record.source, renamed.source);
        assert_eq!(record.launch, instance.record.launch);
    }
}

#[test]
fn live_fields_are_taken_over_without_touching_the_instance() {
    let a = echo("a");
    let live = deployment(
        "a",
        json!({
            "engine": "echo",
            "priority": 3,
            "livenessProbe": {"periodSeconds": 60},
            "restartPolicy": "Never",
            "backoff": {"initialSeconds": 9},
            "terminationGracePeriodSeconds": 1,
            "startupDeadlineSeconds": 5,
            "deletionPolicy": "Orphan",
        }),
    );
    let live = tuned(&live, |live| {
        live.labels.labels.insert("team".to_owned(), "x".to_owned());
        live.labels
            .annotations
            .insert("note".to_owned(), "y".to_owned());
    });
    let world = wanting([live.clone()]).with([ready(&a)]);
    world.plans(["~ a-0  update   ready"]);
    world.looks_again_in(59.0);
    let record = world.writes("a-0").unwrap();
    assert_eq!(record.spec, live.spec);
    assert_eq!(record.metadata, live.labels);
    world
        .clone()
        .then(&world.planned())
        .plans(["  a-0  wait     ready"]);
}

#[test]
fn the_restarted_at_annotation_restarts() {
    let a = echo("a");
    let mut again = a.clone();
    let at = crate::spec::RESTARTED_AT.to_owned();
    again.labels.annotations.insert(at, "2026-01-01".to_owned());
    again.restart_key = RestartKey::of(&again.spec, again.labels.restarted_at());
    wanting([again])
        .with([ready(&a)])
        .plans(["~ a-0  restart  the manifest changed"]);
}

#[test]
fn a_probe_that_is_taken_out_of_the_manifest_no_longer_counts() {
    let a = deployment(
        "a",
        json!({"engine": "echo", "readinessProbe": {"httpGet": {"path": "/ready"}}}),
    );
    let unready = but(ready(&a), |a| {
        let failure = ProbeResult::Failure {
            detail: "500".to_owned(),
        };
        a.health.readiness.count(ago(1), failure);
    });
    wanting([a])
        .with([unready.clone()])
        .plans(["  a-0  wait     ProbeFailed: the last probe failed: 500"]);
    wanting([echo("a")])
        .with([unready])
        .plans(["~ a-0  update   ready"]);
}
