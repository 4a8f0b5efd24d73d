//! Listening and serving, with a graceful end.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

use self::crowd::{Crowd, HalfClosed, Keeping, Place};
use self::socket::Socket;
use crate::{Backoff, Stop};

mod crowd;
mod refusal;
mod socket;
mod stall;

/// A slow client has so long to send its request's headers; a connection that waits for the next request is closed
/// after as long.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// Headers, and what is written ahead of a slow reader: several times what browsers and SDKs send, and 64 MiB for a
/// thousand connections. The library looks before a read, and may read nearly as much again.
const BUFFER_BYTES_MAX: usize = 64 << 10;
/// Connections at once: 8,192 × some 24 KiB = 192 MiB. Where there are fewer descriptors, those are the bound.
const CONNECTIONS_MAX: usize = 8192;
/// That no connection can be accepted is told so often.
const TOLD_AGAIN: Duration = Duration::from_secs(5);
/// A silent HTTP/2 client is asked after so long whether it is there, and has as long to answer.
const PING: Duration = Duration::from_secs(20);

/// Who sent a request: among the extensions of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub SocketAddr);

impl Peer {
    /// Whether it is this machine.
    pub fn is_loopback(&self) -> bool {
        self.0.ip().to_canonical().is_loopback()
    }
}

/// An address that cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {why}")]
pub struct BindError {
    address: String,
    /// Cause and cure.
    why: String,
}

/// Listens.
///
/// # Errors
/// When the address is taken, not ours, or not allowed.
pub async fn bind(address: &str) -> Result<TcpListener, BindError> {
    TcpListener::bind(address).await.map_err(|error| BindError {
        address: address.into(),
        why: match error.kind() {
            io::ErrorKind::AddrInUse => {
                "another program uses it: stop that one, or choose another port with --listen".into()
            }
            io::ErrorKind::PermissionDenied => {
                "ports below 1024 need privileges: choose another port with --listen".into()
            }
            _ => format!(
                "{error}; give an address of this machine as HOST:PORT, for example --listen 127.0.0.1:8080"
            ),
        },
    })
}

/// How it begins to be told that nobody answers.
pub const NO_ANSWER: &str = "no answer from";

/// Nobody answers, and why: the first cause, since what lies between says only who passed it on.
pub fn no_answer(server: &str, error: &(dyn std::error::Error + 'static)) -> String {
    format!("{NO_ANSWER} {server}: {}", first_cause(error))
}

/// What an error comes from.
pub fn first_cause<'a>(mut error: &'a (dyn std::error::Error + 'static)) -> &'a dyn std::error::Error {
    while let Some(cause) = error.source() {
        error = cause;
    }
    error
}

/// Serves `app` until `stop` is graceful; then finishes what is open, at most for `grace` or until `stop` aborts.
/// Idle connections are closed at once. HTTP/1.1 and HTTP/2 on the same port. Every request has its [`Peer`].
///
/// Bounded: headers in bytes (431) and time, a client's silence, what is written ahead of a client that does not read,
/// and connections: one too many, or one without a descriptor, takes the place of the one that has waited for a whole
/// request for longest.
///
/// Dropping it half-way drops every connection.
pub async fn serve(listener: TcpListener, app: axum::Router, stop: Stop, grace: Duration) {
    serve_whom(HalfClosed::Reads, listener, app, stop, grace).await;
}

/// The same for our own programs: one that closes its half of a connection, as when it dies, wants nothing any more.
/// What it asked for ends at once, also where nothing is being said to it.
pub async fn serve_programs(listener: TcpListener, app: axum::Router, stop: Stop, grace: Duration) {
    serve_whom(HalfClosed::Gone, listener, app, stop, grace).await;
}

async fn serve_whom(
    half_closed: HalfClosed,
    listener: TcpListener,
    app: axum::Router,
    stop: Stop,
    grace: Duration,
) {
    let connections = TaskTracker::new();
    accept(&listener, &app, &stop, &connections, &Crowd::new(half_closed), CONNECTIONS_MAX).await;
    drop(listener);
    connections.close();
    tokio::select! {
        () = connections.wait() => {}
        () = stop.aborting() => {}
        () = tokio::time::sleep(grace) => {
            tracing::warn!(open = connections.len(), "grace period over, connections are cut");
            stop.abort.cancel();
        }
    }
}

/// Takes connections until the stop, `most` of them at once.
async fn accept(
    listener: &TcpListener,
    app: &axum::Router,
    stop: &Stop,
    connections: &TaskTracker,
    crowd: &Arc<Crowd>,
    most: usize,
) {
    let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_secs(1));
    let mut told: Option<Instant> = None;
    loop {
        let accepted = tokio::select! {
            () = stop.stopping() => return,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                while connections.len() >= most && !crowd.cut_oldest() {
                    tracing::warn!(most, "that many connections are being answered: the next ones wait");
                    tokio::select! {
                        () = stop.stopping() => return,
                        () = backoff.wait() => {}
                    }
                }
                backoff.reset();
                connections.spawn(connection(stream, peer, app.clone(), crowd.enter(), stop.clone()));
            }
            Err(error) => {
                // Whoever gives way lets the next one in at once, who may lack a descriptor again.
                crowd.cut_oldest();
                if told.is_none_or(|told| told.elapsed() >= TOLD_AGAIN) {
                    tracing::warn!(%error, "accept a connection; often the limit of open files (`ulimit -n`)");
                    told = Some(Instant::now());
                }
                backoff.wait().await;
            }
        }
    }
}

