//! Wall time that never steps while the controller lives.
//!
//! A wall clock steps: NTP corrects it after boot, people set it. A deadline taken before a step and compared after it
//! would come at once, or hours late: a load killed in the middle, a back-off without end. So the wall clock is read
//! once, and from there the boot clock counts. The boot clock, and not the monotonic one, because it goes on while the
//! machine sleeps: a grace period that began before a suspend is over after it.
//!
//! Both are disciplined at the same rate by NTP, so a long-lived controller does not drift; it only keeps the offset
//! that the wall clock had when it started. Times in records outlive a controller, so a step between two controllers is
//! still seen, once.
//!
//! Invariant: [`Clock::now`] never goes backwards.
#![expect(clippy::disallowed_methods, reason = "reads clocks; nobody else does")]

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use nix::time::ClockId;

/// A wall clock that does not step.
#[derive(Debug, Clone, Copy)]
pub struct Clock {
    /// The wall time when it was started.
    wall: Timestamp,
    /// The boot clock at the same moment.
    boot: Duration,
}

impl Clock {
    /// Reads the wall clock, for the only time.
    #[expect(
        clippy::new_without_default,
        reason = "a default that reads a clock would be a surprise"
    )]
    pub fn new() -> Self {
        Self {
            wall: Timestamp::now(),
            boot: since_boot(),
        }
    }

    /// Now.
    pub fn now(&self) -> Timestamp {
        self.at(since_boot())
    }

    fn at(&self, since_boot: Duration) -> Timestamp {
        let elapsed = since_boot.saturating_sub(self.boot);
        // Out of range after the year 9999, where it stands still.
        self.wall
            .saturating_add(SignedDuration::try_from(elapsed).unwrap_or(SignedDuration::MAX))
            .unwrap_or(Timestamp::MAX)
    }
}

fn since_boot() -> Duration {
    ClockId::CLOCK_BOOTTIME
        .now()
        .expect("Linux has the boot clock since 2.6.39, and reading it cannot fail")
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_begins_with_the_wall_clock_and_counts_by_the_boot_clock() {
        let clock = Clock {
            wall: "2026-01-01T00:00:00Z".parse().unwrap(),
            boot: Duration::from_secs(100),
        };
        let later = clock.at(Duration::from_millis(161_500));
        assert_eq!(later.to_string(), "2026-01-01T00:01:01.5Z");
        assert_eq!(clock.at(Duration::from_secs(1)), clock.wall);
        assert_eq!(clock.at(Duration::MAX), Timestamp::MAX);
    }

    #[test]
    fn it_does_not_go_backwards() {
        let clock = Clock::new();
        let first = clock.now();
        assert!(clock.now() >= first);
        assert!(first.duration_since(Timestamp::now()).abs() < SignedDuration::from_secs(5));
    }
}
