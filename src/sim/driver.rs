//! The driver: plays the controller's shell on the fake world, step by step as `controller/mod.rs` does it.
//!
//! What the shell awaits are flights here: things that come at a time. An effect is two of them, one when it takes place
//! and one when its outcome arrives, so that the controller can die between the two.
//!
//! Invariant: a controller that dies leaves nothing behind but the world.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::rc::Rc;
use std::time::Duration;

use jiff::Timestamp;
use uuid::Uuid;

use super::folder::{Folder, Scanner, Truth};
use super::world::{Ended, Gate, World};
use super::{Mutant, Random};
use crate::controller::step::Core;
use crate::desired::Desired;
use crate::failure::ExitStatus;
use crate::names::{InstanceName, LaunchId};
use crate::observed::{Inventory, Liveness, Outcome, ProbeResult};
use crate::order::ProbePurpose;
use crate::plan::{Action, Inputs, Settings};
use crate::record::Launch;
use crate::spec::RestartKey;

/// The shell's own numbers.
const RESYNC: Duration = Duration::from_secs(30);
const FIRST_SCAN_PATIENCE: Duration = Duration::from_secs(1);
const IDLE_FLOOR: Duration = Duration::from_millis(20);

/// The world, and the controller if one runs.
pub(super) struct Sim {
    pub world: World,
    pub shell: Option<Shell>,
    pub inventory: Rc<Inventory>,
    pub settings: Settings,
    pub weather: Weather,
    /// Lifecycle effects that took place so far, or failed to.
    pub effects: u64,
    /// The one whose end is never heard of.
    pub loses_outcome_of: Option<u64>,
    flights: BTreeMap<(Timestamp, u64), Flight>,
    departed: u64,
    restarts_at: Timestamp,
}

/// In percent of the effects, each.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Weather {
    pub fails: u64,
    pub loses: u64,
    pub times_out: u64,
    pub is_late: u64,
    pub loses_wakes: u64,
}

/// A controller: what it keeps in memory.
pub(super) struct Shell {
    pub core: Core,
    pub slots: BTreeMap<LaunchId, Slot>,
    pub desired: Desired,
    pub truth: Rc<Truth>,
    /// Away while a scan is under way.
    pub scanner: Option<Scanner>,
    pub is_scan_wanted: bool,
    pub look_again_at: Option<Timestamp>,
    pub next_resync: Timestamp,
    pub wakes_at: Timestamp,
}

#[derive(Default)]
pub(super) struct Slot {
    pub gate: Option<Gate>,
    pub seen: Option<ExitStatus>,
    pub watch: Watch,
}

#[derive(Default)]
pub(super) enum Watch {
    #[default]
    Off,
    On(InstanceName),
    /// It has something to tell, which may never arrive.
    Over,
}

/// What comes at a time.
#[expect(
    clippy::large_enum_variant,
    reason = "few at a time, and each is moved twice"
)]
pub(super) enum Flight {
    /// An effect takes place.
    Effect {
        instance: InstanceName,
        launch: Launch,
        action: Action,
        gate: Option<Gate>,
    },
    Outcome {
        instance: InstanceName,
        launch: LaunchId,
        outcome: Outcome,
        gate: Option<Gate>,
    },
    Probed {
        instance: InstanceName,
        launch: LaunchId,
        purpose: ProbePurpose,
        result: ProbeResult,
    },
    Ended {
        instance: InstanceName,
        launch: LaunchId,
        status: Option<ExitStatus>,
    },
    /// The folder is read.
    Scan(Scanner),
    Scanned(Box<(Scanner, Desired, Option<Timestamp>, Rc<Truth>)>),
    /// The folder changed.
    Marked,
}

impl Sim {
    pub fn new(random: Random, inventory: Inventory, settings: Settings) -> Self {
        let mut world = World::new(random);
        world.unified = inventory
            .devices
            .iter()
            .filter(|device| device.unified)
            .map(|device| device.id.clone())
            .collect();
        Self {
            restarts_at: world.now,
            world,
            shell: None,
            inventory: Rc::new(inventory),
            settings,
            weather: Weather::default(),
            effects: 0,
            loses_outcome_of: None,
            flights: BTreeMap::new(),
            departed: 0,
        }
    }

