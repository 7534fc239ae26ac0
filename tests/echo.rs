//! Every switch of the echo engine, from outside.

mod support;

use std::fs::read_to_string;
use std::io::{ErrorKind, Read as _};
use std::net::TcpListener;
use std::process::Command;
use std::time::Duration;

use nix::sys::signal::Signal::{SIGKILL, SIGTERM};
use nix::unistd::{Pid, getpgid, getsid};
use serde_json::json;
use support::http::{self, get, post};
use support::process::{Running, Stray, evenkeel, free_port, holds_for, wait_for, wait_until};

/// How long something must not happen before a test believes that it does not.
const A_WHILE: Duration = Duration::from_millis(300);

fn command(words: &[&str]) -> Command {
    let mut command = Command::new(evenkeel());
    command.arg("echo").args(words);
    command
}

fn start(words: &[&str]) -> Running {
    Running::start(&mut command(words))
}

/// Starts it on a port that the system picks.
fn listening(words: &[&str]) -> (Running, u16) {
    let engine = start(&[words, &["--port", "0"]].concat());
    let port = port_of(&engine);
    (engine, port)
}

fn port_of(engine: &Running) -> u16 {
    let port = engine.wait_for_log("listening on http://127.0.0.1:");
    port.parse().expect("a port")
}

fn ready(words: &[&str]) -> (Running, u16) {
    let (engine, port) = listening(words);
    engine.wait_for_log("echo: ready");
    (engine, port)
}

fn status(port: u16, path: &str) -> u16 {
    get(port, path).expect("an answer").status
}

/// Whether a request is without an answer for a while.
fn hangs(port: u16, method: &str, path: &str, body: &[u8]) -> bool {
    match http::request(port, method, path, body, A_WHILE) {
        Ok(_) => false,
        Err(error) => error.kind() == ErrorKind::WouldBlock,
    }
}

fn refuses(port: u16) -> bool {
    get(port, "/health").is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

fn metric(port: u16, name: &str) -> u64 {
    let metrics = get(port, "/metrics").expect("an answer").body;
    let value = metrics
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.expect(name).parse().expect("a number")
}

/// The workers' pids, once all of them are up.
fn workers(engine: &Running, count: usize) -> Vec<Stray> {
    wait_for(
        || {
            let log = engine.log();
            let pids: Vec<Pid> = log
                .lines()
                .filter_map(|line| {
                    let pid = line.strip_prefix("echo: worker pid ")?;
                    Some(Pid::from_raw(pid.strip_suffix(" is up")?.parse().ok()?))
                })
                .collect();
            (pids.len() == count).then(|| pids.into_iter().map(Stray).collect())
        },
        || format!("not {count} workers in\n{}", engine.log()),
    )
}

// -- a good citizen

#[test]
fn it_answers_completions_and_counts_them() {
    let (_engine, port) = ready(&["--served-model-name", "tiny"]);
    let health = get(port, "/health").expect("an answer");
    assert_eq!(
        (health.status, health.json()),
        (200, json!({"status": "ok"}))
    );
    let models = get(port, "/v1/models").expect("an answer").json();
    assert_eq!(models["data"][0]["id"], "tiny");

    let body = json!({"model": "tiny", "prompt": "fair winds", "max_tokens": 1});
    let answer = post(port, "/v1/completions", body.to_string()).expect("an answer");
    assert_eq!(answer.status, 200);
    assert_eq!(answer.json()["choices"][0]["text"], "fair");

    let body = json!({"messages": [{"role": "user", "content": "fair winds"}]});
    let answer = post(port, "/v1/chat/completions", body.to_string()).expect("an answer");
    let document = answer.json();
    assert_eq!(document["choices"][0]["message"]["content"], "fair winds");
    assert_eq!(document["model"], "tiny");

    assert_eq!(metric(port, "echo_requests_total"), 2);
    assert_eq!(metric(port, "echo_requests_running"), 0);
    assert_eq!(metric(port, "echo_prompt_tokens_total"), 4);
    assert_eq!(metric(port, "echo_generation_tokens_total"), 3);
}

#[test]
fn it_streams_until_done() {
    let (_engine, port) = ready(&[]);
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "a b", "stream": true})),
        (
            "/v1/chat/completions",
            json!({"messages": [{"role": "user", "content": "a b"}], "stream": true}),
        ),
    ] {
        let answer = post(port, path, body.to_string()).expect("an answer");
        assert_eq!(answer.status, 200);
        assert!(answer.head.contains("content-type: text/event-stream"));
        assert!(answer.body.starts_with("data: {"), "{}", answer.body);
        assert!(
            answer.body.ends_with("\n\ndata: [DONE]\n\n"),
            "{}",
            answer.body
        );
    }
}

