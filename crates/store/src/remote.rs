//! The adapter for a cluster elsewhere: a Kubernetes API server, or the HTTP face of an embedded store, by one client.
//!
//! Every request has a time limit, and every error is one of [`StoreError`]. What a server asks to be asked again
//! (429, 5xx) is, at most four times and no sooner than its `Retry-After`; all else is the caller's choice: a
//! conflict, and a request that was not answered, which may have been done. Long lists come in pages. A watch that says
//! nothing for [`WATCH_SILENCE_MAX`] is given up: servers send bookmarks more often.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::BoxStream;
use futures::{AsyncBufReadExt as _, FutureExt as _, StreamExt as _};
use http::{Method, Request, header};
use http_body_util::BodyExt as _;
use kube::config::{KubeConfigOptions, Kubeconfig};
use pilotlight_kit::Backoff;
use pilotlight_kit::http::{first_cause, no_answer};
use serde_json::{Value, json};

use crate::kind::encode;
use crate::port::Answer;
use crate::status::from_status;
use crate::{
    Change, ClusterStore, DeleteOptions, Filter, Kind, Listed, ObjectRef, StoreError, Version, WatchStream,
};

/// A healthy API server answers in milliseconds, a page of a long list in a second or two.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
/// Twice the interval of an API server's bookmarks.
pub const WATCH_SILENCE_MAX: Duration = Duration::from_secs(120);
/// Asked of the server, so that watches spread over its replicas again; as Kubernetes' own clients do.
const WATCH_SECONDS: u32 = 290;
/// Objects per page: some MiB.
const PAGE: usize = 500;

/// Requests that a busy server put off are sent so often in all: with the pauses below, for about a second.
const TRIES_MAX: u32 = 4;
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// A server that asks for more patience is left to the caller, who may have something better to do.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(5);

/// No client could be made.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The kubeconfig, environment or service account does not say where the cluster is.
    #[error("{what}: {message}")]
    Config {
        /// Where it was looked for.
        what: String,
        /// What was wrong.
        message: String,
    },
    /// Not a URL of a server.
    #[error("`{url}` is not a server's URL; write for example http://127.0.0.1:8080")]
    Url {
        /// What was given.
        url: String,
    },
}

/// A cluster behind HTTP. Clones share connections.
#[derive(Clone)]
pub struct RemoteStore {
    client: kube::Client,
    server: Arc<str>,
    manager: Arc<str>,
    timeout: Duration,
}

impl std::fmt::Debug for RemoteStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteStore").field("server", &self.server).finish_non_exhaustive()
    }
}

impl RemoteStore {
    /// Finds the cluster as kubectl does: `path` if given, else `KUBECONFIG` or `~/.kube/config`, else the service
    /// account of this pod. `manager` is the field manager of its writes. Nothing is sent yet.
    ///
    /// # Errors
    /// When none of them says where the cluster is.
    pub async fn from_kubeconfig(path: Option<&Path>, manager: &str) -> Result<RemoteStore, ConnectError> {
        let config = match path {
            None => kube::Config::infer().await.map_err(|error| ConnectError::Config {
                what: "no cluster found".into(),
                message: chain(&error),
            })?,
            Some(path) => {
                let wrong = |error: &kube::config::KubeconfigError| ConnectError::Config {
                    what: format!("kubeconfig {}", path.display()),
                    // Of what is no YAML, the first line says what and where.
                    message: first_cause(error).to_string().lines().next().unwrap_or_default().into(),
                };
                let file = Kubeconfig::read_from(path).map_err(|error| wrong(&error))?;
                let options = KubeConfigOptions::default();
                kube::Config::from_custom_kubeconfig(file, &options).await.map_err(|error| wrong(&error))?
            }
        };
        Self::from_config(config, manager)
    }

    /// A server at a URL, without credentials: the face of an embedded store.
    ///
    /// # Errors
    /// When it is not a URL.
    pub fn from_url(url: &str, manager: &str) -> Result<RemoteStore, ConnectError> {
        let wrong = || ConnectError::Url { url: url.into() };
        let uri: http::Uri = url.trim_end_matches('/').parse().map_err(|_| wrong())?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none_or(str::is_empty) {
            return Err(wrong());
        }
        Self::from_config(kube::Config::new(uri), manager)
    }

