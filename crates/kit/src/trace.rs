//! Traces: spans that OpenTelemetry collectors take, by OTLP over HTTP with JSON bodies.
//!
//! ```text
//! client ─traceparent─► router: request ─ hold ─ wake        (a span ends when it is dropped)
//!                              │            └─traceparent─► operator: decide
//!                              └ upstream ─traceparent─► agent: session ─ load, prefill, decode, move
//! ended spans ─bounded channel─► one task ─POST /v1/traces─► collector
//! ```
//!
//! - Off, which is the default, a span is a null pointer: nothing is allocated, timed or sent.
//! - A client's `traceparent` is gone on with, and its wish not to be sampled is kept; without one a trace begins here.
//! - Nobody waits for the collector: what does not fit into the channel is dropped, and how much is logged.
//!
//! It deliberately does **not** turn log spans into these: a trace is made of the few steps that a person asks about.
//! It speaks plain HTTP only: a collector stands on the node or in the cluster.

use std::fmt::Display;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use axum::http::{Request, Uri, header};
use http_body_util::Full;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};

/// Ended spans that wait: 4,096 × about 0.5 KiB = 2 MiB, ten seconds of 60 requests per second.
const WAITING_MAX: usize = 4096;
/// Spans of one message: about 256 KiB.
const BATCH_MAX: usize = 512;
/// The first span of a message waits so long for others.
const GATHER: Duration = Duration::from_millis(500);
/// A collector that does not answer within so long loses the message.
const ANSWER_MAX: Duration = Duration::from_secs(5);

static TRACER: OnceLock<Tracer> = OnceLock::new();

struct Tracer {
    endpoint: String,
    ended: mpsc::Sender<Told>,
    dropped: AtomicU64,
}

enum Told {
    Ended(Box<Open>),
    Flush(oneshot::Sender<()>),
}

/// An endpoint that cannot be one.
#[derive(Debug, thiserror::Error)]
#[error("`--otlp {0}` is no address of a collector; write it as http://HOST:4318 (plain HTTP only)")]
pub struct BadEndpoint(String);

/// Starts sending to the collector at `endpoint`, from a task on this runtime. A second call in one process changes
/// nothing.
///
/// # Errors
/// When the endpoint cannot be one.
pub fn start(endpoint: &str, service: &'static str) -> Result<(), BadEndpoint> {
    let bad = || BadEndpoint(endpoint.to_owned());
    let url: Uri = format!("{}/v1/traces", endpoint.trim_end_matches('/')).parse().map_err(|_| bad())?;
    if url.scheme_str() != Some("http") || url.authority().is_none() {
        return Err(bad());
    }
    let (ended, inbox) = mpsc::channel(WAITING_MAX);
    let tracer = Tracer { endpoint: endpoint.to_owned(), ended, dropped: AtomicU64::new(0) };
    if TRACER.set(tracer).is_ok() {
        tokio::spawn(export(url, service, inbox));
    }
    Ok(())
}

/// Where spans go, if anywhere: for the programs that this one starts.
pub fn endpoint() -> Option<&'static str> {
    TRACER.get().map(|tracer| tracer.endpoint.as_str())
}

/// Sends what has ended so far, but waits no longer than this. Dropping it half-way is safe.
pub async fn flush(at_most: Duration) {
    let Some(tracer) = TRACER.get() else { return };
    let (done, sent) = oneshot::channel();
    let flushing = async {
        if tracer.ended.send(Told::Flush(done)).await.is_ok() {
            let _exporter_gone = sent.await;
        }
    };
    let _too_late = tokio::time::timeout(at_most, flushing).await;
}

/// One step of a trace, until it is dropped.
#[derive(Debug, Default)]
pub struct Span(Option<Box<Open>>);

#[derive(Debug)]
struct Open {
    trace: u128,
    id: u64,
    parent: Option<u64>,
    name: &'static str,
    begun: SystemTime,
    /// Set once it is dropped.
    ended: SystemTime,
    attributes: Mutex<Vec<(&'static str, String)>>,
}

impl Span {
    /// Begins where another process, or the client, told of its own span; without that it begins a trace.
    pub fn begin(name: &'static str, traceparent: Option<&str>) -> Span {
        if TRACER.get().is_none() {
            return Span(None);
        }
        match traceparent.and_then(parse) {
            Some(Parent { sampled: false, .. }) => Span(None),
            Some(Parent { trace, id, .. }) => Span::new(name, trace, Some(id)),
            None => Span::new(name, fastrand::u128(1..), None),
        }
    }

    /// A step of this one.
    #[must_use]
    pub fn child(&self, name: &'static str) -> Span {
        self.0.as_ref().map_or_else(Span::default, |open| Span::new(name, open.trace, Some(open.id)))
    }

    /// It began so long ago.
    #[must_use]
    pub fn since(mut self, ago: Duration) -> Span {
        if let Some(open) = &mut self.0 {
            open.begun = open.begun.checked_sub(ago).unwrap_or(open.begun);
        }
        self
    }

    /// Notes something of it.
    pub fn set(&self, key: &'static str, value: impl Display) {
        if let Some(open) = &self.0 {
            open.attributes.lock().unwrap_or_else(PoisonError::into_inner).push((key, value.to_string()));
        }
    }

    /// What the next process is told, in W3C's form.
    pub fn traceparent(&self) -> Option<String> {
        self.0.as_ref().map(|open| format!("00-{:032x}-{:016x}-01", open.trace, open.id))
    }

