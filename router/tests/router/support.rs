//! A router in a small world: an embedded store, a scripted operator, and a client.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use pilotlight_api::{Model, ModelReplica};
use pilotlight_kit::clock::SystemClock;
use pilotlight_kit::{Readiness, Stop};
use pilotlight_router::{Router, Settings};
use pilotlight_store::{ClusterStore, EmbeddedStore, Typed as _};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::fakes::FakeOperator;

/// Nothing in these tests takes long; what takes this long hangs.
pub(crate) async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), future).await.expect("it takes too long")
}

pub(crate) struct World {
    pub(crate) url: String,
    pub(crate) operator: FakeOperator,
    pub(crate) router: Router,
    pub(crate) metrics: prometheus::Registry,
    pub(crate) stop: Stop,
    pub(crate) running: JoinHandle<()>,
    store: Arc<dyn ClusterStore>,
    client: Client<HttpConnector, Full<Bytes>>,
    _dir: tempfile::TempDir,
}

/// An answer read to its end.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {:?}", self.body))
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |v| v.to_str().unwrap())
    }

    /// `status type/code param`, of an error.
    pub(crate) fn error(&self) -> String {
        let error = &self.json()["error"];
        assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()), "{error}");
        let text = |key: &str| error[key].as_str().unwrap_or("-").to_owned();
        format!("{} {}/{} {}", self.status.as_u16(), text("type"), text("code"), text("param"))
    }

    pub(crate) fn message(&self) -> String {
        self.json()["error"]["message"].as_str().unwrap_or_default().to_owned()
    }
}

/// An answer that is read event by event. Dropping it closes its connection.
pub(crate) struct Sse {
    pub(crate) headers: HeaderMap,
    body: Incoming,
    buffer: String,
    trailers: HeaderMap,
}

impl Sse {
    /// The next event or comment without its blank line; none at the end.
    pub(crate) async fn next(&mut self) -> Option<String> {
        loop {
            if let Some((event, rest)) = self.buffer.split_once("\n\n") {
                let event = event.to_owned();
                self.buffer = rest.to_owned();
                return Some(event);
            }
            let frame = within(self.body.frame()).await?.expect("an unbroken body");
            match frame.into_data() {
                Ok(data) => self.buffer.push_str(std::str::from_utf8(&data).unwrap()),
                Err(frame) => self.trailers = frame.into_trailers().unwrap(),
            }
        }
    }

    /// The next event's JSON.
    pub(crate) async fn json(&mut self) -> Value {
        let event = self.next().await.expect("an event");
        let data = event.strip_prefix("data: ").unwrap_or_else(|| panic!("no data: {event}"));
        serde_json::from_str(data).unwrap_or_else(|e| panic!("{e}: {data}"))
    }

    /// Everything that is left.
    pub(crate) async fn rest(self) -> Vec<String> {
        self.end().await.0
    }

    /// The same, and the trailers.
    pub(crate) async fn end(mut self) -> (Vec<String>, HeaderMap) {
        let mut events = Vec::new();
        while let Some(event) = self.next().await {
            events.push(event);
        }
        (events, self.trailers)
    }
}

impl World {
    pub(crate) async fn new() -> Self {
        Self::with(Settings::default()).await
    }

    pub(crate) async fn with(settings: Settings) -> Self {
        let operator = FakeOperator::start().await;
        let dir = tempfile::tempdir().unwrap();
        let store = EmbeddedStore::open(dir.path(), Arc::new(SystemClock)).await.unwrap();
        let store: Arc<dyn ClusterStore> = Arc::new(store);
        let config = Settings { operator: operator.url.clone(), ..settings }.check().unwrap();
        let metrics = prometheus::Registry::new();
        let router = Router::new(config, store.clone(), Arc::new(SystemClock), &metrics).unwrap();
        let listener = pilotlight_kit::http::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let stop = Stop::new();
        let app = router.routes().merge(router.session_routes()).fallback(pilotlight_router::not_found);
        tokio::spawn(pilotlight_kit::http::serve(listener, app, stop.clone(), Duration::from_secs(10)));
        let running = tokio::spawn({
            let (router, stop) = (router.clone(), stop.clone());
            async move { router.run(stop).await }
        });
        let mut ready = router.readiness();
        within(ready.wait_for(|r| *r == Readiness::Ready)).await.unwrap();
        let client = Client::builder(TokioExecutor::new()).build_http();
        World { url, operator, router, metrics, stop, running, store, client, _dir: dir }
    }

    /// Applies a Model with these further fields of its spec, and waits until the router knows it.
    pub(crate) async fn model(&self, name: &str, spec: Value) {
        self.apply(name, spec).await;
        self.knows(name, |_| true).await;
    }

    /// Applies a Model, and does not wait.
    pub(crate) async fn apply(&self, name: &str, spec: Value) {
        let mut whole = json!({"source": {"uri": "file:///nowhere"}});
        whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
        let model: Model = serde_json::from_value(json!({
            "apiVersion": "pilotlight.dev/v1alpha1", "kind": "Model",
            "metadata": {"name": name, "namespace": "default"}, "spec": whole,
        }))
        .unwrap();
        self.store.apply(&model).await.unwrap();
    }

    /// Writes a Model's status.
    pub(crate) async fn model_status(&self, name: &str, status: Value) {
        let mut model: Model = self.store.get("default", name).await.unwrap();
        model.status = Some(serde_json::from_value(status).unwrap());
        self.store.apply_status(&model).await.unwrap();
    }