    fn from_config(mut config: kube::Config, manager: &str) -> Result<RemoteStore, ConnectError> {
        // Retries are the caller's choice.
        config.default_retry = false;
        config.connect_timeout = Some(REQUEST_TIMEOUT / 3);
        let server = config.cluster_url.to_string().trim_end_matches('/').into();
        let client = kube::Client::try_from(config).map_err(|error| ConnectError::Config {
            what: format!("client for {server}"),
            message: chain(&error),
        })?;
        Ok(RemoteStore { client, server, manager: manager.into(), timeout: REQUEST_TIMEOUT })
    }

    /// The same cluster with another limit on each request; the default is 15 s.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// The server's URL.
    pub fn server(&self) -> &str {
        &self.server
    }

    async fn send(&self, what: &str, request: Request<Vec<u8>>) -> Result<Value, StoreError> {
        let mut backoff = Backoff::new(PAUSE_MIN, PAUSE_MAX);
        let mut tries = 1;
        loop {
            let (error, answered) = match self.limited(what, self.once(what, request.clone())).await? {
                Ok(answer) => return Ok(answer),
                Err(failure) => failure,
            };
            // 429 was not begun. What failed inside may have been done: all but `create` may be repeated.
            let again = answered == 429 || request.method() != Method::POST;
            let StoreError::Unavailable { retry_after, .. } = &error else { return Err(error) };
            let pause = retry_after.unwrap_or_default().max(backoff.next());
            if !again || tries >= TRIES_MAX || pause > RETRY_AFTER_MAX {
                return Err(error);
            }
            tracing::debug!(
                what,
                answered,
                pause_seconds = pause.as_secs_f64(),
                "the server asks for patience"
            );
            tokio::time::sleep(pause).await;
            tries += 1;
        }
    }

