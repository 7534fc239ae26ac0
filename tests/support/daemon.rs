//! A whole evenkeel: a manifest folder, a state folder, and the controller that runs on them. The tests see what a user
//! sees, through files and verbs, and judge by what runs.
//!
//! Everything that a daemon starts inherits one variable from it. So what is left over is found in `/proc`, whatever the
//! records say, and ended: also what left its session and its leader, and also when the test panics.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

use evenkeel::record::{Handle, Launch, Record};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::marked::{self, Process};
use super::process::{as_pid, evenkeel, is_alive, wait_for, wait_until};
use super::verb::{Said, read, say};

/// How long everything may take to stop once a test is over: it says what is left before its caller gives up.
const DOWN_SECONDS: &str = "25";

/// Between two looks through a verb, which costs a process.
const PAUSE: Duration = Duration::from_millis(40);

/// A manifest folder, a state folder, and perhaps a running controller. Nothing of it is left when it goes.
pub struct Daemon {
    root: tempfile::TempDir,
    controller: Option<Child>,
    /// How many sentinels were put, so that each has another name.
    settles: AtomicU32,
}

impl Daemon {
    /// The folders, and no controller.
    pub fn new() -> Self {
        let root = tempfile::tempdir().expect("a temporary folder");
        fs::create_dir(root.path().join("manifests")).expect("a manifest folder");
        Self {
            root,
            controller: None,
            settles: AtomicU32::new(0),
        }
    }

    /// The folders and a running controller with these arguments.
    pub fn start(arguments: &[&str]) -> Self {
        let mut daemon = Self::new();
        daemon.run(arguments);
        daemon
    }

    /// Declares so many devices for the controllers that are started from now on.
    pub fn declare_devices(&self, count: usize) {
        let mut text = "devices:\n".to_owned();
        for index in 0..count {
            writeln!(text, "- {{id: GPU-{index}, kind: cuda}}").expect("a string takes any text");
        }
        fs::write(self.devices(), text).expect("an inventory");
    }

    // -- the controller

    /// Starts a controller, and waits until it keeps the state folder.
    pub fn run(&mut self, arguments: &[&str]) {
        let folder = self.folder();
        self.run_on(&folder, arguments);
    }

    /// Starts a controller on another folder.
    pub fn run_on(&mut self, folder: &Path, arguments: &[&str]) {
        assert!(self.controller.is_none(), "a controller runs already");
        let log = self.path("run.log");
        let lock = self.state().join("lock");
        let controller = self.spawn(folder, arguments, &log);
        let controller = self.controller.insert(controller);
        let pid = controller.id();
        wait_for(
            || {
                if let Some(status) = controller.try_wait().expect("our own child") {
                    panic!("the controller ended, {status}:\n{}", read(&log));
                }
                let text = fs::read_to_string(&lock).ok()?;
                let holder: Value = serde_json::from_str(&text).ok()?;
                (holder["pid"] == pid).then_some(())
            },
            || format!("the controller does not start:\n{}", read(&log)),
        );
    }

