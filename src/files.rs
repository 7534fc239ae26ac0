//! Reading and replacing small files of the state folder.
//!
//! Invariant: a reader finds the old content or the new, never a part of either, and no read follows a symlink, waits
//! for a fifo or takes more memory than its limit.
#![expect(
    clippy::disallowed_methods,
    reason = "files. Reads bounded regular files and replaces files; decides nothing about what is in them"
)]

use std::ffi::OsString;
use std::fs::{self, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use nix::fcntl::OFlag;

/// Why there is nothing to decode.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// It is not there (any more).
    #[error("is gone")]
    Gone,
    /// A folder, a symlink, a fifo: nothing that evenkeel ever wrote here.
    #[error("is {0}, not a regular file")]
    NotAFile(&'static str),
    /// Longer than the limit.
    #[error("is longer than {0} bytes")]
    TooLong(u64),
    /// The system refused. This says nothing about the content.
    #[error("cannot be read")]
    Refused(#[source] io::Error),
}

/// The content of a regular file of at most `limit` bytes. Its folder is private, so the name means the same file
/// from one call to the next.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>, ReadError> {
    let refused = |error: io::Error| match error.kind() {
        io::ErrorKind::NotFound => ReadError::Gone,
        _ => ReadError::Refused(error),
    };
    let kind = fs::symlink_metadata(path).map_err(refused)?.file_type();
    if kind.is_symlink() {
        return Err(ReadError::NotAFile("a symlink"));
    } else if kind.is_dir() {
        return Err(ReadError::NotAFile("a folder"));
    } else if !kind.is_file() {
        return Err(ReadError::NotAFile("a device, fifo or socket"));
    }
    let file = OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits())
        .open(path)
        .map_err(refused)?;
    let mut content = Vec::new();
    // The length is taken from what is read: a file may grow meanwhile.
    file.take(limit.saturating_add(1))
        .read_to_end(&mut content)
        .map_err(refused)?;
    if content.len() as u64 > limit {
        return Err(ReadError::TooLong(limit));
    }
    Ok(content)
}

/// Where the new content of `path` is prepared: beside it, hidden, one name per file because there is one writer.
pub fn temporary(path: &Path) -> PathBuf {
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(".tmp");
    path.with_file_name(name)
}

/// Replaces a file by one that only its owner may read. When it fails, the old content is as it was and nothing is left
/// behind, as far as the file system lets it be removed.
///
/// Without fsync: after a crash of the machine the content may be missing, see [`crate::store`].
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let temporary = temporary(path);
    let result = prepare(&temporary, content).and_then(|()| fs::rename(&temporary, path));
    if result.is_err() {
        // The first error is the one to tell; a leftover is removed at the next start.
        let _ = fs::remove_file(&temporary);
    }
    result
}

fn prepare(temporary: &Path, content: &[u8]) -> io::Result<()> {
    match fs::remove_file(temporary) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(temporary)?;
    file.write_all(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_whole_and_for_its_owner_alone() {
        use std::os::unix::fs::PermissionsExt as _;

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        replace(&path, b"old").unwrap();
        replace(&path, b"new").unwrap();
        assert_eq!(read(&path, 10).unwrap(), b"new");
        assert_eq!(
            fs::metadata(&path).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_replacement_that_fails_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::create_dir(&path).unwrap();
        replace(&path, b"new").unwrap_err();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn only_regular_files_of_bounded_length_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("long"), "12345").unwrap();
        std::os::unix::fs::symlink(at("long"), at("link")).unwrap();
        assert_eq!(read(&at("long"), 5).unwrap(), b"12345");
        assert!(matches!(read(&at("long"), 4), Err(ReadError::TooLong(4))));
        assert!(matches!(read(&at("none"), 5), Err(ReadError::Gone)));
        assert!(matches!(read(&at("link"), 5), Err(ReadError::NotAFile(_))));
        assert!(matches!(
            read(folder.path(), 5),
            Err(ReadError::NotAFile(_))
        ));
    }
}
