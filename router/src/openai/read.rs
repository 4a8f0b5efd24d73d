//! From a body's bytes to a [`Request`], or to a 400 that names the parameter.
//!
//! Which parameters do something, which ask for nothing (`null`, `[]`, `echo: false`), which are hints that change
//! no answer (`user`, `metadata`, …) and which are refused stands in one table, [`Raw::field`]. An unknown name is
//! refused: it may mean something to whoever sent it.

use std::collections::HashSet;
use std::fmt;

use pilotlight_domain::session::{Input, Message, Sampling};
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use super::error::ApiError;
use super::request::{Request, SESSIONS_MAX, Task};
use super::wire::{
    Asks, LogitBias, MessagesSeed, PROMPTS_MAX, Prompt, ResponseFormat, STOPS_MAX, Seed, Stop, StreamOptions,
    Trail,
};

/// Log-probabilities of that many alternatives at most: OpenAI's bound for chat.
const TOP_LOGPROBS_MAX: u32 = 20;
/// Bytes of one stop string.
const STOP_BYTES_MAX: usize = 1_024;

/// Reads a body. `random_seed` is used where the client gave none.
pub(crate) fn read(task: Task, body: &[u8], random_seed: u64) -> Result<Request, ApiError> {
    let trail = Trail::default();
    let mut json = serde_json::Deserializer::from_slice(body);
    let raw =
        BodySeed { task, trail: &trail }.deserialize(&mut json).and_then(|raw| json.end().map(|()| raw));
    match raw {
        Ok(raw) => raw.check(task, random_seed),
        Err(error) => Err(refusal(trail.path(), &error)),
    }
}

fn refusal(param: Option<String>, error: &serde_json::Error) -> ApiError {
    use serde_json::error::Category;
    match (error.classify(), param) {
        (Category::Data, Some(param)) => {
            let message = format!("`{param}`: {error}");
            ApiError::bad(param, message)
        }
        (Category::Data, None) => {
            ApiError::new(super::Code::BadRequest, format!("the body is not a request: {error}"))
        }
        (_, param) => {
            let place = param.as_deref().map(|p| format!(" in `{p}`")).unwrap_or_default();
            let mut refused =
                ApiError::new(super::Code::BadRequest, format!("the body is not valid JSON{place}: {error}"));
            refused.param = param;
            refused
        }
    }
}

struct BodySeed<'a> {
    task: Task,
    trail: &'a Trail,
}

impl<'de> DeserializeSeed<'de> for BodySeed<'_> {
    type Value = Raw;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Raw, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for BodySeed<'_> {
    type Value = Raw;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON object with `model` and the other parameters")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw, A::Error> {
        let (mut raw, mut seen) = (Raw::default(), HashSet::new());
        while let Some(key) = map.next_key::<String>()? {
            self.trail.at(key.clone(), || raw.field(self.task, &key, &mut map, self.trail))?;
            if !seen.insert(key) {
                return Err(A::Error::custom("a parameter is given twice"));
            }
        }
        Ok(raw)
    }
}

/// What the body says, unchecked; absent and `null` are none.
#[derive(Default)]
struct Raw {
    model: Option<String>,
    messages: Option<Vec<Message>>,
    prompt: Option<Vec<Input>>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    min_p: Option<f64>,
    frequency_penalty: Option<f64>,
    presence_penalty: Option<f64>,
    repetition_penalty: Option<f64>,
    seed: Option<Seed>,
    stop: Option<Stop>,
    n: Option<u32>,
    best_of: Option<u32>,
    logprobs_chat: Option<bool>,
    logprobs_completion: Option<u32>,
    top_logprobs: Option<u32>,
    logit_bias: Option<LogitBias>,
    response_format: Option<ResponseFormat>,
    ignore_eos: Option<bool>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
}

