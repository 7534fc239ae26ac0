//! The bytes of a file to deployments, or to everything that is wrong with it. Pure.
//!
//! Invariant: the same bytes give the same answer, in bounded time and memory, whatever they are (W9).

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use serde::Deserialize;
use serde_yaml::Deserializer;

use super::diagnose::{self, Finding, Place};
use super::outline::{self, Node, Shape, Walk};
use super::text::{self, Lines};
use crate::desired::{Problem, ProblemKind};
use crate::manifest::{API_GROUP, Manifest};
use crate::names::DeploymentName;
use crate::spec::{Deployment, Source, SpecProblem};

/// The most problems reported of one file: each costs a walk over it, and nobody mends twenty at a time.
const PROBLEM_LIMIT: usize = 20;

/// The most words kept of a file that is not accepted, beyond the names that are known.
const WORD_LIMIT: usize = 4096;

/// What an accepted file holds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Manifests {
    /// Its deployments, in the order written; of two with one name the first.
    pub deployments: Vec<Deployment>,
    /// Where the name of each deployment stands.
    pub places: Vec<Place>,
    /// Documents of other programs, for the log.
    pub ignored: Vec<Ignored>,
    /// Documents whose name an earlier document of the file has.
    pub duplicates: Vec<Problem>,
}

/// A document that is not evenkeel's.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ignored {
    /// Which document of the file, from 0.
    pub document: usize,
    /// Its `apiVersion`.
    pub api_version: String,
    /// Its `kind`, if it has one.
    pub kind: Option<String>,
}

/// Reads the manifests of a file. `file` is relative to the watched folder and only named, never opened.
///
/// # Errors
/// Everything that is wrong with the file. One wrong document makes the whole file unaccepted.
pub fn read_manifests(file: &Path, bytes: &[u8]) -> Result<Manifests, Vec<Problem>> {
    // The YAML parser is a translation from C and panics where it trusts itself. Nothing is shared with it, so a
    // panic costs this file and not the daemon.
    catch_unwind(AssertUnwindSafe(|| read(file, bytes))).unwrap_or_else(|panic| {
        let finding = Finding {
            place: None,
            path: None,
            message: format!("the YAML parser gave up: {}", panic_text(panic.as_ref())),
            hint: Some("this is a bug of evenkeel; please report it with the file".to_owned()),
        };
        Err(vec![diagnose::problem(
            file,
            finding,
            ProblemKind::Invalid,
            None,
        )])
    })
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no reason given")
}

/// The words of a file that could be names of deployments: all of the `known` ones, and the first of any others.
pub fn words_of(bytes: &[u8], known: &BTreeSet<&str>) -> BTreeSet<String> {
    // UTF-16 puts a NUL beside each letter.
    let bytes: Vec<u8> = bytes.iter().copied().filter(|&byte| byte != 0).collect();
    let in_name = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-';
    let mut words = BTreeSet::new();
    let mut others = 0;
    for run in bytes.split(|byte| !in_name(byte)) {
        let word = String::from_utf8_lossy(run);
        let word = word.trim_matches('-');
        if known.contains(word) {
            words.insert(word.to_owned());
        } else if others < WORD_LIMIT && word.parse::<DeploymentName>().is_ok() {
            others += usize::from(words.insert(word.to_owned()));
        }
    }
    words
}

/// A document of a file.
struct Document {
    /// Which, from 0.
    index: usize,
    outline: Node,
    standing: Standing,
}

/// Whose a document is.
enum Standing {
    Empty,
    Ours,
    Foreign {
        api_version: String,
        kind: Option<String>,
    },
    Wrong(Complaint),
}

/// A finding whose place is still a number.
#[derive(Clone)]
struct Complaint {
    number: usize,
    path: Option<String>,
    message: String,
    hint: Option<String>,
    /// The place, where it is known better than by number.
    place: Option<Place>,
}

