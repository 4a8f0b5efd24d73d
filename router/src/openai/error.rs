//! The error object, and the closed table of errors that a client can meet.
//!
//! Every answer that is not a success is `{"error":{"message","type","param","code"}}`: as a body before the first
//! byte, as the last SSE event after it.

use std::fmt;

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, Response, StatusCode, header};
use axum::response::IntoResponse;
use serde::Serialize;

/// Why a request was dropped without being served: the value of `x-pilotlight-dropped-reason` and a metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Dropped {
    QueueFull,
    QueueBytes,
    HoldExpired,
    ClientGone,
    Draining,
    Suspended,
    /// It made room for a request of higher priority.
    Shed,
    /// The Model's policy, or the caller, wants no waiting.
    Rejected,
    /// The load failed, or nothing fits.
    NoCapacity,
}

impl Dropped {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Dropped::QueueFull => "queue-full",
            Dropped::QueueBytes => "queue-bytes",
            Dropped::HoldExpired => "hold-expired",
            Dropped::ClientGone => "client-gone",
            Dropped::Draining => "draining",
            Dropped::Suspended => "suspended",
            Dropped::Shed => "shed",
            Dropped::Rejected => "rejected",
            Dropped::NoCapacity => "no-capacity",
        }
    }
}

/// The `code` of an error object: code matches on it, people read the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Code {
    BadRequest,
    ContextLengthExceeded,
    InvalidApiKey,
    ModelNotAllowed,
    ModelNotFound,
    TaskUnsupported,
    NotFound,
    MethodNotAllowed,
    BodyTimeout,
    BodyTooLarge,
    RateLimitExceeded,
    QueueFull,
    HoldExpired,
    Draining,
    Suspended,
    NoCapacity,
    UpstreamFailed,
    Timeout,
}

impl Code {
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Code::BadRequest => "bad_request",
            Code::ContextLengthExceeded => "context_length_exceeded",
            Code::InvalidApiKey => "invalid_api_key",
            Code::ModelNotAllowed => "model_not_allowed",
            Code::ModelNotFound => "model_not_found",
            Code::TaskUnsupported => "task_unsupported",
            Code::NotFound => "not_found",
            Code::MethodNotAllowed => "method_not_allowed",
            Code::BodyTimeout => "body_timeout",
            Code::BodyTooLarge => "body_too_large",
            Code::RateLimitExceeded => "rate_limit_exceeded",
            Code::QueueFull => "queue_full",
            Code::HoldExpired => "hold_expired",
            Code::Draining => "draining",
            Code::Suspended => "suspended",
            Code::NoCapacity => "no_capacity",
            Code::UpstreamFailed => "upstream_failed",
            Code::Timeout => "timeout",
        }
    }

    pub(crate) const fn status(self) -> StatusCode {
        match self {
            Code::BadRequest | Code::ContextLengthExceeded => StatusCode::BAD_REQUEST,
            Code::InvalidApiKey => StatusCode::UNAUTHORIZED,
            Code::ModelNotAllowed => StatusCode::FORBIDDEN,
            Code::ModelNotFound | Code::TaskUnsupported | Code::NotFound => StatusCode::NOT_FOUND,
            Code::MethodNotAllowed => StatusCode::METHOD_NOT_ALLOWED,
            Code::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
            Code::BodyTooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Code::RateLimitExceeded => StatusCode::TOO_MANY_REQUESTS,
            Code::QueueFull | Code::HoldExpired | Code::Draining | Code::Suspended | Code::NoCapacity => {
                StatusCode::SERVICE_UNAVAILABLE
            }
            Code::UpstreamFailed => StatusCode::BAD_GATEWAY,
            Code::Timeout => StatusCode::GATEWAY_TIMEOUT,
        }
    }

    /// The `type`: whose fault it is.
    const fn kind(self) -> &'static str {
        match self {
            Code::InvalidApiKey => "authentication_error",
            Code::ModelNotAllowed => "permission_error",
            Code::RateLimitExceeded => "rate_limit_error",
            _ if self.status().as_u16() < 500 => "invalid_request_error",
            _ => "server_error",
        }
    }
}

/// One error as the client sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(crate) code: Code,
    pub(crate) message: String,
    /// The parameter at fault, as a path: `messages[2].content`.
    pub(crate) param: Option<String>,
    /// Seconds: 1 to 60 where we lack capacity, until it frees where the caller is over a limit.
    pub(crate) retry_after: Option<u32>,
    pub(crate) dropped: Option<Dropped>,
    /// The methods that would do, for a 405.
    pub(crate) allow: Option<&'static str>,
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code.as_str(), self.message)
    }
}

