//! The launcher of processes of this host.
//!
//! Every signal and every wait goes through a pidfd that was opened first and proven after: the process that had the
//! right identity before and after the opening is the one the pidfd names, so no recycled pid can slip in between.
//!
//! What it keeps in memory is a help and never the truth: members that were proven once (see [`super::group`]) and exit
//! statuses that were collected before anybody asked. Both are lost with the controller.
//!
//! Invariant: nothing is signalled that is not proven a member at that moment, and no child stays a zombie once it was
//! inspected or watched.
#![expect(
    clippy::disallowed_methods,
    reason = "starts processes, signals them, waits for them; tests whether ports are free"
)]

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::Future;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use pidfd_util::{PidFd, PidFdExt};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::TcpSocket;

use super::assemble::{assemble, secrets};
use super::child::{Abandoned, collect, open};
use super::gate::{self, OWN_PROGRAM};
use super::group::{self, Identity, Leader, Scan};
use super::logs::{LogError, Logs, TAIL, tail};
use super::{Effect, Launcher, PrepareError, Prepared, Unproven};
use crate::failure::{ExitStatus, LaunchFailure};
use crate::names::{InstanceName, LaunchId, Port};
use crate::observed::{Liveness, SignalKind};
use crate::order::LaunchOrder;
use crate::procfs::Procfs;
use crate::record::{Handle, Launch, ProcessHandle};
use crate::spec::EnvVar;

/// How long it may take to find all members, and to signal them: some passes over /proc, of milliseconds each. This
/// covers a machine that is swapping; the next pass tries again.
const SCAN_TIMEOUT: Duration = Duration::from_secs(10);

/// How often members that fork while they are being killed are looked for again. Each pass kills all that there are, so
/// only a fork bomb needs more, and that gets the next plan's Kill.
const KILL_PASSES: usize = 8;

/// When a watch that has nothing to wait on, because nothing can be proven, asks to look again: no sooner than the
/// resync would, so that it cannot keep the loop busy.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

/// How many uncollected exit statuses are kept: more than instances end between two passes. The oldest is dropped, and
/// its status reads as unknown.
const ENDED_KEPT: usize = 1024;

/// Starts, inspects, signals and watches processes. Cheap to clone; lives on the loop's thread.
#[derive(Clone)]
pub struct ProcessLauncher {
    proc: Procfs,
    logs: Logs,
    gate_program: PathBuf,
    abandoned: Abandoned,
    memory: Rc<RefCell<Memory>>,
}

#[derive(Default)]
struct Memory {
    /// Members as they were last proven.
    members: BTreeMap<LaunchId, BTreeSet<Identity>>,
    /// How leaders ended that were collected while nobody watched.
    ended: VecDeque<(LaunchId, ExitStatus)>,
}

impl ProcessLauncher {
    /// A launcher whose logs and temporary folders lie in this state folder.
    pub fn new(state: &Path) -> Self {
        Self {
            proc: Procfs::default(),
            logs: Logs::new(state),
            gate_program: PathBuf::from(OWN_PROGRAM),
            abandoned: Abandoned::default(),
            memory: Rc::default(),
        }
    }

    /// With another binary for the gate: tests are not evenkeel themselves.
    #[doc(hidden)]
    pub fn with_gate_program(self, gate_program: impl Into<PathBuf>) -> Self {
        Self {
            gate_program: gate_program.into(),
            ..self
        }
    }

    /// The log files and temporary folders.
    pub fn logs(&self) -> &Logs {
        &self.logs
    }

    /// Puts an instance's log aside if it has grown too large. To be called at each resync.
    pub fn cap_log(&self, instance: &InstanceName) -> Result<(), LogError> {
        self.logs.cap(instance)
    }

    /// Removes what shall not outlive an instance's record: its temporary folder. Its logs stay.
    pub fn remove(&self, instance: &InstanceName) -> Result<(), LogError> {
        self.logs.remove(instance)
    }

    /// The members of a launch as they are now, and the processes of which it cannot be told.
    pub fn scan(&self, launch: &Launch) -> Effect<Result<Scan, Unproven>> {
        let this = self.clone();
        let id = launch.id;
        let handle = process_handle(launch).cloned();
        Box::pin(async move { this.scan_off_loop(id, handle).await })
    }

