//! The gate: the process that waits until a record names it, and then becomes the engine.
//!
//! The launcher starts `/proc/self/exe __gate` and sends it one instruction through a pipe: program, arguments,
//! environment, working directory, log. None of that is in the gate's own arguments or environment, because some of it
//! is secret. The gate makes its own session, opens the log, says *prepared*, and waits. One byte lets it `exec` the
//! engine under the same pid; the end of the pipe makes it leave.
//!
//! Invariant: the engine runs only after the byte, and the byte is sent only by whoever holds the [`WaitingGate`]. If the
//! controller dies, its end of the pipe closes, and no engine runs that no record names.
//!
//! ```text
//! launcher ── length, JSON ──► gate      setsid, log, chdir, descriptors, signals
//!          ◄── length, JSON ── prepared, or the step that failed and its error number
//!          ── one byte ──────► exec
//!          ◄── end of file ─── it is the engine now; or the error number
//! ```
#![expect(
    clippy::disallowed_methods,
    reason = "starts this very binary as a gate; inside the gate: leaves the session, replaces the process"
)]

use std::convert::Infallible;
use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::errno::Errno;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::unix::pipe;

use super::child::{Abandoned, Child};
use super::{Effect, Gate};
use crate::failure::LaunchFailure;
use crate::names::{InstanceName, LaunchId};
use crate::procfs::{LAUNCH_ID_VARIABLE, Procfs};

/// The hidden subcommand. `main` must look for it before anything else: a gate parses no options and logs nothing.
pub const SUBCOMMAND: &str = "__gate";

/// The variable that carries the instance's name.
pub const INSTANCE_VARIABLE: &str = "EVENKEEL_INSTANCE";

/// The path that names the running binary, also after an upgrade replaced the file.
pub const OWN_PROGRAM: &str = "/proc/self/exe";

/// What a gate exits with that never became an engine: what `env`, `timeout` and `docker run` use for "it was me, not
/// the program".
const GATE_EXIT: i32 = 125;

/// What opens the gate.
const GO: u8 = b'!';

/// No instruction is larger: the kernel takes 6 MiB of arguments and environment with usual limits. A bound, so that a
/// broken length is an error and no allocation.
const FRAME_LIMIT: u32 = 256 << 20;

/// How long an opened gate may take to become the engine. `exec` reads the first page of a program; this covers a
/// program on a network file system that is slow to wake up.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(30);

/// What the gate shall become. Holds secrets, so it is not printed.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Instruction {
    /// The path to execute. [`OWN_PROGRAM`] is evenkeel itself.
    pub program: Octets,
    /// The arguments, the program's own name first.
    pub arguments: Vec<Octets>,
    /// `NAME=VALUE`.
    pub environment: Vec<Octets>,
    /// The folder to run in.
    pub working_dir: Octets,
    /// The file that stdout and stderr are appended to.
    pub log: Octets,
}

/// Text of the operating system: UTF-8 by custom, any bytes by right. In JSON a string, or a list of bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Octets(pub OsString);

impl<T: Into<OsString>> From<T> for Octets {
    fn from(text: T) -> Self {
        Self(text.into())
    }
}

impl Octets {
    /// As the operating system takes it.
    pub fn as_os_str(&self) -> &OsStr {
        &self.0
    }

    fn to_c_string(&self) -> io::Result<CString> {
        Ok(CString::new(self.0.as_bytes())?)
    }
}

impl Serialize for Octets {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.0.to_str() {
            Some(text) => serializer.serialize_str(text),
            None => serializer.collect_seq(self.0.as_bytes()),
        }
    }
}

impl<'de> Deserialize<'de> for Octets {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Octets;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a string or a list of bytes")
            }

            fn visit_str<E>(self, text: &str) -> Result<Octets, E> {
                Ok(Octets(text.into()))
            }

            fn visit_seq<A: serde::de::SeqAccess<'de>>(
                self,
                mut list: A,
            ) -> Result<Octets, A::Error> {
                let mut bytes = Vec::new();
                while let Some(byte) = list.next_element()? {
                    bytes.push(byte);
                }
                Ok(Octets(OsString::from_vec(bytes)))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

/// What the gate answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Report {
    /// Session, log, folder, descriptors and signals are in place.
    Prepared,
    /// This step failed; the gate leaves.
    Failed(StepFailure),
}

/// A step that the gate could not take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StepFailure {
    /// Which.
    pub step: Step,
    /// The system's error number.
    pub errno: i32,
}

impl StepFailure {
    /// The error as the system calls it.
    pub fn errno(self) -> Errno {
        Errno::from_raw(self.errno)
    }
}

/// The gate's steps, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Step {
    /// Reading the instruction.
    Instruction,
    /// A session of its own.
    Session,
    /// Opening the log.
    Log,
    /// Changing to the working directory.
    WorkingDir,
    /// Arranging the descriptors.
    Descriptors,
    /// Resetting the signals.
    Signals,
    /// Becoming the engine.
    Exec,
}

