//! The log files: `NAME.log` for the launch that runs, `NAME.1.log` for the one before, and so on.
//!
//! An engine writes into its file directly, opened for appending. So the file can be cut while it is written: what comes
//! next lands at the new end.
//!
//! Logs stay when their record goes, so that a person can still look at why it went; the next instance of that name
//! takes their place. That is bounded by [`KEPT`] × [`SIZE_LIMIT`] per name. The temporary folder does not stay.
//!
//! Invariant: no more than [`KEPT`] files per name, and no older one is larger than [`SIZE_LIMIT`].
#![expect(
    clippy::disallowed_methods,
    reason = "renames, cuts and reads log files, and removes instances' temporary folders"
)]

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::redact::redact;
use crate::names::InstanceName;

/// How many files are kept per name, the current one included (P7).
pub const KEPT: usize = 5;

/// The size at which a file is put aside (P7).
pub const SIZE_LIMIT: u64 = 10 << 20;

/// How much of a log's end is shown (P5).
pub const TAIL: usize = 4096;

/// How much more is read for a tail than is shown: so that lines which begin before it are redacted as a whole.
const TAIL_CONTEXT: u64 = 64 << 10;

/// Something could not be done to a file.
#[derive(Debug, thiserror::Error)]
#[error("{} could not be {what}: {source}", .path.display())]
pub struct LogError {
    /// What was tried.
    pub what: &'static str,
    /// On which file.
    pub path: PathBuf,
    /// What the system said.
    pub source: io::Error,
}

fn failed(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> LogError {
    move |source| LogError {
        what,
        path: path.to_owned(),
        source,
    }
}

/// Where logs and temporary folders lie.
#[derive(Debug, Clone)]
pub struct Logs {
    logs: PathBuf,
    tmp: PathBuf,
}

impl Logs {
    /// Those of a state folder.
    pub fn new(state: &Path) -> Self {
        Self {
            logs: state.join("logs"),
            tmp: state.join("tmp"),
        }
    }

    /// The log of an instance's current launch.
    pub fn current(&self, instance: &InstanceName) -> PathBuf {
        self.older(instance, 0)
    }

    /// The log of the launch `age` launches ago.
    pub fn older(&self, instance: &InstanceName, age: usize) -> PathBuf {
        // No name holds a dot, so no two of these are the same.
        self.logs.join(match age {
            0 => format!("{instance}.log"),
            _ => format!("{instance}.{age}.log"),
        })
    }

    /// An instance's temporary folder.
    pub fn tmp(&self, instance: &InstanceName) -> PathBuf {
        self.tmp.join(instance.to_string())
    }

    /// Makes way for a new launch: an empty temporary folder, and no `NAME.log`.
    ///
    /// To be called when nothing of the instance's last launch is left.
    pub fn begin(&self, instance: &InstanceName) -> Result<(), LogError> {
        make_private(&self.logs)?;
        self.shift(instance)?;
        self.remove(instance)?;
        make_private(&self.tmp(instance))
    }

    /// Removes what shall not outlive the record: the temporary folder.
    pub fn remove(&self, instance: &InstanceName) -> Result<(), LogError> {
        let tmp = self.tmp(instance);
        // Does not follow links that an engine may have left in there.
        unless_missing(std::fs::remove_dir_all(&tmp)).map_err(failed("removed", &tmp))
    }

    /// Puts a running instance's log aside when it has grown beyond [`SIZE_LIMIT`]. To be called at each resync.
    ///
    /// The newest [`SIZE_LIMIT`] bytes are copied, then the file is cut. What the engine writes between the two is lost:
    /// the price for never touching the engine.
    pub fn cap(&self, instance: &InstanceName) -> Result<(), LogError> {
        let current = self.current(instance);
        let size = match std::fs::metadata(&current) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) => return Err(failed("read", &current)(error)),
        };
        if size <= SIZE_LIMIT {
            return Ok(());
        }
        self.shift_older(instance)?;
        let aside = self.older(instance, 1);
        copy_end(&current, &aside, size).map_err(failed("copied", &current))?;
        File::options()
            .write(true)
            .open(&current)
            .and_then(|file| file.set_len(0))
            .map_err(failed("cut", &current))
    }

    /// `NAME.log` becomes `NAME.1.log` and so on; the oldest goes.
    fn shift(&self, instance: &InstanceName) -> Result<(), LogError> {
        if !self.current(instance).exists() {
            return Ok(());
        }
        self.shift_older(instance)?;
        let (from, to) = (self.current(instance), self.older(instance, 1));
        // It may have grown since the last resync.
        let size = std::fs::metadata(&from)
            .map_err(failed("read", &from))?
            .len();
        if size > SIZE_LIMIT {
            copy_end(&from, &to, size).map_err(failed("copied", &from))?;
            return std::fs::remove_file(&from).map_err(failed("removed", &from));
        }
        std::fs::rename(&from, &to).map_err(failed("renamed", &from))
    }

    fn shift_older(&self, instance: &InstanceName) -> Result<(), LogError> {
        for age in (1..KEPT - 1).rev() {
            let from = self.older(instance, age);
            let to = self.older(instance, age + 1);
            unless_missing(std::fs::rename(&from, &to)).map_err(failed("renamed", &from))?;
        }
        Ok(())
    }
}

