//! Server-side apply of metadata: who gave which label, annotation, finalizer and owner reference.
//!
//! What a manager gave before and gives no longer goes away, unless another manager gave it too. The record is
//! Kubernetes' `managedFields`, so that its clients can read it, but only of these four lists: a spec belongs as a
//! whole to whoever applied it last. That is the simplification against a real API server, where a spec is merged
//! field by field; it makes no difference while each spec has one writer, which is how all programs here write.

use serde_json::{Map, Value, json};

/// How an item of a list is called.
type KeyOf = fn(&Value) -> Option<&str>;
/// The lists of the metadata that are merged.
const LISTS: [(&str, KeyOf); 2] =
    [("finalizers", Value::as_str), ("ownerReferences", |item| item["uid"].as_str())];
const MAPS: [&str; 2] = ["labels", "annotations"];

/// Merges what `manager` gives into the metadata that is there, and notes it in `managedFields`.
pub(super) fn apply(before: &Value, given: &Value, manager: &str, api_version: &str, now: &str) -> Value {
    let mut merged = before.clone();
    let mut fields = Map::new();
    for name in MAPS {
        let mut entries = before[name].as_object().cloned().unwrap_or_default();
        let gives = given[name].as_object().cloned().unwrap_or_default();
        entries.retain(|key, _| gives.contains_key(key) || !only_owned_by(before, manager, name, key));
        fields.insert(format!("f:{name}"), gives.keys().map(|key| (format!("f:{key}"), json!({}))).collect());
        entries.extend(gives);
        merged[name] = entries.into();
    }
    for (name, key_of) in LISTS {
        let gives = given[name].as_array().cloned().unwrap_or_default();
        let given_keys: Vec<&str> = gives.iter().filter_map(key_of).collect();
        let mut items = before[name].as_array().cloned().unwrap_or_default();
        items.retain(|item| {
            let key = key_of(item).unwrap_or_default();
            !given_keys.contains(&key) && !only_owned_by(before, manager, name, key)
        });
        fields.insert(
            format!("f:{name}"),
            given_keys.iter().map(|key| (format!("f:{key}"), json!({}))).collect(),
        );
        items.extend(gives);
        // The order of what stays is the order it had.
        let place = |item: &Value| {
            let old = before[name].as_array().into_iter().flatten();
            old.clone().position(|each| key_of(each) == key_of(item)).unwrap_or(usize::MAX)
        };
        items.sort_by_key(place);
        merged[name] = items.into();
    }
    note(&mut merged, manager, api_version, now, &json!({ "f:metadata": fields }));
    merged
}

fn note(meta: &mut Value, manager: &str, api_version: &str, now: &str, fields: &Value) {
    let mut entries = meta["managedFields"].as_array().cloned().unwrap_or_default();
    match entries.iter_mut().find(|entry| entry["manager"] == manager) {
        Some(entry) if entry["fieldsV1"] == *fields => {}
        Some(entry) => {
            entry["time"] = now.into();
            entry["fieldsV1"] = fields.clone();
        }
        None => entries.push(json!({
            "manager": manager, "operation": "Apply", "apiVersion": api_version, "time": now,
            "fieldsType": "FieldsV1", "fieldsV1": fields,
        })),
    }
    meta["managedFields"] = entries.into();
}

fn only_owned_by(meta: &Value, manager: &str, list: &str, key: &str) -> bool {
    let owners = meta["managedFields"].as_array().into_iter().flatten().filter(|entry| {
        entry["fieldsV1"]["f:metadata"][format!("f:{list}")].get(format!("f:{key}")).is_some()
    });
    let mut names = owners.map(|entry| entry["manager"].as_str().unwrap_or_default());
    names.next() == Some(manager) && names.next().is_none()
}

/// JSON merge patch, RFC 7386.
pub(super) fn merge_patch(target: &mut Value, patch: Value) {
    let Value::Object(fields) = patch else {
        *target = patch;
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    let Some(into) = target.as_object_mut() else { return };
    for (key, value) in fields {
        if value.is_null() {
            into.shift_remove(&key);
        } else {
            merge_patch(into.entry(key).or_insert(Value::Null), value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(before: &Value, given: &Value, manager: &str) -> Value {
        apply(before, given, manager, "v1", "now")
    }

    #[test]
    fn a_manager_takes_away_only_what_it_alone_gave() {
        let by_user = json!({ "labels": { "team": "a" }, "finalizers": ["user"] });
        let one = step(&by_user, &json!({ "labels": { "x": "1", "y": "1" }, "finalizers": ["op"] }), "op");
        assert_eq!(one["labels"], json!({ "team": "a", "x": "1", "y": "1" }));
        assert_eq!(one["finalizers"], json!(["user", "op"]));
        let two = step(&one, &json!({ "labels": { "y": "1" } }), "other");
        let three = step(&two, &json!({ "labels": {} }), "op");
        assert_eq!(three["labels"], json!({ "team": "a", "y": "1" }));
        assert_eq!(three["finalizers"], json!(["user"]));
    }

    #[test]
    fn the_same_again_changes_nothing() {
        let given =
            json!({ "labels": { "a": "1" }, "finalizers": ["f"], "ownerReferences": [{ "uid": "u" }] });
        let once = apply(&json!({}), &given, "op", "v1", "then");
        assert_eq!(apply(&once, &given, "op", "v1", "later"), once);
    }

    #[test]
    fn merge_patch_follows_its_rfc() {
        for (target, patch, expect) in [
            (json!({"a": "b"}), json!({"a": "c"}), json!({"a": "c"})),
            (json!({"a": "b", "b": "c"}), json!({"a": null}), json!({"b": "c"})),
            (json!({"a": ["b"]}), json!({"a": "c"}), json!({"a": "c"})),
            (json!({"a": {"b": "c"}}), json!({"a": {"b": "d", "c": null}}), json!({"a": {"b": "d"}})),
            (json!({"a": [1]}), json!({"a": [2, null]}), json!({"a": [2, null]})),
            (json!(["a"]), json!({"a": 1}), json!({"a": 1})),
            (json!({}), json!({"a": {"bb": {"ccc": null}}}), json!({"a": {"bb": {}}})),
        ] {
            let mut merged = target;
            merge_patch(&mut merged, patch);
            assert_eq!(merged, expect);
        }
    }
}
