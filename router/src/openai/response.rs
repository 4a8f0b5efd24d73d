//! Responses in OpenAI's shapes: whole, or as the `data:` events of a stream.
//!
//! ```text
//! chat        data: {…"delta":{"role":"assistant","content":""}…}     once per choice, with its first token
//!             data: {…"delta":{"content":"Hel"}…} …
//!             data: {…"delta":{},"finish_reason":"stop"}
//! both        data: {…"choices":[],"usage":{…}}                       if include_usage
//!             data: [DONE]                                            always last
//! ```

use std::fmt::Write as _;

use pilotlight_domain::session::{FinishReason, Logprobs, TokenLogprob, Usage};
use serde::Serialize;

use super::error::ApiError;
use super::request::Task;

/// What every object of one answer repeats.
#[derive(Clone, Debug)]
pub(crate) struct Envelope {
    pub(crate) task: Task,
    /// `chatcmpl-` or `cmpl-` and the request's id.
    pub(crate) id: String,
    /// Seconds since the epoch.
    pub(crate) created: u64,
    /// As the client wrote it.
    pub(crate) model: String,
    /// `usage: null` in each chunk, and one with the numbers at the end.
    pub(crate) include_usage: bool,
    /// How many alternatives a chat asked for: no more are shown.
    pub(crate) top_logprobs: usize,
}

#[derive(Serialize)]
struct Object<'a, C> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: C,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<UsageWire>>,
}

#[derive(Serialize)]
struct UsageWire {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: Details,
}

#[derive(Serialize)]
struct Details {
    cached_tokens: u32,
}

impl From<Usage> for UsageWire {
    fn from(usage: Usage) -> Self {
        UsageWire {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            total_tokens: usage.prompt_tokens.saturating_add(usage.completion_tokens),
            prompt_tokens_details: Details { cached_tokens: usage.cached_tokens },
        }
    }
}

#[derive(Serialize)]
struct ChatChoice<'a> {
    index: usize,
    message: ChatMessage<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: &'static str,
}

#[derive(Serialize)]
struct ChatMessage<'a> {
    role: &'static str,
    content: &'a str,
    refusal: Option<()>,
}

#[derive(Serialize)]
struct ChatChunk<'a> {
    index: usize,
    delta: Delta<'a>,
    logprobs: Option<ChatLogprobs<'a>>,
    finish_reason: Option<&'static str>,
}

#[derive(Default, Serialize)]
struct Delta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

#[derive(Serialize)]
struct ChatLogprobs<'a> {
    content: Vec<ChatToken<'a>>,
    refusal: Option<()>,
}

#[derive(Serialize)]
struct ChatToken<'a> {
    token: &'a str,
    logprob: f32,
    bytes: &'a [u8],
    top_logprobs: Vec<ChatTop<'a>>,
}

#[derive(Serialize)]
struct ChatTop<'a> {
    token: &'a str,
    logprob: f32,
    bytes: &'a [u8],
}

#[derive(Serialize)]
struct TextChoice<'a> {
    text: &'a str,
    index: usize,
    logprobs: Option<TextLogprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Serialize)]
struct TextLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f32>,
    top_logprobs: Vec<serde_json::Map<String, serde_json::Value>>,
    text_offset: Vec<usize>,
}

/// JSON has no infinities: a token that cannot be is very unlikely, as OpenAI writes it.
fn finite(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob } else { -9999.0 }
}

fn chat_logprobs(tokens: &[Logprobs], top: usize) -> ChatLogprobs<'_> {
    let content = tokens
        .iter()
        .map(|t| ChatToken {
            token: &t.chosen.token,
            logprob: finite(t.chosen.logprob),
            bytes: &t.chosen.bytes,
            top_logprobs: t
                .top
                .iter()
                .take(top)
                .map(|a| ChatTop { token: &a.token, logprob: finite(a.logprob), bytes: &a.bytes })
                .collect(),
        })
        .collect();
    ChatLogprobs { content, refusal: None }
}

