//! Errors on the wire: [`StoreError`] as Kubernetes' `Status` object, and back.

use std::time::Duration;

use serde_json::{Value, json};

use crate::{FieldError, StoreError};

/// The HTTP code and the `Status` object for an error.
pub(crate) fn to_status(error: &StoreError) -> (u16, Value) {
    let (code, reason) = match error {
        StoreError::NotFound { .. } => (404, "NotFound"),
        StoreError::AlreadyExists { .. } => (409, "AlreadyExists"),
        StoreError::Conflict { .. } => (409, "Conflict"),
        StoreError::Invalid { .. } => (422, "Invalid"),
        StoreError::BadRequest { .. } => (400, "BadRequest"),
        StoreError::Gone { .. } => (410, "Expired"),
        StoreError::Forbidden { .. } => (403, "Forbidden"),
        StoreError::Timeout { .. } => (504, "Timeout"),
        StoreError::Unavailable { retry_after: Some(_), .. } => (429, "TooManyRequests"),
        StoreError::Unavailable { retry_after: None, .. } => (503, "ServiceUnavailable"),
        StoreError::Decode { .. } => (500, "InternalError"),
    };
    let mut status = status(code, reason, &error.to_string());
    // "Model default/a" in the words of Kubernetes' details, so that a client has it apart from the message.
    let named = match error {
        StoreError::NotFound { object }
        | StoreError::AlreadyExists { object }
        | StoreError::Conflict { object, .. }
        | StoreError::Invalid { object, .. } => object.split_once(' '),
        _ => None,
    };
    if let Some((kind, name)) = named {
        status["details"] = json!({ "kind": kind, "name": name });
    }
    match error {
        StoreError::Invalid { causes, .. } => {
            let causes: Vec<Value> = causes
                .iter()
                .map(|cause| {
                    json!({ "reason": "FieldValueInvalid", "message": cause.message, "field": cause.field })
                })
                .collect();
            status["details"]["causes"] = causes.into();
        }
        StoreError::Unavailable { retry_after: Some(after), .. } => {
            status["details"] = json!({ "retryAfterSeconds": after.as_secs() });
        }
        _ => {}
    }
    (code, status)
}

/// A `Status` of a failure.
pub(crate) fn status(code: u16, reason: &str, message: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "code": code, "reason": reason, "message": message,
    })
}

/// What a server's `Status` means; `object` is what was asked for.
pub(crate) fn from_status(object: &str, status: &Value) -> StoreError {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (reason, details) = (text(&status["reason"]), &status["details"]);
    let mut message = text(&status["message"]);
    if message.is_empty() {
        message = format!("the server answered {reason}");
    }
    let object = object.to_owned();
    match (status["code"].as_u64().unwrap_or(0), reason.as_str()) {
        (404, "NotFound") | (_, "NotFound") => StoreError::NotFound { object },
        (_, "AlreadyExists") => StoreError::AlreadyExists { object },
        (409, _) => StoreError::Conflict { object, message },
        (410, _) => StoreError::Gone { message },
        (422, _) => {
            let causes: Vec<FieldError> = details["causes"]
                .as_array()
                .into_iter()
                .flatten()
                .map(|cause| FieldError::new(text(&cause["field"]), text(&cause["message"])))
                .collect();
            let causes = if causes.is_empty() { vec![FieldError::new("", message)] } else { causes };
            StoreError::Invalid { object, causes }
        }
        (401 | 403, _) => StoreError::Forbidden { message },
        (code @ (429 | 500..=599), _) if code != 501 => StoreError::Unavailable {
            message,
            retry_after: details["retryAfterSeconds"].as_u64().map(Duration::from_secs),
        },
        (404, _) => StoreError::BadRequest {
            message: format!("{message}: the server does not know this path; are the CRDs installed?"),
        },
        _ => StoreError::BadRequest { message },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_survive_the_wire() {
        let object = || "Model default/a".to_owned();
        let message = || "why".to_owned();
        let errors = [
            StoreError::NotFound { object: object() },
            StoreError::AlreadyExists { object: object() },
            StoreError::Invalid { object: object(), causes: vec![FieldError::new("spec.source.uri", "bad")] },
            StoreError::BadRequest { message: message() },
            StoreError::Forbidden { message: message() },
            StoreError::Unavailable { message: message(), retry_after: Some(Duration::from_secs(3)) },
            StoreError::Unavailable { message: message(), retry_after: None },
        ];
        for error in errors {
            let (code, status) = to_status(&error);
            let back = from_status("Model default/a", &status);
            assert_eq!(status["code"], code);
            assert_eq!(std::mem::discriminant(&back), std::mem::discriminant(&error));
            assert_eq!(
                (back.verdict(), back.to_string().contains("why")),
                (error.verdict(), error.to_string().contains("why"))
            );
        }
        let gone = StoreError::Gone { message: message() };
        assert!(matches!(from_status("", &to_status(&gone).1), StoreError::Gone { .. }));
        let conflict = StoreError::Conflict { object: object(), message: message() };
        assert!(from_status("Model default/a", &to_status(&conflict).1).is_conflict());
        let unknown = json!({ "code": 500, "message": "etcdserver: leader changed" });
        assert_eq!(from_status("", &unknown).verdict(), crate::Verdict::Retry);
    }
}
