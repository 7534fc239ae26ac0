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
    if let Some(finding) = unfit(file, bytes) {
        return Err(vec![diagnose::problem(
            file,
            finding,
            ProblemKind::Invalid,
            None,
        )]);
    }
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

/// What is wrong with a file before anything of it is parsed.
fn unfit(file: &Path, bytes: &[u8]) -> Option<Finding> {
    let (message, hint) = if file.to_str().is_none() {
        (
            "its name is not UTF-8",
            "rename it: records and output are JSON",
        )
    } else if bytes.iter().all(u8::is_ascii_whitespace) {
        // A disk that was full when it was saved leaves such a file, and an editor one for a moment.
        (
            "it is empty",
            "delete the file if nothing of it is wanted any more",
        )
    } else {
        return None;
    };
    Some(Finding {
        place: None,
        path: None,
        message: message.to_owned(),
        hint: Some(hint.to_owned()),
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
                complaints.extend(doubled(document).map(|complaint| (document, complaint)));
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
                    complaints.extend(found.into_iter().map(|complaint| (document, complaint)));
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
    let begins = locate_each(lines.rest_at(1), &roots);
    let mut problems = Vec::new();
    for (document, complaint) in complaints.into_iter().take(PROBLEM_LIMIT) {
        let begin = begins.get(&document.index).map_or(1, |&(line, _)| line);
        let place = complaint.place.or_else(|| {
            let yaml = Deserializer::from_str(lines.rest_at(begin)).next()?;
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
mod tests;
