// effect: kills and reaps children of this process, through their pidfds.
//! Children that were started and not (yet) handed over to a record.
//!
//! A child is held by a pidfd that was opened while it could not have been reaped, so the pidfd names it and nobody else.
//!
//! Invariant: a child that is given up is killed, and no child stays a zombie past the launcher's next call.

use std::cell::RefCell;
use std::io;
use std::process::ExitStatus;
use std::rc::Rc;

use pidfd_util::{PidFd, PidFdExt};

/// Children that were given up and whose end is still to be collected. Shared by a launcher and its gates.
#[derive(Clone, Default)]
pub struct Abandoned(Rc<RefCell<Vec<PidFd>>>);

impl Abandoned {
    /// Collects those that have ended. Never waits.
    pub fn sweep(&self) {
        self.0
            .borrow_mut()
            .retain(|child| matches!(child.try_wait(), Ok(None)));
    }

    fn kill(&self, child: PidFd) {
        // Fails only if it has ended.
        let _ = child.kill();
        self.0.borrow_mut().push(child);
        self.sweep();
    }
}

/// A child that is killed when it is dropped, unless it was let go.
pub struct Child {
    pid: u32,
    pidfd: Option<PidFd>,
    abandoned: Abandoned,
}

impl Child {
    /// Takes over a child that was just spawned.
    pub fn take(child: &std::process::Child, abandoned: &Abandoned) -> io::Result<Self> {
        let pid = child.id();
        // Nobody else reaps our children, so this number is still this child's, even if it has ended already. Dropping
        // the `std` value neither kills nor reaps.
        let pidfd = open(pid)?;
        Ok(Self {
            pid,
            pidfd: Some(pidfd),
            abandoned: abandoned.clone(),
        })
    }

    /// Its id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// From here on a record names it: it lives on, and whoever watches the record collects its end.
    pub fn let_go(mut self) -> Released {
        Released {
            pidfd: self.pidfd.take(),
            abandoned: self.abandoned.clone(),
        }
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if let Some(pidfd) = self.pidfd.take() {
            self.abandoned.kill(pidfd);
        }
    }
}

/// A child that lives on when this is dropped.
pub struct Released {
    pidfd: Option<PidFd>,
    abandoned: Abandoned,
}

impl Released {
    /// Kills it after all.
    pub fn give_up(mut self) {
        if let Some(pidfd) = self.pidfd.take() {
            self.abandoned.kill(pidfd);
        }
    }
}

/// A pidfd of whoever has this id now.
pub fn open(pid: u32) -> io::Result<PidFd> {
    let pid = i32::try_from(pid).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    PidFd::from_pid(pid)
}

/// Collects the end of a child that is a zombie. `None` for what still runs, is no child of ours, or was collected.
pub fn collect(pidfd: &PidFd) -> Option<ExitStatus> {
    pidfd.try_wait().ok().flatten()
}
