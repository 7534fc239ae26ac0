//! `evenkeel run DIR`: the controller.

use std::path::{Path, PathBuf};

use tracing_subscriber::EnvFilter;

use super::progress::Progress;
use super::report::{Exit, Report};
use crate::controller::{self, OnExit, Options, RunError};
use crate::plan::action::whole_seconds;
use crate::plan::{Intent, Plan, WaitReason};
use crate::store::LockError;

/// Runs the controller.
#[derive(Debug, Clone, clap::Args)]
pub struct RunArgs {
    /// The manifest folder
    pub folder: PathBuf,
    /// Devices of the host, declared in a file
    #[arg(long, value_name = "FILE", env = "EVENKEEL_DEVICES")]
    pub devices: Option<PathBuf>,
    /// How many seconds a document must be absent before its instances are stopped
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, env = "EVENKEEL_REMOVAL_GRACE", value_parser = super::parse_seconds)]
    pub removal_grace: f64,
    /// How often everything is looked at, whatever was noticed, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30.0, env = "EVENKEEL_RESYNC", value_parser = super::parse_period)]
    pub resync: f64,
    /// How many instances may be between launch and ready at a time; 0: any number
    #[arg(
        long,
        value_name = "N",
        default_value_t = 8,
        env = "EVENKEEL_MAX_LAUNCHES"
    )]
    pub max_launches: u32,
    /// Instead of every engine's own start-up deadline, in seconds
    #[arg(long, value_name = "SECONDS", env = "EVENKEEL_STARTUP_DEADLINE", value_parser = clap::value_parser!(u32).range(1..))]
    pub startup_deadline: Option<u32>,
    /// A label of this host, for nodeSelector; can be repeated
    #[arg(long = "node-label", value_name = "KEY=VALUE", env = "EVENKEEL_NODE_LABEL", value_delimiter = ',', value_parser = parse_label)]
    pub node_labels: Vec<(String, String)>,
    /// Look into folders within the folder
    #[arg(long, env = "EVENKEEL_RECURSIVE")]
    pub recursive: bool,
    /// Look at the folder this often instead of watching it, for file systems without events
    #[arg(long, value_name = "SECONDS", env = "EVENKEEL_POLL", value_parser = super::parse_period)]
    pub poll: Option<f64>,
    /// What ending the controller does to the instances [default: SIGINT stops them, SIGTERM leaves them]
    #[arg(long, value_enum, env = "EVENKEEL_ON_EXIT")]
    pub on_exit: Option<OnExit>,
    /// Take a folder that everybody may write to: whoever can write manifests can run commands
    #[arg(long, env = "EVENKEEL_ALLOW_WORLD_WRITABLE")]
    pub allow_world_writable: bool,
    /// How log lines look
    #[arg(long, value_enum, default_value = "text", env = "EVENKEEL_LOG_FORMAT")]
    pub log_format: LogFormat,
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people
    Text,
    /// One JSON document per line
    Json,
}

fn parse_label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        Some(_) | None => Err("a label is KEY=VALUE".to_owned()),
    }
}

impl RunArgs {
    fn options(&self, state: &Path) -> Result<Options, Report> {
        // Not resolved further: a link that is swapped (git-sync) stays a link.
        let absolute = |path: &Path| {
            std::path::absolute(path).map_err(|error| Report::new(Exit::BadConfiguration, error))
        };
        Ok(Options {
            folder: absolute(&self.folder)?,
            state: absolute(state)?,
            devices: self.devices.as_deref().map(absolute).transpose()?,
            removal_grace_seconds: self.removal_grace,
            resync_seconds: self.resync,
            max_launches: self.max_launches,
            startup_deadline_seconds: self.startup_deadline,
            node_labels: self.node_labels.iter().cloned().collect(),
            folder_device: None,
            recursive: self.recursive,
            poll_seconds: self.poll,
            on_exit: self.on_exit,
            allow_world_writable: self.allow_world_writable,
        })
    }
}

/// Runs the controller until it is told to end.
pub async fn run(args: &RunArgs, state: &Path) -> Result<(), Report> {
    let options = args.options(state)?;
    let progress = Progress::new();
    start_logging(args.log_format, &progress);
    tracing::info!(folder = %options.folder.display(), state = %options.state.display(), "evenkeel {} begins", env!("CARGO_PKG_VERSION"));
    let onlooker = Box::new(move |plan: &Plan| show(plan, &progress));
    controller::run(options, Intent::Reconcile, onlooker)
        .await
        .map_err(report)
}

fn start_logging(format: LogFormat, progress: &Progress) {
    let filter = EnvFilter::try_from_env("EVENKEEL_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let progress = progress.clone();
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_target(false)
        .with_ansi(super::report::Colour::of(&std::io::stderr()) == super::report::Colour::Ansi)
        .with_writer(move || progress.clone());
    // Only fails when logging was started before, which then goes on.
    let _ = match format {
        LogFormat::Text => lines.try_init(),
        LogFormat::Json => lines.json().try_init(),
    };
}

/// What starts and stops, in one line.
fn show(plan: &Plan, progress: &Progress) {
    let mut moving = Vec::new();
    for (name, step) in &plan.steps {
        match step.wait.as_ref().map(|wait| &wait.reason) {
            Some(WaitReason::Starting { deadline, .. }) => moving.push(format!(
                "{name} starting, until {}",
                whole_seconds(*deadline)
            )),
            Some(WaitReason::Stopping { .. }) => moving.push(format!("{name} stopping")),
            Some(WaitReason::Proof { .. }) => moving.push(format!("{name} killed")),
            _ => {}
        }
    }
    if moving.is_empty() {
        progress.hide();
    } else {
        progress.show(moving.join(" · "));
    }
}

/// What a failure to run means for the exit code, and what can be done.
pub fn report(error: RunError) -> Report {
    let (exit, hint) = match &error {
        RunError::Folder(error) => (Exit::BadConfiguration, Some(error.hint())),
        RunError::Lock(error @ LockError::Held { .. }) => (Exit::StateInUse, Some(error.hint())),
        RunError::Lock(error) => (Exit::BadConfiguration, Some(error.hint())),
        RunError::Store(error) => (Exit::BadConfiguration, Some(error.hint())),
        RunError::Inventory(_) => (Exit::BadConfiguration, None),
        RunError::Journal(error) => (Exit::BadConfiguration, error.hint().map(str::to_owned)),
        RunError::Prober(_) | RunError::System { .. } => (Exit::Failed, None),
    };
    let report = Report::new(exit, error);
    match hint {
        Some(hint) => report.hint(hint),
        None => report,
    }
}
