//! Bytes of a file to text that the YAML parser takes in bounded time and memory (W9).
//!
//! The parser loads all events of a document before anything can be counted, and some of its checks are quadratic. So
//! what could make it slow or big is counted here first, in one pass over the bytes, always too high and never too low.
//!
//! Invariant: a text that passes costs the parser at most [`EVENT_LIMIT`] events.

/// The most events that a file may hold: at about 100 bytes each they take 25 MiB. A file of 1 MiB of ordinary
/// YAML has a quarter of that.
const EVENT_LIMIT: usize = 250_000;

/// The most brackets that may be open at a time. The deserialiser gives up at 128 levels; brackets in texts, which
/// this count cannot tell from YAML's, need some room.
const OPEN_LIMIT: usize = 512;

/// The most lines that may begin with `%`: the parser compares each `%TAG` with all before.
const DIRECTIVE_LIMIT: usize = 16;

/// Why bytes are not given to the parser.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// Where, as an offset in bytes.
    pub(super) offset: usize,
    /// What is wrong.
    pub(super) message: String,
    /// What would be right.
    pub(super) hint: Option<String>,
}

impl Refusal {
    fn new(offset: usize, message: impl Into<String>, hint: &str) -> Self {
        Self {
            offset,
            message: message.into(),
            hint: Some(hint.to_owned()),
        }
    }
}

/// The text of a file: UTF-8, without a byte order mark, without what YAML forbids, and bounded.
pub(super) fn text_of(bytes: &[u8]) -> Result<&str, Refusal> {
    const UTF8: &str = "save it as UTF-8";
    if bytes.starts_with(&[0xFF, 0xFE]) || bytes.starts_with(&[0xFE, 0xFF]) || looks_wide(bytes) {
        return Err(Refusal::new(0, "is UTF-16 or UTF-32, not UTF-8", UTF8));
    }
    let bytes = without_mark(bytes);
    let text = std::str::from_utf8(bytes).map_err(|error| {
        Refusal::new(error.valid_up_to(), "holds bytes that are not UTF-8", UTF8)
    })?;
    if let Some((offset, unfit)) = text.char_indices().find(|&(_, c)| !is_printable(c)) {
        return Err(Refusal::new(
            offset,
            format!(
                "holds the character U+{:04X}, which YAML forbids",
                u32::from(unfit)
            ),
            "take it out; in a double-quoted text it can be written as an escape",
        ));
    }
    bounded(text).map(|()| text)
}

/// The bytes without a byte order mark, which editors of Windows write.
pub(super) fn without_mark(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(bytes)
}

/// Whether every second byte of the beginning is NUL: wide characters without a byte order mark.
fn looks_wide(bytes: &[u8]) -> bool {
    let beginning = &bytes[..bytes.len().min(64)];
    let nul_at = |parity: usize| {
        let mut every_second = beginning.iter().skip(parity).step_by(2).peekable();
        every_second.peek().is_some() && every_second.all(|&b| b == 0)
    };
    beginning.len() >= 4 && (nul_at(0) != nul_at(1))
}

/// The characters that YAML allows, as libyaml's reader has them.
fn is_printable(c: char) -> bool {
    matches!(c,
        '\t' | '\n' | '\r' | '\u{85}' | ' '..='~' | '\u{A0}'..='\u{D7FF}' | '\u{E000}'..='\u{FFFD}' | '\u{10000}'..)
}

fn bounded(text: &str) -> Result<(), Refusal> {
    const SPLIT: &str = "split the file";
    let bytes = text.as_bytes();
    let (mut events, mut open, mut directives) = (0_usize, 0_usize, 0_usize);
    let mut at_line_start = true;
    for (offset, &byte) in bytes.iter().enumerate() {
        let ends_word = || bytes.get(offset + 1).is_none_or(u8::is_ascii_whitespace);
        events += match byte {
            b'[' | b'{' => {
                open += 1;
                2
            }
            b']' | b'}' => {
                open = open.saturating_sub(1);
                0
            }
            // A lone `?` in brackets makes a mapping with an empty key and an empty value.
            b'?' => 4,
            b',' | b':' => 2,
            b'-' if ends_word() => 2,
            b'\n' | b'\r' => 1,
            _ => 0,
        };
        directives += usize::from(at_line_start && byte == b'%');
        at_line_start = matches!(byte, b'\n' | b'\r');
        if open > OPEN_LIMIT {
            return Err(Refusal::new(
                offset,
                format!("is nested too deeply: more than {OPEN_LIMIT} brackets are open"),
                "close them",
            ));
        }
        if directives > DIRECTIVE_LIMIT {
            return Err(Refusal::new(
                offset,
                format!("has more than {DIRECTIVE_LIMIT} lines that begin with `%`"),
                "manifests need none of these directives",
            ));
        }
        if events > EVENT_LIMIT {
            return Err(Refusal::new(
                offset,
                "has too many values for one file",
                SPLIT,
            ));
        }
    }
    Ok(())
}