#[test]
fn it_answers_bad_requests_with_an_error_and_lives_on() {
    let (_engine, port) = ready(&[]);
    let too_long = vec![b' '; 3_000_000];
    let cases: &[(&str, &str, &[u8], u16)] = &[
        ("POST", "/v1/completions", b"\0\xff{", 400),
        ("POST", "/v1/chat/completions", b"{}", 400),
        (
            "POST",
            "/v1/completions",
            br#"{"model": "other", "prompt": "a"}"#,
            404,
        ),
        ("POST", "/v1/completions", &too_long, 413),
        ("GET", "/v1/completions", b"", 405),
        ("GET", "/nothing", b"", 404),
    ];
    for (method, path, body, status) in cases {
        // A body that is refused before it is read may break the connection instead.
        let answer = http::request(port, method, path, body, support::process::PATIENCE);
        match answer {
            Ok(answer) => {
                assert_eq!(answer.status, *status, "{method} {path}: {answer:?}");
                assert!(answer.json()["error"]["message"].is_string(), "{answer:?}");
            }
            Err(error) => assert_eq!(*status, 413, "{method} {path}: {error}"),
        }
    }
    assert_eq!(status(port, "/health"), 200);
}

#[test]
fn sigterm_ends_it_with_code_0_even_with_a_request_open() {
    let (mut engine, port) = ready(&["--hang-requests"]);
    let _open = http::open(port, "POST", "/v1/completions", b"{}").expect("a connection");
    engine.wait_for_log("a request hangs");
    engine.signal(SIGTERM);
    assert_eq!(engine.wait().code(), Some(0));
}

#[test]
fn sigterm_ends_it_while_it_loads() {
    let (mut engine, _) = listening(&["--never-ready"]);
    engine.signal(SIGTERM);
    assert_eq!(engine.wait().code(), Some(0));
}

#[test]
fn a_missing_model_ends_it_with_a_message() {
    let mut engine = start(&["--port", "0", "--model", "no/such/model"]);
    assert_eq!(engine.wait().code(), Some(1));
    let log = engine.log();
    assert!(log.contains("cannot load model no/such/model"), "{log}");
}

#[test]
fn a_model_that_exists_gives_its_path_as_the_name() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().to_str().expect("a plain path");
    let (_engine, port) = ready(&["--model", path]);
    let models = get(port, "/v1/models").expect("an answer").json();
    assert_eq!(models["data"][0]["id"], path);
}

#[test]
fn a_taken_port_ends_it_with_a_message_that_names_the_port() {
    let taken = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = taken.local_addr().expect("bound").port().to_string();
    let mut engine = start(&["--port", &port]);
    assert_eq!(engine.wait().code(), Some(1));
    let log = engine.log();
    assert!(
        log.contains(&format!("port {port} on 127.0.0.1 is already taken")),
        "{log}"
    );
}

#[test]
fn host_is_the_address_it_listens_on() {
    let engine = start(&["--host", "127.0.0.2", "--port", "0"]);
    engine.wait_for_log("listening on http://127.0.0.2:");
}

// -- loading

#[test]
fn while_loading_the_port_accepts_and_says_503() {
    let (_engine, port) = listening(&["--load-seconds", "600"]);
    let health = get(port, "/health").expect("an answer");
    assert_eq!(
        (health.status, health.json()),
        (503, json!({"status": "loading model"}))
    );
    assert_eq!(status(port, "/v1/models"), 503);
    let body = br#"{"prompt": "a"}"#;
    let answer = post(port, "/v1/completions", body).expect("an answer");
    assert_eq!(answer.status, 503);
    assert_eq!(status(port, "/metrics"), 200);
}

