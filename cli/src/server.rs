//! The running system, as the commands reach it: resources through the store port's client, everything else by HTTP.

use std::time::Duration;

use http::{HeaderValue, Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

use pilotlight_kit::http::{NO_ANSWER, no_answer};
use pilotlight_store::{RemoteStore, StoreError};

use crate::args::{Kind, ServerArgs};
use crate::failure::Failure;

/// A server that does not take the connection within so long is not there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The largest answer that is read whole: a list of 10,000 Models at 4 KiB is 40 MB.
const ANSWER_BYTES_MAX: usize = 128 << 20;

/// A running system's address and a client for it.
#[derive(Clone)]
pub(crate) struct Server {
    url: String,
    /// `Bearer KEY`.
    authorization: Option<HeaderValue>,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Server {
    /// Checks the address; connects only when asked something.
    pub(crate) fn new(url: &str) -> Result<Self, Failure> {
        let trimmed = url.trim_end_matches('/');
        let parsed: Uri =
            trimmed.parse().map_err(|e| Failure::usage(format!("`{url}` is not a server address: {e}")))?;
        if parsed.scheme_str() != Some("http") || parsed.authority().is_none() {
            return Err(Failure::usage(format!("`{url}` is not a server address"))
                .cure("write it as http://HOST:PORT, as `pilotlight up` printed it"));
        }
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new()).build(connector);
        Ok(Server { url: trimmed.to_owned(), authorization: None, client })
    }

    /// From the command line.
    pub(crate) fn from_args(args: &ServerArgs) -> Result<Self, Failure> {
        let mut server = Server::new(&args.server)?;
        if let Some(key) = &args.api_key {
            let value = HeaderValue::from_str(&format!("Bearer {key}"));
            let mut value =
                value.map_err(|_| Failure::usage("--api-key is no key: it has odd characters"))?;
            value.set_sensitive(true);
            server.authorization = Some(value);
        }
        Ok(server)
    }

    /// Without a slash at its end.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Sends a request; the body of the answer comes as it comes.
    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&serde_json::Value>,
    ) -> Result<Response<Incoming>, Failure> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.url));
        if let Some(authorization) = &self.authorization {
            request = request.header(http::header::AUTHORIZATION, authorization);
        }
        let bytes = match body {
            Some(json) => {
                request = request.header(http::header::CONTENT_TYPE, "application/json");
                Bytes::from(serde_json::to_vec(json)?)
            }
            None => Bytes::new(),
        };
        self.client
            .request(request.body(Full::new(bytes))?)
            .await
            .map_err(|error| Failure::new(no_answer(&self.url, &error)).cure(START_IT))
    }

    /// Asks for a JSON document.
    pub(crate) async fn get_json(&self, path: &str) -> Result<serde_json::Value, Failure> {
        let answer = self.send(Method::GET, path, None).await?;
        let status = answer.status();
        let body = read_all(answer).await?;
        if status != StatusCode::OK {
            return Err(refusal(status, &body));
        }
        Ok(serde_json::from_slice(&body)?)
    }
}

const START_IT: &str = "start it with `pilotlight up`, or name another with --server or PILOTLIGHT_SERVER";

/// The store of a running system.
pub(crate) fn store(url: &str) -> Result<RemoteStore, Failure> {
    Ok(RemoteStore::from_url(Server::new(url)?.url(), "pilotlight-cli")?)
}

/// A store's refusal, with the way out where nobody answered. Whoever did answer says what to do itself.
pub(crate) fn unreachable_hint(error: &StoreError, url: &str) -> Failure {
    match error {
        StoreError::Unavailable { message, .. } if message.starts_with(NO_ANSWER) => {
            Failure::new(message).cure(START_IT)
        }
        StoreError::Timeout { after, .. } => {
            Failure::new(format!("{NO_ANSWER} {url} within {} s", after.as_secs())).cure(START_IT)
        }
        StoreError::NotFound { .. } => Failure::from_error(error)
            .cure("`pilotlight get` lists what there is; --namespace names another one"),
        _ => Failure::from_error(error),
    }
}

/// What the store calls it.
pub(crate) fn store_kind(kind: Kind) -> pilotlight_store::Kind {
    match kind {
        Kind::Models => pilotlight_store::Kind::Model,
        Kind::Nodes => pilotlight_store::Kind::ModelNode,
        Kind::Replicas => pilotlight_store::Kind::ModelReplica,
    }
}

/// Reads an answer whole, within bounds.
pub(crate) async fn read_all(answer: Response<Incoming>) -> Result<Bytes, Failure> {
    let body = Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await;
    Ok(body.map_err(|e| Failure::new(format!("read the server's answer: {e}")))?.to_bytes())
}

/// What the server said against it: an OpenAI error object, a Kubernetes Status, or plain text.
pub(crate) fn refusal(status: StatusCode, body: &[u8]) -> Failure {
    let json: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let message = json["error"]["message"].as_str().or_else(|| json["message"].as_str());
    match message {
        Some(message) if status == StatusCode::UNAUTHORIZED => {
            Failure::new(message).cure("give a key with --api-key or PILOTLIGHT_API_KEY")
        }
        Some(message) => Failure::new(message),
        None => {
            let text = String::from_utf8_lossy(&body[..body.len().min(300)]);
            Failure::new(format!("the server answered {status}: {}", text.trim()))
        }
    }
}
