//! Who gets which devices and which port.

use super::*;

#[test]
fn devices_are_granted_in_the_hosts_order_and_what_is_left_over_waits() {
    wanting([greedy("a", 1), greedy("b", 2), greedy("c", 1)]).gpus(3).plans([
        "+ a-0  launch   port 8900, devices GPU-0",
        "+ b-0  launch   port 8901, devices GPU-1 GPU-2",
        "  c-0  wait     InsufficientDevices: needs 1, 0 free (held: GPU-0 by a-0, GPU-1 by b-0, GPU-2 by b-0)",
    ]);
}

#[test]
fn a_lease_is_held_until_its_holder_is_proven_gone() {
    let a = greedy("a", 1);
    let held = |instance: Instance| {
        wanting([a.clone(), greedy("b", 1)])
            .gpus(1)
            .with([holding(instance, 8900, &["GPU-0"])])
    };
    let b = "  b-0  wait     InsufficientDevices: needs 1, 0 free (held: GPU-0 by a-0)";
    for instance in [
        reserved(&a),
        starting(&a),
        ready(&a),
        stopping(&a),
        but(ready(&a), |a| a.liveness = unknown()),
        but(ready(&a), |a| a.liveness = leader_gone()),
        but(exited(&a), |a| a.effect = Some(EffectKind::Signal)),
    ] {
        let shown = held(instance).planned().to_string();
        assert_eq!(shown.lines().last(), Some(b), "{shown}");
    }
    let gone = but(holding(exited(&a), 8900, &["GPU-0"]), |a| {
        a.record.history.failures = 3;
    });
    wanting([a.clone(), greedy("b", 1)]).gpus(1).with([gone]).plans([
        "~ a-0  update   CrashLoopBackOff: 4 failures in a row, next try at 2026-01-01T12:00:03Z",
        "+ b-0  launch   port 8900, devices GPU-0",
    ]);
}

#[test]
fn a_removed_holder_frees_its_lease_when_it_is_gone() {
    let a = greedy("a", 1);
    let world = wanting([greedy("b", 1)]).gpus(1);
    world
        .clone()
        .with([holding(ready(&a), 8900, &["GPU-0"])])
        .plans([
            "- a-0  stop     no longer wanted",
            "  b-0  wait     InsufficientDevices: needs 1, 0 free (held: GPU-0 by a-0)",
        ]);
    world.with([holding(exited(&a), 8900, &["GPU-0"])]).plans([
        "- a-0  forget   nothing of it is left",
        "+ b-0  launch   port 8900, devices GPU-0",
    ]);
}

#[test]
fn newcomers_are_served_by_priority_then_waiting_time_then_name() {
    let world = wanting([greedy("a", 1), greedy("b", 1), prior("c", 1, 1)]).gpus(1);
    world.plans([
        "  a-0  wait     InsufficientDevices: needs 1, 0 free (held: GPU-0 by c-0)",
        "  b-0  wait     InsufficientDevices: needs 1, 0 free (held: GPU-0 by c-0)",
        "+ c-0  launch   port 8900, devices GPU-0",
    ]);
    let world = wanting([greedy("a", 1), greedy("b", 1)]).gpus(1);
    world.plans([
        "+ a-0  launch   port 8900, devices GPU-0",
        "  b-0  wait     InsufficientDevices: needs 1, 0 free (held: GPU-0 by a-0)",
    ]);
    world.waiting("b-0", 5).waiting("a-0", 4).plans([
        "  a-0  wait     InsufficientDevices: needs 1, 0 free (held: GPU-0 by b-0)",
        "+ b-0  launch   port 8900, devices GPU-0",
    ]);
}

