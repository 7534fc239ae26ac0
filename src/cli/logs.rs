//! `evenkeel logs`: what an instance printed.
//!
//! The engine writes straight into `STATE/logs/INSTANCE.log`; at a relaunch that becomes `INSTANCE.1.log`, and a file that
//! grew too long is emptied in place. Following copes with both.
//!
//! Invariant: what is printed is what is in the file, byte by byte; nothing of it is taken for text.
#![expect(clippy::disallowed_methods, reason = "reads STATE/logs")]

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nix::fcntl::OFlag;
use tokio::time::MissedTickBehavior;

use crate::names::InstanceName;

/// How often a follower looks: so that a person sees no delay, and the look is one `stat`.
const PERIOD: Duration = Duration::from_millis(250);

/// Read at a time.
const BLOCK: usize = 64 * 1024;

/// Shows what an instance printed.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct LogsArgs {
    /// An instance, or a deployment that has only one
    pub name: String,
    /// Go on printing what is added, until interrupted; also across relaunches
    #[arg(short, long)]
    pub follow: bool,
    /// Of the launch before this one
    #[arg(long, conflicts_with = "follow")]
    pub previous: bool,
    /// Only the last N lines
    #[arg(long, value_name = "N")]
    pub tail: Option<u64>,
}

/// Why a log could not be printed.
#[derive(Debug, thiserror::Error)]
pub enum LogsError {
    /// Nothing has this name.
    #[error("no instance and no deployment is called `{name}`")]
    Unknown {
        /// The name asked for.
        name: String,
        /// The instances that there are.
        known: Vec<InstanceName>,
    },
    /// A deployment with several instances.
    #[error("`{name}` has several instances: {}", list(.instances))]
    Several {
        /// The name asked for.
        name: String,
        /// Its instances.
        instances: Vec<InstanceName>,
    },
    /// It never ran.
    #[error("{instance} has no log: it was not launched yet")]
    NoLog {
        /// Which instance.
        instance: InstanceName,
    },
    /// It ran once only.
    #[error("{instance} has no log of an earlier launch")]
    NoPrevious {
        /// Which instance.
        instance: InstanceName,
    },
    /// A file or folder cannot be read.
    #[error("cannot read {}", .path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The output cannot be written.
    #[error("cannot write the output")]
    Output(#[source] io::Error),
}

fn list(instances: &[InstanceName]) -> String {
    let names: Vec<_> = instances.iter().map(ToString::to_string).collect();
    names.join(", ")
}

impl LogsError {
    /// What a person can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Unknown { known, .. } if known.is_empty() => Some(
                "nothing has been launched with this state folder; see `--state-dir`".to_owned(),
            ),
            Self::Unknown { name, known } => {
                Some(format!("did you mean {}?", nearest(name, known)))
            }
            Self::Several { .. } => Some("name one of them".to_owned()),
            Self::NoLog { .. } => Some("`evenkeel describe` says what it waits for".to_owned()),
            Self::Read { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Some("ask as the user whom evenkeel runs as".to_owned())
            }
            Self::NoPrevious { .. } | Self::Read { .. } | Self::Output(_) => None,
        }
    }
}

fn nearest(name: &str, known: &[InstanceName]) -> String {
    let distance = |instance: &&InstanceName| {
        strsim::damerau_levenshtein(name, instance.deployment.as_str())
            .min(strsim::damerau_levenshtein(name, &instance.to_string()))
    };
    known
        .iter()
        .min_by_key(distance)
        .map(ToString::to_string)
        .unwrap_or_default()
}

/// Prints the log of an instance; with `--follow` it ends when the reader does, or never.
pub async fn logs(args: &LogsArgs, state: &Path, out: &mut dyn Write) -> Result<(), LogsError> {
    let instance = resolve(state, &args.name)?;
    let file = if args.previous {
        format!("{instance}.1.log")
    } else {
        format!("{instance}.log")
    };
    let mut follower = Follower::new(state.join("logs").join(file));
    follower.look(args.tail, out)?;
    if follower.open.is_none() && !args.follow {
        return Err(if args.previous {
            LogsError::NoPrevious { instance }
        } else {
            LogsError::NoLog { instance }
        });
    }
    if !args.follow {
        return Ok(());
    }
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    while follower.reader == Reader::There {
        ticks.tick().await;
        // The wish for a tail concerns what was there at the beginning.
        follower.look(None, out)?;
    }
    Ok(())
}

