//! The operator's HTTP: demand comes in, explanations go out.
//!
//! | path | answers |
//! |---|---|
//! | `POST /operator/v1/demand` | after the orders for the wakes in it were written: 200, wakes that cannot be; 503 while we do not lead, or are behind: repeat it |
//! | `POST /operator/v1/place` | `{model, node, seconds}`: the model shall serve on that node for so long though nobody waits there, because sessions are about to move. 200 once the order is written; 409 with the reason if it cannot be; 503 as above |
//! | `GET /operator/v1/explain/{namespace}/{name}` | 200, or 404 |

use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use pilotlight_api::demand::{DemandAnswer, DemandReport};
use pilotlight_api::explain::Explanation;
use pilotlight_domain::{ModelName, NodeName};
use pilotlight_kit::Readiness;
use serde::Deserialize;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

/// Reports that wait to be taken up: a hundred routers report about a hundred times per second together, and a turn
/// takes milliseconds. Reports are at most 2 MiB (axum's limit for bodies), so 64 of them are bounded too.
pub(crate) const ASKS_MAX: usize = 64;
/// A store that does not answer must not keep routers waiting for ever: they repeat.
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Whether the order is written, or why it cannot be.
pub(crate) type PlaceAnswer = oneshot::Sender<Result<(), String>>;

/// What the service is asked.
pub(crate) enum Ask {
    /// A router's report, and when it came.
    Demand(DemandReport, Instant, oneshot::Sender<DemandAnswer>),
    /// Explain a model.
    Explain(ModelName, oneshot::Sender<Option<Explanation>>),
    /// Have a model serve on a node for so long.
    Place(Place, PlaceAnswer),
    /// The clock jumped: look again what is due.
    Look,
}

/// A wish that a model serve on a node, for a session that is to move there.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// Which.
    pub model: ModelName,
    /// Where.
    pub node: NodeName,
    /// For how long, at most an hour.
    pub seconds: f64,
}

/// A way to ask a running operator; cheap to clone.
#[derive(Clone, Debug)]
pub struct Handle {
    pub(crate) asks: mpsc::Sender<Ask>,
    pub(crate) leads: watch::Receiver<bool>,
    pub(crate) ready: watch::Receiver<Readiness>,
}

impl Handle {
    /// Its paths, below `/operator/v1`.
    pub fn routes(&self) -> Router {
        Router::new()
            .route("/operator/v1/demand", post(demand))
            .route("/operator/v1/place", post(place))
            .route("/operator/v1/explain/{namespace}/{name}", get(explain))
            .with_state(self.clone())
    }

    /// Ready once every kind was listed; leadership is not required.
    pub fn ready(&self) -> watch::Receiver<Readiness> {
        self.ready.clone()
    }

    /// Tells the operator that its clock jumped (a machine that slept, a test): it looks again what is due.
    pub async fn look(&self) {
        let _ended = self.asks.send(Ask::Look).await;
    }

    /// What `POST /operator/v1/demand` does, for callers in the same process. None: repeat it later.
    pub async fn demand(&self, report: DemandReport) -> Option<DemandAnswer> {
        if !*self.leads.borrow() {
            return None;
        }
        let (answer, answered) = oneshot::channel();
        self.asks.try_send(Ask::Demand(report, Instant::now(), answer)).ok()?;
        tokio::time::timeout(ANSWER_MAX, answered).await.ok()?.ok()
    }

    /// What `POST /operator/v1/place` does. None: repeat it later.
    pub async fn place(&self, place: Place) -> Option<Result<(), String>> {
        if !*self.leads.borrow() {
            return None;
        }
        let (answer, answered) = oneshot::channel();
        self.asks.try_send(Ask::Place(place, answer)).ok()?;
        tokio::time::timeout(ANSWER_MAX, answered).await.ok()?.ok()
    }

    /// What `GET /operator/v1/explain/…` does. None: there is no such model.
    pub async fn explain(&self, model: ModelName) -> Option<Explanation> {
        let (answer, answered) = oneshot::channel();
        self.asks.send(Ask::Explain(model, answer)).await.ok()?;
        tokio::time::timeout(ANSWER_MAX, answered).await.ok()?.ok()?
    }
}

async fn demand(State(handle): State<Handle>, Json(report): Json<DemandReport>) -> Response {
    match handle.demand(report).await {
        Some(answer) => Json(answer).into_response(),
        None => again(&handle),
    }
}

async fn place(State(handle): State<Handle>, Json(place): Json<Place>) -> Response {
    match handle.place(place).await {
        Some(Ok(())) => Json(serde_json::json!({})).into_response(),
        Some(Err(message)) => {
            (StatusCode::CONFLICT, Json(serde_json::json!({ "message": message }))).into_response()
        }
        None => again(&handle),
    }
}

/// Why it should be asked again. Who does not lead closes the connection: behind one address are several operators, and a
/// connection that was kept would lead here for ever.
fn again(handle: &Handle) -> Response {
    let (name, value, why) = if *handle.leads.borrow() {
        (header::RETRY_AFTER, "1", "the operator is behind: repeat it\n")
    } else {
        (header::CONNECTION, "close", "this operator does not lead: repeat it\n")
    };
    (StatusCode::SERVICE_UNAVAILABLE, [(name, value)], why).into_response()
}

async fn explain(State(handle): State<Handle>, Path((namespace, name)): Path<(String, String)>) -> Response {
    let model = match ModelName::new(&namespace, &name) {
        Ok(model) => model,
        Err(error) => return (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
    };
    let why = format!("there is no Model {model}; `pilotlight get models` lists those that there are");
    match handle.explain(model).await {
        Some(explanation) => Json(explanation).into_response(),
        None => (StatusCode::NOT_FOUND, Json(serde_json::json!({ "message": why }))).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use axum::http::Request;
    use tower::ServiceExt as _;

    use super::*;

    async fn asked(leads: bool) -> Response {
        let (asks, nobody) = mpsc::channel(1);
        drop(nobody);
        let (_leads, led) = watch::channel(leads);
        let (_ready, ready) = watch::channel(Readiness::Ready);
        let request = Request::post("/operator/v1/demand").header(header::CONTENT_TYPE, "application/json");
        let request = request.body(Body::from(r#"{"router":"r","models":[]}"#)).unwrap();
        Handle { asks, leads: led, ready }.routes().oneshot(request).await.unwrap()
    }

    #[tokio::test]
    async fn who_does_not_lead_closes_the_connection_and_who_is_behind_keeps_it() {
        let follower = asked(false).await;
        assert_eq!(follower.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(follower.headers()[header::CONNECTION], "close");
        let leader = asked(true).await;
        assert_eq!(leader.status(), StatusCode::SERVICE_UNAVAILABLE);
        assert!(leader.headers().get(header::CONNECTION).is_none());
        assert_eq!(leader.headers()[header::RETRY_AFTER], "1");
    }
}
