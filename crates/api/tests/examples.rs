//! Every rule refuses something, in the words of its examples, and takes what is right.
#![allow(clippy::unwrap_used, reason = "a failed test is what they are for")]

use std::collections::BTreeSet;

use pilotlight_api::{rules, validate};
use serde_json::{Value, json};

fn object(example: &Value) -> Value {
    let mut spec = match example["kind"].as_str().unwrap() {
        "Model" => json!({ "source": { "uri": "hf://a/b" } }),
        _ => {
            json!({ "modelName": "a", "modelUid": "u", "nodeName": "n", "sourceUri": "hf://a/b", "hold": "Disk",
            "device": "Cpu", "orderGeneration": 1 })
        }
    };
    for (key, value) in example["spec"].as_object().unwrap() {
        spec[key] = value.clone();
    }
    json!({ "apiVersion": "pilotlight.dev/v1alpha1", "kind": example["kind"],
        "metadata": { "name": example["name"].as_str().unwrap_or("example"), "namespace": "default" }, "spec": spec })
}

#[test]
fn each_rule_refuses_and_takes_its_examples() {
    let examples: Vec<Value> = serde_yaml::from_str(include_str!("examples.yaml")).unwrap();
    let mut refused = BTreeSet::new();
    for example in &examples {
        let kind = example["kind"].as_str().unwrap();
        let found: Vec<String> =
            validate::object(kind, &object(example)).iter().map(ToString::to_string).collect();
        match example["field"].as_str() {
            None => assert!(found.is_empty(), "{example}: {found:?}"),
            Some(field) => {
                let expect = format!("{field}: {}", example["message"].as_str().unwrap());
                assert_eq!(found, [expect], "{example}");
                let unnumbered = field.replace(|c: char| c.is_ascii_digit(), "");
                refused.insert((kind.to_owned(), unnumbered));
            }
        }
    }
    for rule in ["Model", "ModelReplica"].into_iter().flat_map(rules::of) {
        let of: Vec<&str> = [rule.at, rule.field].into_iter().filter(|part| !part.is_empty()).collect();
        let broken = |example: &&Value| {
            example["kind"] == rule.kind && {
                let message = example["message"].as_str().unwrap_or_default();
                // The fixed beginning or end of what the rule says.
                let fixed =
                    rule.message.split('\'').filter(|part| part.len() > 8).max_by_key(|part| part.len());
                refused.contains(&(rule.kind.to_owned(), of.join(".")))
                    && message.contains(fixed.unwrap_or(rule.message.trim_matches('\'')))
            }
        };
        assert!(
            examples.iter().any(|each| broken(&each)),
            "nothing breaks the rule {} at {}",
            rule.cel,
            of.join(".")
        );
    }
}
