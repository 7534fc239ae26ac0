//! The direction of dependency, read from the `use` lines and paths of the source: `cli → controller → {effects, plan}`,
//! `plan → {engine, words}`, `effects → words`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

const WORDS: &[&str] = &[
    "names", "manifest", "spec", "failure", "event", "record", "desired", "observed", "order",
];

/// What effects share of the system.
const SYSTEM: &[&str] = &["procfs", "files"];

/// A module, and what it may know beside the words.
const MAY_KNOW: &[(&str, &[&str])] = &[
    ("names", &[]),
    ("manifest", &[]),
    ("spec", &[]),
    ("failure", &[]),
    ("event", &[]),
    ("record", &[]),
    ("desired", &[]),
    ("observed", &[]),
    ("order", &[]),
    ("engine", &[]),
    ("plan", &["engine"]),
    ("source", SYSTEM),
    ("store", SYSTEM),
    ("launch", &["procfs", "files", "probe"]),
    ("probe", &["procfs", "files", "launch"]),
    ("devices", SYSTEM),
    ("journal", SYSTEM),
    ("clock", &[]),
    ("procfs", &[]),
    ("files", &[]),
    (
        "controller",
        &[
            "engine", "plan", "source", "store", "launch", "probe", "devices", "journal", "clock",
        ],
    ),
    ("echo", &[]),
];

/// Modules that are tests, and may know everything.
const TESTS: &[&str] = &["testing", "sim"];

struct Source {
    module: String,
    path: PathBuf,
    /// Without comments, and without the tests at the end of the file.
    code: String,
}

fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut folders = vec![root.clone()];
    let mut sources = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let within = path.strip_prefix(&root).unwrap();
            let is_test = within.components().any(|part| {
                matches!(
                    part.as_os_str().to_str(),
                    Some("tests" | "tests.rs" | "check" | "check.rs")
                )
            });
            if path.extension().is_none_or(|extension| extension != "rs") || is_test {
                continue;
            }
            let first = within
                .components()
                .next()
                .unwrap()
                .as_os_str()
                .to_string_lossy()
                .into_owned();
            let module = first.trim_end_matches(".rs").to_owned();
            let text = fs::read_to_string(&path).unwrap();
            let code: Vec<&str> = text
                .lines()
                .take_while(|line| *line != "mod tests {")
                .map(|line| line.split("//").next().unwrap_or_default())
                .collect();
            sources.push(Source {
                module,
                path,
                code: code.join("\n"),
            });
        }
    }
    assert!(sources.len() > 40, "the source was found");
    sources
}

/// The modules of this crate that a piece of code names.
fn known(code: &str) -> BTreeSet<String> {
    let is_word = |c: char| c.is_ascii_lowercase() || c == '_';
    code.match_indices("crate::")
        .map(|(at, prefix)| &code[at + prefix.len()..])
        .map(|rest| rest.chars().take_while(|&c| is_word(c)).collect::<String>())
        .filter(|module| !module.is_empty())
        .collect()
}

#[test]
fn every_module_knows_only_what_lies_below_it() {
    let mut wrong = Vec::new();
    for Source { module, path, code } in sources() {
        if matches!(module.as_str(), "lib" | "main" | "cli") || TESTS.contains(&module.as_str()) {
            continue;
        }
        let (_, beside) = MAY_KNOW
            .iter()
            .find(|(name, _)| *name == module)
            .unwrap_or_else(|| {
                panic!("`{module}` has no place in the layers: give it one here and in lib.rs")
            });
        for other in known(&code) {
            let allowed = other == module
                || WORDS.contains(&other.as_str())
                || beside.contains(&other.as_str());
            if !allowed {
                wrong.push(format!("{} knows `{other}`", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn only_source_cli_and_the_declared_devices_know_yaml() {
    for Source { module, path, code } in sources() {
        let may =
            matches!(module.as_str(), "source" | "cli") || path.ends_with("devices/declared.rs");
        assert!(
            may || !code.contains("serde_yaml"),
            "{} knows YAML",
            path.display()
        );
    }
}

#[test]
fn only_the_controller_writes_records() {
    for Source { module, path, code } in sources() {
        let may =
            matches!(module.as_str(), "store" | "controller") || TESTS.contains(&module.as_str());
        assert!(
            may || !code.contains("Records"),
            "{} writes records",
            path.display()
        );
    }
}

#[test]
fn only_launchers_and_the_words_know_what_is_inside_a_handle() {
    for Source { module, path, code } in sources() {
        let may =
            matches!(module.as_str(), "launch" | "record") || TESTS.contains(&module.as_str());
        assert!(
            may || !code.contains("ProcessHandle"),
            "{} looks into a handle",
            path.display()
        );
    }
}

#[test]
fn words_knowledge_and_the_pass_are_synchronous_and_read_no_clock() {
    for Source { module, path, code } in sources() {
        let is_pure = WORDS.contains(&module.as_str())
            || matches!(module.as_str(), "engine" | "plan")
            || path.ends_with("controller/step.rs");
        if !is_pure {
            continue;
        }
        for effect in [
            "async ",
            "tokio",
            "std::fs",
            "std::env",
            "Timestamp::now",
            "Instant::now",
            "tracing",
        ] {
            assert!(!code.contains(effect), "{} has `{effect}`", path.display());
        }
    }
}

#[test]
fn the_top_level_stays_as_it_is() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let expected = [
        "Cargo.toml",
        "Cargo.lock",
        "src",
        "schemas",
        "examples",
        "tests",
        "benches",
        "README.md",
        "LICENSE",
        "target",
    ];
    for entry in fs::read_dir(root).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let is_expected = name.starts_with('.') || expected.contains(&name.as_str());
        assert!(
            is_expected,
            "{name} lies at the top level of the repository"
        );
    }
}
