//! How a controller is set up, and why it does not run.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::devices::InventoryError;
use crate::journal::JournalError;
use crate::plan::{Intent, Settings};
use crate::probe::ProberError;
use crate::source::{Depth, FolderError, ScanOptions};
use crate::store::{LockError, StoreError};

/// How a controller is set up. Written into the lock file, so that the command line plans with the same settings.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Options {
    /// The manifest folder.
    pub folder: PathBuf,
    /// The state folder.
    pub state: PathBuf,
    /// An inventory file instead of looking for devices.
    pub devices: Option<PathBuf>,
    /// How long a document must be absent before its instances are stopped.
    pub removal_grace_seconds: f64,
    /// How often everything is looked at without a wake.
    pub resync_seconds: f64,
    /// Instances between launch and ready at a time; 0: any number.
    pub max_launches: u32,
    /// Instead of the engines' own start-up deadlines.
    pub startup_deadline_seconds: Option<u32>,
    /// Labels of this host, for `nodeSelector`.
    pub node_labels: BTreeMap<String, String>,
    /// The device that the folder was last known to be on: kept across restarts, so that an unmounted volume is told from
    /// an emptied folder.
    #[serde(default)]
    pub folder_device: Option<u64>,
    /// Whether folders in the folder are looked into.
    pub recursive: bool,
    /// Scan this often, for file systems without events.
    pub poll_seconds: Option<f64>,
    /// What ending the controller does to the instances; none: SIGTERM leaves them, SIGINT stops them.
    pub on_exit: Option<OnExit>,
    /// Accept a folder that everybody may write to.
    pub allow_world_writable: bool,
}

/// What ending the controller does to the instances.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum OnExit {
    /// They are stopped.
    Stop,
    /// They are left running.
    Leave,
}

impl Options {
    /// What it takes to stop everything, where no controller left its settings.
    pub fn stopping(state: &std::path::Path) -> Self {
        Self {
            folder: PathBuf::from("/"),
            state: state.to_path_buf(),
            devices: None,
            removal_grace_seconds: 0.0,
            resync_seconds: 5.0,
            max_launches: 0,
            startup_deadline_seconds: None,
            node_labels: BTreeMap::new(),
            folder_device: None,
            recursive: false,
            poll_seconds: None,
            on_exit: None,
            allow_world_writable: false,
        }
    }

    /// The plan's part of it.
    pub fn settings(&self, intent: Intent) -> Settings {
        let node = nix::unistd::gethostname()
            .ok()
            .and_then(|name| name.into_string().ok())
            .unwrap_or_else(|| "localhost".to_owned());
        let mut node_labels = self.node_labels.clone();
        node_labels
            .entry("kubernetes.io/hostname".to_owned())
            .or_insert_with(|| node.clone());
        Settings {
            removal_grace: seconds(self.removal_grace_seconds),
            max_launches: self.max_launches,
            startup_deadline: self
                .startup_deadline_seconds
                .map(|seconds| Duration::from_secs(seconds.into())),
            node,
            node_labels,
            intent,
        }
    }

    /// How the folder is scanned.
    pub fn scan_options(&self) -> ScanOptions {
        ScanOptions {
            depth: if self.recursive {
                Depth::Recursive
            } else {
                Depth::Flat
            },
        }
    }
}

/// A duration from a number that clap has checked; nonsense becomes nothing rather than a panic.
pub(super) fn seconds(number: f64) -> Duration {
    Duration::try_from_secs_f64(number).unwrap_or_default()
}

/// Why a controller does not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The manifest folder is unfit.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// Another controller has the state folder, or it cannot be locked.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The state folder is unfit.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The journal cannot be opened.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// The inventory cannot be read.
    #[error(transparent)]
    Inventory(#[from] InventoryError),
    /// Probing cannot be set up.
    #[error(transparent)]
    Prober(#[from] ProberError),
    /// The system refuses what every controller needs.
    #[error("{what}")]
    System {
        /// What was asked of it.
        what: &'static str,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}
