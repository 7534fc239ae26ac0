//! The worker processes: this program once more, in the leader's process group and with its environment.
//!
//! A worker does nothing but live. What ties it to its leader is its standard input, a pipe that closes when the
//! leader is gone, however it went. With `--workers-outlive` there is no such tie.

use std::convert::Infallible;
use std::future::pending;
use std::io;
use std::os::fd::AsFd as _;
use std::process::{ExitCode, ExitStatus, Stdio};

use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::process::Command;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;

use super::{EchoArgs, EchoError, log};

/// The leader's workers. Dropping it lets go of them.
pub(super) struct Workers {
    exits: JoinSet<(u16, io::Result<ExitStatus>)>,
}

impl Workers {
    /// Starts as many as the arguments say.
    pub(super) fn start(args: &EchoArgs) -> Result<Self, EchoError> {
        let mut exits = JoinSet::new();
        for index in 0..args.workers {
            let mut child = command(args)
                .spawn()
                .map_err(|source| EchoError::Worker { index, source })?;
            let pid = child.id().unwrap_or_default();
            log(format_args!("worker {index} is pid {pid}"));
            // Taken out, since `wait` would close it.
            let tie = child.stdin.take();
            exits.spawn(async move {
                let status = child.wait().await;
                drop(tie);
                (index, status)
            });
        }
        Ok(Self { exits })
    }

    /// Takes note of workers that end, so that none stays a zombie. Never comes back.
    pub(super) async fn watch(&mut self) -> Infallible {
        while let Some(exit) = self.exits.join_next().await {
            match exit {
                Ok((index, Ok(status))) => log(format_args!("worker {index} is gone: {status}")),
                Ok((index, Err(error))) => log(format_args!("worker {index}: {error}")),
                Err(error) => log(format_args!("a worker's watch: {error}")),
            }
        }
        pending().await
    }
}

fn command(args: &EchoArgs) -> Command {
    // Not the path of the program's file, which an upgrade may have replaced.
    let mut command = Command::new("/proc/self/exe");
    if let Some(name) = std::env::args_os().next() {
        command.arg0(name);
    }
    command.args(["echo", "--worker"]);
    let switches = [
        (args.workers_outlive, "--workers-outlive"),
        (args.workers_setsid, "--workers-setsid"),
        (args.workers_ignore_sigterm, "--ignore-sigterm"),
    ];
    command.args(switches.iter().filter(|(on, _)| *on).map(|(_, word)| word));
    command.stdin(if args.workers_outlive {
        Stdio::null()
    } else {
        Stdio::piped()
    });
    command
}

/// A worker's whole life.
pub(super) async fn run(args: EchoArgs) -> Result<ExitCode, EchoError> {
    if args.ignore_sigterm {
        // Asking for the signal once replaces what it does by default, which is to end the process, for good.
        drop(signal(SignalKind::terminate())?);
    }
    if args.workers_setsid {
        nix::unistd::setsid().map_err(io::Error::from)?;
    }
    let pid = std::process::id();
    log(format_args!("worker pid {pid} is up"));
    if args.workers_outlive {
        return pending().await;
    }
    leader_gone().await?;
    log(format_args!("worker pid {pid} leaves with its leader"));
    Ok(ExitCode::SUCCESS)
}

/// Comes back when the standard input ends.
async fn leader_gone() -> io::Result<()> {
    let stdin = io::stdin().as_fd().try_clone_to_owned()?;
    let mut tie = pipe::Receiver::from_owned_fd(stdin)?;
    // The leader writes nothing, so that the only end of this is the pipe's.
    tie.read_to_end(&mut Vec::new()).await?;
    Ok(())
}