#[test]
fn who_waits_with_a_higher_priority_is_not_overtaken_on_what_it_could_use() {
    let held = holding(ready(&greedy("x", 1)), 8900, &["GPU-0"]);
    let world = wanting([prior("a", 2, 1), greedy("b", 1), echo("c"), greedy("x", 1)])
        .gpus(2)
        .with([held.clone()]);
    world.plans([
        "  a-0  wait     InsufficientDevices: needs 2, 1 free (held: GPU-0 by x-0)",
        "  b-0  wait     InsufficientDevices: needs 1, 0 free (held: GPU-0 by x-0)",
        // On a host with devices one is the default.
        "  c-0  wait     InsufficientDevices: needs 1, 0 free (held: GPU-0 by x-0)",
        "  x-0  wait     ready",
    ]);
    // Of the same priority, a smaller one goes first rather than leaving a device idle.
    wanting([greedy("a", 2), greedy("b", 1), greedy("x", 1)])
        .gpus(2)
        .with([held.clone()])
        .plans([
            "  a-0  wait     InsufficientDevices: needs 2, 1 free (held: GPU-0 by x-0)",
            "+ b-0  launch   port 8901, devices GPU-1",
            "  x-0  wait     ready",
        ]);
    // A pinned one waits for its device alone.
    let choosy = tuned(&pinned("a", &["GPU-0"]), |a| a.spec.priority = 1);
    wanting([choosy, greedy("b", 1), greedy("x", 1)])
        .gpus(2)
        .with([held])
        .plans([
            "  a-0  wait     InsufficientDevices: needs 1, 0 free (held: GPU-0 by x-0)",
            "+ b-0  launch   port 8901, devices GPU-1",
            "  x-0  wait     ready",
        ]);
}

#[test]
fn pinned_devices_are_exactly_those() {
    let world = wanting([pinned("a", &["GPU-1", "index:2"]), greedy("b", 1)]).gpus(3);
    world.plans([
        "+ a-0  launch   port 8900, devices GPU-1 GPU-2",
        "+ b-0  launch   port 8901, devices GPU-0",
    ]);
    let taken = holding(ready(&greedy("x", 1)), 8900, &["GPU-1"]);
    wanting([pinned("a", &["GPU-1", "GPU-2"]), greedy("x", 1)])
        .gpus(3)
        .with([taken])
        .plans([
            "  a-0  wait     InsufficientDevices: needs 2, 1 free (held: GPU-1 by x-0)",
            "  x-0  wait     ready",
        ]);
}

#[test]
fn an_unknown_device_and_more_than_there_are_are_refused() {
    wanting([pinned("a", &["GPU-9"])]).gpus(2).plans([
        "  a-0  wait     Unsupported: echo cannot run here: there is no device `GPU-9`; this host has GPU-0, GPU-1",
    ]);
    wanting([pinned("a", &["GPU-9"])]).plans([
        "  a-0  wait     Unsupported: echo cannot run here: there is no device `GPU-9`; this host has no accelerator",
    ]);
    wanting([pinned("a", &["GPU-1", "index:1"])]).gpus(2).plans([
        "  a-0  wait     Unsupported: echo cannot run here: `spec.devices.ids` names a device twice; this host has GPU-0, GPU-1",
    ]);
    wanting([greedy("a", 3)]).gpus(2).plans([
        "  a-0  wait     Unsupported: echo cannot run here: it asks for 3 devices, and this host has 2 of a kind; lower `spec.devices.count` or the parallelism",
    ]);
    wanting([greedy("a", 1)]).plans([
        "  a-0  wait     Unsupported: echo cannot run here: it asks for 1 device, and this host has 0 of a kind; lower `spec.devices.count` or the parallelism",
    ]);
}

#[test]
fn devices_of_one_instance_are_of_one_kind() {
    let (cuda, rocm) = ((DeviceKind::Cuda, false), (DeviceKind::Rocm, false));
    wanting([greedy("a", 2)])
        .devices(&[cuda, rocm, rocm])
        .plans(["+ a-0  launch   port 8900, devices GPU-1 GPU-2"]);
    wanting([greedy("a", 2)]).devices(&[cuda, rocm]).plans([
        "  a-0  wait     Unsupported: echo cannot run here: it asks for 2 devices, and this host has 1 of a kind; lower `spec.devices.count` or the parallelism",
    ]);
}

