// effect: connects to 127.0.0.1; reads /proc, through procfs.rs.
//! One question to one instance, and whose answer it was.
//!
//! An answer counts only if the socket that took the connection belongs to a member of the instance (H2): a stranger on
//! the port may answer 200 all day while the engine hangs. Whose the socket is, is decided like this:
//!
//! * no member's descriptors show it, and some other process's do: a stranger, with its pid. Also when a member listens
//!   there as well (`SO_REUSEPORT`): the kernel hands connections to either, so the answer may have been the other's;
//! * nobody's descriptors show it, and all members' could be read: a stranger, without a pid;
//! * nobody's descriptors show it, and those of a member could not be read (it runs under another uid), or it cannot be
//!   told who the members are: accepted. Refusing would make such an engine unhealthy for good over what is our lack of
//!   rights, and a stranger that took the port before it was found by the bind test at the launch;
//! * the kernel's list of sockets cannot be read: accepted, for the same reason.
//!
//! Invariant: a probe ends by its timeout, and a success is the instance's own.

use std::collections::BTreeSet;
use std::error::Error as _;
use std::future::Future;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use reqwest::{Client, Response, StatusCode, redirect};

use crate::launch::group::{Identity, Scan, is_still};
use crate::launch::process::{ProcessLauncher, off_loop};
use crate::launch::{Effect, Unproven};
use crate::names::Port;
use crate::observed::{ProbeResult, Stranger};
use crate::order::{ProbeMethod, ProbeRequest};
use crate::procfs::Procfs;
use crate::record::Launch;

/// How much of an answer's body is read (H3): so that a server is not cut off in the middle of a usual answer, and one
/// that never ends costs nothing.
const BODY_LIMIT: usize = 64 << 10;

/// How much of a body is shown.
const DETAIL_LIMIT: usize = 120;

/// How long it may take to find out whose a socket is: some passes over /proc, of milliseconds each. Beside the probe's
/// own timeout, so that a slow look does not read as a slow engine.
const OWNER_TIMEOUT: Duration = Duration::from_secs(5);

