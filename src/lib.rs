//! evenkeel keeps the model servers of a GPU box running as their owner declared.
//!
//! People drop manifests into a folder; a reconcile loop compares them with the live instance records and launches what is
//! missing, stops what was removed, and re-launches what exited or went unhealthy. There is no separate supervisor:
//! supervising is part of each pass. This page **is** the architecture; it is kept true as the code changes.
//!
//! # Flow: one loop, one direction
//!
//! ```text
//!  fs event   process exit   effect outcome   probe result   deadline   resync   signal     wakes: a reason for the log,
//!     └───────────┴───────────────┴──────┬────────┴────────────┴──────────┴────────┘        never data for the decision
//!                                        ▼
//!                                mark "look again"                    (many wakes, one pass)
//!                                        │
//!  folder/*.yaml ─► source ───► Desired ─┴─────────────┐
//!                                                      ▼
//!  records/*.json ─► store ─────┐               ┌─────────────┐      Plan
//!  /proc ─────────► launch ─────┼─► Observed ──►│ plan (pure) │────► ├ steps: record change, action, wait, events
//!  probe results ──► probe ─────┤               └─────────────┘      └ deadline: the earliest of all waits
//!  effects in flight ───────────┘  Inventory, Settings, now ──▲
//!                                        ┌──────────────────────────────┘
//!                                        ▼
//!                   1 commit    records first (launch id, lease, intent)        controller::step, the single writer
//!                   2 dispatch  each action into its instance's slot            controller::execute → launch, probe
//!                   3 emit      events                                          journal, tracing
//!                   4 sleep     until a wake or the deadline
//!                                        ▲
//!                                        └──── Outcome { launch id, result }, a wake like any other
//! ```
//!
//! [`Desired`](desired::Desired) and [`Observed`](observed::Observed) are values, rebuilt from caches that sources keep
//! fresh; nothing is patched by a callback. The [`plan`] is global, because leases, ports and the launch limit need one view
//! of everything; execution is per instance, with one lifecycle slot, one probe slot and one watch each, so a slow launch
//! holds up its own instance and nothing else. Waiting is a fact and a deadline, never a sleeping task. The same [`plan::plan`]
//! serves the daemon, `evenkeel diff`, `evenkeel get`, the tests and the simulator; the simulator also drives the daemon's own
//! [`controller::step`].
//!
//! # A launch is two effects with a record between them
//!
//! *Prepare* starts `evenkeel __gate`: it leaves the session, opens the log and waits on a pipe. Its pid and start time go
//! into the record. Only then *release* opens the gate, and the gate becomes the engine under the same pid. A controller that
//! dies before closes the pipe, and the gate leaves without ever running the engine: no engine runs that no record names.
//!
//! | the controller dies | the next start sees | resolution |
//! |---|---|---|
//! | before the record | nothing | plan again |
//! | after the record, before the gate | reserved, nothing carries the launch id | never started, relaunch at once |
//! | after the gate started, before its handle is saved | reserved; the gate leaves | the same |
//! | handle saved, gate not opened | the handle of a process that is gone | ended, relaunch at once |
//! | gate opened | a running record | identity check, adopted |
//! | stop intent saved | stopping | signalled again, the grace counts from the saved time |
//! | ended, before the record says so | a dead handle | ended |
//! | record removed | nothing | nothing |
//!
//! # Modules, in reading order
//!
//! * **Words**, values only, no I/O, no clock: [`names`], [`manifest`], [`spec`], [`failure`], [`event`], [`record`],
//!   [`desired`], [`observed`], [`order`] (what effects are asked to do).
//! * **Knowledge**, pure functions over words: [`engine`], [`plan`].
//! * **Effects**, each one outside thing: [`source`] (the folder), [`store`] (records, quarantine, the lock), [`launch`]
//!   (processes), [`probe`], [`devices`], [`journal`], [`clock`]; and what they share of the system: [`procfs`], [`files`].
//! * **Shell**, the only place that holds state and awaits: [`controller`], [`cli`].
//! * [`echo`], the stand-in for a model server, knows nothing of the others.
//!
//! Direction: `cli → controller → {effects, plan}`, `plan → {engine, words}`, `effects → words`. Effects do not know the plan.
//! Only [`launch`] acts on what is inside a handle; only [`source`] and [`cli`] know YAML (and [`devices`] for its one declared
//! file); only [`controller`] writes records. `tests/layering.rs` holds this, and clippy's `disallowed_methods` the rest: a
//! file that reads files, starts processes or reads a clock says so in its first lines. No `unsafe`.
//!
//! # Invariants
//!
//! 1. [`plan::plan`] is total, synchronous and a function of its arguments.
//! 2. Planning again on what a plan's commits produce yields only waits.
//! 3. No device and no port is in two leases, where everything not proven gone counts as holding.
//! 4. Unreadable never means removed; unknown never means gone.
//! 5. At most one lifecycle effect per instance; no effect without a timeout.
//! 6. The record is on disk before the effect starts; a record goes last, after its instance is proven gone.
//! 7. No signal goes to a process that is not proven ours at that moment.
//! 8. Changing one deployment causes no action on another, except through leases.
//! 9. Every wake can be lost: the system still converges within one resync.
//! 10. A failing instance neither ends the loop nor delays another.
//! 11. Restarting or upgrading the controller restarts no instance.

#![warn(clippy::disallowed_methods)]
#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, reason = "tests set the scene themselves")
)]

pub mod names;

pub mod manifest;

pub mod spec;

pub mod failure;

pub mod event;

pub mod record;

pub mod desired;

pub mod observed;

pub mod order;

pub mod engine;

pub mod plan;

pub mod source;

pub mod store;

pub mod launch;

pub mod probe;

pub mod devices;

pub mod journal;

pub mod clock;

pub mod procfs;

pub mod files;

pub mod controller;

pub mod echo;

pub mod cli;

#[cfg(test)]
pub mod testing;

#[cfg(test)]
mod sim;
