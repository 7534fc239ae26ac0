//! `evenkeel get [NAME]`: the deployments and their instances.
//!
//! Invariant: within `v1alpha1` fields of the machine-readable output are added, never renamed or removed.

use std::io::{self, Write};
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::report::{Exit, Report};
use super::survey::{DeploymentView, InstanceView, Scope, Survey, survey};
use super::table::{Table, age, one_line};
use crate::desired::Problem;
use crate::plan::state::State;

/// Shows deployments and their instances.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct GetArgs {
    /// Only this deployment
    pub name: Option<String>,
    /// How
    #[arg(short, long, value_enum)]
    pub output: Option<Output>,
    /// Go on showing, until interrupted
    #[arg(short, long)]
    pub watch: bool,
}

/// How deployments are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Output {
    /// More columns
    Wide,
    /// One JSON document
    Json,
    /// One YAML document
    Yaml,
    /// Names only
    Name,
}

/// How often a watch looks: each look is a scan and a probe, so not more often than a person reads.
const WATCH_PERIOD: Duration = Duration::from_secs(2);

/// Shows deployments and their instances.
pub async fn get(args: &GetArgs, state: &Path, out: &mut dyn Write) -> Result<(), Report> {
    let mut ticks = tokio::time::interval(WATCH_PERIOD);
    let mut before = None;
    loop {
        ticks.tick().await;
        let scope = Scope {
            deployment: args.name.as_deref(),
            ..Scope::default()
        };
        let survey = survey(state, &scope).await?;
        let text = print(args, &survey)?;
        if before.as_ref() != Some(&text) {
            out.write_all(text.as_bytes())
                .and_then(|()| out.flush())
                .map_err(|error| Report::new(Exit::Failed, error))?;
            before = Some(text);
        }
        if !args.watch {
            return Ok(());
        }
    }
}

