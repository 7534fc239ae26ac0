//! The README tells the truth: its manifests are accepted, its verbs exist, its set-up is two commands. That the two
//! commands work is tried by `.ci/run`.

mod support;

use std::path::Path;

use evenkeel::source::read_manifests;
use support::process::evenkeel;

fn readme() -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap()
}

/// The fenced blocks of a language.
fn blocks(language: &str) -> Vec<String> {
    let readme = readme();
    let fence = format!("```{language}\n");
    readme
        .split(&fence)
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap_or_default().to_owned())
        .collect()
}

#[test]
fn every_manifest_in_it_is_accepted() {
    let manifests = blocks("yaml");
    assert!(!manifests.is_empty());
    for manifest in manifests {
        let read = read_manifests(Path::new("README.md"), manifest.as_bytes()).unwrap();
        assert_eq!(read.deployments.len(), 1, "{manifest}");
    }
}

#[test]
fn its_set_up_is_two_commands() {
    let commands = blocks("sh");
    assert_eq!(
        commands[0].trim(),
        "cargo run --release -- run examples/quickstart"
    );
    assert_eq!(commands[1].trim(), "cargo test");
}

#[test]
fn every_verb_in_it_exists() {
    let readme = readme();
    let verbs: std::collections::BTreeSet<&str> = readme
        .match_indices("evenkeel ")
        .map(|(at, name)| &readme[at + name.len()..])
        .filter_map(|rest| rest.split(|c: char| !c.is_ascii_lowercase()).next())
        .filter(|word| {
            matches!(
                *word,
                "run"
                    | "validate"
                    | "diff"
                    | "get"
                    | "describe"
                    | "logs"
                    | "events"
                    | "wait"
                    | "down"
                    | "schema"
                    | "version"
                    | "echo"
            )
        })
        .collect();
    assert!(verbs.len() >= 4, "{verbs:?}");
    for verb in verbs {
        let output = std::process::Command::new(evenkeel())
            .args([verb, "--help"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{verb}");
    }
}
