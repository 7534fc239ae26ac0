//! One look at everything: the records, what runs, what the folder wishes, and what the plan makes of it.
//!
//! The same scan and the same plan as the daemon's, with nothing carried out: so the command line knows as much when no
//! controller runs, and no status needs to be stored anywhere.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use jiff::Timestamp;
use uuid::Uuid;

use crate::clock::Clock;
use crate::controller::Options;
use crate::desired::{Desired, Problem};
use crate::devices;
use crate::launch::Launcher;
use crate::launch::process::ProcessLauncher;
use crate::names::{DeploymentName, InstanceName, Port};
use crate::observed::{Instance, Inventory, Liveness, Observed, ProbeResult, Stranger};
use crate::plan::{self, Inputs, Intent, Plan, Settings, Step, state::State};
use crate::probe::{Prober, port_holder};
use crate::record::Record;
use crate::source::Scanner;
use crate::spec::Deployment;
use crate::store::{self, ControllerState};

use super::report::{Exit, Report};

/// One look at everything.
pub struct Survey {
    /// When.
    pub now: Timestamp,
    /// Whether a controller runs.
    pub is_reconciled: bool,
    /// The folder, if one is known.
    pub folder: Option<PathBuf>,
    /// What it wishes.
    pub desired: Desired,
    /// What is known.
    pub observed: Observed,
    /// What a pass would decide.
    pub plan: Plan,
}

/// What is surveyed.
#[derive(Debug, Clone, Default)]
pub struct Scope<'a> {
    /// Another folder than the controller's.
    pub folder: Option<&'a Path>,
    /// Another inventory than the controller's.
    pub devices: Option<&'a Path>,
    /// Only instances of this deployment are asked how they are.
    pub deployment: Option<&'a str>,
    /// Show what happens once every grace is over.
    pub without_grace: bool,
    /// Ask nobody how they are.
    pub unasked: bool,
}

/// Looks.
pub async fn survey(state: &Path, scope: &Scope<'_>) -> Result<Survey, Report> {
    let now = Clock::new().now();
    let failed = |error: Box<dyn std::error::Error>| Report::new(Exit::Failed, error);
    let controller = store::controller(state).map_err(|error| {
        let hint = error.hint();
        failed(error.into()).hint(hint)
    })?;
    let (is_reconciled, introduced) = match controller {
        ControllerState::Running(controller) => (true, Some(controller)),
        ControllerState::NotRunning(controller) => (false, controller),
    };
    let options: Option<Options> =
        introduced.and_then(|controller| serde_json::from_value(controller.settings).ok());
    let loaded = store::read_only(state).map_err(|error| {
        let hint = error.hint();
        failed(error.into()).hint(hint)
    })?;
    let folder = scope
        .folder
        .map(Path::to_path_buf)
        .or_else(|| options.as_ref().map(|options| options.folder.clone()));
    let devices = scope
        .devices
        .map(Path::to_path_buf)
        .or_else(|| options.as_ref().and_then(|options| options.devices.clone()));
    let inventory = devices::inventory(devices.as_deref()).map_err(|error| failed(error.into()))?;
    let desired = match &folder {
        Some(folder) => wishes(folder, options.as_ref(), &loaded.records, now),
        None => Desired::default(),
    };
    let mut settings = options.as_ref().map_or_else(Settings::default, |options| {
        options.settings(Intent::Reconcile)
    });
    if scope.without_grace {
        settings.removal_grace = Duration::ZERO;
    }
    let instances = observe(state, loaded.records, scope, now).await?;
    let observed = Observed {
        strangers: strangers(&desired, &instances),
        instances,
        quarantined: loaded.quarantined,
        ..Observed::default()
    };
    let plan = decide(&desired, &observed, &inventory, &settings, now);
    Ok(Survey {
        now,
        is_reconciled,
        folder,
        desired,
        observed,
        plan,
    })
}

