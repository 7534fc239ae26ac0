//! The manifest folder as the file system shows it: which files there are, and their bytes.
//!
//! Invariant: a [`Listing`] is complete, or there is none (W5); nothing but regular files is opened (W7).
#![expect(clippy::disallowed_methods, reason = "reads the manifest folder")]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use nix::fcntl::OFlag;

/// The largest file that is read: manifests have some kilobytes, and what is bigger is something else.
pub(super) const FILE_LIMIT: u64 = 1 << 20;

/// How deep `--recursive` goes: deeper than anybody sorts manifests, and an end for links that lead in circles.
const DEPTH_LIMIT: usize = 16;

/// How often a folder is listed anew that is swapped meanwhile: a swap is rare, three in a row are something else.
const LISTING_TRIES: usize = 3;

/// Whether folders within the folder are looked into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Depth {
    /// Only the folder itself.
    #[default]
    Flat,
    /// Also the folders in it.
    Recursive,
}

/// Why a folder is no manifest folder.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// It cannot be looked at.
    #[error("the manifest folder {path} cannot be read")]
    Unreadable {
        /// The folder.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// It is something else.
    #[error("{0} is not a folder")]
    NotAFolder(PathBuf),
    /// Everybody can write to it.
    #[error(
        "everybody can write to the manifest folder {0}, and whoever can write manifests can run commands"
    )]
    WorldWritable(PathBuf),
}

impl FolderError {
    /// What would be right.
    pub fn hint(&self) -> String {
        match self {
            Self::Unreadable { path, .. } => format!("create it: mkdir -p {}", path.display()),
            Self::NotAFolder(_) => "name the folder, not a file in it".to_owned(),
            Self::WorldWritable(path) => format!(
                "take the right away (chmod o-w {}), or say --allow-world-writable",
                path.display()
            ),
        }
    }
}

/// Whether a folder writable by everybody is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WorldWritable {
    /// It is refused (W10).
    #[default]
    Refuse,
    /// It is taken.
    Allow,
}

/// The device that the folder is known to be on: the present one if any of the files that were in it before is there, or
/// nothing is known; else the one from before, because an unmounted volume leaves another, empty folder in its place.
pub fn known_device<'a>(
    folder: &Path,
    files: impl IntoIterator<Item = &'a Path>,
    before: Option<u64>,
) -> Option<u64> {
    let is_there = |file: &Path| fs::symlink_metadata(folder.join(file)).is_ok();
    let present = || fs::metadata(folder).ok().map(|metadata| metadata.dev());
    match before {
        Some(before) if !files.into_iter().any(is_there) => Some(before),
        Some(_) | None => present(),
    }
}

/// Checks the folder at start-up: it is there, it is a folder, it can be listed, and not everybody can write to it.
pub fn check_folder(folder: &Path, world_writable: WorldWritable) -> Result<(), FolderError> {
    let unreadable = |source| FolderError::Unreadable {
        path: folder.to_owned(),
        source,
    };
    let metadata = fs::metadata(folder).map_err(unreadable)?;
    if !metadata.is_dir() {
        return Err(FolderError::NotAFolder(folder.to_owned()));
    }
    if metadata.mode() & 0o002 != 0 && world_writable == WorldWritable::Refuse {
        return Err(FolderError::WorldWritable(folder.to_owned()));
    }
    fs::read_dir(folder).map_err(unreadable).map(drop)
}

/// What tells a changed file from an unchanged one without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// When its bytes were last written, if that is a time at all.
    pub(super) fn modified(&self) -> Option<Timestamp> {
        let (seconds, nanoseconds) = self.modified;
        Timestamp::new(seconds, nanoseconds.try_into().ok()?).ok()
    }

    /// How many bytes it has.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Whether it is too large to be read.
    pub(super) fn is_too_large(&self) -> bool {
        self.size > FILE_LIMIT
    }
}

/// A complete listing of the folder.
#[derive(Debug)]
pub(super) struct Listing {
    /// The device that the folder is on.
    pub(super) device: u64,
    /// Where the folder really is, links followed: what belongs to one listing is read under one name.
    pub(super) root: PathBuf,
    /// The manifests by their path in the folder; those that cannot be looked at with the reason.
    pub(super) files: BTreeMap<PathBuf, Result<Stamp, String>>,
}

