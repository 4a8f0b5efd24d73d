//! The shape of an object: its outside, its body and its metadata, and the checks on them.

use std::collections::BTreeMap;

use pilotlight_api::{schema, validate};
use pilotlight_domain::Timestamp;
use serde_json::{Map, Value, json};

use crate::{FieldError, Kind, ObjectRef, StoreError};

/// Checks and completes the outside of an object: the right kind, a namespace where there are some, no nulls.
pub(super) fn envelope(key: &ObjectRef, object: &mut Value) -> Result<(), StoreError> {
    let Some(all) = object.as_object_mut() else {
        return Err(StoreError::BadRequest { message: format!("a {} must be an object", key.kind) });
    };
    for (field, right) in [("apiVersion", key.kind.api_version()), ("kind", key.kind.name())] {
        match all.get(field) {
            Some(given) if given != right => {
                let message = format!("`{field}` is {given}, but \"{right}\" is written to here");
                return Err(StoreError::BadRequest { message });
            }
            _ => all.insert(field.into(), right.into()),
        };
    }
    // Mistakes that dropping nulls would hide: a null where a value is needed.
    if key.kind.has_status() {
        let mut causes = schema::mistakes(key.kind.name(), object);
        causes.retain(|cause| cause.message.ends_with("not null") && cause.field.starts_with("spec"));
        if !causes.is_empty() {
            return Err(StoreError::Invalid { object: key.to_string(), causes });
        }
    }
    drop_nulls(object);
    let Some(meta) = object.get_mut("metadata").and_then(Value::as_object_mut) else {
        return Err(invalid(key, "metadata", "required"));
    };
    meta.retain(|_, value| !is_empty(value));
    if key.kind.namespaced() {
        meta.insert("namespace".into(), key.namespace.clone().into());
    } else {
        meta.shift_remove("namespace");
    }
    Ok(())
}

/// Types and rules.
pub(super) fn check(key: &ObjectRef, object: &Value) -> Result<(), StoreError> {
    use k8s_openapi::api::{coordination::v1::Lease, core::v1::Event, core::v1::Node};
    use serde::Deserialize as _;
    let mut causes = validate::object(key.kind.name(), object);
    let misread = match key.kind {
        Kind::Lease => Lease::deserialize(object).err(),
        Kind::Event => Event::deserialize(object).err(),
        Kind::Node => Node::deserialize(object).err(),
        Kind::Model | Kind::ModelReplica | Kind::ModelNode | Kind::Secret => None,
    };
    causes.extend(misread.map(|error| FieldError::new("", error.to_string())));
    if causes.is_empty() { Ok(()) } else { Err(StoreError::Invalid { object: key.to_string(), causes }) }
}

pub(super) fn preconditions(key: &ObjectRef, before: &Value, given: &Value) -> Result<(), StoreError> {
    for (field, what) in [("uid", "it is another object of that name"), ("resourceVersion", "read it again")]
    {
        let (wanted, found) = (&given[field], &before["metadata"][field]);
        if wanted.as_str().is_some_and(|wanted| !wanted.is_empty()) && wanted != found {
            let message = format!("{field} {wanted} was given, but it is {found}; {what}");
            return Err(StoreError::Conflict { object: key.to_string(), message });
        }
    }
    Ok(())
}

pub(super) fn invalid(key: &ObjectRef, field: &str, message: &str) -> StoreError {
    StoreError::Invalid { object: key.to_string(), causes: vec![FieldError::new(field, message)] }
}

pub(super) fn is_body(key: &ObjectRef, field: &str) -> bool {
    let apart = field == "status" && key.kind.has_status();
    !apart && !matches!(field, "apiVersion" | "kind" | "metadata")
}

pub(super) fn body<'a>(key: &ObjectRef, object: &'a Value) -> BTreeMap<&'a str, &'a Value> {
    let all = object.as_object().into_iter().flatten();
    all.filter(|(field, _)| is_body(key, field)).map(|(field, value)| (field.as_str(), value)).collect()
}

pub(super) fn has_body(key: &ObjectRef, object: &Value) -> bool {
    object.as_object().is_some_and(|all| all.keys().any(|field| is_body(key, field)))
}

pub(super) fn copy_body(key: &ObjectRef, from: &Value, into: &mut Value) {
    for (field, value) in body(key, from) {
        into[field] = value.clone();
    }
}

pub(super) fn keep_status(key: &ObjectRef, before: &Value, object: &mut Value) {
    if key.kind.has_status() {
        match &before["status"] {
            Value::Null => drop(fields(object).shift_remove("status")),
            status => object["status"] = status.clone(),
        }
    }
}

pub(super) fn owners(object: &Value) -> impl Iterator<Item = &Value> {
    object["metadata"]["ownerReferences"].as_array().into_iter().flatten()
}

/// The fields of what is known to be an object; an empty one takes the place of anything else.
pub(super) fn fields(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = json!({});
    }
    value.as_object_mut().expect("it was made an object just now")
}

pub(super) fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

pub(super) fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(drop_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

pub(super) fn json_of(key: &ObjectRef, object: &Value) -> Result<Vec<u8>, StoreError> {
    serde_json::to_vec(object)
        .map_err(|error| StoreError::Decode { what: key.to_string(), message: error.to_string() })
}

pub(super) fn version_of(object: &Value) -> u64 {
    object["metadata"]["resourceVersion"].as_str().and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// As Kubernetes writes times in metadata: whole seconds.
pub(super) fn seconds(time: Timestamp) -> String {
    let seconds = i64::try_from(time.as_micros() / 1_000_000).unwrap_or(i64::MAX);
    jiff::Timestamp::from_second(seconds).map(|time| time.to_string()).unwrap_or_default()
}

/// The version makes it unique in this store, the random half among stores.
pub(super) fn uid(version: u64) -> String {
    let random = fastrand::u64(..);
    let (high, mid) = (version >> 16 & 0xffff_ffff, version & 0xffff);
    let (a, b, c) = (random & 0xfff, random >> 12 & 0x3fff, random >> 16);
    format!("{high:08x}-{mid:04x}-4{a:03x}-{:04x}-{c:012x}", 0x8000 | b)
}