    /// The processes of a launch that are likely to hold its port: its leader, and the members that were proven last.
    /// Each is a member if it still has its identity.
    pub fn known_members(&self, launch: &Launch) -> Vec<Identity> {
        let leader = process_handle(launch)
            .filter(|handle| group::leader(&self.proc, handle) == Ok(Leader::Alive))
            .map(|handle| Identity {
                pid: handle.pid,
                start_ticks: handle.start_ticks,
            });
        let others = self.remembered(launch.id).into_iter();
        leader
            .into_iter()
            .chain(others.filter(|member| Some(*member) != leader))
            .collect()
    }

    async fn scan_off_loop(
        &self,
        id: LaunchId,
        handle: Option<ProcessHandle>,
    ) -> Result<Scan, Unproven> {
        let proc = self.proc.clone();
        let remembered = self.remembered(id);
        let scan = off_loop(move || group::scan(&proc, id, handle.as_ref(), &remembered));
        let scan = in_time(scan).await?;
        self.remember(id, &scan.proven);
        Ok(scan)
    }

    fn remembered(&self, id: LaunchId) -> BTreeSet<Identity> {
        let memory = self.memory.borrow();
        memory.members.get(&id).cloned().unwrap_or_default()
    }

    fn remember(&self, id: LaunchId, members: &[Identity]) {
        let mut memory = self.memory.borrow_mut();
        if members.is_empty() {
            memory.members.remove(&id);
        } else {
            memory.members.insert(id, members.iter().copied().collect());
        }
    }

    async fn prepare_untimed(self, order: LaunchOrder) -> Result<Prepared, PrepareError> {
        self.abandoned.sweep();
        if let Some(port) = order.port {
            let proc = self.proc.clone();
            off_loop(move || test_port(&proc, port)).await?;
        }
        let logs = self.logs.clone();
        let (launch_id, instance) = (order.launch_id, order.instance.clone());
        let assembled = off_loop(move || {
            let assembled = assemble(&order, &logs, std::env::vars_os()).map_err(failed)?;
            // Last, so that a launch that fails before leaves the logs where they are.
            logs.begin(&order.instance).map_err(failed)?;
            Ok::<_, PrepareError>(assembled)
        })
        .await?;
        let names = assembled.names.clone();
        let gate = gate::start(
            &self.gate_program,
            launch_id,
            &instance,
            &assembled.instruction,
            &self.abandoned,
            Box::new(move |error| names.explain(error)),
        )
        .await
        .map_err(|error| PrepareError::Failed(assembled.names.explain(&error)))?;
        let (pid, start_ticks) = gate.identity(&self.proc).map_err(failed)?;
        let boot_id = self
            .proc
            .boot_id()
            .map_err(|error| failed(format!("the boot id cannot be read: {error}")))?;
        Ok(Prepared {
            handle: Handle::Process(ProcessHandle {
                pid,
                start_ticks,
                boot_id,
            }),
            gate: Box::new(gate),
        })
    }

    /// Ends with the leader; `None` when it is gone already, or cannot be looked at.
    async fn watch_leader(&self, id: LaunchId, handle: &ProcessHandle) -> Option<ExitStatus> {
        if let Some(status) = self.take_ended(id) {
            return Some(status);
        }
        let pidfd = open(handle.pid).ok()?;
        let pidfd = match group::leader(&self.proc, handle) {
            Ok(Leader::Alive) => watchable(pidfd).ok()?,
            Ok(Leader::Zombie) => return Some(self.ending(id, handle, &pidfd)),
            Ok(Leader::Gone | Leader::OtherBoot) | Err(_) => return None,
        };
        // An adopted engine has its members already: now they can be proven, later perhaps not.
        let _ = self.scan_off_loop(id, Some(handle.clone())).await;
        pidfd.readable().await.ok()?.retain_ready();
        // Whoever's child it is may collect it at any moment, so the first look is for the status, and the second, while
        // a zombie still proves the session, for the members.
        let glimpsed = self.glimpse(handle);
        let _ = self.scan_off_loop(id, Some(handle.clone())).await;
        Some(match self.ending(id, handle, pidfd.get_ref()) {
            ExitStatus::UNKNOWN => glimpsed.unwrap_or(ExitStatus::UNKNOWN),
            known => known,
        })
    }

