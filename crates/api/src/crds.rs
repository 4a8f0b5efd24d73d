//! The custom resource definitions: the schemas that the types give, with bounds, rules, columns and subresources.
//!
//! Everything has a bound, so that the API server can tell beforehand what a rule costs, and no object grows without
//! end. The chart installs what `cargo xtask crds` writes of them; the embedded store checks by the same schemas.
//!
//! It deliberately does **not** use `minimum` and its like for what people write: a rule says it in our words.

use std::sync::OnceLock;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt as _;
use serde_json::{Value, json};

use crate::columns::{self, Content};
use crate::{Model, ModelNode, ModelReplica, rules};

/// Longest text of a spec, unless said otherwise below: a Kubernetes name.
const SPEC_TEXT_MAX: u64 = 253;
/// Longest text of a status: what Kubernetes allows to a condition's message.
const STATUS_TEXT_MAX: u64 = 32_768;
/// Longest list of a spec, unless said otherwise below.
const SPEC_LIST_MAX: u64 = 32;
/// Longest list of a status: the residents of a node.
const STATUS_LIST_MAX: u64 = 1_000;
/// Most entries of a map.
const MAP_MAX: u64 = 64;

/// Bounds that differ: of texts in characters, of lists in items.
const BOUNDS: &[(&str, u64)] = &[
    ("spec.source.uri", 2048),
    ("spec.sourceUri", 2048),
    ("spec.source.digest", 71),
    ("spec.digest", 71),
    ("spec.reason", 1024),
    ("spec.aliases", 16),
    ("spec.tasks", 2),
    ("spec.scaling.schedules", 16),
    ("spec.migration.on", 5),
];

/// Our CRDs, in the order in which they are documented.
pub fn all() -> &'static [CustomResourceDefinition] {
    static CRDS: OnceLock<Vec<CustomResourceDefinition>> = OnceLock::new();
    CRDS.get_or_init(|| vec![whole(&Model::crd()), whole(&ModelReplica::crd()), whole(&ModelNode::crd())])
}