#[test]
fn load_seconds_later_it_is_ready() {
    let (engine, port) = listening(&["--load-seconds", "0.3"]);
    wait_until(
        || match status(port, "/health") {
            503 => false,
            other => {
                assert_eq!(other, 200);
                true
            }
        },
        "it never becomes ready",
    );
    engine.wait_for_log("echo: ready");
}

#[test]
fn bind_after_load_refuses_until_it_is_ready() {
    let port = free_port();
    let engine = start(&[
        "--bind-after-load",
        "--load-seconds=0.5",
        "--port",
        &port.to_string(),
    ]);
    engine.wait_for_log("starting");
    wait_until(
        || match get(port, "/health") {
            Ok(answer) => {
                assert_eq!(answer.status, 200, "503 must never be seen");
                true
            }
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
                false
            }
        },
        "it never listens",
    );
}

#[test]
fn never_ready_says_503_for_ever() {
    let (_engine, port) = listening(&["--never-ready"]);
    assert!(holds_for(A_WHILE, || status(port, "/health") == 503));
}

#[test]
fn never_ready_with_bind_after_load_refuses_for_ever() {
    let port = free_port();
    let engine = start(&[
        "--never-ready",
        "--bind-after-load",
        "--port",
        &port.to_string(),
    ]);
    engine.wait_for_log("starting");
    assert!(holds_for(A_WHILE, || refuses(port)));
}

#[test]
fn lie_healthy_says_200_though_nothing_is_loaded() {
    let (_engine, port) = listening(&["--lie-healthy", "--never-ready"]);
    assert_eq!(status(port, "/health"), 200);
    assert_eq!(status(port, "/v1/models"), 200);
    let body = br#"{"prompt": "a"}"#;
    let answer = post(port, "/v1/completions", body).expect("an answer");
    assert_eq!(answer.status, 503);
}

// -- health and requests

#[test]
fn fail_health_after_turns_health_to_500() {
    let (_engine, port) = ready(&["--fail-health-after", "0.5"]);
    wait_until(|| status(port, "/health") == 500, "health does not fail");
    let body = br#"{"prompt": "a"}"#;
    let answer = post(port, "/v1/completions", body).expect("an answer");
    assert_eq!(answer.status, 200);
}

#[test]
fn hang_health_after_accepts_and_never_answers() {
    let (_engine, port) = ready(&["--hang-health-after", "0"]);
    assert!(hangs(port, "GET", "/health", b""));
    assert_eq!(status(port, "/v1/models"), 200);
}

#[test]
fn fail_requests_answers_500_and_stays_healthy() {
    let (_engine, port) = ready(&["--fail-requests"]);
    let body = br#"{"prompt": "a"}"#;
    let answer = post(port, "/v1/completions", body).expect("an answer");
    assert_eq!(answer.status, 500);
    assert!(answer.json()["error"]["message"].is_string());
    assert_eq!(status(port, "/health"), 200);
}

#[test]
fn hang_requests_never_answers_stays_healthy_and_counts_them_as_running() {
    let (_engine, port) = ready(&["--hang-requests"]);
    let open = http::open(port, "POST", "/v1/completions", b"{}").expect("a connection");
    wait_until(
        || metric(port, "echo_requests_running") == 1,
        "the request is not seen",
    );
    assert!(hangs(port, "POST", "/v1/chat/completions", b"{}"));
    assert_eq!(status(port, "/health"), 200);
    drop(open);
    wait_until(
        || metric(port, "echo_requests_running") == 0,
        "the client is gone and its request still counts",
    );
    assert_eq!(metric(port, "echo_requests_total"), 2);
}

// -- the end

#[test]
fn crash_after_ends_it_with_the_exit_code() {
    let (mut engine, _) = listening(&["--crash-after", "0.5", "--exit-code", "42"]);
    assert_eq!(engine.wait().code(), Some(42));
    assert!(engine.log().contains("crashing as told, exit code 42"));
}

