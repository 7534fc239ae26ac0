//! evenkeel

pub mod echo;
