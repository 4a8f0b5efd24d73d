//! Sessions: one generation in flight, as every part speaks of it.
//!
//! A session's whole state is small: prompt ids, generated ids, sampling parameters with their seed. Everything else
//! (random numbers, penalties, the detokeniser, the stop-string tail) is *derived* from these, which is why a session
//! moves by replaying tokens.
//!
//! Invariants: token `index` counts generated tokens from 0 and never restarts, also after a move; `text` of token
//! *i* is a function of the generated ids up to *i* and the stop strings alone, so the text of a replayed session is
//! the same whoever says it. The router forwards a token only if `(epoch, index)` is the next one it expects.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{ModelName, Phases, SessionId, Tier};

/// A token's id in its model's vocabulary.
pub type TokenId = u32;

/// What to generate from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Input {
    /// Messages for the model's chat template.
    Chat(Vec<Message>),
    /// Text, tokenized with the tokenizer's post-processor (a BOS token counts).
    Text(String),
    /// Token ids, taken as they are.
    Tokens(Vec<TokenId>),
}

/// One message of a chat; content parts of type text are joined before they come here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, or whatever the template knows.
    pub role: String,
    /// The text.
    pub content: String,
    /// The speaker's name, where the client gave one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// How tokens are chosen. `None` is the checkpoint's `generation_config.json`, else the neutral value.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sampling {
    /// At most so many tokens, counted from the original request; none: up to the context length.
    pub max_tokens: Option<u32>,
    /// 0 is greedy.
    #[serde(deserialize_with = "finite::option")]
    pub temperature: Option<f32>,
    /// Nucleus: the smallest set of tokens with this much probability.
    #[serde(deserialize_with = "finite::option")]
    pub top_p: Option<f32>,
    /// Only the k most likely; 0 is off.
    pub top_k: Option<u32>,
    /// Only tokens at least this likely, relative to the most likely one.
    #[serde(deserialize_with = "finite::option")]
    pub min_p: Option<f32>,
    /// Subtracted from a logit for each earlier occurrence among the generated tokens.
    #[serde(deserialize_with = "finite::number")]
    pub frequency_penalty: f32,
    /// Subtracted from a logit once if the token occurred among the generated tokens.
    #[serde(deserialize_with = "finite::number")]
    pub presence_penalty: f32,
    /// Divides (positive) or multiplies (negative) the logit of tokens in prompt and output; none is 1.
    #[serde(deserialize_with = "finite::option")]
    pub repetition_penalty: Option<f32>,
    /// The random number of token *i* is a function of `(seed, i)` alone. The router picks one if the client did not.
    pub seed: u64,
    /// Texts that end the generation; they are not part of the output.
    pub stop: Vec<String>,
    /// Do not stop at the end-of-text token.
    pub ignore_eos: bool,
    /// Report the chosen token's log-probability and this many alternatives.
    pub logprobs: Option<u32>,
    /// Added to logits.
    #[serde(deserialize_with = "finite::map")]
    pub logit_bias: BTreeMap<TokenId, f32>,
    /// What the text must be; none: anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grammar: Option<Grammar>,
}

/// Numbers that are numbers: JSON has no others, so that one which only a larger type can hold would arrive as `null`
/// at the next part, if this one took it.
mod finite {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Deserializer, de::Error};

    use super::TokenId;

    fn check<E: Error>(number: f32) -> Result<f32, E> {
        if number.is_finite() { Ok(number) } else { Err(E::custom("a number is too large")) }
    }

    pub(super) fn number<'de, D: Deserializer<'de>>(d: D) -> Result<f32, D::Error> {
        check(f32::deserialize(d)?)
    }

    pub(super) fn option<'de, D: Deserializer<'de>>(d: D) -> Result<Option<f32>, D::Error> {
        Option::<f32>::deserialize(d)?.map(check).transpose()
    }

    pub(super) fn map<'de, D: Deserializer<'de>>(d: D) -> Result<BTreeMap<TokenId, f32>, D::Error> {
        let numbers = BTreeMap::<TokenId, f32>::deserialize(d)?;
        numbers.values().try_for_each(|number| check(*number).map(|_| ()))?;
        Ok(numbers)
    }
}

