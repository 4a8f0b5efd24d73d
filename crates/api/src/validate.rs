//! Everything that can be wrong with an object, and where: its types and bounds, its name, the rules of its kind.
//!
//! It deliberately does **not** look at other objects: two Models may claim one served name, which the operator tells
//! by a condition, since nobody can forbid it at the door of a cluster.

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{Model, ModelNode, ModelReplica, rules, schema};

/// A broken rule, with the path of the field that breaks it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct FieldError {
    /// Where: `spec.source.uri`, `spec.aliases[2]`.
    pub field: String,
    /// What is wrong, and what would be right.
    pub message: String,
}

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.field.is_empty() {
            f.write_str(&self.message)
        } else {
            write!(f, "{}: {}", self.field, self.message)
        }
    }
}

impl FieldError {
    /// A broken rule.
    pub fn new(field: impl Into<String>, message: impl Into<String>) -> Self {
        FieldError { field: field.into(), message: message.into() }
    }
}

/// Everything that is wrong with an object of one of our kinds, or with the metadata of any other.
pub fn object(kind: &str, object: &Value) -> Vec<FieldError> {
    let mut found = schema::mistakes(kind, object);
    if found.is_empty() {
        found = schema::metadata_mistakes(object);
    }
    // The rules speak of values of the right types only.
    if !found.is_empty() {
        return found;
    }
    names(kind, object, &mut found);
    let filled = match kind {
        "Model" => filled::<Model>(object),
        "ModelReplica" => filled::<ModelReplica>(object),
        "ModelNode" => filled::<ModelNode>(object),
        _ => return found,
    };
    match filled {
        Ok(filled) => found.extend(rules::broken(kind, &filled)),
        // The schema and the types agree (a test says so); should they not, serde has the last word.
        Err(error) => found.push(FieldError::new("", error.to_string())),
    }
    found
}

/// The object with its defaults.
fn filled<K: DeserializeOwned + Serialize>(object: &Value) -> serde_json::Result<Value> {
    serde_json::to_value(K::deserialize(object)?)
}

fn names(kind: &str, object: &Value, found: &mut Vec<FieldError>) {
    let meta = &object["metadata"];
    let (name, namespace) =
        (meta["name"].as_str().unwrap_or_default(), meta["namespace"].as_str().unwrap_or_default());
    if name.is_empty() {
        found.push(FieldError::new("metadata.name", "required"));
    } else if kind != "Model" && !is_subdomain(name) {
        let rule =
            "at most 253 lower-case letters, digits, `-` and `.`, starting and ending with a letter or digit";
        found.push(FieldError::new("metadata.name", format!("`{name}` is not a name: {rule}")));
    }
    if !namespace.is_empty() && (namespace.len() > 63 || namespace.contains('.') || !is_subdomain(namespace))
    {
        let rule =
            "at most 63 lower-case letters, digits and `-`, starting and ending with a letter or digit";
        found
            .push(FieldError::new("metadata.namespace", format!("`{namespace}` is not a namespace: {rule}")));
    }
}

fn is_subdomain(text: &str) -> bool {
    let ok = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit();
    let bytes = text.as_bytes();
    (1..=253).contains(&bytes.len())
        && bytes.iter().all(|&c| ok(c) || c == b'-' || c == b'.')
        && ok(bytes[0])
        && ok(bytes[bytes.len() - 1])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn named(name: &str) -> Vec<FieldError> {
        object(
            "Model",
            &json!({ "apiVersion": "pilotlight.dev/v1alpha1", "kind": "Model",
            "metadata": { "name": name, "namespace": "default" }, "spec": { "source": { "uri": "hf://a/b" } } }),
        )
    }

    #[test]
    fn names_have_rules() {
        assert!(named(&"a".repeat(52)).is_empty());
        for bad in ["", "A", "a_b", "-a", &"a".repeat(53)] {
            assert_eq!(named(bad)[0].field, "metadata.name", "{bad}");
        }
        let lease = json!({ "metadata": { "name": "a", "namespace": "A" } });
        assert_eq!(super::object("Lease", &lease)[0].field, "metadata.namespace");
    }
}