fn read(file: &Path, bytes: &[u8]) -> Result<Manifests, Vec<Problem>> {
    let text = match text::text_of(bytes) {
        Ok(text) => text,
        Err(refusal) => {
            let lossy = String::from_utf8_lossy(text::without_mark(bytes));
            let (line, column) = Lines::of(lossy.get(..refusal.offset).unwrap_or_default()).end();
            let finding = Finding {
                place: Some(Place::new(&Lines::of(&lossy), line, column)),
                path: None,
                message: refusal.message,
                hint: refusal.hint,
            };
            return Err(vec![diagnose::problem(
                file,
                finding,
                ProblemKind::Invalid,
                None,
            )]);
        }
    };
    let lines = Lines::of(text);
    let (documents, broken) = outlines(text, &lines);
    let mut complaints: Vec<(&Document, Complaint)> = Vec::new();
    let mut manifests = Manifests::default();
    for document in &documents {
        match &document.standing {
            Standing::Empty => {}
            Standing::Ours => {
                complaints.extend(doubled(document).map(|complaint| (document, complaint)))
            }
            Standing::Foreign { api_version, kind } => manifests.ignored.push(Ignored {
                document: document.index,
                api_version: diagnose::clean(api_version),
                kind: kind.as_deref().map(diagnose::clean),
            }),
            Standing::Wrong(complaint) => complaints.push((document, complaint.clone())),
        }
        if complaints.len() >= PROBLEM_LIMIT {
            break;
        }
    }
    // Types are looked at only where the YAML is right: the first of two values under one key is no help.
    if complaints.is_empty() && broken.is_none() {
        for (document, yaml) in documents.iter().zip(Deserializer::from_str(text)) {
            if !matches!(document.standing, Standing::Ours) {
                continue;
            }
            match deployment(file, document, &lines, yaml) {
                Ok(deployment) => manifests.deployments.push(deployment),
                Err(found) => {
                    complaints.extend(found.into_iter().map(|complaint| (document, complaint)))
                }
            }
            if complaints.len() >= PROBLEM_LIMIT {
                break;
            }
        }
    }
    let mut problems = problems(file, &lines, complaints);
    problems
        .extend(broken.map(|finding| diagnose::problem(file, finding, ProblemKind::Invalid, None)));
    if !problems.is_empty() {
        return Err(problems);
    }
    let names = documents
        .iter()
        .filter(|document| matches!(document.standing, Standing::Ours))
        .map(|document| (document.index, document.outline.number_at("metadata.name")))
        .collect();
    let found = locate_each(text, &names);
    manifests.places = found
        .values()
        .map(|&(line, column)| Place::new(&lines, line, column))
        .collect();
    keep_first(file, &mut manifests);
    Ok(manifests)
}

/// The documents of a file up to the first that is not YAML.
fn outlines(text: &str, lines: &Lines<'_>) -> (Vec<Document>, Option<Finding>) {
    let mut walk = Walk::new();
    let mut documents = Vec::new();
    for (index, yaml) in Deserializer::from_str(text).enumerate() {
        match walk.outline(yaml) {
            // What follows a syntax error means nothing, and the parser would repeat the error for ever.
            Err(error) => {
                let mut finding = diagnose::syntax(lines, &error);
                if let Some(excess) = walk.excess() {
                    (finding.message, finding.hint) = (excess, Some("split the file".to_owned()));
                }
                return (documents, Some(finding));
            }
            Ok(outline) => documents.push(Document {
                index,
                standing: standing(&outline),
                outline,
            }),
        }
    }
    (documents, None)
}

