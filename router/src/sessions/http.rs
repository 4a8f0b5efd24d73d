//! The paths under `/router/v1`: for the operators of a system, not for its clients.
//!
//! | path | answers |
//! |---|---|
//! | `GET /router/v1/sessions` | a list; with `?watch=true` lines of JSON: every session that changes, all at first |
//! | `GET /router/v1/sessions/{id}` | one |
//! | `POST /router/v1/sessions/{id}/migrate` `{"node": …}` | when it has moved: the move; 409 with why not |
//! | `POST /router/v1/nodes/{node}/drain` | when no session is left there: how many moved |

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::http::{Response, StatusCode};
use axum::response::IntoResponse as _;
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use futures::StreamExt as _;
use pilotlight_domain::ModelName;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;

use super::drain;
use super::record::{Ask, Move, NotMoved, Record};
use crate::context::Context;
use crate::registry::ReplicaView;

/// As long as a request may wait for a cold model.
const PLACED_MAX: Duration = Duration::from_secs(300);
/// How long the operator keeps a replica for a session that is on its way to it.
const PLACED_FOR_SECONDS: u32 = 120;
/// A move that may be possible a moment later is tried again, so often and that much later.
const TRIES: u32 = 3;
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// Lines that a watcher has not taken.
const LINES: usize = 64;

pub(crate) fn routes(cx: Arc<Context>) -> Router {
    Router::new()
        .route("/router/v1/sessions", get(list))
        .route("/router/v1/sessions/{id}", get(one))
        .route("/router/v1/sessions/{id}/migrate", post(migrate))
        .route("/router/v1/nodes/{node}/drain", post(drain_node))
        .with_state(cx)
}

