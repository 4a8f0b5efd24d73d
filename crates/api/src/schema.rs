//! Strict reading of untrusted objects: every unknown field and every wrong type, each with its path.
//!
//! The schemas are those of the CRDs, generated from the Rust types, so that an object is refused here for what a real
//! API server would refuse it for. Unlike serde this finds all mistakes, not only the first, and says where.
//!
//! It deliberately does **not** fill in defaults, and reads only the part of OpenAPI that the generated schemas use.

use std::sync::OnceLock;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::{Map, Value, json};

use crate::crds;
use crate::validate::FieldError;

/// At most so many mistakes are told at once: more is noise.
const MISTAKES_MAX: usize = 16;
/// Deeper than any of our types; bounds the recursion on what comes from outside.
const DEPTH_MAX: usize = 32;

/// The mistakes in an object of one of our kinds: its shape, its metadata and its spec strictly, of its status the
/// types only (an agent of another version may say more). Empty for kinds that are not ours.
pub fn mistakes(kind: &str, object: &Value) -> Vec<FieldError> {
    let mut found = Vec::new();
    if let Some(schema) = of(kind) {
        walk(schema, object, "", Unknown::Refused, 0, &mut found);
    }
    found
}

/// The mistakes in `metadata`, of any kind.
pub fn metadata_mistakes(object: &Value) -> Vec<FieldError> {
    let mut found = Vec::new();
    match object.get("metadata") {
        Some(meta) => walk(metadata(), meta, "metadata", Unknown::Refused, 0, &mut found),
        None => found.push(FieldError::new("metadata", "required")),
    }
    found
}

/// The OpenAPI schema of one of our kinds, metadata included.
pub fn of(kind: &str) -> Option<&'static Value> {
    static SCHEMAS: OnceLock<Map<String, Value>> = OnceLock::new();
    let schemas = SCHEMAS.get_or_init(|| {
        let whole = |crd: &CustomResourceDefinition| {
            let mut schema = crd
                .spec
                .versions
                .first()
                .and_then(|version| {
                    serde_json::to_value(version.schema.as_ref()?.open_api_v3_schema.as_ref()?).ok()
                })
                .unwrap_or_default();
            if let Some(properties) = schema["properties"].as_object_mut() {
                properties.insert("apiVersion".into(), json!({ "type": "string" }));
                properties.insert("kind".into(), json!({ "type": "string" }));
                properties.insert("metadata".into(), metadata().clone());
            }
            (crd.spec.names.kind.clone(), schema)
        };
        crds::all().iter().map(whole).collect()
    });
    schemas.get(kind)
}

fn metadata() -> &'static Value {
    static METADATA: OnceLock<Value> = OnceLock::new();
    METADATA.get_or_init(|| {
        let (text, number) = (json!({ "type": "string" }), json!({ "type": "integer" }));
        let time = json!({ "type": "string", "nullable": true });
        let texts = json!({ "type": "object", "additionalProperties": text, "nullable": true });
        json!({ "type": "object", "properties": {
            "name": text, "generateName": text, "namespace": text, "uid": text, "resourceVersion": text,
            "selfLink": text, "generation": number, "deletionGracePeriodSeconds": number,
            "creationTimestamp": time, "deletionTimestamp": time, "labels": texts, "annotations": texts,
            "finalizers": { "type": "array", "items": text, "nullable": true },
            "ownerReferences": { "type": "array", "nullable": true, "items": { "type": "object",
                "required": ["apiVersion", "kind", "name", "uid"],
                "properties": { "apiVersion": text, "kind": text, "name": text, "uid": text,
                    "controller": { "type": "boolean" }, "blockOwnerDeletion": { "type": "boolean" } } } },
            "managedFields": { "type": "array", "nullable": true },
        } })
    })
}

#[derive(Clone, Copy, PartialEq)]
enum Unknown {
    Refused,
    Ignored,
}

