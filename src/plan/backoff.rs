//! How long a relaunch waits. Derived from the record, never stored, so it survives a restart of the controller.

use std::time::Duration;

use jiff::Timestamp;

use crate::record::{Ending, History};
use crate::spec::Backoff;

/// When the next launch may begin.
pub fn not_before(history: &History, backoff: &Backoff, now: Timestamp) -> Timestamp {
    match &history.last {
        // An ending in the future means that the clock was set back: waiting for it could take for ever.
        Some(last) if last.cause.is_failure() && last.at <= now => {
            last.at + delay(last, history.failures, backoff)
        }
        Some(_) | None => now,
    }
}

/// The first relaunch is immediate, the second waits `initialSeconds`, each further one twice as long, ±10 %.
fn delay(last: &Ending, failures: u32, backoff: &Backoff) -> Duration {
    let Some(doublings) = failures.checked_sub(2) else {
        return Duration::ZERO;
    };
    let initial = Duration::from_secs(backoff.initial_seconds.into());
    let longest = Duration::from_secs(backoff.max_seconds.into());
    let factor = 2_u32.saturating_pow(doublings);
    jitter(initial.saturating_mul(factor).min(longest), last)
}

/// Between 90 % and 110 %, drawn from the launch id, so that instances that fell together do not rise together, and the
/// plan stays a function of its arguments.
fn jitter(delay: Duration, last: &Ending) -> Duration {
    let id = last.launch_id.as_bytes();
    let thousandths = u32::from(u16::from_be_bytes([id[0], id[1]])) * 200 / u32::from(u16::MAX);
    delay.saturating_mul(900 + thousandths) / 1000
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::ExitStatus;
    use crate::names::LaunchId;
    use crate::record::Cause;
    use uuid::Uuid;

    fn waits(failures: u32, backoff: &Backoff) -> Duration {
        let at = Timestamp::from_second(1_000_000).unwrap();
        let history = History {
            restarts: 0,
            failures,
            last: Some(Ending {
                at,
                launch_id: LaunchId::derive(Uuid::from_u128(7), &"a-0".parse().unwrap()),
                cause: Cause::Exited {
                    status: ExitStatus::UNKNOWN,
                    log_tail: String::new(),
                },
            }),
        };
        not_before(&history, backoff, at)
            .duration_since(at)
            .unsigned_abs()
    }

    #[test]
    fn the_first_relaunch_is_immediate_and_the_following_ones_double_to_the_limit() {
        let backoff = Backoff::default();
        assert_eq!(waits(1, &backoff), Duration::ZERO);
        for (failures, seconds) in [
            (2, 1.0),
            (3, 2.0),
            (4, 4.0),
            (10, 256.0),
            (11, 300.0),
            (u32::MAX, 300.0),
        ] {
            let wait = waits(failures, &backoff).as_secs_f64();
            assert!(
                (seconds * 0.9..=seconds * 1.1).contains(&wait),
                "{failures}: {wait}"
            );
        }
    }

    #[test]
    fn zero_turns_the_back_off_off() {
        let backoff = Backoff {
            initial_seconds: 0,
            ..Backoff::default()
        };
        assert_eq!(waits(50, &backoff), Duration::ZERO);
    }
}