#[derive(Serialize)]
struct Wire<'a> {
    error: WireError<'a>,
}

#[derive(Serialize)]
struct WireError<'a> {
    message: &'a str,
    r#type: &'static str,
    param: Option<&'a str>,
    code: &'static str,
}

pub(crate) const DROPPED_REASON: HeaderName = HeaderName::from_static("x-pilotlight-dropped-reason");

impl ApiError {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        let retry_after = (code == Code::UpstreamFailed).then_some(1);
        ApiError { code, message: message.into(), param: None, retry_after, dropped: None, allow: None }
    }

    /// A 400 that names the parameter.
    pub(crate) fn bad(param: impl Into<String>, message: impl Into<String>) -> Self {
        ApiError { param: Some(param.into()), ..ApiError::new(Code::BadRequest, message) }
    }

    pub(crate) fn unknown_path(path: &str) -> Self {
        let path: String = path.chars().take(200).collect();
        ApiError::new(
            Code::NotFound,
            format!("no such path: {path}; try /v1/chat/completions, /v1/completions or /v1/models"),
        )
    }

    pub(crate) fn unknown_model(name: &str) -> Self {
        let name: String = name.chars().take(200).collect();
        ApiError {
            param: Some("model".into()),
            ..ApiError::new(
                Code::ModelNotFound,
                format!("the model `{name}` does not exist; GET /v1/models lists those that do"),
            )
        }
    }

    pub(crate) fn method_not_allowed(method: &str, allow: &'static str) -> Self {
        ApiError {
            allow: Some(allow),
            ..ApiError::new(Code::MethodNotAllowed, format!("{method} is not allowed here; use {allow}"))
        }
    }

    #[must_use]
    pub(crate) fn dropped(mut self, why: Dropped) -> Self {
        self.dropped = Some(why);
        self
    }

    /// Retry-After from an estimate in seconds: at least 1, at most 60, and up to a quarter later, so that those who
    /// were turned away together do not come back together. `dice` is in 0..1.
    #[must_use]
    pub(crate) fn retry_after(mut self, estimate_seconds: f64, dice: f64) -> Self {
        let jittered = estimate_seconds.max(0.0) * (1.0 + 0.25 * dice) + dice;
        self.retry_after = Some(jittered.ceil().clamp(1.0, 60.0) as u32);
        self
    }

    /// The error object as JSON.
    pub(crate) fn json(&self) -> Vec<u8> {
        let wire = Wire {
            error: WireError {
                message: &self.message,
                r#type: self.code.kind(),
                param: self.param.as_deref(),
                code: self.code.as_str(),
            },
        };
        serde_json::to_vec(&wire).unwrap_or_else(|_| {
            br#"{"error":{"message":"","type":"server_error","param":null,"code":"upstream_failed"}}"#
                .to_vec()
        })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response<Body> {
        let mut response = Response::new(Body::from(self.json()));
        *response.status_mut() = self.code.status();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.code == Code::InvalidApiKey {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(why) = self.dropped {
            headers.insert(DROPPED_REASON, HeaderValue::from_static(why.as_str()));
        }
        if let Some(methods) = self.allow {
            headers.insert(header::ALLOW, HeaderValue::from_static(methods));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_object_has_all_four_fields() {
        let error = ApiError::bad("messages[0]", "say \"hi\"");
        assert_eq!(
            String::from_utf8(error.json()).unwrap(),
            r#"{"error":{"message":"say \"hi\"","type":"invalid_request_error","param":"messages[0]","code":"bad_request"}}"#
        );
        let error = ApiError::new(Code::QueueFull, "full");
        assert!(String::from_utf8(error.json()).unwrap().contains(r#""type":"server_error","param":null"#));
    }

    #[test]
    fn retry_after_stays_between_one_second_and_a_minute() {
        for (estimate, dice, seconds) in [
            (0.0, 0.0, 1),
            (-3.0, 0.0, 1),
            (2.2, 0.0, 3),
            (10.0, 1.0, 14),
            (1e9, 0.5, 60),
            (f64::NAN, 0.0, 1),
        ] {
            let error = ApiError::new(Code::HoldExpired, "").retry_after(estimate, dice);
            assert_eq!(error.retry_after, Some(seconds), "{estimate} {dice}");
        }
    }
}
