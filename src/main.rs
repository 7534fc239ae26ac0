//! Parses arguments, calls the library, maps its report to an exit code.
fn main() {}
