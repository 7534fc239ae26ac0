//! What the kernel tells of processes and listening sockets.
//!
//! Readers get three answers, never two: it is so, it is not there (any more), it cannot be read. What a process wrote
//! itself (its name, its environment) is parsed as hostile text.
//!
//! Invariant: a process that ended, a zombie included, is never reported as running.
#![expect(
    clippy::disallowed_methods,
    reason = "reads /proc. Nothing else, and writes nowhere"
)]

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use jiff::Timestamp;

use crate::names::{LaunchId, Port};
use crate::observed::Stranger;

/// The variable that carries a launch's id through all of its processes.
pub const LAUNCH_ID_VARIABLE: &str = "EVENKEEL_LAUNCH_ID";

/// A mounted proc file system, and who looks at it.
#[derive(Debug, Clone)]
pub struct Procfs {
    root: PathBuf,
    /// The reader itself: it is nobody's member, whatever its own environment says.
    own_pid: u32,
    own_uid: u32,
}

impl Default for Procfs {
    fn default() -> Self {
        Self::at("/proc")
    }
}

/// One line of `/proc/PID/stat`, as far as it is of use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stat {
    /// Its id.
    pub pid: u32,
    /// The first 15 bytes of its program's name, or what it calls itself.
    pub comm: String,
    /// `R`, `S`, `D`, `Z` and so on.
    pub state: char,
    /// Its parent.
    pub parent: u32,
    /// Its process group.
    pub group: u32,
    /// Its session.
    pub session: u32,
    /// How many threads it has.
    pub threads: u32,
    /// When it started, in clock ticks since boot.
    pub start_ticks: u64,
    /// How it ended, as `wait` encodes it; 0 for one that runs and for readers who may not know.
    pub exit_code: i32,
}

impl Stat {
    /// Whether it ended. A process whose first thread ended and whose others run is a `Z` that still lives.
    pub fn is_gone(&self) -> bool {
        match self.state {
            'Z' => self.threads <= 1,
            'X' | 'x' => true,
            _ => false,
        }
    }

    fn parse(line: &[u8]) -> Option<Self> {
        // The name stands in parentheses, unescaped, and may hold parentheses, blanks and line ends itself. No later
        // field does, so it ends at the last one.
        let open = line.iter().position(|&byte| byte == b'(')?;
        let close = line.iter().rposition(|&byte| byte == b')')?;
        let pid = std::str::from_utf8(line.get(..open)?).ok()?.trim();
        let comm = line.get(open + 1..close)?;
        let rest = std::str::from_utf8(line.get(close + 1..)?).ok()?;
        // Field 3 of proc(5) is the first here.
        let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
        let field = |number: usize| fields.get(number - 3).copied();
        Some(Self {
            pid: pid.parse().ok()?,
            comm: String::from_utf8_lossy(comm).into_owned(),
            state: field(3)?.chars().next()?,
            parent: field(4)?.parse().ok()?,
            // -1 where the reader's pid namespace does not know them.
            group: field(5)?.parse().unwrap_or(0),
            session: field(6)?.parse().unwrap_or(0),
            threads: field(20)?.parse().ok()?,
            start_ticks: field(22)?.parse().ok()?,
            exit_code: field(52).and_then(|code| code.parse().ok()).unwrap_or(0),
        })
    }
}

/// What a process's environment says about the launch it belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tag {
    /// It belongs to this launch.
    Of(LaunchId),
    /// It names none. No proof of the contrary: programs that set their title write over their environment.
    Untagged,
    /// It may not be read.
    Unreadable,
    /// The process is gone.
    Gone,
}

/// A listening TCP socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Listener {
    reach: Reach,
    inode: u64,
}

/// How near to 127.0.0.1 a socket listens. A connection goes to the nearest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Reach {
    /// 127.0.0.1 itself.
    Loopback,
    /// All addresses.
    Any,
    /// Some other address: connections to 127.0.0.1 never arrive there.
    Elsewhere,
}

