//! The simulator: a fake world with a virtual clock, in which the daemon's own [`Core`](crate::controller::step::Core)
//! lives through a schedule of misfortunes.
//!
//! The world is the truth: processes, a disk, a folder. The driver plays the controller's shell on it:
//! effects take place after a random delay, in any order, fail, are lost, and the controller dies between any two steps.
//! The judge looks at the world and not at the records, so that a record that lies is found out.
//!
//! A schedule is a function of its seed. `EVENKEEL_SIM_SEED=n cargo test --lib sim` plays one and prints what happened;
//! `EVENKEEL_SIM_SCHEDULES=n` plays more of them than usual.
//!
//! Invariant: nothing here reads a clock, a file or a random source of the machine, so every failure comes again.

mod world;

mod launcher;

mod disk;

mod folder;

mod driver;

mod effects;

mod judge;

mod converge;

mod schedule;

mod scenario;

mod tests;

use std::time::Duration;

/// Numbers that look random and follow from a seed (splitmix64).
#[derive(Debug, Clone)]
struct Random(u64);

impl Random {
    fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `limit`, which is not 0.
    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// A number from `first` to `last`, both included.
    fn between(&mut self, first: u64, last: u64) -> u64 {
        first + self.below(last - first + 1)
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of `choices`, none of none.
    fn pick<T: Clone>(&mut self, choices: &[T]) -> Option<T> {
        let count = u64::try_from(choices.len())
            .ok()
            .filter(|&count| count > 0)?;
        let at = usize::try_from(self.below(count)).ok()?;
        choices.get(at).cloned()
    }

    /// A number of milliseconds, both ends included.
    fn millis(&mut self, first: u64, last: u64) -> Duration {
        Duration::from_millis(self.between(first, last))
    }
}

/// What is broken on purpose, to see that the judge finds it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mutant {
    /// The disk says that it wrote, and did not.
    DropsWrites,
    /// The launcher says that a launch is gone whose leader is gone, while others of it live.
    SaysGone,
    /// The launcher signals whatever has the pid.
    SignalsByPid,
    /// The gate runs the engine without having been opened.
    GateStandsOpen,
    /// The source takes a file that it cannot read for one that is not there.
    UnreadableIsAbsent,
    /// The controller takes what it recovers for made from another manifest.
    ForgetsRestartKeys,
    /// The controller forgets whatever it cannot prove.
    UnknownIsGone,
    /// The controller looks again at once, whatever the deadline.
    NeverSleeps,
    /// The controller looks at nothing without a wake.
    NeverResyncs,
}
