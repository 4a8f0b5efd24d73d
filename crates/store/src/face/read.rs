//! Reads: one object, a list, a watch; as JSON or as kubectl's tables.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::response::Response;
use http::{HeaderMap, header};
use serde_json::{Value, json};

use super::address::Query;
use super::table::{self, Rows};
use super::{Face, Refusal, json, raw};
use crate::embedded::{Subscription, Told};
use crate::status::to_status;
use crate::{Kind, ObjectRef, StoreError};

/// Who does not say gets as long as an API server gives.
const WATCH_SECONDS: u64 = 1800;

impl Face {
    pub(super) fn get(&self, object: &ObjectRef, headers: &HeaderMap) -> Result<Response, Refusal> {
        let found = self.store.read(object)?;
        if wants_table(headers) {
            let version = found["metadata"]["resourceVersion"].clone();
            let now = self.store.now();
            return Ok(json(200, &table::table(object.kind, &[found], &version, now, Rows::WithColumns)));
        }
        Ok(json(200, &found))
    }

    pub(super) async fn list_or_watch(
        &self,
        kind: Kind,
        namespace: Option<String>,
        query: &Query,
        headers: &HeaderMap,
    ) -> Result<Response, Refusal> {
        let filter = query.filter(namespace)?;
        let as_table = wants_table(headers);
        if query.is_set("watch") {
            if query.get("sendInitialEvents").is_some() {
                // In Kubernetes' words, so that its clients list first, as they did before they could ask for this.
                let message = "sendInitialEvents is not supported: list, then watch".to_owned();
                return Err(Refusal::Http(422, "Invalid", message));
            }
            let subscription = self.store.subscribe(kind, &filter, query.version().as_ref())?;
            let seconds =
                query.get("timeoutSeconds").and_then(|text| text.parse().ok()).unwrap_or(WATCH_SECONDS);
            let stream = Stream {
                kind,
                subscription,
                store: self.store.clone(),
                bookmarks: query.is_set("allowWatchBookmarks"),
                as_table: as_table.then_some(Rows::WithColumns),
                ended: false,
            };
            return Ok(self.watch(stream, Duration::from_secs(seconds.min(WATCH_SECONDS))));
        }
        let now = self.store.now();
        let body = self.store.read_all(kind, &filter, move |objects, version| {
            let version = Value::from(version.to_string());
            if as_table {
                return table::table(kind, &objects, &version, now, Rows::WithColumns)
                    .to_string()
                    .into_bytes();
            }
            list(kind, &objects, &version)
        });
        Ok(raw(200, body.await?.into()))
    }

    fn watch(&self, stream: Stream, limit: Duration) -> Response {
        let stop = self.stop.clone();
        let end = Box::pin(async move {
            tokio::select! {
                () = tokio::time::sleep(limit) => {}
                () = stop.stopping() => {}
            }
        });
        let lines = futures::stream::unfold((stream, end), |(mut stream, mut end)| async {
            tokio::select! {
                biased;
                () = &mut end => None,
                line = stream.line() => line.map(|line| (Ok::<_, std::convert::Infallible>(line), (stream, end))),
            }
        });
        raw(200, Body::from_stream(lines))
    }
}

/// A list, written object by object so that none is copied.
fn list(kind: Kind, objects: &[Arc<Value>], version: &Value) -> Vec<u8> {
    let head = json!({
        "kind": kind.list_name(), "apiVersion": kind.api_version(), "metadata": { "resourceVersion": version },
    });
    let mut body = head.to_string().into_bytes();
    body.pop();
    body.extend_from_slice(b",\"items\":[");
    for (index, object) in objects.iter().enumerate() {
        if index > 0 {
            body.push(b',');
        }
        body.extend_from_slice(object.to_string().as_bytes());
    }
    body.extend_from_slice(b"]}");
    body
}

fn wants_table(headers: &HeaderMap) -> bool {
    let accepts = headers.get(header::ACCEPT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    accepts.split(',').next().is_some_and(|first| first.contains("as=Table") && first.contains("v=v1;"))
}

/// A watch on its way out.
struct Stream {
    kind: Kind,
    subscription: Subscription,
    store: crate::EmbeddedStore,
    bookmarks: bool,
    /// A table per event; the columns stand in the first one only.
    as_table: Option<Rows>,
    ended: bool,
}

impl Stream {
    /// The next line; none at the end.
    async fn line(&mut self) -> Option<Bytes> {
        if self.ended {
            return None;
        }
        loop {
            let (word, object) = match self.subscription.next().await? {
                Ok(Told::Added(object)) => ("ADDED", object),
                Ok(Told::Modified(object)) => ("MODIFIED", object),
                Ok(Told::Deleted(object)) => ("DELETED", object),
                Ok(Told::Bookmark(_)) if !self.bookmarks => continue,
                Ok(Told::Bookmark(version)) => {
                    let (kind, api_version) = (self.kind.name(), self.kind.api_version());
                    let metadata =
                        json!({ "resourceVersion": version.to_string(), "creationTimestamp": null });
                    let object = json!({ "kind": kind, "apiVersion": api_version, "metadata": metadata });
                    ("BOOKMARK", Arc::new(object))
                }
                Err(error) => return Some(self.error(&error)),
            };
            let Some(rows) = self.as_table.filter(|_| word != "BOOKMARK") else {
                return Some(line(word, &object));
            };
            self.as_table = Some(Rows::Alone);
            let version = object["metadata"]["resourceVersion"].clone();
            return Some(line(word, &table::table(self.kind, &[object], &version, self.store.now(), rows)));
        }
    }

    fn error(&mut self, error: &StoreError) -> Bytes {
        self.ended = true;
        line("ERROR", &to_status(error).1)
    }
}

fn line(word: &str, object: &Value) -> Bytes {
    format!("{{\"type\":\"{word}\",\"object\":{object}}}\n").into()
}
