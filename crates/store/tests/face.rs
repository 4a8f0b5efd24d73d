//! The HTTP face as strangers meet it: raw requests, and the typed client of kube.

#![expect(clippy::unwrap_used, reason = "a failed test is what they are for")]

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use futures::StreamExt as _;
use http::Request;
use http_body_util::BodyExt as _;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, WatchEvent, WatchParams};
use kube::{Api, ResourceExt as _};
use pilotlight_api::{Model, ModelNode};
use pilotlight_kit::Stop;
use pilotlight_kit::clock::SystemClock;
use pilotlight_store::{EmbeddedStore, RemoteStore, StoreError, Typed as _, face};
use serde_json::{Value, json};
use tempfile::TempDir;
use tower::ServiceExt as _;

struct World {
    routes: axum::Router,
    store: EmbeddedStore,
    stop: Stop,
    _dir: TempDir,
}

const MODELS: &str = "/apis/pilotlight.dev/v1alpha1/namespaces/default/models";

impl World {
    async fn new() -> World {
        let dir = TempDir::new().unwrap();
        let store = EmbeddedStore::open(dir.path(), Arc::new(SystemClock)).await.unwrap();
        let stop = Stop::new();
        World { routes: face::routes(store.clone(), stop.clone()), store, stop, _dir: dir }
    }

    async fn ask(&self, method: &str, path: &str, kind: &str, body: impl Into<Body>) -> (u16, Value) {
        let mut request = Request::builder().method(method).uri(path);
        if !kind.is_empty() {
            let header = if kind.contains("as=") { "accept" } else { "content-type" };
            request = request.header(header, kind);
        }
        let answer = self.routes.clone().oneshot(request.body(body.into()).unwrap()).await.unwrap();
        assert_eq!(answer.headers()["content-type"], "application/json");
        let code = answer.status().as_u16();
        let bytes = answer.into_body().collect().await.unwrap().to_bytes();
        (code, serde_json::from_slice(&bytes).expect("JSON"))
    }

    async fn get(&self, path: &str) -> (u16, Value) {
        self.ask("GET", path, "", Body::empty()).await
    }

    async fn serve(&self) -> (kube::Client, String) {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let serving = pilotlight_kit::http::serve(
            listener,
            self.routes.clone(),
            self.stop.clone(),
            Duration::from_secs(20),
        );
        tokio::spawn(serving);
        (kube::Client::try_from(kube::Config::new(url.parse().unwrap())).unwrap(), url)
    }
}

fn model(name: &str) -> Value {
    json!({ "apiVersion": "pilotlight.dev/v1alpha1", "kind": "Model", "metadata": { "name": name },
        "spec": { "source": { "uri": "file:///models/a" } } })
}

/// Method, path, content type and body; status, reason, and words of the message.
type Refusal<'a> = (&'a str, &'a str, &'a str, String, u16, &'a str, &'a str);

const JSON: &str = "application/json";

/// One without a body.
fn bare<'a>(method: &'a str, path: &'a str, code: u16, reason: &'a str, says: &'a str) -> Refusal<'a> {
    (method, path, "", String::new(), code, reason, says)
}

/// Every refusal is a Status that says why.
async fn refused(world: &World, cases: Vec<Refusal<'_>>) {
    for (method, path, kind, body, code, reason, says) in cases {
        let (got, status) = world.ask(method, path, kind, body).await;
        let message = status["message"].as_str().unwrap_or_default();
        assert!(got == code && message.contains(says), "{method} {path}: {got} {status}");
        assert_eq!(
            (&status["kind"], &status["reason"], &status["code"]),
            (&json!("Status"), &json!(reason), &json!(code))
        );
        assert_eq!(status["status"], "Failure");
    }
}

