//! Sessions over HTTP: `POST /v1/sessions` opens one and streams its events, `GET /v1/status` tells what is here.
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
//! of bytes of waiting requests and of undelivered events are bounded; a session counts as open in its replica from
//! before it looked at it until its last event was sent.
//!
//! It deliberately does **not** know tokens, prompts or replays: the worker makes events, the router judges them.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use pilotlight_domain::session::{FailureCode, Retry, SessionEvent, SessionSpec};
use pilotlight_kit::Stop;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::Instant;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::TaskTracker;

use crate::orders::face::{Entered, Face, Serving, View};
use crate::orders::replica::Node;
use crate::workers::SessionLink;

/// A prompt of 16 MiB, and a MiB for everything around it.
const BODY_BYTES_MAX: usize = 17 << 20;
/// Bytes of requests that are read or wait: 15 of the largest, or tens of thousands of usual ones.
const WAITING_BYTES_MAX: usize = 256 << 20;
/// Lines that wait for the connection; what does not fit waits in the session's own queue.
const LINES: usize = 16;
/// What goes out in one piece at most.
const PIECE_BYTES_MAX: usize = 64 << 10;

/// What the handlers share. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Sessions {
    node: Arc<Node>,
    stop: Stop,
    tasks: TaskTracker,
    places: Arc<Semaphore>,
    waiting_bytes: Arc<Semaphore>,
}

impl Sessions {
    pub(crate) fn new(node: Arc<Node>, stop: Stop, tasks: TaskTracker) -> Self {
        let places = Arc::new(Semaphore::new(node.limits.sessions_max));
        let waiting_bytes = Arc::new(Semaphore::new(WAITING_BYTES_MAX));
        Sessions { node, stop, tasks, places, waiting_bytes }
    }

    /// The paths.
    pub(crate) fn routes(self) -> Router {
        let limit = DefaultBodyLimit::max(BODY_BYTES_MAX);
        Router::new()
            .route("/v1/sessions", post(open).layer(limit))
            .route("/v1/status", get(status))
            .with_state(self)
    }
}

async fn status(State(sessions): State<Sessions>) -> Response {
    let status = crate::report::node_status(&sessions.node, sessions.stop.is_stopping());
    let replicas: Vec<_> =
        sessions.node.faces.all().iter().map(|(model, face)| replica_line(model, face)).collect();
    axum::Json(serde_json::json!({ "node": status, "replicas": replicas })).into_response()
}

fn replica_line(model: &pilotlight_domain::ModelName, face: &Arc<Face>) -> serde_json::Value {
    let (state, cause) = match &*face.view.borrow() {
        View::Waiting => ("waiting", None),
        View::Serving(_) => ("serving", None),
        View::Idle => ("idle", None),
        View::Draining => ("draining", None),
        View::Failed(failure) => ("failed", Some(failure.message.clone())),
    };
    serde_json::json!({ "model": model, "state": state, "sessions": face.open(), "cause": cause })
}

/// Why a session is not served, ready to be said.
#[derive(Clone, Debug)]
struct Refusal {
    code: FailureCode,
    message: String,
    retry: Retry,
}

impl Refusal {
    fn new(code: FailureCode, message: impl Into<String>, retry: Retry) -> Self {
        Refusal { code, message: message.into(), retry }
    }

    fn draining() -> Self {
        Refusal::new(FailureCode::Draining, "the replica is going away; another one serves", Retry::Elsewhere)
    }

    fn event(self) -> SessionEvent {
        SessionEvent::Failed { code: self.code, message: self.message, retry: self.retry }
    }

    fn into_response(self, status: StatusCode) -> Response {
        (status, axum::Json(self.event())).into_response()
    }
}

