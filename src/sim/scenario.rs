//! Scenarios: short stories without chance, for a crash at each of their points.
//!
//! Invariant: a story told twice passes the same boundaries, so that each can be met once.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::Random;
use super::driver::Sim;
use super::folder::{File, plain_file};
use super::schedule::{Report, device};
use super::world::{Part, exited};
use crate::manifest::RestartPolicy;
use crate::names::{DeploymentName, Port};
use crate::observed::Inventory;
use crate::plan::{Intent, Settings};

/// A story, and how many engines are executed in it whatever happens to the controller.
pub(super) struct Scenario {
    pub name: &'static str,
    engines: RangeInclusive<usize>,
    tell: fn(&mut Sim),
}

/// What is done to the controller.
#[derive(Debug, Clone, Copy)]
pub(super) enum Blow {
    /// It dies at this boundary.
    Dies(u64),
    /// It dies at this boundary, and its successor at that one, counted on.
    DiesTwice(u64, u64),
    /// Its write of this number fails.
    CannotWrite(u64),
    /// It never hears how the effect of this number ended.
    HearsNothing(u64),
}

/// What there is to be met in a story.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    pub boundaries: u64,
    pub writes: u64,
    pub effects: u64,
}

/// Long enough for a launch, a grace period and what follows.
const CHAPTER: Duration = Duration::from_secs(15);

pub(super) const SCENARIOS: [Scenario; 11] = [
    Scenario {
        name: "a launch",
        engines: 1..=1,
        tell: |sim| {
            sim.put(plain_file("a", 1));
            sim.run(CHAPTER);
        },
    },
    Scenario {
        name: "a relaunch after a crash",
        engines: 2..=2,
        tell: |sim| {
            sim.put(plain_file("a", 1));
            sim.run(CHAPTER);
            sim.kill_leader("a", None);
            sim.run(CHAPTER);
        },
    },
    Scenario {
        name: "a relaunch after a crash that leaves a worker",
        engines: 2..=2,
        tell: |sim| {
            sim.put(plain_file("a", 1));
            sim.run(CHAPTER);
            sim.kill_leader("a", Some(2));
            sim.run(CHAPTER);
        },
    },
    Scenario {
        name: "a change of the manifest",
        engines: 2..=2,
        tell: |sim| {
            sim.put(plain_file("a", 1));
            sim.run(CHAPTER);
            sim.put(plain_file("a", 2));
            sim.run(CHAPTER);
        },
    },
    Scenario {
        name: "a change of the manifest during the launch",
        engines: 1..=2,
        tell: |sim| {
            sim.put(plain_file("a", 1));
            // Until its gate is there.
            while sim.world.processes.is_empty() {
                sim.run(Duration::from_millis(5));
            }
            sim.put(plain_file("a", 2));
            sim.run(CHAPTER);
        },
    },
    Scenario {
        name: "a removal",
        engines: 1..=1,
        tell: |sim| {
            sim.put(plain_file("a", 1));
            sim.run(CHAPTER);
            sim.edit(&"a is removed", |folder, _| folder.files.clear());
            sim.run(CHAPTER);
        },
    },
    Scenario {
        name: "a removal of what ignores SIGTERM",
        engines: 1..=1,
        tell: |sim| {
            sim.put(plain_file("a", 1));
            sim.run(CHAPTER);
            for process in sim.world.processes.values_mut() {
                process.manner.term_takes = None;
            }
            sim.edit(&"a is removed", |folder, _| folder.files.clear());
            sim.run(CHAPTER);
        },
    },
    Scenario {
        name: "a port that changes hands",
        engines: 2..=3,
        tell: |sim| {
            sim.put(plain_file("d", 1));
            sim.run(CHAPTER);
            let mut file = plain_file("b", 2);
            file.deployment.spec.port = Port::try_from(8900).ok();
            file.change_restart(3);
            let file_name = file.deployment.name.clone();
            sim.put(file);
            sim.run(CHAPTER);
            sim.kill_leader("d", None);
            // A successor that cannot read the folder does not know that the port is promised.
            let heir = file_name.instance(0);
            let mut patience = 0..100;
            while !sim.world.disk.records.contains_key(&heir) && patience.next().is_some() {
                sim.run(Duration::from_millis(1));
            }
            sim.world.folder.is_unavailable = true;
            sim.run(CHAPTER);
            sim.edit(&"it is mounted again", |folder, _| {
                folder.is_unavailable = false;
            });
            sim.run(CHAPTER);
        },
    },
    Scenario {
        name: "a launch of what is never launched again",
        engines: 1..=1,
        tell: |sim| {
            let mut file = plain_file("a", 1);
            file.deployment.spec.restart_policy = RestartPolicy::Never;
            sim.put(file);
            sim.run(CHAPTER);
        },
    },
    Scenario {
        name: "a start-up deadline that passes while no controller runs",
        engines: 1..=1,
        tell: |sim| {
            sim.put(plain_file("a", 1));
            while sim.world.judge.execs == 0 {
                sim.run(Duration::from_millis(5));
            }
            sim.crash();
            sim.stay_away(Duration::from_secs(20));
            sim.run(CHAPTER * 2);
        },
    },
    Scenario {
        name: "an end of everything",
        engines: 2..=2,
        tell: |sim| {
            sim.put(plain_file("a", 1));
            sim.put(plain_file("b", 2));
            sim.run(CHAPTER);
            sim.settings.intent = Intent::StopAll;
            sim.world.judge.is_everything_to_stop = true;
            sim.run(CHAPTER);
        },
    },
];

