//! Probes against tiny servers. Those that are to be members of an instance run in this very binary, launched like an
//! engine.

mod support;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use evenkeel::names::Port;
use evenkeel::observed::ProbeResult;
use evenkeel::order::{ProbeMethod, ProbePurpose, ProbeRequest};
use evenkeel::probe::{Prober, port_holder};
use evenkeel::record::Launch;
use support::launcher::*;

const HABIT: &str = "PROBED_SERVER_HABIT";
const PORT: &str = "PROBED_SERVER_PORT";

/// Not a test: the server, when this binary is launched as an engine.
#[test]
fn the_server() {
    let (Ok(habit), Ok(port)) = (std::env::var(HABIT), std::env::var(PORT)) else {
        return;
    };
    let listener = TcpListener::bind(("127.0.0.1", port.parse().unwrap())).unwrap();
    for connection in listener.incoming().flatten() {
        let habit = habit.clone();
        std::thread::spawn(move || serve(connection, &habit));
    }
}

fn serve(mut connection: TcpStream, habit: &str) {
    let mut request = [0; 4096];
    let length = connection.read(&mut request).unwrap_or(0);
    let request = String::from_utf8_lossy(&request[..length]).into_owned();
    let mut answer = |text: &str| {
        let _ = connection.write_all(text.as_bytes());
    };
    match habit {
        "well" if request.starts_with("GET /health HTTP/1.1\r\n") => {
            answer("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok");
        }
        "well" => answer("HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"),
        "loading" => answer(
            "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 37\r\n\r\n\
             {\"error\":{\"message\":\"Loading model\"}}\n",
        ),
        "redirect" => answer(
            "HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
        ),
        "endless" => {
            answer("HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n");
            let chunk = "x".repeat(10_000);
            while connection.write_all(chunk.as_bytes()).is_ok() {}
        }
        "unfinished" => {
            answer("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf");
            std::thread::sleep(Duration::from_secs(1000));
        }
        "nonsense" => answer("+OK this is another protocol\r\n"),
        "hangup" => {}
        "silent" => std::thread::sleep(Duration::from_secs(1000)),
        other => panic!("{other}"),
    }
}

fn get(port: Port, path: &str) -> ProbeRequest {
    ProbeRequest {
        purpose: ProbePurpose::Readiness,
        method: ProbeMethod::HttpGet {
            path: path.to_owned(),
        },
        port,
        timeout: Duration::from_secs(20),
    }
}

async fn engine(world: &mut World, habit: &str) -> (Launch, Port) {
    let port = free_port().await;
    let own = std::env::current_exe().unwrap();
    let mut order = world.order(
        own.to_str().unwrap(),
        &["--exact", "the_server", "--nocapture"],
    );
    order.environment = vec![variable(HABIT, habit), variable(PORT, &port.to_string())];
    order.port = Some(port);
    let launch = world.start(order).await;
    eventually("it listens", || port_holder(port).is_some()).await;
    assert_eq!(port_holder(port).unwrap().pid, Some(pid(&launch)));
    (launch, port)
}

async fn asked(world: &World, launch: &Launch, request: ProbeRequest) -> ProbeResult {
    let prober = Prober::new(world.launcher.clone()).unwrap();
    within("probe", prober.probe(request, launch)).await
}

#[tokio::test]
async fn each_habit_of_a_server_has_its_result() {
    for (habit, expected) in [
        ("well", "success"),
        ("loading", "Loading model"),
        ("redirect", "GET /health was answered with 302 Found"),
        ("endless", "success"),
        ("nonsense", "invalid HTTP version parsed"),
        ("hangup", "connection closed before message completed"),
    ] {
        let mut world = World::new();
        let (launch, port) = engine(&mut world, habit).await;
        let result = asked(&world, &launch, get(port, "/health")).await;
        assert_eq!(result.to_string(), expected, "{habit}");
        assert_eq!(
            matches!(result, ProbeResult::Loading { .. }),
            habit == "loading"
        );
    }
}

