//! From what the parser says to what helps a person: the place, the field's path, what is wrong, what would be right.
//!
//! Invariant: every text made here is bounded, whatever the file holds, and has no control characters.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::LazyLock;

use annotate_snippets::{AnnotationKind, Level, Origin, Renderer, Snippet};
use schemars::generate::SchemaSettings;
use serde_json::Value;

use super::outline::{Node, Shape};
use super::text::Lines;
use crate::desired::{Problem, ProblemKind};
use crate::manifest::Manifest;
use crate::names::{DeploymentName, Port};

/// The longest message in characters: two terminal lines and a half; values may be much longer.
const MESSAGE_LIMIT: usize = 240;

/// How much of a source line is shown around the caret, in characters: the width of a usual terminal.
const SHOWN_LINE: usize = 120;

/// Something wrong at a place of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Finding {
    /// The place.
    pub(super) place: Option<Place>,
    /// The field's path.
    pub(super) path: Option<String>,
    /// What is wrong.
    pub(super) message: String,
    /// What would be right.
    pub(super) hint: Option<String>,
}

/// A place in a file, with enough of its line to show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The line, from 1.
    pub line: usize,
    /// The column, from 1, in characters.
    pub column: usize,
    /// The line's text around the place.
    shown: String,
    /// The bytes of `shown` that the caret underlines.
    caret: std::ops::Range<usize>,
}

impl Place {
    /// The place at a line and column, both from 1; the nearest one there is, if the text ends before.
    pub(super) fn new(lines: &Lines<'_>, line: usize, column: usize) -> Self {
        let (found, text) = lines.get(line);
        // What is missing at the end of the file is missed at the end of its last line.
        let (line, column) = found.map_or((lines.count(), usize::MAX), |line| (line, column));
        let characters: Vec<char> = text.chars().collect();
        let at = column.saturating_sub(1).min(characters.len());
        let from = at.saturating_sub(SHOWN_LINE / 2);
        let to = characters.len().min(from + SHOWN_LINE);
        let shown: String = characters[from..to].iter().collect();
        let width = token(&characters, at).min(to - at);
        let bytes = |chars: &[char]| chars.iter().map(|c| c.len_utf8()).sum::<usize>();
        let start = bytes(&characters[from..at]);
        Self {
            line,
            column: at + 1,
            caret: start..start + bytes(&characters[at..at + width]),
            shown,
        }
    }
}

/// How many characters the word, quoted text or value at a place has.
fn token(line: &[char], at: usize) -> usize {
    let rest = &line[at..];
    if let Some(&quote @ ('"' | '\'')) = rest.first() {
        let end = rest.iter().skip(1).position(|&c| c == quote);
        return end.map_or(rest.len(), |end| end + 2);
    }
    let before = |unwanted: [char; 2]| line[..at].iter().any(|c| unwanted.contains(c));
    let in_brackets = before(['[', '{']);
    let end = rest.iter().enumerate().position(|(n, &c)| match c {
        ':' => rest.get(n + 1).is_none_or(|next| next.is_whitespace()),
        '#' => n > 0 && rest[n - 1].is_whitespace(),
        ',' | ']' | '}' => in_brackets,
        _ => false,
    });
    let word = &rest[..end.unwrap_or(rest.len())];
    word.len() - word.iter().rev().take_while(|c| c.is_whitespace()).count()
}

/// The problem that a finding is.
pub(super) fn problem(
    file: &Path,
    finding: Finding,
    kind: ProblemKind,
    deployment: Option<DeploymentName>,
) -> Problem {
    let Finding {
        place,
        path,
        message,
        hint,
    } = finding;
    let message = clean(&message);
    let path = path.map(|path| clean(&path));
    let hint = hint.map(|hint| clean(&hint));
    Problem {
        file: file.to_owned(),
        line: place.as_ref().map(|place| place.line),
        column: place.as_ref().map(|place| place.column),
        report: report(
            file,
            place.as_ref(),
            path.as_deref(),
            &message,
            hint.as_deref(),
        ),
        path,
        message,
        hint,
        deployment,
        kind,
    }
}