impl Procfs {
    /// One mounted (or laid out by a test) at `root`.
    pub fn at(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            own_pid: std::process::id(),
            own_uid: nix::unistd::Uid::current().as_raw(),
        }
    }

    fn of(&self, pid: u32, file: &str) -> PathBuf {
        self.root.join(pid.to_string()).join(file)
    }

    /// The reader's own pid.
    pub fn own_pid(&self) -> u32 {
        self.own_pid
    }

    /// Which boot this is.
    pub fn boot_id(&self) -> io::Result<String> {
        let path = self.root.join("sys/kernel/random/boot_id");
        Ok(read_text(&path)?.trim().to_owned())
    }

    /// The ids of all processes. One that starts or ends meanwhile may be missing.
    pub fn pids(&self) -> io::Result<Vec<u32>> {
        let mut pids = Vec::new();
        for entry in std::fs::read_dir(&self.root)? {
            let name = entry?.file_name();
            if let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) {
                pids.push(pid);
            }
        }
        pids.sort_unstable();
        Ok(pids)
    }

    /// What the kernel says of a process; `None` when there is none of that id.
    pub fn stat(&self, pid: u32) -> io::Result<Option<Stat>> {
        let path = self.of(pid, "stat");
        let Some(line) = unless_gone(std::fs::read(&path))? else {
            return Ok(None);
        };
        Stat::parse(&line)
            .filter(|stat| stat.pid == pid)
            .map(Some)
            .ok_or_else(|| {
                io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("{} cannot be understood", path.display()),
                )
            })
    }

    /// The launch that a process's environment names.
    pub fn tag(&self, pid: u32) -> Tag {
        match unless_gone(std::fs::read(self.of(pid, "environ"))) {
            Ok(Some(environ)) => tag_of(&environ),
            Ok(None) => Tag::Gone,
            Err(_) => Tag::Unreadable,
        }
    }

    /// Whether a process was started by the reader's user. What cannot be told counts as such.
    pub fn has_own_uid(&self, pid: u32) -> bool {
        let status = match read_text(&self.of(pid, "status")) {
            Ok(status) => status,
            // A /proc mounted with `hidepid=1`: it still shows whose the folder is.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                return std::fs::metadata(self.root.join(pid.to_string()))
                    .is_ok_and(|folder| folder.uid() == self.own_uid);
            }
            Err(_) => return true,
        };
        let uid = status
            .lines()
            .find_map(|line| line.strip_prefix("Uid:"))
            .and_then(|ids| ids.split_ascii_whitespace().next())
            .and_then(|real| real.parse::<u32>().ok());
        uid.is_none_or(|uid| uid == self.own_uid)
    }

    /// Whether the reader is told the exit code of a zombie. Others see 0, which would read as success.
    pub fn may_see_exit_code(&self, pid: u32) -> bool {
        self.own_uid == 0 || self.has_own_uid(pid)
    }

    /// A process's command name, where it can be read.
    pub fn command(&self, pid: u32) -> Option<String> {
        let comm = std::fs::read(self.of(pid, "comm")).ok()?;
        let comm = String::from_utf8_lossy(&comm);
        let printable: String = comm
            .trim_end_matches('\n')
            .chars()
            .map(|c| if c.is_control() { '?' } else { c })
            .collect();
        (!printable.is_empty()).then_some(printable)
    }

    /// The sockets a process holds open, by inode; `None` when there is no such process.
    pub fn sockets(&self, pid: u32) -> io::Result<Option<BTreeSet<u64>>> {
        let Some(entries) = unless_gone(std::fs::read_dir(self.of(pid, "fd")))? else {
            return Ok(None);
        };
        let mut inodes = BTreeSet::new();
        for entry in entries {
            let Some(entry) = unless_gone(entry)? else {
                return Ok(None);
            };
            // A descriptor that was closed meanwhile is none.
            let Some(target) = unless_gone(std::fs::read_link(entry.path()))? else {
                continue;
            };
            if let Some(inode) = socket_inode(target.as_os_str()) {
                inodes.insert(inode);
            }
        }
        Ok(Some(inodes))
    }

    /// The inodes of the sockets that a connection to 127.0.0.1 on this port may arrive at: several where a port is
    /// shared on purpose (`SO_REUSEPORT`), none where nobody listens.
    pub fn listeners(&self, port: Port) -> io::Result<BTreeSet<u64>> {
        let listeners = self.all_listeners(port)?;
        let nearest = listeners
            .iter()
            .map(|listener| listener.reach)
            .filter(|reach| *reach != Reach::Elsewhere)
            .min();
        Ok(listeners
            .into_iter()
            .filter(|listener| Some(listener.reach) == nearest)
            .map(|listener| listener.inode)
            .collect())
    }

    fn all_listeners(&self, port: Port) -> io::Result<Vec<Listener>> {
        // Of this network namespace: the one that probes and bind tests happen in.
        let mut listeners = parse_listeners(&read_text(&self.root.join("net/tcp"))?, port);
        // Absent where IPv6 is switched off.
        if let Some(table) = unless_gone(read_text(&self.root.join("net/tcp6")))? {
            listeners.extend(parse_listeners(&table, port));
        }
        Ok(listeners)
    }

    /// A process that holds one of these sockets open; `None` where none can be found, because there is none or because
    /// it may not be looked into.
    pub fn holder(&self, inodes: &BTreeSet<u64>) -> Option<u32> {
        self.pids().ok()?.into_iter().find(|&pid| {
            let held = self.sockets(pid);
            matches!(held, Ok(Some(held)) if !held.is_disjoint(inodes))
        })
    }

    /// Who listens on a port, at whichever address; `None` when nobody does.
    pub fn port_holder(&self, port: Port) -> Option<Stranger> {
        let inodes: BTreeSet<u64> = self
            .all_listeners(port)
            .ok()?
            .into_iter()
            .map(|listener| listener.inode)
            .collect();
        if inodes.is_empty() {
            return None;
        }
        Some(self.stranger(self.holder(&inodes)))
    }

    /// What is to be said of a process that is none of ours, or of one that cannot be found.
    pub fn stranger(&self, pid: Option<u32>) -> Stranger {
        Stranger {
            pid,
            command: pid.and_then(|pid| self.command(pid)),
            seen_at: Timestamp::now(),
        }
    }
}