    /// One request; the inner error is an answer, with its code.
    async fn once(
        &self,
        what: &str,
        request: Request<Vec<u8>>,
    ) -> Result<Result<Value, (StoreError, u16)>, kube::Error> {
        let response = self.client.send(request.map(kube::client::Body::from)).await?;
        let code = response.status();
        let seconds =
            response.headers().get(header::RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
        let bytes = response.into_body().collect().await?.to_bytes();
        if code.is_success() {
            let answer = serde_json::from_slice(&bytes).map_err(|error| StoreError::Decode {
                what: format!("the answer for {what}"),
                message: error.to_string(),
            });
            return Ok(answer.map_err(|error| (error, code.as_u16())));
        }
        // What stands before an API server may answer in words of its own.
        let mut status: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        if status["kind"] != "Status" {
            let text = String::from_utf8_lossy(&bytes);
            let message = format!(
                "{} answered {code}: {}",
                self.server,
                text.trim().chars().take(200).collect::<String>()
            );
            status = json!({ "code": code.as_u16(), "message": message });
        }
        if let Some(seconds) = seconds.filter(|_: &u64| status["details"]["retryAfterSeconds"].is_null()) {
            status["details"]["retryAfterSeconds"] = seconds.into();
        }
        Ok(Err((from_status(what, &status), code.as_u16())))
    }

    async fn limited<T>(
        &self,
        what: &str,
        answer: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, StoreError> {
        match tokio::time::timeout(self.timeout, answer).await {
            Ok(answer) => answer.map_err(|error| self.error(what, &error)),
            Err(_) => Err(StoreError::Timeout { what: what.into(), after: self.timeout }),
        }
    }

    fn error(&self, what: &str, error: &kube::Error) -> StoreError {
        match error {
            kube::Error::Api(status) => {
                let status = serde_json::to_value(status).unwrap_or_default();
                from_status(what, &status)
            }
            kube::Error::Auth(error) => StoreError::Forbidden { message: chain(error) },
            error => StoreError::Unavailable { message: no_answer(&self.server, error), retry_after: None },
        }
    }

    async fn write(
        &self,
        target: &ObjectRef,
        method: Method,
        path: String,
        kind: &str,
        body: &Value,
    ) -> Result<Value, StoreError> {
        let what = target.to_string();
        self.send(&what, request(method, &path, Some((kind, body)))?).await
    }

    /// A field that the server does not know is a mistake, as with kubectl, and not dropped in silence.
    fn query(&self) -> String {
        format!("fieldManager={}&fieldValidation=Strict", encode(&self.manager))
    }

    fn apply_query(&self) -> String {
        format!("{}&force=true", self.query())
    }

    async fn list_pages(&self, kind: Kind, filter: &Filter) -> Result<Listed, StoreError> {
        let what = kind.plural();
        let mut listed = Listed { items: Vec::new(), version: Version(String::new()) };
        let mut more = String::new();
        loop {
            let path =
                format!("{}?limit={PAGE}{}{more}", kind.path(filter.namespace.as_deref()), selectors(filter));
            let mut page = self.send(what, request(Method::GET, &path, None)?).await?;
            if let Value::Array(items) = page["items"].take() {
                listed.items.extend(items.into_iter().map(|item| typed(kind, item)));
            }
            let text = |key: &str| page["metadata"][key].as_str().unwrap_or_default().to_owned();
            if listed.version.0.is_empty() {
                listed.version = Version(text("resourceVersion"));
            }
            match text("continue") {
                token if token.is_empty() => {
                    // Servers sort by path, to which `a-b` comes before `a`.
                    listed.items.sort_by_cached_key(|item| ObjectRef::of(kind, item));
                    return Ok(listed);
                }
                token => more = format!("&continue={}", encode(&token)),
            }
        }
    }

    async fn open_watch(
        &self,
        kind: Kind,
        filter: &Filter,
        from: Option<Version>,
    ) -> Result<WatchStream, StoreError> {
        let from = from.map(|version| format!("&resourceVersion={}", encode(&version.0))).unwrap_or_default();
        let path = format!(
            "{}?watch=true&allowWatchBookmarks=true&timeoutSeconds={WATCH_SECONDS}{}{from}",
            kind.path(filter.namespace.as_deref()),
            selectors(filter),
        );
        let answer = self.client.request_stream(request(Method::GET, &path, None)?);
        let lines = self.limited(kind.plural(), answer).await?.lines().boxed();
        let server = self.server.clone();
        let watch = Watch { kind, server, lines, ended: false };
        Ok(futures::stream::unfold(watch, |mut watch| async move { Some((watch.next().await?, watch)) })
            .boxed())
    }
}

/// An open watch.
struct Watch {
    kind: Kind,
    server: Arc<str>,
    lines: BoxStream<'static, std::io::Result<String>>,
    ended: bool,
}

impl Watch {
    async fn next(&mut self) -> Option<Result<Change, StoreError>> {
        if self.ended {
            return None;
        }
        let line = match tokio::time::timeout(WATCH_SILENCE_MAX, self.lines.next()).await {
            Ok(None) => return None,
            Ok(Some(Ok(line))) => line,
            Ok(Some(Err(error))) => return Some(Err(self.lost(&chain(&error)))),
            Err(_) => return Some(Err(self.lost(&format!("nothing for {} s", WATCH_SILENCE_MAX.as_secs())))),
        };
        let change = self.read(&line);
        self.ended = change.is_err();
        Some(change)
    }

    fn lost(&mut self, message: &str) -> StoreError {
        self.ended = true;
        let message = format!("watch of {} at {} was lost: {message}", self.kind.plural(), self.server);
        StoreError::Unavailable { message, retry_after: None }
    }

    fn read(&self, line: &str) -> Result<Change, StoreError> {
        let wrong = |message: String| StoreError::Decode {
            what: format!("watch of {}", self.kind.plural()),
            message,
        };
        let mut event: Value = serde_json::from_str(line).map_err(|error| wrong(error.to_string()))?;
        let object = event["object"].take();
        match event["type"].as_str().unwrap_or_default() {
            "ADDED" | "MODIFIED" => Ok(Change::Applied(typed(self.kind, object))),
            "DELETED" => Ok(Change::Deleted(typed(self.kind, object))),
            "BOOKMARK" => Version::of(&object)
                .map(Change::Bookmark)
                .ok_or_else(|| wrong("bookmark without version".into())),
            "ERROR" => Err(from_status(self.kind.plural(), &object)),
            other => Err(wrong(format!("unknown event `{other}`"))),
        }
    }
}

impl ClusterStore for RemoteStore {
    fn get_object<'a>(&'a self, object: &'a ObjectRef) -> Answer<'a, Value> {
        async {
            let mut request = request(Method::GET, &object.path(), None)?;
            if object.kind == Kind::Secret {
                // That it is there is enough: what is in it never comes here.
                let metadata = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1";
                request.headers_mut().insert(header::ACCEPT, http::HeaderValue::from_static(metadata));
            }
            self.send(&object.to_string(), request).await
        }
        .boxed()
    }

    fn list_objects<'a>(&'a self, kind: Kind, filter: &'a Filter) -> Answer<'a, Listed> {
        self.list_pages(kind, filter).boxed()
    }

    fn watch_objects<'a>(
        &'a self,
        kind: Kind,
        filter: &'a Filter,
        from: Option<Version>,
    ) -> Answer<'a, WatchStream> {
        self.open_watch(kind, filter, from).boxed()
    }

