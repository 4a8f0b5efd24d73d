//! Answering one request, from its body to its last byte.
//!
//! A task of its own drives the answer; the HTTP side waits for its head and then reads its body. Either side learns
//! at once that the other is gone: a client that leaves drops the body, which ends the task, which closes the
//! sessions.

mod body;
mod choice;
mod client;
mod headers;
mod leg;
mod session;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use axum::body::Body;
use axum::extract::Request as HttpRequest;
use axum::http::request::Parts;
use axum::http::{HeaderValue, Response, header};
use axum::response::IntoResponse as _;
use bytes::Bytes;
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use pilotlight_api::model::{ColdStartPolicy, ColdStartReport};
use pilotlight_domain::session::Input;
use pilotlight_domain::{Phases, SessionId, Timestamp};
use pilotlight_kit::trace::Span;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::body::LeasedBody;
pub(crate) use self::body::Reading;
use self::client::{Answer, Client};
use self::headers::Wishes;
pub(crate) use self::headers::{REQUEST_ID, request_id};
use crate::context::{Context, InFlight};
use crate::demand;
use crate::hold::{Entry, hash};
use crate::keys::Who;
use crate::limits::Permit;
use crate::openai::response::Envelope;
use crate::openai::{ApiError, Code, Dropped, Request, Task, read};
use crate::registry::ModelView;

/// Said by the choices and not yet written: a few tokens of each. Boxed: a channel makes room for 32 at once.
const SAID_MAX: usize = 16;
/// Bodies from here on are parsed aside: 256 KiB take about half a millisecond.
const PARSE_ASIDE_BYTES: usize = 256 << 10;

/// One request with everything that its answer needs.
pub(crate) struct Job {
    cx: Arc<Context>,
    id: SessionId,
    request: Request,
    model: Arc<ModelView>,
    wishes: Wishes,
    arrived: Instant,
    arrived_at: Timestamp,
    /// Of the body.
    bytes: u64,
    /// What the header says that pins sessions to a replica.
    pin: Option<u64>,
    /// Of all its sessions.
    moves: Arc<AtomicU32>,
    /// Of a caller with limits.
    permit: Option<Arc<Permit>>,
    /// The whole of it, until its last word.
    span: Span,
}

/// What an answer keeps until its last byte has left.
struct Lease {
    _body: demand::Body,
    _inflight: InFlight,
    _permit: Option<Arc<Permit>>,
}

/// A request whose answer is under way: all that its connection keeps of it.
struct Pending {
    answer: oneshot::Receiver<Answer>,
    lease: Arc<Lease>,
    moves: Arc<AtomicU32>,
    arrived: Instant,
    stream: bool,
}

/// Answers a chat or completion request. Dropping it half-way ends everything that was begun for it.
///
/// No `async fn`, and its parts are boxed: a request may be held for minutes, and what it needs no more until then,
/// its headers with the buffer that they were read into above all, is given back before.
pub(crate) fn answer(
    cx: Arc<Context>,
    task: Task,
    request: HttpRequest,
) -> impl Future<Output = Response<Body>> + Send + use<> {
    let arrived = Instant::now();
    let (parts, body) = request.into_parts();
    let id = request_id(&parts.headers);
    let begun = Box::pin(begin(cx.clone(), task, id.clone(), arrived, parts, body));
    async move {
        let begun = begun.await;
        let mut response = match begun {
            Ok(pending) => pending.response().await,
            Err(error) => refuse(&cx, task, error),
        };
        if let Ok(id) = HeaderValue::from_str(id.as_str()) {
            response.headers_mut().insert(REQUEST_ID, id);
        }
        response
    }
}

/// Reads a request, and has it answered by a task.
async fn begin(
    cx: Arc<Context>,
    task: Task,
    id: SessionId,
    arrived: Instant,
    parts: Parts,
    body: Body,
) -> Result<Pending, ApiError> {
    let told = parts.headers.get("traceparent").and_then(|value| value.to_str().ok());
    let span = Span::begin("request", told);
    span.set("pilotlight.request", &id);
    let who = cx.caller(&parts.headers)?;
    let mut wishes = Wishes::read(&parts.headers)?;
    wishes.flow = wishes.flow.or(Some(who.flow()));
    let (body, counted) = body::read(&parts.headers, body, &cx.reading).await?;
    let bytes = body.len() as u64;
    let request = parse(task, body).await?;
    let model = resolve(&cx, &request, &who).await?;
    let permit = who.admit()?;
    drop(counted);
    let pin = model.session_header.as_ref().and_then(|name| parts.headers.get(name));
    let pin = pin.map(|value| hash(&[value.as_bytes()]));
    span.set("gen_ai.request.model", &request.model);
    let (arrived_at, moves) = (cx.clock.now(), Arc::default());
    Ok(drive_aside(Job {
        cx,
        id,
        request,
        model,
        wishes,
        arrived,
        arrived_at,
        bytes,
        pin,
        moves,
        permit,
        span,
    }))
}

