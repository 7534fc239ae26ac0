//! Running a verb to its end.

use std::fmt;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::process::wait_for;

/// What a verb said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    /// `None`: a signal ended it.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Said {
    /// What it printed, if it succeeded.
    pub fn done(self) -> String {
        assert_eq!(self.code, Some(0), "{self}");
        self.stdout
    }
}

impl fmt::Display for Said {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let code = self
            .code
            .map_or("a signal".to_owned(), |code| code.to_string());
        write!(
            f,
            "exit code: {code}\n--- stdout\n{}--- stderr\n{}",
            self.stdout, self.stderr
        )
    }
}

/// A child that does not outlive its test.
pub struct Kept(pub Child);

impl Drop for Kept {
    fn drop(&mut self) {
        // Fails only where it has ended already.
        let _ended = self.0.kill();
        let _ended = self.0.wait();
    }
}

/// Runs a command to its end. Its output goes into files, so that it never waits for a reader.
pub fn say(command: &mut Command) -> Said {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (out, err) = (folder.path().join("out"), folder.path().join("err"));
    command
        .stdin(Stdio::null())
        .stdout(File::create(&out).expect("a file"))
        .stderr(File::create(&err).expect("a file"));
    let spawned = command.spawn();
    let mut child = Kept(spawned.unwrap_or_else(|error| panic!("{command:?}: {error}")));
    let status = wait_for(
        || child.0.try_wait().expect("our own child"),
        || format!("{command:?} does not end:\n{}\n{}", read(&out), read(&err)),
    );
    Said {
        code: status.code(),
        stdout: read(&out),
        stderr: read(&err),
    }
}

/// What is in a file, if it is there.
pub fn read(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}