    fn create_object(&self, kind: Kind, object: Value) -> Answer<'_, Value> {
        async move {
            let target = ObjectRef::of(kind, &object);
            let path = format!("{}?{}", kind.path(Some(&target.namespace)), self.query());
            self.write(&target, Method::POST, path, JSON, &object).await
        }
        .boxed()
    }

    fn replace_object(&self, kind: Kind, object: Value) -> Answer<'_, Value> {
        async move {
            let target = ObjectRef::of(kind, &object);
            let path = format!("{}?{}", target.path(), self.query());
            self.write(&target, Method::PUT, path, JSON, &object).await
        }
        .boxed()
    }

    fn apply_object(&self, kind: Kind, mut object: Value) -> Answer<'_, Value> {
        async move {
            let target = ObjectRef::of(kind, &object);
            if let Some(fields) = object.as_object_mut().filter(|_| kind.has_status()) {
                fields.shift_remove("status");
            }
            let path = format!("{}?{}", target.path(), self.apply_query());
            self.write(&target, Method::PATCH, path, APPLY, &object).await
        }
        .boxed()
    }

    fn merge_object<'a>(&'a self, object: &'a ObjectRef, mut patch: Value) -> Answer<'a, Value> {
        async move {
            if let Some(fields) = patch.as_object_mut().filter(|_| object.kind.has_status()) {
                fields.shift_remove("status");
            }
            let path = format!("{}?{}", object.path(), self.query());
            self.write(object, Method::PATCH, path, MERGE, &patch).await
        }
        .boxed()
    }

    fn apply_status_object(&self, kind: Kind, object: Value) -> Answer<'_, Value> {
        async move {
            let target = ObjectRef::of(kind, &object);
            let status = json!({
                "apiVersion": kind.api_version(), "kind": kind.name(),
                "metadata": object["metadata"], "status": object["status"],
            });
            let path = format!("{}/status?{}", target.path(), self.apply_query());
            let written = self.write(&target, Method::PATCH, path, APPLY, &status).await?;
            // An API server looks at nothing but the status here.
            let (wanted, found) = (&object["metadata"]["uid"], &written["metadata"]["uid"]);
            if wanted.is_string() && wanted != found {
                let message =
                    format!("uid {wanted} was given, but it is {found}; it is another object of that name");
                return Err(StoreError::Conflict { object: target.to_string(), message });
            }
            Ok(written)
        }
        .boxed()
    }

    fn delete_object<'a>(&'a self, object: &'a ObjectRef, options: DeleteOptions) -> Answer<'a, ()> {
        async move {
            let version = options.version.map(|version| version.0);
            let mut body = json!({
                "apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background",
                "preconditions": { "uid": options.uid, "resourceVersion": version },
            });
            if options.dry_run {
                body["dryRun"] = json!(["All"]);
            }
            self.write(object, Method::DELETE, object.path(), JSON, &body).await.map(|_| ())
        }
        .boxed()
    }
}

const JSON: &str = "application/json";
const APPLY: &str = "application/apply-patch+yaml";
const MERGE: &str = "application/merge-patch+json";

fn request(method: Method, path: &str, body: Option<(&str, &Value)>) -> Result<Request<Vec<u8>>, StoreError> {
    let mut builder = Request::builder().method(method).uri(path).header(header::ACCEPT, JSON);
    let mut bytes = Vec::new();
    if let Some((kind, value)) = body {
        builder = builder.header(header::CONTENT_TYPE, kind);
        bytes = value.to_string().into_bytes();
    }
    builder
        .body(bytes)
        .map_err(|_| StoreError::BadRequest { message: format!("`{path}` is not a path: bad name") })
}

fn selectors(filter: &Filter) -> String {
    let mut query = String::new();
    for (name, selector) in
        [("fieldSelector", filter.field_selector()), ("labelSelector", filter.label_selector())]
    {
        if !selector.is_empty() {
            query.push_str(&format!("&{name}={}", encode(&selector)));
        }
    }
    query
}

/// Items of an API server's lists do not say what they are.
fn typed(kind: Kind, mut object: Value) -> Value {
    if let Some(fields) = object.as_object_mut() {
        fields.entry("apiVersion").or_insert_with(|| kind.api_version().into());
        fields.entry("kind").or_insert_with(|| kind.name().into());
    }
    object
}

/// An error with its causes; those that say again what was said are left out.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
