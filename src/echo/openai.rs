//! The two completion endpoints as a pure function: a request's bytes become a reply, or an error in the same style.
//!
//! A token is a word. The reply is the prompt's words, as many of them as `max_tokens` allows.

use std::fmt::Write as _;

use serde::Deserialize;
use serde_json::{Value, json};

/// The longest prompt in words. The reply to a stream is built in memory at some 200 bytes a word, so this bounds it.
const MAX_PROMPT_WORDS: usize = 32_768;

/// Which of the two endpoints, and so which shape requests and replies have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Endpoint {
    /// `/v1/completions`
    Completions,
    /// `/v1/chat/completions`
    Chat,
}

/// A request that can be answered.
#[derive(Debug)]
pub(super) struct Request {
    endpoint: Endpoint,
    /// The model it asks for, when it says so.
    pub(super) model: Option<String>,
    /// The words to answer with, one list per choice.
    choices: Vec<Vec<String>>,
    prompt_tokens: usize,
    max_tokens: Option<usize>,
    /// Whether the answer is wanted as server-sent events.
    pub(super) stream: bool,
    include_usage: bool,
}

/// An answer, before it has a form.
#[derive(Debug)]
pub(super) struct Reply {
    endpoint: Endpoint,
    id: String,
    created: u64,
    model: String,
    choices: Vec<Choice>,
    /// Words in the prompt.
    pub(super) prompt_tokens: usize,
    include_usage: bool,
}

#[derive(Debug)]
struct Choice {
    words: Vec<String>,
    finish_reason: &'static str,
}

/// An error, with the HTTP status that goes with it.
#[derive(Debug)]
pub(super) struct ApiError {
    pub(super) status: u16,
    kind: &'static str,
    message: String,
}

impl ApiError {
    pub(super) fn new(status: u16, kind: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            kind,
            message: message.into(),
        }
    }

    fn invalid(message: impl Into<String>) -> Self {
        Self::new(400, "invalid_request_error", message)
    }

    pub(super) fn body(&self) -> Value {
        json!({"error": {
            "message": self.message, "type": self.kind, "param": null, "code": self.status,
        }})
    }
}

