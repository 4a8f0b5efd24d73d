//! One choice of an answer: a session, from its place in the line to its last event.
//!
//! ```text
//!   enter ─► place ─► open ─► accepted ─► a session: token …, moves, recoveries ─► done
//!     ▲                │          │
//!     └── again ◄──────┴──────────┘
//! ```
//!
//! What happens before an agent took the session costs nothing. A model's only replica is tried again for as long as
//! the request may be held: its agent may be away, restart, or not know its order yet. A retry, at another replica or
//! after a loss that is said, is bounded for each request and, as a share, for all. From `accepted` on a loss is recovered by replay: see [`session`](super::session).

use std::time::Duration;

use pilotlight_domain::session::{
    FailureCode, FinishReason, Logprobs, Retry, SessionEvent, SessionSpec, Usage,
};
use pilotlight_domain::{SessionId, Tier};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;

use super::Job;
use super::headers::{Cold, Served};
use super::session::{Begin, Session};
use crate::demand;
use crate::hold::{Entry, Place, Refusal};
use crate::openai::{ApiError, Code, Dropped};
use crate::sessions::{Entry as Told, State};
use crate::stopwatch::Stopwatch;
use crate::upstream::OpenError;

/// What a session gets at least, once it is opened at a replica that loads.
const LAST_TRY: Duration = Duration::from_secs(1);

/// What a choice says to the answer that it is part of.
#[derive(Debug)]
pub(super) struct Said {
    pub(super) choice: usize,
    /// With the first token, or the end if there was none.
    pub(super) served: Option<Box<Served>>,
    pub(super) what: What,
}

#[derive(Debug)]
pub(super) enum What {
    Token { text: String, logprobs: Option<Logprobs> },
    Done { reason: FinishReason, usage: Usage },
    Failed(ApiError),
}

/// How a try ended.
pub(super) enum Outcome {
    Ended,
    Fatal(ApiError),
    /// Once more, with what to say if that is not possible.
    Again {
        why: ApiError,
        counted: bool,
    },
    /// Nobody listens.
    Deserted,
}

/// One choice.
pub(super) struct Choice<'a> {
    pub(super) job: &'a Job,
    index: usize,
    watch: Stopwatch,
    session: demand::Session,
    /// What people are told.
    pub(super) entry: Told,
    out: mpsc::Sender<Box<Said>>,
}

/// Runs one choice to its end; the last thing it says is its end. Choices but the first wait for `admitted`, so that
/// a request holds one place in the line, however many choices it wants. Dropping it closes its session.
pub(super) async fn run(job: &Job, index: usize, admitted: &CancellationToken, out: mpsc::Sender<Box<Said>>) {
    if index > 0 {
        admitted.cancelled().await;
    }
    let session = job.cx.demand.session(&job.model.name);
    let watch = Stopwatch::new(job.arrived);
    let entry = job.cx.sessions.begin(job.session_id(index), &job.request.model, &job.model.name);
    let mut choice = Choice { job, index, watch, session, entry, out };
    if let Err(error) = choice.run(admitted).await {
        choice.entry.is(State::Failed);
        let _client_gone = choice.say(None, What::Failed(error)).await;
    }
}

