//! The disk: records, and writes that fail.
//!
//! Invariant: what a controller recovers after its death is what its predecessor wrote, encoded and decoded, and nothing
//! else.

use std::collections::BTreeMap;
use std::io;

use jiff::Timestamp;

use super::Mutant;
use super::world::World;
use crate::names::InstanceName;
use crate::record::Record;
use crate::store::{Records, StoreError};

pub(super) struct Disk {
    pub records: BTreeMap<InstanceName, Record>,
    /// Until then no write succeeds.
    pub full_until: Timestamp,
    /// Writes and removals asked for so far.
    pub writes: u64,
    /// The one that fails.
    pub fails_at: Option<u64>,
}

impl Disk {
    pub fn new(now: Timestamp) -> Self {
        Self {
            records: BTreeMap::new(),
            full_until: now,
            writes: 0,
            fails_at: None,
        }
    }

    /// What a controller finds that starts now.
    pub fn load(&self) -> BTreeMap<InstanceName, Record> {
        let through_json = |record: &Record| -> Record {
            let bytes = serde_json::to_vec(record).expect("a record can be encoded");
            serde_json::from_slice(&bytes).expect("what was encoded can be decoded")
        };
        self.records
            .iter()
            .map(|(name, record)| (name.clone(), through_json(record)))
            .collect()
    }
}

impl Records for World {
    fn write(&mut self, record: &Record) -> Result<(), StoreError> {
        if self.boundary(&format_args!("before {} is written", record.name)) {
            return Ok(());
        }
        self.refuse(&record.name)?;
        if self.is(Mutant::DropsWrites) && self.random.chance(10) {
            return Ok(());
        }
        let name = record.name.clone();
        let before = self.disk.records.insert(name, record.clone());
        self.judge_write(before.as_ref(), record);
        self.boundary(&format_args!("{} is written", record.name));
        Ok(())
    }

    fn remove(&mut self, name: &InstanceName) -> Result<(), StoreError> {
        if self.boundary(&format_args!("before {name} is removed")) {
            return Ok(());
        }
        self.refuse(name)?;
        if let Some(record) = self.disk.records.remove(name) {
            self.judge_remove(&record);
        }
        self.boundary(&format_args!("{name} is removed"));
        Ok(())
    }
}

impl World {
    fn refuse(&mut self, name: &InstanceName) -> Result<(), StoreError> {
        let number = self.disk.writes;
        self.disk.writes += 1;
        if self.now >= self.disk.full_until && self.disk.fails_at != Some(number) {
            return Ok(());
        }
        self.note(&format_args!("the record of {name} cannot be written"));
        Err(StoreError::Write {
            path: format!("{name}.json").into(),
            source: io::Error::from(io::ErrorKind::StorageFull),
        })
    }
}
