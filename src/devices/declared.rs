//! Devices that a person declares, in YAML or JSON:
//!
//! ```yaml
//! devices:
//!   - {id: GPU-0, kind: cuda, name: H100, memoryBytes: 85899345920}
//! ```
//!
//! YAML is otherwise known to `source/` and `cli/` alone. This file is the one exception: an inventory is written by the
//! same people as manifests, and needs nothing of what makes manifests difficult.
//!
//! Invariant: strict. A field that is not known, or a device declared twice, is an error.
#![expect(clippy::disallowed_methods, reason = "reads the inventory file")]

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use crate::names::DeviceId;
use crate::observed::Inventory;

/// Thousands of devices.
const FILE_LIMIT: u64 = 1024 * 1024;

/// Why there is no inventory.
#[derive(Debug, thiserror::Error)]
pub enum InventoryError {
    /// The file cannot be read.
    #[error("cannot read the inventory {}", .path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The file is too long to be one.
    #[error("the inventory {} is longer than {FILE_LIMIT} bytes", .path.display())]
    TooLong {
        /// Which.
        path: PathBuf,
    },
    /// The file is no inventory.
    #[error("{}{position}: {message}", .path.display())]
    Invalid {
        /// Which.
        path: PathBuf,
        /// Where in it.
        position: Position,
        /// What is wrong.
        message: String,
    },
    /// A device is declared twice.
    #[error("the inventory {} declares {id} twice", .path.display())]
    Duplicate {
        /// Which file.
        path: PathBuf,
        /// Which device.
        id: DeviceId,
    },
}

/// Line and column from 1, where they are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position(pub Option<(usize, usize)>);

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some((line, column)) => write!(f, ":{line}:{column}"),
            None => Ok(()),
        }
    }
}

/// Reads an inventory file. It may be a symlink: it is the operator's, not ours.
pub(super) fn read(path: &Path) -> Result<Inventory, InventoryError> {
    let content = || -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        let file = File::open(path)?;
        file.take(FILE_LIMIT + 1).read_to_end(&mut content)?;
        Ok(content)
    };
    let content = content().map_err(|source| InventoryError::Read {
        path: path.to_owned(),
        source,
    })?;
    if content.len() as u64 > FILE_LIMIT {
        return Err(InventoryError::TooLong {
            path: path.to_owned(),
        });
    }
    parse(path, &content)
}

fn parse(path: &Path, content: &[u8]) -> Result<Inventory, InventoryError> {
    let inventory: Inventory =
        serde_yaml::from_slice(content).map_err(|error| invalid(path, &error))?;
    let mut seen = BTreeSet::new();
    for device in &inventory.devices {
        if !seen.insert(&device.id) {
            return Err(InventoryError::Duplicate {
                path: path.to_owned(),
                id: device.id.clone(),
            });
        }
    }
    Ok(inventory)
}

fn invalid(path: &Path, error: &serde_yaml::Error) -> InventoryError {
    let position = error
        .location()
        .map(|location| (location.line(), location.column()));
    let mut message = error.to_string();
    // The position is told before the message already.
    if let Some((line, column)) = position
        && let Some(end) = message.find(&format!(" at line {line} column {column}"))
    {
        message.truncate(end);
    }
    InventoryError::Invalid {
        path: path.to_owned(),
        position: Position(position),
        message,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observed::DeviceKind;

    fn parsed(text: &str) -> Result<Inventory, InventoryError> {
        parse(Path::new("gpus.yaml"), text.as_bytes())
    }

    #[test]
    fn an_inventory_is_yaml_or_json() {
        let yaml = "devices:\n- {id: GPU-0, kind: cuda, name: H100, memoryBytes: 85899345920}\n- id: GPU-1\n  kind: rocm\n  unified: true\n";
        let json = r#"{"devices": [
            {"id": "GPU-0", "kind": "cuda", "name": "H100", "memoryBytes": 85899345920, "unified": false},
            {"id": "GPU-1", "kind": "rocm", "name": "", "memoryBytes": null, "unified": true}
        ]}"#;
        let inventory = parsed(yaml).unwrap();
        assert_eq!(parsed(json).unwrap(), inventory);
        assert_eq!(inventory.devices.len(), 2);
        assert_eq!(inventory.devices[0].kind, DeviceKind::Cuda);
        assert_eq!(inventory.devices[0].memory_bytes, Some(85_899_345_920));
        assert!(inventory.devices[1].unified);
        assert_eq!(parsed("devices: []").unwrap(), Inventory::default());
    }

    #[test]
    fn a_mistake_is_shown_where_it_stands() {
        for (text, expected) in [
            (
                "devices:\n- {id: GPU-0, kind: cuda, memory: 80}\n",
                "gpus.yaml:2:27: devices[0]: unknown field `memory`",
            ),
            (
                "devices:\n- {id: GPU-0, kind: cuda}\n- {id: GPU-1, kind: tpu}\n",
                "gpus.yaml:3:21: devices[1].kind: unknown variant `tpu`",
            ),
            ("devices: [", "gpus.yaml:2:1: "),
            ("", "gpus.yaml:1:1: missing field `devices`"),
            ("gpus: []", "gpus.yaml:1:1: unknown field `gpus`"),
            (
                "devices:\n- {id: GPU-0, kind: cuda}\n- {id: GPU-0, kind: cuda}\n",
                "the inventory gpus.yaml declares GPU-0 twice",
            ),
        ] {
            let message = parsed(text).unwrap_err().to_string();
            assert!(message.starts_with(expected), "{message}");
            assert!(!message.contains(" at line "), "{message}");
        }
    }

    #[test]
    fn a_file_that_is_missing_or_endless_is_an_error_that_names_it() {
        let message = read(Path::new("/nowhere/gpus.yaml"))
            .unwrap_err()
            .to_string();
        assert!(message.contains("/nowhere/gpus.yaml"), "{message}");
        let error = read(Path::new("/dev/zero")).unwrap_err();
        assert!(matches!(error, InventoryError::TooLong { .. }));
    }

    #[test]
    fn without_a_file_there_is_no_device() {
        assert_eq!(super::super::inventory(None).unwrap(), Inventory::default());
    }
}
