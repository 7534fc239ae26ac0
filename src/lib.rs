//! evenkeel

pub mod names;

pub mod manifest;

pub mod spec;

pub mod failure;

pub mod event;

pub mod record;

pub mod desired;

pub mod observed;

pub mod order;

pub mod engine;

pub mod plan;

pub mod source;

pub mod store;

pub mod launch;

pub mod probe;

pub mod devices;

pub mod journal;

pub mod clock;

pub mod procfs;

pub mod files;

pub mod controller;

pub mod echo;

pub mod cli;

#[cfg(test)]
pub mod testing;

#[cfg(test)]
mod sim;
