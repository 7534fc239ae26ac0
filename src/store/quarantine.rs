//! Records that cannot be decoded: kept, never overwritten, and still holding what can be made out of them.
//!
//! Everything in `STATE/quarantine` holds (dotfiles aside) until a person removes it, because nobody else can tell when
//! that is safe. Nothing in here trusts a part of a lease: what is not understood inside of one may be a thing that is
//! held, so then everything may be held.
//!
//! Invariant: no file is lost, and a file is never taken to hold less than it says.
#![expect(
    clippy::disallowed_methods,
    reason = "renames files into STATE/quarantine, and reads what is there"
)]

use std::cell::Cell;
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize as _;
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use super::{FILE_LIMIT, StoreError, entries, folder};
use crate::files::{self, ReadError};
use crate::names::LaunchId;
use crate::observed::{Holds, Quarantined};
use crate::record::Lease;

/// What a file says about its launch, whatever else is wrong with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Claim {
    /// That there is none.
    Nothing,
    /// This one.
    Launch(LaunchId, Lease),
    /// Nothing that can be understood.
    Unreadable,
}

impl Claim {
    /// What it holds; `None`: nothing.
    pub(super) fn holds(self) -> Option<Holds> {
        match self {
            Self::Nothing => None,
            Self::Launch(launch_id, lease) => Some(Holds::Lease { launch_id, lease }),
            Self::Unreadable => Some(Holds::Unknown),
        }
    }
}

/// Reads the `launch` of a JSON text, which may be cut off or broken after it, and of any version.
pub(super) fn claim(content: &[u8]) -> Claim {
    let found = Cell::new(None);
    let mut json = serde_json::Deserializer::from_slice(content);
    // However it ends: what was found until then is the answer.
    let _ = Sketch { found: &found }.deserialize(&mut json);
    found.take().unwrap_or(Claim::Unreadable)
}

/// Looks for the key `launch` of the outermost object.
struct Sketch<'a> {
    found: &'a Cell<Option<Claim>>,
}

impl<'de> DeserializeSeed<'de> for Sketch<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Sketch<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a record")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen = false;
        while let Some(key) = map.next_key::<String>()? {
            if key == "launch" {
                // Should it be cut off, or come twice, nothing is certain.
                self.found.set(Some(Claim::Unreadable));
                let value = map.next_value::<Value>()?;
                if !seen {
                    self.found.set(Some(launch_claim(&value)));
                }
                seen = true;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(())
    }
}

fn launch_claim(launch: &Value) -> Claim {
    if launch.is_null() {
        return Claim::Nothing;
    }
    let id = launch.get("id").and_then(Value::as_str);
    let lease = launch
        .get("lease")
        // An absent port would read as none.
        .filter(|lease| lease.get("port").is_some());
    match (id.map(str::parse), lease.map(Lease::deserialize)) {
        (Some(Ok(id)), Some(Ok(lease))) => Claim::Launch(id, lease),
        _ => Claim::Unreadable,
    }
}

/// Moves a file into the quarantine folder, beside what is there already. Gives its new path.
///
/// Looking for a free name and renaming are two steps; there is one writer, who holds the lock.
pub(super) fn take_in(quarantine: &Path, file: &Path) -> Result<PathBuf, StoreError> {
    folder::prepare_private(quarantine)?;
    let moved = |source| StoreError::Quarantine {
        path: file.to_owned(),
        source,
    };
    let name = file.file_name().unwrap_or_default();
    let mut free = quarantine.join(name);
    let mut number = 0_u32;
    while exists(&free).map_err(moved)? {
        number += 1;
        let mut numbered = OsString::from(name);
        numbered.push(format!(".{number}"));
        free.set_file_name(numbered);
    }
    fs::rename(file, &free).map_err(moved)?;
    Ok(free)
}

