//! One session: its ids, and everything that is derived from them.
//!
//! Invariants: a session is a function of (prompt ids, generated ids, sampling parameters): one that is begun with
//! `generated` ids and one that generated them are in the same state, to the byte of held-back text. Checks happen
//! once, in [`Session::begin`].
//!
//! It deliberately does **not** know pages, steps or logits.

use pilotlight_domain::session::{
    FailureCode, FinishReason, Input, Retry, Sampling, SessionEvent, SessionSpec, TokenId, Usage,
};

use crate::protocol::SessionKey;
use crate::text::{Constraint, Mask, ModelText, TextStream, Tokenizer};

/// Stop strings of one session. Each is looked for after each token.
const STOPS_MAX: usize = 64;

/// Bytes of one stop string: 64 of 1 KiB are looked through in some ten microseconds.
const STOP_BYTES_MAX: usize = 1024;

/// Alternatives of one token. Each is some hundred bytes in its event.
const LOGPROBS_MAX: u32 = 128;

/// Entries of `logit_bias`. Each is added at each token.
const LOGIT_BIASES_MAX: usize = 4096;

/// What a model can take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Token ids are below this.
    pub(crate) vocabulary: usize,
    /// Tokens of prompt and answer together, by the model or by order.
    pub(crate) context: usize,
    /// Tokens of which KV memory can hold the keys and values of one session.
    pub(crate) kv_tokens: usize,
}

impl Limits {
    /// The longest prompt with its answer: the last token's keys and values are never needed.
    pub(crate) fn context_here(&self) -> usize {
        self.context.min(self.kv_tokens + 1)
    }
}

/// Why a session cannot be served, as the event that says so.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    /// Which kind.
    pub(crate) code: FailureCode,
    /// Cause and cure.
    pub(crate) message: String,
    /// What the caller may do.
    pub(crate) retry: Retry,
}

impl Refusal {
    /// The request is wrong, everywhere.
    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Refusal { code: FailureCode::BadRequest, message: message.into(), retry: Retry::No }
    }

    /// Another replica may do.
    pub(crate) fn elsewhere(code: FailureCode, message: impl Into<String>) -> Self {
        Refusal { code, message: message.into(), retry: Retry::Elsewhere }
    }

    /// As the last event of a session.
    pub(crate) fn into_event(self) -> SessionEvent {
        SessionEvent::Failed { code: self.code, message: self.message, retry: self.retry }
    }
}

/// A session with its prompt as ids, before any check against the model.
#[derive(Clone, Debug)]
pub(crate) struct Prepared {
    /// Its name.
    pub(crate) key: SessionKey,
    /// As it was started; `input` is not needed any more and is empty.
    pub(crate) spec: SessionSpec,
    /// The prompt.
    pub(crate) prompt: Vec<TokenId>,
    /// The specification's grammar, before the first generated token.
    pub(crate) constraint: Option<Constraint>,
}

impl Prepared {
    /// Takes the input away from the specification: the ids replace it.
    pub(crate) fn new(key: SessionKey, mut spec: SessionSpec, prompt: Vec<TokenId>) -> Self {
        spec.input = Input::Tokens(Vec::new());
        Prepared { key, spec, prompt, constraint: None }
    }

    /// With its grammar.
    pub(crate) fn constrained(self, constraint: Option<Constraint>) -> Self {
        Prepared { constraint, ..self }
    }
}

/// What one more token means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Said {
    /// What it adds to the text.
    pub(crate) text: String,
    /// Nothing comes after it.
    pub(crate) end: Option<FinishReason>,
}

/// A session in flight.
#[derive(Debug)]
pub(crate) struct Session {
    /// Its name.
    pub(crate) key: SessionKey,
    /// Its epoch.
    pub(crate) epoch: u32,
    /// How tokens are chosen.
    pub(crate) sampling: Sampling,
    prompt: Vec<TokenId>,
    generated: Vec<TokenId>,
    /// Generated tokens at most.
    limit: usize,
    /// Whether it is KV memory here that sets the limit, and not the request or the model.
    limit_is_memory: bool,
    text: TextStream,
    constraint: Option<Constraint>,
}

