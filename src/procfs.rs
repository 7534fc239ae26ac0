// effect: reads /proc.

//! What `/proc` tells of this boot and of one process: enough to say whether a pid still means the same process.
//!
//! Invariant: a process that cannot be read is an error, and only one that is not there is `None`.

use std::io;

/// The id of this boot. A pid of another boot means nothing.
pub fn boot_id() -> io::Result<String> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(text.trim_end().to_owned())
}

/// When the process started, in clock ticks since boot; `None` when there is no such process, or only its zombie.
pub fn start_ticks(pid: u32) -> io::Result<Option<u64>> {
    match std::fs::read(format!("/proc/{pid}/stat")) {
        Ok(stat) => parse_stat(&stat)
            .ok_or_else(|| io::Error::other(format!("/proc/{pid}/stat has an unknown form"))),
        // ESRCH: it ended between open and read.
        Err(error)
            if error.kind() == io::ErrorKind::NotFound
                || error.raw_os_error() == Some(nix::libc::ESRCH) =>
        {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// The start ticks in a line of `/proc/PID/stat`; inner `None` for a zombie.
#[expect(
    clippy::option_option,
    reason = "unparsable and gone are different answers"
)]
fn parse_stat(stat: &[u8]) -> Option<Option<u64>> {
    // The second field is the command in parentheses, and may itself hold spaces and parentheses: count after the last.
    let close = stat.iter().rposition(|&byte| byte == b')')?;
    let rest = std::str::from_utf8(stat.get(close + 1..)?).ok()?;
    let mut fields = rest.split_ascii_whitespace();
    // Fields 3 (state) and 22 (start time) of the line.
    let state = fields.next()?;
    let ticks = fields.nth(18)?.parse().ok()?;
    Some((!matches!(state, "Z" | "X" | "x")).then_some(ticks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_with_parentheses_and_spaces_moves_no_field() {
        let tail = " 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20 21\n";
        let line = |state: &str| format!("7 (a) S) (b) {state}{tail}").into_bytes();
        assert_eq!(parse_stat(&line("S")), Some(Some(4711)));
        assert_eq!(parse_stat(&line("Z")), Some(None));
        assert_eq!(parse_stat(b""), None);
        assert_eq!(parse_stat(b"7 (a) S 1"), None);
    }

    #[test]
    fn this_process_lives_and_an_impossible_one_does_not() {
        assert!(start_ticks(std::process::id()).unwrap().is_some());
        assert_eq!(start_ticks(u32::MAX).unwrap(), None);
        assert_eq!(boot_id().unwrap().len(), 36);
    }
}