fn whole(derived: &CustomResourceDefinition) -> CustomResourceDefinition {
    let kind = derived.spec.names.kind.as_str();
    let mut crd = serde_json::to_value(derived).expect("a CRD is JSON");
    for version in crd["spec"]["versions"].as_array_mut().into_iter().flatten() {
        let schema = &mut version["schema"]["openAPIV3Schema"];
        bound(schema, "");
        for rule in rules::of(kind) {
            state(schema, &rule);
        }
        if kind == "Model" {
            // What people see before the operator has said anything.
            schema["properties"]["status"]["default"] = json!({ "phase": "Pending" });
        }
        version["additionalPrinterColumns"] = columns::of(kind).iter().filter_map(printed).collect();
        if kind == "Model" {
            version["subresources"]["scale"] = json!({
                "specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            });
        }
    }
    serde_json::from_value(crd).expect("it is a CRD still")
}

/// Gives every text, list and map below a bound, and makes formats and defaults those that API servers know.
fn bound(schema: &mut Value, path: &str) {
    let is_spec = !path.starts_with("status");
    let own = BOUNDS.iter().find(|(at, _)| *at == path).map(|(_, most)| *most);
    let pick = |spec: u64, status: u64| own.unwrap_or(if is_spec { spec } else { status });
    match schema["type"].as_str() {
        Some("string") if schema["enum"].is_null() => {
            schema["maxLength"] = pick(SPEC_TEXT_MAX, STATUS_TEXT_MAX).into();
        }
        Some("array") => {
            schema["maxItems"] = pick(SPEC_LIST_MAX, STATUS_LIST_MAX).into();
            bound(&mut schema["items"], &format!("{path}[]"));
        }
        Some("integer") if schema["format"].as_str().is_some_and(|format| format.starts_with('u')) => {
            schema["format"] = "int64".into();
        }
        _ => {}
    }
    if schema["additionalProperties"].is_object() {
        schema["maxProperties"] = MAP_MAX.into();
        bound(&mut schema["additionalProperties"], &format!("{path}[]"));
    }
    if !schema["default"].is_null() {
        drop_nulls(&mut schema["default"]);
    }
    for (key, property) in schema["properties"].as_object_mut().into_iter().flatten() {
        bound(property, &join(path, key));
    }
    // Looking a key up makes it.
    if let Some(fields) = schema.as_object_mut() {
        fields.retain(|_, value| !value.is_null());
    }
}

fn join(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

fn drop_nulls(value: &mut Value) {
    if let Some(fields) = value.as_object_mut() {
        fields.retain(|_, field| !field.is_null());
        fields.values_mut().for_each(drop_nulls);
    }
}

/// Writes a rule where it belongs.
fn state(schema: &mut Value, rule: &rules::Rule) {
    let mut place = schema;
    for part in rule.at.split('.').filter(|part| !part.is_empty()) {
        let key = part.trim_end_matches("[]");
        place = &mut place["properties"][key];
        if part.ends_with("[]") {
            place = &mut place["items"];
        }
    }
    debug_assert!(
        place["type"].is_string(),
        "a rule of {} stands at {}, where nothing is",
        rule.kind,
        rule.at
    );
    let mut stated = json!({ "rule": rule.cel, "messageExpression": rule.message });
    // What is in the metadata cannot be pointed to.
    if !rule.field.is_empty() && !rule.at.is_empty() {
        stated["fieldPath"] = format!(".{}", rule.field).into();
    }
    match place["x-kubernetes-validations"].as_array_mut() {
        Some(all) => all.push(stated),
        None => place["x-kubernetes-validations"] = json!([stated]),
    }
}

/// A column, as kubectl has it; none for the name, which it shows by itself.
fn printed(column: &columns::Column) -> Option<Value> {
    if column.path == "metadata.name" {
        return None;
    }
    let mut path = String::new();
    for part in column.path.split('.') {
        match part.split_once('[') {
            None => path.push_str(&format!(".{part}")),
            Some((list, item)) => {
                let item = item.trim_end_matches(']');
                let key = if list == "conditions" { "type" } else { "kind" };
                path.push_str(&format!(".{list}[?(@.{key}==\"{item}\")]"));
            }
        }
    }
    let kind = match column.content {
        Content::Text => "string",
        Content::Number => "integer",
        Content::Age => "date",
    };
    let mut printed = json!({ "name": column.name, "type": kind, "jsonPath": path });
    if column.wide {
        printed["priority"] = 1.into();
    }
    Some(printed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn walk(schema: &Value, path: &str, visit: &mut dyn FnMut(&Value, &str)) {
        visit(schema, path);
        for (key, property) in schema["properties"].as_object().into_iter().flatten() {
            walk(property, &join(path, key), visit);
        }
        for below in ["items", "additionalProperties"] {
            if schema[below].is_object() {
                walk(&schema[below], &format!("{path}[]"), visit);
            }
        }
    }

    #[test]
    fn everything_has_a_bound() {
        for crd in all() {
            let crd = serde_json::to_value(crd).unwrap();
            let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
            walk(schema, "", &mut |schema, path| {
                let bound = match schema["type"].as_str().unwrap() {
                    "string" if schema["enum"].is_null() => "maxLength",
                    "array" => "maxItems",
                    "object" if schema["additionalProperties"].is_object() => "maxProperties",
                    _ => return,
                };
                assert!(schema[bound].is_u64(), "{path} has no {bound}");
            });
        }
    }

    #[test]
    fn each_exception_and_each_rule_has_its_place() {
        let mut places = Vec::new();
        for crd in all() {
            let crd = serde_json::to_value(crd).unwrap();
            let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
            walk(schema, "", &mut |_, path| places.push(path.to_owned()));
        }
        for (path, _) in BOUNDS {
            assert!(places.iter().any(|place| place == path), "{path}");
        }
        for rule in ["Model", "ModelReplica"].into_iter().flat_map(rules::of) {
            assert!(places.iter().any(|place| place == rule.at), "{}", rule.at);
        }
    }

    #[test]
    fn the_defaults_of_the_schema_are_those_of_the_types() {
        let spec = json!({ "source": { "uri": "hf://a/b" } });
        let typed: crate::ModelSpec = serde_json::from_value(spec.clone()).unwrap();
        let crd = serde_json::to_value(&all()[0]).unwrap();
        let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
        let mut filled = spec;
        fill(schema, &mut filled);
        assert_eq!(serde_json::from_value::<crate::ModelSpec>(filled.clone()).unwrap(), typed);
        for group in ["scaling", "coldStart", "routing", "migration", "residency", "drain", "access", "tasks"]
        {
            assert!(!filled[group].is_null(), "{group} has no default");
        }
    }

    /// As an API server fills in defaults.
    fn fill(schema: &Value, value: &mut Value) {
        let Some(fields) = value.as_object_mut() else { return };
        for (key, property) in schema["properties"].as_object().into_iter().flatten() {
            if !property["default"].is_null() && fields.get(key).is_none() {
                fields.insert(key.clone(), property["default"].clone());
            }
            if let Some(field) = fields.get_mut(key) {
                fill(property, field);
            }
        }
    }
}
