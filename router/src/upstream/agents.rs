//! The HTTP client.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use pilotlight_domain::SessionId;
use pilotlight_domain::session::{FailureCode, Retry, SessionCommand, SessionEvent, SessionSpec};
use pilotlight_kit::trace::Span;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::lines::Lines;

/// Agents are near; one that takes longer is as good as gone.
const CONNECT_MAX: Duration = Duration::from_secs(3);
/// An answer that is not a stream: an error with its message, or a small report.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// Whatever becomes of a session, the head of its answer comes at once: a request of 16 MiB is read in a fraction of
/// this. An agent that is stopped has a kernel that still takes connections.
const ANSWERS_WITHIN: Duration = Duration::from_secs(10);

/// Of two operators eight connections in a row miss the leader once in 256 times; then the caller's back-off helps.
const ASKS_AT_ONCE: u32 = 8;

/// The end of an answer comes with its last event, or is not worth waiting for.
const FINISH_MAX: Duration = Duration::from_secs(1);

/// Connections to everybody that this router speaks to.
#[derive(Clone, Debug)]
pub(crate) struct Agents {
    client: Client<HttpConnector, Full<Bytes>>,
}

/// A session that could not be opened.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OpenError {
    /// Nobody answered: nothing has happened.
    #[error("cannot reach the agent at {url}: {cause}")]
    Unreachable { url: String, cause: String },
    /// The agent answered with a failure.
    #[error("{message}")]
    Failed { status: StatusCode, code: FailureCode, message: String, retry: Retry },
    /// The agent answered something else.
    #[error("the agent at {url} answered {status}: {message}")]
    Strange { url: String, status: StatusCode, message: String },
}

/// A stream that broke.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StreamError {
    #[error("the connection to the agent broke: {0}")]
    Connection(#[source] hyper::Error),
    #[error("the agent sent {0}")]
    TooLong(#[from] super::lines::LineTooLong),
    #[error("the agent sent a line that is no event: {0}")]
    NoEvent(#[source] serde_json::Error),
    #[error("the agent closed the stream before its last event")]
    Ended,
}

impl StreamError {
    /// The other side is not what we think; a new try will not change that.
    pub(crate) fn is_nonsense(&self) -> bool {
        matches!(self, StreamError::TooLong(_) | StreamError::NoEvent(_))
    }
}

impl Agents {
    pub(crate) fn new() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_MAX));
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(Duration::from_secs(60))
            // 64 idle connections to each agent are more than it has slots.
            .pool_max_idle_per_host(64)
            .build(connector);
        Agents { client }
    }

    /// Opens a session. `spec` is dropped once it is written: while a session waits at its agent, only the written
    /// form is kept here. Dropping it half-way closes the connection.
    pub(crate) async fn open(
        &self,
        endpoint: &str,
        spec: SessionSpec,
        span: &Span,
    ) -> Result<Events, OpenError> {
        let url = format!("{}/v1/sessions", endpoint.trim_end_matches('/'));
        let unreachable = |cause: String| OpenError::Unreachable { url: url.clone(), cause };
        let body = serde_json::to_vec(&spec).map_err(|e| unreachable(e.to_string()))?;
        drop(spec);
        let answering = tokio::time::timeout(ANSWERS_WITHIN, self.send_in(span, &url, body.into()));
        let answered = answering.await.map_err(|_| unreachable("it does not answer".into()))?;
        let response = answered.map_err(&unreachable)?;
        let status = response.status();
        let body = response.into_body();
        if status == StatusCode::OK {
            return Ok(Events { body, lines: Lines::default() });
        }
        let answer = read_all(body).await.map_err(&unreachable)?;
        match serde_json::from_slice(&answer) {
            Ok(SessionEvent::Failed { code, message, retry }) => {
                Err(OpenError::Failed { status, code, message, retry })
            }
            _ => {
                let message = String::from_utf8_lossy(&answer).chars().take(200).collect();
                Err(OpenError::Strange { url, status, message })
            }
        }
    }

    /// Tells an open session something. Dropping it half-way may or may not have told it.
    pub(crate) async fn command(
        &self,
        endpoint: &str,
        id: &SessionId,
        epoch: u32,
        command: &SessionCommand,
    ) -> Result<(), PostError> {
        let url =
            format!("{}/v1/sessions/{}/command?epoch={epoch}", endpoint.trim_end_matches('/'), id.in_path());
        self.tell(&url, command).await
    }

    /// Posts JSON, and reads nothing but whether it was taken.
    pub(crate) async fn tell<T: Serialize>(&self, url: &str, what: &T) -> Result<(), PostError> {
        let body = serde_json::to_vec(what).map_err(|e| PostError(e.to_string()))?;
        let response = self.send(url, body.into()).await.map_err(PostError)?;
        let status = response.status();
        let answer = read_all(response.into_body()).await.map_err(PostError)?;
        if status.is_success() {
            return Ok(());
        }
        Err(refusal(status, &answer))
    }

    /// Posts JSON to the operator and reads JSON.
    ///
    /// Behind its address are several, of which one leads. The others say 503 and close the connection, so that the next
    /// one may reach the leader, and is made at once: a wake is worth no back-off.
    pub(crate) async fn post<T: Serialize, R: DeserializeOwned>(
        &self,
        url: &str,
        what: &T,
    ) -> Result<R, PostError> {
        let body = Bytes::from(serde_json::to_vec(what).map_err(|e| PostError(e.to_string()))?);
        let mut asked = 0;
        loop {
            asked += 1;
            let response = self.send(url, body.clone()).await.map_err(PostError)?;
            let status = response.status();
            let closes = response.headers().get(header::CONNECTION).is_some_and(|value| value == "close");
            let answer = read_all(response.into_body()).await.map_err(PostError)?;
            if status.is_success() {
                return serde_json::from_slice(&answer).map_err(|e| PostError(e.to_string()));
            }
            if !(status == StatusCode::SERVICE_UNAVAILABLE && closes && asked < ASKS_AT_ONCE) {
                return Err(refusal(status, &answer));
            }
        }
    }

    async fn send(&self, url: &str, body: Bytes) -> Result<http::Response<Incoming>, String> {
        self.send_in(&Span::default(), url, body).await
    }

    /// As a step of a trace.
    async fn send_in(&self, span: &Span, url: &str, body: Bytes) -> Result<http::Response<Incoming>, String> {
        let mut request = Request::builder()
            .method(Method::POST)
            .uri(url)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|e| e.to_string())?;
        if let Some(value) = span.traceparent().and_then(|text| text.parse().ok()) {
            request.headers_mut().insert("traceparent", value);
        }
        self.client.request(request).await.map_err(|e| chain(&e))
    }
}

