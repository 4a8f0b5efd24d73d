//! The paths.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::body::Body;
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, Response, Uri, Version, header};
use axum::middleware::{self, Next};
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
    router.layer(middleware::from_fn_with_state(cx.clone(), last_request)).with_state(cx)
}

/// While the process drains, each answer is the last one of its connection.
async fn last_request(State(cx): State<Arc<Context>>, request: Request, next: Next) -> Response<Body> {
    let one_at_a_time = request.version() < Version::HTTP_2;
    let mut response = next.run(request).await;
    if one_at_a_time && cx.draining.load(Ordering::Relaxed) {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
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
    let response = cx.caller(&headers).map(|who| {
        let registry = cx.registry();
        let objects = registry.objects(|model| who.may_use(model, &registry));
        Json(ModelList::new(objects, query.get("state").map(String::as_str)))
    });
    with_id(&headers, response.into_response())
}

async fn one(State(cx): State<Arc<Context>>, Path(id): Path<String>, headers: HeaderMap) -> Response<Body> {
    let response = cx.caller(&headers).and_then(|who| {
        let registry = cx.registry();
        let model = registry.resolve(&id).filter(|m| m.verdict != Verdict::Gone);
        let model = model.ok_or_else(|| ApiError::unknown_model(&id))?;
        who.must_use(&id, &model, &registry)?;
        Ok(Json(registry.object(&model)))
    });
    with_id(&headers, response.into_response())
}

fn with_id(headers: &HeaderMap, mut response: Response<Body>) -> Response<Body> {
    if let Ok(id) = HeaderValue::from_str(serve::request_id(headers).as_str()) {
        response.headers_mut().insert(serve::REQUEST_ID, id);
    }
    response
}
