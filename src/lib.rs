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

pub mod launch;
pub mod probe;
pub mod procfs;
