//! Launchers: each starts, inspects, signals and watches one kind of runtime. Only this folder knows what is inside a
//! handle.
//!
//! Effects return outcomes; nothing in here writes a record, retries or decides. A launch is two effects, *prepare* and
//! *release*, so that the record can be written between them.
//!
//! Invariant: nothing is signalled that is not proven ours at that moment, and nothing is called gone that is not
//! proven gone.

pub mod assemble;
pub mod child;
pub mod gate;
pub mod group;
pub mod logs;
pub mod process;
pub mod redact;

use std::future::Future;
use std::pin::Pin;

use crate::failure::{ExitStatus, LaunchFailure};
use crate::names::{InstanceName, LaunchId, Port};
use crate::observed::{Liveness, SignalKind, Stranger};
use crate::order::LaunchOrder;
use crate::record::{Handle, Launch};
use crate::spec::EnvVar;

/// An effect under way on the loop's own thread. Dropping it calls it off.
pub type Effect<T> = Pin<Box<dyn Future<Output = T>>>;

/// Starts, inspects, signals and watches one kind of runtime. Every effect ends by its own timeout.
pub trait Launcher {
    /// Starts everything but the engine itself, after testing that the port is free.
    fn prepare(&self, order: LaunchOrder) -> Effect<Result<Prepared, PrepareError>>;

    /// What carries this launch id, if anything does. For records that name no handle.
    fn find(&self, id: LaunchId) -> Effect<Result<Option<Handle>, Unproven>>;

    /// Whether it runs. `seen` is the exit status that a watch brought, if one did; `env` tells which values must not
    /// appear in the log's tail.
    fn inspect(
        &self,
        instance: &InstanceName,
        launch: &Launch,
        env: &[EnvVar],
        seen: Option<ExitStatus>,
    ) -> Liveness;

    /// Ends when something of the launch ends: the leader first, with its exit status; when it is gone already, a member
    /// that is left (then `None`).
    fn watch(&self, launch: &Launch) -> Effect<Option<ExitStatus>>;

    /// Signals every member that is proven ours.
    fn signal(&self, launch: &Launch, signal: SignalKind) -> Effect<Result<usize, Unproven>>;
}

/// A launch that waits at its gate.
pub struct Prepared {
    /// Who will become the engine.
    pub handle: Handle,
    /// What lets it.
    pub gate: Box<dyn Gate>,
}

/// Lets a prepared launch run. Dropping it calls the launch off: the engine never runs.
pub trait Gate {
    /// Opens the gate; ends when the engine is exec'ed, or failed to be.
    fn open(self: Box<Self>) -> Effect<Result<(), LaunchFailure>>;
}

/// Why nothing was prepared.
#[derive(Debug)]
pub enum PrepareError {
    /// A stranger holds the port.
    PortTaken {
        /// Which.
        port: Port,
        /// Who.
        stranger: Stranger,
    },
    /// Anything else.
    Failed(LaunchFailure),
}

/// It cannot be told whose a process is, so nothing was done.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct Unproven {
    /// Why.
    pub why: String,
}
