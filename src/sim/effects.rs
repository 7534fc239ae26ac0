//! Effects under way: from the moment the controller starts one to the moment it hears of its end.
//!
//! Invariant: an effect takes place in the world or not, whatever the controller is told.

use std::rc::Rc;
use std::time::Duration;

use super::driver::{Flight, Sim, Watch, Weather};
use super::launcher::Mishap;
use super::world::Gate;
use crate::names::{InstanceName, LaunchId};
use crate::observed::{Outcome, ProbeResult};
use crate::plan::Action;
use crate::record::Launch;

impl Sim {
    /// An effect is started, as the executor does.
    pub fn begin(&mut self, instance: InstanceName, launch: Launch, action: Action) {
        self.world.judge_action(&instance, &launch, &action);
        if self
            .world
            .boundary(&format_args!("before {} of {instance}", verb(&action)))
        {
            return;
        }
        let slot = self
            .shell
            .as_mut()
            .and_then(|shell| shell.slots.get_mut(&launch.id));
        let gate = match &action {
            Action::Release { .. } | Action::Signal { .. } => {
                slot.and_then(|slot| slot.gate.take())
            }
            Action::Prepare(_) | Action::Resolve { .. } | Action::Probe { .. } => None,
        };
        if let (Action::Signal { .. }, Some(gate)) = (&action, gate) {
            self.world.call_off(gate);
        }
        let delay = self.delay();
        self.take_off(
            delay,
            Flight::Effect {
                instance,
                launch,
                action,
                gate,
            },
        );
    }

    fn mishap(&mut self) -> Option<Mishap> {
        let Weather {
            fails,
            loses,
            times_out,
            is_late: _,
            loses_wakes: _,
        } = self.weather;
        let chances = [
            (Mishap::Fails, fails),
            (Mishap::OutcomeLost, loses),
            (Mishap::Lost, loses),
            (Mishap::TimesOut, times_out),
        ];
        let random = &mut self.world.random;
        let mut drawn = chances
            .into_iter()
            .filter(|(_, percent)| random.chance(*percent));
        drawn.next().map(|(mishap, _)| mishap)
    }

    /// An effect takes place.
    fn take_place(
        &mut self,
        instance: InstanceName,
        launch: &Launch,
        action: Action,
        gate: Option<Gate>,
    ) {
        let number = self.effects;
        let is_probe = matches!(action, Action::Probe { .. });
        self.effects += u64::from(!is_probe);
        let mishap = if !is_probe && self.loses_outcome_of == Some(number) {
            Some(Mishap::OutcomeLost)
        } else {
            self.mishap()
        };
        let what = verb(&action);
        if let Some(mishap) = mishap {
            self.world
                .note(&format_args!("{what} of {instance}: {mishap:?}"));
        }
        if mishap == Some(Mishap::Lost) {
            if let Some(gate) = gate {
                self.world.call_off(gate);
            }
            return;
        }
        // What takes place although its outcome is lost is as good as what does not go wrong.
        let wrong = mishap.filter(|mishap| *mishap != Mishap::OutcomeLost);
        let timeout = match &action {
            Action::Release { .. } => Duration::from_secs(30),
            Action::Probe { request, .. } => request.timeout,
            Action::Prepare(_) | Action::Resolve { .. } | Action::Signal { .. } => {
                Duration::from_secs(10)
            }
        };
        let (outcome, gate) = match action {
            Action::Prepare(order) => self.world.prepare(&order, &self.inventory, wrong),
            Action::Release { .. } => (self.world.release(gate, wrong), None),
            Action::Resolve { launch_id } => (self.world.find(launch_id, wrong), None),
            Action::Signal { signal, .. } => (self.world.signal(launch, signal, wrong), None),
            Action::Probe { launch_id, request } => {
                let result = self.world.probe(launch, &request, wrong);
                if mishap != Some(Mishap::OutcomeLost) {
                    let delay = self.arrival(mishap, timeout);
                    self.take_off(
                        delay,
                        Flight::Probed {
                            instance,
                            launch: launch_id,
                            purpose: request.purpose,
                            result,
                        },
                    );
                }
                return;
            }
        };
        if self
            .world
            .boundary(&format_args!("{what} of {instance} took place"))
        {
            return;
        }
        if mishap == Some(Mishap::OutcomeLost) {
            if let Some(gate) = gate {
                self.world.call_off(gate);
            }
            return;
        }
        let delay = self.arrival(mishap, timeout);
        let launch = launch.id;
        self.take_off(
            delay,
            Flight::Outcome {
                instance,
                launch,
                outcome,
                gate,
            },
        );
    }

