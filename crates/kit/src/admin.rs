//! The admin paths of every program: `/livez` (the process runs), `/readyz` (it can do its work), `/metrics`.

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus::{Encoder, Registry, TextEncoder};
use tokio::sync::watch;

/// Whether a program can do its work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Not yet: what it waits for.
    Starting(String),
    /// Yes.
    Ready,
    /// Not any more: it finishes what is open.
    Draining,
}

#[derive(Clone)]
struct Admin {
    registry: Registry,
    ready: watch::Receiver<Readiness>,
}

/// The three paths.
pub fn routes(registry: Registry, ready: watch::Receiver<Readiness>) -> axum::Router {
    axum::Router::new()
        .route("/livez", get(async || "ok\n"))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .with_state(Admin { registry, ready })
}

async fn readyz(State(admin): State<Admin>) -> Response {
    match &*admin.ready.borrow() {
        Readiness::Ready => (StatusCode::OK, "ok\n").into_response(),
        Readiness::Draining => (StatusCode::SERVICE_UNAVAILABLE, "draining\n").into_response(),
        Readiness::Starting(what) => {
            (StatusCode::SERVICE_UNAVAILABLE, format!("starting: {what}\n")).into_response()
        }
    }
}

async fn metrics(State(admin): State<Admin>) -> Response {
    let encoder = TextEncoder::new();
    let mut text = Vec::new();
    match encoder.encode(&admin.registry.gather(), &mut text) {
        Ok(()) => ([(header::CONTENT_TYPE, encoder.format_type().to_owned())], text).into_response(),
        Err(error) => {
            tracing::error!(%error, "encode metrics");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}