#[test]
fn crash_after_0_ends_it_before_the_port_is_bound() {
    let taken = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = taken.local_addr().expect("bound").port().to_string();
    let mut engine = start(&["--crash-after=0", "--exit-code=0", "--port", &port]);
    assert_eq!(engine.wait().code(), Some(0));
    assert!(!engine.log().contains("taken"), "{}", engine.log());
}

#[test]
fn crash_after_ends_it_while_it_drains() {
    let (mut engine, _) = ready(&["--crash-after=2", "--exit-code=42", "--term-delay=600"]);
    engine.signal(SIGTERM);
    engine.wait_for_log("draining");
    assert_eq!(engine.wait().code(), Some(42));
}

#[test]
fn hang_on_taken_port_stays_and_still_ends_by_sigterm() {
    let taken = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let port = taken.local_addr().expect("bound").port().to_string();
    let mut engine = start(&["--hang-on-taken-port", "--port", &port]);
    engine.wait_for_log("staying all the same");
    assert!(holds_for(A_WHILE, || engine.has_exited().is_none()));
    engine.signal(SIGTERM);
    assert_eq!(engine.wait().code(), Some(0));
}

#[test]
fn ignore_sigterm_goes_on_as_if_nothing_was() {
    let (mut engine, port) = ready(&["--ignore-sigterm"]);
    engine.signal(SIGTERM);
    engine.wait_for_log("SIGTERM: ignored");
    assert_eq!(status(port, "/health"), 200);
    assert!(holds_for(A_WHILE, || engine.has_exited().is_none()));
    engine.signal(SIGKILL);
    assert!(!engine.wait().success());
}

#[test]
fn term_delay_closes_the_port_and_leaves_open_requests_alone() {
    let (engine, port) = ready(&["--term-delay", "600", "--hang-requests"]);
    let mut open = http::open(port, "POST", "/v1/completions", b"{}").expect("a connection");
    engine.wait_for_log("a request hangs");
    engine.signal(SIGTERM);
    engine.wait_for_log("draining");
    assert!(refuses(port));
    open.set_read_timeout(Some(A_WHILE)).expect("a timeout");
    let still_open = open.read(&mut [0]).expect_err("an open connection");
    assert_eq!(still_open.kind(), ErrorKind::WouldBlock);
}

#[test]
fn after_the_term_delay_it_ends_with_code_0() {
    let (mut engine, _) = ready(&["--term-delay", "0.2"]);
    engine.signal(SIGTERM);
    assert_eq!(engine.wait().code(), Some(0));
    assert!(engine.log().contains("drained"));
}

#[test]
fn a_second_sigterm_ends_the_drain_with_code_1() {
    let (mut engine, _) = ready(&["--term-delay", "600"]);
    engine.signal(SIGTERM);
    engine.wait_for_log("draining");
    assert!(holds_for(A_WHILE, || engine.has_exited().is_none()));
    engine.signal(SIGTERM);
    assert_eq!(engine.wait().code(), Some(1));
}

// -- workers

#[test]
fn workers_share_the_group_the_session_and_the_environment_and_leave_with_their_leader() {
    let mut engine = Running::start(
        command(&["--port", "0", "--workers", "2"]).env("EVENKEEL_TEST_MARK", "a mark"),
    );
    let workers = workers(&engine, 2);
    for worker in &workers {
        assert_eq!(getpgid(Some(worker.0)), getpgid(Some(engine.pid())));
        assert_eq!(getsid(Some(worker.0)), getsid(Some(engine.pid())));
        let environment = read_to_string(format!("/proc/{}/environ", worker.0)).expect("its own");
        assert!(environment.contains("EVENKEEL_TEST_MARK=a mark\0"));
    }
    engine.signal(SIGKILL);
    engine.wait();
    for worker in &workers {
        worker.wait_until_gone();
    }
}

#[test]
fn workers_leave_when_their_leader_is_told_to_stop() {
    let (mut engine, _) = ready(&["--workers", "1"]);
    let workers = workers(&engine, 1);
    engine.signal(SIGTERM);
    assert_eq!(engine.wait().code(), Some(0));
    workers[0].wait_until_gone();
}

