//! The process launcher against real processes.

mod support;

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use evenkeel::failure::ExitStatus;
use evenkeel::launch::gate::{Instruction, Octets};
use evenkeel::launch::{Launcher, PrepareError};
use evenkeel::names::{LaunchId, Port};
use evenkeel::observed::{Liveness, SignalKind};
use evenkeel::order::Program;
use evenkeel::procfs::Procfs;
use evenkeel::record::Handle;
use evenkeel::spec::{EnvValue, EnvVar};
use support::launcher::*;

fn code(code: i32) -> ExitStatus {
    ExitStatus {
        code: Some(code),
        ..ExitStatus::UNKNOWN
    }
}

fn killed(signal: i32) -> ExitStatus {
    ExitStatus {
        signal: Some(signal),
        ..ExitStatus::UNKNOWN
    }
}

fn environment(pid: u32) -> BTreeMap<String, String> {
    let text = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
    text.split(|&byte| byte == 0)
        .filter_map(|variable| std::str::from_utf8(variable).ok()?.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

fn descriptors(pid: u32) -> BTreeMap<u32, PathBuf> {
    std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            let number = path.file_name().unwrap().to_str().unwrap();
            (number.parse().unwrap(), std::fs::read_link(&path).unwrap())
        })
        .collect()
}

fn status_line(pid: u32, name: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let value = status.lines().find_map(|line| line.strip_prefix(name));
    value.unwrap().trim_start_matches(':').trim().to_owned()
}

#[tokio::test]
async fn a_prepared_gate_leads_its_own_session_and_shows_no_secret() {
    let mut world = World::new();
    let mut order = world.shell("echo $HF_TOKEN; exec sleep 1000");
    order.environment = vec![variable("HF_TOKEN", "sekrit")];
    let id = order.launch_id;
    let (launch, prepared) = world.prepare(order).await.unwrap();
    let gate = pid(&launch);
    let stat = Procfs::default().stat(gate).unwrap().unwrap();
    assert_eq!((stat.session, stat.group), (gate, gate));
    assert_eq!(launch.handle, Some(Handle::Process(handle_of(gate))));
    let names: Vec<String> = environment(gate).into_keys().collect();
    assert_eq!(names, ["EVENKEEL_INSTANCE", "EVENKEEL_LAUNCH_ID"]);
    let shown = std::fs::read_to_string(format!("/proc/{gate}/cmdline")).unwrap();
    assert_eq!(shown, "evenkeel\0__gate\0");
    assert_eq!(world.inspect(&launch), Liveness::Alive);
    assert_eq!(
        within("find", world.launcher.find(id)).await,
        Ok(launch.handle.clone())
    );

    within("open", prepared.gate.open()).await.unwrap();
    eventually("the secret is in the log", || world.log() == "sekrit\n").await;
    assert_eq!(handle_of(gate), handle_of(pid(&launch)));
    assert_eq!(world.inspect(&launch), Liveness::Alive);
}