    /// A node that is there.
    pub(crate) async fn node(&self, name: &str, spec: Value) {
        let node: pilotlight_api::ModelNode = serde_json::from_value(json!({
            "apiVersion": "pilotlight.dev/v1alpha1", "kind": "ModelNode",
            "metadata": {"name": name}, "spec": spec,
        }))
        .unwrap();
        self.store.apply(&node).await.unwrap();
    }

    /// A node whose processor computes in this numerics class.
    pub(crate) async fn node_of_class(&self, name: &str, class: &str) {
        self.node(name, json!({})).await;
        let mut node: pilotlight_api::ModelNode = self.store.get("", name).await.unwrap();
        let devices = json!({"devices": [{"name": "cpu", "kind": "Cpu", "numerics": class}]});
        node.status = Some(serde_json::from_value(devices).unwrap());
        self.store.apply_status(&node).await.unwrap();
    }

    /// Says of a node that its agent is not heard of.
    pub(crate) async fn node_lost(&self, name: &str) {
        let mut node: pilotlight_api::ModelNode = self.store.get("", name).await.unwrap();
        node.status = Some(
            serde_json::from_value(json!({"conditions": [{"type": "Ready", "status": "Unknown",
            "reason": "AgentLost", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}]}))
            .unwrap(),
        );
        self.store.apply_status(&node).await.unwrap();
    }

    pub(crate) async fn delete_model(&self, name: &str) {
        self.store.delete::<Model>("default", name).await.unwrap();
    }

    pub(crate) async fn delete_replica(&self, model: &str, node: &str) {
        self.store.delete::<ModelReplica>("default", &format!("{model}-{node}")).await.unwrap();
    }

    /// Orders a replica on `node` and says for its agent how far it is. It does not wait for the router to know.
    pub(crate) async fn replica(&self, model: &str, node: &str, endpoint: &str, status: Value) {
        let mut told = json!({"orderGeneration": 1, "endpoint": endpoint, "path": "disk"});
        told.as_object_mut().unwrap().extend(status.as_object().unwrap().clone());
        let mut replica: ModelReplica = serde_json::from_value(json!({
            "apiVersion": "pilotlight.dev/v1alpha1", "kind": "ModelReplica",
            "metadata": {"name": format!("{model}-{node}"), "namespace": "default"},
            "spec": {"modelName": model, "modelUid": "", "nodeName": node, "sourceUri": "file:///nowhere",
                "hold": "Host", "device": "Cpu", "orderGeneration": 1, "decideSeconds": 0.00002},
        }))
        .unwrap();
        self.store.apply(&replica).await.unwrap();
        replica.status = Some(serde_json::from_value(told).unwrap());
        self.store.apply_status(&replica).await.unwrap();
    }

    /// The operator wants no sessions there any more.
    pub(crate) async fn ends(&self, model: &str, node: &str) {
        let patch = json!({"spec": {"drainDeadline": "2100-01-01T00:00:00Z"}});
        self.store.merge::<ModelReplica>("default", &format!("{model}-{node}"), patch).await.unwrap();
    }

    /// A model with one ready replica of four slots.
    pub(crate) async fn warm(&self, model: &str, endpoint: &str) {
        self.model(model, json!({})).await;
        self.replica(model, "n1", endpoint, json!({"phase": "Ready", "slots": 4})).await;
        self.knows(model, |m| m["state"] == "ready").await;
    }

    /// Waits until the router lists the model so.
    pub(crate) async fn knows(&self, model: &str, so: impl Fn(&Value) -> bool) {
        within(async {
            loop {
                let answer = self.get(&format!("/v1/models/default/{model}")).await;
                if answer.status == StatusCode::OK && so(&answer.json()) {
                    return;
                }
            }
        })
        .await;
    }

    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Answer {
        let (parts, body) = self.open(method, path, headers, body).await.into_parts();
        let body = within(body.collect()).await.unwrap().to_bytes();
        Answer { status: parts.status, headers: parts.headers, body }
    }

    pub(crate) async fn open(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> http::Response<Incoming> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.url));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        within(self.client.request(request.body(Full::new(body.into())).unwrap())).await.unwrap()
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send(Method::GET, path, &[], "").await
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Answer {
        self.send(Method::POST, path, &[], body.to_string()).await
    }

    pub(crate) async fn chat(&self, model: &str, more: Value) -> Answer {
        self.post("/v1/chat/completions", &chat(model, more)).await
    }

    /// Opens a stream; the head must be a success.
    pub(crate) async fn stream(&self, path: &str, body: &Value) -> Sse {
        let response = self.open(Method::POST, path, &[("te", "trailers")], body.to_string()).await;
        let (parts, body) = response.into_parts();
        if parts.status != StatusCode::OK {
            let body = body.collect().await.unwrap().to_bytes();
            panic!("{} {body:?}", parts.status);
        }
        assert_eq!(parts.headers["content-type"], "text/event-stream; charset=utf-8");
        Sse { headers: parts.headers, body, buffer: String::new(), trailers: HeaderMap::new() }
    }

    /// The sum of a metric over all its labels.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let name = format!("pilotlight_router_{name}");
        let families = self.metrics.gather();
        let found = families
            .iter()
            .filter(|f| f.name() == name)
            .flat_map(prometheus::proto::MetricFamily::get_metric);
        found.map(|m| m.get_counter().get_value() + m.get_gauge().get_value()).sum()
    }
}

/// A chat request with these further parameters.
pub(crate) fn chat(model: &str, more: Value) -> Value {
    let mut body = json!({"model": model, "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}