/// The instance that a name means: the instance of this name, else the only one of the deployment of this name. One that
/// has a record is preferred to those of which only logs are left.
fn resolve(state: &Path, name: &str) -> Result<InstanceName, LogsError> {
    let recorded = instances(&state.join("instances"), ".json")?;
    let logged = instances(&state.join("logs"), ".log")?;
    let known: BTreeSet<_> = recorded.union(&logged).cloned().collect();
    if let Ok(instance) = name.parse::<InstanceName>()
        && known.contains(&instance)
    {
        return Ok(instance);
    }
    for candidates in [recorded, logged] {
        let of_name: Vec<_> = candidates
            .into_iter()
            .filter(|instance| instance.deployment.as_str() == name)
            .collect();
        match of_name.as_slice() {
            [] => {}
            [instance] => return Ok(instance.clone()),
            _ => {
                return Err(LogsError::Several {
                    name: name.to_owned(),
                    instances: of_name,
                });
            }
        }
    }
    Err(LogsError::Unknown {
        name: name.to_owned(),
        known: known.into_iter().collect(),
    })
}

/// The instances that have a file of this kind in the folder.
fn instances(folder: &Path, suffix: &str) -> Result<BTreeSet<InstanceName>, LogsError> {
    let list = || -> io::Result<BTreeSet<InstanceName>> {
        let mut instances = BTreeSet::new();
        for entry in fs::read_dir(folder)? {
            let name = entry?.file_name();
            let stem = name.to_str().and_then(|name| name.strip_suffix(suffix));
            instances.extend(stem.and_then(|stem| stem.parse::<InstanceName>().ok()));
        }
        Ok(instances)
    };
    match list() {
        Ok(instances) => Ok(instances),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeSet::new()),
        Err(source) => Err(LogsError::Read {
            path: folder.to_owned(),
            source,
        }),
    }
}

/// Whether anybody reads the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reader {
    There,
    Gone,
}

/// A log and how much of it has been printed.
struct Follower {
    path: PathBuf,
    open: Option<Open>,
    reader: Reader,
}

struct Open {
    file: File,
    position: u64,
}

impl Follower {
    fn new(path: PathBuf) -> Self {
        Self {
            path,
            open: None,
            reader: Reader::There,
        }
    }

    /// Prints what was added since the last look; of a file that is new at the first look its last `tail` lines.
    fn look(&mut self, tail: Option<u64>, out: &mut dyn Write) -> Result<(), LogsError> {
        let result = self.copy(tail, out);
        match result {
            Ok(()) => Ok(()),
            Err(Failed::Write(error)) if error.kind() == io::ErrorKind::BrokenPipe => {
                self.reader = Reader::Gone;
                Ok(())
            }
            Err(Failed::Write(error)) => Err(LogsError::Output(error)),
            Err(Failed::Read(source)) => Err(LogsError::Read {
                path: self.path.clone(),
                source,
            }),
        }
    }

    fn copy(&mut self, tail: Option<u64>, out: &mut dyn Write) -> Result<(), Failed> {
        if let Some(open) = &mut self.open {
            let same = is_at(&open.file, &self.path).map_err(Failed::Read)?;
            // Also of a file that was moved away: what came in before that belongs here.
            open.copy(out)?;
            if same {
                return out.flush().map_err(Failed::Write);
            }
        }
        match open_log(&self.path) {
            Ok(file) => {
                let position = match tail {
                    Some(lines) => tail_start(&file, lines).map_err(Failed::Read)?,
                    None => 0,
                };
                let open = self.open.insert(Open { file, position });
                open.copy(out)?;
            }
            // Between two launches, or before the first.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Failed::Read(error)),
        }
        out.flush().map_err(Failed::Write)
    }
}

/// Which side failed.
enum Failed {
    Read(io::Error),
    Write(io::Error),
}

fn open_log(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits())
        .open(path)
}

