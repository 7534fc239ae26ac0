//! Child processes that are gone when their test is, and waits with a deadline.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// How long a wait goes on before its test fails. Nothing here takes a second on an idle machine; a loaded one with
/// two cores must not fail a test.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The pause between two looks of a wait.
const PAUSE: Duration = Duration::from_millis(5);

/// A child with its log in a file. Dropping it kills it.
pub struct Running {
    child: Child,
    log: PathBuf,
    _folder: tempfile::TempDir,
}

impl Running {
    /// Starts a command with its output and errors in one file.
    pub fn start(command: &mut Command) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let log = folder.path().join("log");
        let file = File::create(&log).expect("a log file");
        command.stdout(file.try_clone().expect("a second handle"));
        Self::spawn(command, file.into(), log, folder)
    }

    /// Starts a command with its errors going elsewhere. Its log here is empty.
    pub fn start_with_log(command: &mut Command, stderr: Stdio) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let log = folder.path().join("log");
        command.stdout(File::create(&log).expect("a log file"));
        Self::spawn(command, stderr, log, folder)
    }

    fn spawn(
        command: &mut Command,
        stderr: Stdio,
        log: PathBuf,
        folder: tempfile::TempDir,
    ) -> Self {
        let child = command
            .stdin(Stdio::null())
            .stderr(stderr)
            .spawn()
            .unwrap_or_else(|error| panic!("{command:?}: {error}"));
        Self {
            child,
            log,
            _folder: folder,
        }
    }

    pub fn pid(&self) -> Pid {
        as_pid(self.child.id())
    }

    /// The log so far.
    pub fn log(&self) -> String {
        let bytes = std::fs::read(&self.log).expect("the log is there");
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits for a text in the log and gives the rest of its line.
    pub fn wait_for_log(&self, text: &str) -> String {
        wait_for(
            || {
                let log = self.log();
                let rest = &log[log.find(text)? + text.len()..];
                Some(rest[..rest.find('\n')?].to_owned())
            },
            || format!("no {text:?} in the log:\n{}", self.log()),
        )
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).expect("the child is not waited for yet");
    }

    pub fn has_exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("our own child")
    }

    /// Waits for the end.
    pub fn wait(&mut self) -> ExitStatus {
        let log = self.log.clone();
        wait_for(
            || self.has_exited(),
            || {
                let log = std::fs::read_to_string(&log).unwrap_or_default();
                format!("it does not end. Its log:\n{log}")
            },
        )
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Fails only where it has ended already.
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}

/// A process that is not our child and that must not outlive its test.
pub struct Stray(pub Pid);

impl Stray {
    pub fn is_alive(&self) -> bool {
        is_alive(self.0)
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.0, signal).expect("the stray is alive");
    }

    pub fn wait_until_gone(&self) {
        wait_until(|| !self.is_alive(), &format!("pid {} lives on", self.0));
    }
}

impl Drop for Stray {
    fn drop(&mut self) {
        let _gone = kill(self.0, Signal::SIGKILL);
    }
}

/// Whether a process runs. A zombie does not.
pub fn is_alive(pid: Pid) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return false;
    };
    // The state follows the name, which is in brackets and may hold anything.
    let state = stat
        .rsplit_once(") ")
        .and_then(|(_, rest)| rest.chars().next());
    !matches!(state, None | Some('Z' | 'X'))
}

pub fn as_pid(pid: u32) -> Pid {
    Pid::from_raw(pid.try_into().expect("a pid"))
}

/// A port of 127.0.0.1 that nobody listens on.
///
/// It is below the range from which Linux serves port 0 and outgoing connections, so that neither takes it in the
/// meantime, and each call of one process gives another one. Two processes begin at different places.
pub fn free_port() -> u16 {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    const FIRST: u16 = 12_000;
    const COUNT: u32 = 20_000;

    // A prime, so that pids that follow each other begin far apart.
    let begin = std::process::id().wrapping_mul(7_919) % COUNT;
    (0..COUNT)
        .map(|_| {
            let step = (begin + CALLS.fetch_add(1, Relaxed)) % COUNT;
            FIRST + u16::try_from(step).expect("less than COUNT")
        })
        .find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok())
        .expect("a free port")
}

/// Looks until there is something, and fails the test with a message when there is nothing for too long.
pub fn wait_for<T>(mut look: impl FnMut() -> Option<T>, message: impl FnOnce() -> String) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "{}", message());
        sleep(PAUSE);
    }
}

/// Looks until it is so.
pub fn wait_until(mut look: impl FnMut() -> bool, message: &str) {
    wait_for(|| look().then_some(()), || message.to_owned());
}

/// Whether it holds at every look for this long. For what must *not* happen.
pub fn holds_for(time: Duration, mut look: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + time;
    while Instant::now() < deadline {
        if !look() {
            return false;
        }
        sleep(PAUSE);
    }
    look()
}

/// The binary under test.
pub fn evenkeel() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_evenkeel"))
}
