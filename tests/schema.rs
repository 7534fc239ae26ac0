//! The schema that editors use, the parser, the examples and the samples of what is wrong hold together.

use std::fs;
use std::path::{Path, PathBuf};

use evenkeel::source::read_manifests;
use serde::Deserialize;
use serde_json::Value;

const SCHEMA: &str = "schemas/modeldeployment.v1alpha1.json";

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn schema() -> Value {
    serde_json::from_str(&evenkeel::cli::schema::schema()).unwrap()
}

fn yaml_files(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(yaml_files(&path));
        } else if path.extension().is_some_and(|ending| ending == "yaml") {
            files.push(path);
        }
    }
    files.sort();
    assert!(!files.is_empty(), "{} holds no YAML", folder.display());
    files
}

/// The documents of a file as JSON; none if it is not YAML.
fn documents(text: &str) -> Option<Vec<Value>> {
    serde_yaml::Deserializer::from_str(text)
        .map(|document| Value::deserialize(document).ok())
        .collect()
}

/// Calls a function with the path and schema of each field.
fn each_field(schema: &Value, root: &Value, path: &str, visit: &mut dyn FnMut(&str, &Value)) {
    if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
        let definition = root.pointer(reference.trim_start_matches('#')).unwrap();
        each_field(definition, root, path, visit);
    }
    for (name, property) in schema
        .get("properties")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
    {
        let path = format!("{path}.{name}");
        visit(&path, property);
        each_field(property, root, &path, visit);
    }
    if let Some(items) = schema.get("items") {
        each_field(items, root, &format!("{path}[]"), visit);
    }
    for alternative in schema
        .get("anyOf")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
    {
        each_field(alternative, root, path, visit);
    }
}

#[test]
fn the_schema_file_is_that_of_the_types() {
    let file = fs::read_to_string(root().join(SCHEMA)).unwrap_or_default();
    assert!(
        file == evenkeel::cli::schema::schema(),
        "{SCHEMA} is not up to date; make it anew: evenkeel schema > {SCHEMA}"
    );
}

#[test]
fn the_schema_is_one() {
    let schema = schema();
    jsonschema::draft202012::meta::validate(&schema).unwrap();
    assert_eq!(
        schema["$schema"],
        "https://json-schema.org/draft/2020-12/schema"
    );
    assert!(
        schema["$id"]
            .as_str()
            .unwrap()
            .ends_with("/modeldeployment.v1alpha1.json")
    );
    assert_eq!(schema["title"], "ModelDeployment");
    assert!(evenkeel::cli::schema::schema().ends_with("}\n"));
}

#[test]
fn every_field_has_a_description_and_those_of_spec_say_what_a_change_causes() {
    let schema = schema();
    let mut fields = 0;
    each_field(&schema, &schema, "", &mut |path, field| {
        fields += 1;
        let description = field
            .get("description")
            .and_then(Value::as_str)
            .unwrap_or_default();
        assert!(!description.is_empty(), "{path} has no description");
        let is_direct = path
            .strip_prefix(".spec.")
            .is_some_and(|rest| !rest.contains(['.', '[']));
        let class = field.get("x-evenkeel-change").and_then(Value::as_str);
        match class {
            Some(class) => assert!(
                ["live", "restart", "re-lease"].contains(&class),
                "{path}: {class}"
            ),
            None => assert!(!is_direct, "{path} does not say what a change causes"),
        }
    });
    assert!(fields > 50, "{fields} fields");
}

