//! The client's side of an answer: whole or streamed, its head sent once.
//!
//! Before the head an error is a status; after it, it is the last event. A client that reads too slowly fills a
//! bounded channel, which stops the reading from the agent; after [`SLOW_MAX`] it is cut.

use std::collections::HashMap;
use std::time::Duration;

use bytes::Bytes;
use pilotlight_domain::session::Usage;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Job;
use super::body::{PieceSender, Pieces, buffer};
use super::choice::{Said, What};
use super::headers::Served;
use crate::metrics::Start;
use crate::openai::ApiError;
use crate::openai::response::{self, Choice, Envelope};

/// A client that takes nothing for that long is cut.
const SLOW_MAX: Duration = Duration::from_secs(30);

/// The head of an answer, and how its body comes.
pub(super) enum Answer {
    Whole(Option<Box<Served>>, Vec<u8>),
    Stream(Option<Box<Served>>, Pieces),
    Refused(ApiError),
}

/// See the module.
pub(super) struct Client<'a> {
    job: &'a Job,
    envelope: Envelope,
    /// Until the head is sent.
    reply: Option<oneshot::Sender<Answer>>,
    /// From the head on, of a stream.
    pieces: Option<PieceSender>,
    choices: Vec<Choice>,
    usages: HashMap<usize, Usage>,
    served: Option<Box<Served>>,
    first_token: Option<Instant>,
    /// Tokens that its caller's limits know of.
    spent: i64,
}

impl<'a> Client<'a> {
    pub(super) fn new(job: &'a Job, reply: oneshot::Sender<Answer>) -> Self {
        Client {
            job,
            envelope: job.envelope(),
            reply: Some(reply),
            pieces: None,
            choices: vec![Choice::default(); job.request.choices()],
            usages: HashMap::new(),
            served: None,
            first_token: None,
            spent: 0,
        }
    }

    /// Resolves when nobody waits for the answer any more.
    pub(super) async fn gone(&mut self) {
        match (&mut self.reply, &self.pieces) {
            (Some(reply), _) => reply.closed().await,
            (None, Some(pieces)) => pieces.closed().await,
            (None, None) => std::future::pending().await,
        }
    }

    /// Writes what a choice said; false: that was the end.
    pub(super) async fn take(&mut self, said: Said) -> bool {
        if let Some(served) = said.served {
            self.begun(served);
        }
        let (index, stream) = (said.choice, self.job.request.stream);
        if matches!(said.what, What::Token { .. }) {
            self.spend(1);
        }
        match said.what {
            What::Failed(error) => {
                self.fail(error).await;
                false
            }
            What::Token { text, logprobs } if stream => {
                let events = self.envelope.token(index, &mut self.choices[index], &text, logprobs);
                self.write(events).await
            }
            What::Token { text, logprobs } => {
                self.choices[index].push(&text, logprobs);
                true
            }
            What::Done { reason, usage } => {
                self.usages.insert(index, usage);
                if stream {
                    let events = self.envelope.end(index, &mut self.choices[index], reason);
                    return self.write(events).await;
                }
                self.choices[index].finish(reason);
                true
            }
        }
    }

    /// Tokens count as they come, for a client may leave before the end.
    fn spend(&mut self, tokens: i64) {
        self.spent += tokens;
        if let Some(permit) = &self.job.permit {
            permit.spend(tokens, Instant::now());
        }
    }

    /// The first token of the first choice that has one.
    fn begun(&mut self, served: Box<Served>) {
        if self.first_token.is_some() {
            return;
        }
        let now = Instant::now();
        self.first_token = Some(now);
        let prompts = self.job.request.inputs.iter().map(super::tokens_about).sum::<u64>();
        self.spend(i64::try_from(prompts).unwrap_or(i64::MAX));
        let start = match &served.cold {
            None => Start::Warm,
            Some(_) if served.kind() == "cpu" => Start::Cpu,
            Some(_) => Start::Cold,
        };
        self.job.cx.metrics.first_token(
            &self.job.model.name,
            start,
            now.saturating_duration_since(self.job.arrived),
        );
        self.wish_is(now.saturating_duration_since(self.job.arrived));
        self.served = Some(served);
    }