/// Lists the folder completely, or says why it cannot be.
pub(super) fn list(folder: &Path, depth: Depth) -> Result<Listing, String> {
    let mut why = "it is replaced again and again while it is listed".to_owned();
    for _ in 0..LISTING_TRIES {
        let root = resolve(folder)?;
        let before = identity(&root)?;
        let mut files = BTreeMap::new();
        let mut listed = BTreeSet::from([before]);
        let result = list_into(&root, Path::new(""), depth, &mut files, &mut listed);
        // A folder that was swapped or removed half-way gave half of a listing, or none.
        let is_same = resolve(folder)? == root && identity(&root)? == before;
        match result {
            Ok(()) if is_same => {
                let (device, _) = before;
                return Ok(Listing {
                    device,
                    root,
                    files,
                });
            }
            Ok(()) => {}
            Err(error) => why = error,
        }
    }
    Err(why)
}

fn resolve(folder: &Path) -> Result<PathBuf, String> {
    fs::canonicalize(folder).map_err(|error| error.to_string())
}

fn identity(folder: &Path) -> Result<(u64, u64), String> {
    let metadata = fs::metadata(folder).map_err(|error| error.to_string())?;
    if metadata.is_dir() {
        Ok((metadata.dev(), metadata.ino()))
    } else {
        Err("it is not a folder".to_owned())
    }
}

fn list_into(
    root: &Path,
    within: &Path,
    depth: Depth,
    files: &mut BTreeMap<PathBuf, Result<Stamp, String>>,
    listed: &mut BTreeSet<(u64, u64)>,
) -> Result<(), String> {
    let in_folder = |error: io::Error| {
        if within.as_os_str().is_empty() {
            error.to_string()
        } else {
            format!("{}: {error}", within.display())
        }
    };
    let entries: io::Result<Vec<_>> = fs::read_dir(root.join(within))
        .map_err(in_folder)?
        .collect();
    let mut entries = entries.map_err(in_folder)?;
    // What is reached under two names is listed under the same one each time, and rather not by a link.
    entries.sort_by_cached_key(|entry| {
        (
            entry.file_type().is_ok_and(|kind| kind.is_symlink()),
            entry.file_name(),
        )
    });
    for entry in entries {
        let name = entry.file_name();
        if is_ignored(&name) {
            continue;
        }
        let relative = within.join(&name);
        if is_manifest(&name) {
            match fs::metadata(entry.path()) {
                Ok(metadata) if metadata.is_file() => {
                    files.insert(relative, Ok(Stamp::of(&metadata)));
                    continue;
                }
                // A folder may be called anything; the rest is never opened.
                Ok(metadata) if metadata.is_dir() => {}
                Ok(_) => continue,
                Err(error) => {
                    // Gone since it was listed: absent, not unreadable. A link to nothing is unreadable.
                    if fs::symlink_metadata(entry.path()).is_ok() {
                        let why = match error.kind() {
                            ErrorKind::NotFound => {
                                "is a link to a file that does not exist".to_owned()
                            }
                            _ => format!("cannot be looked at: {error}"),
                        };
                        files.insert(relative, Err(why));
                    }
                    continue;
                }
            }
        }
        if depth == Depth::Recursive && within.components().count() < DEPTH_LIMIT {
            list_below(root, &relative, entry.file_type().ok(), files, listed)?;
        }
    }
    Ok(())
}

fn list_below(
    root: &Path,
    relative: &Path,
    kind: Option<fs::FileType>,
    files: &mut BTreeMap<PathBuf, Result<Stamp, String>>,
    listed: &mut BTreeSet<(u64, u64)>,
) -> Result<(), String> {
    // Most entries are plain files, which needs no further look.
    if kind.is_some_and(|kind| !kind.is_dir() && !kind.is_symlink()) {
        return Ok(());
    }
    match fs::metadata(root.join(relative)) {
        Ok(metadata) if metadata.is_dir() => {
            // Links may lead in circles, and the same file twice would be its own duplicate.
            if listed.insert((metadata.dev(), metadata.ino())) {
                list_into(root, relative, Depth::Recursive, files, listed)?;
            }
            Ok(())
        }
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(format!("{}: {error}", relative.display())),
    }
}

