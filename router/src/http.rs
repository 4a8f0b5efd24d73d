//! The paths.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::body::Body;
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, Response, Uri, Version, header};
use axum::middleware::{self, Next};
use axum::response::IntoResponse as _;
use axum::routing::{any, get};
use axum::{Json, Router};

use crate::context::Context;
use crate::openai::models::ModelList;
use crate::openai::{ApiError, Task};
use crate::registry::Verdict;
use crate::serve;

/// Every path under both prefixes; what is unknown below them is answered too, what is unknown beside them is not.
pub(crate) fn routes(cx: Arc<Context>) -> Router {
    let last = || middleware::from_fn_with_state(cx.clone(), last_request);
    let mut router = Router::new();
    for prefix in ["/v1", "/openai/v1"] {
        let at = |path: &str| format!("{prefix}{path}");
        // Not around what may be held for minutes: the layer would be kept, with the request, as long.
        router = router
            .route(&at("/models"), get(list).fallback(only_get).layer(last()))
            .route(&at("/models/{*id}"), get(one).fallback(only_get).layer(last()))
            .route(&at("/{*rest}"), any(not_found).layer(last()))
            .route(&at("/"), any(not_found).layer(last()))
            .route(prefix, any(not_found).layer(last()))
            .route(&at("/chat/completions"), any(only_post).layer(last()).post(chat))
            .route(&at("/completions"), any(only_post).layer(last()).post(completion));
    }
    router.with_state(cx)
}

/// While the process drains, each answer is the last one of its connection.
async fn last_request(State(cx): State<Arc<Context>>, request: Request, next: Next) -> Response<Body> {
    let version = request.version();
    let mut response = next.run(request).await;
    close_if_draining(&cx, version, &mut response);
    response
}

fn close_if_draining(cx: &Context, version: Version, response: &mut Response<Body>) {
    if version < Version::HTTP_2 && cx.draining.load(Ordering::Relaxed) {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
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

fn chat(
    State(cx): State<Arc<Context>>,
    request: Request,
) -> impl Future<Output = Response<Body>> + Send + use<> {
    ask(cx, Task::Chat, request)
}

fn completion(
    State(cx): State<Arc<Context>>,
    request: Request,
) -> impl Future<Output = Response<Body>> + Send + use<> {
    ask(cx, Task::Completion, request)
}

fn ask(
    cx: Arc<Context>,
    task: Task,
    request: Request,
) -> impl Future<Output = Response<Body>> + Send + use<> {
    let version = request.version();
    let answer = serve::answer(cx.clone(), task, request);
    async move {
        let mut response = answer.await;
        close_if_draining(&cx, version, &mut response);
        response
    }
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