    /// Whether the first token was there in the time that the request wishes.
    fn wish_is(&self, took: Duration) {
        if let Some(wish) = self.job.wishes.first_token {
            self.job.cx.metrics.wished(took <= wish);
        }
    }

    /// Tells a streaming client that it is not forgotten. The first heartbeat sends the head. How long a recovery
    /// takes nobody knows.
    pub(super) async fn heartbeat(&mut self, state: &str) {
        let held = self.first_token.is_none();
        let line = response::heartbeat(state, held.then(|| self.job.remaining()).flatten());
        self.write(line).await;
    }

    /// Writes events, with the head before the first; false: the client is gone.
    async fn write(&mut self, events: Vec<u8>) -> bool {
        if events.is_empty() {
            return true;
        }
        if let Some(reply) = self.reply.take() {
            let (pieces, body) = buffer();
            self.pieces = Some(pieces);
            if reply.send(Answer::Stream(self.served.clone(), body)).is_err() {
                self.lost();
                return false;
            }
        }
        let Some(pieces) = &self.pieces else { return false };
        let sent = tokio::time::timeout(SLOW_MAX, pieces.send(Bytes::from(events))).await;
        if matches!(sent, Ok(true)) {
            return true;
        }
        if sent.is_err() {
            tracing::info!(request = %self.job.id, "client reads too slowly, cut");
            self.pieces.take().into_iter().for_each(PieceSender::cut);
        }
        self.lost();
        false
    }

    async fn fail(&mut self, error: ApiError) {
        let status = error.code.status().as_u16();
        if let Some(dropped) = error.dropped {
            self.job.cx.metrics.drop_request(dropped.as_str());
        }
        tracing::debug!(request = %self.job.id, model = %self.job.model.name, %error, "request failed");
        self.count(status, error.code.as_str());
        if self.first_token.is_none() {
            self.wish_is(Duration::MAX);
        }
        match self.reply.take() {
            Some(reply) => {
                let _client_gone = reply.send(Answer::Refused(error));
            }
            None => {
                self.write(response::error_event(&error)).await;
            }
        }
    }

    /// Every choice has ended well.
    pub(super) async fn finish(mut self) {
        let usage = self.usage();
        // What was counted by guess, put right.
        self.spend(i64::from(usage.prompt_tokens) + i64::from(usage.completion_tokens) - self.spent);
        let now = Instant::now();
        let whole = now.saturating_duration_since(self.job.arrived);
        let decode = self.first_token.map(|first| now.saturating_duration_since(first));
        let on_cpu = self.served.as_ref().is_some_and(|s| s.kind() == "cpu");
        // With several choices at once the time between tokens is not the time between any two.
        let decode = decode.filter(|_| self.choices.len() == 1);
        self.job.cx.metrics.answer(
            &self.job.model.name,
            usage.prompt_tokens,
            usage.completion_tokens,
            whole,
            decode,
            on_cpu,
        );
        if self.job.request.stream {
            let events = self.envelope.done(usage);
            if self.write(events).await {
                self.count(200, "ok");
            }
        } else if let Some(reply) = self.reply.take() {
            let answer = Answer::Whole(self.served.take(), self.envelope.whole(&self.choices, usage));
            match reply.send(answer) {
                Ok(()) => self.count(200, "ok"),
                Err(_) => self.lost(),
            }
        }
    }

    /// The client is gone: 499, as nginx writes it.
    pub(super) fn lost(&self) {
        tracing::debug!(request = %self.job.id, model = %self.job.model.name, "client gone");
        self.job.cx.metrics.drop_request(super::Dropped::ClientGone.as_str());
        self.count(499, "client_gone");
    }

    fn count(&self, status: u16, outcome: &str) {
        let job = self.job;
        job.span.set("http.response.status_code", status);
        job.span.set("pilotlight.outcome", outcome);
        job.cx.metrics.request(Some(&job.model.name), job.request.task.as_str(), status, outcome);
    }

    /// Each prompt counts once, however many choices it has.
    fn usage(&self) -> Usage {
        let n = self.job.request.n as usize;
        let mut sum = Usage::default();
        for (index, usage) in &self.usages {
            sum.completion_tokens += usage.completion_tokens;
            if index % n == 0 {
                sum.prompt_tokens += usage.prompt_tokens;
                sum.cached_tokens += usage.cached_tokens;
            }
        }
        sum
    }
}