/// Decides whose a document is.
fn standing(outline: &Node) -> Standing {
    let wrong = |path: Option<&str>, message: &str, hint: &str| {
        Standing::Wrong(Complaint {
            number: outline.number_at(path.unwrap_or_default()),
            path: path.map(str::to_owned),
            message: message.to_owned(),
            hint: Some(hint.to_owned()),
            place: None,
        })
    };
    match outline.shape {
        Shape::Null => return Standing::Empty,
        Shape::Mapping(_) => {}
        Shape::Scalar(_) | Shape::Sequence(_) => {
            return wrong(
                None,
                "a manifest is a mapping with apiVersion, kind, metadata and spec",
                "begin it with `apiVersion: evenkeel.dev/v1alpha1`",
            );
        }
    }
    let Some(version) = outline.get("apiVersion") else {
        let hint = "add `apiVersion: evenkeel.dev/v1alpha1`";
        return wrong(
            Some("apiVersion"),
            "the field `apiVersion` is missing",
            hint,
        );
    };
    let Some(api_version) = version.value.text() else {
        let hint = "write `apiVersion: evenkeel.dev/v1alpha1`";
        return wrong(Some("apiVersion"), "expected a text", hint);
    };
    let kind = outline.get("kind").and_then(|entry| entry.value.text());
    let group = api_version
        .split_once('/')
        .map_or(api_version, |(group, _)| group);
    if group == API_GROUP {
        return Standing::Ours;
    }
    // Somebody who misspells the group would otherwise wait for instances that never come.
    if kind == Some("ModelDeployment") && diagnose::nearest(group, [API_GROUP]).is_some() {
        return Standing::Wrong(Complaint {
            number: version.value.number,
            path: Some("apiVersion".to_owned()),
            message: format!("unknown group `{group}`"),
            hint: Some("did you mean `evenkeel.dev/v1alpha1`?".to_owned()),
            place: None,
        });
    }
    if kind.is_none() {
        let hint = "every document has a kind; evenkeel's is `kind: ModelDeployment`";
        return wrong(Some("kind"), "the field `kind` is missing", hint);
    }
    Standing::Foreign {
        api_version: api_version.to_owned(),
        kind: kind.map(str::to_owned),
    }
}

fn last_step(path: &str) -> &str {
    path.rsplit_once('.').map_or(path, |(_, last)| last)
}

/// The keys that stand twice in one mapping: the parser itself would let the second silently win.
fn doubled(document: &Document) -> impl Iterator<Item = Complaint> {
    let doubled = document.outline.doubled_keys().into_iter();
    doubled.take(PROBLEM_LIMIT).map(|(path, number)| Complaint {
        number,
        message: format!("the key `{}` is there twice", last_step(&path)),
        path: Some(path),
        hint: Some("keep one".to_owned()),
        place: None,
    })
}

/// The deployment of a document, or everything that is wrong with it.
fn deployment(
    file: &Path,
    document: &Document,
    lines: &Lines<'_>,
    yaml: Deserializer<'_>,
) -> Result<Deployment, Vec<Complaint>> {
    let manifest = Manifest::deserialize(yaml).map_err(|error| {
        let (finding, better) = diagnose::typed(lines, &document.outline, &error);
        let number = better.map(|path| document.outline.number_at(&path));
        vec![Complaint {
            // The parser's own place is used for keys, which it alone knows.
            number: number.unwrap_or_default(),
            place: finding.place.filter(|_| number.is_none()),
            path: finding.path,
            message: finding.message,
            hint: finding.hint,
        }]
    })?;
    let source = Source {
        file: file.to_owned(),
        document: document.index,
        revision: None,
    };
    Deployment::from_manifest(manifest, source).map_err(|problems| {
        let complaint = |SpecProblem {
                             path,
                             message,
                             hint,
                         }| Complaint {
            number: document.outline.number_at(&path),
            path: Some(path),
            message,
            hint,
            place: None,
        };
        problems.into_iter().map(complaint).collect()
    })
}

