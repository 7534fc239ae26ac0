//! `evenkeel down`: stops everything, and waits until it is gone.
//!
//! The controller, if one runs, is asked to stop what it runs, and ends. What is left is stopped here, by the same loop
//! with everything unwanted.

use std::path::Path;
use std::time::Duration;

use pidfd_util::{PidFd, PidFdExt};

use super::progress::Progress;
use super::report::{Exit, Report};
use crate::controller::{self, Options};
use crate::names::InstanceName;
use crate::plan::{Intent, Plan};
use crate::procfs::Procfs;
use crate::store::{self, Controller, ControllerState};

/// Stops everything and waits.
#[derive(Debug, Clone, clap::Args)]
pub struct DownArgs {
    /// For how many seconds at most
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0, value_parser = super::parse_seconds)]
    pub timeout: f64,
}

/// How often the controller is looked at while it stops.
const PERIOD: Duration = Duration::from_millis(100);

/// Stops everything and waits.
pub async fn down(args: &DownArgs, state: &Path) -> Result<(), Report> {
    let timeout = Duration::try_from_secs_f64(args.timeout).unwrap_or(Duration::MAX / 4);
    match tokio::time::timeout(timeout, stop_everything(state)).await {
        Ok(result) => result.and_then(|()| check_quarantine(state)),
        Err(_) => {
            let left: Vec<String> = instances(state)?.iter().map(ToString::to_string).collect();
            let error = format!(
                "not everything is stopped after {} s: {}",
                args.timeout,
                left.join(", ")
            );
            Err(Report::new(Exit::Failed, error)
                .hint("see `evenkeel get`; stopping goes on where a controller runs"))
        }
    }
}

/// Whose record cannot be read is not known, so it may run on.
fn check_quarantine(state: &Path) -> Result<(), Report> {
    let quarantined = loaded(state)?.quarantined;
    if quarantined.is_empty() {
        return Ok(());
    }
    let files: Vec<String> = quarantined
        .iter()
        .map(|record| record.file.display().to_string())
        .collect();
    let error = format!(
        "what these records were of may still run: {}",
        files.join(", ")
    );
    Err(Report::new(Exit::Failed, error).hint("make sure that it does not, then delete them"))
}

async fn stop_everything(state: &Path) -> Result<(), Report> {
    let progress = Progress::new();
    let options = match controller_of(state)? {
        ControllerState::Running(controller) => {
            interrupt(&controller)?;
            wait_for_end(state, &progress).await?;
            serde_json::from_value(controller.settings).ok()
        }
        ControllerState::NotRunning(controller) => {
            controller.and_then(|controller| serde_json::from_value(controller.settings).ok())
        }
    };
    if instances(state)?.is_empty() {
        return Ok(());
    }
    let options = Options {
        state: state.to_path_buf(),
        ..options.unwrap_or_else(|| Options::stopping(state))
    };
    let onlooker =
        Box::new(move |plan: &Plan| progress.show(format!("stopping {}", plan.steps.len())));
    controller::run(options, Intent::StopAll, onlooker)
        .await
        .map_err(super::run::report)
}

fn controller_of(state: &Path) -> Result<ControllerState, Report> {
    store::controller(state).map_err(|error| {
        let hint = error.hint();
        Report::new(Exit::Failed, error).hint(hint)
    })
}

fn loaded(state: &Path) -> Result<store::Loaded, Report> {
    store::read_only(state).map_err(|error| {
        let hint = error.hint();
        Report::new(Exit::Failed, error).hint(hint)
    })
}

fn instances(state: &Path) -> Result<Vec<InstanceName>, Report> {
    Ok(loaded(state)?.records.into_keys().collect())
}

/// SIGINT to the very process that holds the lock: opened first, proven after, signalled through what was opened.
fn interrupt(controller: &Controller) -> Result<(), Report> {
    let unproven = || {
        Report::new(
            Exit::Failed,
            format!("{controller} cannot be found among the processes here"),
        )
        .hint(
            "if it runs in a container, stop it there with SIGINT; then run `evenkeel down` again",
        )
    };
    let pid = i32::try_from(controller.pid).map_err(|_| unproven())?;
    let pidfd = PidFd::from_pid(pid).map_err(|_| unproven())?;
    let proc = Procfs::default();
    let is_it = proc
        .boot_id()
        .is_ok_and(|boot_id| boot_id == controller.boot_id)
        && proc
            .stat(controller.pid)
            .ok()
            .flatten()
            .is_some_and(|stat| stat.start_ticks == controller.start_ticks);
    if !is_it {
        return Err(unproven());
    }
    pidfd.send_signal(nix::libc::SIGINT).map_err(|error| {
        Report::new(Exit::Failed, error).hint(format!("{controller} could not be signalled"))
    })
}

async fn wait_for_end(state: &Path, progress: &Progress) -> Result<(), Report> {
    let mut ticks = tokio::time::interval(PERIOD);
    loop {
        ticks.tick().await;
        match controller_of(state)? {
            ControllerState::NotRunning(_) => return Ok(()),
            ControllerState::Running(_) => {
                let left = instances(state)?.len();
                progress.show(format!("stopping {left} instances"));
            }
        }
    }
}
