//! `evenkeel wait NAME --for ready|gone`: until it is so.

use std::path::Path;
use std::time::Duration;

use super::progress::Progress;
use super::report::{Exit, Report};
use super::survey::{Scope, survey};
use crate::plan::WaitReason;
use crate::plan::state::State;

/// Waits until a deployment is ready or gone.
#[derive(Debug, Clone, clap::Args)]
pub struct WaitArgs {
    /// The deployment
    pub name: String,
    /// Until when
    #[arg(long = "for", value_enum, default_value = "ready")]
    pub condition: Condition,
    /// For how many seconds at most
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0, value_parser = super::parse_seconds)]
    pub timeout: f64,
}

/// What is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Condition {
    /// Every wanted instance answers
    Ready,
    /// Nothing of it is left
    Gone,
}

/// How often it is looked at: a person sees no delay, and a look costs a scan and a probe.
const PERIOD: Duration = Duration::from_millis(200);

/// Waits. It fails when the time is over, or when waiting longer cannot help.
pub async fn wait(args: &WaitArgs, state: &Path) -> Result<(), Report> {
    let progress = Progress::new();
    let deadline = tokio::time::Instant::now()
        + Duration::try_from_secs_f64(args.timeout).unwrap_or(Duration::MAX / 4);
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let seen = look(args, state).await?;
        let text = match seen {
            Seen::Met => return Ok(()),
            Seen::Hopeless(text) => {
                return Err(Report::new(
                    Exit::Failed,
                    format!("{} will not be ready: {text}", args.name),
                )
                .hint(format!("see `evenkeel describe {}`", args.name)));
            }
            Seen::NotYet(text) => text,
        };
        progress.show(format!("{}: {text}", args.name));
        if tokio::time::Instant::now() >= deadline {
            let what = match args.condition {
                Condition::Ready => "ready",
                Condition::Gone => "gone",
            };
            let error = format!(
                "{} is not {what} after {} s: {text}",
                args.name, args.timeout
            );
            return Err(Report::new(Exit::Failed, error)
                .hint(format!("see `evenkeel describe {}`", args.name)));
        }
    }
}

enum Seen {
    Met,
    NotYet(String),
    Hopeless(String),
}

async fn look(args: &WaitArgs, state: &Path) -> Result<Seen, Report> {
    let scope = Scope {
        deployment: Some(&args.name),
        unasked: args.condition == Condition::Gone,
        ..Scope::default()
    };
    let survey = survey(state, &scope).await?;
    let views = survey.deployments();
    let view = views
        .values()
        .find(|view| view.deployment.name.as_str() == args.name);
    let Some(view) = view else {
        return Ok(match args.condition {
            Condition::Gone => Seen::Met,
            Condition::Ready => Seen::NotYet("there is no such deployment yet".to_owned()),
        });
    };
    if args.condition == Condition::Gone {
        return Ok(Seen::NotYet(view.state().to_string()));
    }
    let text = view.worst().map_or_else(String::new, |worst| {
        let (_, sentence) = worst.reason();
        let sentence = if sentence.is_empty() {
            String::new()
        } else {
            format!(" ({sentence})")
        };
        format!("{}{sentence}", worst.state)
    });
    let waits = || {
        view.instances
            .iter()
            .filter_map(|instance| instance.step.wait.as_ref())
    };
    let is_hopeless = waits().any(|wait| {
        matches!(
            wait.reason,
            WaitReason::Refused(_) | WaitReason::Completed | WaitReason::OtherNode
        )
    });
    Ok(match view.state() {
        State::Ready => Seen::Met,
        State::Stopped => Seen::Hopeless("its manifest says `replicas: 0`".to_owned()),
        _ if is_hopeless => Seen::Hopeless(text),
        _ => Seen::NotYet(text),
    })
}