/// The complaints with their places.
fn problems(
    file: &Path,
    lines: &Lines<'_>,
    complaints: Vec<(&Document, Complaint)>,
) -> Vec<Problem> {
    // One walk over the file finds where the documents begin; then each place costs a walk over its document alone.
    let roots = complaints
        .iter()
        .map(|(document, _)| (document.index, document.outline.number))
        .collect();
    let begins = locate_each(lines.from_line(1), &roots);
    let mut problems = Vec::new();
    for (document, complaint) in complaints.into_iter().take(PROBLEM_LIMIT) {
        let begin = begins.get(&document.index).map_or(1, |&(line, _)| line);
        let place = complaint.place.or_else(|| {
            let yaml = Deserializer::from_str(lines.from_line(begin)).next()?;
            let at = outline::locate(yaml, complaint.number)?;
            Some(Place::new(lines, begin - 1 + at.line(), at.column()))
        });
        let finding = Finding {
            place: place.or_else(|| Some(Place::new(lines, begin, 1))),
            path: complaint.path,
            message: complaint.message,
            hint: complaint.hint,
        };
        let name = document
            .outline
            .at("metadata.name")
            .and_then(|name| name.text()?.parse().ok());
        problems.push(diagnose::problem(file, finding, ProblemKind::Invalid, name));
    }
    problems
}

/// The line and column of one key or value in each of some documents: one walk over the file, however many.
fn locate_each(text: &str, numbers: &BTreeMap<usize, usize>) -> BTreeMap<usize, (usize, usize)> {
    let documents = numbers.last_key_value().map_or(0, |(last, _)| last + 1);
    Deserializer::from_str(text)
        .enumerate()
        .take(documents)
        .filter_map(|(index, yaml)| {
            let at = outline::locate(yaml, *numbers.get(&index)?);
            Some((index, at.map_or((1, 1), |at| (at.line(), at.column()))))
        })
        .collect()
}

/// Of documents with one name the first keeps it.
fn keep_first(file: &Path, manifests: &mut Manifests) {
    let deployments = std::mem::take(&mut manifests.deployments);
    let places = std::mem::take(&mut manifests.places);
    let mut seen: BTreeMap<DeploymentName, usize> = BTreeMap::new();
    for (deployment, place) in deployments.into_iter().zip(places) {
        match seen.get(&deployment.name) {
            None => {
                seen.insert(deployment.name.clone(), place.line);
                manifests.deployments.push(deployment);
                manifests.places.push(place);
            }
            Some(first) => {
                let other = format!("line {first} of this file");
                manifests
                    .duplicates
                    .push(duplicate(file, &deployment.name, &place, &other));
            }
        }
    }
}