fn report(
    file: &Path,
    place: Option<&Place>,
    path: Option<&str>,
    message: &str,
    hint: Option<&str>,
) -> String {
    let file = clean(&file.display().to_string());
    let title = path.map_or_else(|| message.to_owned(), |path| format!("{path}: {message}"));
    let title = Level::ERROR.primary_title(title);
    let mut group = match place {
        None => title.element(Origin::path(file)),
        Some(place) => {
            let origin = Origin::path(file)
                .line(place.line)
                .char_column(place.column);
            let snippet = Snippet::source(place.shown.as_str())
                .line_start(place.line)
                .annotation(AnnotationKind::Primary.span(place.caret.clone()));
            title.element(origin).element(snippet)
        }
    };
    if let Some(hint) = hint {
        group = group.element(Level::HELP.message(hint));
    }
    // The renderer takes the origin and the line for two pieces and puts `:::` between them. They are one: the origin
    // stands by itself only because of a long line, whose column the renderer would count wrong.
    let rendered = Renderer::plain().render(&[group]);
    let lines: Vec<&str> = rendered
        .lines()
        .filter(|line| line.trim() != ":::")
        .collect();
    lines.join("\n")
}

/// A text for one line: bounded, without control characters.
pub(super) fn clean(text: &str) -> String {
    let mut cleaned = String::new();
    for (n, c) in text.chars().enumerate() {
        if n == MESSAGE_LIMIT {
            cleaned.push('…');
            break;
        }
        if c.is_control() {
            cleaned.extend(c.escape_default());
        } else {
            cleaned.push(c);
        }
    }
    cleaned
}

/// What the parser found wrong with the YAML itself.
pub(super) fn syntax(lines: &Lines<'_>, error: &serde_yaml::Error) -> Finding {
    let text = error.to_string();
    // `what is wrong at line 4 column 1, while parsing a list at line 3 column 9`
    let said = text.split(" at line ").next().unwrap_or(&text);
    let said = said.split(" at position ").next().unwrap_or(said);
    let mut place = error
        .location()
        .map(|at| Place::new(lines, at.line(), at.column()));
    let begins_with = |wanted: char| {
        let shown = place
            .as_ref()
            .map(|place| &place.shown[place.caret.start..]);
        shown.is_some_and(|rest| rest.starts_with(wanted))
    };
    let (message, hint) = match said {
        "found character that cannot start any token" if begins_with('\t') => (
            "there is a tab where YAML wants spaces",
            Some("indent with spaces"),
        ),
        _ => explain(said),
    };
    // What is not closed is noticed at the end of the file and mended where it begins.
    if message.contains("begins here")
        && let Some((line, column)) = context_of(&text)
    {
        place = Some(Place::new(lines, line, column));
    }
    Finding {
        place,
        path: None,
        message: message.to_owned(),
        hint: hint.map(str::to_owned),
    }
}

/// The line and column of what the parser was in when it noticed.
fn context_of(text: &str) -> Option<(usize, usize)> {
    let (_, context) = text.rsplit_once(", while ")?;
    let (_, at) = context.rsplit_once(" at line ")?;
    let (line, column) = at.split_once(" column ")?;
    Some((line.parse().ok()?, column.parse().ok()?))
}

/// The parser's words in ours.
fn explain(said: &str) -> (&str, Option<&'static str>) {
    match said {
        "recursion limit exceeded" => ("is nested too deeply", Some("128 levels are the most")),
        "repetition limit exceeded" => ("its aliases repeat too much", Some("write it out")),
        "mapping values are not allowed in this context" => (
            "there is a `:` where no value can begin",
            Some("quote a text that holds `: `, and indent the keys of one mapping alike"),
        ),
        "found a tab character where an indentation space is expected"
        | "found a tab character that violates indentation" => (
            "there is a tab where YAML wants spaces",
            Some("indent with spaces"),
        ),
        "found character that cannot start any token" => (
            "no value can begin with this character",
            Some("quote the text"),
        ),
        "did not find expected key" => (
            "there is no key where one should be",
            Some(
                "indent the keys of one mapping alike; quote a text that goes on behind a closing quote",
            ),
        ),
        "did not find expected '-' indicator" => (
            "there is no `-` where the next item of the list should be",
            Some("indent the items of one list alike"),
        ),
        "could not find expected ':'" => (
            "the key that begins here has no `:`",
            Some("write `key: value`, with a space behind the colon"),
        ),
        "did not find expected ',' or ']'" => (
            "the list that begins here has no `]`, or no `,` between two items",
            None,
        ),
        "did not find expected ',' or '}'" => (
            "the mapping that begins here has no `}`, or no `,` between two entries",
            None,
        ),
        "found unexpected end of stream" => {
            ("the text that begins here has no closing quote", None)
        }
        "unknown anchor" => (
            "no anchor of this name stands before",
            Some(
                "an alias `*name` needs an anchor `&name` in the same document; quote a text that begins with `*`",
            ),
        ),
        _ if said.ends_with("expected a text as key") => ("a key can only be a text", None),
        _ => (said, None),
    }
}