/// Whether the path still leads to this file. While it leads nowhere, it does: the next launch has not begun.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let here = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(there) => Ok((here.dev(), here.ino()) == (there.dev(), there.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error),
    }
}

impl Open {
    /// Prints from the position to the present end. A file that is shorter now was emptied: from its beginning.
    fn copy(&mut self, out: &mut dyn Write) -> Result<(), Failed> {
        // As far as it goes now: an engine may write faster than a terminal shows.
        let end = self.file.metadata().map_err(Failed::Read)?.len();
        if end < self.position {
            self.position = 0;
        }
        let mut block = vec![0; BLOCK];
        while self.position < end {
            let left = usize::try_from(end - self.position).unwrap_or(BLOCK);
            let part = &mut block[..left.min(BLOCK)];
            let read = match self.file.read_at(part, self.position) {
                // Emptied in this moment.
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(Failed::Read(error)),
            };
            out.write_all(&part[..read]).map_err(Failed::Write)?;
            self.position += read as u64;
        }
        Ok(())
    }
}

/// Where the last `lines` lines begin. A last line without a line end is one.
fn tail_start(file: &File, lines: u64) -> io::Result<u64> {
    let length = file.metadata()?.len();
    if lines == 0 {
        return Ok(length);
    }
    let mut block = vec![0; BLOCK];
    let mut start = length;
    let mut ends = 0_u64;
    while start > 0 {
        let size = usize::try_from(start).unwrap_or(BLOCK).min(BLOCK);
        start -= size as u64;
        let part = &mut block[..size];
        match file.read_exact_at(part, start) {
            Ok(()) => {}
            // Emptied in this moment.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(0),
            Err(error) => return Err(error),
        }
        for (offset, &byte) in part.iter().enumerate().rev() {
            let at = start + offset as u64;
            // The very last byte ends the last line and begins none.
            if byte == b'\n' && at + 1 < length {
                ends += 1;
                if ends == lines {
                    return Ok(at + 1);
                }
            }
        }
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct World {
        folder: tempfile::TempDir,
    }

    fn world() -> World {
        let folder = tempfile::tempdir().unwrap();
        for name in ["instances", "logs"] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        World { folder }
    }

    impl World {
        fn at(&self, path: &str) -> PathBuf {
            self.folder.path().join(path)
        }

        fn put(&self, path: &str, content: impl AsRef<[u8]>) {
            fs::write(self.at(path), content).unwrap();
        }

        fn add(&self, path: &str, content: &str) {
            let mut file = OpenOptions::new().append(true).open(self.at(path)).unwrap();
            file.write_all(content.as_bytes()).unwrap();
        }

        async fn logs(&self, args: &LogsArgs) -> Result<String, LogsError> {
            let mut out = Vec::new();
            logs(args, self.folder.path(), &mut out).await?;
            Ok(String::from_utf8(out).unwrap())
        }
    }

    fn of(name: &str) -> LogsArgs {
        LogsArgs {
            name: name.to_owned(),
            ..LogsArgs::default()
        }
    }

    fn look(follower: &mut Follower) -> String {
        let mut out = Vec::new();
        follower.look(None, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[tokio::test]
    async fn a_name_means_an_instance_or_a_deployment_with_only_one() {
        let world = world();
        world.put("logs/a-0.log", "of a-0\n");
        world.put("logs/a-0.1.log", "before\n");
        world.put("logs/b-0.log", "of b-0\n");
        world.put("logs/b-1.log", "of b-1\n");
        assert_eq!(world.logs(&of("a")).await.unwrap(), "of a-0\n");
        assert_eq!(world.logs(&of("a-0")).await.unwrap(), "of a-0\n");
        assert_eq!(world.logs(&of("b-1")).await.unwrap(), "of b-1\n");
        let error = world.logs(&of("b")).await.unwrap_err();
        assert_eq!(error.to_string(), "`b` has several instances: b-0, b-1");
        // Scaled down: one is left, and the logs of the other.
        world.put("instances/b-1.json", "");
        assert_eq!(world.logs(&of("b")).await.unwrap(), "of b-1\n");
    }

    #[tokio::test]
    async fn what_is_not_there_is_told_apart() {
        let world = world();
        let error = world.logs(&of("a")).await.unwrap_err();
        assert!(matches!(&error, LogsError::Unknown { known, .. } if known.is_empty()));
        world.put("instances/qwen3-8b-0.json", "");
        let error = world.logs(&of("qwen3-8b")).await.unwrap_err();
        assert!(matches!(error, LogsError::NoLog { .. }));
        let error = world.logs(&of("qwen-8b")).await.unwrap_err();
        assert_eq!(error.hint().unwrap(), "did you mean qwen3-8b-0?");
        world.put("logs/qwen3-8b-0.log", "x");
        let previous = LogsArgs {
            previous: true,
            ..of("qwen3-8b")
        };
        let error = world.logs(&previous).await.unwrap_err();
        assert!(matches!(error, LogsError::NoPrevious { .. }));
        for hostile in ["../instances/x", "", "/etc/passwd", "a-0.1"] {
            let error = world.logs(&of(hostile)).await.unwrap_err();
            assert!(matches!(error, LogsError::Unknown { .. }));
        }
    }

    #[tokio::test]
    async fn the_previous_launch_has_a_log_of_its_own() {
        let world = world();
        world.put("logs/a-0.log", "now\n");
        world.put("logs/a-0.1.log", "before\n");
        let previous = LogsArgs {
            previous: true,
            ..of("a")
        };
        assert_eq!(world.logs(&previous).await.unwrap(), "before\n");
    }

    #[tokio::test]
    async fn a_tail_counts_lines_from_the_end_whatever_their_length() {
        let world = world();
        let long = "x".repeat(3 * BLOCK);
        for (content, lines, expected) in [
            ("1\n2\n3\n".to_owned(), 2, "2\n3\n".to_owned()),
            ("1\n2\n3".to_owned(), 2, "2\n3".to_owned()),
            ("1\n2\n3\n".to_owned(), 0, String::new()),
            ("1\n2\n3\n".to_owned(), 9, "1\n2\n3\n".to_owned()),
            ("\n\n\n".to_owned(), 1, "\n".to_owned()),
            (String::new(), 3, String::new()),
            (format!("1\n{long}\n3\n"), 2, format!("{long}\n3\n")),
        ] {
            world.put("logs/a-0.log", &content);
            let args = LogsArgs {
                tail: Some(lines),
                ..of("a")
            };
            assert_eq!(world.logs(&args).await.unwrap(), expected);
        }
    }

    #[test]
    fn a_follower_prints_what_is_added_and_nothing_twice() {
        let world = world();
        let mut follower = Follower::new(world.at("logs/a-0.log"));
        assert_eq!(look(&mut follower), "", "not launched yet");
        world.put("logs/a-0.log", "1\n");
        assert_eq!(look(&mut follower), "1\n");
        assert_eq!(look(&mut follower), "");
        world.add("logs/a-0.log", "2\n");
        assert_eq!(look(&mut follower), "2\n");
    }

    #[test]
    fn a_follower_goes_on_across_relaunches() {
        let world = world();
        world.put("logs/a-0.log", "1\n");
        let mut follower = Follower::new(world.at("logs/a-0.log"));
        assert_eq!(look(&mut follower), "1\n");
        world.add("logs/a-0.log", "last words\n");
        fs::rename(world.at("logs/a-0.log"), world.at("logs/a-0.1.log")).unwrap();
        // Between the launches.
        assert_eq!(look(&mut follower), "last words\n");
        world.add("logs/a-0.1.log", "late\n");
        world.put("logs/a-0.log", "again\n");
        assert_eq!(look(&mut follower), "late\nagain\n");
    }

    #[test]
    fn a_follower_begins_again_when_the_file_was_emptied() {
        let world = world();
        world.put("logs/a-0.log", "a long line\n");
        let mut follower = Follower::new(world.at("logs/a-0.log"));
        look(&mut follower);
        world.put("logs/a-0.log", "new\n");
        assert_eq!(look(&mut follower), "new\n");
    }

    #[tokio::test]
    async fn a_follower_ends_with_its_reader() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let world = world();
        world.put("logs/a-0.log", "1\n");
        let args = LogsArgs {
            follow: true,
            ..of("a")
        };
        logs(&args, world.folder.path(), &mut Closed).await.unwrap();
    }
}