fn walk(
    schema: &Value,
    value: &Value,
    path: &str,
    unknown: Unknown,
    depth: usize,
    found: &mut Vec<FieldError>,
) {
    if found.len() >= MISTAKES_MAX {
        return;
    }
    if depth > DEPTH_MAX {
        found.push(FieldError::new(path, "nested too deeply"));
        return;
    }
    if value.is_null() && schema["nullable"] == true {
        return;
    }
    let expected = schema["type"].as_str().unwrap_or_default();
    let right = match expected {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|n| n.fract() == 0.0),
        "number" => value.is_number(),
        _ => true,
    };
    if !right {
        found.push(FieldError::new(path, format!("must be {}, not {}", article(expected), shown(value))));
        return;
    }
    match value {
        Value::Object(fields) => walk_object(schema, fields, path, unknown, depth, found),
        Value::Array(items) if schema["items"].is_object() => {
            if let Some(most) = above(schema, "maxItems", items.len()) {
                return found.push(FieldError::new(path, format!("must have at most {most} items")));
            }
            for (index, item) in items.iter().enumerate() {
                walk(&schema["items"], item, &format!("{path}[{index}]"), unknown, depth + 1, found);
            }
        }
        Value::String(text) => {
            if let Some(most) = above(schema, "maxLength", text.chars().count()) {
                return found.push(FieldError::new(path, format!("may not be more than {most} bytes")));
            }
            let allowed: Vec<&str> =
                schema["enum"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
            if !allowed.is_empty() && !allowed.contains(&text.as_str()) {
                found.push(FieldError::new(path, format!("`{text}` is not one of {}", allowed.join(", "))));
            }
        }
        Value::Number(number) => walk_number(schema, number.as_f64().unwrap_or(f64::NAN), path, found),
        _ => {}
    }
}

fn walk_object(
    schema: &Value,
    fields: &Map<String, Value>,
    path: &str,
    unknown: Unknown,
    depth: usize,
    found: &mut Vec<FieldError>,
) {
    let nothing = Map::new();
    let properties = schema["properties"].as_object().unwrap_or(&nothing);
    if let Some(most) = above(schema, "maxProperties", fields.len()) {
        return found.push(FieldError::new(path, format!("must have at most {most} items")));
    }
    let at = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
    for required in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if !fields.contains_key(required) {
            found.push(FieldError::new(at(required), "required"));
        }
    }
    for (key, value) in fields {
        let below = if path.is_empty() && key == "status" { Unknown::Ignored } else { unknown };
        match properties.get(key) {
            Some(property) => walk(property, value, &at(key), below, depth + 1, found),
            None if schema["additionalProperties"].is_object() => {
                walk(&schema["additionalProperties"], value, &at(key), below, depth + 1, found);
            }
            None if unknown == Unknown::Ignored
                || (properties.is_empty() && schema["properties"].is_null()) => {}
            None => found.push(FieldError::new(at(key), unknown_field(key, properties))),
        }
    }
}

fn walk_number(schema: &Value, number: f64, path: &str, found: &mut Vec<FieldError>) {
    if let Some(minimum) = schema["minimum"].as_f64().filter(|minimum| number < *minimum) {
        found.push(FieldError::new(path, format!("must be at least {minimum}, not {number}")));
    } else if schema["format"] == "int32" && !(f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&number) {
        found.push(FieldError::new(path, format!("{number} does not fit in 32 bits")));
    }
}

/// The bound, if so many are above it. What is said of it are an API server's words.
fn above(schema: &Value, bound: &str, count: usize) -> Option<u64> {
    schema[bound].as_u64().filter(|&most| u64::try_from(count).is_ok_and(|count| count > most))
}

fn unknown_field(key: &str, properties: &Map<String, Value>) -> String {
    let near = properties.keys().map(|known| (distance(key, known), known)).min();
    match near {
        // Two slips in a long name, one in a short one.
        Some((slips, known)) if slips <= (key.len() / 4).clamp(1, 3) => {
            format!("unknown field, did you mean `{known}`?")
        }
        _ => {
            let known: Vec<&str> = properties.keys().map(String::as_str).collect();
            format!("unknown field; known here: {}", known.join(", "))
        }
    }
}

