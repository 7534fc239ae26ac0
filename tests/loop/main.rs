//! The whole loop with the echo engine: a controller on a folder, its engines as real processes, and nothing but file
//! operations and signals.

#[path = "../support/mod.rs"]
mod support;

mod adoption;

mod commands;

mod edits;

mod ending;

mod folder;

mod habits;

mod leases;

mod options;

mod restarts;