fn decide(
    desired: &Desired,
    observed: &Observed,
    inventory: &Inventory,
    settings: &Settings,
    now: Timestamp,
) -> Plan {
    plan::plan(Inputs {
        desired,
        observed,
        inventory,
        settings,
        now,
        nonce: Uuid::new_v4(),
    })
}

fn wishes(
    folder: &Path,
    options: Option<&Options>,
    records: &BTreeMap<InstanceName, Record>,
    now: Timestamp,
) -> Desired {
    let owners = records
        .iter()
        .map(|(name, record)| (name.deployment.clone(), record.source.file.clone()))
        .collect();
    let scan_options = options.map(Options::scan_options).unwrap_or_default();
    let device = options
        .filter(|options| options.folder == folder)
        .and_then(|options| options.folder_device);
    let mut scanner = Scanner::new(folder.to_path_buf(), scan_options, owners).remembering(device);
    // A file that was written a moment ago is read all the same: this look is the only one.
    let files: BTreeSet<PathBuf> = scanner
        .scan(now, &BTreeSet::new())
        .desired
        .unreadable
        .into_keys()
        .collect();
    scanner.scan(now, &files).desired
}

/// Who else has the ports that manifests want exactly and nothing of ours holds.
fn strangers(
    desired: &Desired,
    instances: &BTreeMap<InstanceName, Instance>,
) -> BTreeMap<Port, Stranger> {
    let launches = instances
        .values()
        .filter_map(|instance| instance.record.launch.as_ref());
    let held: BTreeSet<Port> = launches.filter_map(|launch| launch.lease.port).collect();
    let wanted: BTreeSet<Port> = desired
        .deployments
        .values()
        .filter_map(|deployment| deployment.spec.port)
        .collect();
    let free = wanted.difference(&held);
    free.filter_map(|port| Some((*port, port_holder(*port)?)))
        .collect()
}

/// What runs, and how it is: each instance is asked once, all at the same time.
async fn observe(
    state: &Path,
    records: BTreeMap<InstanceName, Record>,
    scope: &Scope<'_>,
    now: Timestamp,
) -> Result<BTreeMap<InstanceName, Instance>, Report> {
    let launcher = ProcessLauncher::new(state);
    let prober = Prober::new(launcher.clone()).map_err(|error| Report::new(Exit::Failed, error))?;
    let mut instances = BTreeMap::new();
    let mut questions = tokio::task::JoinSet::new();
    for (name, record) in records {
        let mut instance = Instance::of_record(record);
        if let Some(launch) = instance
            .record
            .launch
            .clone()
            .filter(|launch| launch.handle.is_some())
        {
            instance.liveness = launcher.inspect(&name, &launch, &instance.record.spec.env, None);
            let is_asked = !scope.unasked
                && instance.liveness == Liveness::Alive
                && scope
                    .deployment
                    .is_none_or(|only| name.deployment.as_str() == only);
            if let Some(request) =
                plan::health::question(&instance.record.spec, &launch).filter(|_| is_asked)
            {
                let asking = prober.probe(request, &launch);
                let name = name.clone();
                questions.spawn_local(async move { (name, asking.await) });
            }
        }
        instances.insert(name, instance);
    }
    while let Some(answer) = questions.join_next().await {
        if let Ok((name, result)) = answer
            && let Some(instance) = instances.get_mut(&name)
        {
            // One answer says all there is to say in one look. It never counts against the liveness: a look stops
            // nothing.
            let record = &instance.record;
            let is_ready = record
                .launch
                .as_ref()
                .is_some_and(|launch| launch.ready_at.is_some());
            if is_ready || record.spec.startup_probe.is_none() {
                instance.health.readiness.count(now, result.clone());
            }
            instance.health.startup.count(now, result);
            instance.health.in_flight = true;
        }
    }
    Ok(instances)
}

