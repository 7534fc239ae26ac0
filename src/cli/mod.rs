//! The command line: one verb per file.
//!
//! Invariant: data goes to stdout, everything else to stderr.

pub mod schema;

pub mod validate;