/// Why there is no gate, or why it did not open.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// No process could be started.
    #[error("the gate could not be started: {0}")]
    Spawn(#[source] io::Error),
    /// It ended, or was killed, before it answered.
    #[error("the gate ended before it answered")]
    Ended,
    /// It does not lead a session of its own, or cannot be looked at.
    #[error("the gate cannot be recognised: {why}")]
    Unrecognised {
        /// What is wrong.
        why: String,
    },
    /// It was opened and did not become the engine in time.
    #[error("the program was not executed within {} s", RELEASE_TIMEOUT.as_secs())]
    Slow,
    /// A step failed.
    #[error("the gate failed at {:?}: {}", .0.step, .0.errno().desc())]
    Step(StepFailure),
}

// ---------------------------------------------------------------------------------------------------------------------
// Inside the gate

/// The gate's whole life: never returns. Expects the launcher's pipes as stdin and stdout.
pub fn gate_main() -> ! {
    if let Ok((mut orders, mut reports)) = take_pipes() {
        // Either the pipe closed, and there is nobody to tell; or a step failed, and the launcher is told.
        if let Err(Some(failure)) = serve(&mut orders, &mut reports) {
            let _ = write_frame(&mut reports, &Report::Failed(failure));
        }
    }
    std::process::exit(GATE_EXIT)
}

/// Moves the pipes to descriptors that close on exec: only so is the end of file the news of a successful exec.
fn take_pipes() -> io::Result<(File, File)> {
    let orders: OwnedFd = io::stdin().as_fd().try_clone_to_owned()?;
    let reports: OwnedFd = io::stdout().as_fd().try_clone_to_owned()?;
    Ok((orders.into(), reports.into()))
}

/// Ends with the step that failed, or with `None` when the launcher is gone or has called the launch off.
fn serve(orders: &mut File, reports: &mut File) -> Result<Infallible, Option<StepFailure>> {
    let at = |step: Step| {
        move |error: io::Error| {
            Some(StepFailure {
                step,
                errno: error.raw_os_error().unwrap_or(Errno::EINVAL as i32),
            })
        }
    };
    let instruction = match read_frame::<Instruction>(orders) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(None),
        other => other.map_err(at(Step::Instruction))?,
    };
    // First of all: from here on nothing that is meant for the controller's group or terminal reaches it.
    nix::unistd::setsid()
        .map_err(io::Error::from)
        .map_err(at(Step::Session))?;
    let log = open_log(Path::new(instruction.log.as_os_str())).map_err(at(Step::Log))?;
    std::env::set_current_dir(instruction.working_dir.as_os_str()).map_err(at(Step::WorkingDir))?;
    arrange_descriptors(&log, &[orders, reports, &log]).map_err(at(Step::Descriptors))?;
    drop(log);
    // Made before *prepared* is said, so that between the byte and the exec nothing can fail but the exec.
    let become_engine = Exec::new(&instruction).map_err(at(Step::Exec))?;
    drop(instruction);
    reset_signals().map_err(at(Step::Signals))?;

    write_frame(reports, &Report::Prepared).map_err(|_| None)?;
    let mut byte = [0];
    match orders.read_exact(&mut byte) {
        Ok(()) if byte == [GO] => Err(at(Step::Exec)(become_engine.run())),
        Ok(()) | Err(_) => Err(None),
    }
}

fn open_log(path: &Path) -> io::Result<File> {
    // Appending, so that the file can be cut while the engine holds it open, and nobody else's to read.
    std::fs::OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(path)
}

/// /dev/null on 0, the log on 1 and 2, and nothing else left open past the exec.
fn arrange_descriptors(log: &File, ours: &[&File]) -> io::Result<()> {
    let null = File::open("/dev/null")?;
    nix::unistd::dup2_stdin(&null)?;
    nix::unistd::dup2_stdout(log)?;
    nix::unistd::dup2_stderr(log)?;
    // What this process opened closes on exec. What the controller inherited from whoever started it may not, and was
    // inherited here in turn: a socket, a lock or a pipe that an engine would hold open for months.
    let mut inherited: Vec<i32> = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let name = entry?.file_name();
        if let Some(number) = name.to_str().and_then(|name| name.parse().ok()) {
            inherited.push(number);
        }
    }
    inherited.retain(|&number| {
        number > 2
            && number != null.as_raw_fd()
            && ours.iter().all(|file| file.as_raw_fd() != number)
    });
    for number in inherited {
        // One of them is the listing's own, closed by now.
        let _ = nix::unistd::close(number);
    }
    Ok(())
}

