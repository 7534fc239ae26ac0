//! `evenkeel validate PATH...`: are these manifests right?
//!
//! Reads the files as the daemon would, and asks nobody: no host, no state, no controller.
//!
//! Invariant: the exit code says the same as what is printed.

use std::io::{self, Write};
use std::path::PathBuf;

use serde_json::{Value, json};

use super::report::clean_end;
use crate::desired::{Problem, ProblemKind};
use crate::source::{CheckedFile, Depth, check};

/// Exit code: everything is valid.
pub const VALID: u8 = 0;

/// Exit code: something is not valid.
pub const INVALID: u8 = 1;

/// Exit code: something cannot be read.
pub const UNREADABLE: u8 = 2;

/// How the result is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// For people: reports to stderr, a line for each valid file to stdout.
    #[default]
    Text,
    /// For programs: one JSON list of problems to stdout.
    Json,
}

/// Validates files and folders, and returns the exit code.
///
/// # Errors
/// Only those of writing to `out` and `err`.
pub fn validate(
    paths: &[PathBuf],
    out: &mut dyn Write,
    err: &mut dyn Write,
    format: Format,
) -> io::Result<u8> {
    let mut files = Vec::new();
    for path in paths {
        match check(path, Depth::Flat) {
            Ok(checked) => {
                if checked.is_empty() {
                    writeln!(err, "{}: holds no manifests", path.display())?;
                }
                files.extend(checked);
            }
            Err(problem) => files.push(CheckedFile {
                file: path.clone(),
                deployments: 0,
                ignored: Vec::new(),
                problems: vec![*problem],
            }),
        }
    }
    // A reader that went away does not make them valid.
    clean_end(match format {
        Format::Text => print_text(&files, out, err),
        Format::Json => print_json(&files, out),
    })?;
    Ok(exit_code(&files))
}

fn exit_code(files: &[CheckedFile]) -> u8 {
    let code = |problem: &Problem| match problem.kind {
        ProblemKind::Unreadable => UNREADABLE,
        ProblemKind::Invalid | ProblemKind::Duplicate => INVALID,
    };
    files
        .iter()
        .flat_map(|file| &file.problems)
        .map(code)
        .max()
        .unwrap_or(VALID)
}

fn print_text(files: &[CheckedFile], out: &mut dyn Write, err: &mut dyn Write) -> io::Result<()> {
    for CheckedFile {
        file,
        deployments,
        ignored,
        problems,
    } in files
    {
        let file = file.display();
        for problem in problems {
            writeln!(err, "{}\n", problem.report)?;
        }
        for foreign in ignored {
            let kind = foreign.kind.as_deref().unwrap_or_default();
            let (document, version) = (foreign.document + 1, &foreign.api_version);
            writeln!(
                err,
                "{file}: document {document} is not evenkeel's and is ignored ({version} {kind})"
            )?;
        }
        if problems.is_empty() {
            let plural = if *deployments == 1 { "" } else { "s" };
            writeln!(out, "{file}: {deployments} deployment{plural} valid")?;
        }
    }
    Ok(())
}

fn print_json(files: &[CheckedFile], out: &mut dyn Write) -> io::Result<()> {
    let problems: Vec<Value> = files
        .iter()
        .flat_map(|file| &file.problems)
        .map(problem_json)
        .collect();
    serde_json::to_writer_pretty(&mut *out, &problems)?;
    writeln!(out)
}

/// A problem as programs read it.
fn problem_json(problem: &Problem) -> Value {
    let Problem {
        file,
        line,
        column,
        path,
        message,
        hint,
        deployment,
        kind,
        report: _,
    } = problem;
    json!({
        "file": file.display().to_string(),
        "line": line,
        "column": column,
        "path": path,
        "message": message,
        "hint": hint,
        "deployment": deployment,
        "kind": match kind {
            ProblemKind::Unreadable => "Unreadable",
            ProblemKind::Invalid => "Invalid",
            ProblemKind::Duplicate => "Duplicate",
        },
    })
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use tempfile::TempDir;

    use super::*;

    const GOOD: &str = "apiVersion: evenkeel.dev/v1alpha1\nkind: ModelDeployment\nmetadata: {name: a}\nspec: {engine: echo}\n";

    fn folder(files: &[(&str, &str)]) -> TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (file, text) in files {
            fs::write(dir.path().join(file), text).unwrap();
        }
        dir
    }

    fn run(dir: &Path, paths: &[&str], format: Format) -> (u8, String, String) {
        let paths: Vec<_> = paths.iter().map(|path| dir.join(path)).collect();
        let (mut out, mut err) = (Vec::new(), Vec::new());
        let code = validate(&paths, &mut out, &mut err, format).unwrap();
        let text = |bytes| {
            String::from_utf8(bytes)
                .unwrap()
                .replace(dir.to_str().unwrap(), "DIR")
        };
        (code, text(out), text(err))
    }

    #[test]
    fn valid_files_are_counted_on_stdout() {
        let two = format!(
            "{GOOD}---\n{}---\napiVersion: v1\nkind: List\n",
            GOOD.replace("name: a", "name: b")
        );
        let dir = folder(&[("a.yaml", GOOD), ("readme.md", "no manifest")]);
        fs::write(dir.path().join("two"), two).unwrap();
        let (code, out, err) = run(dir.path(), &["", "two"], Format::Text);
        assert_eq!(code, VALID, "{err}");
        assert_eq!(
            out,
            "DIR/a.yaml: 1 deployment valid\nDIR/two: 2 deployments valid\n"
        );
        assert_eq!(
            err,
            "DIR/two: document 3 is not evenkeel's and is ignored (v1 List)\n"
        );
    }

    #[test]
    fn problems_are_reported_on_stderr() {
        let dir = folder(&[
            ("a.yaml", GOOD),
            ("b.yaml", GOOD),
            ("c.yaml", &GOOD.replace("echo", "ecko")),
        ]);
        let (code, out, err) = run(dir.path(), &[""], Format::Text);
        assert_eq!(code, INVALID);
        assert_eq!(out, "DIR/a.yaml: 1 deployment valid\n");
        assert!(
            err.contains("--> DIR/b.yaml:3:18")
                && err.contains("belongs to the document in DIR/a.yaml"),
            "{err}"
        );
        assert!(
            err.contains("--> DIR/c.yaml:4:16") && err.contains("did you mean `echo`?"),
            "{err}"
        );
    }

    #[test]
    fn programs_get_one_list() {
        let dir = folder(&[("a.yaml", &GOOD.replace("echo", "ecko"))]);
        let (code, out, err) = run(dir.path(), &["a.yaml"], Format::Json);
        let list: Value = serde_json::from_str(&out).unwrap();
        assert_eq!((code, err.as_str()), (INVALID, ""));
        assert_eq!(
            (&list[0]["line"], &list[0]["path"]),
            (&json!(4), &json!("spec.engine"))
        );
        assert_eq!(
            run(folder(&[("a.yaml", GOOD)]).path(), &[""], Format::Json).1,
            "[]\n"
        );
    }

    #[test]
    fn what_cannot_be_read_has_its_own_exit_code() {
        let dir = folder(&[("a.yaml", &GOOD.replace("echo", "ecko"))]);
        let (code, _, err) = run(dir.path(), &["a.yaml", "none.yaml"], Format::Text);
        assert_eq!(code, UNREADABLE);
        assert!(err.contains("cannot be read: No such file"), "{err}");
        let empty = folder(&[]);
        assert_eq!(
            run(empty.path(), &[""], Format::Text),
            (
                VALID,
                String::new(),
                "DIR/: holds no manifests\n".to_owned()
            )
        );
    }
}
