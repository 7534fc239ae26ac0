//! The loop: the only place that holds state and awaits. One thread drives it.
//!
//! Wakes only mark that it is time to look again. Each pass rebuilds what is wished and known from caches, decides, commits
//! the records, starts effects, tells people, and sleeps until a wake or the plan's earliest deadline.
//!
//! Invariant: every wake may be lost. A resync looks at everything, so that the loop converges without any.
#![expect(
    clippy::disallowed_methods,
    reason = "a scan of the folder can block long; its task is owned by the loop's task set"
)]

mod options;

mod execute;

mod wake;

pub mod step;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use jiff::Timestamp;
use tokio::signal::unix::{Signal, SignalKind as UnixSignal, signal};
use tokio::sync::Notify;
use tracing::{debug, info, warn};
use uuid::Uuid;

use crate::clock::Clock;
use crate::desired::Desired;
use crate::devices::{self};
use crate::event::{Event, Reason};
use crate::failure::causes;
use crate::journal::Journal;
use crate::launch::Launcher;
use crate::launch::process::ProcessLauncher;
use crate::names::{InstanceName, LaunchId};
use crate::observed::{Inventory, Liveness};
use crate::plan::{Intent, Plan, Settings};
use crate::probe::Prober;
use crate::record::Launch;
use crate::source::{
    FolderChange, FolderChanges, FolderError, Scan, Scanner, Watch, WorldWritable, check_folder,
    known_device, watch,
};
use crate::store::{self, Controller as LockHolder, ControllerState, LockError, StateLock, Store};
pub use options::{OnExit, Options, RunError};

use execute::Executor;
use options::seconds;
use step::Core;
use wake::Wake;

/// A controller that ends leaves its lock within milliseconds; a start waits this long for it, so that a restart does not
/// trip over its predecessor.
const LOCK_PATIENCE: Duration = Duration::from_millis(500);

/// How long start-up waits for the first scan before it looks after what runs without knowing what is wished.
const FIRST_SCAN_PATIENCE: Duration = Duration::from_secs(1);

/// The shortest sleep after a pass that changed nothing and has a deadline in the past: a fault of the plan must not burn
/// a core.
const IDLE_FLOOR: Duration = Duration::from_millis(20);

/// What the folder's watcher marked since the last scan: its thread writes, the loop takes; neither holds it longer.
#[derive(Default)]
struct Marks {
    changes: Mutex<FolderChanges>,
    notify: Notify,
}

/// Where people are told: each pass's plan, for a progress line.
pub type Onlooker = Box<dyn FnMut(&Plan)>;

/// Runs a controller until it is told to end.
///
/// # Errors
/// Only before the first pass: a running controller goes on whatever happens.
pub async fn run(mut options: Options, intent: Intent, onlooker: Onlooker) -> Result<(), RunError> {
    let system = |what| move |source| RunError::System { what, source };
    if intent == Intent::Reconcile {
        check_desired_folder(&options)?;
        options.folder_device = known_folder_device(&options);
    }
    let inventory = devices::inventory(options.devices.as_deref())?;
    let clock = Clock::new();
    let introduction = serde_json::to_value(&options).unwrap_or_default();
    let holder = LockHolder::this(clock.now(), options.folder.clone(), introduction)
        .map_err(system("this process cannot be found in /proc"))?;
    let mut store = Store::open(&options.state)?;
    let lock = acquire_lock(&options, &holder).await?;
    let launcher = ProcessLauncher::new(&options.state);
    let prober = Prober::new(launcher.clone())?;
    let journal = Journal::open(&options.state)?;
    let loaded = store.load()?;
    let owners = loaded
        .records
        .iter()
        .map(|(name, record)| (name.deployment.clone(), record.source.file.clone()))
        .collect();
    let marks = Arc::new(Marks::default());
    let signals = Signals {
        terminate: signal(UnixSignal::terminate()).map_err(system("SIGTERM cannot be handled"))?,
        interrupt: signal(UnixSignal::interrupt()).map_err(system("SIGINT cannot be handled"))?,
        _child: signal(UnixSignal::child()).map_err(system("SIGCHLD cannot be handled"))?,
        hang_up: signal(UnixSignal::hangup()).map_err(system("SIGHUP cannot be handled"))?,
    };
    let mut controller = Controller {
        scanner: Some(Box::new(
            Scanner::new(options.folder.clone(), options.scan_options(), owners)
                .remembering(options.folder_device),
        )),
        settings: options.settings(intent),
        watch: None,
        marks,
        inventory,
        clock,
        store,
        journal,
        core: Core::recover(loaded.records, loaded.quarantined),
        executor: Executor::new(launcher, prober),
        desired: Desired::default(),
        look_again_at: None,
        is_scan_wanted: true,
        onlooker,
        options,
        _lock: lock,
    };
    for (reason, message) in loaded.events {
        controller.tell(&Event::general(controller.clock.now(), reason, message));
    }
    if intent == Intent::Reconcile {
        controller.arm_watch();
    }
    controller.adopt();
    controller.first_scan().await;
    controller.reconcile(signals).await;
    Ok(())
}

