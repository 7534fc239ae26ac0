//! The folders of the state: made for their owner alone.
//!
//! Invariant: permissions are only ever taken away, and only from folders that hold nothing but evenkeel's own.
#![expect(
    clippy::disallowed_methods,
    reason = "creates the folders of the state and takes permissions away from them"
)]

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{
    DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _,
};
use std::path::Path;

use nix::fcntl::OFlag;
use nix::unistd::Uid;

use super::StoreError;

/// What may lie in a state folder that nobody else uses. Dotfiles may as well.
const OWN_NAMES: [&str; 6] = [
    "instances",
    "quarantine",
    "lock",
    "logs",
    "events.jsonl",
    // The root of a file system of its own.
    "lost+found",
];

/// Creates the state folder with its parents, or takes an existing one, which may be a symlink to it.
///
/// An existing one that holds other things keeps its permissions: `--state-dir /tmp` must not close /tmp.
pub(super) fn prepare_state(state: &Path) -> Result<(), StoreError> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(state)
        .map_err(|source| StoreError::create(state, source))?;
    let folder = open(state, OFlag::empty())?;
    if is_all_ours(state).map_err(|source| StoreError::create(state, source))? {
        tighten(state, &folder)?;
    }
    refuse_exposed(state, &folder)
}

/// Creates a folder in the state folder, or takes the one that is there, which must not be a symlink: whoever could set
/// one would have records written elsewhere.
pub(super) fn prepare_private(path: &Path) -> Result<(), StoreError> {
    match DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(source) => return Err(StoreError::create(path, source)),
    }
    let kind = fs::symlink_metadata(path)
        .map_err(|source| StoreError::create(path, source))?
        .file_type();
    if kind.is_symlink() {
        return Err(StoreError::Symlink {
            path: path.to_owned(),
        });
    }
    let folder = open(path, OFlag::O_NOFOLLOW)?;
    tighten(path, &folder)?;
    refuse_exposed(path, &folder)
}

/// Opened, so that what is checked and what is changed are the same folder.
fn open(path: &Path, further: OFlag) -> Result<File, StoreError> {
    OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_DIRECTORY | further).bits())
        .open(path)
        .map_err(|source| StoreError::create(path, source))
}

fn is_all_ours(state: &Path) -> io::Result<bool> {
    for entry in fs::read_dir(state)? {
        let name = entry?.file_name();
        let bytes = name.as_encoded_bytes();
        if !bytes.starts_with(b".") && !OWN_NAMES.iter().any(|own| own.as_bytes() == bytes) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn metadata(path: &Path, folder: &File) -> Result<Metadata, StoreError> {
    folder
        .metadata()
        .map_err(|source| StoreError::create(path, source))
}

fn tighten(path: &Path, folder: &File) -> Result<(), StoreError> {
    let metadata = metadata(path, folder)?;
    let mode = metadata.mode() & 0o7777;
    let private = mode & !0o077;
    if mode == private || metadata.uid() != Uid::effective().as_raw() {
        return Ok(());
    }
    match folder.set_permissions(Permissions::from_mode(private)) {
        Ok(()) => Ok(()),
        // Nobody can write there anyway, and what is there is readable for its owner alone.
        Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => Ok(()),
        Err(source) => Err(StoreError::create(path, source)),
    }
}

/// Whoever can rename `instances` can write records, and so name processes to be signalled.
fn refuse_exposed(path: &Path, folder: &File) -> Result<(), StoreError> {
    let mode = metadata(path, folder)?.mode();
    let sticky = mode & 0o1000 != 0;
    if mode & 0o002 != 0 && !sticky {
        return Err(StoreError::Exposed {
            path: path.to_owned(),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().mode() & 0o7777
    }

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn a_new_state_folder_and_its_parents_are_private() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("a/b");
        prepare_state(&state).unwrap();
        assert_eq!(mode(&state), 0o700);
        assert_eq!(mode(&folder.path().join("a")), 0o700);
    }

    #[test]
    fn an_existing_state_folder_is_tightened_when_it_holds_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("instances")).unwrap();
        set_mode(folder.path(), 0o755);
        prepare_state(folder.path()).unwrap();
        assert_eq!(mode(folder.path()), 0o700);
    }

    #[test]
    fn a_folder_that_holds_other_things_keeps_its_mode() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("thesis.tex"), "").unwrap();
        for kept in [0o755, 0o1777] {
            set_mode(folder.path(), kept);
            prepare_state(folder.path()).unwrap();
            assert_eq!(mode(folder.path()), kept);
        }
        set_mode(folder.path(), 0o777);
        assert!(matches!(
            prepare_state(folder.path()),
            Err(StoreError::Exposed { .. })
        ));
    }

    #[test]
    fn a_symlink_is_fine_as_state_folder_and_refused_inside_of_it() {
        let folder = tempfile::tempdir().unwrap();
        let real = folder.path().join("real");
        let link = folder.path().join("link");
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        prepare_state(&link).unwrap();
        assert!(matches!(
            prepare_private(&link),
            Err(StoreError::Symlink { .. })
        ));
    }

    #[test]
    fn a_file_in_the_folders_place_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("instances");
        fs::write(&path, "").unwrap();
        let text = prepare_private(&path).unwrap_err().to_string();
        assert!(text.contains("instances"), "{text}");
    }
}
