//! The folder of manifests and its scanner, in the manner of `source/`.
//!
//! Invariant: the scanner says what the folder wishes as far as it can be read, [`Truth`] what it wishes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::json;

use super::Random;
use crate::desired::{self, Desired, Unreadable};
use crate::manifest::{DeletionPolicy, ManifestProbe, RestartPolicy};
use crate::names::{DeploymentName, InstanceName};
use crate::spec::{Backoff, Deployment, DeviceRequest, RestartKey, Source};

#[derive(Debug, Clone, Default)]
pub(super) struct Folder {
    pub files: BTreeMap<PathBuf, File>,
    pub is_unavailable: bool,
    /// Since when git is at work.
    pub git_since: Option<Timestamp>,
    /// No two contents that need a relaunch between them have the same revision.
    last_revision: u32,
}

#[derive(Debug, Clone)]
pub(super) struct File {
    pub deployment: Deployment,
    /// Another with each change that forces a relaunch.
    pub revision: u32,
    pub state: FileState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileState {
    Good,
    /// It is no manifest at present, but its words can be read.
    Broken,
    /// Not even its words can be read.
    Hidden,
}

/// What a folder wishes at one moment.
#[derive(Debug, Clone, Default)]
pub(super) struct Truth {
    /// None while the folder could not be listed.
    pub files: Option<BTreeMap<DeploymentName, File>>,
}

impl Truth {
    /// Whether the instance was certainly not wanted.
    pub fn is_unwanted(&self, name: &InstanceName) -> bool {
        match &self.files {
            None => false,
            Some(files) => files
                .get(&name.deployment)
                .is_none_or(|file| file.deployment.spec.replicas <= name.ordinal),
        }
    }
}

impl Folder {
    pub fn truth(&self) -> Truth {
        let files = || {
            let files = self.files.values();
            files.map(|file| (file.deployment.name.clone(), file.clone()))
        };
        Truth {
            files: (!self.is_unavailable).then(|| files().collect()),
        }
    }

    /// A number for new content.
    pub fn new_revision(&mut self) -> u32 {
        self.last_revision += 1;
        self.last_revision
    }
}

/// Removals wait this long for git at most.
const GIT_WAIT: Duration = Duration::from_mins(1);

/// What is missing or waits for git is looked at again this soon.
const CONFIRM: Duration = Duration::from_secs(1);

/// Reads the folder again and again.
#[derive(Debug, Clone, Default)]
pub(super) struct Scanner {
    accepted: BTreeMap<PathBuf, Deployment>,
    owners: BTreeMap<DeploymentName, PathBuf>,
    missing: BTreeMap<DeploymentName, Timestamp>,
    /// What a file may hold of which not even the words can be read: what disappeared elsewhere when it came.
    suspects: BTreeMap<PathBuf, BTreeSet<String>>,
    first_listed_at: Option<Timestamp>,
    pub takes_unreadable_for_absent: bool,
}

impl Scanner {
    pub fn new(owners: BTreeMap<DeploymentName, PathBuf>) -> Self {
        Self {
            owners,
            ..Self::default()
        }
    }

    /// What is wished as far as can be read, and when to look again.
    pub fn scan(&mut self, now: Timestamp, folder: &Folder) -> (Desired, Option<Timestamp>) {
        if folder.is_unavailable {
            self.missing.clear();
            self.first_listed_at = None;
            let why = "it is not mounted".to_owned();
            let desired = Desired {
                folder: desired::Folder::Unavailable { why },
                deployments: self.deployments(),
                ..Desired::default()
            };
            return (desired, None);
        }
        self.first_listed_at.get_or_insert(now);
        self.accepted
            .retain(|path, _| folder.files.contains_key(path));
        let good = folder
            .files
            .iter()
            .filter(|(_, file)| file.state == FileState::Good);
        for (path, file) in good {
            self.accepted.insert(path.clone(), file.deployment.clone());
        }
        let mut unreadable = self.unreadable(folder);
        if self.takes_unreadable_for_absent {
            self.accepted
                .retain(|path, _| !unreadable.contains_key(path));
            unreadable.clear();
        }
        let deployments = self.deployments();
        for (name, deployment) in &deployments {
            self.owners
                .insert(name.clone(), deployment.source.file.clone());
        }
        for (name, owner) in &self.owners {
            let is_held = unreadable
                .iter()
                .any(|(path, file)| path == owner || file.words.contains(name.as_str()));
            if deployments.contains_key(name) || is_held {
                self.missing.remove(name);
            } else {
                self.missing.entry(name.clone()).or_insert(now);
            }
        }
        let is_news = self.missing.values().any(|since| *since == now);
        let waits_for_git = folder.git_since.is_some() && !self.missing.is_empty();
        let desired = Desired {
            folder: desired::Folder::Listed,
            deployments,
            unreadable,
            problems: Vec::new(),
            missing: self.missing.clone(),
            first_listed_at: self.first_listed_at,
            removals_wait_until: folder.git_since.map(|since| since + GIT_WAIT),
        };
        (desired, (is_news || waits_for_git).then(|| now + CONFIRM))
    }

    fn unreadable(&mut self, folder: &Folder) -> BTreeMap<PathBuf, Unreadable> {
        let present = self.deployments();
        let absent = self
            .owners
            .keys()
            .filter(|name| !present.contains_key(*name));
        let absent: BTreeSet<String> = absent.map(ToString::to_string).collect();
        let state = |path: &PathBuf| folder.files.get(path).map(|file| file.state);
        self.suspects
            .retain(|path, _| state(path) == Some(FileState::Hidden));
        let mut unreadable = BTreeMap::new();
        for (path, file) in &folder.files {
            let words = match file.state {
                FileState::Good => continue,
                FileState::Broken => BTreeSet::from([file.deployment.name.to_string()]),
                FileState::Hidden => {
                    let suspects = self.suspects.entry(path.clone());
                    suspects.or_insert_with(|| absent.clone()).clone()
                }
            };
            unreadable.insert(path.clone(), Unreadable { words });
        }
        unreadable
    }