/// A text and its lines, as the YAML parser counts them: it knows more line ends than `\n`.
#[derive(Debug)]
pub(super) struct Lines<'t> {
    text: &'t str,
    lines: Vec<&'t str>,
}

impl<'t> Lines<'t> {
    /// The lines of a text: at least one.
    pub(super) fn of(text: &'t str) -> Self {
        let mut lines = Vec::new();
        let mut rest = text;
        while let Some(end) = rest.find(['\n', '\r', '\u{85}', '\u{2028}', '\u{2029}']) {
            let (line, tail) = rest.split_at(end);
            let mut after = tail.chars();
            after.next();
            rest = tail.strip_prefix("\r\n").unwrap_or(after.as_str());
            lines.push(line);
        }
        lines.push(rest);
        Self { text, lines }
    }

    /// A line by its number from 1; behind the end the last one, and `None` in place of its number.
    pub(super) fn get(&self, number: usize) -> (Option<usize>, &'t str) {
        match self.lines.get(number.saturating_sub(1)) {
            Some(line) => (Some(number), line),
            None => (None, self.lines.last().copied().unwrap_or_default()),
        }
    }

    /// The text from the beginning of a line on.
    pub(super) fn rest_at(&self, number: usize) -> &'t str {
        let line = self
            .lines
            .get(number.saturating_sub(1))
            .copied()
            .unwrap_or_default();
        // The lines are slices of the text, so their addresses tell their offsets.
        let offset = (line.as_ptr() as usize).checked_sub(self.text.as_ptr() as usize);
        offset
            .and_then(|offset| self.text.get(offset..))
            .unwrap_or_default()
    }

    /// How many lines there are.
    pub(super) fn count(&self) -> usize {
        self.lines.len()
    }

    /// The line and column, both from 1, of the end of the text.
    pub(super) fn end(&self) -> (usize, usize) {
        let (_, last) = self.get(usize::MAX);
        (self.count(), last.chars().count() + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_order_mark_is_tolerated_and_wide_characters_are_refused() {
        assert_eq!(text_of(b"\xEF\xBB\xBFa: 1"), Ok("a: 1"));
        for wide in [
            &b"\xFF\xFEa\0:\0"[..],
            b"\xFE\xFF\0a\0:",
            b"a\0p\0i\0",
            b"\0a\0p\0i",
        ] {
            let refusal = text_of(wide).unwrap_err();
            assert!(refusal.message.contains("UTF-16"), "{wide:?}: {refusal:?}");
        }
    }

    #[test]
    fn bytes_that_are_no_text_are_refused_where_they_stand() {
        assert_eq!(text_of(b"a: \xC3(").unwrap_err().offset, 3);
        let nul = text_of(b"name: a\0b").unwrap_err();
        assert_eq!(nul.offset, 7);
        assert!(nul.message.contains("U+0000"), "{}", nul.message);
        assert_eq!(text_of("a: \u{1b}[0m".as_bytes()).unwrap_err().offset, 3);
        assert!(text_of("a: ä😀\u{85}".as_bytes()).is_ok());
        assert!(text_of(b"").is_ok());
    }

    #[test]
    fn what_would_make_the_parser_slow_or_big_is_refused() {
        for bomb in [
            "[".repeat(100_000),
            "[?,".repeat(200_000),
            format!("[{}]", "?,".repeat(500_000)),
            "- ".repeat(500_000),
            "? ".repeat(500_000),
            format!("{{{}}}", "a,".repeat(500_000)),
            "---\n".repeat(250_000),
            "%TAG !a! b\n".repeat(90_000),
        ] {
            assert!(text_of(bomb.as_bytes()).is_err(), "{}", &bomb[..20]);
        }
    }

    #[test]
    fn lines_end_where_the_parser_ends_them() {
        let lines = Lines::of("a\r\nb\rc\n\u{2028}d\n");
        assert_eq!(lines.lines, ["a", "b", "c", "", "d", ""]);
        assert_eq!(lines.get(3), (Some(3), "c"));
        assert_eq!(lines.get(7), (None, ""));
        assert_eq!(lines.rest_at(1), "a\r\nb\rc\n\u{2028}d\n");
        assert_eq!(lines.rest_at(3), "c\n\u{2028}d\n");
        assert_eq!(lines.rest_at(7), "");
        assert_eq!(Lines::of("a\r\näb").end(), (2, 3));
        assert_eq!(Lines::of("").end(), (1, 1));
    }
}