/// What was found wrong when a document was read as a manifest, and the path of the value whose place should be shown
/// if the parser's own is not the best.
pub(super) fn typed(
    lines: &Lines<'_>,
    outline: &Node,
    error: &serde_yaml::Error,
) -> (Finding, Option<String>) {
    let mut said = error.to_string();
    if let Some(at) = error.location() {
        let suffix = format!(" at line {} column {}", at.line(), at.column());
        if let Some(stripped) = said.strip_suffix(&suffix) {
            said.truncate(stripped.len());
        }
    }
    let (path, said) = outline.split_path(&said);
    let place = error
        .location()
        .map(|at| Place::new(lines, at.line(), at.column()));
    let finding = |path: &str, message: String, hint: Option<String>| Finding {
        place: place.clone(),
        path: (!path.is_empty()).then(|| path.to_owned()),
        message,
        hint,
    };
    if let Some((field, expected)) = quoted(said, "unknown field `") {
        let hint = unknown_field(path, field, &words(expected));
        let path = join(path, field);
        return (
            finding(&path, format!("unknown field `{field}`"), hint),
            None,
        );
    }
    if let Some((value, expected)) = quoted(said, "unknown variant `") {
        let known = words(expected);
        let message = if value.is_empty() {
            "has no value".to_owned()
        } else {
            format!("unknown value `{value}`")
        };
        let hint = match (nearest(value, known.iter().copied()), known.as_slice()) {
            (Some(meant), [_]) => format!("did you mean `{meant}`?"),
            (Some(meant), _) => format!("did you mean `{meant}`? known are {}", listed(&known)),
            (None, [only]) => format!("only `{only}` is known"),
            (None, _) => format!("known are {}", listed(&known)),
        };
        return (finding(path, message, Some(hint)), Some(path.to_owned()));
    }
    if let Some((field, _)) = quoted(said, "missing field `") {
        let at = join(path, field);
        let hint = Some(format!("add `{field}: ...`"));
        return (
            finding(&at, format!("the field `{field}` is missing"), hint),
            Some(at),
        );
    }
    if let Some((found, expected)) = said
        .strip_prefix("invalid type: ")
        .or_else(|| said.strip_prefix("invalid value: "))
        .and_then(|said| said.rsplit_once(", expected "))
    {
        let message = format!("expected {}, found {}", wanted(expected), given(found));
        return (
            finding(path, message, type_hint(found, expected)),
            Some(path.to_owned()),
        );
    }
    // The types of names and ports refuse a text after the parser gave it away, so it tells their parent's place.
    let at = outline
        .at(path)
        .and_then(|parent| refused_child(parent, said));
    let path = at.map_or_else(|| path.to_owned(), |child| join(path, child));
    (finding(&path, said.to_owned(), None), Some(path))
}

/// The key of the value that was refused with these words.
fn refused_child<'n>(parent: &'n Node, said: &str) -> Option<&'n str> {
    let Shape::Mapping(entries) = &parent.shape else {
        return None;
    };
    let refused = |text: &str| {
        let name = text.parse::<DeploymentName>().err();
        let port = text
            .parse::<u16>()
            .ok()
            .and_then(|number| Port::try_from(number).err());
        name.is_some_and(|error| error.to_string() == said)
            || port.is_some_and(|error| error.to_string() == said)
    };
    let child = entries.iter().find(|entry| match &entry.value.shape {
        Shape::Scalar(text) => text.as_deref().is_none_or(refused),
        Shape::Null => refused(""),
        Shape::Sequence(_) | Shape::Mapping(_) => false,
    });
    child.map(|entry| entry.key.as_str())
}