#[tokio::test]
async fn the_path_is_asked_for_as_it_is_written() {
    let mut world = World::new();
    let (launch, port) = engine(&mut world, "well").await;
    let result = asked(&world, &launch, get(port, "/elsewhere?a=b")).await;
    assert_eq!(
        result.to_string(),
        "GET /elsewhere?a=b was answered with 404 Not Found"
    );
    let result = asked(&world, &launch, get(port, "@example.org/")).await;
    assert!(matches!(result, ProbeResult::Failure { .. }), "{result}");
}

#[tokio::test]
async fn an_answer_that_does_not_come_ends_with_the_timeout() {
    for habit in ["silent", "unfinished"] {
        let mut world = World::new();
        let (launch, port) = engine(&mut world, habit).await;
        let mut request = get(port, "/health");
        request.timeout = Duration::from_millis(300);
        let began = Instant::now();
        let result = asked(&world, &launch, request).await;
        assert_eq!(result.to_string(), "no answer within 0.3 s");
        assert!(matches!(result, ProbeResult::Failure { .. }));
        assert!(began.elapsed() < Duration::from_secs(10));
    }
}

#[tokio::test]
async fn a_refused_connection_is_still_loading() {
    let mut world = World::new();
    let launch = world.start(world.order("sleep", &["1000"])).await;
    let port = free_port().await;
    let mut request = get(port, "/health");
    for method in [request.method.clone(), ProbeMethod::TcpConnect] {
        request.method = method;
        assert_eq!(
            asked(&world, &launch, request.clone()).await,
            ProbeResult::Loading {
                detail: "connection refused".to_owned()
            }
        );
    }
}

#[tokio::test]
async fn a_connection_is_enough_for_a_tcp_probe() {
    let mut world = World::new();
    let (launch, port) = engine(&mut world, "silent").await;
    let mut request = get(port, "");
    request.method = ProbeMethod::TcpConnect;
    assert_eq!(asked(&world, &launch, request).await, ProbeResult::Success);
}

#[tokio::test]
async fn a_server_that_is_a_grandchild_is_the_instance() {
    let mut world = World::new();
    let port = free_port().await;
    let own = std::env::current_exe().unwrap();
    let mut order = world.shell(&format!(
        "{} --exact the_server --nocapture & wait",
        own.display()
    ));
    order.environment = vec![variable(HABIT, "well"), variable(PORT, &port.to_string())];
    let launch = world.start(order).await;
    eventually("it listens", || port_holder(port).is_some()).await;
    assert_eq!(
        asked(&world, &launch, get(port, "/health")).await,
        ProbeResult::Success
    );
}

#[tokio::test]
async fn a_strangers_200_is_no_success_and_names_the_stranger() {
    let mut world = World::new();
    let launch = world.start(world.order("sleep", &["1000"])).await;
    for (address, habit) in [
        ("127.0.0.1:0", "well"),
        ("0.0.0.0:0", "well"),
        ("127.0.0.1:0", "loading"),
        ("127.0.0.1:0", "hangup"),
    ] {
        let listener = TcpListener::bind(address).unwrap();
        let port = Port::try_from(listener.local_addr().unwrap().port()).unwrap();
        std::thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                serve(connection, habit);
            }
        });
        let result = asked(&world, &launch, get(port, "/health")).await;
        let ProbeResult::Stranger { stranger } = result else {
            panic!("{address} {habit}: {result}");
        };
        assert_eq!(stranger.pid, Some(std::process::id()));
        assert!(stranger.command.is_some());
    }
}

#[tokio::test]
async fn many_probes_at_once_do_not_wait_for_one_another() {
    let mut world = World::new();
    let (launch, port) = engine(&mut world, "silent").await;
    let prober = Prober::new(world.launcher.clone()).unwrap();
    let began = Instant::now();
    let mut pending: Vec<_> = (0..100)
        .map(|_| {
            let mut request = get(port, "/health");
            request.timeout = Duration::from_millis(500);
            prober.probe(request, &launch)
        })
        .collect();
    let all = std::future::poll_fn(|context| {
        pending.retain_mut(|probe| probe.as_mut().poll(context).is_pending());
        if pending.is_empty() {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    });
    within("all probes", all).await;
    assert!(began.elapsed() < Duration::from_secs(20));
}