async fn parse(task: Task, bytes: Bytes) -> Result<Request, ApiError> {
    let seed = fastrand::u64(..);
    if bytes.len() < PARSE_ASIDE_BYTES {
        return read::read(task, &bytes, seed);
    }
    let parsed = tokio::task::spawn_blocking(move || read::read(task, &bytes, seed)).await;
    parsed.unwrap_or_else(|_| Err(ApiError::new(Code::BadRequest, "the body could not be parsed")))
}

/// The model that is meant, or why not; decided before any queue.
async fn resolve(cx: &Context, request: &Request, who: &Who) -> Result<Arc<ModelView>, ApiError> {
    cx.becomes_known(&request.model).await;
    let registry = cx.registry();
    let Some(model) = registry.resolve(&request.model) else {
        if !registry.is_complete() {
            let error = ApiError::new(Code::NoCapacity, "this router has not read the list of models yet");
            return Err(error.retry_after(0.0, 0.0));
        }
        return Err(ApiError::unknown_model(&request.model));
    };
    who.must_use(&request.model, &model, &registry)?;
    if !model.takes(request.task) {
        let message = format!("the model `{}` is not for {} requests", request.model, request.task.as_str());
        return Err(ApiError {
            param: Some("model".into()),
            ..ApiError::new(Code::TaskUnsupported, message)
        });
    }
    Ok(model)
}

/// An error before there was anything to serve.
fn refuse(cx: &Context, task: Task, error: ApiError) -> Response<Body> {
    cx.metrics.request(None, task.as_str(), error.code.status().as_u16(), "refused");
    error.into_response()
}

fn drive_aside(job: Job) -> Pending {
    let (cx, arrived) = (job.cx.clone(), job.arrived);
    cx.retries.deposit();
    let lease = Arc::new(Lease {
        _body: cx.demand.body(&job.model.name),
        _inflight: cx.in_flight(),
        _permit: job.permit.clone(),
    });
    let (stream, moves) = (job.request.stream, job.moves.clone());
    let (reply, answer) = oneshot::channel();
    // Boxed: a future has its arguments twice.
    cx.tasks.spawn(drive(Box::new(job), reply, lease.clone()));
    Pending { answer, lease, moves, arrived, stream }
}

