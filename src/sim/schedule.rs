//! Schedules: what befalls a world, drawn from a seed, and what it must come to afterwards.
//!
//! Invariant: a schedule is a function of its seed, so that every failure can be played again, in words.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use super::driver::{Sim, Weather};
use super::folder::{File, FileState, Folder, arbitrary_file};
use super::world::{Climate, exited};
use super::{Mutant, Random};
use crate::names::Port;
use crate::observed::{Device, DeviceKind, Inventory};
use crate::plan::{Intent, Settings};

/// The names that deployments have here: few, so that they come back.
const NAMES: [&str; 5] = ["a", "b", "c", "d", "e"];

/// Everything must be as it should this long after the last misfortune. The longest chain: an effect is lost (two minutes
/// until it is given up, and a resync), what it was for is stopped (grace, a slow kill, the proof), and what waits for
/// its devices starts, which can go wrong once more (start-up deadline, back-off).
const PATIENCE: Duration = Duration::from_secs(500);

/// What engines do that started in bad times is over.
const AFTERMATH: Duration = Duration::from_secs(40);

/// Long enough for two resyncs, in which nothing may change any more.
const CALM: Duration = Duration::from_secs(65);

/// What came of a schedule.
pub(super) struct Report {
    pub violations: Vec<String>,
    pub trace: Vec<String>,
    pub passes: usize,
    pub execs: usize,
}

/// Plays a schedule until its end or its first violation.
pub(super) fn play(seed: u64, mutant: Option<Mutant>, is_traced: bool) -> Report {
    let mut schedule = Schedule::new(seed, mutant, is_traced);
    schedule.play();
    schedule.sim.report()
}

impl Sim {
    pub fn report(self) -> Report {
        let judge = self.world.judge;
        Report {
            violations: judge.violations,
            trace: self.world.trace.unwrap_or_default(),
            passes: judge.passes,
            execs: judge.execs,
        }
    }

    /// Waits until all is as it should be, and sees that it stays so.
    pub fn settle(&mut self) {
        let end = self.world.now + PATIENCE;
        self.run(AFTERMATH);
        while let Some(what) = self.unsettled() {
            if self.world.now >= end {
                self.world.accuse(format!("it does not converge: {what}"));
            }
            if !self.world.judge.violations.is_empty() {
                return;
            }
            self.run(Duration::from_secs(5));
        }
        let before = self.activity();
        self.run(CALM);
        if let Some(what) = self.unsettled() {
            self.world
                .accuse(format!("it does not stay converged: {what}"));
        } else if self.activity() != before {
            self.world
                .accuse("it stops or starts something without need".to_owned());
        }
    }

    /// Grows with whatever is started or stopped.
    fn activity(&self) -> usize {
        let judge = &self.world.judge;
        judge.stopped.len() + judge.execs
    }
}

struct Schedule {
    random: Random,
    sim: Sim,
    devices: u64,
    /// They may come back as they were.
    removed: BTreeMap<String, File>,
}

impl Schedule {
    fn new(seed: u64, mutant: Option<Mutant>, is_traced: bool) -> Self {
        let mut random = Random::new(seed);
        let devices = random.pick(&[0, 1, 2, 2, 3, 4, 8]).unwrap_or(0);
        let unified = random.chance(15);
        let settings = Settings {
            max_launches: random.pick(&[8, 8, 1, 2, 0]).unwrap_or(8),
            ..Settings::default()
        };
        let inventory = Inventory {
            devices: (0..devices).map(|index| device(index, unified)).collect(),
        };
        let mut sim = Sim::new(Random::new(random.next()), inventory, settings);
        sim.world.mutant = mutant;
        sim.world.trace = is_traced.then(Vec::new);
        if random.chance(70) {
            sim.world.climate = Climate::Foul;
        }
        let mut percent = |most: u64| {
            let is_on = random.chance(50);
            if is_on { random.between(1, most) } else { 0 }
        };
        sim.weather = Weather {
            fails: percent(15),
            loses: percent(5),
            times_out: percent(5),
            is_late: percent(25),
            loses_wakes: percent(50),
        };
        Self {
            random,
            sim,
            devices,
            removed: BTreeMap::new(),
        }
    }