#[test]
fn a_worker_that_dies_is_no_zombie_and_does_not_end_its_leader() {
    let (mut engine, port) = ready(&["--workers", "1"]);
    let workers = workers(&engine, 1);
    workers[0].signal(SIGTERM);
    engine.wait_for_log("worker 0 is gone: signal: 15");
    assert!(engine.has_exited().is_none());
    assert_eq!(status(port, "/health"), 200);
}

#[test]
fn workers_outlive_a_killed_and_a_stopped_leader_until_they_are_ended() {
    for signal in [SIGKILL, SIGTERM] {
        let (mut engine, _) = ready(&["--workers", "1", "--workers-outlive"]);
        let workers = workers(&engine, 1);
        engine.signal(signal);
        engine.wait();
        assert!(holds_for(A_WHILE, || workers[0].is_alive()));
        workers[0].signal(SIGTERM);
        workers[0].wait_until_gone();
    }
}

#[test]
fn workers_setsid_are_in_a_session_of_their_own() {
    let (mut engine, _) = ready(&["--workers", "1", "--workers-setsid"]);
    let workers = workers(&engine, 1);
    assert_eq!(getsid(Some(workers[0].0)), Ok(workers[0].0));
    assert_eq!(getpgid(Some(workers[0].0)), Ok(workers[0].0));
    engine.signal(SIGKILL);
    engine.wait();
    workers[0].wait_until_gone();
}

#[test]
fn workers_ignore_sigterm_while_their_leader_does_not() {
    let (mut engine, _) = ready(&[
        "--workers=1",
        "--workers-outlive",
        "--workers-ignore-sigterm",
    ]);
    let workers = workers(&engine, 1);
    workers[0].signal(SIGTERM);
    engine.signal(SIGTERM);
    assert_eq!(engine.wait().code(), Some(0));
    assert!(holds_for(A_WHILE, || workers[0].is_alive()));
    workers[0].signal(SIGKILL);
    workers[0].wait_until_gone();
}

// -- the log

#[test]
fn log_bytes_logs_that_many_bytes_of_lines() {
    let length = |bytes: &str| {
        let mut engine = start(&["--crash-after=0", "--log-bytes", bytes]);
        engine.wait();
        let log = engine.log();
        assert!(log.ends_with('\n'));
        let pid = engine.pid().to_string();
        log.len() - pid.len()
    };
    let without = length("0");
    for bytes in ["1", "100", "1000000"] {
        let expected = without + bytes.parse::<usize>().expect("a number");
        assert_eq!(length(bytes), expected);
    }
}

#[test]
fn print_env_logs_the_variables_named() {
    let mut engine = Running::start(
        command(&[
            "--crash-after=0",
            "--print-env=MARK_A",
            "--print-env=MARK_B",
        ])
        .env("MARK_A", "one two")
        .env_remove("MARK_B"),
    );
    engine.wait();
    let log = engine.log();
    assert!(log.lines().any(|line| line == "MARK_A=one two"), "{log}");
    assert!(log.lines().any(|line| line == "MARK_B is not set"), "{log}");
}

#[test]
fn every_request_is_logged() {
    let (engine, port) = ready(&[]);
    assert_eq!(status(port, "/health"), 200);
    assert_eq!(status(port, "/nothing"), 404);
    engine.wait_for_log("echo: GET /health 200");
    engine.wait_for_log("echo: GET /nothing 404");
}

#[test]
fn the_alias_is_the_served_name() {
    let (_engine, port) = ready(&["--alias", "tiny"]);
    let models = get(port, "/v1/models").expect("an answer").json();
    assert_eq!(models["data"][0]["id"], "tiny");
}

#[test]
fn a_log_that_nobody_reads_any_more_breaks_nothing() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let port = free_port();
    let mut command = command(&["--port", &port.to_string()]);
    let mut engine = Running::start_with_log(&mut command, writer.into());
    // The command holds no end of the pipe any more, so that this closes it.
    drop(command);
    drop(reader);
    let healthy = || get(port, "/health").is_ok_and(|answer| answer.status == 200);
    wait_until(healthy, "it does not answer without a log");
    engine.signal(SIGTERM);
    assert_eq!(engine.wait().code(), Some(0));
}