/// Levenshtein's, ignoring case and punctuation, so that `served_name` is near `servedName`.
fn distance(a: &str, b: &str) -> usize {
    let letters = |text: &str| -> Vec<char> {
        text.chars().take(64).filter(|c| c.is_alphanumeric()).flat_map(char::to_lowercase).collect()
    };
    let (a, b) = (letters(a), letters(b));
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let change = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

fn article(kind: &str) -> &str {
    match kind {
        "object" => "an object",
        "array" => "a list",
        "string" => "a string",
        "boolean" => "true or false",
        "integer" => "a whole number",
        _ => "a number",
    }
}

fn shown(value: &Value) -> String {
    match value {
        Value::Object(_) => "an object".into(),
        Value::Array(_) => "a list".into(),
        Value::String(text) => format!("the string `{}`", text.chars().take(40).collect::<String>()),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Model;

    fn model(spec: &Value) -> Value {
        json!({ "apiVersion": "pilotlight.dev/v1alpha1", "kind": "Model", "metadata": { "name": "a" }, "spec": spec })
    }

    fn check(object: &Value, expect: &[&str]) {
        let found: Vec<String> = mistakes("Model", object).iter().map(ToString::to_string).collect();
        assert_eq!(found, expect);
    }

    #[test]
    fn a_name_and_a_source_are_enough() {
        check(&model(&json!({ "source": { "uri": "file:///m" } })), &[]);
        check(
            &model(
                &json!({ "source": { "uri": "file:///m" }, "replicas": null, "scaling": { "target": null } }),
            ),
            &[],
        );
    }

    #[test]
    fn every_mistake_is_told_with_its_path() {
        check(
            &model(&json!({
                "source": { "ur": "file:///m", "include": ["*.json", 3] },
                "scaling": { "min_replica": 1, "maxReplicas": "3", "metric": "Luck" },
                "resources": { "placement": { "nodeSelector": { "zone": 1 } } },
                "priority": 3_000_000_000_u64,
                "wishes": [],
            })),
            &[
                "spec.source.uri: required",
                "spec.source.ur: unknown field, did you mean `uri`?",
                "spec.source.include[1]: must be a string, not 3",
                "spec.scaling.min_replica: unknown field, did you mean `minReplicas`?",
                "spec.scaling.maxReplicas: must be a whole number, not the string `3`",
                "spec.scaling.metric: `Luck` is not one of Concurrency",
                "spec.resources.placement.nodeSelector.zone: must be a string, not 1",
                "spec.priority: 3000000000 does not fit in 32 bits",
                "spec.wishes: unknown field; known here: access, aliases, coldStart, drain, engine, migration, \
                 priority, replicas, residency, resources, routing, scaling, servedName, source, suspend, tasks",
            ],
        );
        check(
            &json!({ "metadata": { "name": "a" }, "specs": {} }),
            &["spec: required", "specs: unknown field, did you mean `spec`?"],
        );
        check(&json!([]), &["must be an object, not a list"]);
    }

    #[test]
    fn metadata_is_strict_and_a_status_is_not() {
        let mut object = model(&json!({ "source": { "uri": "file:///m" } }));
        object["status"] = json!({ "phase": "Idle", "invented": 1 });
        check(&object, &[]);
        object["status"]["phase"] = json!("Sleeping");
        object["metadata"]["label"] = json!({});
        object["metadata"]["annotations"] = json!({ "a": 1 });
        let found = mistakes("Model", &object);
        let fields: Vec<&str> = found.iter().map(|each| each.field.as_str()).collect();
        assert_eq!(fields, ["metadata.label", "metadata.annotations.a", "status.phase"]);
    }

    #[test]
    fn what_serde_refuses_is_refused_here_first() {
        let deep = (0..200).fold(json!({}), |inner, _| json!({ "a": inner }));
        assert!(!mistakes("Model", &model(&deep)).is_empty());
        for spec in [
            json!({ "source": { "uri": 1 } }),
            json!({ "source": { "uri": "hf://a" }, "tasks": ["Sing"] }),
            json!({ "source": { "uri": "hf://a" }, "coldStart": { "cpu": { "mode": true } } }),
            json!({ "source": { "uri": "hf://a" }, "replicas": 1.5 }),
        ] {
            let object = model(&spec);
            assert!(serde_json::from_value::<Model>(object.clone()).is_err(), "{object}");
            assert!(!mistakes("Model", &object).is_empty(), "{object}");
        }
    }
}
