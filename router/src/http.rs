//! The paths.

use std::collections::HashMap;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, Response, Uri};
use axum::response::IntoResponse as _;
use axum::routing::{any, get, post};
use axum::{Json, Router};

use crate::context::Context;
use crate::openai::models::ModelList;
use crate::openai::{ApiError, Task};
use crate::registry::Verdict;
use crate::serve;

/// Every path under both prefixes; what is unknown below them is answered too, what is unknown beside them is not.
pub(crate) fn routes(cx: Arc<Context>) -> Router {
    let mut router = Router::new();
    for prefix in ["/v1", "/openai/v1"] {
        let at = |path: &str| format!("{prefix}{path}");
        router = router
            .route(&at("/chat/completions"), post(chat).fallback(only_post))
            .route(&at("/completions"), post(completion).fallback(only_post))
            .route(&at("/models"), get(list).fallback(only_get))
            .route(&at("/models/{*id}"), get(one).fallback(only_get))
            .route(&at("/{*rest}"), any(not_found))
            .route(&at("/"), any(not_found))
            .route(prefix, any(not_found));
    }
    router.with_state(cx)
}

/// A 404 with the error object: for the fallback of whatever these routes are merged into.
pub async fn not_found(headers: HeaderMap, uri: Uri) -> Response<Body> {
    with_id(&headers, ApiError::unknown_path(uri.path()).into_response())
}

async fn only_post(method: Method, headers: HeaderMap) -> Response<Body> {
    with_id(&headers, ApiError::method_not_allowed(method.as_str(), "POST").into_response())
}

async fn only_get(method: Method, headers: HeaderMap) -> Response<Body> {
    with_id(&headers, ApiError::method_not_allowed(method.as_str(), "GET").into_response())
}

async fn chat(State(cx): State<Arc<Context>>, request: Request) -> Response<Body> {
    serve::answer(cx, Task::Chat, request).await
}

async fn completion(State(cx): State<Arc<Context>>, request: Request) -> Response<Body> {
    serve::answer(cx, Task::Completion, request).await
}

async fn list(State(cx): State<Arc<Context>>, headers: HeaderMap, uri: Uri) -> Response<Body> {
    let query: HashMap<String, String> = Query::try_from_uri(&uri).map(|Query(q)| q).unwrap_or_default();
    let objects = cx.registry().objects();
    with_id(&headers, Json(ModelList::new(objects, query.get("state").map(String::as_str))).into_response())
}

async fn one(State(cx): State<Arc<Context>>, Path(id): Path<String>, headers: HeaderMap) -> Response<Body> {
    let object = {
        let registry = cx.registry();
        registry.resolve(&id).filter(|m| m.verdict != Verdict::Gone).map(|m| registry.object(&m))
    };
    let response = match object {
        Some(object) => Json(object).into_response(),
        None => ApiError::unknown_model(&id).into_response(),
    };
    with_id(&headers, response)
}

fn with_id(headers: &HeaderMap, mut response: Response<Body>) -> Response<Body> {
    if let Ok(id) = HeaderValue::from_str(serve::request_id(headers).as_str()) {
        response.headers_mut().insert(serve::REQUEST_ID, id);
    }
    response
}