    fn arrival(&mut self, mishap: Option<Mishap>, timeout: Duration) -> Duration {
        match mishap {
            Some(Mishap::TimesOut) => timeout,
            Some(Mishap::Fails | Mishap::Lost | Mishap::OutcomeLost) | None => {
                self.delay().min(timeout)
            }
        }
    }

    /// Takes in what a flight brings. Returns whether it wakes the controller.
    pub fn arrive(&mut self, flight: Flight) -> bool {
        match flight {
            Flight::Effect {
                instance,
                launch,
                action,
                gate,
            } => {
                self.take_place(instance, &launch, action, gate);
                return false;
            }
            Flight::Scan(mut scanner) => {
                let (desired, look_again_at) = scanner.scan(self.world.now, &self.world.folder);
                let truth = Rc::new(self.world.folder.truth());
                let delay = self.delay();
                let scanned = Box::new((scanner, desired, look_again_at, truth));
                self.take_off(delay, Flight::Scanned(scanned));
                return false;
            }
            Flight::Outcome {
                instance,
                launch,
                outcome,
                gate,
            } => self.take_outcome(&instance, launch, outcome, gate),
            Flight::Probed {
                instance,
                launch,
                purpose,
                result,
            } => {
                self.world
                    .judge_probe(launch, purpose, result == ProbeResult::Success);
                let now = self.world.now;
                if let Some(shell) = &mut self.shell {
                    shell.core.probed(&instance, launch, purpose, result, now);
                }
            }
            Flight::Ended {
                instance,
                launch,
                status,
            } => {
                if let Some(slot) = self
                    .shell
                    .as_mut()
                    .and_then(|shell| shell.slots.get_mut(&launch))
                {
                    slot.watch = Watch::Off;
                    slot.seen = slot.seen.or(status);
                }
                self.inspect_launch(&instance, launch);
            }
            Flight::Scanned(scanned) => {
                let (scanner, desired, look_again_at, truth) = *scanned;
                if let Some(shell) = &mut self.shell {
                    shell.scanner = Some(scanner);
                    shell.desired = desired;
                    shell.look_again_at = look_again_at;
                    shell.truth = truth;
                }
            }
            Flight::Marked => {
                if let Some(shell) = &mut self.shell {
                    shell.is_scan_wanted = true;
                }
            }
        }
        true
    }

    fn inspect_launch(&mut self, instance: &InstanceName, launch: LaunchId) {
        if let Some(launch) = self.launch(instance).filter(|held| held.id == launch) {
            self.inspect(instance, &launch);
        }
    }

    fn take_outcome(
        &mut self,
        instance: &InstanceName,
        launch: LaunchId,
        outcome: Outcome,
        gate: Option<Gate>,
    ) {
        self.world
            .note(&format_args!("outcome for {instance}: {outcome:?}"));
        self.inspect_launch(instance, launch);
        if matches!(outcome, Outcome::Failed(_)) {
            self.world.judge_failure(instance, launch);
        }
        let Some(shell) = &mut self.shell else {
            return;
        };
        let is_held = shell.core.outcome(instance, launch, outcome);
        if let Some(gate) = gate {
            if is_held {
                shell.slots.entry(launch).or_default().gate = Some(gate);
            } else {
                self.world.call_off(gate);
            }
        }
        self.world
            .boundary(&format_args!("an outcome of {instance} was taken in"));
    }
}

fn verb(action: &Action) -> &'static str {
    match action {
        Action::Prepare(_) => "prepare",
        Action::Release { .. } => "release",
        Action::Resolve { .. } => "resolve",
        Action::Signal { .. } => "signal",
        Action::Probe { .. } => "probe",
    }
}