fn exists(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// What lies in quarantine and holds something, in the order of names.
pub(super) fn inmates(quarantine: &Path) -> Result<Vec<Quarantined>, StoreError> {
    let mut inmates = Vec::new();
    for name in entries(quarantine)? {
        if name.as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let file = quarantine.join(name);
        let claim = match files::read(&file, FILE_LIMIT) {
            Ok(content) => claim(&content),
            Err(ReadError::Gone) => continue,
            Err(ReadError::NotAFile(_) | ReadError::TooLong(_) | ReadError::Refused(_)) => {
                Claim::Unreadable
            }
        };
        if let Some(holds) = claim.holds() {
            inmates.push(Quarantined { file, holds });
        }
    }
    Ok(inmates)
}

/// What a quarantined file holds, and when a person may delete it.
pub(super) fn advice(quarantined: &Quarantined) -> String {
    let Quarantined { file, holds } = quarantined;
    let file = file.display();
    match holds {
        Holds::Lease { launch_id, lease } => {
            let Lease { port, devices } = lease;
            let mut held: Vec<String> =
                devices.iter().map(|device| device.id.to_string()).collect();
            held.extend(port.map(|port| format!("port {port}")));
            let held = if held.is_empty() {
                "no device and no port".to_owned()
            } else {
                held.join(", ")
            };
            format!(
                "it goes on holding {held}; delete {file} when no process has \
                 EVENKEEL_LAUNCH_ID={launch_id} in its environment any more"
            )
        }
        Holds::Unknown => format!(
            "what it holds cannot be read, so no device is granted anew; delete {file} when no process of its \
             instance runs any more (they have EVENKEEL_INSTANCE in their environment)"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "67e55044-10b1-426f-9247-bb680e5fe0c8";

    fn launch(lease: &str) -> String {
        format!(r#"{{"id": "{ID}", "new": 1, "lease": {lease}}}"#)
    }

    #[test]
    fn a_lease_is_made_out_of_records_of_any_version_and_of_torn_ones() {
        let lease = r#"{"port": 8000, "devices": [{"id": "GPU-0", "bytes": null}]}"#;
        let launch = launch(lease);
        for text in [
            format!(r#"{{"version": 9, "launch": {launch}, "new": []}}"#),
            format!(r#"{{"version": 1, "launch": {launch}, "hist"#),
            format!(r#"{{"version": 1, "launch": {launch}"#),
            format!(r#"{{"version": 1, "launch": {launch}}} trailing"#),
        ] {
            let Claim::Launch(id, lease) = claim(text.as_bytes()) else {
                panic!("{text}");
            };
            assert_eq!(id.to_string(), ID);
            assert_eq!(lease.port.unwrap().get(), 8000);
            assert_eq!(lease.devices.len(), 1);
        }
    }

    #[test]
    fn no_launch_is_believed_only_where_it_is_written() {
        assert_eq!(claim(br#"{"launch": null, "x"#), Claim::Nothing);
        for text in [
            "",
            "{}",
            "[]",
            "null",
            r#"{"version": 1}"#,
            r#"{"launch": nul"#,
        ] {
            assert_eq!(claim(text.as_bytes()), Claim::Unreadable, "{text}");
        }
    }

    #[test]
    fn half_a_lease_is_none() {
        for lease in [
            "null",
            "{}",
            r#"{"devices": []}"#,
            r#"{"port": 8000}"#,
            r#"{"port": 0, "devices": []}"#,
            r#"{"port": null, "devices": [{"id": ""}]}"#,
            r#"{"port": null, "devices": [], "fpga": 1}"#,
        ] {
            let text = format!(r#"{{"launch": {}}}"#, launch(lease));
            assert_eq!(claim(text.as_bytes()), Claim::Unreadable, "{text}");
        }
        let twice = r#"{"launch": null, "launch": null}"#;
        assert_eq!(claim(twice.as_bytes()), Claim::Unreadable);
        let torn = format!(r#"{{"launch": {{"id": "{ID}", "lease": {{"port": 80"#);
        assert_eq!(claim(torn.as_bytes()), Claim::Unreadable);
    }

    #[test]
    fn what_is_in_quarantine_is_never_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let quarantine = folder.path().join("quarantine");
        let file = folder.path().join("a-0.json");
        let mut places = Vec::new();
        for content in ["first", "second", "third"] {
            fs::write(&file, content).unwrap();
            let place = take_in(&quarantine, &file).unwrap();
            assert_eq!(fs::read_to_string(&place).unwrap(), content);
            places.push(place);
        }
        assert_eq!(inmates(&quarantine).unwrap().len(), 3);
        assert!(places[2].ends_with("quarantine/a-0.json.2"));
    }
}