impl Choice<'_> {
    async fn run(&mut self, admitted: &CancellationToken) -> Result<(), ApiError> {
        let job = self.job;
        let mut retries = 0;
        let mut entry = job.entry(self.index);
        if let Some(error) = job.comes_too_late(&entry) {
            return Err(error);
        }
        loop {
            let ticket = job.cx.gate.enter(&job.model.name, entry.clone());
            self.watch.cold |= ticket.is_cold() && entry.turn.is_none();
            let hold = job.span.child("hold");
            let wake = ticket.is_cold().then(|| hold.child("wake"));
            if let Some(wake) = &wake {
                job.cx.demand.wake(&job.model.name, wake);
            }
            let place = ticket.place().await;
            drop((wake, hold));
            let waited = job.arrived.elapsed();
            job.cx.metrics.held(waited, if place.is_ok() { "released" } else { "refused" });
            let place = place.map_err(|refusal| job.refused(refusal))?;
            admitted.cancel();
            entry.turn = place.turn.as_deref().copied();
            let replica = place.replica.key.clone();
            // Boxed: who is held does not carry the room for it about.
            match Box::pin(self.attempt(place)).await {
                Outcome::Ended | Outcome::Deserted => return Ok(()),
                Outcome::Fatal(error) => return Err(error),
                Outcome::Again { why, counted } => {
                    self.session.taken(false);
                    retries += u32::from(counted);
                    if counted && (retries > job.model.retries || !job.cx.retries.take()) {
                        return Err(why);
                    }
                    job.cx.metrics.retries.inc();
                    tracing::debug!(request = %job.id, replica = replica.0, why = %why.message, "session tried again");
                    if !entry.avoid.contains(&replica) {
                        entry.avoid.push(replica);
                    }
                    entry.note = Some(why.message);
                }
            }
        }
    }

    /// One session at one replica: up to `accepted` here, and then to its end.
    async fn attempt(&mut self, place: Place) -> Outcome {
        let job = self.job;
        let now = Instant::now();
        let wake_sent = job.cx.demand.wake_sent(&job.model.name);
        self.watch.placed(now, wake_sent, place.accepting_since, place.replica.decide);
        if !self.watch.cold {
            job.cx.metrics.overhead(now.saturating_duration_since(job.arrived));
        }
        let held_until = self.held_until(now);
        let spec = job.spec(self.index);
        let span = job.span.child("upstream");
        span.set("pilotlight.endpoint", &place.replica.endpoint);
        let opening = job.cx.agents.open(&place.replica.endpoint, spec, &span);
        let mut events = match timeout_at(held_until, opening).await {
            Ok(Ok(events)) => events,
            Ok(Err(error)) => return self.not_opened(&place, error),
            Err(_late) => return Outcome::Fatal(job.hold_expired(self.watch.cold, None)),
        };
        let (why, nonsense) = match timeout_at(held_until, events.next()).await {
            Err(_late) => return Outcome::Fatal(job.hold_expired(self.watch.cold, None)),
            Ok(Ok(SessionEvent::Accepted { prompt_ids, device, numerics, waited, from })) => {
                let now = Instant::now();
                place.reached();
                self.session.taken(true);
                self.watch.accepted(now, waited);
                // It is held no more: the request's own time begins.
                let deadline = now + job.model.request_timeout;
                let until = job.model.first_token_timeout.map_or(deadline, |t| deadline.min(now + t));
                let queued = self.watch.queued();
                let served = Box::new(Served { device: device.clone(), from, queued, cold: None });
                let (spec, opened) = (job.spec(self.index), (place, events));
                let begin = Begin { spec, opened, prompt_ids, device, numerics, served, until, deadline };
                return Session::new(self, begin).run().await;
            }
            Ok(Ok(SessionEvent::Failed { code, message, retry })) => {
                return self.failed(&place, code, message, retry);
            }
            Ok(Ok(_)) => ("events before `accepted`".to_owned(), true),
            Ok(Err(error)) => (error.to_string(), error.is_nonsense()),
        };
        place.unreachable();
        let why = ApiError::new(Code::UpstreamFailed, format!("the session was lost: {why}"));
        Outcome::Again { why, counted: nonsense || job.has_other_replica(&place) }
    }

    /// A worker has the session, or lost it.
    pub(super) fn taken(&mut self, taken: bool) {
        self.session.taken(taken);
    }

    /// For the answer's trailer.
    pub(super) fn count_move(&self) {
        self.job.moves.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    }

    /// How long a session that is opened `now` may wait at its agent. A load counts from the arrival, as in the line;
    /// a busy worker from here.
    fn held_until(&self, now: Instant) -> Instant {
        let job = self.job;
        let until = if self.watch.cold {
            // A try after a failure may come at the end of the budget, and gets a little time.
            (job.arrived + job.model.terms.hold_max).max(now + LAST_TRY)
        } else {
            now + job.cx.queue_max
        };
        let wanted = job.wishes.wait_max.filter(|_| self.index == 0).map(|max| job.arrived + max);
        wanted.map_or(until, |wanted| wanted.min(until))
    }

    /// The first token is here: what the headers say, and what is counted.
    pub(super) fn first_token(&self, mut served: Box<Served>, accepting_since: Instant) -> Box<Served> {
        if self.watch.cold {
            let phases = self.watch.phases(Instant::now());
            let path = served.from.map_or("unknown", Tier::as_str);
            served.cold = Some(Cold { path, phases });
            if self.index == 0 {
                self.job.cold_start_ended(accepting_since, path, &phases);
            }
        }
        served
    }

    pub(super) async fn say(
        &self,
        served: Option<Box<Served>>,
        what: What,
    ) -> Result<(), mpsc::error::SendError<Box<Said>>> {
        self.out.send(Box::new(Said { choice: self.index, served, what })).await
    }

    /// A session could not be opened: nothing has happened yet.
    fn not_opened(&self, place: &Place, error: OpenError) -> Outcome {
        match error {
            OpenError::Failed { status, code, message, retry } => {
                tracing::debug!(request = %self.job.id, %status, ?code, message, "agent refused a session");
                self.failed(place, code, message, retry)
            }
            OpenError::Unreachable { .. } => {
                place.unreachable();
                // The only replica is waited for; from one to the next is a retry.
                let counted = self.job.has_other_replica(place);
                Outcome::Again { why: ApiError::new(Code::UpstreamFailed, error.to_string()), counted }
            }
            OpenError::Strange { .. } => {
                place.unreachable();
                Outcome::Again { why: ApiError::new(Code::UpstreamFailed, error.to_string()), counted: true }
            }
        }
    }

    /// The agent said that the session failed, before a worker took it.
    fn failed(&self, place: &Place, code: FailureCode, message: String, retry: Retry) -> Outcome {
        let why = self.job.failure(code, message);
        match (code, retry) {
            (FailureCode::ContextLengthExceeded | FailureCode::BadRequest, _) => Outcome::Fatal(why),
            // The order is not there yet, or not any more: the cluster will tell.
            (FailureCode::UnknownModel | FailureCode::Draining, _) => {
                place.unreachable();
                Outcome::Again { why, counted: false }
            }
            (_, Retry::No) => Outcome::Fatal(why),
            (FailureCode::LoadFailed, Retry::Elsewhere) if !self.job.has_other_replica(place) => {
                Outcome::Fatal(why)
            }
            (FailureCode::WorkerLost, Retry::Elsewhere) => Outcome::Again { why, counted: true },
            (_, Retry::Elsewhere) => {
                place.unreachable();
                Outcome::Again { why, counted: true }
            }
        }
    }
}

