//! One controller per state folder.
//!
//! `STATE/lock` is locked with `flock` for the controller's life, and never unlinked: a lock on a file that another
//! process can replace protects nothing. The kernel drops it when the process ends, however it ends. In the file the
//! controller says who it is, for the messages of others; it stays there after the controller, and proves nothing.
//!
//! Who only wants to *know* whether a controller runs must not lock the file, not for a moment: a controller that starts
//! in that moment would give up. So the controller also takes an open-file-description lock on the same file, which
//! others can ask about without taking it (`F_OFD_GETLK`); unlike a pid this also works where the controller lives in
//! a container with the same state folder. Where the file system does not know such locks, pid, start ticks and boot id
//! decide.
//!
//! Invariant: nothing in here waits, and asking changes nothing.
#![expect(
    clippy::disallowed_methods,
    reason = "holds the lock of the state folder, and asks who does"
)]

use std::fmt;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use jiff::Timestamp;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::libc;
use serde::{Deserialize, Serialize, Serializer};

use super::{StoreError, folder};
use crate::procfs::Procfs;

/// More than any controller writes about itself.
const FILE_LIMIT: u64 = 64 * 1024;

/// Who keeps a state folder, in its own words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Controller {
    /// Its pid, as it sees itself: in a container another than outside.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start_ticks: u64,
    /// Which boot.
    pub boot_id: String,
    /// The version of evenkeel.
    pub version: String,
    /// When it started.
    pub started_at: Timestamp,
    /// The manifest folder, absolute.
    #[serde(serialize_with = "lossy")]
    pub folder: PathBuf,
    /// The options it runs with.
    pub settings: serde_json::Value,
}

/// A folder with a strange name must not keep the controller from starting; this is for showing.
fn lossy<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&path.display())
}

impl Controller {
    /// This process.
    pub fn this(
        started_at: Timestamp,
        folder: PathBuf,
        settings: serde_json::Value,
    ) -> io::Result<Self> {
        let pid = std::process::id();
        let start_ticks = Procfs::default()
            .stat(pid)?
            .ok_or_else(|| io::Error::other("this process is not in /proc"))?
            .start_ticks;
        Ok(Self {
            pid,
            start_ticks,
            boot_id: Procfs::default().boot_id()?,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            started_at,
            folder,
            settings,
        })
    }

    /// Whether its very process lives. What cannot be read is no proof.
    fn is_proven_alive(&self) -> bool {
        let proc = Procfs::default();
        let stat = proc.stat(self.pid).ok().flatten();
        proc.boot_id().is_ok_and(|boot_id| boot_id == self.boot_id)
            && stat.is_some_and(|stat| !stat.is_gone() && stat.start_ticks == self.start_ticks)
    }
}

impl fmt::Display for Controller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the controller of {} (pid {}, since {})",
            self.folder.display(),
            self.pid,
            // To the second.
            self.started_at.strftime("%FT%TZ"),
        )
    }
}

/// Why the state folder is not ours.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another controller has it.
    #[error("{} is in use by {}", .state.display(), by_text(.by.as_deref()))]
    Held {
        /// The state folder.
        state: PathBuf,
        /// Who, as far as it has said so yet.
        by: Option<Box<Controller>>,
    },
    /// The folder cannot be used.
    #[error(transparent)]
    State(#[from] StoreError),
    /// The file cannot be used.
    #[error("cannot lock {}", .path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

fn by_text(by: Option<&Controller>) -> String {
    by.map_or_else(
        || "another controller that is just starting".to_owned(),
        ToString::to_string,
    )
}

impl LockError {
    /// What a person can do about it.
    pub fn hint(&self) -> String {
        match self {
            Self::Held { .. } => {
                "stop that one, or give this one another folder with `--state-dir`".to_owned()
            }
            Self::State(error) => error.hint(),
            Self::File { .. } => {
                "give `--state-dir` a folder on a local file system that this user may write to"
                    .to_owned()
            }
        }
    }
}

/// The state folder is ours while this lives.
#[derive(Debug)]
pub struct StateLock {
    /// Locked; the kernel unlocks it when it is closed.
    _file: File,
}

impl StateLock {
    /// Takes the state folder, creating it if need be, and says in it who we are. Tries once.
    pub fn acquire(state: &Path, controller: &Controller) -> Result<Self, LockError> {
        folder::prepare_state(state)?;
        let path = path(state);
        let failed = |source| LockError::File {
            path: path.clone(),
            source,
        };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(OFlag::O_NOFOLLOW.bits())
            .open(&path)
            .map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(LockError::Held {
                    state: state.to_owned(),
                    by: read(&mut file).ok().flatten().map(Box::new),
                });
            }
            Err(TryLockError::Error(source)) => return Err(failed(source)),
        }
        // A full disk must not keep the controller from looking after what runs.
        if let Err(error) = introduce(&mut file, controller) {
            tracing::warn!(file = %path.display(), %error, "cannot say who holds the lock");
        }
        // After the introduction, so that whoever sees this lock can read who holds it. `flock` is what protects: where
        // this one does not work, only the answer to "is one running" gets worse.
        if let Err(error) = fcntl(&file, FcntlArg::F_OFD_SETLK(&whole_file())) {
            tracing::debug!(%error, "no open-file-description lock");
        }
        Ok(Self { _file: file })
    }
}

fn introduce(file: &mut File, controller: &Controller) -> io::Result<()> {
    let mut text = serde_json::to_vec_pretty(controller)?;
    text.push(b'\n');
    // Emptied first: the earlier controller must not be taken for this one.
    file.set_len(0)?;
    file.set_permissions(std::fs::Permissions::from_mode(0o600))?;
    file.rewind()?;
    file.write_all(&text)
}