    fn deployments(&self) -> BTreeMap<DeploymentName, Deployment> {
        let accepted = self.accepted.values();
        accepted
            .map(|deployment| (deployment.name.clone(), deployment.clone()))
            .collect()
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Manifests

/// A manifest that asks for one device.
pub(super) fn plain_file(name: &str, revision: u32) -> File {
    let spec = json!({"engine": "echo"});
    let mut file = file(name, &spec);
    file.deployment.spec.devices = DeviceRequest::Count(1);
    file.change_restart(revision);
    file
}

/// A manifest for a host with so many devices.
pub(super) fn arbitrary_file(name: &str, devices: u64, revision: u32, random: &mut Random) -> File {
    let spec = if random.chance(80) {
        json!({"engine": "echo"})
    } else {
        json!({"engine": "command", "command": ["serve"]})
    };
    let mut file = file(name, &spec);
    file.deployment.spec.devices = DeviceRequest::Count(0);
    if random.chance(80) {
        // The quick first probes of small models are half of all passes otherwise.
        file.deployment.spec.startup_probe = Some(every(1));
    }
    file.change_restart(revision);
    if random.chance(70) {
        file.change_lease(devices, revision, random);
    }
    if random.chance(60) {
        file.change_live(random);
    }
    file
}

fn every(seconds: u64) -> ManifestProbe {
    ManifestProbe {
        period_seconds: u32::try_from(seconds).ok(),
        ..ManifestProbe::default()
    }
}

fn file(name: &str, spec: &serde_json::Value) -> File {
    let manifest = json!({
        "apiVersion": "evenkeel.dev/v1alpha1",
        "kind": "ModelDeployment",
        "metadata": {"name": name},
        "spec": spec,
    });
    let manifest = serde_json::from_value(manifest).expect("a manifest");
    let source = Source {
        file: format!("{name}.yaml").into(),
        document: 0,
        revision: None,
    };
    let mut deployment = Deployment::from_manifest(manifest, source).expect("a right manifest");
    // Everything is over soon, so that little virtual time is spent on waiting.
    deployment.spec.backoff = Backoff {
        initial_seconds: 1,
        max_seconds: 8,
        reset_seconds: 20,
    };
    deployment.spec.startup_deadline_seconds = Some(15);
    deployment.spec.termination_grace_period_seconds = 4;
    File {
        deployment,
        revision: 0,
        state: FileState::Good,
    }
}

impl File {
    /// Changes a field that forces a relaunch.
    pub fn change_restart(&mut self, revision: u32) {
        self.revision = revision;
        let Deployment {
            spec,
            labels,
            restart_key,
            ..
        } = &mut self.deployment;
        spec.args = vec!["--revision".to_owned(), revision.to_string()];
        *restart_key = RestartKey::of(spec, labels.restarted_at());
    }

    /// Changes devices or port, which forces a relaunch too.
    pub fn change_lease(&mut self, devices: u64, revision: u32, random: &mut Random) {
        let spec = &mut self.deployment.spec;
        if random.chance(25) && spec.replicas <= 1 {
            let port = u16::try_from(8900 + random.below(4)).ok();
            spec.port = port.and_then(|port| port.try_into().ok());
        } else if spec.port.is_some() && random.chance(50) {
            spec.port = None;
        }
        spec.devices = match random.below(4) {
            0 if devices > 0 => {
                let first = random.below(devices);
                let count = random.between(1, 2).min(devices - first);
                DeviceRequest::Ids(
                    (first..first + count)
                        .map(|index| format!("GPU-{index}"))
                        .collect(),
                )
            }
            1 => DeviceRequest::Parallelism,
            // Now and then more than there are.
            _ => DeviceRequest::Count(u32::try_from(random.below(devices.min(3) + 2)).unwrap_or(0)),
        };
        self.change_restart(revision);
    }

    /// Changes a field that forces nothing.
    pub fn change_live(&mut self, random: &mut Random) {
        let spec = &mut self.deployment.spec;
        match random.below(9) {
            0 => spec.priority = i32::try_from(random.below(3)).unwrap_or(0),
            1 if spec.port.is_none() => {
                spec.replicas = u32::try_from(random.below(4)).unwrap_or(1);
            }
            2 => {
                let seconds = u32::try_from(random.between(1, 6)).unwrap_or(1);
                spec.termination_grace_period_seconds = seconds;
            }
            3 => {
                spec.liveness_probe = Some(every(random.between(2, 12)));
            }
            4 => {
                spec.readiness_probe = random.chance(50).then(|| ManifestProbe {
                    success_threshold: Some(2),
                    ..every(3)
                });
            }
            5 => spec.paused = !spec.paused,
            6 => {
                spec.deletion_policy = if random.chance(30) {
                    DeletionPolicy::Orphan
                } else {
                    DeletionPolicy::Stop
                };
            }
            7 => {
                spec.restart_policy = random
                    .pick(&[
                        RestartPolicy::Always,
                        RestartPolicy::Always,
                        RestartPolicy::OnFailure,
                        RestartPolicy::Never,
                    ])
                    .unwrap_or_default();
            }
            _ => {
                let labels = &mut self.deployment.labels.labels;
                labels.insert("team".to_owned(), random.below(100).to_string());
            }
        }
    }
}