/// What a text must be. Tokens that cannot continue such a text are never chosen, and its end ends the session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Grammar {
    /// A JSON object, whatever is in it.
    JsonObject,
    /// JSON that this schema describes; the schema as JSON text.
    JsonSchema(String),
}

/// A session as the router opens it at an agent, and the agent at a worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SessionSpec {
    /// Names it in logs and in `pilotlight session ID`.
    pub id: SessionId,
    /// The model that must answer.
    pub model: ModelName,
    /// Counts the moves; 0 at first.
    #[serde(default)]
    pub epoch: u32,
    /// The prompt.
    pub input: Input,
    /// Tokens already generated and sent: they are replayed, never sent again.
    #[serde(default)]
    pub generated: Vec<TokenId>,
    /// How tokens are chosen.
    #[serde(default)]
    pub sampling: Sampling,
    /// Prefill what exists and wait: the session says no token before [`SessionCommand::Release`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hold: bool,
    /// Begin on the CPU where that may serve the model while its device is not ready, whatever is predicted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub on_cpu: bool,
}

/// What an arbiter asks of an open session while it moves: the router of an agent, the agent of a worker. None is
/// answered but by the session's events, in their order; one that does not fit the session's state changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "command", rename_all = "snake_case")]
pub enum SessionCommand {
    /// To a held session: these tokens too have been generated elsewhere. `at` is the index of the first; what
    /// overlaps with the known is skipped. Answered by `prepared`.
    Extend {
        /// Index of the first of `ids`.
        at: u32,
        /// The tokens.
        ids: Vec<TokenId>,
    },
    /// Stop after the current token. Answered by `frozen`, or by `done` if the end came first.
    Freeze,
    /// To a held or frozen session: these are the last tokens said elsewhere; go on from here, under this epoch.
    /// Answered by `moved` with the index of the next token.
    Release {
        /// The epoch of all that follows.
        epoch: u32,
        /// Index of the first of `ids`.
        at: u32,
        /// The tokens since the last `Extend`; none for a session that goes on where it froze.
        ids: Vec<TokenId>,
    },
}

/// Why a session ended well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The end-of-text token or a stop string.
    Stop,
    /// `max_tokens` or the context length.
    Length,
}

/// Why a session ended badly: a closed list, matched on by code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureCode {
    /// The prompt is longer than the model's context.
    ContextLengthExceeded,
    /// The request cannot be carried out as it is; the message says why.
    BadRequest,
    /// The agent has no order for this model.
    UnknownModel,
    /// The model's load failed; the message says why.
    LoadFailed,
    /// No memory or no slot for the session.
    NoCapacity,
    /// The worker died or hung.
    WorkerLost,
    /// The node or the replica is going away.
    Draining,
    /// Asked for by the other side.
    Cancelled,
    /// Ours.
    Internal,
}

/// What the caller may do about a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Retry {
    /// The same request fails the same way anywhere.
    No,
    /// Another replica may do.
    Elsewhere,
}

/// Token counts, as the OpenAI API reports them. Replayed tokens count once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens generated, an end-of-text token included.
    pub completion_tokens: u32,
    /// Prompt tokens whose KV pages were reused.
    #[serde(default)]
    pub cached_tokens: u32,
}

/// One token and its log-probability, of the unscaled distribution.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    /// The token.
    pub id: TokenId,
    /// Its own bytes, decoded (lossy where they are no UTF-8).
    pub token: String,
    /// Its own bytes.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability.
    #[serde(deserialize_with = "finite::number")]
    pub logprob: f32,
}

/// The chosen token's log-probability, and the most likely alternatives, most likely first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Logprobs {
    /// The chosen token.
    pub chosen: TokenLogprob,
    /// At least as many as were asked for.
    pub top: Vec<TokenLogprob>,
}

