//! Wakes: reasons to look again. What they carry goes into the caches that the next pass reads; none of it decides
//! anything by itself.

use crate::failure::ExitStatus;
use crate::launch::Gate;
use crate::names::{InstanceName, LaunchId};
use crate::observed::{Outcome, ProbeResult};
use crate::order::ProbePurpose;
use crate::source::{Scan, Scanner};

/// An effect ended.
pub(super) enum Wake {
    /// A lifecycle effect. A gate comes with what was prepared.
    Outcome {
        instance: InstanceName,
        launch_id: LaunchId,
        outcome: Outcome,
        gate: Option<Box<dyn Gate>>,
    },
    /// A probe.
    Probed {
        instance: InstanceName,
        launch_id: LaunchId,
        purpose: ProbePurpose,
        result: ProbeResult,
    },
    /// Something of a launch ended.
    Ended {
        instance: InstanceName,
        launch_id: LaunchId,
        status: Option<ExitStatus>,
    },
    /// A scan of the folder; none if it broke off.
    Scanned(Option<Box<(Scanner, Scan)>>),
}