/// Why there is no prober.
#[derive(Debug, thiserror::Error)]
#[error("the HTTP client could not be made")]
pub struct ProberError(#[from] reqwest::Error);

/// Asks instances how they are. Cheap to clone.
#[derive(Clone)]
pub struct Prober {
    client: Client,
    launcher: ProcessLauncher,
    proc: Procfs,
}

impl Prober {
    /// A prober of what this launcher launches.
    pub fn new(launcher: ProcessLauncher) -> Result<Self, ProberError> {
        let client = Client::builder()
            .no_proxy()
            .redirect(redirect::Policy::none())
            // A connection of its own for each probe: a kept one would hide that nobody listens any more.
            .pool_max_idle_per_host(0)
            .http1_only()
            .user_agent(concat!("evenkeel/", env!("CARGO_PKG_VERSION")))
            .build()?;
        Ok(Self {
            client,
            launcher,
            proc: Procfs::default(),
        })
    }

    /// Asks once. A refused connection and 503 are `Loading`, at any age of the instance; what that means is the
    /// plan's to say.
    pub fn probe(&self, request: ProbeRequest, launch: &Launch) -> Effect<ProbeResult> {
        let this = self.clone();
        let launch = launch.clone();
        Box::pin(async move {
            let answer = match &request.method {
                ProbeMethod::HttpGet { path } => this.get(&request, path).await,
                ProbeMethod::TcpConnect => connect(&request).await,
            };
            match answer {
                // Nobody took the connection, so there is nobody to identify.
                Answer::Refused => ProbeResult::Loading {
                    detail: "connection refused".to_owned(),
                },
                Answer::Taken(result) => match this.owner(request.port, &launch).await {
                    Owner::Instance => result,
                    Owner::Stranger(stranger) => ProbeResult::Stranger { stranger },
                    Owner::Nobody => match result {
                        ProbeResult::Success => ProbeResult::Failure {
                            detail: "it answered, and nobody listens any more".to_owned(),
                        },
                        other => other,
                    },
                },
            }
        })
    }

    async fn get(&self, request: &ProbeRequest, path: &str) -> Answer {
        let url = format!("http://127.0.0.1:{}{path}", request.port);
        let asked = async {
            let response = self.client.get(url).send().await?;
            let status = response.status();
            let body = read_body(response).await?;
            Ok::<_, reqwest::Error>((status, body))
        };
        match in_time(request.timeout, asked).await {
            Some(Ok((status, body))) => Answer::Taken(judge(status, path, &body)),
            Some(Err(error)) if is_refused(&error) => Answer::Refused,
            Some(Err(error)) => Answer::Taken(ProbeResult::Failure {
                detail: in_words(&error),
            }),
            None => Answer::Taken(no_answer(request.timeout)),
        }
    }

    async fn owner(&self, port: Port, launch: &Launch) -> Owner {
        let proc = self.proc.clone();
        let known = self.launcher.known_members(launch);
        let found = async {
            // Nearly always the leader or a known member listens, and nobody else needs to be looked at: a thousand
            // instances must not mean a thousand passes over all processes.
            if off_loop(move || known_listen(&proc, port, &known)).await {
                return Owner::Instance;
            }
            let scan = self.launcher.scan(launch).await;
            let proc = self.proc.clone();
            off_loop(move || owner(&proc, port, &scan)).await
        };
        // The benefit of the doubt, as everywhere here.
        in_time(OWNER_TIMEOUT, found)
            .await
            .unwrap_or(Owner::Instance)
    }
}

/// Who listens on a port, at whichever address; `None` when nobody does.
pub fn port_holder(port: Port) -> Option<Stranger> {
    Procfs::default().port_holder(port)
}

enum Answer {
    /// Nobody listens.
    Refused,
    /// Somebody took the connection, and this came of it.
    Taken(ProbeResult),
}

#[derive(Debug, PartialEq)]
enum Owner {
    Instance,
    Stranger(Stranger),
    Nobody,
}

/// Whether these processes, which are members if they still are who they were, hold every socket that a connection may
/// arrive at.
fn known_listen(proc: &Procfs, port: Port, known: &[Identity]) -> bool {
    let Ok(mut listeners) = proc.listeners(port) else {
        return false;
    };
    if listeners.is_empty() {
        return false;
    }
    known.iter().any(|&member| {
        // Proven after it was looked into: then it was the same process meanwhile.
        if let Ok(Some(held)) = proc.sockets(member.pid)
            && is_still(proc, member)
        {
            listeners.retain(|inode| !held.contains(inode));
        }
        listeners.is_empty()
    })
}

fn owner(proc: &Procfs, port: Port, scan: &Result<Scan, Unproven>) -> Owner {
    let Ok(listeners) = proc.listeners(port) else {
        return Owner::Instance;
    };
    if listeners.is_empty() {
        return Owner::Nobody;
    }
    // Without members to compare with, everybody would look like a stranger.
    let Ok(scan) = scan else {
        return Owner::Instance;
    };
    let mut foreign = listeners;
    let mut is_certain = true;
    let proven = scan.proven.iter();
    // Unknown is not foreign.
    let doubtful = scan.doubtful.iter().map(|(process, _)| process);
    for pid in proven.chain(doubtful).map(|process| process.pid) {
        match proc.sockets(pid) {
            Ok(Some(held)) => foreign.retain(|inode| !held.contains(inode)),
            Ok(None) => {}
            Err(_) => is_certain = false,
        }
        if foreign.is_empty() {
            return Owner::Instance;
        }
    }
    match proc.holder(&foreign) {
        Some(pid) => Owner::Stranger(proc.stranger(Some(pid))),
        None if is_certain && still_listens(proc, port, &foreign) => {
            Owner::Stranger(proc.stranger(None))
        }
        None => Owner::Instance,
    }
}

/// A socket that nobody holds may have been closed while it was looked for.
fn still_listens(proc: &Procfs, port: Port, foreign: &BTreeSet<u64>) -> bool {
    let now = proc.listeners(port);
    now.is_ok_and(|listeners| !listeners.is_disjoint(foreign))
}

async fn connect(request: &ProbeRequest) -> Answer {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, request.port.get()));
    match in_time(request.timeout, tokio::net::TcpStream::connect(address)).await {
        Some(Ok(_)) => Answer::Taken(ProbeResult::Success),
        Some(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => Answer::Refused,
        Some(Err(error)) => Answer::Taken(ProbeResult::Failure {
            detail: error.to_string(),
        }),
        None => Answer::Taken(no_answer(request.timeout)),
    }
}

