//! Listening and serving, with a graceful end.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::time::Duration;

use axum::extract::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

use self::drained::Drained;
use self::refusal::Refusing;
use self::stall::Unstalled;
use crate::{Backoff, Stop};

mod drained;
mod refusal;
mod stall;

/// A slow client has so long to send its request's headers; a connection that waits for the next request is closed
/// after as long.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);
/// Headers, and what is written ahead of a slow reader: several times what browsers and SDKs send, and 64 MiB for a
/// thousand connections. The library looks before a read, and may read nearly as much again.
const BUFFER_BYTES_MAX: usize = 64 << 10;
/// A client that takes no byte for so long is cut.
const STALL_MAX: Duration = Duration::from_secs(30);
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
#[error("cannot listen on {address}: {source}; {cure}")]
pub struct BindError {
    address: String,
    cure: &'static str,
    source: io::Error,
}

/// Listens.
///
/// # Errors
/// When the address is taken, not ours, or not allowed.
pub async fn bind(address: &str) -> Result<TcpListener, BindError> {
    TcpListener::bind(address).await.map_err(|source| BindError {
        address: address.into(),
        cure: match source.kind() {
            io::ErrorKind::AddrInUse => {
                "another program uses it: stop that one, or choose another port with --listen"
            }
            io::ErrorKind::PermissionDenied => {
                "ports below 1024 need privileges: choose another port with --listen"
            }
            _ => "give an address of this machine as HOST:PORT, for example --listen 127.0.0.1:8080",
        },
        source,
    })
}