    fn new(name: &'static str, trace: u128, parent: Option<u64>) -> Span {
        let now = SystemTime::now();
        let attributes = Mutex::default();
        Span(Some(Box::new(Open {
            trace,
            id: fastrand::u64(1..),
            parent,
            name,
            begun: now,
            ended: now,
            attributes,
        })))
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if let Some((mut open, tracer)) = self.0.take().zip(TRACER.get()) {
            open.ended = SystemTime::now();
            if tracer.ended.try_send(Told::Ended(open)).is_err() {
                tracer.dropped.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

#[derive(Debug, PartialEq)]
struct Parent {
    trace: u128,
    id: u64,
    sampled: bool,
}

/// `00-<32 hex>-<16 hex>-<2 hex>`; what is not that begins a trace anew, as the specification wants.
fn parse(text: &str) -> Option<Parent> {
    let mut parts = text.split('-');
    let (version, trace, id, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let hex = |part: &str, digits| part.len() == digits && part.bytes().all(|b| b.is_ascii_hexdigit());
    let whole = version != "00" || parts.next().is_none();
    if !hex(version, 2) || version == "ff" || !hex(trace, 32) || !hex(id, 16) || !hex(flags, 2) || !whole {
        return None;
    }
    let trace = u128::from_str_radix(trace, 16).ok().filter(|trace| *trace != 0)?;
    let id = u64::from_str_radix(id, 16).ok().filter(|id| *id != 0)?;
    Some(Parent { trace, id, sampled: u8::from_str_radix(flags, 16).ok()? & 1 == 1 })
}

async fn export(url: Uri, service: &'static str, mut inbox: mpsc::Receiver<Told>) {
    let client: Client<_, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let mut told = Vec::with_capacity(BATCH_MAX);
    while let Some(first) = inbox.recv().await {
        let wait = matches!(first, Told::Ended(_));
        told.push(first);
        let gather = tokio::time::sleep(if wait { GATHER } else { Duration::ZERO });
        tokio::pin!(gather);
        while told.len() < BATCH_MAX && !told.iter().any(|told| matches!(told, Told::Flush(_))) {
            tokio::select! {
                more = inbox.recv() => match more {
                    Some(more) => told.push(more),
                    None => break,
                },
                () = &mut gather => break,
            }
        }
        let (mut spans, mut waiting) = (Vec::new(), Vec::new());
        for told in told.drain(..) {
            match told {
                Told::Ended(open) => spans.push(span(&open)),
                Told::Flush(done) => waiting.push(done),
            }
        }
        if !spans.is_empty() {
            send(&client, &url, &message(service, &spans)).await;
        }
        for done in waiting {
            let _nobody_waits = done.send(());
        }
    }
}

type HttpClient = Client<hyper_util::client::legacy::connect::HttpConnector, Full<Bytes>>;

async fn send(client: &HttpClient, url: &Uri, message: &Value) {
    let request = Request::post(url.clone())
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(message.to_string())));
    let Ok(request) = request else { return };
    let trouble = match tokio::time::timeout(ANSWER_MAX, client.request(request)).await {
        Ok(Ok(answer)) if answer.status().is_success() => None,
        Ok(Ok(answer)) => Some(format!("it answered {}", answer.status())),
        Ok(Err(error)) => Some(error.to_string()),
        Err(_) => Some("it does not answer".into()),
    };
    let dropped = TRACER.get().map_or(0, |tracer| tracer.dropped.swap(0, Ordering::Relaxed));
    if trouble.is_some() || dropped > 0 {
        tracing::warn!(%url, trouble, dropped, "spans were lost on the way to the collector");
    }
}

fn message(service: &str, spans: &[Value]) -> Value {
    let resource = json!({ "attributes": [attribute("service.name", service)] });
    let scope = json!({ "name": "pilotlight", "version": env!("CARGO_PKG_VERSION") });
    json!({ "resourceSpans": [{ "resource": resource, "scopeSpans": [{ "scope": scope, "spans": spans }] }] })
}

fn span(open: &Open) -> Value {
    let nanos = |time: SystemTime| {
        // Text, since a number in JSON does not hold it.
        time.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos().to_string()
    };
    let attributes = open.attributes.lock().unwrap_or_else(PoisonError::into_inner);
    let attributes: Vec<Value> = attributes.iter().map(|(key, value)| attribute(key, value)).collect();
    json!({
        "traceId": format!("{:032x}", open.trace),
        "spanId": format!("{:016x}", open.id),
        "parentSpanId": open.parent.map_or_else(String::new, |id| format!("{id:016x}")),
        "name": open.name,
        // Internal, and a server's for what another process or the client asked for.
        "kind": if matches!(open.name, "request" | "session") { 2 } else { 1 },
        "startTimeUnixNano": nanos(open.begun),
        "endTimeUnixNano": nanos(open.ended),
        "attributes": attributes,
    })
}

fn attribute(key: &str, value: &str) -> Value {
    json!({ "key": key, "value": { "stringValue": value } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_tell_of_their_span() {
        let good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
        let parent = parse(good).unwrap();
        assert_eq!((parent.id, parent.sampled), (0xb7ad_6b71_6920_3331, true));
        assert!(!parse(&good.replace("-01", "-00")).unwrap().sampled);
        // A later version may have more parts.
        assert!(parse(&format!("01{}-more", &good[2..])).is_some());
        for bad in [
            "",
            "00-1-2-01",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-more",
            "00-+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        ] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn nothing_is_made_where_nothing_is_sent() {
        let span = Span::begin("request", None);
        span.set("key", "value");
        assert!(span.0.is_none() && span.child("hold").0.is_none() && span.traceparent().is_none());
        assert_eq!(size_of::<Span>(), size_of::<usize>());
    }

    #[test]
    fn an_endpoint_is_plain_http() {
        for bad in ["https://h:4318", "h:4318", "http://", ""] {
            assert!(start(bad, "test").is_err(), "{bad}");
        }
    }
}
