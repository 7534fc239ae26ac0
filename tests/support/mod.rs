//! What tests with real processes share: a state folder with a launcher, orders, and an end for everything started.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use evenkeel::launch::group;
use evenkeel::launch::process::ProcessLauncher;
use evenkeel::launch::{Launcher, PrepareError, Prepared};
use evenkeel::names::{InstanceName, LaunchId, Port};
use evenkeel::observed::Liveness;
use evenkeel::order::{LaunchOrder, Program};
use evenkeel::probe::port_holder;
use evenkeel::procfs::Procfs;
use evenkeel::record::{Handle, Launch, Lease, ProcessHandle};
use evenkeel::spec::{EnvValue, EnvVar};
use jiff::Timestamp;

/// How long anything may take that is expected to happen: far more than it takes, on a machine with other things to do.
const PATIENCE: Duration = Duration::from_secs(30);

/// The evenkeel binary.
pub const EVENKEEL: &str = env!("CARGO_BIN_EXE_evenkeel");

/// Waits until something is so; panics if it does not become so.
pub async fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "this did not happen: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits for an effect, not for ever.
pub async fn within<T>(what: &str, effect: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, effect)
        .await
        .unwrap_or_else(|_| panic!("this did not end: {what}"))
}

/// A state folder with its launcher. Ends what was launched when it goes, also when the test panics.
pub struct World {
    pub folder: tempfile::TempDir,
    pub launcher: ProcessLauncher,
    pub instance: InstanceName,
    started: Vec<Launch>,
}

impl World {
    pub fn new() -> Self {
        Self::with_gate(EVENKEEL)
    }

    pub fn with_gate(gate: impl Into<PathBuf>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("state");
        Self {
            launcher: ProcessLauncher::new(&state).with_gate_program(gate),
            folder,
            instance: "a-0".parse().unwrap(),
            started: Vec::new(),
        }
    }

    /// What a controller that was started anew would have: the same state folder, and nothing in memory.
    pub fn forget(&mut self) {
        self.launcher =
            ProcessLauncher::new(&self.folder.path().join("state")).with_gate_program(EVENKEEL);
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn order(&self, program: &str, arguments: &[&str]) -> LaunchOrder {
        LaunchOrder {
            instance: self.instance.clone(),
            launch_id: LaunchId::derive(uuid::Uuid::new_v4(), &self.instance),
            program: Program::Named(program.to_owned()),
            arguments: arguments.iter().map(|&text| text.to_owned()).collect(),
            environment: Vec::new(),
            working_dir: None,
            port: None,
            timeout: PATIENCE,
        }
    }

    pub fn shell(&self, script: &str) -> LaunchOrder {
        self.order("sh", &["-c", script])
    }

    /// Remembers to end it.
    pub fn launched(&mut self, id: LaunchId, handle: Option<Handle>) -> Launch {
        let launch = Launch {
            id,
            handle,
            lease: Lease::default(),
            reserved_at: Timestamp::now(),
            started_at: None,
            ready_at: None,
            stop: None,
        };
        self.started.push(launch.clone());
        launch
    }

    pub async fn prepare(
        &mut self,
        order: LaunchOrder,
    ) -> Result<(Launch, Prepared), PrepareError> {
        let id = order.launch_id;
        // Also if preparing fails: nothing of it may be left then.
        self.launched(id, None);
        let prepared = within("prepare", self.launcher.prepare(order)).await?;
        let launch = self.launched(id, Some(prepared.handle.clone()));
        Ok((launch, prepared))
    }

    pub async fn start(&mut self, order: LaunchOrder) -> Launch {
        let (launch, prepared) = self.prepare(order).await.unwrap();
        within("open", prepared.gate.open()).await.unwrap();
        launch
    }

    pub fn inspect(&self, launch: &Launch) -> Liveness {
        self.launcher.inspect(&self.instance, launch, &[], None)
    }

    pub fn log(&self) -> String {
        let path = self.launcher.logs().current(&self.instance);
        std::fs::read_to_string(path).unwrap_or_default()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let proc = Procfs::default();
        let deadline = Instant::now() + Duration::from_secs(5);
        for launch in &self.started {
            let handle = launch.handle.as_ref().map(|Handle::Process(handle)| handle);
            let mut known = BTreeSet::new();
            while let Ok(scan) = group::scan(&proc, launch.id, handle, &known) {
                if scan.proven.is_empty() || Instant::now() > deadline {
                    break;
                }
                for member in &scan.proven {
                    kill(member.pid);
                }
                known.extend(scan.proven);
                std::thread::sleep(Duration::from_millis(5));
            }
            if let Some(handle) = handle {
                reap(handle.pid);
            }
        }
    }
}

fn signed(pid: u32) -> nix::unistd::Pid {
    nix::unistd::Pid::from_raw(pid.try_into().unwrap())
}

pub fn kill(pid: u32) {
    let _ = nix::sys::signal::kill(signed(pid), nix::sys::signal::SIGKILL);
}

fn reap(pid: u32) {
    let _ = nix::sys::wait::waitpid(signed(pid), Some(nix::sys::wait::WaitPidFlag::WNOHANG));
}

/// A process that a test started by itself. Ended when it goes.
pub struct Stray(std::process::Child);

impl Stray {
    pub fn start(command: &mut std::process::Command) -> Self {
        Self(command.spawn().unwrap())
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Stray {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A port that nobody listens on.
pub async fn free_port() -> Port {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = Port::try_from(listener.local_addr().unwrap().port()).unwrap();
    drop(listener);
    released(port).await;
    port
}

/// Waits until a port whose listener was closed here is free: a process that another test is starting right now has a
/// copy of the listener until its exec.
pub async fn released(port: Port) {
    eventually("the port is free", || port_holder(port).is_none()).await;
}

pub fn pid(launch: &Launch) -> u32 {
    launch.handle.as_ref().and_then(Handle::pid).unwrap()
}

pub fn runs(pid: u32) -> bool {
    matches!(Procfs::default().stat(pid), Ok(Some(stat)) if !stat.is_gone())
}

/// Whether the pid is used at all, be it by a zombie.
pub fn exists(pid: u32) -> bool {
    Path::new("/proc").join(pid.to_string()).exists()
}

pub fn handle_of(pid: u32) -> ProcessHandle {
    let proc = Procfs::default();
    ProcessHandle {
        pid,
        start_ticks: proc.stat(pid).unwrap().unwrap().start_ticks,
        boot_id: proc.boot_id().unwrap(),
    }
}

pub fn read_pid(path: &Path) -> Option<u32> {
    std::fs::read_to_string(path).ok()?.trim().parse().ok()
}

pub fn variable(name: &str, value: &str) -> EnvVar {
    EnvVar {
        name: name.to_owned(),
        value: EnvValue::Literal(value.to_owned()),
    }
}

pub fn script(path: &Path, text: &str) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

pub fn failure(result: Result<(Launch, Prepared), PrepareError>) -> String {
    match result {
        Err(PrepareError::Failed(failure)) => failure.to_string(),
        Err(other) => panic!("{other:?}"),
        Ok((launch, _)) => panic!("it was prepared: {launch:?}"),
    }
}