/// Unblocks every signal and gives each its default action, which an exec does not do for those that are ignored:
/// Rust's runtime ignores SIGPIPE, `nohup` SIGHUP, a shell's `&` SIGINT.
///
/// An exec does reset signals that have a handler. So each ignored one gets a handler, which is the way to do it without
/// `unsafe`. Only those: a signal that had its default action keeps it while the gate waits.
fn reset_signals() -> io::Result<()> {
    nix::sys::signal::SigSet::empty().thread_set_mask()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()?;
    {
        let _inside = runtime.enter();
        for signal in ignored_signals()? {
            // Fails for those that cannot be caught; seen below. The handler stays when the stream is dropped.
            let kind = tokio::signal::unix::SignalKind::from_raw(signal);
            let _ = tokio::signal::unix::signal(kind);
        }
    }
    let still_ignored = ignored_signals()?;
    if still_ignored.contains(&(nix::sys::signal::Signal::SIGPIPE as i32)) {
        return Err(io::Error::from_raw_os_error(Errno::ENOTSUP as i32));
    }
    Ok(())
}

fn ignored_signals() -> io::Result<Vec<i32>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .ok_or(io::ErrorKind::InvalidData)?;
    Ok((1..=64)
        .filter(|signal| mask & (1 << (signal - 1)) != 0)
        .collect())
}

/// An exec with everything allocated.
struct Exec {
    program: CString,
    arguments: Vec<CString>,
    environment: Vec<CString>,
}

impl Exec {
    fn new(instruction: &Instruction) -> io::Result<Self> {
        let all = |texts: &[Octets]| {
            let texts = texts.iter().map(Octets::to_c_string);
            texts.collect::<io::Result<Vec<CString>>>()
        };
        Ok(Self {
            program: instruction.program.to_c_string()?,
            arguments: all(&instruction.arguments)?,
            environment: all(&instruction.environment)?,
        })
    }

    /// Returns only if it fails. `execve` and not `std`'s exec: that one hands a file the kernel refuses to `/bin/sh`, so
    /// a program for another machine would be read as a script.
    fn run(self) -> io::Error {
        match nix::unistd::execve(&self.program, &self.arguments, &self.environment) {
            Ok(never) => match never {},
            Err(errno) => errno.into(),
        }
    }
}

fn write_frame<T: Serialize>(pipe: &mut File, value: &T) -> io::Result<()> {
    pipe.write_all(&frame(value)?)
}

fn read_frame<T: serde::de::DeserializeOwned>(pipe: &mut File) -> io::Result<T> {
    let mut length = [0; 4];
    pipe.read_exact(&mut length)?;
    let mut json = vec![0; frame_length(length)?];
    pipe.read_exact(&mut json)?;
    Ok(serde_json::from_slice(&json)?)
}

fn frame<T: Serialize>(value: &T) -> io::Result<Vec<u8>> {
    let json = serde_json::to_vec(value)?;
    let length = u32::try_from(json.len())
        .ok()
        .filter(|&length| length <= FRAME_LIMIT)
        .ok_or_else(|| io::Error::from_raw_os_error(Errno::E2BIG as i32))?;
    let mut frame = length.to_be_bytes().to_vec();
    frame.extend(json);
    Ok(frame)
}