/// A token as a key: its text, or its bytes where they are no text by themselves.
fn token_key(token: &TokenLogprob) -> String {
    if std::str::from_utf8(&token.bytes).is_ok() {
        return token.token.clone();
    }
    let mut key = String::from("bytes:");
    for byte in &token.bytes {
        let _infallible = write!(key, "\\x{byte:02x}");
    }
    key
}

fn text_logprobs(tokens: &[(usize, Logprobs)]) -> TextLogprobs {
    let mut all = TextLogprobs {
        tokens: Vec::with_capacity(tokens.len()),
        token_logprobs: Vec::with_capacity(tokens.len()),
        top_logprobs: Vec::with_capacity(tokens.len()),
        text_offset: Vec::with_capacity(tokens.len()),
    };
    for (offset, token) in tokens {
        all.tokens.push(token_key(&token.chosen));
        all.token_logprobs.push(finite(token.chosen.logprob));
        let top = token.top.iter().map(|a| (token_key(a), finite(a.logprob).into())).collect();
        all.top_logprobs.push(top);
        all.text_offset.push(*offset);
    }
    all
}

fn finish(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

/// One choice as it grows; a stream needs only its counters.
#[derive(Clone, Debug, Default)]
pub(crate) struct Choice {
    text: String,
    logprobs: Vec<(usize, Logprobs)>,
    reason: Option<FinishReason>,
    chars: usize,
    begun: bool,
}

impl Choice {
    /// Keeps a token, for an answer in one piece.
    pub(crate) fn push(&mut self, text: &str, logprobs: Option<Logprobs>) {
        if let Some(logprobs) = logprobs {
            self.logprobs.push((self.chars, logprobs));
        }
        self.chars += text.chars().count();
        self.text.push_str(text);
    }

    /// Its end.
    pub(crate) fn finish(&mut self, reason: FinishReason) {
        self.reason = Some(reason);
    }
}

impl Envelope {
    fn object<'a, C: Serialize>(
        &'a self,
        choices: C,
        usage: Option<Option<UsageWire>>,
        chunk: bool,
    ) -> Object<'a, C> {
        let object = match (self.task, chunk) {
            (Task::Chat, false) => "chat.completion",
            (Task::Chat, true) => "chat.completion.chunk",
            (Task::Completion, _) => "text_completion",
        };
        Object { id: &self.id, object, created: self.created, model: &self.model, choices, usage }
    }

    /// The answer in one piece.
    pub(crate) fn whole(&self, choices: &[Choice], usage: Usage) -> Vec<u8> {
        let usage = Some(Some(usage.into()));
        let reason = |c: &Choice| finish(c.reason.unwrap_or(FinishReason::Stop));
        match self.task {
            Task::Chat => {
                let tokens: Vec<Vec<Logprobs>> =
                    choices.iter().map(|c| c.logprobs.iter().map(|(_, l)| l.clone()).collect()).collect();
                let list: Vec<ChatChoice<'_>> = choices
                    .iter()
                    .zip(&tokens)
                    .enumerate()
                    .map(|(index, (c, tokens))| ChatChoice {
                        index,
                        message: ChatMessage { role: "assistant", content: &c.text, refusal: None },
                        logprobs: (!tokens.is_empty()).then(|| chat_logprobs(tokens, self.top_logprobs)),
                        finish_reason: reason(c),
                    })
                    .collect();
                json(&self.object(list, usage, false))
            }
            Task::Completion => {
                let list: Vec<TextChoice<'_>> = choices
                    .iter()
                    .enumerate()
                    .map(|(index, c)| TextChoice {
                        text: &c.text,
                        index,
                        logprobs: (!c.logprobs.is_empty()).then(|| text_logprobs(&c.logprobs)),
                        finish_reason: Some(reason(c)),
                    })
                    .collect();
                json(&self.object(list, usage, false))
            }
        }
    }

    /// The events of one token; none where it adds nothing to see.
    pub(crate) fn token(
        &self,
        index: usize,
        choice: &mut Choice,
        text: &str,
        logprobs: Option<Logprobs>,
    ) -> Vec<u8> {
        let mut out = Vec::new();
        self.begin(index, choice, &mut out);
        let offset = choice.chars;
        choice.chars += text.chars().count();
        if text.is_empty() && logprobs.is_none() {
            return out;
        }
        match self.task {
            Task::Chat => {
                let logprobs = logprobs.as_ref().map(std::slice::from_ref);
                let chunk = ChatChunk {
                    index,
                    delta: Delta { role: None, content: Some(text) },
                    logprobs: logprobs.map(|l| chat_logprobs(l, self.top_logprobs)),
                    finish_reason: None,
                };
                self.event([chunk], &mut out);
            }
            Task::Completion => {
                let logprobs = logprobs.map(|l| text_logprobs(&[(offset, l)]));
                self.event([TextChoice { text, index, logprobs, finish_reason: None }], &mut out);
            }
        }
        out
    }

    /// The events of a choice's end.
    pub(crate) fn end(&self, index: usize, choice: &mut Choice, reason: FinishReason) -> Vec<u8> {
        let mut out = Vec::new();
        self.begin(index, choice, &mut out);
        let finish_reason = Some(finish(reason));
        match self.task {
            Task::Chat => {
                let chunk = ChatChunk { index, delta: Delta::default(), logprobs: None, finish_reason };
                self.event([chunk], &mut out);
            }
            Task::Completion => {
                self.event([TextChoice { text: "", index, logprobs: None, finish_reason }], &mut out);
            }
        }
        out
    }

    /// The last events of a stream that ended well.
    pub(crate) fn done(&self, usage: Usage) -> Vec<u8> {
        let mut out = Vec::new();
        if self.include_usage {
            let none: [(); 0] = [];
            data(&self.object(none, Some(Some(usage.into())), true), &mut out);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
        out
    }

    fn begin(&self, index: usize, choice: &mut Choice, out: &mut Vec<u8>) {
        if self.task == Task::Chat && !choice.begun {
            let delta = Delta { role: Some("assistant"), content: Some("") };
            self.event([ChatChunk { index, delta, logprobs: None, finish_reason: None }], out);
        }
        choice.begun = true;
    }

    fn event<C: Serialize>(&self, choices: [C; 1], out: &mut Vec<u8>) {
        data(&self.object(choices, self.include_usage.then_some(None), true), out);
    }
}