    /// How a leader ended that has ended. Collects it, if it is a child of ours.
    fn ending(&self, id: LaunchId, handle: &ProcessHandle, pidfd: &PidFd) -> ExitStatus {
        // Before it is collected, because then there is nothing left to see.
        let glimpsed = self.glimpse(handle);
        collect(pidfd)
            .map(exit_status)
            .or_else(|| self.take_ended(id))
            .or(glimpsed)
            .unwrap_or(ExitStatus::UNKNOWN)
    }

    /// What the kernel shows of how a zombie ended. For processes that are not our children this is all there is, and
    /// only until their parent collects them.
    fn glimpse(&self, handle: &ProcessHandle) -> Option<ExitStatus> {
        let stat = self.proc.stat(handle.pid).ok()??;
        let is_ours = stat.start_ticks == handle.start_ticks && stat.is_gone();
        (is_ours && self.proc.may_see_exit_code(handle.pid))
            .then(|| exit_status(std::process::ExitStatus::from_raw(stat.exit_code)))
    }

    /// Collects a leader that has ended, so that no zombie stays, and keeps its status for the watch.
    fn reap(&self, id: LaunchId, handle: &ProcessHandle) -> ExitStatus {
        let known = self.take_ended(id);
        let found = open(handle.pid)
            .ok()
            .filter(|_| matches!(group::leader(&self.proc, handle), Ok(Leader::Zombie)))
            .map(|pidfd| self.ending(id, handle, &pidfd));
        let status = known.or(found).unwrap_or(ExitStatus::UNKNOWN);
        if status != ExitStatus::UNKNOWN {
            let mut memory = self.memory.borrow_mut();
            memory.ended.push_back((id, status));
            while memory.ended.len() > ENDED_KEPT {
                memory.ended.pop_front();
            }
        }
        status
    }

    fn take_ended(&self, id: LaunchId) -> Option<ExitStatus> {
        let mut memory = self.memory.borrow_mut();
        let at = memory.ended.iter().position(|(ended, _)| *ended == id)?;
        memory.ended.remove(at).map(|(_, status)| status)
    }

    /// Ends when a member ends, at once if there is none.
    async fn watch_members(&self, id: LaunchId, handle: ProcessHandle) {
        let Ok(scan) = self.scan_off_loop(id, Some(handle)).await else {
            return tokio::time::sleep(LOOK_AGAIN).await;
        };
        let mut watched = Vec::with_capacity(scan.proven.len());
        for member in scan.proven {
            let pidfd = open(member.pid);
            match pidfd.and_then(watchable) {
                Ok(pidfd) if group::is_still(&self.proc, member) => watched.push(pidfd),
                // It ended between the scan and here.
                Ok(_) => return,
                Err(error) if is_gone(&error) => return,
                // No descriptors left, say.
                Err(_) => return tokio::time::sleep(LOOK_AGAIN).await,
            }
        }
        if watched.is_empty() {
            if !scan.doubtful.is_empty() {
                tokio::time::sleep(LOOK_AGAIN).await;
            }
            return;
        }
        std::future::poll_fn(|context| {
            let ended = watched
                .iter()
                .any(|pidfd| pidfd.poll_read_ready(context).is_ready());
            if ended {
                std::task::Poll::Ready(())
            } else {
                std::task::Poll::Pending
            }
        })
        .await;
    }

    fn log_tail(&self, instance: &InstanceName, env: &[EnvVar]) -> String {
        match secrets(env) {
            Ok(secrets) => tail(&self.logs.current(instance), TAIL, &secrets)
                .unwrap_or_else(|error| format!("(the log cannot be read: {error})")),
            // What cannot be read cannot be taken out.
            Err(error) => format!("(the log is not shown, for it may hold a secret: {error})"),
        }
    }
}

impl Launcher for ProcessLauncher {
    fn prepare(&self, order: LaunchOrder) -> Effect<Result<Prepared, PrepareError>> {
        let this = self.clone();
        Box::pin(async move {
            let limit = order.timeout;
            // Calls the gate off, if it has come to that.
            tokio::time::timeout(limit, this.prepare_untimed(order))
                .await
                .unwrap_or_else(|_| {
                    Err(failed(format!(
                        "the launch was not prepared within {} s",
                        limit.as_secs_f32()
                    )))
                })
        })
    }

