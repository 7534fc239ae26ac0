//! Aligned columns and short ages, in the manner of `kubectl`.
//!
//! Invariant: a row is one line, whatever is in its cells: a text of an engine cannot move the cursor or forge a row.

use std::io::{self, Write};

use jiff::Timestamp;

/// Rows that are printed in batches. Columns never get narrower, so that a watch stays aligned.
#[derive(Debug)]
pub struct Table<const N: usize> {
    headings: [&'static str; N],
    widths: [usize; N],
    rows: Vec<[String; N]>,
    headed: bool,
}

impl<const N: usize> Table<N> {
    /// An empty table.
    pub fn new(headings: [&'static str; N]) -> Self {
        Self {
            headings,
            widths: headings.map(str::len),
            rows: Vec::new(),
            headed: false,
        }
    }

    /// Adds a row to the next batch.
    pub fn row(&mut self, cells: [String; N]) {
        let cells = cells.map(|cell| one_line(&cell));
        for (width, cell) in self.widths.iter_mut().zip(&cells) {
            *width = (*width).max(cell.chars().count());
        }
        self.rows.push(cells);
    }

    /// Prints the rows added since, the first time below the headings.
    pub fn print(&mut self, out: &mut dyn Write) -> io::Result<()> {
        if !self.headed {
            self.headed = true;
            print_row(out, &self.widths, self.headings)?;
        }
        for row in self.rows.drain(..) {
            print_row(out, &self.widths, row.each_ref().map(String::as_str))?;
        }
        out.flush()
    }
}

fn print_row<const N: usize>(
    out: &mut dyn Write,
    widths: &[usize; N],
    cells: [&str; N],
) -> io::Result<()> {
    let mut line = String::new();
    for (cell, &width) in cells.iter().zip(widths) {
        line.extend([format!("{cell:width$}"), "   ".to_owned()]);
    }
    // The last column is not padded, nor is an empty one at the end.
    writeln!(out, "{}", line.trim_end())
}

/// A text with every control character replaced by a space, and without them at its ends.
pub fn one_line(text: &str) -> String {
    text.trim_matches(|c: char| c.is_control() || c == ' ')
        .replace(|c: char| c.is_control(), " ")
}

/// How long ago, in at most two units and about three digits: `45s`, `3m20s`, `2h`, `5d3h`. What lies ahead is `0s`.
pub fn age(now: Timestamp, then: Timestamp) -> String {
    let seconds = now.duration_since(then).as_secs().max(0);
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    let two = |large: i64, large_unit: &str, small: i64, small_unit: &str| {
        if small == 0 {
            format!("{large}{large_unit}")
        } else {
            format!("{large}{large_unit}{small}{small_unit}")
        }
    };
    if seconds < 120 {
        format!("{seconds}s")
    } else if minutes < 10 {
        two(minutes, "m", seconds % 60, "s")
    } else if hours < 3 {
        format!("{minutes}m")
    } else if hours < 8 {
        two(hours, "h", minutes % 60, "m")
    } else if hours < 48 {
        format!("{hours}h")
    } else if days < 8 {
        two(days, "d", hours % 24, "h")
    } else {
        format!("{days}d")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed<const N: usize>(table: &mut Table<N>) -> String {
        let mut out = Vec::new();
        table.print(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn columns_are_as_wide_as_their_widest_cell_and_the_last_is_not_padded() {
        let mut table = Table::new(["NAME", "STATE", "WHY"]);
        table.row(["a-0", "ready", ""].map(str::to_owned));
        table.row(["größer-0", "starting", "loading"].map(str::to_owned));
        assert_eq!(
            printed(&mut table),
            "NAME       STATE      WHY\n\
             a-0        ready\n\
             größer-0   starting   loading\n"
        );
        // A later batch keeps the widths and has no headings.
        table.row(["b-0", "ready", "x"].map(str::to_owned));
        assert_eq!(printed(&mut table), "b-0        ready      x\n");
    }

    #[test]
    fn a_cell_cannot_break_its_row() {
        let mut table = Table::new(["A", "B"]);
        table.row(["x\n\u{1b}[2Jy", "z\n"].map(str::to_owned));
        let text = printed(&mut table);
        assert_eq!(text.lines().count(), 2);
        assert!(!text.contains('\u{1b}'));
    }

    #[test]
    fn an_age_is_short() {
        let then = Timestamp::UNIX_EPOCH;
        for (seconds, expected) in [
            (-5, "0s"),
            (0, "0s"),
            (119, "119s"),
            (120, "2m"),
            (200, "3m20s"),
            (600, "10m"),
            (3 * 3600 + 60, "3h1m"),
            (8 * 3600 + 60, "8h"),
            (2 * 86_400 + 3600, "2d1h"),
            (400 * 86_400, "400d"),
        ] {
            let now = Timestamp::from_second(seconds).unwrap();
            assert_eq!(age(now, then), expected);
        }
    }
}
