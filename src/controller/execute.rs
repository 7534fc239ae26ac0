//! Starting effects. Each instance has one lifecycle slot, one probe slot and one watch; all are tasks of one set, owned by
//! the loop, so none is detached and none outlives it.

use std::collections::BTreeMap;
use std::rc::Rc;

use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::wake::Wake;
use crate::failure::{ExitStatus, LaunchFailure};
use crate::launch::process::ProcessLauncher;
use crate::launch::{Gate, Launcher, PrepareError};
use crate::names::{InstanceName, LaunchId};
use crate::observed::{Outcome, ProbeResult};
use crate::plan::Action;
use crate::probe::Prober;
use crate::record::Launch;

/// Probes at a time. A probe holds one socket and reads /proc once; more at a time would only slow one another down.
const PROBES_AT_A_TIME: usize = 64;

/// What is kept of a launch while it runs, beside its record.
#[derive(Default)]
struct Slot {
    /// Not opened yet.
    gate: Option<Box<dyn Gate>>,
    /// How the leader ended, as the watch told.
    seen: Option<ExitStatus>,
    /// Whether a watch is under way.
    is_watched: bool,
}

/// Starts effects and keeps what belongs to them.
pub(super) struct Executor {
    pub launcher: ProcessLauncher,
    prober: Prober,
    slots: BTreeMap<LaunchId, Slot>,
    probes: Rc<Semaphore>,
    /// At most three tasks per instance, and one scan.
    pub tasks: JoinSet<Wake>,
}

impl Executor {
    pub fn new(launcher: ProcessLauncher, prober: Prober) -> Self {
        Self {
            launcher,
            prober,
            slots: BTreeMap::new(),
            probes: Rc::new(Semaphore::new(PROBES_AT_A_TIME)),
            tasks: JoinSet::new(),
        }
    }

    /// Starts an effect. `launch` is what the record holds.
    pub fn start(&mut self, instance: InstanceName, launch: &Launch, action: Action) {
        let launch = launch.clone();
        let launcher = self.launcher.clone();
        let of = instance.clone();
        let wake = move |outcome, gate| Wake::Outcome {
            instance: of,
            launch_id: launch.id,
            outcome,
            gate,
        };
        match action {
            Action::Prepare(order) => {
                self.tasks.spawn_local(async move {
                    match launcher.prepare(*order).await {
                        Ok(prepared) => {
                            wake(Outcome::Prepared(prepared.handle), Some(prepared.gate))
                        }
                        Err(PrepareError::PortTaken { port, stranger }) => {
                            wake(Outcome::PortTaken { port, stranger }, None)
                        }
                        Err(PrepareError::Failed(failure)) => wake(Outcome::Failed(failure), None),
                    }
                });
            }
            Action::Release { launch_id } => {
                let gate = self
                    .slots
                    .get_mut(&launch_id)
                    .and_then(|slot| slot.gate.take());
                self.tasks.spawn_local(async move {
                    let opened = match gate {
                        Some(gate) => gate.open().await,
                        None => Err(LaunchFailure::SpawnFailed {
                            detail: "its gate is gone".to_owned(),
                        }),
                    };
                    match opened {
                        Ok(()) => wake(Outcome::Released, None),
                        Err(failure) => wake(Outcome::Failed(failure), None),
                    }
                });
            }
            Action::Resolve { launch_id } => {
                self.tasks.spawn_local(async move {
                    match launcher.find(launch_id).await {
                        Ok(handle) => wake(Outcome::Resolved(handle), None),
                        Err(unproven) => wake(Outcome::Unresolved { why: unproven.why }, None),
                    }
                });
            }
            Action::Signal {
                launch_id, signal, ..
            } => {
                // A gate that was not opened goes now: the engine never runs.
                if let Some(slot) = self.slots.get_mut(&launch_id) {
                    slot.gate = None;
                }
                self.tasks.spawn_local(async move {
                    match launcher.signal(&launch, signal).await {
                        Ok(members) => wake(Outcome::Signalled { signal, members }, None),
                        Err(unproven) => wake(Outcome::Unproven { why: unproven.why }, None),
                    }
                });
            }
            Action::Probe { launch_id, request } => {
                let (prober, probes) = (self.prober.clone(), self.probes.clone());
                self.tasks.spawn_local(async move {
                    let purpose = request.purpose;
                    let result = match probes.acquire().await {
                        Ok(_permit) => prober.probe(request, &launch).await,
                        Err(_closed) => ProbeResult::Failure {
                            detail: "the controller is ending".to_owned(),
                        },
                    };
                    Wake::Probed {
                        instance,
                        launch_id,
                        purpose,
                        result,
                    }
                });
            }
        }
    }

    /// Keeps the gate of a prepared launch. Without this it is dropped, and the engine never runs.
    pub fn keep_gate(&mut self, launch_id: LaunchId, gate: Box<dyn Gate>) {
        self.slots.entry(launch_id).or_default().gate = Some(gate);
    }

    /// Watches a launch, unless it is watched already.
    pub fn watch(&mut self, instance: InstanceName, launch: &Launch) {
        let slot = self.slots.entry(launch.id).or_default();
        if slot.is_watched || launch.handle.is_none() {
            return;
        }
        slot.is_watched = true;
        let launch_id = launch.id;
        let watching = self.launcher.watch(launch);
        self.tasks.spawn_local(async move {
            Wake::Ended {
                instance,
                launch_id,
                status: watching.await,
            }
        });
    }

    /// A watch ended.
    pub fn watch_ended(&mut self, launch_id: LaunchId, status: Option<ExitStatus>) {
        if let Some(slot) = self.slots.get_mut(&launch_id) {
            slot.is_watched = false;
            slot.seen = slot.seen.or(status);
        }
    }

    /// A watch may have broken off: whoever is inspected next is watched again, at worst twice.
    pub fn doubt_watches(&mut self) {
        for slot in self.slots.values_mut() {
            slot.is_watched = false;
        }
    }

    /// How the leader ended, as the watch told.
    pub fn seen(&self, launch_id: LaunchId) -> Option<ExitStatus> {
        self.slots.get(&launch_id).and_then(|slot| slot.seen)
    }

    /// Drops what is kept of launches that no record holds.
    pub fn keep_only(&mut self, is_held: impl Fn(LaunchId) -> bool) {
        self.slots.retain(|id, _| is_held(*id));
    }
}