/// The quoted word behind a beginning, and what follows it.
fn quoted<'s>(said: &'s str, beginning: &str) -> Option<(&'s str, &'s str)> {
    let rest = said.strip_prefix(beginning)?;
    // The word is the user's and may itself hold a backquote; what serde lists behind it does not.
    rest.rsplit_once("`, expected ")
        .or_else(|| rest.rsplit_once("`, there are no fields"))
        .or_else(|| Some((rest.strip_suffix('`')?, "")))
}

/// The words that serde lists as expected.
fn words(expected: &str) -> Vec<&str> {
    expected.split('`').skip(1).step_by(2).collect()
}

fn listed(words: &[&str]) -> String {
    let quoted: Vec<_> = words.iter().map(|word| format!("`{word}`")).collect();
    quoted.join(", ")
}

fn join(path: &str, field: &str) -> String {
    if path.is_empty() {
        field.to_owned()
    } else {
        format!("{path}.{field}")
    }
}

fn unknown_field(path: &str, field: &str, expected: &[&str]) -> Option<String> {
    if field == "<<" {
        return Some(
            "merge keys are not known here; give a whole value with an alias: `options: *options`"
                .to_owned(),
        );
    }
    if let Some(home) = home_of(path, field) {
        return Some(home);
    }
    if let Some(meant) = nearest(field, expected.iter().copied()) {
        return Some(format!("did you mean `{meant}`?"));
    }
    // A list of all 25 fields of `spec` helps nobody.
    (!expected.is_empty() && expected.len() <= 8)
        .then(|| format!("the fields are {}", listed(expected)))
}

/// Where a field belongs that exists, but not here.
fn home_of(path: &str, field: &str) -> Option<String> {
    static PATHS: LazyLock<Vec<(String, String)>> = LazyLock::new(|| {
        let mut paths = Vec::new();
        let settings = SchemaSettings::default().with(|settings| settings.inline_subschemas = true);
        let schema = settings.into_generator().into_root_schema_for::<Manifest>();
        collect_fields(&schema.to_value(), "", &mut paths);
        paths
    });
    let mut homes = PATHS
        .iter()
        .filter(|(_, name)| name == field)
        .map(|(home, _)| home.as_str());
    let home = homes.next()?;
    // `path`, `name` or `value` are in several places: no telling which was meant.
    if homes.next().is_some() || home == path {
        return None;
    }
    Some(if home.is_empty() {
        format!("`{field}` belongs in the top level")
    } else {
        format!("`{field}` belongs in `{home}`")
    })
}

fn collect_fields(schema: &Value, path: &str, fields: &mut Vec<(String, String)>) {
    if let Some(properties) = schema.get("properties").and_then(Value::as_object) {
        for (name, property) in properties {
            fields.push((path.to_owned(), name.clone()));
            collect_fields(property, &join(path, name), fields);
        }
    }
    if let Some(items) = schema.get("items") {
        collect_fields(items, &format!("{path}[]"), fields);
    }
    for alternative in schema
        .get("anyOf")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
    {
        collect_fields(alternative, path, fields);
    }
}

/// The word that was probably meant: a third of its letters may be wrong, and `snake_case` does not count.
pub(super) fn nearest<'w>(word: &str, known: impl IntoIterator<Item = &'w str>) -> Option<&'w str> {
    // The distance is quadratic in the length, and nobody means a short word by a long one.
    if word.is_empty() || word.len() > 64 {
        return None;
    }
    let plain = |word: &str| word.to_lowercase().replace(['_', '-'], "");
    let word = plain(word);
    let allowed = (word.chars().count() / 3).max(1);
    known
        .into_iter()
        .map(|known| (strsim::osa_distance(&word, &plain(known)), known))
        .filter(|(distance, _)| *distance <= allowed)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, known)| known)
}