impl Job {
    fn session_id(&self, index: usize) -> SessionId {
        match index {
            0 => self.id.clone(),
            n => format!("{}.{n}", self.id).parse().unwrap_or_else(|_| -> SessionId { self.id.clone() }),
        }
    }

    /// The session of one choice.
    fn spec(&self, index: usize) -> SessionSpec {
        let (input, sampling) = self.request.choice(index);
        SessionSpec {
            id: self.session_id(index),
            model: self.model.name.clone(),
            epoch: 0,
            input: input.clone(),
            generated: Vec::new(),
            sampling,
            hold: false,
            on_cpu: self.wishes.on_cpu,
        }
    }

    /// The queue gave no place.
    pub(super) fn refused(&self, refusal: Refusal) -> ApiError {
        let name = &self.request.model;
        let (code, dropped, message) = match refusal {
            Refusal::Full { held } => {
                (Code::QueueFull, Dropped::QueueFull, format!("{held} requests wait for `{name}` already"))
            }
            Refusal::Bytes => {
                let message =
                    "the requests that wait take all the memory that is meant for them; send it again later";
                (Code::QueueFull, Dropped::QueueBytes, message.into())
            }
            Refusal::Shed => {
                let message = format!(
                    "too many wait for `{name}`, and this request made room for a more important one"
                );
                (Code::QueueFull, Dropped::Shed, message)
            }
            Refusal::Expired { cold, note } => return self.hold_expired(cold, note),
            Refusal::Rejected => {
                self.cx.demand.knock(&self.model.name);
                let message =
                    format!("`{name}` is not ready and this request may not wait; it is being woken");
                (Code::NoCapacity, Dropped::Rejected, message)
            }
            Refusal::Failed(why) => {
                // The operator may try again; whoever asks next may be lucky.
                self.cx.demand.knock(&self.model.name);
                (Code::NoCapacity, Dropped::NoCapacity, format!("`{name}` cannot be loaded: {why}"))
            }
            Refusal::Suspended => {
                (Code::Suspended, Dropped::Suspended, format!("`{name}` is suspended by its spec"))
            }
            Refusal::Gone => return ApiError::unknown_model(name),
            Refusal::Draining => {
                (Code::Draining, Dropped::Draining, "this router is shutting down; send it again".into())
            }
        };
        self.unavailable(code, message).dropped(dropped)
    }