/// A deployment and its instances.
pub struct DeploymentView<'a> {
    /// The deployment, as wished or as its records remember it.
    pub deployment: Deployment,
    /// Its instances, wanted or left over.
    pub instances: Vec<InstanceView<'a>>,
    /// What is wrong with its file.
    pub problems: Vec<&'a Problem>,
}

/// An instance as people are shown it.
pub struct InstanceView<'a> {
    /// Which.
    pub name: InstanceName,
    /// What is known of it.
    pub instance: Option<&'a Instance>,
    /// What is decided for it.
    pub step: &'a Step,
    /// Its state.
    pub state: State,
}

impl InstanceView<'_> {
    /// Why it is as it is: a word, and a sentence.
    pub fn reason(&self) -> (&'static str, String) {
        if let Some(wait) = &self.step.wait {
            return match wait.reason {
                plan::WaitReason::Ready => ("", String::new()),
                _ => (wait.reason.word(), wait.sentence()),
            };
        }
        match &self.step.action {
            Some(plan::Action::Signal { reason, .. }) => ("Terminating", reason.to_string()),
            Some(plan::Action::Prepare(_)) => ("Launching", "is launched next".to_owned()),
            Some(plan::Action::Resolve { .. }) => {
                ("InProgress", "the launch is being prepared".to_owned())
            }
            Some(plan::Action::Release { .. } | plan::Action::Probe { .. }) | None => {
                ("", String::new())
            }
        }
    }

    /// When it is tried again.
    pub fn next_try_at(&self) -> Option<Timestamp> {
        let wait = self.step.wait.as_ref()?;
        matches!(wait.reason, plan::WaitReason::BackOff { .. })
            .then_some(wait.until)
            .flatten()
    }

    /// What the last probe said, if it failed.
    pub fn failed_probe(&self) -> Option<&ProbeResult> {
        let (_, result) = self.instance?.health.readiness.last.as_ref()?;
        (*result != ProbeResult::Success).then_some(result)
    }
}

impl DeploymentView<'_> {
    /// The worst of its instances' states.
    pub fn state(&self) -> State {
        self.instances
            .iter()
            .map(|instance| instance.state)
            .max()
            .unwrap_or(State::Stopped)
    }

    /// The instance that is worst.
    pub fn worst(&self) -> Option<&InstanceView<'_>> {
        self.instances.iter().max_by_key(|instance| instance.state)
    }
}

impl Survey {
    /// The deployments, wished or still there.
    pub fn deployments(&self) -> BTreeMap<DeploymentName, DeploymentView<'_>> {
        let mut views: BTreeMap<DeploymentName, DeploymentView<'_>> = BTreeMap::new();
        let view = |deployment: Deployment| DeploymentView {
            deployment,
            instances: Vec::new(),
            problems: Vec::new(),
        };
        for (name, deployment) in &self.desired.deployments {
            views.insert(name.clone(), view(deployment.clone()));
        }
        for (name, instance) in &self.observed.instances {
            views
                .entry(name.deployment.clone())
                .or_insert_with(|| view(instance.record.deployment()));
        }
        for (name, step) in &self.plan.steps {
            let instance = self.observed.instances.get(name);
            if let Some(view) = views.get_mut(&name.deployment) {
                view.instances.push(InstanceView {
                    name: name.clone(),
                    instance,
                    step,
                    state: plan::state::state(instance, step),
                });
            }
        }
        for view in views.values_mut() {
            let file = view.deployment.source.file.clone();
            view.problems = self
                .desired
                .problems
                .iter()
                .filter(|problem| problem.file == file)
                .collect();
        }
        views
    }

    /// Problems of files that give no deployment.
    pub fn stray_problems(&self) -> Vec<&Problem> {
        let views = self.deployments();
        let files: BTreeSet<&Path> = views
            .values()
            .map(|view| view.deployment.source.file.as_path())
            .collect();
        self.desired
            .problems
            .iter()
            .filter(|problem| !files.contains(problem.file.as_path()))
            .collect()
    }
}