    /// Starts `evenkeel run` with its log in a file.
    pub fn spawn(&self, folder: &Path, arguments: &[&str], log: &Path) -> Child {
        let log = OpenOptions::new().create(true).append(true).open(log);
        let log = log.expect("a log file");
        let mut command = self.command(&["run"]);
        command.arg(folder).args(arguments);
        if self.devices().exists() {
            command.arg("--devices").arg(self.devices());
        }
        command
            .env(marked::MARK, self.root.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a second handle"))
            .stderr(log)
            .spawn()
            .expect("evenkeel is there")
    }

    pub fn pid(&self) -> Pid {
        as_pid(self.controller.as_ref().expect("a controller runs").id())
    }

    pub fn signal(&self, signal: Signal) {
        kill(self.pid(), signal).expect("the controller is not waited for yet");
    }

    /// Waits for the controller's end and gives its exit code; none after a signal that it did not handle.
    pub fn wait_for_exit(&mut self) -> Option<i32> {
        let mut controller = self.controller.take().expect("a controller runs");
        let status = wait_for(
            || controller.try_wait().expect("our own child"),
            || format!("the controller does not end:\n{}", self.log()),
        );
        status.code()
    }

    /// SIGTERM, and its end.
    pub fn stop(&mut self) {
        self.signal(Signal::SIGTERM);
        assert_eq!(self.wait_for_exit(), Some(0), "{}", self.log());
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        self.signal(Signal::SIGKILL);
        assert_eq!(self.wait_for_exit(), None);
    }

    /// What the controllers logged.
    pub fn log(&self) -> String {
        read(&self.path("run.log"))
    }

    // -- files

    pub fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    pub fn folder(&self) -> PathBuf {
        self.path("manifests")
    }

    pub fn state(&self) -> PathBuf {
        self.path("state")
    }

    fn devices(&self) -> PathBuf {
        self.path("devices.yaml")
    }

    /// Renames a finished file into the folder.
    pub fn put(&self, name: &str, text: &str) {
        let finished = self.path(&format!("finished-{name}"));
        fs::write(&finished, text).expect("a file beside the folder");
        fs::rename(&finished, self.folder().join(name)).expect("the folder is there");
    }

    pub fn remove(&self, name: &str) {
        fs::remove_file(self.folder().join(name)).expect("the file is there");
    }

    pub fn rename(&self, old: &str, new: &str) {
        fs::rename(self.folder().join(old), self.folder().join(new)).expect("the file is there");
    }

    /// What an instance printed since its last launch.
    pub fn engine_log(&self, instance: &str) -> String {
        read(&self.state().join(format!("logs/{instance}.log")))
    }

    /// What it printed before its last launch.
    pub fn previous_log(&self, instance: &str) -> String {
        read(&self.state().join(format!("logs/{instance}.1.log")))
    }

    /// The record of an instance.
    pub fn record(&self, instance: &str) -> Option<Record> {
        let path = self.state().join(format!("instances/{instance}.json"));
        let text = fs::read_to_string(path).ok()?;
        Some(serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}:\n{text}")))
    }

    /// All records.
    pub fn records(&self) -> BTreeMap<String, Record> {
        let names = fs::read_dir(self.state().join("instances")).into_iter();
        names
            .flatten()
            .flatten()
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                let name = name.strip_suffix(".json")?.to_owned();
                Some((name.clone(), self.record(&name)?))
            })
            .collect()
    }

    // -- verbs

    /// `evenkeel` with the state folder, and nothing of the environment that would set it up differently.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(evenkeel());
        for (name, _) in std::env::vars_os() {
            let is_ours = name.to_string_lossy().starts_with("EVENKEEL_");
            if is_ours || name == "NO_COLOR" {
                command.env_remove(name);
            }
        }
        command.args(arguments).arg("--state-dir").arg(self.state());
        command
    }

    /// Runs a verb to its end.
    pub fn verb(&self, arguments: &[&str]) -> Said {
        say(&mut self.command(arguments))
    }

    /// `get -o json`.
    pub fn get(&self) -> Value {
        let said = self.verb(&["get", "-o", "json"]);
        let text = said.done();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}:\n{text}"))
    }

    /// `events -o json`, the items.
    pub fn events(&self) -> Vec<Value> {
        let text = self.verb(&["events", "-o", "json"]).done();
        let mut list: Value = serde_json::from_str(&text).expect("JSON");
        match list["items"].take() {
            Value::Array(items) => items,
            other => panic!("{other}"),
        }
    }

    /// The messages of the events of this reason about a deployment or instance.
    pub fn told(&self, subject: &str, reason: &str) -> Vec<String> {
        let is_about = |event: &Value| {
            event["reason"] == reason
                && (event["instance"] == subject
                    || event["deployment"] == subject
                    || (subject == "-" && event["deployment"].is_null()))
        };
        let events = self.events().into_iter().filter(is_about);
        events
            .map(|event| event["message"].as_str().expect("a text").to_owned())
            .collect()
    }

    // -- waiting

    /// Waits until `get` shows it so, and gives what it shows.
    pub fn wait_for(&self, what: &str, mut is_so: impl FnMut(&Value) -> bool) -> Value {
        self.eventually(what, || {
            let seen = self.get();
            is_so(&seen).then_some(seen)
        })
    }

    /// Waits for something of this daemon; what is known of it is shown if it does not come.
    pub fn eventually<T>(&self, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        wait_for(
            || {
                let found = look();
                if found.is_none() {
                    std::thread::sleep(PAUSE);
                }
                found
            },
            || format!("this did not happen: {what}\n{}", self.story()),
        )
    }

    /// Waits until a deployment is ready, and gives its instances.
    ///
    /// A look by `get` may find it ready before its controller does; here the controller's word counts.
    pub fn ready(&self, deployment: &str) -> Vec<Value> {
        let seen = self.wait_for(&format!("{deployment} is ready"), |seen| {
            item(seen, deployment).is_some_and(|item| {
                item["status"]["state"] == "ready"
                    && instances(seen, deployment)
                        .iter()
                        .all(|instance| instance["readyAt"].is_string())
            })
        });
        instances(&seen, deployment)
    }

    /// Waits until a deployment is in a state, and gives its instances.
    pub fn in_state(&self, deployment: &str, state: &str) -> Vec<Value> {
        let seen = self.wait_for(&format!("{deployment} is {state}"), |seen| {
            item(seen, deployment).is_some_and(|item| item["status"]["state"] == state)
        });
        instances(&seen, deployment)
    }

    /// Waits until a deployment is ready, and gives the launch of its first instance.
    pub fn ready_launch(&self, deployment: &str) -> Launch {
        self.ready(deployment);
        self.launch(&format!("{deployment}-0"))
    }

    /// The launch of an instance, which has one.
    pub fn launch(&self, instance: &str) -> Launch {
        let record = self.record(instance);
        record
            .and_then(|record| record.launch)
            .unwrap_or_else(|| panic!("{instance} has no launch\n{}", self.story()))
    }

    /// Waits until a record is so.
    pub fn wait_for_record(
        &self,
        instance: &str,
        what: &str,
        is_so: impl Fn(&Record) -> bool,
    ) -> Record {
        self.eventually(&format!("{instance}: {what}"), || {
            self.record(instance).filter(|record| is_so(record))
        })
    }

    /// Waits until an instance runs in another launch than this, and gives that one.
    pub fn relaunched(&self, instance: &str, before: &Launch) -> Launch {
        let record = self.wait_for_record(instance, "it is launched again", |record| {
            let launch = record.launch.as_ref();
            launch.is_some_and(|launch| launch.id != before.id && launch.started_at.is_some())
        });
        record.launch.expect("just seen")
    }

    /// Waits until an instance has no record any more.
    pub fn wait_until_forgotten(&self, instance: &str) {
        self.eventually(&format!("{instance} has no record"), || {
            self.record(instance).is_none().then_some(())
        });
    }

    /// Waits until a person was told this of a deployment or instance.
    pub fn wait_for_event(&self, subject: &str, reason: &str) -> String {
        self.eventually(&format!("{reason} is told of {subject}"), || {
            self.told(subject, reason).pop()
        })
    }

    /// Waits until the controller has acted on everything that is in the folder now.
    ///
    /// A sentinel that gives no instance is put into it. Once that is accepted, the folder was listed as it is now; once a
    /// second one is accepted, the pass after that listing is over, since the next listing is begun after it.
    pub fn settle(&self) {
        for _ in 0..2 {
            let name = format!("sentinel-{}", self.settles.fetch_add(1, Relaxed));
            self.put(
                "sentinel.yaml",
                &manifest(&name, "engine: echo\nreplicas: 0\n"),
            );
            self.wait_for_event(&name, "Accepted");
        }
    }

    /// That a launch goes on: nothing asked it to end, and nothing else took its place.
    pub fn assert_untouched(&self, instance: &str, before: &Launch) {
        let launch = self.launch(instance);
        assert_eq!(
            (launch.id, &launch.handle, &launch.stop),
            (before.id, &before.handle, &None),
            "{}",
            self.story()
        );
        assert!(is_alive(pid_of(&launch)), "{}", self.story());
    }

    // -- what runs

    /// Everything that runs and was started by a controller of this daemon.
    pub fn processes(&self) -> Vec<Process> {
        let controller = self.controller.as_ref().map(Child::id);
        marked::processes(self.root.path())
            .into_iter()
            .filter(|process| Some(process.pid.as_raw().cast_unsigned()) != controller)
            .collect()
    }

    /// What runs of a launch.
    pub fn members(&self, launch: &Launch) -> Vec<Pid> {
        let id = launch.id.to_string();
        self.processes()
            .into_iter()
            .filter(|process| process.variable("EVENKEEL_LAUNCH_ID") == Some(&id))
            .map(|process| process.pid)
            .collect()
    }

    /// Waits until nothing runs.
    pub fn wait_until_nothing_runs(&self) {
        wait_until(
            || self.processes().is_empty(),
            &format!("something is left: {:?}", self.processes()),
        );
    }

    /// All that is known, for the message of a failed test.
    pub fn story(&self) -> String {
        let get = self.verb(&["get", "-o", "wide"]);
        let events = self.verb(&["events"]);
        format!("{get}\n{events}\nits log:\n{}", self.log())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut controller) = self.controller.take() {
            // Fails only where it has ended already.
            let _ended = controller.kill();
            let _ended = controller.wait();
        }
        if std::thread::panicking() {
            marked::end(self.root.path());
            return;
        }
        let said = if self.state().exists() {
            self.verb(&["down", "--timeout", DOWN_SECONDS])
        } else {
            Said {
                code: Some(0),
                stdout: String::new(),
                stderr: String::new(),
            }
        };
        let records = self.records();
        let left = self.processes();
        marked::end(self.root.path());
        assert_eq!(said.code, Some(0), "{said}\n{}", self.log());
        assert!(records.is_empty(), "records are left: {records:#?}");
        assert!(left.is_empty(), "processes are left: {left:#?}");
    }
}

