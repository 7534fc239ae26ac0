//! Golden command lines.
