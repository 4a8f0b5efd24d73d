//! Why a session is not served, as its last event or as the answer to a request.

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use pilotlight_domain::session::{FailureCode, Retry, SessionEvent};

/// Ready to be said.
#[derive(Clone, Debug)]
pub(super) struct Refusal {
    pub(super) code: FailureCode,
    message: String,
    retry: Retry,
}

impl Refusal {
    pub(super) fn new(code: FailureCode, message: impl Into<String>, retry: Retry) -> Self {
        Refusal { code, message: message.into(), retry }
    }

    pub(super) fn bad(message: impl Into<String>) -> Self {
        Refusal::new(FailureCode::BadRequest, message, Retry::No)
    }

    pub(super) fn draining() -> Self {
        Refusal::new(FailureCode::Draining, "the replica is going away; another one serves", Retry::Elsewhere)
    }

    pub(super) fn worker_lost() -> Self {
        let message = "the worker died; its weights are still in memory";
        Refusal::new(FailureCode::WorkerLost, message, Retry::Elsewhere)
    }

    pub(super) fn event(self) -> SessionEvent {
        SessionEvent::Failed { code: self.code, message: self.message, retry: self.retry }
    }

    pub(super) fn into_response(self, status: StatusCode) -> Response {
        (status, axum::Json(self.event())).into_response()
    }
}