impl Session {
    /// Checks a session against the model and replays what was generated. With a reason: it has ended already.
    ///
    /// # Errors
    /// When it cannot be served here.
    pub(crate) fn begin(
        prepared: Prepared,
        text: &ModelText,
        limits: &Limits,
    ) -> Result<(Self, Option<FinishReason>), Refusal> {
        let Prepared { key, spec, prompt, constraint } = prepared;
        check_sampling(&spec.sampling, text, limits)?;
        check_ids(&prompt, &spec.generated, limits)?;
        let context = limits.context_here();
        let wanted = spec.sampling.max_tokens.map_or(usize::MAX, |max| max as usize);
        let limit = wanted.min(context - prompt.len());
        let limit_is_memory = limit < wanted && context < limits.context;
        let sampling = with_defaults(spec.sampling, text);
        let stream = TextStream::new(&sampling.stop);
        let generated = Vec::with_capacity(spec.generated.len());
        let mut session = Session {
            key,
            epoch: spec.epoch,
            sampling,
            prompt,
            generated,
            limit,
            limit_is_memory,
            text: stream,
            constraint,
        };
        if limit == 0 {
            return Ok((session, Some(FinishReason::Length)));
        }
        let ended = session.replay(&spec.generated, text, limits)?;
        Ok((session, ended))
    }

    /// Takes tokens that were generated elsewhere, and says nothing. What follows the end, if they contain it, is
    /// left away.
    fn replay(
        &mut self,
        ids: &[TokenId],
        text: &ModelText,
        limits: &Limits,
    ) -> Result<Option<FinishReason>, Refusal> {
        for &id in ids {
            let end = self.push(id, text).end;
            if let Some(why) = self.constraint.as_ref().and_then(Constraint::broken) {
                let message = format!("the tokens generated so far do not follow `response_format`: {why}");
                return Err(Refusal::bad_request(message));
            }
            match end {
                // Elsewhere it may go on.
                Some(FinishReason::Length) if self.limit_is_memory => {
                    let message = format!(
                        "the session has {} tokens; KV memory here holds {}",
                        self.known(),
                        limits.kv_tokens
                    );
                    return Err(Refusal::elsewhere(FailureCode::NoCapacity, message));
                }
                Some(reason) => return Ok(Some(reason)),
                None => {}
            }
        }
        Ok(None)
    }

    /// As the tokens of a move come: `at` is the index of the first of `ids`, and what is known already is skipped.
    ///
    /// # Errors
    /// When they leave a gap, contradict what is known, or no model could have generated them.
    pub(crate) fn extend(
        &mut self,
        at: u32,
        ids: &[TokenId],
        text: &ModelText,
        limits: &Limits,
    ) -> Result<Option<FinishReason>, Refusal> {
        let (at, next) = (at as usize, self.generated.len());
        let Some(overlap) = next.checked_sub(at) else {
            let message = format!("tokens from index {at} were handed over, and the next one is {next}");
            return Err(Refusal::elsewhere(FailureCode::BadRequest, message));
        };
        let (known, fresh) = ids.split_at(overlap.min(ids.len()));
        if !self.generated[at..].starts_with(known) {
            let message = format!("the tokens handed over from index {at} are not those known here");
            return Err(Refusal::elsewhere(FailureCode::BadRequest, message));
        }
        check_vocabulary("the tokens handed over", fresh, limits)?;
        self.replay(fresh, text, limits)
    }

    /// Takes the next generated token.
    pub(crate) fn push(&mut self, id: TokenId, text: &ModelText) -> Said {
        self.generated.push(id);
        let complete = self.constraint.as_mut().is_some_and(|constraint| {
            constraint.push(id);
            constraint.is_complete()
        });
        let is_end_token = text.end_tokens().binary_search(&id).is_ok();
        let is_end = is_end_token && (!self.sampling.ignore_eos || complete);
        let at_limit = self.generated.len() >= self.limit;
        let Some(tokenizer) = text.tokenizer() else {
            let end = is_end.then_some(FinishReason::Stop).or(at_limit.then_some(FinishReason::Length));
            return Said { text: String::new(), end };
        };
        let (said, stopped) = self.say(id, is_end, at_limit || complete, tokenizer);
        let end = if is_end || stopped || complete {
            Some(FinishReason::Stop)
        } else {
            at_limit.then_some(FinishReason::Length)
        };
        Said { text: said, end }
    }

    /// The tokens that may come next; none: any.
    ///
    /// # Errors
    /// When the grammar is too costly to tell.
    pub(crate) fn mask(&mut self) -> Result<Option<Mask>, Refusal> {
        let Some(constraint) = &mut self.constraint else { return Ok(None) };
        constraint.mask().map(Some).map_err(|why| {
            Refusal::bad_request(format!("`response_format` cannot be followed any further: {why}"))
        })
    }

    /// The text of the newest token, and whether a stop string is complete. What is held back goes with the last one.
    fn say(&mut self, id: TokenId, is_end: bool, is_last: bool, tokenizer: &Tokenizer) -> (String, bool) {
        let mut said = String::new();
        if !is_end {
            let filtered = self.text.push(tokenizer, id);
            if filtered.stopped {
                return (filtered.text, true);
            }
            said = filtered.text;
        }
        if !(is_end || is_last) {
            return (said, false);
        }
        let rest = self.text.finish(tokenizer);
        said.push_str(&rest.text);
        (said, rest.stopped)
    }