    fn find(&self, id: LaunchId) -> Effect<Result<Option<Handle>, Unproven>> {
        let proc = self.proc.clone();
        Box::pin(async move {
            let found = off_loop(move || group::find(&proc, id));
            let found = in_time(found).await?;
            Ok(found.map(Handle::Process))
        })
    }

    fn inspect(
        &self,
        instance: &InstanceName,
        launch: &Launch,
        env: &[EnvVar],
        seen: Option<ExitStatus>,
    ) -> Liveness {
        self.abandoned.sweep();
        let unknown = |Unproven { why }| Liveness::Unknown { why };
        let Some(handle) = process_handle(launch) else {
            return Liveness::Unknown {
                why: "it is not known yet which process it is".to_owned(),
            };
        };
        match group::leader(&self.proc, handle) {
            Ok(Leader::Alive) => return Liveness::Alive,
            Ok(Leader::Zombie | Leader::Gone | Leader::OtherBoot) => {}
            Err(unproven) => return unknown(unproven),
        }
        // Before the leader is collected: as a zombie it still proves whose the session is.
        let scan = group::scan(
            &self.proc,
            launch.id,
            Some(handle),
            &self.remembered(launch.id),
        );
        let scan = match scan {
            Ok(scan) => scan,
            Err(unproven) => return unknown(unproven),
        };
        self.remember(launch.id, &scan.proven);
        let reaped = self.reap(launch.id, handle);
        let status = seen
            .filter(|status| *status != ExitStatus::UNKNOWN)
            .unwrap_or(reaped);
        match scan.certain() {
            Err(unproven) => unknown(unproven),
            Ok(members) if members.is_empty() => Liveness::Gone {
                status,
                log_tail: self.log_tail(instance, env),
            },
            Ok(members) => Liveness::LeaderGone {
                members: members.len(),
                status,
            },
        }
    }

    /// Does not end for a launch without a handle. For one of which nothing is left it ends at once: do not watch what
    /// was inspected and is gone.
    fn watch(&self, launch: &Launch) -> Effect<Option<ExitStatus>> {
        let this = self.clone();
        let id = launch.id;
        let handle = process_handle(launch).cloned();
        Box::pin(async move {
            let Some(handle) = handle else {
                return std::future::pending().await;
            };
            let status = this.watch_leader(id, &handle).await;
            if status.is_none() {
                this.watch_members(id, handle).await;
            }
            status
        })
    }

    fn signal(&self, launch: &Launch, signal: SignalKind) -> Effect<Result<usize, Unproven>> {
        let this = self.clone();
        let id = launch.id;
        let handle = process_handle(launch).cloned();
        Box::pin(async move {
            let proc = this.proc.clone();
            let remembered = this.remembered(id);
            let sent = off_loop(move || signal_all(&proc, id, handle.as_ref(), remembered, signal));
            let sent = in_time(sent).await?;
            // Those that were just killed prove the session for those that are left.
            this.remember(id, &Vec::from_iter(sent.known));
            Ok(sent.members)
        })
    }
}

struct Sent {
    members: usize,
    known: BTreeSet<Identity>,
}

fn signal_all(
    proc: &Procfs,
    id: LaunchId,
    handle: Option<&ProcessHandle>,
    mut known: BTreeSet<Identity>,
    signal: SignalKind,
) -> Result<Sent, Unproven> {
    let (number, passes) = match signal {
        SignalKind::Term => (nix::sys::signal::SIGTERM as i32, 1),
        SignalKind::Kill => (nix::sys::signal::SIGKILL as i32, KILL_PASSES),
    };
    let mut reached = BTreeSet::new();
    let mut refused = Vec::new();
    for pass in 0..passes {
        let scan = group::scan(proc, id, handle, &known)?;
        if pass == 0 && scan.proven.is_empty() {
            // Nobody is left, or nobody is proven.
            scan.certain()?;
            break;
        }
        known.extend(&scan.proven);
        let mut news = false;
        for member in scan.proven {
            if reached.contains(&member) {
                continue;
            }
            news = true;
            match signal_one(proc, member, number) {
                Ok(true) => {
                    reached.insert(member);
                }
                Ok(false) => {}
                Err(error) => refused.push(format!("pid {}: {error}", member.pid)),
            }
        }
        if !news {
            break;
        }
    }
    if reached.is_empty() && !refused.is_empty() {
        return Err(Unproven {
            why: format!("the signal was refused: {}", refused.join(", ")),
        });
    }
    Ok(Sent {
        members: reached.len(),
        known,
    })
}