impl Pending {
    /// Waits for the head, and gives the body its lease.
    async fn response(self) -> Response<Body> {
        let Pending { answer, lease, moves, arrived, stream } = self;
        let (head, body) = match answer.await {
            Ok(Answer::Whole(head, bytes)) => (head, LeasedBody::whole(Bytes::from(bytes), lease)),
            Ok(Answer::Stream(head, pieces)) => (head, LeasedBody::stream(pieces, moves.clone(), lease)),
            Ok(Answer::Refused(error)) => {
                let mut response = error.into_response();
                headers::write_queued(response.headers_mut(), arrived.elapsed());
                return response;
            }
            // The process is being torn down.
            Err(_) => return ApiError::new(Code::Draining, "this router is shutting down").into_response(),
        };
        let mut response = Response::new(Body::new(body));
        let headers = response.headers_mut();
        if stream {
            headers
                .insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
            headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
            // Proxies that gather small pieces would hide the stream.
            headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
            headers.insert(header::TRAILER, HeaderValue::from_static("x-pilotlight-migrations"));
        } else {
            headers.insert(headers::MIGRATIONS, HeaderValue::from(moves.load(Ordering::Relaxed)));
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        if let Some(served) = head {
            served.write(headers);
        }
        response
    }
}

/// Runs a request's choices and writes what they say. Holds the lease as long as it works.
async fn drive(job: Box<Job>, reply: oneshot::Sender<Answer>, _lease: Arc<Lease>) {
    let admitted = CancellationToken::new();
    let (out, mut said) = mpsc::channel(SAID_MAX);
    // Boxed: the set has room for one more than there are.
    let running = (0..job.request.choices()).map(|i| Box::pin(choice::run(&job, i, &admitted, out.clone())));
    let mut running: FuturesUnordered<_> = running.collect();
    drop(out);
    let mut client = Client::new(&job, reply);
    let mut next_beat = job.model.heartbeat.filter(|_| job.request.stream).map(|beat| job.arrived + beat);
    loop {
        tokio::select! {
            biased;
            () = client.gone() => {
                client.lost();
                return;
            }
            said = said.recv() => match said {
                Some(said) => {
                    // A stream that pauses later, because it recovers, has its heartbeats then.
                    next_beat = next_beat.zip(job.model.heartbeat).map(|(_, beat)| Instant::now() + beat);
                    if !client.take(*said).await {
                        return;
                    }
                }
                None => {
                    client.finish().await;
                    return;
                }
            },
            Some(()) = running.next() => {}
            () = tokio::time::sleep_until(next_beat.unwrap_or(job.arrived)), if next_beat.is_some() => {
                next_beat = next_beat.zip(job.model.heartbeat).map(|(at, beat)| at + beat);
                client.heartbeat(job.cx.gate.state(&job.model.name)).await;
            }
        }
    }
}

/// How many tokens a prompt has, about: a token of English is four bytes long.
fn tokens_about(input: &Input) -> u64 {
    (match input {
        Input::Chat(messages) => messages.iter().map(|m| m.content.len() / 4 + 4).sum(),
        Input::Text(text) => text.len() / 4,
        Input::Tokens(ids) => ids.len(),
    }) as u64
}

/// The beginning of a prompt, after the model, as one number.
fn hash_of_prefix(model: &ModelView, input: &Input) -> u64 {
    let chars = model.prefix_chars;
    let begin: String = match input {
        Input::Chat(messages) => {
            let texts = messages.iter().flat_map(|m| [m.role.as_str(), "\n", m.content.as_str(), "\n"]);
            texts.flat_map(str::chars).take(chars).collect()
        }
        Input::Text(text) => text.chars().take(chars).collect(),
        Input::Tokens(ids) => ids.iter().take(chars / 4).map(|id| format!("{id} ")).collect(),
    };
    hash(&[model.name.to_string().as_bytes(), begin.as_bytes()])
}

impl Job {
    /// What every object of the answer repeats.
    fn envelope(&self) -> Envelope {
        let prefix = match self.request.task {
            Task::Chat => "chatcmpl",
            Task::Completion => "cmpl",
        };
        Envelope {
            task: self.request.task,
            id: format!("{prefix}-{}", self.id),
            created: self.arrived_at.as_micros() / 1_000_000,
            model: self.request.model.clone(),
            include_usage: self.request.include_usage,
            top_logprobs: self.request.sampling.logprobs.unwrap_or(0) as usize,
        }
    }

    /// How a choice stands in the line.
    fn entry(&self, index: usize) -> Entry {
        let first = index == 0;
        let (input, _) = self.request.choice(index);
        let keeps = self.model.keeps_prefixes(self.request.task);
        let prefix = || hash_of_prefix(&self.model, input);
        Entry {
            since: self.arrived,
            until: self.wishes.wait_max.filter(|_| first).map(|max| self.arrived + max),
            bytes: if first { self.bytes } else { 0 },
            counted: first,
            may_hold: self.may_hold(),
            priority: self.wishes.priority.unwrap_or(self.model.priority),
            flow: self.wishes.flow.unwrap_or(0),
            affinity: self.pin.or_else(|| keeps.then(prefix)),
            tokens: tokens_about(input),
            turn: None,
            avoid: Vec::new(),
            class: None,
            note: None,
        }
    }

    fn may_hold(&self) -> bool {
        self.wishes.hold.unwrap_or(self.model.policy == ColdStartPolicy::Hold)
    }

    /// The expected rest of a load, for heartbeats and Retry-After; how long others take at a ready replica nobody
    /// knows.
    fn remaining(&self) -> Option<f64> {
        let estimate = self.cx.registry().estimate(&self.model.name).filter(|seconds| *seconds > 0.0)?;
        Some((estimate - self.arrived.elapsed().as_secs_f64()).max(0.0))
    }

    fn cold_start_ended(&self, accepting_since: Instant, path: &str, phases: &Phases) {
        self.cx.metrics.cold_start(&self.model.name, path, phases, self.model.estimate);
        let report = ColdStartReport {
            started_at: pilotlight_kit::clock::rfc3339(self.arrived_at),
            path: path.into(),
            total_seconds: phases.total(),
            estimate_seconds: self.model.estimate.unwrap_or(0.0),
            phases: *phases,
        };
        self.cx.demand.cold_start(&self.model.name, accepting_since, report);
    }
}