fn print(args: &GetArgs, survey: &Survey) -> Result<String, Report> {
    let views = survey.deployments();
    let wanted = |name: &str| args.name.as_deref().is_none_or(|only| only == name);
    let chosen: Vec<_> = views
        .values()
        .filter(|view| wanted(view.deployment.name.as_str()))
        .collect();
    if let Some(name) = args.name.as_deref().filter(|_| chosen.is_empty()) {
        return Err(unknown(name, survey));
    }
    if !survey.is_reconciled && !matches!(args.output, Some(Output::Name)) {
        eprintln!("no controller runs: nobody is reconciling, and this is what would be found");
    }
    let written = |error: io::Error| Report::new(Exit::Failed, error);
    let mut text = Vec::new();
    match args.output {
        Some(Output::Json) => {
            let document = document(&chosen, survey);
            let json = serde_json::to_string_pretty(&document)
                .map_err(|error| Report::new(Exit::Failed, error))?;
            writeln!(text, "{json}").map_err(written)?;
        }
        Some(Output::Yaml) => {
            let document = document(&chosen, survey);
            let yaml = serde_yaml::to_string(&document)
                .map_err(|error| Report::new(Exit::Failed, error))?;
            write!(text, "{yaml}").map_err(written)?;
        }
        Some(Output::Name) => {
            for view in &chosen {
                writeln!(text, "{}", view.deployment.name).map_err(written)?;
            }
        }
        Some(Output::Wide) => print_wide(&chosen, survey, &mut text).map_err(written)?,
        None => print_narrow(&chosen, survey, &mut text).map_err(written)?,
    }
    if matches!(args.output, None | Some(Output::Wide)) {
        if chosen.is_empty() {
            eprintln!(
                "no deployments{}",
                survey
                    .folder
                    .as_ref()
                    .map(|folder| format!(" in {}", folder.display()))
                    .unwrap_or_default()
            );
        }
        for record in &survey.observed.quarantined {
            eprintln!(
                "quarantined: {} cannot be read, and what it holds stays held (see `evenkeel events`)",
                record.file.display()
            );
        }
        for problem in survey
            .desired
            .problems
            .iter()
            .filter(|_| args.name.is_none())
        {
            eprintln!("problem: {}", one_line(&problem.to_string()));
        }
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Nothing has this name.
pub fn unknown(name: &str, survey: &Survey) -> Report {
    let names: Vec<String> = survey
        .deployments()
        .keys()
        .map(ToString::to_string)
        .collect();
    let report = Report::new(Exit::Failed, format!("no deployment is called `{name}`"));
    if names.is_empty() {
        report.hint(
            "there is none at all: does the controller run on this state folder (`--state-dir`)?",
        )
    } else {
        report.hint(format!("there are {}", names.join(", ")))
    }
}

fn print_narrow(
    views: &[&DeploymentView<'_>],
    survey: &Survey,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut table = Table::new([
        "NAME", "STATE", "PORT", "DEVICES", "RESTARTS", "AGE", "REASON",
    ]);
    for (name, view, instance) in rows(views) {
        let state = instance.map_or(view.state(), |instance| instance.state);
        let [port, devices, restarts, age] = facts(instance, survey);
        table.row([
            name,
            state.to_string(),
            port,
            devices,
            restarts,
            age,
            reason(instance),
        ]);
    }
    table.print(out)
}

fn print_wide(
    views: &[&DeploymentView<'_>],
    survey: &Survey,
    out: &mut dyn Write,
) -> io::Result<()> {
    let mut table = Table::new([
        "NAME", "STATE", "PORT", "DEVICES", "RESTARTS", "AGE", "ENGINE", "PID", "SOURCE", "REASON",
    ]);
    for (name, view, instance) in rows(views) {
        let state = instance.map_or(view.state(), |instance| instance.state);
        let [port, devices, restarts, age] = facts(instance, survey);
        let pid = instance
            .and_then(pid)
            .map_or_else(dash, |pid| pid.to_string());
        let engine = view.deployment.spec.engine.to_string();
        let source = view.deployment.source.file.display().to_string();
        table.row([
            name,
            state.to_string(),
            port,
            devices,
            restarts,
            age,
            engine,
            pid,
            source,
            reason(instance),
        ]);
    }
    table.print(out)
}

/// One row per instance, and one for a deployment without any.
fn rows<'a>(
    views: &'a [&'a DeploymentView<'a>],
) -> impl Iterator<Item = (String, &'a DeploymentView<'a>, Option<&'a InstanceView<'a>>)> {
    views.iter().flat_map(|view| {
        let none = view
            .instances
            .is_empty()
            .then(|| (view.deployment.name.to_string(), *view, None));
        let some = view
            .instances
            .iter()
            .map(|instance| (instance.name.to_string(), *view, Some(instance)));
        none.into_iter().chain(some)
    })
}

fn dash() -> String {
    "-".to_owned()
}

fn pid(instance: &InstanceView<'_>) -> Option<u32> {
    instance
        .instance?
        .record
        .launch
        .as_ref()?
        .handle
        .as_ref()?
        .pid()
}

/// Port, devices, restarts, age.
fn facts(instance: Option<&InstanceView<'_>>, survey: &Survey) -> [String; 4] {
    let record = instance
        .and_then(|instance| instance.instance)
        .map(|instance| &instance.record);
    let launch = record.and_then(|record| record.launch.as_ref());
    let port = launch
        .and_then(|launch| launch.lease.port)
        .map_or_else(dash, |port| port.to_string());
    let devices: Vec<_> = launch
        .iter()
        .flat_map(|launch| &launch.lease.devices)
        .map(|device| device.id.as_str())
        .collect();
    let devices = if devices.is_empty() {
        dash()
    } else {
        devices.join(",")
    };
    let restarts = record.map_or_else(dash, |record| record.history.restarts.to_string());
    let age = launch.map_or_else(dash, |launch| {
        age(survey.now, launch.started_at.unwrap_or(launch.reserved_at))
    });
    [port, devices, restarts, age]
}

fn reason(instance: Option<&InstanceView<'_>>) -> String {
    let Some(instance) = instance else {
        return String::new();
    };
    let (word, sentence) = instance.reason();
    match (word, sentence.as_str()) {
        ("", "") => instance
            .failed_probe()
            .map(ToString::to_string)
            .unwrap_or_default(),
        (word, "") => word.to_owned(),
        ("", sentence) => sentence.to_owned(),
        (word, sentence) => format!("{word}: {sentence}"),
    }
}

/// The machine-readable output.
pub fn document(views: &[&DeploymentView<'_>], survey: &Survey) -> Value {
    let items: Vec<Value> = views.iter().map(|view| item(view)).collect();
    let problems: Vec<Value> = survey.stray_problems().into_iter().map(problem).collect();
    json!({
        "apiVersion": "evenkeel.dev/v1alpha1",
        "kind": "ModelDeploymentList",
        "reconciled": survey.is_reconciled,
        "items": items,
        "problems": problems,
    })
}

fn item(view: &DeploymentView<'_>) -> Value {
    let deployment = &view.deployment;
    let (reason, message) = view.worst().map(InstanceView::reason).unwrap_or_default();
    let ready = view
        .instances
        .iter()
        .filter(|instance| instance.state == State::Ready)
        .count();
    let problems: Vec<Value> = view.problems.iter().map(|found| problem(found)).collect();
    let instances: Vec<Value> = view
        .instances
        .iter()
        .map(|instance| instance_item(instance, view))
        .collect();
    json!({
        "metadata": {
            "name": deployment.name,
            "labels": deployment.labels.labels,
            "annotations": deployment.labels.annotations,
        },
        "spec": deployment.spec,
        "status": {
            "state": view.state().to_string(),
            "reason": reason,
            "message": message,
            "replicas": deployment.spec.replicas,
            "readyReplicas": ready,
            "source": {
                "file": deployment.source.file.to_string_lossy(),
                "document": deployment.source.document,
                "revision": deployment.source.revision,
            },
            "problems": problems,
            "instances": instances,
        },
    })
}

fn instance_item(view: &InstanceView<'_>, deployment: &DeploymentView<'_>) -> Value {
    let record = view.instance.map(|instance| &instance.record);
    let launch = record.and_then(|record| record.launch.as_ref());
    let (reason, message) = view.reason();
    let devices: Vec<_> = launch
        .iter()
        .flat_map(|launch| &launch.lease.devices)
        .map(|device| &device.id)
        .collect();
    json!({
        "name": view.name,
        "state": view.state.to_string(),
        "reason": reason,
        "message": message,
        "runtime": record.map_or(deployment.deployment.spec.runtime, |record| record.spec.runtime),
        "pid": pid(view),
        "containerId": Value::Null,
        "port": launch.and_then(|launch| launch.lease.port),
        "devices": devices,
        "restarts": record.map_or(0, |record| record.history.restarts),
        "launchId": launch.map(|launch| launch.id),
        "startedAt": launch.and_then(|launch| launch.started_at),
        "readyAt": launch.and_then(|launch| launch.ready_at),
        "nextTryAt": view.next_try_at(),
        "lastEnding": record.and_then(|record| record.history.last.as_ref()).map(|last| json!({
            "at": last.at,
            "reason": last.cause.reason(),
            "message": last.cause.to_string(),
        })),
    })
}

fn problem(problem: &Problem) -> Value {
    json!({
        "file": problem.file.to_string_lossy(),
        "line": problem.line,
        "column": problem.column,
        "path": problem.path,
        "message": problem.message,
    })
}