fn path(state: &Path) -> PathBuf {
    state.join("lock")
}

fn read(file: &mut File) -> io::Result<Option<Controller>> {
    file.rewind()?;
    let mut text = Vec::new();
    file.take(FILE_LIMIT).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text).ok())
}

/// A write lock from the file's beginning to its end, wherever that will be.
fn whole_file() -> libc::flock {
    // The constants are small; the kernel's struct has 16 bits for them.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "F_WRLCK is 1, SEEK_SET is 0"
    )]
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    }
}

/// Whether a controller keeps a state folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControllerState {
    /// This one does.
    Running(Controller),
    /// None does; the last one that did, where it is known.
    NotRunning(Option<Controller>),
}

/// Whether a controller keeps the state folder. Takes no lock.
pub fn controller(state: &Path) -> Result<ControllerState, LockError> {
    let path = path(state);
    let failed = |source| LockError::File {
        path: path.clone(),
        source,
    };
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits())
        .open(&path);
    let mut file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(ControllerState::NotRunning(None));
        }
        Err(source) => return Err(failed(source)),
    };
    // Asked before the file is read: what is read then is from its holder, or from a later one.
    let locked = is_locked(&file);
    let controller = read(&mut file).map_err(failed)?;
    Ok(match controller {
        Some(controller) if locked || controller.is_proven_alive() => {
            ControllerState::Running(controller)
        }
        // Without a word in it the file is locked for an instant only, by one that is starting.
        last => ControllerState::NotRunning(last),
    })
}

fn is_locked(file: &File) -> bool {
    let mut lock = whole_file();
    let asked = fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock));
    asked.is_ok() && i32::from(lock.l_type) != libc::F_UNLCK
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One that cannot be alive.
    fn dead() -> Controller {
        Controller {
            pid: 4_194_305,
            start_ticks: 1,
            boot_id: "another".to_owned(),
            version: "0.1.0".to_owned(),
            started_at: "2026-01-01T00:00:00.5Z".parse().unwrap(),
            folder: "/srv/models".into(),
            settings: serde_json::json!({"resync": 30}),
        }
    }

    fn this() -> Controller {
        Controller::this(Timestamp::UNIX_EPOCH, "/srv/models".into(), ().into()).unwrap()
    }

    #[test]
    fn a_second_controller_is_told_who_the_first_is() {
        let folder = tempfile::tempdir().unwrap();
        let first = StateLock::acquire(folder.path(), &dead()).unwrap();
        let error = StateLock::acquire(folder.path(), &this()).unwrap_err();
        let text = error.to_string();
        for part in ["/srv/models", "4194305", "2026-01-01T00:00:00Z"] {
            assert!(text.contains(part), "{text}");
        }
        let LockError::Held { by, .. } = error else {
            panic!("{error:?}");
        };
        assert_eq!(by.as_deref(), Some(&dead()));
        drop(first);
        StateLock::acquire(folder.path(), &this()).unwrap();
    }

    #[test]
    fn one_that_has_not_said_who_it_is_holds_the_lock_all_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(path(folder.path())).unwrap();
        file.lock().unwrap();
        let error = StateLock::acquire(folder.path(), &this()).unwrap_err();
        assert!(matches!(error, LockError::Held { by: None, .. }));
    }

    #[test]
    fn asking_who_runs_takes_no_lock_and_needs_no_pid() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path();
        assert_eq!(
            controller(state).unwrap(),
            ControllerState::NotRunning(None)
        );
        // As seen from outside of a container: the pid means nothing here.
        let lock = StateLock::acquire(state, &dead()).unwrap();
        assert_eq!(controller(state).unwrap(), ControllerState::Running(dead()));
        drop(lock);
        assert_eq!(
            controller(state).unwrap(),
            ControllerState::NotRunning(Some(dead()))
        );
    }

    #[test]
    fn where_locks_cannot_be_asked_about_the_process_decides() {
        let folder = tempfile::tempdir().unwrap();
        let say = |controller: &Controller| {
            let text = serde_json::to_string(controller).unwrap();
            std::fs::write(path(folder.path()), text).unwrap();
        };
        say(&this());
        assert_eq!(
            controller(folder.path()).unwrap(),
            ControllerState::Running(this())
        );
        for other in [
            Controller {
                start_ticks: this().start_ticks + 1,
                ..this()
            },
            Controller {
                boot_id: "another".to_owned(),
                ..this()
            },
        ] {
            say(&other);
            assert_eq!(
                controller(folder.path()).unwrap(),
                ControllerState::NotRunning(Some(other))
            );
        }
    }

    #[test]
    fn what_an_earlier_controller_wrote_is_replaced_however_long_it_was() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(path(folder.path()), "x".repeat(10_000)).unwrap();
        std::fs::set_permissions(path(folder.path()), std::fs::Permissions::from_mode(0o644))
            .unwrap();
        let _lock = StateLock::acquire(folder.path(), &dead()).unwrap();
        let text = std::fs::read(path(folder.path())).unwrap();
        assert_eq!(serde_json::from_slice::<Controller>(&text).unwrap(), dead());
        let mode = std::fs::metadata(path(folder.path()))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_symlink_in_the_locks_place_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("instances");
        std::fs::write(&target, "precious").unwrap();
        std::os::unix::fs::symlink(&target, path(folder.path())).unwrap();
        StateLock::acquire(folder.path(), &this()).unwrap_err();
        assert_eq!(std::fs::read_to_string(&target).unwrap(), "precious");
    }
}