fn frame_length(length: [u8; 4]) -> io::Result<usize> {
    let length = u32::from_be_bytes(length);
    if length > FRAME_LIMIT {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(length as usize)
}

// ---------------------------------------------------------------------------------------------------------------------
// Outside: the launcher's side

/// A gate that said *prepared*. Dropping it makes the gate leave.
pub struct WaitingGate {
    orders: pipe::Sender,
    reports: Reports,
    child: Child,
    explain: Box<dyn Fn(&GateError) -> LaunchFailure>,
}

/// Starts a gate and waits until it is prepared. The caller limits the time; dropping the future ends the gate.
///
/// `program` is the evenkeel binary ([`OWN_PROGRAM`], but for tests); `explain` turns what goes wrong, also later when the
/// gate is opened, into words that name the paths.
pub async fn start(
    program: &Path,
    launch_id: LaunchId,
    instance: &InstanceName,
    instruction: &Instruction,
    abandoned: &Abandoned,
    explain: Box<dyn Fn(&GateError) -> LaunchFailure>,
) -> Result<WaitingGate, GateError> {
    let message = frame(instruction).map_err(|error| {
        GateError::Step(StepFailure {
            step: Step::Exec,
            errno: error.raw_os_error().unwrap_or(Errno::EINVAL as i32),
        })
    })?;
    let mut gate =
        spawn(program, launch_id, instance, abandoned, explain).map_err(GateError::Spawn)?;
    // It reads while this writes, so a message beyond the pipe's capacity blocks nobody. That it stopped reading shows
    // in its answer.
    let _ = gate.orders.write_all(&message).await;
    match gate.reports.next().await? {
        Some(Report::Prepared) => Ok(gate),
        Some(Report::Failed(failure)) => Err(GateError::Step(failure)),
        None => Err(GateError::Ended),
    }
}

fn spawn(
    program: &Path,
    launch_id: LaunchId,
    instance: &InstanceName,
    abandoned: &Abandoned,
    explain: Box<dyn Fn(&GateError) -> LaunchFailure>,
) -> io::Result<WaitingGate> {
    // Both ends close on exec, so no gate inherits another's.
    let (orders_out, orders_in) = io::pipe()?;
    let (reports_out, reports_in) = io::pipe()?;
    let orders = pipe::Sender::from_owned_fd(orders_in.into())?;
    let reports = Reports(pipe::Receiver::from_owned_fd(reports_out.into())?);
    let spawned = Command::new(program)
        .arg0("evenkeel")
        .arg(SUBCOMMAND)
        .env_clear()
        .env(LAUNCH_ID_VARIABLE, launch_id.to_string())
        .env(INSTANCE_VARIABLE, instance.to_string())
        .stdin(orders_out)
        .stdout(reports_in)
        .stderr(Stdio::null())
        .spawn()?;
    let child = Child::take(&spawned, abandoned)?;
    Ok(WaitingGate {
        orders,
        reports,
        child,
        explain,
    })
}

impl WaitingGate {
    /// Who the engine will be: pid and start ticks. An exec changes neither.
    pub fn identity(&self, proc: &Procfs) -> Result<(u32, u64), GateError> {
        let pid = self.child.pid();
        let unrecognised = |why: String| GateError::Unrecognised { why };
        let stat = proc
            .stat(pid)
            .map_err(|error| unrecognised(error.to_string()))?
            .filter(|stat| !stat.is_gone())
            .ok_or(GateError::Ended)?;
        if (stat.session, stat.group) != (pid, pid) {
            return Err(unrecognised(format!(
                "pid {pid} is in session {} and group {}",
                stat.session, stat.group
            )));
        }
        Ok((pid, stat.start_ticks))
    }
}

/// The pipe that the gate answers through.
struct Reports(pipe::Receiver);

impl Reports {
    /// The next report; `None` at the end of the pipe.
    async fn next(&mut self) -> Result<Option<Report>, GateError> {
        let mut length = [0; 4];
        if self.0.read_exact(&mut length).await.is_err() {
            return Ok(None);
        }
        let broken = |error: io::Error| GateError::Unrecognised {
            why: format!("its report is broken: {error}"),
        };
        let mut json = vec![0; frame_length(length).map_err(broken)?];
        self.0.read_exact(&mut json).await.map_err(broken)?;
        serde_json::from_slice(&json)
            .map(Some)
            .map_err(|error| broken(error.into()))
    }
}

impl Gate for WaitingGate {
    fn open(self: Box<Self>) -> Effect<Result<(), LaunchFailure>> {
        Box::pin(async move {
            let mut gate = *self;
            if gate.orders.write_all(&[GO]).await.is_err() {
                return Err((gate.explain)(&GateError::Ended));
            }
            // From the byte on it may be the engine, which outlives this effect: a controller that is told to end right
            // now leaves it running, under the record that names it.
            let released = gate.child.let_go();
            let mut reports = gate.reports;
            let failure = match tokio::time::timeout(RELEASE_TIMEOUT, reports.next()).await {
                // The pipe closed on exec. Or because the gate was killed: that will show as its exit.
                Ok(Ok(None)) => return Ok(()),
                Ok(Ok(Some(Report::Failed(failure)))) => GateError::Step(failure),
                Ok(Ok(Some(Report::Prepared))) => GateError::Unrecognised {
                    why: "it said twice that it is prepared".to_owned(),
                },
                Ok(Err(error)) => error,
                Err(_) => GateError::Slow,
            };
            released.give_up();
            Err((gate.explain)(&failure))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_bytes_pass_through_the_pipe() {
        for bytes in [&b"plain"[..], "\u{e4}\n\"".as_bytes(), b"\xff\x00\x80", b""] {
            let sent = Octets(OsString::from_vec(bytes.to_vec()));
            let json = serde_json::to_string(&sent).unwrap();
            assert_eq!(serde_json::from_str::<Octets>(&json).unwrap(), sent);
        }
    }

    #[test]
    fn a_length_without_sense_is_an_error_and_no_allocation() {
        assert!(frame_length([0xff; 4]).is_err());
        assert_eq!(frame_length([0, 0, 1, 2]).unwrap(), 258);
        assert_eq!(frame(&Report::Prepared).unwrap(), b"\0\0\0\x0a\"prepared\"");
    }

    #[test]
    fn ignored_signals_are_seen() {
        // Rust's own runtime ignores this one.
        assert!(ignored_signals().unwrap().contains(&13));
    }
}
