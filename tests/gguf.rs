//! The tiny model against the real llama-server.

mod support;

use std::path::Path;
use std::process::Command;

use serde_json::json;
use support::gguf::{Damage, TinyModel, damage, write_tiny};
use support::http::{get, post};
use support::llama::llama_server;
use support::process::{Running, free_port, wait_until};

fn start(program: &Path, model: &Path, port: u16) -> Running {
    Running::start(
        Command::new(program)
            .args([
                "--host",
                "127.0.0.1",
                "--ctx-size",
                "512",
                "--parallel",
                "1",
            ])
            .args(["--threads", "1", "--no-warmup", "--alias", "tiny"])
            .arg("--port")
            .arg(port.to_string())
            .arg("--model")
            .arg(model),
    )
}

#[test]
fn the_same_model_gives_the_same_bytes_and_another_seed_gives_others() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let bytes = |name: &str, seed: u64| {
        let path = folder.path().join(name);
        let model = TinyModel {
            seed,
            ..TinyModel::default()
        };
        write_tiny(&path, &model).expect("a model");
        std::fs::read(&path).expect("the model")
    };
    let first = bytes("a", 1);
    assert!(first == bytes("b", 1));
    assert!(first != bytes("c", 2));
    assert!((400_000..800_000).contains(&first.len()), "{}", first.len());
}

#[test]
fn a_larger_model_has_about_the_size_asked_for() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("large.gguf");
    let model = TinyModel {
        target_mb: Some(100),
        ..TinyModel::default()
    };
    write_tiny(&path, &model).expect("a model");
    let size = path.metadata().expect("the model").len();
    assert!((50_000_000..=101_000_000).contains(&size), "{size}");
}

#[test]
fn llama_server_loads_the_tiny_model_and_answers() {
    let Some(program) = llama_server() else {
        return;
    };
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("tiny.gguf");
    write_tiny(&path, &TinyModel::default()).expect("a model");
    let port = free_port();
    let mut server = start(&program, &path, port);
    wait_until(
        || {
            assert!(server.has_exited().is_none(), "{}", server.log());
            get(port, "/health").is_ok_and(|answer| answer.status == 200)
        },
        "llama-server does not become healthy",
    );

    let body = json!({"model": "tiny", "prompt": "the ship", "max_tokens": 8});
    let answer = post(port, "/v1/completions", body.to_string()).expect("an answer");
    assert_eq!(answer.status, 200, "{answer:?}");
    let document = answer.json();
    assert_eq!(document["usage"]["completion_tokens"], 8);
    let text = document["choices"][0]["text"].as_str().expect("a text");
    assert!(
        text.bytes().all(|byte| (b' '..=b'~').contains(&byte)),
        "{text:?}"
    );
}

#[test]
fn llama_server_exits_when_the_model_is_damaged() {
    let Some(program) = llama_server() else {
        return;
    };
    let folder = tempfile::tempdir().expect("a temporary folder");
    for how in [Damage::Truncated, Damage::Magic, Damage::Empty] {
        let path = folder.path().join("damaged.gguf");
        write_tiny(&path, &TinyModel::default()).expect("a model");
        damage(&path, how).expect("a damaged model");
        let mut server = start(&program, &path, free_port());
        let status = server.wait();
        assert!(!status.success(), "{how:?}: {}", server.log());
    }
}
