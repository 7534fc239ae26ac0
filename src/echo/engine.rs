//! What the engine knows of itself: its name, whether it is loaded, and its counters.
//!
//! Whether it is healthy is computed when asked, from the time since it became ready. Nothing sets it.
#![expect(
    clippy::disallowed_methods,
    reason = "the stand-in pretends to take time"
)]

use std::fmt::Write as _;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use super::EchoArgs;

/// The state that the HTTP side and the leader share.
pub(super) struct Engine {
    pub(super) args: EchoArgs,
    /// The one model name that requests may use.
    pub(super) name: String,
    ready_at: OnceLock<Instant>,
    requests: AtomicU64,
    running: AtomicU64,
    prompt_tokens: AtomicU64,
    generated_tokens: AtomicU64,
}

/// What the health path does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Health {
    /// 503.
    Loading,
    /// 200.
    Healthy,
    /// 500.
    Failing,
    /// Accepts and never answers.
    Hung,
}

impl Engine {
    pub(super) fn new(args: EchoArgs) -> Self {
        let name = match (&args.served_model_name, &args.model) {
            (Some(name), _) => name.clone(),
            (None, Some(path)) => path.display().to_string(),
            (None, None) => "echo".to_owned(),
        };
        Self {
            args,
            name,
            ready_at: OnceLock::new(),
            requests: AtomicU64::new(0),
            running: AtomicU64::new(0),
            prompt_tokens: AtomicU64::new(0),
            generated_tokens: AtomicU64::new(0),
        }
    }

    /// The model counts as loaded from now on.
    pub(super) fn loaded(&self) {
        self.ready_at.get_or_init(Instant::now);
    }

    pub(super) fn is_loaded(&self) -> bool {
        self.ready_at.get().is_some()
    }

    pub(super) fn health(&self) -> Health {
        health(&self.args, self.ready_at.get().map(Instant::elapsed))
    }

    /// Counts a request as begun, and as running until the value is dropped. A request that hangs is dropped when its
    /// client goes away.
    pub(super) fn begin(&self) -> Running<'_> {
        self.running.fetch_add(1, Relaxed);
        Running {
            engine: self,
            number: self.requests.fetch_add(1, Relaxed),
        }
    }

    /// Counts the tokens of a request that was answered.
    pub(super) fn count_tokens(&self, prompt: usize, generated: usize) {
        self.prompt_tokens.fetch_add(prompt as u64, Relaxed);
        self.generated_tokens.fetch_add(generated as u64, Relaxed);
    }

    /// The counters in the Prometheus text format.
    pub(super) fn metrics(&self) -> String {
        let mut text = String::new();
        for (name, kind, help, value) in [
            (
                "echo_requests_total",
                "counter",
                "Completion requests received",
                &self.requests,
            ),
            (
                "echo_requests_running",
                "gauge",
                "Completion requests not answered yet",
                &self.running,
            ),
            (
                "echo_prompt_tokens_total",
                "counter",
                "Words in the prompts",
                &self.prompt_tokens,
            ),
            (
                "echo_generation_tokens_total",
                "counter",
                "Words in the answers",
                &self.generated_tokens,
            ),
        ] {
            let value = value.load(Relaxed);
            write!(
                text,
                "# HELP {name} {help}\n# TYPE {name} {kind}\n{name} {value}\n"
            )
            .expect("a string takes any text");
        }
        text
    }
}

/// A request that is being answered.
pub(super) struct Running<'a> {
    engine: &'a Engine,
    /// How many requests came before it.
    pub(super) number: u64,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.engine.running.fetch_sub(1, Relaxed);
    }
}

fn health(args: &EchoArgs, since_ready: Option<Duration>) -> Health {
    let Some(since_ready) = since_ready else {
        return if args.lie_healthy {
            Health::Healthy
        } else {
            Health::Loading
        };
    };
    let due = |after: Option<Duration>| after.is_some_and(|after| since_ready >= after);
    if due(args.hang_health_after) {
        Health::Hung
    } else if due(args.fail_health_after) {
        Health::Failing
    } else {
        Health::Healthy
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::args;
    use super::*;

    #[test]
    fn health_follows_the_switches_and_the_time_since_ready() {
        let at = |seconds: u64| Some(Duration::from_secs(seconds));
        let fails_then_hangs: &[&str] = &["--fail-health-after=2", "--hang-health-after=5"];
        let cases: &[(&[&str], Option<Duration>, Health)] = &[
            (&[], None, Health::Loading),
            (&[], at(0), Health::Healthy),
            (&["--lie-healthy"], None, Health::Healthy),
            (&["--fail-health-after=0"], None, Health::Loading),
            (&["--fail-health-after=0"], at(0), Health::Failing),
            (fails_then_hangs, at(1), Health::Healthy),
            (fails_then_hangs, at(2), Health::Failing),
            (fails_then_hangs, at(5), Health::Hung),
        ];
        for (words, since_ready, expected) in cases {
            assert_eq!(health(&args(words), *since_ready), *expected, "{words:?}");
        }
    }

    #[test]
    fn the_served_name_is_the_name_given_else_the_path_else_echo() {
        let name = |words: &[&str]| Engine::new(args(words)).name;
        assert_eq!(name(&[]), "echo");
        assert_eq!(name(&["--model=some/path"]), "some/path");
        assert_eq!(
            name(&["--model=some/path", "--served-model-name=tiny"]),
            "tiny"
        );
    }

    #[test]
    fn a_request_runs_until_it_is_dropped() {
        let engine = Engine::new(args(&[]));
        let first = engine.begin();
        assert_eq!(first.number, 0);
        assert!(engine.metrics().contains("\necho_requests_running 1\n"));
        drop(first);
        engine.count_tokens(3, 2);
        let metrics = engine.metrics();
        for line in [
            "echo_requests_total 1",
            "echo_requests_running 0",
            "echo_prompt_tokens_total 3",
            "echo_generation_tokens_total 2",
        ] {
            assert!(metrics.lines().any(|l| l == line), "{line} in {metrics}");
        }
    }
}