async fn open(State(sessions): State<Sessions>, body: Result<Bytes, BytesRejection>) -> Response {
    let bad = |message: String| Refusal::new(FailureCode::BadRequest, message, Retry::No);
    let body = match body {
        Ok(body) => body,
        Err(rejection) => {
            let message = format!("{}; a session's request has at most 17 MiB", rejection.body_text());
            return bad(message).into_response(rejection.status());
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
        Err(error) => return bad(format!("not a session: {error}")).into_response(StatusCode::BAD_REQUEST),
    };
    drop(body);
    let Some(face) = sessions.node.faces.get(&spec.model) else {
        let message = format!("this node has no order for model {}", spec.model);
        return Refusal::new(FailureCode::UnknownModel, message, Retry::Elsewhere)
            .into_response(StatusCode::NOT_FOUND);
    };
    // Counted before it looks: see `Face::enter`.
    let entered = face.enter();
    if let Err(refusal) = look(&face) {
        let status = match refusal.code {
            FailureCode::UnknownModel => StatusCode::NOT_FOUND,
            _ => StatusCode::SERVICE_UNAVAILABLE,
        };
        return refusal.into_response(status);
    }
    let (lines, stream) = mpsc::channel::<Bytes>(LINES);
    let session = Session {
        node: sessions.node.clone(),
        stop: sessions.stop.clone(),
        face,
        lines,
        opened: Instant::now(),
        _entered: entered,
        _place: place,
    };
    sessions.tasks.spawn(session.run(Box::new(spec), waiting));
    let body = Body::from_stream(ReceiverStream::new(stream).map(Ok::<_, std::convert::Infallible>));
    ([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response()
}

/// Where sessions start; none while they wait.
fn look(face: &Face) -> Result<Option<Serving>, Refusal> {
    match &*face.view.borrow() {
        View::Waiting => Ok(None),
        View::Serving(serving) => Ok(Some(serving.clone())),
        View::Idle => Err(Refusal::new(
            FailureCode::UnknownModel,
            "this node holds the model, but is not to serve it",
            Retry::Elsewhere,
        )),
        View::Draining => Err(Refusal::draining()),
        View::Failed(failure) => {
            let retry = if failure.cause.is_source() { Retry::No } else { Retry::Elsewhere };
            Err(Refusal::new(FailureCode::LoadFailed, failure.message.clone(), retry))
        }
    }
}

/// The other side closed the connection.
struct ClientGone;

/// One session's task.
struct Session {
    node: Arc<Node>,
    stop: Stop,
    face: Arc<Face>,
    lines: mpsc::Sender<Bytes>,
    opened: Instant,
    _entered: Entered,
    _place: OwnedSemaphorePermit,
}

impl Session {
    #[tracing::instrument(name = "session", skip_all, fields(request = %spec.id, model = %spec.model))]
    async fn run(self, spec: Box<SessionSpec>, waiting: OwnedSemaphorePermit) {
        let metrics = self.node.board.metrics().clone();
        let _counted = metrics.session();
        self.node.board.changed();
        let outcome = match self.serve(spec, waiting).await {
            Ok(last) => {
                let outcome = match &last {
                    SessionEvent::Done { .. } => "done",
                    _ => "failed",
                };
                if let SessionEvent::Failed { code, message, .. } = &last {
                    tracing::info!(?code, message, "session failed");
                }
                let _client_gone = self.send(vec![last]).await;
                outcome
            }
            Err(ClientGone) => "cancelled",
        };
        metrics.session_ended(outcome);
        self.node.board.changed();
    }

    /// The last event, which is not sent yet.
    async fn serve(
        &self,
        spec: Box<SessionSpec>,
        waiting: OwnedSemaphorePermit,
    ) -> Result<SessionEvent, ClientGone> {
        let serving = match self.wait().await? {
            Ok(serving) => serving,
            Err(refusal) => return Ok(refusal.event()),
        };
        let key = serving.worker.new_session();
        let events_max = self.node.limits.session_events_max;
        let lost = |message: &str| Refusal::new(FailureCode::WorkerLost, message, Retry::Elsewhere).event();
        let started = tokio::select! {
            started = serving.life.start(key, serving.model, spec, events_max) => started,
            () = self.lines.closed() => return Err(ClientGone),
        };
        drop(waiting);
        let Ok(mut link) = started else { return Ok(lost("the worker died")) };
        loop {
            let event = tokio::select! {
                event = link.event() => event,
                () = self.lines.closed() => return Err(ClientGone),
                () = serving.cut.cancelled() => return Ok(Refusal::draining().event()),
                () = self.stop.aborting() => return Ok(Refusal::draining().event()),
            };
            let Some(event) = event else {
                return Ok(if link.is_overrun() {
                    let message = format!("the reader fell {events_max} events behind");
                    Refusal::new(FailureCode::Internal, message, Retry::Elsewhere).event()
                } else {
                    lost("the worker died; its weights are still in memory")
                });
            };
            if let Some(last) = self.forward(event, &mut link).await? {
                return Ok(last);
            }
        }
    }

    /// Sends this event, and what came with it, in one piece. Answers with the last event instead of sending it.
    async fn forward(
        &self,
        event: SessionEvent,
        link: &mut SessionLink,
    ) -> Result<Option<SessionEvent>, ClientGone> {
        let (mut batch, mut next) = (Vec::new(), Some(event));
        while let Some(mut event) = next {
            if event.is_last() {
                if !batch.is_empty() {
                    self.send(batch).await?;
                }
                return Ok(Some(event));
            }
            if let SessionEvent::Accepted { waited, from, .. } = &mut event {
                *waited = self.face.waited(self.opened, Instant::now());
                *from = self.face.from();
            }
            batch.push(event);
            next = if batch.len() < LINES { link.event_now() } else { None };
        }
        self.send(batch).await.map(|()| None)
    }

    async fn send(&self, events: Vec<SessionEvent>) -> Result<(), ClientGone> {
        let mut piece = Vec::new();
        for event in events {
            serde_json::to_writer(&mut piece, &event).expect("events are plain data with text keys");
            piece.push(b'\n');
            if piece.len() > PIECE_BYTES_MAX {
                self.lines.send(Bytes::from(std::mem::take(&mut piece))).await.map_err(|_| ClientGone)?;
            }
        }
        if piece.is_empty() { Ok(()) } else { self.lines.send(piece.into()).await.map_err(|_| ClientGone) }
    }

    /// Waits until the replica serves.
    async fn wait(&self) -> Result<Result<Serving, Refusal>, ClientGone> {
        let limit = self.node.limits.session_wait_max;
        let mut view = self.face.view.clone();
        let waiting = async {
            loop {
                match look(&self.face) {
                    Ok(Some(serving)) => return Ok(serving),
                    Err(refusal) => return Err(refusal),
                    Ok(None) => {}
                }
                if view.changed().await.is_err() {
                    return Err(Refusal::draining());
                }
            }
        };
        tokio::select! {
            found = waiting => Ok(found),
            () = self.lines.closed() => Err(ClientGone),
            () = self.stop.stopping() => Ok(Err(Refusal::draining())),
            () = tokio::time::sleep(limit) => Ok(Err(too_long(limit))),
        }
    }
}

fn too_long(limit: Duration) -> Refusal {
    let message = format!(
        "the model was not ready within {} s; its replica's status tells how far it is",
        limit.as_secs()
    );
    Refusal::new(FailureCode::LoadFailed, message, Retry::Elsewhere)
}