/// The last `limit` bytes of a log, redacted, in whole lines. Empty when there is no such file.
pub fn tail(path: &Path, limit: usize, secrets: &[String]) -> io::Result<String> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
        Err(error) => return Err(error),
    };
    let window = limit as u64 + TAIL_CONTEXT;
    let skipped = file.metadata()?.len().saturating_sub(window);
    file.seek(SeekFrom::Start(skipped))?;
    let mut bytes = Vec::new();
    file.take(window).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let whole = if skipped == 0 {
        &*text
    } else {
        // What was cut off may be what made the rest of the line a secret.
        after_first_line(&text)
    };
    Ok(last_lines(&redact(whole, secrets), limit))
}

fn after_first_line(text: &str) -> &str {
    text.split_once('\n').map_or("", |(_, rest)| rest)
}

/// The last whole lines of a redacted text. Of a single line that is longer, its end.
fn last_lines(text: &str, limit: usize) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    let mut start = text.len() - limit;
    while !text.is_char_boundary(start) {
        start += 1;
    }
    let cut = &text[start..];
    if text[..start].ends_with('\n') {
        return cut.to_owned();
    }
    match after_first_line(cut) {
        "" => format!("…{cut}"),
        whole => whole.to_owned(),
    }
}

fn copy_end(from: &Path, to: &Path, size: u64) -> io::Result<()> {
    let mut source = File::open(from)?;
    source.seek(SeekFrom::Start(size.saturating_sub(SIZE_LIMIT)))?;
    let mut target = File::options()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(to)?;
    io::copy(&mut source.take(SIZE_LIMIT), &mut target)?;
    target.flush()
}

fn make_private(folder: &Path) -> Result<(), LogError> {
    std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)
        .map_err(failed("created", folder))
}

