//! Where everything must have come to once misfortune ends.
//!
//! Invariant: what is wished and can be had runs, is ready, and exists once; nothing else does.

use std::collections::BTreeMap;

use super::driver::Sim;
use super::folder::File;
use super::world::{Part, Process};
use crate::engine;
use crate::manifest::RestartPolicy;
use crate::names::{DeviceId, InstanceName};
use crate::plan::Intent;
use crate::spec::DeviceRequest;

impl Sim {
    /// What is not as it must be; none when all is well.
    pub fn unsettled(&self) -> Option<String> {
        let wanted = self.wanted();
        let mut waiting = Vec::new();
        for (name, file) in &wanted {
            match self.state(name, file) {
                Ok(true) => {}
                Ok(false) => waiting.push((name, *file)),
                Err(what) => return Some(what),
            }
        }
        for (name, file) in &waiting {
            if let Err(what) = self.may_wait(name, file, &waiting) {
                return Some(what);
            }
        }
        let mut living = self.world.processes.iter();
        let unwanted = living.find_map(|(pid, process)| {
            let owner = process.owner.as_ref().filter(|_| !process.is_orphan)?;
            (!wanted.contains_key(&owner.instance)).then_some((pid, &owner.instance))
        });
        if let Some((pid, name)) = unwanted {
            return Some(format!("{name} is not wanted, and pid {pid} lives"));
        }
        let mut records = self.world.disk.records.keys();
        let unwanted = records.find(|name| !wanted.contains_key(name));
        unwanted.map(|name| format!("{name} is not wanted, and has a record"))
    }

    fn wanted(&self) -> BTreeMap<InstanceName, &File> {
        if self.settings.intent == Intent::StopAll {
            return BTreeMap::new();
        }
        let files = self.world.folder.files.values();
        files
            .flat_map(|file| file.deployment.instances().map(move |name| (name, file)))
            .collect()
    }

    fn living(&self, name: &InstanceName) -> impl Iterator<Item = (&u32, &Process)> {
        self.world.processes.iter().filter(move |(_, process)| {
            let owner = process.owner.as_ref().filter(|_| !process.is_orphan);
            owner.is_some_and(|owner| owner.instance == *name)
        })
    }

    /// Whether an instance runs as it must; false when nothing of it is there.
    fn state(&self, name: &InstanceName, file: &File) -> Result<bool, String> {
        let leaders: Vec<_> = self
            .living(name)
            .filter(|(_, process)| process.part != Part::Worker)
            .collect();
        let [(pid, process)] = leaders[..] else {
            return match (leaders.len(), self.living(name).next()) {
                (0, None) => Ok(false),
                (0, Some((pid, _))) => Err(format!("{name} has no leader, and pid {pid} is left")),
                (count, _) => Err(format!("{name} has {count} leaders")),
            };
        };
        let Part::Leader {
            healthy_from,
            sick_from,
        } = &process.part
        else {
            return Err(format!("{name} has not left its gate"));
        };
        let now = self.world.now;
        let owner = process.owner.as_ref().expect("it was found by its owner");
        let is_healthy =
            healthy_from.is_some_and(|at| at <= now) && sick_from.is_none_or(|at| at > now);
        let is_refused = engine::support(&file.deployment.spec, &self.inventory).is_err();
        let record = self.world.disk.records.get(name);
        let Some(launch) = record.and_then(|record| record.launch.as_ref()) else {
            return Err(format!("{name} runs, and its record holds no launch"));
        };
        if owner.revision != file.revision && !is_refused {
            Err(format!(
                "{name} is at revision {}, not {}",
                owner.revision, file.revision
            ))
        } else if !is_healthy && owner.port.is_some() {
            Err(format!("{name} is not healthy"))
        } else if launch.handle != self.world.handle(*pid) {
            Err(format!(
                "the record of {name} names another process than pid {pid}"
            ))
        } else if launch.ready_at.is_none() {
            Err(format!("{name} is not ready, says its record"))
        } else if launch.stop.is_some() {
            Err(format!("{name} is being stopped"))
        } else {
            Ok(true)
        }
    }

    /// Whether an instance of which nothing is there has a good reason.
    fn may_wait(
        &self,
        name: &InstanceName,
        file: &File,
        waiting: &[(&InstanceName, &File)],
    ) -> Result<(), String> {
        let spec = &file.deployment.spec;
        if engine::support(spec, &self.inventory).is_err() {
            return Ok(());
        }
        if self.is_completed(name, file) {
            return Ok(());
        }
        if spec
            .port
            .is_some_and(|port| self.world.port_holder(port).is_some())
        {
            return Ok(());
        }
        if self.lacks_devices(file) {
            return Ok(());
        }
        let needs_devices = engine::devices_needed(spec, &self.inventory) > 0;
        let is_overtaken = waiting.iter().any(|(_, other)| {
            other.deployment.spec.priority > spec.priority
                && engine::support(&other.deployment.spec, &self.inventory).is_ok()
                && self.lacks_devices(other)
        });
        if needs_devices && is_overtaken {
            return Ok(());
        }
        Err(format!(
            "{name} does not run, and nothing keeps it from running"
        ))
    }

    /// Whether it was tried, and its policy leaves it so.
    fn is_completed(&self, name: &InstanceName, file: &File) -> bool {
        let attempts = self.world.judge.attempts.get(name);
        let was_tried = attempts.is_some_and(|revisions| revisions.contains(&file.revision));
        let Some(record) = self.world.disk.records.get(name).filter(|_| was_tried) else {
            return false;
        };
        let last = record.history.last.as_ref();
        let status = last.and_then(|last| last.cause.status());
        record.launch.is_none()
            && match file.deployment.spec.restart_policy {
                RestartPolicy::Always => false,
                RestartPolicy::OnFailure => status.is_some_and(|status| status.code == Some(0)),
                RestartPolicy::Never => true,
            }
    }

    fn lacks_devices(&self, file: &File) -> bool {
        let spec = &file.deployment.spec;
        let need = engine::devices_needed(spec, &self.inventory) as usize;
        let pinned = match &spec.devices {
            DeviceRequest::Ids(ids) => engine::pinned_devices(ids, &self.inventory).ok(),
            DeviceRequest::Count(_) | DeviceRequest::Parallelism => None,
        };
        let devices = self.inventory.devices.iter().map(|device| &device.id);
        let free = devices
            .filter(|id| pinned.as_ref().is_none_or(|pinned| pinned.contains(id)))
            .filter(|id| self.is_free(id, pinned.is_some()))
            .count();
        free < need
    }

    fn is_free(&self, id: &DeviceId, pins: bool) -> bool {
        let mut holders = self.world.processes.values().filter_map(|process| {
            let owner = process.owner.as_ref().filter(|_| !process.is_orphan)?;
            process.devices().contains(id).then_some(&owner.instance)
        });
        let is_shared = self.world.unified.contains(id);
        holders.all(|name| {
            let record = self.world.disk.records.get(name);
            let is_pinned =
                record.is_some_and(|record| matches!(record.spec.devices, DeviceRequest::Ids(_)));
            is_shared && !is_pinned && !pins
        })
    }
}
