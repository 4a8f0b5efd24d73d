//! Listening and serving, with a graceful end.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use axum::extract::Request;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

use crate::{Backoff, Stop};

/// A slow client has so long to send its request's headers.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

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
/// Idle connections are closed at once. HTTP/1.1 and HTTP/2 on the same port.
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
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        app.clone().oneshot(request.map(axum::body::Body::new))
    });
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT);
    builder.http2().timer(TokioTimer::new());
    let serving = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(serving);
    let ended = tokio::select! {
        ended = &mut serving => ended,
        () = stop.stopping() => {
            serving.as_mut().graceful_shutdown();
            tokio::select! {
                ended = &mut serving => ended,
                () = stop.aborting() => return,
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%peer, error, "connection ended");
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