    /// A request of negative priority whose wish cannot be met makes room at once. The model wakes nevertheless.
    fn comes_too_late(&self, entry: &Entry) -> Option<ApiError> {
        let wish = self.wishes.first_token.filter(|_| entry.priority < 0)?.as_secs_f64();
        let estimate = self.remaining().filter(|estimate| *estimate > wish)?;
        self.cx.demand.knock(&self.model.name);
        let message = format!(
            "`{}` is expected to answer in {estimate:.1} s, the request wishes it in {wish:.1} s, and its priority \
             is negative; it is being woken",
            self.request.model
        );
        Some(self.unavailable(Code::QueueFull, message).dropped(Dropped::Shed))
    }

    /// There is no place for a session that was lost.
    pub(super) fn lost_for_good(&self, refusal: Refusal) -> ApiError {
        let why = self.refused(refusal).message;
        ApiError::new(Code::UpstreamFailed, format!("the session was lost, and nobody takes it over: {why}"))
    }

    /// What the client is told of a session that failed.
    pub(super) fn failure(&self, code: FailureCode, message: String) -> ApiError {
        let unavailable = |code, message| self.unavailable(code, message);
        match code {
            FailureCode::ContextLengthExceeded => {
                let error = ApiError::new(Code::ContextLengthExceeded, message);
                ApiError { param: Some(self.request.prompt_param().into()), ..error }
            }
            FailureCode::BadRequest => ApiError::new(Code::BadRequest, message),
            FailureCode::LoadFailed => {
                let message = format!("`{}` cannot be loaded: {message}", self.request.model);
                unavailable(Code::NoCapacity, message).dropped(Dropped::NoCapacity)
            }
            FailureCode::NoCapacity => unavailable(Code::NoCapacity, message).dropped(Dropped::NoCapacity),
            FailureCode::Draining => unavailable(Code::Draining, message).dropped(Dropped::Draining),
            _ => ApiError::new(Code::UpstreamFailed, message),
        }
    }

    /// A 503 with the time after which it is worth trying again.
    fn unavailable(&self, code: Code, message: String) -> ApiError {
        ApiError::new(code, message).retry_after(self.remaining().unwrap_or(1.0), fastrand::f64())
    }

    fn hold_expired(&self, cold: bool, note: Option<String>) -> ApiError {
        let waited = self.arrived.elapsed().as_secs_f64();
        let what = if cold { "was not loaded" } else { "had no place" };
        let note = note.map(|note| format!(": {note}")).unwrap_or_default();
        let message = format!("`{}` {what} within {waited:.1} s{note}", self.request.model);
        self.unavailable(Code::HoldExpired, message).dropped(Dropped::HoldExpired)
    }

    pub(super) fn timed_out(&self, has_begun: bool) -> ApiError {
        let what = if has_begun { "the answer" } else { "the first token" };
        ApiError::new(Code::Timeout, format!("{what} took longer than the model's time-out"))
    }

    fn has_other_replica(&self, place: &Place) -> bool {
        let standing = self.cx.registry().standing(&self.model.name);
        standing.is_some_and(|s| s.replicas.iter().any(|r| r.key != place.replica.key))
    }
}