fn json<T: Serialize>(value: &T) -> Vec<u8> {
    serde_json::to_vec(value).expect("plain data with text keys serializes")
}

fn data<T: Serialize>(value: &T, out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: ");
    out.extend_from_slice(&json(value));
    out.extend_from_slice(b"\n\n");
}

/// An error after the first byte: the last event of its stream.
pub(crate) fn error_event(error: &ApiError) -> Vec<u8> {
    let mut out = b"data: ".to_vec();
    out.extend_from_slice(&error.json());
    out.extend_from_slice(b"\n\n");
    out
}

/// A line that clients ignore, so that nobody on the way thinks the connection idle.
pub(crate) fn heartbeat(state: &str, remaining_seconds: Option<f64>) -> Vec<u8> {
    match remaining_seconds {
        Some(seconds) => format!(": {state}, about {seconds:.0} s left\n\n").into_bytes(),
        None => format!(": {state}\n\n").into_bytes(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn envelope(task: Task, include_usage: bool) -> Envelope {
        Envelope { task, id: "id-1".into(), created: 7, model: "m".into(), include_usage, top_logprobs: 1 }
    }

    fn logprob(token: &str, bytes: &[u8], logprob: f32) -> TokenLogprob {
        TokenLogprob { id: 1, token: token.into(), bytes: bytes.into(), logprob }
    }

    fn logprobs() -> Logprobs {
        Logprobs {
            chosen: logprob("a", b"a", -0.5),
            top: vec![logprob("a", b"a", -0.5), logprob("\u{fffd}", &[0xe2, 0x80], f32::NEG_INFINITY)],
        }
    }

    fn text(bytes: Vec<u8>) -> String {
        String::from_utf8(bytes).unwrap()
    }

    const USAGE: Usage = Usage { prompt_tokens: 3, completion_tokens: 2, cached_tokens: 1 };

    #[test]
    fn a_chat_streams_role_content_and_reason() {
        let envelope = envelope(Task::Chat, false);
        let mut choice = Choice::default();
        let head = r#"data: {"id":"id-1","object":"chat.completion.chunk","created":7,"model":"m","choices":[{"index":0,"#;
        assert_eq!(
            text(envelope.token(0, &mut choice, "Hi", None)),
            format!(
                "{head}\"delta\":{{\"role\":\"assistant\",\"content\":\"\"}},\"logprobs\":null,\"finish_reason\":null}}]}}\n\n\
                 {head}\"delta\":{{\"content\":\"Hi\"}},\"logprobs\":null,\"finish_reason\":null}}]}}\n\n"
            )
        );
        assert_eq!(text(envelope.token(0, &mut choice, "", None)), "");
        assert_eq!(
            text(envelope.end(0, &mut choice, FinishReason::Length)),
            format!("{head}\"delta\":{{}},\"logprobs\":null,\"finish_reason\":\"length\"}}]}}\n\n")
        );
        assert_eq!(text(envelope.done(USAGE)), "data: [DONE]\n\n");
    }

    #[test]
    fn usage_comes_last_with_empty_choices() {
        let envelope = envelope(Task::Completion, true);
        let mut choice = Choice::default();
        let event = text(envelope.token(1, &mut choice, "x", None));
        assert!(event.contains(
            r#""choices":[{"text":"x","index":1,"logprobs":null,"finish_reason":null}],"usage":null"#
        ));
        assert_eq!(
            text(envelope.done(USAGE)),
            "data: {\"id\":\"id-1\",\"object\":\"text_completion\",\"created\":7,\"model\":\"m\",\"choices\":[],\
             \"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2,\"total_tokens\":5,\
             \"prompt_tokens_details\":{\"cached_tokens\":1}}}\n\ndata: [DONE]\n\n"
        );
    }

    #[test]
    fn logprobs_have_both_forms() {
        let mut choice = Choice::default();
        choice.push("é", Some(logprobs()));
        choice.push("a", Some(logprobs()));
        choice.finish(FinishReason::Stop);
        let whole: serde_json::Value =
            serde_json::from_slice(&envelope(Task::Completion, false).whole(&[choice.clone()], USAGE))
                .unwrap();
        let got = &whole["choices"][0]["logprobs"];
        assert_eq!(got["text_offset"], serde_json::json!([0, 1]));
        assert_eq!(got["top_logprobs"][0], serde_json::json!({"a": -0.5, "bytes:\\xe2\\x80": -9999.0}));
        let whole: serde_json::Value =
            serde_json::from_slice(&envelope(Task::Chat, false).whole(&[choice], USAGE)).unwrap();
        assert_eq!(whole["choices"][0]["message"]["content"], "éa");
        assert_eq!(
            whole["choices"][0]["logprobs"]["content"][0],
            serde_json::json!({"token": "a", "logprob": -0.5, "bytes": [97],
                "top_logprobs": [{"token": "a", "logprob": -0.5, "bytes": [97]}]})
        );
        assert_eq!(whole["usage"]["total_tokens"], 5);
    }

    #[test]
    fn heartbeats_are_comments() {
        assert_eq!(text(heartbeat("loading", Some(3.4))), ": loading, about 3 s left\n\n");
        assert_eq!(text(heartbeat("waiting", None)), ": waiting\n\n");
    }
}