async fn in_time<T>(limit: Duration, effect: impl Future<Output = T>) -> Option<T> {
    tokio::time::timeout(limit, effect).await.ok()
}

fn no_answer(limit: Duration) -> ProbeResult {
    ProbeResult::Failure {
        detail: format!("no answer within {} s", limit.as_secs_f32()),
    }
}

async fn read_body(mut response: Response) -> reqwest::Result<Vec<u8>> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await? {
        body.extend_from_slice(&chunk);
        if body.len() >= BODY_LIMIT {
            body.truncate(BODY_LIMIT);
            break;
        }
    }
    Ok(body)
}

fn judge(status: StatusCode, path: &str, body: &[u8]) -> ProbeResult {
    if status.is_success() {
        return ProbeResult::Success;
    }
    let said = said(body);
    if status == StatusCode::SERVICE_UNAVAILABLE {
        return ProbeResult::Loading {
            detail: said.unwrap_or_else(|| "503 Service Unavailable".to_owned()),
        };
    }
    let said = said.map(|said| format!(": {said}")).unwrap_or_default();
    ProbeResult::Failure {
        detail: format!("GET {path} was answered with {status}{said}"),
    }
}

/// What a body says, in one short line: an API's error message, or else its first line.
fn said(body: &[u8]) -> Option<String> {
    let json: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    let message = json.as_ref().and_then(|json| {
        ["/error/message", "/error", "/message", "/detail"]
            .iter()
            .find_map(|place| json.pointer(place)?.as_str())
    });
    let text = String::from_utf8_lossy(body);
    // A page is no message.
    let line = message.or_else(|| text.lines().next().filter(|line| !line.contains('<')))?;
    let line: String = line
        .chars()
        .filter(|c| !c.is_control())
        .take(DETAIL_LIMIT)
        .collect();
    let line = line.trim();
    // It may repeat what it was asked with.
    (!line.is_empty()).then(|| crate::launch::redact::redact(line, &[]))
}

/// The errors below an error, the innermost last.
fn causes(error: &reqwest::Error) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
    let mut next = error.source();
    std::iter::from_fn(move || {
        let cause = next?;
        next = cause.source();
        Some(cause)
    })
}

fn io_kind(error: &reqwest::Error) -> Option<io::ErrorKind> {
    causes(error).find_map(|cause| cause.downcast_ref::<io::Error>().map(io::Error::kind))
}

fn is_refused(error: &reqwest::Error) -> bool {
    io_kind(error) == Some(io::ErrorKind::ConnectionRefused)
}

