//! Takes secrets out of text that is to be shown: log tails, events, the API, the page. The log on disk stays as it is.
//!
//! Two sources: values that are known to be secret (everything that came from `valueFrom`), and patterns of how programs
//! print secrets. Too much is taken out rather than too little; but `None`, `null`, and the token counts and special
//! tokens that engines print all day stay readable.
//!
//! Invariant: no known value survives, in one piece or line by line.

use std::ops::Range;
use std::sync::LazyLock;

use regex_lite::Regex;

/// What stands in place of a secret.
pub const MASK: &str = "***";

/// Shorter lines of a secret of several lines are not looked for by themselves: `}` or `-----` are in every log.
const SHORTEST_LINE: usize = 6;

/// Takes out `secrets`, and what looks like one.
///
/// Redact before cutting: half a secret is recognised by nobody.
pub fn redact(text: &str, secrets: &[String]) -> String {
    let mut hidden: Vec<Range<usize>> = Vec::new();
    for secret in secrets {
        for needle in needles(secret) {
            hidden.extend(occurrences(text, &needle));
        }
    }
    for pattern in PATTERNS.iter() {
        for found in pattern.captures_iter(text) {
            hidden.extend(
                found
                    .name("v")
                    .filter(|_| {
                        !found
                            .name("n")
                            .is_some_and(|name| is_harmless_name(name.as_str()))
                    })
                    .filter(|value| !is_harmless(value.as_str()))
                    .map(|value| value.range()),
            );
        }
    }
    mask(text, hidden)
}

/// Whether the value of a variable of this name is to be taken for a secret.
pub fn is_secret_name(name: &str) -> bool {
    static NAME: LazyLock<Regex> = LazyLock::new(|| compile(&format!("(?i)^(?:{NAMES})$")));
    NAME.is_match(name) && !is_harmless_name(name)
}

/// The forms in which a secret may stand in a text.
fn needles(secret: &str) -> Vec<String> {
    let mut needles = vec![secret.to_owned()];
    // As JSON and Python print it.
    if let Ok(json) = serde_json::to_string(secret) {
        needles.push(json[1..json.len() - 1].to_owned());
    }
    // The first lines of a long one may be cut off, and the rest must go all the same.
    if secret.contains('\n') {
        needles.extend(
            secret
                .lines()
                .map(str::trim)
                .filter(|line| line.len() >= SHORTEST_LINE)
                .map(str::to_owned),
        );
    }
    // Blanks would take every blank with them; an empty value is none.
    needles.retain(|needle| !needle.trim().is_empty());
    needles.dedup();
    needles
}

/// Every place where `needle` stands, those that overlap one another included.
fn occurrences<'a>(text: &'a str, needle: &'a str) -> impl Iterator<Item = Range<usize>> + 'a {
    let mut from = 0;
    std::iter::from_fn(move || {
        let start = from + text.get(from..)?.find(needle)?;
        let first = text[start..].chars().next().map_or(1, char::len_utf8);
        from = start + first;
        Some(start..start + needle.len())
    })
}

fn mask(text: &str, mut hidden: Vec<Range<usize>>) -> String {
    hidden.retain(|range| !range.is_empty());
    hidden.sort_by_key(|range| range.start);
    let mut masked = String::with_capacity(text.len());
    let mut shown_to = 0;
    for range in hidden {
        if range.start > shown_to || (range.start == shown_to && !masked.ends_with(MASK)) {
            masked.push_str(&text[shown_to..range.start]);
            masked.push_str(MASK);
        }
        shown_to = shown_to.max(range.end);
    }
    masked.push_str(&text[shown_to..]);
    masked
}

/// Names of secrets: `HF_TOKEN`, `OPENAI_API_KEY`, `client-secret`, `db_password`. Not the plural `prompt_tokens`.
const NAMES: &str = "[a-z0-9_.-]*?(?:api[_-]?keys?|access[_-]?key|private[_-]?key|passwd|password|passphrase\
    |secrets?(?:[_-][a-z0-9_-]*)?|credentials?|[_-]token)|authorization";

/// What stands before `_token` in names that are no secrets and are printed all day: those of tokenizers and figures.
const HARMLESS_TOKENS: [&str; 20] = [
    "added", "audio", "bos", "cls", "eos", "eot", "first", "image", "input", "last", "mask",
    "next", "output", "pad", "per", "sep", "special", "stop", "unk", "video",
];

fn is_harmless_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase().replace('-', "_");
    name.strip_suffix("_token").is_some_and(|before| {
        let word = before.rsplit('_').next().unwrap_or(before);
        HARMLESS_TOKENS.contains(&word)
    })
}