/// Serves `app` until `stop` is graceful; then finishes what is open, at most for `grace` or until `stop` aborts.
/// Idle connections are closed at once. HTTP/1.1 and HTTP/2 on the same port. Every request has its [`Peer`].
///
/// Bounded: headers in bytes (431) and time, a client's silence, and what is written ahead of a client that does not
/// read. A client that closes its half of a connection is gone: nobody else can tell it from one that died.
///
/// Dropping it half-way drops every connection.
pub async fn serve(listener: TcpListener, app: axum::Router, stop: Stop, grace: Duration) {
    let connections = TaskTracker::new();
    let mut backoff = Backoff::new(Duration::from_millis(5), Duration::from_secs(1));
    loop {
        let accepted = tokio::select! {
            () = stop.stopping() => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => {
                backoff.reset();
                connections.spawn(connection(stream, peer, app.clone(), stop.clone()));
            }
            Err(error) => {
                tracing::warn!(%error, "accept a connection; often the limit of open files (`ulimit -n`)");
                backoff.wait().await;
            }
        }
    }
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

async fn connection(stream: TcpStream, peer: SocketAddr, app: axum::Router, stop: Stop) {
    // Tokens are small and must leave at once.
    let _best_effort = stream.set_nodelay(true);
    let mut begin = [0; 2];
    let begun = tokio::select! {
        begun = tokio::time::timeout(HEADER_TIMEOUT, stream.peek(&mut begin)) => begun,
        () = stop.stopping() => return,
    };
    // Only HTTP/2 begins so. What looks at both needs twice the buffer: a held request would pay for it.
    let http1 = matches!(begun, Ok(Ok(2))) && begin != *b"PR";
    let service = hyper::service::service_fn(move |mut request: Request<Incoming>| {
        request.extensions_mut().insert(Peer(peer));
        app.clone().oneshot(request.map(axum::body::Body::new))
    });
    let stream = TokioIo::new(Refusing::new(Unstalled::new(Drained(stream), STALL_MAX)));
    let ended = match begun {
        Ok(Ok(1..)) if http1 => {
            let mut builder = http1::Builder::new();
            builder
                .timer(TokioTimer::new())
                .header_read_timeout(HEADER_TIMEOUT)
                .max_buf_size(BUFFER_BYTES_MAX);
            let serving = pin!(builder.serve_connection(stream, service));
            until_stopped(serving, http1::Connection::graceful_shutdown, &stop).await.map_err(Into::into)
        }
        Ok(Ok(1..)) => Box::pin(either(stream, service, &stop)).await,
        // It was closed, or said nothing.
        Ok(_) | Err(_) => return,
    };
    if let Err(error) = ended {
        tracing::debug!(%peer, error, "connection ended");
    }
}

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Serves whichever version it is.
async fn either<S>(
    stream: TokioIo<Refusing<Unstalled<Drained>>>,
    service: S,
    stop: &Stop,
) -> Result<(), Failure>
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
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn a_port_in_use_says_so() {
        let held = bind("127.0.0.1:0").await.unwrap();
        let again = bind(&held.local_addr().unwrap().to_string()).await.unwrap_err();
        assert!(again.to_string().contains("another program uses it"), "{again}");
    }

    #[tokio::test]
    async fn headers_are_bounded_and_requests_know_their_peer() {
        let app = axum::Router::new().route(
            "/peer",
            axum::routing::get(async |request: Request| {
                let peer = *request.extensions().get::<Peer>().unwrap();
                format!("{} {}", peer.0.ip(), peer.is_loopback())
            }),
        );
        let listener = bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve(listener, app, Stop::new(), Duration::ZERO));
        let ask = async |header: &str| {
            let mut client = TcpStream::connect(address).await.unwrap();
            let request =
                format!("GET /peer HTTP/1.1\r\nhost: a\r\nconnection: close\r\nx: {header}\r\n\r\n");
            let _cut_off = client.write_all(request.as_bytes()).await;
            let mut answer = Vec::new();
            let _reset = client.read_to_end(&mut answer).await;
            String::from_utf8(answer).unwrap()
        };
        let answer = ask("y").await;
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("127.0.0.1 true"), "{answer}");
        // What is not read of it must not cost the client its answer.
        let answer = ask(&"y".repeat(2 * BUFFER_BYTES_MAX)).await;
        assert!(answer.starts_with("HTTP/1.1 431") && answer.contains("headers_too_large"), "{answer}");
        assert!(ask("y").await.starts_with("HTTP/1.1 200"));
    }

    /// Both versions, and a first byte that could begin either.
    #[tokio::test]
    async fn the_first_bytes_tell_the_version() {
        let app = axum::Router::new().route("/", axum::routing::any(async || "served"));
        let listener = bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(serve(listener, app, Stop::new(), Duration::ZERO));
        for first in [1, 2, 5] {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.set_nodelay(true).unwrap();
            let request = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
            client.write_all(&request[..first]).await.unwrap();
            tokio::task::yield_now().await;
            client.write_all(&request[first..]).await.unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("served"), "{answer}");
        }
        let client = hyper_util::client::legacy::Client::builder(TokioExecutor::new())
            .http2_only(true)
            .build_http::<axum::body::Body>();
        let answer = client.get(format!("http://{address}/").parse().unwrap()).await.unwrap();
        assert_eq!((answer.version(), answer.status().as_u16()), (axum::http::Version::HTTP_2, 200));
    }

    #[tokio::test]
    async fn open_requests_are_finished_after_the_stop() {
        let (entered, mut wait_entered) = tokio::sync::mpsc::channel::<()>(1);
        let release = std::sync::Arc::new(tokio::sync::Notify::new());
        let held = release.clone();
        let app = axum::Router::new().route(
            "/slow",
            axum::routing::get(async move || {
                entered.send(()).await.unwrap();
                held.notified().await;
                "done"
            }),
        );
        let listener = bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = Stop::new();
        let server = tokio::spawn(serve(listener, app, stop.clone(), Duration::from_secs(60)));
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET /slow HTTP/1.1\r\nhost: a\r\n\r\n").await.unwrap();
        wait_entered.recv().await.unwrap();
        stop.stop();
        release.notify_one();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("done"), "{answer}");
        server.await.unwrap();
        assert!(TcpStream::connect(address).await.is_err());
    }
}