impl Raw {
    /// Reads the value of one parameter.
    fn field<'de, A: MapAccess<'de>>(
        &mut self,
        task: Task,
        key: &str,
        map: &mut A,
        trail: &Trail,
    ) -> Result<(), A::Error> {
        let chat = task == Task::Chat;
        match key {
            "model" => self.model = map.next_value()?,
            "messages" if chat => self.messages = Some(map.next_value_seed(MessagesSeed(trail))?),
            "prompt" if !chat => self.prompt = map.next_value::<Option<Prompt>>()?.map(|p| p.0),
            "max_tokens" => self.max_tokens = map.next_value()?,
            "max_completion_tokens" => self.max_completion_tokens = map.next_value()?,
            "temperature" => self.temperature = map.next_value()?,
            "top_p" => self.top_p = map.next_value()?,
            "top_k" => self.top_k = map.next_value()?,
            "min_p" => self.min_p = map.next_value()?,
            "frequency_penalty" => self.frequency_penalty = map.next_value()?,
            "presence_penalty" => self.presence_penalty = map.next_value()?,
            "repetition_penalty" => self.repetition_penalty = map.next_value()?,
            "seed" => self.seed = map.next_value()?,
            "stop" => self.stop = map.next_value()?,
            "n" => self.n = map.next_value()?,
            "best_of" if !chat => self.best_of = map.next_value()?,
            "logprobs" if chat => self.logprobs_chat = map.next_value()?,
            "logprobs" => self.logprobs_completion = map.next_value()?,
            "top_logprobs" if chat => self.top_logprobs = map.next_value()?,
            "logit_bias" => self.logit_bias = map.next_value()?,
            "response_format" => self.response_format = map.next_value()?,
            "ignore_eos" => self.ignore_eos = map.next_value()?,
            "stream" => self.stream = map.next_value()?,
            "stream_options" => self.stream_options = map.next_value()?,
            _ => return neutral(chat, key, map),
        }
        Ok(())
    }

    fn check(self, task: Task, random_seed: u64) -> Result<Request, ApiError> {
        let sampling = self.sampling(random_seed)?;
        let model = self.model.ok_or_else(|| ApiError::bad("model", "`model` is missing"))?;
        let inputs = match task {
            Task::Chat => {
                let messages = self.messages.unwrap_or_default();
                if messages.is_empty() {
                    return Err(ApiError::bad("messages", "`messages` is missing or empty"));
                }
                vec![Input::Chat(messages)]
            }
            Task::Completion => check_prompts(self.prompt.unwrap_or_default())?,
        };
        let n = self.n.unwrap_or(1);
        if n == 0 || n as usize * inputs.len() > SESSIONS_MAX {
            let message = format!("`n` times the number of prompts must be from 1 to {SESSIONS_MAX}");
            return Err(ApiError::bad("n", message));
        }
        if self.best_of.is_some_and(|best| best != n) {
            return Err(ApiError::bad("best_of", "`best_of` other than `n` is not supported"));
        }
        let stream = self.stream.unwrap_or(false);
        if let Some(options) = &self.stream_options {
            if !stream {
                return Err(ApiError::bad("stream_options", "`stream_options` needs `stream: true`"));
            }
            if options.include_obfuscation == Some(true) {
                let param = "stream_options.include_obfuscation";
                return Err(ApiError::bad(param, format!("`{param}: true` is not supported")));
            }
        }
        let include_usage = self.stream_options.and_then(|o| o.include_usage).unwrap_or(false);
        Ok(Request { task, model, inputs, n, sampling, stream, include_usage })
    }

    fn sampling(&self, random_seed: u64) -> Result<Sampling, ApiError> {
        let max_tokens = match (self.max_tokens, self.max_completion_tokens) {
            (Some(a), Some(b)) if a != b => {
                let message =
                    "`max_tokens` and `max_completion_tokens` are the same thing and differ; send one";
                return Err(ApiError::bad("max_completion_tokens", message));
            }
            (Some(0), _) => return Err(ApiError::bad("max_tokens", "`max_tokens` must be at least 1")),
            (None, Some(0)) => {
                let message = "`max_completion_tokens` must be at least 1";
                return Err(ApiError::bad("max_completion_tokens", message));
            }
            (a, b) => a.or(b),
        };
        let top_k = match self.top_k {
            None => None,
            Some(-1) => Some(0),
            Some(k) => Some(u32::try_from(k).map_err(|_| {
                ApiError::bad("top_k", "`top_k` must be at least 1; 0 and -1 mean every token")
            })?),
        };
        let repetition_penalty = range("repetition_penalty", self.repetition_penalty, 0.0, 10.0)?;
        if repetition_penalty.is_some_and(|p| p <= 0.0) {
            return Err(ApiError::bad("repetition_penalty", "`repetition_penalty` must be more than 0"));
        }
        let stop = self.stop.as_ref().map(|s| s.0.clone()).unwrap_or_default();
        check_stops(&stop)?;
        Ok(Sampling {
            max_tokens,
            temperature: range("temperature", self.temperature, 0.0, 2.0)?,
            top_p: range("top_p", self.top_p, 0.0, 1.0)?,
            top_k,
            min_p: range("min_p", self.min_p, 0.0, 1.0)?,
            frequency_penalty: range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?.unwrap_or(0.0),
            presence_penalty: range("presence_penalty", self.presence_penalty, -2.0, 2.0)?.unwrap_or(0.0),
            repetition_penalty,
            seed: self.seed.as_ref().map_or(random_seed, |s| s.0),
            stop,
            ignore_eos: self.ignore_eos.unwrap_or(false),
            logprobs: self.logprobs()?,
            logit_bias: self.logit_bias.as_ref().map(|b| b.0.clone()).unwrap_or_default(),
            grammar: self.response_format.as_ref().and_then(|format| format.0.clone()),
        })
    }

