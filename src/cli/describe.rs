//! `evenkeel describe NAME`: everything a person may want to know of one deployment.

use std::io::{self, Write};
use std::path::Path;

use super::get::unknown;
use super::report::{Exit, Report};
use super::survey::{DeploymentView, InstanceView, Scope, survey};
use super::table::{age, one_line};
use crate::journal;
use crate::plan::action::whole_seconds;
use crate::record::Launch;
use jiff::Timestamp;

/// Shows everything of one deployment.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct DescribeArgs {
    /// The deployment
    pub name: String,
}

/// How many events are shown: the latest.
const EVENTS: usize = 20;

/// Shows everything of one deployment.
pub async fn describe(
    args: &DescribeArgs,
    state: &Path,
    out: &mut dyn Write,
) -> Result<(), Report> {
    let scope = Scope {
        deployment: Some(&args.name),
        ..Scope::default()
    };
    let survey = survey(state, &scope).await?;
    let views = survey.deployments();
    let Some(view) = views
        .values()
        .find(|view| view.deployment.name.as_str() == args.name)
    else {
        return Err(unknown(&args.name, &survey));
    };
    if !survey.is_reconciled {
        eprintln!("no controller runs: nobody is reconciling, and this is what would be found");
    }
    let events = journal::read(state)
        .map(|history| history.entries)
        .unwrap_or_default();
    let events: Vec<_> = events
        .iter()
        .filter(|entry| entry.event.deployment.as_ref() == Some(&view.deployment.name))
        .collect();
    let latest = &events[events.len().saturating_sub(EVENTS)..];
    print(view, latest, survey.now, out).map_err(|error| Report::new(Exit::Failed, error))
}

fn print(
    view: &DeploymentView<'_>,
    events: &[&journal::Entry],
    now: Timestamp,
    out: &mut dyn Write,
) -> io::Result<()> {
    let deployment = &view.deployment;
    writeln!(out, "Name:        {}", deployment.name)?;
    writeln!(out, "State:       {}", view.state())?;
    writeln!(
        out,
        "Engine:      {} ({})",
        deployment.spec.engine, deployment.spec.runtime
    )?;
    writeln!(
        out,
        "Source:      {}, document {}",
        deployment.source.file.display(),
        deployment.source.document
    )?;
    writeln!(out, "Replicas:    {}", deployment.spec.replicas)?;
    for (heading, map) in [
        ("Labels:", &deployment.labels.labels),
        ("Annotations:", &deployment.labels.annotations),
    ] {
        for (n, (key, value)) in map.iter().enumerate() {
            writeln!(
                out,
                "{:<12} {key}={}",
                if n == 0 { heading } else { "" },
                one_line(value)
            )?;
        }
    }
    for (field, value) in deployment.spec.restart_fields() {
        writeln!(out, "  {field}: {}", one_line(&value.to_string()))?;
    }
    for problem in &view.problems {
        writeln!(
            out,
            "\nProblem with its file, so the last accepted manifest stays in force:\n{}",
            problem.report
        )?;
    }
    for instance in &view.instances {
        print_instance(instance, now, out)?;
    }
    writeln!(out, "\nEvents:")?;
    if events.is_empty() {
        writeln!(out, "  none")?;
    }
    for entry in events {
        let event = &entry.event;
        writeln!(
            out,
            "  {:>5} ago  {:<20} {:<12} {}{}",
            age(now, entry.last_seen),
            event.reason,
            event.subject(),
            one_line(&event.message),
            if entry.count > 1 {
                format!(" (×{})", entry.count)
            } else {
                String::new()
            },
        )?;
    }
    out.flush()
}

fn print_instance(view: &InstanceView<'_>, now: Timestamp, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "\nInstance {}:", view.name)?;
    let (word, sentence) = view.reason();
    writeln!(out, "  State:     {}", view.state)?;
    if !word.is_empty() || !sentence.is_empty() {
        writeln!(out, "  Reason:    {word}: {}", one_line(&sentence))?;
    }
    if let Some(at) = view.next_try_at() {
        writeln!(out, "  Next try:  {}", whole_seconds(at))?;
    }
    if let Some(probe) = view.failed_probe() {
        writeln!(out, "  Probe:     {}", one_line(&probe.to_string()))?;
    }
    let Some(record) = view.instance.map(|instance| &instance.record) else {
        return Ok(());
    };
    if let Some(launch) = &record.launch {
        print_launch(launch, now, out)?;
    }
    writeln!(
        out,
        "  Restarts:  {} ({} failures in a row)",
        record.history.restarts, record.history.failures
    )?;
    if let Some(last) = &record.history.last {
        let ago = age(now, last.at);
        writeln!(
            out,
            "  Last end:  {} ago, {}: {}",
            ago,
            last.cause.reason(),
            one_line(&last.cause.to_string())
        )?;
        if let Some(tail) = last.cause.log_tail().filter(|tail| !tail.is_empty()) {
            writeln!(out, "  The end of its log:")?;
            for line in tail.lines() {
                writeln!(out, "    | {}", one_line(line))?;
            }
        }
    }
    Ok(())
}

fn print_launch(launch: &Launch, now: Timestamp, out: &mut dyn Write) -> io::Result<()> {
    if let Some(pid) = launch.handle.as_ref().and_then(crate::record::Handle::pid) {
        writeln!(out, "  Pid:       {pid}")?;
    }
    if let Some(port) = launch.lease.port {
        writeln!(out, "  Port:      {port}")?;
    }
    for device in &launch.lease.devices {
        writeln!(out, "  Device:    {}", device.id)?;
    }
    writeln!(out, "  Launch id: {}", launch.id)?;
    if let Some(started_at) = launch.started_at {
        writeln!(
            out,
            "  Started:   {} ({} ago)",
            whole_seconds(started_at),
            age(now, started_at)
        )?;
    }
    if let Some(ready_at) = launch.ready_at {
        writeln!(
            out,
            "  Ready:     {} ({} ago)",
            whole_seconds(ready_at),
            age(now, ready_at)
        )?;
    }
    if let Some(stop) = &launch.stop {
        writeln!(
            out,
            "  Stopping:  since {}, {}",
            whole_seconds(stop.asked_at),
            one_line(&stop.reason.to_string())
        )?;
    }
    Ok(())
}