/// The problem of a document whose name another one has.
pub(super) fn duplicate(file: &Path, name: &DeploymentName, place: &Place, other: &str) -> Problem {
    let finding = Finding {
        place: Some(place.clone()),
        path: Some("metadata.name".to_owned()),
        message: format!("the name `{name}` belongs to the document in {other}"),
        hint: Some("give this one another name, or take one of the two out".to_owned()),
    };
    diagnose::problem(file, finding, ProblemKind::Duplicate, Some(name.clone()))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use insta::assert_snapshot;
    use proptest::prelude::*;

    use super::*;

    fn reports<const N: usize>(texts: [String; N]) -> String {
        texts.map(|text| report(&text)).join("\n\n")
    }

    fn report(text: &str) -> String {
        let problems = read_manifests(Path::new("chat.yaml"), text.as_bytes()).unwrap_err();
        let reports: Vec<_> = problems
            .iter()
            .map(|problem| problem.report.as_str())
            .collect();
        reports.join("\n\n")
    }

    fn manifest(spec: &str) -> String {
        format!(
            "apiVersion: evenkeel.dev/v1alpha1\nkind: ModelDeployment\nmetadata:\n  name: chat\nspec:\n{spec}"
        )
    }

    fn accepted(text: &str) -> Manifests {
        read_manifests(Path::new("chat.yaml"), text.as_bytes()).unwrap_or_else(|problems| {
            panic!("{}", problems[0].report);
        })
    }

    #[test]
    fn a_file_gives_its_deployments_and_names_what_is_not_evenkeels() {
        let text = format!(
            "# nothing\n---\n{}---\napiVersion: apps/v1\nkind: Deployment\nspec: !Ref {{a: b}}\n---\n---\n{}",
            manifest("  engine: echo\n"),
            manifest("  engine: echo\n").replace("chat", "embed"),
        );
        let manifests = accepted(&text);
        let names: Vec<_> = manifests
            .deployments
            .iter()
            .map(|d| (d.name.as_str(), d.source.document))
            .collect();
        assert_eq!(names, [("chat", 0), ("embed", 3)]);
        assert_eq!(manifests.places[0].line, 6);
        assert_eq!(
            manifests.ignored,
            [Ignored {
                document: 1,
                api_version: "apps/v1".to_owned(),
                kind: Some("Deployment".to_owned()),
            }]
        );
        assert!(manifests.duplicates.is_empty());
    }

    #[test]
    fn an_empty_file_holds_nothing() {
        for empty in [
            "",
            "\n",
            "# comment\n",
            "---\n",
            "---\n---\n...\n",
            "\u{feff}",
            "null\n",
        ] {
            assert_eq!(accepted(empty), Manifests::default(), "{empty:?}");
        }
    }

    #[test]
    fn json_and_windows_line_ends_and_a_byte_order_mark_are_read() {
        let json = r#"{"apiVersion": "evenkeel.dev/v1alpha1", "kind": "ModelDeployment",
            "metadata": {"name": "chat"}, "spec": {"engine": "echo", "args": ["a\/b\u00e4"]}}"#;
        assert_eq!(accepted(json).deployments[0].spec.args, ["a/bä"]);
        let windows = format!(
            "\u{feff}{}",
            manifest("  engine: echo\n").replace('\n', "\r\n")
        );
        assert_eq!(accepted(&windows).deployments.len(), 1);
        let wrong = format!(
            "\u{feff}{}",
            manifest("  engine: ecko\n").replace('\n', "\r\n")
        );
        let problems = read_manifests(Path::new("a.yaml"), wrong.as_bytes()).unwrap_err();
        assert_eq!((problems[0].line, problems[0].column), (Some(6), Some(11)));
        assert!(!problems[0].report.contains('\r'));
    }

    #[test]
    fn one_wrong_document_makes_the_whole_file_unaccepted() {
        let text = format!(
            "{}---\n{}",
            manifest("  engine: echo\n"),
            manifest("  engine: nope\n").replace("chat", "b")
        );
        let problems = read_manifests(Path::new("a.yaml"), text.as_bytes()).unwrap_err();
        assert_eq!(problems.len(), 1);
        assert_eq!(
            problems[0].deployment.as_ref().map(DeploymentName::as_str),
            Some("b")
        );
        assert_eq!(problems[0].kind, ProblemKind::Invalid);
    }

    #[test]
    fn each_wrong_document_is_reported() {
        let text = format!("{0}---\n{0}", manifest("  engine: nope\n"));
        let lines: Vec<_> = read_manifests(Path::new("a.yaml"), text.as_bytes())
            .unwrap_err()
            .iter()
            .map(|problem| problem.line)
            .collect();
        assert_eq!(lines, [Some(6), Some(13)]);
    }

    #[test]
    fn of_two_documents_with_one_name_the_first_keeps_it() {
        let text = format!(
            "{}---\n{}",
            manifest("  engine: echo\n"),
            manifest("  engine: echo\n  priority: 2\n")
        );
        let manifests = accepted(&text);
        assert_eq!(manifests.deployments.len(), 1);
        assert_eq!(manifests.deployments[0].spec.priority, 0);
        let [duplicate] = manifests.duplicates.as_slice() else {
            panic!("{:?}", manifests.duplicates);
        };
        assert_eq!(
            (duplicate.kind, duplicate.line),
            (ProblemKind::Duplicate, Some(11))
        );
    }

    #[test]
    fn extension_keys_hold_anchors() {
        let text = format!(
            "x-args: &args [--a, --b]\n{}",
            manifest("  engine: echo\n  args: *args\n")
        );
        assert_eq!(accepted(&text).deployments[0].spec.args, ["--a", "--b"]);
    }

    #[test]
    fn a_typo_in_a_key_is_shown_with_what_was_meant() {
        assert_snapshot!(reports([
            manifest("  engine: vllm\n  options:\n    maxContextLenght: 32768\n"),
            manifest("  engine: echo\n  tensorParallel: 2\n"),
            manifest("  engine: echo\n").replace("metadata", "metdata"),
            manifest("  <<: *x\n  engine: echo\n").replace("apiV", "x-x: &x {}\napiV"),
        ]));
    }

    #[test]
    fn a_wrong_word_is_shown_with_the_right_ones() {
        assert_snapshot!(reports([
            manifest("  engine: vlm\n"),
            manifest("  engine: echo\n  restartPolicy: sometimes\n"),
            manifest("  engine:\n"),
            manifest("  engine: echo\n").replace("v1alpha1", "v1"),
            manifest("  engine: echo\n").replace("evenkeel.dev", "evenkeel.io"),
        ]));
    }

    #[test]
    fn a_wrong_type_is_shown_with_the_right_one() {
        assert_snapshot!(reports([
            manifest("  engine: echo\n  replicas: \"2\"\n"),
            manifest("  engine: echo\n  paused: yes\n"),
            manifest("  engine: echo\n  args: --a --b\n"),
            manifest("  engine: echo\n  port: 70000\n"),
            manifest("  engine: echo\n  port: 0\n"),
            manifest("  engine: {vllm: 1}\n"),
            manifest("  engine: echo\n").replace("name: chat", "name: Chat_1"),
            "- a\n- b\n".to_owned(),
        ]));
    }

    #[test]
    fn a_missing_field_is_shown_at_its_parent() {
        assert_snapshot!(reports([
            manifest("  priority: 1\n"),
            "kind: ModelDeployment\nmetadata: {name: a}\n".to_owned(),
            "apiVersion: evenkeel.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: a}\n"
                .to_owned(),
            "apiVersion: evenkeel.dev/v1alpha1\nkind: ModelDeployment\nspec: {engine: echo}\n"
                .to_owned(),
        ]));
    }

    #[test]
    fn all_that_is_wrong_with_a_spec_is_shown_at_once() {
        assert_snapshot!(reports([manifest(
            "  engine: vllm\n  workingDir: models\n  env:\n    - name: A=B\n      value: x\n    - {name: A, value: b, valueFrom: {file: /f}}\n  docker: {}\n  options: {memoryFraction: 2.0}\n"
        ),]));
    }

    #[test]
    fn what_is_no_yaml_is_shown_where_it_ends_to_be() {
        assert_snapshot!(reports([
            manifest("  engine: echo\n   priority: 1\n"),
            manifest("  engine: echo\n priority: 1\n"),
            manifest("  engine: echo\n\tpriority: 1\n"),
            manifest("  engine: echo\n  args: [a, b\n"),
            manifest("  engine: echo\n  binary: \"a\n"),
            manifest("  engine: echo\n  priority 1\n"),
            manifest("  engine: echo\n  binary: *x\n"),
            manifest("  engine: echo\n  binary: @x\n"),
        ]));
    }

    #[test]
    fn doubled_keys_are_errors_in_every_mapping() {
        assert_snapshot!(reports([
            manifest("  engine: echo\n  priority: 1\n  priority: 2\n"),
            manifest("  engine: echo\n")
                .replace("spec:", "  labels:\n    a: 1\n    \"a\": 2\nspec:"),
        ]));
    }

    #[test]
    fn bytes_that_are_no_text_are_shown_too() {
        assert_snapshot!(reports(["apiVersion: a\u{0}b\n".to_owned(),]));
        let problems = read_manifests(Path::new("a.yaml"), b"\xFF\xFEa\0:\0").unwrap_err();
        assert_snapshot!(problems[0].report);
        let problems = read_manifests(Path::new("a.yaml"), b"a: b\nc: \xC3(\n").unwrap_err();
        assert_snapshot!(problems[0].report);
    }

    /// Debug builds are some ten times slower than what W9 asks of release builds.
    fn refused_in_time(name: &str, bytes: &[u8]) {
        let begin = Instant::now();
        let problems = read_manifests(Path::new("bomb.yaml"), bytes).expect_err(name);
        let took = begin.elapsed();
        eprintln!("{name}: {took:?}: {}", problems[0]);
        assert!(took < Duration::from_secs(5), "{name}: {took:?}");
        for problem in &problems {
            assert!(
                !problem.message.contains("gave up"),
                "{name}: {}",
                problem.message
            );
            assert!(
                problem.report.len() < 4096,
                "{name}: {} bytes",
                problem.report.len()
            );
        }
    }

    #[test]
    fn hostile_yaml_gets_an_error_in_bounded_time() {
        let mut laughs = "a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol, lol]\n".to_owned();
        for n in 1..20 {
            let last = format!("*a{},", n - 1);
            laughs += &format!("a{n}: &a{n} [{}]\n", last.repeat(10));
        }
        let scalar = "x".repeat(1 << 20);
        let indented: String = (0..1400)
            .map(|n| format!("{}a:\n", " ".repeat(n)))
            .collect();
        for (name, text) in [
            ("alias bomb", laughs),
            (
                "copied text",
                manifest(&format!(
                    "  engine: echo\n  args: [&a {}, {}]\n",
                    &scalar[..500_000],
                    "*a,".repeat(100_000)
                )),
            ),
            ("alias of itself", "a: &a [*a, *a]\n".to_owned()),
            ("10,000 brackets", "[".repeat(10_000)),
            (
                "10,000 brackets, closed",
                "[".repeat(10_000) + &"]".repeat(10_000),
            ),
            ("300 brackets, closed", "[".repeat(300) + &"]".repeat(300)),
            ("10,000 braces", "{a: ".repeat(10_000)),
            ("10,000 items", "- ".repeat(10_000)),
            ("10,000 keys", "? ".repeat(10_000)),
            ("indented", indented),
            ("brackets for ever", "[".repeat(1 << 20)),
            ("open and close", "[".repeat(400) + &("],[".repeat(60_000))),
            ("scalar", scalar.clone()),
            (
                "scalar as name",
                format!(
                    "apiVersion: evenkeel.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {{name: {scalar}}}\nspec: {{engine: echo}}\n"
                ),
            ),
            (
                "scalar as engine",
                manifest(&format!("  engine: {scalar}\n")),
            ),
            ("scalar as key", manifest(&format!("  ? {scalar}\n  : 1\n"))),
            (
                "scalar as number",
                manifest(&format!("  engine: echo\n  replicas: \"{scalar}\"\n")),
            ),
            (
                "digits",
                manifest(&format!(
                    "  engine: echo\n  replicas: {}\n",
                    "9".repeat(1 << 20)
                )),
            ),
            ("quote", format!("a: \"{scalar}")),
            ("documents", "---\na\n".repeat(50_000)),
            ("empty documents", format!("{}a", "---\n".repeat(80_000))),
            (
                "problems",
                format!("{0}---\n", manifest("  engine: nope\n")).repeat(1000),
            ),
            ("directives", "%TAG !a! b\n".repeat(90_000)),
            (
                "anchors",
                format!(
                    "a: [{}]\n",
                    (0..50_000).map(|n| format!("&a{n} b,")).collect::<String>()
                ),
            ),
            ("tags", "!a ".repeat(300_000)),
            ("NUL bytes", "\0".repeat(1 << 20)),
            (
                "many names",
                format!("{}\nkind: 1", "a: 1\n".repeat(40_000)),
            ),
        ] {
            refused_in_time(name, text.as_bytes());
        }
    }

    #[test]
    fn a_megabyte_of_good_manifests_is_read() {
        let text: String = (0..8000)
            .map(|n| manifest("  engine: echo\n").replace("chat", &format!("chat-{n}")) + "---\n")
            .collect();
        let manifests = accepted(&text);
        assert_eq!(manifests.deployments.len(), 8000);
        assert_eq!(manifests.places[7999].line, 7999 * 7 + 4);
    }

    #[test]
    fn words_that_could_be_names_are_found() {
        let known = BTreeSet::from(["qwen3-8b", "b"]);
        let words = words_of(b"name: qwen3-8b\n-b- {c} /models/Dee \xFF", &known);
        for word in ["qwen3-8b", "b", "c", "models", "name", "ee"] {
            assert!(words.contains(word), "{word} in {words:?}");
        }
        let wide: Vec<u8> = "qwen3-8b".bytes().flat_map(|b| [b, 0]).collect();
        assert!(words_of(&wide, &known).contains("qwen3-8b"));
        let many: String = (0..10_000).map(|n| format!("w{n} ")).collect();
        let words = words_of(format!("{many} qwen3-8b").as_bytes(), &known);
        assert!(words.contains("qwen3-8b") && words.len() <= WORD_LIMIT + 2);
    }

    /// Any YAML value, with words of ours among the others so that the reading gets far.
    fn values() -> impl Strategy<Value = serde_yaml::Value> {
        use serde_yaml::Value;
        let word = prop_oneof![
            Just("name".to_owned()),
            Just("engine".to_owned()),
            Just("echo".to_owned()),
            Just("env".to_owned()),
            Just("args".to_owned()),
            Just("options".to_owned()),
            Just("model".to_owned()),
            Just("path".to_owned()),
            "[a-z]{1,8}",
            ".*",
        ];
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            word.clone().prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 6, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::vec((word.clone(), inner), 0..6).prop_map(|entries| {
                    Value::Mapping(
                        entries
                            .into_iter()
                            .map(|(key, value)| (Value::from(key), value))
                            .collect(),
                    )
                }),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(192))]

        #[test]
        fn any_bytes_are_read_the_same_way_twice(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let file = Path::new("a.yaml");
            prop_assert_eq!(read_manifests(file, &bytes), read_manifests(file, &bytes));
        }

        #[test]
        fn any_text_of_yamls_characters_is_read_without_panic(text in r"[-:?,\[\]{}&*!|>'%@#a \n\t\x22]{0,60}") {
            let file = Path::new("a.yaml");
            for text in [text.clone(), manifest(&format!("  engine: echo\n  args:\n{text}"))] {
                if let Err(problems) = read_manifests(file, text.as_bytes()) {
                    prop_assert!(problems.iter().all(|problem| !problem.message.contains("gave up")), "{problems:?}");
                }
            }
        }

        #[test]
        fn any_valid_yaml_is_accepted_or_explained(spec in values(), metadata in values()) {
            let mut document = serde_yaml::Mapping::new();
            document.insert("apiVersion".into(), "evenkeel.dev/v1alpha1".into());
            document.insert("kind".into(), "ModelDeployment".into());
            document.insert("metadata".into(), metadata);
            document.insert("spec".into(), spec);
            let text = serde_yaml::to_string(&document).unwrap();
            match read_manifests(Path::new("a.yaml"), text.as_bytes()) {
                Ok(manifests) => prop_assert_eq!(manifests.deployments.len(), manifests.places.len()),
                Err(problems) => {
                    prop_assert!(!problems.is_empty());
                    for problem in problems {
                        prop_assert!(problem.line.is_some(), "{}\n{}", problem, text);
                        prop_assert!(!problem.message.contains("gave up"), "{}", problem.message);
                    }
                }
            }
        }
    }
}