/// The device of the folder, as the controller before this one knew it where the folder looks like another.
fn known_folder_device(options: &Options) -> Option<u64> {
    let before: Option<Options> = match store::controller(&options.state) {
        Ok(ControllerState::NotRunning(Some(before)) | ControllerState::Running(before)) => {
            serde_json::from_value(before.settings).ok()
        }
        Ok(ControllerState::NotRunning(None)) | Err(_) => None,
    };
    let before = before.filter(|before| before.folder == options.folder);
    let records = store::read_only(&options.state)
        .map(|loaded| loaded.records)
        .unwrap_or_default();
    let files = records.values().map(|record| record.source.file.as_path());
    known_device(
        &options.folder,
        files,
        before.and_then(|before| before.folder_device),
    )
}

/// A folder that is not there is a mistake on the command line, unless there are records: then it may be a volume that is
/// not mounted yet, and what runs must be looked after whatever is wished (W4).
fn check_desired_folder(options: &Options) -> Result<(), FolderError> {
    let world_writable = if options.allow_world_writable {
        WorldWritable::Allow
    } else {
        WorldWritable::Refuse
    };
    match check_folder(&options.folder, world_writable) {
        Err(error @ (FolderError::Unreadable { .. } | FolderError::NotAFolder(_)))
            if store::read_only(&options.state).is_ok_and(|loaded| !loaded.records.is_empty()) =>
        {
            warn!(error = %chain(&error), "nothing is known of what is wished: what has a record is looked after");
            Ok(())
        }
        result => result,
    }
}

async fn acquire_lock(options: &Options, holder: &LockHolder) -> Result<StateLock, LockError> {
    let mut retry = tokio::time::interval(Duration::from_millis(25));
    let deadline = tokio::time::Instant::now() + LOCK_PATIENCE;
    loop {
        retry.tick().await;
        match StateLock::acquire(&options.state, holder) {
            Err(LockError::Held { .. }) if tokio::time::Instant::now() < deadline => {}
            answer => return answer,
        }
    }
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hang_up: Signal,
    /// Only that it is handled: where a parent left SIGCHLD ignored, exit codes would be lost.
    _child: Signal,
}

struct Controller {
    options: Options,
    settings: Settings,
    inventory: Inventory,
    clock: Clock,
    store: Store,
    journal: Journal,
    core: Core,
    executor: Executor,
    /// Away while a scan is under way.
    scanner: Option<Box<Scanner>>,
    watch: Option<Watch>,
    marks: Arc<Marks>,
    desired: Desired,
    /// When a scan that could not know yet will.
    look_again_at: Option<Timestamp>,
    is_scan_wanted: bool,
    onlooker: Onlooker,
    /// Held for life.
    _lock: StateLock,
}

/// Why the loop ends.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// Instances are left as they are.
    Leave,
    /// Everything is stopped.
    AllStopped,
}