/// Whether a name is one that editors, downloads and version control leave behind (W7). Such folders are not looked
/// into either.
pub(super) fn is_ignored(name: &OsStr) -> bool {
    let name = name.as_bytes();
    let swap = name.len() > 4 && name[..name.len() - 1].ends_with(b".sw");
    let is_numbered = name.starts_with(b"#") && name.ends_with(b"#") && name.len() > 1;
    name.starts_with(b".")
        || name.ends_with(b"~")
        || is_numbered
        || swap
        || name == b"4913"
        || [&b".tmp"[..], b".bak", b".orig", b".part"]
            .iter()
            .any(|ending| name.ends_with(ending))
}

/// Whether a name is that of a manifest.
pub(super) fn is_manifest(name: &OsStr) -> bool {
    let ending = Path::new(name).extension();
    !is_ignored(name)
        && ending.is_some_and(|ending| ending == "yaml" || ending == "yml" || ending == "json")
}

/// What reading a file came to.
#[derive(Debug)]
pub(super) enum Bytes {
    /// Its bytes, and the stamp that belongs to them.
    Read(Stamp, Vec<u8>),
    /// It was written to while it was read.
    Changing,
    /// It is larger than [`FILE_LIMIT`].
    TooLarge,
    /// It could not be read.
    Failed(String),
}

/// Reads a file of a listing.
pub(super) fn read(path: &Path) -> Bytes {
    match try_read(path) {
        Ok(bytes) => bytes,
        Err(error) => Bytes::Failed(format!("cannot be read: {error}")),
    }
}

fn try_read(path: &Path) -> io::Result<Bytes> {
    // Not blocking, in case the file was replaced by a fifo since it was listed.
    let mut file: File = OpenOptions::new()
        .read(true)
        .custom_flags(OFlag::O_NONBLOCK.bits())
        .open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Ok(Bytes::Failed("is not a file".to_owned()));
    }
    let before = Stamp::of(&metadata);
    if before.is_too_large() {
        return Ok(Bytes::TooLarge);
    }
    let mut bytes = Vec::with_capacity(usize::try_from(before.size).unwrap_or_default());
    file.by_ref().take(FILE_LIMIT + 1).read_to_end(&mut bytes)?;
    let after = Stamp::of(&file.metadata()?);
    let complete = u64::try_from(bytes.len()).is_ok_and(|length| length == after.size);
    if before == after && complete {
        Ok(Bytes::Read(after, bytes))
    } else {
        Ok(Bytes::Changing)
    }
}