    /// The prompt.
    pub(crate) fn prompt(&self) -> &[TokenId] {
        &self.prompt
    }

    /// Generated so far, replayed ones included.
    pub(crate) fn generated(&self) -> &[TokenId] {
        &self.generated
    }

    /// Tokens of prompt and answer so far.
    pub(crate) fn known(&self) -> usize {
        self.prompt.len() + self.generated.len()
    }

    /// The token at a position below [`known`](Self::known).
    pub(crate) fn token_at(&self, position: usize) -> TokenId {
        match position.checked_sub(self.prompt.len()) {
            None => self.prompt[position],
            Some(index) => self.generated[index],
        }
    }

    /// Tokens it may still generate.
    pub(crate) fn remaining(&self) -> usize {
        self.limit.saturating_sub(self.generated.len())
    }

    /// The counts, as the API reports them.
    pub(crate) fn usage(&self) -> Usage {
        let prompt_tokens = self.prompt.len() as u32;
        Usage { prompt_tokens, completion_tokens: self.generated.len() as u32, cached_tokens: 0 }
    }
}

/// What the request leaves open, `generation_config.json` says.
fn with_defaults(sampling: Sampling, text: &ModelText) -> Sampling {
    let defaults = text.defaults();
    Sampling {
        temperature: sampling.temperature.or(defaults.temperature),
        top_p: sampling.top_p.or(defaults.top_p),
        top_k: sampling.top_k.or(defaults.top_k),
        min_p: sampling.min_p.or(defaults.min_p),
        repetition_penalty: sampling.repetition_penalty.or(defaults.repetition_penalty),
        ..sampling
    }
}

fn check_ids(prompt: &[TokenId], generated: &[TokenId], limits: &Limits) -> Result<(), Refusal> {
    if prompt.is_empty() {
        return Err(Refusal::bad_request("the prompt is empty: it must have at least one token"));
    }
    let context = limits.context_here();
    if prompt.len() >= context {
        let why = match context < limits.context {
            true => format!(" (KV memory bounds it; the model's own is {})", limits.context),
            false => String::new(),
        };
        let message = format!(
            "the prompt has {} tokens; the context is {context} tokens{why}, and the answer needs at least one: shorten the prompt",
            prompt.len()
        );
        return Err(Refusal { code: FailureCode::ContextLengthExceeded, message, retry: Retry::No });
    }
    check_vocabulary("the prompt", prompt, limits)?;
    check_vocabulary("the tokens generated so far", generated, limits)
}

fn check_vocabulary(place: &str, ids: &[TokenId], limits: &Limits) -> Result<(), Refusal> {
    match ids.iter().find(|id| **id as usize >= limits.vocabulary) {
        Some(id) => Err(outside_vocabulary(place, *id, limits)),
        None => Ok(()),
    }
}

fn outside_vocabulary(place: &str, id: TokenId, limits: &Limits) -> Refusal {
    Refusal::bad_request(format!(
        "token id {id} in {place} is outside the vocabulary of {} tokens",
        limits.vocabulary
    ))
}

fn check_sampling(sampling: &Sampling, text: &ModelText, limits: &Limits) -> Result<(), Refusal> {
    let stops = &sampling.stop;
    if stops.len() > STOPS_MAX || stops.iter().any(|stop| stop.len() > STOP_BYTES_MAX) {
        let message = format!("`stop` takes at most {STOPS_MAX} strings of at most {STOP_BYTES_MAX} bytes");
        return Err(Refusal::bad_request(message));
    }
    if stops.iter().any(|stop| !stop.is_empty()) && text.tokenizer().is_none() {
        let message = "the model's checkpoint has no tokenizer.json: `stop` cannot be served";
        return Err(Refusal::bad_request(message));
    }
    if sampling.logprobs.is_some_and(|count| count > LOGPROBS_MAX) {
        return Err(Refusal::bad_request(format!("`logprobs` is at most {LOGPROBS_MAX}")));
    }
    if sampling.logit_bias.len() > LOGIT_BIASES_MAX {
        return Err(Refusal::bad_request(format!("`logit_bias` takes at most {LOGIT_BIASES_MAX} tokens")));
    }
    match sampling.logit_bias.keys().find(|id| **id as usize >= limits.vocabulary) {
        Some(id) => Err(outside_vocabulary("`logit_bias`", *id, limits)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