/// A file or process that is not there (any more) is an answer, not an error.
fn unless_gone<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error)
            if error.kind() == io::ErrorKind::NotFound
                || error.raw_os_error() == Some(nix::errno::Errno::ESRCH as i32) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

fn read_text(path: &Path) -> io::Result<String> {
    let bytes = std::fs::read(path)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn tag_of(environ: &[u8]) -> Tag {
    environ
        .split(|&byte| byte == 0)
        .find_map(|variable| {
            variable
                .strip_prefix(LAUNCH_ID_VARIABLE.as_bytes())?
                .strip_prefix(b"=")
        })
        .and_then(|value| std::str::from_utf8(value).ok()?.parse().ok())
        .map_or(Tag::Untagged, Tag::Of)
}

fn socket_inode(target: &OsStr) -> Option<u64> {
    let inode = target
        .as_bytes()
        .strip_prefix(b"socket:[")?
        .strip_suffix(b"]")?;
    std::str::from_utf8(inode).ok()?.parse().ok()
}

/// `TCP_LISTEN` of the kernel's `tcp_states.h`.
const LISTEN: &str = "0A";

fn parse_listeners(table: &str, port: Port) -> Vec<Listener> {
    let wanted = format!("{:04X}", port.get());
    table
        .lines()
        .filter_map(|line| {
            let mut fields = line.split_ascii_whitespace();
            let (address, local_port) = fields.nth(1)?.split_once(':')?;
            let state = fields.nth(1)?;
            if local_port != wanted || state != LISTEN {
                return None;
            }
            // tx:rx, timer, retransmits, uid, timeout, inode.
            let inode = fields.nth(5)?.parse().ok()?;
            Some(Listener {
                reach: reach(address),
                inode,
            })
        })
        .collect()
}

/// Addresses are printed as words of 32 bits in the machine's own byte order.
fn reach(address: &str) -> Reach {
    let bytes: Option<Vec<u8>> = address
        .as_bytes()
        .chunks(8)
        .map(|word| {
            let word = std::str::from_utf8(word).ok()?;
            u32::from_str_radix(word, 16).ok().map(u32::to_ne_bytes)
        })
        .collect::<Option<Vec<_>>>()
        .map(|words| words.concat());
    let address = match bytes.as_deref() {
        Some(bytes) if bytes.len() == 4 => <[u8; 4]>::try_from(bytes)
            .map(std::net::Ipv4Addr::from)
            .map(std::net::IpAddr::V4),
        Some(bytes) => <[u8; 16]>::try_from(bytes)
            .map(std::net::Ipv6Addr::from)
            .map(std::net::IpAddr::V6),
        None => return Reach::Elsewhere,
    };
    match address.map(|address| address.to_canonical()) {
        Ok(address) if address == std::net::Ipv4Addr::LOCALHOST => Reach::Loopback,
        Ok(address) if address.is_unspecified() => Reach::Any,
        Ok(_) | Err(_) => Reach::Elsewhere,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A line as the kernel prints it, with fields 3 to 52.
    fn line(pid: u32, comm: &str, state: char, threads: u32) -> String {
        let mut fields = vec![state.to_string()];
        fields.extend(["1", "70", "71"].map(String::from));
        fields.extend((7..=19).map(|n| n.to_string()));
        fields.push(threads.to_string());
        fields.extend((21..=51).map(|n| (n * 100).to_string()));
        fields.push("256".to_owned());
        format!("{pid} ({comm}) {}\n", fields.join(" "))
    }

    #[test]
    fn a_name_may_hold_parentheses_blanks_and_line_ends() {
        for comm in [
            "sh",
            "a) R 1 1 1 (",
            "two\nlines",
            ") (",
            "",
            "VLLM::Eng ine",
        ] {
            let stat = Stat::parse(line(42, comm, 'S', 3).as_bytes()).unwrap();
            assert_eq!(
                stat,
                Stat {
                    pid: 42,
                    comm: comm.to_owned(),
                    state: 'S',
                    parent: 1,
                    group: 70,
                    session: 71,
                    threads: 3,
                    start_ticks: 2200,
                    exit_code: 256,
                }
            );
        }
    }

    #[test]
    fn half_a_line_is_no_process() {
        let whole = line(42, "sh", 'S', 1);
        for length in 0..40 {
            assert_eq!(Stat::parse(&whole.as_bytes()[..length]), None);
        }
    }

    #[test]
    fn zombies_are_gone_unless_other_threads_run() {
        let gone = |state, threads| {
            Stat::parse(line(1, "x", state, threads).as_bytes())
                .unwrap()
                .is_gone()
        };
        assert!(gone('Z', 1) && gone('Z', 0) && gone('X', 1));
        assert!(!gone('Z', 2) && !gone('S', 1) && !gone('D', 1) && !gone('T', 1));
    }

    #[test]
    fn a_launch_id_is_read_from_an_environment_as_a_whole_variable() {
        let id = "c5b0e1a8-93ff-5d1d-9f6f-0a4f0d3c2b1a";
        let of = |text: String| tag_of(text.as_bytes());
        assert_eq!(
            of(format!("A=b\0EVENKEEL_LAUNCH_ID={id}\0C=d\0")),
            Tag::Of(id.parse().unwrap())
        );
        for foreign in [
            format!("NOT_EVENKEEL_LAUNCH_ID={id}\0"),
            format!("X=\nEVENKEEL_LAUNCH_ID={id}\0"),
            format!("EVENKEEL_LAUNCH_IDS={id}\0"),
            "EVENKEEL_LAUNCH_ID=nonsense\0".to_owned(),
            String::new(),
        ] {
            assert_eq!(of(foreign), Tag::Untagged);
        }
    }

    #[test]
    fn a_connection_goes_to_the_nearest_listener() {
        let root = tempfile::tempdir().unwrap();
        let net = root.path().join("net");
        std::fs::create_dir(&net).unwrap();
        let row = |address: &str, state: &str, inode: u32| {
            format!(
                "   0: {address}:1F90 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0 0 {inode} 1 x\n"
            )
        };
        let word = |bytes: [u8; 4]| format!("{:08X}", u32::from_ne_bytes(bytes));
        let loopback = word([127, 0, 0, 1]);
        let other = word([10, 0, 0, 1]);
        let any = word([0; 4]);
        let any6 = any.repeat(4);
        let proc = Procfs::at(root.path());
        let port = Port::try_from(8080).unwrap();
        let listeners = |v4: &str, v6: &str| {
            std::fs::write(net.join("tcp"), v4).unwrap();
            std::fs::write(net.join("tcp6"), v6).unwrap();
            Vec::from_iter(proc.listeners(port).unwrap())
        };
        let both = row(&loopback, "0A", 1) + &row(&any, "0A", 2);
        assert_eq!(listeners(&both, &row(&any6, "0A", 3)), [1]);
        assert_eq!(listeners(&row(&any, "0A", 2), &row(&any6, "0A", 3)), [2, 3]);
        let mapped = format!("{}{}{}{loopback}", any, any, word([0, 0, 0xff, 0xff]));
        assert_eq!(listeners(&row(&any, "0A", 2), &row(&mapped, "0A", 3)), [3]);
        assert!(listeners(&row(&other, "0A", 2), "").is_empty());
        assert!(listeners(&row(&loopback, "01", 2), "").is_empty());
        assert!(proc.port_holder(port).is_none());
    }

    #[test]
    fn what_is_gone_and_what_cannot_be_read_are_told_apart() {
        let root = tempfile::tempdir().unwrap();
        let proc = Procfs::at(root.path());
        assert_eq!(proc.tag(7), Tag::Gone);
        assert!(proc.stat(7).unwrap().is_none());
        // A folder where a file should be: the one read error that root gets too.
        std::fs::create_dir_all(root.path().join("7/environ")).unwrap();
        std::fs::create_dir_all(root.path().join("7/stat")).unwrap();
        assert_eq!(proc.tag(7), Tag::Unreadable);
        assert!(proc.stat(7).is_err());
        std::fs::create_dir_all(root.path().join("8")).unwrap();
        std::fs::write(root.path().join("8/stat"), "nonsense").unwrap();
        assert!(proc.stat(8).is_err());
    }

    #[test]
    fn this_very_process_is_found_with_its_sockets() {
        let proc = Procfs::default();
        let pid = std::process::id();
        let stat = proc.stat(pid).unwrap().unwrap();
        assert!(!stat.is_gone() && stat.start_ticks > 0);
        assert!(proc.pids().unwrap().contains(&pid));
        assert!(proc.boot_id().unwrap().len() >= 36);
        assert!(proc.has_own_uid(pid));
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = Port::try_from(socket.local_addr().unwrap().port()).unwrap();
        let inodes = proc.listeners(port).unwrap();
        assert_eq!(inodes.len(), 1);
        assert!(proc.sockets(pid).unwrap().unwrap().is_superset(&inodes));
        let stranger = proc.port_holder(port).unwrap();
        assert_eq!(stranger.pid, Some(pid));
        assert!(stranger.command.is_some());
    }
}