#[test]
fn unified_memory_is_shared_unless_it_is_pinned() {
    let unified = [(DeviceKind::Cuda, true)];
    wanting([greedy("a", 1), greedy("b", 1)])
        .devices(&unified)
        .plans([
            "+ a-0  launch   port 8900, devices GPU-0",
            "+ b-0  launch   port 8901, devices GPU-0",
        ]);
    wanting([greedy("a", 1), pinned("b", &["GPU-0"])])
        .devices(&unified)
        .plans([
            "+ a-0  launch   port 8900, devices GPU-0",
            "  b-0  wait     InsufficientDevices: needs 1, 0 free (held: GPU-0 by a-0)",
        ]);
    wanting([pinned("a", &["GPU-0"]), greedy("b", 1)])
        .devices(&unified)
        .plans([
            "+ a-0  launch   port 8900, devices GPU-0",
            "  b-0  wait     InsufficientDevices: needs 1, 0 free (held: GPU-0 by a-0)",
        ]);
    let share = |name| holding(ready(&greedy(name, 1)), 8900, &["GPU-0"]);
    let second = but(share("y"), |y| {
        with_launch(y, |launch| launch.lease.port = 8901.try_into().ok());
    });
    wanting([pinned("a", &["GPU-0"]), greedy("x", 1), greedy("y", 1)])
        .devices(&unified)
        .with([share("x"), second])
        .plans([
            "  a-0  wait     InsufficientDevices: needs 1, 0 free (held: GPU-0 by x-0 and y-0)",
            "  x-0  wait     ready",
            "  y-0  wait     ready",
        ]);
}

#[test]
fn a_relaunch_keeps_its_port_and_its_devices() {
    let a = greedy("a", 1);
    let ended = holding(exited(&a), 8907, &["GPU-1"]);
    wanting([a.clone(), greedy("b", 1)])
        .gpus(2)
        .with([ended.clone()])
        .plans([
            "+ a-0  launch   port 8907, devices GPU-1",
            "+ b-0  launch   port 8900, devices GPU-0",
        ]);
    // An edit of a restart field too.
    wanting([edited(&a)])
        .gpus(2)
        .with([ended])
        .plans(["+ a-0  launch   port 8907, devices GPU-1"]);
}

#[test]
fn an_edit_of_devices_or_port_asks_for_them_anew() {
    let a = greedy("a", 1);
    let ended = || holding(exited(&a), 8907, &["GPU-1"]);
    wanting([pinned("a", &["GPU-0"])])
        .gpus(2)
        .with([ended()])
        .plans(["+ a-0  launch   port 8907, devices GPU-0"]);
    let moved = deployment(
        "a",
        json!({"engine": "echo", "devices": {"count": 1}, "port": 9000}),
    );
    wanting([moved])
        .gpus(2)
        .with([ended()])
        .plans(["+ a-0  launch   port 9000, devices GPU-1"]);
    let fixed = but(exited(&exact("a", 8907)), |a| a.liveness = gone());
    wanting([echo("a")])
        .with([fixed])
        .plans(["+ a-0  launch   port 8900"]);
}

#[test]
fn a_holder_is_served_before_newcomers_of_a_higher_priority() {
    let ended = holding(exited(&greedy("b", 1)), 8901, &["GPU-0"]);
    wanting([prior("a", 1, 9), greedy("b", 1)])
        .gpus(1)
        .with([ended])
        .plans([
            "  a-0  wait     InsufficientDevices: needs 1, 0 free (held: GPU-0 by b-0)",
            "+ b-0  launch   port 8901, devices GPU-0",
        ]);
}

#[test]
fn a_holder_that_wants_more_takes_nothing_from_another_whose_launch_has_ended_too() {
    // `a` comes first and now wants two; GPU-1 and port 8901 are still `b`'s.
    let a = holding(exited(&greedy("a", 1)), 8900, &["GPU-0"]);
    let b = holding(exited(&greedy("b", 1)), 8901, &["GPU-1"]);
    wanting([prior("a", 2, 9), greedy("b", 1)])
        .gpus(2)
        .with([a, b])
        .plans([
            "~ a-0  update   InsufficientDevices: needs 2, 1 free (held: GPU-1 by b-0)",
            "+ b-0  launch   port 8901, devices GPU-1",
        ]);
}

#[test]
fn what_a_holder_gives_up_is_granted_in_the_same_pass() {
    // Both want other devices than they held: `a` could not have both before `b` gave its own up.
    let a = holding(exited(&greedy("a", 1)), 8900, &["GPU-0"]);
    let b = holding(exited(&greedy("b", 1)), 8901, &["GPU-1"]);
    wanting([greedy("a", 2), greedy("b", 2)]).gpus(2).with([a, b]).plans([
        "+ a-0  launch   port 8900, devices GPU-0 GPU-1",
        "~ b-0  update   InsufficientDevices: needs 2, 0 free (held: GPU-0 by a-0, GPU-1 by a-0)",
    ]);
}

