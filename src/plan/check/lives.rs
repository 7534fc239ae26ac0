//! Arbitrary lives of an instance: what is recorded of its launch and what is known of it.
//!
//! Invariant: news of an effect fits the launch it is of.

use jiff::Timestamp;
use proptest::collection::btree_set;
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;
use uuid::Uuid;

use super::worlds::{moment, past, port};
use crate::failure::{ExitStatus, LaunchFailure};
use crate::names::{InstanceName, LaunchId};
use crate::observed::{
    EffectKind, Health, Liveness, Outcome, ProbeCount, ProbeResult, SignalKind, Stranger,
};
use crate::record::{
    Cause, Ending, Handle, History, Launch, Lease, LeasedDevice, Stop, StopReason,
};
use crate::testing;

/// What an instance is, beside the spec it was launched from.
#[derive(Debug, Clone)]
pub(super) struct Life {
    pub launch: Option<(Launch, News)>,
    pub history: History,
    pub health: Health,
}

/// What is known of a launch beside its record.
#[derive(Debug, Clone)]
pub(super) struct News {
    pub liveness: Liveness,
    pub effect: Option<EffectKind>,
    pub outcome: Option<Outcome>,
    pub signalled: Option<(Timestamp, SignalKind)>,
}

pub(super) fn stranger() -> impl Strategy<Value = Stranger> {
    (option::of(2..99_u32), past()).prop_map(|(pid, seen_at)| Stranger {
        pid,
        command: None,
        seen_at,
    })
}

fn unlooked() -> Liveness {
    Liveness::Unknown {
        why: "not looked at yet".to_owned(),
    }
}

pub(super) fn lease() -> impl Strategy<Value = Lease> {
    let devices = btree_set(0..6_u8, 0..3);
    (option::weighted(0.8, port()), devices).prop_map(|(port, devices)| Lease {
        port,
        devices: devices
            .into_iter()
            .map(|number| LeasedDevice {
                id: format!("GPU-{number}").parse().unwrap(),
                bytes: None,
            })
            .collect(),
    })
}

pub(super) fn launch_id() -> impl Strategy<Value = LaunchId> {
    any::<u128>().prop_map(|nonce| {
        LaunchId::derive(
            Uuid::from_u128(nonce),
            &"x-0".parse::<InstanceName>().unwrap(),
        )
    })
}

/// A launch of which no handle is known.
fn reserved() -> BoxedStrategy<(Launch, News)> {
    let outcome = prop_oneof![
        testing::handle().prop_map(Outcome::Prepared),
        failure().boxed().prop_map(Outcome::Failed),
        (port(), stranger()).prop_map(|(port, stranger)| Outcome::PortTaken { port, stranger }),
        Just(Outcome::Resolved(None)),
        testing::handle().prop_map(|handle| Outcome::Resolved(Some(handle))),
        Just(Outcome::Unresolved {
            why: "a hidden process".to_owned()
        }),
    ];
    let news = prop_oneof![
        3 => outcome.prop_map(|outcome| (None, Some(outcome))),
        1 => Just((None, None)),
        2 => select(vec![EffectKind::Prepare, EffectKind::Resolve])
            .prop_map(|effect| (Some(effect), None)),
    ];
    (launch_id(), lease(), moment(), news.boxed())
        .prop_map(|(id, lease, reserved_at, (effect, outcome))| {
            let launch = Launch {
                id,
                handle: None,
                lease,
                reserved_at,
                started_at: None,
                ready_at: None,
                stop: None,
            };
            let news = News {
                liveness: unlooked(),
                effect,
                outcome,
                signalled: None,
            };
            (launch, news)
        })
        .boxed()
}

fn handle() -> impl Strategy<Value = Handle> {
    testing::handle()
}

