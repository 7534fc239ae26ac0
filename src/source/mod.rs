//! The manifest folder: bytes to [`Desired`](crate::desired::Desired), and a watch that says when to look again.
//!
//! What a file means is decided by pure functions ([`read_manifests`]); [`Scanner`] and [`Watch`] are the only ones
//! that touch the folder. Only here and in `cli/` is YAML known.
//!
//! Invariant: what cannot be read is never taken for removed, and every wake can be lost (W1, W4).

mod text;

mod outline;

mod diagnose;

mod read;

mod folder;

mod ledger;

mod scan;

mod check;

mod watch;

pub use check::{CheckedFile, check};
pub use diagnose::Place;
pub use folder::{Depth, FolderError, WorldWritable, check_folder, known_device};
pub use read::{Ignored, Manifests, read_manifests, words_of};
pub use scan::{Scan, ScanOptions, Scanner};
pub use watch::{FolderChange, FolderChanges, Watch, WatchError, watch};
