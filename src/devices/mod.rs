//! The devices of this host.
//!
//! So far they are what a person declares in a file (`--devices FILE`), and a host without such a file has none: engines
//! run on its processors. Asking the drivers (NVML for NVIDIA, sysfs for AMD and Intel) comes later, as files of this
//! folder; a declared inventory will go on to win over what they say.
//!
//! Invariant: no device is in an inventory twice, and what cannot be known is an error, never an empty inventory.

mod declared;

use std::path::Path;

pub use declared::InventoryError;

use crate::observed::Inventory;

/// The devices of this host, as declared.
pub fn inventory(declared: Option<&Path>) -> Result<Inventory, InventoryError> {
    match declared {
        Some(path) => declared::read(path),
        None => Ok(Inventory::default()),
    }
}
