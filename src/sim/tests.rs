//! Many schedules, every crash, and broken worlds that must be found out.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::Mutant;
use super::scenario::{Blow, SCENARIOS, Scenario};
use super::schedule::{Report, play};

/// Schedules of an ordinary test run.
const SCHEDULES: u64 = 2000;

fn variable(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().expect("a number"))
}

/// Plays a seed again, in words, and fails.
fn show(seed: u64, mutant: Option<Mutant>) -> ! {
    let report = play(seed, mutant, true);
    for line in &report.trace {
        println!("{line}");
    }
    panic!(
        "schedule {seed}: {} (play it again with EVENKEEL_SIM_SEED={seed})",
        report.violations.join("; ")
    );
}

#[test]
fn whatever_befalls_the_world_no_rule_is_broken_and_it_converges() {
    if let Some(seed) = variable("EVENKEEL_SIM_SEED") {
        let report = play(seed, None, true);
        if !report.violations.is_empty() {
            show(seed, None);
        }
        for line in &report.trace {
            println!("{line}");
        }
        return;
    }
    let count = variable("EVENKEEL_SIM_SCHEDULES").unwrap_or(SCHEDULES);
    let started = Instant::now();
    let (next, passes, execs) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let search = || {
        let mut failed = Vec::new();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= count || failed.len() >= 3 {
                return failed;
            }
            let Report {
                violations,
                trace: _,
                passes: of_this,
                execs: started,
            } = play(seed, None, false);
            passes.fetch_add(of_this as u64, Ordering::Relaxed);
            execs.fetch_add(started as u64, Ordering::Relaxed);
            if let Some(violation) = violations.first() {
                failed.push((seed, violation.clone()));
            }
        }
    };
    let mut failed: Vec<(u64, String)> = std::thread::scope(|scope| {
        let other = scope.spawn(search);
        let mut failed = search();
        failed.extend(other.join().expect("it does not panic"));
        failed
    });
    failed.sort();
    println!(
        "{count} schedules, {} passes, {} engines in {:.1} s",
        passes.into_inner(),
        execs.into_inner(),
        started.elapsed().as_secs_f64()
    );
    for (seed, violation) in &failed {
        println!("schedule {seed}: {violation}");
    }
    if let Some((seed, _)) = failed.first() {
        show(*seed, None);
    }
}

/// Plays a story with each of these blows.
fn strike(scenario: &Scenario, blows: impl Iterator<Item = Blow>) {
    for blow in blows {
        if scenario.play(blow, false).violations.is_empty() {
            continue;
        }
        let report = scenario.play(blow, true);
        for line in &report.trace {
            println!("{line}");
        }
        panic!(
            "{}, {blow:?}: {}",
            scenario.name,
            report.violations.join("; ")
        );
    }
}

#[test]
fn a_controller_that_dies_at_any_boundary_is_as_if_it_had_lived() {
    for scenario in &SCENARIOS {
        let extent = scenario.extent();
        assert!(extent.boundaries > 10, "{}: {extent:?}", scenario.name);
        strike(scenario, (0..extent.boundaries).map(Blow::Dies));
    }
}

#[test]
fn a_controller_that_dies_twice_in_a_launch_is_as_if_it_had_lived() {
    let launch = &SCENARIOS[0];
    let first = 0..launch.extent().boundaries.min(20);
    strike(
        launch,
        first.flat_map(|at| (0..12).map(move |more| Blow::DiesTwice(at, more))),
    );
}

#[test]
fn a_record_that_cannot_be_written_the_first_time_delays_and_breaks_nothing() {
    for scenario in &SCENARIOS {
        strike(
            scenario,
            (0..scenario.extent().writes).map(Blow::CannotWrite),
        );
    }
}

#[test]
fn an_effect_whose_end_is_never_heard_of_is_looked_into_after_a_while() {
    let launch = &SCENARIOS[0];
    strike(launch, (0..launch.extent().effects).map(Blow::HearsNothing));
}

/// What is broken on purpose, and a word of what the judge must say of it.
const MUTANTS: [(Mutant, &str); 9] = [
    (Mutant::DropsWrites, "no record names it"),
    (Mutant::SaysGone, "lives"),
    (Mutant::SignalsByPid, "a signal reaches"),
    (Mutant::GateStandsOpen, "no record names it"),
    (Mutant::UnreadableIsAbsent, "Removed"),
    (Mutant::ForgetsRestartKeys, "SpecChanged"),
    (Mutant::UnknownIsGone, "lives"),
    (Mutant::NeverSleeps, "passes within a second"),
    (Mutant::NeverResyncs, "converge"),
];

#[test]
fn what_is_broken_on_purpose_is_found_out() {
    for (mutant, word) in MUTANTS {
        let found = (0..400).any(|seed| {
            let violations = play(seed, Some(mutant), false).violations;
            violations.iter().any(|violation| violation.contains(word))
        });
        assert!(found, "nobody noticed {mutant:?}");
    }
}

#[test]
fn a_schedule_is_a_function_of_its_seed() {
    for seed in 0..5 {
        assert_eq!(play(seed, None, true).trace, play(seed, None, true).trace);
    }
}