/// `false`: it has ended.
fn signal_one(proc: &Procfs, member: Identity, signal: i32) -> std::io::Result<bool> {
    let pidfd = match open(member.pid) {
        Ok(pidfd) => pidfd,
        Err(error) if is_gone(&error) => return Ok(false),
        Err(error) => return Err(error),
    };
    // It was a member before the pidfd was opened. If the same process still has the pid, the pidfd is its own.
    if !group::is_still(proc, member) {
        return Ok(false);
    }
    match pidfd.send_signal(signal) {
        Ok(()) => Ok(true),
        Err(error) if is_gone(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

fn is_gone(error: &std::io::Error) -> bool {
    error.raw_os_error() == Some(nix::errno::Errno::ESRCH as i32)
}

/// A bind test at every address that an engine may choose (L8). Binds and does not listen, so that no client of the
/// engine before can connect to the test.
fn test_port(proc: &Procfs, port: Port) -> Result<(), PrepareError> {
    let addresses: [IpAddr; 3] = [
        Ipv4Addr::LOCALHOST.into(),
        Ipv4Addr::UNSPECIFIED.into(),
        Ipv6Addr::UNSPECIFIED.into(),
    ];
    for address in addresses {
        let bound = || {
            let socket = if address.is_ipv4() {
                TcpSocket::new_v4()?
            } else {
                TcpSocket::new_v6()?
            };
            // As servers do: connections that are still being closed are in nobody's way.
            socket.set_reuseaddr(true)?;
            socket.bind(SocketAddr::new(address, port.get()))
        };
        // Anything else (no IPv6 here, a port that only root may use) does not say that somebody has it.
        if matches!(bound(), Err(error) if error.kind() == std::io::ErrorKind::AddrInUse) {
            let stranger = proc.port_holder(port);
            return Err(PrepareError::PortTaken {
                port,
                stranger: stranger.unwrap_or_else(|| proc.stranger(None)),
            });
        }
    }
    Ok(())
}

/// A pidfd becomes readable when its process ends, a child or not, and stays so.
fn watchable(pidfd: PidFd) -> std::io::Result<AsyncFd<PidFd>> {
    #[expect(
        deprecated,
        reason = "its successor is an `unsafe fn`, for values that may give their descriptor away while they are \
                  registered; a PidFd owns its own for as long as it lives"
    )]
    AsyncFd::with_interest(pidfd, Interest::READABLE)
}

fn process_handle(launch: &Launch) -> Option<&ProcessHandle> {
    launch.handle.as_ref().map(|handle| match handle {
        Handle::Process(process) => process,
    })
}

fn exit_status(status: std::process::ExitStatus) -> ExitStatus {
    ExitStatus {
        code: status.code(),
        signal: status.signal(),
        // The cgroup would know.
        oom: None,
    }
}

fn failed(error: impl std::fmt::Display) -> PrepareError {
    PrepareError::Failed(LaunchFailure::SpawnFailed {
        detail: error.to_string(),
    })
}

async fn in_time<T>(effect: impl Future<Output = Result<T, Unproven>>) -> Result<T, Unproven> {
    tokio::time::timeout(SCAN_TIMEOUT, effect)
        .await
        .unwrap_or_else(|_| {
            Err(Unproven {
                why: format!(
                    "looking for its processes took longer than {} s",
                    SCAN_TIMEOUT.as_secs()
                ),
            })
        })
}

/// Runs what may block (passes over /proc, files on a slow file system) off the loop's thread.
pub(crate) async fn off_loop<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match tokio::task::spawn_blocking(work).await {
        Ok(value) => value,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // The runtime is shutting down, and with it whoever awaits this.
            Err(_) => std::future::pending().await,
        },
    }
}