/// What a worker says of a session to its agent, and an agent to the router, as lines of JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum SessionEvent {
    /// The session is known and will be served. First, exactly once per opening.
    Accepted {
        /// The prompt as token ids.
        prompt_ids: Vec<TokenId>,
        /// The device that serves it: `cpu`, `sim`, `gpu0`.
        device: String,
        /// Outputs are byte-identical inside one class.
        numerics: String,
        /// What this session waited for at the agent; zero for a warm one. `prefill` is not in it.
        #[serde(default)]
        waited: Phases,
        /// The tier that the load which serves it started from.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        from: Option<Tier>,
    },
    /// One generated token.
    Token {
        /// The session's epoch when it was generated.
        epoch: u32,
        /// Its place among the generated tokens, from 0.
        index: u32,
        /// The token. Ids are the truth.
        id: TokenId,
        /// What it adds to the text; may be empty (incomplete UTF-8, a possible stop string's beginning).
        text: String,
        /// If they were asked for.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        logprobs: Option<Logprobs>,
    },
    /// A held session has replayed so far.
    Prepared {
        /// Generated tokens that are replayed: the session could go on with this index.
        next_index: u32,
        /// Measured rate of the replay in tokens each second; 0: nothing was measured.
        rate: f64,
    },
    /// The session has stopped; every token before was said.
    Frozen {
        /// The index of the token that was not generated any more.
        next_index: u32,
    },
    /// The session goes on elsewhere.
    Moved {
        /// The device or node that serves it now.
        to: String,
        /// The new epoch.
        epoch: u32,
        /// The index of the first token from there.
        next_index: u32,
    },
    /// The end, well. Last.
    Done {
        /// Why.
        reason: FinishReason,
        /// The counts.
        usage: Usage,
    },
    /// The end, badly. Last.
    Failed {
        /// Which kind.
        code: FailureCode,
        /// Cause and cure, for people.
        message: String,
        /// What the caller may do.
        retry: Retry,
    },
}

impl SessionEvent {
    /// Whether nothing comes after it.
    pub const fn is_last(&self) -> bool {
        matches!(self, SessionEvent::Done { .. } | SessionEvent::Failed { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_lines_of_json() {
        let event = SessionEvent::Token { epoch: 0, index: 3, id: 17, text: "a\nb".into(), logprobs: None };
        let line = serde_json::to_string(&event).unwrap();
        assert_eq!(line, r#"{"event":"token","epoch":0,"index":3,"id":17,"text":"a\nb"}"#);
        assert_eq!(serde_json::from_str::<SessionEvent>(&line).unwrap(), event);
    }

    #[test]
    fn numbers_that_no_part_could_say_again_are_refused() {
        let read = |json: &str| serde_json::from_str::<Sampling>(json);
        for field in
            ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"]
        {
            assert!(read(&format!("{{\"{field}\":1e300}}")).is_err(), "{field}");
            assert!(read(&format!("{{\"{field}\":-1.5}}")).is_ok(), "{field}");
        }
        assert!(read(r#"{"logit_bias":{"3":1e39}}"#).is_err());
        let logprob = r#"{"id":1,"token":"a","bytes":[97],"logprob":-1e39}"#;
        assert!(serde_json::from_str::<TokenLogprob>(logprob).is_err());
        assert_eq!(read(r#"{"temperature":null,"logit_bias":{"3":2.5}}"#).unwrap().logit_bias[&3], 2.5);
    }

    #[test]
    fn a_session_needs_only_id_model_and_input() {
        let spec: SessionSpec = serde_json::from_str(
            r#"{"id":"r1","model":{"namespace":"default","name":"demo"},"input":{"text":"hi"}}"#,
        )
        .unwrap();
        assert_eq!(spec.sampling, Sampling::default());
        assert_eq!(spec.input, Input::Text("hi".into()));
    }
}
