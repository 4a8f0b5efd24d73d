//! The embedded store over HTTP, in Kubernetes' shapes: for agents, the command line, and kubectl.
//!
//! ```text
//!   /apis/pilotlight.dev/v1alpha1/…   Models, ModelReplicas, ModelNodes, and their status
//!   /apis/coordination.k8s.io/v1/…    Leases
//!   /api/v1/…                         Events; namespaces, which need not be made
//!   /api, /apis, /version             discovery
//! ```
//!
//! Invariants: every answer is an object, a list, a table or a `Status`, never plain text; a body is bounded in bytes
//! and time; a watch ends when the server stops.
//!
//! It deliberately does **not** know users or permissions: it is served on loopback by `pilotlight up`. A write needs
//! a content type that a foreign web page cannot send unasked. Limits of lists are not kept (a list is one page), JSON
//! patches and deletions of collections are refused.

mod address;
mod discovery;
mod read;
mod table;
mod write;

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::any;
use http::{HeaderMap, Method, StatusCode, header};
use pilotlight_kit::Stop;
use serde_json::Value;

use crate::status::{status, to_status};
use crate::{EmbeddedStore, StoreError};
use address::{Address, Query};

/// As an API server's; the store itself takes less.
pub const BODY_BYTES_MAX: usize = 3 << 20;
/// A body comes in one go; who takes longer holds memory for nothing.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// The routes; watches end when `stop` is graceful.
pub fn routes(store: EmbeddedStore, stop: Stop) -> Router {
    let face = Face { store, stop };
    let mut router = Router::new();
    for path in
        ["/api", "/api/", "/api/{*rest}", "/apis", "/apis/", "/apis/{*rest}", "/version", "/openapi/{*rest}"]
    {
        router = router.route(path, any(handle));
    }
    router.with_state(face)
}

#[derive(Clone, Debug)]
struct Face {
    store: EmbeddedStore,
    stop: Stop,
}

async fn handle(State(face): State<Face>, request: Request) -> Response {
    let answered = face.answer(request).await;
    answered.unwrap_or_else(|refusal| match refusal {
        Refusal::Store(error) => {
            let (code, body) = to_status(&error);
            json(code, &body)
        }
        Refusal::Http(code, reason, message) => json(code, &status(code, reason, &message)),
    })
}

/// Why a request was not carried out.
enum Refusal {
    Store(StoreError),
    /// HTTP's own reasons: code, Kubernetes' reason, message.
    Http(u16, &'static str, String),
}

impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        Refusal::Store(error)
    }
}

impl Face {
    async fn answer(&self, request: Request) -> Result<Response, Refusal> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path();
        let query = Query::read(parts.uri.query().unwrap_or_default())?;
        let unknown = || Refusal::Http(404, "NotFound", format!("the server has nothing at {path}"));
        let wrong_method = || {
            let message = format!("{} is not supported at {path}", parts.method);
            Refusal::Http(405, "MethodNotAllowed", message)
        };
        let address = Address::read(path).ok_or_else(unknown)?;
        match (&parts.method, address) {
            (&Method::GET, Address::Collection { kind, namespace }) => {
                self.list_or_watch(kind, namespace, &query, &parts.headers).await
            }
            (&Method::GET, Address::Object(object) | Address::Status(object)) => {
                self.get(&object, &parts.headers)
            }
            (&Method::GET, Address::Discovery(path)) => {
                discovery::document(&path).map(|document| json(200, &document)).ok_or_else(unknown)
            }
            (&Method::GET, Address::Namespaces(name)) => {
                Ok(json(200, &discovery::namespaces(name.as_deref())))
            }
            (&Method::POST, Address::Collection { kind, namespace })
                if namespace.is_some() == kind.namespaced() =>
            {
                let object = written(&parts.headers, body).await?;
                self.create(kind, namespace.as_deref(), object, &query).await
            }
            (&Method::PUT, Address::Object(target)) => {
                let object = written(&parts.headers, body).await?;
                self.replace(&target, object, &query).await
            }
            (&Method::PUT, Address::Status(target)) => {
                let object = written(&parts.headers, body).await?;
                self.replace_status(&target, object, &query).await
            }
            (&Method::PATCH, Address::Object(target)) => {
                let patch = write::Patch::read(target.kind, content_type(&parts.headers))?;
                self.patch(&target, patch, parse(&bytes(body).await?)?, &query).await
            }
            (&Method::PATCH, Address::Status(target)) => {
                let patch = write::Patch::read(target.kind, content_type(&parts.headers))?;
                self.patch_status(&target, patch, parse(&bytes(body).await?)?, &query).await
            }
            (&Method::DELETE, Address::Object(target)) => {
                let bytes = bytes(body).await?;
                let options = if bytes.is_empty() { Value::Null } else { parse(&bytes)? };
                self.delete(&target, &options, &query).await
            }
            _ => Err(wrong_method()),
        }
    }
}

/// The object in a body.
async fn written(headers: &HeaderMap, body: Body) -> Result<Value, Refusal> {
    match content_type(headers) {
        "application/json" | "application/yaml" | "application/x-yaml" => parse(&bytes(body).await?),
        other => Err(Refusal::Http(
            415,
            "UnsupportedMediaType",
            format!(
                "content type `{other}` is not supported here: send application/json or application/yaml"
            ),
        )),
    }
}

fn content_type(headers: &HeaderMap) -> &str {
    let whole = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    whole.split(';').next().unwrap_or_default().trim()
}

async fn bytes(body: Body) -> Result<axum::body::Bytes, Refusal> {
    let reading = axum::body::to_bytes(body, BODY_BYTES_MAX);
    match tokio::time::timeout(BODY_TIMEOUT, reading).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(error)) => {
            let mut cause: Option<&dyn std::error::Error> = Some(&error);
            while let Some(error) = cause {
                if error.to_string().contains("length limit") {
                    let message = format!("the body is too large: at most {BODY_BYTES_MAX} bytes are taken");
                    return Err(Refusal::Http(413, "RequestEntityTooLarge", message));
                }
                cause = error.source();
            }
            Err(Refusal::Http(400, "BadRequest", format!("the body could not be read: {error}")))
        }
        Err(_) => {
            let message = format!("the body did not come within {} s", BODY_TIMEOUT.as_secs());
            Err(Refusal::Http(408, "Timeout", message))
        }
    }
}

/// JSON, or else YAML, of which JSON is a part.
fn parse(bytes: &[u8]) -> Result<Value, Refusal> {
    let json = match serde_json::from_slice(bytes) {
        Ok(value) => return Ok(value),
        Err(error) => error,
    };
    // What looks like JSON gets JSON's error.
    if bytes.trim_ascii_start().first().is_none_or(|first| b"{[\"".contains(first)) {
        return Err(Refusal::Http(400, "BadRequest", format!("the body is not JSON: {json}")));
    }
    serde_yaml::from_slice(bytes).map_err(|error| {
        Refusal::Http(400, "BadRequest", format!("the body is neither JSON nor YAML: {error}"))
    })
}

fn json(code: u16, body: &Value) -> Response {
    raw(code, body.to_string().into())
}

fn raw(code: u16, body: Body) -> Response {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/json"));
    response
}
