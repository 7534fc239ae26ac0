//! Health: from what the probes said to ready, unhealthy, overdue, and when to ask again.
//!
//! Invariant: one failed probe changes nothing that runs.

use std::time::Duration;

use jiff::Timestamp;

use super::Settings;
use crate::engine::{self, Question};
use crate::manifest::ManifestProbe;
use crate::names::LaunchId;
use crate::observed::{Health, ProbeCount};
use crate::order::{ProbePurpose, ProbeRequest};
use crate::record::{Launch, StopReason};
use crate::spec::InstanceSpec;

/// What the probes come to.
#[derive(Debug, Clone, PartialEq)]
pub struct Checkup {
    /// What is to be said of the instance.
    pub verdict: Verdict,
    /// The probe that is due.
    pub probe: Option<ProbeRequest>,
    /// When to look again.
    pub until: Option<Timestamp>,
}

/// What is to be said of an instance.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// Not ready yet, and still in time.
    Starting {
        /// Until when it must be ready.
        deadline: Timestamp,
        /// What the last probe said.
        last_probe: String,
    },
    /// Ready for the first time.
    FirstReady,
    /// Ready.
    Ready,
    /// It was ready; the last probe failed, and not often enough.
    NotReady {
        /// What it said.
        last_probe: String,
    },
    /// It must be stopped.
    Stop(StopReason),
}

/// A probe with every number filled in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Probe<'a> {
    question: Question<'a>,
    initial_delay: Duration,
    period: Duration,
    timeout: Duration,
    failure_threshold: u32,
    success_threshold: u32,
}

/// Generous, because an engine under full load answers late, and a false alarm costs a model load.
const TIMEOUT_SECONDS: u32 = 5;
const LIVENESS_PERIOD_SECONDS: u32 = 10;
const STARTUP_PERIOD_SECONDS: u32 = 1;
const FAILURE_THRESHOLD: u32 = 3;

/// The first probes come quickly, because small models load in milliseconds: a quarter of the wait so far, at least this.
const STARTUP_PROBE_FLOOR: Duration = Duration::from_millis(50);

/// What a manifest that says nothing writes.
const UNWRITTEN: ManifestProbe = ManifestProbe {
    http_get: None,
    tcp_socket: None,
    initial_delay_seconds: None,
    period_seconds: None,
    timeout_seconds: None,
    failure_threshold: None,
    success_threshold: None,
};

/// A gate whose pipe closes leaves within milliseconds; this covers a machine that is swapping.
const GATE_LEAVES: Duration = Duration::from_secs(5);

impl<'a> Probe<'a> {
    /// The probe of the manifest, its gaps filled from the engine. None where nothing says how to ask.
    fn of(
        written: Option<&'a ManifestProbe>,
        spec: &InstanceSpec,
        period_seconds: u32,
    ) -> Option<Self> {
        let ManifestProbe {
            http_get,
            tcp_socket,
            initial_delay_seconds,
            period_seconds: period,
            timeout_seconds,
            failure_threshold,
            success_threshold,
        } = written.unwrap_or(&UNWRITTEN);
        let question = match (http_get, tcp_socket) {
            (Some(get), _) => match (&get.path, engine::default_probe(spec)) {
                (Some(path), _) => Question::HttpGet(path),
                (None, Some(standard @ Question::HttpGet(_))) => standard,
                (None, Some(Question::TcpConnect) | None) => Question::HttpGet("/"),
            },
            (None, Some(_)) => Question::TcpConnect,
            (None, None) => engine::default_probe(spec)?,
        };
        let seconds = |written: Option<u32>, standard: u32| {
            Duration::from_secs(written.unwrap_or(standard).max(1).into())
        };
        Some(Self {
            question,
            initial_delay: Duration::from_secs(initial_delay_seconds.unwrap_or(0).into()),
            period: seconds(*period, period_seconds),
            timeout: seconds(*timeout_seconds, TIMEOUT_SECONDS),
            failure_threshold: failure_threshold.unwrap_or(FAILURE_THRESHOLD),
            success_threshold: success_threshold.unwrap_or(1),
        })
    }

    fn request(&self, purpose: ProbePurpose, launch: &Launch) -> Option<ProbeRequest> {
        Some(ProbeRequest {
            purpose,
            method: self.question.method(),
            port: launch.lease.port?,
            timeout: self.timeout,
        })
    }
}