#[test]
fn the_classes_of_the_schema_are_those_of_the_restart_key() {
    // Each changes one field of the same manifest; a field that no sample changes is caught by the count.
    let schema = schema();
    let mut classes = std::collections::BTreeMap::new();
    each_field(&schema, &schema, "", &mut |path, field| {
        let name = path
            .strip_prefix(".spec.")
            .filter(|name| !name.contains(['.', '[']));
        if let (Some(name), Some(class)) = (name, field.get("x-evenkeel-change")) {
            classes.insert(name.to_owned(), class.as_str().unwrap().to_owned());
        }
    });
    let base = serde_json::json!({"engine": "command", "command": ["a"]});
    let samples = serde_json::json!({
        "replicas": 2, "paused": true, "priority": 1, "nodeSelector": {"a": "b"}, "engine": "echo",
        "binary": "/b", "model": {"path": "/m"}, "options": {"dtype": "half"}, "args": ["--x"],
        "command": ["b"], "env": [{"name": "A", "value": "b"}], "workingDir": "/w", "devices": {"count": 3},
        "port": 9000, "startupProbe": {"periodSeconds": 9}, "readinessProbe": {"periodSeconds": 9},
        "livenessProbe": {"periodSeconds": 9}, "startupDeadlineSeconds": 9, "restartPolicy": "Never",
        "backoff": {"initialSeconds": 9}, "terminationGracePeriodSeconds": 9, "deletionPolicy": "Orphan"
    });
    let key = |spec: &Value| {
        let manifest = serde_json::json!({
            "apiVersion": "evenkeel.dev/v1alpha1", "kind": "ModelDeployment", "metadata": {"name": "a"}, "spec": spec
        });
        let read = read_manifests(Path::new("a.json"), manifest.to_string().as_bytes());
        read.unwrap_or_else(|problems| panic!("{}", problems[0].report))
            .deployments[0]
            .restart_key
    };
    let unchanged = key(&base);
    for (name, value) in samples.as_object().unwrap() {
        let mut spec = base.clone();
        spec[name] = value.clone();
        let class = classes
            .remove(name)
            .unwrap_or_else(|| panic!("{name} is no field"));
        assert_eq!(
            key(&spec) == unchanged,
            class == "live",
            "{name} is said to be {class}"
        );
    }
    // `docker` and `runtime` go together, and `strategy` has one value only.
    let left: Vec<_> = classes.into_keys().collect();
    assert_eq!(left, ["docker", "runtime", "strategy"]);
}

#[test]
fn the_examples_are_valid_by_schema_and_parser() {
    let validator = jsonschema::validator_for(&schema()).unwrap();
    for file in yaml_files(&root().join("examples")) {
        let text = fs::read_to_string(&file).unwrap();
        for document in documents(&text).expect("an example is YAML") {
            if let Err(error) = validator.validate(&document) {
                panic!("{}: {}: {error}", file.display(), error.instance_path());
            }
        }
        match read_manifests(&file, text.as_bytes()) {
            Ok(manifests) => assert!(
                !manifests.deployments.is_empty(),
                "{} is empty",
                file.display()
            ),
            Err(problems) => panic!("{}", problems[0].report),
        }
        let named = text
            .lines()
            .next()
            .and_then(|line| line.strip_prefix("# yaml-language-server: $schema="));
        let schema = file
            .parent()
            .unwrap()
            .join(named.expect("an example names its schema first"));
        assert_eq!(
            schema.canonicalize().unwrap(),
            root().join(SCHEMA).canonicalize().unwrap()
        );
    }
}

/// Each sample says in its first two lines what the schema makes of it, and what the parser says of it.
#[test]
fn the_invalid_samples_are_refused() {
    let validator = jsonschema::validator_for(&schema()).unwrap();
    for file in yaml_files(&root().join("tests/fixtures/invalid")) {
        let text = fs::read_to_string(&file).unwrap();
        let mut lines = text.lines();
        let mut note = |name: &str| {
            let note = lines.next().and_then(|line| line.strip_prefix(name));
            note.unwrap_or_else(|| panic!("{} does not say `{name}`", file.display()))
                .to_owned()
        };
        let (schema, says) = (note("# schema: "), note("# says: "));
        let problems = read_manifests(&file, text.as_bytes()).expect_err(file.to_str().unwrap());
        let report = &problems[0].report;
        assert!(
            report.contains(&says),
            "{} does not say `{says}`:\n{report}",
            file.display()
        );
        assert!(problems[0].line.is_some());
        // What is not even YAML, or doubles a key, no schema gets to see.
        let refuses = documents(&text)
            .is_some_and(|documents| documents.iter().any(|one| !validator.is_valid(one)));
        assert_eq!(
            refuses,
            schema == "refuses",
            "{}: the schema {schema} it",
            file.display()
        );
    }
}