fn unless_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::PermissionsExt;

    fn logs() -> (tempfile::TempDir, Logs, InstanceName) {
        let state = tempfile::tempdir().unwrap();
        let logs = Logs::new(state.path());
        (state, logs, "a-0".parse().unwrap())
    }

    #[test]
    fn five_logs_are_kept_and_the_oldest_goes() {
        let (_state, logs, name) = logs();
        for launch in 0..8 {
            logs.begin(&name).unwrap();
            assert!(!logs.current(&name).exists());
            std::fs::write(logs.current(&name), format!("launch {launch}")).unwrap();
        }
        for age in 0..KEPT {
            let text = std::fs::read_to_string(logs.older(&name, age)).unwrap();
            assert_eq!(text, format!("launch {}", 7 - age));
        }
        assert!(!logs.older(&name, KEPT).exists());
    }

    #[test]
    fn a_launch_that_wrote_no_log_pushes_none_out() {
        let (_state, logs, name) = logs();
        logs.begin(&name).unwrap();
        std::fs::write(logs.current(&name), "crash").unwrap();
        for _ in 0..9 {
            logs.begin(&name).unwrap();
        }
        assert_eq!(
            std::fs::read_to_string(logs.older(&name, 1)).unwrap(),
            "crash"
        );
    }

    #[test]
    fn logs_of_one_instance_leave_those_of_others_alone() {
        let (_state, logs, name) = logs();
        let other: InstanceName = "a-0-1".parse().unwrap();
        logs.begin(&other).unwrap();
        std::fs::write(logs.current(&other), "other").unwrap();
        for _ in 0..7 {
            logs.begin(&name).unwrap();
            std::fs::write(logs.current(&name), "").unwrap();
        }
        assert_eq!(
            std::fs::read_to_string(logs.current(&other)).unwrap(),
            "other"
        );
    }

    #[test]
    fn a_log_that_grew_too_large_is_put_aside_while_it_is_written() {
        let (_state, logs, name) = logs();
        logs.begin(&name).unwrap();
        let mut engine = File::options()
            .append(true)
            .create(true)
            .open(logs.current(&name))
            .unwrap();
        let limit = usize::try_from(SIZE_LIMIT).unwrap();
        engine.write_all(&vec![b'a'; limit]).unwrap();
        logs.cap(&name).unwrap();
        assert!(!logs.older(&name, 1).exists());
        engine.write_all(b"last words\n").unwrap();
        logs.cap(&name).unwrap();
        engine.write_all(b"next").unwrap();
        assert_eq!(std::fs::read(logs.current(&name)).unwrap(), b"next");
        let aside = std::fs::read(logs.older(&name, 1)).unwrap();
        assert_eq!(aside.len(), limit);
        assert!(aside.ends_with(b"last words\n"));
        let mode = std::fs::metadata(logs.older(&name, 1))
            .unwrap()
            .permissions()
            .mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_missing_log_is_no_error() {
        let (_state, logs, name) = logs();
        logs.cap(&name).unwrap();
        logs.remove(&name).unwrap();
        assert_eq!(tail(&logs.current(&name), TAIL, &[]).unwrap(), "");
    }

    #[test]
    fn the_temporary_folder_is_private_empty_and_goes_with_the_record_while_the_log_stays() {
        let (_state, logs, name) = logs();
        logs.begin(&name).unwrap();
        std::fs::write(logs.current(&name), "log").unwrap();
        let tmp = logs.tmp(&name);
        assert_eq!(
            std::fs::metadata(&tmp).unwrap().permissions().mode() & 0o777,
            0o700
        );
        std::fs::write(tmp.join("socket"), "").unwrap();
        logs.begin(&name).unwrap();
        assert!(!tmp.join("socket").exists());
        logs.remove(&name).unwrap();
        assert!(!tmp.exists());
        assert!(logs.older(&name, 1).exists());
    }

    fn tail_of(text: &[u8], limit: usize, secrets: &[String]) -> String {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        tail(file.path(), limit, secrets).unwrap()
    }

    #[test]
    fn a_tail_is_whole_lines() {
        assert_eq!(tail_of(b"one\ntwo\n", 100, &[]), "one\ntwo\n");
        assert_eq!(tail_of(b"one\ntwo\nthree\n", 8, &[]), "three\n");
        assert_eq!(tail_of(b"one\ntwo\nthree\n", 6, &[]), "three\n");
        assert_eq!(tail_of(b"one\nfour five six", 8, &[]), "…five six");
        assert_eq!(tail_of("ää\nüü".as_bytes(), 5, &[]), "üü");
        assert_eq!(tail_of(b"a\xff\nb", 100, &[]), "a\u{fffd}\nb");
    }

    #[test]
    fn a_tail_is_redacted_before_it_is_cut() {
        let secret = "0123456789abcdef".to_owned();
        let text = format!("x{secret}y\nend\n");
        for limit in 1..text.len() {
            let shown = tail_of(text.as_bytes(), limit, std::slice::from_ref(&secret));
            assert!(!shown.contains("def"), "{limit}: {shown}");
        }
        // The secret's name lies before what is read at all.
        let long = format!("--api-key {}SEKRIT", "x".repeat(200_000));
        assert_eq!(tail_of(long.as_bytes(), 10, &[]), "");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn no_part_of_a_line_that_held_a_secret_shows_it(
            before in "[a-z\n]{0,300}",
            after in "[a-z\n]{0,300}",
            limit in 1usize..700,
        ) {
            let secret = "0123456789".to_owned();
            let text = format!("{before}{secret}{after}");
            let shown = tail_of(text.as_bytes(), limit, &[secret]);
            prop_assert!(!shown.contains(|c: char| c.is_ascii_digit()), "{shown}");
            prop_assert!(shown.len() <= limit + "…".len());
        }
    }
}