fn wanted(expected: &str) -> &str {
    match expected {
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" | "u64" | "usize" => "a whole number, 0 or more",
        "i32" | "i64" => "a whole number",
        "f32" | "f64" => "a number",
        "a string" => "a text",
        "path string" => "a path",
        "a boolean" => "`true` or `false`",
        "a sequence" => "a list",
        "a map" => "a mapping",
        "a YAML tag starting with '!'" => "one word",
        _ if expected.starts_with("struct ") => "a mapping",
        _ => expected,
    }
}

fn given(found: &str) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = match found.split_once(' ') {
        Some(("string", value)) => write!(text, "the text {value}"),
        Some(("integer", value)) => write!(text, "the number {value}"),
        Some(("boolean", value)) => write!(text, "{value}"),
        _ if found.starts_with("floating point ") => {
            write!(text, "the number {}", &found["floating point ".len()..])
        }
        _ if found == "map" => write!(text, "a mapping"),
        _ if found == "sequence" => write!(text, "a list"),
        _ if found == "unit value" => write!(text, "nothing"),
        _ => write!(text, "{found}"),
    };
    text
}

fn type_hint(found: &str, expected: &str) -> Option<String> {
    let text = found
        .strip_prefix("string \"")
        .and_then(|rest| rest.strip_suffix('"'))?;
    match expected {
        "a boolean"
            if matches!(
                text.to_lowercase().as_str(),
                "yes" | "on" | "y" | "true" | "1"
            ) =>
        {
            Some("write `true`".to_owned())
        }
        "a boolean"
            if matches!(
                text.to_lowercase().as_str(),
                "no" | "off" | "n" | "false" | "0"
            ) =>
        {
            Some("write `false`".to_owned())
        }
        "u8" | "u16" | "u32" | "u64" | "i32" | "i64" | "f64" if text.parse::<f64>().is_ok() => {
            Some("write the number without quotes".to_owned())
        }
        "a sequence" => Some("write the list as `[a, b]`, or one `- item` a line".to_owned()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_caret_underlines_the_token() {
        let under = |source: &str, column| {
            let place = Place::new(&Lines::of(source), 1, column);
            place.shown[place.caret].to_owned()
        };
        assert_eq!(under("engine: vlm # fast", 1), "engine");
        assert_eq!(under("engine: vlm # fast", 9), "vlm");
        assert_eq!(under("a: 'it is' # x", 4), "'it is'");
        assert_eq!(under("a: [x, y]", 5), "x");
        assert_eq!(under("a: http://b, c", 4), "http://b, c");
        assert_eq!(under("a:", 3), "");
        assert_eq!(under("", 1), "");
    }

    #[test]
    fn a_long_line_is_shown_around_the_caret_with_its_true_column() {
        let source = format!("{}oops: {}", "ä".repeat(5000), "x".repeat(1 << 20));
        let place = Place::new(&Lines::of(&source), 1, 5001);
        assert_eq!(place.column, 5001);
        assert_eq!(&place.shown[place.caret], "oops");
        assert!(place.shown.chars().count() <= SHOWN_LINE);
    }

    #[test]
    fn a_place_behind_the_end_is_the_end() {
        let place = Place::new(&Lines::of("a: 1\nb"), 7, 3);
        assert_eq!((place.line, place.column), (2, 2));
    }

    #[test]
    fn the_word_that_was_meant_is_near() {
        let known = ["maxContextLength", "dtype", "tensorParallel"];
        assert_eq!(nearest("maxContextLenght", known), Some("maxContextLength"));
        assert_eq!(
            nearest("max_context_length", known),
            Some("maxContextLength")
        );
        assert_eq!(nearest("Dtype", known), Some("dtype"));
        assert_eq!(nearest("volume", known), None);
        assert_eq!(nearest("", known), None);
        assert_eq!(nearest(&"x".repeat(1 << 20), known), None);
    }

    #[test]
    fn what_people_read_is_bounded_and_has_no_control_characters() {
        let cleaned = clean(&format!("a\u{1b}[31m\n{}", "x".repeat(1 << 20)));
        assert!(cleaned.starts_with(r"a\u{1b}[31m\nx"), "{}", &cleaned[..20]);
        assert!(cleaned.chars().count() < MESSAGE_LIMIT + 20);
    }
}