    fn logprobs(&self) -> Result<Option<u32>, ApiError> {
        let in_bounds = |param: &str, n: u32| {
            if n <= TOP_LOGPROBS_MAX {
                Ok(n)
            } else {
                Err(ApiError::bad(param, format!("`{param}` must be from 0 to {TOP_LOGPROBS_MAX}")))
            }
        };
        match (self.logprobs_chat, self.top_logprobs, self.logprobs_completion) {
            (_, _, Some(n)) => in_bounds("logprobs", n).map(Some),
            (Some(true), n, None) => in_bounds("top_logprobs", n.unwrap_or(0)).map(Some),
            (_, Some(n), None) if n > 0 => {
                Err(ApiError::bad("top_logprobs", "`top_logprobs` needs `logprobs: true`"))
            }
            _ => Ok(None),
        }
    }
}

/// Parameters that are accepted only where they ask for nothing, or change no answer.
fn neutral<'de, A: MapAccess<'de>>(chat: bool, key: &str, map: &mut A) -> Result<(), A::Error> {
    let refused = |what: &str| Err(A::Error::custom(format_args!("{what} is not supported")));
    match key {
        // Hints for others than the model.
        "user" | "safety_identifier" | "prompt_cache_key" => {
            map.next_value::<Option<String>>()?;
        }
        "metadata" => {
            map.next_value::<IgnoredAny>()?;
        }
        // Without tools it means nothing.
        "parallel_tool_calls" => {
            map.next_value::<Option<bool>>()?;
        }
        "store" if map.next_value::<Option<bool>>()? == Some(true) => return refused("storing completions"),
        "echo" if map.next_value::<Option<bool>>()? == Some(true) => return refused("echoing the prompt"),
        "store" | "echo" => {}
        "suffix" if map.next_value::<Option<String>>()?.is_some_and(|s| !s.is_empty()) => {
            return refused("a suffix");
        }
        "suffix" => {}
        "service_tier" => match map.next_value::<Option<String>>()?.as_deref() {
            None | Some("auto" | "default") => {}
            Some(_) => return refused("a service tier other than `auto` and `default`"),
        },
        "modalities" => match map.next_value::<Option<Vec<String>>>()? {
            Some(list) if list.iter().any(|m| m != "text") => return refused("a modality other than `text`"),
            _ => {}
        },
        _ if !map.next_value::<Asks>()?.0 => {}
        "messages" if !chat => {
            return Err(A::Error::custom("is for /v1/chat/completions; send `prompt` here"));
        }
        "prompt" if chat => return Err(A::Error::custom("is for /v1/completions; send `messages` here")),
        "tools" | "tool_choice" | "functions" | "function_call" => return refused("calling tools"),
        "audio" => return refused("audio"),
        _ => return Err(A::Error::custom("unknown or unsupported parameter")),
    }
    Ok(())
}

fn range(param: &str, value: Option<f64>, min: f64, max: f64) -> Result<Option<f32>, ApiError> {
    match value {
        None => Ok(None),
        Some(v) if (min..=max).contains(&v) => Ok(Some(v as f32)),
        Some(_) => Err(ApiError::bad(param, format!("`{param}` must be from {min} to {max}"))),
    }
}

fn check_prompts(inputs: Vec<Input>) -> Result<Vec<Input>, ApiError> {
    if inputs.is_empty() {
        return Err(ApiError::bad("prompt", "`prompt` is missing or empty"));
    }
    if inputs.len() > PROMPTS_MAX {
        return Err(ApiError::bad("prompt", format!("more than {PROMPTS_MAX} prompts")));
    }
    if inputs.iter().any(|input| matches!(input, Input::Tokens(ids) if ids.is_empty())) {
        return Err(ApiError::bad("prompt", "`prompt` has an empty list of token ids"));
    }
    Ok(inputs)
}

fn check_stops(stops: &[String]) -> Result<(), ApiError> {
    if stops.len() > STOPS_MAX {
        return Err(ApiError::bad("stop", format!("`stop` has more than {STOPS_MAX} strings")));
    }
    if stops.iter().any(|s| s.is_empty() || s.len() > STOP_BYTES_MAX) {
        let message = format!("each string of `stop` must have from 1 to {STOP_BYTES_MAX} bytes");
        return Err(ApiError::bad("stop", message));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