    pub fn take_off(&mut self, after: Duration, flight: Flight) {
        self.departed += 1;
        let at = self.world.now + after;
        self.flights.insert((at, self.departed), flight);
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Time

    /// Lets time pass, until something is done wrong.
    pub fn run(&mut self, length: Duration) {
        let end = self.world.now + length;
        while let Some(at) = self.next_at().filter(|at| *at <= end)
            && self.world.judge.violations.is_empty()
        {
            self.world.now = self.world.now.max(at);
            self.tick();
        }
        self.world.now = end;
    }

    fn next_at(&self) -> Option<Timestamp> {
        let shell = match &self.shell {
            Some(shell) => shell.wakes_at,
            None => self.restarts_at,
        };
        let flight = self.flights.keys().next().map(|(at, _)| *at);
        [Some(shell), flight, self.world.next_at()]
            .into_iter()
            .flatten()
            .min()
    }

    /// Everything that happens now, and the pass that it wakes.
    fn tick(&mut self) {
        let mut is_woken = false;
        for ended in self.world.happen() {
            self.tell_watch(&ended);
        }
        while let Some(entry) = self.flights.first_entry()
            && entry.key().0 <= self.world.now
        {
            let flight = entry.remove();
            is_woken |= self.arrive(flight);
            if self.world.controller_died {
                self.crash();
                return;
            }
        }
        match &self.shell {
            Some(_) if is_woken => self.wake(),
            Some(shell) if shell.wakes_at <= self.world.now => {
                self.look_at_doubtful();
                self.wake();
            }
            None if self.restarts_at <= self.world.now => self.start(),
            Some(_) | None => {}
        }
        if self.world.controller_died {
            self.crash();
        }
    }

    // -----------------------------------------------------------------------------------------------------------------
    // The controller's life

    /// A controller starts, as `run` does.
    pub fn start(&mut self) {
        if self.shell.is_some() {
            return;
        }
        self.world.note(&"the controller starts");
        self.world.judge_start();
        let mut records = self.world.disk.load();
        if self.world.is(Mutant::ForgetsRestartKeys) {
            for record in records.values_mut() {
                record.spec.args.clear();
                record.restart_key = RestartKey::of(&record.spec, None);
            }
        }
        let owners = records
            .iter()
            .map(|(name, record)| (name.deployment.clone(), record.source.file.clone()))
            .collect();
        let mut scanner = Scanner::new(owners);
        scanner.takes_unreadable_for_absent = self.world.is(Mutant::UnreadableIsAbsent);
        self.shell = Some(Shell {
            core: Core::recover(records, Vec::new()),
            slots: BTreeMap::new(),
            desired: Desired::default(),
            truth: Rc::default(),
            scanner: Some(scanner),
            is_scan_wanted: true,
            look_again_at: None,
            next_resync: self.world.now + RESYNC,
            wakes_at: self.world.now + FIRST_SCAN_PATIENCE,
        });
        self.inspect_all();
        self.start_scan();
    }

    /// The controller is gone from one moment to the next.
    pub fn crash(&mut self) {
        self.world.controller_died = false;
        let again = self.world.dies_again_after.take();
        self.world.dies_at_boundary = again.map(|more| self.world.boundaries + more);
        if self.shell.take().is_none() {
            return;
        }
        self.world.note(&"the controller is gone");
        self.flights.clear();
        self.world.close_pipes();
        let pause = if self.world.random.chance(70) {
            self.world.random.millis(0, 300)
        } else {
            self.world.random.millis(300, 20_000)
        };
        self.restarts_at = self.world.now + pause;
    }

    /// The next controller starts this much later.
    pub fn stay_away(&mut self, length: Duration) {
        self.restarts_at = self.world.now + length;
    }

    /// The machine goes down, and the controller with it.
    pub fn reboot(&mut self) {
        self.crash();
        self.world.reboot();
    }

    fn launches(&self) -> Vec<(InstanceName, Launch)> {
        let instances = self
            .shell
            .iter()
            .flat_map(|shell| &shell.core.observed().instances);
        instances
            .filter_map(|(name, instance)| Some((name.clone(), instance.record.launch.clone()?)))
            .collect()
    }

    pub fn launch(&self, name: &InstanceName) -> Option<Launch> {
        let instances = &self.shell.as_ref()?.core.observed().instances;
        instances.get(name)?.record.launch.clone()
    }

    fn inspect_all(&mut self) {
        for (name, launch) in self.launches() {
            self.inspect(&name, &launch);
        }
    }

    /// What could not be proven is looked at again at each deadline.
    fn look_at_doubtful(&mut self) {
        let instances = self
            .shell
            .iter()
            .flat_map(|shell| &shell.core.observed().instances);
        let doubtful: Vec<_> = instances
            .filter(|(_, instance)| matches!(instance.liveness, Liveness::Unknown { .. }))
            .filter_map(|(name, instance)| Some((name.clone(), instance.record.launch.clone()?)))
            .collect();
        for (name, launch) in doubtful {
            self.inspect(&name, &launch);
        }
    }

    /// Looks whether a launch runs, and watches it if anything of it does.
    pub fn inspect(&mut self, name: &InstanceName, launch: &Launch) {
        let Some(shell) = &mut self.shell else {
            return;
        };
        if launch.handle.is_none() {
            return;
        }
        let seen = shell.slots.get(&launch.id).and_then(|slot| slot.seen);
        let liveness = self.world.inspect(launch, seen);
        let is_watchable = matches!(liveness, Liveness::Alive | Liveness::LeaderGone { .. });
        shell.core.saw(name, launch.id, liveness);
        if is_watchable {
            let slot = shell.slots.entry(launch.id).or_default();
            if matches!(slot.watch, Watch::Off) {
                slot.watch = Watch::On(name.clone());
            }
        }
    }

    /// A watch ends, if there is one.
    fn tell_watch(&mut self, ended: &Ended) {
        let slots = self.shell.as_mut().map(|shell| &mut shell.slots);
        let Some(slot) = slots.and_then(|slots| slots.get_mut(&ended.launch)) else {
            return;
        };
        // A member's end is looked for only when the leader is gone.
        if ended.status.is_none() && ended.has_leader {
            return;
        }
        let Watch::On(instance) = &slot.watch else {
            return;
        };
        let instance = instance.clone();
        slot.watch = Watch::Over;
        if self.loses_wake(&format_args!("the end of {instance}")) {
            return;
        }
        let delay = self.delay();
        let launch = ended.launch;
        let status = ended.status;
        self.take_off(
            delay,
            Flight::Ended {
                instance,
                launch,
                status,
            },
        );
    }

    fn loses_wake(&mut self, what: &impl Display) -> bool {
        let is_lost = self.world.random.chance(self.weather.loses_wakes);
        if is_lost {
            self.world.note(&format_args!("a wake is lost: {what}"));
        }
        is_lost
    }

    /// Mostly a moment, so that things overtake each other.
    pub fn delay(&mut self) -> Duration {
        if self.world.random.chance(self.weather.is_late) {
            self.world.random.millis(200, 8000)
        } else {
            self.world.random.millis(0, 12) * 5
        }
    }

    // -----------------------------------------------------------------------------------------------------------------
    // The loop

    fn wake(&mut self) {
        let now = self.world.now;
        let never_resyncs = self.world.is(Mutant::NeverResyncs);
        let Some(shell) = &mut self.shell else {
            return;
        };
        if shell.look_again_at.is_some_and(|at| at <= now) {
            shell.is_scan_wanted = true;
        }
        if shell.next_resync <= now {
            shell.next_resync = now + RESYNC;
            if !never_resyncs {
                shell.is_scan_wanted = true;
                shell.core.doubt_again();
                self.inspect_all();
            }
        }
        self.start_scan();
        self.pass();
    }

    fn start_scan(&mut self) {
        let Some(shell) = &mut self.shell else {
            return;
        };
        if !shell.is_scan_wanted {
            return;
        }
        let Some(scanner) = shell.scanner.take() else {
            return;
        };
        shell.is_scan_wanted = false;
        shell.look_again_at = None;
        let delay = self.delay();
        self.take_off(delay, Flight::Scan(scanner));
    }

    fn pass(&mut self) {
        let now = self.world.now;
        let nonce = u128::from(self.world.random.next()) << 64;
        let nonce = Uuid::from_u128(nonce | u128::from(self.world.random.next()));
        let Some(shell) = &mut self.shell else {
            return;
        };
        self.world.judge.truth = shell.truth.clone();
        self.world.judge_pass();
        shell.core.catch_up(now);
        let inputs = Inputs {
            desired: &shell.desired,
            observed: shell.core.observed(),
            inventory: &self.inventory,
            settings: &self.settings,
            now,
            nonce,
        };
        self.world.judge_plan(inputs);
        let pass = shell.core.pass(
            &shell.desired,
            &self.inventory,
            &self.settings,
            now,
            nonce,
            &mut self.world,
        );
        if self.world.trace.is_some() {
            self.world.note(&format_args!("pass\n{}", pass.plan));
        }
        if self.world.controller_died {
            return;
        }
        for name in &pass.watches {
            if let Some(launch) = self.launch(name) {
                self.inspect(name, &launch);
            }
        }
        let is_busy = pass.is_busy;
        for (name, action) in pass.actions {
            if let Some(launch) = self.launch(&name) {
                self.begin(name, launch, action);
            }
            if self.world.controller_died {
                return;
            }
        }
        if is_busy {
            self.keep_only_held();
        }
        let sleeps_never = self.world.is(Mutant::NeverSleeps);
        let Some(shell) = &mut self.shell else {
            return;
        };
        let wakes_at = [Some(shell.next_resync), pass.deadline, shell.look_again_at]
            .into_iter()
            .flatten()
            .min();
        let floor = if is_busy { now } else { now + IDLE_FLOOR };
        shell.wakes_at = wakes_at.unwrap_or(shell.next_resync).max(floor);
        if sleeps_never {
            shell.wakes_at = now + Duration::from_millis(1);
        }
    }

    fn keep_only_held(&mut self) {
        let held: Vec<LaunchId> = self
            .launches()
            .iter()
            .map(|(_, launch)| launch.id)
            .collect();
        let Some(shell) = &mut self.shell else {
            return;
        };
        let dropped = shell.slots.extract_if(.., |id, _| !held.contains(id));
        for gate in dropped.filter_map(|(_, slot)| slot.gate) {
            self.world.call_off(gate);
        }
    }

    // -----------------------------------------------------------------------------------------------------------------
    // The folder

    /// The folder changes, and the watch may notice.
    pub fn edit(&mut self, what: &impl Display, edit: impl FnOnce(&mut Folder, &mut Random)) {
        self.world.note(&format_args!("folder: {what}"));
        edit(&mut self.world.folder, &mut self.world.random);
        if self.shell.is_some() && !self.loses_wake(&"of the folder") {
            let delay = self.delay();
            self.take_off(delay, Flight::Marked);
        }
    }
}