#[test]
fn a_holder_that_the_launch_limit_stops_keeps_its_lease_against_those_before_it() {
    // A stranger sits on `a`'s port: the next free one is not 8901, which `b`'s record still holds.
    let a = exited(&echo("a"));
    let b = holding(exited(&echo("b")), 8901, &[]);
    let world = wanting([echo("a"), echo("b")])
        .with([a, b])
        .stranger(8900, 1)
        .but(|world| world.settings.max_launches = 1);
    world.plans([
        "+ a-0  launch   port 8902",
        "  b-0  wait     LaunchLimit: waits for its turn: 1 may start at a time (--max-launches)",
    ]);
    assert_eq!(world.writes("b-0"), None);
}

#[test]
fn ports_are_scanned_upward_past_leases_exact_ports_and_strangers() {
    let leased = holding(ready(&echo("x")), 8900, &[]);
    wanting([echo("a"), echo("b"), exact("c", 8901), echo("x")])
        .with([leased])
        .stranger(8902, 9)
        .stranger(8903, 10)
        .plans([
            // A stranger is remembered for ten seconds.
            "+ a-0  launch   port 8903",
            "+ b-0  launch   port 8904",
            "+ c-0  launch   port 8901",
            "  x-0  wait     ready",
        ]);
}

#[test]
fn a_port_is_looked_for_no_higher_than_there_are() {
    let strangers = 8900..=u16::MAX;
    let world = strangers.fold(wanting([echo("a")]), |world, port| world.stranger(port, 0));
    world.plans(["  a-0  wait     NoPort: no port is free from 8900 upward"]);
    world.looks_again_in(10.0);
}

#[test]
fn an_exact_port_waits_for_who_holds_it() {
    let holder = holding(ready(&echo("x")), 9000, &[]);
    wanting([exact("a", 9000), echo("x")])
        .with([holder])
        .plans([
            "  a-0  wait     PortHeld: port 9000 is held by x-0",
            "  x-0  wait     ready",
        ]);
    let world = wanting([exact("a", 9000)]).stranger(9000, 4);
    world.plans(["  a-0  wait     PortTakenByStranger: port 9000 is taken by nginx (pid 99)"]);
    world.looks_again_in(6.0);
    wanting([exact("a", 9000)])
        .stranger(9000, 10)
        .plans(["+ a-0  launch   port 9000"]);
}

#[test]
fn a_port_that_a_stranger_had_first_is_no_failure_and_another_one_is_tried() {
    let taken = |deployment: &Deployment, port: u16| {
        but(reserved(deployment), |instance| {
            instance.record.history.failures = 3;
            instance.outcome = Some(Outcome::PortTaken {
                port: port.try_into().unwrap(),
                stranger: Stranger {
                    pid: Some(99),
                    command: Some("nginx".to_owned()),
                    seen_at: NOW,
                },
            });
        })
    };
    let a = echo("a");
    let world = wanting([a.clone()])
        .with([taken(&a, 8900)])
        .stranger(8900, 0);
    world.plans(["+ a-0  launch   port 8901"]);
    world.tells([
        "a-0 PortTaken: port 8900 is taken by nginx (pid 99)",
        "a-0 Launching: echo on port 8901",
    ]);
    assert_eq!(world.writes("a-0").unwrap().history.failures, 3);
    let a = exact("a", 9000);
    wanting([a.clone()])
        .with([taken(&a, 9000)])
        .stranger(9000, 0)
        .plans(["~ a-0  update   PortTakenByStranger: port 9000 is taken by nginx (pid 99)"]);
}

#[test]
fn a_command_without_a_port_gets_none() {
    let a = deployment("a", json!({"engine": "command", "command": ["serve"]}));
    wanting([a]).plans(["+ a-0  launch"]);
    let a = deployment(
        "a",
        json!({"engine": "command", "command": ["serve", "--port", "$(PORT)"]}),
    );
    wanting([a]).plans(["+ a-0  launch   port 9000"]);
}

#[test]
fn while_a_record_cannot_be_read_no_device_is_granted_and_the_rest_goes_on() {
    let held = holding(exited(&greedy("c", 1)), 8902, &["GPU-1"]);
    let world = wanting([greedy("a", 1), greedy("b", 0), greedy("c", 1)])
        .gpus(2)
        .with([held])
        .quarantined(Holds::Unknown);
    world.plans([
        "  a-0  wait     RecordQuarantined: a record in the quarantine folder cannot be read and may hold any device: see `evenkeel events`",
        "+ b-0  launch   port 8900",
        // What it held itself is not in doubt.
        "+ c-0  launch   port 8902, devices GPU-1",
    ]);
}