/// A value: in quotes, or up to the next blank.
const VALUE: &str = r#"(?:"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|[^\s'"\[][^\s]*)"#;

static PATTERNS: LazyLock<Vec<Regex>> = LazyLock::new(|| {
    [
        // Headers, in logs of requests: the rest of the line, or up to the quote.
        r#"(?i)\b(?:proxy-)?authorization["']?\s*[:=]\s*["']?(?P<v>[^"'\r\n]+)"#.to_owned(),
        r#"(?i)\b(?:set-)?cookie["']?\s*:\s*["']?(?P<v>[^"'\r\n]+)"#.to_owned(),
        r"(?i)\b(?:bearer|basic)\s+(?P<v>[a-z0-9._~+/=-]{6,})".to_owned(),
        // `HF_TOKEN=x`, `api_key: x`, `'api_key': 'x'`, `"api_key": "x"`.
        format!(r#"(?i)(?:^|[^a-z0-9_.-])(?P<n>{NAMES})["']?\s*[:=]\s*(?P<v>{VALUE})"#),
        format!(r#"(?i)["']token["']\s*:\s*(?P<v>{VALUE})"#),
        // `api_key=['x', 'y']`, as vLLM prints its arguments.
        format!(r#"(?i)(?:^|[^a-z0-9_.-])(?P<n>{NAMES})["']?\s*[:=]\s*\[(?P<v>[^\]\n]*)\]"#),
        // `--api-key x`, `--api-key=x`, `'--api-key', 'x'`.
        format!(
            r#"(?i)--[a-z0-9-]*?(?:key|token|secret|password|passphrase)["']?(?:\s*[,=]\s*|\s+)(?P<v>{VALUE})"#
        ),
        // Values of a query, and the password of an address.
        r#"[?&][A-Za-z0-9_.~%\[\]-]+=(?P<v>[^\s&#"'<>]+)"#.to_owned(),
        r#"[a-z][a-z0-9+.-]*://[^\s/:@"']*:(?P<v>[^\s/@"']+)@"#.to_owned(),
        // Tokens that are known by their looks.
        r"(?:^|[^A-Za-z0-9])(?P<v>hf_[A-Za-z0-9]{8,})".to_owned(),
        r"(?:^|[^A-Za-z0-9])(?P<v>sk-[A-Za-z0-9_-]{8,})".to_owned(),
    ]
    .iter()
    .map(|pattern| compile(pattern))
    .collect()
});

fn compile(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a pattern of this file, which its tests compile")
}

/// What programs print where there is no secret.
fn is_harmless(value: &str) -> bool {
    let bare = value.trim_end_matches([',', ')', '}', ']', ';']);
    matches!(
        bare,
        "" | "None" | "null" | "nil" | "True" | "False" | "true" | "false" | "''" | "\"\"" | "***"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn plain(text: &str) -> String {
        redact(text, &[])
    }

    #[test]
    fn what_looks_like_a_secret_is_taken_out() {
        for line in [
            "Authorization: Bearer SEKRIT.abc-123",
            "authorization: Basic SEKRIT==",
            "{'Authorization': 'Bearer SEKRIT1'}",
            "{\"company_token\": \"SEKRIT\"}",
            "auth-token=SEKRIT",
            "{\"token\": \"SEKRIT\"}",
            "X-Api-Key: SEKRIT",
            "api-key: SEKRIT",
            "Cookie: session=SEKRIT; theme=SEKRIT",
            "HF_TOKEN=SEKRIT",
            "export HF_TOKEN='SEKRIT with blanks'",
            "OPENAI_API_KEY=\"SEKRIT\"",
            "MY_TOKEN=SEKRIT,SEKRIT",
            "AWS_SECRET_ACCESS_KEY=SEKRIT",
            "CLIENT_SECRET_2=SEKRIT",
            "DB_PASSWORD=SEKRIT",
            "{\"hf_token\": \"SEKRIT\", \"port\": 1}",
            "{'api_key': 'SEK\\'RIT'}",
            "args: Namespace(api_key=['SEKRIT', 'SEKRIT2'], port=1)",
            "non-default args: {'api_key': ['SEKRIT']}",
            "llama-server --api-key SEKRIT --port 1",
            "llama-server --api-key=SEKRIT",
            "['--api-key', 'SEKRIT', '--port']",
            "--hf-token SEKRIT",
            "--api-key \"SEKRIT SEKRIT\"",
            "GET /v1/models?api=SEKRIT&other=SEKRIT HTTP/1.1",
            "https://user:SEKRIT@example.org/path",
            "loaded with hf_SEKRITSEKRIT now",
            "key sk-SEKRIT_abcdef-1 is wrong",
            "Bearer SEKRIT123",
        ] {
            let shown = plain(line);
            assert!(!shown.contains("SEK"), "{line}: {shown}");
            assert!(!shown.contains("RIT"), "{line}: {shown}");
            assert!(shown.contains(MASK), "{line}: {shown}");
        }
    }

    #[test]
    fn what_surrounds_a_secret_stays() {
        assert_eq!(
            plain("llama-server --api-key SEKRIT --port 1"),
            "llama-server --api-key *** --port 1"
        );
        assert_eq!(
            plain("GET /v1?a=b&c=d HTTP/1.1"),
            "GET /v1?a=***&c=*** HTTP/1.1"
        );
        assert_eq!(
            plain("{\"hf_token\": \"SEKRIT\", \"port\": 1}"),
            "{\"hf_token\": ***, \"port\": 1}"
        );
        assert_eq!(plain("a\nHF_TOKEN=x\nb"), "a\nHF_TOKEN=***\nb");
    }

    #[test]
    fn what_engines_print_all_day_stays_readable() {
        for line in [
            "prompt_tokens: 12, max_num_batched_tokens=8192, total_tokens=5",
            "print_info: EOS token = 2 '</s>'",
            "tokenizer='/models/x', tokenizer_mode='auto', skip_tokenizer_init=False",
            "\"eos_token\": \"</s>\", 'pad_token_id': 0, mean_time_per_token=0.1",
            "api_key=None, hf_token=None, 'api_key': null",
            "sglang:token_usage 0.5",
            "INFO 01-01 00:00:00 [core.py:58] Initializing a V1 LLM engine",
            "risk-free, ask-me: hf_x",
            "CUDA out of memory. Tried to allocate 2.00 GiB",
        ] {
            assert_eq!(plain(line), line);
        }
    }

    #[test]
    fn a_known_value_goes_whatever_surrounds_it() {
        let secrets = ["p:a ss\"w".to_owned(), "abab".to_owned()];
        assert_eq!(redact("xp:a ss\"wy", &secrets), "x***y");
        assert_eq!(
            redact("{\"x\": \"p:a ss\\\"w\"}", &secrets),
            "{\"x\": \"***\"}"
        );
        // Two that overlap are one.
        assert_eq!(redact("-ababab-", &secrets), "-***-");
        assert_eq!(redact("-abababab-", &secrets), "-***-");
    }

    #[test]
    fn the_rest_of_a_long_secret_goes_when_its_beginning_is_cut_off() {
        let secret = "-----BEGIN KEY-----\nAAAABBBB\nCCCCDDDD\n-----END KEY-----".to_owned();
        let shown = redact("CCCCDDDD\n-----END KEY-----\nready\n", &[secret]);
        assert_eq!(shown, "***\n***\nready\n");
    }

    #[test]
    fn an_empty_value_takes_nothing_out() {
        let secrets = [String::new(), " ".to_owned(), "\n".to_owned()];
        assert_eq!(redact("a b\n", &secrets), "a b\n");
    }

    #[test]
    fn names_of_secrets_are_known() {
        for name in [
            "HF_TOKEN",
            "OPENAI_API_KEY",
            "VLLM_API_KEY",
            "MY_SECRET",
            "MY_SECRET_2",
            "DB_PASSWORD",
            "GH_TOKEN",
        ] {
            assert!(is_secret_name(name), "{name}");
        }
        for name in [
            "PATH",
            "MAX_TOKENS",
            "TOKENIZERS_PARALLELISM",
            "HF_HOME",
            "KEYBOARD",
        ] {
            assert!(!is_secret_name(name), "{name}");
        }
    }

    proptest! {
        #[test]
        fn no_known_value_survives(
            secrets in prop::collection::vec("[!-)+-~]{1,3}[ -)+-~\u{e4}]{0,12}[!-)+-~]{0,2}(\n[a-f]{6,9}){0,2}", 1..4),
            noise in prop::collection::vec("[ -~\n\u{e4}]{0,12}", 1..6),
            order in prop::collection::vec((0usize..4, 0usize..6), 0..8),
        ) {
            let mut text = String::new();
            for (secret, piece) in order {
                text.push_str(&noise[piece % noise.len()]);
                text.push_str(&secrets[secret % secrets.len()]);
            }
            let shown = redact(&text, &secrets);
            for secret in &secrets {
                prop_assert!(!shown.contains(secret.as_str()), "{secret:?} in {shown:?}");
            }
        }

        #[test]
        fn any_text_is_taken(text in "\\PC{0,200}", secret in "\\PC{0,5}") {
            let _ = redact(&text, &[secret]);
        }
    }
}