/// How long an instance may take from its start until it is ready.
pub fn startup_deadline(spec: &InstanceSpec, settings: &Settings) -> Duration {
    match (spec.startup_deadline_seconds, settings.startup_deadline) {
        (Some(seconds), _) => Duration::from_secs(seconds.into()),
        (None, Some(deadline)) => deadline,
        (None, None) => engine::engine(spec.engine).facts().startup_deadline,
    }
}

/// When a launch has used half of its time: from then on it does not count as starting, so that slow loaders block nobody.
pub fn half_way(spec: &InstanceSpec, launch: &Launch, settings: &Settings) -> Timestamp {
    let started_at = launch.started_at.unwrap_or(launch.reserved_at);
    // Only a record that was tampered with is so far ahead.
    started_at
        .checked_add(startup_deadline(spec, settings) / 2)
        .unwrap_or(Timestamp::MAX)
}

/// Judges an instance whose leader is alive.
pub fn judge(
    spec: &InstanceSpec,
    launch: &Launch,
    health: &Health,
    settings: &Settings,
    now: Timestamp,
) -> Checkup {
    match launch.ready_at {
        None => judge_start(spec, launch, health, settings, now),
        Some(ready_at) => judge_running(spec, launch, health, ready_at, now),
    }
}

/// The question whose answer says how the instance is, whenever it is asked: for who looks once.
pub fn question(spec: &InstanceSpec, launch: &Launch) -> Option<ProbeRequest> {
    let (purpose, written) = match launch.ready_at {
        None => (
            ProbePurpose::Startup,
            spec.startup_probe
                .as_ref()
                .or(spec.readiness_probe.as_ref()),
        ),
        Some(_) => (
            ProbePurpose::Liveness,
            spec.readiness_probe
                .as_ref()
                .or(spec.liveness_probe.as_ref()),
        ),
    };
    Probe::of(written, spec, STARTUP_PERIOD_SECONDS)?.request(purpose, launch)
}

fn judge_start(
    spec: &InstanceSpec,
    launch: &Launch,
    health: &Health,
    settings: &Settings,
    now: Timestamp,
) -> Checkup {
    let started_at = launch.started_at.unwrap_or(launch.reserved_at);
    let deadline = started_at + startup_deadline(spec, settings);
    let startup = Probe::of(spec.startup_probe.as_ref(), spec, STARTUP_PERIOD_SECONDS);
    let readiness = spec
        .readiness_probe
        .as_ref()
        .and_then(|written| Probe::of(Some(written), spec, LIVENESS_PERIOD_SECONDS));
    // First the startup probe until it succeeds, then the readiness probe where there is one. Without a startup probe of
    // its own the manifest's readiness probe is the one that is asked.
    let (purpose, probe, count) = match (&spec.startup_probe, startup, readiness) {
        (None, _, Some(readiness)) => (ProbePurpose::Readiness, readiness, &health.readiness),
        (_, Some(startup), _) if health.startup.successes < startup.success_threshold => {
            (ProbePurpose::Startup, startup, &health.startup)
        }
        (_, _, Some(readiness)) => (ProbePurpose::Readiness, readiness, &health.readiness),
        (_, _, None) => return judge_unasked(launch, health, deadline, now),
    };
    if count.successes >= probe.success_threshold {
        return quiet(Verdict::FirstReady);
    }
    let tries_are_over = purpose == ProbePurpose::Startup
        && spec
            .startup_probe
            .as_ref()
            .is_some_and(|written| written.failure_threshold.is_some())
        && count.failures >= probe.failure_threshold;
    let waited = now.duration_since(started_at).unsigned_abs();
    // It may have become ready while no controller ran: who was not asked, or has just said yes, is not stopped.
    let is_asked = count.last.is_some() || probe.request(purpose, launch).is_none();
    let is_overdue = now >= deadline && is_asked && count.successes == 0;
    let verdict = if is_overdue || tries_are_over {
        Verdict::Stop(StopReason::StartupTimeout {
            waited_seconds: waited.as_secs(),
            last_probe: count.last_text(),
        })
    } else {
        Verdict::Starting {
            deadline,
            last_probe: count.last_text(),
        }
    };
    let interval = match &spec.startup_probe {
        Some(written) if written.period_seconds.is_some() => probe.period,
        Some(_) | None => (waited / 4).clamp(STARTUP_PROBE_FLOOR, probe.period),
    };
    let due = match &count.last {
        None => started_at + probe.initial_delay,
        Some((at, _)) => *at + interval,
    };
    ask_when_due(
        verdict,
        [Some((due, purpose, &probe)), None],
        launch,
        health,
        now,
        Some(deadline).filter(|deadline| *deadline > now),
    )
}