impl Controller {
    /// Watches the folder. Without a watch everything still converges at each resync.
    fn arm_watch(&mut self) {
        if self.options.poll_seconds.is_some() {
            return;
        }
        let marks = self.marks.clone();
        let wake = move |change: FolderChange| {
            let mut changes = marks.changes.lock().unwrap_or_else(PoisonError::into_inner);
            changes.note(change);
            drop(changes);
            marks.notify.notify_one();
        };
        match watch(
            &self.options.folder,
            self.options.scan_options().depth,
            wake,
        ) {
            Ok(watch) => self.watch = Some(watch),
            Err(error) => {
                warn!(error = %chain(&error), "the folder is not watched: changes are seen at each resync");
            }
        }
    }

    /// Finds out what runs, before anything is decided.
    fn adopt(&mut self) {
        let now = self.clock.now();
        let launches: Vec<(InstanceName, Launch)> = self.launches().collect();
        for (name, launch) in launches {
            self.inspect(&name, &launch);
            let is_alive = self
                .core
                .observed()
                .instances
                .get(&name)
                .is_some_and(|instance| instance.liveness == Liveness::Alive);
            if let Some(pid) = launch
                .handle
                .as_ref()
                .and_then(crate::record::Handle::pid)
                .filter(|_| is_alive)
            {
                let event =
                    Event::of_instance(now, &name, Reason::Adopted, format!("pid {pid} goes on"));
                self.tell(&event.launch(launch.id));
            }
        }
    }