impl Scenario {
    /// Tells the story undisturbed.
    pub fn extent(&self) -> Extent {
        let mut sim = begin(false);
        (self.tell)(&mut sim);
        Extent {
            boundaries: sim.world.boundaries,
            writes: sim.world.disk.writes,
            effects: sim.effects,
        }
    }

    /// Tells the story with a blow, and sees what it comes to.
    pub fn play(&self, blow: Blow, is_traced: bool) -> Report {
        let mut sim = begin(is_traced);
        match blow {
            Blow::Dies(at) => sim.world.dies_at_boundary = Some(at),
            Blow::DiesTwice(at, more) => {
                sim.world.dies_at_boundary = Some(at);
                sim.world.dies_again_after = Some(more);
            }
            Blow::CannotWrite(at) => sim.world.disk.fails_at = Some(at),
            Blow::HearsNothing(at) => sim.loses_outcome_of = Some(at),
        }
        (self.tell)(&mut sim);
        sim.settle();
        let engines = sim.world.judge.execs;
        if !self.engines.contains(&engines) {
            let expected = &self.engines;
            sim.world
                .accuse(format!("{engines} engines were executed, not {expected:?}"));
        }
        sim.report()
    }
}

fn begin(is_traced: bool) -> Sim {
    let inventory = Inventory {
        devices: (0..2).map(|index| device(index, false)).collect(),
    };
    let mut sim = Sim::new(Random::new(7), inventory, Settings::default());
    sim.world.trace = is_traced.then(Vec::new);
    sim.start();
    sim
}

impl Sim {
    fn put(&mut self, file: File) {
        let name = file.deployment.name.clone();
        self.edit(&format_args!("{name} is written"), |folder, _| {
            folder
                .files
                .insert(file.deployment.source.file.clone(), file);
        });
    }

    /// The engine crashes; with workers given, so many of it live on.
    fn kill_leader(&mut self, name: &str, workers: Option<u64>) {
        let name: DeploymentName = name.parse().expect("a name");
        let leader = self.world.processes.iter().find(|(_, process)| {
            let owner = process.owner.as_ref();
            owner.is_some_and(|owner| owner.instance.deployment == name)
                && matches!(process.part, Part::Leader { .. })
        });
        let Some((pid, process)) = leader.map(|(pid, process)| (*pid, process)) else {
            return;
        };
        let owner = process.owner.clone();
        for _ in 0..workers.unwrap_or(0) {
            let manner = self.world.manner();
            self.world.spawn(Part::Worker, owner.clone(), manner);
        }
        if let Some(process) = self.world.processes.get_mut(&pid) {
            process.manner.workers_outlive_it = workers.is_some();
        }
        self.world.end(pid, Duration::ZERO, exited(139));
    }
}
