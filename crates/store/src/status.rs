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
    if let Some(causes) = undeclared(&message) {
        return StoreError::Invalid { object, causes };
    }
    match (status["code"].as_u64().unwrap_or(0), reason.as_str()) {
        (404, "NotFound") | (_, "NotFound") => StoreError::NotFound { object },
        (_, "AlreadyExists") => StoreError::AlreadyExists { object },
        (409, _) => StoreError::Conflict { object, message },
        (410, _) => StoreError::Gone { message },
        (422, _) => {
            let causes: Vec<FieldError> =
                details["causes"].as_array().into_iter().flatten().filter_map(cause).collect();
            // That is another object of that name.
            if causes.iter().any(|cause| cause.field == "metadata.uid") {
                return StoreError::Conflict { object, message };
            }
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

/// One cause of a refusal. API servers say first what they were given; who wrote it knows.
fn cause(cause: &Value) -> Option<FieldError> {
    let field = cause["field"].as_str().filter(|field| *field != "<nil>").unwrap_or_default();
    let message = cause["message"].as_str().unwrap_or_default();
    // The scale subresource says again, of a path with a dot before it, what a rule says.
    if field.starts_with('.') || message.contains("some validation rules were not checked") {
        return None;
    }
    let said = message
        .strip_prefix("Too long: ")
        .or_else(|| message.strip_prefix("Too many: ").map(after_value))
        .or_else(|| message.strip_prefix("Invalid value: ").map(after_value))
        .unwrap_or(message);
    Some(FieldError::new(field, said))
}

/// What comes after a value and a colon, if there is one: a text as Go quotes it, else JSON.
fn after_value(text: &str) -> &str {
    let end = if let Some(quoted) = text.strip_prefix('"') {
        let mut escaped = false;
        let closes = |c: char| {
            let closes = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            closes
        };
        quoted.find(closes).map(|end| end + 2)
    } else {
        let mut values = serde_json::Deserializer::from_str(text).into_iter::<Value>();
        values.next().is_some_and(|value| value.is_ok()).then(|| values.byte_offset())
    };
    end.and_then(|end| text[end..].strip_prefix(": ")).unwrap_or(text)
}

/// Fields that the server's schema does not know, or knows as another type: strict decoding says so with 400, and
/// server-side apply, strangely, with 500.
fn undeclared(message: &str) -> Option<Vec<FieldError>> {
    if let Some((_, fields)) = message.split_once("strict decoding error: ") {
        let names = fields.split('"').skip(1).step_by(2);
        return Some(names.map(|name| FieldError::new(name, "unknown field")).collect());
    }
    let (_, told) = message.strip_prefix("failed to create typed patch object (")?.split_once("): ")?;
    let lines = told.strip_prefix("errors:\n").unwrap_or(told).lines();
    let split = |line: &str| {
        let (field, message) = line.trim().split_once(": ").unwrap_or(("", line.trim()));
        FieldError::new(field.trim_start_matches('.'), message)
    };
    Some(lines.map(split).collect())
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

    /// As a server of 1.36 said it.
    #[test]
    fn an_api_servers_refusals_name_the_field() {
        let said = |status: Value| from_status("Model default/a", &status).to_string();
        let causes = json!([
            { "field": "spec.source.uri", "message": "Invalid value: \"ftp://\\\"x\": scheme `ftp` is not supported" },
            { "field": "spec.scaling.target", "message": "Invalid value: 0: must be at least 1" },
            { "field": "spec.scaling", "message": "Invalid value: {\"a\":{\"b\":[1]}}: must be less" },
            { "field": "spec.aliases", "message": "Too many: 17: must have at most 16 items" },
            { "field": "spec.servedName", "message": "Too long: may not be more than 253 bytes" },
            { "field": "status.phase", "message": "Unsupported value: \"Sleeping\": supported values: \"Idle\"" },
            { "field": "<nil>", "message": "Invalid value: null: some validation rules were not checked because …" },
            { "field": ".spec.replicas", "message": "Invalid value: -1: should be a non-negative integer" },
            { "field": "spec.aliases[0]", "message": "Invalid value: \"a\\a\": must not have control characters" },
            { "field": "<nil>", "message": "Invalid value: `a` is not a model name" },
        ]);
        assert_eq!(
            said(
                json!({ "code": 422, "reason": "Invalid", "message": "…", "details": { "causes": causes } })
            ),
            "Model default/a is invalid: spec.source.uri: scheme `ftp` is not supported; \
             spec.scaling.target: must be at least 1; spec.scaling: must be less; \
             spec.aliases: must have at most 16 items; spec.servedName: may not be more than 253 bytes; \
             status.phase: Unsupported value: \"Sleeping\": supported values: \"Idle\"; \
             spec.aliases[0]: must not have control characters; `a` is not a model name"
        );
        let patch = "failed to create typed patch object (/; pilotlight.dev/v1alpha1, Kind=Model): ";
        assert_eq!(
            said(json!({ "code": 500, "message": format!("{patch}.spec.x: field not declared in schema") })),
            "Model default/a is invalid: spec.x: field not declared in schema"
        );
        assert_eq!(
            said(
                json!({ "code": 500, "message": format!("{patch}errors:\n  .spec.x: field\n  .spec.y: expected string") })
            ),
            "Model default/a is invalid: spec.x: field; spec.y: expected string"
        );
        let strict = "Model cannot be handled: strict decoding error: unknown field \"spec.x\", unknown field \"spec.y\"";
        assert_eq!(
            said(json!({ "code": 400, "reason": "BadRequest", "message": strict })),
            "Model default/a is invalid: spec.x: unknown field; spec.y: unknown field"
        );
    }
}