#[tokio::test]
async fn paths_and_methods_that_are_not_there_are_refused() {
    let world = World::new().await;
    let one = format!("{MODELS}/a");
    let orphan = format!("{MODELS}/a?propagationPolicy=Orphan");
    refused(
        &world,
        vec![
            bare("GET", &one, 404, "NotFound", "Model default/a not found"),
            bare("GET", "/apis/pilotlight.dev/v2/models", 404, "NotFound", "nothing at"),
            bare("GET", "/apis/apps/v1", 404, "NotFound", "nothing at /apis/apps/v1"),
            bare("GET", "/openapi/v2", 404, "NotFound", "nothing at"),
            bare("GET", "/api/v1/namespaces/%ff/events", 404, "NotFound", "nothing at"),
            ("POST", &one, JSON, "{}".into(), 405, "MethodNotAllowed", "POST is not supported at"),
            bare("DELETE", MODELS, 405, "MethodNotAllowed", "DELETE is not supported"),
            bare("DELETE", &orphan, 400, "BadRequest", "Orphan is not supported"),
        ],
    )
    .await;
}

#[tokio::test]
async fn queries_that_cannot_be_answered_are_refused() {
    let world = World::new().await;
    let path = |query: &str| format!("/apis/pilotlight.dev/v1alpha1/models?{query}");
    // The history begins after the first write.
    world.ask("POST", MODELS, JSON, model("taken").to_string()).await;
    for (query, code, reason, says) in [
        ("labelSelector=a!=b", 400, "BadRequest", "labelSelector"),
        ("watch=1&resourceVersion=x", 400, "BadRequest", "not a version"),
        ("watch=1&resourceVersion=1", 410, "Expired", "not remembered"),
        ("watch=1&sendInitialEvents=true", 422, "Invalid", "list, then watch"),
    ] {
        refused(&world, vec![bare("GET", &path(query), code, reason, says)]).await;
    }
}

#[tokio::test]
async fn bodies_that_cannot_be_taken_are_refused() {
    let world = World::new().await;
    let one = format!("{MODELS}/a");
    let apply = "application/apply-patch+yaml";
    let patch = "application/json-patch+json";
    let huge = format!("{{\"x\":\"{}\"}}", "x".repeat(face::BODY_BYTES_MAX));
    let mut bad = model("a");
    bad["spec"]["source"] = json!({ "ur": "file:///a" });
    let mut other_kind = model("a");
    other_kind["kind"] = "Deployment".into();
    let created = world.ask("POST", MODELS, JSON, model("taken").to_string()).await;
    assert_eq!(created.0, 201);
    let (a, b, taken) = (model("a").to_string(), model("b").to_string(), model("taken").to_string());
    refused(
        &world,
        vec![
            ("POST", MODELS, JSON, "{".into(), 400, "BadRequest", "the body is not JSON: EOF"),
            ("POST", MODELS, JSON, "[]".into(), 400, "BadRequest", "not an object"),
            ("POST", MODELS, JSON, "a: [".into(), 400, "BadRequest", "neither JSON nor YAML"),
            ("POST", MODELS, "text/plain", "{}".into(), 415, "UnsupportedMediaType", "`text/plain`"),
            ("POST", MODELS, "", a.clone(), 415, "UnsupportedMediaType", "send application/json"),
            ("PATCH", &one, patch, "[]".into(), 415, "UnsupportedMediaType", "json-patch"),
            ("POST", MODELS, JSON, huge, 413, "RequestEntityTooLarge", "at most 3145728 bytes"),
            ("POST", MODELS, JSON, taken, 409, "AlreadyExists", "already exists"),
            ("POST", MODELS, JSON, bad.to_string(), 422, "Invalid", "did you mean `uri`?"),
            ("POST", MODELS, JSON, other_kind.to_string(), 400, "BadRequest", "`kind` is \"Deployment\""),
            ("PATCH", &one, apply, a.clone(), 400, "BadRequest", "needs a fieldManager"),
            ("PUT", &one, JSON, b, 400, "BadRequest", "metadata.name is \"b\""),
            ("PUT", &one, JSON, a, 404, "NotFound", "not found"),
        ],
    )
    .await;
    let (_, status) = world.ask("POST", MODELS, JSON, bad.to_string()).await;
    let causes = status["details"]["causes"].as_array().unwrap();
    assert!(causes.iter().any(|cause| cause["field"] == "spec.source.ur"), "{status}");
}