#[tokio::test]
async fn an_engine_runs_as_it_should() {
    // Ignored signals and open descriptors that the controller itself was started with.
    let mut world = World::new();
    let gate = world.path("gate");
    script(
        &gate,
        &format!("#!/bin/sh\ntrap '' HUP INT QUIT USR1 CHLD\nexec {EVENKEEL} \"$@\"\n"),
    );
    world.launcher = world.launcher.clone().with_gate_program(gate);
    let kept_open = std::fs::File::open("/dev/zero").unwrap();
    let inherited = nix::unistd::dup(&kept_open).unwrap();
    let mut order = world.order("sleep", &["1000"]);
    order.environment = vec![variable("A", "first"), variable("A", "second")];
    let launch = world.start(order).await;
    drop(inherited);

    let engine = pid(&launch);
    let log = world.launcher.logs().current(&world.instance);
    let open = descriptors(engine);
    assert_eq!(open[&0], Path::new("/dev/null"));
    assert_eq!((&open[&1], &open[&2]), (&log, &log));
    assert_eq!(open.len(), 3, "{open:?}");
    assert_eq!(
        std::fs::metadata(&log).unwrap().permissions().mode() & 0o777,
        0o600
    );
    // 32 and 33 are the C library's own; it lets nobody change them.
    let own = 3 << 31;
    for mask in ["SigIgn", "SigBlk", "SigCgt"] {
        let signals = u64::from_str_radix(&status_line(engine, mask), 16).unwrap();
        assert_eq!(signals & !own, 0, "{mask}");
    }
    let stat = Procfs::default().stat(engine).unwrap().unwrap();
    assert_eq!((stat.session, stat.group), (engine, engine));
    let tmp = world.launcher.logs().tmp(&world.instance);
    assert_eq!(
        std::fs::read_link(format!("/proc/{engine}/cwd")).unwrap(),
        tmp
    );
    let environment = environment(engine);
    assert_eq!(environment["A"], "second");
    assert_eq!(environment["TMPDIR"], tmp.to_str().unwrap());
    assert_eq!(environment["EVENKEEL_LAUNCH_ID"], launch.id.to_string());
    assert_eq!(environment["EVENKEEL_INSTANCE"], "a-0");
    assert_eq!(environment["PATH"], std::env::var("PATH").unwrap());
}

#[tokio::test]
async fn an_exit_is_noticed_with_its_code_and_the_log_is_kept() {
    let mut world = World::new();
    let launch = world.start(world.shell("echo last words; exit 7")).await;
    assert_eq!(
        within("watch", world.launcher.watch(&launch)).await,
        Some(code(7))
    );
    assert!(!exists(pid(&launch)), "it was collected");
    let liveness = world
        .launcher
        .inspect(&world.instance, &launch, &[], Some(code(7)));
    assert_eq!(
        liveness,
        Liveness::Gone {
            status: code(7),
            log_tail: "last words\n".to_owned()
        }
    );
    // What is gone is not worth a watch, and a watch says so at once.
    assert_eq!(within("watch", world.launcher.watch(&launch)).await, None);

    let again = world.start(world.shell("exit 0")).await;
    within("watch", world.launcher.watch(&again)).await;
    let older = world.launcher.logs().older(&world.instance, 1);
    assert_eq!(std::fs::read_to_string(older).unwrap(), "last words\n");
}

#[tokio::test]
async fn an_exit_that_was_inspected_first_still_has_its_code() {
    let mut world = World::new();
    let launch = world.start(world.shell("exit 7")).await;
    let watch = world.launcher.watch(&launch);
    eventually("it is a zombie", || !runs(pid(&launch))).await;
    for _ in 0..2 {
        let Liveness::Gone { status, .. } = world.inspect(&launch) else {
            panic!("it is gone");
        };
        assert_eq!(status, code(7));
        assert!(!exists(pid(&launch)), "it was collected");
    }
    assert_eq!(within("watch", watch).await, Some(code(7)));
}

#[tokio::test]
async fn a_signal_that_ends_an_engine_is_told() {
    let mut world = World::new();
    let launch = world.start(world.order("sleep", &["1000"])).await;
    let mut watch = world.launcher.watch(&launch);
    let early = tokio::time::timeout(Duration::from_millis(50), &mut watch).await;
    assert!(early.is_err(), "it runs");
    let sent = world.launcher.signal(&launch, SignalKind::Term);
    assert_eq!(within("signal", sent).await, Ok(1));
    assert_eq!(within("watch", watch).await, Some(killed(15)));
    let sent = world.launcher.signal(&launch, SignalKind::Term);
    assert_eq!(within("signal", sent).await, Ok(0));
}

