//! Sessions over HTTP.
//!
//! | path | answers |
//! |---|---|
//! | `POST /v1/sessions` | opens one and streams its events, until its last event or the connection's end |
//! | `POST /v1/sessions/{id}/command?epoch=E` | 202: the opening under that epoch has the `SessionCommand`; its stream tells what becomes of it. 404: no such opening; 409: it has too many commands already |
//! | `GET /v1/status` | what is here: the node, its replicas, its sessions |
//!
//! ```text
//! body ─parse─► replica? ─no─► 404                    (every refusal: a Failed event as JSON)
//!                  │ yes ─► 200, and lines of JSON from here on
//!                  ├─ waits for its model; its failure comes at once
//!                  ├─ started on the worker: accepted, token, …, one last event
//!                  └─ connection closed, at any time: cancelled within a step
//! ```
//!
//! Invariants: a session's stream ends with exactly one last event, or with its connection; the numbers of sessions,
//! of bytes of waiting requests, of undelivered events and of commands are bounded; a session counts as open in its
//! replica from before it looked at it until its last event was sent.
//!
//! It deliberately does **not** know tokens, prompts or replays: the worker makes events, the router judges them.

mod course;
mod opening;
mod refusal;
mod table;
mod task;

use std::sync::Arc;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::rejection::{BytesRejection, JsonRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use pilotlight_domain::SessionId;
use pilotlight_domain::session::{FailureCode, Retry, SessionCommand, SessionSpec};
use pilotlight_kit::Stop;
use pilotlight_kit::trace::Span;
use serde::Deserialize;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::TaskTracker;

use crate::orders::face::{Face, View};
use crate::orders::replica::Node;
use refusal::Refusal;
use table::{NotTaken, Table};
use task::Session;

/// A prompt of 16 MiB, and a MiB for everything around it.
const BODY_BYTES_MAX: usize = 17 << 20;
/// Bytes of requests that are read or wait: 15 of the largest, or tens of thousands of usual ones.
const WAITING_BYTES_MAX: usize = 256 << 20;
/// Lines that wait for the connection; what does not fit waits in the session's own queue.
const LINES: usize = 16;

/// What the handlers share. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Sessions {
    node: Arc<Node>,
    stop: Stop,
    tasks: TaskTracker,
    places: Arc<Semaphore>,
    waiting_bytes: Arc<Semaphore>,
    table: Table,
}

impl Sessions {
    pub(crate) fn new(node: Arc<Node>, stop: Stop, tasks: TaskTracker) -> Self {
        let places = Arc::new(Semaphore::new(node.limits.sessions_max));
        let waiting_bytes = Arc::new(Semaphore::new(WAITING_BYTES_MAX));
        Sessions { node, stop, tasks, places, waiting_bytes, table: Table::default() }
    }

    /// The paths.
    pub(crate) fn routes(self) -> Router {
        let limit = DefaultBodyLimit::max(BODY_BYTES_MAX);
        Router::new()
            .route("/v1/sessions", post(open).layer(limit))
            .route("/v1/sessions/{id}/command", post(command))
            .route("/v1/status", get(status))
            .with_state(self)
    }
}

async fn status(State(sessions): State<Sessions>) -> Response {
    let status = crate::report::node_status(&sessions.node, sessions.stop.is_stopping());
    let replicas: Vec<_> =
        sessions.node.faces.all().iter().map(|(model, face)| replica_line(model, face)).collect();
    let told = sessions.table.told();
    axum::Json(serde_json::json!({ "node": status, "replicas": replicas, "sessions": told })).into_response()
}

fn replica_line(model: &pilotlight_domain::ModelName, face: &Arc<Face>) -> serde_json::Value {
    let (state, cause) = match &*face.view.borrow() {
        View::Waiting => ("waiting", None),
        View::Open(places) if places.iter().any(|place| place.ready().is_some()) => ("serving", None),
        View::Open(_) => ("waiting", None),
        View::Idle => ("idle", None),
        View::Draining => ("draining", None),
        View::Failed(failure) => ("failed", Some(failure.message.clone())),
    };
    serde_json::json!({ "model": model, "state": state, "sessions": face.open(), "cause": cause })
}

