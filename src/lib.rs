//! evenkeel