#[test]
fn while_a_record_cannot_be_read_nobody_is_granted_another_device_than_it_held() {
    // GPU-5, which it held, is no longer there.
    let held = holding(exited(&greedy("a", 1)), 8900, &["GPU-5"]);
    wanting([greedy("a", 1)]).gpus(2).with([held]).quarantined(Holds::Unknown).plans([
        "~ a-0  update   RecordQuarantined: a record in the quarantine folder cannot be read and may hold any device: see `evenkeel events`",
    ]);
}

#[test]
fn what_a_quarantined_record_is_known_to_hold_stays_held_even_of_unified_memory() {
    let lease = Lease {
        port: 8900.try_into().ok(),
        devices: vec![LeasedDevice {
            id: "GPU-0".parse().unwrap(),
            bytes: None,
        }],
    };
    let launch_id = LaunchId::derive(Uuid::from_u128(9), &"b-0".parse().unwrap());
    wanting([greedy("a", 1), greedy("b", 1)])
        .devices(&[(DeviceKind::Cuda, true), (DeviceKind::Cuda, true)])
        .quarantined(Holds::Lease { launch_id, lease })
        .plans([
            "+ a-0  launch   port 8901, devices GPU-1",
            "+ b-0  launch   port 8902, devices GPU-1",
        ]);
}

#[test]
fn at_most_so_many_start_at_a_time_and_those_half_way_through_no_longer_count() {
    let limited = |world: World| world.but(|world| world.settings.max_launches = 1);
    limited(wanting([echo("a"), echo("b")])).plans([
        "+ a-0  launch   port 8900",
        "  b-0  wait     LaunchLimit: waits for its turn: 1 may start at a time (--max-launches)",
    ]);
    let a = deployment("a", json!({"engine": "echo", "startupDeadlineSeconds": 40}));
    let world = limited(wanting([a.clone(), echo("b")])).with([starting(&a)]);
    world.plans([
        "  a-0  wait     Starting: the last probe: connection refused, until 2026-01-01T12:00:30Z",
        "  b-0  wait     LaunchLimit: waits for its turn: 1 may start at a time (--max-launches)",
    ]);
    let b = &world.planned().steps[&"b-0".parse().unwrap()];
    assert_eq!(
        b.wait.as_ref().unwrap().until,
        Some(NOW + Duration::from_secs(10))
    );
    let later = world.but(|world| world.now = NOW + Duration::from_secs(10));
    assert!(
        later
            .planned()
            .to_string()
            .contains("+ b-0  launch   port 8901")
    );
    // Who is ready or is being stopped does not count either, and 0 is no limit.
    limited(wanting([echo("a"), echo("b")]))
        .with([ready(&echo("a"))])
        .plans(["  a-0  wait     ready", "+ b-0  launch   port 8901"]);
    limited(wanting([echo("b")]))
        .with([starting(&echo("a"))])
        .plans([
            "- a-0  stop     no longer wanted",
            "+ b-0  launch   port 8901",
        ]);
    let unlimited = wanting([echo("a"), echo("b")]).but(|world| world.settings.max_launches = 0);
    unlimited.plans(["+ a-0  launch   port 8900", "+ b-0  launch   port 8901"]);
}

#[test]
fn after_a_reboot_the_holders_start_first_and_keep_theirs_until_their_turn() {
    let [a, b, c] = ["a", "b", "c"].map(|name| greedy(name, 1));
    let world = wanting([a.clone(), b.clone(), c.clone()])
        .gpus(3)
        .with([
            holding(exited(&b), 8901, &["GPU-1"]),
            holding(exited(&c), 8902, &["GPU-2"]),
        ])
        .but(|world| world.settings.max_launches = 1);
    world.plans([
        "  a-0  wait     LaunchLimit: waits for its turn: 1 may start at a time (--max-launches)",
        "+ b-0  launch   port 8901, devices GPU-1",
        "  c-0  wait     LaunchLimit: waits for its turn: 1 may start at a time (--max-launches)",
    ]);
}