// -- manifests

/// A manifest with these lines as its spec.
pub fn manifest(name: &str, spec: &str) -> String {
    let mut text = format!(
        "apiVersion: evenkeel.dev/v1alpha1\nkind: ModelDeployment\nmetadata:\n  name: {name}\nspec:\n"
    );
    for line in spec.lines() {
        writeln!(text, "  {line}").expect("a string takes any text");
    }
    text
}

/// A deployment of the echo engine on exactly this port, with these further lines in its spec.
pub fn echo(name: &str, port: u16, spec: &str) -> String {
    manifest(name, &format!("engine: echo\nport: {port}\n{spec}"))
}

// -- looking into what `get -o json` shows

/// The item of a deployment.
pub fn item<'a>(seen: &'a Value, deployment: &str) -> Option<&'a Value> {
    let items = seen["items"].as_array().expect("a list");
    items
        .iter()
        .find(|item| item["metadata"]["name"] == deployment)
}

/// The instances of a deployment.
pub fn instances(seen: &Value, deployment: &str) -> Vec<Value> {
    let item = item(seen, deployment).unwrap_or_else(|| panic!("no {deployment} in {seen:#}"));
    item["status"]["instances"]
        .as_array()
        .expect("a list")
        .clone()
}

/// The pid of an instance.
pub fn pid(instance: &Value) -> Pid {
    let pid = instance["pid"].as_u64().and_then(|pid| pid.try_into().ok());
    as_pid(pid.unwrap_or_else(|| panic!("no pid in {instance:#}")))
}

/// The pid of a launch.
pub fn pid_of(launch: &Launch) -> Pid {
    let pid = launch.handle.as_ref().and_then(Handle::pid);
    as_pid(pid.unwrap_or_else(|| panic!("no pid in {launch:#?}")))
}