/// What was said against it: the message of an error object, or the beginning of what came.
fn refusal(status: StatusCode, answer: &[u8]) -> PostError {
    let json: serde_json::Value = serde_json::from_slice(answer).unwrap_or_default();
    let message = json["error"]["message"].as_str().or_else(|| json["message"].as_str());
    PostError(message.map_or_else(
        || {
            format!(
                "status {status}: {}",
                String::from_utf8_lossy(answer).chars().take(200).collect::<String>()
            )
        },
        str::to_owned,
    ))
}

/// A request that failed, with its causes.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(crate) struct PostError(String);

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

async fn read_all(body: Incoming) -> Result<Bytes, String> {
    Limited::new(body, ANSWER_BYTES_MAX)
        .collect()
        .await
        .map(http_body_util::Collected::to_bytes)
        .map_err(|e| e.to_string())
}

/// A session's events. Dropping them ends the session.
pub(crate) struct Events {
    body: Incoming,
    lines: Lines,
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events").finish_non_exhaustive()
    }
}

impl Events {
    /// Reads past the last event, so that the connection can be used again.
    pub(crate) async fn finish(mut self) {
        let rest = async { while let Some(Ok(_)) = self.body.frame().await {} };
        let _best_effort = tokio::time::timeout(FINISH_MAX, rest).await;
    }

    /// The next event. Dropping it half-way loses nothing.
    pub(crate) async fn next(&mut self) -> Result<SessionEvent, StreamError> {
        loop {
            if let Some(line) = self.lines.next()? {
                return serde_json::from_slice(&line).map_err(StreamError::NoEvent);
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Some(bytes) = frame.data_ref() {
                        self.lines.push(bytes);
                    }
                }
                Some(Err(error)) => return Err(StreamError::Connection(error)),
                None if self.lines.is_torn() => {
                    // A last line without its newline.
                    self.lines.push(b"\n");
                }
                None => return Err(StreamError::Ended),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use axum::extract::State;
    use axum::response::IntoResponse as _;
    use axum::routing::post;

    use super::*;

    async fn serve(app: axum::Router) -> String {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        url
    }

    /// The first `misses` answers are a follower's.
    async fn operators(
        misses: u32,
        head: [(header::HeaderName, &'static str); 1],
    ) -> (String, Arc<AtomicU32>) {
        let asked = Arc::new(AtomicU32::new(0));
        let answer = async move |State(asked): State<Arc<AtomicU32>>| {
            if asked.fetch_add(1, Ordering::SeqCst) < misses {
                return (StatusCode::SERVICE_UNAVAILABLE, head, "not the leader").into_response();
            }
            axum::Json(7).into_response()
        };
        (serve(axum::Router::new().route("/", post(answer)).with_state(asked.clone())).await, asked)
    }

    #[tokio::test]
    async fn an_operator_that_does_not_lead_is_passed_over_at_once() {
        let close = [(header::CONNECTION, "close")];
        let (url, asked) = operators(3, close.clone()).await;
        assert_eq!(Agents::new().post::<_, u32>(&url, &()).await.unwrap(), 7);
        assert_eq!(asked.load(Ordering::SeqCst), 4);
        // Where none leads it ends.
        let (url, asked) = operators(u32::MAX, close).await;
        let error = Agents::new().post::<_, u32>(&url, &()).await.unwrap_err().to_string();
        assert!(error.contains("not the leader"), "{error}");
        assert_eq!(asked.load(Ordering::SeqCst), ASKS_AT_ONCE);
        // A leader that is behind keeps its connection, and is not pressed.
        let (url, asked) = operators(u32::MAX, [(header::RETRY_AFTER, "1")]).await;
        Agents::new().post::<_, u32>(&url, &()).await.unwrap_err();
        assert_eq!(asked.load(Ordering::SeqCst), 1);
    }
}