    fn launches(&self) -> impl Iterator<Item = (InstanceName, Launch)> + '_ {
        let instances = self.core.observed().instances.iter();
        instances
            .filter_map(|(name, instance)| Some((name.clone(), instance.record.launch.clone()?)))
    }

    fn launch(&self, name: &InstanceName) -> Option<Launch> {
        self.core
            .observed()
            .instances
            .get(name)?
            .record
            .launch
            .clone()
    }

    /// Looks whether a launch runs, and watches it if anything of it does.
    fn inspect(&mut self, name: &InstanceName, launch: &Launch) {
        if launch.handle.is_none() {
            return;
        }
        let Some(instance) = self.core.observed().instances.get(name) else {
            return;
        };
        let seen = self.executor.seen(launch.id);
        let liveness =
            self.executor
                .launcher
                .inspect(name, launch, &instance.record.spec.env, seen);
        let is_watchable = matches!(liveness, Liveness::Alive | Liveness::LeaderGone { .. });
        self.core.saw(name, launch.id, liveness);
        if is_watchable {
            self.executor.watch(name.clone(), launch);
        }
    }

    /// Without knowing what is wished there is little to decide, so start-up waits for it; a hung file system does not keep
    /// it from looking after what runs.
    async fn first_scan(&mut self) {
        self.start_scan();
        let scanned =
            tokio::time::timeout(FIRST_SCAN_PATIENCE, self.executor.tasks.join_next()).await;
        if let Ok(Some(ended)) = scanned {
            self.take_joined(ended);
        }
    }

    async fn reconcile(&mut self, mut signals: Signals) {
        let mut next_resync = self.clock.now() + self.resync();
        loop {
            self.start_scan();
            let (deadline, is_busy) = self.pass();
            if self.settings.intent == Intent::StopAll && self.core.observed().instances.is_empty()
            {
                self.end(&End::AllStopped);
                return;
            }
            let now = self.clock.now();
            let look_at = [Some(next_resync), deadline, self.look_again_at]
                .into_iter()
                .flatten()
                .min()
                .unwrap_or(next_resync);
            let mut sleep = Duration::try_from(look_at.duration_since(now)).unwrap_or_default();
            if !is_busy {
                sleep = sleep.max(IDLE_FLOOR);
            }
            let wake_at = tokio::time::Instant::now() + sleep;
            tokio::select! {
                biased;
                _ = signals.terminate.recv() => {
                    if self.asked_to_end(OnExit::Leave) { return; }
                }
                _ = signals.hang_up.recv() => {
                    if self.asked_to_end(OnExit::Leave) { return; }
                }
                _ = signals.interrupt.recv() => {
                    if self.asked_to_end(OnExit::Stop) { return; }
                }
                Some(ended) = self.executor.tasks.join_next() => {
                    self.take_joined(ended);
                }
                () = self.marks.notify.notified() => {
                    self.is_scan_wanted = true;
                }
                () = tokio::time::sleep_until(wake_at) => {
                    self.look_at_doubtful();
                }
            }
            // Many wakes, one pass.
            while let Some(ended) = self.executor.tasks.try_join_next() {
                self.take_joined(ended);
            }
            let now = self.clock.now();
            if self.look_again_at.is_some_and(|at| at <= now) {
                self.is_scan_wanted = true;
            }
            if next_resync <= now {
                self.look_at_everything();
                next_resync = now + self.resync();
            }
        }
    }

    /// The next resync: jittered, so that the controllers of a rack do not march in step.
    fn resync(&self) -> Duration {
        let period = seconds(
            self.options
                .poll_seconds
                .unwrap_or(self.options.resync_seconds),
        );
        let jitter = u32::from(Uuid::new_v4().as_bytes()[0]);
        period.saturating_mul(950 + jitter * 100 / 255) / 1000
    }

    /// A signal asks to end. Returns whether to end at once.
    fn asked_to_end(&mut self, by_default: OnExit) -> bool {
        let is_second = self.settings.intent == Intent::StopAll;
        match self.options.on_exit.unwrap_or(by_default) {
            OnExit::Stop if !is_second => {
                info!("stopping every instance; a second signal leaves at once");
                self.settings.intent = Intent::StopAll;
                false
            }
            OnExit::Stop | OnExit::Leave => {
                self.end(&End::Leave);
                true
            }
        }
    }

    fn end(&mut self, end: &End) {
        let running = self.launches().count();
        match end {
            End::Leave => info!(
                running,
                "ending; instances go on, and the next start adopts them"
            ),
            End::AllStopped => info!("ending; everything is stopped"),
        }
    }

    fn take_joined(&mut self, ended: Result<Wake, tokio::task::JoinError>) {
        match ended {
            Ok(wake) => self.take(wake),
            // A task of ours panicked: whose it was is not told, so everything is looked at.
            Err(error) => {
                warn!(%error, "an effect broke off");
                self.executor.doubt_watches();
                self.look_at_everything();
            }
        }
    }

    /// Takes in what a wake brought. Decides nothing.
    fn take(&mut self, wake: Wake) {
        let now = self.clock.now();
        match wake {
            Wake::Outcome {
                instance,
                launch_id,
                outcome,
                gate,
            } => {
                debug!(%instance, %launch_id, ?outcome, "an effect ended");
                if let Some(launch) = self
                    .launch(&instance)
                    .filter(|launch| launch.id == launch_id)
                {
                    self.inspect(&instance, &launch);
                }
                if self.core.outcome(&instance, launch_id, outcome)
                    && let Some(gate) = gate
                {
                    self.executor.keep_gate(launch_id, gate);
                }
            }
            Wake::Probed {
                instance,
                launch_id,
                purpose,
                result,
            } => {
                debug!(%instance, ?purpose, %result, "a probe ended");
                if let Some(event) = self.core.probed(&instance, launch_id, purpose, result, now) {
                    self.tell(&event);
                }
            }
            Wake::Ended {
                instance,
                launch_id,
                status,
            } => {
                debug!(%instance, %launch_id, ?status, "something of it ended");
                self.executor.watch_ended(launch_id, status);
                if let Some(launch) = self
                    .launch(&instance)
                    .filter(|launch| launch.id == launch_id)
                {
                    self.inspect(&instance, &launch);
                }
            }
            Wake::Scanned(None) => {
                warn!("a scan of the folder broke off");
                let owners = self.owners();
                let scanner = Scanner::new(
                    self.options.folder.clone(),
                    self.options.scan_options(),
                    owners,
                );
                self.scanner = Some(Box::new(scanner));
            }
            Wake::Scanned(Some(scanned)) => {
                let (scanner, scan) = *scanned;
                self.scanner = Some(Box::new(scanner));
                let Scan {
                    desired,
                    events,
                    look_again_at,
                } = scan;
                self.desired = desired;
                self.look_again_at = look_again_at;
                for event in &events {
                    self.tell(event);
                }
            }
        }
    }

    fn owners(&self) -> BTreeMap<crate::names::DeploymentName, PathBuf> {
        let instances = self.core.observed().instances.iter();
        instances
            .map(|(name, instance)| (name.deployment.clone(), instance.record.source.file.clone()))
            .collect()
    }

    /// Scans the folder if that is wanted, beside the loop: a hung file system holds up nothing.
    fn start_scan(&mut self) {
        if !self.is_scan_wanted || self.settings.intent == Intent::StopAll {
            return;
        }
        let Some(mut scanner) = self.scanner.take() else {
            return;
        };
        self.is_scan_wanted = false;
        self.look_again_at = None;
        if let Some(watch) = &mut self.watch
            && let Err(error) = watch.rearm()
        {
            debug!(error = %chain(&error), "not all of the folder is watched");
        }
        let settled: BTreeSet<PathBuf> = {
            let mut changes = self
                .marks
                .changes
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            changes.take_settled()
        };
        let now = self.clock.now();
        let scanning = tokio::task::spawn_blocking(move || {
            let scan = scanner.scan(now, &settled);
            Box::new((*scanner, scan))
        });
        self.executor
            .tasks
            .spawn_local(async move { Wake::Scanned(scanning.await.ok()) });
    }

    /// What could not be proven is looked at again whenever the plan's deadline is reached: no wake tells of it.
    fn look_at_doubtful(&mut self) {
        let instances = self.core.observed().instances.iter();
        let doubtful: Vec<_> = instances
            .filter(|(_, instance)| matches!(instance.liveness, Liveness::Unknown { .. }))
            .filter_map(|(name, instance)| Some((name.clone(), instance.record.launch.clone()?)))
            .collect();
        for (name, launch) in doubtful {
            self.inspect(&name, &launch);
        }
    }

    /// The safety net below every wake.
    fn look_at_everything(&mut self) {
        self.is_scan_wanted = true;
        self.core.doubt_again();
        let launches: Vec<_> = self.launches().collect();
        for (name, launch) in launches {
            self.inspect(&name, &launch);
            if let Err(error) = self.executor.launcher.cap_log(&name) {
                warn!(instance = %name, error = %chain(&error), "its log could not be kept within its size");
            }
        }
        if !self.core.observed().quarantined.is_empty() {
            match self.store.load() {
                Ok(loaded) => self.core.set_quarantined(loaded.quarantined),
                Err(error) => warn!(error = %chain(&error), "the quarantine cannot be read"),
            }
        }
    }

    /// One pass. Returns its deadline, and whether it changed anything.
    fn pass(&mut self) -> (Option<Timestamp>, bool) {
        let pass = self.core.pass(
            &self.desired,
            &self.inventory,
            &self.settings,
            self.clock.now(),
            Uuid::new_v4(),
            &mut self.store,
        );
        for event in &pass.events {
            self.tell(event);
        }
        for name in &pass.watches {
            if let Some(launch) = self.launch(name) {
                self.inspect(name, &launch);
            }
        }
        for name in &pass.forgotten {
            if let Err(error) = self.executor.launcher.remove(name) {
                warn!(instance = %name, error = %chain(&error), "its temporary folder could not be removed");
            }
        }
        let is_busy = pass.is_busy;
        for (name, action) in pass.actions {
            if let Some(launch) = self.launch(&name) {
                self.executor.start(name, &launch, action);
            }
        }
        if is_busy {
            let held: BTreeSet<LaunchId> = self.launches().map(|(_, launch)| launch.id).collect();
            self.executor.keep_only(|id| held.contains(&id));
        }
        (self.onlooker)(&pass.plan);
        (pass.deadline, is_busy)
    }

    /// Tells people: the journal for users, the log for operators.
    fn tell(&mut self, event: &Event) {
        let (subject, reason, message) = (event.subject(), event.reason, &event.message);
        if event.reason.is_warning() {
            warn!(target: "evenkeel::event", %subject, %reason, "{subject}: {message}");
        } else {
            info!(target: "evenkeel::event", %subject, %reason, "{subject}: {message}");
        }
        if let Err(error) = self.journal.append(event) {
            warn!(error = %chain(&error), "an event could not be kept");
        }
    }
}

/// The whole chain of an error in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = causes(error);
    std::iter::once(error.to_string())
        .chain(causes)
        .collect::<Vec<_>>()
        .join(": ")
}