#[tokio::test]
async fn a_gate_that_is_dropped_never_runs_the_engine_and_leaves_no_zombie() {
    let mut world = World::new();
    let marker = world.path("marker");
    let order = world.order("touch", &[marker.to_str().unwrap()]);
    let id = order.launch_id;
    let (launch, prepared) = world.prepare(order).await.unwrap();
    drop(prepared);
    eventually("the gate has left", || !runs(pid(&launch))).await;
    assert!(matches!(world.inspect(&launch), Liveness::Gone { .. }));
    assert!(!exists(pid(&launch)), "it was collected");
    assert!(!marker.exists());
    assert_eq!(within("find", world.launcher.find(id)).await, Ok(None));
}

#[tokio::test]
async fn an_engine_outlives_the_effect_that_let_it_run() {
    let mut world = World::new();
    let (launch, prepared) = world
        .prepare(world.shell("echo up; exec sleep 1000"))
        .await
        .unwrap();
    let mut opening = prepared.gate.open();
    // Once, and then the controller is told to end.
    let _ = tokio::time::timeout(Duration::ZERO, &mut opening).await;
    drop(opening);
    eventually("it is up", || world.log() == "up\n").await;
    assert_eq!(world.inspect(&launch), Liveness::Alive);
}

#[tokio::test]
async fn a_gate_whose_controller_dies_never_runs_the_engine() {
    let world = World::new();
    let marker = world.path("marker");
    let log = world.path("log");
    let instruction = |working_dir: &Path| Instruction {
        program: Octets("/bin/touch".into()),
        arguments: vec![Octets("touch".into()), Octets(marker.clone().into())],
        environment: Vec::new(),
        working_dir: Octets(working_dir.into()),
        log: Octets(log.clone().into()),
    };
    let gate = |instruction: &Instruction| {
        let mut gate = Command::new(EVENKEEL)
            .arg("__gate")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let json = serde_json::to_vec(instruction).unwrap();
        let orders = gate.stdin.as_mut().unwrap();
        orders
            .write_all(&u32::try_from(json.len()).unwrap().to_be_bytes())
            .unwrap();
        orders.write_all(&json).unwrap();
        let mut length = [0; 4];
        let reports = gate.stdout.as_mut().unwrap();
        reports.read_exact(&mut length).unwrap();
        let mut report = vec![0; u32::from_be_bytes(length).try_into().unwrap()];
        reports.read_exact(&mut report).unwrap();
        (gate, String::from_utf8(report).unwrap())
    };

    let (mut prepared, report) = gate(&instruction(Path::new("/")));
    assert_eq!(report, "\"prepared\"");
    drop(prepared.stdin.take());
    assert_eq!(prepared.wait().unwrap().code(), Some(125));
    assert!(!marker.exists());

    // Anything but the byte is no permission either.
    let (mut prepared, _) = gate(&instruction(Path::new("/")));
    prepared.stdin.take().unwrap().write_all(b"?").unwrap();
    assert_eq!(prepared.wait().unwrap().code(), Some(125));
    assert!(!marker.exists());

    let (mut refused, report) = gate(&instruction(Path::new("/nowhere")));
    assert_eq!(report, r#"{"failed":{"step":"workingDir","errno":2}}"#);
    assert_eq!(refused.wait().unwrap().code(), Some(125));

    let (mut opened, _) = gate(&instruction(Path::new("/")));
    opened.stdin.take().unwrap().write_all(b"!").unwrap();
    assert!(opened.wait().unwrap().success());
    assert!(marker.exists());
}

#[tokio::test]
async fn an_effect_that_is_called_off_leaves_nothing_behind() {
    let mut world = World::new();
    let pid_file = world.path("pid");
    let gate = world.path("gate");
    script(
        &gate,
        &format!(
            "#!/bin/sh\necho $$ > {}\nexec sleep 1000\n",
            pid_file.display()
        ),
    );
    world.launcher = world.launcher.clone().with_gate_program(gate);

    let mut order = world.shell("true");
    order.timeout = Duration::from_millis(500);
    let said = failure(world.prepare(order).await);
    assert!(said.contains("was not prepared within 0.5 s"), "{said}");
    let silent = read_pid(&pid_file).unwrap();
    eventually("the silent gate was killed", || !runs(silent)).await;

    let mut effect = world.launcher.prepare(world.shell("true"));
    std::fs::remove_file(&pid_file).unwrap();
    while read_pid(&pid_file).is_none() {
        let _ = tokio::time::timeout(Duration::from_millis(5), &mut effect).await;
    }
    drop(effect);
    let cancelled = read_pid(&pid_file).unwrap();
    eventually("the cancelled gate was killed", || !runs(cancelled)).await;

    // The launcher's next call collects them.
    let launch = world.launched(LaunchId::derive(uuid::Uuid::nil(), &world.instance), None);
    world.inspect(&launch);
    assert!(!exists(silent) && !exists(cancelled));
}

#[tokio::test]
async fn a_gate_that_dies_is_a_failure_and_is_collected() {
    let mut world = World::new();
    let pid_file = world.path("pid");
    let gate = world.path("gate");
    script(
        &gate,
        &format!("#!/bin/sh\necho $$ > {}\nexit 3\n", pid_file.display()),
    );
    world.launcher = world.launcher.clone().with_gate_program(gate);
    let said = failure(world.prepare(world.shell("true")).await);
    assert_eq!(said, "could not start: the gate ended before it answered");
    let gate = read_pid(&pid_file).unwrap();
    eventually("it has ended", || !runs(gate)).await;
    let launch = world.launched(LaunchId::derive(uuid::Uuid::nil(), &world.instance), None);
    world.inspect(&launch);
    assert!(!exists(gate));

    world.launcher = world
        .launcher
        .clone()
        .with_gate_program("/nowhere/evenkeel");
    let said = failure(world.prepare(world.shell("true")).await);
    assert!(said.contains("the gate could not be started"), "{said}");
}

#[tokio::test]
async fn reasons_for_not_starting_are_told_apart_with_the_path() {
    let mut world = World::new();
    let at = |name: &str| world.folder.path().join(name);
    std::fs::write(at("text"), "no program").unwrap();
    script(&at("stray"), "#!/nowhere/python\n");
    script(&at("garbage"), "\u{7f}ELF for another machine");
    let folder = world.folder.path().display().to_string();
    let prepared = [
        (format!("{folder}/missing"), "{}/missing: not found"),
        (format!("{folder}/text"), "{}/text: not executable"),
        (folder.clone(), "{}: not executable"),
    ];
    for (program, expected) in prepared {
        let said = failure(world.prepare(world.order(&program, &[])).await);
        let expected = expected.replace("{}", &folder);
        assert_eq!(said, format!("could not start: {expected}"));
    }
    let mut order = world.order("missing", &[]);
    order.environment = vec![variable("PATH", "/x:/y")];
    assert_eq!(
        failure(world.prepare(order).await),
        "could not start: missing: not found in PATH (/x:/y)"
    );
    for (working_dir, expected) in [
        ("/nowhere", "no such working directory: /nowhere"),
        (
            "/dev/null",
            "the working directory /dev/null is not a folder",
        ),
    ] {
        let mut order = world.shell("true");
        order.working_dir = Some(working_dir.into());
        let said = failure(world.prepare(order).await);
        assert_eq!(said, format!("could not start: {expected}"));
    }
    let mut order = world.shell("true");
    order.environment = vec![EnvVar {
        name: "TOKEN".to_owned(),
        value: EnvValue::File("/nowhere/token".into()),
    }];
    let said = failure(world.prepare(order).await);
    assert!(
        said.contains("TOKEN") && said.contains("/nowhere/token"),
        "{said}"
    );

    // Those that only the exec can tell.
    let opened = [
        ("stray", "{}/stray: its interpreter was not found"),
        (
            "garbage",
            "{}/garbage: not executable: no program of this machine's kind, and no script with `#!`",
        ),
    ];
    for (program, expected) in opened {
        let order = world.order(&format!("{folder}/{program}"), &[]);
        let (launch, prepared) = world.prepare(order).await.unwrap();
        let error = within("open", prepared.gate.open()).await.unwrap_err();
        let expected = expected.replace("{}", &folder);
        assert_eq!(error.to_string(), format!("could not start: {expected}"));
        eventually("the gate has left", || !runs(pid(&launch))).await;
        assert!(matches!(world.inspect(&launch), Liveness::Gone { .. }));
        assert!(!exists(pid(&launch)));
    }
    let long = "x".repeat(100_000);
    let arguments = vec![long.as_str(); 100];
    let (_, prepared) = world
        .prepare(world.order("true", &arguments))
        .await
        .unwrap();
    let error = within("open", prepared.gate.open()).await.unwrap_err();
    let said = error.to_string();
    assert!(said.contains("argument list too long"), "{said}");
    assert!(
        said.contains("/true") && said.contains("101 arguments"),
        "{said}"
    );
}

#[tokio::test]
async fn a_log_that_cannot_be_opened_is_told_with_its_path() {
    let mut world = World::new();
    let log = world.launcher.logs().current(&world.instance);
    std::fs::create_dir_all(log.parent().unwrap()).unwrap();
    // A link into nowhere: it does not exist, so nothing is rotated, and it cannot be created.
    std::os::unix::fs::symlink("/nowhere/log", &log).unwrap();
    let said = failure(world.prepare(world.shell("true")).await);
    assert!(said.contains(log.to_str().unwrap()), "{said}");
    assert!(said.contains("No such file"), "{said}");
}

#[tokio::test]
async fn evenkeel_itself_can_be_the_engine() {
    let mut world = World::new();
    let mut order = world.order("", &["--version"]);
    order.program = Program::Own;
    let (launch, prepared) = world.prepare(order).await.unwrap();
    within("open", prepared.gate.open()).await.unwrap();
    let status = within("watch", world.launcher.watch(&launch)).await;
    assert_eq!(status, Some(code(0)));
}

#[tokio::test]
async fn members_that_outlive_their_leader_are_seen_and_reached() {
    let mut world = World::new();
    // One in the session, one that left it.
    let launch = world
        .start(world.shell("sleep 1000 & setsid sleep 1000 & sleep 0.2; exit 3"))
        .await;
    let status = within("watch", world.launcher.watch(&launch)).await;
    assert_eq!(status, Some(code(3)));
    let expected = Liveness::LeaderGone {
        members: 2,
        status: code(3),
    };
    let inspect = |world: &World, seen| world.launcher.inspect(&world.instance, &launch, &[], seen);
    assert_eq!(inspect(&world, status), expected);

    // The same for a controller that starts now.
    world.forget();
    assert_eq!(inspect(&world, status), expected);
    let watch = world.launcher.watch(&launch);
    let sent = world.launcher.signal(&launch, SignalKind::Term);
    assert_eq!(within("signal", sent).await, Ok(2));
    assert_eq!(within("watch", watch).await, None);
    eventually(
        "they are gone",
        || matches!(inspect(&world, status), Liveness::Gone { status: s, .. } if s == code(3)),
    )
    .await;
}

#[tokio::test]
async fn a_member_without_the_launch_id_is_proven_by_what_was_seen_before() {
    let mut world = World::new();
    let pid_file = world.path("pid");
    let launch = world
        .start(world.shell(&format!(
            "env -i /bin/sleep 1000 & echo $! > {}
             while grep -aq EVENKEEL /proc/$!/environ; do sleep 0.01; done; exit 0",
            pid_file.display()
        )))
        .await;
    let status = within("watch", world.launcher.watch(&launch)).await;
    assert_eq!(status, Some(code(0)));
    let member = read_pid(&pid_file).unwrap();
    assert!(matches!(
        world.inspect(&launch),
        Liveness::LeaderGone { members: 1, .. }
    ));

    // A controller that starts now knows only that somebody is in a session of that number.
    let with_memory = world.launcher.clone();
    world.forget();
    let Liveness::Unknown { why } = world.inspect(&launch) else {
        panic!("it cannot be known");
    };
    assert!(why.contains(&member.to_string()), "{why}");
    let sent = within("signal", world.launcher.signal(&launch, SignalKind::Kill)).await;
    assert!(sent.is_err(), "{sent:?}");
    assert!(runs(member));

    let sent = within("signal", with_memory.signal(&launch, SignalKind::Kill)).await;
    assert_eq!(sent, Ok(1));
    eventually("it is gone", || {
        matches!(world.inspect(&launch), Liveness::Gone { .. })
    })
    .await;
}

#[tokio::test]
async fn a_kill_reaches_everybody_also_those_that_ignore_the_first_signal() {
    let mut world = World::new();
    let launch = world
        .start(world.shell("trap '' TERM; sleep 1000 & sleep 1000 & echo up; wait"))
        .await;
    eventually("it is up", || world.log() == "up\n").await;
    for _ in 0..2 {
        let sent = world.launcher.signal(&launch, SignalKind::Term);
        assert_eq!(within("signal", sent).await, Ok(3));
        assert_eq!(world.inspect(&launch), Liveness::Alive);
    }
    let watch = world.launcher.watch(&launch);
    let sent = world.launcher.signal(&launch, SignalKind::Kill);
    assert_eq!(within("signal", sent).await, Ok(3));
    assert_eq!(within("watch", watch).await, Some(killed(9)));
    eventually("all are gone", || {
        matches!(world.inspect(&launch), Liveness::Gone { .. })
    })
    .await;
}

#[tokio::test]
async fn a_recycled_pid_is_never_signalled() {
    let mut world = World::new();
    let innocent = Stray::start(Command::new("sleep").arg("1000").process_group(0));
    let proven = handle_of(innocent.pid());
    let mut recycled = proven.clone();
    recycled.start_ticks -= 1;
    let mut other_boot = proven;
    other_boot.boot_id = "another".to_owned();
    for handle in [recycled, other_boot] {
        let id = LaunchId::derive(uuid::Uuid::new_v4(), &world.instance);
        let launch = world.launched(id, Some(Handle::Process(handle)));
        for signal in [SignalKind::Term, SignalKind::Kill] {
            let sent = within("signal", world.launcher.signal(&launch, signal)).await;
            assert_eq!(sent, Ok(0));
        }
        assert!(matches!(
            world.inspect(&launch),
            Liveness::Gone {
                status: ExitStatus::UNKNOWN,
                ..
            }
        ));
        assert_eq!(within("watch", world.launcher.watch(&launch)).await, None);
        assert!(runs(innocent.pid()));
    }
}

#[tokio::test]
async fn a_zombie_of_somebody_else_is_gone_and_tells_its_code() {
    let mut world = World::new();
    // Its parent lives and never collects it, as some first processes of containers do.
    let (launch, _parent) = adopted(&mut world, "exit 5", "exec sleep 1000").await;
    go(&world);
    eventually("it has ended", || !runs(pid(&launch))).await;
    assert!(exists(pid(&launch)), "a zombie");
    let Liveness::Gone { status, .. } = world.inspect(&launch) else {
        panic!("it is gone");
    };
    assert_eq!(status, code(5));
    assert_eq!(
        within("watch", world.launcher.watch(&launch)).await,
        Some(code(5))
    );
}

/// An engine that is nobody's child here: started by a shell, which then goes on as `parent` says. The engine waits for
/// [`go`] first.
async fn adopted(
    world: &mut World,
    engine: &str,
    parent: &str,
) -> (evenkeel::record::Launch, Stray) {
    let id = LaunchId::derive(uuid::Uuid::new_v4(), &world.instance);
    let pid_file = world.path("adopted");
    let go = world.path("go");
    let script = format!(
        "EVENKEEL_LAUNCH_ID={id} setsid sh -c 'while ! [ -e {go} ]; do sleep 0.01; done; {engine}' & echo $! > {pid}.new; \
         mv {pid}.new {pid}; {parent}",
        go = go.display(),
        pid = pid_file.display(),
    );
    let shell = Stray::start(Command::new("sh").args(["-c", &script]));
    eventually("the engine leads a session", || {
        let stat = read_pid(&pid_file).and_then(|pid| Procfs::default().stat(pid).ok()?);
        stat.is_some_and(|stat| stat.session == stat.pid)
    })
    .await;
    let handle = Handle::Process(handle_of(read_pid(&pid_file).unwrap()));
    let launch = world.launched(id, Some(handle));
    assert_eq!(world.inspect(&launch), Liveness::Alive);
    (launch, shell)
}

fn go(world: &World) {
    std::fs::write(world.path("go"), "").unwrap();
}

/// Begins to watch, lets it go on, and waits for its end.
async fn watched(world: &World, launch: &evenkeel::record::Launch) -> Option<ExitStatus> {
    let mut watch = world.launcher.watch(launch);
    let early = tokio::time::timeout(Duration::from_millis(50), &mut watch).await;
    assert!(early.is_err(), "it waits");
    go(world);
    within("watch", watch).await
}

#[tokio::test]
async fn the_exit_of_an_adopted_engine_is_noticed_with_its_code() {
    let mut world = World::new();
    let (launch, _parent) = adopted(&mut world, "exit 6", "exec sleep 1000").await;
    let status = watched(&world, &launch).await;
    assert_eq!(status, Some(code(6)));
}

#[tokio::test]
async fn the_exit_of_an_engine_whose_parent_is_gone_is_noticed() {
    let mut world = World::new();
    let (launch, parent) = adopted(&mut world, "exit 6", "exit 0").await;
    eventually("the parent has gone", || !runs(parent.pid())).await;
    assert_eq!(
        within("find", world.launcher.find(launch.id)).await,
        Ok(launch.handle.clone())
    );
    let status = watched(&world, &launch).await;
    // Who adopts it may collect it sooner than anybody else can look.
    assert!(
        [Some(code(6)), Some(ExitStatus::UNKNOWN)].contains(&status),
        "{status:?}"
    );
    assert!(matches!(world.inspect(&launch), Liveness::Gone { .. }));
}

#[tokio::test]
async fn an_adopted_engine_is_signalled_like_a_child() {
    let mut world = World::new();
    let (launch, _parent) = adopted(&mut world, "true", "exec sleep 1000").await;
    let watch = world.launcher.watch(&launch);
    let sent = within("signal", world.launcher.signal(&launch, SignalKind::Kill)).await;
    assert!(sent.is_ok_and(|members| members >= 1));
    assert_eq!(within("watch", watch).await, Some(killed(9)));
}

#[tokio::test]
async fn a_port_that_is_taken_is_told_with_who_has_it() {
    let mut world = World::new();
    for address in ["127.0.0.1:0", "0.0.0.0:0", "[::]:0", "[::1]:0"] {
        let Ok(listener) = TcpListener::bind(address) else {
            eprintln!("SKIPPED: {address} cannot be bound here");
            continue;
        };
        let port = Port::try_from(listener.local_addr().unwrap().port()).unwrap();
        let mut order = world.shell("true");
        order.port = Some(port);
        let Err(PrepareError::PortTaken {
            port: taken,
            stranger,
        }) = world.prepare(order.clone()).await
        else {
            panic!("{address} is taken");
        };
        assert_eq!(taken, port);
        assert_eq!(stranger.pid, Some(std::process::id()), "{address}");
        assert!(stranger.command.is_some());
        assert_eq!(world.log(), "", "nothing was started");

        drop(listener);
        released(port).await;
        order.launch_id = LaunchId::derive(uuid::Uuid::new_v4(), &world.instance);
        let (_, prepared) = world.prepare(order).await.unwrap();
        drop(prepared);
    }
}

#[tokio::test]
async fn connections_that_are_still_closing_take_no_port() {
    let mut world = World::new();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let client = std::net::TcpStream::connect(address).unwrap();
    let (server, _) = listener.accept().unwrap();
    // The server closes first, so its side waits out the rest of the connection on the port.
    drop(server);
    drop(client);
    drop(listener);
    let port = Port::try_from(address.port()).unwrap();
    released(port).await;
    let mut order = world.shell("true");
    order.port = Some(port);
    assert!(world.prepare(order).await.is_ok());
}

#[tokio::test]
async fn a_secret_from_a_file_reaches_the_engine_and_no_log_tail() {
    let mut world = World::new();
    let file = world.path("value");
    std::fs::write(&file, "correct horse\n").unwrap();
    let env = vec![EnvVar {
        name: "PLAIN".to_owned(),
        value: EnvValue::File(file.clone()),
    }];
    let mut order = world.shell("echo \"got <$PLAIN>\"");
    order.environment.clone_from(&env);
    let launch = world.start(order).await;
    let status = within("watch", world.launcher.watch(&launch)).await;
    assert_eq!(world.log(), "got <correct horse>\n");
    let tail = |world: &World| match world
        .launcher
        .inspect(&world.instance, &launch, &env, status)
    {
        Liveness::Gone { log_tail, .. } => log_tail,
        other => panic!("{other:?}"),
    };
    assert_eq!(tail(&world), "got <***>\n");
    // What cannot be known cannot be taken out.
    std::fs::remove_file(&file).unwrap();
    assert!(tail(&world).contains("not shown"), "{}", tail(&world));
}

#[tokio::test]
async fn a_launch_without_a_handle_is_unknown_and_found_by_its_id() {
    let mut world = World::new();
    let order = world.order("sleep", &["1000"]);
    let reserved = world.launched(order.launch_id, None);
    assert!(matches!(world.inspect(&reserved), Liveness::Unknown { .. }));
    let find = |world: &World| world.launcher.find(reserved.id);
    assert_eq!(within("find", find(&world)).await, Ok(None));
    let launch = world.start(order).await;
    assert_eq!(
        within("find", find(&world)).await,
        Ok(launch.handle.clone())
    );
    // It can be stopped without its handle, too.
    let sent = within("signal", world.launcher.signal(&reserved, SignalKind::Kill)).await;
    assert_eq!(sent, Ok(1));
    within("watch", world.launcher.watch(&launch)).await;
    assert_eq!(within("find", find(&world)).await, Ok(None));
}

#[tokio::test]
async fn many_launches_at_once_do_not_disturb_one_another() {
    let mut world = World::new();
    let mut started = Vec::new();
    for n in 0..10 {
        world.instance = format!("a-{n}").parse().unwrap();
        let order = world.shell(&format!("sleep 0.05; echo {n}; exit {n}"));
        let (launch, prepared) = world.prepare(order).await.unwrap();
        started.push((n, world.instance.clone(), launch, prepared));
    }
    let mut watches = Vec::new();
    for (n, instance, launch, prepared) in started {
        within("open", prepared.gate.open()).await.unwrap();
        watches.push((n, instance, world.launcher.watch(&launch)));
    }
    for (n, instance, watch) in watches {
        assert_eq!(within("watch", watch).await, Some(code(n)));
        let log = world.launcher.logs().current(&instance);
        assert_eq!(std::fs::read_to_string(log).unwrap(), format!("{n}\n"));
    }
}
