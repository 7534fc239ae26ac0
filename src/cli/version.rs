//! `evenkeel version`: what this binary is, and which formats it speaks.

use std::io::{self, Write};

use crate::cli::report::clean_end;
use crate::manifest::API_GROUP;
use crate::record::RECORD_VERSION;

/// Prints the version, on the first line alone, and the formats.
pub fn version(out: &mut dyn Write) -> io::Result<()> {
    let version = env!("CARGO_PKG_VERSION");
    clean_end(
        writeln!(
            out,
            "evenkeel {version}\nmanifests: {API_GROUP}/v1alpha1\nrecords: version {RECORD_VERSION}"
        )
        .and_then(|()| out.flush()),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_is_the_version() {
        let mut out = Vec::new();
        version(&mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        let first = concat!("evenkeel ", env!("CARGO_PKG_VERSION"));
        assert_eq!(text.lines().next(), Some(first));
    }
}