/// The `index.lock` of the work tree that surrounds the folder, if a git command holds it.
pub(super) fn git_lock(root: &Path) -> Option<PathBuf> {
    let dot_git = root
        .ancestors()
        .map(|folder| folder.join(".git"))
        .find(|path| path.exists())?;
    let git_folder = if dot_git.is_dir() {
        dot_git
    } else {
        // A linked work tree or a submodule: `gitdir: PATH`. The file has one short line.
        let mut line = String::new();
        File::open(&dot_git)
            .ok()?
            .take(4096)
            .read_to_string(&mut line)
            .ok()?;
        let path = line.strip_prefix("gitdir:")?.trim();
        dot_git.parent()?.join(path)
    };
    let lock = git_folder.join("index.lock");
    lock.exists().then_some(lock)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn names(listing: &Listing) -> Vec<&str> {
        listing
            .files
            .keys()
            .map(|path| path.to_str().unwrap())
            .collect()
    }

    #[test]
    fn what_editors_leave_behind_is_no_manifest() {
        for ignored in [
            ".a.yaml",
            "..data",
            "a.yaml~",
            "#a.yaml#",
            ".a.yaml.swp",
            "a.yaml.swx",
            "4913",
            "a.yaml.tmp",
            "a.yaml.bak",
            "a.yaml.orig",
            "a.yaml.part",
            "a.txt",
            "yaml",
            "a.yaml.gz",
            ".yaml",
        ] {
            assert!(!is_manifest(OsStr::new(ignored)), "{ignored}");
        }
        for manifest in [
            "a.yaml",
            "a.yml",
            "a.json",
            "a b.yaml",
            "a.sw.yaml",
            "4913.yaml",
        ] {
            assert!(is_manifest(OsStr::new(manifest)), "{manifest}");
        }
    }

    #[test]
    fn fifos_and_folders_are_not_listed_and_links_are_followed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("a.yaml"), "").unwrap();
        fs::create_dir(at("folder.yaml")).unwrap();
        fs::write(at("folder.yaml/b.yaml"), "").unwrap();
        nix::unistd::mkfifo(&at("fifo.yaml"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        std::os::unix::net::UnixListener::bind(at("socket.yaml")).unwrap();
        symlink("a.yaml", at("link.yaml")).unwrap();
        symlink("nothing", at("nothing.yaml")).unwrap();
        symlink("/dev/zero", at("device.yaml")).unwrap();

        let flat = list(folder.path(), Depth::Flat).unwrap();
        assert_eq!(names(&flat), ["a.yaml", "link.yaml", "nothing.yaml"]);
        assert!(flat.files[Path::new("nothing.yaml")].is_err());
        let deep = list(folder.path(), Depth::Recursive).unwrap();
        assert_eq!(
            names(&deep),
            ["a.yaml", "folder.yaml/b.yaml", "link.yaml", "nothing.yaml"]
        );
    }

    #[test]
    fn folders_that_lead_in_circles_are_listed_once() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("sub")).unwrap();
        fs::write(folder.path().join("sub/a.yaml"), "").unwrap();
        symlink("..", folder.path().join("sub/up")).unwrap();
        symlink("sub", folder.path().join("again")).unwrap();
        let listing = list(folder.path(), Depth::Recursive).unwrap();
        assert_eq!(names(&listing), ["sub/a.yaml"]);
    }

    #[test]
    fn a_fifo_in_place_of_a_file_does_not_block() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.yaml");
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert!(matches!(read(&path), Bytes::Failed(_)));
    }

    #[test]
    fn a_folder_is_checked_at_start() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.yaml");
        fs::write(&file, "").unwrap();
        assert!(check_folder(folder.path(), WorldWritable::Refuse).is_ok());
        assert!(matches!(
            check_folder(&file, WorldWritable::Refuse),
            Err(FolderError::NotAFolder(_))
        ));
        let missing = check_folder(&folder.path().join("none"), WorldWritable::Refuse);
        assert!(matches!(missing, Err(FolderError::Unreadable { .. })));

        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let refused = check_folder(folder.path(), WorldWritable::Refuse).unwrap_err();
        assert!(matches!(refused, FolderError::WorldWritable(_)));
        assert!(refused.hint().contains("--allow-world-writable"));
        assert!(check_folder(folder.path(), WorldWritable::Allow).is_ok());
    }

    #[test]
    fn a_git_command_at_work_is_seen_from_within_its_work_tree() {
        let tree = tempfile::tempdir().unwrap();
        let folder = tree.path().join("deep/manifests");
        fs::create_dir_all(&folder).unwrap();
        fs::create_dir(tree.path().join(".git")).unwrap();
        assert_eq!(git_lock(&folder), None);
        let lock = tree.path().join(".git/index.lock");
        fs::write(&lock, "").unwrap();
        assert_eq!(git_lock(&folder), Some(lock));

        let linked = tree.path().join("linked");
        fs::create_dir_all(tree.path().join(".git/worktrees/linked")).unwrap();
        fs::create_dir(&linked).unwrap();
        fs::write(linked.join(".git"), "gitdir: ../.git/worktrees/linked\n").unwrap();
        assert_eq!(git_lock(&linked), None);
        fs::write(tree.path().join(".git/worktrees/linked/index.lock"), "").unwrap();
        assert!(git_lock(&linked).is_some());
    }
}