async fn open(
    State(sessions): State<Sessions>,
    headers: HeaderMap,
    body: Result<Bytes, BytesRejection>,
) -> Response {
    let body = match body {
        Ok(body) => body,
        Err(rejection) => {
            let message = format!("{}; a session's request has at most 17 MiB", rejection.body_text());
            return Refusal::bad(message).into_response(rejection.status());
        }
    };
    if sessions.stop.is_stopping() {
        return Refusal::draining().into_response(StatusCode::SERVICE_UNAVAILABLE);
    }
    let full = |what: &str| {
        Refusal::new(FailureCode::NoCapacity, format!("this node has {what} already"), Retry::Elsewhere)
            .into_response(StatusCode::SERVICE_UNAVAILABLE)
    };
    let Ok(place) = sessions.places.clone().try_acquire_owned() else {
        return full(&format!("{} sessions", sessions.node.limits.sessions_max));
    };
    let bytes = u32::try_from(body.len()).unwrap_or(u32::MAX);
    let Ok(waiting) = sessions.waiting_bytes.clone().try_acquire_many_owned(bytes) else {
        return full("256 MiB of waiting requests");
    };
    let spec: SessionSpec = match serde_json::from_slice(&body) {
        Ok(spec) => spec,
        Err(error) => {
            return Refusal::bad(format!("not a session: {error}")).into_response(StatusCode::BAD_REQUEST);
        }
    };
    drop(body);
    let Some(face) = sessions.node.faces.get(&spec.model) else {
        let message = format!("this node has no order for model {}", spec.model);
        return Refusal::new(FailureCode::UnknownModel, message, Retry::Elsewhere)
            .into_response(StatusCode::NOT_FOUND);
    };
    // Counted before it looks: see `Face::enter`.
    let entered = face.enter(spec.on_cpu);
    if let Err(refusal) = opening::look(&face, 0, false) {
        let status = match refusal.code {
            FailureCode::UnknownModel => StatusCode::NOT_FOUND,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        return refusal.into_response(status);
    }
    let generated = u32::try_from(spec.generated.len()).unwrap_or(u32::MAX);
    let listed = sessions.table.enter(spec.id.clone(), spec.epoch, spec.model.clone(), generated);
    let (lines, stream) = mpsc::channel::<Bytes>(LINES);
    let session = Session {
        node: sessions.node.clone(),
        stop: sessions.stop.clone(),
        face,
        lines,
        opened: Instant::now(),
        listed,
        step: Span::default(),
        span: span_of(&headers),
        decodes: false,
        _entered: entered,
        _place: place,
    };
    sessions.tasks.spawn(session.run(Box::new(spec), waiting));
    let body = Body::from_stream(ReceiverStream::new(stream).map(Ok::<_, std::convert::Infallible>));
    ([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response()
}

/// A session's span, if whoever opened it traces it.
fn span_of(headers: &HeaderMap) -> Span {
    match headers.get("traceparent").and_then(|value| value.to_str().ok()) {
        told @ Some(_) => Span::begin("session", told),
        None => Span::default(),
    }
}

/// Which opening of a session is meant.
#[derive(Deserialize)]
struct Which {
    epoch: u32,
}

async fn command(
    State(sessions): State<Sessions>,
    Path(id): Path<String>,
    which: Result<Query<Which>, QueryRejection>,
    command: Result<axum::Json<SessionCommand>, JsonRejection>,
) -> Response {
    let (Query(Which { epoch }), axum::Json(command)) = match (which, command) {
        (Ok(which), Ok(command)) => (which, command),
        (Err(error), _) => {
            let message = format!("name the opening with ?epoch=N: {}", error.body_text());
            return Refusal::bad(message).into_response(StatusCode::BAD_REQUEST);
        }
        (_, Err(error)) => {
            let message = format!("not a command: {}", error.body_text());
            return Refusal::bad(message).into_response(error.status());
        }
    };
    let taken = match id.parse::<SessionId>() {
        Ok(id) => sessions.table.command(&id, epoch, command),
        Err(_) => Err(NotTaken::Unknown),
    };
    match taken {
        Ok(()) => StatusCode::ACCEPTED.into_response(),
        Err(NotTaken::Unknown) => {
            Refusal::bad(format!("no session {id} is open here under epoch {epoch}; it may have ended"))
                .into_response(StatusCode::NOT_FOUND)
        }
        Err(NotTaken::Busy) => {
            Refusal::bad(format!("session {id} has not taken up its earlier commands; wait for its events"))
                .into_response(StatusCode::CONFLICT)
        }
    }
}