fn in_words(error: &reqwest::Error) -> String {
    match io_kind(error) {
        Some(io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe) => {
            "the connection was reset".to_owned()
        }
        _ if error.is_builder() => "the probe's path makes no address".to_owned(),
        // The innermost cause says it best: "invalid HTTP version parsed", "connection closed before message completed".
        _ => causes(error)
            .last()
            .map_or_else(|| error.to_string(), ToString::to_string),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::group::Doubt;

    #[test]
    fn an_answer_is_told_in_plain_words() {
        let judged = |status: u16, body: &str| {
            judge(
                StatusCode::from_u16(status).unwrap(),
                "/health",
                body.as_bytes(),
            )
        };
        assert_eq!(judged(200, "anything"), ProbeResult::Success);
        assert_eq!(judged(204, ""), ProbeResult::Success);
        let loading = r#"{"error":{"code":503,"message":"Loading model"}}"#;
        for (status, body, text) in [
            (503, loading, "Loading model"),
            (503, "", "503 Service Unavailable"),
            (503, "<html>", "503 Service Unavailable"),
            (
                404,
                r#"{"detail":"Not Found"}"#,
                "GET /health was answered with 404 Not Found: Not Found",
            ),
            (302, "", "GET /health was answered with 302 Found"),
            (
                500,
                "oh\u{7}\nno",
                "GET /health was answered with 500 Internal Server Error: oh",
            ),
        ] {
            assert_eq!(judged(status, body).to_string(), text);
        }
        assert!(matches!(judged(503, ""), ProbeResult::Loading { .. }));
        assert!(matches!(judged(302, ""), ProbeResult::Failure { .. }));
        assert_eq!(
            said("ä".repeat(1000).as_bytes()).unwrap().chars().count(),
            DETAIL_LIMIT
        );
    }

    /// A /proc with a listener on port 8080 of the given inodes, and processes that hold sockets.
    fn proc(inodes: &[u64], processes: &[(u32, &[u64])]) -> (tempfile::TempDir, Procfs) {
        let root = tempfile::tempdir().unwrap();
        let address = format!("{:08X}", u32::from_ne_bytes([127, 0, 0, 1]));
        let rows: Vec<String> = inodes
            .iter()
            .map(|inode| format!("0: {address}:1F90 00000000:0000 0A 0:0 00:0 0 0 0 {inode} 1 x"))
            .collect();
        std::fs::create_dir(root.path().join("net")).unwrap();
        std::fs::write(root.path().join("net/tcp"), rows.join("\n")).unwrap();
        for (pid, sockets) in processes {
            let fd = root.path().join(format!("{pid}/fd"));
            std::fs::create_dir_all(&fd).unwrap();
            for (n, socket) in sockets.iter().enumerate() {
                let target = format!("socket:[{socket}]");
                std::os::unix::fs::symlink(target, fd.join(n.to_string())).unwrap();
            }
        }
        let proc = Procfs::at(root.path());
        (root, proc)
    }

    fn members(pids: &[u32]) -> Scan {
        Scan {
            proven: pids.iter().copied().map(process).collect(),
            doubtful: Vec::new(),
        }
    }

    fn process(pid: u32) -> Identity {
        Identity {
            pid,
            start_ticks: 1,
        }
    }

    /// Whose port 8080 is.
    fn decided(proc: &Procfs, scan: &Result<Scan, Unproven>) -> String {
        match owner(proc, Port::try_from(8080).unwrap(), scan) {
            Owner::Instance => "instance".to_owned(),
            Owner::Nobody => "nobody".to_owned(),
            Owner::Stranger(stranger) => stranger.to_string(),
        }
    }

    #[test]
    fn whose_a_socket_is_follows_the_table_above() {
        let ours = Ok(members(&[10, 11]));
        let of = |inodes: &[u64], processes: &[(u32, &[u64])]| {
            decided(&proc(inodes, processes).1, &ours)
        };
        assert_eq!(of(&[], &[(10, &[])]), "nobody");
        assert_eq!(of(&[7], &[(10, &[5]), (11, &[7]), (20, &[8])]), "instance");
        // A member may have got it from one that is no member.
        assert_eq!(of(&[7], &[(11, &[7]), (9, &[7])]), "instance");
        assert_eq!(of(&[7], &[(10, &[5]), (11, &[]), (20, &[7])]), "pid 20");
        assert_eq!(of(&[7, 8], &[(10, &[7]), (11, &[]), (20, &[8])]), "pid 20");
        assert_eq!(
            of(&[7], &[(10, &[5]), (11, &[])]),
            "a process that cannot be found"
        );

        // A member that cannot be looked into: a file where its descriptors should be.
        let (root, closed) = proc(&[7], &[(10, &[5])]);
        std::fs::create_dir(root.path().join("11")).unwrap();
        std::fs::write(root.path().join("11/fd"), "").unwrap();
        assert_eq!(decided(&closed, &ours), "instance");
        // ... which is no excuse for somebody who is known.
        std::fs::create_dir_all(root.path().join("20/fd")).unwrap();
        std::os::unix::fs::symlink("socket:[7]", root.path().join("20/fd/3")).unwrap();
        assert_eq!(decided(&closed, &ours), "pid 20");

        let unproven = Err(Unproven {
            why: "no proof".to_owned(),
        });
        assert_eq!(decided(&closed, &unproven), "instance");
        assert_eq!(decided(&Procfs::at("/nowhere"), &ours), "instance");
    }

    #[test]
    fn who_may_be_a_member_is_no_stranger() {
        let (_root, other) = proc(&[7], &[(20, &[7])]);
        let mut scan = members(&[]);
        assert_eq!(decided(&other, &Ok(scan.clone())), "pid 20");
        scan.doubtful.push((process(20), Doubt::Session));
        assert_eq!(decided(&other, &Ok(scan)), "instance");
    }
}