#[tokio::test]
async fn curl_can_do_it_with_yaml() {
    let world = World::new().await;
    let yaml = "apiVersion: pilotlight.dev/v1alpha1\nkind: Model\nspec:\n  source: {uri: hf://a/b}\n";
    let path = format!("{MODELS}/a?fieldManager=me&force=true");
    let dry = world.ask("PATCH", &format!("{path}&dryRun=All"), "application/apply-patch+yaml", yaml).await;
    assert_eq!((dry.0, world.get(&format!("{MODELS}/a")).await.0), (201, 404));
    let (code, made) = world.ask("PATCH", &path, "application/apply-patch+yaml", yaml).await;
    assert_eq!(
        (code, &made["metadata"]["name"], &made["metadata"]["namespace"]),
        (201, &json!("a"), &json!("default"))
    );
    assert_eq!(world.ask("PATCH", &path, "application/apply-patch+yaml", yaml).await, (200, made.clone()));
    let merge = json!({ "status": { "phase": "Idle" } }).to_string();
    let (code, object) =
        world.ask("PATCH", &format!("{MODELS}/a/status"), "application/merge-patch+json", merge).await;
    assert_eq!((code, &object["status"]["phase"]), (200, &json!("Idle")));
    let (code, gone) = world.ask("DELETE", &format!("{MODELS}/a"), "", Body::empty()).await;
    assert_eq!((code, &gone["status"], &gone["details"]["name"]), (200, &json!("Success"), &json!("a")));
}

#[tokio::test]
async fn kubectl_finds_its_way_and_gets_tables() {
    let world = World::new().await;
    assert_eq!(world.get("/version").await.1["major"], "1");
    assert_eq!(world.get("/api").await.1["versions"], json!(["v1"]));
    let groups = world.get("/apis").await.1;
    assert_eq!(groups["groups"][0]["preferredVersion"]["groupVersion"], "pilotlight.dev/v1alpha1");
    assert_eq!(world.get("/apis/pilotlight.dev").await.1["kind"], "APIGroup");
    let resources = world.get("/apis/pilotlight.dev/v1alpha1").await.1;
    let names: Vec<&str> = resources["resources"]
        .as_array()
        .unwrap()
        .iter()
        .map(|each| each["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "models",
            "models/status",
            "modelreplicas",
            "modelreplicas/status",
            "modelnodes",
            "modelnodes/status"
        ]
    );
    let openapi = world.get("/openapi/v3").await.1;
    let document = openapi["paths"]["apis/pilotlight.dev/v1alpha1"]["serverRelativeURL"].as_str().unwrap();
    let document = world.get(document).await.1;
    let patch =
        &document["paths"]["/apis/pilotlight.dev/v1alpha1/namespaces/{namespace}/models/{name}"]["patch"];
    assert_eq!(patch["parameters"][0]["name"], "fieldValidation");
    assert_eq!(world.get("/api/v1/namespaces/any").await.1["metadata"]["name"], "any");

    world.ask("POST", MODELS, "application/json", model("a").to_string()).await;
    let accept = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
    let (_, table) = world.ask("GET", MODELS, accept, Body::empty()).await;
    assert_eq!((&table["kind"], &table["columnDefinitions"][1]["name"]), (&json!("Table"), &json!("Phase")));
    assert_eq!(table["rows"][0]["cells"][0], "a");
    assert_eq!(table["rows"][0]["object"]["metadata"]["name"], "a");
    let (_, one) = world.ask("GET", &format!("{MODELS}/a"), accept, Body::empty()).await;
    assert_eq!(one["rows"][0]["cells"], table["rows"][0]["cells"]);
    let (_, list) = world.get(MODELS).await;
    assert_eq!((&list["kind"], list["items"].as_array().unwrap().len()), (&json!("ModelList"), 1));
    assert_eq!(list["metadata"]["resourceVersion"], list["items"][0]["metadata"]["resourceVersion"]);
}

