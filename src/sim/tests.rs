//! Many schedules, every crash, and broken worlds that must be found out.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::Mutant;
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