/// A launch that has a handle.
fn running() -> BoxedStrategy<(Launch, News)> {
    let status = testing::exit_status;
    let liveness = prop_oneof![
        5 => Just(Liveness::Alive),
        1 => (1..4_usize, status()).prop_map(|(members, status)| Liveness::LeaderGone { members, status }),
        2 => (status(), select(vec!["", "out of memory"])).prop_map(|(status, log_tail)| Liveness::Gone { status, log_tail: log_tail.to_owned() }),
        1 => Just(unlooked()),
    ];
    let outcome = prop_oneof![
        Just(Outcome::Released),
        failure().boxed().prop_map(Outcome::Failed),
        Just(Outcome::Signalled {
            signal: SignalKind::Term,
            members: 1
        }),
        Just(Outcome::Unproven {
            why: "no permission".to_owned()
        }),
    ];
    let news = prop_oneof![
        5 => Just((None, None)),
        1 => outcome.prop_map(|outcome| (None, Some(outcome))),
        1 => select(vec![EffectKind::Release, EffectKind::Signal])
            .prop_map(|effect| (Some(effect), None)),
    ];
    let stop = (
        moment(),
        stop_reason().boxed(),
        option::weighted(0.4, past()),
    )
        .prop_map(|(asked_at, reason, killed_at)| Stop {
            asked_at,
            reason,
            killed_at,
        });
    let signalled = option::weighted(0.7, past());
    (
        (launch_id(), handle(), lease()),
        // One that was not started stands at its gate.
        (
            moment(),
            option::weighted(0.8, moment()),
            option::of(moment()),
        ),
        option::weighted(0.25, stop.boxed()),
        (liveness.boxed(), news.boxed(), signalled),
    )
        .prop_map(
            |((id, handle, lease), times, stop, (liveness, (effect, outcome), signalled))| {
                let (reserved_at, started_at, ready_at) = times;
                let reserved_at = started_at.map_or(reserved_at, |at| reserved_at.min(at));
                let ready_at = ready_at.map(|at| at.max(started_at.unwrap_or(reserved_at)));
                let launch = Launch {
                    id,
                    handle: Some(handle),
                    lease,
                    reserved_at,
                    started_at,
                    ready_at,
                    // A signal is sent when the intent is written.
                    stop: stop.clone(),
                };
                let news = News {
                    liveness,
                    effect: effect.filter(|effect| *effect != EffectKind::Signal || stop.is_some()),
                    outcome,
                    signalled: stop.and_then(|stop| {
                        let kind = match stop.killed_at {
                            Some(_) => SignalKind::Kill,
                            None => SignalKind::Term,
                        };
                        signalled.map(|at| (at, kind))
                    }),
                };
                (launch, news)
            },
        )
        .boxed()
}

fn count() -> impl Strategy<Value = ProbeCount> {
    let result = prop_oneof![
        3 => Just(ProbeResult::Success),
        1 => Just(ProbeResult::Loading { detail: "503".to_owned() }),
        1 => Just(ProbeResult::Failure { detail: "refused".to_owned() }),
        1 => stranger().prop_map(|stranger| ProbeResult::Stranger { stranger }),
    ];
    (0..5_u32, option::weighted(0.7, (past(), result))).prop_map(|(times, last)| match last {
        None => ProbeCount::default(),
        Some((at, result)) => {
            let mut count = ProbeCount::default();
            for _ in 0..=times {
                count.count(at, result.clone());
            }
            count
        }
    })
}

fn health() -> impl Strategy<Value = Health> {
    (
        option::of(past()),
        count(),
        count(),
        count(),
        prop::bool::weighted(0.2),
    )
        .prop_map(|(since, startup, readiness, liveness, in_flight)| Health {
            since,
            startup,
            readiness,
            liveness,
            in_flight,
        })
}

/// Any cause now and then, the ones that decide something more often.
fn cause() -> impl Strategy<Value = Cause> {
    let exited = option::of(0..2_i32).prop_map(|code| Cause::Exited {
        status: ExitStatus {
            code,
            ..ExitStatus::UNKNOWN
        },
        log_tail: String::new(),
    });
    prop_oneof![
        6 => exited,
        1 => Just(Cause::Stopped),
        1 => Just(Cause::NeverStarted),
        1 => testing::cause(),
    ]
}

fn history() -> BoxedStrategy<History> {
    let ending =
        (moment(), launch_id(), cause().boxed()).prop_map(|(at, launch_id, cause)| Ending {
            at,
            launch_id,
            cause,
        });
    let failures = prop_oneof![9 => 0..6_u32, 1 => any::<u32>()];
    (any::<u32>(), failures, option::of(ending))
        .prop_map(|(restarts, failures, last)| History {
            restarts,
            failures,
            last,
        })
        .boxed()
}

/// Any failure now and then.
fn failure() -> impl Strategy<Value = LaunchFailure> {
    prop_oneof![5 => Just(LaunchFailure::Cancelled), 1 => testing::failure()]
}

fn stop_reason() -> impl Strategy<Value = StopReason> {
    prop_oneof![
        2 => Just(StopReason::Removed),
        2 => Just(StopReason::SpecChanged { fields: Vec::new() }),
        2 => Just(StopReason::LeaderGone),
        1 => Just(StopReason::Shutdown),
        1 => testing::stop_reason(),
    ]
}

pub(super) fn life() -> BoxedStrategy<Life> {
    let launch = prop_oneof![
        1 => Just(None),
        1 => reserved().prop_map(Some),
        3 => running().prop_map(Some),
    ];
    (launch.boxed(), history(), health().boxed())
        .prop_map(|(launch, history, mut health)| {
            // Whether it lives on is asked once it was ready.
            if launch
                .as_ref()
                .is_none_or(|(launch, _)| launch.ready_at.is_none())
            {
                health.liveness = ProbeCount::default();
            }
            Life {
                launch,
                history,
                health,
            }
        })
        .boxed()
}
