//! Processes that carry the mark of a daemon of the tests: found in `/proc`, whatever the records say.

use std::fmt;
use std::fs;
use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::process::is_alive;

/// The variable that marks everything a daemon starts with its folder. Not one of evenkeel's own, which it does not hand
/// on.
pub const MARK: &str = "KEEL_TEST_WORLD";

/// A process that a daemon started.
pub struct Process {
    pub pid: Pid,
    environment: Vec<String>,
}

impl Process {
    pub fn variable(&self, name: &str) -> Option<&str> {
        let mut values = self.environment.iter();
        values.find_map(|entry| entry.strip_prefix(name)?.strip_prefix('='))
    }
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let instance = self.variable("EVENKEEL_INSTANCE").unwrap_or("no instance");
        write!(f, "pid {} of {instance}", self.pid)
    }
}

/// Everything alive that carries the mark of this folder.
pub fn processes(root: &Path) -> Vec<Process> {
    let mark = format!("{MARK}={}", root.display());
    let entries = fs::read_dir("/proc").expect("/proc is there");
    entries
        .filter_map(|entry| {
            let pid: i32 = entry.ok()?.file_name().to_str()?.parse().ok()?;
            let bytes = fs::read(format!("/proc/{pid}/environ")).ok()?;
            let environment: Vec<String> = bytes
                .split(|byte| *byte == 0)
                .map(|entry| String::from_utf8_lossy(entry).into_owned())
                .collect();
            let pid = Pid::from_raw(pid);
            (environment.contains(&mark) && is_alive(pid)).then_some(Process { pid, environment })
        })
        .collect()
}

/// Kills everything that carries the mark, and what that starts meanwhile.
pub fn end(root: &Path) {
    for _ in 0..100 {
        let left = processes(root);
        if left.is_empty() {
            return;
        }
        for process in left {
            let _gone = kill(process.pid, Signal::SIGKILL);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
