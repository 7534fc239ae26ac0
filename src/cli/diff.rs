//! `evenkeel diff DIR`: what a controller would do with this folder, without doing it.

use std::io::Write;
use std::path::{Path, PathBuf};

use super::report::{Exit, Report, clean_end};
use super::survey::{Scope, survey};
use crate::plan::{Plan, RecordChange, Step};

/// Shows what would be done with a folder.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct DiffArgs {
    /// The manifest folder
    pub folder: PathBuf,
    /// Devices of the host, declared in a file
    #[arg(long, value_name = "FILE", env = "EVENKEEL_DEVICES")]
    pub devices: Option<PathBuf>,
}

/// Nothing would be done.
pub const SAME: u8 = 0;

/// Something would be done.
pub const DIFFERENT: u8 = 1;

/// It cannot be told, or not wholly.
pub const ERROR: u8 = 2;

/// Prints the plan, and returns the exit code.
pub async fn diff(
    args: &DiffArgs,
    state: &Path,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> Result<u8, Report> {
    let scope = Scope {
        folder: Some(&args.folder),
        devices: args.devices.as_deref(),
        without_grace: true,
        ..Scope::default()
    };
    let survey = survey(state, &scope).await?;
    let written = |error: std::io::Error| Report::new(Exit::Failed, error);
    if let crate::desired::Folder::Unavailable { why } = &survey.desired.folder {
        return Err(Report::new(
            Exit::Failed,
            format!("{} cannot be read: {why}", args.folder.display()),
        ));
    }
    for problem in &survey.desired.problems {
        writeln!(err, "{}", problem.report).map_err(written)?;
    }
    let shown = Plan {
        steps: survey
            .plan
            .steps
            .into_iter()
            .filter(|(_, step)| is_shown(step))
            .collect(),
        deadline: None,
    };
    clean_end(write!(out, "{shown}").and_then(|()| out.flush())).map_err(written)?;
    Ok(
        match (survey.desired.problems.is_empty(), shown.is_change()) {
            (false, _) => ERROR,
            (true, true) => DIFFERENT,
            (true, false) => SAME,
        },
    )
}

/// Changes, and what a wanted instance waits for. That something became ready is no change of anybody's wish.
fn is_shown(step: &Step) -> bool {
    let waits_for_something = step.wait.as_ref().is_some_and(|wait| match &wait.reason {
        crate::plan::WaitReason::Ready
        | crate::plan::WaitReason::Starting { .. }
        | crate::plan::WaitReason::Effect(_) => false,
        reason => !reason.word().is_empty(),
    });
    let became_ready = match (&step.record, &step.wait) {
        (Some(RecordChange::Write(_)), Some(wait)) => {
            step.action.is_none()
                && wait.reason == crate::plan::WaitReason::Ready
                && !step.events.is_empty()
        }
        _ => false,
    };
    (step.is_change() || waits_for_something) && !became_ready
}
