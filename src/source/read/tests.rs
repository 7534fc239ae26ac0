//! What is made of files, good, bad and hostile.

use std::fmt::Write as _;
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

/// The texts of the numbers from 0, one behind the other.
fn each(count: usize, text: impl Fn(usize) -> String) -> String {
    (0..count).map(text).collect()
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
fn a_file_of_comments_holds_nothing_and_an_empty_one_is_a_problem() {
    for text in ["# a\n", "---\n", "---\n---\n# nothing\n"] {
        assert!(accepted(text).deployments.is_empty(), "{text:?}");
    }
    for text in ["", "\n", " \r\n"] {
        let problems = read_manifests(Path::new("chat.yaml"), text.as_bytes()).unwrap_err();
        assert_eq!(problems[0].message, "it is empty", "{text:?}");
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
        manifest("  engine: echo\n").replace("spec:", "  labels:\n    a: 1\n    \"a\": 2\nspec:"),
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
        writeln!(laughs, "a{n}: &a{n} [{}]", last.repeat(10)).unwrap();
    }
    let scalar = "x".repeat(1 << 20);
    let indented = each(1400, |n| " ".repeat(n) + "a:\n");
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
            format!("a: [{}]\n", each(50_000, |n| format!("&a{n} b,"))),
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
    let many = each(10_000, |n| format!("w{n} "));
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