#[tokio::test]
async fn kubes_typed_client_works() {
    let world = World::new().await;
    let (client, _) = world.serve().await;
    let models: Api<Model> = Api::default_namespaced(client.clone());
    let typed: Model = serde_json::from_value(model("a")).unwrap();
    let made = models.create(&PostParams::default(), &typed).await.unwrap();
    assert_eq!(models.get("a").await.unwrap(), made);
    assert!(models.get_opt("b").await.unwrap().is_none());

    let version =
        models.list(&ListParams::default().limit(1)).await.unwrap().metadata.resource_version.unwrap();
    let watching = WatchParams::default().timeout(60).fields("metadata.name=a");
    let mut watch = models.watch(&watching, &version).await.unwrap().boxed();
    let apply = PatchParams::apply("test").force();
    let mut wanted = model("a");
    wanted["spec"]["priority"] = 3.into();
    models.patch("a", &apply, &Patch::Apply(&wanted)).await.unwrap();
    models.patch("b", &apply, &Patch::Apply(&model("b"))).await.unwrap();
    let suspend = Patch::Merge(json!({ "spec": { "suspend": true } }));
    assert!(models.patch("a", &PatchParams::default(), &suspend).await.unwrap().spec.suspend);
    let mut reported = models.get("a").await.unwrap();
    reported.status = Some(serde_json::from_value(json!({ "phase": "Suspended" })).unwrap());
    models.replace_status("a", &PostParams::default(), &reported).await.unwrap();
    let conflict = models.replace("a", &PostParams::default(), &reported).await.unwrap_err();
    assert!(matches!(conflict, kube::Error::Api(status) if status.is_conflict()));
    models.delete("a", &DeleteParams::default()).await.unwrap();
    for expect in ["modified", "modified", "modified", "deleted"] {
        let word = match watch.next().await.unwrap().unwrap() {
            WatchEvent::Modified(object) if object.name_any() == "a" => "modified",
            WatchEvent::Deleted(_) => "deleted",
            other => panic!("{other:?}"),
        };
        assert_eq!(word, expect);
    }
    let nodes: Api<ModelNode> = Api::all(client);
    assert!(nodes.list(&ListParams::default()).await.unwrap().items.is_empty());

    // A watch ends when the server stops, so that the server can.
    world.stop.stop();
    let end = tokio::time::timeout(Duration::from_secs(20), watch.next()).await;
    assert!(end.expect("the watch ends").is_none());
}

#[tokio::test]
async fn a_server_that_is_not_there_or_does_not_answer_is_told_apart() {
    let nowhere = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = nowhere.local_addr().unwrap();
    let url = format!("http://{address}");
    // It accepts, by its backlog, and never answers.
    let silent = RemoteStore::from_url(&url, "test").unwrap().with_timeout(Duration::from_millis(200));
    let error = silent.get::<Model>("default", "a").await.unwrap_err();
    assert!(matches!(error, StoreError::Timeout { .. }), "{error}");
    drop((silent, nowhere));
    let absent = RemoteStore::from_url(&url, "test").unwrap();
    let error = absent.get::<Model>("default", "a").await.unwrap_err();
    assert!(error.to_string().contains(&url) && error.to_string().contains("refused"), "{error}");
    for bad in ["", "127.0.0.1:80", "ftp://a", "http://"] {
        let error = RemoteStore::from_url(bad, "test").unwrap_err().to_string();
        assert!(error.contains("http://127.0.0.1:8080"), "{error}");
    }
    let error = RemoteStore::from_kubeconfig(Some("/nowhere/config".as_ref()), "test").await.unwrap_err();
    assert_eq!(error.to_string(), "kubeconfig /nowhere/config: No such file or directory (os error 2)");
}

#[tokio::test]
async fn a_kubeconfig_without_credentials_is_enough() {
    let world = World::new().await;
    let (_, url) = world.serve().await;
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("kubeconfig");
    let config = json!({ "apiVersion": "v1", "kind": "Config", "current-context": "pilotlight",
        "clusters": [{ "name": "pilotlight", "cluster": { "server": url } }], "users": [],
        "contexts": [{ "name": "pilotlight", "context": { "cluster": "pilotlight", "user": "" } }] });
    std::fs::write(&path, config.to_string()).unwrap();
    let remote = RemoteStore::from_kubeconfig(Some(&path), "test").await.unwrap();
    let made = remote.create(&serde_json::from_value::<Model>(model("a")).unwrap()).await.unwrap();
    assert_eq!(world.store.get::<Model>("default", "a").await.unwrap(), made);
}