/// Who cannot be asked is ready as soon as it runs. One that is not known to have left its gate, because the controller
/// died meanwhile, is believed to run once a gate that was called off would have left.
fn judge_unasked(launch: &Launch, health: &Health, deadline: Timestamp, now: Timestamp) -> Checkup {
    let runs_from = match (launch.started_at, health.since) {
        (None, Some(since)) => since + GATE_LEAVES,
        (Some(_), _) | (None, None) => now,
    };
    if now >= runs_from {
        return quiet(Verdict::FirstReady);
    }
    Checkup {
        verdict: Verdict::Starting {
            deadline,
            last_probe: String::new(),
        },
        probe: None,
        until: Some(runs_from),
    }
}

fn judge_running(
    spec: &InstanceSpec,
    launch: &Launch,
    health: &Health,
    ready_at: Timestamp,
    now: Timestamp,
) -> Checkup {
    let liveness = Probe::of(spec.liveness_probe.as_ref(), spec, LIVENESS_PERIOD_SECONDS);
    let readiness = spec
        .readiness_probe
        .as_ref()
        .and_then(|written| Probe::of(Some(written), spec, LIVENESS_PERIOD_SECONDS));
    // A count says nothing once its probe is no longer in the manifest: nobody would ever ask again.
    let counted = [
        readiness.as_ref().map(|_| &health.readiness),
        liveness.as_ref().map(|_| &health.liveness),
    ];
    let failing = counted
        .into_iter()
        .flatten()
        .find(|count| count.failures > 0);
    let is_dead = liveness
        .as_ref()
        .is_some_and(|probe| health.liveness.failures >= probe.failure_threshold);
    let verdict = match failing {
        _ if is_dead => Verdict::Stop(StopReason::Unhealthy {
            failures: health.liveness.failures,
            last_probe: health.liveness.last_text(),
        }),
        Some(count) => Verdict::NotReady {
            last_probe: count.last_text(),
        },
        None => Verdict::Ready,
    };
    let due = |count: &ProbeCount, probe: &Probe| match &count.last {
        Some((at, _)) if *at >= ready_at => *at + probe.period,
        // Spread over the period, counted from when this controller first saw it: a thousand adopted instances are not
        // asked in one moment.
        Some(_) | None => {
            health.since.unwrap_or(ready_at).max(ready_at) + phase(launch.id, probe.period)
        }
    };
    let liveness = liveness
        .as_ref()
        .map(|probe| (due(&health.liveness, probe), ProbePurpose::Liveness, probe));
    let readiness = readiness.as_ref().map(|probe| {
        (
            due(&health.readiness, probe),
            ProbePurpose::Readiness,
            probe,
        )
    });
    ask_when_due(verdict, [liveness, readiness], launch, health, now, None)
}

fn quiet(verdict: Verdict) -> Checkup {
    Checkup {
        verdict,
        probe: None,
        until: None,
    }
}

/// The question that has been due longest, or when the next one is. Asked even of what must be stopped: it goes on
/// running while its deployment is paused.
fn ask_when_due(
    verdict: Verdict,
    questions: [Option<(Timestamp, ProbePurpose, &Probe<'_>)>; 2],
    launch: &Launch,
    health: &Health,
    now: Timestamp,
    deadline: Option<Timestamp>,
) -> Checkup {
    let first = questions.iter().flatten().min_by_key(|(due, _, _)| *due);
    let probe = first
        .filter(|(due, _, _)| !health.in_flight && *due <= now)
        .and_then(|(_, purpose, probe)| probe.request(*purpose, launch));
    // A probe under way wakes the loop when it ends.
    let next = first
        .map(|(due, _, _)| *due)
        .filter(|due| !health.in_flight && *due > now);
    Checkup {
        verdict,
        probe,
        until: next.into_iter().chain(deadline).min(),
    }
}

/// A fixed place of this launch within a period.
fn phase(id: LaunchId, period: Duration) -> Duration {
    let bytes = id.as_bytes();
    let place = u32::from(u16::from_be_bytes([bytes[2], bytes[3]]));
    period.saturating_mul(place) / u32::from(u16::MAX)
}
