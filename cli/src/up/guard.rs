//! Who may reach what, when `up` or a part alone listens beyond this machine.
//!
//! The management API can write to the store, and knows no users: it answers this machine alone, whatever the address.
//! The OpenAI API asks for API keys; an address that others reach is refused without them.

use std::net::IpAddr;

use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse as _, Response};
use pilotlight_kit::http::Peer;

use crate::failure::Failure;

const REFUSED: &str = r#"{"error":{"message":"the management API answers the machine it runs on alone: use the commands there, or forward the port","type":"permission_error","param":null,"code":"not_this_machine"}}"#;

/// `routes`, for callers on this machine: from loopback, or from `own`, the address that is listened on.
pub(crate) fn for_this_machine(routes: axum::Router, own: IpAddr) -> axum::Router {
    routes.layer(middleware::from_fn(move |request: Request, next: Next| async move {
        let peer = request.extensions().get::<Peer>().copied();
        if peer.is_some_and(|peer| peer.is_loopback() || peer.0.ip() == own) {
            next.run(request).await
        } else {
            refused()
        }
    }))
}

fn refused() -> Response {
    let json = HeaderValue::from_static("application/json");
    (StatusCode::FORBIDDEN, [(header::CONTENT_TYPE, json)], REFUSED).into_response()
}

/// An address that others reach would give every model to whoever finds it.
pub(super) async fn refuse_open_address(listen: &str) -> Result<(), Failure> {
    if !is_open_address(listen).await {
        return Ok(());
    }
    Err(Failure::usage(format!("{listen} can be reached from other machines, and no API key would be asked for")).cure(
        "give --api-keys FILE (`pilotlight key new NAME` makes its lines), or, if that is meant, --insecure-no-auth",
    ))
}

/// Whether other machines may reach it. What cannot be resolved cannot be listened on, which says so by itself.
pub(crate) async fn is_open_address(listen: &str) -> bool {
    let addresses = tokio::net::lookup_host(listen).await;
    addresses.is_ok_and(|mut all| all.any(|address| !address.ip().to_canonical().is_loopback()))
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use tower::ServiceExt as _;

    use super::*;

    #[tokio::test]
    async fn an_open_address_needs_keys() {
        for listen in [
            "127.0.0.1:0",
            "127.3.4.5:80",
            "[::1]:8080",
            "[::ffff:127.0.0.1]:1",
            "localhost:8080",
            "nonsense",
        ] {
            assert!(refuse_open_address(listen).await.is_ok(), "{listen}");
        }
        for listen in ["0.0.0.0:8080", "[::]:8080", "192.0.2.1:80"] {
            let failure = refuse_open_address(listen).await.unwrap_err();
            assert!(failure.to_string().contains("--api-keys") && failure.code == 2, "{listen}");
        }
    }

    #[tokio::test]
    async fn management_is_for_this_machine() {
        let routes = axum::Router::new().route("/apis", axum::routing::get(async || "ok"));
        let app = for_this_machine(routes, "192.0.2.1".parse().unwrap());
        for (peer, status) in
            [("127.0.0.1:9", 200), ("[::1]:9", 200), ("192.0.2.1:9", 200), ("192.0.2.7:9", 403)]
        {
            let mut request = Request::builder().uri("/apis").body(Body::empty()).unwrap();
            request.extensions_mut().insert(Peer(peer.parse().unwrap()));
            assert_eq!(app.clone().oneshot(request).await.unwrap().status(), status, "{peer}");
        }
        let nobody = Request::builder().uri("/apis").body(Body::empty()).unwrap();
        assert_eq!(app.oneshot(nobody).await.unwrap().status(), 403);
    }
}
