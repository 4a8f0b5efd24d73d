//! The client against a server that says what the test wrote for it: busy, behind, gone, cut off.
#![allow(clippy::unwrap_used, reason = "a failed test is what it is for")]

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use futures::StreamExt as _;
use pilotlight_api::Model;
use pilotlight_kit::Stop;
use pilotlight_store::{Filter, Reflected, RemoteStore, StoreError, Typed as _, reflect};
use serde_json::{Value, json};

/// Longer than any answer takes, so that a test that waits for nothing ends.
const PATIENCE: Duration = Duration::from_secs(20);

/// What is answered to the next request, whatever it is.
enum Say {
    Json(u16, Value),
    /// With `Retry-After`, in words that are no `Status`.
    Busy(u16, u64),
    /// Lines of a watch, and then the end.
    Lines(Vec<Value>),
    /// Nothing, for ever.
    Silence,
}

#[derive(Clone, Default)]
struct Script {
    says: Arc<Mutex<VecDeque<Say>>>,
    asked: Arc<Mutex<Vec<String>>>,
}

async fn answer(State(script): State<Script>, request: Request) -> Response {
    let query = request.uri().query().unwrap_or_default();
    let part = |key: &str| query.split('&').find(|part| part.starts_with(key)).map(|part| format!(" {part}"));
    let told = [part("watch"), part("resourceVersion")].into_iter().flatten().collect::<String>();
    script.asked.lock().unwrap().push(format!("{}{told}", request.method()));
    let say = script.says.lock().unwrap().pop_front();
    let response = Response::builder();
    match say {
        Some(Say::Json(code, value)) => response.status(code).body(Body::from(value.to_string())),
        Some(Say::Busy(code, seconds)) => {
            response.status(code).header("retry-after", seconds).body(Body::from("Too many requests"))
        }
        Some(Say::Lines(lines)) => {
            response.body(Body::from(lines.iter().map(|line| format!("{line}\n")).collect::<String>()))
        }
        Some(Say::Silence) | None => std::future::pending().await,
    }
    .unwrap()
}

struct Server {
    store: RemoteStore,
    script: Script,
    stop: Stop,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.stop();
    }
}

async fn server(says: impl IntoIterator<Item = Say>) -> Server {
    let script = Script { says: Arc::new(Mutex::new(says.into_iter().collect())), ..Script::default() };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let routes = axum::Router::new().fallback(answer).with_state(script.clone());
    let stop = Stop::new();
    tokio::spawn(pilotlight_kit::http::serve(listener, routes, stop.clone(), Duration::ZERO));
    Server { store: RemoteStore::from_url(&url, "test").unwrap(), script, stop }
}

impl Server {
    fn asked(&self) -> Vec<String> {
        self.script.asked.lock().unwrap().clone()
    }
}

fn model(name: &str, version: &str) -> Value {
    json!({ "apiVersion": "pilotlight.dev/v1alpha1", "kind": "Model",
        "metadata": { "name": name, "namespace": "default", "resourceVersion": version },
        "spec": { "source": { "uri": "hf://a/b" } } })
}

fn typed(name: &str) -> Model {
    serde_json::from_value(model(name, "1")).unwrap()
}

fn status(code: u16, reason: &str) -> Value {
    json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": "why" })
}

fn list(version: &str, items: &[Value]) -> Say {
    Say::Json(200, json!({ "kind": "ModelList", "metadata": { "resourceVersion": version }, "items": items }))
}

#[tokio::test]
async fn a_busy_server_is_asked_again_and_not_before_it_said() {
    let world = server([
        Say::Busy(429, 1),
        Say::Json(500, status(500, "InternalError")),
        Say::Json(504, status(504, "Timeout")),
        Say::Json(200, model("a", "5")),
    ])
    .await;
    let begun = tokio::time::Instant::now();
    let found = world.store.get::<Model>("default", "a").await.unwrap();
    assert_eq!(found.metadata.resource_version.as_deref(), Some("5"));
    assert!(begun.elapsed() >= Duration::from_secs(1), "Retry-After was honoured");
    assert_eq!(world.asked(), ["GET", "GET", "GET", "GET"]);
}