/// A request's body. Fields that are not listed are allowed and mean nothing here, as clients send many.
#[derive(Deserialize)]
struct Body {
    model: Option<String>,
    prompt: Option<Value>,
    messages: Option<Vec<Message>>,
    max_tokens: Option<u64>,
    max_completion_tokens: Option<u64>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: Option<Value>,
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// Reads a request. Whatever is wrong with it is a 400.
pub(super) fn parse(endpoint: Endpoint, body: &[u8]) -> Result<Request, ApiError> {
    let body: Body = serde_json::from_slice(body)
        .map_err(|error| ApiError::invalid(format!("the request's body: {error}")))?;
    let (choices, prompt_tokens) = match endpoint {
        Endpoint::Completions => {
            let choices = prompts(body.prompt.as_ref())?;
            let tokens = choices.iter().map(Vec::len).sum();
            (choices, tokens)
        }
        Endpoint::Chat => {
            let (answer, tokens) = conversation(body.messages.as_deref())?;
            (vec![answer], tokens)
        }
    };
    if prompt_tokens > MAX_PROMPT_WORDS {
        return Err(ApiError::invalid(format!(
            "the prompt has {prompt_tokens} tokens and the context length is {MAX_PROMPT_WORDS}"
        )));
    }
    Ok(Request {
        endpoint,
        model: body.model,
        choices,
        prompt_tokens,
        // The newer of the two names goes first. A bound too large for this machine is no bound.
        max_tokens: (body.max_completion_tokens.or(body.max_tokens))
            .map(|max| usize::try_from(max).unwrap_or(usize::MAX)),
        stream: body.stream.unwrap_or_default(),
        include_usage: (body.stream_options)
            .and_then(|options| options.include_usage)
            .unwrap_or_default(),
    })
}

/// The words of each prompt.
fn prompts(prompt: Option<&Value>) -> Result<Vec<Vec<String>>, ApiError> {
    let wrong = || ApiError::invalid("prompt must be a string or a list of strings");
    match prompt {
        Some(Value::String(text)) => Ok(vec![words(text)]),
        Some(Value::Array(texts)) if !texts.is_empty() => texts
            .iter()
            .map(|text| text.as_str().map(words).ok_or_else(wrong))
            .collect(),
        _ => Err(wrong()),
    }
}

/// The words to answer a conversation with, which are those of its last user message, and the count of all words.
fn conversation(messages: Option<&[Message]>) -> Result<(Vec<String>, usize), ApiError> {
    let messages = messages.unwrap_or_default();
    let mut answer = None;
    let mut tokens = 0;
    for message in messages {
        let said = words(&content(message.content.as_ref())?);
        tokens += said.len();
        if message.role == "user" || answer.is_none() {
            answer = Some(said);
        }
    }
    let answer =
        answer.ok_or_else(|| ApiError::invalid("messages must be a list with a message in it"))?;
    Ok((answer, tokens))
}

/// A message's text: a string, or the text parts of a list. An assistant's message may have none.
fn content(content: Option<&Value>) -> Result<String, ApiError> {
    match content {
        None | Some(Value::Null) => Ok(String::new()),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => {
            let texts: Vec<&str> = parts
                .iter()
                .filter_map(|part| part.get("text")?.as_str())
                .collect();
            Ok(texts.join(" "))
        }
        Some(_) => Err(ApiError::invalid(
            "a message's content must be a string or a list of parts",
        )),
    }
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

impl Request {
    /// Answers it. `number` tells this answer from others, `created` is in seconds since 1970.
    pub(super) fn answer(self, model: &str, number: u64, created: u64) -> Reply {
        let max = self.max_tokens.unwrap_or(usize::MAX);
        let choices = (self.choices.into_iter())
            .map(|mut words| {
                let finish_reason = if words.len() > max { "length" } else { "stop" };
                words.truncate(max);
                Choice {
                    words,
                    finish_reason,
                }
            })
            .collect();
        let prefix = match self.endpoint {
            Endpoint::Completions => "cmpl",
            Endpoint::Chat => "chatcmpl",
        };
        Reply {
            endpoint: self.endpoint,
            id: format!("{prefix}-echo-{number}"),
            created,
            model: model.to_owned(),
            choices,
            prompt_tokens: self.prompt_tokens,
            include_usage: self.include_usage,
        }
    }
}

impl Reply {
    /// Words in the answer.
    pub(super) fn generated_tokens(&self) -> usize {
        self.choices.iter().map(|choice| choice.words.len()).sum()
    }

    /// The answer as one document.
    pub(super) fn json(&self) -> Value {
        let choices = self.choices.iter().enumerate().map(|(index, choice)| {
            let text = choice.words.join(" ");
            let finish_reason = choice.finish_reason;
            match self.endpoint {
                Endpoint::Completions => json!({
                    "index": index, "text": text, "logprobs": null, "finish_reason": finish_reason,
                }),
                Endpoint::Chat => json!({
                    "index": index, "message": {"role": "assistant", "content": text},
                    "logprobs": null, "finish_reason": finish_reason,
                }),
            }
        });
        let object = match self.endpoint {
            Endpoint::Completions => "text_completion",
            Endpoint::Chat => "chat.completion",
        };
        let mut document = self.document(object, &choices.collect::<Vec<_>>());
        document["usage"] = self.usage();
        document
    }

    /// The answer as server-sent events, a word each, up to and with `[DONE]`.
    pub(super) fn events(&self) -> String {
        let mut events = String::new();
        let mut send = |document: &Value| {
            write!(events, "data: {document}\n\n").expect("a string takes any text");
        };
        for (index, choice) in self.choices.iter().enumerate() {
            if self.endpoint == Endpoint::Chat {
                let role = json!({"role": "assistant", "content": ""});
                send(&self.chunk(index, &role, None));
            }
            for (position, word) in choice.words.iter().enumerate() {
                let text = match position {
                    0 => word.clone(),
                    _ => format!(" {word}"),
                };
                let piece = match self.endpoint {
                    Endpoint::Completions => json!(text),
                    Endpoint::Chat => json!({"content": text}),
                };
                send(&self.chunk(index, &piece, None));
            }
            let nothing = match self.endpoint {
                Endpoint::Completions => json!(""),
                Endpoint::Chat => json!({}),
            };
            send(&self.chunk(index, &nothing, Some(choice.finish_reason)));
        }
        if self.include_usage {
            let mut document = self.document(self.chunk_object(), &[]);
            document["usage"] = self.usage();
            send(&document);
        }
        events.push_str("data: [DONE]\n\n");
        events
    }

    fn chunk(&self, index: usize, piece: &Value, finish_reason: Option<&str>) -> Value {
        let field = match self.endpoint {
            Endpoint::Completions => "text",
            Endpoint::Chat => "delta",
        };
        let choice = json!({
            "index": index, field: piece, "logprobs": null, "finish_reason": finish_reason,
        });
        self.document(self.chunk_object(), &[choice])
    }

    fn chunk_object(&self) -> &'static str {
        match self.endpoint {
            Endpoint::Completions => "text_completion",
            Endpoint::Chat => "chat.completion.chunk",
        }
    }

    fn document(&self, object: &str, choices: &[Value]) -> Value {
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "choices": choices,
        })
    }

    fn usage(&self) -> Value {
        let generated = self.generated_tokens();
        json!({
            "prompt_tokens": self.prompt_tokens, "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Endpoint::{Chat, Completions};

    fn reply(endpoint: Endpoint, body: &Value) -> Reply {
        parse(endpoint, body.to_string().as_bytes())
            .expect("a good request")
            .answer("tiny", 7, 1_700_000_000)
    }

    /// The text of a stream's pieces, put together.
    fn streamed(reply: &Reply, pointer: &str) -> String {
        let events = reply.events();
        let lines: Vec<&str> = events.split_terminator("\n\n").collect();
        assert_eq!(lines.last(), Some(&"data: [DONE]"));
        lines[..lines.len() - 1]
            .iter()
            .map(|line| {
                let line = line.strip_prefix("data: ").expect("an event");
                let event: Value = serde_json::from_str(line).expect("a document");
                event
                    .pointer(pointer)
                    .and_then(Value::as_str)
                    .unwrap_or_default()
                    .to_owned()
            })
            .collect()
    }

    #[test]
    fn a_prompt_comes_back() {
        let reply = reply(Completions, &json!({"prompt": "to  be\nor not"}));
        assert_eq!(
            reply.json(),
            json!({
                "id": "cmpl-echo-7", "object": "text_completion", "created": 1_700_000_000,
                "model": "tiny",
                "choices": [{"index": 0, "text": "to be or not", "logprobs": null, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8},
            })
        );
        assert_eq!(streamed(&reply, "/choices/0/text"), "to be or not");
    }

    #[test]
    fn the_last_user_message_comes_back() {
        let reply = reply(
            Chat,
            &json!({"messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "one"},
                {"role": "assistant", "content": null},
                {"role": "user", "content": [{"type": "text", "text": "two three"}, {"type": "image_url"}]},
                {"role": "tool", "content": "four"},
            ]}),
        );
        let document = reply.json();
        assert_eq!(
            document["choices"][0]["message"],
            json!({"role": "assistant", "content": "two three"})
        );
        assert_eq!(document["usage"]["prompt_tokens"], 6);
        assert_eq!(streamed(&reply, "/choices/0/delta/content"), "two three");
        assert_eq!(streamed(&reply, "/choices/0/finish_reason"), "stop");
    }

    #[test]
    fn a_conversation_without_a_user_gives_its_first_message() {
        let reply = reply(
            Chat,
            &json!({"messages": [{"role": "system", "content": "be brief"}]}),
        );
        assert_eq!(reply.json()["choices"][0]["message"]["content"], "be brief");
    }

    #[test]
    fn max_tokens_cuts_and_says_so() {
        for (max, text, reason) in [
            (0, "", "length"),
            (2, "a b", "length"),
            (3, "a b c", "stop"),
        ] {
            let reply = reply(Completions, &json!({"prompt": "a b c", "max_tokens": max}));
            let choice = &reply.json()["choices"][0];
            assert_eq!(choice["text"], text);
            assert_eq!(choice["finish_reason"], reason);
            assert_eq!(streamed(&reply, "/choices/0/finish_reason"), reason);
        }
        let both = json!({"prompt": "a b c", "max_tokens": 3, "max_completion_tokens": 1});
        assert_eq!(reply(Completions, &both).generated_tokens(), 1);
    }

    #[test]
    fn each_prompt_of_a_list_is_a_choice() {
        let reply = reply(Completions, &json!({"prompt": ["a b", "c"]}));
        let document = reply.json();
        assert_eq!(document["choices"][0]["text"], "a b");
        assert_eq!(document["choices"][1]["text"], "c");
        assert_eq!(document["choices"][1]["index"], 1);
    }

    #[test]
    fn usage_is_streamed_when_asked_for() {
        let body =
            json!({"prompt": "a b", "stream": true, "stream_options": {"include_usage": true}});
        let events = reply(Completions, &body).events();
        assert!(events.contains(r#""completion_tokens":2"#), "{events}");
    }

    #[test]
    fn whatever_is_wrong_with_a_request_is_a_400() {
        let deep = format!("{{\"prompt\":{}", "[".repeat(10_000));
        let long = json!({"prompt": "a ".repeat(MAX_PROMPT_WORDS + 1)}).to_string();
        let cases: &[(Endpoint, &[u8])] = &[
            (Completions, b""),
            (Completions, b"\xff\xfe\x00"),
            (Completions, b"[]"),
            (Completions, b"{}"),
            (Completions, br#"{"prompt": 1}"#),
            (Completions, br#"{"prompt": []}"#),
            (Completions, br#"{"prompt": [[1, 2]]}"#),
            (Completions, br#"{"prompt": "a", "max_tokens": -1}"#),
            (Completions, br#"{"prompt": "a", "stream": "yes"}"#),
            (Completions, deep.as_bytes()),
            (Completions, long.as_bytes()),
            (Chat, br#"{"prompt": "a"}"#),
            (Chat, br#"{"messages": []}"#),
            (Chat, br#"{"messages": [{"content": "a"}]}"#),
            (Chat, br#"{"messages": [{"role": "user", "content": 1}]}"#),
        ];
        for (endpoint, body) in cases {
            let error = parse(*endpoint, body).expect_err("a bad request");
            assert_eq!(error.status, 400);
            let body = error.body();
            assert_eq!(body["error"]["type"], "invalid_request_error");
            assert!(body["error"]["message"].is_string());
        }
    }
}