    fn play(&mut self) {
        for _ in 0..self.random.between(1, 4) {
            self.add();
        }
        self.sim.start();
        for _ in 0..self.random.between(30, 80) {
            let length = match self.random.below(10) {
                0 => self.random.millis(3000, 15_000),
                1..=3 => self.random.millis(200, 3000),
                _ => self.random.millis(0, 300),
            };
            self.sim.run(length);
            if !self.sim.world.judge.violations.is_empty() {
                return;
            }
            self.befall();
        }
        self.relent();
        self.sim.settle();
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Misfortune

    fn befall(&mut self) {
        match self.random.below(32) {
            0..=1 => self.change("restart", |file, revision, _| file.change_restart(revision)),
            2..=3 => {
                let devices = self.devices;
                self.change("lease", |file, revision, random| {
                    file.change_lease(devices, revision, random);
                });
            }
            4..=7 => self.change("live", |file, _, random| file.change_live(random)),
            8..=9 => self.add(),
            10..=11 => self.remove(),
            12..=13 => self.spoil(),
            14..=15 => self.mend(),
            16 => self.rename(),
            17 => self.sim.edit(&"its volume goes or comes", |folder, _| {
                folder.is_unavailable = !folder.is_unavailable;
            }),
            18 => {
                let now = self.sim.world.now;
                self.sim.edit(&"git begins or ends", |folder, _| {
                    folder.git_since = match folder.git_since {
                        None => Some(now),
                        Some(_) => None,
                    };
                });
            }
            19..=22 => {
                let world = &mut self.sim.world;
                world.dies_at_boundary = Some(world.boundaries + self.random.below(12));
            }
            23 => self.sim.crash(),
            24 if self.random.chance(30) => self.sim.reboot(),
            25..=26 => self.kill(),
            27 => self.visit(),
            28 => {
                let length = self.random.millis(500, 20_000);
                let world = &mut self.sim.world;
                world.disk.full_until = world.now + length;
                world.note(&"the disk is full");
            }
            29 => {
                let length = self.random.millis(500, 15_000);
                let world = &mut self.sim.world;
                world.doubt_until = world.now + length;
                world.note(&"/proc cannot be read");
            }
            _ => {}
        }
    }

    fn path(&mut self) -> Option<PathBuf> {
        let files = self.sim.world.folder.files.keys();
        let paths: Vec<_> = files.cloned().collect();
        self.random.pick(&paths)
    }

    fn add(&mut self) {
        let Some(name) = self.random.pick(&NAMES) else {
            return;
        };
        let present = self.sim.world.folder.files.values();
        if present
            .into_iter()
            .any(|file| file.deployment.name.as_str() == name)
        {
            return;
        }
        let (devices, is_undone) = (self.devices, self.random.chance(40));
        let removed = self.removed.remove(name).filter(|_| is_undone);
        self.sim
            .edit(&format!("{name} is added"), |folder, random| {
                let revision = folder.new_revision();
                let file =
                    removed.unwrap_or_else(|| arbitrary_file(name, devices, revision, random));
                folder
                    .files
                    .insert(file.deployment.source.file.clone(), file);
            });
    }

    fn change(&mut self, what: &str, change: impl FnOnce(&mut File, u32, &mut Random)) {
        let Some(path) = self.path() else {
            return;
        };
        let what = format!("{} changes ({what})", path.display());
        self.sim.edit(&what, |folder, random| {
            let revision = folder.new_revision();
            if let Some(file) = folder.files.get_mut(&path)
                && file.state == FileState::Good
            {
                change(file, revision, random);
            }
        });
    }

    fn remove(&mut self) {
        let Some(path) = self.path() else {
            return;
        };
        let removed = &mut self.removed;
        self.sim
            .edit(&format!("{} is removed", path.display()), |folder, _| {
                if let Some(file) = folder.files.remove(&path) {
                    removed.insert(file.deployment.name.to_string(), file);
                }
            });
    }

    fn spoil(&mut self) {
        let Some(path) = self.path() else {
            return;
        };
        let state = if self.random.chance(50) {
            FileState::Broken
        } else {
            FileState::Hidden
        };
        self.sim
            .edit(&format!("{} is {state:?}", path.display()), |folder, _| {
                if let Some(file) = folder.files.get_mut(&path) {
                    file.state = state;
                }
            });
    }

    fn mend(&mut self) {
        self.sim.edit(&"all is mended", |folder, _| mend(folder));
    }

    /// A file that cannot be read tells its name no more, so only those are renamed that can.
    fn rename(&mut self) {
        let Some(path) = self.path() else {
            return;
        };
        let new: PathBuf = format!("{}-{}", self.random.below(100), path.display()).into();
        self.sim
            .edit(&format!("{} is renamed", path.display()), |folder, _| {
                let is_known = |file: &File| file.state != FileState::Hidden;
                if folder.files.get(&path).is_some_and(is_known)
                    && let Some(mut file) = folder.files.remove(&path)
                {
                    file.deployment.source.file.clone_from(&new);
                    folder.files.insert(new, file);
                }
            });
    }

    fn kill(&mut self) {
        let processes = self.sim.world.processes.keys();
        let pids: Vec<u32> = processes.copied().collect();
        if let Some(pid) = self.random.pick(&pids) {
            self.sim.world.note(&format!("pid {pid} crashes"));
            self.sim.world.end(pid, Duration::ZERO, exited(139));
        }
    }

    fn visit(&mut self) {
        let port = u16::try_from(8900 + self.random.below(6)).unwrap_or(8900);
        if let Ok(port) = Port::try_from(port) {
            self.sim.world.stranger(port);
        }
    }

    // -----------------------------------------------------------------------------------------------------------------
    // Mercy

    fn relent(&mut self) {
        self.sim.world.note(&"FROM HERE ON ALL IS WELL");
        self.sim.weather = Weather::default();
        self.sim.world.clear_up();
        self.sim.world.dies_at_boundary = None;
        self.sim.edit(&"all is mended", |folder, _| {
            mend(folder);
            folder.is_unavailable = false;
            folder.git_since = None;
            for file in folder.files.values_mut() {
                file.deployment.spec.paused = false;
            }
        });
        if self.random.chance(8) {
            self.sim.world.note(&"everything is to stop");
            self.sim.settings.intent = Intent::StopAll;
            self.sim.world.judge.is_everything_to_stop = true;
        }
    }
}

fn mend(folder: &mut Folder) {
    for file in folder.files.values_mut() {
        file.state = FileState::Good;
    }
}

pub(super) fn device(index: u64, unified: bool) -> Device {
    Device {
        id: format!("GPU-{index}").parse().expect("an id"),
        kind: DeviceKind::Cuda,
        name: String::new(),
        memory_bytes: None,
        unified,
    }
}