#[derive(Deserialize)]
struct ListQuery {
    #[serde(default)]
    watch: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Migrate {
    node: String,
}

fn refusal(status: StatusCode, code: &str, message: impl Into<String>) -> Response<Body> {
    let kind = if status.is_server_error() { "server_error" } else { "invalid_request_error" };
    let error = json!({ "message": message.into(), "type": kind, "param": null, "code": code });
    (status, Json(json!({ "error": error }))).into_response()
}

fn unknown(id: &str) -> Response<Body> {
    let message = format!("no session `{id}` is known here; ended ones are kept for ten minutes");
    refusal(StatusCode::NOT_FOUND, "session_not_found", message)
}

async fn list(State(cx): State<Arc<Context>>, Query(query): Query<ListQuery>) -> Response<Body> {
    if query.watch {
        return watch(&cx);
    }
    let items: Vec<_> = cx.sessions.all().iter().map(|record| record.told()).collect();
    Json(json!({ "apiVersion": "v1", "kind": "List", "metadata": {}, "items": items })).into_response()
}

fn watch(cx: &Arc<Context>) -> Response<Body> {
    let (lines, stream) = mpsc::channel::<Bytes>(LINES);
    let sessions = cx.sessions.clone();
    // Ends with its reader, or when all sessions have ended with this process.
    tokio::spawn(async move {
        let (mut changes, over) = (sessions.changes(), sessions.over());
        let mut seen = 0;
        loop {
            let now = *changes.borrow_and_update();
            let changed = sessions.all().into_iter().filter(|record| record.changed_since(seen));
            for record in changed.collect::<Vec<_>>() {
                let Ok(mut line) = serde_json::to_vec(&record.told()) else { return };
                line.push(b'\n');
                if lines.send(line.into()).await.is_err() {
                    return;
                }
            }
            seen = now;
            tokio::select! {
                biased;
                changed = changes.changed() => if changed.is_err() { return },
                () = lines.closed() => return,
                () = over.cancelled() => return,
            }
        }
    });
    let body = Body::from_stream(ReceiverStream::new(stream).map(Ok::<_, std::convert::Infallible>));
    ([("content-type", "application/x-ndjson")], body).into_response()
}

async fn one(State(cx): State<Arc<Context>>, Path(id): Path<String>) -> Response<Body> {
    match cx.sessions.get(&id) {
        Some(record) => Json(record.told()).into_response(),
        None => unknown(&id),
    }
}

async fn migrate(State(cx): State<Arc<Context>>, Path(id): Path<String>, body: Bytes) -> Response<Body> {
    let Migrate { node } = match serde_json::from_slice(&body) {
        Ok(body) => body,
        Err(error) => return refusal(StatusCode::BAD_REQUEST, "bad_request", format!("the body: {error}")),
    };
    let Some(record) = cx.sessions.get(&id) else { return unknown(&id) };
    if !cx.registry().knows_node(&node) {
        let message = format!("no node `{node}` is known; `pilotlight get nodes` lists them");
        return refusal(StatusCode::NOT_FOUND, "node_not_found", message);
    }
    let conflict = |why: &str| {
        refusal(StatusCode::CONFLICT, "not_moved", format!("session {id} was not moved to {node}: {why}"))
    };
    if record.state().is_over() {
        return conflict("it has ended; `pilotlight sessions` lists those that run");
    }
    let replica = match placed(&cx, &record.model, &node).await {
        Ok(replica) => replica,
        Err(why) => return conflict(&why),
    };
    match move_to(&record, &replica).await {
        Ok(moved) => Json(moved).into_response(),
        Err(why) => conflict(&why.message),
    }
}

async fn drain_node(State(cx): State<Arc<Context>>, Path(node): Path<String>) -> Response<Body> {
    if !cx.registry().knows_node(&node) {
        let message = format!("no node `{node}` is known; `pilotlight get nodes` lists them");
        return refusal(StatusCode::NOT_FOUND, "node_not_found", message);
    }
    Json(drain::drain(&cx, &node).await).into_response()
}

/// A replica of the model on that node, ordered if there is none. Dropping it half-way is safe.
pub(super) async fn placed(cx: &Context, model: &ModelName, node: &str) -> Result<Arc<ReplicaView>, String> {
    let mut changes = cx.changes.subscribe();
    let there = || cx.registry().standing(model)?.replicas.into_iter().find(|r| r.node == node);
    if let Some(replica) = there() {
        return Ok(replica);
    }
    let order = json!({ "model": model, "node": node, "seconds": PLACED_FOR_SECONDS });
    let url = format!("{}/operator/v1/place", cx.operator);
    let told = cx.agents.post::<_, serde_json::Value>(&url, &order).await;
    told.map_err(|error| format!("the operator did not place `{model}` there: {error}"))?;
    let waiting = async {
        loop {
            if let Some(replica) = there() {
                return Some(replica);
            }
            if changes.changed().await.is_err() {
                return None;
            }
        }
    };
    let placed = tokio::time::timeout(PLACED_MAX, waiting).await;
    placed.ok().flatten().ok_or_else(|| {
        format!(
            "`{model}` was not ready there within {} s; `pilotlight get replicas` tells",
            PLACED_MAX.as_secs()
        )
    })
}

/// Asks a session to move, and waits for what comes of it. Dropping it half-way leaves the move to itself.
pub(super) async fn move_to(record: &Record, to: &Arc<ReplicaView>) -> Result<Move, NotMoved> {
    let mut tries = 0;
    loop {
        tries += 1;
        let (answer, answered) = oneshot::channel();
        // Not asked, or not answered: it did not listen yet, has enough to do, or has ended.
        let unheard = || match record.state() {
            super::record::State::Held => NotMoved {
                message: "the session waits for its model: it moves once it has begun".into(),
                soon: true,
            },
            state if state.is_over() => {
                NotMoved { message: "the session ended before it could move".into(), soon: false }
            }
            _ => NotMoved { message: "the session is busy".into(), soon: true },
        };
        record.ask(Ask::Move { to: to.clone(), answer });
        match answered.await.unwrap_or_else(|_| Err(unheard())) {
            Err(why) if why.soon && tries < TRIES => tokio::time::sleep(AGAIN_AFTER).await,
            answer => return answer,
        }
    }
}