/// Serves a connection until it ends, or has to give way.
async fn connection(stream: TcpStream, peer: SocketAddr, app: axum::Router, place: Arc<Place>, stop: Stop) {
    tokio::select! {
        () = served(stream, peer, app, &place, &stop) => {}
        () = place.cut() => tracing::debug!(%peer, "a connection gave way to a newer one"),
    }
}

async fn served(stream: TcpStream, peer: SocketAddr, app: axum::Router, place: &Arc<Place>, stop: &Stop) {
    // Tokens are small and must leave at once.
    let _best_effort = stream.set_nodelay(true);
    let mut begin = [0; 2];
    let begun = tokio::select! {
        begun = tokio::time::timeout(HEADER_TIMEOUT, stream.peek(&mut begin)) => begun,
        () = stop.stopping() => return,
    };
    // Only HTTP/2 begins so. What looks at both needs twice the buffer: a held request would pay for it.
    let http1 = matches!(begun, Ok(Ok(2))) && begin != *b"PR";
    let service = hyper::service::service_fn(|mut request: Request<Incoming>| {
        request.extensions_mut().insert(Peer(peer));
        let (asking, answering) = place.request(request.version());
        let request = request.map(|body| Body::new(Keeping::new(body, asking)));
        let answer = app.clone().oneshot(request);
        async move {
            let answer = answer.await;
            answering.begins();
            answer.map(|answer| answer.map(|body| Body::new(Keeping::new(body, answering))))
        }
    });
    let stream = TokioIo::new(Socket::new(stream, place.clone()));
    let ended = match begun {
        Ok(Ok(1..)) if http1 => {
            let mut builder = http1::Builder::new();
            builder
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_TIMEOUT)
                .max_buf_size(BUFFER_BYTES_MAX);
            let serving = pin!(builder.serve_connection(stream, service));
            until_stopped(serving, http1::Connection::graceful_shutdown, stop).await.map_err(Into::into)
        }
        Ok(Ok(1..)) => Box::pin(either(stream, service, stop)).await,
        // It was closed, or said nothing.
        Ok(_) | Err(_) => return,
    };
    if let Err(error) = ended {
        tracing::debug!(%peer, error, "connection ended");
    }
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Serves whichever version it is.
async fn either<S>(stream: TokioIo<Socket>, service: S, stop: &Stop) -> Result<(), Failure>
where
    S: Service<Request<Incoming>, Response = axum::response::Response, Error = Infallible>,
    S::Future: Send + 'static,
{
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(BUFFER_BYTES_MAX);
    builder
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(PING)
        .keep_alive_timeout(PING)
        .max_header_list_size(BUFFER_BYTES_MAX as u32)
        .max_send_buf_size(BUFFER_BYTES_MAX);
    let serving = pin!(builder.serve_connection(stream, service));
    until_stopped(serving, auto::Connection::graceful_shutdown, stop).await
}

/// Until it ends; from the stop on it takes no further request. A stop that aborts ends it.
async fn until_stopped<C, E>(
    mut serving: Pin<&mut C>,
    no_more: impl FnOnce(Pin<&mut C>),
    stop: &Stop,
) -> Result<(), E>
where
    C: Future<Output = Result<(), E>>,
{
    tokio::select! {
        ended = &mut serving => ended,
        () = stop.stopping() => {
            no_more(serving.as_mut());
            tokio::select! {
                ended = &mut serving => ended,
                () = stop.aborting() => Ok(()),
            }
        }
    }
}

#[cfg(test)]
mod tests;