#[tokio::test]
async fn patience_has_an_end() {
    let world = server((0..9).map(|_| Say::Json(503, status(503, "ServiceUnavailable")))).await;
    let error = world.store.apply(&typed("a")).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error}");
    assert_eq!(world.asked().len(), 4);

    let world = server([Say::Busy(429, 3600)]).await;
    let error = world.store.get::<Model>("default", "a").await.unwrap_err();
    let StoreError::Unavailable { retry_after, message } = error else { panic!("{error}") };
    assert_eq!(retry_after, Some(Duration::from_secs(3600)), "that is the caller's to wait");
    assert!(message.contains("429") && message.contains("Too many requests"), "{message}");
}

#[tokio::test]
async fn a_creation_that_may_have_been_done_is_not_repeated() {
    let world = server([Say::Json(500, status(500, "InternalError"))]).await;
    assert!(world.store.create(&typed("a")).await.is_err());
    assert_eq!(world.asked(), ["POST"]);
    let world = server([Say::Busy(429, 0), Say::Json(201, model("a", "1"))]).await;
    world.store.create(&typed("a")).await.unwrap();
    assert_eq!(world.asked(), ["POST", "POST"], "429 was not begun");
}

#[tokio::test]
async fn a_conflict_and_a_refusal_are_told_at_once() {
    let world =
        server([Say::Json(409, status(409, "Conflict")), Say::Json(403, status(403, "Forbidden"))]).await;
    assert!(world.store.replace(&typed("a")).await.unwrap_err().is_conflict());
    let error = world.store.get::<Model>("default", "a").await.unwrap_err();
    assert!(matches!(error, StoreError::Forbidden { .. }), "{error}");
    assert_eq!(world.asked().len(), 2);
}

#[tokio::test]
async fn no_answer_is_a_timeout() {
    let world = server([Say::Silence]).await;
    let store = world.store.clone().with_timeout(Duration::from_millis(50));
    let error = store.get::<Model>("default", "a").await.unwrap_err();
    assert!(matches!(error, StoreError::Timeout { .. }), "{error}");
}

#[tokio::test]
async fn a_finalizer_is_set_again_after_a_conflict() {
    let world = server([
        Say::Json(200, model("a", "1")),
        Say::Json(409, status(409, "Conflict")),
        Say::Json(200, model("a", "2")),
        Say::Json(200, model("a", "3")),
    ])
    .await;
    world.store.set_finalizer(&typed("a"), "pilotlight.dev/x", true).await.unwrap();
    assert_eq!(world.asked(), ["GET", "PATCH", "GET", "PATCH"]);
}

fn told(item: &Reflected<Model>) -> String {
    let name = |model: &Model| model.metadata.name.clone().unwrap();
    match item {
        Reflected::Restarted(all) => format!("all {}", all.iter().map(name).collect::<Vec<_>>().join(" ")),
        Reflected::Applied(model) => format!("+{}", name(model)),
        Reflected::Deleted(model) => format!("-{}", name(model)),
    }
}

#[tokio::test]
async fn a_watch_resumes_after_its_end_and_lists_again_after_gone() {
    let event = |kind: &str, object: Value| json!({ "type": kind, "object": object });
    let bookmark = json!({ "kind": "Model", "metadata": { "resourceVersion": "20" } });
    let world = server([
        list("10", &[model("a", "9")]),
        Say::Lines(vec![event("ADDED", model("b", "11"))]),
        // The server ended it: from the last version on.
        Say::Lines(vec![event("BOOKMARK", bookmark)]),
        // A bookmark counts as seen. Now too much was forgotten, said as an answer.
        Say::Json(410, status(410, "Expired")),
        list("30", &[model("c", "30")]),
        // The same said on the stream.
        Say::Lines(vec![event("DELETED", model("c", "31")), event("ERROR", status(410, "Expired"))]),
        list("40", &[]),
        // A server that cannot is tried again without listing.
        Say::Json(500, status(500, "InternalError")),
        Say::Lines(vec![event("ADDED", model("d", "41"))]),
    ])
    .await;
    let mut seen = reflect::<Model>(Arc::new(world.store.clone()), Filter::all());
    let mut items = Vec::new();
    while items.len() < 6 {
        items.push(told(&tokio::time::timeout(PATIENCE, seen.next()).await.unwrap().unwrap()));
    }
    assert_eq!(items, ["all a", "+b", "all c", "-c", "all ", "+d"]);
    let watch = |version: &str| format!("GET watch=true resourceVersion={version}");
    let asked = [
        "GET",
        &watch("10"),
        &watch("11"),
        &watch("20"),
        "GET",
        &watch("30"),
        "GET",
        &watch("40"),
        &watch("40"),
    ];
    assert_eq!(world.asked(), asked);
}
