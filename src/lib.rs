//! evenkeel

pub mod desired;
pub mod event;
pub mod failure;
pub mod manifest;
pub mod names;
pub mod observed;
pub mod order;
pub mod record;
pub mod spec;

pub mod store;

pub mod launch;

pub mod journal;

pub mod devices;

pub mod clock;

pub mod procfs;

pub mod files;

pub mod cli;

#[cfg(test)]
pub mod testing;
